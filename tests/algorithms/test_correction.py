"""Importance weights between engine and trainer, by hand and against plain Python."""

import math

import pytest
import torch
from torch import Tensor

from nemo_prorl.algorithms.correction import rollout_correction
from nemo_prorl.config import CorrectionConfig
from tests.algorithms.choices import choices

CORRECTION_KINDS = choices("correction.kind")


def logs(ratios: list[list[float]]) -> tuple[Tensor, Tensor]:
    """Trainer's and engine's log-probabilities with these ratios of probability."""
    engine = torch.full((len(ratios), len(ratios[0])), -2.0)
    return engine + torch.tensor(ratios).log(), engine


RATIOS = [[0.25, 1.0, 3.0, 1.5], [0.5, 0.5, 1.0, 1.0], [3.0, 3.0, 3.0, 0.1]]
MASK = torch.tensor([[True] * 4, [True, True, True, False], [True, True, True, False]])


@pytest.mark.parametrize(
    ("kind", "expected", "capped", "masked"),
    [
        ("none", [[1, 1, 1, 1], [1, 1, 1, 0], [1, 1, 1, 0]], 0, 0),
        ("tis", [[0.25, 1, 2, 1.5], [0.5, 0.5, 1, 0], [2, 2, 2, 0]], 4, 0),
        ("icepop", [[0, 1, 0, 1.5], [0.5, 0.5, 1, 0], [0, 0, 0, 0]], 0, 5),
        # Geometric means: (0.25 * 3 * 1.5) ** 0.25 = 1.03, 0.63, and 3, which is above the cap.
        ("sequence_mask", [[1, 1, 1, 1], [1, 1, 1, 0], [0, 0, 0, 0]], 0, 3),
    ],
)
def test_weights_by_hand(kind: str, expected: list[list[float]], capped: int, masked: int) -> None:
    old, engine = logs(RATIOS)
    # 0.5 in float32 logarithms comes back as 0.49999997: keep the floor just below it.
    weight, gap = rollout_correction(old, engine, MASK, CorrectionConfig(kind, floor=0.4999))
    assert weight.dtype == torch.float32
    torch.testing.assert_close(weight, torch.tensor(expected, dtype=torch.float32))
    assert gap["fraction_capped"].item() == pytest.approx(capped / 10)
    assert gap["fraction_masked"].item() == pytest.approx(masked / 10)


def test_without_a_cap_no_ratio_is_too_large() -> None:
    old, engine = logs([[0.25, 1.0, 300.0, 1.5]])
    for kind, expected in (("tis", [0.25, 1, 300, 1.5]), ("icepop", [0, 1, 300, 1.5]), ("sequence_mask", [1] * 4)):
        weight, gap = rollout_correction(old, engine, MASK[:1], CorrectionConfig(kind, cap=None))
        torch.testing.assert_close(weight, torch.tensor([expected], dtype=torch.float32))
        assert gap["fraction_capped"] == 0


def test_a_response_of_one_token() -> None:
    old, engine = logs([[3.0, 1.0]])
    weight, gap = rollout_correction(old, engine, torch.tensor([[True, False]]), CorrectionConfig("sequence_mask"))
    assert weight.tolist() == [[0.0, 0.0]]
    assert gap["fraction_masked"].item() == 1.0
    assert rollout_correction(old, engine, torch.tensor([[True, False]]), CorrectionConfig())[1]["fraction_capped"] == 1


@pytest.mark.parametrize("kind", CORRECTION_KINDS)
def test_gap_is_measured_whatever_the_correction(kind: str) -> None:
    old, engine = logs(RATIOS)
    _, gap = rollout_correction(old, engine, MASK, CorrectionConfig(kind))
    ratios = [r for row, on in zip(RATIOS, MASK.tolist(), strict=True) for r, ok in zip(row, on, strict=True) if ok]
    assert gap["tokens"].item() == 10
    assert gap["mean_abs"].item() == pytest.approx(sum(abs(math.log(r)) for r in ratios) / 10, rel=1e-5)
    assert gap["max_abs"].item() == pytest.approx(math.log(4), rel=1e-5)
    assert gap["mean_k3"].item() == pytest.approx(sum(r - 1 - math.log(r) for r in ratios) / 10, rel=1e-5)


def test_k3_is_the_divergence_from_engine_to_trainer() -> None:
    """Weighted with the engine's probabilities it is KL(engine || trainer), and not the other one."""
    engine = torch.tensor([0.7, 0.2, 0.1], dtype=torch.float64)
    trainer = torch.tensor([0.4, 0.4, 0.2], dtype=torch.float64)
    mean = 0.0
    for e, t in zip(engine, trainer, strict=True):
        one = torch.ones(1, 1, dtype=torch.bool)
        _, gap = rollout_correction(t.log().view(1, 1), e.log().view(1, 1), one, CorrectionConfig("none"))
        mean += float(e) * gap["mean_k3"].item()
    forward = float((engine * (engine / trainer).log()).sum())
    backward = float((trainer * (trainer / engine).log()).sum())
    assert mean == pytest.approx(forward, rel=1e-5)
    assert abs(forward - backward) > 0.001


@pytest.mark.parametrize("kind", CORRECTION_KINDS)
def test_equal_policies_are_left_alone(kind: str) -> None:
    old, _ = logs(RATIOS)
    weight, gap = rollout_correction(old, old.clone(), MASK, CorrectionConfig(kind, cap=1.0, floor=1.0))
    assert torch.equal(weight, MASK.float())
    assert gap.pop("tokens") == 10
    assert [value.item() for value in gap.values()] == [0.0] * 5


@pytest.mark.parametrize("kind", CORRECTION_KINDS)
def test_masked_rubbish_is_ignored_and_counted_rubbish_is_named(kind: str) -> None:
    old, engine = logs(RATIOS)
    clean = rollout_correction(old, engine, MASK, CorrectionConfig(kind))
    engine[1, 3], old[2, 3] = math.nan, -math.inf
    spoilt = rollout_correction(old, engine, MASK, CorrectionConfig(kind))
    assert torch.equal(clean[0], spoilt[0])
    assert clean[1] == spoilt[1]
    engine[1, 2] = -math.inf
    with pytest.raises(ValueError, match=r"engine_logp_BT\[1, 2\]=-inf: expected a finite number"):
        rollout_correction(old, engine, MASK, CorrectionConfig(kind))


@pytest.mark.parametrize("kind", CORRECTION_KINDS)
def test_padding_and_split_do_not_matter(kind: str) -> None:
    old, engine = logs(RATIOS)
    whole, _ = rollout_correction(old, engine, MASK, CorrectionConfig(kind))
    rows = [
        rollout_correction(old[i : i + 1], engine[i : i + 1], MASK[i : i + 1], CorrectionConfig(kind))[0]
        for i in range(3)
    ]
    assert torch.equal(torch.cat(rows), whole)
    wide_old, wide_engine, wide_mask = (torch.nn.functional.pad(x, (2, 3)) for x in (old, engine, MASK))
    wide, _ = rollout_correction(wide_old, wide_engine, wide_mask, CorrectionConfig(kind))
    torch.testing.assert_close(wide[:, 2:6], whole)


@pytest.mark.parametrize("kind", CORRECTION_KINDS)
def test_nothing_counts(kind: str) -> None:
    for shape in ((2, 3), (0, 3), (2, 0)):
        nan = torch.full(shape, math.nan)
        weight, gap = rollout_correction(nan, nan, torch.zeros(shape, dtype=torch.bool), CorrectionConfig(kind))
        assert torch.equal(weight, torch.zeros(shape))
        assert all(value.item() == 0.0 for value in gap.values())


def test_a_kind_that_no_formula_has_is_refused() -> None:
    with pytest.raises(ValueError, match="correction 'raft': expected none, tis, icepop or sequence_mask"):
        rollout_correction(*logs(RATIOS), MASK, CorrectionConfig("raft"))


def test_weight_has_no_gradient_and_huge_gaps_are_capped() -> None:
    old = torch.tensor([[-1.0, -300.0]], requires_grad=True)
    engine = torch.tensor([[-300.0, -1.0]])
    weight, gap = rollout_correction(old, engine, torch.ones(1, 2, dtype=torch.bool), CorrectionConfig("tis"))
    assert not weight.requires_grad
    assert weight.tolist() == [[2.0, pytest.approx(0.0)]]
    assert all(torch.isfinite(value) for value in gap.values())
