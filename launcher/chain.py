"""`prorl launch`: stages one after the other, here or as jobs of Slurm, and what they came to together."""

import argparse
import contextlib
import json
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
from nemo_prorl.launcher.submission import CLUSTER
from nemo_prorl.lifecycle.records import Journal

_log = logging.getLogger(__name__)

_OWN = ("run_dir", "chain.start_from")  # overrides of the chain and of its first stage


def add_parser(commands: Any) -> None:
    """Adds `launch` to the main command line."""
    text = "several stages, each from the one before: as jobs of Slurm or on this machine; again: goes on"
    parser = commands.add_parser("launch", help=text, description=text)
    parser.add_argument("--stages", required=True, metavar="run1..run8", help="first and last, or a list: run1,run2")
    parser.add_argument("--here", action="store_true", help="on this machine, one after the other, without Slurm")
    parser.add_argument("--sbatch", metavar="FLAGS", help="flags of sbatch for every job, as one word in quotes")
    parser.add_argument("--container-image", metavar="IMG", help="as slurm/stage.sbatch takes it")
    parser.add_argument("--container-mounts", metavar="A:B", help="as slurm/stage.sbatch takes it")
    parser.add_argument("--dry-run", action="store_true", help="say what would run and start nothing")
    parser.add_argument("overrides", metavar="OVERRIDE", nargs="*", default=[], help="KEY=VALUE, for every stage")
    parser.set_defaults(run_command=run)


def run(args: argparse.Namespace) -> int:
    """The exit code of the first stage that does not end with 0; else 0.  Raises ConfigError before anything starts."""
    if not args.here:
        root = chain_slurm.project_root()
        folder, stages = read_chain(args.stages, args.overrides, root)
        if all(stage.finished for stage in stages):
            _log.info("all stages of %s are finished", folder)
            if not args.dry_run:
                tell(folder, [stage.name for stage in stages])
            return 0
        chain_slurm.launch(root, folder, stages, args)
        return 0
    if given := [f"--{key}" for key in ("sbatch", "container-image", "container-mounts") if _given(args, key)]:
        raise ConfigError(f"{given[0]} is for jobs of Slurm: leave it out, or leave out --here")
    return _run_here(*read_chain(args.stages, args.overrides), args.dry_run)


def _given(args: argparse.Namespace, key: str) -> bool:
    return getattr(args, key.replace("-", "_")) is not None


def read_chain(text: str, overrides: Sequence[str], root: Path | None = None) -> tuple[Path, list[ChainStage]]:
    """The chain's folder and the stages that `--stages` names; raises ConfigError where one is wrong.

    `root`: where they will run, if not here but as Slurm jobs.  Then the chain's own paths become absolute, other
    relative ones are looked for there, and the cluster is the jobs' default.
    """
    from nemo_prorl import settings

    names = stage_names(text, settings.group_options()["stage"])
    given = {key: value for key, _, value in (word.partition("=") for word in overrides)}
    if "stage" in given:
        raise ConfigError(f"stage={given['stage']}: the stages are those of --stages")
    folder = Path(given.get("run_dir") or "runs/prorl")
    start = given.get("chain.start_from")
    if root is not None:
        folder = folder.absolute()
        start = start if start in (None, "null") else str(Path(str(start)).absolute())
    rest = [word for word in overrides if word.partition("=")[0] not in _OWN]
    default = [f"cluster={CLUSTER}"] if root is not None and "cluster" not in given else []  # the script's own
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
            _log.error("stage %s ended with %d; the same command goes on from there", stage.name, code)
            return code
    if not dry_run:
        tell(folder, [stage.name for stage in stages])
    return 0


def stage_names(text: str, known: Sequence[str]) -> list[str]:
    """`run1..run8`, `run2` or `run1,run2` as a list; raises ConfigError for stages that do not exist."""
    stages = [name for name in known if name != "none"]
    match = re.fullmatch(r"(\w+)\.\.(\w+)", text)
    wanted = [match[1], match[2]] if match else text.split(",")
    if unknown := [name for name in wanted if name not in stages]:
        raise ConfigError(f"--stages {text}: {unknown[0]!r} is no stage; known are {', '.join(stages)}")
    if not match:
        return wanted
    first, last = stages.index(match[1]), stages.index(match[2])
    if first > last:
        raise ConfigError(f"--stages {text}: {match[1]} comes after {match[2]}")
    return stages[first : last + 1]


def tell(folder: Path, names: Sequence[str]) -> None:
    """Prints the stages as a table and draws FOLDER/curves.png."""
    runs = [_StageResults(folder / name) for name in names]
    rows = [("stage", "steps", "n", "tasks", "held-out before", "after", "entropy", "KL", "tokens", "hard resets")]
    for name, one in zip(names, runs, strict=True):
        heldout, metrics = one.summary["heldout"], one.metrics
        rows.append(
            (
                name,
                str(one.summary["step"]),
                str(one.config["trainer"]["grpo"]["samples_per_prompt"]),
                " ".join(sorted({key.removeprefix("reward/") for m in metrics for key in m if _is_task(key)})),
                f"{heldout['before']:.3f}" if heldout else "-",
                f"{heldout['after']:.3f}" if heldout else "-",
                _last(metrics, "entropy", ".2f"),
                _last(metrics, "kl", ".3f"),
                f"{sum(m['rollout/generated_tokens'] for m in metrics):.0f}",
                ", ".join(f"{r['step']} ({r['reason']})" for r in one.summary["resets"]) or "-",
            )
        )
    widths = [max(len(row[k]) for row in rows) for k in range(len(rows[0]))]
    lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
    sys.stdout.write("\n".join(lines) + "\n")
    picture = folder / "curves.png"
    draw(names, runs, picture)
    sys.stdout.write(f"curves: {picture}\n")


class _StageResults:
    """What a finished stage wrote."""

    def __init__(self, folder: Path) -> None:
        import yaml

        self.summary: dict[str, Any] = json.loads((folder / "summary.json").read_text())
        self.metrics = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
        self.config: dict[str, Any] = yaml.safe_load((folder / "config.yaml").read_text())
        self.validations = {e["step"]: e for e in Journal(folder).events() if e["event"] == "validation"}


def _last(metrics: list[dict[str, Any]], key: str, form: str) -> str:
    """The last value of a metric that there is."""
    values = [m[key] for m in metrics if m.get(key) is not None]
    return format(values[-1], form) if values else "-"


def _is_task(key: str) -> bool:
    return key.startswith("reward/") and key not in ("reward/all", "reward/shaped")


def draw(names: Sequence[str], runs: Sequence[_StageResults], path: Path) -> None:
    """The chain as a picture, as the paper's Figure 1: one axis of steps, stages and resets marked."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    figure, axes = plt.subplots(2, 3, figsize=(15, 7), constrained_layout=True)
    offsets = [0]
    for one in runs:
        offsets.append(offsets[-1] + one.summary["step"])

    def curve(axis: Any, key: str, label: str) -> None:
        points = [
            (o + m["step"], m[key])
            for o, r in zip(offsets, runs, strict=False)
            for m in r.metrics
            if m.get(key) is not None
        ]
        if points:
            axis.plot(*zip(*points, strict=True), label=label, linewidth=1)

    curve(axes[0, 0], "kl", "KL")
    axes[0, 0].set_title("KL to the reference policy, nats a token")
    curve(axes[0, 1], "entropy", "entropy")
    axes[0, 1].set_title("entropy, nats a token")
    curve(axes[0, 2], "rollout/response_tokens", "mean length")
    axes[0, 2].set_title("response length, tokens")
    tasks = sorted({key for r in runs for m in r.metrics for key in m if _is_task(key)})
    for key in tasks:
        curve(axes[1, 0], key, key.removeprefix("reward/"))
    axes[1, 0].set_title("reward in training")
    _draw_validations(axes[1, 1], offsets, runs)
    axes[1, 1].set_title("mean reward on unseen problems")
    curve(axes[1, 2], "keep_rate/all", "groups with a signal")
    curve(axes[1, 2], "rollout/truncated", "responses cut off")
    axes[1, 2].set_title("dynamic sampling, truncation")
    for axis in axes.flat:
        for name, offset, one in zip(names, offsets, runs, strict=False):
            axis.axvline(offset + 0.5, color="grey", linewidth=0.5)
            axis.text(offset + 0.5, 1.0, name, transform=axis.get_xaxis_transform(), fontsize=7, va="bottom")
            for reset in one.summary["resets"]:
                axis.axvline(offset + reset["step"] + 0.5, color="firebrick", linestyle="--", linewidth=1)
        axis.set_title(axis.get_title(), pad=14, fontsize=10)
        axis.set_xlabel("step of the chain (dashed: hard reset)")
        axis.grid(alpha=0.3)
        axis.legend(fontsize=7)
    figure.savefig(path, dpi=110)
    plt.close(figure)


def _draw_validations(axis: Any, offsets: Sequence[int], runs: Sequence[_StageResults]) -> None:
    """Draw the mean reward on unseen problems, of each source and of all."""
    sources = sorted({name for r in runs for v in r.validations.values() for name in v["tasks"]})
    for name in [*sources, None]:
        points = []
        for offset, one in zip(offsets, runs, strict=False):
            for step, scores in sorted(one.validations.items()):
                score = scores["all"] if name is None else scores["tasks"].get(name)
                points += [(offset + step, score["mean"])] if score else []
        style = {"color": "black", "linewidth": 2} if name is None else {"alpha": 0.7}
        axis.plot(*zip(*points, strict=True), marker=".", label=name or "all", **style)
