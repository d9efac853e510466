"""Groups as bytes: what is read equals what was written to the bit, in few bytes per token."""

import json
import re
import struct
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load

from nemo_prorl.rollout.endpoints import Response
from nemo_prorl.rollout.group_arrays import decode, encode
from nemo_prorl.rollout.groups import Group


def group_of(draw: int, lengths: list[int], **changed: Any) -> Group:
    """Return a group of responses of these lengths, with random tokens and log-probabilities."""
    rng = np.random.default_rng(draw)
    responses = [
        Response(
            index,
            rng.integers(0, 2**31 - 1, length).tolist(),
            rng.normal(size=length).astype(np.float32).tolist(),
            "stop" if index % 2 else "length",
            draw - index,
        )
        for index, length in enumerate(lengths)
    ]
    verdicts: list[Any] = [
        {"id": "p", "score": score, "correct": None, "parts": {"form": 0.1}, "detail": "ä\n", "failure": None}
        for score in (0.1 + 0.2, None, 1.0)[: len(lengths)]
    ]
    record = {"id": "p", "task": "math", "prompt": "1 + 1 = ?", "truth": {"value": [2.5, None, "\u2028"]}}
    made = Group("p", "math", record, list(range(draw + 1)), 3, responses, verdicts, step=7, version=6, draw_index=draw)
    return replace(made, **changed)


CASES: dict[str, list[Group]] = {
    "none": [],
    "several": [group_of(5, [3, 1, 4]), group_of(2, [2, 7]), group_of(9, [1, 1, 1])],
    "without responses": [group_of(1, []), group_of(2, [2])],
    "an empty response": [group_of(1, [0, 2, 0])],
    "without log-probabilities": [group_of(1, [2], responses=[Response(0, [1, 2], [], "stop", 4)]), group_of(2, [2])],
}


@pytest.mark.parametrize("groups", CASES.values(), ids=CASES)
def test_groups_come_back_as_they_were(groups: list[Group]) -> None:
    assert decode(encode(groups)) == groups
    assert encode(decode(encode(groups))) == encode(groups)


def test_log_probabilities_come_back_to_the_bit() -> None:
    bits = [0x00000000, 0x80000000, 0x00000001, 0x807FFFFF, 0xBEAAAAAB, 0xFF7FFFFF, 0xFF800000]
    logprobs = [struct.unpack("<f", struct.pack("<I", one))[0] for one in bits]
    group = group_of(1, [], responses=[Response(0, list(range(len(bits))), logprobs, "stop", 1)])
    (again,) = decode(encode([group]))
    assert [struct.unpack("<I", struct.pack("<f", p))[0] for p in again.responses[0].logprobs] == bits


def test_tokens_and_numbers_are_plain_python_values() -> None:
    """NumPy's integers would fail later, in the JSON of a request or a record."""
    (again,) = decode(encode([group_of(1, [2])]))
    response = again.responses[0]
    assert {type(v) for v in (*again.prompt_ids, *response.token_ids, response.weight_version)} == {int}
    assert {type(p) for p in response.logprobs} == {float}


def test_the_page_has_every_array_of_a_stored_batch() -> None:
    page = (Path(__file__).parents[2] / "docs" / "reference" / "run_directory.md").read_text()
    rows = re.findall(r"^\| `(\w+)` \| (\w+) \| \[(\w+)\] \|", page, re.MULTILINE)
    groups = CASES["several"]
    arrays = load(encode(groups))
    assert {name: dtype for name, dtype, _ in rows} == {name: str(array.dtype) for name, array in arrays.items()}
    sizes = {"G": 3, "B": 8, "P": 6 + 3 + 10, "M": 3 + 1 + 4 + 2 + 7 + 1 + 1 + 1}
    assert {name: (sizes[size],) for name, _, size in rows if size in sizes} == {
        name: array.shape for name, array in arrays.items() if name != "json"
    }
    [listed] = re.findall(r"^`json` holds .*?\n\n", page, re.MULTILINE | re.DOTALL)
    first = json.loads(arrays["json"].tobytes())[0]
    assert set(re.findall(r"`(\w+)`", listed)) == {"json", *first, *first["responses"][0]}


def test_a_token_takes_at_most_9_bytes() -> None:
    groups = [group_of(draw, [500] * 3) for draw in range(8)]
    assert len(encode(groups)) <= 9 * 8 * 3 * 500
