"""Properties that every rule for hard resets must have; `properties.trial` tries a rule of the user on them.

The rule, alone in `asks`, sees invented metrics: of a run in which nothing changes, and of runs in which all
metrics fall or rise after half of the steps.  Each check returns None, or a sentence that says what went wrong.
"""

import copy
import difflib
import random
from collections.abc import Iterator
from contextlib import suppress
from itertools import chain
from typing import Any

from nemo_prorl.algorithms.reset_rules import Finding, History, findings_of
from nemo_prorl.config import ResetRulesConfig
from nemo_prorl.errors import ConfigError
from nemo_prorl.own_functions import function_at
from nemo_prorl.schema import METRICS

STEPS = 400
_RESUMED = 150  # first step of a process that begins late
FALL, RISE = 0.2, 5.0
# Usual values of metrics; the validations are measured each tenth step.
_METRICS = {
    **{"kl": 0.01, "entropy": 0.6, "reward/all": 0.2, "reward/shaped": 0.2, "keep_rate/all": 0.2, "solved/all": 0.1},
    **{"unsolved/all": 0.2, "rollout/response_tokens": 900.0, "rollout/truncated": 0.1, "rollout/repetition": 0.1},
    **{"policy/grad_norm": 0.2, "policy/max_ratio": 2.0, "policy/clipped_high": 0.01, "policy/clipped_low": 0.01},
}
_VALIDATIONS = {"validation/math": 0.2, "validation/code": 0.15, "validation/all": 0.175}


class _Series(dict[str, Any]):
    """The metrics of a history, which records in `asked` the names that a rule asks for."""

    def __init__(self) -> None:
        super().__init__()
        self.asked: set[str] = set()

    def __contains__(self, key: Any) -> bool:
        self.asked.add(key)
        return super().__contains__(key)

    def __getitem__(self, key: str) -> Any:
        self.asked.add(key)
        return super().__getitem__(key)

    def get(self, key: str, default: Any = None) -> Any:
        self.asked.add(key)
        return super().get(key, default)


def histories(factor: float) -> Iterator[History]:
    """Yield a run's history after each step; it is one object that grows.

    Args:
        factor: what all metrics are multiplied with in the second half of the steps.
    """
    noise, history = random.Random(0), History(series=_Series())
    for step in range(1, STEPS + 1):
        usual = _METRICS | (_VALIDATIONS if step % 10 == 0 else {})
        now = factor if step > STEPS // 2 else 1.0
        line = {key: value * now * noise.uniform(0.97, 1.03) for key, value in usual.items()}
        history.add({"step": step, **line}, {"math": 0.01, "code": 0.01} if step % 10 == 0 else None)
        yield history


def _found(rules: ResetRulesConfig, factor: float, first: int = 1) -> list[Finding]:
    """Return what the rule finds after the steps from `first` on."""
    late = (history for history in histories(factor) if history.step >= first)
    return [finding for history in late for finding in findings_of(rules.asks[0], history, rules)]


def rule_call(rules: ResetRulesConfig) -> str | None:
    """The rule yields findings or nothing after any step, also before the first one and right after a reset.

    It asks for no metric that runs do not have.
    """
    if sentence := _unknown(rules):
        return sentence
    for history in chain([History()], histories(RISE)):
        findings_of(rules.asks[0], history, rules)
    history.reset(STEPS)
    findings_of(rules.asks[0], history, rules)
    return None


def _unknown(rules: ResetRulesConfig) -> str | None:
    asked: set[str] = set()
    with suppress(ConfigError):  # the error comes again in `rule_call`, if all names are right
        for history in histories(RISE):
            asked = history.series.asked  # type: ignore[attr-defined]
            findings_of(rules.asks[0], history, rules)
    names = {f"{prefix}/{name}".lstrip("/") for prefix, every in METRICS.items() for name in every.split()}
    for key in sorted(asked):
        if key not in names and f"{key.rpartition('/')[0]}/TASK" not in names:
            same_name = [name for name in sorted(names) if name.split("/")[-1] == key.split("/")[-1]]
            near = same_name or difflib.get_close_matches(key, sorted(names), 3, 0.5)
            meant = f"did you mean {', '.join(near)}" if near else "docs/reference/metrics.md has all"
            return f"it asks for the metric {key}, which no run writes; {meant}"
    return None


def repeatable(rules: ResetRulesConfig) -> str | None:
    """A process that begins later, with the file imported again, finds the same in its steps, as a resumed run must."""
    for factor in (FALL, RISE):
        whole = [finding for finding in _found(rules, factor) if finding.step >= _RESUMED]
        function_at.cache_clear()
        if whole != _found(rules, factor, _RESUMED):
            return "a resumed run found something else in the same metrics: a rule has no state of its own"
    return None


def read_only(rules: ResetRulesConfig) -> str | None:
    """The rule leaves the history as it is, because other rules read it, too."""
    for history in histories(RISE):
        if history.step % 50 == 0:
            before = copy.deepcopy(history)
            findings_of(rules.asks[0], history, rules)
            if history != before:
                return "it changed the history"
    return None


RULE_CHECKS = (rule_call, repeatable, read_only)


def steady(rules: ResetRulesConfig) -> str | None:
    """In a run in which nothing changes, the rule finds nothing."""
    finds = _found(rules, 1.0)
    return f"it finds something in a run in which nothing changes, first after step {finds[0].step}" if finds else None


def silent(rules: ResetRulesConfig) -> str | None:
    """In a run in which all metrics change, the rule finds something."""
    if any(_found(rules, factor) for factor in (FALL, RISE)):
        return None
    known = ", ".join(_METRICS | _VALIDATIONS)
    return f"it found nothing in runs in which these metrics fall or rise {RISE:g} times: {known}"


RULE_REMARKS = (steady, silent)  # true of some good rules
