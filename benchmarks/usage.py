"""What the metrics `system/*` cost a run that is going on: its supervisor's samples, and rank 0's work in each step.

    .venv/train/bin/python benchmarks/usage.py RUN

The samples are taken here, of the processes of RUN, in the way and as often as its supervisor does.  Rank 0's work
is repeated with the samples and steps that RUN has written.  Costs are CPU time, as shares of one core and of a step.
"""

import argparse
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

from machine import describe

from nemo_prorl.files import read_objects
from nemo_prorl.launcher.peers import NodeAddress
from nemo_prorl.launcher.processes import Child
from nemo_prorl.launcher.usage_sampler import _EVERY_S, _SHARE, UsageSampler
from nemo_prorl.usage import GrowthWatch, newest, totals

ROUNDS = 20


def cpu_seconds(work: Callable[[], Any]) -> float:
    """Return the CPU seconds of a call: median of ROUNDS."""
    found = []
    for _ in range(ROUNDS):
        began = time.process_time()
        work()
        found.append(time.process_time() - began)
    return statistics.median(found)


def measure(run: Path) -> None:
    lines = read_objects(run / "metrics.jsonl")
    step_s = statistics.median(line["time/step"] for line in lines)
    nodes = newest(run / "endpoints")
    processes = {name: process["pid"] for node in nodes for name, process in node["processes"].items()}
    children = [SimpleNamespace(name=name, process=SimpleNamespace(pid=pid)) for name, pid in processes.items()]
    with tempfile.TemporaryDirectory() as own:
        sampler = UsageSampler(cast(list[Child], children), Path(own), NodeAddress())
        sampler.close()
        sample_s = cpu_seconds(sampler.sample)
    watch = GrowthWatch()
    steps = [line["step"] for line in lines]

    def of_a_step() -> None:
        totals(newest(run / "endpoints"))

    def watched() -> None:
        for step in steps:
            list(watch.observe(step, step_s, nodes, steps[-1]))

    rank_s = cpu_seconds(of_a_step) + cpu_seconds(watched) / len(steps)
    pause_s = max(_EVERY_S, sample_s / _SHARE)
    share = sample_s / pause_s
    sys.stdout.write(
        f"{describe()}\n{len(processes)} processes; {len(steps)} steps of {1e3 * step_s:.0f} ms (median)\n"
        f"a sample       {1e3 * sample_s:7.2f} ms of CPU time, every {pause_s:.0f} s: {share:.3%} of a core\n"
        f"rank 0, a step {1e3 * rank_s:7.2f} ms of CPU time: {rank_s / step_s:.3%} of a step\n"
        f"together       {share + rank_s / step_s:.3%} (limit 1 %)\n"
    )


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", metavar="RUN", type=Path, help="directory of a run that is going on")
    measure(parser.parse_args().run)
