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
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from omegaconf import DictConfig

from nemo_prorl.algorithms.paired import PairedDifference, difference, later_half, look
from nemo_prorl.errors import ConfigError
from nemo_prorl.files import read_object, read_objects, write_json, write_text
from nemo_prorl.launcher.formats import ForkArm, ForkRecord
from nemo_prorl.lifecycle.bottleneck import number
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
RECORD = "fork.json"
HEADS = ("arm", "held-out", "difference", "95 %", "cost")
_LOOK_S = 2.0  # seconds between looks at an arm with --early


@dataclass(frozen=True)
class Arm:
    """A way to continue: `text` as the user wrote it, the name of its folder, and its overrides."""

    text: str
    name: str
    overrides: tuple[str, ...]


_Todo = list[tuple[Path, Arm, DictConfig]]  # folder of all arms, the arm and its configuration
_Validations = dict[int, dict[str, float]]  # score of each held-out prompt, by step


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
    sbatch_help = "submit each arm as a Slurm job, with these flags of sbatch, which may be '' (slurm/stage.sbatch)"
    parser.add_argument("--sbatch", metavar="FLAGS", help=sbatch_help)
    parser.add_argument("--dry-run", action="store_true", help="print the command of each arm, start nothing")
    parser.set_defaults(run_command=run)


def run(args: argparse.Namespace) -> int:
    """Run the arms one after the other, then print the comparison; return 0, or the exit code of an unfinished arm.

    With --sbatch, submit the unfinished arms; print the comparison if there are none.

    Raises:
        ConfigError: a checkpoint or a key does not exist.
        UnfitMachine: Slurm is missing or refused a job.
    """
    from nemo_prorl import settings
    from nemo_prorl.launcher import one_node, run_results

    todo, forks, commands = composed(args)
    for folder, record in forks.items():
        folder.mkdir(parents=True, exist_ok=True)  # `retention.retain` then keeps the checkpoint
        write_json(folder / RECORD, record)
    if args.sbatch is not None:
        unfinished = [item for item in todo if run_results.finished_step(item[0] / item[1].name, args.steps) is None]
        if unfinished:
            _submit(unfinished, forks, args.sbatch, args.dry_run)
            return 0
    elif args.dry_run:
        sys.stdout.write("".join(f"{command}\n" for command in commands))
        return 0
    for count, (folder, arm, cfg) in enumerate(todo, 1):
        name = f"arm {count} of {len(todo)}: {arm.text} in {folder / arm.name}"
        if run_results.finished_step(folder / arm.name, args.steps) is not None:
            _log.info("%s is finished", name)
            continue
        decided = partial(early_difference, folder, forks[folder], arm.name)
        if decided():
            _log.info("%s is decided", name)
            continue
        _log.info("%s", name)
        with _stopped_if(decided, folder / arm.name) if args.early else nullcontext():
            code = one_node.run(cfg, settings.resolved_yaml(cfg))
        if code and not decided():
            return code
    sys.stdout.write(table(forks))
    return 0


def _submit(todo: _Todo, forks: Mapping[Path, ForkRecord], flags: str, is_rehearsal: bool) -> None:
    """Submit a Slurm job for each arm of `todo` without one; the arm's config.yaml has what the job trains.

    Args:
        is_rehearsal: only write config.yaml and print the commands.
    """
    from nemo_prorl import settings
    from nemo_prorl.launcher.chain_slurm import SCRIPT, live, sbatch_flags, submit
    from nemo_prorl.launcher.submission import ROOT, SAVED

    own = sbatch_flags(flags)
    entries = {folder / arm["folder"]: arm for folder, record in forks.items() for arm in record["arms"]}
    states = {} if is_rehearsal else live([entry["job"] for entry in entries.values() if entry["job"]])
    for folder, arm, cfg in todo:
        run_dir = folder / arm.name
        if (job := entries[run_dir]["job"]) and job in states:
            sys.stdout.write(f"{arm.text}  job {job} is {states[job]}\n")
            continue
        run_dir.mkdir(exist_ok=True)
        settings.make_data_absolute(cfg)  # the job runs in another folder
        write_text(run_dir / "config.yaml", settings.resolved_yaml(cfg))
        name = f"--job-name=fork-{folder.name}-{arm.name}"
        words = ["sbatch", "--parsable", name, *own, SCRIPT, SAVED, f"run_dir={run_dir}"]
        if is_rehearsal:
            sys.stdout.write(f"{shlex.join(words)}\n")
            continue
        job = entries[run_dir]["job"] = submit(words, ROOT, f"arm {arm.text}")
        write_json(folder / RECORD, forks[folder])
        sys.stdout.write(f"{arm.text}  job {job}\n")
    if not is_rehearsal:
        sys.stdout.write("when the jobs have ended, the same command compares the arms\n")


def composed(args: argparse.Namespace) -> tuple[_Todo, dict[Path, ForkRecord], list[str]]:
    """Return the arms of all runs, the content of fork.json by its folder, and the commands that train the arms."""
    from nemo_prorl import settings

    if args.steps < 1:
        raise ConfigError(f"--steps={args.steps}: expected at least 1")
    if args.out is not None and len(args.runs) > 1:
        raise ConfigError(f"--out {args.out}: expected one RUN; without --out each RUN gets its own folder")
    if args.early and args.sbatch is not None:
        raise ConfigError(
            "--early: expected arms one after the other, which --sbatch does not start. Fix: leave one out"
        )
    if args.early and len(args.runs) > 1:
        raise ConfigError("--early: expected one RUN, because the prompts of one run decide. Fix: fork each RUN")
    if twice := [arm for arm in args.arms if args.arms.count(arm) > 1]:
        raise ConfigError(f"--arms {' '.join(args.arms)}: {twice[0]} is given twice. Fix: leave one out")
    todo: _Todo = []
    forks: dict[Path, ForkRecord] = {}
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
        own, held = todo[-len(args.arms) :], read_fork(folder)
        jobs = {arm["folder"]: arm.get("job") for arm in held["arms"]} if held else {}
        forks[folder] = {
            "format": 1,
            "checkpoint": str(checkpoint),
            "steps": args.steps,
            "early_noise": own[0][2].trainer.resets.trial_noise if args.early else None,
            "arms": [{"text": arm.text, "folder": arm.name, "job": jobs.get(arm.name)} for _, arm, _ in own],
        }
    return todo, forks, commands


def read_fork(folder: Path) -> ForkRecord | None:
    """Return the content of FOLDER/fork.json, or None if the file is missing or is not JSON."""
    record: Any = read_object(folder / RECORD)
    if record is not None and record.get("format") != 1:
        raise ConfigError(f"{folder / RECORD}: expected format 1; repeat the command of the fork with this version")
    return record


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
    own = tuple(shlex.split(text))
    return Arm(text, re.sub(r"[^A-Za-z0-9._-]+", "_", text), (keeps, *own))


def table(forks: Mapping[Path, ForkRecord]) -> str:
    """Return the table of the arms of forks that differ in their runs only."""
    record = next(iter(forks.values()))
    rows = [HEADS, *(cells(forks, arm) for arm in record["arms"])]
    return columns(rows) + footnote(record["steps"], len(forks)) + "\n"


def footnote(steps: int, runs: int = 1) -> str:
    """Return what a reader must know of the table."""
    over = "prompts; another seed may differ more" if runs == 1 else f"{runs} runs, by Student's t"
    return f"held-out: mean of the validations after step {steps // 2}; the interval is over {over}"


def cells(forks: Mapping[Path, ForkRecord], arm: ForkArm) -> tuple[str, ...]:
    """Return the row of an arm: held-out scores of the second half, and the difference from the first arm.

    An arm that `--early` ended is compared over the later half of the validations that both have, with the wider
    interval of several looks.  Raises ConfigError: no validation of the second half is one of both arms.
    """
    folder, record = next(iter(forks.items()))
    if shown := early_difference(folder, record, arm["folder"]):
        first, last = _pair(folder, record, arm["folder"])
        own = [later_half(list(last.values()))]
        mean, half = shown.mean, shown.half_width(len(first))
    else:
        halves = [_second_half(folder, fork, arm["folder"]) for folder, fork in forks.items()]
        own = [half for _, half in halves]
        mean, half = compared([base for base, _ in halves], own)
    level = statistics.fmean(statistics.fmean(scores.values()) for scores in own)
    shows = (f"{mean:+.4f}", f"{mean - half:+.4f} to {mean + half:+.4f}") if arm != record["arms"][0] else ("", "")
    return arm["text"], f"{level:.4f}", *shows, cost(folder / arm["folder"] for folder in forks)


def _pair(folder: Path, record: ForkRecord, name: str) -> tuple[_Validations, _Validations]:
    """Return the validations of the first arm and of the arm in FOLDER/NAME, those of the same prompts only."""
    first = folder / record["arms"][0]["folder"]
    base, own = (validations_of(run_dir, 0, record["steps"]) for run_dir in (first, folder / name))
    prompts = next(iter(base.values()), {}).keys()
    base, own = ({step: scores for step, scores in arm.items() if scores.keys() == prompts} for arm in (base, own))
    return base, own


def _second_half(folder: Path, record: ForkRecord, name: str) -> tuple[dict[str, float], dict[str, float]]:
    """Return the mean score of each prompt in two arms, over the validations of the second half that both have."""
    pair, middle = _pair(folder, record, name), record["steps"] // 2
    steps = [step for step in pair[0] if step in pair[1] and step > middle]
    if not steps:
        raise ConfigError(
            f"{folder / name}: no validation after step {middle}. Fix: data.validation, or more steps (--steps)"
        )
    base, own = ({key: statistics.fmean(arm[step][key] for step in steps) for key in arm[steps[0]]} for arm in pair)
    return base, own


def early_difference(folder: Path, record: ForkRecord, name: str) -> PairedDifference | None:
    """Return the difference of an arm from the first, finished one, if --early ends it; else None."""
    comparison = None if record["early_noise"] is None else look(*_pair(folder, record, name), record["early_noise"])
    return comparison[0] if comparison and comparison[1] else None


def differences(folder: Path, record: ForkRecord, name: str) -> dict[int, list[float]]:
    """Return low end, difference and high end of the interval, by step of the validations that both arms have."""
    (base, own), noise = _pair(folder, record, name), record["early_noise"]
    looks = 1 if noise is None else len(base)
    by_step = {step: difference(base[step], own[step], noise or 0.0) for step in base if step in own}
    halves = {step: shown.half_width(looks) for step, shown in by_step.items()}
    return {step: [shown.mean - halves[step], shown.mean, shown.mean + halves[step]] for step, shown in by_step.items()}


@contextmanager
def _stopped_if(decided: Callable[[], PairedDifference | None], arm_dir: Path) -> Iterator[None]:
    """Context manager in which an arm trains; it is asked to stop, as by `prorl control`, once it is decided."""
    ended = threading.Event()

    def watch() -> None:
        while not ended.wait(_LOOK_S):
            if (shown := decided()) is not None:
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


def cost(run_dirs: Iterable[Path]) -> str:
    """Return as text the number of tokens that runs generated for training."""
    lines = (line for run_dir in run_dirs for line in read_objects(run_dir / "metrics.jsonl"))
    return f"{sum(number(line, 'rollout/generated_tokens') for line in lines) / 1e6:.3g} M tokens"
