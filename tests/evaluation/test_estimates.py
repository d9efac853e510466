"""Pass@k against enumeration, and the errors against their definitions."""

import itertools
import math

import numpy as np
import pytest

from nemo_prorl.evaluation.estimates import (
    KS,
    Interval,
    bootstrap_means,
    intervals,
    ks_up_to,
    mean_of,
    mean_of_means,
    pass_at_k,
)


@pytest.mark.parametrize("n", range(1, 9))
def test_pass_at_k_is_the_share_of_subsets_with_a_right_one(n: int) -> None:
    for c in range(n + 1):
        right = [True] * c + [False] * (n - c)
        for k in range(1, n + 1):
            drawn = list(itertools.combinations(right, k))
            assert pass_at_k(n, c, k) == pytest.approx(sum(map(any, drawn)) / len(drawn), abs=1e-12)


@pytest.mark.parametrize(("n", "c", "k"), [(256, 1, 256), (256, 1, 128), (512, 3, 256), (4096, 5, 64), (10000, 1, 1)])
def test_pass_at_k_equals_the_product_form_and_scipys_where_numbers_are_large(n: int, c: int, k: int) -> None:
    from scipy import stats

    product = 1.0 - float(np.prod(1.0 - k / np.arange(n - c + 1, n + 1)))
    assert pass_at_k(n, c, k) == pytest.approx(product, rel=1e-10)
    assert pass_at_k(n, c, k) == pytest.approx(float(stats.hypergeom.sf(0, n, c, k)), rel=1e-8)


def test_pass_at_k_is_unbiased() -> None:
    """Its mean over all outcomes of n tries with chance p is the chance that one of k tries is right."""
    n, p = 6, 0.3
    chance_C = [math.comb(n, c) * p**c * (1 - p) ** (n - c) for c in range(n + 1)]
    for k in range(1, n + 1):
        expected = sum(chance * pass_at_k(n, c, k) for c, chance in enumerate(chance_C))
        assert expected == pytest.approx(1 - (1 - p) ** k, abs=1e-12)


@pytest.mark.parametrize(("n", "c", "k"), [(4, 5, 1), (4, 1, 0), (4, 1, 5), (4, -1, 1)])
def test_pass_at_k_refuses_what_makes_no_sense(n: int, c: int, k: int) -> None:
    with pytest.raises(ValueError, match=f"n={n}, c={c}, k={k}"):
        pass_at_k(n, c, k)


def test_k_goes_as_far_as_the_samples() -> None:
    assert ks_up_to(20) == (1, 2, 4, 8, 16)
    assert ks_up_to(256) == KS


def test_the_standard_error_is_over_prompts() -> None:
    from scipy import stats

    values = [0.0, 0.5, 1.0, 0.25]
    found = mean_of(values)
    assert found["mean"] == pytest.approx(0.4375)
    assert found["se"] == pytest.approx(stats.sem(values))
    assert mean_of([0.5])["se"] is None


def test_the_mean_over_benchmarks_adds_variances() -> None:
    found = mean_of_means([{"mean": 0.2, "se": 0.03}, {"mean": 0.4, "se": 0.04}])
    assert found == {"mean": pytest.approx(0.3), "se": pytest.approx(0.025)}
    assert mean_of_means([{"mean": 0.2, "se": None}, {"mean": 0.4, "se": 0.04}])["se"] is None


def test_bootstrap_intervals_agree_with_those_of_scipy_and_repeat() -> None:
    from scipy import stats

    difference_PK = np.random.default_rng(3).normal(0.1, 1.0, size=(400, 2))

    def drawn() -> Interval:
        drawn_RK = bootstrap_means(difference_PK, 4000, np.random.default_rng(0))
        return intervals(difference_PK.mean(axis=0), drawn_RK, 0.95)[0]

    one, values = drawn(), difference_PK[:, 0]
    theirs = stats.bootstrap((values,), np.mean, n_resamples=4000, method="percentile", rng=1).confidence_interval
    assert one["difference"] == pytest.approx(values.mean())
    width = theirs.high - theirs.low
    assert one["low"] == pytest.approx(theirs.low, abs=0.05 * width)
    assert one["high"] == pytest.approx(theirs.high, abs=0.05 * width)
    assert drawn() == one


def test_pairing_keeps_a_prompts_values_together() -> None:
    value_PK = np.repeat(np.random.default_rng(1).normal(size=(30, 1)), 2, axis=1)
    drawn_RK = bootstrap_means(value_PK, 100, np.random.default_rng(0))
    assert drawn_RK.shape == (100, 2)
    np.testing.assert_allclose(drawn_RK[:, 0], drawn_RK[:, 1])
    assert drawn_RK.std() > 0
