"""Records spans of work in each process while a step is traced, and merges them into one timeline of the step.

The timeline is in Chrome's trace-event format, which Perfetto (ui.perfetto.dev) and chrome://tracing open.  Each
process records its spans on its own monotonic clock, and `timeline` moves them to one time axis.  Processes of the same
boot of a machine share the monotonic clock; spans of other machines are shifted by their wall clock's measured offset.

This file uses the standard library only, because the rollout engine imports it in another environment.  While no trace
is recorded, a span costs one check of a flag.
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
    """A span; times are in microseconds since the start of the step."""

    ph: Literal["X"]
    name: Text
    cat: Literal["step", "phase", "publication", "responses", "weights", "judgements", "logprobs"]
    pid: int
    tid: Count
    ts: float
    dur: Amount
    args: dict[str, Any]


class NameEvent(TypedDict):
    """The name of a process, or the name or position of one of its rows in the timeline (Chrome's threads)."""

    ph: Literal["M"]
    name: Literal["process_name", "thread_name", "thread_sort_index"]
    pid: int
    tid: Count
    ts: float
    args: dict[str, Any]


class TraceAbout(TypedDict):
    """The step and the processes of a timeline, and what the timeline lacks."""

    step: Number
    seconds: Amount
    """duration of the step"""
    processes: list[str]
    """names of the processes in the timeline"""
    missing: dict[str, str]
    """reason for each process whose part is not in the trace"""
    clock_offset_s: dict[str, float]
    """by host: seconds by which its clock was ahead of rank 0's; already subtracted from the times"""
    dropped: dict[str, Number]
    """by process: number of spans that were not recorded because the process had reached its limit"""


class Timeline(TypedDict):
    """The timeline of a step: the object form of Chrome's trace-event format."""

    traceEvents: Annotated[list[SpanEvent | NameEvent], Constraint(minItems=1)]
    displayTimeUnit: Literal["ms"]
    otherData: TraceAbout


MAX_SPANS = 200_000  # per process, so that a trace that is never collected does not fill the memory


def boot_id() -> str:
    """Return an id of this machine's current boot: processes with the same id share CLOCK_MONOTONIC."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return socket.gethostname()


@dataclass
class Recorder:
    """The recorder of one process's spans.  Safe to call from any thread.

    A span has a name, a category, begin and end (`time.monotonic`) and arguments.  `on`: whether spans are being
    recorded.  `dropped`: number of spans that were not recorded because there were already MAX_SPANS.
    """

    process: str = ""
    on: bool = False
    dropped: int = 0
    _spans: list[dict[str, Any]] = field(default_factory=list)
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def start(self, process: str) -> None:
        """Discard all spans and start recording under this process name."""
        with self._lock:
            self.process = process
            self.on = True
            self.dropped = 0
            self._spans = []

    def add(
        self, name: str, category: str, begin: float, end: float, pid: int | None = None, other: str = "", **args: Any
    ) -> None:
        """Record a span that has ended.

        Args:
            pid: id of the process that did the work, such as a worker process; None: this process.
            other: name of the process `pid`.
        """
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
        """Record the body as a span, even if it raises."""
        began = time.monotonic()
        try:
            yield
        finally:
            self.add(name, category, began, time.monotonic(), **args)

    def stop(self) -> dict[str, Any]:
        """Stop recording and return this process's part of the trace as a JSON object.

        `clock` and `wall` in it are the current times of the monotonic and of the wall clock.
        """
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
    """Start or stop recording on a service's request, and return the reply.

    Args:
        body: {"record": true} starts the recording; {"record": false} stops it and returns the spans.
        process: name of this process in the trace.

    Raises:
        ValueError: any other body.
    """
    if not isinstance(body, dict) or not isinstance(body.get("record"), bool):
        raise ValueError('the body must be {"record": true} or {"record": false}')
    if not body["record"]:
        return RECORDER.stop()
    RECORDER.start(process)
    return {"process": process}


def lanes(spans: Sequence[tuple[float, float]]) -> list[int]:
    """Return a lane number for each span, so that spans of a lane do not overlap; `spans` must be sorted by begin."""
    free: list[int] = []
    busy: list[tuple[float, int]] = []
    numbers = []
    for begin, end in spans:
        while busy and busy[0][0] <= begin:
            heapq.heappush(free, heapq.heappop(busy)[1])
        lane = heapq.heappop(free) if free else len(busy)
        heapq.heappush(busy, (end, lane))
        numbers.append(lane)
    return numbers


def timeline(
    step: int, window: tuple[float, float], parts: Sequence[dict[str, Any]], missing: dict[str, str]
) -> Timeline:
    """Merge the parts that processes returned from `Recorder.stop` into one trace.

    Spans that ended before the window or began after it are left out.  Times in the trace are microseconds since the
    start of the window.

    Args:
        window: begin and end of the step, on the monotonic clock of the first part's process.
        parts: `wall_offset` of a part is the number of seconds by which its wall clock is ahead of the first part's;
            `others` is a list of (pid, name) of processes to show even if they have no spans.
        missing: reason for each process whose part is not there.
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
            "clock_offset_s": clocks,
            "dropped": {part["process"]: part["dropped"] for part in parts if part["dropped"]},
        },
    }


def _events_of(pid: int, name: str, spans: list[dict[str, Any]], shift: float) -> list[SpanEvent | NameEvent]:
    """Return the events of one process: its name, its rows in the timeline, and its spans.

    A category has one row, or several rows (lanes) if its spans overlap.  `shift`: seconds added to all times.
    """
    events: list[SpanEvent | NameEvent] = [
        {"ph": "M", "name": "process_name", "pid": pid, "tid": 0, "ts": 0, "args": {"name": name}}
    ]
    rows: list[str] = []
    for category in sorted({span["cat"] for span in spans}):
        in_category = sorted((s for s in spans if s["cat"] == category), key=lambda s: (s["begin"], -s["end"]))
        lane_of = lanes([(s["begin"], s["end"]) for s in in_category])
        for span, lane in zip(in_category, lane_of, strict=True):
            events.append(
                {
                    "ph": "X",
                    "name": span["name"],
                    "cat": category,
                    "pid": pid,
                    "tid": len(rows) + lane,
                    "ts": round(1e6 * (span["begin"] + shift), 3),
                    "dur": round(1e6 * (span["end"] - span["begin"]), 3),
                    "args": span["args"],
                }
            )
        count = max(lane_of) + 1
        rows += [category] if count == 1 else [f"{category} {lane}" for lane in range(count)]
    for tid, label in enumerate(rows):
        row: NameEvent = {"ph": "M", "name": "thread_name", "pid": pid, "tid": tid, "ts": 0, "args": {"name": label}}
        events += [row, {**row, "name": "thread_sort_index", "args": {"sort_index": tid}}]
    return events
