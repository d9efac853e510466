"""Canaries: responses with known verdicts, which a run sends to its reward servers beside those of the policy.

A verifier that breaks during a run, for example after an update of a library on one node, corrupts training silently.
So each step sends one canary for each 100 responses, through the same client, servers and workers.  Canaries belong to
no group, so no training reads their verdicts.  Which canaries a step sends depends on the step and the seed only.
A false accept is a score of 1 for a wrong response, a false reject any other score for a right one.  A verdict that the
infrastructure failed to give counts as neither.

The counts of a step are its metrics `canaries/*`.  The alarm follows from these metrics alone, so a resumed run reads
metrics.jsonl and needs no state of its own.  For each task and side the alarm is a CUSUM test of the error rate,
BOUND against ALARM_RATE: an error adds ERROR to a level, a right verdict subtracts 1, the level stays between 0 and
FULL, and the alarm comes when the level reaches FULL.  Exact probabilities (tests/rewards/test_canaries.py computes
them):

    error rate BOUND:       at most 0.0075 for any alarm in 40,000 verdicts, over all tasks and sides together.  This is
                            1,000 steps with the most canaries that a step sends
    error rate ALARM_RATE:  0.9 within 1,280 verdicts of the task and side, however many of them a step has
    error rate 5 %:         0.9 within 160 verdicts
"""

import asyncio
import contextlib
from collections import Counter
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from nemo_prorl.deadlines import Deadline
from nemo_prorl.rewards.discovery import Registry
from nemo_prorl.rewards.interface import FULL_SCORE, Canary, RewardRequest, Verdict

RESPONSES_PER_CANARY = 100
MOST_PER_STEP = 40  # limits the false alarms of a run with very large batches
BOUND = 0.001  # tolerated error rate; a plugin that passes `prorl rewards test` has an error rate of 0
ALARM_RATE = 0.01  # error rate that the alarm is tuned for
ERROR = 250  # log(ALARM_RATE / BOUND) / log((1 - BOUND) / (1 - ALARM_RATE)), rounded
FULL = 1050  # 1,000 would make false alarms at BOUND more frequent than 1 % in 40,000 verdicts
CONFIDENCE = 0.95  # level of the intervals that people see
# Side -> name of its errors.
SIDES = {"right": "false_rejects", "wrong": "false_accepts"}
_GRACE_S = 5.0  # seconds after the deadline; the reward client returns by the deadline, unless it hangs


@dataclass(frozen=True)
class SentCanary:
    """A canary as a request of its task."""

    request: dict[str, Any]
    right: bool


def requests_of(plugin_tasks: Sequence[str], canaries: Sequence[Canary]) -> list[SentCanary]:
    """Return the requests of a plugin's canaries, with unique ids.

    Args:
        plugin_tasks: Tasks of the plugin; a canary without a task belongs to the first one.
    """
    sent = []
    for number, canary in enumerate(canaries):
        task = canary.task or plugin_tasks[0]
        request = RewardRequest(f"canary-{task}-{number + 1}", task, "?", canary.truth, canary.response)
        sent.append(SentCanary(request.to_json(), canary.right))
    return sent


def is_error(right: bool, verdict: Verdict) -> bool | None:
    """Return whether a verdict on a canary is wrong; None if the infrastructure failed."""
    score = verdict["score"]
    return None if score is None else (score >= FULL_SCORE) != right


class CanarySchedule:
    """The canaries of each step, taken in turn from the tasks in use and from the canaries of each task."""

    def __init__(self, registry: Registry, tasks: Iterable[str], responses_per_step: int, seed: int) -> None:
        wanted = sorted(set(tasks))
        plugins = {plugin.name: plugin for plugin in map(registry.plugin_of_task, wanted)}
        every = [canary for plugin in plugins.values() for canary in requests_of(plugin.tasks, plugin.canaries())]
        of_task = ([canary for canary in every if canary.request["task"] == task] for task in wanted)
        self._of_task = [canaries for canaries in of_task if canaries]
        self._hundredths = min(responses_per_step, RESPONSES_PER_CANARY * MOST_PER_STEP)
        self._seed = seed

    def of_step(self, step: int) -> list[SentCanary]:
        """Return the canaries of a step (from 1): one for each 100 responses; with small batches none in some steps."""
        if not self._of_task:
            return []
        first, end = ((number * self._hundredths) // RESPONSES_PER_CANARY for number in (step - 1, step))
        chosen = []
        for turn in range(first + self._seed, end + self._seed):
            number, task = divmod(turn, len(self._of_task))
            chosen.append(self._of_task[task][number % len(self._of_task[task])])
        return chosen


async def ask(
    canary: SentCanary, score: Callable[[dict[str, Any], Deadline], Awaitable[Verdict]], seconds: float
) -> Counter[str]:
    """Send one canary and return its counts, as `CanaryWatch.observe` takes them.

    The counts are empty if there is no verdict within `seconds`.
    """
    task, side = canary.request["task"], "right" if canary.right else "wrong"
    deadline = Deadline(seconds, f"the verdict on {canary.request['id']}")
    error = None
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(seconds + _GRACE_S):
            error = is_error(canary.right, await score(canary.request, deadline))
    return Counter() if error is None else Counter({f"{side}/{task}": 1, f"{SIDES[side]}/{task}": int(error)})


def total(counts: Iterable[Counter[str]]) -> dict[str, int]:
    """Return the sums of several counts; unlike with `+`, a sum of 0 is kept."""
    sums: Counter[str] = Counter()
    for count in counts:
        sums.update(count)
    return dict(sums)


@dataclass
class Tally:
    """The verdicts on a task's right canaries, or on its wrong ones."""

    judged: int = 0
    errors: int = 0
    level: int = 0  # level of the CUSUM test, 0 to FULL
    alarmed: bool = False  # counted since the level was 0

    def add(self, judged: int, errors: int) -> bool:
        """Count verdicts; return whether they raise the alarm.

        Errors are taken before right verdicts, which gives the lowest level.  So false alarms are not more frequent
        than with one verdict at a time.
        """
        self.judged, self.errors = self.judged + judged, self.errors + errors
        self.level = min(FULL, max(0, self.level + ERROR * errors - (judged - errors)))
        raised = self.level >= FULL and not self.alarmed
        self.alarmed = self.level > 0 and (self.alarmed or raised)
        return raised

    def text(self, name: str) -> str:
        """Return the counts with their interval, such as "5 false accepts in 90 canaries (0.018 to 0.125)"."""
        low, high = interval(self.errors, self.judged)
        return f"{self.errors} {name.replace('_', ' ')} in {self.judged} canaries ({low:.3g} to {high:.3g})"


class CanaryWatch:
    """The counts of a run by task and side, and the alarm."""

    def __init__(self) -> None:
        self.tallies: dict[str, Tally] = {}  # tallies by "SIDE/TASK"

    @classmethod
    def replay(cls, lines: Iterable[Mapping[str, Any]]) -> "CanaryWatch":
        """Return the watch after the steps of `lines` (of metrics.jsonl)."""
        watch = cls()
        for line in lines:
            keys = (key for key in line if key.startswith("canaries/"))
            watch.observe({key.removeprefix("canaries/"): int(line[key] or 0) for key in keys})
        return watch

    def observe(self, counts: Mapping[str, int]) -> list[tuple[str, str]]:
        """Count the canaries of a step.

        Args:
            counts: `right/TASK` and `wrong/TASK`: verdicts; `false_rejects/TASK`, `false_accepts/TASK`: errors.

        Returns:
            task and description of each alarm.
        """
        alarms = []
        for key in sorted(counts):
            side, _, task = key.partition("/")
            if side not in SIDES:
                continue
            tally = self.tallies.setdefault(key, Tally())
            if tally.add(counts[key], counts.get(f"{SIDES[side]}/{task}", 0)):
                alarms.append((task, tally.text(SIDES[side])))
        return alarms


def interval(errors: int, judged: int) -> tuple[float, float]:
    """Return the exact (Clopper-Pearson) interval of an error rate, with confidence CONFIDENCE."""
    from scipy.special import betaincinv  # the import is slow

    half = (1.0 - CONFIDENCE) / 2
    low = float(betaincinv(errors, judged - errors + 1, half)) if errors else 0.0
    high = float(betaincinv(errors + 1, judged - errors, 1.0 - half)) if errors < judged else 1.0
    return low, high
