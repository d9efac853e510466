"""`prorl watch RUN`: evaluate the checkpoints of a run as they appear, while the run continues.

The evaluations have their own engines, on this machine or, with a shared file system, on any other; the run does not
wait for them.  Each is written to RUN/evaluations/step-N, and the run's report shows them.
"""

import argparse
import logging
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from nemo_prorl.errors import ConfigError, StoppedCleanly
from nemo_prorl.files import read_object
from nemo_prorl.lifecycle.retention import complete, step_of

_log = logging.getLogger(__name__)

FOLDER = "evaluations"
_EVERY_S = 30.0  # seconds between two looks for new checkpoints
_PAUSE_S = 10.0  # seconds after a failed attempt
_TRIES = 2  # attempts at one checkpoint; an interrupted evaluation continues


def add_parser(commands: Any) -> None:
    """Add `watch` to the main command line."""
    text = "evaluate the checkpoints of a run as they appear, while the run continues; the report shows the results"
    parser = commands.add_parser("watch", help=text, description=text)
    parser.add_argument("run", metavar="RUN", type=Path, help="run directory")
    parser.add_argument(
        "overrides",
        metavar="OVERRIDE",
        nargs="*",
        default=[],
        help="KEY=VALUE for the evaluations, as for prorl evaluate",
    )
    parser.add_argument(
        "--benchmarks", metavar="A,B", required=True, help="names, sets or files, as for prorl evaluate"
    )
    parser.add_argument("--samples", metavar="N", type=int, help="responses per prompt (default: the benchmark's)")
    parser.add_argument("--limit", metavar="N", type=int, help="first N prompts of each benchmark (default: all)")
    parser.add_argument("--data", metavar="DIR", help="folder with the records of benchmarks that are not shipped")
    parser.add_argument("--every", metavar="STEPS", type=int, default=1, help="only multiples of STEPS; default: 1")
    parser.set_defaults(run_command=run)


def run(args: argparse.Namespace) -> int:
    """Evaluate until the run has ended and nothing is left; return 1 if a checkpoint could not be evaluated.

    Raises ConfigError if RUN is no run directory, a benchmark is unknown, or `--every` is below 1.
    """
    from nemo_prorl.evaluation.catalogue import choose

    if args.every < 1:
        raise ConfigError(f"--every {args.every}: expected 1 or more")
    if not (args.run / "config.yaml").is_file():
        raise ConfigError(f"{args.run}: expected a run directory (config.yaml)")
    choose(args.benchmarks)
    options = [word for name in ("samples", "limit", "data") if (value := getattr(args, name)) is not None
               for word in (f"--{name}", str(value))]  # fmt: skip
    command = [sys.executable, "-m", "nemo_prorl.cli", "evaluate", str(args.run), *args.overrides]
    command += ["--benchmarks", args.benchmarks, *options]
    failed: dict[int, int] = {}
    if not has_ended(args.run):
        _log.info("this ends once %s has made all its steps; a stopped run is waited for until it goes on", args.run)
    while True:
        ended = has_ended(args.run)  # before the look for checkpoints: the last one is written earlier
        due = [step for step in missing(args.run, args.every) if failed.get(step, 0) < _TRIES]
        if due:
            if not evaluate(args.run, due[0], command):
                failed[due[0]] = failed.get(due[0], 0) + 1
                time.sleep(_PAUSE_S)
        elif ended:
            return 1 if any(tries >= _TRIES for tries in failed.values()) else 0
        else:
            time.sleep(_EVERY_S)


def missing(run_dir: Path, every: int) -> list[int]:
    """Return the steps of checkpoints without a complete evaluation, oldest first: these are deleted first."""
    steps = map(step_of, complete(run_dir / "checkpoints"))
    return [step for step in steps if step % every == 0 and not _is_complete(run_dir, step)]


def evaluate(run_dir: Path, step: int, command: Sequence[str]) -> bool:
    """Evaluate one checkpoint; return False if this failed although the checkpoint is still there."""
    out = folder_of(run_dir, step)
    _log.info("step %d: evaluating; the results go to %s", step, out)
    process = subprocess.Popen([*command, "--checkpoint", str(step), "--out", str(out)])
    before = signal.signal(signal.SIGTERM, lambda *_: process.terminate())  # the evaluation ends with this command
    try:
        code = process.wait()
    finally:
        signal.signal(signal.SIGTERM, before)
    if code in (0, 1) and _is_complete(run_dir, step):
        return True
    if not any(step_of(folder) == step for folder in complete(run_dir / "checkpoints")):
        _log.warning(
            "step %d: the run has deleted this checkpoint. Fix: trainer.grpo.keep_checkpoints, or --every", step
        )
        return True
    if code in (75, -signal.SIGTERM, -signal.SIGINT):
        raise StoppedCleanly("stopped; the same command continues")
    _log.error("step %d: prorl evaluate ended with status %d", step, code)
    return False


def folder_of(run_dir: Path, step: int) -> Path:
    return run_dir / FOLDER / f"step-{step:06d}"


def _is_complete(run_dir: Path, step: int) -> bool:
    return bool((read_object(folder_of(run_dir, step) / "results.json") or {}).get("complete"))


def has_ended(run_dir: Path) -> bool:
    """Return whether the run has made all its steps, by its summary.json."""
    return bool((read_object(run_dir / "summary.json") or {}).get("finished"))


def results(run_dir: Path) -> Iterator[tuple[int, dict[str, Any]]]:
    """Yield (step, content of results.json) of each evaluated checkpoint, by step."""
    for folder in sorted((run_dir / FOLDER).glob("step-*")):
        step = folder.name.removeprefix("step-")
        if step.isdecimal() and (result := read_object(folder / "results.json")):
            yield int(step), result
