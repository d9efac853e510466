"""Where a step's batch comes from: collected when the step asks for it, or while the step before it trained.

One step off, the weights that make a batch are one step older than those that train on it
(`algorithms.correction` makes up for it), and engines and trainer work at the same time.
"""

import contextlib
import queue
import time
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any, Protocol

from nemo_prorl.errors import RolloutAbandoned
from nemo_prorl.rollout.collected import CollectedBatch, Group
from nemo_prorl.rollout.groups import Rollouts
from nemo_prorl.rollout.load import Load

_GRACE_S = 60.0  # after a collection's own deadline


class Place(Protocol):
    """Of the prompt stream: where it stands."""

    def position(self) -> list[tuple[int, int]]: ...
    def return_to(self, position: list[tuple[int, int]]) -> None: ...


@dataclass
class _Begun:
    """A collection under way: where its prompts begin, the blocks that it found, and when it was over (monotonic)."""

    position: list[tuple[int, int]]
    aside: contextlib.ExitStack = field(default_factory=contextlib.ExitStack)  # open while nobody waits for it
    ready: "queue.SimpleQueue[list[Group] | None]" = field(default_factory=queue.SimpleQueue)  # None: it is over
    over: float | None = None

    def end(self, _: object) -> None:
        self.over = time.monotonic()
        self.ready.put(None)


class Supply:
    """The batches of a run, in order of steps.  On rank 0 only.

    `take` a step's batch; before that `begin` it and use what is `ready`, or, one step off, after that `begin` the next
    one's.  What was begun is to `finish` before anything else is asked of the rollouts: so nothing is under way where a
    checkpoint is written.  A batch that is finished waits for its step, and belongs to the state.
    """

    def __init__(self, rollouts: Rollouts, prompts: Place, load: Load) -> None:
        self._rollouts, self._prompts, self._load = rollouts, prompts, load
        self._waiting: CollectedBatch | None = None
        self._begun: _Begun | None = None

    def take(self, step: int, version: int) -> CollectedBatch:
        """The batch that waits for this step; without one it is collected now, from these weights.

        Raises RolloutAbandoned, with everything as it was before, after somebody gave the rollouts up.
        """
        if self._waiting is None:
            return self._end(self._begin(step, version))
        if self._rollouts.abandoned:
            raise RolloutAbandoned("the rollouts were given up before this step began")
        batch, self._waiting = self._waiting, None
        return batch

    def begin(self, step: int, version: int, aside: bool = False) -> None:
        """Starts to collect the batch of a step, unless it waits; what goes wrong with it `finish` says.

        `aside`: until then the trainer makes its updates, and nothing waits for this batch's rewards.
        """
        if self._waiting is None:
            with contextlib.suppress(RolloutAbandoned):
                self._begun = self._begin(step, version)
                if aside:
                    self._begun.aside.enter_context(self._rollouts.elsewhere())

    def ready(self) -> list[list[Group]]:
        """Blocks of groups that the trainer can begin with, new since the last call (`Rollouts.collect`).  Waits for
        one; without any what was begun is over."""
        if self._begun is None:
            return []
        try:  # a collection ends by its own deadlines; had its thread died, `finish` says so
            found = [self._begun.ready.get(timeout=self._rollouts.settings.longest_collection_s + _GRACE_S)]
        except queue.Empty:
            return []
        while not self._begun.ready.empty():
            found.append(self._begun.ready.get())
        return [] if None in found else [block for block in found if block is not None]

    def training(self) -> AbstractContextManager[None]:
        """Inside, the trainer works on what was `ready`."""
        return self._rollouts.training()

    def finish(self) -> float:
        """Waits for what was begun, whose batch from then on waits for its step.  If somebody gave it up, all is as if
        it had never begun.

        Returns the seconds since its end, in which the engines had nothing to do.
        """
        begun, self._begun = self._begun, None
        if begun is None:
            return 0.0
        asked = time.monotonic()
        begun.aside.close()
        with contextlib.suppress(RolloutAbandoned):
            self._waiting = self._end(begun)
        return max(0.0, asked - (begun.over or asked))

    def _begin(self, step: int, version: int) -> _Begun:
        begun = _Begun(self._prompts.position())
        self._load.begin()
        self._rollouts.begin(step, version, begun.ready.put).add_done_callback(begun.end)
        return begun

    def _end(self, begun: _Begun) -> CollectedBatch:
        try:
            batch = self._rollouts.end()
        except RolloutAbandoned:
            self._prompts.return_to(begun.position)
            raise
        batch.load = self._load.end(begun.over)
        return batch

    def drop(self) -> None:
        """What waits, and what was left over, is not trained on."""
        self._waiting = None
        self._rollouts.drop_surplus()

    def state_dict(self) -> dict[str, Any]:
        """For a checkpoint, when nothing is under way: JSON, exact."""
        waiting = None if self._waiting is None else self._waiting.to_json()
        return {**self._rollouts.state_dict(), "waiting": waiting}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        waiting = state.get("waiting")  # a checkpoint from before there was such a thing has none
        self._waiting = None if waiting is None else CollectedBatch.from_json(waiting)
        self._rollouts.load_state_dict(state)
