"""One step off: the batch of a step is collected while the previous step trains, by engines with their own devices.

The weights that generate a batch are one step older than those that train on it; `algorithms.correction` corrects for
that.

    step s:  take(s)   begin_next(s + 1)   updates, while engines generate   finish_next()   step s+1:  take is at once
"""

import contextlib
import time
from concurrent.futures import Future
from dataclasses import asdict
from typing import Any

from nemo_prorl.errors import RolloutAbandoned
from nemo_prorl.rollout.collector import Collector, CollectorState, _Before
from nemo_prorl.rollout.groups import CollectedBatch


class OneStepOff(Collector):
    """A collector that may collect the next batch while the current one is trained on.

    Call `finish_next` before any other method, so that nothing runs while a checkpoint is written.  A finished batch
    waits for its step and is part of the state.
    """

    def __init__(self, *arguments: Any, **named: Any) -> None:
        super().__init__(*arguments, **named)
        self._waiting: CollectedBatch | None = None
        self._next: tuple[_Before, Future[CollectedBatch]] | None = None
        self._over: float | None = None  # monotonic time at the end of the collection

    def take(self, step: int, version: int) -> CollectedBatch:
        """Return the batch that waits for this step, or collect one now from these weights."""
        if self._waiting is None:
            return super().take(step, version)
        self._background.check()
        batch, self._waiting = self._waiting, None
        return batch

    def announce(self, path: str, version: int) -> None:
        """Require these weights from all engines before they generate again, while the trainer continues."""
        self._background.run(self._engines.announce(path, version))

    def begin_next(self, step: int, version: int) -> None:
        """Start to collect the batch of the next step, unless one waits.  `finish_next` raises its errors."""
        if self._waiting is None:
            with contextlib.suppress(RolloutAbandoned):
                self._over = None
                self._next = self._begin(step, version)
                self._clock.wait(False)
                self._next[1].add_done_callback(self._note_end)

    def _note_end(self, _: object) -> None:
        self._over = time.monotonic()

    def finish_next(self) -> float:
        """Wait for the collection that was started.  Its batch then waits for its step.

        If the collection was abandoned, the state is as before its start.

        Returns:
            seconds since the end of the collection, in which the engines had no work.
        """
        begun, self._next = self._next, None
        if begun is None:
            return 0.0
        asked = time.monotonic()
        self._clock.wait(True)
        with contextlib.suppress(RolloutAbandoned):
            self._waiting = self._end(begun)
        return max(0.0, asked - (self._over or asked))

    def drop(self) -> None:
        """Discard the waiting batch and the surplus."""
        self._waiting = None
        super().drop()

    def state_dict(self) -> CollectorState:
        return {**super().state_dict(), "waiting": asdict(self._waiting) if self._waiting else None}

    def load_state_dict(self, state: CollectorState) -> None:
        waiting = state.get("waiting")  # absent if the earlier run shared its devices
        self._waiting = None if waiting is None else CollectedBatch.from_json(waiting)
        super().load_state_dict(state)
