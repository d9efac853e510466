"""When a run should stop before its end: a signal, the end of its job, somebody's request."""

import logging
import os
import signal
import threading
import time
from collections.abc import Callable

from nemo_prorl.config import DeadlinesConfig

_log = logging.getLogger(__name__)

_STEPS_SPARED = 1.5  # a step more must fit into the job, and half of the longest one for checkpoint and end


class Stopping:
    """Remembers why to stop, and sees to it that a rollout of hours does not outlast the patience of who asked.

    `abandon` is called, from another thread, once `finish_step_s` passed since the signal: by then the step is in its
    updates, or it still generates.  PRORL_JOB_START: when the job began, in seconds since 1970; else this process did.
    """

    def __init__(self, deadlines: DeadlinesConfig) -> None:
        self.abandon: Callable[[], None] = _nothing
        self._deadlines = deadlines
        self._reason: str | None = None
        self._job_start = float(os.environ.get("PRORL_JOB_START") or time.time())
        self._looked: float | None = None  # at the last step's end
        self._longest_step_s = 0.0

    def ask(self, reason: str) -> None:
        """To stop after the step under way, or, if that takes too long, without it."""
        if self._reason is not None:
            return
        self._reason = reason
        seconds = self._deadlines.finish_step_s
        _log.warning("%s: stopping after this step, without it if its rollout takes %g s more", reason, seconds)
        timer = threading.Timer(seconds, self._give_up)
        timer.daemon = True
        timer.start()

    def _give_up(self) -> None:
        self.abandon()  # as it is by then

    def on_signal(self, number: int, _: object) -> None:
        self.ask(signal.Signals(number).name)

    def reason(self) -> str | None:
        """Between two steps: why to stop now, if so."""
        now = time.monotonic()
        self._longest_step_s, self._looked = max(self._longest_step_s, now - (self._looked or now)), now
        if self._reason is None and self._deadlines.job_s is not None:
            left = self._job_start + self._deadlines.job_s - time.time()
            if left < _STEPS_SPARED * self._longest_step_s:
                self._reason = (
                    f"{left:.0f} s are left of the job (trainer.deadlines.job_s={self._deadlines.job_s:g}), and a step"
                    f" took up to {self._longest_step_s:.0f} s"
                )
        return self._reason


def _nothing() -> None:
    """Before there are rollouts to give up."""
