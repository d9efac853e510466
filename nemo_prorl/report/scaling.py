"""ScaleRL's curve of reward over compute, fitted to the validations of a run (arXiv 2510.13786, equation 1).

    R(C) = R0 + (A - R0) / (1 + (C_mid / C)^B)

R0: score at the start; A: asymptote; C_mid: compute at which half of the gain is reached; B: exponent, the steepness.
All curves of a grid of (C_mid, B) are fitted at once, because R0 and A are linear.  Intervals come from draws of
curves, each weighted by how well it fits.  A bootstrap of the best fit would take a chance plateau of a short run for
certain.
"""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]

LEAST_POINTS = 8  # validations
DRAWS = 1000
LEVEL = (0.05, 0.95)  # a 90 % interval
TOP = 1.0  # the highest score
_MIDPOINTS, _EXPONENTS = 80, 16
_STEEPNESS = (0.8, 4.0)  # ScaleRL's fits lie between 1 and 2.5
_BEYOND = 0.05  # share of draws that may have their midpoint ahead of the last measurement
_GAIN_SIGMAS = 4.0


@dataclass(frozen=True)
class Curves:
    """The best curve, and draws of curves that the scores allow.

    Attributes:
        best: [4] asymptote, C_mid, B and R0 of the best curve.
        draws: [DRAWS, 4] the same of each draw.
        end: compute of the last score.
        noise: standard error of one score.
    """

    best: Floats
    draws: Floats
    end: float
    noise: float

    @property
    def asymptote(self) -> tuple[float, float, float]:
        """Return the asymptote of the best curve, and its interval."""
        low, high = np.quantile(self.draws[:, 0], LEVEL)
        return float(self.best[0]), float(low), float(high)

    def score_at(self, compute: float) -> tuple[float, float, float]:
        """Return the best curve's score at a compute, and its interval."""
        low, high = np.quantile(at(self.draws, compute), LEVEL)
        return float(at(self.best[None], compute)[0]), float(low), float(high)

    def gain(self, compute: float) -> tuple[float, float, float]:
        """Return the gain that further `compute` brings, from the score now: median and interval."""
        gains = at(self.draws, self.end + compute) - at(self.draws, self.end)
        low, middle, high = np.quantile(gains, (LEVEL[0], 0.5, LEVEL[1]))
        return float(middle), float(low), float(high)

    @property
    def refusal(self) -> str | None:
        """Return why the scores do not determine the asymptote; None if they do."""
        _, low, high = self.asymptote
        now = self.score_at(self.end)[0]
        if now - self.best[3] < _GAIN_SIGMAS * self.noise / 2.0:
            return f"the score has changed by {now - self.best[3]:+.3f}, which noise may explain"
        if np.mean(self.draws[:, 1] > self.end) > _BEYOND:
            return "the scores do not bend yet: half of the gain may still lie ahead"
        if high - low > now - self.best[3]:
            return f"the asymptote lies anywhere between {low:.2f} and {high:.2f}"
        return None


def at(curves: Floats, compute: float) -> Floats:
    """Return the score of each curve ([K, 4]) at a compute."""
    asymptote, middle, exponent, start = curves.T
    share = 1.0 / (1.0 + (middle / compute) ** exponent) if compute > 0 else np.zeros(len(curves))
    return np.asarray(start + (asymptote - start) * share)


def fit(compute: Floats, scores: Floats, errors: Floats, seed: int = 0) -> Curves:
    """Fit the curve to at least LEAST_POINTS scores.

    Args:
        compute: [N] compute of each score, rising from 0.
        scores: [N] between 0 and 1.
        errors: [N] standard errors of the scores.
    """
    errors = np.maximum(errors, 1e-4)  # a score of 0 or 1 has an error of 0
    middles = np.geomspace(compute[-1] / 200.0, compute[-1] * 8.0, _MIDPOINTS)
    grid = [each.ravel() for each in np.meshgrid(middles, np.geomspace(*_STEEPNESS, _EXPONENTS), indexing="ij")]
    with np.errstate(divide="ignore"):
        share_KN = 1.0 / (1.0 + (grid[0][:, None] / compute) ** grid[1][:, None])
    weight_N = 1.0 / errors**2
    rest_KN = 1.0 - share_KN
    a, b, c = ((weight_N * product).sum(1) for product in (rest_KN**2, rest_KN * share_KN, share_KN**2))
    u, v = ((weight_N * part * scores).sum(1) for part in (rest_KN, share_KN))
    determinant = np.maximum(a * c - b * b, 1e-12 * a * c + 1e-300)
    start, asymptote = (c * u - b * v) / determinant, (a * v - b * u) / determinant
    start = np.where(asymptote > TOP, (u - b * TOP) / a, start)
    asymptote = np.minimum(asymptote, TOP)
    flat = (u + v) / (a + 2.0 * b + c)
    falls = asymptote < start
    start, asymptote = np.where(falls, flat, start), np.where(falls, flat, asymptote)
    misfit = (weight_N * (scores - start[:, None] * rest_KN - asymptote[:, None] * share_KN) ** 2).sum(1)
    k = int(np.argmin(misfit))
    variance = max(
        1.0, float(misfit[k]) / max(1, len(scores) - 4)
    )  # above 1: the scores scatter more than their errors
    # The weight of a curve is that of all its R0 and A together, hence the determinant.
    chance = np.exp(-(misfit - misfit[k]) / (2.0 * variance)) / np.sqrt(determinant)
    random = np.random.default_rng(seed)
    picked = random.choice(len(chance), DRAWS, p=chance / chance.sum())
    spread = np.sqrt(a / determinant * variance)[picked] * random.standard_normal(DRAWS)
    drawn = np.clip(asymptote[picked] + spread, 0.0, TOP)
    # Given A, the best R0 follows.
    starts = (u[picked] - b[picked] * drawn) / a[picked]
    return Curves(
        best=np.array([asymptote[k], grid[0][k], grid[1][k], start[k]]),
        draws=np.stack([drawn, grid[0][picked], grid[1][picked], starts], axis=1),
        end=float(compute[-1]),
        noise=float(np.median(errors) * np.sqrt(variance)),
    )
