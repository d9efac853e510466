"""Diagnostics by hand, and their exact reduction."""

import math
import random

import pytest
import torch

from nemo_prorl.algorithms.correction import rollout_correction
from nemo_prorl.algorithms.diagnostics import (
    gap_numbers,
    gap_profile,
    means_by_task,
    merge,
    policy_diagnostics,
    reduction,
    reference_gap,
    repetition,
    sums_by_task,
    temperature_ratio,
    temperature_sums,
)
from nemo_prorl.algorithms.objectives import clipped_surrogate
from nemo_prorl.config import CorrectionConfig, GRPOConfig
from nemo_prorl.lifecycle.tolerances import RATIO_PER_GAP, TEMPERATURE


def test_clip_counts_by_hand() -> None:
    ratio = torch.tensor([[0.5, 1.0, 1.3, 1.5, 4.0]] * 3 + [[9.0] * 5])
    mask = torch.tensor([[True] * 5] * 3 + [[False] * 5])
    advantage = torch.tensor([1.0, -1.0, 0.0, 1.0])
    old = torch.full((4, 5), -5.0)
    old[3] = math.nan
    got = policy_diagnostics(old + ratio.log(), old, advantage, mask, GRPOConfig(dual_clip=3.0))
    assert {name: value.item() for name, value in got.items() if name not in ("ratio", "approx_kl")} == {
        "tokens": 15,
        "positive_tokens": 5,
        "negative_tokens": 5,
        "clipped_high": 2,  # 1.5 and 4
        "clipped_low": 1,  # 0.5
        "unclipped_high": 1,  # 1.5; 4 is cut by the dual clip
        "unclipped_low": 1,  # 0.5
        "dual_clipped": 1,  # 4
        "min_ratio": pytest.approx(0.5),
        "max_ratio": pytest.approx(4.0),
    }
    assert got["ratio"].item() == pytest.approx(3 * 8.3, rel=1e-6)
    assert got["approx_kl"].item() == pytest.approx(3 * sum(r - 1 - math.log(r) for r in ratio[0].tolist()), rel=1e-5)


@pytest.mark.parametrize("dual", [None, 2.0])
def test_clipped_tokens_are_those_without_a_gradient(dual: float | None) -> None:
    generator = torch.Generator().manual_seed(0)
    config = GRPOConfig(dual_clip=dual)
    old = torch.full((40, 5), -4.0, dtype=torch.float64)
    logp = (old + torch.randn(40, 5, generator=generator, dtype=torch.float64)).requires_grad_()
    advantage = torch.randn(40, generator=generator, dtype=torch.float64)
    clipped_surrogate((logp - old).exp(), advantage[:, None], config).sum().backward()
    assert logp.grad is not None
    got = policy_diagnostics(logp, old, advantage, torch.ones(40, 5, dtype=torch.bool), config)
    without = (logp.grad == 0).sum().item()
    assert got["clipped_high"] + got["clipped_low"] + got["dual_clipped"] == without > 0


def test_reference_gap_by_hand_and_right_after_a_reset() -> None:
    old = torch.tensor([[-1.0, -2.0, math.nan], [-3.0, math.inf, -1.0]])
    ref = torch.tensor([[-1.5, -1.0, -1.0], [-3.0, -1.0, math.nan]])
    mask = torch.tensor([[True, True, False], [True, False, False]])
    gap = reference_gap(old, ref, mask)
    assert gap["tokens"].item() == 3
    assert gap["mean_abs"].item() == pytest.approx(0.5)
    assert gap["max_abs"].item() == 1.0
    assert gap["mean_k3"].item() == pytest.approx((math.exp(-0.5) + 0.5 - 1 + math.exp(1.0) - 1.0 - 1) / 3)
    one = reference_gap(old[:, :1], ref[:, :1], mask[:, :1] & mask[:, 1:2])
    assert [one[name].item() for name in ("tokens", "mean_abs", "max_abs")] == [1.0, 0.5, 0.5]
    assert one["mean_k3"].item() == pytest.approx(math.exp(-0.5) + 0.5 - 1)
    after = reference_gap(old, old.clone(), mask)
    assert [after[name].item() for name in ("mean_abs", "max_abs", "mean_k3")] == [0.0, 0.0, 0.0]


class TestGapProfile:
    def test_by_hand(self) -> None:
        """Eight tokens in one response, two in each quarter; four in the other, one in each."""
        mask = torch.ones(2, 10, dtype=torch.bool)
        mask[:, 0] = mask[0, 9] = False  # the prompt, and padding
        mask[1, 5:] = False
        gap = torch.zeros(2, 10)
        gap[0, 1:9] = torch.tensor([0.0, 0.1, 0.0, -0.2, 0.0, 0.3, 0.0, 1.0])
        gap[1, 1:5] = torch.tensor([0.2, 0.2, 0.0, 0.0])
        gap[:, 0] = math.nan
        profile = gap_profile(torch.zeros(2, 10), gap, mask)
        assert profile.shape == (4, 2 + 11 * 24 + 2)  # two sums, the bins of 11 decades, and one on either side
        found = gap_numbers(profile)
        quarters = [found[f"mean_abs_quarter{k}"] for k in (1, 2, 3, 4)]
        assert quarters == pytest.approx([0.3 / 3, 0.4 / 3, 0.3 / 3, 1.0 / 3])
        sizes = [0.0, 0.1, 0.0, 0.2, 0.0, 0.3, 0.0, 1.0, 0.2, 0.2, 0.0, 0.0]
        assert found["mean_ratio"] == pytest.approx(sum(map(math.exp, sizes)) / 12)
        assert 1.0 <= found["p999"] <= 1.1

    def test_the_percentile_is_that_of_all_ranks(self) -> None:
        """0.2 % of the tokens differ much: the 99.9th percentile is among them, whichever rank has them."""
        generator = torch.Generator().manual_seed(1)
        gap = 0.01 * torch.rand(40, 100, generator=generator)
        gap[3, :8] = 3.0
        mask, zero = torch.ones(40, 100, dtype=torch.bool), torch.zeros(40, 100)
        whole = gap_profile(zero, gap, mask)
        parts = [gap_profile(zero[rows], gap[rows], mask[rows]) for rows in (slice(0, 7), slice(7, 40))]
        assert torch.allclose(whole, parts[0] + parts[1])
        found = gap_numbers(whole)
        assert 3.0 <= found["p999"] <= 3.3
        assert gap_numbers(parts[1])["p999"] <= 0.011

    def test_differences_that_are_too_large_for_the_bins(self) -> None:
        mask = torch.ones(1, 3, dtype=torch.bool)
        found = gap_numbers(gap_profile(torch.zeros(1, 3), torch.tensor([[0.0101, 51.0, 200.0]]), mask))
        assert found["p999"] == pytest.approx(100.0)
        assert found["mean_ratio"] == pytest.approx(2 * math.exp(50.0) / 3)
        small = gap_numbers(gap_profile(torch.zeros(1, 1), torch.tensor([[0.0101]]), mask[:, :1]))
        assert small["p999"] == pytest.approx(10 ** (-2 + 1 / 24))

    def test_few_large_differences_raise_the_ratio_and_not_the_mean(self) -> None:
        """A fault that the mean of absolute differences does not show at the limit for 16 bits, 0.05."""
        gap = torch.full((10, 100), 0.003)
        gap[0, :5] = 5.0  # 0.5 % of the tokens
        found = gap_numbers(gap_profile(torch.zeros(10, 100), gap, torch.ones(10, 100, dtype=torch.bool)))
        assert gap.mean() < 0.05
        assert found["mean_ratio"] > 1.0 + RATIO_PER_GAP * 0.05

    def test_no_tokens_no_numbers(self) -> None:
        zero = torch.zeros(2, 3)
        assert gap_numbers(gap_profile(zero, zero, torch.zeros(2, 3, dtype=torch.bool))) == {}


class TestTemperature:
    """4 responses of 100 tokens, sampled at one temperature."""

    def estimate(self, factor: float, noise: float = 0.0, scale: float = 1.0, outlier: float = 0.0) -> float:
        generator = torch.Generator().manual_seed(3)
        logits = scale * torch.randn(4, 100, 50, generator=generator)
        theirs = logits / factor + noise * torch.randn(4, 100, 50, generator=generator)
        trainers, engines = logits.log_softmax(-1), theirs.log_softmax(-1)
        tokens = torch.multinomial(engines.exp().view(-1, 50), 1, generator=generator).view(4, 100, 1)
        engine, old = engines.gather(-1, tokens)[..., 0], trainers.gather(-1, tokens)[..., 0]
        engine[0, 0] += outlier
        entropy, mask = -(trainers.exp() * trainers).sum(-1), torch.ones(4, 100, dtype=torch.bool)
        mask[3, 40:] = False
        engine[3, 40:] = old[3, 41:42] = math.nan
        parts = [temperature_sums(*(t[rows] for t in (engine, old, entropy, mask))) for rows in ([0, 1], [2, 3])]
        return temperature_ratio({key: float(parts[0][key] + parts[1][key]) for key in parts[0]})

    @pytest.mark.parametrize("factor", [0.9, 0.95, 1.05, 1.1])
    @pytest.mark.parametrize("scale", [0.7, 2.0, 6.0])
    def test_another_temperature_is_found(self, factor: float, scale: float) -> None:
        assert self.estimate(factor, noise=0.01, scale=scale) == pytest.approx(factor, abs=0.02)

    @pytest.mark.parametrize("factor", [0.3, 0.5, 0.8, 0.9, 1.1, 1.25, 2.0, 4.0])
    @pytest.mark.parametrize("scale", [0.7, 2.0, 6.0])
    def test_far_off_it_is_found_and_not_overstated(self, factor: float, scale: float) -> None:
        """The alarm says "at least"."""
        found = self.estimate(factor, noise=0.003, scale=scale)
        assert min(1.0, factor) - 0.01 < found < max(1.0, factor) + 0.01
        assert abs(found - 1.0) > TEMPERATURE

    @pytest.mark.parametrize("scale", [0.7, 2.0, 6.0])
    @pytest.mark.parametrize("noise", [0.0, 0.003, 0.03, 0.1])
    def test_rounding_is_no_temperature(self, noise: float, scale: float) -> None:
        assert abs(self.estimate(1.0, noise, scale) - 1.0) < TEMPERATURE / 2

    @pytest.mark.parametrize("outlier", [-8.0, 3.0])
    def test_one_token_is_no_temperature(self, outlier: float) -> None:
        assert abs(self.estimate(1.0, 0.003, 2.0, outlier) - 1.0) < TEMPERATURE / 2

    def test_by_hand(self) -> None:
        """6 standard deviations are the limit, and 100 is the highest ratio."""
        sums = {"tokens": 36.0, "xx": 2.0, "xy": -1.5, "yy": 1.125}
        assert temperature_ratio(sums) == 1.0
        assert temperature_ratio({**sums, "tokens": 37.0}) == 4.0
        assert temperature_ratio({**sums, "xy": 3.0}) == pytest.approx(0.4)
        assert temperature_ratio({**sums, "xy": -2.0}) == pytest.approx(100.0)

    def test_no_tokens_say_nothing(self) -> None:
        zero = torch.zeros(2, 3)
        sums = temperature_sums(zero, zero, zero, torch.zeros(2, 3, dtype=torch.bool))
        assert temperature_ratio({key: float(value) for key, value in sums.items()}) == 1.0


TASKS = ("code", "math", "max_task")  # the last one's name must not change how it is reduced


def test_entropy_and_kl_by_task_by_hand() -> None:
    mask = torch.tensor([[True, True, False], [False, False, False], [True, True, True]])
    entropy = torch.tensor([[1.0, 2.0, math.nan], [math.nan] * 3, [0.5, 0.5, 0.5]])
    old = torch.tensor([[-1.0, -2.0, math.nan], [math.nan] * 3, [-1.0, -1.0, -1.0]])
    ref = torch.tensor([[-1.5, -1.0, math.inf], [math.nan] * 3, [-1.0, -1.0, -2.0]])
    sums = {k: v.item() for k, v in sums_by_task(old, ref, entropy, mask, torch.tensor([1, 0, 1]), TASKS).items()}
    kl = (math.exp(-0.5) + 0.5 - 1) + (math.exp(1.0) - 1.0 - 1) + math.exp(-1.0)
    assert sums == {
        **{"tokens/code": 0, "tokens/math": 5, "tokens/max_task": 0},
        **{"entropy/code": 0, "entropy/math": 4.5, "entropy/max_task": 0},
        **{"kl/code": 0, "kl/math": pytest.approx(kl), "kl/max_task": 0},
    }
    kl_per_token = pytest.approx(kl / 5)
    assert means_by_task(sums, TASKS) == {
        "entropy": 0.9,
        "entropy/math": 0.9,
        "kl": kl_per_token,
        "kl/math": kl_per_token,
    }
    sums |= {"tokens/code": 15.0, "entropy/code": 3.0}
    assert means_by_task(sums, TASKS) == {
        **{"entropy": 7.5 / 20, "entropy/code": 0.2, "entropy/math": 0.9},
        **{"kl": pytest.approx(kl / 20), "kl/code": 0, "kl/math": kl_per_token},
    }
    assert means_by_task(dict.fromkeys(sums, 0.0), TASKS) == {"entropy": 0.0, "kl": 0.0}


def exact_repetition(ids: list[int], n: int) -> float:
    grams = [tuple(ids[k : k + n]) for k in range(len(ids) - n + 1)]
    return 1 - len(set(grams)) / len(grams)


def test_repetition_by_hand() -> None:
    assert repetition([]) == repetition([7]) == repetition([7] * 4) == 0.0  # no two 4-grams
    assert repetition([7] * 5) == 0.5  # two, of which one is a repeat
    assert repetition([1, 2, 3, 4, 5, 1, 2, 3, 4, 6]) == pytest.approx(1 / 7)
    assert repetition(list(range(5000))) == 0.0
    assert repetition([1, 2, 3] * 5) == pytest.approx(9 / 12)  # 15 tokens: 12 4-grams, 3 of them different
    text = [9, 8, 7, 6] * 4 + list(range(100, 148)) + [9, 8, 7, 6] * 4  # 80 tokens, 65 16-grams, the first comes again
    assert repetition(text) == pytest.approx(1 / 65)


@pytest.mark.parametrize("period", [1, 7, 300])
def test_a_loop_shows_in_proportion_to_its_length(period: int) -> None:
    rng = random.Random(period)
    before = [rng.randrange(150_000) for _ in range(4000)]
    loop = [rng.randrange(150_000) for _ in range(period)]
    looping = before + (loop * (4000 // period + 1))[:4000]
    assert repetition(before) == 0.0
    assert repetition(looping) == pytest.approx((4000 - 15 - period) / 7985)
    assert repetition(looping) == pytest.approx(exact_repetition(looping, 16))


@pytest.mark.parametrize("length", [5, 17, 40, 63, 64, 65, 900])
def test_repetition_equals_counting_tuples(length: int) -> None:
    rng = random.Random(length)
    for _ in range(20):
        ids = [rng.randrange(2) for _ in range(length)]
        n = min(16, max(4, length // 4))
        assert repetition(ids) == pytest.approx(exact_repetition(ids, n))


@pytest.mark.parametrize("seed", range(3))
def test_merging_parts_equals_the_whole(seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    old = torch.randn(9, 5, generator=generator)
    new = old + 0.5 * torch.randn(9, 5, generator=generator)
    mask = torch.rand(9, 5, generator=generator) > 0.4
    mask[3:5] = False
    advantage = torch.randn(9, generator=generator)
    task = torch.tensor([0, 0, 0, 1, 1, 2, 2, 1, 2])  # no part has all of them
    measures = {
        "policy": lambda r: policy_diagnostics(new[r], old[r], advantage[r], mask[r], GRPOConfig()),
        "reference": lambda r: reference_gap(old[r], new[r], mask[r]),
        "tasks": lambda r: sums_by_task(old[r], new[r], old[r].exp(), mask[r], task[r], TASKS),
        "engine": lambda r: rollout_correction(old[r], new[r], mask[r], CorrectionConfig("icepop", 1.5, 0.7))[1],
    }
    parts = [slice(0, 3), slice(3, 5), slice(5, 5), slice(5, 9)]  # the second and third count no token
    for name, measure in measures.items():
        whole = measure(slice(0, 9))
        merged = measure(parts[0])
        for part in parts[1:]:
            merged = merge(merged, measure(part))
        backwards = measure(parts[2])
        for part in (parts[1], parts[3], parts[0]):
            backwards = merge(backwards, measure(part))
        for key, value in whole.items():
            assert value.dtype == torch.float64, (name, key)
            assert merged[key].item() == pytest.approx(value.item(), rel=1e-12), (name, key)
            assert backwards[key].item() == pytest.approx(value.item(), rel=1e-12), (name, key)


def test_a_part_without_tokens_moves_no_extreme() -> None:
    old = torch.zeros(2, 2)
    new = torch.tensor([[0.5, 0.7], [0.0, 0.0]])  # all ratios above 1
    mask = torch.tensor([[True, True], [False, False]])
    advantage = torch.ones(2)
    parts = [
        policy_diagnostics(new[r], old[r], advantage[r], mask[r], GRPOConfig()) for r in (slice(0, 1), slice(1, 2))
    ]
    for first, second in (parts, parts[::-1]):
        merged = merge(first, second)
        assert merged["min_ratio"].item() == pytest.approx(math.exp(0.5))
        assert merged["max_ratio"].item() == pytest.approx(math.exp(0.7))
        assert min(first["min_ratio"], second["min_ratio"]).item() == pytest.approx(math.exp(0.5))  # as the actor does
    below = [
        policy_diagnostics(-new[r], old[r], advantage[r], mask[r], GRPOConfig()) for r in (slice(0, 1), slice(1, 2))
    ]
    assert max(below[0]["max_ratio"], below[1]["max_ratio"]).item() == pytest.approx(math.exp(-0.5))


def test_reduction_rules() -> None:
    assert [reduction(key) for key in ("tokens", "mean_abs", "fraction_masked", "max_ratio", "min_ratio")] == [
        "sum",
        "mean",
        "mean",
        "max",
        "min",
    ]
