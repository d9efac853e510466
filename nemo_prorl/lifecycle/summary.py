"""The numbers that a run is judged by: held-out scores and summary.json."""

import math
from collections.abc import Sequence
from typing import Any

from nemo_prorl.errors import RewardFailure
from nemo_prorl.lifecycle.bottleneck import bottleneck

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


def summary(
    *,
    finished: bool,
    step: int,
    stage: str,
    seed: int,
    validations: dict[int, dict[str, Any]],
    resets: list[dict[str, Any]],
    hashes: dict[str, str],
    tokens: int,
    phase_s: dict[str, float],
    rewards_s: dict[str, float],
    recent: Sequence[dict[str, Any]] = (),
) -> dict[str, Any]:
    """summary.json, as docs/formats.md describes it.  `recent`: the last lines of metrics.jsonl."""
    steps = sorted(validations)
    heldout: dict[str, Any] = {}
    if steps:
        first, last = validations[steps[0]], validations[steps[-1]]
        heldout = {
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
    while_generating = ["rollout", *(_BESIDE if "ahead" in phase_s else [])]
    rollout_s = sum(phase_s.get(phase, 0.0) for phase in while_generating)
    opened, waited = rewards_s["open"], rewards_s["wait"]
    return {
        "finished": finished,
        "step": step,
        "stage": stage,
        "seed": seed,
        "heldout": heldout,
        "weights_sha256": hashes.get("weights_sha256"),
        "reference_sha256": hashes.get("reference_sha256"),
        "resets": resets,
        "time": {
            "tokens_per_s": tokens / rollout_s if rollout_s else None,
            "phase_s": phase_s,
            "reward_hidden_share": 1.0 - waited / opened if opened else None,
            "bottleneck": bottleneck(recent),
        },
    }
