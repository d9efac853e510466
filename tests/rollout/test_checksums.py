"""Checksums of weights: what an engine holds after a load is what was published, tensor by tensor."""

import itertools
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file
from torch import Tensor, nn

from nemo_prorl.errors import EngineFailure
from nemo_prorl.lifecycle.tolerances import ENGINE, FLOAT32
from nemo_prorl.rollout.checksums import Held, checksum, columns_of, compare, from_metadata, held, published
from nemo_prorl.rollout.weights import WeightStore
from tests.rollout.engines import ROOT, EngineProcess
from tests.rollout.test_engine import GREEDY, ask_all, load

VERSION = 7
HEADS, KV_HEADS, WIDTH, HIDDEN = 4, 2, 8, 32


def test_each_column_is_read_in_some_version() -> None:
    for width in (1, 5, 16, 40, 128):
        read = [set(columns_of(width, version).tolist()) for version in range(width)]
        assert set().union(*read) == set(range(width))
        assert {len(columns) for columns in read} == {min(4, width)}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_a_checksum_sees_a_last_bit_and_no_order(dtype: torch.dtype) -> None:
    values = torch.randn(300, generator=torch.Generator().manual_seed(1)).to(dtype)
    assert checksum(values) == checksum(values.flip(0).reshape(30, 10))
    changed = values.clone()
    changed[17] *= 1 + torch.finfo(dtype).eps
    assert checksum(changed) != checksum(values)
    swapped = values.clone()  # two changes whose sum is 0
    swapped[0], swapped[1] = values[0] * 2, values[1] / 2
    assert checksum(swapped) != checksum(values)
    assert checksum(torch.tensor([-0.0], dtype=dtype)) == checksum(torch.tensor([0.0], dtype=dtype)) == (1, 0, 0)


def test_a_checksum_is_that_of_the_engines_dtype(tmp_path: Path) -> None:
    tensor = torch.randn(20, 64, generator=torch.Generator().manual_seed(2))
    path = WeightStore(tmp_path / "w", "bfloat16").write([("a", tensor)], VERSION)
    with safe_open(path, framework="pt") as file:
        expected = {"a": published(tensor.bfloat16(), VERSION, torch.bfloat16)}
        assert from_metadata(file.metadata()) == (VERSION, expected)


class Shard(nn.Module):
    """A layer as vLLM divides it among ranks: `weight` (rows, columns) and `bias` (rows,) of one rank."""

    def __init__(self, weight: Tensor, bias: Tensor | None = None, **attributes: Any) -> None:
        super().__init__()
        self.weight = nn.Parameter(weight)
        self.bias = None if bias is None else nn.Parameter(bias)
        self.num_heads, self.head_size = 0, WIDTH
        for name, value in attributes.items():
            setattr(self, name, value)


class Model(nn.Module):
    packed_modules_mapping: ClassVar = {"qkv_proj": ["q_proj", "k_proj", "v_proj"]}

    def __init__(self, weights: dict[str, Tensor], rank: int, ranks: int) -> None:
        super().__init__()
        heads, kept = HEADS // ranks, max(1, KV_HEADS // ranks)
        replicas = max(1, ranks // KV_HEADS)
        rows = {"q": (rank * heads, heads), "k": (rank // replicas * kept, kept), "v": (rank // replicas * kept, kept)}

        def part(kind: str) -> Tensor:
            return torch.cat(
                [weights[f"{n}_proj.{kind}"][WIDTH * at : WIDTH * (at + count)] for n, (at, count) in rows.items()]
            )

        attributes = {"num_heads": heads, "num_kv_head_replicas": replicas}
        self.qkv_proj = Shard(part("weight"), part("bias"), **attributes)
        own = HIDDEN // ranks
        self.o_proj = Shard(weights["o_proj.weight"][:, rank * own : (rank + 1) * own], input_size_per_partition=own)
        self.norm = Shard(weights["norm.weight"])


def weights_of(seed: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    shapes: dict[str, tuple[int, ...]] = {}
    shapes |= {f"{n}_proj.weight": (WIDTH * k, HIDDEN) for n, k in (("q", HEADS), ("k", KV_HEADS), ("v", KV_HEADS))}
    shapes |= {f"{n}_proj.bias": (WIDTH * k,) for n, k in (("q", HEADS), ("k", KV_HEADS), ("v", KV_HEADS))}
    shapes |= {"o_proj.weight": (HIDDEN, HIDDEN), "norm.weight": (HIDDEN,)}
    return {name: torch.randn(shape, generator=generator) for name, shape in shapes.items()}


def compared(publish: dict[str, Tensor], hold: dict[str, Tensor], ranks: int) -> tuple[list[str], list[str]]:
    shapes = {name: tensor.shape for name, tensor in publish.items()}
    found: list[list[Held]] = [
        list(held(Model(hold, rank, ranks), shapes, VERSION, torch.float32, rank)) for rank in range(ranks)
    ]
    expected = {name: published(tensor, VERSION, torch.float32) for name, tensor in publish.items()}
    return compare(expected, found)


@pytest.mark.parametrize("ranks", [1, 2, 4])  # two of 4 ranks have the same key-value head
def test_merged_and_shared_tensors_are_compared(ranks: int) -> None:
    publish = weights_of(1)
    assert compared(publish, publish, ranks) == ([], [])
    for name in publish:
        other = {**publish, name: publish[name] * (1 + 1e-6)}
        (wrong,), _ = compared(publish, other, ranks)
        assert name in wrong.split("+")


def test_what_is_not_found_in_the_engine_is_named() -> None:
    publish = weights_of(1)
    assert compared({**publish, "other.weight": torch.ones(3, 3)}, publish, 1) == ([], ["other.weight"])


def test_an_engine_names_what_it_could_not_compare_and_refuses_what_differs(tmp_path: Path) -> None:
    from nemo_prorl.rollout.engine.weights import check_held

    publish = {**weights_of(1), "other.weight": torch.ones(3, 3)}
    path = str(WeightStore(tmp_path / "weights", "float32").write(publish.items(), VERSION))
    shapes = {name: tensor.shape for name, tensor in publish.items()}

    def holding(weights: dict[str, Tensor]) -> list[list[Held]]:
        return [list(held(Model(weights, 0, 1), shapes, VERSION, torch.float32, 0))]

    assert check_held(path, holding(publish)) == ["other.weight"]
    with pytest.raises(RuntimeError, match=r"holds other values than the published file in 1 tensors: norm.weight"):
        check_held(path, holding({**publish, "norm.weight": publish["norm.weight"] + 1.0}))


def test_versions_differ_in_what_they_read() -> None:
    tensor = weights_of(1)["o_proj.weight"]
    found = [published(tensor, version, torch.float32) for version in range(2)]
    assert all(a != b for a, b in itertools.combinations(found, 2))


# Put first on the engine's path: a load of version 2 takes one tensor from the file of version 1.
STALE = """
import nemo_prorl.rollout.engine.weights as weights

opened = weights.safe_open

class Stale:
    def __init__(self, path, framework):
        self.file, self.framework, self.path = opened(path, framework=framework), framework, path
    def __enter__(self):
        self.opened = self.file.__enter__()
        return self
    def __exit__(self, *error):
        return self.file.__exit__(*error)
    def __getattr__(self, name):
        return getattr(self.opened, name)
    def get_tensor(self, name):
        if name == "TENSOR" and self.path.endswith("2.safetensors"):
            with opened(self.path.replace("2.safetensors", "1.safetensors"), framework="pt") as before:
                return before.get_tensor(name)
        return self.opened.get_tensor(name)

weights.safe_open = Stale
"""
LR = 2e-6


@pytest.fixture
def fresh(vllm_python: str, models: dict[str, Path], tmp_path: Path) -> Iterator[EngineProcess]:
    """An engine that is not started yet."""
    engine = EngineProcess(vllm_python, models["tied1"], tmp_path / "engine")
    yield engine
    engine.stop()


@pytest.mark.vllm
@pytest.mark.parametrize(
    ("tensor", "named"),
    [
        ("model.layers.2.self_attn.k_proj.weight", "self_attn.q_proj.weight+model.layers.2.self_attn.k_proj.weight"),
        pytest.param("model.layers.1.mlp.down_proj.weight", "mlp.down_proj", marks=pytest.mark.slow),
        pytest.param("model.embed_tokens.weight", "model.embed_tokens.weight", marks=pytest.mark.slow),
        pytest.param("model.layers.0.self_attn.v_proj.bias", "self_attn.v_proj.bias", marks=pytest.mark.slow),
    ],
)
def test_an_engine_with_one_tensor_of_the_step_before_ends_and_names_it(
    fresh: EngineProcess, models: dict[str, Path], tmp_path: Path, tensor: str, named: str
) -> None:
    (tmp_path / "sitecustomize.py").write_text(STALE.replace("TENSOR", tensor))
    fresh.variables = {"PYTHONPATH": f"{tmp_path}:{ROOT}"}
    fresh.start().wait_ready()
    generator = torch.Generator().manual_seed(3)
    first = load_file(models["tied1"] / "model.safetensors")
    second = {n: w + LR * torch.randn(w.shape, generator=generator).sign() for n, w in first.items()}
    store = WeightStore(fresh.weights_dir)
    load(fresh, store.write(first.items(), 1), 1)
    path = store.write(second.items(), 2)
    with pytest.raises(EngineFailure, match=f"other values than the published file in 1 tensors: .*{re.escape(named)}"):
        load(fresh, path, 2)
    fresh.wait_gone()
    assert fresh.process is not None
    assert fresh.process.returncode == 70
    assert named in fresh.log.read_text()


@pytest.mark.vllm
def test_the_mean_gap_does_not_see_one_stale_tensor(engine: EngineProcess, models: dict[str, Path]) -> None:
    """The reason for the checksums: the gap of log-probabilities is far below every limit."""
    generator = torch.Generator().manual_seed(3)
    first = load_file(models["tied1"] / "model.safetensors")
    second = {n: w + LR * torch.randn(w.shape, generator=generator).sign() for n, w in first.items()}
    name = "model.layers.2.self_attn.k_proj.weight"
    store = WeightStore(engine.weights_dir)
    found = []
    for version, weights in ((3, second), (4, {**second, name: first[name]})):
        load(engine, store.write(weights.items(), version), version)
        found.append([p for response in ask_all(engine, GREEDY) for p in response.logprobs])
    gap = (torch.tensor(found[0]) - torch.tensor(found[1])).abs()
    assert 0 < gap.mean() < ENGINE[FLOAT32] / 100
