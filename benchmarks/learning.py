"""Held-out reward of the laptop job before and after training, for three seeds and for learning rate 0.

    .venv/train/bin/python benchmarks/learning.py                       runs all four, one after the other
    .venv/train/bin/python benchmarks/learning.py --report RUN...       reports finished runs

A run has learnt if it gains at least 0.15 and 4 standard errors, and ends at 1.5 times its start or more.  The
run with learning rate 0 must not learn.
"""

import argparse
import json
import math
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from machine import describe

SEEDS = (1, 2, 3)


def train(run: Path, *overrides: str) -> Path:
    """Run or continue `prorl train` in `run`, write its wall seconds to run/wall_s.json, and return `run`."""
    began = time.monotonic()
    command = [str(Path(sys.executable).with_name("prorl")), "train", f"run_dir={run}", *overrides]
    subprocess.run(command, check=True, stdout=sys.stderr)
    (run / "wall_s.json").write_text(json.dumps(time.monotonic() - began))
    return run


def line_of(run: Path) -> tuple[str, bool]:
    """Return the line of a run in the table, and whether it has learnt."""
    summary: dict[str, Any] = json.loads((run / "summary.json").read_text())
    config = (run / "config.yaml").read_text()
    rate = next(line.split(":")[1].strip() for line in config.splitlines() if line.strip().startswith("lr:"))
    for text in config.split("optim:")[1:]:
        rate = next(line.split(":")[1].strip() for line in text.splitlines() if line.strip().startswith("lr:"))
    heldout = summary["heldout"]
    before, after = heldout["before"], heldout["after"]
    sigmas = (after - before) / math.hypot(heldout["before_se"], heldout["after_se"])
    learnt = after - before >= 0.15 and after >= 1.5 * before and sigmas >= 4
    tasks = ", ".join(f"{n} {s['before']:.2f}->{s['after']:.2f}" for n, s in heldout["tasks"].items())
    wall = run / "wall_s.json"
    minutes = f"{json.loads(wall.read_text()) / 60:5.1f}" if wall.is_file() else "    -"
    return (
        f"{summary['seed']:4d} {float(rate):8.1e} {summary['step']:5d} {minutes} {before:7.3f} {after:7.3f}"
        f" {after - before:+7.3f} {after / before:6.2f} {sigmas:7.1f}  {'yes' if learnt else 'no ':3s}  {tasks}",
        learnt,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--report", type=Path, nargs="+", metavar="RUN", help="report these finished runs; train none")
    parser.add_argument("--out", type=Path, default=Path("runs/learning"), help="folder of the runs")
    args = parser.parse_args()
    runs = args.report or [
        *(train(args.out / f"seed{seed}", f"seed={seed}") for seed in SEEDS),
        train(args.out / "lr0", "seed=1", "model.optim.lr=0"),
    ]
    lines = [
        describe(),
        "mean reward at temperature 1 on 512 unseen problems, before (after the warm-up) and after",
        "seed       lr steps   min  before   after    gain  times  sigmas  learnt  tasks",
    ]
    sys.stdout.write("\n".join([*lines, *(line_of(run)[0] for run in runs)]) + "\n")


if __name__ == "__main__":
    main()
