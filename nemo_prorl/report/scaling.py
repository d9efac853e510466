"""ScaleRL's curve of reward over compute (arXiv 2510.13786, equation 1) and its rivals, fitted to validations.

    R(C) = R0 + (A - R0) (1 - (1 + (2^(1/P) - 1) (C / C_mid)^B)^-P)

R0: score at the start; A: asymptote; C_mid: compute at which half of the gain is reached; B: exponent, the steepness;
P: how fast the rest of the gain follows.  P = 1 is ScaleRL's family.  An infinite P is the stretched exponential, a
small one a power law: they agree with ScaleRL's curve on most scores and differ in the asymptote.

All curves of a grid of (C_mid, B) are fitted at once, because R0 and A are linear.  A family's interval comes from
draws of curves, each weighted by how well it fits.  A bootstrap of the best fit would take a chance plateau of a short
run for certain.  The interval of a result holds those of all families that fit the scores as well as the best.

The noise comes from the scatter of the scores about the best curve: validations use the same prompts, so the recorded
errors, which are those of independent prompts, are about twice as large.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]

DRAWS = 1000
LEVEL = (0.05, 0.95)  # a 90 % interval
TOP = 1.0  # the highest score
SCALERL = 1.0
FAMILIES = {SCALERL: "ScaleRL's", np.inf: "an exponential", 0.5: "a power law"}  # by P
_MIDPOINTS, _EXPONENTS = 100, 24  # a coarser grid adds misfits as large as the noise of 500 prompts
_STEEPNESS = (0.4, 6.0)  # ScaleRL's fits lie between 1 and 2.5
_BEYOND = 0.05  # share of draws that may have their midpoint ahead of the last measurement
_WIDEST = 0.7  # width of the asymptote's interval, as a share of the gain so far
_GAIN_SIGMAS = 4.0
_SCATTER, _SCATTER_WEIGHT = 0.7, 4  # expected scatter, as a share of the recorded errors, and its weight in scores
_LEAST_SCATTER = 0.5  # as a share of the recorded errors: that of the same prompts under a policy that does not wander
_CORRELATION = 0.2  # least correlation of neighbouring residuals: few scores show none, long runs show 0 to 0.4
_AS_GOOD = 4.0  # a rival whose misfit exceeds the best by less, in variances, widens the interval
_WORSE = 6.0  # ScaleRL's family is refused if its misfit exceeds a rival's by more
_WANDERS = 1.64  # standard deviations of the correlation of neighbouring residuals
_START_SPREAD = 0.5  # R0 lies between 0 and 1, also where no score is near the start
_GRID = 0.3  # residuals smaller than this, in units of the errors, are those of the grid
_PARAMETERS = 4


class Noise(NamedTuple):
    """How the scores scatter about the best curve.

    Attributes:
        variance: variance of a score, as a multiple of its recorded error squared.
        correlation: of the residuals of neighbouring scores.
        drift: factor by which correlated residuals raise the variance of what is fitted.
        wanders: whether the correlation is larger than chance.
    """

    variance: float
    correlation: float
    drift: float
    wanders: bool


@dataclass(frozen=True)
class FamilyFit:
    """All curves of one family, each with the R0 and A that fit best; arrays [K].

    Attributes:
        power: P of the family.
        middle: C_mid of each curve.
        exponent: B.
        start: R0.
        asymptote: A.
        slope: change of the best R0 for a change of A.
        variance: variance of A at fixed C_mid and B, for scores whose variance is that of their errors.
        log_volume: logarithm of the root of the determinant of the covariance of R0 and A.
        misfit: sum of the squared residuals in units of the errors.
    """

    power: float
    middle: Floats
    exponent: Floats
    start: Floats
    asymptote: Floats
    slope: Floats
    variance: Floats
    log_volume: Floats
    misfit: Floats

    @property
    def best(self) -> Floats:
        """Return [4] of the best curve: asymptote, C_mid, B and R0."""
        k = int(np.argmin(self.misfit))
        return np.array([self.asymptote[k], self.middle[k], self.exponent[k], self.start[k]])

    def chances(self, variance: float) -> Floats:
        """Return [K], the weight of each curve, together with all its R0 and A."""
        logs = self.log_volume - 0.5 * self.misfit / variance
        weights = np.exp(logs - logs.max())
        return np.asarray(weights / weights.sum())

    def draw(self, variance: float, freedom: float, random: np.random.Generator) -> Floats:
        """Return [DRAWS, 4] curves.  `freedom`: degrees of freedom of the variance."""
        picked = random.choice(len(self.misfit), DRAWS, p=self.chances(variance))
        scale = random.standard_normal(DRAWS) * np.sqrt(freedom / random.chisquare(freedom, DRAWS))
        spread = np.sqrt(self.variance[picked] * variance) * scale
        drawn = np.clip(self.asymptote[picked] + spread, 0.0, TOP)
        starts = self.start[picked] + self.slope[picked] * (drawn - self.asymptote[picked])
        return np.stack([drawn, self.middle[picked], self.exponent[picked], starts], axis=1)


@dataclass(frozen=True)
class Curves:
    """The best curve, and draws of curves that the scores allow.

    Attributes:
        best: [4] asymptote, C_mid, B and R0 of the best curve of ScaleRL's family.
        draws: for P of ScaleRL's family and of the rivals that fit as well, [DRAWS, 4] the same of each draw.
        end: compute of the last score.
        noise: standard error of one score.
        scatter: how the scores scatter.
        rival: name and asymptote of the best curve of a family that fits clearly better than ScaleRL's, or None.
    """

    best: Floats
    draws: dict[float, Floats]
    end: float
    noise: float
    scatter: Noise
    rival: tuple[str, float] | None

    @property
    def asymptote(self) -> tuple[float, float, float]:
        """Return the asymptote of the best curve, and its interval."""
        return float(self.best[0]), *_interval(drawn[:, 0] for drawn in self.draws.values())

    def score_at(self, compute: float) -> tuple[float, float, float]:
        """Return the best curve's score at a compute, and its interval."""
        low, high = _interval(at(drawn, compute, power) for power, drawn in self.draws.items())
        return float(at(self.best[None], compute)[0]), low, high

    def gain(self, compute: float) -> tuple[float, float, float]:
        """Return the gain that further `compute` brings, from the score now: median and interval."""
        gains = {
            power: at(drawn, self.end + compute, power) - at(drawn, self.end, power)
            for power, drawn in self.draws.items()
        }
        return float(np.median(gains[SCALERL])), *_interval(gains.values())

    def measured(self, computes: Sequence[float], seed: int = 0) -> tuple[float, float]:
        """Return the interval of the mean of the scores that validations after these computes will measure."""
        error = self.noise * (self.scatter.drift / len(computes)) ** 0.5
        noise = error * np.random.default_rng(seed).standard_normal(DRAWS)
        return _interval(
            np.mean([at(drawn, compute, power) for compute in computes], axis=0) + noise
            for power, drawn in self.draws.items()
        )

    @property
    def refusal(self) -> str | None:
        """Return why the scores do not determine the asymptote; None if they do."""
        _, low, high = self.asymptote
        now = self.score_at(self.end)[0]
        if now - self.best[3] < _GAIN_SIGMAS * self.noise / 2.0:
            return f"the score has changed by {now - self.best[3]:+.3f}, which noise may explain"
        if max(np.mean(drawn[:, 1] > self.end) for drawn in self.draws.values()) > _BEYOND:
            return "the scores do not bend yet: half of the gain may still lie ahead"
        if self.scatter.wanders:
            return (
                "the scores wander about the curve: neighbouring validations lie on the same side of it"
                f" (correlation {self.scatter.correlation:.2f})"
            )
        if self.rival is not None:
            name, end = self.rival
            return f"the curve is not of ScaleRL's family: {name} fits better, and approaches {end:.2f}"
        if high - low > _WIDEST * (now - self.best[3]):
            return f"the asymptote lies anywhere between {low:.2f} and {high:.2f}"
        return None


def _interval(draws: Iterable[Floats]) -> tuple[float, float]:
    """Return the interval that holds the interval of each family's draws."""
    bounds = np.array([np.quantile(drawn, LEVEL) for drawn in draws])
    return float(bounds[:, 0].min()), float(bounds[:, 1].max())


def share_of(middle: Floats, exponent: Floats, power: float, compute: Floats | float) -> Floats:
    """Return the share of the gain that a compute has brought."""
    relative = (compute / middle) ** exponent
    if np.isinf(power):
        return np.asarray(-np.expm1(-np.log(2.0) * relative))
    rest = 1.0 / (1.0 + (2.0 ** (1.0 / power) - 1.0) * relative)
    return np.asarray(1.0 - (rest if power == SCALERL else rest**power))


def at(curves: Floats, compute: float, power: float = SCALERL) -> Floats:
    """Return the score of each curve ([K, 4]) of a family at a compute."""
    asymptote, middle, exponent, start = curves.T
    return np.asarray(start + (asymptote - start) * share_of(middle, exponent, power, compute))


def fit_family(power: float, compute: Floats, scores: Floats, errors: Floats) -> tuple[FamilyFit, Floats]:
    """Return the fitted curves of a family, and [N] the residuals of the best in units of the errors."""
    middles = np.geomspace(compute[-1] / 100.0, compute[-1] * 8.0, _MIDPOINTS)
    grid = [each.ravel() for each in np.meshgrid(middles, np.geomspace(*_STEEPNESS, _EXPONENTS), indexing="ij")]
    share_KN = share_of(grid[0][:, None], grid[1][:, None], power, compute)
    rest_KN, weight_N = 1.0 - share_KN, 1.0 / errors**2
    a, b, c = (product @ weight_N for product in (rest_KN**2, rest_KN * share_KN, share_KN**2))
    a = np.maximum(a, 1.0 / _START_SPREAD**2)
    u, v = (part @ (weight_N * scores) for part in (rest_KN, share_KN))
    determinant = np.maximum(a * c - b * b, 1e-12 * a * c + 1e-300)
    start, asymptote = (c * u - b * v) / determinant, (a * v - b * u) / determinant
    start = np.where(asymptote > TOP, (u - b * TOP) / a, start)
    asymptote = np.minimum(asymptote, TOP)
    flat = (u + v) / (a + 2.0 * b + c)
    falls = asymptote < start
    start, asymptote = np.where(falls, flat, start), np.where(falls, flat, asymptote)
    residual_KN = (scores - start[:, None] * rest_KN - asymptote[:, None] * share_KN) / errors
    misfit = np.einsum("kn,kn->k", residual_KN, residual_KN)
    family = FamilyFit(
        power=power,
        middle=grid[0],
        exponent=grid[1],
        start=start,
        asymptote=asymptote,
        slope=-b / a,
        variance=a / determinant,
        log_volume=-0.5 * np.log(determinant),
        misfit=misfit,
    )
    return family, np.asarray(residual_KN[np.argmin(misfit)])


def noise_of(residuals: Floats) -> Noise:
    """Return how scores scatter, from the residuals of the best curve in units of the recorded errors."""
    count = len(residuals)
    free = count - _PARAMETERS
    variance = (float(residuals @ residuals) + _SCATTER_WEIGHT * _SCATTER**2) / (free + _SCATTER_WEIGHT)
    variance = max(variance, _LEAST_SCATTER**2)
    centred = residuals - residuals.mean()
    power = float(centred @ centred)
    correlation = float(centred[1:] @ centred[:-1]) / power if power > count * _GRID**2 else 0.0
    # A curve with four parameters takes up part of the correlation.
    likely = min(0.9, max(_CORRELATION, correlation + 3.0 / count))
    wanders = (correlation + 2.5 / count) * count**0.5 > _WANDERS
    return Noise(variance, correlation, (1.0 + likely) / (1.0 - likely), wanders)


def fit(compute: Floats, scores: Floats, errors: Floats, seed: int = 0) -> Curves:
    """Fit the curves to scores, at least as many as `forecast.LEAST_POINTS`.

    Args:
        compute: [N] compute of each score, rising from 0.
        scores: [N] between 0 and 1.
        errors: [N] recorded standard errors of the scores.
        seed: seed of the draws.
    """
    errors = np.maximum(errors, 1e-4)  # a score of 0 or 1 has an error of 0
    fitted = [fit_family(power, compute, scores, errors) for power in FAMILIES]
    best, residuals = min(fitted, key=lambda pair: pair[0].misfit.min())
    noise = noise_of(residuals)
    variance = noise.variance * noise.drift
    freedom = (len(scores) - _PARAMETERS) / noise.drift + _SCATTER_WEIGHT
    random = np.random.default_rng(seed)
    excess = {grid.power: float(grid.misfit.min() - best.misfit.min()) / variance for grid, _ in fitted}
    return Curves(
        best=next(grid for grid, _ in fitted if grid.power == SCALERL).best,
        draws={
            grid.power: grid.draw(variance, freedom, random)
            for grid, _ in fitted
            if grid.power == SCALERL or excess[grid.power] <= _AS_GOOD
        },
        end=float(compute[-1]),
        noise=float(np.median(errors) * np.sqrt(noise.variance)),
        scatter=noise,
        rival=(FAMILIES[best.power], float(best.best[0])) if excess[SCALERL] > _WORSE else None,
    )
