"""Entropy and its controller."""

import json
import math

import pytest
import torch

from nemo_prorl.algorithms.entropy import AdaptiveEntropy, entropy_of_logits


def test_entropy_by_hand() -> None:
    assert entropy_of_logits(torch.zeros(3, 8)).tolist() == pytest.approx([math.log(8)] * 3)
    logits = torch.tensor([1.0, 2.0, 4.0])
    weights = [math.exp(x / 1.2) for x in (1.0, 2.0, 4.0)]
    expected = -sum(w / sum(weights) * math.log(w / sum(weights)) for w in weights)
    assert entropy_of_logits(logits, 1.2).item() == pytest.approx(expected, rel=1e-6)
    excluded = torch.tensor([1.0, 2.0, 4.0, -math.inf], requires_grad=True)
    entropy = entropy_of_logits(excluded, 1.2)
    entropy.backward()
    assert entropy.item() == pytest.approx(expected, rel=1e-6)
    assert excluded.grad is not None
    assert torch.isfinite(excluded.grad).all()
    assert torch.autograd.gradcheck(entropy_of_logits, (torch.randn(2, 5, dtype=torch.float64, requires_grad=True),))


def test_controller_by_hand() -> None:
    controller = AdaptiveEntropy(target=0.2, step=0.25, maximum=0.6)
    given = [controller.update(entropy) for entropy in (0.1, 0.1, 0.1, 0.1, 0.5, 0.2, 0.1, 0.5, 0.5, 0.5, 0.1)]
    # c before each step: 0, .25, .5, .6 (bounded), .6, .35, .35, .6, .35, .1, 0 (bounded); 0 is given above the target.
    assert given == pytest.approx([0.0, 0.25, 0.5, 0.6, 0.0, 0.35, 0.35, 0.0, 0.0, 0.0, 0.0])


def test_controller_resumes_exactly() -> None:
    first, second = AdaptiveEntropy(0.3, 0.0001), AdaptiveEntropy(0.3, 0.0001)
    for entropy in (0.1, 0.2, 0.1, 0.4):
        first.update(entropy)
    second.load_state_dict(json.loads(json.dumps(first.state_dict())))
    assert [first.update(0.1) for _ in range(5)] == [second.update(0.1) for _ in range(5)]


def test_wrong_use_is_refused() -> None:
    with pytest.raises(ValueError, match="entropy is nan"):
        AdaptiveEntropy(0.2, 0.1, maximum=1.0).update(math.nan)
    with pytest.raises(ValueError, match="target entropy is -1"):
        AdaptiveEntropy(-1.0, 0.1)
    with pytest.raises(ValueError, match="step of the entropy coefficient is 0"):
        AdaptiveEntropy(0.2, 0.0)
    with pytest.raises(ValueError, match="minimum <= start"):
        AdaptiveEntropy(0.2, 0.1, start=0.5)
