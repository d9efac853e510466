"""Types for judged groups, for counts over the groups of a task, and for the batch of a step.

`rollout.collector` decides which groups are kept.

Suffixes: G groups, N responses of a group.
"""

import math
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field, fields, replace
from typing import Any

from nemo_prorl.algorithms.diagnostics import repetition
from nemo_prorl.rewards.interface import Verdict
from nemo_prorl.rollout.endpoints import Response


@dataclass(frozen=True)
class PromptDraw:
    """A prompt record that was drawn, with its tokens; `visit`: number of earlier draws of the same record."""

    record: dict[str, Any]
    prompt_ids: list[int]
    visit: int


@dataclass(frozen=True)
class Group:
    """The N responses to one prompt, with their verdicts.

    `visit`: number of earlier draws of the same record.  `step`: step in which the prompt was drawn.  `version`:
    version of the weights that generated the responses.  `draw_index`: number of the prompt's draw in the run, from 0.
    """

    prompt_id: str
    task: str
    record: dict[str, Any]
    prompt_ids: list[int]
    visit: int
    responses: list[Response]
    verdicts: list[Verdict]
    step: int
    version: int
    draw_index: int

    @property
    def valid(self) -> list[bool]:
        """Return, for each response, whether it has a reward: False if the infrastructure for rewards failed."""
        return [verdict["score"] is not None for verdict in self.verdicts]

    @property
    def scores(self) -> list[float]:
        """Return the raw reward of each response, in 0..1; 0, without a meaning, if the response has no reward."""
        return [0.0 if verdict["score"] is None else float(verdict["score"]) for verdict in self.verdicts]

    @property
    def unjudged(self) -> str:
        """Return why the first response without a reward has none; empty if all have one."""
        return next((verdict["detail"] for verdict in self.verdicts if verdict["score"] is None), "")

    @property
    def mean_reward(self) -> float:
        """Return the mean raw reward of the valid responses; nan if none is valid."""
        rewards = [score for score, valid in zip(self.scores, self.valid, strict=True) if valid]
        return sum(rewards) / len(rewards) if rewards else math.nan

    @property
    def finished(self) -> list[bool]:
        """Return, for each response, whether it ended with a stop token."""
        return [response.finished for response in self.responses]

    def outcome(self, tolerance: float) -> str:
        """Classify the group by the raw rewards of its valid responses.

        Returns:
            `mixed` if they differ by more than `tolerance`; otherwise `solved` (all 1), `unsolved` (all 0) or `tied`
            (all equal, but neither 0 nor 1); `unjudged` if no response is valid.
        """
        rewards = [score for score, valid in zip(self.scores, self.valid, strict=True) if valid]
        if not rewards:
            return "unjudged"
        low, high = min(rewards), max(rewards)
        if high - low > tolerance:
            return "mixed"
        if low >= 1.0 - tolerance:
            return "solved"
        return "unsolved" if high <= tolerance else "tied"


def draws_of(groups: Iterable[Group]) -> list[int]:
    """Return the draw number of each group; no two groups of a run have the same."""
    return [group.draw_index for group in groups]


@dataclass
class TaskTally:
    """Counts and sums over the groups of one task that were decided (kept or dropped) in a step.

    Sums are over the responses of these groups.  Rewards are raw: before shaping.
    """

    decided: int = 0  # groups
    kept: int = 0  # groups
    solved: int = 0  # groups with this `Group.outcome`; likewise `unsolved` and `tied`
    unsolved: int = 0
    tied: int = 0
    judged: int = 0  # responses with a reward
    masked: int = 0  # responses without a reward, because infrastructure failed
    score_sum: float = 0.0  # sum of the rewards of judged responses
    finished: int = 0  # responses with a stop token
    tokens: int = 0  # sum over responses
    repetition_sum: float = 0.0  # sum of `algorithms.diagnostics.repetition` over all responses

    @classmethod
    def total(cls, tallies: "Iterable[TaskTally]") -> "TaskTally":
        """Return the field-wise sum of several tallies."""
        parts = list(tallies)
        return cls(**{f.name: sum(getattr(part, f.name) for part in parts) for f in fields(cls)})

    @property
    def responses(self) -> int:
        return self.judged + self.masked

    @property
    def mean_score(self) -> float:
        return self.score_sum / self.judged if self.judged else math.nan

    @property
    def keep_rate(self) -> float:
        return self.kept / self.decided if self.decided else math.nan

    def add(self, group: Group, kept: bool, tolerance: float) -> None:
        """Count a decided group.  Rewards that differ by no more than `tolerance` count as equal."""
        outcome = group.outcome(tolerance)
        self.decided += 1
        self.kept += kept
        self.solved += outcome == "solved"
        self.unsolved += outcome == "unsolved"
        self.tied += outcome == "tied"
        self.judged += sum(group.valid)
        self.masked += len(group.valid) - sum(group.valid)
        self.score_sum += sum(group.scores)
        self.finished += sum(group.finished)
        self.tokens += sum(len(response.token_ids) for response in group.responses)
        self.repetition_sum += sum(repetition(response.token_ids) for response in group.responses)


@dataclass
class CollectedBatch:
    """The groups to train on in a step, in draw order, with counts and durations of their collection.

    `version`: version of the weights.  `needed`: number of groups wanted; the batch has fewer groups if the limit of
    draws was reached first.  `engine_s`, `reward_open_s`: seconds with at least one open request to an engine, or to
    the reward server.  `reward_wait_s`: seconds in which the step waited for rewards while no engine request was open.
    """

    step: int
    version: int
    needed: int
    groups: list[Group] = field(default_factory=list)
    tasks: dict[str, TaskTally] = field(default_factory=dict)
    # (prompt id, outcome) of each decided group, in the order of decisions, for data.retire_after.  The outcome is also
    # `solved` if the group's mean reward is at least data.retire_rate.
    outcomes: list[tuple[str, str]] = field(default_factory=list)
    drawn: int = 0  # prompts drawn in this step
    carried: int = 0  # groups taken from the surplus of the previous step
    stale: int = 0  # surplus groups discarded because they were too old
    surplus: int = 0  # groups left for the next step
    generated_tokens: int = 0
    wall_s: float = 0.0  # seconds that the collection took
    load: dict[str, float] = field(default_factory=dict)  # result of `OpenResponses.end`; checkpoints have this name
    kv_cache_peak: float | None = None  # largest share (0 to 1) in use, over all engines; None if no engine reported it
    engine_s: float = 0.0
    reward_open_s: float = 0.0
    reward_wait_s: float = 0.0
    canaries: dict[str, int] = field(default_factory=dict)  # counts of `rewards.canaries` by SIDE/TASK and ERROR/TASK
    second: dict[str, int] = field(default_factory=dict)  # counts of `rewards.second` by judged/TASK, disagreed/TASK
    disagreements: list[dict[str, Any]] = field(default_factory=list)  # the first of them, with texts
    dropped: list[Group] = field(default_factory=list)  # dropped groups among the first `save_rollout_groups`
    unjudged: str = ""  # why the first response without a verdict has none; empty: all of the decided groups have one

    @property
    def full(self) -> bool:
        return len(self.groups) >= self.needed

    def without_tokens(self) -> "CollectedBatch":
        """Return a copy without texts, tokens and verdicts, small enough to send to all ranks."""
        left_out: dict[str, Any] = {"record": {}, "prompt_ids": [], "responses": [], "verdicts": []}
        groups = [replace(group, **left_out) for group in self.groups]
        return replace(self, groups=groups, dropped=[], disagreements=[])

    def to_json(self) -> dict[str, Any]:
        """Return the batch as JSON values, with the draw numbers of its groups in place of the groups."""
        numbers = {"groups": draws_of(self.groups), "dropped": draws_of(self.dropped)}
        return {**asdict(replace(self, groups=[], dropped=[])), **numbers}

    @classmethod
    def from_json(cls, value: dict[str, Any], groups: Mapping[int, Group]) -> "CollectedBatch":
        """Return the batch of a value of `to_json`, with its groups from `groups`, by draw number."""
        parts = {
            "groups": [groups[draw] for draw in value["groups"]],
            "dropped": [groups[draw] for draw in value["dropped"]],
            "tasks": {task: TaskTally(**tally) for task, tally in value["tasks"].items()},
            "outcomes": [(prompt_id, outcome) for prompt_id, outcome in value["outcomes"]],
        }
        return cls(**{**value, **parts})
