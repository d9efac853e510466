"""A client of a server with OpenAI's API; until a deadline, it repeats requests whose failure may pass."""

import asyncio
import json
import logging
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

import aiohttp

from nemo_prorl.deadlines import Deadline
from nemo_prorl.errors import DeadlineExceeded, ProrlError

_log = logging.getLogger(__name__)

T = TypeVar("T")

_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.5, 30.0
_TEMPORARY = (408, 409, 425, 429)  # HTTP status below 500 after which a retry may succeed


class RequestRefused(Exception):
    """A request that the server refused with HTTP `status`; a retry cannot succeed.

    It does not reach users: callers say in an error of their own which option to change.
    """

    def __init__(self, status: int, text: str) -> None:
        super().__init__(text)
        self.status = status


class OpenAIClient:
    """A client of one server; call `close` at the end."""

    def __init__(self, url: str, token: str | None) -> None:
        """Connect at the first request.

        Args:
            url: URL up to /v1.
            token: sent as a bearer token, if any.
        """
        self.url = url.rstrip("/")
        self._headers = {"Authorization": f"Bearer {token}"} if token else {}
        self._http: aiohttp.ClientSession | None = None

    async def post(self, path: str, body: Mapping[str, Any], deadline: Deadline, read: Callable[[Any], T]) -> T:
        """Return what `read` makes of the JSON value that replies to a request.

        A busy server, a broken connection, and a reply that is not JSON or that `read` refuses with LookupError,
        TypeError or ValueError are retried, with growing pauses.

        Raises:
            RequestRefused: the server refused the request.
            DeadlineExceeded: no try succeeded in time; the message has the last error.
        """
        pause = _FIRST_PAUSE_S
        while True:
            try:
                return read(await self._once(self.url + path, body, deadline))
            except (aiohttp.ClientError, OSError, LookupError, TypeError, ValueError) as error:
                if isinstance(error, ProrlError):
                    raise
                fault = f"{type(error).__name__}: {error}"
            if deadline.remaining <= pause:
                raise DeadlineExceeded(f"{deadline.error()}; last error: {fault}")
            _log.debug("%s%s: %s; retrying", self.url, path, fault)
            await asyncio.sleep(pause)
            pause = min(2 * pause, _LONGEST_PAUSE_S)

    async def _once(self, url: str, body: Mapping[str, Any], deadline: Deadline) -> Any:
        if self._http is None:
            self._http = aiohttp.ClientSession(trust_env=True, headers=self._headers)
        timeout = aiohttp.ClientTimeout(total=max(1.0, deadline.remaining), sock_connect=30)
        async with self._http.post(url, json=body, timeout=timeout) as reply:
            text = await reply.text()
            if reply.status == 200:
                return json.loads(text)
            fault = f"HTTP {reply.status}: {' '.join(text.split())[:300]}"
            if 400 <= reply.status < 500 and reply.status not in _TEMPORARY:
                raise RequestRefused(reply.status, f"{url}: {fault}")
            raise ConnectionError(fault)

    async def close(self) -> None:
        if self._http is not None:
            await self._http.close()
