"""Comparison of two trainings in pairs: by hand, and how often equal trainings are told apart."""

import math
import random
import statistics

import pytest

from nemo_prorl.algorithms.paired import LEVEL, PairedDifference, difference, later_half, look


def test_a_difference_is_that_of_the_pairs() -> None:
    first, second = {"a": 0.0, "b": 1.0, "c": 0.5}, {"c": 1.0, "a": 0.25, "b": 1.0}
    found = difference(first, second)
    assert found.mean == pytest.approx(0.25)
    assert found.se == pytest.approx(0.25 / math.sqrt(3))
    assert difference(first, second, noise=0.1).se == pytest.approx(math.hypot(found.se, 0.1))
    assert difference({"a": 0.0}, {"a": 1.0}).se == math.inf  # one prompt shows nothing


def test_the_later_half_of_the_validations_counts() -> None:
    one, two, three = {"a": 0.0}, {"a": 0.4}, {"a": 0.8}
    assert later_half([one]) == one
    assert later_half([one, two]) == two
    assert later_half([one, two, three]) == {"a": pytest.approx(0.6)}


def test_several_looks_need_more_than_one() -> None:
    assert PairedDifference(0.0, 1.0).half_width() == pytest.approx(1.96, abs=1e-3)
    assert PairedDifference(0.0, 1.0).half_width(5) == pytest.approx(2.576, abs=1e-3)
    assert PairedDifference(2.2, 1.0).decided(1)
    assert not PairedDifference(2.2, 1.0).decided(5)
    assert PairedDifference(-2.7, 1.0).decided(5)


def test_equal_trainings_are_told_apart_in_at_most_5_percent() -> None:
    """Four looks at equal arms whose validations have noise of prompts, and a difference of training that stays."""
    chance, noise, wrong = random.Random(5), 0.02, 0
    for _ in range(200):
        drift, looks = chance.gauss(0, noise), []
        base, other = [], []
        for _ in range(4):
            skill = {str(k): chance.random() for k in range(100)}
            base.append({k: s + chance.gauss(0, 0.2) for k, s in skill.items()})
            other.append({k: s + drift + chance.gauss(0, 0.2) for k, s in skill.items()})
            looks.append(difference(later_half(base), later_half(other), noise).decided(4))
        wrong += any(looks)
    assert wrong / 200 <= LEVEL
    assert statistics.fmean(looks) <= 1


def test_a_look_compares_the_validations_that_both_have_made() -> None:
    def validation(level: float) -> dict[str, float]:
        return {str(k): level + 0.1 * (k % 2) * level for k in range(40)}

    first = {10: validation(0.0), 20: validation(0.1), 30: validation(0.2), 40: validation(0.3)}
    second = {10: validation(0.5), 20: validation(0.1), 25: validation(9.0)}
    assert look(first, {25: validation(9.0)}, 0.0) is None
    found = look(first, second, 0.0)
    assert found is not None
    assert found[0] == difference(first[20], second[20])
    quiet, noisy = look(first, {10: first[10]}, 0.0), look(first, {10: first[10]}, 0.1)
    assert quiet is not None
    assert noisy is not None
    assert (quiet[0].se, noisy[0].se) == (0.0, 0.1)
    # One of four looks needs 2.5 standard errors, a single one 2.0.
    base = {step: {str(k): 0.0 for k in range(101)} for step in (1, 2, 3, 4)}
    other = {1: {str(k): 0.226 + (-1.0) ** k for k in range(101)}}
    assert [found[1] for count in (1, 4) if (found := look(dict(list(base.items())[:count]), other, 0.0))] == [
        True,
        False,
    ]
