"""Deadlines: a time limit for every wait.  The error of a missed deadline names the awaited thing."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field

from nemo_prorl.errors import DeadlineExceeded


@dataclass
class Deadline:
    """A time limit in seconds, counted on the monotonic clock from construction or from the last progress.

    `what` names the awaited thing in the error, such as "the engines to start".
    """

    seconds: float
    what: str
    _start: float = field(default_factory=time.monotonic, repr=False)

    @property
    def remaining(self) -> float:
        """Return the seconds left, never below 0."""
        return max(0.0, self._start + self.seconds - time.monotonic())

    @property
    def passed(self) -> bool:
        return self.remaining == 0.0

    def progressed(self, at: float) -> None:
        """Count the limit from `at`, when the awaited work made progress (monotonic seconds).

        The limit is unchanged if it counts from a later time already.
        """
        self._start = max(self._start, at)

    def error(self) -> DeadlineExceeded:
        return DeadlineExceeded(f"waited {self.seconds:g} s for {self.what}")

    def check(self) -> None:
        """Raise DeadlineExceeded if the time is over."""
        if self.passed:
            raise self.error()

    def wait_until(self, ready: Callable[[], bool], every: float = 0.05) -> None:
        """Poll `ready` every `every` seconds until it returns true; raise DeadlineExceeded if the time ends first."""
        while not ready():
            self.check()
            time.sleep(min(every, self.remaining or every))
