"""Dynamic sampling: which groups are trained on, and how many prompts are drawn to find them (paper sec. 3.3).

`rollout.collector` draws prompts as the decisions here say.

Suffixes: G groups, N samples per group.  The decisions use no clock, thread or randomness: the same verdicts in the
same order give the same decisions, to the bit.
"""

import math
from collections import deque
from typing import Any

from torch import Tensor

from nemo_prorl.algorithms.advantages import reward_spread
from nemo_prorl.config import DynamicSamplingConfig


def carries_signal(reward_GN: Tensor, valid_GN: Tensor, tolerance: float) -> Tensor:
    """Return whether a group's valid RAW rewards differ by more than `tolerance`; otherwise all its advantages are 0.

    Args:
        reward_GN: raw (unshaped) rewards, ignored where not valid.
        valid_GN: bool; False where infrastructure failed.
        tolerance: largest difference that counts as rounding, not as a signal.

    Returns:
        bool [G]; False with fewer than 2 valid responses.
    """
    return reward_spread(reward_GN, valid_GN) > tolerance


class KeepRates:
    """The probability that a drawn group is kept, for each task: an exponential moving average with a prior.

    rate = (strength * prior + sum of decay^age * kept) / (strength + sum of decay^age), age counted in decisions of
    the same task; decay 0.98 remembers about 50 decisions.  The prior of 1 is optimistic on purpose: an unknown task is
    not drawn more often than needed, and further groups are drawn once the first ones turn out to be dropped.  A
    pessimistic prior would start with a surplus, which costs generation and goes stale.  Strength and prior are
    positive, so no rate is ever 0.
    """

    prior, strength, decay = 1.0, 1.0, 0.98

    def __init__(self) -> None:
        self._sums: dict[str, tuple[float, float]] = {}  # task -> (discounted kept, discounted decisions)

    def __getitem__(self, task: str) -> float:
        """Return the rate of a task, in (0, 1]; the prior for a task that was never decided."""
        kept, decisions = self._sums.get(task, (0.0, 0.0))
        return (self.strength * self.prior + kept) / (self.strength + decisions)

    def update(self, task: str, signal: bool) -> None:
        """Add one decision.  Call in draw order: the average depends on the order."""
        old_kept, old_decisions = self._sums.get(task, (0.0, 0.0))
        self._sums[task] = (self.decay * old_kept + float(signal), self.decay * old_decisions + 1.0)

    def state_dict(self) -> dict[str, list[float]]:
        return {task: list(sums) for task, sums in sorted(self._sums.items())}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._sums = {task: (float(kept), float(decisions)) for task, (kept, decisions) in state.items()}


class DynamicSampler:
    """Decides, within one step, when another prompt is drawn and which groups make up the batch.

    The caller draws prompts and generates; this object only counts.  A group is drawn (`carry` or `dispatched`), then
    decided, strictly in draw order, until the batch is full or the draws are used up::

        for group in surplus:                       # of the step before, oldest first
            sampler.carry(group.task)
        while not sampler.done:
            while sampler.wants_more():
                sampler.dispatched(draw_and_start().task)
            sampler.decide(signal=wait_for_verdict_of_the_oldest_undecided())

    Every decision depends on the verdicts in draw order alone.  `decide` therefore refuses to continue while
    `wants_more()` is true: otherwise a faster verdict would change which prompts are drawn.

    When the batch is full, groups drawn and not yet decided are the surplus.  They are decided in the next step, after
    `carry`, and change the keep rates only then.  When the draws are used up first, the groups kept so far are the
    batch.

    Args:
        needed: groups of a full batch.
        keep_rate: shared by all steps of a run, updated by `decide`.
        config: `max_draw_factor`: limit of draws in this step per needed group; carried groups count as draws.
            `enabled`: False keeps every usable group (static sampling); keep rates are still measured.
            `margin`: drawing begins when fewer kept groups are expected than needed.  It goes on until the expected
            number of kept groups exceeds the needed number by `margin` standard deviations.  To begin again costs the
            time of a whole response, but a few groups too many cost little: they become surplus.

    Raises:
        RuntimeError: a call out of order.
    """

    def __init__(self, needed: int, keep_rate: KeepRates, config: DynamicSamplingConfig) -> None:
        self.needed, self.max_drawn = needed, math.ceil(needed * config.max_draw_factor)
        self.keep_rate, self._config = keep_rate, config
        self.kept = self.dropped = self.carried = self.started = 0
        self._undecided: deque[str] = deque()
        self._undecided_of: dict[str, int] = {}
        self._filling = True  # True: draw up to the margin; False: wait until fewer are expected than needed

    def carry(self, task: str) -> None:
        """Count a group that the previous step drew but did not use.

        All calls come before those of `dispatched` and `decide`: groups that were drawn earlier are decided first.
        """
        if self.started or self.decided:
            raise RuntimeError(
                "carry() was called after dispatched() or decide(); expected all calls of carry() before them"
            )
        self.carried += 1
        self._append(task)

    def dispatched(self, task: str) -> None:
        """Count a prompt of this task as drawn.  Call it only while `wants_more()` is true."""
        if not self.wants_more():
            raise RuntimeError(f"dispatched({task!r}) was called although wants_more() is false: {self}")
        self.started += 1
        self._append(task)

    def decide(self, signal: bool, usable: bool = True) -> bool:
        """Count the verdict of the oldest undecided group; return whether the group joins the batch.

        `signal` is the result of `carries_signal`.  Static sampling (`enabled` False) also takes a group without a
        signal, if it is `usable`: its responses have rewards to compare.
        """
        if not self._undecided:
            raise RuntimeError(f"decide() was called, but no group is undecided: {self}")
        if self.full:
            raise RuntimeError(f"decide() was called although the batch is full; undecided groups are surplus: {self}")
        if self.wants_more():
            raise RuntimeError(
                "decide() was called while wants_more() is true; expected dispatched() first, so that draws do not"
                f" depend on timing: {self}"
            )
        task = self._undecided.popleft()
        self._undecided_of[task] -= 1
        self.keep_rate.update(task, signal)
        joins = usable and (signal or not self._config.enabled)
        self.kept += joins
        self.dropped += not joins
        self._filling = self.kept + self.expected < self.needed
        return joins

    def wants_more(self) -> bool:
        """Return whether another prompt is to be drawn now."""
        if self.full or self.drawn >= self.max_drawn:
            return False
        in_hand = self.kept + self.expected - (self._config.margin * self.deviation if self._filling else 0.0)
        return not self._undecided or in_hand < self.needed

    @property
    def expected(self) -> float:
        """Return how many of the undecided groups will be kept, by the present keep rates."""
        if not self._config.enabled:
            return float(self.undecided)
        # By task and in sorted order: the sum's rounding must not depend on history.
        return sum(self.keep_rate[task] * count for task, count in sorted(self._undecided_of.items()))

    @property
    def deviation(self) -> float:
        """Return the standard deviation of the number that `expected` estimates, as if the keep rates were exact."""
        if not self._config.enabled:
            return 0.0
        rates = ((self.keep_rate[task], count) for task, count in sorted(self._undecided_of.items()))
        return math.sqrt(sum(rate * (1.0 - rate) * count for rate, count in rates))

    @property
    def drawn(self) -> int:
        """Return the number of groups drawn or carried so far."""
        return self.carried + self.started

    @property
    def decided(self) -> int:
        return self.kept + self.dropped

    @property
    def undecided(self) -> int:
        return len(self._undecided)

    @property
    def full(self) -> bool:
        """Return whether the batch has all the groups that it needs."""
        return self.kept >= self.needed

    @property
    def exhausted(self) -> bool:
        """Return whether all allowed draws are made and decided, and the batch is still short.

        The short batch is then trained on.
        """
        return not self.full and not self._undecided and self.drawn >= self.max_drawn

    @property
    def done(self) -> bool:
        return self.full or self.exhausted

    def __repr__(self) -> str:
        return (
            f"DynamicSampler(needed={self.needed}, kept={self.kept}, dropped={self.dropped}, "
            f"undecided={self.undecided}, drawn={self.drawn} of {self.max_drawn})"
        )

    def _append(self, task: str) -> None:
        self._undecided.append(task)
        self._undecided_of[task] = self._undecided_of.get(task, 0) + 1
