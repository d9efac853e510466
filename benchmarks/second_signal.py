"""Two Ctrl-C, two seconds apart, in six phases of the laptop job: seconds until its last process is gone.

.venv/train/bin/python benchmarks/second_signal.py            3 to 6 minutes
"""

import argparse
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

import psutil
from machine import describe

ROOT = Path(__file__).resolve().parent.parent
PRORL = Path(sys.executable).with_name("prorl")
APART_S, PATIENCE_S = 2.0, 240.0
NO_WARMUP = "trainer.warmup.steps=0"
LONG = "trainer.grpo.prompts_per_step=512"
# Phase: (text of the log that comes before it, seconds to wait then, overrides that make the phase long).
PHASES: dict[str, tuple[str, float, list[str]]] = {
    "the ranks import NeMo": ("starting the trainer", 1.0, []),
    "the engines start": ("the model is built", 0.5, [NO_WARMUP]),
    "warm-up": ("warm-up:", 3.0, ["trainer.warmup.steps=3000"]),
    "validation": ("ready: rollout engines", 3.0, [NO_WARMUP, "trainer.grpo.validation_samples=64"]),
    "rollout": ("ready: rollout engines", 8.0, [NO_WARMUP, LONG, "data.validation=[]"]),
    "updates": ("   1/120", 4.0, [NO_WARMUP, "trainer.grpo.updates_per_step=48", "data.validation=[]"]),
}


def wait_for(process: "subprocess.Popen[bytes]", log: Path, text: str) -> None:
    """Wait until the job has written the text.  Raises SystemExit if it ends before, or after PATIENCE_S."""
    limit = time.monotonic() + PATIENCE_S
    while text not in log.read_text(errors="replace"):
        if process.poll() is not None or time.monotonic() > limit:
            process.kill()
            raise SystemExit(f"{text!r} did not come:\n{log.read_text(errors='replace')[-2000:]}")
        time.sleep(0.05)


def measure(folder: Path, phase: str) -> tuple[float, int, str]:
    """Start the job and stop it twice in a phase; return seconds after the second signal, exit code, last message."""
    text, pause, overrides = PHASES[phase]
    log = folder / "log.txt"
    with log.open("wb") as out:
        words = [str(PRORL), "train", f"run_dir={folder / 'run'}", *overrides]
        process = subprocess.Popen(words, stdout=out, stderr=out, cwd=ROOT)
        wait_for(process, log, text)
        time.sleep(pause)
        family = [psutil.Process(process.pid), *psutil.Process(process.pid).children(recursive=True)]
        process.send_signal(signal.SIGINT)
        time.sleep(APART_S)
        family = list({*family, *[c for p in family if p.is_running() for c in children_of(p)]})
        if process.poll() is None:  # a trainer that has just been started ends at the first signal
            process.send_signal(signal.SIGINT)
        began = time.monotonic()
        while any(alive(one) for one in family):
            if process.poll() is not None and time.monotonic() - began > PATIENCE_S:
                break
            time.sleep(0.02)
        seconds = time.monotonic() - began
    return seconds, process.wait(), log.read_text(errors="replace").strip().splitlines()[-1]


def children_of(process: psutil.Process) -> Sequence[psutil.Process]:
    try:
        found: list[psutil.Process] = process.children(recursive=True)
    except psutil.NoSuchProcess:
        return []
    return found


def alive(process: psutil.Process) -> bool:
    if process.pid == os.getpid():
        return False
    try:
        return bool(process.is_running()) and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--phases", nargs="+", choices=list(PHASES), default=list(PHASES), metavar="PHASE")
    args = parser.parse_args()
    sys.stdout.write(f"{describe()}\n{'phase':24s} {'seconds':>8s} {'exit code':>10s}  last message\n")
    for phase in args.phases:
        with tempfile.TemporaryDirectory() as folder:
            seconds, code, said = measure(Path(folder), phase)
        sys.stdout.write(f"{phase:24s} {seconds:8.2f} {code:10d}  {said}\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main()
