"""What an engine accepts: parsing and checking of request bodies, without vLLM.

vLLM without a tokenizer does not check token ids, and one beyond the embedding table kills the engine.  So everything
is checked here, and what passes is safe to hand on.
"""

import hashlib
from dataclasses import dataclass
from typing import Any

MAX_RESPONSES = 4096
MAX_SEED = 2**63 - 1


class BadRequest(ValueError):
    """Becomes a 400: names the field, its value, and what would be right."""


@dataclass(frozen=True)
class ModelLimits:
    """What the engine's model can take."""

    context_tokens: int
    vocab_size: int
    stop_token_ids: tuple[int, ...]


@dataclass(frozen=True)
class GenerateRequest:
    """A checked POST /generate.  One engine request is made for each seed."""

    prompt: list[int]
    seeds: list[int | None]
    temperature: float
    top_p: float
    max_tokens: int
    stop_token_ids: list[int]
    weight_version: int | None
    logprobs: bool


def seed_of(seed: int, index: int) -> int:
    """The seed of response `index` where a request brings one seed for all; in 0..2**63-1."""
    digest = hashlib.blake2b(f"{seed}/{index}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1


def is_number(value: Any, low: float, high: float, *types: type) -> bool:
    """Whether value is of one of exactly these types and within [low, high]; a bool is no int, nan is no number."""
    return type(value) in types and low <= value <= high


def json_object(body: Any, known: set[str]) -> dict[str, Any]:
    """The body, if it is a JSON object with known fields only."""
    if not isinstance(body, dict):
        raise BadRequest(f"the body must be a JSON object, not {type(body).__name__}")
    if unknown := sorted(set(body) - known):
        raise BadRequest(f"unknown field {unknown[0]!r}; known: {', '.join(sorted(known))}")
    return body


def parse_generate(body: Any, limits: ModelLimits) -> GenerateRequest:
    """Checks a POST /generate body; raises BadRequest."""
    defaults: dict[str, Any] = {
        "prompt": None,
        "seeds": None,
        "n": 1,
        "seed": None,
        "temperature": 1.0,
        "top_p": 1.0,
        "max_tokens": 16,
        "stop_token_ids": list(limits.stop_token_ids),
        "weight_version": None,
        "logprobs": True,
    }
    values = {**defaults, **json_object(body, set(defaults))}
    _check_tokens(values, limits)
    _check_numbers(values)
    return GenerateRequest(
        prompt=values["prompt"],
        seeds=_seeds(values),
        temperature=float(values["temperature"]),
        top_p=float(values["top_p"]),
        max_tokens=values["max_tokens"],
        stop_token_ids=values["stop_token_ids"],
        weight_version=values["weight_version"],
        logprobs=values["logprobs"],
    )


def _check_tokens(values: dict[str, Any], limits: ModelLimits) -> None:
    prompt, stop, room = values["prompt"], values["stop_token_ids"], limits.context_tokens
    if not isinstance(prompt, list) or not prompt:
        raise BadRequest(f"prompt must be a non-empty list of token ids, not {str(prompt)[:40]!r}")
    if not isinstance(stop, list):
        raise BadRequest(f"stop_token_ids must be a list of token ids, not {str(stop)[:40]!r}")
    for token in prompt + stop:
        if not is_number(token, 0, limits.vocab_size - 1, int):
            raise BadRequest(f"{token!r} is not a token id in 0..{limits.vocab_size - 1}")
    if not is_number(values["max_tokens"], 1, room - len(prompt), int):
        raise BadRequest(
            f"a prompt of {len(prompt)} tokens and max_tokens {values['max_tokens']!r} do not fit the context of "
            f"{room} tokens; max_tokens must be an integer in 1..{max(room - len(prompt), 0)}"
        )


def _check_numbers(values: dict[str, Any]) -> None:
    temperature, version = values["temperature"], values["weight_version"]
    greedy = is_number(temperature, 0, 0, int, float)
    checks = (  # vLLM lifts a temperature below 0.01 to 0.01 without a word
        ("temperature", greedy or is_number(temperature, 0.01, 100, int, float), "0 or in 0.01..100"),
        ("top_p", is_number(values["top_p"], 1e-6, 1, int, float), "in (0, 1]"),
        ("n", is_number(values["n"], 1, MAX_RESPONSES, int), f"an integer in 1..{MAX_RESPONSES}"),
        ("seed", values["seed"] is None or _is_seed(values["seed"]), f"an integer in 0..{MAX_SEED}"),
        ("logprobs", isinstance(values["logprobs"], bool), "true or false"),
        ("weight_version", version is None or is_number(version, -1, 2**62, int), "an integer, -1 or more"),
    )
    for name, good, wanted in checks:
        if not good:
            raise BadRequest(f"{name} must be {wanted}, not {values[name]!r}")


def _is_seed(value: Any) -> bool:
    return is_number(value, 0, MAX_SEED, int)


def _seeds(values: dict[str, Any]) -> list[int | None]:
    seeds = values["seeds"]
    if seeds is None:
        seed = values["seed"]
        return [None if seed is None else seed_of(seed, index) for index in range(values["n"])]
    if values["seed"] is not None or values["n"] != 1:
        raise BadRequest("send either seeds, one for each response, or seed and n")
    if not isinstance(seeds, list) or not 1 <= len(seeds) <= MAX_RESPONSES or not all(map(_is_seed, seeds)):
        raise BadRequest(f"seeds must be a list of 1..{MAX_RESPONSES} integers in 0..{MAX_SEED}, one for each response")
    return seeds


@dataclass(frozen=True)
class WeightsRequest:
    """A checked POST /weights."""

    path: str
    version: int
    wait_s: float


def parse_weights(body: Any) -> WeightsRequest:
    """Checks a POST /weights body; raises BadRequest.  The file itself is checked by `weights.check_fits`."""
    values = {"path": None, "version": None, "wait_s": 0, **json_object(body, {"path", "version", "wait_s"})}
    if not isinstance(values["path"], str) or not values["path"]:
        raise BadRequest(f"path must be the name of a safetensors file, not {values['path']!r}")
    if not is_number(values["version"], 0, 2**62, int):
        raise BadRequest(f"version must be an integer, 0 or more, not {values['version']!r}")
    if not is_number(values["wait_s"], 0, 1e6, int, float):
        raise BadRequest(f"wait_s must be seconds in 0..1e6, not {values['wait_s']!r}")
    return WeightsRequest(values["path"], values["version"], float(values["wait_s"]))
