"""The client of the reward servers of all nodes.  Every request gets one verdict, even if a server fails.

Requests that are made within a short time are sent in one POST.  The reply is a stream of verdicts, one per line; the
client matches each verdict to its request by a key and checks the `id`.  After a connection error, a full queue (429)
or a stopping server (503), a request is retried until its deadline, on another server if another server is ready.  A
request waits in the queue of its server, so its deadline counts from the server's last verdict on the same task.  A
request whose deadline passes gets the verdict "infrastructure" (score None).  If a server rejects a POST as invalid
(400, 413), each request of the POST is sent again alone, so that only the invalid request fails.
"""

import asyncio
import itertools
import json
import logging
import math
import time
from collections import deque
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp

from nemo_prorl.deadlines import Deadline
from nemo_prorl.rewards.connections import MAX_BODY
from nemo_prorl.rewards.interface import Verdict, failed_verdict, read_verdict
from nemo_prorl.rewards.retries import until_judged
from nemo_prorl.service import Pause, endpoints_in

_log = logging.getLogger(__name__)

_WARN_EVERY_S = 10.0  # seconds between warnings that no server is ready
_WARN_FAILURE_EVERY_S = 300.0  # seconds between warnings of verdicts without a score
_PACE_OF = 64  # verdicts from which a server's seconds per verdict are told
_READ_EVERY_S = 0.5  # seconds between readings of the endpoint files
_REJECTED = (400, 413)  # statuses that a repeated POST would get again


@dataclass(frozen=True)
class ClientOptions:
    """The limits that decide how requests are bundled into POSTs."""

    batch_size: int = 64  # maximum requests per POST
    batch_bytes: int = MAX_BODY // 2  # maximum bytes of encoded requests per POST; a longer request is sent alone
    batch_wait_s: float = 0.005  # seconds to wait for further requests before a POST
    batch_gap_s: float = 0.05  # minimum seconds between two POSTs, unless a bundle is full
    max_posts: int = 2048  # maximum concurrent POSTs; further POSTs wait


@dataclass(eq=False)
class _Waiting:
    """One attempt to get a verdict on a request."""

    request_id: str
    key: int  # different for each attempt; the server returns it with the verdict
    body: bytes  # the request with its key, as JSON
    deadline: Deadline
    future: "asyncio.Future[Verdict | None]"  # None: no verdict arrived; retry
    task: str = ""
    began: float = field(default_factory=time.monotonic)
    server: "_Endpoint | None" = None  # None: not sent

    def settle(self, verdict: Verdict | None) -> None:
        if not self.future.done():
            self.future.set_result(verdict)

    def refuse(self, refused: "_Refused") -> None:
        if not self.future.done():
            self.future.set_exception(refused)


@dataclass(eq=False)
class _Endpoint:
    url: str
    name: str = ""
    open_requests: int = 0
    posted: list[list[_Waiting]] = field(default_factory=list)  # bundles whose replies have not ended
    answered_at: float = field(default_factory=time.monotonic)  # time of the last verdict
    judged_at: dict[str, deque[float]] = field(default_factory=dict)  # by task: times of the last verdicts that count
    pause: Pause = field(default_factory=Pause)  # other servers are preferred meanwhile


class _Refused(Exception):
    """A server rejected a POST as invalid, and would reject it again."""


@dataclass
class ClientStats:
    """Counts of requests and failures since the start of a client."""

    posts: int = 0
    retries: int = 0  # of requests, not of POSTs
    connection_failures: int = 0  # POSTs that failed, malformed replies included


class _Endpoints:
    """The ready reward servers, found by their endpoint files in a folder."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._read_at = -math.inf
        self._known: dict[str, _Endpoint] = {}

    def _read(self) -> None:
        known: dict[str, _Endpoint] = {}
        for endpoint in endpoints_in(self._folder):
            if endpoint.kind == "rewards" and endpoint.ready:
                known[endpoint.url] = self._known.get(endpoint.url) or _Endpoint(endpoint.url, endpoint.name)
        self._known = known

    def known(self) -> list[_Endpoint]:
        return list(self._known.values())

    def choose(self, now: float) -> _Endpoint | None:
        """Return the server with the fewest open requests among those not in back-off after a failure.

        If all servers are in back-off, return the one whose back-off ends first.  Return None if no server is ready.
        """
        if not self._known or now >= self._read_at + _READ_EVERY_S:
            self._read()
            self._read_at = now
        servers = self._known.values()
        return min(servers, key=lambda server: (max(0.0, server.pause.until - now), server.open_requests), default=None)


class RewardClient:
    """A client of all ready reward servers.  Use it as an async context manager, within one event loop."""

    def __init__(self, endpoints_dir: Path, token_file: Path, options: ClientOptions | None = None) -> None:
        self.options = options or ClientOptions()
        self.stats = ClientStats()
        self._token_file = Path(token_file)
        self._endpoints = _Endpoints(Path(endpoints_dir))
        self._bundle: list[_Waiting] = []
        self._bundle_bytes = 0
        self._flush: asyncio.TimerHandle | None = None
        self._flushed_at = -math.inf  # time of the last POST on the loop's clock
        self._keys = itertools.count()
        self._session: aiohttp.ClientSession | None = None
        self._tasks: set[asyncio.Task[None]] = set()
        self._no_server = self._last_error = f"no reward server is ready in {endpoints_dir}"
        self._warned_at = -_WARN_EVERY_S
        self._failure_warned_at = self._slow_warned_at = -math.inf
        self._open = 0  # requests without a verdict, sent or not

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
        """Return the verdict on one request.  Never raises because of a server; may be cancelled at any time.

        Args:
            request: A reward request as a JSON object.
        """
        self._open += 1
        try:
            verdict = await until_judged(lambda: self._once(request, deadline), deadline, self._on_retry)
        except _Refused as refused:
            return failed_verdict(request["id"], "infrastructure", str(refused))
        finally:
            self._open -= 1
        late = f"{deadline.error()}; last: {self._last_error}"
        return failed_verdict(request["id"], "infrastructure", late) if verdict is None else verdict

    def waiting(self) -> str:
        """Return the reward servers with open requests as text.  Any thread may call this."""
        now, parts = time.monotonic(), []
        if self._open and not any(server.posted for server in self._endpoints.known()):
            return f"{self._open} requests wait for a reward server: {self._last_error}"
        for server in self._endpoints.known():
            waits = [request for bundle in list(server.posted) for request in bundle if not request.future.done()]
            if waits:
                oldest = min(waits, key=lambda request: request.began)
                silent_s, open_s = now - max(server.answered_at, oldest.began), now - oldest.began
                parts.append(
                    f"{server.name} has {len(waits)} open requests, no verdict for {silent_s:.0f} s, the oldest open"
                    f" for {open_s:.0f} s (task {oldest.task}, prompt {oldest.request_id})"
                )
        return ", ".join(parts)

    def _on_retry(self, verdict: Verdict | None) -> None:
        self.stats.retries += 1
        if verdict is None:
            return
        self._last_error, now = verdict["detail"], time.monotonic()
        if now - self._failure_warned_at >= _WARN_FAILURE_EVERY_S:
            self._failure_warned_at = now
            _log.warning("no verdict on prompt %s, which is sent again: %s", verdict["id"], verdict["detail"])

    def _count_progress(self, waiting: _Waiting) -> None:
        """Count the deadline of a request from the last verdict of its server on the same task."""
        late, server, now = waiting.deadline.passed, waiting.server, time.monotonic()
        if server is None or not (judged_at := server.judged_at.get(waiting.task)):
            return
        waiting.deadline.progressed(judged_at[-1])
        if late and not waiting.deadline.passed and now - self._slow_warned_at >= _WARN_FAILURE_EVERY_S:
            self._slow_warned_at = now
            left = sum(not request.future.done() for bundle in server.posted for request in bundle)
            each = (judged_at[-1] - judged_at[0]) / max(1, len(judged_at) - 1)
            _log.warning(
                "a response of task %s has waited %.0f s for its verdict: %s has %d open requests, and judges one every"
                " %.2g s.  More rewards.workers judge more responses at a time",
                *(waiting.task, now - waiting.began, server.name, left, each),
            )

    async def _once(self, request: dict[str, Any], deadline: Deadline) -> Verdict | None:
        """Add a request to the next POST and return its verdict; None if no verdict arrives.

        Raises:
            _Refused: A server rejected the request as invalid.
        """
        loop = asyncio.get_running_loop()
        key = next(self._keys)
        body = json.dumps({**request, "key": key}).encode()
        waiting = _Waiting(
            request["id"], key, body=body, deadline=deadline, future=loop.create_future(), task=str(request.get("task"))
        )
        if self._bundle and self._bundle_bytes + len(body) > self.options.batch_bytes:
            self._send_bundle()
        self._bundle.append(waiting)
        self._bundle_bytes += len(body)
        if len(self._bundle) >= self.options.batch_size:
            self._send_bundle()
        elif self._flush is None:
            at = max(loop.time() + self.options.batch_wait_s, self._flushed_at + self.options.batch_gap_s)
            self._flush = loop.call_at(at, self._send_bundle)
        try:
            while not (await asyncio.wait({waiting.future}, timeout=deadline.remaining))[0]:
                self._count_progress(waiting)
                if deadline.passed:
                    return None
            self._count_progress(waiting)  # a retry has the whole limit again
            return waiting.future.result()
        finally:
            waiting.future.cancel()

    def _send_bundle(self) -> None:
        if self._flush is not None:
            self._flush.cancel()
            self._flush = None
        self._flushed_at = asyncio.get_running_loop().time()
        bundle = [waiting for waiting in self._bundle if not waiting.future.done()]
        self._bundle, self._bundle_bytes = [], 0
        if bundle:
            self._start_post(bundle)

    def _start_post(self, bundle: list[_Waiting]) -> None:
        task = asyncio.create_task(self._post(bundle))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _post(self, bundle: list[_Waiting]) -> None:
        """Send a bundle of requests in one POST to one server, and set the result of each request's attempt.

        The result is the verdict; None if no verdict arrived, so that the request is retried.  If the server rejects
        the POST as invalid, each request is sent again alone; a request that is rejected alone ends with _Refused.
        """
        now = time.monotonic()
        server = self._endpoints.choose(now)
        if server is None and now - self._warned_at >= _WARN_EVERY_S:
            self._warned_at = now
            _log.warning("%d reward requests wait for a reward server: %s", len(bundle), self._no_server)
        if server is None or not server.pause.over:  # all servers failed recently: retry after the back-off
            for waiting in bundle:
                waiting.settle(None)
            return
        unsettled = bundle
        server.open_requests += len(bundle)
        server.posted.append(bundle)
        self.stats.posts += 1
        try:
            await self._exchange_in_time(server, bundle)
            server.pause.failures = 0
        except _Refused as refused:
            _log.warning("reward server %s rejected a POST of %d requests: %s", server.url, len(bundle), refused)
            if len(bundle) == 1:
                bundle[0].refuse(refused)
            else:
                unsettled = []
                for waiting in bundle:
                    self._start_post([waiting])
        except (aiohttp.ClientError, OSError, ValueError) as error:
            self.stats.connection_failures += 1
            self._last_error = f"reward server {server.url}: {type(error).__name__}: {error}"
            if server.pause.failed():
                count = server.pause.failures
                _log.warning("%s (failure %d in a row; its requests are retried)", self._last_error, count)
        finally:
            server.open_requests -= len(bundle)
            server.posted.remove(bundle)
            for waiting in unsettled:
                waiting.settle(None)

    async def _exchange_in_time(self, server: _Endpoint, bundle: list[_Waiting]) -> None:
        """Send one POST as `_exchange` does; raise TimeoutError once the deadlines of all its requests have passed."""
        for waiting in bundle:
            waiting.server = server
        if self._last_error == self._no_server:
            self._last_error = f"reward server {server.name} was sent the request, and gave no verdict"
        exchange = asyncio.ensure_future(self._exchange(server, bundle))
        try:
            while not exchange.done():
                left = max(waiting.deadline.remaining for waiting in bundle)
                await asyncio.wait({exchange}, timeout=left + 1.0)  # meanwhile `_once` counts progress
                if not exchange.done() and all(waiting.deadline.passed for waiting in bundle):
                    raise TimeoutError(f"no verdict on {len(bundle)} requests before their deadline")
            exchange.result()
        finally:
            exchange.cancel()

    async def _exchange(self, server: _Endpoint, bundle: list[_Waiting]) -> None:
        """Send one POST, and set the result of each attempt when its verdict arrives in the reply.

        Raises:
            _Refused: The server rejected the POST as invalid.
            aiohttp.ClientError, OSError, ValueError: The connection broke, or the reply is malformed.
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
        timeout = aiohttp.ClientTimeout(total=None, sock_connect=5.0)
        async with self._session.post(
            f"{server.url}/v1/score", data=body, headers=headers, timeout=timeout
        ) as response:
            if response.status != 200:
                fault = f"HTTP {response.status}: {(await response.text())[:300]}"
                raise _Refused(fault) if response.status in _REJECTED else ValueError(fault)
            of_key = {waiting.key: waiting for waiting in bundle}
            async for line in response.content:
                verdict = json.loads(line)
                task = take_verdict(verdict, of_key).task
                server.answered_at = time.monotonic()
                if verdict["failure"] != "infrastructure":
                    server.judged_at.setdefault(task, deque(maxlen=_PACE_OF)).append(server.answered_at)


def take_verdict(verdict: Any, of_key: dict[int, _Waiting]) -> _Waiting:
    """Give a verdict from a server to the waiting attempt with the same key, and return this attempt.

    Args:
        of_key: Open attempts of the POST by key; the attempt that gets the verdict is removed.

    Raises:
        ValueError: No open attempt has this key, or the verdict is malformed or has another request's id.
    """
    key = verdict.pop("key", None)
    waiting = of_key.pop(key, None)
    if waiting is None:
        raise ValueError(f"the server sent a verdict with key {key!r}, but no open request has this key")
    waiting.settle(read_verdict(verdict, waiting.request_id))
    return waiting
