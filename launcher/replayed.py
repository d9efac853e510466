"""`prorl replay-training`: trains stored steps of a run again, without engines, and compares the ledgers."""

import argparse
import shutil
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from nemo_prorl.errors import ConfigError
from nemo_prorl.files import read_objects
from nemo_prorl.lifecycle.retention import complete, step_of
from nemo_prorl.lifecycle.run_records import Journal
from nemo_prorl.planning.bisect import norms_of
from nemo_prorl.planning.columns import columns

# Beginnings of keys without effect on stored responses with their verdicts.
_STORED = (
    *("run_dir", "stage", "seed", "chain.", "data.", "rewards.", "rollout.", "pretrained_checkpoint."),
    *(f"trainer.{part}" for part in ("warmup.", "deadlines.")),
    *(f"trainer.resets.{key}" for key in ("mode", "at_steps", "every", "rules", "roll_back")),
    *(f"trainer.grpo.{key}" for key in ("samples_per_prompt", "prompts_per_step", "temperature", "dynamic_sampling")),
    *(f"trainer.grpo.{key}" for key in ("validat", "checkpoint", "keep_", "save_rollout")),
)
_COMPARED = ("policy/loss", "policy/grad_norm", "policy/kl", "policy/clipped_high", "policy/max_ratio", "kl", "entropy")


def add_parser(commands: Any) -> None:
    """Add `replay-training` to the main command line."""
    text = (
        "train stored steps of a run again, without engines: the same digests, or what another setting would have done"
    )
    parser = commands.add_parser("replay-training", help=text, description=text)
    parser.add_argument("run_dir", metavar="RUN", type=Path, help="run directory")
    parser.add_argument("--from", dest="first", metavar="A", type=int, required=True, help="first step")
    parser.add_argument("--to", dest="last", metavar="B", type=int, help="last step (default: A)")
    parser.add_argument(
        "--with", dest="changed", metavar="KEY=VALUE", nargs="+", default=[], help="other values for keys of the run"
    )
    parser.set_defaults(run_command=run)


def run(args: argparse.Namespace) -> int:
    """Train the steps again and print the comparison.

    Returns:
        0 if all digests are equal, or if keys were changed; 1 if a digest differs; the exit code of the ranks if they
        failed.
    """
    run_dir = args.run_dir.absolute()
    first, last = args.first, args.first if args.last is None else args.last
    if not 1 <= first <= last:
        raise ConfigError(f"--from={first} --to={last}: expected steps with 1 <= A <= B")
    if stored := [word for word in args.changed if word.lstrip("+~").startswith(_STORED)]:
        raise ConfigError(
            f"--with {stored[0]}: expected a key of the loss, the optimizer or the shaping of rewards; prompts,"
            " responses and verdicts are those that the run stored"
        )
    folder = run_dir / "replays" / f"{first}-{last}"
    if code := train_again(run_dir, folder, first, last, args.changed):
        return code
    return report(run_dir, folder, range(first, last + 1), bool(args.changed))


def train_again(
    run_dir: Path, folder: Path, first: int, last: int, changed: Sequence[str] = (), audit: bool = False
) -> int:
    """Train steps of a run again in a new folder, which replaces an old one; return the exit code of the ranks.

    Args:
        changed: overrides of the run's configuration.
        audit: write what `prorl audit` compares.

    Raises ConfigError: there is no such run, or it does not have the checkpoint or the batches that this needs.
    """
    from nemo_prorl import settings
    from nemo_prorl.launcher import one_node
    from nemo_prorl.lifecycle.ledger import read_ledger
    from nemo_prorl.replay_training import ReplaySpec

    if not (run_dir / "config.yaml").is_file():
        raise ConfigError(f"{run_dir} is not a run directory: it has no config.yaml")
    original = read_ledger(run_dir)
    checkpoint, before = start_of(run_dir, first, last)
    cfg = settings.load([f"run_dir={folder}", *changed], run_dir / "config.yaml")
    shutil.rmtree(folder, ignore_errors=True)
    for name in ("logs", "endpoints"):
        (folder / name).mkdir(parents=True)
    for name in ("init", "base"):
        if (run_dir / name).exists():
            (folder / name).symlink_to(run_dir / name)
    (folder / "config.yaml").write_text(settings.resolved_yaml(cfg))
    resets = {step: reset for step, reset in Journal(run_dir).resets().items() if before < step <= last}
    chain = original[before]["chain"] if before in original else ""
    ReplaySpec(
        run_dir=str(run_dir),
        checkpoint=None if checkpoint is None else str(checkpoint),
        before=before,
        last=last,
        chain=chain,
        resets=resets,
        audit=audit,
    ).write(folder)
    return one_node.replay(cfg, folder)


def start_of(run_dir: Path, first: int, last: int) -> tuple[Path | None, int]:
    """Return the newest checkpoint before the first step and its step; None and 0: the weights that the run began with.

    Raises ConfigError: there is no such checkpoint, or a batch of the steps after it was not kept.
    """
    from nemo_prorl.lifecycle.batches import stored_batch

    saved = [folder for folder in complete(run_dir / "checkpoints") if step_of(folder) < first]
    begun = next((e for e in Journal(run_dir).events() if e["event"] == "start"), {})
    if not saved and begun.get("start_from"):
        raise ConfigError(
            f"step {first}: no checkpoint before this step is kept, and the run began from another one"
            f" ({begun['start_from']}). Fix: keep more with trainer.grpo.keep_checkpoints=N"
        )
    checkpoint, before = (saved[-1], step_of(saved[-1])) if saved else (None, 0)
    if missing := [step for step in range(before + 1, last + 1) if stored_batch(run_dir, step) is None]:
        there = checkpoint or "the start of the run"
        asked = f"step {first}" if first == last else f"steps {first} to {last}"
        raise ConfigError(
            f"{asked}: the replay begins after {there}, and the batch of step {missing[0]} is not in"
            f" {run_dir / 'batches'}. Fix: other steps; for later runs trainer.grpo.keep_batches=N, or `prorl control"
            " RUN keep-batches` while they are there"
        )
    return checkpoint, before


def report(run_dir: Path, folder: Path, steps: range, changed: bool) -> int:
    """Print for each step whether the digests are equal, its seconds, and the metrics that differ."""
    from nemo_prorl.lifecycle.ledger import read_ledger
    from nemo_prorl.lifecycle.ledger_diff import Norms, of_step

    ledgers = read_ledger(run_dir), read_ledger(folder)
    lines = tuple({line["step"]: line for line in read_objects(path / "metrics.jsonl")} for path in (run_dir, folder))
    norms = Norms(norms_of(run_dir), norms_of(folder))
    rows, equal = [("step", "digests", "seconds", "in the run", "differs most in")], True
    for step in steps:
        if step not in ledgers[0] or step not in ledgers[1]:
            rows.append((str(step), "no ledger", "", "", ""))
            equal = False
            continue
        parting = of_step(ledgers[0][step], ledgers[1][step], norms)
        equal = equal and parting is None
        text = "equal" if parting is None else f"{parting.object}: {parting.where} ({parting.kind})"
        was, now = (line.get(step, {}) for line in lines)
        rows.append((str(step), text, _seconds(now), _seconds(was), "" if parting is None else _differences(was, now)))
    sys.stdout.write(columns(rows))
    chains = [ledger.get(steps[-1], {}).get("chain", "-") for ledger in ledgers]
    sys.stdout.write(f"chain after step {steps[-1]}: {chains[0]} in the run, {chains[1]} in {folder}\n")
    return 0 if equal or changed else 1


def _seconds(line: Mapping[str, Any]) -> str:
    """Return the seconds of a step but for its rollout, as text."""
    if "time/step" not in line:
        return "-"
    return f"{line['time/step'] - line.get('time/rollout', 0.0) - line.get('time/publish', 0.0):.2f}"


def _differences(was: Mapping[str, Any], now: Mapping[str, Any]) -> str:
    """Return the compared metrics whose values differ, with both values, largest relative difference first."""
    pairs = [(key, was[key], now[key]) for key in _COMPARED if was.get(key) is not None and now.get(key) is not None]
    parts = [(abs(a - b) / max(abs(a), abs(b), 1e-12), key, a, b) for key, a, b in pairs if a != b]
    return ", ".join(f"{key} {a:.6g} / {b:.6g}" for _, key, a, b in sorted(parts, reverse=True)[:3]) or "no metric"
