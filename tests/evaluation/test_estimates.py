"""Pass@k against enumeration, and the errors against their definitions."""

import itertools
import math

import numpy as np
import pytest

from nemo_prorl.evaluation.estimates import (
    KS,
    Mean,
    bootstrap_means,
    ks_up_to,
    mean_of,
    mean_of_means,
    paired_intervals,
    pass_at_k,
    pass_table,
)


@pytest.mark.parametrize("n", range(1, 9))
def test_pass_at_k_is_the_share_of_subsets_with_a_right_one(n: int) -> None:
    for c in range(n + 1):
        right = [True] * c + [False] * (n - c)
        for k in range(1, n + 1):
            drawn = list(itertools.combinations(right, k))
            assert pass_at_k(n, c, k) == pytest.approx(sum(map(any, drawn)) / len(drawn), abs=1e-12)


@pytest.mark.parametrize(("n", "c", "k"), [(256, 1, 256), (256, 1, 128), (512, 3, 256), (4096, 5, 64), (10000, 1, 1)])
def test_pass_at_k_equals_the_closed_form_where_numbers_are_large(n: int, c: int, k: int) -> None:
    exact = 1 - math.comb(n - c, k) / math.comb(n, k)  # of whole numbers: no rounding before the division
    assert pass_at_k(n, c, k) == pytest.approx(exact, rel=1e-10)


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


def test_the_table_has_a_row_a_prompt() -> None:
    assert ks_up_to(20) == (1, 2, 4, 8, 16)
    assert ks_up_to(256) == KS
    table_PK = pass_table([4, 4, 2], [1, 0, 2], (1, 2))
    assert table_PK.tolist() == [[0.25, 0.5], [0.0, 0.0], [1.0, 1.0]]


def test_the_standard_error_is_over_prompts() -> None:
    values = [0.0, 0.5, 1.0, 0.25]
    found = mean_of(values)
    assert found.mean == pytest.approx(0.4375)
    assert found.se == pytest.approx(np.std(values, ddof=1) / 2)
    assert mean_of([0.5]).se is None
    with pytest.raises(ValueError, match="one prompt"):
        mean_of([])


def test_repeating_every_sample_changes_no_standard_error() -> None:
    """The unit is the prompt: twice as many equal samples tell nothing new."""
    few, many = pass_table([4] * 3, [0, 2, 3], (1,)), pass_table([8] * 3, [0, 4, 6], (1,))
    assert mean_of(few[:, 0]).se == pytest.approx(mean_of(many[:, 0]).se)


def test_the_mean_over_benchmarks_adds_variances() -> None:
    found = mean_of_means([Mean(0.2, 0.03), Mean(0.4, 0.04)])
    assert (found.mean, found.se) == (pytest.approx(0.3), pytest.approx(0.025))
    assert mean_of_means([Mean(0.2, None), Mean(0.4, 0.04)]).se is None


def test_bootstrap_intervals_agree_with_the_normal_ones_and_repeat() -> None:
    difference_PK = np.random.default_rng(3).normal(0.1, 1.0, size=(400, 2))
    [one, _] = paired_intervals(difference_PK, 4000, np.random.default_rng(0), 0.95)
    half = 1.96 * mean_of(difference_PK[:, 0]).se  # type: ignore[operator]
    assert one.difference == pytest.approx(difference_PK[:, 0].mean())
    assert one.low == pytest.approx(one.difference - half, abs=0.1 * half)
    assert one.high == pytest.approx(one.difference + half, abs=0.1 * half)
    assert paired_intervals(difference_PK, 4000, np.random.default_rng(0), 0.95)[0] == one


def test_pairing_keeps_a_prompts_values_together() -> None:
    value_PK = np.repeat(np.random.default_rng(1).normal(size=(30, 1)), 2, axis=1)
    drawn_RK = bootstrap_means(value_PK, 100, np.random.default_rng(0))
    assert drawn_RK.shape == (100, 2)
    np.testing.assert_allclose(drawn_RK[:, 0], drawn_RK[:, 1])
    assert drawn_RK.std() > 0
