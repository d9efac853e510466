"""Advantages against references in plain Python, degenerate groups, and what must not change them."""

import math
import statistics

import pytest
import torch
from torch import Tensor

from nemo_prorl.algorithms.advantages import group_advantages
from tests.algorithms.choices import choices

ADVANTAGE_KINDS = choices("advantage")


def reference(rewards: list[list[float]], valid: list[list[bool]], kind: str) -> list[list[float]]:
    """The formulas, written from the papers with the standard library only."""
    centred: list[list[float]] = []
    pool: list[float] = []
    for group, oks in zip(rewards, valid, strict=True):
        good = [r for r, ok in zip(group, oks, strict=True) if ok]
        if len(good) < 2:
            centred.append([0.0] * len(group))
            continue
        mean = statistics.fmean(good)
        centred.append([r - mean if ok else 0.0 for r, ok in zip(group, oks, strict=True)])
        pool += [r - mean for r in good]
    result = []
    for group, oks, differences in zip(rewards, valid, centred, strict=True):
        good = [r for r, ok in zip(group, oks, strict=True) if ok]
        row = []
        for i, ok in enumerate(oks):
            if not ok or len(good) < 2 or max(good) == min(good):
                row.append(0.0)
            elif kind == "group_norm":
                row.append(differences[i] / (statistics.stdev(good) + 1e-6))
            elif kind == "leave_one_out":
                others = [r for j, r in enumerate(group) if j != i and oks[j]]
                row.append(group[i] - sum(others) / len(others))
            elif kind == "reinforce_pp_baseline":
                row.append(differences[i] / (statistics.stdev(pool) + 1e-6))
            else:
                row.append(differences[i] / (statistics.fmean(good) if kind == "maxrl" else 1.0))
        result.append(row)
    return result


def batch(seed: int, groups: int = 7, samples: int = 5) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    reward_GN = torch.rand(groups, samples, generator=generator, dtype=torch.float64)
    reward_GN[0] = 0.3  # a group that learns nothing
    valid_GN = torch.rand(groups, samples, generator=generator) > 0.25
    valid_GN[1] = True
    return reward_GN, valid_GN


@pytest.mark.parametrize("kind", ADVANTAGE_KINDS)
@pytest.mark.parametrize("seed", range(5))
def test_matches_the_formula(kind: str, seed: int) -> None:
    reward_GN, valid_GN = batch(seed)
    expected = torch.tensor(reference(reward_GN.tolist(), valid_GN.tolist(), kind), dtype=torch.float64)
    torch.testing.assert_close(group_advantages(reward_GN, valid_GN, kind), expected, rtol=1e-10, atol=1e-12)
    in_float32 = group_advantages(reward_GN.float(), valid_GN, kind)
    assert in_float32.dtype == torch.float32
    torch.testing.assert_close(in_float32.double(), expected, rtol=1e-5, atol=1e-6)


def test_group_norm_by_hand_pins_the_sample_deviation() -> None:
    """1, 0, 0, 0: mean 0.25; squared deviations add up to 0.75; 0.75 / 3 = 0.25, so std is 0.5 (not 0.433)."""
    advantage_GN = group_advantages(
        torch.tensor([[1.0, 0.0, 0.0, 0.0]]), torch.ones(1, 4, dtype=torch.bool), "group_norm"
    )
    expected = torch.tensor([[0.75, -0.25, -0.25, -0.25]]) / (0.5 + 1e-6)
    torch.testing.assert_close(advantage_GN, expected, rtol=1e-6, atol=0.0)


def test_leave_one_out_and_batch_wide_by_hand() -> None:
    valid_GN = torch.ones(2, 3, dtype=torch.bool)
    reward_GN = torch.tensor([[3.0, 0.0, 0.0], [1.0, 1.0, 1.0]])
    torch.testing.assert_close(
        group_advantages(reward_GN, valid_GN, "leave_one_out"),
        torch.tensor([[3.0, -1.5, -1.5], [0.0, 0.0, 0.0]]),
    )
    # Differences 2, -1, -1, 0, 0, 0: squares add up to 6, 6 / 5 = 1.2.
    torch.testing.assert_close(
        group_advantages(reward_GN, valid_GN, "reinforce_pp_baseline"),
        torch.tensor([[2.0, -1.0, -1.0], [0.0, 0.0, 0.0]]) / (math.sqrt(1.2) + 1e-6),
    )


@pytest.mark.parametrize("kind", ADVANTAGE_KINDS)
def test_two_responses(kind: str) -> None:
    found = group_advantages(torch.tensor([[1.0, 0.0]], dtype=torch.float64), torch.ones(1, 2, dtype=torch.bool), kind)
    assert found.tolist()[0] == pytest.approx(reference([[1.0, 0.0]], [[True, True]], kind)[0])


@pytest.mark.parametrize("kind", ADVANTAGE_KINDS)
@pytest.mark.parametrize("value", [0.0, 1.0, 0.1, 1e6 / 3])
def test_equal_rewards_give_exact_zeros(kind: str, value: float) -> None:
    """Also in float64, where the mean of three times 0.1 is not 0.1."""
    for samples in (2, 3, 7, 16):
        for dtype in (torch.float32, torch.float64):
            reward_GN = torch.full((2, samples), value, dtype=dtype)
            valid_GN = torch.ones(2, samples, dtype=torch.bool)
            assert torch.equal(group_advantages(reward_GN, valid_GN, kind), torch.zeros(2, samples, dtype=dtype))


@pytest.mark.parametrize("kind", ADVANTAGE_KINDS)
def test_degenerate_shapes_and_groups(kind: str) -> None:
    assert group_advantages(torch.zeros(0, 4), torch.zeros(0, 4, dtype=torch.bool), kind).shape == (0, 4)
    assert group_advantages(torch.zeros(3, 0), torch.zeros(3, 0, dtype=torch.bool), kind).shape == (3, 0)
    one = torch.tensor([[5.0], [1.0]])
    assert torch.equal(group_advantages(one, torch.ones(2, 1, dtype=torch.bool), kind), torch.zeros(2, 1))
    nothing_valid = group_advantages(torch.ones(2, 3), torch.zeros(2, 3, dtype=torch.bool), kind)
    assert torch.equal(nothing_valid, torch.zeros(2, 3))
    valid_GN = torch.tensor([[True, False, False]])
    assert torch.equal(group_advantages(torch.tensor([[1.0, 0.0, 0.0]]), valid_GN, kind), torch.zeros(1, 3))


@pytest.mark.parametrize("kind", ADVANTAGE_KINDS)
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_bad_rewards_are_ignored_where_not_valid(kind: str, bad: float) -> None:
    reward_GN, valid_GN = batch(11)
    reward_GN[2, 3] = bad
    valid_GN[2] = torch.tensor([True, True, True, False, True])
    zeroed = torch.where(valid_GN, reward_GN, 0.0)
    assert torch.equal(group_advantages(reward_GN, valid_GN, kind), group_advantages(zeroed, valid_GN, kind))


@pytest.mark.parametrize("kind", ADVANTAGE_KINDS)
def test_an_invalid_response_is_as_if_it_had_never_been(kind: str) -> None:
    reward_GN, _ = batch(3, groups=4, samples=6)
    valid_GN = torch.ones(4, 6, dtype=torch.bool)
    valid_GN[:, 4] = False
    smaller = group_advantages(reward_GN[:, [0, 1, 2, 3, 5]], valid_GN[:, [0, 1, 2, 3, 5]], kind)
    advantage_GN = group_advantages(reward_GN, valid_GN, kind)
    torch.testing.assert_close(advantage_GN[:, [0, 1, 2, 3, 5]], smaller)
    assert torch.equal(advantage_GN[:, 4], torch.zeros(4, dtype=torch.float64))


@pytest.mark.parametrize("kind", ADVANTAGE_KINDS)
@pytest.mark.parametrize("seed", range(3))
def test_order_of_groups_and_samples_does_not_matter(kind: str, seed: int) -> None:
    reward_GN, valid_GN = batch(seed)
    advantage_GN = group_advantages(reward_GN, valid_GN, kind)
    groups = torch.randperm(7, generator=torch.Generator().manual_seed(seed))
    samples = torch.randperm(5, generator=torch.Generator().manual_seed(seed + 1))
    shuffled = group_advantages(reward_GN[groups][:, samples], valid_GN[groups][:, samples], kind)
    torch.testing.assert_close(shuffled, advantage_GN[groups][:, samples], rtol=1e-12, atol=1e-14)


def test_a_kind_that_no_formula_has_is_refused() -> None:
    with pytest.raises(ValueError, match=r"advantage=gae: expected group_norm, leave_one_out, .* of your own"):
        group_advantages(torch.zeros(1, 2), torch.ones(1, 2, dtype=torch.bool), "gae")


@pytest.mark.parametrize("kind", ["group_norm", "leave_one_out", "mean_only", "maxrl"])
def test_these_kinds_need_only_their_own_group(kind: str) -> None:
    reward_GN, valid_GN = batch(8)
    whole = group_advantages(reward_GN, valid_GN, kind)
    parts = [group_advantages(reward_GN[rows], valid_GN[rows], kind) for rows in (slice(0, 3), slice(3, 7))]
    assert torch.equal(whole, torch.cat(parts))
