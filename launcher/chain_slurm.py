"""A chain of stages as jobs of Slurm: one a stage, each after the one before; and what Slurm says of them.

FOLDER/chain.json records what was submitted.  A job that requeues itself keeps its id, so that the next stage waits for
the end of the stage, however many times Slurm starts it.
"""

import argparse
import json
import logging
import shlex
import shutil
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, cast

from omegaconf import DictConfig

import nemo_prorl
from nemo_prorl.errors import ConfigError, ProrlError, UnfitMachine
from nemo_prorl.launcher.formats import ChainEntry, ChainRecord
from nemo_prorl.lifecycle.records import write_json

if TYPE_CHECKING:
    from nemo_prorl.config import Config

_log = logging.getLogger(__name__)

SCRIPT = "slurm/stage.sbatch"  # from the project's folder, where sbatch is called
RECORD = "chain.json"
GONE = "gone"  # Slurm does not know the job any more
_OVER = {"BOOT_FAIL", "CANCELLED", "COMPLETED", "DEADLINE", "FAILED", "NODE_FAIL", "OUT_OF_MEMORY", "PREEMPTED"}
_OVER |= {"REVOKED", "TIMEOUT"}
_CHAINS_OWN = ("--dependency", "--kill-on-invalid-dep", "--chdir", "--array", "--wrap", "-d", "-D", "-a")
_SUBMIT_S, _ASK_S = 300.0, 60.0


def project_root() -> Path:
    """The project's folder: the one that the package lies in."""
    return Path(nemo_prorl.__file__).resolve().parent.parent


# --- launching -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class ChainStage:
    """A stage as it will run: its overrides but for `stage=NAME`, and the checked configuration that they make."""

    name: str
    overrides: list[str]
    cfg: DictConfig

    @property
    def run_dir(self) -> Path:
        return Path(self.cfg.run_dir)

    @property
    def finished(self) -> bool:
        """Return whether nothing is left to do."""
        try:
            summary = json.loads((self.run_dir / "summary.json").read_text())
        except (OSError, ValueError):
            return False
        return bool(summary["finished"] and summary["step"] >= self.cfg.trainer.grpo.max_steps)


@dataclass(frozen=True)
class _Launch:
    """The folder and the options that the commands of one call share."""

    root: Path
    folder: Path
    flags: list[str]
    container: list[str]

    def command(self, stage: ChainStage, before: str | None) -> list[str]:
        """`before`: the job that must end well first.  The user's flags come after ours, so that theirs count."""
        waits = [f"--dependency=afterok:{before}", "--kill-on-invalid-dep=yes"] if before else []
        ours = ["sbatch", "--parsable", f"--job-name={self.folder.name}-{stage.name}", *waits]
        return [*ours, *self.flags, SCRIPT, stage.name, *self.container, *stage.overrides]


def launch(root: Path, folder: Path, stages: Sequence[ChainStage], args: argparse.Namespace) -> None:
    """Submits the stages that are not finished; `args` are those of `prorl launch`.

    Raises ConfigError where a stage has no beginning or is at work; UnfitMachine without a script or Slurm, and with
    Slurm's words where it refuses: then nothing stays submitted.
    """
    container = [f"--container-image={args.container_image}"] if args.container_image else []
    container += [f"--container-mounts={args.container_mounts}"] if args.container_mounts else []
    how = _Launch(root, folder, _sbatch_flags(args.sbatch), container)
    if not (root / SCRIPT).is_file():
        raise UnfitMachine(
            f"{root / SCRIPT} is not there, and it is what is submitted: use a checkout of the project, installed with"
            " pip install -e, or run the stages on this machine with --here"
        )
    for stage in stages:
        if stage.finished:
            _log.info("stage %s is finished and left out: %s", stage.name, stage.run_dir)
    todo = [stage for stage in stages if not stage.finished]
    _check_beginnings(todo)
    if Path.cwd() != root:
        _log.info("jobs start in %s: relative paths in overrides count from there", root)
    if args.dry_run:
        sys.stdout.write(_rehearsal(how, todo))
        return
    if shutil.which("sbatch") is None:
        raise UnfitMachine(
            "sbatch is not on the PATH: submit where Slurm is, or run the stages on this machine with --here"
        )
    from nemo_prorl.launcher.job import locked

    with locked(folder):
        held = read_record(folder)
        _refuse_those_at_work(todo, held)
        entries = {entry["stage"]: entry.copy() for entry in (held["stages"] if held else [])}
        for stage in stages:
            most = stage.cfg.trainer.grpo.max_steps
            new: ChainEntry = {"stage": stage.name, "job": None, "command": None, "time": None, "max_steps": most}
            entries.setdefault(stage.name, new)["max_steps"] = most
        _submit(how, todo, {"command": _as_given(args), "time": time.time(), "stages": list(entries.values())}, held)
    sys.stdout.write(f"`prorl status {shlex.quote(str(folder))}` tells where the chain is\n")


def _submit(how: _Launch, todo: Sequence[ChainStage], record: ChainRecord, held: ChainRecord | None) -> None:
    """Submits stage by stage and writes down each at once; takes all of it back where one fails."""
    entries = {entry["stage"]: entry for entry in record["stages"]}
    jobs: list[str] = []
    try:
        for stage in todo:
            words = how.command(stage, jobs[-1] if jobs else None)
            job = _sbatch(words, how.root, stage.name)
            jobs.append(job)
            entries[stage.name].update({"job": job, "command": words, "time": time.time()})
            write_json(how.folder / RECORD, record)
            sys.stdout.write(f"{stage.name}  job {job}{f', after {jobs[-2]}' if len(jobs) > 1 else ''}\n")
    except BaseException as error:
        what = _take_back(jobs)
        if held is not None:
            write_json(how.folder / RECORD, held)
        else:
            (how.folder / RECORD).unlink(missing_ok=True)
        if isinstance(error, ProrlError):
            raise UnfitMachine(f"{error}; {what}") from error
        _log.error("%s", what)
        raise


def _sbatch(words: list[str], root: Path, stage: str) -> str:
    """Submit a stage; return the job's id."""
    told = _call(words, _SUBMIT_S, root)
    job = told.stdout.strip().partition(";")[0]  # ID;CLUSTER where there are several clusters
    if told.returncode or not job.isdecimal():
        raise UnfitMachine(f"stage {stage} was not submitted: sbatch ended with {told.returncode}: {_words(told)}")
    return job


def _take_back(jobs: Sequence[str]) -> str:
    """Cancel jobs; return a sentence about it."""
    if not jobs:
        return "nothing was submitted"
    try:
        told = _call(["scancel", *jobs], _ASK_S)
        failure = _words(told) if told.returncode else ""
    except UnfitMachine as error:
        failure = str(error)
    if failure:
        return f"scancel {' '.join(jobs)} failed too ({failure}): cancel what was submitted before yourself"
    return f"what was submitted before is cancelled: job{'s' if len(jobs) > 1 else ''} {', '.join(jobs)}"


def _sbatch_flags(text: str | None) -> list[str]:
    """Return the words of `--sbatch`; raises ConfigError for flags that are the chain's own."""
    try:
        flags = shlex.split(text or "")
    except ValueError as error:
        raise ConfigError(f"--sbatch {text}: {error}") from error
    if flags and not flags[0].startswith("-"):
        raise ConfigError(f"--sbatch {text}: {flags[0]!r} is no flag of sbatch; they begin with a dash")
    for flag in flags:
        if flag.partition("=")[0] in _CHAINS_OWN:
            raise ConfigError(f"--sbatch {text}: {flag.partition('=')[0]} is the chain's own; leave it out")
    return flags


def _check_beginnings(todo: Sequence[ChainStage]) -> None:
    """Raises ConfigError for a stage that follows none of those before it here and finds no finished one either.

    Its job would say so too, but only after waiting in the queue.
    """
    from nemo_prorl.lifecycle.retention import complete
    from nemo_prorl.lifecycle.stages import origin

    for place, stage in enumerate(todo):
        here = stage.cfg.chain.start_from is None and stage.cfg.chain.after in [s.name for s in todo[:place]]
        if not here and not complete(stage.run_dir / "checkpoints"):
            origin(cast("Config", stage.cfg), stage.run_dir)


def _refuse_those_at_work(todo: Sequence[ChainStage], record: ChainRecord | None) -> None:
    """Raises ConfigError for a stage whose job waits or runs."""
    names = [stage.name for stage in todo]
    jobs = {e["job"]: e["stage"] for e in (record["stages"] if record else []) if e["job"] and e["stage"] in names}
    states = queued(list(jobs)) if jobs else {}
    if live := [job for job in jobs if job in states and states[job].state not in _OVER]:
        raise ConfigError(
            f"--stages: {jobs[live[0]]} is at work: its job {live[0]} is {states[live[0]].state}; leave it alone,"
            f" or end it first: scancel {' '.join(live)}"
        )


def _rehearsal(how: _Launch, todo: Sequence[ChainStage]) -> str:
    """Return the commands of `launch` as lines for a shell, and the script."""
    lines = [f"cd {shlex.quote(str(how.root))}"]
    before = None
    for stage in todo:
        words = shlex.join(how.command(stage, "@job@" if before else None))
        lines.append(f"{stage.name}=$({words.replace('afterok:@job@', f'afterok:${before}')})")
        before = stage.name
    return "\n".join(lines) + f"\n\n# {SCRIPT}\n{(how.root / SCRIPT).read_text()}"


def _as_given(args: argparse.Namespace) -> list[str]:
    """Return the call of `prorl launch`, to be given again."""
    options = {"--sbatch": args.sbatch, "--container-image": args.container_image}
    options |= {"--container-mounts": args.container_mounts}
    given = [f"{key}={value}" for key, value in options.items() if value is not None]
    return ["prorl", "launch", "--stages", args.stages, *given, *args.overrides]


def read_record(folder: Path) -> ChainRecord | None:
    """Return FOLDER/chain.json, if it is there."""
    try:
        record: ChainRecord = json.loads((folder / RECORD).read_text())
    except FileNotFoundError:
        return None
    except ValueError as error:
        raise ConfigError(f"{folder / RECORD} is not what prorl launch wrote: {error}; move it away") from error
    return record


# --- what Slurm says -------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class JobState:
    """Slurm's word for a job's state, and the reason it gives; empty where it gives none."""

    state: str
    reason: str


def job_states(jobs: Sequence[str]) -> dict[str, JobState]:
    """Return each job's state from the controller, else from the accounting; else `GONE`.

    Raises UnfitMachine where there is no Slurm, or it does not answer.
    """
    found = queued(jobs)
    if missing := [job for job in jobs if job not in found]:
        found |= _accounted(missing)
    return {job: found.get(job, JobState(GONE, "")) for job in jobs}


def queued(jobs: Sequence[str]) -> dict[str, JobState]:
    """Return the jobs that squeue knows: waiting, running, and ended a few minutes ago."""
    told = _call(["squeue", "-h", "-t", "all", "-j", ",".join(jobs), "-o", "%i %T %r"], _ASK_S)
    if told.returncode and "Invalid job id" in told.stderr:  # one job was asked for, and is forgotten
        return {}
    if told.returncode:
        raise UnfitMachine(f"squeue ended with {told.returncode}: {_words(told)}")
    rows = [line.split(maxsplit=2) for line in told.stdout.splitlines() if line.strip()]
    return {row[0]: JobState(row[1], _reason(row[2] if len(row) > 2 else "")) for row in rows}


def _accounted(jobs: Sequence[str]) -> dict[str, JobState]:
    """Return the state of the jobs' last start in the accounting, if the cluster keeps one."""
    if shutil.which("sacct") is None:
        return {}
    told = _call(["sacct", "-X", "-n", "-P", "-j", ",".join(jobs), "-o", "JobID,State,Reason"], _ASK_S)
    if told.returncode:
        return {}
    rows = [line.split("|") for line in told.stdout.splitlines() if line.count("|") == 2]
    return {job: JobState(state.split()[0], _reason(reason)) for job, state, reason in rows if state}


def _reason(text: str) -> str:
    return "" if text.strip() in ("None", "(null)", "none") else text.strip()


def _call(words: list[str], seconds: float, folder: Path | None = None) -> "subprocess.CompletedProcess[str]":
    """Raises UnfitMachine where the program is missing or takes too long."""
    try:
        return subprocess.run(words, cwd=folder, capture_output=True, text=True, timeout=seconds, check=False)
    except FileNotFoundError as error:
        raise UnfitMachine(f"{words[0]} is not on the PATH: this needs a machine where Slurm is") from error
    except subprocess.TimeoutExpired as error:
        raise UnfitMachine(
            f"{words[0]} did not answer within {seconds:g} s; `squeue --me` tells what it did after all"
        ) from error


def _words(told: "subprocess.CompletedProcess[str]") -> str:
    return " ".join((told.stderr.strip() or told.stdout.strip() or "it said nothing").split())
