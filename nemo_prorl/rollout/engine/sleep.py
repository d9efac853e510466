"""Sleep of an engine: it releases its device's memory for the trainer and takes it back before the next rollout.

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
    """The state of the engine does not allow the request.  Becomes status 409."""


class EngineSleep:
    """The sleeping parts of an engine.

    Args:
        enabled: the engine was started with --sleep.
        frees_memory: its build can release memory (a CPU build cannot).
    """

    def __init__(self, engine: Any, enabled: bool, frees_memory: bool) -> None:
        self.engine, self.enabled, self.frees_memory = engine, enabled, frees_memory
        self.level = 0  # level of the current or last sleep
        self.asleep: tuple[str, ...] = ()
        self.weights_lost = False

    @property
    def refusal(self) -> str | None:
        """Return why no response can be generated now, or None."""
        if self.asleep:
            return f"the engine sleeps (level {self.level}: {', '.join(self.asleep)}); wake it first"
        if self.weights_lost:
            return "the engine dropped its weights when it slept (level 2); load some first"
        return None

    async def fall_asleep(self, level: int) -> dict[str, Any]:
        """Fall asleep.  Call it only with nothing in flight.

        Raises Refused while the engine sleeps at another level, BadRequest if it was started without --sleep.
        """
        if not self.enabled:
            raise BadRequest("this engine was not started for sleep; start it with --sleep (rollout.sleep)")
        if self.asleep and (self.level != level or self.asleep != PARTS):
            raise Refused(f"the engine sleeps at level {self.level} ({', '.join(self.asleep)}); wake it first")
        if self.asleep:
            return self.account()
        began, free = time.monotonic(), await self._free_bytes()
        self.level, self.asleep, self.weights_lost = level, PARTS, level == 2 or self.weights_lost
        await self.engine.sleep(level)
        freed = await self._free_bytes() - free
        return {**self.account(), "freed_bytes": freed, "seconds": round(time.monotonic() - began, 4)}

    async def wake(self, parts: Sequence[str]) -> dict[str, Any]:
        """Take back the device's memory of these parts.  Parts that are awake do not change."""
        began = time.monotonic()
        if due := [part for part in self.asleep if part in parts]:
            await self.engine.wake_up(due)
            self.asleep = tuple(part for part in self.asleep if part not in due)
        return {**self.account(), "seconds": round(time.monotonic() - began, 4)}

    def account(self) -> dict[str, Any]:
        """Return the state for /health and for replies."""
        return {
            "level": self.level if self.asleep else 0,
            "asleep": list(self.asleep),
            "frees_memory": self.frees_memory,
        }

    async def _free_bytes(self) -> int:
        """Return the free bytes on the devices of all workers; 0 if the build cannot report them."""
        return sum(await self.engine.collective_rpc("prorl_free_bytes")) if self.frees_memory else 0


def wait_while_held(hold: str, waiting: str, seconds: float) -> None:
    """Wait, before the engine takes memory, until the hold file is removed.

    The file exists while the other engines sleep.  The file `waiting` exists while this engine waits.  Raises
    TimeoutError naming the hold file.
    """
    if not os.path.exists(hold):
        with contextlib.suppress(OSError):
            os.unlink(waiting)  # left by an engine that was killed while it waited
        return
    _log.info("%s: the trainer has the device; this engine starts when the others wake", hold)
    end = time.monotonic() + seconds
    with open(waiting, "w", encoding="ascii"):
        pass
    try:
        while os.path.exists(hold):
            if time.monotonic() > end:
                raise TimeoutError(f"{hold} still exists after {seconds:g} s (--hold-s): the engines were not woken")
            time.sleep(_POLL_S)
    finally:
        with contextlib.suppress(OSError):
            os.unlink(waiting)
