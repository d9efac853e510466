"""Rules for when a hard reset is due and what a person should look at: pure functions of recorded metrics.

The paper resets when validation gets worse or stops improving (sec. 4.2), and shows a sharp drop of one benchmark and
a plateau with a spike of KL (sec. 5.3; why: sec. 3.3.1).  It gives no numbers: rules and numbers are ours.  The paper
also watches entropy, length and missing eos (sec. 4.2); the rules on these only advise, unless `asks` names them.

A rule is a function, registered by its name, with the arguments (history, rules): the metrics so far, and the section
`trainer.resets.rules`.  It yields a finding for each fault that it sees after the history's last step, and has no state
of its own.  `asks` names the rules that may ask for a reset, also rules of the user (docs/howto/own_loss.md).

The history grows by one line of metrics.jsonl at a time.  A reset discards all earlier measurements.  For
`cooldown_steps` after the start of a run and after each reset, no rule asks for a reset.  After a finding, the rule
makes no finding on the same metric for `cooldown_steps` (the plateau rule: for `plateau_steps`; rules that only advise:
until the run, or the time since its last reset, is twice as long); other rules are not affected.

Noise.  A plateau's is that of the residuals about a line.  For drops and KL, the standard deviation of one measurement
is its recorded standard error, or it is estimated as the standard deviation of successive differences over sqrt(2), in
which a slow trend cancels.  A threshold of k standard deviations
becomes `t_quantile(k, dof)` if the standard deviation is estimated.  If both are known, the smaller threshold applies.
"""

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from statistics import median
from typing import Any

from nemo_prorl.algorithms.registry import NamedFunctions
from nemo_prorl.config import ADVISING_RULES, RESET_RULES, ResetRulesConfig
from nemo_prorl.errors import ConfigError

KEY = "trainer.resets.rules.asks"
LEAST_DIFFERENCES = 12  # with fewer differences, their scatter is not used
LEAST_BASELINE = 4  # evaluations
SCATTER_POINTS = 100
PLATEAU_BLOCKS = 12  # a plateau is looked for in at least so many means of scores, if there are as many scores
BLOCK_STEPS = 10  # steps per block: length, truncation and entropy are compared as means of blocks


@dataclass(frozen=True)
class Finding:
    """A finding of a rule: at `step`, the number `seen` passed `threshold`.

    `asks`: the rule asks for a hard reset; otherwise it only advises a person.
    """

    rule: str
    step: int
    subject: str  # a validation name, or the metric's key
    seen: float
    threshold: float
    asks: bool
    what: str  # the finding as a sentence for a person

    def __str__(self) -> str:
        return f"{self.rule}: {self.what}"


@dataclass
class History:
    """The metrics of a run that the rules need, and the findings that they have reported.

    All metrics are kept since the last reset; those of rules that advise also as means over blocks of 10 steps since
    the run's start.
    """

    step: int = 0
    began: int | None = None  # the step before the first recorded one
    last_reset: int | None = None
    validated: bool = False  # at `step`
    series: dict[str, list[tuple[int, float]]] = field(default_factory=dict)  # (step, value) by metric
    errors: dict[str, dict[int, float]] = field(default_factory=dict)  # standard errors of validations, where recorded
    blocks: dict[str, list[float]] = field(default_factory=dict)  # means of whole blocks
    open_block: dict[str, list[float]] = field(default_factory=dict)  # values of the newest block, even if it is whole
    told: dict[str, int] = field(default_factory=dict)  # rule and subject -> step of the last finding

    def add(self, line: Mapping[str, Any], standard_errors: Mapping[str, float] | None = None) -> None:
        """Add a line of metrics.jsonl, and the standard errors of its validation by name.  Null and nan are skipped."""
        self.step = int(line["step"])
        self.began = self.step - 1 if self.began is None else self.began
        numbers = {k: float(v) for k, v in line.items() if isinstance(v, int | float) and math.isfinite(v)}
        self.validated = any(_is_score(key) for key in numbers)
        for key, value in numbers.items():
            self.series.setdefault(key, []).append((self.step, value))
        for name, value in (standard_errors or {}).items():
            if math.isfinite(value):
                self.errors.setdefault(f"validation/{name}", {})[self.step] = value
        for key in ("rollout/truncated", "rollout/response_tokens", "entropy", "kl"):
            if key in numbers:
                self._to_block(key, numbers[key])

    @property
    def since(self) -> int:
        """Return the step of the last reset, or else the step before the first line."""
        return (self.began or 0) if self.last_reset is None else self.last_reset

    @property
    def scores(self) -> dict[str, list[tuple[int, float]]]:
        """Return `series` of the validations by source, without their mean `validation/all`."""
        return {key: points for key, points in self.series.items() if _is_score(key)}

    def finding(self, subject: str, seen: float, threshold: float, what: str) -> "Finding":
        """Return a finding after the last step, for a rule to yield; the arguments are described in `Finding`."""
        return Finding("", self.step, subject, float(seen), float(threshold), asks=False, what=what)

    def note(self, findings: Iterable[Finding]) -> None:
        """Record findings as reported: `decide` does not repeat them for `cooldown_steps` (or `plateau_steps`)."""
        for finding in findings:
            self.told[f"{finding.rule} {finding.subject}"] = finding.step

    def reset(self, step: int) -> None:
        """Record a hard reset after the updates and the validation of `step`, the last step so far."""
        self.last_reset = step
        self.series.clear()

    def _to_block(self, key: str, value: float) -> None:
        values = self.open_block.setdefault(key, [])
        if len(values) == BLOCK_STEPS:
            values.clear()
        values.append(value)
        if len(values) == BLOCK_STEPS:
            self.blocks.setdefault(key, []).append(sum(values) / BLOCK_STEPS)


Rule = Callable[[History, ResetRulesConfig], Iterable[Finding]]
RULES: NamedFunctions[Rule] = NamedFunctions(KEY)


def _is_score(key: str) -> bool:
    return key.startswith("validation/") and key != "validation/all"


def policy_scores(scores: Mapping[Any, Mapping[str, Any]], resets: Iterable[Mapping[str, Any]]) -> dict[int, float]:
    """Return mean validation scores by step: each step has the score of the weights in its checkpoint.

    If the reset after a step went back to an earlier step, the later step has the earlier step's score.
    """
    by_step = {int(step): float(score["all"]["mean"]) for step, score in scores.items()}
    for reset in resets:
        if (back_to := reset.get("rolled_back_to")) is not None:
            by_step[reset["step"]] = by_step[back_to]
    return by_step


def best_policy(
    scores: Mapping[Any, Mapping[str, Any]], resets: Sequence[Mapping[str, Any]], steps: Iterable[int] | None = None
) -> int | None:
    """Return the step whose weights scored best since the last hard reset; of equal scores, the newest step.

    None if no such step has a score.  `steps`: consider these steps only; None: all.
    """
    by_step = policy_scores(scores, resets)
    if steps is not None:
        by_step = {step: by_step[step] for step in steps if step in by_step}
    since = max((reset["step"] for reset in resets), default=0)
    return max((step for step in by_step if step >= since), key=lambda step: (by_step[step], step), default=None)


def decide(history: History, rules: ResetRulesConfig) -> list[Finding]:
    """Return the findings after the history's last step: drop, plateau, KL, rules of the user, advice.

    Raises ConfigError if a rule of the user fails.
    """
    findings = []
    for name in dict.fromkeys((*RESET_RULES, *rules.asks, *ADVISING_RULES)):
        advises = name in ADVISING_RULES and name not in rules.asks
        if advises or history.step - history.since >= rules.cooldown_steps:
            findings += findings_of(name, history, rules)
    return [finding for finding in findings if not _silent(finding, history, rules)]


def findings_of(name: str, history: History, rules: ResetRulesConfig) -> list[Finding]:
    """Return what one rule finds, whether or not it has just found the same.

    Args:
        name: a registered name, FILE.py:FUNCTION or MODULE:FUNCTION.

    Raises:
        ConfigError: there is no such rule, a rule of the user raised an error, or it yielded anything but findings of
            finite numbers.
    """
    rule = RULES[name]
    try:
        made = rule(history, rules)
        findings = list(made) if isinstance(made, Iterable) else [made]
    except Exception as error:
        if name in RULES.names:  # a failure of our rule is not the user's configuration
            raise
        fix = ". Fix: .get, because a metric may not be measured yet" if isinstance(error, KeyError) else ""
        raise ConfigError(
            f"{KEY}={name}: after step {history.step} it raised {type(error).__name__}: {error}{fix}"
        ) from error
    for finding in findings:
        if not isinstance(finding, Finding) or not math.isfinite(finding.seen + finding.threshold):
            raise ConfigError(
                f"{KEY}={name}: expected `yield history.finding(...)`, of finite numbers; got {finding!r}"
            )
    return [replace(finding, rule=name, asks=name in rules.asks) for finding in findings]


def _silent(finding: Finding, history: History, rules: ResetRulesConfig) -> bool:
    reported = history.told.get(f"{finding.rule} {finding.subject}")
    if reported is None:
        return False
    pause = rules.cooldown_steps
    if finding.rule == "plateau":
        pause = max(pause, rules.plateau_steps)
    elif finding.rule in ADVISING_RULES:  # a lasting state is reported at twice, four times, eight times its first step
        pause = max(pause, reported - history.since)
    return history.step - reported < pause


def replay(
    lines: Iterable[Mapping[str, Any]],
    rules: ResetRulesConfig,
    standard_errors: Mapping[int, Mapping[str, float]] | None = None,
    resets: Iterable[int] = (),
    act: bool = False,
) -> list[Finding]:
    """Return all findings that the rules make over recorded lines of metrics.jsonl.

    `resets`: steps after which the run made a hard reset.  `act`: also assume a reset at each step where a rule asks
    for a reset.
    """
    history, findings, recorded = History(), list[Finding](), set(resets)
    for line in lines:
        history.add(line, (standard_errors or {}).get(int(line["step"])))
        now = decide(history, rules)
        history.note(now)
        findings += now
        if history.step in recorded or (act and any(finding.asks for finding in now)):
            history.reset(history.step)
    return findings


# --- the rules -------------------------------------------------------------------------------------------------------


@RULES.register
def validation_drop(history: History, rules: ResetRulesConfig) -> Iterator[Finding]:
    """Find a validation score far below its best mean (paper sec. 5.3: a sudden degradation on one benchmark).

    best = the highest mean of m = `drop_baseline` successive evaluations since the reset, or fewer if there are fewer.
    seen = best - mean of the last w evaluations; w = `drop_confirm` is tried first, then w = `drop_confirm` + 1.
    It is a drop if seen > max(drop_min, s (k sqrt(1/w + 1/m) + b)), with s the standard deviation of one evaluation and
    k = `drop_sigma`.  b = sqrt(2 ln(windows / m) / m), because by chance alone the highest of `windows` means lies
    about s b above their average.  Each of the last w evaluations must also lie below best by half of this threshold,
    so that a single bad evaluation is not a drop.
    """
    for key, points in sorted(history.scores.items()):
        if points[-1][0] != history.step:
            continue
        for width in (rules.drop_confirm, rules.drop_confirm + 1):
            if finding := _drop(key, points, width, history, rules):
                yield finding
                break


def _drop(
    key: str, points: list[tuple[int, float]], width: int, history: History, rules: ResetRulesConfig
) -> Finding | None:
    before, last = points[:-width], [value for _, value in points[-width:]]
    length = min(rules.drop_baseline, len(before))
    bound = _bound(before, history.errors.get(key, {}), rules.drop_sigma, points[-width:])
    if length < LEAST_BASELINE or bound is None:
        return None
    values = [value for _, value in before]
    windows = len(values) - length + 1
    best = total = sum(values[:length])
    for old, new in zip(values, values[length:], strict=False):
        total += new - old
        best = max(best, total)
    best /= length
    chance = math.sqrt(2.0 * math.log(max(1.0, windows / length)) / length) / rules.drop_sigma
    threshold = max(rules.drop_min, bound * (math.sqrt(1.0 / width + 1.0 / length) + chance))
    seen = best - sum(last) / width
    if not (seen > threshold and all(best - value > threshold / 2 for value in last)):
        return None
    name = key.removeprefix("validation/")
    text = (
        f"{name} fell by {seen:.3g}, from {best:.3g} to {best - seen:.3g} over {width} evaluations (> {threshold:.3g})"
    )
    return history.finding(name, seen, threshold, text)


@RULES.register
def plateau(history: History, rules: ResetRulesConfig) -> Iterator[Finding]:
    """Find a plateau: the mean validation score gains less than `plateau_gain` in `plateau_steps` (paper sec. 4.2).

    The windows are the last `plateau_steps` steps, twice, four times as many and so on, as far as they fit behind the
    last reset: rare or noisy validations need a long one.  The blend is the mean of the validation scores whose names
    were measured in every evaluation of the window.  gain = the slope of the blend's least-squares line times
    `plateau_steps`, and sd its standard deviation (see `_line`).  It is a plateau if gain + k sd < plateau_gain in one
    of the windows, with k = `plateau_sigma`: if noise hides the gain, there is no finding.
    """
    length = rules.plateau_steps
    while history.validated and history.since <= (first := history.step - length):
        window = [[p for p in points if p[0] >= first] for points in history.scores.values()]
        most = max(map(len, window), default=0)
        whole = [points for points in window if len(points) == most]
        if most >= LEAST_BASELINE:
            steps = [step for step, _ in whole[0]]
            blend = [sum(points[i][1] for points in whole) / len(whole) for i in range(most)]
            slope, deviation, dof = _line(steps, blend)
            gain = slope * rules.plateau_steps
            seen = gain + t_quantile(rules.plateau_sigma, dof) * deviation * rules.plateau_steps
            if seen < rules.plateau_gain:
                scores = f"{len(whole)} validation score{'s' if len(whole) > 1 else ''}"
                text = (
                    f"the mean of {scores} changed by {gain:+.3g} in {rules.plateau_steps} steps, at most {seen:+.3g}"
                    f" (< {rules.plateau_gain:g}), by the last {length} steps"
                )
                yield history.finding("blend", seen, rules.plateau_gain, text)
                return
        length *= 2


@RULES.register
def kl_spike(history: History, rules: ResetRulesConfig) -> Iterator[Finding]:
    """Find a KL to the reference far above its earlier level (paper sec. 3.3.1, 5.3: a sudden increase of KL).

    seen = median of the last 3 steps / median of the n <= `kl_steps` steps before them: one odd batch is not a spike.
    It is a spike if seen > max(kl_factor, exp(s k sqrt(pi/2 (1/3 + 1/n)))), with s the scatter of log KL over the n
    steps and k = `kl_sigma`, and if the median of the last 3 steps is at least `kl_min`.
    """
    points = [p for p in history.series.get("kl", [])[-rules.kl_steps - 3 :] if p[1] > 0.0]
    before, last = points[:-3], [value for _, value in points[-3:]]
    if not before or points[-1][0] != history.step:
        return
    high, usual = median(last), median(value for _, value in before)
    bound = _bound([(step, math.log(value)) for step, value in before], {}, rules.kl_sigma)
    if bound is None or high < rules.kl_min:
        return
    spread = bound * math.sqrt(math.pi / 2 * (1 / 3 + 1 / len(before)))
    threshold = max(rules.kl_factor, math.exp(min(spread, 700.0)))
    if not high / usual > threshold:
        return
    text = f"KL rose to {high:.3g}, {high / usual:.3g} times the {usual:.3g} of the {len(before)} steps before"
    text += f" (> {threshold:.3g})"
    yield history.finding("kl", high / usual, threshold, text)


# The rules that only advise compare the last mean over 10 steps with the run's lowest or highest, or with a limit.


def _block(history: History, key: str) -> tuple[float, float, float] | None:
    """Return the last, lowest and highest of the means over blocks of 10 steps; None while the last is not whole."""
    if len(history.open_block.get(key, [])) != BLOCK_STEPS:
        return None
    blocks = history.blocks[key]
    return blocks[-1], min(blocks), max(blocks)


@RULES.register
def truncation(history: History, rules: ResetRulesConfig) -> Iterator[Finding]:
    """Find responses that are cut off more often, by difference to the run's lowest share (paper sec. 4.2, run 3)."""
    if block := _block(history, key := "rollout/truncated"):
        now, low, _ = block
        if now - low > rules.truncation_rise:
            text = f"{now:.1%} of the responses are cut off; it was {low:.1%} (> {rules.truncation_rise:.1%} more)"
            yield history.finding(key, now - low, rules.truncation_rise, text)


@RULES.register
def length(history: History, rules: ResetRulesConfig) -> Iterator[Finding]:
    """Find longer responses, by ratio to the run's shortest (paper sec. 4.2)."""
    if block := _block(history, key := "rollout/response_tokens"):
        now, low, _ = block
        if low and now > rules.length_factor * low:
            text = f"responses have {now:.4g} tokens, {now / low:.3g} times their shortest (> {rules.length_factor:g})"
            yield history.finding(key, now / low, rules.length_factor, text)


@RULES.register
def entropy(history: History, rules: ResetRulesConfig) -> Iterator[Finding]:
    """Find collapsed entropy, by ratio to the run's highest (paper sec. 3.2.1)."""
    if block := _block(history, key := "entropy"):
        now, _, high = block
        if now < rules.entropy_share * high:
            text = f"entropy is {now:.3g}, {now / high:.3g} of its highest (< {rules.entropy_share:g})"
            yield history.finding(key, now / high, rules.entropy_share, text)


@RULES.register
def kl_high(history: History, rules: ResetRulesConfig) -> Iterator[Finding]:
    """Find a large KL to the reference, however steadily it came there."""
    if block := _block(history, "kl"):
        now = block[0]
        if now > rules.kl_high:
            text = f"KL to the reference is {now:.3g} nats per token, the mean of 10 steps (> {rules.kl_high:g})"
            yield history.finding("kl", now, rules.kl_high, text)


# --- noise -----------------------------------------------------------------------------------------------------------


def _bound(
    points: list[tuple[int, float]],
    errors: Mapping[int, float],
    sigmas: float,
    judged: Sequence[tuple[int, float]] = (),
) -> float | None:
    """Return `sigmas` standard deviations of one measurement; None if they cannot be estimated.

    There are two estimates, and the result is the smaller.  The first is the scatter of `points`, if there are enough.
    The second is the root mean square of the standard errors in `errors`, of `points` or of `judged`, whichever is
    larger, because a score of 0 or 1 has a standard error of 0.

    Args:
        points: (step, value) of the earlier measurements.
        errors: standard error by step.
        judged: (step, value) of the measurements that a rule compares with `points`.
    """
    points = points[-SCATTER_POINTS:]
    bounds = []
    differences = [b[1] - a[1] for a, b in pairwise(points)]
    if len(differences) >= LEAST_DIFFERENCES:
        mean = sum(differences) / len(differences)
        scatter = math.sqrt(sum((d - mean) ** 2 for d in differences) / (len(differences) - 1) / 2.0)
        # Successive differences share a measurement, so they have only two thirds as many degrees of freedom.
        bounds.append(t_quantile(sigmas, 2.0 * len(differences) / 3.0) * scatter)
    if points and all(step in errors for step, _ in [*points, *judged]):
        largest = max(sum(errors[step] ** 2 for step, _ in part) / len(part) for part in (points, judged) if part)
        bounds.append(sigmas * math.sqrt(largest))
    return min(bounds, default=None)


def _line(steps: Sequence[int], values: Sequence[float]) -> tuple[float, float, float]:
    """Return the slope of the least-squares line, its standard deviation, and the degrees of freedom of the latter.

    The line is fitted to means over blocks of equal length, `PLATEAU_BLOCKS` to twice as many, or to the values if
    there are fewer.  Their noise is taken from the residuals, so it is that of scores on the same prompts, and of a
    policy that wanders: the residuals' variance is multiplied by (1 + r) / (1 - r), with r their lag-one
    autocorrelation, to which 4 / n is added, because a fitted line takes about as much from it.
    """
    size = max(1, len(values) // PLATEAU_BLOCKS)
    begins = range(len(values) % size, len(values), size)
    x = [sum(steps[i : i + size]) / size for i in begins]
    y = [sum(values[i : i + size]) / size for i in begins]
    n = len(x)
    centre, level = sum(x) / n, sum(y) / n
    spread = sum((a - centre) ** 2 for a in x)
    slope = sum((a - centre) * b for a, b in zip(x, y, strict=True)) / spread
    residuals = [b - level - slope * (a - centre) for a, b in zip(x, y, strict=True)]
    squares = sum(e * e for e in residuals)
    if squares == 0.0:
        return slope, 0.0, math.inf
    r = min(max(sum(a * b for a, b in pairwise(residuals)) / squares + 4.0 / n, 0.0), 0.95)
    inflation = (1.0 + r) / (1.0 - r)
    return slope, math.sqrt(squares / (n - 2) * inflation / spread), max(2.0, (n - 2) / inflation)


def t_quantile(sigmas: float, dof: float) -> float:
    """Return the quantile of Student's distribution with the tail probability of `sigmas` normal standard deviations.

    It is computed by an expansion in 1 / dof, with z = `sigmas`:
    z + (z^3 + z) / (4 dof) + (5 z^5 + 16 z^3 + 3 z) / (96 dof^2) + (3 z^7 + 19 z^5 + 17 z^3 - 15 z) / (384 dof^3)
    (Abramowitz and Stegun 26.7.5).  Below about 5 degrees of freedom it is far too low for z = 4; the error rates in
    benchmarks/results/triggers-2026-11-26.txt are those of the rules with this expansion.
    """
    z = sigmas
    first = (z**3 + z) / 4.0
    second = (5.0 * z**5 + 16.0 * z**3 + 3.0 * z) / 96.0
    third = (3.0 * z**7 + 19.0 * z**5 + 17.0 * z**3 - 15.0 * z) / 384.0
    return z + first / dof + second / dof**2 + third / dof**3
