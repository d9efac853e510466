"""The ingredients of the forecast's interval, against the formulas written down with matrices: exact values."""

from typing import Any

import numpy as np
import pytest

from nemo_prorl.report.forecast import Segment, backtests, judged
from nemo_prorl.report.scaling import DRAWS, FAMILIES, SCALERL, Curves, Noise, at, fit, fit_family, noise_of, share_of

CURVE = np.array([[0.6, 1.0, 1.5, 0.1]])
CASES = [(8.0, 0.02, 40), (8.0, 0.06, 40), (5.0, 0.02, 12)]


def scores_of(end: float, noise: float, seed: int, count: int = 30, power: float = SCALERL) -> tuple[Any, Any, Any]:
    """Return compute, noisy scores of one curve, and errors that say 0.02 whatever the noise is."""
    random, compute = np.random.default_rng(seed), np.linspace(0.0, end, count)
    true = np.array([float(at(CURVE, c, power)[0]) for c in compute])
    return compute, true + noise * random.standard_normal(count), np.full(count, 0.02)


def by_matrices(compute: Any, scores: Any, errors: Any, power: float) -> dict[str, Any]:
    """Return misfit, start, asymptote, covariance and residuals of each curve of a family."""
    rows = []
    for middle in np.geomspace(compute[-1] / 100.0, compute[-1] * 8.0, 100):
        for exponent in np.geomspace(0.4, 6.0, 24):
            relative = (compute / middle) ** exponent
            if np.isinf(power):
                share = 1.0 - 0.5**relative
            else:
                share = 1.0 - (1.0 + (2.0 ** (1.0 / power) - 1.0) * relative) ** -power
            design = np.stack([1.0 - share, share], axis=1) / errors[:, None]
            covariance = np.linalg.inv(design.T @ design)
            start, asymptote = covariance @ design.T @ (scores / errors)
            if asymptote > 1.0:  # the best R0 of the curve that ends at 1
                asymptote = 1.0
                start = design[:, 0] @ (scores / errors - design[:, 1]) / (design[:, 0] @ design[:, 0])
            if asymptote < start:
                start = asymptote = np.average(scores, weights=errors**-2.0)
            residuals = scores / errors - design @ (start, asymptote)
            slope = covariance[0, 1] / covariance[1, 1]
            rows.append((residuals, start, asymptote, slope, covariance[1, 1], np.linalg.det(covariance), middle))
    residuals, start, asymptote, slope, variance, determinant, middles = (
        np.array(each) for each in zip(*rows, strict=True)
    )
    misfit = (residuals**2).sum(1)
    return {
        "misfit": misfit,
        "start": start,
        "asymptote": asymptote,
        "slope": slope,
        "variance": variance,
        "determinant": determinant,
        "middle": middles,
        "residuals": residuals[misfit.argmin()],
    }


def factor_of(residuals: Any) -> tuple[float, float]:
    """Return the variance of a score in units of its recorded one, and the factor for correlated residuals."""
    count = len(residuals)
    centred = residuals - residuals.mean()
    correlation = (centred[1:] * centred[:-1]).sum() / (centred**2).sum()
    likely = min(0.9, max(0.2, correlation + 3.0 / count))
    return max(0.25, ((residuals**2).sum() + 4 * 0.7**2) / (count - 4 + 4)), (1.0 + likely) / (1.0 - likely)


@pytest.mark.parametrize("power", FAMILIES)
@pytest.mark.parametrize(("end", "noise", "count"), CASES)
def test_each_curve_has_the_spread_and_the_weight_of_the_formula(
    end: float, noise: float, count: int, power: float
) -> None:
    measured = scores_of(end, noise, seed=1, count=count)
    expected = by_matrices(*measured, power)
    grid, residuals = fit_family(power, *measured)
    likely = expected["misfit"] < expected["misfit"].min() + 30.0
    for name in ("misfit", "start", "asymptote", "slope", "variance", "middle"):
        assert getattr(grid, name)[likely] == pytest.approx(expected[name][likely], rel=1e-6, abs=1e-9)
    assert residuals == pytest.approx(expected["residuals"], abs=1e-8)
    weights = np.exp(-0.5 * (expected["misfit"] - expected["misfit"].min()) / 2.3) * expected["determinant"] ** 0.5
    assert grid.chances(2.3) == pytest.approx(weights / weights.sum(), rel=1e-5, abs=1e-9)
    assert grid.chances(1e-3).sum() == pytest.approx(1.0)  # misfits of thousands


@pytest.mark.parametrize("power", FAMILIES)
def test_scores_that_fall_have_flat_curves_at_their_mean(power: float) -> None:
    compute, scores, errors = scores_of(8.0, 0.01, seed=1)
    errors[:10] = 0.01
    grid, _ = fit_family(power, compute, scores[::-1], errors)
    mean = np.average(scores[::-1], weights=errors**-2)
    assert grid.start == pytest.approx(np.full(len(grid.start), mean), abs=1e-3)
    assert (grid.start == grid.asymptote).all()


@pytest.mark.parametrize(("end", "noise", "count"), CASES)
def test_draws_are_those_of_the_formula(end: float, noise: float, count: int) -> None:
    """Curve by weight, then Student's t with the variance of the scatter, raised for correlated residuals."""
    measured = scores_of(end, noise, seed=1, count=count)
    each = [by_matrices(*measured, power) for power in FAMILIES]
    best = min(each, key=lambda one: one["misfit"].min())
    own, (variance, drift) = each[0], factor_of(best["residuals"])
    total, freedom = variance * drift, (count - 4) / drift + 4
    weights = np.exp(-0.5 * (own["misfit"] - own["misfit"].min()) / total) * own["determinant"] ** 0.5
    random = np.random.default_rng(3)
    picked = random.choice(len(weights), DRAWS, p=weights / weights.sum())
    scale = random.standard_normal(DRAWS) * np.sqrt(freedom / random.chisquare(freedom, DRAWS))
    drawn = np.clip(own["asymptote"][picked] + np.sqrt(own["variance"][picked] * total) * scale, 0.0, 1.0)
    found = fit(*measured, seed=3)
    assert found.draws[SCALERL][:, 0] == pytest.approx(drawn, abs=1e-6)
    starts = own["start"][picked] + own["slope"][picked] * (drawn - own["asymptote"][picked])
    assert found.draws[SCALERL][:, 3] == pytest.approx(starts, abs=1e-6)
    assert found.noise == pytest.approx(0.02 * variance**0.5)
    assert found.end == measured[0][-1]
    assert found.asymptote[0] == pytest.approx(own["asymptote"][own["misfit"].argmin()])


def test_noise_comes_from_the_scatter_and_its_correlation() -> None:
    least = noise_of(np.array([0.1, 0.1, -0.1, -0.1] * 10))
    assert least == (pytest.approx(0.25), 0.0, pytest.approx(1.5), False)  # residuals of this size are the grid's
    alone = noise_of(np.array([1.0, -1.0] * 6))
    assert alone.variance == pytest.approx((12 + 4 * 0.49) / (8 + 4))
    assert alone.correlation == pytest.approx(-11 / 12)
    assert alone.drift == pytest.approx(1.2 / 0.8)  # never less
    assert not alone.wanders
    shifted = noise_of(np.array([1.5, -0.5] * 6))
    assert shifted.variance == pytest.approx((15 + 4 * 0.49) / (8 + 4))
    assert shifted.correlation == pytest.approx(-11 / 12)
    blocks = noise_of(np.array([2.0] * 6 + [-2.0] * 6))
    assert blocks.variance == pytest.approx((48 + 4 * 0.49) / (8 + 4))
    assert blocks.correlation == pytest.approx((10 - 1) / 12)
    assert blocks.drift == pytest.approx(1.9 / 0.1)  # 0.75 + 3 / 12 exceeds 0.9, the most
    assert blocks.wanders


@pytest.mark.parametrize(("blocks", "wanders"), [((3, 3, 3, 3, 2, 2), True), ((2, 3, 2, 3, 2, 2, 2), False)])
def test_scores_wander_above_a_correlation(blocks: tuple[int, ...], wanders: bool) -> None:
    """16 residuals of equal size that change their sign 5 or 6 times; the limit is 1.64 / 4 - 2.5 / 16 = 0.254."""
    found = noise_of(np.array([(-1.0) ** k for k, length in enumerate(blocks) for _ in range(length)]))
    assert found.correlation == pytest.approx((15 - 2 * (len(blocks) - 1)) / 16)
    assert found.wanders == wanders


@pytest.mark.parametrize("power", FAMILIES)
def test_half_of_the_gain_comes_by_the_midpoint(power: float) -> None:
    middle, exponent = np.array([2.0, 2.0]), np.array([0.7, 3.0])
    assert share_of(middle, exponent, power, 2.0) == pytest.approx([0.5, 0.5])
    assert share_of(middle, exponent, power, 0.0) == pytest.approx([0.0, 0.0])


def test_a_segment_without_a_score_near_its_start_has_curves() -> None:
    """Some curves are over before the first score: R0 is then anywhere between 0 and 1."""
    compute = np.linspace(10.0, 400.0, 40)
    with np.errstate(divide="raise", invalid="raise"):
        grid, _ = fit_family(np.inf, compute, 0.5 + 0.0 * compute, np.full(40, 0.01))
    assert np.isfinite(grid.log_volume).all()
    steepest = grid.middle.argmin() + 23
    assert grid.log_volume[steepest] == pytest.approx(-0.5 * np.log(4.0 * 40 / 0.01**2))
    assert grid.variance[steepest] == pytest.approx(0.01**2 / 40)


# --- several families ------------------------------------------------------------------------------------------------


def made(draws: dict[float, Any], noise: float = 0.01, drift: float = 1.5, rival: Any = None) -> Curves:
    return Curves(np.array([0.6, 1.0, 1.5, 0.1]), draws, 4.0, noise, Noise(0.5, 0.1, drift, False), rival)


def alike(asymptote: float, middle: float = 1.0) -> Any:
    """Return draws that differ in nothing."""
    return np.tile([asymptote, middle, 1.5, 0.1], (DRAWS, 1))


def test_an_interval_holds_those_of_all_families() -> None:
    two = made({SCALERL: alike(0.6), np.inf: alike(0.5)})
    assert two.asymptote == pytest.approx((0.6, 0.5, 0.6))
    ends = [float(at(alike(a)[:1], 4.0, power)[0]) for a, power in ((0.6, SCALERL), (0.5, np.inf))]
    assert two.score_at(4.0) == pytest.approx((ends[0], min(ends), max(ends)))
    later = [float(at(alike(a)[:1], 6.0, power)[0]) for a, power in ((0.6, SCALERL), (0.5, np.inf))]
    gains = [after - now for after, now in zip(later, ends, strict=True)]
    assert two.gain(2.0) == pytest.approx((gains[0], min(gains), max(gains)))


def test_a_measured_mean_has_the_noise_of_its_scores() -> None:
    """Draws and noise add as independent numbers do; correlated scores tell less together."""
    draws = {SCALERL: alike(0.6)}
    draws[SCALERL][:, 0] += 0.02 * np.random.default_rng(7).standard_normal(DRAWS)
    noise = 0.01 * (1.5 / 3) ** 0.5 * np.random.default_rng(0).standard_normal(DRAWS)
    means = np.mean([at(draws[SCALERL], c) for c in (5.0, 6.0, 7.0)], axis=0)
    assert made(draws).measured((5.0, 6.0, 7.0)) == pytest.approx(tuple(np.quantile(means + noise, (0.05, 0.95))))


def test_a_curve_of_another_family_is_refused_with_its_name() -> None:
    curves = fit(*scores_of(5.0, 0.004, seed=1, count=40, power=np.inf))
    assert curves.rival == ("an exponential", pytest.approx(0.6, abs=0.01))
    assert "not of ScaleRL's family: an exponential fits better, and approaches 0.6" in str(curves.refusal)
    own = fit(*scores_of(5.0, 0.004, seed=1, count=40))
    assert own.rival is None
    assert own.refusal is None


def test_a_rival_that_fits_clearly_worse_does_not_widen_the_interval() -> None:
    exact, noisy = (fit(*scores_of(8.0, noise, seed=1, count=40)) for noise in (0.002, 0.03))
    assert list(noisy.draws) == list(FAMILIES)
    assert np.inf not in exact.draws
    assert SCALERL in exact.draws


@pytest.mark.parametrize(
    ("asymptotes", "middle", "reason"),
    [
        ((0.6, 0.6), 1.0, None),
        ((0.6, 0.905), 1.0, None),  # 0.7 of the gain so far: 0.311
        ((0.6, 0.915), 1.0, "the asymptote lies anywhere between 0.60 and 0.92"),
        ((0.6, 0.6), 4.1, "the scores do not bend yet: half of the gain may still lie ahead"),
    ],
)
def test_a_rival_can_refuse(asymptotes: tuple[float, float], middle: float, reason: str | None) -> None:
    assert made({SCALERL: alike(asymptotes[0]), np.inf: alike(asymptotes[1], middle)}).refusal == reason


def test_a_gain_within_two_standard_errors_is_refused() -> None:
    gain = float(at(CURVE, 4.0)[0]) - 0.1
    assert made({SCALERL: alike(0.6)}, noise=gain / 1.95).refusal == (
        f"the score has changed by {gain:+.3f}, which noise may explain"
    )
    assert made({SCALERL: alike(0.6)}, noise=gain / 2.05).refusal is None


@pytest.mark.parametrize(("ahead", "refused"), [(49, False), (51, True)])
def test_one_draw_in_twenty_may_have_its_midpoint_ahead(ahead: int, refused: bool) -> None:
    draws = alike(0.6)
    draws[:ahead, 1] = 4.1
    assert ("do not bend yet" in str(made({SCALERL: draws}).refusal)) == refused


def test_scores_that_wander_are_refused() -> None:
    random, state = np.random.default_rng(1), 0.0
    compute, scores, errors = scores_of(5.0, 0.01, seed=1, count=60)
    for k in range(60):
        state = 0.8 * state + 0.6 * random.normal(0.0, 0.025)
        scores[k] += state
    assert "the scores wander about the curve" in str(fit(compute, scores, errors).refusal)


# --- back-tests ------------------------------------------------------------------------------------------------------


def segment_of(scores: Any) -> Segment:
    hours = tuple(float(k) for k in range(len(scores)))
    return Segment(0, tuple(range(len(scores))), hours, tuple(map(float, scores)), (0.01,) * len(scores), None)


def test_a_back_test_that_misses_says_so() -> None:
    """Saturated at 0.3 until 80 % of the segment, then 0.6: no earlier part can know."""
    scores = [0.1 + 0.2 * (1.0 - np.exp(-k / 3.0)) for k in range(40)]
    scores[36:] = [0.6] * 4
    found = backtests(segment_of(scores))
    assert [test["hit"] for test in found] == [False, False, False]
    assert all(test["interval"][1] < 0.45 < test["end"] for test in found)


def test_a_back_test_sees_only_its_share() -> None:
    """What comes after its share changes nothing in the forecast itself, only whether it hits."""
    scores = [0.1 + 0.3 * (1.0 - np.exp(-k / 4.0)) for k in range(40)]
    other = [*scores[:32], *[0.9] * 8]
    one, two = (backtests(segment_of(part)) for part in (scores, other))
    assert [test["interval"] for test in one] == [test["interval"] for test in two]
    assert [test["hit"] for test in one] == [True] * 3
    assert [test["hit"] for test in two] == [False] * 3


@pytest.mark.parametrize(("count", "seen"), [(40, (16, 24, 32)), (12, (None, None, 9)), (14, (None, 8, 11))])
def test_the_end_is_in_no_share(count: int, seen: tuple[int | None, ...]) -> None:
    segment = segment_of([0.1 + 0.3 * (1.0 - np.exp(-k / 4.0)) for k in range(count)])
    for test, size in zip(backtests(segment), seen, strict=True):
        assert test["end"] == pytest.approx(sum(segment.scores[-3:]) / 3, abs=1e-4)
        if size is None:
            assert test["interval"] is None
            continue
        curves = segment.curves(size)
        assert curves is not None
        assert test["interval"] == pytest.approx(curves.measured(segment.hours[-3:]), abs=1e-4)


def test_a_missed_back_test_from_60_percent_refuses_the_asymptote() -> None:
    """The last three scores lie higher, within what the noise of the whole segment explains."""
    scores = scores_of(5.0, 0.01, seed=7, count=40)[1]
    scores[-3:] += 0.02
    curves, tests, refusal = judged(segment_of(scores))
    assert curves is not None
    assert curves.refusal is None
    assert [test["hit"] for test in tests] == [True, False, False]
    low, high = tests[1]["interval"]
    assert refusal == f"the forecast from the first 60% missed: {low:.3f} to {high:.3f}, and it became 0.578"
    scores[-3:] -= 0.02
    assert judged(segment_of(scores))[2] is None
    scores[13:16] -= (0.01, 0.02, 0.03)  # so the first 40 % forecast too low an end: too few to refuse
    _, tests, refusal = judged(segment_of(scores))
    assert [test["hit"] for test in tests] == [False, True, True]
    assert refusal is None
