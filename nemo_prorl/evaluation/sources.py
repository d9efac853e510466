"""Sources of responses: this machine's engines, or a server with OpenAI's API.

Both have a deadline per prompt, retry after network errors and dead servers, and raise when the deadline has passed.
A missing response is therefore never counted as a wrong one.
"""

import asyncio
import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from nemo_prorl.deadlines import Deadline
from nemo_prorl.errors import ConfigError, DataError, EngineRefused
from nemo_prorl.evaluation.catalogue import Sampling
from nemo_prorl.openai_client import OpenAIClient, RequestRefused
from nemo_prorl.rewards.interface import opened_thought
from nemo_prorl.rollout.endpoints import Response, SamplingParams
from nemo_prorl.rollout.engines import EnginePool

if TYPE_CHECKING:
    from nemo_prorl.data.render import PromptRenderer

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Reply:
    """One response.  `tokens` is None if the endpoint did not report the number of response tokens."""

    text: str
    finished: bool  # False: cut off before its end
    tokens: int | None


OnReply = Callable[[int, Reply], None]


class ResponseSource(Protocol):
    """A source that samples responses to prompts."""

    max_concurrent: int  # concurrent responses that keep the source busy

    @property
    def generated_tokens(self) -> int:
        """Return the number of tokens generated so far, unfinished responses included; 0 if the number is not known."""

    def check(self, record: Mapping[str, Any], sampling: Sampling) -> int | None:
        """Return the most tokens of a response to the prompt, None if not known; DataError if there is no room."""

    async def generate(
        self, record: Mapping[str, Any], sampling: Sampling, seeds: Sequence[int], on_reply: OnReply
    ) -> None:
        """Sample one response per seed; when a response ends, call `on_reply` with its seed's index and the reply."""

    async def close(self) -> None: ...


class LocalEngines:
    """The engines of this machine, which exchange token ids.  Each prompt goes to the least loaded engine."""

    def __init__(
        self, renderer: "PromptRenderer", stop: Sequence[int], per_engine: int, engines: int, seconds: float
    ) -> None:
        """Use the engines of a run.

        Args:
            renderer: Turns prompts into tokens.
            stop: Ids of the model's end tokens.
            per_engine: Concurrent responses that keep one engine busy.
            engines: Number of engines.
            seconds: Deadline: longest time in which no response to a prompt ends and no token is generated.
        """
        self.max_concurrent = per_engine * engines
        self._renderer, self._stop = renderer, tuple(sorted(stop))
        self._per_engine, self._seconds = per_engine, seconds
        self._pool: EnginePool | None = None

    @property
    def generated_tokens(self) -> int:
        return 0 if self._pool is None else self._pool.generated_tokens

    def connect(self, endpoints: Path, token: str, engines: int) -> None:
        """Connect to the engines that announce themselves in the folder `endpoints`.  Call it before `generate`."""
        self._pool = EnginePool(endpoints, token, engines, self._per_engine)

    def check(self, record: Mapping[str, Any], sampling: Sampling) -> int | None:
        return self.request(record, sampling)[1].max_tokens

    def request(self, record: Mapping[str, Any], sampling: Sampling) -> tuple[list[int], SamplingParams]:
        """Return the prompt's token ids and the sampling parameters.

        Raises DataError if the prompt leaves no room for a response in the context.
        """
        ids = self._renderer.prompt_ids(dict(record))
        room = sampling.context - len(ids)
        if room < 1:
            raise DataError(
                f"record {record['id']!r}: its prompt of {len(ids)} tokens leaves no room for a response in the"
                f" context of {sampling.context}. Fix: --context N, at most the model's; or leave such prompts out with"
                " --tokenizer MODEL --max-prompt-tokens N of prorl data prepare"
            )
        most = room if sampling.max_response is None else min(room, sampling.max_response)
        return ids, SamplingParams(sampling.temperature, sampling.top_p, most, self._stop, logprobs=False)

    async def generate(
        self, record: Mapping[str, Any], sampling: Sampling, seeds: Sequence[int], on_reply: OnReply
    ) -> None:
        assert self._pool is not None, "call connect first"

        def ended(response: Response) -> None:
            text = self._renderer.judged_text(ids, response.token_ids)
            on_reply(response.index, Reply(text, response.finished, len(response.token_ids)))

        awaited = f"a new token, with responses to {record['id']!r} open (trainer.deadlines.rollout_s)"
        deadline = Deadline(self._seconds, awaited)
        ids, params = self.request(record, sampling)
        await self._pool.generate(ids, seeds, params, deadline, ended)

    async def close(self) -> None:
        if self._pool is not None:
            await self._pool.close()


class ServedModel:
    """A model on an OpenAI-compatible server.  Messages go to /chat/completions, text prompts to /completions."""

    def __init__(
        self,
        url: str,
        name: str,
        token: str | None,
        max_concurrent: int,
        seconds: float,
        opens_thought: bool = False,
    ) -> None:
        """Use a server with OpenAI's API.

        Args:
            url: URL up to /v1.
            name: Name of the model on the server.
            token: Sent as a bearer token, if any.
            max_concurrent: Maximum concurrent requests.
            seconds: Deadline for one response, retries included.
            opens_thought: The server's chat template ends the prompt in `<think>`.
        """
        self.max_concurrent = max_concurrent
        self._opens_thought, self._warned = opens_thought, False
        self._server, self._name, self._seconds = OpenAIClient(url, token), name, seconds
        self._room = asyncio.Semaphore(max_concurrent)
        self.generated_tokens = 0

    def check(self, record: Mapping[str, Any], sampling: Sampling) -> int | None:
        self._body(record, sampling, 0)
        return None

    def _body(self, record: Mapping[str, Any], sampling: Sampling, seed: int) -> dict[str, Any]:
        body: dict[str, Any] = {"model": self._name, "temperature": sampling.temperature, "top_p": sampling.top_p}
        body |= {"seed": seed, "n": 1}
        prompt = record["prompt"]
        if not isinstance(prompt, str):
            most = {} if sampling.max_response is None else {"max_tokens": sampling.max_response}
            return {**body, "messages": prompt, **most}  # the server uses its whole context if there is no max_tokens
        # Without max_tokens servers generate 16 tokens. A prompt has at most as many tokens as bytes.
        room = sampling.max_response or sampling.context - len(prompt.encode())
        if room < 1:
            raise DataError(
                f"record {record['id']!r}: its prompt of {len(prompt.encode())} bytes has up to as many tokens and may"
                f" fill the context of {sampling.context} tokens. Fix: a larger --context N, or --max-response N"
            )
        return {**body, "prompt": prompt, "max_tokens": room}

    async def generate(
        self, record: Mapping[str, Any], sampling: Sampling, seeds: Sequence[int], on_reply: OnReply
    ) -> None:
        async def one(index: int, seed: int) -> None:
            async with self._room:
                reply = await self._reply(record, self._body(record, sampling, seed))
                on_reply(index, replace(reply, text=self._judged_text(record["prompt"], reply.text)))

        try:
            async with asyncio.TaskGroup() as group:
                for index, seed in enumerate(seeds):
                    group.create_task(one(index, seed))
        except BaseExceptionGroup as errors:
            raise errors.exceptions[0] from None

    def _judged_text(self, prompt: Any, text: str) -> str:
        """Return the response for the verifiers, with `<think>` put before it if the prompt ends in `<think>`."""
        if isinstance(prompt, str):
            return opened_thought(prompt) + text
        if self._opens_thought:
            return text if text.startswith("<think>") else "<think>" + text
        before, closing, _ = text.partition("</think>")
        if closing and "<think>" not in before and not self._warned:
            self._warned = True
            _log.warning(
                "%s: a response has </think> without <think>. Fix: --opens-thought; without it, a response "
                "that was truncated inside its thought is judged as an answer",
                self._server.url,
            )
        return text

    async def _reply(self, record: Mapping[str, Any], body: dict[str, Any]) -> Reply:
        """Request one response.

        Raises:
            DeadlineExceeded: No try succeeded in time; the message has the last error.
            EngineRefused, ConfigError: The server refused the request; a retry cannot succeed.
        """
        chat, url = "messages" in body, self._server.url
        deadline = Deadline(self._seconds, f"{url} to answer {record['id']!r} (trainer.deadlines.rollout_s)")

        def read(value: Any) -> Reply:
            try:
                return _reply_of(value, chat)
            except (KeyError, IndexError, TypeError) as error:
                text = f"{url}: expected an answer in OpenAI's format ({error!r}); got: {str(value)[:200]}"
                raise EngineRefused(text) from error

        try:
            return await self._server.post("/chat/completions" if chat else "/completions", body, deadline, read)
        except RequestRefused as error:
            if error.status in (401, 403):
                raise ConfigError(
                    f"{error}\nThe environment variable that --token-env names must contain the token"
                ) from None
            if error.status == 404:
                raise ConfigError(
                    f"{error}\nMODEL must be the URL up to /v1, and --model a name that GET /v1/models lists"
                ) from None
            raise EngineRefused(str(error)) from None

    async def close(self) -> None:
        await self._server.close()


def _reply_of(value: Any, chat: bool) -> Reply:
    choice = value["choices"][0]
    if chat:
        message = choice["message"]
        text = message.get("content") or ""
        thinking = message.get("reasoning_content") or message.get("reasoning")
        if thinking:  # a server that separates the thought, which the verifiers need as text
            truncated = not text and choice["finish_reason"] == "length"
            text = f"<think>{thinking}{'' if truncated else '</think>'}{text}"
    else:
        text = choice["text"]
    if not isinstance(text, str):
        raise TypeError(f"expected the text as a string; got {type(text).__name__}")
    reason = choice["finish_reason"]
    tokens = (value.get("usage") or {}).get("completion_tokens")
    return Reply(text, reason == "stop", int(tokens) if isinstance(tokens, int) else None)
