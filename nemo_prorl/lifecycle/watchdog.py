"""Tells when a step takes far longer than the steps before, long before a deadline ends the run.

A rank that hangs in a collective, an engine that makes no token and a reward that never comes look alike from outside:
nothing happens.  The watchdog then writes what each rank is doing, so that the culprit can be found while it hangs.
"""

import logging
import sys
import threading
import time
import traceback
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from nemo_prorl.metrics import Metrics

_log = logging.getLogger(__name__)

LEAST_S = 60.0  # shorter waits are never reported
FACTOR = 5.0  # times the longest of the last steps
_REMEMBERED, _LEAST_STEPS = 50, 3


class Watchdog:
    """One object per rank.  It is not saved: after a resume it waits for three steps again.

    Args:
        rank: trainer rank of this process.
        folder: logs folder of the run directory; a late rank writes its stacks to stacks-RANK.txt there.
        alarm: function of a step and a text that raises an alarm; called on rank 0 only.
        least_s: seconds below which a wait is never reported.
    """

    def __init__(self, rank: int, folder: Path, alarm: Callable[[int, str], None], least_s: float = LEAST_S) -> None:
        self._rank, self._folder, self._alarm, self._least_s = rank, folder, alarm, least_s
        self._waiting: Callable[[], str] | None = None
        self._past: deque[float] = deque(maxlen=_REMEMBERED)

    def set_waiting(self, waiting: Callable[[], str]) -> None:
        """Register the function that says what a rollout waits for; rank 0 only."""
        self._waiting = waiting

    @contextmanager
    def step(self, step: int) -> Iterator[None]:
        """Context manager of rollout and updates: reports once if they take 5 times the longest of the last 50 steps.

        Validations and checkpoints do not belong into it: they take longer, and only some steps have them.
        """
        began, timer = time.monotonic(), None
        if len(self._past) >= _LEAST_STEPS:
            limit = max(self._least_s, FACTOR * max(self._past))
            timer = threading.Timer(limit, self._report, (step, limit))
            timer.daemon = True
            timer.start()
        try:
            yield
        finally:
            if timer is not None:
                timer.cancel()
        self._past.append(time.monotonic() - began)

    def _report(self, step: int, limit: float) -> None:
        file, phase = self._folder / f"stacks-{self._rank}.txt", Metrics.current or "none"
        try:
            file.write_text(f"step {step}, phase {phase}, after {limit:.0f} s\n\n{stacks()}")
        except OSError as error:
            _log.warning("%s cannot be written: %s", file, error)
        if self._rank == 0:
            waiting = f"; {self._waiting()}" if phase == "rollout" and self._waiting is not None else ""
            self._alarm(
                step,
                f"no progress for {limit:.0f} s, {FACTOR:g} times the longest of the last steps, in phase"
                f" {phase}{waiting}; what each rank does is in {self._folder}/stacks-*.txt",
            )


def stacks() -> str:
    """Return the stacks of all threads of this process as text."""
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    parts = [
        f"thread {names.get(ident, ident)}\n{''.join(traceback.format_stack(frame))}"
        for ident, frame in sys._current_frames().items()
    ]
    return "\n".join(parts)
