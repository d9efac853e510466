"""One engine at one address: what it is asked, and what it answers."""

import hashlib
import json
import math
import stat
from collections.abc import AsyncGenerator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import aiohttp

from nemo_prorl.deadlines import Deadline
from nemo_prorl.errors import ConfigError, EngineFailure, EngineRefused

_FAULTS = (aiohttp.ClientError, TimeoutError, ConnectionError, ValueError, TypeError)  # of a connection or a reply
_SILENCE_S = 60.0  # a stream says an empty line every 10 s; silence means that the server or the network is gone


@dataclass(frozen=True)
class SamplingParams:
    """How responses are drawn.

    `stop_token_ids` None: those of the model's config.json.  `logprobs` False: a response comes without them.
    """

    temperature: float = 1.0
    top_p: float = 1.0
    max_tokens: int = 16
    stop_token_ids: tuple[int, ...] | None = None
    logprobs: bool = True


@dataclass(frozen=True)
class Response:
    """One response: tokens with the stop token if it ended, and their log-probabilities at the sampling temperature."""

    index: int
    token_ids: list[int]
    logprobs: list[float]
    finish_reason: str  # stop | length
    weight_version: int

    @property
    def finished(self) -> bool:
        """Whether it ended by itself, with a stop token."""
        return self.finish_reason == "stop"


def response_seed(run_seed: int, prompt_id: str, visit: int, sample: int) -> int:
    """The seed of one response, in 0..2**63-1: its tokens do not depend on what is generated beside it."""
    key = json.dumps([run_seed, prompt_id, visit, sample]).encode()
    return int.from_bytes(hashlib.blake2b(key, digest_size=8).digest(), "little") >> 1


def read_token(path: str | Path) -> str:
    """Return the run's token; ConfigError for a file that others can read, or that holds none."""
    file = Path(path)
    if file.stat().st_mode & (stat.S_IRWXG | stat.S_IRWXO):
        raise ConfigError(f"{file}: the token must be unreadable to others (chmod 600)")
    if not (token := file.read_text(encoding="ascii").strip()):
        raise ConfigError(f"{file}: is empty; it must hold the run's token")
    return token


class EngineClient:
    """One running engine at one address."""

    def __init__(self, http: aiohttp.ClientSession, url: str, token: str) -> None:
        self.url = url
        self._http = http
        self._headers = {"Authorization": f"Bearer {token}"}

    async def generate(
        self, prompt_ids: Sequence[int], seeds: Sequence[int], sampling: SamplingParams, version: int | None
    ) -> AsyncGenerator[Response, None]:
        """Responses as they end, `index` counting the seeds.

        Raises EngineFailure for a cut or silent stream, EngineRefused for a request that the engine calls wrong.
        """
        body = {"prompt": list(prompt_ids), "seeds": list(seeds), **asdict(sampling), "weight_version": version}
        timeout = aiohttp.ClientTimeout(total=None, sock_connect=10, sock_read=_SILENCE_S)
        done = False
        try:
            async with self._http.post(
                self.url + "/generate", json=body, headers=self._headers, timeout=timeout
            ) as reply:
                await self._raise_for_status(reply)
                async for line in reply.content:
                    if not line.strip():
                        continue
                    value = json.loads(line)
                    if "error" in value:
                        raise EngineFailure(f"{self.url}: {value['error']}")
                    if done := "done" in value:
                        break
                    yield self._checked(value, len(seeds), sampling.logprobs)
        except (EngineFailure, EngineRefused):  # a ConnectionError, a ValueError
            raise
        except _FAULTS as error:
            raise EngineFailure(f"{self.url}: {type(error).__name__}: {error}") from error
        if not done:
            raise EngineFailure(f"{self.url}: the stream was cut")

    def _checked(self, value: dict[str, Any], count: int, logprobs: bool) -> Response:
        response = Response(**value)
        if not 0 <= response.index < count or len(response.logprobs) != logprobs * len(response.token_ids):
            raise EngineFailure(f"{self.url}: a response that makes no sense, index {response.index} of {count}")
        if not all(map(math.isfinite, response.logprobs)):
            raise EngineRefused(
                f"{self.url}: a log-probability is not finite; the weights of version {response.weight_version} are bad"
            )
        return response

    async def load_weights(self, path: str, version: int, deadline: Deadline) -> None:
        """Loads a published file once the engine is idle."""
        body = {"path": path, "version": version, "wait_s": deadline.remaining}
        await self._call("/weights", deadline, body)

    async def sleep(self, level: int, deadline: Deadline) -> dict[str, Any]:
        """Gives the device's memory away once the engine is idle; its account, with `freed_bytes`."""
        return await self._call("/sleep", deadline, {"level": level, "wait_s": deadline.remaining})

    async def wake(self, part: str, deadline: Deadline) -> dict[str, Any]:
        """Takes the memory of `weights` or `kv_cache` back; an awake engine stays as it is."""
        return await self._call("/wake", deadline, {"parts": [part]})

    async def _call(self, path: str, deadline: Deadline, body: dict[str, Any]) -> dict[str, Any]:
        timeout = aiohttp.ClientTimeout(total=deadline.remaining, sock_connect=10)
        try:
            async with self._http.post(self.url + path, json=body, headers=self._headers, timeout=timeout) as reply:
                await self._raise_for_status(reply)
                answer: dict[str, Any] = await reply.json()
                return answer
        except (EngineFailure, EngineRefused):
            raise
        except _FAULTS as error:
            raise EngineFailure(f"{self.url}{path}: {type(error).__name__}: {error}") from error

    async def _raise_for_status(self, reply: aiohttp.ClientResponse) -> None:
        if reply.status == 200:
            return
        text = (await reply.text())[:500]
        # 409: busy, or other weights; both pass.  404, 405: no engine at all, a dead one's port was taken over.
        wrong = 400 <= reply.status < 500 and reply.status not in (404, 405, 409)
        raise (EngineRefused if wrong else EngineFailure)(f"{reply.url}: HTTP {reply.status}: {text}")
