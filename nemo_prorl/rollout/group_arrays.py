"""Judged groups as bytes in the safetensors format: 8 bytes per response token, and JSON for all that is not a token.

Suffixes: G groups, B responses of all groups, P prompt tokens of all groups, M response tokens of all groups.

    prompt_P, prompt_G      int32: the prompts' tokens, group after group, and their numbers
    token_M, response_B     int32: the responses' tokens, response after response, and their numbers
    logp_M, logp_B          float32: the engine's log-probabilities of these tokens; int32: their numbers
    json                    uint8: JSON in UTF-8, a list of the groups without the values above
"""

import json
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray
from safetensors.numpy import load, save

from nemo_prorl.rollout.endpoints import Response
from nemo_prorl.rollout.groups import Group


def encode(groups: Sequence[Group]) -> bytes:
    """Return the groups as bytes.  Log-probabilities become float32, the precision in which training uses them."""
    responses = [response for group in groups for response in group.responses]
    arrays: dict[str, NDArray[Any]] = {
        **_joined("prompt_P", "prompt_G", [group.prompt_ids for group in groups], np.int32),
        **_joined("token_M", "response_B", [response.token_ids for response in responses], np.int32),
        **_joined("logp_M", "logp_B", [response.logprobs for response in responses], np.float32),
    }
    text = json.dumps([_without_tokens(group) for group in groups]).encode()
    data: bytes = save({**arrays, "json": np.frombuffer(text, np.uint8)})
    return data


def decode(data: bytes) -> list[Group]:
    """Return the groups of bytes that `encode` returned."""
    arrays = load(data)
    prompts = iter(_parts(arrays, "prompt_P", "prompt_G"))
    responses = zip(_parts(arrays, "token_M", "response_B"), _parts(arrays, "logp_M", "logp_B"), strict=True)
    groups = []
    for value in json.loads(arrays["json"].tobytes()):
        # The values come first in `zip`: it must not take the next group's response when a group's values end.
        made = [Response(**fields, token_ids=t, logprobs=p) for fields, (t, p) in zip(value["responses"], responses)]  # noqa: B905
        groups.append(Group(**{**value, "prompt_ids": next(prompts), "responses": made}))
    return groups


def _joined(values: str, numbers: str, parts: Sequence[Sequence[Any]], dtype: Any) -> dict[str, NDArray[Any]]:
    # One array per part: a conversion of all tokens in one call would stop the training thread (GIL) for a second.
    arrays = [np.array(part, dtype) for part in parts]
    return {
        values: np.concatenate([np.empty(0, dtype), *arrays]),
        numbers: np.array([len(part) for part in parts], np.int32),
    }


def _parts(arrays: dict[str, NDArray[Any]], values: str, numbers: str) -> Iterable[list[Any]]:
    ends = np.cumsum(arrays[numbers]).tolist()
    return [arrays[values][begin:end].tolist() for begin, end in zip([0, *ends], ends)]  # noqa: B905


def _without_tokens(group: Group) -> dict[str, Any]:
    kept = [
        {name: value for name, value in vars(response).items() if name not in ("token_ids", "logprobs")}
        for response in group.responses
    ]
    return {**{name: value for name, value in vars(group).items() if name != "prompt_ids"}, "responses": kept}
