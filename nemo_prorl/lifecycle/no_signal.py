"""The diagnosis of a step in which no group carries a signal: its cause, and what to change."""

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from nemo_prorl.errors import UNJUDGED
from nemo_prorl.metrics import Metrics

_SPAN = 10  # steps whose mean entropy is compared, the run's first with its last
_COLLAPSED = 0.3  # share of the first entropy, as in `trainer.resets.rules.entropy_share`
_NOISE = 0.8  # share of responses without an end that a model without skill writes


def diagnosis(metrics: Metrics, past: Sequence[Mapping[str, Any]], responses: Sequence[Mapping[str, Any]]) -> str:
    """Return what the judged groups of a step have in common, the cause, its fix, and where the responses are.

    Args:
        past: lines of metrics.jsonl of the steps before.
        responses: lines of rollouts/step-N.jsonl.
    """
    if math.isnan(metrics["reward/all"]):
        unjudged = (line["verdict"] for line in responses if line["verdict"].get("score") is None)
        first = next((f"; the first: {verdict['detail']}" for verdict in unjudged), "")
        return f"no response has a verdict{first}. Cause: the reward failed, not the model. {UNJUDGED}"
    facts = (
        f"{metrics['unsolved/all']:.0%} of the groups have only wrong responses,"
        f" {metrics['solved/all']:.0%} only right ones; mean reward {metrics['reward/all']:.2f},"
        f" {metrics['rollout/truncated']:.0%} of the responses are cut off,"
        f" {metrics['rollout/response_tokens']:.0f} tokens per response"
    )
    there = f" The responses are in rollouts/step-{metrics.step}.jsonl" if responses else ""
    return f"{facts}. {_cause(metrics, past, responses)}{there}"


def _cause(metrics: Metrics, past: Sequence[Mapping[str, Any]], responses: Sequence[Mapping[str, Any]]) -> str:
    cut_off = metrics["rollout/truncated"]
    if metrics["solved/all"] > 0.5:
        return "Cause: the prompts are solved. Fix: take harder problems, or end the run here."
    if collapse := _collapse(past):
        return (
            f"Cause: the policy has collapsed: {collapse}. Fix: begin a run from a checkpoint before that"
            " (chain.start_from=RUN/checkpoints/step-N) with a lower model.optim.lr, or a higher trainer.grpo.kl_coef"
            " or trainer.grpo.temperature."
        )
    if cut_off > _NOISE and not any(line.get("reward/all") for line in past):
        return (
            "Cause: the model hardly ever ends a response, and no response was ever right. Fix: if the texts are noise,"
            " begin with a warm-up (trainer.warmup.steps) or with a trained model; if they are good, give them more"
            " room (trainer.grpo.max_response_tokens, trainer.grpo.context_tokens)."
        )
    if cut_off > 0.5:
        return (
            "Cause: the responses are cut off before their answer. Fix: give them more room"
            " (trainer.grpo.max_response_tokens, trainer.grpo.context_tokens)."
        )
    if detail := _common_detail(responses):
        return (
            f"Cause: most responses have no answer in the form that is asked for; the verdict is {detail!r}. Fix: state"
            " the form in the prompts (data.templates), or begin with a warm-up (trainer.warmup.steps)."
        )
    return (
        "Cause: the problems are too hard for this model. Fix: take easier problems, more samples per prompt"
        " (trainer.grpo.samples_per_prompt), or begin with a warm-up (trainer.warmup.steps)."
    )


def _collapse(past: Sequence[Mapping[str, Any]]) -> str:
    """Return how far the entropy has fallen since the run began, or "" if it has not collapsed."""
    measured = [(line["step"], line["entropy"]) for line in past if line.get("entropy") is not None]
    if len(measured) < 2 * _SPAN:
        return ""
    first, last = (sum(value for _, value in part) / _SPAN for part in (measured[:_SPAN], measured[-_SPAN:]))
    steps = measured[-1][0] - measured[0][0]
    return f"its entropy fell from {first:.2g} to {last:.2g} in {steps} steps" if last < _COLLAPSED * first else ""


def _common_detail(responses: Sequence[Mapping[str, Any]]) -> str:
    """Return the verdict on most responses if it says that the answer is missing; otherwise ""."""
    details = Counter(str(response["verdict"].get("detail") or "") for response in responses)
    detail, count = details.most_common(1)[0] if details else ("", 0)
    return detail if detail.startswith("no ") and 2 * count > len(responses) else ""
