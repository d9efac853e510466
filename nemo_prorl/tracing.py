"""Spans of what a process does, recorded while a step is traced, and one timeline of all processes of that step.

The timeline is in Chrome's trace-event format, which Perfetto (ui.perfetto.dev) and chrome://tracing open.  Every
process keeps its own spans, on its monotonic clock; whoever merges them puts them on one time axis: processes of one
boot of one machine share the clock, others are placed by the offset of their wall clock, which was measured.

Standard library only: the rollout engine records here, too, in its own environment.  While nothing is traced, a span
costs a look at one flag.
"""

import contextlib
import heapq
import os
import socket
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Literal, TypedDict

from nemo_prorl.schema import Amount, Constraint, Count, Number, Text


class SpanEvent(TypedDict):
    """A span, in microseconds from the step's begin."""

    ph: Literal["X"]
    name: Text
    cat: Literal["step", "phase", "publication", "responses", "weights", "judgements", "logprobs"]
    pid: int
    tid: Count
    ts: float
    dur: Amount
    args: dict[str, Any]


class NameEvent(TypedDict):
    """The name of a process or of a track, or the place of a track."""

    ph: Literal["M"]
    name: Literal["process_name", "thread_name", "thread_sort_index"]
    pid: int
    tid: Count
    ts: float
    args: dict[str, Any]


class TraceAbout(TypedDict):
    """What a timeline holds."""

    step: Number
    seconds: Amount
    processes: list[str]
    missing: dict[str, str]
    """processes whose part is not in the trace, with the reason"""
    clock_offset_s: dict[str, float]
    """by host: how far its clock was ahead of rank 0's; taken out"""
    dropped: dict[str, Number]
    """by process: spans beyond those that it keeps"""


class Timeline(TypedDict):
    """The timeline of a step in Chrome's trace-event format, the object form."""

    traceEvents: Annotated[list[SpanEvent | NameEvent], Constraint(minItems=1)]
    displayTimeUnit: Literal["ms"]
    otherData: TraceAbout


MAX_SPANS = 200_000  # of a process: a trace that was never asked for again must not fill the memory


def boot_id() -> str:
    """Return a name of the machine and its boot: processes with the same name share CLOCK_MONOTONIC."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return socket.gethostname()


@dataclass
class Recorder:
    """The spans of one process.  Safe to call from any thread.

    A span: name, category, begin and end (`time.monotonic`), lane (what runs at the same time stands in several), and
    arguments.  `other` names another process that this one speaks for, such as a worker.
    """

    process: str = ""
    on: bool = False
    dropped: int = 0
    _spans: list[dict[str, Any]] = field(default_factory=list)
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def start(self, process: str) -> None:
        """Forgets what was recorded, and records from now on under this process name."""
        with self._lock:
            self.process, self.on, self.dropped, self._spans = process, True, 0, []

    def add(
        self, name: str, category: str, begin: float, end: float, pid: int | None = None, other: str = "", **args: Any
    ) -> None:
        """A span that has ended.  `pid` and `other`: of the process that did it, where that is not this one."""
        if not self.on:
            return
        span = {"name": name, "cat": category, "begin": begin, "end": max(begin, end), "args": args}
        if pid is not None:
            span |= {"pid": pid, "process": other}
        with self._lock:
            if len(self._spans) < MAX_SPANS:
                self._spans.append(span)
            else:
                self.dropped += 1

    @contextlib.contextmanager
    def span(self, name: str, category: str, **args: Any) -> Iterator[None]:
        """Records what happens inside; also when it raises."""
        began = time.monotonic()
        try:
            yield
        finally:
            self.add(name, category, began, time.monotonic(), **args)

    def stop(self) -> dict[str, Any]:
        """Ends the recording: this process's part of the trace, JSON; `clock` and `wall` are now, on both clocks."""
        with self._lock:
            self.on, spans, self._spans = False, self._spans, []
        return {
            "process": self.process,
            "pid": os.getpid(),
            "host": socket.gethostname(),
            "boot": boot_id(),
            "clock": time.monotonic(),
            "wall": time.time(),
            "dropped": self.dropped,
            "spans": spans,
        }


RECORDER = Recorder()


def answer(body: Any, process: str) -> dict[str, Any]:
    """Return the reply of a service to {"record": true} or {"record": false}; ValueError for anything else."""
    if not isinstance(body, dict) or not isinstance(body.get("record"), bool):
        raise ValueError('the body must be {"record": true} or {"record": false}')
    if not body["record"]:
        return RECORDER.stop()
    RECORDER.start(process)
    return {"process": process}


def lanes(spans: Sequence[tuple[float, float]]) -> list[int]:
    """Return a lane for each span, in order of their begin: the first that is free then."""
    free: list[int] = []
    busy: list[tuple[float, int]] = []
    found = []
    for begin, end in spans:
        while busy and busy[0][0] <= begin:
            heapq.heappush(free, heapq.heappop(busy)[1])
        lane = heapq.heappop(free) if free else len(busy)
        heapq.heappush(busy, (end, lane))
        found.append(lane)
    return found


def timeline(
    step: int, window: tuple[float, float], parts: Sequence[dict[str, Any]], missing: dict[str, str]
) -> Timeline:
    """Merge the parts into one trace.  `window` and the time axis go by the clock of the first part's process.

    A part may carry `wall_offset`, seconds by which its wall clock is ahead of the first's, as its asker measured it.
    What ended before the window or began after it is left out; times are microseconds from the window's begin.
    """
    first = parts[0]
    events: list[SpanEvent | NameEvent] = []
    processes: dict[int, str] = {}
    numbers: dict[tuple[str, int], int] = {}
    clocks: dict[str, float] = {}
    for part in parts:
        shift = 0.0
        if part["boot"] != first["boot"]:
            offset = part.get("wall_offset", 0.0)
            clocks[part["host"]] = offset
            shift = (part["wall"] - part["clock"] - offset) - (first["wall"] - first["clock"])
        by_process: dict[tuple[int, str], list[dict[str, Any]]] = {(part["pid"], part["process"]): []}
        by_process |= {(pid, name): [] for pid, name in part.get("others", ())}
        for span in part["spans"]:
            owner = (span.get("pid", part["pid"]), span.get("process", part["process"]))
            if span["end"] + shift >= window[0] and span["begin"] + shift <= window[1]:
                by_process.setdefault(owner, []).append(span)
        for (pid, name), spans in by_process.items():
            number = numbers.setdefault((part["boot"], pid), pid if pid not in processes else 10**7 + len(numbers))
            processes[number] = name
            events += _events_of(number, f"{name} ({part['host']})", spans, shift - window[0])
    return {
        "traceEvents": events,
        "displayTimeUnit": "ms",
        "otherData": {
            "step": step,
            "seconds": round(window[1] - window[0], 6),
            "processes": sorted(processes.values()),
            "missing": missing,
            "clock_offset_s": clocks,  # by host: how far its wall clock was ahead; taken out
            "dropped": {part["process"]: part["dropped"] for part in parts if part["dropped"]},
        },
    }


def _events_of(pid: int, name: str, spans: list[dict[str, Any]], shift: float) -> list[SpanEvent | NameEvent]:
    """Return a process's events: its name, a track for each category and lane, and its spans."""
    events: list[SpanEvent | NameEvent] = [
        {"ph": "M", "name": "process_name", "pid": pid, "tid": 0, "ts": 0, "args": {"name": name}}
    ]
    tid = 0
    for category in sorted({span["cat"] for span in spans}):
        ours = sorted((s for s in spans if s["cat"] == category), key=lambda s: (s["begin"], -s["end"]))
        lane_of = lanes([(s["begin"], s["end"]) for s in ours])
        count = max(lane_of) + 1
        for lane in range(count):
            label = category if count == 1 else f"{category} {lane}"
            track: NameEvent = {
                "ph": "M",
                "pid": pid,
                "tid": tid + lane,
                "ts": 0,
                "name": "thread_name",
                "args": {"name": label},
            }
            events += [track, {**track, "name": "thread_sort_index", "args": {"sort_index": tid + lane}}]
        for span, lane in zip(ours, lane_of, strict=True):
            events.append(
                {
                    "ph": "X",
                    "name": span["name"],
                    "cat": category,
                    "pid": pid,
                    "tid": tid + lane,
                    "ts": round(1e6 * (span["begin"] + shift), 3),
                    "dur": round(1e6 * (span["end"] - span["begin"]), 3),
                    "args": span["args"],
                }
            )
        tid += count
    return events
