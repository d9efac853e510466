"""`prorl launch`: run the stages of a chain in order, on this machine or as Slurm jobs, and print their results."""

import argparse
import contextlib
import logging
import re
import shlex
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from nemo_prorl.errors import ConfigError, ProrlError
from nemo_prorl.files import read_object
from nemo_prorl.launcher import chain_slurm
from nemo_prorl.launcher.chain_slurm import ChainStage
from nemo_prorl.launcher.curves import OF_A_CHAIN, RunResults, draw
from nemo_prorl.launcher.submission import CLUSTER, ROOT
from nemo_prorl.lifecycle.stages import begun_from, end_text
from nemo_prorl.planning.columns import columns

_log = logging.getLogger(__name__)

_STOPPED = 75  # exit code
_OWN = ("run_dir", "chain.start_from")  # overrides that apply to the chain or to its first stage only


def add_parser(commands: Any) -> None:
    """Add `launch` to the main command line."""
    text = "run several stages, each from the result of the one before, as Slurm jobs or here; repeat it to continue"
    parser = commands.add_parser("launch", help=text, description=text)
    stages = "first and last stage, or a list: run1,run2; default with --from: the stages after the checkpoint's"
    parser.add_argument("--stages", metavar="run1..run8", help=stages)
    start = "begin the first stage from this checkpoint of an earlier stage, which has been stopped; run_dir is then by"
    start += " default the folder of that chain"
    parser.add_argument("--from", dest="start", metavar="CHECKPOINT", type=Path, help=start)
    parser.add_argument("--here", action="store_true", help="run on this machine, without Slurm")
    parser.add_argument("--sbatch", metavar="FLAGS", help="flags of sbatch for every job, in quotes; default: none")
    parser.add_argument("--container-image", metavar="IMG", help="container image of each job; default: none")
    parser.add_argument(
        "--container-mounts", metavar="A:B", help="mounts of the container, HOST:CONTAINER; default: none"
    )
    parser.add_argument("--dry-run", action="store_true", help="print the commands and start nothing")
    parser.add_argument("overrides", metavar="OVERRIDE", nargs="*", default=[], help="KEY=VALUE, for every stage")
    parser.set_defaults(run_command=run)


def run(args: argparse.Namespace) -> int:
    """Run or submit the stages; return the exit code of the first stage that fails, otherwise 0.

    Raises:
        ConfigError: the arguments or a configuration are wrong; all stages are checked before the first starts.
    """
    if args.start is not None:
        _begin_from(args)
    if args.stages is None:
        raise ConfigError("--stages: expected run1..run8, or a part of it. Fix: name the stages, or --from CHECKPOINT")
    if not args.here:
        root = ROOT
        folder, stages = read_chain(args.stages, args.overrides, root)
        if all(stage.finished for stage in stages):
            _log.info("all stages of %s are finished", folder)
            if not args.dry_run:
                print_results(folder, [stage.name for stage in stages])
            return 0
        with contextlib.chdir(root):
            _check_stages(stages)
        chain_slurm.launch(root, folder, stages, args)
        return 0
    of_jobs = {"--sbatch": args.sbatch, "--container-image": args.container_image}
    of_jobs["--container-mounts"] = args.container_mounts
    if slurm_options := [option for option, value in of_jobs.items() if value is not None]:
        raise ConfigError(f"{slurm_options[0]} is for Slurm jobs, and --here uses none. Fix: remove one of the two")
    folder, stages = read_chain(args.stages, args.overrides)
    _check_stages(stages)
    return _run_here(folder, stages, args.dry_run)


def _check_stages(stages: Sequence[ChainStage]) -> None:
    """Check the records of the stages that are not finished, before the first of them starts."""
    from nemo_prorl.launcher.prepare import check_beginning, run_dir_fault
    from nemo_prorl.launcher.run_data import check_stages

    if stages and (fault := run_dir_fault(stages[0].run_dir.parent)):  # launch itself writes there
        raise ConfigError(fault)
    todo = [stage for stage in stages if not stage.finished]
    results = check_stages([stage.cfg for stage in todo])
    reported = set()
    for stage in todo:
        try:
            check_beginning(stage.cfg)
            checked = next(results)
        except ProrlError as error:
            raise type(error)(f"stage {stage.name}: {error}") from error
        if checked.words() not in reported:  # several stages have the same records
            reported.add(checked.words())
            checked.tell()


def _begin_from(args: argparse.Namespace) -> None:
    """Complete the arguments for `--from`: the stages, chain.start_from, and run_dir.

    Raises:
        ConfigError: it is not a checkpoint, its run is still active, or an argument says something else.
    """
    from nemo_prorl import settings

    start: Path = args.start.absolute()
    run = start.parent.parent
    values = {word.partition("=")[0]: word.partition("=")[2] for word in args.overrides}
    if "chain.start_from" in values:
        raise ConfigError(f"--from {args.start}: is chain.start_from in short. Fix: give one of the two")
    if start.suffix or not (start / "state.json").is_file():
        raise ConfigError(f"--from {args.start}: expected a complete checkpoint: {_checkpoints(start)}")
    of_run = settings.read_config(run / "config.yaml") if (run / "config.yaml").is_file() else None
    if of_run is not None:
        _check_ended(run, args.start)
    if args.stages is None:
        known = [name for name in settings.group_options(values.get("config_dir"))["stage"] if name != "none"]
        if of_run is None or of_run.stage not in known[:-1]:
            raise ConfigError(f"--from {args.start}: no stage follows its run. Fix: name the stages with --stages")
        args.stages = f"{known[known.index(of_run.stage) + 1]}..{known[-1]}"
    if "run_dir" not in values and of_run is not None and of_run.stage != "none":
        args.overrides.append(f"run_dir={run.parent}")
    args.overrides.append(f"chain.start_from={start}")


def _checkpoints(folder: Path) -> str:
    """Return the checkpoints of a run directory, or those beside a checkpoint that is gone; otherwise a path's form."""
    from nemo_prorl.lifecycle.retention import complete, step_of

    checkpoints = complete(folder / "checkpoints") or complete(folder.parent)
    if not checkpoints:
        return "a folder such as RUN/checkpoints/step-000100"
    scores = (read_object(checkpoints[-1] / "state.json") or {}).get("validation", {}).get("scores", {})
    means = {int(step): score["all"]["mean"] for step, score in scores.items()}
    named = [f"{p} (held-out {means[step_of(p)]:.3f})" if step_of(p) in means else str(p) for p in checkpoints]
    return "one of " + ", ".join(named)


def _check_ended(run: Path, start: Path) -> None:
    """Raise ConfigError if the run is still active here or in Slurm: it might remove the checkpoint."""
    from nemo_prorl.lifecycle.control import is_locked

    record = chain_slurm.read_record(run.parent) if shutil.which("squeue") else None
    if is_locked(run) or chain_slurm.live_jobs([run.name], record):
        raise ConfigError(
            f"--from {start}: the run in {run} is still active. Fix: wait for its end (prorl status {run}), or"
            f" end it with prorl control {run} stop; then the same command"
        )


def _check_origin(run_dir: Path, start: str | None, last: str) -> None:
    """Raise ConfigError if the run of a stage began from a checkpoint that the command does not name."""
    from nemo_prorl import settings

    if start is not None or not (run_dir / "config.yaml").is_file():
        return
    if (origin := settings.read_config(run_dir / "config.yaml").chain.start_from) is not None:
        raise ConfigError(
            f"--stages: {run_dir.name} began from the checkpoint {origin}, not from the end of the stage before."
            f" Fix: continue from there, with chain.start_from={origin} --stages {run_dir.name}..{last}"
        )


def read_chain(text: str, overrides: Sequence[str], root: Path | None = None) -> tuple[Path, list[ChainStage]]:
    """Return the chain's folder and the stages that `--stages` names.  Raises ConfigError if a stage is wrong.

    Args:
        text: value of `--stages`.
        root: folder in which the Slurm jobs run; None: the stages run here.  With `root`, run_dir and
            chain.start_from become absolute, other relative paths start at `root`, and `cluster` has the same default
            as in the batch script.
    """
    from nemo_prorl import settings

    values = {key: value for key, _, value in (word.partition("=") for word in overrides)}
    with contextlib.chdir(root or Path.cwd()):
        names = stage_names(text, settings.group_options(values.get("config_dir"))["stage"])
    if "stage" in values:
        raise ConfigError(f"stage={values['stage']}: --stages names the stages. Fix: remove this override")
    folder = Path(values.get("run_dir") or "runs/prorl").expanduser()
    start = values.get("chain.start_from")
    if root is not None:
        folder = folder.absolute()
        start = start if start in (None, "null") else str(Path(str(start)).expanduser().absolute())
    rest = [word for word in overrides if word.partition("=")[0] not in _OWN]
    default = [f"cluster={CLUSTER}"] if root is not None and "cluster" not in values else []
    first = [] if start is None else [f"chain.start_from={start}"]
    stages = []
    with contextlib.chdir(root or Path.cwd()):
        for name in names:
            words = [f"run_dir={folder / name}", *rest, *(first if name == names[0] else [])]
            _check_origin(folder / name, start if name == names[0] else None, names[-1])
            stages.append(ChainStage(name, words, settings.load_run([f"stage={name}", *default, *words])))
    return folder, stages


def _run_here(folder: Path, stages: Sequence[ChainStage], dry_run: bool) -> int:
    from nemo_prorl import settings
    from nemo_prorl.launcher import one_node

    for place, stage in enumerate(stages, 1):
        if dry_run:
            sys.stdout.write(f"prorl train {shlex.join([f'stage={stage.name}', *stage.overrides])}\n")
            continue
        chain_slurm.tell_of_a_stop(stage)
        _log.info("stage %s, %d of %d, in %s", stage.name, place, len(stages), stage.run_dir)
        code: int = one_node.run(stage.cfg, settings.resolved_yaml(stage.cfg))
        if code:
            text = "stage %s ended with exit code %d; repeat the command to continue from there%s"
            instead = ", or begin the next stage with --from CHECKPOINT" if code == _STOPPED else ""
            _log.error(text, stage.name, code, instead)
            return code
    if not dry_run:
        print_results(folder, [stage.name for stage in stages])
    return 0


def stage_names(text: str, known: Sequence[str]) -> list[str]:
    """Return the names of the stages that `text` lists, such as `run1..run8`, `run2` or `run1,run2`.

    Raises ConfigError for stages that are not in `known`.
    """
    stages = [name for name in known if name != "none"]
    match = re.fullmatch(r"(\w+)\.\.(\w+)", text)
    wanted = [match[1], match[2]] if match else text.split(",")
    if unknown := [name for name in wanted if name not in stages]:
        raise ConfigError(f"--stages {text}: expected stages among {', '.join(stages)}; got {unknown[0]!r}")
    if not match:
        return wanted
    first, last = stages.index(match[1]), stages.index(match[2])
    if first > last:
        raise ConfigError(f"--stages {text}: expected FIRST..LAST; {match[1]} is after {match[2]}")
    return stages[first : last + 1]


def print_results(folder: Path, names: Sequence[str]) -> None:
    """Print the results of the chain's stages as a table and draw FOLDER/curves.png.

    Args:
        names: stages that have just ended; stages of the same folder that ended before are shown, too.
    """
    import yaml

    from nemo_prorl import settings
    from nemo_prorl.lifecycle.run_records import Journal

    known = [*settings.group_options()["stage"], *names]
    shown = [n for n in dict.fromkeys(known) if n in names or (folder / n / "summary.json").is_file()]
    runs = {name: RunResults(folder / name) for name in shown}
    head = ("stage", "steps", "from", "ended", "n", "tasks", "held-out before", "after", "entropy", "KL", "tokens")
    rows = [(*head, "hard resets")]
    for name, run in runs.items():
        config = yaml.safe_load((folder / name / "config.yaml").read_text())
        events = Journal(folder / name, writes=False).events()
        heldout, metrics = run.summary["heldout"], run.metrics
        tasks = {key.removeprefix("reward/") for line in metrics for key in line if key.startswith("reward/")}
        rows.append(
            (
                name,
                f"{run.summary['step']} of {config['trainer']['grpo']['max_steps']}",
                begun_from(events) or "model",
                end_text(events),
                str(config["trainer"]["grpo"]["samples_per_prompt"]),
                " ".join(sorted(tasks - {"all", "shaped"})),
                f"{heldout['before']:.3f}" if heldout else "-",
                f"{heldout['after']:.3f}" if heldout else "-",
                _last(metrics, "entropy", ".2f"),
                _last(metrics, "kl", ".3f"),
                f"{sum(m['rollout/generated_tokens'] for m in metrics):.0f}",
                ", ".join(f"{r['step']} ({r['reason']})" for r in run.summary["resets"]) or "-",
            )
        )
    sys.stdout.write(columns(rows))
    picture = folder / "curves.png"
    draw(runs, OF_A_CHAIN, picture)
    sys.stdout.write(f"curves: {picture}\n")


def _last(metrics: list[dict[str, Any]], key: str, form: str) -> str:
    """Return the newest value of a metric as text; "-" if there is none."""
    values = [m[key] for m in metrics if m.get(key) is not None]
    return format(values[-1], form) if values else "-"
