"""Pool of rollout engines for the trainer: sends requests, with deadlines and retries, and publishes weights.

A response depends only on weights, prompt, seed and sampling parameters.  If an engine fails, its unfinished responses
are therefore requested again from any engine with the same seeds, and the result is the same.
"""

import asyncio
import contextlib
import logging
import math
import time
from collections.abc import Awaitable, Callable, Collection, Iterable, Sequence
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
from nemo_prorl.rollout.open_responses import OpenResponses
from nemo_prorl.rollout.scheduling import spread
from nemo_prorl.service import Pause, endpoints_in

_log = logging.getLogger(__name__)

_POLL_S = 0.1  # seconds between reads of the endpoint files while a request waits
_SCAN_S = 1.0  # seconds between reads otherwise, because the files may be on a slow shared disk
_LINE_BYTES = 1 << 24  # bytes of the longest response line


@dataclass
class _Slot:
    """The pool's record of one engine process.  A restarted engine gets a new slot, even if it has the same name."""

    name: str
    pid: int
    client: EngineClient
    weights_dir: Path | None = None  # folder of the published weights on the engine's node; None: as on rank 0's node
    version: int | None = None  # version of the weights that this pool has loaded into the engine; None if unknown
    asleep: bool = False  # put to sleep and not yet woken
    in_flight: int = 0  # open responses
    tokens: int = 0  # tokens that the engine has generated since its start, according to its last report
    progress_at: float = 0.0  # monotonic time of its last response or newly generated token
    pause: Pause = field(default_factory=Pause)
    updating: asyncio.Lock = field(default_factory=asyncio.Lock)

    def progressed(self, tokens: int | None = None) -> None:
        """Record progress: a response arrived (None), or the reported number of generated `tokens` has changed."""
        if tokens != self.tokens:
            self.tokens, self.progress_at = self.tokens if tokens is None else tokens, time.monotonic()

    def path_of(self, published: str) -> str:
        """Return the path on the engine's node of the weights file that rank 0's node has at the path `published`.

        Each node has its own folder of weights; the file names are the same on all nodes.
        """
        return published if self.weights_dir is None else str(self.weights_dir / Path(published).name)


@dataclass
class _Share:
    """Responses that one engine generates for a request: positions in the request, and the number still open."""

    slot: _Slot
    indexes: list[int]
    open: int


class EnginePool:
    """Pool of all engines of a run, on one event loop.  Call `close` when done.

    Args:
        endpoints: folder of the endpoint files engine-*.json, which the engines write at each start.
        engines: number of engines when all are healthy.
        max_in_flight: maximum of open responses per engine; further requests wait in order of arrival.
    """

    def __init__(self, endpoints: str | Path, token: str, engines: int = 1, max_in_flight: int = 512) -> None:
        self.endpoints, self.engines, self.max_in_flight = Path(endpoints), engines, max_in_flight
        self.open_responses = OpenResponses(engines)
        self.current: tuple[str, int] | None = None  # the published file and its version
        self.hold = self.endpoints / HOLD_FILE
        self.wake_failures: dict[str, str] = {}  # engine name -> why it did not wake at the last publication
        self.unread: dict[str, list[str]] = {}  # engine name -> tensors that its last load could not compare
        self._token = token
        self._slots: dict[str, _Slot] = {}
        self._last_failure: dict[str, str] = {}  # engine name -> error message; kept after the engine has ended
        self._scanned_at = -math.inf  # monotonic
        self._http: aiohttp.ClientSession | None = None
        self._turn, self._freed = asyncio.Lock(), asyncio.Event()

    @property
    def generated_tokens(self) -> int:
        """Return the number of tokens generated since the starts of the engines, as the engines reported it last."""
        return sum(slot.tokens for slot in self._slots.values())

    def waiting(self) -> str:
        """Return the engines with open responses as text, the one without progress for the longest time first."""
        now = time.monotonic()
        busy = sorted((slot for slot in list(self._slots.values()) if slot.in_flight), key=lambda one: one.progress_at)
        since = [f"for {now - slot.progress_at:.0f} s" if slot.progress_at else "yet" for slot in busy]
        return ", ".join(
            f"{slot.name} has {slot.in_flight} open responses, no token {how_long}"
            for slot, how_long in zip(busy, since, strict=True)
        )

    def _session(self) -> aiohttp.ClientSession:
        if self._http is None:
            # The server closes an idle connection after 5 s: never reuse one that was idle for longer than 1 s.
            connector = aiohttp.TCPConnector(limit=0, keepalive_timeout=1.0)
            self._http = aiohttp.ClientSession(connector=connector, read_bufsize=_LINE_BYTES)
        return self._http

    async def close(self) -> None:
        if self._http is not None:
            await self._http.close()
            self._http = None

    def _scan(self, max_age_s: float = 0.0) -> list[_Slot]:
        """Read the endpoint files if the last scan is older than `max_age_s` seconds; return the engines.

        An engine whose address or process id has changed gets a new slot, because its weights are unknown.
        """
        if time.monotonic() - self._scanned_at < max_age_s:
            return list(self._slots.values())
        session, slots = self._session(), {}
        for endpoint in endpoints_in(self.endpoints, "engine-*.json"):
            old = self._slots.get(endpoint.name)
            if old is not None and (old.client.url, old.pid) == (endpoint.url, endpoint.pid):
                slots[endpoint.name] = old
            elif endpoint.ready:
                slots[endpoint.name] = _Slot(
                    endpoint.name, endpoint.pid, EngineClient(session, endpoint.url, self._token), endpoint.weights_dir
                )
        self._slots, self._scanned_at = slots, time.monotonic()
        return list(slots.values())

    async def generate(
        self,
        prompt_ids: Sequence[int],
        seeds: Sequence[int],
        sampling: SamplingParams,
        deadline: Deadline,
        on_response: Callable[[Response], object] = lambda response: None,
        version: int | None = None,
    ) -> list[Response]:
        """Return one response for each seed, in the order of seeds; call `on_response` with each as soon as it ends.

        Args:
            deadline: limit of the time without progress.  It restarts whenever an engine with open responses of this
                request makes progress: a response ends or tokens are generated, for this or for another request.
            version: required version of the weights (None: any).  Responses of other weights are requested again.

        Raises:
            EngineRefused: immediately, if an engine rejects the request.
            DeadlineExceeded: responses are missing at the deadline; the text names their engines.
        """
        if version is not None and self.current is not None and self.current[1] != version:
            raise ValueError(f"weights version {version} was requested, but version {self.current[1]} is published")
        got: dict[int, Response] = {}

        def take(share: _Share, response: Response) -> None:
            share.slot.progressed()
            if response.index not in got:
                got[response.index] = response
                self._free(share, 1)
                on_response(response)

        attempt = partial(self._attempt, prompt_ids, seeds, sampling, version, deadline, take)
        missing, failed = list(range(len(seeds))), None
        attempts: dict[asyncio.Task[None], _Share] = {}
        try:
            while missing or attempts:
                _check_progress(deadline, attempts.values())
                for share in await self._room_for(missing, deadline) if missing else ():
                    missing = missing[share.open :]
                    task = asyncio.ensure_future(attempt(share))
                    task.add_done_callback(partial(self._free_rest, share))
                    attempts[task] = share
                if not missing:
                    await asyncio.wait(attempts, timeout=deadline.remaining, return_when=asyncio.FIRST_COMPLETED)
                for share in _ended(attempts):
                    if again := [index for index in share.indexes if index not in got]:
                        missing, failed = missing + again, share.slot
        except TimeoutError:
            late = sorted({self._describe(s.slot) for s in attempts.values()})
            where = f" from {'; '.join(late)}" if late else f"; {self._describe(failed)}"
            missed = f"{len(seeds) - len(got)} of {len(seeds)} responses are missing"
            raise DeadlineExceeded(f"{deadline.error()}: {missed}{where}") from None
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
        """Request a share's responses from its engine; call `take` with each.  An EngineFailure is only recorded."""
        slot = share.slot
        try:
            if await self._bring_up_to_date(slot, deadline):
                self.open_responses.answered(slot.name)
            wanted = [seeds[i] for i in share.indexes]
            stream = slot.client.generate(
                prompt_ids,
                wanted,
                sampling,
                version,
                on_tokens=slot.progressed,
                on_kv_cache_use=self.open_responses.kv_cache_used,
            )
            async with contextlib.aclosing(stream) as replies:
                async for reply in replies:
                    self.open_responses.answered(slot.name)
                    if version is not None and reply.weight_version != version:
                        raise EngineFailure(
                            f"{slot.name}: expected a response of weights version {version};"
                            f" got version {reply.weight_version}"
                        )
                    take(share, replace(reply, index=share.indexes[reply.index]))
            self._succeeded(slot)
        except EngineFailure as error:
            self._failed(slot, error)
            slot.version = None  # load again, in case the engine has other weights

    async def _room_for(self, responses: list[int], deadline: Deadline) -> list[_Share]:
        """Assign as many of the responses (positions in the request) as possible to the least loaded healthy engines.

        Waits until an engine has fewer than `max_in_flight` open responses.  Callers are served in order of arrival.
        Raises TimeoutError at the deadline, which the progress of any engine restarts.
        """
        async with self._turn:
            while True:
                self._freed.clear()
                shares = self._shares(self._scan(_SCAN_S), responses) or self._shares(self._scan(_POLL_S), responses)
                if shares:
                    for share in shares:
                        share.slot.in_flight += share.open
                        self.open_responses.changed(share.slot.name, share.open)
                    return shares
                deadline.progressed(max((slot.progress_at for slot in self._slots.values()), default=0.0))
                if deadline.passed:
                    raise TimeoutError
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(_POLL_S):
                        await self._freed.wait()

    def _shares(self, slots: list[_Slot], responses: list[int]) -> list[_Share]:
        """Distribute the responses over the healthy engines; return the share of each engine that gets responses.

        Responses that would exceed `max_in_flight` open responses per engine are in no share.
        """
        remaining = iter(responses)
        usable = [slot for slot in slots if slot.pause.over]
        counts = spread([slot.in_flight for slot in usable], len(responses), self.max_in_flight)
        return [_Share(slot, list(islice(remaining, n)), n) for slot, n in zip(usable, counts, strict=True) if n]

    def _free(self, share: _Share, responses: int) -> None:
        share.open -= responses
        share.slot.in_flight -= responses
        self.open_responses.changed(share.slot.name, -responses)
        self._freed.set()

    def _free_rest(self, share: _Share, task: "asyncio.Task[Any]") -> None:
        """Count the open responses of a share as ended.

        This is the done callback of the share's task.  asyncio also calls it if the task is cancelled before it begins.
        """
        self._free(share, share.open)

    async def _bring_up_to_date(self, slot: _Slot, deadline: Deadline) -> bool:
        """Wake an engine and make it load the published weights.

        Does nothing if the engine already has these weights, or if no weights are published.

        Returns:
            whether the engine was changed.
        """
        if self.current is None or slot.version == self.current[1]:
            return False
        async with slot.updating:
            path, version = self.current
            await self._wake(slot, "weights", deadline)
            if slot.version != version:
                self.unread[slot.name] = await slot.client.load_weights(slot.path_of(path), version, deadline)
            await self._wake(slot, "kv_cache", deadline)  # only now, because the load itself needs memory
            slot.version, slot.asleep = version, False
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
        """Put all engines to sleep until the next publication; return the bytes released on their devices (0 on CPUs).

        `level`: 1 keeps the weights in host memory, 2 drops them.  While the engines
        sleep, the hold file exists.  An engine that starts meanwhile takes no memory: it creates the file NAME.held and
        waits until the hold file is removed.  Such an engine counts as asleep.

        Raises:
            DeadlineExceeded: the text names the engines that are still awake at the deadline.
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
            awake = [self._describe(slot) for slot in self._slots.values() if slot.name not in freed]
            which = f"still awake: {'; '.join(awake)}" if awake else self._describe(None)
            asleep = f"{len(freed)} of {self.engines} engines are asleep"
            raise DeadlineExceeded(f"{deadline.error()}: {asleep}; {which}") from None

    async def _put_to_sleep(self, slot: _Slot, level: int, freed: dict[str, int], deadline: Deadline) -> None:
        # Set before the request, whose reply may be lost.  Waking an awake engine does nothing.
        slot.asleep, slot.version = True, None
        freed[slot.name] = int((await slot.client.sleep(level, deadline)).get("freed_bytes", 0))

    def _held(self) -> set[str]:
        """Return the names of restarted engines that take no memory until the sleeping engines wake."""
        return {file.stem for file in self.endpoints.glob(f"engine-*{HELD_SUFFIX}")}

    async def announce(self, path: str | Path, version: int) -> None:
        """Mark the weights of all engines as outdated, and return immediately.

        An engine loads the weights file `path` before its next response.
        """
        self.current = (str(path), version)
        for slot in self._slots.values():
            slot.version = None  # even for the same version: after a roll-back the engine has weights of the lost steps

    async def publish(self, path: str | Path, version: int, deadline: Deadline) -> None:
        """Load a weights file into all engines and wake sleeping ones; return when every engine has the weights.

        If an engine fails, this method waits until it answers again or is restarted, and loads the weights then.

        Raises:
            DeadlineExceeded: the text names the engines without the weights.
            EngineRefused: an engine rejects the file.
        """
        self.current = (str(path), version)
        self.wake_failures = dict.fromkeys(self._held(), "it ended while it slept") if self.hold.exists() else {}
        self.hold.unlink(missing_ok=True)
        sleepers = {name: slot for name, slot in self._slots.items() if slot.asleep}
        for slot in self._scan():
            slot.version = None  # even for the same version: after a roll-back the engine has weights of the lost steps
        try:
            async with asyncio.timeout(deadline.remaining):
                while True:
                    slots = self._scan()
                    await asyncio.gather(
                        *(
                            self._try(s, partial(self._bring_up_to_date, s, deadline))
                            for s in slots
                            if s.version != version
                        )
                    )
                    if len(slots) >= self.engines and all(s.version == version for s in slots):
                        ended = [name for name, slot in sleepers.items() if self._slots.get(name) is not slot]
                        self.wake_failures = dict.fromkeys(ended, "it ended while it slept") | self.wake_failures
                        return
                    await asyncio.sleep(_POLL_S)
        except TimeoutError:
            behind = [f"not loaded by {self._describe(s)}" for s in self._slots.values() if s.version != version]
            absent = [self._describe(None)] if len(self._slots) < self.engines else []
            which = "; ".join([*behind, *absent])
            raise DeadlineExceeded(
                f"{deadline.error()}: not all engines have weights version {version}: {which}"
            ) from None

    async def _try(self, slot: _Slot, change: Callable[[], Awaitable[object]]) -> None:
        """Call `change`, which changes an engine; record success or failure.

        Does nothing during the pause that follows a failure of the engine.
        """
        if not slot.pause.over:
            return
        try:
            await change()
            self._succeeded(slot)
        except EngineFailure as error:
            self._failed(slot, error)

    def _succeeded(self, slot: _Slot) -> None:
        slot.pause.succeeded()
        self.open_responses.answered(slot.name)

    def _failed(self, slot: _Slot, error: EngineFailure) -> None:
        self._last_failure[slot.name] = str(error)
        if slot.pause.failed():
            _log.warning("%s failed (%d in a row): %s", slot.name, slot.pause.failures, error)
        self.open_responses.lost(slot.name)

    def _describe(self, slot: _Slot | None) -> str:
        """Describe an engine (None: all engines) for an error message."""
        if slot is not None:
            last = self._last_failure.get(slot.name, "")
            return f"{slot.name} at {slot.client.url}" + (f" (last failure: {last})" if last else "")
        failures = "".join(f"; {name} (last failure: {text})" for name, text in sorted(self._last_failure.items()))
        return f"{len(self._slots)} of {self.engines} engines known from {self.endpoints}/engine-*.json{failures}"


def _ended(attempts: dict[asyncio.Task[None], _Share]) -> list[_Share]:
    """Remove the tasks that have ended from `attempts` and return their shares; raise the first error of a task."""
    ended = [task for task in attempts if task.done()]
    for task in ended:
        task.result()
    return [attempts.pop(task) for task in ended]


def _check_progress(deadline: Deadline, open_shares: Iterable[_Share]) -> None:
    """Restart the deadline at the last progress of these engines; then raise TimeoutError if it has passed."""
    for share in open_shares:
        deadline.progressed(share.slot.progress_at)
    if deadline.passed:
        raise TimeoutError


async def _cancel(tasks: Collection[asyncio.Task[Any]]) -> None:
    """Cancel tasks and wait until they have ended."""
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
