"""Early stop of a run: after a signal, near the end of its job, or on a user's request."""

import logging
import math
import os
import signal
import threading
import time
from collections.abc import Callable

from nemo_prorl.config import DeadlinesConfig

_log = logging.getLogger(__name__)

JOB_START = "PRORL_JOB_START"  # start of the job, in seconds since 1970; set by the supervisor
# The signal that tells a rank which signal the supervisor received.  Ctrl-C is not passed on as SIGINT, because Python
# raises KeyboardInterrupt for SIGINT while a rank still imports its modules.  SIGUSR1 is blocked in a rank, because
# Slurm sends it to all processes of a task (`launcher.processes`).  No program gives the other two another meaning.
FORWARDED_AS: dict[signal.Signals, int] = {
    signal.SIGTERM: signal.SIGTERM,
    signal.SIGINT: signal.SIGRTMIN,
    signal.SIGUSR1: signal.SIGRTMIN + 1,
}
_NAMES = {signal.SIGTERM: "SIGTERM", signal.SIGRTMIN: "SIGINT (Ctrl-C)", signal.SIGRTMIN + 1: "SIGUSR1"}
_STEPS_RESERVED = 1.5  # longest steps that must fit before the job's end: one step, and half for checkpoint and exit
_FINISH_RESERVED = 2.0  # the stop request comes this many times `finish_step_s` before the job's end


class Stopping:
    """Keeps the stop request of a run, and abandons a rollout that takes too long after the request.

    `finish_step_s` seconds after the request, another thread calls the function that `set_abandon` has registered.
    """

    def __init__(self, deadlines: DeadlinesConfig) -> None:
        self._deadlines = deadlines
        self._abandon: Callable[[], None] | None = None
        self._is_overdue = False
        self._reason: str | None = None
        self._last_step_end: float | None = None  # on the monotonic clock
        self._longest_step_s = 0.0
        self._end = math.inf  # of the job, in seconds since 1970
        if deadlines.job_s is not None:
            self._end = float(os.environ.get(JOB_START) or time.time()) + deadlines.job_s
            seconds = self._end - time.time() - _FINISH_RESERVED * deadlines.finish_step_s
            _later(seconds, lambda: self.request_stop(self._out_of_time()))

    def set_abandon(self, abandon: Callable[[], None]) -> None:
        """Register the function that abandons the current rollout; if time is up, call it now."""
        self._abandon = abandon
        if self._is_overdue:
            abandon()

    def request_stop(self, reason: str, level: int = logging.WARNING) -> None:
        """Request a stop after the current step, or earlier if its rollout takes too long.

        Only the first request of a run has an effect.  `level` is the level of its log message.
        """
        if self._reason is not None:
            return
        self._reason = reason
        seconds = self._deadlines.finish_step_s
        text = "%s: the run stops after this step; a rollout longer than %g s more is abandoned"
        _log.log(level, text, reason, seconds)
        _later(seconds, self._abandon_rollout)

    def _abandon_rollout(self) -> None:
        self._is_overdue = True
        if self._abandon is not None:
            self._abandon()

    def on_signal(self, number: int, _: object) -> None:
        self.request_stop(_NAMES[number], logging.DEBUG)  # the supervisor has logged the signal

    def reason(self) -> str | None:
        """Return the reason to stop now, or None.

        Call it before the first step and after each step, because it measures the length of steps.
        """
        now = time.monotonic()
        step_s, self._last_step_end = now - (self._last_step_end or now), now
        self._longest_step_s = max(self._longest_step_s, step_s)
        if self._reason is None and self._end - time.time() < _STEPS_RESERVED * self._longest_step_s:
            self._reason = f"{self._out_of_time()}, and a step took up to {self._longest_step_s:.0f} s"
        return self._reason

    def _out_of_time(self) -> str:
        left = self._end - time.time()
        return f"{left:.0f} s are left of the job (trainer.deadlines.job_s={self._deadlines.job_s:g})"


def _later(seconds: float, function: Callable[[], None]) -> None:
    timer = threading.Timer(max(0.0, seconds), function)
    timer.daemon = True
    timer.start()
