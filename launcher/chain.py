"""`prorl launch`: run the stages of a chain in order, on this machine or as Slurm jobs, and print their results."""

import argparse
import contextlib
import logging
import re
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from nemo_prorl.errors import ConfigError
from nemo_prorl.launcher import chain_slurm
from nemo_prorl.launcher.chain_slurm import ChainStage
from nemo_prorl.launcher.curves import OF_A_CHAIN, RunResults, draw
from nemo_prorl.launcher.submission import CLUSTER
from nemo_prorl.planning.columns import columns

_log = logging.getLogger(__name__)

_OWN = ("run_dir", "chain.start_from")  # overrides that apply to the chain or to its first stage only


def add_parser(commands: Any) -> None:
    """Add `launch` to the main command line."""
    text = "run several stages, each from the result of the one before, as Slurm jobs or here; repeat it to continue"
    parser = commands.add_parser("launch", help=text, description=text)
    parser.add_argument(
        "--stages", required=True, metavar="run1..run8", help="first and last stage, or a list: run1,run2"
    )
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
    if not args.here:
        root = chain_slurm.project_root()
        folder, stages = read_chain(args.stages, args.overrides, root)
        if all(stage.finished for stage in stages):
            _log.info("all stages of %s are finished", folder)
            if not args.dry_run:
                print_results(folder, [stage.name for stage in stages])
            return 0
        chain_slurm.launch(root, folder, stages, args)
        return 0
    if given := [f"--{key}" for key in ("sbatch", "container-image", "container-mounts") if _given(args, key)]:
        raise ConfigError(f"{given[0]} is for Slurm jobs, and --here uses none. Fix: remove one of the two")
    return _run_here(*read_chain(args.stages, args.overrides), args.dry_run)


def _given(args: argparse.Namespace, key: str) -> bool:
    return getattr(args, key.replace("-", "_")) is not None


def read_chain(text: str, overrides: Sequence[str], root: Path | None = None) -> tuple[Path, list[ChainStage]]:
    """Return the chain's folder and the stages that `--stages` names.  Raises ConfigError if a stage is wrong.

    Args:
        text: value of `--stages`.
        root: folder in which the Slurm jobs run; None: the stages run here.  With `root`, run_dir and
            chain.start_from become absolute, other relative paths start at `root`, and `cluster` has the same default
            as in the batch script.
    """
    from nemo_prorl import settings

    given = {key: value for key, _, value in (word.partition("=") for word in overrides)}
    names = stage_names(text, settings.group_options(given.get("config_dir"))["stage"])
    if "stage" in given:
        raise ConfigError(f"stage={given['stage']}: --stages names the stages. Fix: remove this override")
    folder = Path(given.get("run_dir") or "runs/prorl")
    start = given.get("chain.start_from")
    if root is not None:
        folder = folder.absolute()
        start = start if start in (None, "null") else str(Path(str(start)).absolute())
    rest = [word for word in overrides if word.partition("=")[0] not in _OWN]
    default = [f"cluster={CLUSTER}"] if root is not None and "cluster" not in given else []
    first = [] if start is None else [f"chain.start_from={start}"]
    stages = []
    with contextlib.chdir(root or Path.cwd()):
        for name in names:
            words = [f"run_dir={folder / name}", *rest, *(first if name == names[0] else [])]
            stages.append(ChainStage(name, words, settings.load_run([f"stage={name}", *default, *words])))
    return folder, stages


def _run_here(folder: Path, stages: Sequence[ChainStage], dry_run: bool) -> int:
    from nemo_prorl import settings
    from nemo_prorl.launcher import job

    for place, stage in enumerate(stages, 1):
        if dry_run:
            sys.stdout.write(f"prorl train {shlex.join([f'stage={stage.name}', *stage.overrides])}\n")
            continue
        _log.info("stage %s, %d of %d, in %s", stage.name, place, len(stages), stage.run_dir)
        code: int = job.run(stage.cfg, settings.resolved_yaml(stage.cfg))
        if code:
            _log.error("stage %s ended with exit code %d; repeat the command to continue from there", stage.name, code)
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
    """Print the results of the stages as a table and draw FOLDER/curves.png."""
    import yaml

    runs = {name: RunResults(folder / name) for name in names}
    rows = [("stage", "steps", "n", "tasks", "held-out before", "after", "entropy", "KL", "tokens", "hard resets")]
    for name, run in runs.items():
        config = yaml.safe_load((folder / name / "config.yaml").read_text())
        heldout, metrics = run.summary["heldout"], run.metrics
        tasks = {key.removeprefix("reward/") for line in metrics for key in line if key.startswith("reward/")}
        rows.append(
            (
                name,
                str(run.summary["step"]),
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
