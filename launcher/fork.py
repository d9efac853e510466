"""`prorl fork`: continues one checkpoint in several ways with the same prompts and seeds, and compares them in pairs.

Each arm is a run of its own (OUT/ARM) that begins from the checkpoint (`chain.start_from`), so nothing is copied, and
an interrupted arm continues like any run.  All arms draw the same prompts, with the same seeds for their responses, and
validate the same prompts with the same seeds: what differs follows from the arm.
"""

import argparse
import logging
import math
import re
import shlex
import statistics
import sys
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path

from omegaconf import DictConfig

from nemo_prorl.algorithms.paired import PairedDifference, difference, later_half, look
from nemo_prorl.errors import ConfigError
from nemo_prorl.files import read_objects
from nemo_prorl.lifecycle.control import place
from nemo_prorl.lifecycle.retention import step_of
from nemo_prorl.lifecycle.stages import chosen_checkpoint
from nemo_prorl.lifecycle.summary import validations_of
from nemo_prorl.planning.columns import columns

_log = logging.getLogger(__name__)

# No reset but the arm's own: an arm shows the effect of one decision.  Its steps count from 1.
_ALL_ARMS = (
    "chain.after=null",
    "trainer.resets.at_steps=[]",
    "trainer.resets.every=null",
    "trainer.resets.mode=manual",
    "trainer.trace_steps=[]",
)
_T95 = (12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262)  # Student's t, two sides, of 2 to 10 runs
_LOOK_S = 2.0  # seconds between looks at an arm with --early


@dataclass(frozen=True)
class Arm:
    """A way to continue: `text` as the user wrote it, the name of its folder, and its overrides."""

    text: str
    name: str
    overrides: tuple[str, ...]


_FirstArm = tuple[Path, Arm, DictConfig]  # folder of all arms, the arm and its configuration


def add_parser(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Add `fork` to the main command line."""
    text = "continue a checkpoint in several ways with the same prompts and seeds, and compare their held-out scores"
    parser = commands.add_parser("fork", help=text, description=text)
    parser.add_argument("runs", metavar="RUN", type=Path, nargs="+", help="run directories, such as one for each seed")
    step_help = "checkpoint to begin from: newest, best or a step number (default: newest)"
    parser.add_argument("--checkpoint", metavar="WHICH", dest="which", default="newest", help=step_help)
    parser.add_argument(
        "--arms",
        metavar="ARM",
        nargs="+",
        default=["none", "reset"],
        help="ways to continue, compared with the first: none (no change); reset (a hard reset first); broaden (a hard"
        " reset, then twice the responses to half the prompts); or overrides in quotes (default: none reset)",
    )
    parser.add_argument("--steps", metavar="N", type=int, required=True, help="steps of each arm")
    parser.add_argument("--out", metavar="OUT", type=Path, help="folder of the arms (default: forks/STEP in each RUN)")
    early_help = "end an arm as soon as it is decided whether it is better or worse than the first; of one RUN"
    parser.add_argument("--early", action="store_true", help=early_help)
    parser.add_argument("--dry-run", action="store_true", help="print the command of each arm, start nothing")
    parser.set_defaults(run_command=run)


def run(args: argparse.Namespace) -> int:
    """Run the arms one after the other, then print the comparison; return 0, or the exit code of an unfinished arm.

    Raises ConfigError: a checkpoint or a key does not exist.
    """
    from nemo_prorl import settings
    from nemo_prorl.launcher import one_node, run_results

    todo, commands = composed(args)
    for folder, _, _ in todo:
        folder.mkdir(parents=True, exist_ok=True)  # `retention.retain` then keeps the checkpoint
    if args.dry_run:
        sys.stdout.write("".join(f"{command}\n" for command in commands))
        return 0
    for number, (folder, arm, cfg) in enumerate(todo, 1):
        name = f"arm {number} of {len(todo)}: {arm.text} in {folder / arm.name}"
        if run_results.finished_step(folder / arm.name, args.steps) is not None:
            _log.info("%s is finished", name)
            continue
        if args.early and early_difference(todo[0], folder / arm.name, args.steps):
            _log.info("%s is decided", name)
            continue
        _log.info("%s", name)
        with _stopped_if_decided(todo[0], folder / arm.name, args.steps) if args.early else nullcontext():
            code = one_node.run(cfg, settings.resolved_yaml(cfg))
        if code and not (args.early and early_difference(todo[0], folder / arm.name, args.steps)):
            return code
    arms = [arm for _, arm, _ in todo[: len(args.arms)]]
    folders = list(dict.fromkeys(folder for folder, _, _ in todo))
    sys.stdout.write(report(folders, arms, args.steps, todo[0] if args.early else None))
    return 0


def composed(args: argparse.Namespace) -> tuple[list[tuple[Path, Arm, DictConfig]], list[str]]:
    """Return folder, arm and configuration of each arm of each run, and the commands that train them."""
    from nemo_prorl import settings

    if args.steps < 1:
        raise ConfigError(f"--steps={args.steps}: expected at least 1")
    if args.out is not None and len(args.runs) > 1:
        raise ConfigError(f"--out {args.out}: expected one RUN; without --out each RUN gets its own folder")
    if args.early and len(args.runs) > 1:
        raise ConfigError("--early: expected one RUN, because the prompts of one run decide. Fix: fork each RUN")
    if twice := [arm for arm in args.arms if args.arms.count(arm) > 1]:
        raise ConfigError(f"--arms {' '.join(args.arms)}: {twice[0]} is given twice. Fix: leave one out")
    todo: list[tuple[Path, Arm, DictConfig]] = []
    commands: list[str] = []
    for run_dir in (run_dir.absolute() for run_dir in args.runs):
        if not (run_dir / "config.yaml").is_file():
            raise ConfigError(f"{run_dir} is not a run directory: it has no config.yaml")
        checkpoint = chosen_checkpoint(run_dir, args.which)
        folder = args.out.absolute() if args.out else run_dir / "forks" / str(step_of(checkpoint))
        parent = settings.read_config(run_dir / "config.yaml")
        for arm in (arm_of(text, parent) for text in args.arms):
            words = [f"run_dir={folder / arm.name}", f"chain.start_from={checkpoint}", *_ALL_ARMS]
            words += [f"trainer.grpo.max_steps={args.steps}", *arm.overrides]
            todo.append((folder, arm, settings.load_run(words, run_dir / "config.yaml")))
            commands.append(shlex.join(["prorl", "train", "--config", str(run_dir / "config.yaml"), *words]))
    return todo, commands


def arm_of(text: str, parent: DictConfig) -> Arm:
    """Return the arm that a text names, for a run with the configuration `parent`."""
    grpo = parent.trainer.grpo
    wide = (
        f"trainer.grpo.samples_per_prompt={2 * grpo.samples_per_prompt}",
        f"trainer.grpo.prompts_per_step={max(1, grpo.prompts_per_step // 2)}",
    )
    keeps, resets = "chain.hard_reset=false", "chain.hard_reset=true"
    named: dict[str, tuple[str, ...]] = {"none": (keeps,), "reset": (resets,), "broaden": (resets, *wide)}
    if text in named:
        return Arm(text, text, named[text])
    if "=" not in text:
        raise ConfigError(f"--arms {text}: expected none, reset, broaden, or overrides KEY=VALUE in quotes")
    own = tuple(text.split())
    return Arm(text, re.sub(r"[^A-Za-z0-9._-]+", "_", text), (keeps, *own))


def report(folders: Sequence[Path], arms: Sequence[Arm], steps: int, early: _FirstArm | None = None) -> str:
    """Return the table of the arms: held-out scores of the second half, and the differences from the first arm.

    Args:
        early: the first arm, if others may have ended before `steps`: these are compared over the later half of the
            validations that both have, with the wider interval of several looks.
    """
    rows = [("arm", "held-out", "difference", "95 %", "cost")]
    base = [scores_of(folder / arms[0].name, steps) for folder in folders]
    for arm in arms:
        shown = early and early_difference(early, folders[0] / arm.name, steps)
        if early and shown:
            looks = len(validations_of(folders[0] / arms[0].name, 0, steps))
            own = [later_half(list(validations_of(folders[0] / arm.name, 0, steps).values()))]
            mean, half = shown.mean, shown.half_width(looks)
        else:
            own = [scores_of(folder / arm.name, steps) for folder in folders]
            mean, half = compared(base, own)
        level = statistics.fmean(statistics.fmean(scores.values()) for scores in own)
        cells = (f"{mean:+.4f}", f"{mean - half:+.4f} to {mean + half:+.4f}") if arm is not arms[0] else ("", "")
        tokens = sum(tokens_of(folder / arm.name) for folder in folders)
        rows.append((arm.text, f"{level:.4f}", *cells, f"{tokens / 1e6:.3g} M tokens"))
    over = "prompts; another seed may differ more" if len(folders) == 1 else f"{len(folders)} runs, by Student's t"
    return columns(rows) + f"held-out: mean of the validations after step {steps // 2}; the interval is over {over}\n"


def scores_of(run_dir: Path, steps: int) -> dict[str, float]:
    """Return the mean score of each held-out prompt in the validations of the second half of an arm."""
    found = list(validations_of(run_dir, steps // 2, steps).values())
    if not found:
        raise ConfigError(
            f"{run_dir}: no validation after step {steps // 2}. Fix: data.validation, or more steps (--steps)"
        )
    return {prompt: statistics.fmean(scores[prompt] for scores in found) for prompt in found[0]}


def early_difference(first: _FirstArm, arm_dir: Path, steps: int) -> PairedDifference | None:
    """Return the difference of an arm from the first, finished one, if its validations so far decide; else None."""
    folder, arm, cfg = first
    base, own = validations_of(folder / arm.name, 0, steps), validations_of(arm_dir, 0, steps)
    found = None if folder / arm.name == arm_dir else look(base, own, cfg.trainer.resets.trial_noise)
    return found[0] if found and found[1] else None


@contextmanager
def _stopped_if_decided(first: _FirstArm, arm_dir: Path, steps: int) -> Iterator[None]:
    """Context manager in which an arm trains; it is asked to stop, as by `prorl control`, once it is decided."""
    ended = threading.Event()

    def watch() -> None:
        while not ended.wait(_LOOK_S):
            if (shown := early_difference(first, arm_dir, steps)) is not None:
                _log.info("decided: %+.4f +- %.4f to the first arm", shown.mean, shown.se)
                place(arm_dir / "control", "stop")
                return

    thread = threading.Thread(target=watch, name="early", daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()


def compared(base: Sequence[Mapping[str, float]], other: Sequence[Mapping[str, float]]) -> tuple[float, float]:
    """Return the mean difference of scores in pairs, and half the width of its 95 % interval.

    With one run, the pairs are prompts; with several, each run gives one difference.
    """
    if len(base) == 1:
        shown = difference(base[0], other[0])
        return shown.mean, shown.half_width()
    values = [difference(*pair).mean for pair in zip(base, other, strict=True)]
    factor = _T95[min(len(values) - 2, len(_T95) - 1)]  # for more runs than the table has, rather too large
    return statistics.fmean(values), factor * statistics.stdev(values) / math.sqrt(len(values))


def tokens_of(run_dir: Path) -> float:
    """Return the number of tokens that an arm generated for training."""
    lines = read_objects(run_dir / "metrics.jsonl")
    return sum(float(line.get("rollout/generated_tokens") or 0.0) for line in lines)
