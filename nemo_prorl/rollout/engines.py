"""The engines as the trainer sees them: requests with deadlines, retries and back-pressure; weights kept current.

A response depends on (weights, prompt, seed, sampling) only, so a response lost with its engine is asked for again,
from any engine, with the same seed, and comes back the same.
"""

import asyncio
import contextlib
import json
import logging
import math
import time
from collections.abc import Awaitable, Callable, Collection, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

import aiohttp

from nemo_prorl.deadlines import Deadline
from nemo_prorl.errors import DeadlineExceeded, EngineFailure
from nemo_prorl.rollout.endpoints import EngineClient, Response, SamplingParams
from nemo_prorl.rollout.engine.sleep import HELD_SUFFIX, HOLD_FILE
from nemo_prorl.rollout.engine_load import EngineLoad
from nemo_prorl.rollout.scheduling import spread

_log = logging.getLogger(__name__)

_POLL_S = 0.1  # between looks at the endpoint files while something is waited for
_SCAN_S = 1.0  # otherwise: the files may lie on a slow shared disk
_MAX_BACKOFF_S = 5.0
_LINE_BYTES = 1 << 24  # the longest response line


@dataclass
class _Slot:
    """One engine process, as its endpoint file tells of it.  A restarted engine is another slot."""

    name: str
    pid: int
    client: EngineClient
    weights_dir: Path | None = None  # of its node
    loaded: int | None = None  # the version that this pool has loaded into it
    asleep: bool = False  # it was told to sleep, and not woken since
    in_flight: int = 0
    failures: int = 0
    retry_at: float = 0.0  # monotonic
    loading: asyncio.Lock = field(default_factory=asyncio.Lock)

    def path_of(self, published: str) -> str:
        """A published file as this engine's node has it: every node writes its own, under the same name."""
        return published if self.weights_dir is None else str(self.weights_dir / Path(published).name)


@dataclass
class _Share:
    """Room on an engine for some responses to a prompt, by their indexes, of which so many are still open."""

    slot: _Slot
    indexes: list[int]
    open: int


class EnginePool:
    """All engines of a run.  Lives on one event loop; `close` when done.

    `endpoints`: the folder with engine-*.json, which the engines write and a supervisor's restart renews.
    `engines`: how many there are when all are well.  `max_in_flight`: responses asked of one engine at a time; further
    requests wait for room, first come first served.
    """

    def __init__(self, endpoints: str | Path, token: str, engines: int = 1, max_in_flight: int = 512) -> None:
        self.endpoints, self.engines, self.max_in_flight = Path(endpoints), engines, max_in_flight
        self.load = EngineLoad(engines)
        self.current: tuple[str, int] | None = None  # the published file and its version
        self.hold = self.endpoints / HOLD_FILE
        self.wake_failures: dict[str, str] = {}  # of the last publication: engine, what it said
        self._token = token
        self._slots: dict[str, _Slot] = {}
        self._last_failure: dict[str, str] = {}  # of each engine, also of one that is gone
        self._scanned_at = -math.inf  # monotonic
        self._http: aiohttp.ClientSession | None = None
        self._turn, self._freed = asyncio.Lock(), asyncio.Event()

    def _session(self) -> aiohttp.ClientSession:
        if self._http is None:
            # The server closes an idle connection after 5 s: one that was just used is used again, no other.
            connector = aiohttp.TCPConnector(limit=0, keepalive_timeout=1.0)
            self._http = aiohttp.ClientSession(connector=connector, read_bufsize=_LINE_BYTES)
        return self._http

    async def close(self) -> None:
        if self._http is not None:
            await self._http.close()
            self._http = None

    def _scan(self, max_age_s: float = 0.0) -> list[_Slot]:
        """Reads the endpoint files; an engine with another address or process is a new one with unknown weights."""
        if time.monotonic() - self._scanned_at < max_age_s:
            return list(self._slots.values())
        session, found = self._session(), {}
        for file in sorted(self.endpoints.glob("engine-*.json")):
            try:
                endpoint = json.loads(file.read_text(encoding="utf-8"))
                name, url, pid = file.stem, str(endpoint["url"]), int(endpoint["pid"])
                ready = endpoint["state"] == "ready"
                weights_dir = Path(endpoint["weights_dir"]) if endpoint.get("weights_dir") else None
            except (OSError, ValueError, KeyError, TypeError):
                continue  # half written by a foreign hand, or just gone
            old = self._slots.get(name)
            if old is not None and (old.client.url, old.pid) == (url, pid):
                found[name] = old
            elif ready:
                found[name] = _Slot(name, pid, EngineClient(session, url, self._token), weights_dir)
        self._slots, self._scanned_at = found, time.monotonic()
        return list(found.values())

    async def generate(
        self,
        prompt_ids: Sequence[int],
        seeds: Sequence[int],
        sampling: SamplingParams,
        deadline: Deadline,
        on_response: Callable[[Response], object] = lambda response: None,
        version: int | None = None,
    ) -> list[Response]:
        """One response for each seed, in the order of seeds; `on_response` is called for each the moment it ends.

        `version`: the weights that must have made them; others are thrown away and asked for again.
        Raises EngineRefused at once, and DeadlineExceeded naming the engine once the time is over.
        """
        if version is not None and self.current is not None and self.current[1] != version:
            raise ValueError(f"weights {version} are asked for, but {self.current[1]} are published")
        got: dict[int, Response] = {}

        def take(share: _Share, response: Response) -> None:
            if response.index not in got:
                got[response.index] = response
                self._free(share, 1)
                on_response(response)

        attempt = partial(self._attempt, prompt_ids, seeds, sampling, version, deadline, take)
        missing, failed = list(range(len(seeds))), None
        attempts: dict[asyncio.Task[None], _Share] = {}
        try:
            async with asyncio.timeout(deadline.remaining):
                while missing or attempts:
                    for share in await self._room_for(missing) if missing else ():
                        missing = missing[share.open :]
                        task = asyncio.ensure_future(attempt(share))
                        task.add_done_callback(partial(self._free_rest, share))
                        attempts[task] = share
                    if not missing:
                        await asyncio.wait(attempts, return_when=asyncio.FIRST_COMPLETED)
                    for task in [task for task in attempts if task.done()]:
                        share = attempts.pop(task)
                        task.result()
                        if again := [index for index in share.indexes if index not in got]:
                            missing, failed = missing + again, share.slot
        except TimeoutError:
            accounts = sorted({self._account(s.slot) for s in attempts.values()}) or [self._account(failed)]
            where = f"{len(seeds) - len(got)} of {len(seeds)} responses missing, {'; '.join(accounts)}"
            raise DeadlineExceeded(f"{deadline.error()}: {where}") from None
        finally:
            await _cancel(attempts)
        return [got[i] for i in range(len(seeds))]

    async def _attempt(
        self,
        prompt_ids: Sequence[int],
        seeds: Sequence[int],
        sampling: SamplingParams,
        version: int | None,
        deadline: Deadline,
        take: Callable[[_Share, Response], None],
        share: _Share,
    ) -> None:
        """Ask one engine for the responses of a share; `take` gets each the moment it comes."""
        slot = share.slot
        try:
            if await self._bring_up_to_date(slot, deadline):
                self.load.answered(slot.name)
            stream = slot.client.generate(prompt_ids, [seeds[i] for i in share.indexes], sampling, version)
            async with contextlib.aclosing(stream) as replies:
                async for reply in replies:
                    self.load.answered(slot.name)
                    if version is not None and reply.weight_version != version:
                        raise EngineFailure(f"{slot.name}: answered with weights {reply.weight_version}, not {version}")
                    take(share, replace(reply, index=share.indexes[reply.index]))
            self._succeeded(slot)
        except EngineFailure as error:
            self._failed(slot, error)
            slot.loaded = None  # if it is the wrong version, load again; if it died, it is another slot anyway

    async def _room_for(self, responses: list[int]) -> list[_Share]:
        """Reserve room for responses, or for the first of them, on the least loaded engines that are well.

        Waits for room for one at least, first come first served.
        """
        async with self._turn:
            while True:
                self._freed.clear()
                shares = self._shares(self._scan(_SCAN_S), responses) or self._shares(self._scan(_POLL_S), responses)
                if shares:
                    for share in shares:
                        share.slot.in_flight += share.open
                        self.load.changed(share.slot.name, share.open)
                    return shares
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(_POLL_S):
                        await self._freed.wait()

    def _shares(self, slots: list[_Slot], responses: list[int]) -> list[_Share]:
        """Return what each engine that is well gets of a prompt's responses, as far as there is room."""
        now, left = time.monotonic(), iter(responses)
        usable = [slot for slot in slots if slot.retry_at <= now]
        counts = spread([slot.in_flight for slot in usable], len(responses), self.max_in_flight)
        return [_Share(slot, list(islice(left, n)), n) for slot, n in zip(usable, counts, strict=True) if n]

    def _free(self, share: _Share, responses: int) -> None:
        share.open -= responses
        share.slot.in_flight -= responses
        self.load.changed(share.slot.name, -responses)
        self._freed.set()

    def _free_rest(self, share: _Share, task: "asyncio.Task[Any]") -> None:
        """When an attempt is over, also one that was cancelled before it began."""
        self._free(share, share.open)

    async def _bring_up_to_date(self, slot: _Slot, deadline: Deadline) -> bool:
        """An engine that was restarted comes up with old weights: it gets the current file before it is asked.

        Returns whether it was asked to load.
        """
        if self.current is None or slot.loaded == self.current[1]:
            return False
        async with slot.loading:
            path, version = self.current
            await self._wake(slot, "weights", deadline)
            if slot.loaded != version:
                await slot.client.load_weights(slot.path_of(path), version, deadline)
            await self._wake(slot, "kv_cache", deadline)  # only now: a load needs room of its own
            slot.loaded, slot.asleep = version, False
        return True

    async def _wake(self, slot: _Slot, part: str, deadline: Deadline) -> None:
        if not slot.asleep:
            return
        try:
            await slot.client.wake(part, deadline)
        except EngineFailure as error:
            self.wake_failures[slot.name] = str(error)
            raise

    async def sleep(self, level: int, deadline: Deadline) -> int:
        """Puts all engines to sleep; the bytes that this freed on their devices (0 on CPUs), once none is awake.

        The next publication wakes them.  An engine that starts meanwhile takes no memory before that: it waits for the
        hold file to go, and says so in a file of its own.  DeadlineExceeded names an engine that does not sleep.
        """
        freed: dict[str, int] = {}
        for old in self._held():
            (self.endpoints / f"{old}{HELD_SUFFIX}").unlink(missing_ok=True)
        self.hold.touch()
        try:
            async with asyncio.timeout(deadline.remaining):
                while True:
                    due = [slot for slot in self._scan() if slot.name not in freed]
                    await asyncio.gather(
                        *(self._try(s, partial(self._put_to_sleep, s, level, freed, deadline)) for s in due)
                    )
                    if len(freed.keys() | self._held()) >= self.engines:
                        return sum(freed.values())
                    await asyncio.sleep(_POLL_S)
        except TimeoutError:
            awake = [self._account(slot) for slot in self._slots.values() if slot.name not in freed]
            which = "; ".join(awake) or self._account(None)
            raise DeadlineExceeded(f"{deadline.error()}: {len(freed)} of {self.engines} sleep; {which}") from None

    async def _put_to_sleep(self, slot: _Slot, level: int, freed: dict[str, int], deadline: Deadline) -> None:
        slot.asleep, slot.loaded = True, None  # also if the answer is lost: waking one that is awake does nothing
        freed[slot.name] = int((await slot.client.sleep(level, deadline)).get("freed_bytes", 0))

    def _held(self) -> set[str]:
        """Engines that wait with their start until the others wake."""
        return {file.stem for file in self.endpoints.glob(f"engine-*{HELD_SUFFIX}")}

    async def announce(self, path: str | Path, version: int) -> None:
        """From now on these weights are asked for: each engine loads them before its next response, and nobody waits.

        For engines that stay awake.
        """
        self.current = (str(path), version)
        for slot in self._slots.values():
            slot.loaded = None  # also where it says so: an engine may hold weights of a run that was lost

    async def publish(self, path: str | Path, version: int, deadline: Deadline) -> None:
        """Loads a weights file into all engines, and wakes those that sleep; returns when each holds it.

        An engine that fails is waited for, restarted or not, until the deadline; DeadlineExceeded names it.
        Raises EngineRefused when an engine calls the file wrong.
        """
        self.current = (str(path), version)
        self.wake_failures = dict.fromkeys(self._held(), "it ended while it slept") if self.hold.exists() else {}
        self.hold.unlink(missing_ok=True)
        slept = {name: slot for name, slot in self._slots.items() if slot.asleep}
        for slot in self._scan():
            slot.loaded = None  # also where it says so: an engine may hold weights of a run that was lost
        try:
            async with asyncio.timeout(deadline.remaining):
                while True:
                    slots = self._scan()
                    await asyncio.gather(
                        *(
                            self._try(s, partial(self._bring_up_to_date, s, deadline))
                            for s in slots
                            if s.loaded != version
                        )
                    )
                    if len(slots) >= self.engines and all(s.loaded == version for s in slots):
                        ended = [name for name, slot in slept.items() if self._slots.get(name) is not slot]
                        self.wake_failures = dict.fromkeys(ended, "it ended while it slept") | self.wake_failures
                        return
                    await asyncio.sleep(_POLL_S)
        except TimeoutError:
            behind = [s for s in self._slots.values() if s.loaded != version]
            absent = [self._account(None)] if len(self._slots) < self.engines else []
            which = "; ".join([*map(self._account, behind), *absent])
            raise DeadlineExceeded(f"{deadline.error()}: weights {version} are not in all engines: {which}") from None

    async def _try(self, slot: _Slot, change: Callable[[], Awaitable[object]]) -> None:
        """Change an engine, unless it failed a moment ago."""
        if slot.retry_at > time.monotonic():
            return
        try:
            await change()
            self._succeeded(slot)
        except EngineFailure as error:
            self._failed(slot, error)

    def _succeeded(self, slot: _Slot) -> None:
        slot.failures, slot.retry_at = 0, 0.0
        self.load.answered(slot.name)

    def _failed(self, slot: _Slot, error: EngineFailure) -> None:
        slot.failures += 1
        slot.retry_at = time.monotonic() + min(_MAX_BACKOFF_S, 0.1 * 2.0 ** min(slot.failures, 10))
        self._last_failure[slot.name] = str(error)
        if slot.failures & (slot.failures - 1) == 0:  # a dead engine fails all its open requests: 1, 2, 4, ... are told
            _log.warning("%s failed (%d in a row): %s", slot.name, slot.failures, error)
        self.load.lost(slot.name)

    def _account(self, slot: _Slot | None) -> str:
        """One engine, or all, in an error message."""
        if slot is not None:
            last = self._last_failure.get(slot.name, "")
            return f"{slot.name} at {slot.client.url}" + (f" (last failure: {last})" if last else "")
        failures = "".join(f"; {name} (last failure: {text})" for name, text in sorted(self._last_failure.items()))
        return f"{len(self._slots)} of {self.engines} engines known from {self.endpoints}/engine-*.json{failures}"


async def _cancel(tasks: Collection[asyncio.Task[Any]]) -> None:
    """Ends tasks and waits until they are over."""
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
