"""The real actor on Megatron's Transformer Engine layers: `cluster=h100_4x8` with a small model, on CPU ranks.

A stand-in computes what Transformer Engine would: this proves wiring, not kernels.
"""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch.distributed.checkpoint.metadata import BytesStorageMetadata

from nemo_prorl.policy.plain_files import check_metadata, check_objects
from nemo_prorl.sizing.phases import MOST_BESIDE_ENGINES
from tests.policy.ranks import fixed_batch
from tests.policy.te_ranks import (
    ACROSS_FUSED,
    ACROSS_RANKS,
    BF16,
    CASES,
    DELAYED,
    LOCAL,
    LOCAL_FUSED,
    QWEN3_ACROSS,
    QWEN3_LOCAL,
    RESUMED,
    TENSORWISE,
    Case,
)

pytestmark = [pytest.mark.nemo, pytest.mark.timeout(900)]


def measured(te_ranks: Path, case: Case) -> dict[str, Any]:
    found: dict[str, Any] = torch.load(te_ranks / f"{case.name}.pt", weights_only=False)
    return found


def names(cases: list[Case]) -> Any:
    return pytest.mark.parametrize("case", cases, ids=[case.name for case in cases])


@names([case for case in CASES if case not in (LOCAL, LOCAL_FUSED, QWEN3_LOCAL)])
def test_layers_are_transformer_engine_s(case: Case, te_ranks: Path) -> None:
    layers = measured(te_ranks, case)["layers"]
    for layer in ("TELayerNormColumnParallelLinear", "TERowParallelLinear", "TEDotProductAttention"):
        assert layer in layers


@pytest.mark.parametrize(("case", "local"), [(ACROSS_RANKS, LOCAL), (QWEN3_ACROSS, QWEN3_LOCAL)], ids=str)
def test_in_float32_they_compute_what_megatron_s_own_layers_do(case: Case, local: Case, te_ranks: Path) -> None:
    """Over two tensor ranks with sequence parallelism, packed: every way that the stand-in can go, but FP8."""
    found, wanted = measured(te_ranks, case), measured(te_ranks, local)
    torch.testing.assert_close(found["logp"], wanted["logp"], rtol=0, atol=2e-6)
    for (_, sums, _), (_, expected, _) in zip(found["steps"], wanted["steps"], strict=True):
        assert sums["grad_norm"] == pytest.approx(expected["grad_norm"], rel=1e-5)
        assert sums["loss"] == pytest.approx(expected["loss"], abs=1e-5)
    for name, value in wanted["weights"].items():
        torch.testing.assert_close(found["weights"][name], value, rtol=0, atol=1e-4)


@pytest.mark.parametrize(("case", "plain"), [(LOCAL_FUSED, LOCAL), (ACROSS_FUSED, ACROSS_RANKS)], ids=str)
def test_kernels_that_add_to_the_gradient_s_buffer_change_no_update(case: Case, plain: Case, te_ranks: Path) -> None:
    """Apex's in Megatron's own layers, and Transformer Engine's.  The loss gives the output weight's gradient."""
    found, wanted = measured(te_ranks, case), measured(te_ranks, plain)
    linear = {f"{part}.weight" for part in ("linear_qkv", "linear_proj", "linear_fc1", "linear_fc2")}
    assert wanted["fused"] == []
    assert {name.split(".", 4)[-1] for name in found["fused"]} == linear
    assert len(found["fused"]) == 3 * len(linear)
    assert measured(te_ranks, BF16)["fused"] == found["fused"]  # as the cluster's files have it
    for (_, sums, _), (_, expected, _) in zip(found["steps"], wanted["steps"], strict=True):
        assert sums["grad_norm"] == pytest.approx(expected["grad_norm"], rel=1e-6)
    for name, value in wanted["weights"].items():
        torch.testing.assert_close(found["weights"][name], value, rtol=0, atol=2e-6)


@pytest.mark.parametrize(("case", "error"), [(BF16, 0.01), (TENSORWISE, 0.1), (DELAYED, 0.1)], ids=str)
def test_in_16_and_8_bits_log_probabilities_are_off_by_their_rounding(case: Case, error: float, te_ranks: Path) -> None:
    mask_BT = fixed_batch().mask_BT
    found, wanted = (measured(te_ranks, c)["logp"][mask_BT] for c in (case, LOCAL))
    off = float((found - wanted).abs().mean())
    assert error / 10 < off < error


def test_the_first_and_the_last_layer_stay_in_bf16_where_so_asked(te_ranks: Path) -> None:
    found = {case: measured(te_ranks, case)["in_fp8"] for case in (BF16, DELAYED, TENSORWISE)}
    assert found == {BF16: [False] * 3, DELAYED: [True] * 3, TENSORWISE: [False, True, False]}


@names([TENSORWISE, DELAYED])
def test_fp8_updates_follow_a_pass_without_gradients(case: Case, te_ranks: Path) -> None:
    """A step computes log-probabilities first; the stand-in keeps weights as Transformer Engine does before 2.2.0."""
    steps = measured(te_ranks, case)["steps"]
    wanted = measured(te_ranks, LOCAL)["steps"]
    assert [s[1]["loss"] for s in steps] == pytest.approx([s[1]["loss"] for s in wanted], abs=0.02)
    assert len({sha256 for _, _, sha256 in steps}) == len(steps)


@names([BF16, TENSORWISE])
def test_nothing_large_reaches_a_gpu_while_engines_are_awake(case: Case, te_ranks: Path) -> None:
    """At the size of the cluster's model.  The reference in use is a copy of the weights, while engines sleep."""
    found, weights = measured(te_ranks, case)["awake"], 2 * 1_777_088_000 / case.ranks
    assert found["in place"]
    assert found["same"]
    assert found["reference"] == pytest.approx(weights, rel=0.01)
    for phase in ("saving", "hashing", "resetting", "loading"):
        assert found[phase] <= MOST_BESIDE_ENGINES, phase


@names([LOCAL, BF16])
def test_a_new_width_is_rare_where_each_needs_new_attention_graphs(case: Case, te_ranks: Path) -> None:
    """In a context of 64 widths are even; Megatron's own layers and packed rows need no such padding."""
    found = measured(te_ranks, case)
    shapes = found["shapes"]
    assert {forward_only for forward_only, _ in shapes} == {False, True}
    assert all(width % 2 == 0 for _, (_, width) in shapes) == (case == BF16)
    assert found["steps"][-1][1]["max_shapes"] == len(shapes)


@pytest.mark.parametrize(("case", "objects"), [(BF16, False), (TENSORWISE, False), (DELAYED, True)], ids=str)
def test_only_a_checkpoint_with_delayed_scales_holds_pickled_objects(case: Case, objects: bool, te_ranks: Path) -> None:
    folder = te_ranks / "checkpoints" / f"{case.name}-2"
    stored = check_metadata(folder).state_dict_metadata
    found = {
        name.split("/")[0].split(".")[-1] for name, kind in stored.items() if isinstance(kind, BytesStorageMetadata)
    }
    assert found == ({"_extra_state"} if objects else set())
    check_objects(folder)


@names(RESUMED)
def test_other_processes_go_on_to_the_bit(case: Case, te_ranks: Path) -> None:
    """Checkpoints after updates and right after a hard reset are loaded; delayed scales are in them."""
    again = torch.load(te_ranks / f"{case.name}-resumed.pt", weights_only=False)
    assert again == measured(te_ranks, case)["onward"]


def test_a_checkpoint_before_any_update_loads(te_ranks: Path) -> None:
    found = torch.load(te_ranks / "bf16-from-bf16-0.pt", weights_only=False)
    assert found["step"] == measured(te_ranks, BF16)["steps"][0]


def test_an_imported_checkpoint_loads_into_transformer_engine_s_layers_and_into_megatron_s_own(te_ranks: Path) -> None:
    """The checkpoint has weights alone: the optimizer begins as in a run that begins with the model."""
    wanted = load_file(te_ranks / "model" / "model.safetensors")
    for case in (BF16, LOCAL):
        found = torch.load(te_ranks / f"{case.name}-from-imported.pt", weights_only=False)
        assert found["weights"].keys() == wanted.keys()
        for name, value in wanted.items():
            assert torch.equal(found["weights"][name], value.float()), name
        assert found["step"] == measured(te_ranks, case)["steps"][0]


def test_a_checkpoint_of_transformer_engine_is_exported(te_ranks: Path) -> None:
    """Written by two tensor ranks, in FP8."""
    exported, wanted = load_file(te_ranks / "exported" / "model.safetensors"), measured(te_ranks, TENSORWISE)["weights"]
    assert exported.keys() == wanted.keys()
    for name, value in wanted.items():
        assert exported[name].dtype == torch.bfloat16
        assert torch.equal(exported[name].float(), value), name


def test_import_and_export_build_no_model(te_ranks: Path) -> None:
    assert json.loads((te_ranks / "imported-by.json").read_text()) == []
    original, again = (load_file(te_ranks / name / "model.safetensors") for name in ("model", "again"))
    assert original.keys() == again.keys()
    for name, value in original.items():
        assert torch.equal(again[name], value), name
