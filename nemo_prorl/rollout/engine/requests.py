"""Types of the request bodies of an engine, with checks that run before vLLM gets a request.

Without a tokenizer vLLM does not check token ids, and an id beyond the embedding table kills the engine.  Every field
is therefore checked here.
"""

from dataclasses import dataclass
from typing import Annotated, Literal, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError

MAX_RESPONSES = 4096  # per request
PARTS: tuple[Literal["weights"], Literal["kv_cache"]] = ("weights", "kv_cache")  # names in vLLM, in the order of waking

Seed = Annotated[int, Field(ge=0, lt=2**63)]
WaitS = Annotated[float, Field(ge=0, le=1e6)]  # seconds to wait until no response is in flight


class BadRequest(ValueError):
    """An invalid request.  The reply has HTTP status 400; the text names the field, its value and the valid values."""


class Body(BaseModel):
    """A JSON object without unknown fields."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)


class GenerateRequest(Body):
    """POST /generate: one vLLM request for each seed."""

    prompt: Annotated[list[int], Field(min_length=1)]
    seeds: Annotated[list[Seed], Field(min_length=1, max_length=MAX_RESPONSES)]
    temperature: Annotated[float, Field(ge=0, le=100)] = 1.0
    top_p: Annotated[float, Field(ge=1e-6, le=1)] = 1.0
    max_tokens: Annotated[int, Field(ge=1)] = 16
    stop_token_ids: list[int] | None = None  # default: stop tokens of the model's config.json
    weight_version: Annotated[int, Field(ge=-1)] | None = None
    logprobs: bool = True
    forced: Annotated[list[int], Field(min_length=1)] | None = None  # tokens of the response, instead of sampled ones


class WeightsRequest(Body):
    """POST /weights: load a weights file.  `weight_load.check_fits` checks the file."""

    path: Annotated[str, Field(min_length=1)]
    version: Annotated[int, Field(ge=0)]
    wait_s: WaitS = 0.0


class SleepRequest(Body):
    """POST /sleep: level 1 moves the weights to host memory, level 2 drops them."""

    level: Annotated[int, Field(ge=1, le=2)]
    wait_s: WaitS = 0.0


class WakeRequest(Body):
    """POST /wake: take back the device memory of these parts of the engine."""

    parts: Annotated[list[Literal["weights", "kv_cache"]], Field(min_length=1)] = list(PARTS)


class TraceRequest(Body):
    """POST /trace: start a recording, or end it and return it."""

    record: bool


AnyBody = TypeVar("AnyBody", bound=Body)


def parse(kind: type[AnyBody], body: bytes) -> AnyBody:
    """Return the request of type `kind` in a JSON body.  Raises BadRequest, which describes the first fault."""
    try:
        return kind.model_validate_json(body)
    except ValidationError as error:
        fault = error.errors(include_url=False)[0]
    field, known = ".".join(map(str, fault["loc"])), ", ".join(sorted(kind.model_fields))
    if fault["type"] == "extra_forbidden":
        raise BadRequest(f"unknown field {field!r}; known: {known}")
    got = "" if fault["type"] == "missing" else f", not {fault['input']!r:.60}"
    raise BadRequest(f"{field or 'the body'}: {fault['msg']}{got}")


@dataclass(frozen=True)
class ModelLimits:
    """Limits of the engine's model."""

    context_tokens: int
    vocab_size: int
    stop_token_ids: tuple[int, ...]

    def check(self, request: GenerateRequest) -> None:
        """Raise BadRequest for values that would crash vLLM, or that vLLM would replace without an error."""
        forced = request.forced or []
        for token in request.prompt + (request.stop_token_ids or []) + forced:
            if not 0 <= token < self.vocab_size:
                raise BadRequest(f"{token} is not a token id in 0..{self.vocab_size - 1}")
        if forced and not request.logprobs:
            raise BadRequest("forced: expected logprobs true, because the tokens are given")
        room, most = self.context_tokens - len(request.prompt), len(forced) or request.max_tokens
        if most > room:
            raise BadRequest(
                f"a prompt of {len(request.prompt)} tokens and max_tokens {most} do not fit the context "
                f"of {self.context_tokens} tokens; "
                + (f"max_tokens may be at most {room}" if room > 0 else "the prompt leaves no room for a response")
            )
        if 0 < request.temperature < 0.01:  # vLLM would raise it to 0.01
            raise BadRequest(f"temperature must be 0 or in 0.01..100, not {request.temperature}")
