"""The real actor computes the same at every parallel layout, and the same as transformers.  All in float32.

Tolerances: two layouts add the same numbers in another order.  Log-probabilities agree to 2e-6, losses and gradients
to 2e-6 (they are about 1), weights after three Adam steps of 1e-3 to 1e-4: Adam divides a gradient by its own size,
so that one near 0 moves its weight by what rounding says.
"""

import hashlib
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch.distributed.checkpoint.filesystem import FileSystemReader

from nemo_prorl.lifecycle.killpoints import POINTS
from tests.policy.ranks import (
    CLOSER,
    DATA_PARALLEL,
    FIRST,
    LAYOUTS,
    MOST_CUT,
    RECORDED_UPDATES,
    SLOW,
    STEPS,
    Layout,
    fixed_batch,
)

Measured = Callable[[str], dict[str, Any]]
pytestmark = [pytest.mark.nemo, pytest.mark.timeout(900)]

OTHERS = [x for x in LAYOUTS if x not in FIRST.values()]


def names(layouts: list[Layout], slow: list[Layout] = SLOW) -> Any:
    return pytest.mark.parametrize(
        "layout", [pytest.param(x, id=x.name, marks=[pytest.mark.slow] if x in slow else []) for x in layouts]
    )


def assert_same_tensors(found: dict[str, Any], wanted: dict[str, Any], relative: float, absolute: float) -> None:
    assert found.keys() == wanted.keys()
    for name, value in wanted.items():
        torch.testing.assert_close(found[name], value, rtol=relative, atol=absolute, msg=partial("{}: {}".format, name))


def maths(sums: dict[str, float]) -> dict[str, float]:
    """Without what says how rows were put together."""
    return {key: value for key, value in sums.items() if key not in ("positions", "padding", "max_shapes")}


def test_data_ranks_make_equally_many_micro_batches(measured: Measured) -> None:
    """The first rank has one row; what it adds has no rows and changes nothing, as `test_layouts_agree` shows."""
    found = measured(DATA_PARALLEL.name)
    assert found["rows"] == 1
    assert found["micro_batches"][0] == 1
    assert len(found["micro_batches"]) > 2
    assert not any(found["micro_batches"][1:])


@names(LAYOUTS)
def test_what_goes_through_the_model_is_counted(layout: Layout, measured: Measured) -> None:
    """Packed, a prompt once in a micro-batch, and only what makes a multiple is padding."""
    sums, tokens = measured(layout.name)["sums"], int(fixed_batch().length_B.sum())
    counted = sums["positions"] - sums["padding"]
    if layout.packed:
        assert counted < tokens
        assert (sums["padding"] == 0) == (not layout.sp)
    else:
        assert counted == tokens
        assert sums["padding"] > 0


@names(LAYOUTS)
def test_import_then_export_is_bit_equal(layout: Layout, ranks: Path, measured: Measured) -> None:
    original = load_file(ranks / layout.model / "model.safetensors")
    exported = measured(layout.name)["exported"]
    assert exported.keys() == original.keys()
    for name, value in original.items():
        assert torch.equal(exported[name], value), name


@names(LAYOUTS)
def test_log_probabilities_are_those_of_transformers(layout: Layout, ranks: Path, measured: Measured) -> None:
    from transformers import AutoModelForCausalLM

    batch, found = fixed_batch(), measured(layout.name)
    model = AutoModelForCausalLM.from_pretrained(ranks / layout.model, attn_implementation="eager").eval()
    with torch.no_grad():
        logits = model(batch.tokens_BT).logits.double() / 1.2
    log_softmax = torch.log_softmax(logits[:, :-1], -1)
    wanted_BT = log_softmax.gather(-1, batch.tokens_BT[:, 1:, None])[..., 0]
    entropy_BT = -(log_softmax.exp() * log_softmax).sum(-1)
    mask_BT = batch.mask_BT[:, 1:]
    torch.testing.assert_close(found["logp"][:, 1:][mask_BT].double(), wanted_BT[mask_BT], rtol=0, atol=1e-5)
    torch.testing.assert_close(found["entropy"][:, 1:][mask_BT].double(), entropy_BT[mask_BT], rtol=0, atol=1e-5)
    assert not found["logp"][~batch.mask_BT].any()
    assert not any(found[key].requires_grad for key in ("logp", "entropy", "reference_logp"))  # no graph is kept


@names(OTHERS)
def test_layouts_agree(layout: Layout, measured: Measured) -> None:
    found, wanted = measured(layout.name), measured(FIRST[layout.model].name)
    for key in ("logp", "reference_logp", "entropy"):
        torch.testing.assert_close(found[key], wanted[key], rtol=0, atol=2e-6)
    for sums, other in zip([found["sums"], *found["updates"]], [wanted["sums"], *wanted["updates"]], strict=True):
        assert maths(sums) == pytest.approx(maths(other), rel=2e-5, abs=2e-6)
    assert_same_tensors(found["gradients"], wanted["gradients"], 2e-5, 2e-6)
    assert_same_tensors(found["weights"], wanted["weights"], 0, 1e-4)


@names(LAYOUTS)
def test_gradients_are_those_of_autograd_in_transformers(layout: Layout, ranks: Path, measured: Measured) -> None:
    """The whole chain, loss included, against plain autograd in float64 on the HF model."""
    from transformers import AutoModelForCausalLM

    from nemo_prorl.algorithms.losses import grpo_loss
    from nemo_prorl.config import GRPOConfig

    batch = fixed_batch()
    model = AutoModelForCausalLM.from_pretrained(ranks / layout.model, attn_implementation="eager").double()
    log_softmax = torch.log_softmax(model(batch.tokens_BT).logits[:, :-1] / 1.2, -1)
    logp_BT = log_softmax.gather(-1, batch.tokens_BT[:, 1:, None])[..., 0]
    entropy_BT = -(log_softmax.exp() * log_softmax).sum(-1)
    rest = (batch.old_logp_BT[:, 1:].double(), batch.ref_logp_BT[:, 1:].double(), batch.advantage_B.double())
    mask_BT, weight_BT = batch.mask_BT[:, 1:], batch.weight_BT[:, 1:].double()
    config = GRPOConfig(kl_coef=0.1, entropy_coef=0.01)
    loss, _ = grpo_loss(logp_BT, *rest, mask_BT, weight_BT, float(mask_BT.sum()), config, entropy_BT)
    loss.backward()
    wanted = {name: p.grad.float() for name, p in model.named_parameters()}
    found = measured(layout.name)
    assert found["sums"]["loss"] == pytest.approx(float(loss.detach()), abs=2e-6)
    assert_same_tensors(found["gradients"], wanted, 1e-4, 1e-6)


@names(LAYOUTS)
def test_updates_change_the_policy_and_not_its_reference(layout: Layout, ranks: Path, measured: Measured) -> None:
    found = measured(layout.name)
    assert len(found["updates"]) == STEPS
    assert any(not torch.equal(found["weights"][name], value) for name, value in found["exported"].items())
    digests = [
        hashlib.sha256(name.encode() + value.numpy().tobytes()).digest()
        for name, value in sorted(found["exported"].items())
    ]
    assert found["reference_after"] == hashlib.sha256(b"".join(digests)).hexdigest()


@names(LAYOUTS)
def test_a_checkpoint_goes_on_to_the_bit(layout: Layout, measured: Measured) -> None:
    step, same_weights, onward, again = measured(layout.name)["resumed"]
    assert step == STEPS
    assert same_weights
    assert onward == again


@names(LAYOUTS)
def test_a_hard_reset_goes_on_to_the_bit(layout: Layout, measured: Measured) -> None:
    onward, again, _ = measured(layout.name)["reset"]
    assert onward == again
    assert onward != measured(layout.name)["resumed"][2]


@names(LAYOUTS)
def test_an_update_that_is_not_finite_is_not_made(layout: Layout, measured: Measured) -> None:
    assert measured(layout.name)["poison"] == "NonFiniteUpdate; weights kept: True"


@names(OTHERS)
def test_a_checkpoint_loads_at_another_layout(layout: Layout, measured: Measured) -> None:
    """Of one rank on many, and of many ranks on one."""
    assert {FIRST[x.model].world < x.world for x in OTHERS if x not in SLOW} == {False, True}
    found, wanted = measured(layout.name), measured(FIRST[layout.model].name)
    for name, value in wanted["weights"].items():
        assert torch.equal(found["resharded"][name], value), name
    assert maths(found["resharded_update"]) == pytest.approx(maths(wanted["resumed"][2][0]), rel=2e-5, abs=2e-6)


@names(OTHERS)
def test_a_reset_gives_the_same_reference_and_updates_at_every_layout(layout: Layout, measured: Measured) -> None:
    """From one checkpoint: the reference to the bit, the weights after two Adam steps of 1e-3 to 1e-4."""
    assert RECORDED_UPDATES == 2
    (reference, weights), (wanted, updated) = (
        measured(name)["recorded"] for name in (layout.name, FIRST[layout.model].name)
    )
    assert reference == wanted
    before = measured(FIRST[layout.model].name)["resharded"]
    assert any((updated[name] - value).abs().max() > 1e-3 for name, value in before.items())
    assert_same_tensors(weights, updated, 0, 1e-4)


@names(LAYOUTS)
def test_a_checkpoint_holds_the_moment_of_its_save_though_written_later(layout: Layout, measured: Measured) -> None:
    """Its weights and how it goes on are the business of `test_a_checkpoint_goes_on_to_the_bit`."""
    still_writing, there, reference_in_place = measured(layout.name)["meanwhile"]
    assert still_writing
    assert not there
    assert not reference_in_place  # a new reference leaves that alone which is still to be written
    assert measured(layout.name)["again in place"]  # and takes no new memory once all is written


@names([DATA_PARALLEL, MOST_CUT])
def test_a_snapshot_copies_what_its_rank_writes(layout: Layout, measured: Measured) -> None:
    """Two moments and float32 weights of its share; the weights in use on the first data rank; on rank 0 all weights
    once more, to be hashed."""
    found = measured(layout.name)
    weights = sum(tensor.nbytes for tensor in found["exported"].values())
    share, of_a_model_rank = 3 * weights / layout.world, weights / (layout.tp * layout.pp)
    copied = [int(count) for count in found["copied"]]
    wanted = [share + of_a_model_rank * (rank < layout.tp * layout.pp) for rank in range(layout.world)]
    wanted[0] += weights
    assert copied == pytest.approx(wanted, rel=0.3), weights


@names(CLOSER, slow=[Layout()])
def test_a_checkpoint_is_the_same_written_in_the_background_or_not(layout: Layout, ranks: Path) -> None:
    one, other = (ranks / "checkpoints" / f"{layout.name}-reset{suffix}" for suffix in ("", "-background"))
    names = sorted(file.name for file in one.iterdir())
    assert len([name for name in names if name.endswith(".distcp")]) == layout.world
    assert names == sorted(file.name for file in other.iterdir())
    for name in names:
        if name != ".metadata":  # torch notes its own random identity of a save there
            assert (one / name).read_bytes() == (other / name).read_bytes(), name
    written, again = (FileSystemReader(folder).read_metadata() for folder in (one, other))
    assert written.state_dict_metadata == again.state_dict_metadata
    assert written.storage_data == again.storage_data


@names(CLOSER, slow=[Layout()])
def test_a_roll_back_takes_the_weights_alone(layout: Layout, measured: Measured) -> None:
    found = measured(layout.name)["rolled_back"]
    weights, saved = found["weights"]
    assert weights == saved
    assert found["random"]
    assert found["reference"]
    onward, wanted = found["update"]
    assert onward == wanted


@pytest.mark.parametrize("point", [p for p in POINTS if p.startswith("checkpoint:")])
def test_a_kill_at_any_point_of_a_write_leaves_whole_checkpoints(point: str, measured: Measured) -> None:
    first, second = ("step-000001", 1, True), ("step-000002", 2, True)
    after = point in ("checkpoint:renamed", "checkpoint:prune")
    assert measured(Layout().name)["killed"][point] == ([first, second] if after else [first])


@pytest.mark.parametrize("way", ["background", "foreground"])
def test_all_ranks_are_told_when_one_cannot_write(way: str, measured: Measured) -> None:
    failing = measured(DATA_PARALLEL.name)["failing"]
    for kind, text, full, _ in failing[way]:
        assert kind == "CheckpointError"
        assert "rank 1: OSError: [Errno 28] No space left on device" in text
        assert full  # as the command then says it
    assert failing[f"{way}, again"] == [None, None]
    assert failing[f"{way}, there"] == [False, True]


def test_the_next_save_tells_of_the_last(measured: Measured) -> None:
    for kind, text, _, _ in measured(DATA_PARALLEL.name)["failing"]["next save"]:
        assert kind == "CheckpointError"
        assert "/first was not saved: rank 1: OSError" in text


def test_no_rank_waits_for_a_silent_one_beyond_the_deadline(measured: Measured) -> None:
    for kind, text, _, seconds in measured(DATA_PARALLEL.name)["failing"]["silent"]:
        assert kind in ("CheckpointError", "DeadlineExceeded")
        assert "/silent" in text
        assert seconds < 10
