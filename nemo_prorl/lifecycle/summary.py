"""The numbers that a run is judged by: held-out scores and summary.json."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

from nemo_prorl.errors import RewardFailure
from nemo_prorl.lifecycle.bottleneck import bottleneck, number

_BESIDE = ("logprobs", "advantages", "updates", "ahead")  # phases in which engines generate, one step off


def heldout_scores(names: Sequence[str], groups: Sequence[Any]) -> dict[str, Any]:
    """{"all": {"mean", "se", "prompts"}, "tasks": {NAME: the same}} of judged groups; `names` says each one's source.

    A prompt's score is the mean over its responses; the standard error is that of the mean over prompts.
    Raises RewardFailure if a response could not be judged: a validation is of all its prompts or none.
    """
    by_name: dict[str, list[float]] = {}
    for name, group in zip(names, groups, strict=True):
        if not all(group.valid):
            raise RewardFailure(f"validation: prompt {group.prompt_id} of {name} could not be judged")
        by_name.setdefault(name, []).append(sum(group.scores) / len(group.scores))

    def of(values: list[float]) -> dict[str, float]:
        mean = sum(values) / len(values)
        variance = sum((v - mean) ** 2 for v in values) / max(1, len(values) - 1)
        return {"mean": mean, "se": math.sqrt(variance / len(values)), "prompts": len(values)}

    return {
        "all": of([value for values in by_name.values() for value in values]),
        "tasks": {name: of(values) for name, values in by_name.items()},
    }


def standard_errors(scores: Mapping[str, Any] | None) -> dict[str, float]:
    """Return the standard errors of a validation as the journal has it, by name."""
    return {name: float(score["se"]) for name, score in scores["tasks"].items()} if scores else {}


def summary(
    step: int,
    stage: str,
    seed: int,
    scores: Mapping[int, dict[str, Any]],
    resets: Sequence[dict[str, Any]],
    lines: Sequence[Mapping[str, Any]],
    checkpoint_s: float,
    hashes: Mapping[str, str] | None,
) -> dict[str, Any]:
    """Return summary.json, as docs/formats.md describes it.

    Args:
        scores: validations by step.
        lines: of metrics.jsonl.
        checkpoint_s: seconds that checkpoints took from the training.
        hashes: of the weights; None while the run is not finished.
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


def _heldout(scores: Mapping[int, dict[str, Any]]) -> dict[str, Any]:
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


def _times(lines: Sequence[Mapping[str, Any]], checkpoint_s: float) -> dict[str, Any]:
    """Return what the steps' seconds and tokens add up to."""
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
