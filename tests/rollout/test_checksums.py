"""Checksums of weights: what an engine holds after a load is what was published, tensor by tensor."""

import asyncio
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from nemo_prorl.deadlines import Deadline
from nemo_prorl.errors import EngineFailure
from nemo_prorl.lifecycle.tolerances import ENGINE, FLOAT32
from nemo_prorl.rollout.checksums import Held, _vector, columns_of, compare, from_metadata, held, published
from nemo_prorl.rollout.weight_store import WeightStore
from tests.rollout.engines import ROOT, EngineProcess
from tests.rollout.test_engine import GREEDY, ask_all, load, with_client

VERSION = 7
HEADS, KV_HEADS, WIDTH, HIDDEN, INNER, WORDS = 8, 2, 8, 32, 48, 50


def test_each_column_is_read_in_some_version() -> None:
    for width in (1, 5, 16, 40, 128):
        read = [set(columns_of(width, version).tolist()) for version in range(width)]
        assert set().union(*read) == set(range(width))
        assert {len(columns) for columns in read} == {min(4, width)}


DTYPES = [torch.float32, torch.bfloat16, torch.float16]


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_exact_part_sees_a_last_bit_and_the_order(dtype: torch.dtype) -> None:
    values = torch.randn(300, generator=torch.Generator().manual_seed(1)).to(dtype)

    def exact(tensor: Tensor) -> tuple[int, int]:
        return published("a", tensor, VERSION, dtype)[:2]

    changed = values.clone()
    changed[17] *= 1 + torch.finfo(dtype).eps
    swapped = values.clone()  # two changes whose sum is 0
    swapped[0], swapped[1] = values[1], values[0]
    assert len({exact(values), exact(changed), exact(swapped), exact(values.flip(0))}) == 4
    assert exact(torch.tensor([-0.0], dtype=dtype)) == exact(torch.tensor([0.0], dtype=dtype)) == (1, 0)


def test_random_numbers_are_the_same_on_every_machine() -> None:
    """The trainer and the engines compute them in environments with other versions of torch and numpy."""
    tensor = torch.arange(24, dtype=torch.float32).reshape(4, 6) - 11.0
    count, bits, sums = published("a.weight", tensor, 3, torch.float32)
    assert (count, bits) == (16, 563901242327171072)
    assert sums[:5] == pytest.approx(
        [19.775369115465285, -4.856534023587195, -4.563395233173808, -11.759403467569543, 0]
    )


def test_a_checksum_is_that_of_the_engines_dtype(tmp_path: Path) -> None:
    tensor = torch.randn(20, 64, generator=torch.Generator().manual_seed(2))
    path = WeightStore(tmp_path / "w", "bfloat16").write([("a", tensor)], VERSION)
    with safe_open(path, framework="pt") as file:
        version, found = from_metadata(file.metadata())
    count, bits, sums = published("a", tensor.bfloat16(), VERSION, torch.bfloat16)
    assert (version, found["a"][:2]) == (VERSION, (count, bits))
    assert found["a"][2] == pytest.approx(sums, rel=1e-9)


class Shard(nn.Module):
    """A layer as vLLM divides it among ranks: `weight` (rows, columns) and `bias` (rows,) of one rank.

    If `packed`, the weight can only be applied, as in vLLM's CPU build.
    """

    def __init__(self, weight: Tensor, bias: Tensor | None = None, packed: bool = False, **attributes: Any) -> None:
        super().__init__()
        self.weight = nn.Parameter(weight[:0, :0] if packed else weight)
        if packed:
            self.input_size_per_partition = weight.shape[1]
            self.cpu_linear = lambda x, _, bias: nn.functional.linear(x, weight, bias)
        self.bias = None if bias is None else nn.Parameter(bias)
        self.num_heads, self.head_size = 0, WIDTH
        for name, value in attributes.items():
            setattr(self, name, value)


class Model(nn.Module):
    packed_modules_mapping: ClassVar = {
        "qkv_proj": ["q_proj", "k_proj", "v_proj"],
        "gate_up_proj": ["gate_proj", "up_proj"],
    }

    def __init__(self, weights: dict[str, Tensor], rank: int, ranks: int, packed: bool = False) -> None:
        super().__init__()
        heads, kept = HEADS // ranks, max(1, KV_HEADS // ranks)
        replicas = max(1, ranks // KV_HEADS)
        rows = {"q": (rank * heads, heads), "k": (rank // replicas * kept, kept), "v": (rank // replicas * kept, kept)}

        def part(kind: str) -> Tensor:
            return torch.cat(
                [weights[f"{n}_proj.{kind}"][WIDTH * at : WIDTH * (at + count)] for n, (at, count) in rows.items()]
            )

        attributes: dict[str, Any] = {"num_heads": heads, "num_kv_head_replicas": replicas, "packed": packed}
        self.qkv_proj = Shard(part("weight"), part("bias"), **attributes)
        own = HIDDEN // ranks
        self.o_proj = Shard(weights["o_proj.weight"][:, rank * own : (rank + 1) * own], packed=packed)
        mine = slice(rank * INNER // ranks, (rank + 1) * INNER // ranks)
        gate_up = torch.cat([weights["gate_proj.weight"][mine], weights["up_proj.weight"][mine]])
        self.gate_up_proj = Shard(gate_up, packed=packed)
        self.norm = Shard(weights["norm.weight"])
        words = nn.functional.pad(weights["embed.weight"], (0, 0, 0, 64 - WORDS))  # vLLM pads vocabularies
        self.embed = Shard(words[rank * 64 // ranks : (rank + 1) * 64 // ranks])


def weights_of(seed: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    shapes: dict[str, tuple[int, ...]] = {}
    shapes |= {f"{n}_proj.weight": (WIDTH * k, HIDDEN) for n, k in (("q", HEADS), ("k", KV_HEADS), ("v", KV_HEADS))}
    shapes |= {f"{n}_proj.bias": (WIDTH * k,) for n, k in (("q", HEADS), ("k", KV_HEADS), ("v", KV_HEADS))}
    shapes |= {"o_proj.weight": (HIDDEN, HIDDEN), "norm.weight": (HIDDEN,), "embed.weight": (WORDS, HIDDEN)}
    shapes |= {"gate_proj.weight": (INNER, HIDDEN), "up_proj.weight": (INNER, HIDDEN)}
    return {name: torch.randn(shape, generator=generator) for name, shape in shapes.items()}


def holding(
    hold: dict[str, Tensor],
    ranks: int,
    packed: bool,
    dtype: torch.dtype,
    shapes: dict[str, Any],
    version: int = VERSION,
) -> list[list[Held]]:
    rounded = {name: tensor.to(dtype) for name, tensor in hold.items()}
    return [list(held(Model(rounded, rank, ranks, packed), shapes, version, dtype, rank)) for rank in range(ranks)]


def compared(
    publish: dict[str, Tensor],
    hold: dict[str, Tensor],
    ranks: int = 1,
    packed: bool = False,
    dtype: torch.dtype = torch.float32,
) -> tuple[list[str], list[str]]:
    shapes = {name: tensor.shape for name, tensor in publish.items()}
    expected = {name: published(name, tensor, VERSION, dtype) for name, tensor in publish.items()}
    return compare(expected, holding(hold, ranks, packed, dtype, shapes))


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("ranks", [1, 2, 4, 8])  # two of 4 ranks and four of 8 have the same key-value head
def test_merged_and_shared_tensors_are_compared(ranks: int, packed: bool) -> None:
    publish = weights_of(1)
    assert compared(publish, publish, ranks, packed) == ([], [])
    for name in publish:
        other = {**publish, name: publish[name] * (1 + 1e-6)}
        (wrong,), _ = compared(publish, other, ranks, packed)
        assert name in wrong.split("+")


@pytest.mark.parametrize("damaged", [0, 1, 2, 3])
def test_a_part_or_copy_of_any_rank_is_compared(damaged: int) -> None:
    """A norm is whole on each rank."""
    publish = weights_of(1)
    shapes = {name: tensor.shape for name, tensor in publish.items()}
    expected = {name: published(name, tensor, VERSION, torch.float32) for name, tensor in publish.items()}
    other = holding({name: tensor + 1.0 for name, tensor in publish.items()}, 4, False, torch.float32, shapes)
    ranks = holding(publish, 4, False, torch.float32, shapes)
    ranks[damaged] = other[damaged]
    qkv = [f"q_proj.{kind}+k_proj.{kind}+v_proj.{kind}" for kind in ("weight", "bias")]
    assert compare(expected, ranks)[0] == [
        *qkv,
        "o_proj.weight",
        "gate_proj.weight+up_proj.weight",
        "norm.weight",
        "embed.weight",
    ]


@pytest.mark.parametrize("ranks", [4, 8])
def test_a_copy_of_a_key_value_head_is_compared_in_one_of_as_many_versions(ranks: int) -> None:
    publish, copies = weights_of(1), ranks // KV_HEADS
    shapes = {name: tensor.shape for name, tensor in publish.items()}
    damage = {name: tensor + (name[:2] in ("k_", "v_")) for name, tensor in publish.items()}
    for damaged in range(ranks):
        found = []
        for version in range(copies):
            expected = {name: published(name, tensor, version, torch.float32) for name, tensor in publish.items()}
            held_now = holding(publish, ranks, False, torch.float32, shapes, version)
            assert compare(expected, held_now) == ([], [])
            held_now[damaged] = holding(damage, ranks, False, torch.float32, shapes, version)[damaged]
            found.append(len(compare(expected, held_now)[0]))
        assert sorted(found) == [*[0] * (copies - 1), 2]  # weights and biases


@pytest.mark.parametrize("equal", [False, True])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("packed", [False, True])
def test_rounding_of_large_layers_is_no_difference(dtype: torch.dtype, packed: bool, equal: bool) -> None:
    """A false difference would end an engine: rows of very different size, and equal ones, must pass."""
    generator = torch.Generator().manual_seed(5)
    weight = torch.randn(700, 3000, generator=generator) * torch.randn(700, 1, generator=generator).exp()
    weight[3] *= 100.0
    weight[4] *= 1e-4
    versions = list(range(40))
    if equal:
        weight = torch.full((6000, 200), 0.01)  # rounding is the same in all rows
        versions += sorted(range(2000), key=lambda version: abs(float(_vector(version, 200).sum())))[:10]  # cancels
    model: Any = nn.Module()
    model.down = Shard(weight.to(dtype), packed=packed)
    for version in versions:
        expected = {"down.weight": published("down.weight", weight, version, dtype)}
        assert compare(expected, [list(held(model, {"down.weight": weight.shape}, version, dtype, 0))]) == ([], [])


def swapped(weights: dict[str, Tensor]) -> dict[str, Tensor]:
    return {**weights, "gate_proj.weight": weights["up_proj.weight"], "up_proj.weight": weights["gate_proj.weight"]}


def rows_shuffled(weights: dict[str, Tensor]) -> dict[str, Tensor]:
    order = torch.randperm(HIDDEN, generator=torch.Generator().manual_seed(1))
    return {**weights, "o_proj.weight": weights["o_proj.weight"][order]}


def two_rows_exchanged(weights: dict[str, Tensor]) -> dict[str, Tensor]:
    order = [1, 0, *range(2, HIDDEN)]
    return {**weights, "o_proj.weight": weights["o_proj.weight"][order], "norm.weight": weights["norm.weight"][order]}


def column_zeroed(weights: dict[str, Tensor]) -> dict[str, Tensor]:
    return {**weights, "up_proj.weight": weights["up_proj.weight"].index_fill(1, UNREAD[:1], 0.0)}


def columns_exchanged(weights: dict[str, Tensor]) -> dict[str, Tensor]:
    order = torch.arange(HIDDEN)
    order[UNREAD] = UNREAD.flip(0)
    return {**weights, "o_proj.weight": weights["o_proj.weight"][:, order]}


def one_value_doubled(weights: dict[str, Tensor]) -> dict[str, Tensor]:
    changed = weights["q_proj.weight"].clone()
    changed[5, UNREAD[0]] *= 2.0
    return {**weights, "q_proj.weight": changed}


UNREAD = torch.tensor([c for c in range(HIDDEN) if c not in columns_of(HIDDEN, VERSION).tolist()])
Damage = Callable[[dict[str, Tensor]], dict[str, Tensor]]
DAMAGES: dict[Damage, list[str]] = {
    swapped: ["gate_proj.weight+up_proj.weight"],
    rows_shuffled: ["o_proj.weight"],
    two_rows_exchanged: ["o_proj.weight", "norm.weight"],
    column_zeroed: ["gate_proj.weight+up_proj.weight"],
    columns_exchanged: ["o_proj.weight"],
    one_value_doubled: ["q_proj.weight+k_proj.weight+v_proj.weight"],
}


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("damage", DAMAGES)
def test_damages_outside_the_read_columns_are_found_in_one_load(
    damage: Damage, ranks: int, packed: bool, dtype: torch.dtype
) -> None:
    publish = weights_of(1)
    assert compared(publish, publish, ranks, packed, dtype) == ([], [])
    assert compared(publish, damage(publish), ranks, packed, dtype) == (DAMAGES[damage], [])


def test_weights_that_are_not_finite_are_compared_by_their_bits() -> None:
    publish = weights_of(1)
    publish["o_proj.weight"][3, UNREAD[0]] = torch.inf
    assert compared(publish, publish) == ([], [])
    assert compared(weights_of(1), publish) == (["o_proj.weight"], [])


def test_what_is_not_found_in_the_engine_is_named() -> None:
    publish = weights_of(1)
    assert compared({**publish, "other.weight": torch.ones(3, 3)}, publish, 1) == ([], ["other.weight"])


@pytest.mark.parametrize("tied", [False, True])
def test_a_head_is_the_embedding_where_it_has_no_weight_of_its_own(tied: bool) -> None:
    embedding, head = torch.randn(2, 8, 4, generator=torch.Generator().manual_seed(1))
    model: Any = nn.Module()
    model.model = nn.Module()
    model.model.embed_tokens, model.model.other, model.lm_head = Shard(embedding), Shard(head), Shard(head)
    published_shapes = {"model.embed_tokens.weight": (8, 4), **({} if tied else {"lm_head.weight": (8, 4)})}
    found = held(model, published_shapes, VERSION, torch.float32, 0)
    names = ["model.embed_tokens.weight", "model.embed_tokens.weight" if tied else "lm_head.weight"]
    assert [names for names, _, _ in found] == [[name] for name in names]


def test_an_engine_names_what_it_could_not_compare_and_refuses_what_differs(tmp_path: Path) -> None:
    from nemo_prorl.rollout.engine.weight_load import check_held

    publish = {**weights_of(1), "other.weight": torch.ones(3, 3)}
    path = str(WeightStore(tmp_path / "weights", "float32").write(publish.items(), VERSION))
    shapes = {name: tensor.shape for name, tensor in publish.items()}
    assert check_held(path, holding(publish, 1, False, torch.float32, shapes)) == ["other.weight"]
    changed = {**publish, "norm.weight": publish["norm.weight"] + 1.0}
    with pytest.raises(RuntimeError, match=r"holds other values than the published file in 1 tensors: norm.weight"):
        check_held(path, holding(changed, 1, False, torch.float32, shapes))


def test_a_file_of_another_program_has_nothing_to_compare(tmp_path: Path) -> None:
    from nemo_prorl.rollout.engine.weight_load import check_held

    publish, path = weights_of(1), tmp_path / "model.safetensors"
    for metadata in (None, {"format": "pt"}):
        save_file(publish, path, metadata)
        held_now = holding(publish, 1, False, torch.float32, {name: tensor.shape for name, tensor in publish.items()})
        assert check_held(str(path), held_now) == []
        assert from_metadata(metadata) == (0, {})


def test_versions_differ_in_what_they_read() -> None:
    tensor = weights_of(1)["o_proj.weight"]
    first, second = (published("a", tensor, version, torch.float32) for version in range(2))
    assert first[1] != second[1]
    assert all(a != b for a, b in zip(first[2], second[2], strict=True))


# Put first on the engine's path: a load of version 2 changes tensors on the way.
CHANGED = """
import nemo_prorl.rollout.engine.weight_load as weights

opened = weights.safe_open

class Changed:
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
        return change(name, self) if self.path.endswith("2.safetensors") else self.opened.get_tensor(name)

weights.safe_open = Changed
"""
STALE = """
def change(name, file):
    if name != "TENSOR":
        return file.opened.get_tensor(name)
    with opened(file.path.replace("2.safetensors", "1.safetensors"), framework="pt") as before:
        return before.get_tensor(name)
"""
SWAPPED = """
def change(name, file):
    names = {"gate_proj": "up_proj", "up_proj": "gate_proj"}
    part = name.split(".")[-2]
    return file.opened.get_tensor(name.replace(part, names[part]) if ".2.mlp." in name and part in names else name)
"""
DAMAGED = """
def change(name, file):
    tensor = file.opened.get_tensor(name)
    if name == "TENSOR":
        DAMAGE
    return tensor
"""
WITHOUT = """
import nemo_prorl.rollout.checksums as checksums
held = checksums.held
checksums.held = lambda *given: (one for one in held(*given) if one[0] != ["model.norm.weight"])
"""
LR = 2e-6


@pytest.fixture
def fresh(vllm_python: str, models: dict[str, Path], tmp_path: Path) -> Iterator[EngineProcess]:
    """An engine that is not started yet, in whose processes sitecustomize.py of `tmp_path` is run first."""
    engine = EngineProcess(vllm_python, models["tied1"], tmp_path / "engine")
    engine.variables = {"PYTHONPATH": f"{tmp_path}:{ROOT}"}
    yield engine
    engine.stop()


def loads_two(engine: EngineProcess, first: dict[str, Tensor], second: dict[str, Tensor], named: str) -> None:
    """Load version 1, then version 2, which must end the engine with the name of one tensor."""
    engine.start().wait_ready()
    store = WeightStore(engine.weights_dir, "bfloat16" if "bfloat16" in engine.arguments else "float32")
    load(engine, store.write(first.items(), 1), 1)
    path = store.write(second.items(), 2)
    with pytest.raises(EngineFailure, match=f"other values than the published file in 1 tensors: .*{re.escape(named)}"):
        load(engine, path, 2)
    engine.wait_gone()
    assert engine.process is not None
    assert engine.process.returncode == 70
    assert named in engine.log.read_text()


@pytest.mark.slow
@pytest.mark.vllm
@pytest.mark.parametrize(
    ("tensor", "named"),
    [
        ("model.layers.2.self_attn.k_proj.weight", "self_attn.q_proj.weight+model.layers.2.self_attn.k_proj.weight"),
        ("model.layers.1.mlp.down_proj.weight", "mlp.down_proj"),
        ("model.embed_tokens.weight", "model.embed_tokens.weight"),
        ("model.layers.0.self_attn.v_proj.bias", "self_attn.v_proj.bias"),
    ],
)
def test_an_engine_with_one_tensor_of_the_step_before_ends_and_names_it(
    fresh: EngineProcess, models: dict[str, Path], tmp_path: Path, tensor: str, named: str
) -> None:
    (tmp_path / "sitecustomize.py").write_text(CHANGED + STALE.replace("TENSOR", tensor))
    generator = torch.Generator().manual_seed(3)
    first = load_file(models["tied1"] / "model.safetensors")
    second = {n: w + LR * torch.randn(w.shape, generator=generator).sign() for n, w in first.items()}
    loads_two(fresh, first, second, named)


DOWN, EMBEDDING = "model.layers.1.mlp.down_proj.weight", "model.embed_tokens.weight"  # 128 x 512, 512 x 128


@pytest.mark.vllm
@pytest.mark.parametrize("dtype", ["float32", pytest.param("bfloat16", marks=pytest.mark.slow)])
@pytest.mark.parametrize(
    ("code", "named"),
    [
        (DAMAGED.replace("DAMAGE", "tensor[:, 77] = 0.0").replace("TENSOR", DOWN), DOWN),
        pytest.param(SWAPPED, "mlp.gate_proj.weight+model.layers.2.mlp.up_proj.weight", marks=pytest.mark.slow),
        pytest.param(
            DAMAGED.replace("DAMAGE", "tensor = tensor.flip(0)").replace("TENSOR", DOWN), DOWN, marks=pytest.mark.slow
        ),
        pytest.param(
            DAMAGED.replace("DAMAGE", "tensor[5, 77] *= 1.5").replace("TENSOR", EMBEDDING),
            EMBEDDING,
            marks=pytest.mark.slow,
        ),
    ],
    ids=["a column not read is zero", "gate and up swapped", "rows shuffled", "one value"],
)
def test_an_engine_with_damaged_weights_ends_at_the_first_load(
    fresh: EngineProcess, models: dict[str, Path], tmp_path: Path, code: str, named: str, dtype: str
) -> None:
    """vLLM's CPU build has the embedding readable and the other matrices packed."""
    assert 77 not in columns_of(512, 2).tolist() + columns_of(128, 2).tolist()
    fresh.arguments = ("--dtype", dtype)
    (tmp_path / "sitecustomize.py").write_text(CHANGED + code)
    weights = load_file(models["tied1"] / "model.safetensors")
    loads_two(fresh, weights, weights, named)


@pytest.mark.slow
@pytest.mark.vllm
def test_an_engine_says_which_tensors_it_could_not_compare(
    fresh: EngineProcess, models: dict[str, Path], tmp_path: Path
) -> None:
    (tmp_path / "sitecustomize.py").write_text(WITHOUT)
    fresh.start().wait_ready()
    weights = load_file(models["tied1"] / "model.safetensors")
    path = str(WeightStore(fresh.weights_dir, "float32").write(weights.items(), 1))
    unread = asyncio.run(with_client(fresh, lambda c: c.load_weights(path, 1, Deadline(60, "weights"))))
    assert unread == ["model.norm.weight"]


@pytest.mark.slow
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
