"""Sleep of an engine: it releases its device memory for the trainer and takes it back before the next rollout.

    awake --sleep--> asleep --wake weights--> weights without KV cache --load--> --wake kv_cache--> awake

vLLM's sleep mode: level 1 keeps the weights in host memory, level 2 drops them; both drop the KV cache.  After level 2
nothing is generated until weights are loaded.  vLLM's CPU build accepts the same calls, stops and resumes its
scheduler, and keeps its memory; its replies have `frees_memory` false.

Runs in the rollout environment.  Importing this module imports neither torch nor vLLM.
"""

import contextlib
import logging
import os
import time
from collections.abc import Sequence
from typing import Any

from nemo_prorl.rollout.engine.requests import PARTS, BadRequest

_log = logging.getLogger(__name__)

HOLD_FILE = "engines-asleep"  # name of the hold file, which exists in the endpoint folder while the engines sleep
HELD_SUFFIX = ".held"  # suffix of the file of an engine that waits for the hold file
_POLL_S = 0.2


class Refused(RuntimeError):
    """A valid request that the state of the engine does not allow now.  The reply has HTTP status 409."""


class EngineSleep:
    """Puts an engine to sleep and wakes it, and records which of its parts are asleep.

    Args:
        enabled: whether the engine was started with --sleep.
        frees_memory: whether this build of vLLM can release memory (a CPU build cannot).
    """

    def __init__(self, engine: Any, enabled: bool, frees_memory: bool) -> None:
        self.engine, self.enabled, self.frees_memory = engine, enabled, frees_memory
        self.level = 0  # level of the current or last sleep
        self.asleep: tuple[str, ...] = ()
        self.weights_lost = False  # True after a sleep at level 2, until weights are loaded

    @property
    def refusal(self) -> str | None:
        """Return why no response can be generated now, or None."""
        if self.asleep:
            return f"the engine is asleep (level {self.level}: {', '.join(self.asleep)}); wake it first"
        if self.weights_lost:
            return "the engine has no weights after a sleep at level 2; load weights first"
        return None

    async def fall_asleep(self, level: int) -> dict[str, Any]:
        """Put the engine to sleep and return its state, with the freed bytes.  No response may be in flight.

        Raises Refused if the engine sleeps at another level or is partly awake, BadRequest if it cannot sleep.
        """
        if not self.enabled:
            raise BadRequest("this engine was started without --sleep.  Fix: set rollout.sleep, or add --sleep")
        if self.asleep and (self.level != level or self.asleep != PARTS):
            raise Refused(f"the engine is asleep at level {self.level} ({', '.join(self.asleep)}); wake it first")
        if self.asleep:
            return self.state()
        began, free = time.monotonic(), await self._free_bytes()
        self.level, self.asleep, self.weights_lost = level, PARTS, level == 2 or self.weights_lost
        await self.engine.sleep(level)
        freed = await self._free_bytes() - free
        return {**self.state(), "freed_bytes": freed, "seconds": round(time.monotonic() - began, 4)}

    async def wake(self, parts: Sequence[str]) -> dict[str, Any]:
        """Take back the device memory of these parts and return the state.  Parts that are awake do not change."""
        began = time.monotonic()
        if due := [part for part in self.asleep if part in parts]:
            await self.engine.wake_up(due)
            self.asleep = tuple(part for part in self.asleep if part not in due)
        return {**self.state(), "seconds": round(time.monotonic() - began, 4)}

    def state(self) -> dict[str, Any]:
        """Return the state for GET /health and for the replies to /sleep and /wake."""
        return {
            "level": self.level if self.asleep else 0,
            "asleep": list(self.asleep),
            "frees_memory": self.frees_memory,
        }

    async def _free_bytes(self) -> int:
        """Return the sum of the free bytes on the devices of all workers; 0 if the build cannot release memory."""
        return sum(await self.engine.collective_rpc("prorl_free_bytes")) if self.frees_memory else 0


def wait_while_held(hold: str, waiting: str, seconds: float) -> None:
    """Wait, before the engine takes memory, until the hold file is removed.

    Args:
        hold: path of the hold file, which exists while the other engines sleep.
        waiting: path of a file that exists while this engine waits.

    Raises:
        TimeoutError: the hold file still exists after `seconds`.
    """
    if not os.path.exists(hold):
        with contextlib.suppress(OSError):
            os.unlink(waiting)  # left by an engine that was killed while it waited
        return
    _log.info("%s exists: the trainer uses the device; this engine starts as soon as the other engines wake", hold)
    end = time.monotonic() + seconds
    with open(waiting, "w", encoding="ascii"):
        pass
    try:
        while os.path.exists(hold):
            if time.monotonic() > end:
                raise TimeoutError(
                    f"{hold} still exists after {seconds:g} s (--hold-s): the other engines did not wake in time; see"
                    " their logs"
                )
            time.sleep(_POLL_S)
    finally:
        with contextlib.suppress(OSError):
            os.unlink(waiting)
