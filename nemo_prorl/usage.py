"""Memory, open files and threads of a run's processes: the samples of each node, and whether something grows.

The supervisor of a node writes a sample to endpoints/usage-NODE.json every few seconds (`launcher.usage_sampler`).
Rank 0 adds the newest samples to the metrics of each step, as `system/*`.  Memory of GPUs is not included.
"""

import math
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import combinations
from pathlib import Path
from statistics import mean, median, stdev
from typing import TypedDict, cast

from nemo_prorl.files import read_object
from nemo_prorl.schema import Count, Number, Time
from nemo_prorl.service import ServiceEndpoint

RESTART_SUFFIX = ".restart"  # endpoints/engine-K.restart: a request to the supervisor to start this engine again
_POINTS = 60  # of a window; more points cost time and say little more
_LEAST_POINTS = 30
_BLOCKS = 5  # of points, for the interval of a slope; Student's t has a simple formula for four degrees of freedom
_CONFIDENCE = 0.99  # of the interval of a growth that is an alarm: wrong in one of 200 looks
_AHEAD = 5  # times the observed steps are foreseen at most, because memory grows faster at a start
_EVERY = 20  # steps between two looks for growth
_KEPT = 4000  # steps
_KINDS = {"trainer": "rank", "engine": "engine", "rewards": "rewards", "supervisor": "supervisor"}


class ProcessUsage(TypedDict):
    """A process of the run, together with all processes that it started."""

    pid: Number
    resident_bytes: Count
    """resident memory; memory that several processes share counts once for each"""
    proportional_bytes: Count
    """resident memory, with shared memory divided by the number of processes that share it"""
    open_files: Count
    threads: Count


class NodeUsage(TypedDict):
    """A sample of a node."""

    host: str
    time: Time
    free_bytes: Count
    """memory that the processes of this job can still take on the node"""
    shm_bytes: Count
    """memory of the files in /dev/shm, of all programs"""
    run_dir_bytes: Count | None
    """size of the files in the run directory; null on nodes other than node 0"""
    processes: dict[str, ProcessUsage]
    """by name, such as trainer-0, engine-3, rewards-0, supervisor-0"""


def newest(endpoints: Path) -> list[NodeUsage]:
    """Return the newest sample of each node; nodes without a readable sample are left out."""
    return [cast(NodeUsage, sample) for file in sorted(endpoints.glob("usage-*.json")) if (sample := read_object(file))]


def totals(nodes: Sequence[NodeUsage]) -> dict[str, float]:
    """Return the metrics `system/*` of a step, without the prefix; empty without a sample.  GB are 10^9 bytes."""
    if not nodes:
        return {}
    metrics = {
        "free_gb": min(node["free_bytes"] for node in nodes) / 1e9,
        "shm_gb": max(node["shm_bytes"] for node in nodes) / 1e9,
    }
    for node in nodes:
        if (size := node["run_dir_bytes"]) is not None:
            metrics["run_dir_gb"] = size / 1e9
        for name, process in node["processes"].items():
            values = {
                f"{_KINDS[name.rpartition('-')[0]]}_gb": process["proportional_bytes"] / 1e9,
                "open_files": process["open_files"],
                "threads": process["threads"],
            }
            for key, value in values.items():
                metrics[key] = max(metrics.get(key, 0.0), float(value))
    return metrics


def growth(points: Sequence[tuple[float, float]], confidence: float = 0.95) -> tuple[float, float, float]:
    """Return the slope of y over x that the points show, and an interval of it: (slope, least, most).

    The slope is the median of the slopes of all pairs of points (Sen 1968), which single outliers do not move.  Memory
    of one step is like that of the step before, so points are not independent.  The interval therefore comes from five
    blocks of consecutive points: it is Student's, with four degrees of freedom, of the slopes in the blocks.  It covers
    the true slope at least as often as `confidence` says even if memory walks at random.  If the slope lies outside,
    the interval is extended to it.

    Args:
        points: (x, y) with increasing x.

    Returns:
        least and most are infinite if a block has fewer than two different x.
    """
    slope = _slope(points)
    size = len(points) / _BLOCKS
    blocks = [_slope(points[round(k * size) : round((k + 1) * size)]) for k in range(_BLOCKS)]
    if slope is None or None in blocks:
        return slope or 0.0, -math.inf, math.inf
    slopes = [block for block in blocks if block is not None]
    margin = _students_t(confidence) * stdev(slopes) / math.sqrt(_BLOCKS)
    return slope, min(slope, mean(slopes) - margin), max(slope, mean(slopes) + margin)


def _slope(points: Sequence[tuple[float, float]]) -> float | None:
    slopes = [(b[1] - a[1]) / (b[0] - a[0]) for a, b in combinations(points, 2) if b[0] > a[0]]
    return median(slopes) if slopes else None


def _students_t(confidence: float) -> float:
    """Return how many standard errors an interval is wide on each side, for four degrees of freedom (exact)."""
    root = math.sqrt(1.0 - confidence**2)
    return 2.0 * math.sqrt(math.cos(math.acos(root) / 3.0) / root - 1.0)


@dataclass
class GrowthWatch:
    """Finds nodes whose memory will be full before the run ends; one object on rank 0, not saved in checkpoints.

    It looks at the second half of the steps since the node's processes started, and reports each growing process once.
    Engines do not count if `recycles`: they are restarted before they fill the node (`rollout.recycle_gb`).
    """

    recycles: bool = False
    seconds: deque[float] = field(default_factory=lambda: deque(maxlen=_KEPT))
    memory: dict[str, deque[tuple[int, dict[str, int], int]]] = field(default_factory=dict)
    pids: dict[str, set[int]] = field(default_factory=dict)
    reported: set[tuple[str, str]] = field(default_factory=set)

    def observe(self, step: int, seconds: float, nodes: Iterable[NodeUsage], max_steps: int) -> Iterator[str]:
        """Add a step's samples; yield a text for each node that will be full before step `max_steps`.

        Args:
            seconds: duration of the step.
        """
        self.seconds.append(seconds)
        for node in nodes:
            host, processes = node["host"], node["processes"]
            counted = {
                k: process for k, process in processes.items() if not (self.recycles and k.startswith("engine-"))
            }
            if (pids := {process["pid"] for process in counted.values()}) != self.pids.get(host):
                self.pids[host], self.memory[host] = pids, deque(maxlen=_KEPT)
            sizes = {name: process["proportional_bytes"] for name, process in counted.items()}
            self.memory[host].append((step, sizes, node["free_bytes"]))
            if step % _EVERY == 0 and (text := self._finding(host, max_steps - step)):
                yield text

    def _finding(self, host: str, steps_left: int) -> str | None:
        whole = list(self.memory[host])
        seen = whole[len(whole) // 2 :]
        if len(seen) < _LEAST_POINTS:
            return None
        points = seen[:: -(-len(seen) // _POINTS)]
        slope, least, _ = growth([(step, float(sum(sizes.values()))) for step, sizes, _ in points], _CONFIDENCE)
        free = seen[-1][2]
        if least * min(steps_left, _AHEAD * len(whole)) <= free:
            return None
        each = {name: growth([(s, float(sizes.get(name, 0))) for s, sizes, _ in points])[0] for name in points[-1][1]}
        name = max(each, key=lambda name: each[name])
        if (host, name) in self.reported:
            return None
        self.reported.add((host, name))
        hours = free / slope * median(self.seconds) / 3600.0
        return (
            f"{host} uses {slope / 1e6:.3g} MB more with each step, most of it in {name} ({each[name] / 1e6:.3g} MB);"
            f" the {free / 1e9:.3g} GB left are used in {hours:.3g} h. Fix: for an engine set rollout.recycle_gb; for"
            " another process stop the run before that time and continue it"
        )


def request_restart(endpoints: Path, above_bytes: float) -> str | None:
    """Ask the supervisors to restart the largest of the engines that use more memory; return its name, None if none.

    One engine at a time, so that the others go on.  An engine whose sample is of an earlier process is left alone, and
    so are all engines while a request is open.
    """
    if any(endpoints.glob(f"*{RESTART_SUFFIX}")):
        return None
    large = {
        name: process
        for node in newest(endpoints)
        for name, process in node["processes"].items()
        if name.startswith("engine-") and process["proportional_bytes"] > above_bytes
    }
    for name in sorted(large, key=lambda name: -large[name]["proportional_bytes"]):
        endpoint = ServiceEndpoint.read(endpoints / f"{name}.json")
        if endpoint is not None and endpoint.pid == large[name]["pid"]:
            with suppress(OSError):
                (endpoints / f"{name}{RESTART_SUFFIX}").touch()
                return name
    return None
