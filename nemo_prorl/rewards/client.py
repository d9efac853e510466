"""Asks the reward servers of all nodes.  One verdict for every request, whatever happens to a server meanwhile.

Requests made close together travel in one POST; verdicts come back one by one, each found by the key of its request,
and its `id` is checked.  A refused or broken connection, a full queue or a stopping server means another try, on
another server where there is one, until the deadline; then the verdict is an infrastructure failure (score None).
A server that refuses several requests is sent each of them alone, so that only the one at fault is lost.
"""

import asyncio
import contextlib
import itertools
import json
import logging
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp

from nemo_prorl.deadlines import Deadline
from nemo_prorl.rewards.connections import MAX_BODY
from nemo_prorl.rewards.interface import Verdict, failed_verdict, read_verdict
from nemo_prorl.rewards.retries import until_judged

_log = logging.getLogger(__name__)

_TELL_EVERY_S = 10.0  # between complaints that no server is there
_LOOK_EVERY_S = 0.5  # between looks at the servers' files
_NEVER = (400, 413)  # what the same POST would be answered again


@dataclass(frozen=True)
class ClientOptions:
    """How requests are bundled."""

    batch_size: int = 64
    batch_bytes: int = MAX_BODY // 2  # of encoded requests; a longer request is sent alone
    batch_wait_s: float = 0.005  # for others, after which a bundle leaves
    batch_gap_s: float = 0.05  # after the bundle before it, at least: while many come, few POSTs
    max_posts: int = 2048  # at the same time; more wait: where responses end one by one, each is a POST of its own


@dataclass(eq=False)
class _Waiting:
    """One attempt for a request."""

    request_id: str
    key: int
    body: bytes  # the request with its key, as JSON
    deadline: Deadline
    future: "asyncio.Future[Verdict | None]"  # None: no verdict, try again

    def settle(self, verdict: Verdict | None) -> None:
        if not self.future.done():
            self.future.set_result(verdict)

    def refuse(self, refused: "_Refused") -> None:
        if not self.future.done():
            self.future.set_exception(refused)


@dataclass(eq=False)
class _Endpoint:
    url: str
    open_requests: int = 0
    closed_until: float = 0.0  # the loop's clock; after a failure others are asked first
    failures: int = 0  # in a row

    def failed(self, now: float) -> None:
        self.failures += 1
        self.closed_until = max(self.closed_until, now + min(5.0, 0.1 * 2.0 ** min(self.failures, 10)))


class _Refused(Exception):
    """A server refused what was posted, and would refuse it again."""


@dataclass
class ClientStats:
    """Counts since the start: POSTs sent, requests tried again, connections that failed."""

    posts: int = 0
    retries: int = 0
    connection_failures: int = 0


class _Endpoints:
    """The servers that announce themselves as ready in a folder."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._read_at = -math.inf
        self._known: dict[str, _Endpoint] = {}

    def _read(self) -> None:
        known: dict[str, _Endpoint] = {}
        for path in sorted(self._folder.glob("*.json")):
            with contextlib.suppress(OSError, ValueError, KeyError, TypeError):  # being replaced, or not one of ours
                obj = json.loads(path.read_text())
                if obj["kind"] == "rewards" and obj["state"] == "ready":
                    known[obj["url"]] = self._known.get(obj["url"]) or _Endpoint(obj["url"])
        self._known = known

    def choose(self, now: float) -> _Endpoint | None:
        """The least loaded server that is not closed off; failing that the one that opens first; None without any."""
        if not self._known or now >= self._read_at + _LOOK_EVERY_S:
            self._read()
            self._read_at = now
        servers = self._known.values()
        return min(servers, key=lambda one: (max(0.0, one.closed_until - now), one.open_requests), default=None)


class RewardClient:
    """Use as an async context manager, within one event loop."""

    def __init__(self, endpoints_dir: Path, token_file: Path, options: ClientOptions | None = None) -> None:
        self.options = options or ClientOptions()
        self.stats = ClientStats()
        self._token_file = Path(token_file)
        self._endpoints = _Endpoints(Path(endpoints_dir))
        self._bundle: list[_Waiting] = []
        self._bundle_bytes = 0
        self._flush: asyncio.TimerHandle | None = None
        self._flushed = -math.inf  # the loop's clock
        self._keys = itertools.count(1)
        self._session: aiohttp.ClientSession | None = None
        self._tasks: set[asyncio.Task[None]] = set()
        self._no_server = self._last_error = f"no reward server is ready in {endpoints_dir}"
        self._told_none = -_TELL_EVERY_S

    async def __aenter__(self) -> "RewardClient":
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def close(self) -> None:
        for task in tuple(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        if self._session is not None:
            await self._session.close()
            self._session = None

    async def score(self, request: dict[str, Any], deadline: Deadline) -> Verdict:
        """The verdict on one request, both as JSON objects.  Never raises for what a server does; cancel it freely."""
        try:
            verdict = await until_judged(lambda: self._once(request, deadline), deadline, self._on_retry)
        except _Refused as refused:
            return failed_verdict(request["id"], "infrastructure", str(refused))
        late = f"{deadline.error()}; last: {self._last_error}"
        return failed_verdict(request["id"], "infrastructure", late) if verdict is None else verdict

    def _on_retry(self, verdict: Verdict | None) -> None:
        self.stats.retries += 1
        if verdict is not None:
            self._last_error = verdict["detail"]

    async def _once(self, request: dict[str, Any], deadline: Deadline) -> Verdict | None:
        """One attempt as part of a bundle; None where no verdict came.  Raises _Refused."""
        loop = asyncio.get_running_loop()
        key = next(self._keys)
        body = json.dumps({**request, "key": key}).encode()
        waiting = _Waiting(request["id"], key, body, deadline, loop.create_future())
        if self._bundle and self._bundle_bytes + len(body) > self.options.batch_bytes:
            self._send_bundle()
        self._bundle.append(waiting)
        self._bundle_bytes += len(body)
        if len(self._bundle) >= self.options.batch_size:
            self._send_bundle()
        elif self._flush is None:
            at = max(loop.time() + self.options.batch_wait_s, self._flushed + self.options.batch_gap_s)
            self._flush = loop.call_at(at, self._send_bundle)
        try:
            return await asyncio.wait_for(waiting.future, deadline.remaining)
        except TimeoutError:
            return None

    def _send_bundle(self) -> None:
        if self._flush is not None:
            self._flush.cancel()
            self._flush = None
        self._flushed = asyncio.get_running_loop().time()
        bundle = [waiting for waiting in self._bundle if not waiting.future.done()]
        self._bundle, self._bundle_bytes = [], 0
        if bundle:
            self._start_post(bundle)

    def _start_post(self, bundle: list[_Waiting]) -> None:
        task = asyncio.create_task(self._post(bundle))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _post(self, bundle: list[_Waiting]) -> None:
        """Post a bundle.  Whoever has no verdict in the end tries again, and a request that was refused ends."""
        now = asyncio.get_running_loop().time()
        server = self._endpoints.choose(now)
        if server is None and now - self._told_none >= _TELL_EVERY_S:
            self._told_none = now
            _log.warning("%d verdicts wait: %s", len(bundle), self._no_server)
        if server is None or server.closed_until > now:  # all failed a moment ago: the callers' back-off decides
            for waiting in bundle:
                waiting.settle(None)
            return
        unsettled = bundle
        server.open_requests += len(bundle)
        self.stats.posts += 1
        try:
            await self._exchange(server.url, bundle)
            server.failures = 0
        except _Refused as refused:
            _log.warning("reward server %s refused %d requests: %s", server.url, len(bundle), refused)
            if len(bundle) == 1:
                bundle[0].refuse(refused)
            else:
                unsettled = []
                for waiting in bundle:
                    self._start_post([waiting])
        except (aiohttp.ClientError, OSError, ValueError) as error:
            self.stats.connection_failures += 1
            self._last_error = f"reward server {server.url}: {type(error).__name__}: {error}"
            server.failed(asyncio.get_running_loop().time())
            if server.failures & (server.failures - 1) == 0:  # all its open POSTs fail at once: 1, 2, 4, ... are told
                _log.warning("%s (%d in a row)", self._last_error, server.failures)
        finally:
            server.open_requests -= len(bundle)
            for waiting in unsettled:
                waiting.settle(None)

    async def _exchange(self, url: str, bundle: list[_Waiting]) -> None:
        """One POST and its stream of verdicts.

        Raises _Refused, and others for a broken connection or an answer that is not as agreed.
        """
        if self._session is None:
            connector = aiohttp.TCPConnector(limit=self.options.max_posts)
            self._session = aiohttp.ClientSession(connector=connector, read_bufsize=2**20)
        longest = max(waiting.deadline.remaining for waiting in bundle)
        headers = {
            "Authorization": f"Bearer {self._token_file.read_text().strip()}",
            "Accept": "application/x-ndjson",
            "Content-Type": "application/json",
            "prorl-deadline-s": f"{longest:.3f}",
        }
        body = b"[" + b",".join(waiting.body for waiting in bundle) + b"]"
        timeout = aiohttp.ClientTimeout(total=longest + 1.0, sock_connect=5.0)
        async with self._session.post(f"{url}/v1/score", data=body, headers=headers, timeout=timeout) as response:
            if response.status != 200:
                fault = f"HTTP {response.status}: {(await response.text())[:300]}"
                raise _Refused(fault) if response.status in _NEVER else ValueError(fault)
            of_key = {waiting.key: waiting for waiting in bundle}
            async for line in response.content:
                take_verdict(json.loads(line), of_key)


def take_verdict(verdict: Any, of_key: dict[int, _Waiting]) -> None:
    """Hands a verdict to the request whose key it bears.  Raises ValueError where it is not that request's verdict."""
    key = verdict.pop("key", None)
    waiting = of_key.pop(key, None)
    if waiting is None:
        raise ValueError(f"the server sent a verdict with key {key!r}, which is not awaited")
    waiting.settle(read_verdict(verdict, waiting.request_id))
