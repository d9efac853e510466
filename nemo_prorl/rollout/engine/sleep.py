"""Sleep of an engine: it hands its device's memory to the trainer and takes it back before the next rollout.

    awake --sleep--> asleep --wake weights--> weights without KV cache --load--> --wake kv_cache--> awake

vLLM's sleep mode: level 1 keeps the weights in host memory, level 2 drops them; both drop the KV cache.  After level 2
nothing is generated until weights were loaded, whatever is awake.  vLLM's CPU build takes the same calls, stops and
resumes its scheduler, and keeps its memory; the answers say so (`frees_memory` false).

Runs in the rollout environment.  Importing this module imports neither torch nor vLLM.
"""

import asyncio
import contextlib
import logging
import os
import time
from dataclasses import dataclass
from typing import Any

from nemo_prorl.rollout.engine.requests import BadRequest, is_number, json_object

_log = logging.getLogger(__name__)

PARTS = ("weights", "kv_cache")  # vLLM's tags, in the order in which they are woken
LEVELS = (1, 2)
HOLD_FILE = "engines-asleep"  # beside the endpoint files, while the engines sleep
HELD_SUFFIX = ".held"  # of the file of an engine that waits for it to go
_POLL_S = 0.2


@dataclass(frozen=True)
class SleepRequest:
    """A checked POST /sleep."""

    level: int
    wait_s: float


def parse_sleep(body: Any) -> SleepRequest:
    """Checks a POST /sleep body; raises BadRequest."""
    values = {"level": None, "wait_s": 0, **json_object(body, {"level", "wait_s"})}
    if values["level"] not in LEVELS or isinstance(values["level"], bool):
        raise BadRequest(
            f"level must be 1 (weights go to host memory) or 2 (they are dropped), not {values['level']!r}"
        )
    if not is_number(values["wait_s"], 0, 1e6, int, float):
        raise BadRequest(f"wait_s must be seconds in 0..1e6, not {values['wait_s']!r}")
    return SleepRequest(values["level"], float(values["wait_s"]))


def parse_wake(body: Any) -> tuple[str, ...]:
    """Checks a POST /wake body; the parts to wake, in order.  Raises BadRequest."""
    parts = {"parts": list(PARTS), **json_object(body, {"parts"})}["parts"]
    if not isinstance(parts, list) or not parts or not all(part in PARTS for part in parts):
        raise BadRequest(f"parts must be a list of {' and '.join(PARTS)}, not {parts!r}")
    return tuple(part for part in PARTS if part in parts)


class Refused(RuntimeError):
    """The engine is in no state for what was asked: becomes a 409."""


class EngineSleep:
    """What of an engine sleeps.  `enabled`: it was started for it.  `frees_memory`: its build can (not a CPU's)."""

    def __init__(self, engine: Any, enabled: bool, frees_memory: bool) -> None:
        self.engine, self.enabled, self.frees_memory = engine, enabled, frees_memory
        self.level = 0  # of the present or last sleep
        self.asleep: tuple[str, ...] = ()
        self.weights_lost = False

    @property
    def refusal(self) -> str | None:
        """Why no response can be made now, if that is so."""
        if self.asleep:
            return f"the engine sleeps (level {self.level}: {', '.join(self.asleep)}); wake it first"
        if self.weights_lost:
            return "the engine dropped its weights when it slept (level 2); load some first"
        return None

    @property
    def weights_asleep(self) -> bool:
        return "weights" in self.asleep

    def loaded(self) -> None:
        """All weights were just loaded."""
        self.weights_lost = False

    async def fall_asleep(self, level: int) -> dict[str, Any]:
        """With nothing in flight.  Raises Refused while it sleeps at another level, BadRequest if not made for it."""
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

    async def wake(self, parts: tuple[str, ...]) -> dict[str, Any]:
        """Takes the device's memory for these parts; what is awake stays so."""
        began = time.monotonic()
        if due := [part for part in parts if part in self.asleep]:
            await self.engine.wake_up(due)
            self.asleep = tuple(part for part in self.asleep if part not in due)
        return {**self.account(), "seconds": round(time.monotonic() - began, 4)}

    def account(self) -> dict[str, Any]:
        """For /health and for answers."""
        return {
            "level": self.level if self.asleep else 0,
            "asleep": list(self.asleep),
            "holds_weights": not (self.weights_lost or self.weights_asleep),
            "frees_memory": self.frees_memory,
        }

    async def _free_bytes(self) -> int:
        """Of the devices of all workers; 0 where they cannot say."""
        return sum(await self.engine.collective_rpc("prorl_free_bytes")) if self.frees_memory else 0


async def when_idle(idle: asyncio.Event, in_flight: Any, seconds: float) -> None:
    """Returns once nothing is in flight; raises Refused with the count after `seconds`."""
    with contextlib.suppress(asyncio.TimeoutError):
        await asyncio.wait_for(idle.wait(), seconds)
    if count := in_flight():
        raise Refused(f"{count} responses in flight for longer than {seconds:g} s; the engine stays awake")


def wait_while_held(hold: str, told: str, seconds: float) -> None:
    """Before an engine takes memory: until the hold file is gone, which stands while the other engines sleep.

    The file `told` stands while this one waits.  Raises TimeoutError naming the hold file.
    """
    if not os.path.exists(hold):
        with contextlib.suppress(OSError):
            os.unlink(told)  # of one that was killed while it waited
        return
    _log.info("%s: the trainer has the device; this engine starts when the others wake", hold)
    end = time.monotonic() + seconds
    with open(told, "w", encoding="ascii"):
        pass
    try:
        while os.path.exists(hold):
            if time.monotonic() > end:
                raise TimeoutError(f"{hold} still stands after {seconds:g} s (--hold-s): the engines were not woken")
            time.sleep(_POLL_S)
    finally:
        with contextlib.suppress(OSError):
            os.unlink(told)
