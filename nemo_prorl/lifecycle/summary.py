"""Held-out scores and summary.json: the results of a run."""

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, TypedDict

from nemo_prorl.errors import RewardFailure
from nemo_prorl.files import read_object
from nemo_prorl.lifecycle.bottleneck import bottleneck, number
from nemo_prorl.lifecycle.journal_events import HeldOutScore, HeldOutScores, Reset
from nemo_prorl.lifecycle.retention import step_of
from nemo_prorl.schema import Amount, Constraint, Count, Number, Sha256, Share

_BESIDE = ("logprobs", "advantages", "updates", "ahead")  # phases in which engines generate, one step off


class TaskChange(TypedDict):
    """Mean reward on the held-out prompts of a source at the first and the last validation."""

    before: Share
    after: Share


class HeldOutChange(TaskChange):
    """Mean reward on all held-out prompts at the first and the last validation."""

    before_se: Amount
    """standard error of `before`"""
    after_se: Amount
    """standard error of `after`"""
    prompts: Number
    steps: Annotated[list[Count], Constraint(minItems=2, maxItems=2)]
    """the steps of the first and the last validation"""
    tasks: dict[str, TaskChange]


class NoValidation(TypedDict):
    """Empty: the run has no validation."""


class RunTimes(TypedDict):
    """Speed and times of a run, over all steps."""

    tokens_per_s: float | None
    """generated tokens per second of generation; null: no step has generated"""
    phase_s: dict[str, Amount]
    """seconds by phase, over the whole run"""
    reward_hidden_share: Annotated[float, Constraint(maximum=1)] | None
    """share of the time with open reward requests in which the run also did other work; null: no reward requests"""
    bottleneck: str | None
    """bottleneck of the last ten steps only, as text"""


class RunSummary(TypedDict):
    """Results of a run, written at each validation and at the end."""

    finished: bool
    step: Count
    stage: str
    seed: Count
    heldout: HeldOutChange | NoValidation
    weights_sha256: Sha256 | None
    reference_sha256: Sha256 | None
    resets: list[Reset]
    time: RunTimes


def heldout_scores(names: Sequence[str], groups: Sequence[Any]) -> HeldOutScores:
    """Return the mean scores of judged groups, over all groups and per source; `names` has the source of each group.

    The score of a prompt is the mean score of its responses.  `se` is the standard error of the mean over prompts.

    Raises:
        RewardFailure: a response could not be judged; a validation covers all its prompts or none.
    """
    by_name: dict[str, list[float]] = {}
    for name, group in zip(names, groups, strict=True):
        if not all(group.valid):
            fault = f"validation: prompt {group.prompt_id} of {name} could not be judged"
            raise RewardFailure(f"{fault}: {group.unjudged}")
        by_name.setdefault(name, []).append(sum(group.scores) / len(group.scores))

    def of(values: list[float]) -> HeldOutScore:
        mean = sum(values) / len(values)
        variance = sum((v - mean) ** 2 for v in values) / max(1, len(values) - 1)
        return {"mean": mean, "se": math.sqrt(variance / len(values)), "prompts": len(values)}

    return {
        "all": of([value for values in by_name.values() for value in values]),
        "tasks": {name: of(values) for name, values in by_name.items()},
    }


def standard_errors(scores: Mapping[str, Any] | None) -> dict[str, float]:
    """Return {source: standard error of its mean reward} of a validation; {} for None."""
    return {name: float(score["se"]) for name, score in scores["tasks"].items()} if scores else {}


def summary(
    step: int,
    stage: str,
    seed: int,
    scores: Mapping[int, HeldOutScores],
    resets: Sequence[Reset],
    lines: Sequence[Mapping[str, Any]],
    checkpoint_s: float,
    hashes: Mapping[str, str] | None,
) -> RunSummary:
    """Return summary.json (docs/reference/run_directory.md).

    Args:
        scores: validations by step.
        lines: lines of metrics.jsonl.
        checkpoint_s: seconds that training waited for checkpoints.
        hashes: hashes of the weights; None while the run is not finished.
    """
    return {
        "finished": hashes is not None,
        "step": max(step, *scores, 0),
        "stage": stage,
        "seed": seed,
        "heldout": _heldout(scores),
        "weights_sha256": (hashes or {}).get("weights_sha256"),
        "reference_sha256": (hashes or {}).get("reference_sha256"),
        "resets": list(resets),
        "time": _times(lines, checkpoint_s),
    }


def _heldout(scores: Mapping[int, HeldOutScores]) -> HeldOutChange | NoValidation:
    """Return the first and the last validation side by side."""
    if not scores:
        return {}
    steps = sorted(scores)
    first, last = scores[steps[0]], scores[steps[-1]]
    return {
        "before": first["all"]["mean"],
        "after": last["all"]["mean"],
        "before_se": first["all"]["se"],
        "after_se": last["all"]["se"],
        "prompts": last["all"]["prompts"],
        "steps": [steps[0], steps[-1]],
        "tasks": {
            name: {"before": first["tasks"][name]["mean"], "after": last["tasks"][name]["mean"]}
            for name in last["tasks"]
        },
    }


def _times(lines: Sequence[Mapping[str, Any]], checkpoint_s: float) -> RunTimes:
    phase_s: dict[str, float] = {"checkpoint": checkpoint_s} if checkpoint_s else {}
    for key in {key for line in lines for key in line if key.startswith("time/") and key.count("/") == 1}:
        if key != "time/step":
            phase_s[key.removeprefix("time/")] = _sum(lines, key)
    while_generating = ["rollout", *(_BESIDE if "ahead" in phase_s else [])]
    rollout_s = sum(phase_s.get(phase, 0.0) for phase in while_generating)
    opened, waited = _sum(lines, "time/rollout/reward_open_s"), _sum(lines, "time/rollout/reward_wait_s")
    return {
        "tokens_per_s": _sum(lines, "rollout/generated_tokens") / rollout_s if rollout_s else None,
        "phase_s": dict(sorted(phase_s.items())),
        "reward_hidden_share": 1.0 - waited / opened if opened else None,
        "bottleneck": bottleneck(lines[-10:]),
    }


def _sum(lines: Sequence[Mapping[str, Any]], key: str) -> float:
    return sum(number(line, key) for line in lines)


def validations_of(run_dir: Path, after: int, last: int) -> dict[int, dict[str, float]]:
    """Return the score of each held-out prompt by step, of the steps after `after` up to `last`, oldest first."""
    files = (file for file in sorted((run_dir / "validations").glob("step-*.json")) if after < step_of(file) <= last)
    validations = {step_of(file): read_object(file) or {} for file in files}
    return {step: scores for step, scores in validations.items() if {*map(type, scores.values())} == {float}}
