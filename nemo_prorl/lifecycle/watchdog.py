"""Tells when a step, validation or checkpoint takes far longer than those before, long before a deadline ends the run.

A rank that hangs in a collective, an engine that makes no token and a reward that never comes look alike from outside:
nothing happens.  The watchdogs of all ranks then say where their rank is, the alarm of rank 0 names the culprit, and
the supervisors write the stacks of all processes while they hang (`nemo_prorl.stacks`).
"""

import json
import logging
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from types import FrameType

import nemo_prorl
from nemo_prorl import stacks
from nemo_prorl.files import write_json
from nemo_prorl.metrics import Metrics

_log = logging.getLogger(__name__)

LEAST_S = 60.0  # shorter waits are never reported
FACTOR = 5.0  # times the longest of the last ones
_REMEMBERED, _LEAST = 50, 3
_LISTEN = 0.1  # share of the limit, 5 s at least, that rank 0 waits for the other ranks: their limits differ a little
_SHOWN = 5  # groups of ranks in the alarm
_PACKAGE = str(Path(nemo_prorl.__file__).parent)


@dataclass(frozen=True)
class Whereabouts:
    """The place of a rank that takes too long: the phase, and the functions of its main thread.

    Attributes:
        phase: phase of the step; outside of a phase "validation", "reset" or "checkpoint".
        waits: whether the rank waits for other ranks in a collective.
    """

    step: int
    phase: str
    place: str
    waits: bool

    @classmethod
    def now(cls, step: int, phase: str) -> "Whereabouts":
        """Return the whereabouts of this rank; `phase`: if Metrics has none.  Any thread may call this."""
        frame = sys._current_frames().get(threading.main_thread().ident or 0)
        waits = frame is not None and "/torch/distributed/" in frame.f_code.co_filename
        inner = _where(frame)
        while frame is not None and not frame.f_code.co_filename.startswith(_PACKAGE):
            frame = frame.f_back
        own = _where(frame)
        return cls(step, Metrics.current or phase, inner if own in ("", inner) else f"{own} > {inner}", waits)


def _where(frame: FrameType | None) -> str:
    return "" if frame is None else f"{frame.f_code.co_name} ({Path(frame.f_code.co_filename).name}:{frame.f_lineno})"


@dataclass(eq=False, repr=False)
class Watchdog:
    """One object per rank.  It is not saved: after a resume it waits for three steps, validations and so on again."""

    rank: int
    ranks: int
    dir: Path  # the run directory; a late rank writes endpoints/late-RANK.json
    alarm: Callable[[int, str], None]  # raises an alarm with a step and a text; called on rank 0 only
    least_s: float = LEAST_S  # seconds below which a wait is never reported

    def __post_init__(self) -> None:
        self._waiting: Callable[[], str] | None = None
        self._past: dict[str, deque[float]] = {}  # seconds, by `what`

    def set_waiting(self, waiting: Callable[[], str]) -> None:
        """Register the function that says what a rollout waits for; rank 0 only."""
        self._waiting = waiting

    @contextmanager
    def watch(self, step: int, work: str = "step") -> Iterator[None]:
        """Context manager that reports once if it takes 5 times the longest of the last 50 with the same `work`.

        Args:
            work: "step" for rollout and updates, "validation", "reset" or "checkpoint".
        """
        past = self._past.setdefault(work, deque(maxlen=_REMEMBERED))
        began, timer = time.monotonic(), None
        if len(past) >= _LEAST:
            limit = max(self.least_s, FACTOR * max(past))
            timer = threading.Timer(limit, self._report, (step, work, limit))
            timer.daemon = True
            timer.start()
        try:
            yield
        finally:
            if timer is not None:
                timer.cancel()
        past.append(time.monotonic() - began)

    def _report(self, step: int, work: str, limit: float) -> None:
        stacks.request()
        own = Whereabouts.now(step, work)
        if self.rank > 0:
            try:
                write_json(self._file(self.rank), asdict(own))
            except OSError as error:
                _log.warning("%s cannot be written: %s", self._file(self.rank), error)
            return
        generates = own.phase in ("rollout", "validate") and not own.waits
        waiting = self._waiting() if self._waiting is not None and generates else ""
        where = {0: own, **self._others(step, max(5.0, _LISTEN * limit))}
        self.alarm(
            step,
            f"no progress for {limit:.0f} s, {FACTOR:g} times the longest of the last {work}s:"
            f" {'; '.join(filter(None, (waiting, *culprits(where, self.ranks))))};"
            f" the stacks of all processes are in {self.dir}/logs/stacks-*.txt",
        )

    def _file(self, rank: int) -> Path:
        return self.dir / "endpoints" / f"late-{rank}.json"

    def _others(self, step: int, seconds: float) -> dict[int, Whereabouts]:
        """Return the whereabouts of the other ranks that have reported them within `seconds`."""
        reports: dict[int, Whereabouts] = {}
        end = time.monotonic() + seconds
        while True:
            for rank in sorted(set(range(1, self.ranks)) - reports.keys()):
                with suppress(OSError, ValueError, TypeError):
                    value = Whereabouts(**json.loads(self._file(rank).read_text()))
                    reports |= {rank: value} if value.step == step else {}
            if len(reports) == self.ranks - 1 or time.monotonic() > end:
                return reports
            time.sleep(0.2)


def culprits(where: Mapping[int, Whereabouts], ranks: int) -> list[str]:
    """Describe the ranks: first those that the others may be waiting for, last those that wait.

    Args:
        where: by rank; a rank that has not reported is absent.
        ranks: number of all ranks.
    """
    groups: dict[tuple[bool, str], list[int]] = {}
    for rank, late in sorted(where.items()):
        does = (
            f"waiting for other ranks in phase {late.phase}" if late.waits else f"in phase {late.phase}, {late.place}"
        )
        groups.setdefault((late.waits, does), []).append(rank)
    ordered = sorted(groups.items(), key=lambda group: (group[0][0], len(group[1])))
    texts = [(waits, f"{_ranks(members)}: {does}") for (waits, does), members in ordered]
    if silent := sorted(set(range(ranks)) - where.keys()):
        texts.append((False, f"{_ranks(silent)}: no report, so hanging in native code or not in this step"))
    return [text for _, text in sorted(texts, key=lambda text: text[0])][:_SHOWN]


def _ranks(members: list[int]) -> str:
    if len(members) == 1:
        return f"rank {members[0]}"
    return f"ranks {', '.join(map(str, members[:4]))}" + (f" and {len(members) - 4} others" if len(members) > 4 else "")
