"""Comparison of two trainings that validate the same prompts, in pairs, also before both have ended.

A look compares the validations that both have made so far.  Each look may decide, so each has its share of the error:
with L planned looks, a difference counts at a look if it excludes 0 at the level LEVEL / L (Bonferroni).
"""

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

LEVEL = 0.05  # probability of a difference where there is none, over all looks and both signs

Scores = Mapping[str, float]  # mean score of each held-out prompt in one validation


@dataclass(frozen=True)
class PairedDifference:
    """The mean difference of two trainings' scores (the second's minus the first's), and its standard error."""

    mean: float
    se: float

    def half_width(self, looks: int = 1) -> float:
        """Return half of the width of the interval that one of `looks` looks has."""
        return statistics.NormalDist().inv_cdf(1 - LEVEL / (2 * looks)) * self.se

    def text(self, looks: int = 1) -> str:
        """Return the difference with its interval, such as `-0.0048 (-0.0243 to +0.0147)`."""
        half = self.half_width(looks)
        return f"{self.mean:+.4f} ({self.mean - half:+.4f} to {self.mean + half:+.4f})"

    def decided(self, looks: int) -> bool:
        """Return whether one of `looks` looks shows a difference."""
        return abs(self.mean) > self.half_width(looks)


def later_half(validations: Sequence[Scores]) -> dict[str, float]:
    """Return the mean score of each prompt over the later half of the validations, at least one."""
    late = validations[len(validations) // 2 :]
    return {prompt: statistics.fmean(scores[prompt] for scores in late) for prompt in late[0]}


def look(
    first: Mapping[int, Scores], second: Mapping[int, Scores], noise: float
) -> tuple[PairedDifference, bool] | None:
    """Compare a training with a finished one, over the later half of the validations that both have made.

    Args:
        first: validations of the finished training by step: each is a look.
        second: those of the other one so far.

    Returns:
        the difference, and whether this look shows one; None if there is no validation that both have made.
    """
    if not (both := sorted(first.keys() & second.keys())):
        return None
    halves = [later_half([training[step] for step in both]) for training in (first, second)]
    shown = difference(halves[0], halves[1], noise)
    return shown, shown.decided(len(first))


def difference(first: Scores, second: Scores, noise: float = 0.0) -> PairedDifference:
    """Compare two trainings prompt by prompt.

    Args:
        noise: standard deviation of the difference between two equal trainings with other random numbers, beyond that
            of the prompts.
    """
    pairs = [second[prompt] - first[prompt] for prompt in first]
    prompts = statistics.variance(pairs) / len(pairs) if len(pairs) > 1 else math.inf
    return PairedDifference(statistics.fmean(pairs), math.sqrt(prompts + noise**2))
