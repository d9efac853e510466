"""A chain of stages as Slurm jobs: submit one job per stage, each after the one before, and query their states.

FOLDER/chain.json records the submitted jobs.  A requeued job keeps its id, so the next stage waits until the stage has
really ended, however many times Slurm starts its job.
"""

import argparse
import contextlib
import json
import logging
import shlex
import shutil
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from omegaconf import DictConfig

from nemo_prorl.errors import ConfigError, ProrlError, UnfitMachine
from nemo_prorl.files import write_json
from nemo_prorl.launcher.allocation import allocation
from nemo_prorl.launcher.formats import ChainEntry, ChainRecord
from nemo_prorl.launcher.run_results import finished_step
from nemo_prorl.launcher.slurm_queries import Job, call, output
from nemo_prorl.launcher.submission import Submission, arguments

_log = logging.getLogger(__name__)

SCRIPT = "slurm/stage.sbatch"  # from the project's folder, where sbatch is called
RECORD = "chain.json"
GONE = "gone"  # state of a job that Slurm does not know any more
_OVER = {"BOOT_FAIL", "CANCELLED", "COMPLETED", "DEADLINE", "FAILED", "NODE_FAIL", "OUT_OF_MEMORY", "PREEMPTED"}
_OVER |= {"REVOKED", "TIMEOUT"}
_CHAINS_OWN = ("--dependency", "--kill-on-invalid-dep", "--chdir", "--array", "--wrap", "-d", "-D", "-a")
_SUBMIT_S = 300.0  # seconds for sbatch to answer


# --- launching -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class ChainStage:
    """A stage to run: its overrides without `stage=NAME`, and its checked configuration."""

    name: str
    overrides: list[str]
    cfg: DictConfig

    @property
    def run_dir(self) -> Path:
        return Path(self.cfg.run_dir)

    @property
    def finished(self) -> bool:
        """Return whether the stage has reached its last step."""
        return finished_step(self.run_dir, self.cfg.trainer.grpo.max_steps) is not None


@dataclass(frozen=True)
class _Commands:
    """The folders and options that the sbatch commands of one `prorl launch` share."""

    root: Path
    folder: Path
    flags: list[str]
    container: list[str]

    def of(self, stage: ChainStage, before: str | None) -> list[str]:
        """Return the sbatch command of a stage.

        Args:
            before: id of the job that must succeed first; None: the stage waits for no job.
        """
        waits = [f"--dependency=afterok:{before}", "--kill-on-invalid-dep=yes"] if before else []
        ours = ["sbatch", "--parsable", f"--job-name={self.folder.name}-{stage.name}", *waits]
        # For a flag given twice, sbatch uses the last one, so the flags of the user come after ours.
        return [*ours, *self.flags, SCRIPT, stage.name, *self.container, *stage.overrides]


def launch(root: Path, folder: Path, stages: Sequence[ChainStage], args: argparse.Namespace) -> None:
    """Submit the stages that are not finished, or only print the commands.

    Args:
        args: arguments of `prorl launch`.

    Raises:
        ConfigError: a stage has no model to begin with, or its job waits or runs.
        UnfitMachine: the script or Slurm is missing, or Slurm refused a job; then no job remains submitted.
    """
    container = [f"--container-image={args.container_image}"] if args.container_image else []
    container += [f"--container-mounts={args.container_mounts}"] if args.container_mounts else []
    commands = _Commands(root, folder, sbatch_flags(args.sbatch), container)
    if not (root / SCRIPT).is_file():
        raise UnfitMachine(
            f"{root / SCRIPT}: expected the script to submit; no such file. Fix: use a checkout of the project that is"
            " installed with pip install -e, or run the stages on this machine with --here"
        )
    for stage in stages:
        if stage.finished:
            _log.info("stage %s is finished and skipped: %s", stage.name, stage.run_dir)
    todo = [stage for stage in stages if not stage.finished]
    _check_beginnings(todo)
    for stage in todo:
        tell_of_a_stop(stage)
    if todo and args.container_image:
        _warn_of_paths(root, [todo[0].name, *container, *todo[0].overrides], todo[0].cfg)
    if Path.cwd() != root:
        _log.info("jobs start in %s: relative paths in overrides start there", root)
    if args.dry_run:
        sys.stdout.write(_rehearsal(commands, todo))
        return
    if shutil.which("sbatch") is None:
        raise UnfitMachine(
            "sbatch is not on the PATH. Fix: submit on a machine with Slurm, or run the stages here with --here"
        )
    from nemo_prorl.launcher.one_node import locked

    with locked(folder):
        held = read_record(folder)
        _refuse_those_at_work(todo, held)
        entries = {entry["stage"]: entry.copy() for entry in (held["stages"] if held else [])}
        for stage in stages:
            most = stage.cfg.trainer.grpo.max_steps
            new: ChainEntry = {"stage": stage.name, "job": None, "command": None, "time": None, "max_steps": most}
            entries.setdefault(stage.name, new)["max_steps"] = most
        _submit(
            commands, todo, {"command": _as_given(args), "time": time.time(), "stages": list(entries.values())}, held
        )
    sys.stdout.write(f"state of the chain: prorl status {shlex.quote(str(folder))}\n")


def _warn_of_paths(root: Path, words: list[str], cfg: DictConfig) -> None:
    """Warn of each path that the container of a job does not see.  `words`: arguments of the batch script."""
    with contextlib.chdir(root):
        submission = Submission(arguments(words), Job())
        submission.needs = allocation(cfg)
        for fault in submission.path_faults():
            _log.warning("%s", fault)


def tell_of_a_stop(stage: ChainStage) -> None:
    """Warn that an unfinished stage, which somebody stopped with `prorl control`, is now continued."""
    from nemo_prorl.files import last_objects
    from nemo_prorl.lifecycle.stages import last_end, stop_requested

    events = last_objects(stage.run_dir / "journal.jsonl")
    if not stage.finished and (who := stop_requested(events)):
        _log.warning(
            "stage %s, which %s stopped after step %d, is continued. To begin the next stage from one of its"
            " checkpoints instead: prorl launch --from %s/checkpoints/step-N",
            stage.name,
            who,
            (last_end(events) or {}).get("step", 0),
            stage.run_dir,
        )


def _submit(commands: _Commands, todo: Sequence[ChainStage], record: ChainRecord, held: ChainRecord | None) -> None:
    """Submit the stages in order, and record each job right after its submission.

    If a submission fails, cancel the jobs of this call and restore the earlier record `held`.
    """
    entries = {entry["stage"]: entry for entry in record["stages"]}
    jobs: list[str] = []
    try:
        for stage in todo:
            words = commands.of(stage, jobs[-1] if jobs else None)
            job = submit(words, commands.root, f"stage {stage.name}")
            jobs.append(job)
            entries[stage.name].update({"job": job, "command": words, "time": time.time()})
            write_json(commands.folder / RECORD, record)
            sys.stdout.write(f"{stage.name}  job {job}{f', after {jobs[-2]}' if len(jobs) > 1 else ''}\n")
    except BaseException as error:
        undone = _take_back(jobs)
        if held is not None:
            write_json(commands.folder / RECORD, held)
        else:
            (commands.folder / RECORD).unlink(missing_ok=True)
        if isinstance(error, ProrlError):
            raise UnfitMachine(f"{error}; {undone}") from error
        _log.error("%s", undone)
        raise


def submit(words: list[str], root: Path, name: str) -> str:
    """Run an sbatch command in the project's folder; return the job's id.

    Args:
        name: what is submitted, for the message of UnfitMachine.
    """
    try:
        job = call(words, _SUBMIT_S, root).strip().partition(";")[0]  # ID;CLUSTER if there are several clusters
    except UnfitMachine as error:
        raise UnfitMachine(f"{name} was not submitted: {error}") from error
    if not job.isdecimal():
        raise UnfitMachine(f"{name}: sbatch printed no job id, but {job!r}. Fix: check squeue --me")
    return job


def _take_back(jobs: Sequence[str]) -> str:
    """Cancel the submitted `jobs`; return a sentence for the error message that says whether this succeeded."""
    if not jobs:
        return "nothing was submitted"
    try:
        call(["scancel", *jobs])
    except UnfitMachine as error:
        return f"the jobs submitted before it could not be cancelled ({error}). Fix: scancel {' '.join(jobs)}"
    return f"cancelled the job{'s' if len(jobs) > 1 else ''} submitted before it: {', '.join(jobs)}"


def sbatch_flags(text: str | None) -> list[str]:
    """Return the flags in `--sbatch`.  Raises ConfigError for flags that `prorl launch` sets itself."""
    try:
        flags = shlex.split(text or "")
    except ValueError as error:
        raise ConfigError(
            f"--sbatch {text}: expected flags quoted as in a shell; they cannot be split: {error}"
        ) from error
    if flags and not flags[0].startswith("-"):
        raise ConfigError(f"--sbatch {text}: expected flags of sbatch, which begin with a dash; got {flags[0]!r}")
    for flag in flags:
        if flag.partition("=")[0] in _CHAINS_OWN:
            raise ConfigError(f"--sbatch {text}: prorl launch sets {flag.partition('=')[0]}. Fix: remove this flag")
    return flags


def _check_beginnings(todo: Sequence[ChainStage]) -> None:
    """Raise ConfigError for a stage whose predecessor is neither submitted before it nor finished.

    The job itself would fail too, but only after waiting in the queue.
    """
    from nemo_prorl.launcher.prepare import check_origin

    for place, stage in enumerate(todo):
        here = stage.cfg.chain.start_from is None and stage.cfg.chain.after in [s.name for s in todo[:place]]
        if not here:
            check_origin(stage.cfg)


def _refuse_those_at_work(todo: Sequence[ChainStage], record: ChainRecord | None) -> None:
    """Raise ConfigError if the Slurm job of a stage is waiting or running."""
    if live := live_jobs([stage.name for stage in todo], record):
        job, (stage, state) = next(iter(live.items()))
        raise ConfigError(
            f"--stages: {stage} is already submitted: its job {job} is {state}."
            f" Fix: wait for its end, or cancel it first: scancel {' '.join(live)}"
        )


def live_jobs(names: Sequence[str], record: ChainRecord | None) -> dict[str, tuple[str, str]]:
    """Return {id: (stage, state)} of the Slurm jobs of these stages that wait or run."""
    jobs = {e["job"]: e["stage"] for e in (record["stages"] if record else []) if e["job"] and e["stage"] in names}
    return {job: (jobs[job], state) for job, state in live(list(jobs)).items()}


def live(jobs: Sequence[str]) -> dict[str, str]:
    """Return {id: state} of those of the jobs that wait or run."""
    states = queued(jobs) if jobs else {}
    return {job: states[job].state for job in jobs if job in states and states[job].state not in _OVER}


def _rehearsal(commands: _Commands, todo: Sequence[ChainStage]) -> str:
    """Return the commands of `launch` as lines for a shell, followed by the text of the batch script."""
    lines = [f"cd {shlex.quote(str(commands.root))}"]
    before = None
    for stage in todo:
        words = shlex.join(commands.of(stage, "@job@" if before else None))
        lines.append(f"{stage.name}=$({words.replace('afterok:@job@', f'afterok:${before}')})")
        before = stage.name
    return "\n".join(lines) + f"\n\n# {SCRIPT}\n{(commands.root / SCRIPT).read_text()}"


def _as_given(args: argparse.Namespace) -> list[str]:
    """Return the `prorl launch` command line that repeats this call."""
    options = {"--sbatch": args.sbatch, "--container-image": args.container_image}
    options |= {"--container-mounts": args.container_mounts}
    words = [f"{key}={value}" for key, value in options.items() if value is not None]
    return ["prorl", "launch", "--stages", args.stages, *words, *args.overrides]


def read_record(folder: Path) -> ChainRecord | None:
    """Return the content of FOLDER/chain.json; None if the file does not exist."""
    try:
        record: ChainRecord = json.loads((folder / RECORD).read_text())
    except FileNotFoundError:
        return None
    except ValueError as error:
        raise ConfigError(
            f"{folder / RECORD}: expected JSON of prorl launch ({error}). Fix: cancel the chain's jobs, then move the"
            " file away"
        ) from error
    return record


# --- states of jobs --------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class JobState:
    """The state of a Slurm job, such as PENDING, and Slurm's reason for it; empty if Slurm gives none."""

    state: str
    reason: str


def job_states(jobs: Sequence[str]) -> dict[str, JobState]:
    """Return each job's state from Slurm's controller, otherwise from its accounting, otherwise `GONE`.

    Raises:
        UnfitMachine: there is no Slurm, or it does not answer.
    """
    states = queued(jobs)
    if missing := [job for job in jobs if job not in states]:
        states |= _accounted(missing)
    return {job: states.get(job, JobState(GONE, "")) for job in jobs}


def queued(jobs: Sequence[str]) -> dict[str, JobState]:
    """Return the states of the jobs that squeue knows: waiting, running, or ended a few minutes ago."""
    try:
        text = call(["squeue", "-h", "-t", "all", "-j", ",".join(jobs), "-o", "%i %T %r"])
    except UnfitMachine as error:
        if "Invalid job id" in str(error):  # squeue fails for a single unknown job
            return {}
        raise
    rows = [line.split(maxsplit=2) for line in text.splitlines() if line.strip()]
    return {row[0]: JobState(row[1], _reason(row[2] if len(row) > 2 else "")) for row in rows}


def _accounted(jobs: Sequence[str]) -> dict[str, JobState]:
    """Return the jobs' states from Slurm's accounting (sacct); {} if the cluster has no accounting."""
    text = output(["sacct", "-X", "-n", "-P", "-j", ",".join(jobs), "-o", "JobID,State,Reason"])
    rows = [line.split("|") for line in text.splitlines() if line.count("|") == 2]
    return {job: JobState(state.split()[0], _reason(reason)) for job, state, reason in rows if state}


def _reason(text: str) -> str:
    return "" if text.strip() in ("None", "(null)", "none") else text.strip()
