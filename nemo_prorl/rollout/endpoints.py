"""Client of one rollout engine at one address: requests, responses and errors."""

import hashlib
import json
import math
from collections.abc import AsyncGenerator, Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import aiohttp

from nemo_prorl.deadlines import Deadline
from nemo_prorl.errors import EngineFailure, EngineRefused

# Errors of a connection, and of a reply that is not the expected JSON.
_FAULTS = (aiohttp.ClientError, TimeoutError, ConnectionError, ValueError, TypeError)
_SILENCE_S = 60.0  # seconds; a stream has a line at least every 10 s, so silence means a lost server or network


@dataclass(frozen=True)
class SamplingParams:
    """Sampling parameters of a request.

    `stop_token_ids` None uses the stop tokens of the model's config.json.  `logprobs` False omits log-probabilities.
    `forced`: the tokens of the response.  The engine then samples nothing and computes their log-probabilities.
    """

    temperature: float = 1.0
    top_p: float = 1.0
    max_tokens: int = 16
    stop_token_ids: tuple[int, ...] | None = None
    logprobs: bool = True
    forced: tuple[int, ...] | None = None


@dataclass(frozen=True)
class Response:
    """A response to a prompt.

    `index`: position of its seed in the request.  `token_ids`: with the stop token, if the response ended with one.
    `logprobs`: one per token, with temperature and top_p applied; empty if not requested.
    """

    index: int
    token_ids: list[int]
    logprobs: list[float]
    finish_reason: str  # stop | length
    weight_version: int

    @property
    def finished(self) -> bool:
        """Return whether the response ended with a stop token."""
        return self.finish_reason == "stop"


def response_seed(run_seed: int, prompt_id: str, visit: int, sample: int) -> int:
    """Return the seed of a response, in 0..2**63-1.

    A response with its own seed does not depend on the responses that the engine generates at the same time.

    `visit`: number of earlier draws of the prompt.  `sample`: number of the response in its group, from 0.
    """
    key = json.dumps([run_seed, prompt_id, visit, sample]).encode()
    return int.from_bytes(hashlib.blake2b(key, digest_size=8).digest(), "little") >> 1


class EngineClient:
    """HTTP client of one running engine."""

    def __init__(self, http: aiohttp.ClientSession, url: str, token: str) -> None:
        self.url = url
        self._http = http
        self._headers = {"Authorization": f"Bearer {token}"}

    async def generate(
        self,
        prompt_ids: Sequence[int],
        seeds: Sequence[int],
        sampling: SamplingParams,
        version: int | None,
        on_tokens: Callable[[int], object] = lambda tokens: None,
        on_kv_cache_use: Callable[[float, int], object] = lambda share, preemptions: None,
    ) -> AsyncGenerator[Response, None]:
        """Yield each response as soon as it ends.

        `version`: required version of the weights; None: any.  `on_tokens`: called after each 10 s in which no response
        ended; its argument is the number of tokens that the engine has generated since its start, for all requests.
        `on_kv_cache_use`: called at the end with the largest share of the KV cache in use and the number of preemptions
        since the engine's last report; not called if the engine does not report them.

        Raises:
            EngineFailure: the reply was cut off, nothing came for 60 s, or the engine sleeps or has other weights.
            EngineRefused: the engine rejects the request, or a log-probability is not finite.
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
                    value = json.loads(line)
                    if "error" in value:
                        raise EngineFailure(f"{self.url}: {value['error']}")
                    if "tokens" in value:
                        on_tokens(int(value["tokens"]))
                        continue
                    if done := "done" in value:
                        if "kv_cache_peak" in value:
                            on_kv_cache_use(float(value["kv_cache_peak"]), int(value["preemptions"]))
                        break
                    yield self._checked(value, len(seeds), sampling.logprobs)
        except (EngineFailure, EngineRefused):  # they are subclasses of ConnectionError and ValueError
            raise
        except _FAULTS as error:
            raise EngineFailure(f"{self.url}: {type(error).__name__}: {error}") from error
        if not done:
            raise EngineFailure(f"{self.url}: the reply was cut off before its last line")

    def _checked(self, value: dict[str, Any], count: int, logprobs: bool) -> Response:
        response = Response(**value)
        if not 0 <= response.index < count or len(response.logprobs) != logprobs * len(response.token_ids):
            got = f"{response.index}, {len(response.token_ids)} tokens, {len(response.logprobs)} log-probabilities"
            wanted = (
                f"an index below {count}, {'one log-probability per token' if logprobs else 'no log-probabilities'}"
            )
            raise EngineFailure(f"{self.url}: invalid response: expected {wanted}; got index {got}")
        if not all(map(math.isfinite, response.logprobs)):
            raise EngineRefused(
                f"{self.url}: a log-probability is not finite: weights {response.weight_version} are damaged"
            )
        return response

    async def load_weights(self, path: str, version: int, deadline: Deadline) -> list[str]:
        """Make the engine load a weights file once it has no open response, and wait for this.

        Returns:
            names of the file's tensors that the engine could not compare with what it then holds.
        """
        body = {"path": path, "version": version, "wait_s": deadline.remaining}
        return list((await self._call("/weights", deadline, body))["unread"])

    async def sleep(self, level: int, deadline: Deadline) -> dict[str, Any]:
        """Make the engine release its device memory once it has no open response; return its reply (`freed_bytes`)."""
        return await self._call("/sleep", deadline, {"level": level, "wait_s": deadline.remaining})

    async def wake(self, part: str, deadline: Deadline) -> dict[str, Any]:
        """Make the engine take back the memory of `part`: "weights" or "kv_cache".  An awake engine does not change."""
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
        # 409: busy, or other weights; both are temporary.  404, 405: another program has the port of a dead engine.
        wrong = 400 <= reply.status < 500 and reply.status not in (404, 405, 409)
        raise (EngineRefused if wrong else EngineFailure)(f"{reply.url}: HTTP {reply.status}: {text}")
