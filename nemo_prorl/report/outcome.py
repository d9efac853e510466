"""The outcome of a curve for the top of the page: held-out reward at the first and the last validation."""

import math
from typing import Any

from nemo_prorl.launcher.run_results import significance
from nemo_prorl.report.read import Curve, number, part_of


def outcome(curve: Curve) -> dict[str, Any]:
    """Return the held-out scores of the first and the last validation, and whether any step trained.

    Returns:
        `scores`: a row for all prompts together, then a row for each source, with `name`, `before` (score in the first
        validation), `after` (score in the last), their standard errors, and `prompts` (their number); empty before the
        second validation.  `steps`: the steps of the first and the last validation, counted over all stages of a chain.
        `words`: a sentence that says whether the change of the mean score over all prompts is significant.  `note`: a
        sentence if the two validations have different sources.  `updated`: whether any step updated the policy.
    """
    judged = [
        (offset + int(event["step"]), event)
        for run, offset in zip(curve.runs, curve.offsets, strict=True)
        for event in run.counted("validation")
    ]
    updated = any("policy/grad_norm" in line for run in curve.runs for line in run.metrics)
    result: dict[str, Any] = {"scores": [], "steps": [], "words": "", "note": "", "updated": updated}
    if len(judged) < 2:
        return result
    (first_step, first), (last_step, last) = judged[0], judged[-1]
    before, after = part_of(first, "tasks"), part_of(last, "tasks")
    shared = [name for name in after if name in before]
    rows = [_row(name, part_of(before, name), part_of(after, name)) for name in shared]
    if set(before) == set(after):
        rows.insert(0, whole := _row("all", part_of(first, "all"), part_of(last, "all")))
        error = math.hypot(whole["before_se"] or 0.0, whole["after_se"] or 0.0)
        if whole["before"] is not None and whole["after"] is not None:
            sigmas, meaning = significance(whole["after"] - whole["before"], error)
            result["words"] = f"{sigmas:.1f} standard errors: {meaning}."
    else:
        result["note"] = "The first and the last validation have other sources; only the common ones are compared."
    return result | {"scores": rows[:200], "steps": [first_step, last_step]}


def _row(name: str, before: dict[str, Any], after: dict[str, Any]) -> dict[str, Any]:
    return {
        "name": name[:100],
        "before": number(before.get("mean")),
        "after": number(after.get("mean")),
        "before_se": number(before.get("se")),
        "after_se": number(after.get("se")),
        "prompts": number(after.get("prompts")),
    }
