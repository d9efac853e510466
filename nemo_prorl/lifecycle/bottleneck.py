"""The bottleneck of a step as text, from its line of metrics.jsonl."""

from collections.abc import Mapping, Sequence
from typing import Any

_ABSURD = 1e12  # larger values and nan are not used as seconds
_WELL = 0.15  # if engines are idle for a smaller share of a step, generation is the bottleneck
_TRAINER = {
    "logprobs": "the trainer computes log-probabilities",
    "advantages": "the trainer computes advantages",
    "updates": "the trainer makes its updates",
    "publish": "the weights are published",
}


def bottleneck(steps: Sequence[Mapping[str, Any]]) -> str | None:
    """Return one sentence on the bottleneck of these steps; None if no line has the needed times.

    The time of validations is left out.

    Args:
        steps: lines of metrics.jsonl.
    """
    steps = [m for m in steps if number(m, "time/step") and m.get("time/rollout/idle_s") is not None]
    seconds = sum(number(m, "time/step") - number(m, "time/validate") for m in steps)
    if seconds <= 0.0:
        return None
    idle = sum(_without_engines(m) + number(m, "time/rollout/idle_s") for m in steps) / seconds
    if idle < _WELL:
        return f"engines busy {100 * (1 - idle):.0f} %: generation sets the pace"
    causes = {text: sum(_held_up(m, f"time/{phase}") for m in steps) for phase, text in _TRAINER.items()}
    left = sum(number(m, "time/rollout/tail_responses") for m in steps) / len(steps)
    asked = sum(number(m, "time/rollout/responses") for m in steps) / len(steps)
    causes[f"waiting for the last {left:.0f} of {asked:.0f} responses"] = sum(
        number(m, "time/rollout/tail_s") for m in steps
    )
    causes["waiting for engines that failed"] = sum(number(m, "time/rollout/lost_s") for m in steps)
    causes["waiting for rewards"] = sum(number(m, "time/rollout/reward_wait_s") for m in steps)
    cause, longest = max(causes.items(), key=lambda item: item[1])
    return f"engines idle {100 * idle:.0f} %: {cause} ({100 * longest / seconds:.0f} % of the step)"


def _without_engines(m: Mapping[str, Any]) -> float:
    """Return for how many seconds of a step the engines have no prompts, without the time of validation.

    Usually the engines have no prompts outside of the rollout.  In a run one step off policy, engines generate the next
    batch while the trainer works.  They then have no prompts only during the publication of weights, and from the end
    of the next batch to the end of the trainer's work.
    """
    if "time/ahead" in m:
        return number(m, "time/publish") + number(m, "time/ahead/engines_wait_s")
    return number(m, "time/step") - number(m, "time/validate") - number(m, "time/rollout")


def _held_up(m: Mapping[str, Any], phase: str) -> float:
    """Return for how many seconds of a step the engines waited because of one phase of the trainer.

    Usually this is the length of the phase.  In a run one step off policy, engines generate during all phases of the
    trainer except the publication of weights.  The total time that the engines waited during these phases is divided
    among the phases in proportion to their length.

    Args:
        phase: key of the phase, such as `time/updates`.
    """
    seconds = number(m, phase)
    if "time/ahead" not in m or phase == "time/publish":
        return seconds
    phases_s = sum(number(m, f"time/{name}") for name in _TRAINER if name != "publish")
    own = sum(number(m, f"time/rollout/{name}_s") for name in ("tail", "lost", "reward_wait"))
    waited = number(m, "time/ahead/engines_wait_s") + max(0.0, number(m, "time/rollout/idle_s") - own)
    return waited * seconds / phases_s if phases_s else 0.0


def number(metrics: Mapping[str, Any], key: str) -> float:
    """Return a metric as a float; 0 if it is absent, not a number, not finite, or 1e12 or more."""
    value = metrics.get(key)
    return float(value) if isinstance(value, int | float) and abs(value) < _ABSURD else 0.0
