"""Time to write the report of a 5,000-step run and to open it in headless Chromium, and the size of its file.

.venv/train/bin/python benchmarks/report.py RUN          RUN: a run directory or a chain's folder, of any length

The long run repeats RUN's steps with new numbers until there are 5,000; each value changes by up to 1 %.  Journal and
responses are RUN's own.  Load time is from navigation until the visible part is drawn, and until everything is drawn
and painted.  Each load uses a new page in the same browser.
"""

import argparse
import json
import random
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from machine import describe

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from nemo_prorl.report import cli, read
from tests.report.browser import Browser, browser

LOADS = 7


def long_run(run: Path, folder: Path, steps: int) -> int:
    """Write a run of `steps` steps that repeat the steps of `run`; return the largest number of metrics in a step."""
    [curve] = read.read_curves([run])
    lines = [line for stage in curve.runs for line in stage.metrics]
    draw = random.Random(1)
    folder.mkdir()
    shutil.copy(curve.runs[-1].folder / "config.yaml", folder)
    shutil.copytree(curve.runs[-1].folder / "rollouts", folder / "rollouts")
    with (folder / "metrics.jsonl").open("w") as file:
        for step in range(1, steps + 1):
            line = {key: changed(value, draw) for key, value in lines[(step - 1) % len(lines)].items()}
            file.write(json.dumps(line | {"step": step}) + "\n")
    with (folder / "journal.jsonl").open("w") as file:
        for again in range(0, steps, len(lines)):
            for stage, offset in zip(curve.runs, curve.offsets, strict=True):
                for event in stage.events:
                    step = again + offset + event["step"]
                    if step <= steps and event["event"] != "resume":
                        file.write(json.dumps(event | {"step": step}) + "\n")
    return max(len(line) - 2 for line in lines)


def changed(value: Any, draw: random.Random) -> Any:
    return value * draw.uniform(0.99, 1.01) if isinstance(value, float) else value


def loads(chromium: Browser, address: str, width: int) -> list[tuple[float, float, float]]:
    """Return seconds (visible part drawn, all drawn, CPU) of each load in a window of `width` pixels.

    Raises:
        AssertionError: the page logs an error or sends a request.
    """
    seconds = []
    for _ in range(LOADS):
        with chromium.visit(address, width) as page:
            assert page.errors == [], page.errors
            assert len(page.requests) == 1, page.requests
            seconds.append((page.first_s, page.load_s, page.cpu_s))
    return seconds


def spread(seconds: Sequence[float]) -> str:
    return f"{statistics.median(seconds):.2f} ({min(seconds):.2f}-{max(seconds):.2f})".rjust(18)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", type=Path, metavar="RUN")
    parser.add_argument("--steps", type=int, default=5000)
    args = parser.parse_args()
    lines = [describe()]
    with tempfile.TemporaryDirectory(prefix="prorl-report-") as name:
        folder = Path(name)
        number = long_run(args.run, folder / "long", args.steps)
        lines.append(f"{args.steps} steps of up to {number} metrics, each of {LOADS} loads in a new page\n")
        lines.append(f"{'':28s} {'file':>8s} {'written, CPU':>14s} {'in view':>18s} {'all drawn':>18s} {'CPU':>18s}")
        with browser() as chromium:
            for what, run, width in (
                (f"the run of {args.steps} steps", folder / "long", 1280),
                ("the same, at 360 px", folder / "long", 360),
                ("RUN itself", args.run, 1280),
            ):
                begun = time.process_time()
                out = cli.write([run], [], cli.SAMPLES, folder / "report.html")
                seconds = time.process_time() - begun
                times = loads(chromium, out.as_uri(), width)
                size = f"{out.stat().st_size / 1e6:.2f} MB"
                cells = [spread(column) for column in zip(*times, strict=True)]
                lines.append(f"{what:28s} {size:>8s} {seconds:12.2f} s {' '.join(cells)}")
    lines.append("\nSeconds: median (least to most). CPU: of all of Chromium's processes until all is drawn.")
    lines.append("No console message and no request but the file in any load.")
    sys.stdout.write("\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
