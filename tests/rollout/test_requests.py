"""What an engine accepts, without an engine."""

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from nemo_prorl.rollout.endpoints import response_seed
from nemo_prorl.rollout.engine.requests import (
    BadRequest,
    Body,
    GenerateRequest,
    ModelLimits,
    SleepRequest,
    TraceRequest,
    WakeRequest,
    WeightsRequest,
    parse,
)
from nemo_prorl.rollout.engine.weight_load import Shapes, UnfitWeights, check_fits, read_header, shapes_of_model

LIMITS = ModelLimits(context_tokens=512, vocab_size=512, stop_token_ids=(2,))
GOOD = {"prompt": [5, 6], "seeds": [1], "max_tokens": 4}

BAD: dict[str, tuple[dict[str, Any], str]] = {
    "token id is the vocabulary's size": ({"prompt": [5, 512]}, "512 is not a token id"),
    "token id -1": ({"prompt": [5, -1]}, "-1 is not a token id"),
    "token id true": ({"prompt": [True]}, "prompt.0"),
    "token id a float": ({"prompt": [5.0]}, "prompt.0"),
    "stop token outside": ({"stop_token_ids": [512]}, "512 is not a token id"),
    "stop tokens a number": ({"stop_token_ids": 2}, "stop_token_ids"),
    "empty prompt": ({"prompt": []}, "prompt"),
    "prompt a string": ({"prompt": "hello"}, "prompt"),
    "no prompt": ({"prompt": None}, "prompt"),
    "prompt beyond the context": ({"prompt": [5] * 600}, "600 tokens"),
    "no room for the response": ({"prompt": [5] * 500, "max_tokens": 13}, "at most 12"),
    "max_tokens 0": ({"max_tokens": 0}, "max_tokens"),
    "max_tokens a float": ({"max_tokens": 4.0}, "max_tokens"),
    "temperature nan": ({"temperature": math.nan}, "temperature"),
    "temperature negative": ({"temperature": -1}, "temperature"),
    "temperature tiny": ({"temperature": 1e-9}, "temperature"),
    "temperature a string": ({"temperature": "hot"}, "temperature"),
    "top_p 0": ({"top_p": 0}, "top_p"),
    "top_p 2": ({"top_p": 2}, "top_p"),
    "seed too large": ({"seeds": [2**63]}, "seeds.0"),
    "no seeds": ({"seeds": None}, "seeds"),
    "seeds empty": ({"seeds": []}, "seeds"),
    "seeds with a string": ({"seeds": [1, "2"]}, "seeds"),
    "version a string": ({"weight_version": "3"}, "weight_version"),
    "logprobs a number": ({"logprobs": 0}, "logprobs"),
    "forced token outside": ({"forced": [5, 512]}, "512 is not a token id"),
    "no room for the forced tokens": ({"prompt": [5] * 500, "forced": [5] * 13}, "at most 12"),
    "forced tokens without log-probabilities": ({"forced": [5], "logprobs": False}, "forced: expected logprobs true"),
    "forced tokens empty": ({"forced": []}, "forced"),
    "unknown field": ({"temprature": 1.0}, "unknown field 'temprature'; known: forced, logprobs, max_tokens"),
}


def generate(body: dict[str, Any]) -> GenerateRequest:
    request = parse(GenerateRequest, json.dumps(body).encode())
    LIMITS.check(request)
    return request


@pytest.mark.parametrize("case", BAD)
def test_bad_requests_say_what_would_be_right(case: str) -> None:
    change, message = BAD[case]
    with pytest.raises(BadRequest) as caught:
        generate({**GOOD, **change})
    assert message in str(caught.value)


def test_good_requests_pass() -> None:
    request = generate({"prompt": [5] * 500, "max_tokens": 12, "seeds": [0, 2**63 - 1]})
    assert request.seeds == [0, 2**63 - 1]
    assert request.stop_token_ids is None
    assert generate({**GOOD, "temperature": 0, "stop_token_ids": []}).stop_token_ids == []
    assert parse(WakeRequest, b"{}").parts == ["weights", "kv_cache"]


@pytest.mark.parametrize(
    ("kind", "body", "words"),
    [
        (WeightsRequest, [], "the body: "),
        (WeightsRequest, {"path": "x"}, "version: Field required"),
        (WeightsRequest, {"path": 3, "version": 1}, "path: .*, not 3"),
        (WeightsRequest, {"path": "x", "version": -1}, "version: .*, not -1"),
        (WeightsRequest, {"path": "x", "version": 1, "wait_s": "1"}, "wait_s: .*, not '1'"),
        (SleepRequest, {}, "level: Field required"),
        (SleepRequest, {"level": True}, "level: Input should be a valid integer, not True"),
        (SleepRequest, {"level": 3}, "level: Input should be less than or equal to 2, not 3"),
        (SleepRequest, {"level": 1, "wait_s": -1}, "wait_s: "),
        (SleepRequest, {"level": 1, "wait": 3}, "unknown field 'wait'; known: level, wait_s"),
        (WakeRequest, {"parts": ["weight"]}, "parts.0: Input should be 'weights' or 'kv_cache'"),
        (WakeRequest, {"parts": []}, "parts: "),
        (WakeRequest, {"parts": "weights"}, "parts: "),
        (WakeRequest, {"parts": None}, "parts: "),
        (TraceRequest, {"record": 1}, "record: "),
    ],
)
def test_a_wrong_request_names_its_field(kind: type[Body], body: Any, words: str) -> None:
    with pytest.raises(BadRequest, match=words):
        parse(kind, json.dumps(body).encode())


@pytest.mark.parametrize("body", [b"", b"{bad", b"\xff", b"[" * 100_000])
def test_what_is_not_json_is_said(body: bytes) -> None:
    with pytest.raises(BadRequest, match="the body: "):
        parse(WakeRequest, body)


def test_response_seeds_differ_in_every_part_and_stay_what_they_are() -> None:
    seeds = {
        response_seed(run, prompt, visit, sample)
        for run in (1, 2)
        for prompt in ("a", "a1", "1", "11")
        for visit in (0, 1, 11)
        for sample in (0, 1, 11)
    }
    assert len(seeds) == 2 * 4 * 3 * 3
    assert all(0 <= seed < 2**63 for seed in seeds)
    assert response_seed(1, "a", 0, 0) == 1443190458280070670  # a resumed run must draw what it drew before


def test_a_file_is_checked_by_its_header(tmp_path: Path) -> None:
    path = tmp_path / "weights.safetensors"
    save_file({"a": torch.zeros(2, 3), "b": torch.zeros(4, dtype=torch.bfloat16)}, path)
    (tmp_path / "config.json").write_text("{}")
    shapes: Shapes = {"a": (2, 3), "b": (4,)}
    only_a: Shapes = {"a": (2, 3)}
    assert read_header(str(path)) == shapes == shapes_of_model(str(tmp_path))
    check_fits(str(path), str(tmp_path), shapes)
    for wrong, message in (
        (only_a, "b: expected shape None"),
        ({**shapes, "a": (3, 2)}, r"a: expected shape \(3"),
    ):
        with pytest.raises(UnfitWeights, match=message):
            check_fits(str(path), str(tmp_path), wrong)
    whole = path.read_bytes()
    for data in (whole[:-1], whole + b"x", whole[:20], b"", whole.replace(b'"F32"', b'"F64"'), b"\xff" * 64):
        path.write_bytes(data)
        with pytest.raises(UnfitWeights):
            read_header(str(path))


def test_a_link_to_the_folder_itself_is_no_way_around(tmp_path: Path) -> None:
    (tmp_path / "real").mkdir()
    save_file({"a": torch.zeros(2)}, tmp_path / "real" / "w.safetensors")
    (tmp_path / "link").symlink_to(tmp_path / "real")
    check_fits(str(tmp_path / "link" / "w.safetensors"), str(tmp_path / "link"), {"a": (2,)})  # the same file
    (tmp_path / "other").mkdir()
    with pytest.raises(UnfitWeights, match="expected a file directly in this run"):
        check_fits(str(tmp_path / "real" / "w.safetensors"), str(tmp_path / "other"), {"a": (2,)})
