"""The actor in 16 bits at parallel layouts: bf16 weights with float32 masters, as on GPUs.

The yardstick is autograd in float64 on the same bf16 weights in transformers.  A gradient in bf16 is that one plus
rounding noise: the cosine says how much noise, and the ratio of norms whether something is counted twice or left out.

Measured at these layouts: whole gradients have cosines of 0.99986 to 0.99989 and norms of 1.001 to 1.008 times the
exact one, single tensors 0.9989 or more and 0.995 to 1.027; log-probabilities are off by 0.0056 on average and by 0.021
at most.  The bounds leave two to four times the room: a part of a gradient that is missing or doubled on one of two
ranks is far outside.
"""

import functools
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from nemo_prorl.algorithms.losses import grpo_loss
from tests.policy.measure_half import DENOMINATOR, LAYOUTS, LOSS, SLOW
from tests.policy.ranks import Layout, fixed_batch

pytestmark = [pytest.mark.nemo, pytest.mark.timeout(900)]
layouts = pytest.mark.parametrize(
    "layout", [pytest.param(x, id=x.name, marks=[pytest.mark.slow] if x in SLOW else []) for x in LAYOUTS]
)


def measured(ranks: Path, layout: Layout) -> dict[str, Any]:
    found: dict[str, Any] = torch.load(ranks / f"half-{layout.name}.pt", weights_only=False)
    return found


@functools.cache
def exact(folder: Path) -> tuple[torch.Tensor, float, dict[str, torch.Tensor]]:
    """Log-probabilities, loss and gradients by autograd in float64, of the weights in bf16."""
    from transformers import AutoModelForCausalLM

    batch = fixed_batch()
    model = AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager", torch_dtype=torch.float64)
    log_softmax = torch.log_softmax(model(batch.tokens_BT).logits[:, :-1] / 1.2, -1)
    logp_BT = log_softmax.gather(-1, batch.tokens_BT[:, 1:, None])[..., 0]
    entropy_BT = -(log_softmax.exp() * log_softmax).sum(-1)
    rest = (batch.old_logp_BT[:, 1:].double(), batch.ref_logp_BT[:, 1:].double(), batch.advantage_B.double())
    weight_BT = batch.weight_BT[:, 1:].double()
    loss, _ = grpo_loss(logp_BT, *rest, batch.mask_BT[:, 1:], weight_BT, DENOMINATOR, LOSS, entropy_BT)
    loss.backward()
    gradients = {name: p.grad for name, p in model.named_parameters()}
    return logp_BT.detach(), float(loss.detach()), gradients


def cosine(a: torch.Tensor, b: torch.Tensor) -> float:
    return float(torch.cosine_similarity(a.flatten().double(), b.flatten().double(), 0))


@layouts
def test_weights_are_in_bf16_and_their_masters_in_float32(layout: Layout, ranks: Path) -> None:
    found = measured(ranks, layout)
    assert found["dtypes"] == ({torch.bfloat16}, {torch.float32})
    original = load_file(ranks / f"half-{layout.model}" / "model.safetensors")
    assert found["exported"].keys() == original.keys()
    assert all(torch.equal(found["exported"][name], value) for name, value in original.items())


@layouts
def test_log_probabilities_are_exact_but_for_rounding(layout: Layout, ranks: Path) -> None:
    logp_BT, loss, _ = exact(ranks / f"half-{layout.model}")
    found = measured(ranks, layout)
    off_N = (found["logp"][:, 1:] - logp_BT)[fixed_batch().mask_BT[:, 1:]]
    assert off_N.abs().max() < 0.05
    assert off_N.abs().mean() < 0.01
    assert off_N.mean().abs() < 0.003  # noise has no side
    assert found["sums"]["loss"] == pytest.approx(loss, abs=0.003)


@layouts
def test_gradients_are_exact_but_for_rounding(layout: Layout, ranks: Path) -> None:
    _, _, wanted = exact(ranks / f"half-{layout.model}")
    found = measured(ranks, layout)["gradients"]
    assert found.keys() == wanted.keys()
    of_all = torch.cat([found[name].flatten() for name in wanted]), torch.cat([g.flatten() for g in wanted.values()])
    assert cosine(*of_all) > 0.9995
    assert float(of_all[0].norm() / of_all[1].norm()) == pytest.approx(1, abs=0.02)
    for name, gradient in wanted.items():
        assert cosine(found[name], gradient) > 0.996, name
        assert float(found[name].norm() / gradient.norm()) == pytest.approx(1, abs=0.06), name


@layouts
@pytest.mark.parametrize("moment", ["resumed", "reset"])
def test_a_checkpoint_goes_on_to_the_bit(layout: Layout, moment: str, ranks: Path) -> None:
    onward, again = measured(ranks, layout)[moment]
    assert onward == again


@layouts
def test_right_after_a_reset_the_reference_is_the_policy(layout: Layout, ranks: Path) -> None:
    assert measured(ranks, layout)["kl"] == 0


@layouts
def test_after_a_warm_up_masters_are_those_of_the_weights_that_it_leaves(layout: Layout, ranks: Path) -> None:
    """Updates keep in the masters what bf16 cannot hold; a run that is killed before its first checkpoint lost it."""
    assert measured(ranks, layout)["masters"] == (True, True)
