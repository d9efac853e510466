"""The three ingredients of the forecast's interval, against the formulas written down with matrices."""

from typing import Any

import numpy as np
import pytest

from nemo_prorl.report.forecast import Segment, backtests
from nemo_prorl.report.scaling import at, fit

CURVE = np.array([[0.6, 1.0, 1.5, 0.1]])


def scores_of(end: float, noise: float, seed: int, count: int = 30) -> tuple[Any, Any, Any]:
    """Return compute, noisy scores of one curve, and errors that say 0.02 whatever the noise is."""
    random, compute = np.random.default_rng(seed), np.linspace(0.0, end, count)
    true = np.array([float(at(CURVE, c)[0]) for c in compute])
    return compute, true + noise * random.standard_normal(count), np.full(count, 0.02)


def posterior(
    compute: Any, scores: Any, errors: Any, *, scatter: bool = True, weigh: bool = True
) -> tuple[float, float]:
    """Return mean and standard deviation of the asymptote over all curves: each curve's normal, by its weight."""
    rows = []
    for middle in np.geomspace(compute[-1] / 200.0, compute[-1] * 8.0, 80):
        for exponent in np.geomspace(0.8, 4.0, 16):
            with np.errstate(divide="ignore"):
                share = 1.0 / (1.0 + (middle / compute) ** exponent)
            design = np.stack([1.0 - share, share], axis=1) / errors[:, None]
            covariance = np.linalg.inv(design.T @ design)
            start, asymptote = covariance @ design.T @ (scores / errors)
            misfit = float(((scores / errors - design @ (start, asymptote)) ** 2).sum())
            rows.append((misfit, asymptote, covariance[1, 1], np.linalg.det(covariance)))
    misfit, mean, own, determinant = np.array(rows).T
    factor = max(1.0, misfit.min() / (len(scores) - 4)) if scatter else 1.0
    chance = np.exp(-(misfit - misfit.min()) / (2.0 * factor)) * (np.sqrt(determinant) if weigh else 1.0)
    chance /= chance.sum()
    middle = float((chance * mean).sum())
    return middle, float(np.sqrt((chance * (own * factor + (mean - middle) ** 2)).sum()))


@pytest.mark.parametrize(("end", "noise", "count"), [(8.0, 0.02, 40), (8.0, 0.06, 40), (5.0, 0.02, 12)])
def test_mean_and_spread_of_the_asymptote_are_those_of_the_formula(end: float, noise: float, count: int) -> None:
    measured = scores_of(end, noise, seed=1, count=count)
    middle, spread = posterior(*measured)
    draws = np.concatenate([fit(*measured, seed=seed).draws[:, 0] for seed in range(10)])
    assert draws.mean() == pytest.approx(middle, abs=0.05 * spread)
    assert draws.std() == pytest.approx(spread, rel=0.03)


def test_what_the_test_above_would_see() -> None:
    """In its cases, an interval without one of its ingredients differs by more than the test allows."""
    many, few = scores_of(8.0, 0.06, seed=1, count=40), scores_of(5.0, 0.02, seed=1, count=12)
    assert posterior(*many)[1] > 2.0 * posterior(*many, scatter=False)[1]
    middle, spread = posterior(*few)
    assert abs(posterior(*few, weigh=False)[0] - middle) > 0.09 * spread
    assert abs(posterior(*few, weigh=False)[1] / spread - 1.0) > 0.05


def test_scores_that_scatter_more_than_their_errors_widen_the_interval() -> None:
    widths = []
    for noise in (0.02, 0.06):
        _, low, high = fit(*scores_of(8.0, noise, seed=1, count=40)).asymptote
        widths.append(high - low)
    assert 2.0 < widths[1] / widths[0] < 4.5


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
