"""Deadlines: every wait has one, and it names what it waits for."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field

from nemo_prorl.errors import DeadlineExceeded


@dataclass(frozen=True)
class Deadline:
    """A point in time after which waiting for `what` is an error.

    `seconds` count from construction, on the monotonic clock.
    """

    seconds: float
    what: str
    _start: float = field(default_factory=time.monotonic, repr=False)

    @property
    def remaining(self) -> float:
        """Seconds left, never below 0."""
        return max(0.0, self._start + self.seconds - time.monotonic())

    @property
    def passed(self) -> bool:
        return self.remaining == 0.0

    def error(self) -> DeadlineExceeded:
        return DeadlineExceeded(f"waited {self.seconds:g} s for {self.what}")

    def check(self) -> None:
        """Raises DeadlineExceeded once the time is over."""
        if self.passed:
            raise self.error()

    def wait_until(self, ready: Callable[[], bool], every: float = 0.05) -> None:
        """Polls `ready` until it is true; raises DeadlineExceeded when the time is over first."""
        while not ready():
            self.check()
            time.sleep(min(every, self.remaining or every))
