"""Pass@k, means with standard errors, and paired bootstrap intervals.  numpy only.

Shapes: P prompts, K values of k, R bootstrap draws, B benchmarks.  A prompt is the unit that was drawn at random:
its samples are no independent trials of the benchmark, so all errors are over prompts (clusters).
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np

Floats: TypeAlias = np.ndarray[Any, np.dtype[np.float64]]

KS = (1, 2, 4, 8, 16, 32, 64, 128, 256)
_CHUNK_CELLS = 1 << 22  # counts of prompts drawn at a time, to bound memory


@dataclass(frozen=True)
class Mean:
    """A mean over prompts and its standard error; `se` is None for a single prompt."""

    mean: float
    se: float | None

    def to_json(self) -> dict[str, float | None]:
        return {"mean": self.mean, "se": self.se}


@dataclass(frozen=True)
class Interval:
    """A difference and its bootstrap interval."""

    difference: float
    low: float
    high: float

    def to_json(self) -> dict[str, float]:
        return {"difference": self.difference, "low": self.low, "high": self.high}


def pass_at_k(n: int, c: int, k: int) -> float:
    """Probability that at least one of k samples is right, drawn without replacement from n of which c are.

    1 - C(n - c, k) / C(n, k) as a product (Chen et al. 2021, eq. 1): no factorial, no difference of large numbers.
    """
    if not 1 <= k <= n or not 0 <= c <= n:
        raise ValueError(f"pass@k needs 1 <= k <= n and 0 <= c <= n, not n={n}, c={c}, k={k}")
    if n - c < k:
        return 1.0
    return float(1.0 - np.prod(1.0 - k / np.arange(n - c + 1, n + 1, dtype=np.float64)))


def ks_up_to(n: int) -> tuple[int, ...]:
    """The values of k that n samples allow."""
    return tuple(k for k in KS if k <= n)


def pass_table(n_P: Sequence[int], c_P: Sequence[int], ks: Sequence[int]) -> Floats:
    """[P, K] unbiased pass@k of each prompt; equal (n, c) are computed once."""
    known: dict[tuple[int, int], list[float]] = {}
    for n, c in zip(n_P, c_P, strict=True):
        if (n, c) not in known:
            known[n, c] = [pass_at_k(n, c, k) for k in ks]
    rows = [known[n, c] for n, c in zip(n_P, c_P, strict=True)]
    return np.asarray(rows, dtype=np.float64).reshape(len(rows), len(ks))


def mean_of(value_P: Sequence[float] | Floats) -> Mean:
    """Mean over prompts; standard error = sample standard deviation over prompts / sqrt(P)."""
    values = np.asarray(value_P, dtype=np.float64)
    if values.size == 0:
        raise ValueError("a mean needs at least one prompt")
    se = float(values.std(ddof=1) / np.sqrt(values.size)) if values.size > 1 else None
    return Mean(float(values.mean()), se)


def mean_of_means(means: Sequence[Mean]) -> Mean:
    """Unweighted mean over benchmarks, whose prompts are independent; no error where one of them has none."""
    errors = [one.se for one in means]
    known = [error for error in errors if error is not None]
    se = float(np.sqrt(np.sum(np.square(known))) / len(means)) if len(known) == len(means) else None
    return Mean(float(np.mean([one.mean for one in means])), se)


def bootstrap_means(value_PK: Floats, resamples: int, rng: np.random.Generator) -> Floats:
    """[R, K] means over prompts drawn with replacement; a prompt's K values stay together."""
    prompts = value_PK.shape[0]
    shares = np.full(prompts, 1.0 / prompts)
    chunk = max(1, _CHUNK_CELLS // prompts)
    parts = []
    for start in range(0, resamples, chunk):
        count_RP = rng.multinomial(prompts, shares, size=min(chunk, resamples - start))
        parts.append(count_RP @ value_PK / prompts)
    return np.concatenate(parts)


def paired_intervals(difference_PK: Floats, resamples: int, rng: np.random.Generator, level: float) -> list[Interval]:
    """K percentile intervals of the mean difference, from prompts drawn for both models together."""
    return intervals(difference_PK.mean(axis=0), bootstrap_means(difference_PK, resamples, rng), level)


def intervals(mean_K: Floats, drawn_RK: Floats, level: float) -> list[Interval]:
    """Percentile intervals at `level` around means, from their bootstrap draws."""
    tail = 50.0 * (1.0 - level)
    low_K, high_K = np.percentile(drawn_RK, [tail, 100.0 - tail], axis=0)
    return [Interval(*map(float, row)) for row in zip(mean_K, low_K, high_K, strict=True)]
