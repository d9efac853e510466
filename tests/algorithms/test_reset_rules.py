"""Each rule for hard resets by hand-made histories, at its threshold and beside it."""

import math
import random
from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise
from statistics import linear_regression, pvariance, stdev
from typing import Any

import pytest
from scipy.stats import norm, t

from nemo_prorl.algorithms import reset_rules
from nemo_prorl.algorithms.reset_rules import (
    Finding,
    History,
    best_policy,
    decide,
    replay,
    t_quantile,
)
from nemo_prorl.config import ADVISING_RULES, RESET_RULES, ResetRulesConfig

RULES = ResetRulesConfig()
# Without a plateau rule, which constant scores would set off.
DROP = replace(RULES, plateau_steps=10**6, drop_sigma=4.0)
SE = 0.02


def scores(values: Sequence[float | None], name: str = "math", first: int = 10) -> list[dict[str, Any]]:
    """A validation every 10 steps; None: a score that is missing in the line."""
    steps = range(first, first + 10 * len(values), 10)
    return [{"step": s, f"validation/{name}": v, "validation/all": v} for s, v in zip(steps, values, strict=True)]


def errors(lines: list[dict[str, Any]], *names: str) -> dict[int, dict[str, float]]:
    return {line["step"]: dict.fromkeys(names, SE) for line in lines}


def told(lines: list[dict[str, Any]], rules: ResetRulesConfig, *names: str, **more: Any) -> list[tuple[str, int, str]]:
    found = replay(lines, rules, errors(lines, *names or ("math",)), **more)
    return [(finding.rule, finding.step, finding.subject) for finding in found]


def threshold(width: int, baseline: int) -> float:
    """For as many evaluations before as the baseline is long, where no best of several means is picked."""
    return 4.0 * SE * math.sqrt(1 / width + 1 / baseline)


class TestDrop:
    def test_at_the_threshold_and_beside_it(self) -> None:
        least = threshold(2, 8)
        above = scores([0.5] * 8 + [0.5 - least * 1.001] * 2)
        below = scores([0.5] * 8 + [0.5 - least * 0.999] * 2)
        assert told(above, DROP) == [("validation_drop", 100, "math")]
        assert told(below, DROP) == []

    def test_the_finding_says_what_it_saw(self) -> None:
        lines = scores([0.5] * 8 + [0.3, 0.3])
        [found] = replay(lines, DROP, errors(lines, "math"))
        assert (found.rule, found.step, found.asks) == ("validation_drop", 100, True)
        assert found.seen == pytest.approx(0.2)
        assert found.threshold == pytest.approx(threshold(2, 8))
        assert "math fell by 0.2, from 0.5 to 0.3 over 2 evaluations" in str(found)

    def test_one_bad_evaluation_is_none_however_bad(self) -> None:
        assert told(scores([0.5] * 8 + [0.0]), DROP) == []
        assert told(scores([0.5] * 8 + [0.0, 0.5, 0.5, 0.5]), DROP) == []

    def test_a_third_evaluation_finds_what_two_do_not(self) -> None:
        assert threshold(3, 8) < 0.06 < threshold(2, 8)
        assert told(scores([0.5] * 8 + [0.44] * 3), DROP) == [("validation_drop", 110, "math")]

    def test_the_best_of_many_levels_is_allowed_for(self) -> None:
        lines = scores([0.5 + 0.03 * (-1) ** i for i in range(30)] + [0.3, 0.3])  # the scatter says less than SE
        [found] = replay(lines, DROP, errors(lines, "math"))
        chance = SE * math.sqrt(2 * math.log((30 - 10 + 1) / 10) / 10)
        assert found.threshold == pytest.approx(threshold(2, 10) + chance)

    def test_a_standard_error_of_zero_is_one(self) -> None:
        lines = scores([1.0] * 8 + [0.8, 0.8])
        known = {line["step"]: {"math": 0.0 if line["step"] < 90 else 0.1} for line in lines}
        assert replay(lines, DROP, known) == []  # what the fallen scores are known to counts too
        assert replay(lines, DROP, {step: {"math": 0.0} for step in known}) != []

    def test_small_drops_are_none_however_sure(self) -> None:
        lines = scores([0.5] * 20 + [0.46] * 3)
        assert told(lines, replace(DROP, drop_sigma=0.5)) == []
        assert told(lines, replace(DROP, drop_sigma=0.5, drop_min=0.03)) != []

    def test_a_rise_is_none(self) -> None:
        assert told(scores([0.2] * 8 + [0.9] * 4), DROP) == []

    def test_too_few_evaluations_say_nothing(self) -> None:
        assert told(scores([0.5] * 3 + [0.0, 0.0]), DROP) == []
        assert told(scores([0.5] * 4 + [0.0, 0.0]), DROP) == [("validation_drop", 60, "math")]

    def test_without_standard_errors_the_scatter_counts(self) -> None:
        noise = [0.5 + SE * math.sqrt(0.5) * (-1) ** i for i in range(14)]
        lines = scores([*noise, 0.2, 0.2])
        [found] = replay(lines, DROP)
        scatter = SE * math.sqrt(13 / 12 * (1 - 1 / 13**2))  # thirteen differences of 2 SE / sqrt(2), up and down
        expected = t_quantile(4.0, 2 * 13 / 3) * scatter * math.sqrt(1 / 2 + 1 / 10)
        assert found.threshold == pytest.approx(expected)
        assert replay(scores([*noise[:12], 0.2, 0.2]), DROP) == []  # eleven differences are too few

    def test_missing_and_nan_scores_are_passed_over(self) -> None:
        values: list[float | None] = [0.5] * 8
        lines = scores([*values[:3], None, math.nan, *values[3:], None, 0.3, math.nan, 0.3])
        assert told(lines, DROP) == [("validation_drop", 140, "math")]

    def test_a_score_that_appears_late_has_its_own_baseline(self) -> None:
        lines = scores([0.5] * 20)
        for line, value in zip(lines[12:], [0.6] * 4 + [0.3] * 4, strict=True):
            line["validation/late"] = value
        assert told(lines, DROP, "math", "late") == [("validation_drop", 180, "late")]

    def test_any_domain_counts_but_not_the_blend(self) -> None:
        lines = scores([0.5] * 10)
        for line in lines:
            line["validation/code"] = 0.5 if line["step"] < 90 else 0.2
        for line in lines[8:]:
            line["validation/all"] = 0.0
        assert told(lines, DROP, "math", "code") == [("validation_drop", 100, "code")]


class TestPlateau:
    RULES = replace(RULES, plateau_steps=100, plateau_gain=0.02, plateau_sigma=2.0)

    @staticmethod
    def seen(lines: list[dict[str, Any]], plateau_steps: int = 100) -> float:
        """What the rule must see over all lines, by the normal equations and the formula for the residuals' noise."""
        x = [line["step"] for line in lines]
        y = [line["validation/math"] for line in lines]
        slope, level = linear_regression(x, y)
        residuals = [b - slope * a - level for a, b in zip(x, y, strict=True)]
        n, squares = len(x), sum(e * e for e in residuals)
        r = min(0.95, max(0.0, sum(a * b for a, b in pairwise(residuals)) / squares + 4 / n))
        inflation = (1 + r) / (1 - r)
        sd = math.sqrt(squares / (n - 2) * inflation / (n * pvariance(x)))
        return plateau_steps * (slope + t_quantile(2.0, max(2.0, (n - 2) / inflation)) * sd)

    @pytest.mark.parametrize("slope", [-0.001, 0.0, 0.002])
    def test_at_the_threshold_and_beside_it(self, slope: float) -> None:
        """Eleven scores, so that none is averaged; those at both ends of the window count."""
        noise = [0.01, -0.02, 0.0, 0.02, -0.01, 0.01, 0.0, -0.02, 0.02, 0.0, -0.01]
        lines = scores([0.3 + slope * 10 * i + e for i, e in enumerate(noise)])
        lines.insert(0, {"step": 9})  # the run begins before its first validation
        seen = self.seen(lines[1:])
        assert told(lines, replace(self.RULES, plateau_gain=seen + 1e-9)) == [("plateau", 110, "blend")]
        assert told(lines, replace(self.RULES, plateau_gain=seen - 1e-9)) == []

    def test_residuals_of_a_kink_are_at_the_bound_of_the_autocorrelation(self) -> None:
        lines = scores([0.3 + 0.01 * max(0, i - 6) for i in range(12)], first=1)
        rules = replace(self.RULES, plateau_steps=110, cooldown_steps=110)
        seen = self.seen(lines, 110)
        assert told(lines, replace(rules, plateau_gain=seen + 1e-9)) == [("plateau", 111, "blend")]
        assert told(lines, replace(rules, plateau_gain=seen - 1e-9)) == []

    def test_the_score_at_the_windows_first_step_counts(self) -> None:
        lines: list[dict[str, Any]] = [{"step": s, "validation/math": 0.5} for s in range(50, 201, 50)]
        lines.insert(0, {"step": 1})
        assert told(lines, replace(self.RULES, plateau_steps=150)) == [("plateau", 200, "blend")]

    def test_noise_that_hides_the_gain_says_nothing_until_the_window_is_long(self) -> None:
        draw = random.Random(1)
        lines = scores([0.5 + draw.gauss(0.0, 0.02) for _ in range(80)])
        first, *_ = replay(lines, replace(self.RULES, plateau_sigma=4.5))
        assert 400 < first.step <= 800
        assert first.what.endswith("by the last 400 steps")  # neither 100 nor 200 are enough
        short = [line for line in lines if line["step"] <= first.step - 10]
        assert told(short, replace(self.RULES, plateau_sigma=4.5)) == []

    def test_the_scores_own_standard_errors_do_not_count(self) -> None:
        """All validations have the same prompts, whose differences are in each standard error, not in the scatter."""
        lines = scores([0.5] * 11)
        assert replay(lines, self.RULES, {line["step"]: {"math": 9.0} for line in lines}) != []

    def test_many_scores_are_averaged_in_blocks(self) -> None:
        """31 scores are 15 pairs, of which the first score is left out."""
        draw = random.Random(2)
        lines = scores([0.3 + draw.gauss(0.0, 0.02) for _ in range(31)])
        pairs = [
            {key: (a[key] + b[key]) / 2 for key in ("step", "validation/math")}
            for a, b in zip(lines[1::2], lines[2::2], strict=True)
        ]
        rules = replace(self.RULES, plateau_steps=300)
        seen = 3 * self.seen(pairs)
        lines.insert(0, {"step": 9})
        assert told(lines, replace(rules, plateau_gain=seen + 1e-9)) == [("plateau", 310, "blend")]
        assert told(lines, replace(rules, plateau_gain=seen - 1e-9)) == []

    def test_a_gain_of_double_the_limit_is_no_plateau_and_none_at_all_is_one(self) -> None:
        """As `benchmarks/triggers.py` has it at a validation every 25 steps."""
        false, found = 0, 0
        for trace in range(20):
            draw = random.Random(f"steady {trace}")
            noise = [draw.gauss(0.0, 0.009) for _ in range(120)]
            for gain in (0.0, 0.04):
                lines = [
                    {"step": 25 * i, "validation/math": 0.3 + gain * 25 * i / 300 + e} for i, e in enumerate(noise, 1)
                ]
                plateaus = [f for f in replay(lines, RULES) if f.rule == "plateau"]
                false, found = false + (gain > 0 and bool(plateaus)), found + (gain == 0 and bool(plateaus))
        assert (false, found) == (0, 20)

    @pytest.mark.parametrize("asks", [True, False])
    def test_the_finding_says_what_it_saw(self, asks: bool) -> None:
        what = "the mean of 1 validation score changed by +0 in 100 steps, at most +0 (< 0.02), by the last 100 steps"
        expected = Finding("plateau", 110, "blend", 0.0, 0.02, asks, what)
        assert replay(scores([0.5] * 11), replace(self.RULES, asks=["plateau"] * asks)) == [expected]

    def test_no_gain_is_not_less_than_none(self) -> None:
        assert told(scores([0.5] * 12), replace(self.RULES, plateau_gain=0.0)) == []

    def test_the_window_must_fill_and_fills_anew_after_a_reset(self) -> None:
        lines = scores([0.5] * 30)
        assert told(lines, self.RULES) == [("plateau", s, "blend") for s in (110, 210)]
        assert told(lines, self.RULES, resets=[50]) == [("plateau", s, "blend") for s in (150, 250)]

    def test_only_scores_measured_throughout_are_blended(self) -> None:
        lines = scores([0.5] * 11)
        for line in lines[6:]:
            line["validation/late"] = 0.01 * line["step"]  # would be a steep rise
        assert told(lines, self.RULES, "math", "late") == [("plateau", 110, "blend")]


class TestKL:
    @staticmethod
    def lines(last: list[float | None], before: int = 60) -> list[dict[str, Any]]:
        return [{"step": s, "kl": v} for s, v in enumerate([0.01] * before + last, 1)]

    def test_at_the_threshold_and_beside_it(self) -> None:
        assert told(self.lines([0.0301] * 3), RULES) == [("kl_spike", 62, "kl")]
        assert told(self.lines([0.0299] * 8), RULES) == []

    @pytest.mark.parametrize("asks", [True, False])
    def test_the_finding_says_what_it_saw(self, asks: bool) -> None:
        """Seventeen steps go up and down; the first two are too old to count, and the median of the others is high."""
        noise = [0.3 * (-1) ** s for s in range(15)]
        lines = [{"step": s, "kl": v} for s, v in enumerate([9.0, 9.0, *map(math.exp, noise), 20.0, 8.0, 12.0], 1)]
        rules = replace(RULES, kl_steps=15, kl_sigma=3.0, cooldown_steps=20, kl_high=99.0, asks=["kl_spike"] * asks)
        [found] = replay(lines, rules)
        scatter = stdev([b - a for a, b in pairwise(noise)]) / math.sqrt(2)
        spread = t_quantile(3.0, 2 * 14 / 3) * scatter * math.sqrt(math.pi / 2 * (1 / 3 + 1 / 15))
        usual = math.exp(0.3)
        what = f"KL rose to 12, {12 / usual:.3g} times the 1.35 of the 15 steps before (> {math.exp(spread):.3g})"
        expected = Finding("kl_spike", 20, "kl", 12 / usual, math.exp(spread), asks, what)
        assert replace(found, threshold=expected.threshold, seen=expected.seen) == expected
        assert (found.seen, found.threshold) == (pytest.approx(expected.seen), pytest.approx(expected.threshold))

    def test_thirteen_steps_are_enough(self) -> None:
        rules = replace(RULES, cooldown_steps=9, kl_high=99.0)
        assert told(self.lines([9.0] * 3, before=12), rules) == []
        assert told(self.lines([9.0] * 3, before=13), rules) == [("kl_spike", 16, "kl")]

    def test_one_odd_step_is_none(self) -> None:
        assert told(self.lines([9.0, 0.01, 0.01, 0.01]), RULES) == []
        assert told(self.lines([9.0, 0.01, 9.0]), RULES) == [("kl_spike", 63, "kl")]

    def test_missing_and_nan_are_passed_over(self) -> None:
        assert told(self.lines([None, 9.0, math.nan, 9.0]), RULES) == [("kl_spike", 64, "kl")]

    def test_values_near_zero_are_none(self) -> None:
        lines = [{"step": s, "kl": 1e-6 if s < 60 else 9e-4} for s in range(1, 64)]
        assert told(lines, RULES) == []
        assert told(lines, replace(RULES, kl_min=9e-4)) == [("kl_spike", 61, "kl")]

    def test_noisy_kl_needs_more(self) -> None:
        noisy = [{"step": s, "kl": 0.01 * math.exp(0.7 * (-1) ** s)} for s in range(1, 61)]
        noisy += [{"step": s, "kl": 0.06} for s in range(61, 64)]
        assert told(noisy, RULES) == []
        assert told(noisy, replace(RULES, kl_sigma=0.1)) != []

    def test_growth_from_zero_after_a_reset_is_none(self) -> None:
        growing = [{"step": s, "kl": 0.01 * ((s - 1) % 60)} for s in range(1, 241)]
        assert told(growing, RULES, resets=[60, 120, 180]) == []


class TestAdvice:
    KEYS = ("rollout/truncated", "rollout/response_tokens", "entropy")

    def lines(self, key: str, blocks: list[float]) -> list[dict[str, Any]]:
        return [{"step": 10 * b + i + 1, key: value} for b, value in enumerate(blocks) for i in range(10)]

    @pytest.mark.parametrize(
        ("rule", "key", "quiet", "loud", "seen", "limit", "what"),
        [
            (
                *("truncation", "rollout/truncated", [0.25, 0.125, 0.25], [0.25, 0.125, 0.375], 0.25, 0.125),
                "37.5% of the responses are cut off; it was 12.5% (> 12.5% more)",
            ),
            (
                *("length", "rollout/response_tokens", [120.0, 100.0, 150.0], [120.0, 100.0, 160.0], 1.6, 1.5),
                "responses have 160 tokens, 1.6 times their shortest (> 1.5)",
            ),
            (
                *("entropy", "entropy", [2.0, 1.0, 0.5], [2.0, 1.0, 0.25], 0.125, 0.25),
                "entropy is 0.25, 0.125 of its highest (< 0.25)",
            ),
        ],
    )
    def test_at_the_threshold_and_beside_it(
        self, rule: str, key: str, quiet: list[float], loud: list[float], seen: float, limit: float, what: str
    ) -> None:
        rules = replace(RULES, truncation_rise=0.125, length_factor=1.5, entropy_share=0.25)
        assert told(self.lines(key, quiet), rules) == []
        assert replay(self.lines(key, loud), rules) == [Finding(rule, 30, key, seen, limit, False, what)]

    def test_a_length_of_zero_is_no_measure(self) -> None:
        assert told(self.lines("rollout/response_tokens", [0.0, 100.0]), RULES) == []

    def test_advice_outlives_a_reset_and_is_repeated_ever_more_rarely(self) -> None:
        """After the cooldown of 50 steps, and when the time since the start or the last reset has doubled."""
        lines = self.lines("entropy", [1.0] + [0.1] * 99)
        assert [step for _, step, _ in told(lines, RULES, resets=[10])] == [20, 70, 130, 250, 490, 970]
        assert [step for _, step, _ in told(lines, RULES, resets=[10, 500])] == [
            20,
            70,
            130,
            250,
            490,
            540,
            590,
            680,
            860,
        ]
        later = [{**line, "step": line["step"] + 600} for line in lines[:300]]  # a stage's steps need not begin at 1
        assert [step for _, step, _ in told(later, RULES)] == [620, 670, 740, 880]


class TestCooldown:
    def test_nothing_asks_after_a_reset_or_the_start(self) -> None:
        lines = scores([0.5] * 10 + [0.3] * 10)
        assert told(lines, DROP)[0] == ("validation_drop", 120, "math")
        assert told(lines, DROP, resets=[110]) == []  # what was before it is no baseline
        short = scores([0.5] * 4 + [0.2] * 3, first=1)
        assert told(short, replace(DROP, cooldown_steps=62)) == []
        assert told(short, replace(DROP, cooldown_steps=51)) == [("validation_drop", 51, "math")]

    def test_a_rule_repeats_itself_after_the_cooldown_only(self) -> None:
        lines = [{**line, "kl": 0.01} for line in scores([0.5] * 10 + [0.3] * 8)]
        assert [step for _, step, _ in told(lines, DROP)] == [120, 170]
        assert [step for _, step, _ in told(lines, DROP, act=True)] == [120]

    def test_a_reset_silences_all_rules_that_ask(self) -> None:
        lines = [{"step": s, "kl": 0.01 if s <= 60 else 0.05} for s in range(1, 131)]
        assert told(lines, RULES) == [("kl_spike", 62, "kl")]
        assert told(lines, RULES, resets=[61]) == []


def test_order_is_drop_by_name_plateau_kl_advice() -> None:
    lines: list[dict[str, Any]] = []
    for step in range(1, 121):
        line = {"step": step, "kl": 0.01 if step < 119 else 1.0, "entropy": 1.0 if step <= 110 else 0.1}
        line["rollout/truncated"] = 0.0 if step <= 110 else 0.5
        if step % 10 == 0:
            line |= {f"validation/{n}": 0.5 if step < 110 else 0.2 for n in ("b", "a")}
        lines.append(line)
    rules = replace(DROP, plateau_steps=120, plateau_sigma=0.0)
    assert [f"{r} {s}" for r, step, s in told(lines, rules, "a", "b") if step == 120] == [
        "validation_drop a",
        "validation_drop b",
        "plateau blend",
        "kl_spike kl",
        "truncation rollout/truncated",
        "entropy entropy",
    ]


def test_a_kl_that_is_high_from_the_start_is_told() -> None:
    """It jumps between 4.5 and 63 from step to step, so it is never a spike."""
    lines = [{"step": s, "kl": 4.5 if s % 2 else 63.0} for s in range(1, 31)]
    assert told(lines, RULES) == [("kl_high", 10, "kl")]
    [found] = replay(lines, RULES)
    assert (found.seen, found.asks) == (pytest.approx(33.75), False)
    assert told([{"step": s, "kl": RULES.kl_high} for s in range(1, 31)], RULES) == []


def test_rules_that_are_not_to_ask_advise() -> None:
    lines = scores([0.5] * 8 + [0.2, 0.2])
    [found] = replay(lines, replace(DROP, asks=["plateau"]), errors(lines, "math"), act=True)
    assert (found.rule, found.asks) == ("validation_drop", False)


def test_decide_changes_nothing_and_an_empty_history_says_nothing() -> None:
    assert decide(History(), RULES) == []
    history = History()
    for line in scores([0.5] * 8 + [0.2, 0.2]):
        history.add(line, {"math": SE})
    first = decide(history, DROP)
    assert first == decide(history, DROP) != []
    history.note(first)
    assert decide(history, DROP) == []


@pytest.mark.parametrize("name", [*RESET_RULES, *ADVISING_RULES])
def test_a_failure_of_our_rule_is_not_the_users_configuration(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    fault = ZeroDivisionError("ours")

    def failing(history: History, rules: ResetRulesConfig) -> list[Finding]:
        raise fault

    monkeypatch.setitem(reset_rules.RULES._functions, name, failing)
    history = History()
    for step in range(1, 100):
        history.add({"step": step})
    with pytest.raises(ZeroDivisionError) as raised:
        decide(history, RULES)
    assert raised.value is fault


def test_a_finding_is_a_text() -> None:
    assert str(Finding("plateau", 3, "blend", 0.0, 0.1, True, "flat")) == "plateau: flat"


@pytest.mark.parametrize(("z", "dof"), [(0.5, 20.0), (1.0, 8.0), (2.0, 60.0), (2.0, 100.0), (4.0, 100.0), (4.0, 1e9)])
def test_student_s_quantile(z: float, dof: float) -> None:
    """The expansion leaves out the fourth power of 1 / dof; with few degrees of freedom it is a little low."""
    assert t_quantile(z, dof) == pytest.approx(t.isf(norm.sf(z), dof), rel=2e-6 if z == 4.0 else 2e-7)
    assert t_quantile(4.0, 8.0) == pytest.approx(t.isf(norm.sf(4.0), 8.0), rel=0.02)


def test_the_checks_name_the_rules() -> None:
    assert not set(RESET_RULES) & set(ADVISING_RULES)


def test_the_best_policy_is_the_newest_of_the_best_since_the_last_reset() -> None:
    scores = {step: {"all": {"mean": mean}} for step, mean in ((0, 0.9), (4, 0.2), (6, 0.4), (8, 0.4), (10, 0.3))}
    assert best_policy(scores, [{"step": 4}]) == 8
    assert best_policy(scores, [{"step": 4}], steps=[4, 6, 99]) == 6
    assert best_policy(scores, []) == 0
    assert best_policy({0: scores[0]}, [{"step": 4}]) is None
    assert best_policy({}, []) is None
