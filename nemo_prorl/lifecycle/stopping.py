"""When a run should stop before its end: a signal, the end of its job, somebody's request."""

import logging
import os
import signal
import threading
import time
from collections.abc import Callable

from nemo_prorl.config import DeadlinesConfig

_log = logging.getLogger(__name__)

JOB_START = "PRORL_JOB_START"  # when the job began, in seconds since 1970; the supervisor sets it
_STEPS_SPARED = 1.5  # a step more must fit into the job, and half of the longest one for checkpoint and end
_PATIENCE_SPARED = 2.0  # so many times `finish_step_s` before the job's end a step under way is asked to end


class Stopping:
    """Remembers why to stop, and sees to it that a rollout of hours does not outlast the patience of who asked.

    What `abandons` is given is called, from another thread, once `finish_step_s` passed since somebody asked.
    """

    def __init__(self, deadlines: DeadlinesConfig) -> None:
        self._deadlines = deadlines
        self._abandon: Callable[[], None] | None = None
        self._given_up = False
        self._reason: str | None = None
        self._looked: float | None = None  # at the last step's end
        self._longest_step_s = 0.0
        self._end: float | None = None
        if deadlines.job_s is not None:
            self._end = float(os.environ.get(JOB_START) or time.time()) + deadlines.job_s
            seconds = self._end - time.time() - _PATIENCE_SPARED * deadlines.finish_step_s
            _later(seconds, lambda: self.ask(self._out_of_time()))

    def abandons(self, abandon: Callable[[], None]) -> None:
        """What to call when it takes too long."""
        self._abandon = abandon
        if self._given_up:
            abandon()

    def ask(self, reason: str) -> None:
        """To stop after the step under way, or, if that takes too long, without it."""
        if self._reason is not None:
            return
        self._reason = reason
        seconds = self._deadlines.finish_step_s
        _log.warning("%s: stopping after this step, without it if its rollout takes %g s more", reason, seconds)
        _later(seconds, self._give_up)

    def _give_up(self) -> None:
        self._given_up = True
        if self._abandon is not None:
            self._abandon()

    def on_signal(self, number: int, _: object) -> None:
        self.ask(signal.Signals(number).name)

    def reason(self) -> str | None:
        """Between two steps, and before the first: why to stop now, if so."""
        now = time.monotonic()
        self._longest_step_s, self._looked = max(self._longest_step_s, now - (self._looked or now)), now
        end = self._end or float("inf")
        if self._reason is None and end - time.time() < _STEPS_SPARED * self._longest_step_s:
            self._reason = f"{self._out_of_time()}, and a step took up to {self._longest_step_s:.0f} s"
        return self._reason

    def _out_of_time(self) -> str:
        left = (self._end or 0.0) - time.time()
        return f"{left:.0f} s are left of the job (trainer.deadlines.job_s={self._deadlines.job_s:g})"


def _later(seconds: float, what: Callable[[], None]) -> None:
    timer = threading.Timer(max(0.0, seconds), what)
    timer.daemon = True
    timer.start()
