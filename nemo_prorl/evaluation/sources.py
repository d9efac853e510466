"""Where responses come from: this machine's engines, or an OpenAI-compatible address.

Both have a deadline for each prompt, try again what the network or a dead server took, and raise where it will not
pass: a response that did not come is no response, and never a wrong one.
"""

import asyncio
import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import aiohttp

from nemo_prorl.deadlines import Deadline
from nemo_prorl.errors import ConfigError, DataError, DeadlineExceeded, EngineFailure, EngineRefused
from nemo_prorl.evaluation.catalogue import Sampling
from nemo_prorl.rewards.interface import opened_thought
from nemo_prorl.rollout.endpoints import Response, SamplingParams
from nemo_prorl.rollout.engines import EnginePool

if TYPE_CHECKING:
    from nemo_prorl.data.render import PromptRenderer

_log = logging.getLogger(__name__)

_FIRST_BACKOFF_S, _LONGEST_BACKOFF_S = 0.5, 30.0
_HOPELESS = (400, 401, 403, 404, 405, 413, 422)  # asking again cannot help


@dataclass(frozen=True)
class Reply:
    """One response; `tokens` None: the endpoint did not say."""

    text: str
    finished: bool
    tokens: int | None


OnReply = Callable[[int, Reply], None]


class ResponseSource(Protocol):
    """Draws responses."""

    at_a_time: int  # responses asked for at a time that keep it busy

    def check(self, record: Mapping[str, Any], sampling: Sampling) -> None:
        """Raises DataError for a prompt that leaves no room in the context."""

    async def generate(
        self, record: Mapping[str, Any], sampling: Sampling, seeds: Sequence[int], on_reply: OnReply
    ) -> None:
        """Calls `on_reply` with the index of each seed, the moment its response ends."""

    async def close(self) -> None: ...


class LocalEngines:
    """The engines of this machine: tokens in, tokens out, to the least loaded."""

    def __init__(
        self, renderer: "PromptRenderer", stop: Sequence[int], at_each: int, engines: int, seconds: float
    ) -> None:
        """Use the engines of a run.

        Args:
            renderer: Turns prompts into tokens.
            stop: The model's end tokens.
            at_each: Responses at a time that keep one engine busy.
            engines: Number of engines.
            seconds: Limit for all responses to a prompt.
        """
        self.at_a_time = at_each * engines
        self._renderer, self._stop = renderer, tuple(sorted(stop))
        self._at_each, self._seconds = at_each, seconds
        self._pool: EnginePool | None = None

    def connect(self, endpoints: Path, token: str, engines: int) -> None:
        """To the engines that announce themselves in a folder; before the first `generate`."""
        self._pool = EnginePool(endpoints, token, engines, self._at_each)

    def check(self, record: Mapping[str, Any], sampling: Sampling) -> None:
        self.request(record, sampling)

    def request(self, record: Mapping[str, Any], sampling: Sampling) -> tuple[list[int], SamplingParams]:
        """Return the prompt's tokens and how an engine is to sample; raises DataError as `check` does."""
        ids = self._renderer.prompt_ids(dict(record))
        room = sampling.context - len(ids)
        if room < 1:
            raise DataError(
                f"record {record['id']!r}: its prompt has {len(ids)} tokens, and the context of {sampling.context}"
                " leaves no room for a response; --context N"
            )
        most = room if sampling.max_response is None else min(room, sampling.max_response)
        return ids, SamplingParams(sampling.temperature, sampling.top_p, most, self._stop, logprobs=False)

    async def generate(
        self, record: Mapping[str, Any], sampling: Sampling, seeds: Sequence[int], on_reply: OnReply
    ) -> None:
        assert self._pool is not None, "connect first"

        def ended(response: Response) -> None:
            text = self._renderer.judged_text(ids, response.token_ids)
            on_reply(response.index, Reply(text, response.finished, len(response.token_ids)))

        deadline = Deadline(self._seconds, f"the responses to {record['id']!r} (trainer.deadlines.rollout_s)")
        ids, params = self.request(record, sampling)
        await self._pool.generate(ids, seeds, params, deadline, ended)

    async def close(self) -> None:
        if self._pool is not None:
            await self._pool.close()


class Endpoint:
    """A model behind an OpenAI-compatible address: messages to /chat/completions, text to /completions."""

    def __init__(
        self,
        url: str,
        name: str,
        token: str | None,
        at_a_time: int,
        seconds: float,
        opens_thought: bool = False,
    ) -> None:
        """Use a server with OpenAI's API.

        Args:
            url: Address up to /v1.
            name: The server's name of the model.
            token: Sent as a bearer token, if any.
            at_a_time: Maximum concurrent requests.
            seconds: Limit for one response with all tries.
            opens_thought: The server's chat template ends the prompt in `<think>`.
        """
        self.at_a_time = at_a_time
        self._opens_thought, self._warned = opens_thought, False
        self._url, self._name, self._seconds = url, name, seconds
        self._headers = {} if token is None else {"Authorization": f"Bearer {token}"}
        self._http: aiohttp.ClientSession | None = None
        self._room = asyncio.Semaphore(at_a_time)

    def check(self, record: Mapping[str, Any], sampling: Sampling) -> None:
        self._body(record, sampling, 0)

    def _body(self, record: Mapping[str, Any], sampling: Sampling, seed: int) -> dict[str, Any]:
        body: dict[str, Any] = {"model": self._name, "temperature": sampling.temperature, "top_p": sampling.top_p}
        body |= {"seed": seed, "n": 1}
        prompt = record["prompt"]
        if not isinstance(prompt, str):
            most = {} if sampling.max_response is None else {"max_tokens": sampling.max_response}
            return {**body, "messages": prompt, **most}  # without: as many as the server's context allows
        # Servers make 16 tokens of text where nothing is said.  A token has a byte at least.
        room = sampling.max_response or sampling.context - len(prompt.encode())
        if room < 1:
            raise DataError(
                f"record {record['id']!r}: its prompt of {len(prompt.encode())} bytes may fill the context of"
                f" {sampling.context} tokens; give --context N or --max-response N"
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
        """Return a response as verifiers see it: behind the `<think>` that the prompt opened, if it opened one."""
        if isinstance(prompt, str):
            return opened_thought(prompt) + text
        if self._opens_thought:
            return text if text.startswith("<think>") else "<think>" + text
        before, closing, _ = text.partition("</think>")
        if closing and "<think>" not in before and not self._warned:
            self._warned = True
            _log.warning(
                "%s: a response closes a thought that it did not open. Give --opens-thought, or a response cut off "
                "inside its thought is judged as an answer",
                self._url,
            )
        return text

    async def _reply(self, record: Mapping[str, Any], body: dict[str, Any]) -> Reply:
        """Tries again, later each time, until the deadline; raises DeadlineExceeded, EngineRefused or ConfigError."""
        deadline = Deadline(self._seconds, f"{self._url} to answer {record['id']!r} (trainer.deadlines.rollout_s)")
        backoff = _FIRST_BACKOFF_S
        while True:
            try:
                return await self._once(body, deadline)
            except EngineFailure as error:
                if deadline.remaining <= backoff:
                    raise DeadlineExceeded(f"{deadline.error()}; last: {error}") from None
                _log.debug("%s; trying again", error)
                await asyncio.sleep(backoff)
                backoff = min(2 * backoff, _LONGEST_BACKOFF_S)

    async def _once(self, body: dict[str, Any], deadline: Deadline) -> Reply:
        if self._http is None:
            self._http = aiohttp.ClientSession(trust_env=True)
        chat = "messages" in body
        url = self._url + ("/chat/completions" if chat else "/completions")
        timeout = aiohttp.ClientTimeout(total=max(1.0, deadline.remaining), sock_connect=30)
        try:
            async with self._http.post(url, json=body, headers=self._headers, timeout=timeout) as answer:
                if answer.status != 200:
                    self._refused(url, answer.status, (await answer.text())[:300])
                value = await answer.json(content_type=None)
        except (aiohttp.ClientError, TimeoutError, ConnectionError, ValueError) as error:
            if isinstance(error, EngineFailure | EngineRefused | ConfigError):
                raise
            raise EngineFailure(f"{url}: {type(error).__name__}: {error}") from error
        try:
            return _reply_of(value, chat)
        except (KeyError, IndexError, TypeError) as error:
            raise EngineRefused(
                f"{url}: its answer is not of the OpenAI form ({error!r}): {str(value)[:200]}"
            ) from error

    def _refused(self, url: str, status: int, text: str) -> None:
        told = f"{url}: HTTP {status}: {text}"
        if status in (401, 403):
            raise ConfigError(f"{told}\nThe token must stand in the environment variable that --token-env names")
        if status == 404:
            raise ConfigError(f"{told}\nMODEL must be the address up to /v1, --model a name that GET /v1/models lists")
        raise (EngineRefused if status in _HOPELESS else EngineFailure)(told)

    async def close(self) -> None:
        if self._http is not None:
            await self._http.close()


def _reply_of(value: Any, chat: bool) -> Reply:
    choice = value["choices"][0]
    if chat:
        message = choice["message"]
        text = message.get("content") or ""
        thinking = message.get("reasoning_content") or message.get("reasoning")
        if thinking:  # a server that parses it out; judged is what follows
            cut_off = not text and choice["finish_reason"] == "length"
            text = f"<think>{thinking}{'' if cut_off else '</think>'}{text}"
    else:
        text = choice["text"]
    if not isinstance(text, str):
        raise TypeError(f"text is {type(text).__name__}")
    reason = choice["finish_reason"]
    tokens = (value.get("usage") or {}).get("completion_tokens")
    return Reply(text, reason == "stop", int(tokens) if isinstance(tokens, int) else None)
