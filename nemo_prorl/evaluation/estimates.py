"""Pass@k, means with standard errors, and paired bootstrap intervals.

Shapes: P prompts, K values of k, R bootstrap draws.  Samples of one prompt are not independent trials of the benchmark,
so the prompt is the unit of resampling and all standard errors are over prompts.
"""

import math
from collections.abc import Sequence
from typing import Any, TypeAlias, TypedDict

import numpy as np

Floats: TypeAlias = np.ndarray[Any, np.dtype[np.float64]]

KS = (1, 2, 4, 8, 16, 32, 64, 128, 256)
_CHUNK_CELLS = 1 << 22  # cells of a chunk of bootstrap draws, which bounds memory (float64: 32 MiB)


class Mean(TypedDict):
    """A mean over prompts and its standard error; `se` is None for a single prompt."""

    mean: float
    se: float | None


class Interval(TypedDict):
    """The difference between two scores, and its bootstrap confidence interval."""

    difference: float
    low: float
    high: float


def pass_at_k(n: int, c: int, k: int) -> float:
    """Return the probability that at least one of k samples is correct.

    The k samples are drawn without replacement from n samples, of which c are correct: 1 - C(n - c, k) / C(n, k)
    (Chen et al. 2021, eq. 1).  Everything before the division is computed in integers.
    """
    if not 1 <= k <= n or not 0 <= c <= n:
        raise ValueError(f"pass@k needs 1 <= k <= n and 0 <= c <= n, not n={n}, c={c}, k={k}")
    ways = math.comb(n, k)
    return (ways - math.comb(n - c, k)) / ways


def ks_up_to(n: int) -> tuple[int, ...]:
    """Return the reported values of k that n samples allow: the powers of 2 up to n, at most 256."""
    return tuple(k for k in KS if k <= n)


def mean_of(value_P: Sequence[float] | Floats) -> Mean:
    """Return the mean over prompts and its standard error: sample standard deviation over prompts / sqrt(P)."""
    values = np.asarray(value_P, dtype=np.float64)
    se = float(values.std(ddof=1) / np.sqrt(values.size)) if values.size > 1 else None
    return {"mean": float(values.mean()), "se": se}


def mean_of_means(means: Sequence[Mean]) -> Mean:
    """Return the unweighted mean over benchmarks with its standard error, which assumes independent prompts.

    The standard error is None if a benchmark does not have a standard error.
    """
    errors = [mean["se"] for mean in means if mean["se"] is not None]
    se = float(np.sqrt(np.sum(np.square(errors))) / len(means)) if len(errors) == len(means) else None
    return {"mean": float(np.mean([mean["mean"] for mean in means])), "se": se}


def bootstrap_means(value_PK: Floats, resamples: int, rng: np.random.Generator) -> Floats:
    """Return [R, K] means over prompts drawn with replacement.  The K values of a prompt are drawn together."""
    prompts = value_PK.shape[0]
    shares = np.full(prompts, 1.0 / prompts)
    chunk = max(1, _CHUNK_CELLS // prompts)
    parts = []
    for start in range(0, resamples, chunk):
        count_RP = rng.multinomial(prompts, shares, size=min(chunk, resamples - start))
        parts.append(count_RP @ value_PK / prompts)
    return np.concatenate(parts)


def intervals(mean_K: Floats, drawn_RK: Floats, level: float) -> list[Interval]:
    """Return the percentile interval of each mean from its bootstrap draws; `level` is the coverage, such as 0.95."""
    tail = 50.0 * (1.0 - level)
    low_K, high_K = np.percentile(drawn_RK, [tail, 100.0 - tail], axis=0).tolist()
    return [
        {"difference": mean, "low": low, "high": high}
        for mean, low, high in zip(mean_K.tolist(), low_K, high_K, strict=True)
    ]
