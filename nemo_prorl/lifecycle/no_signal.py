"""The diagnosis of a step in which no group carries a signal: what was wrong, and what to change."""

from nemo_prorl.metrics import Metrics


def diagnosis(metrics: Metrics) -> str:
    """Return what the judged groups of a step have in common, what to change, and where the responses are."""
    facts = (
        f"{metrics['unsolved/all']:.0%} of the groups have only wrong responses,"
        f" {metrics['solved/all']:.0%} only right ones; mean reward {metrics['reward/all']:.2f},"
        f" {metrics['rollout/truncated']:.0%} of the responses are cut off,"
        f" {metrics['rollout/response_tokens']:.0f} tokens per response"
    )
    return f"{facts}. {_cure(metrics)} The responses are in rollouts/step-{metrics.step}.jsonl"


def _cure(metrics: Metrics) -> str:
    if metrics["rollout/truncated"] > 0.5:
        return "Fix: give responses more room (trainer.grpo.max_response_tokens, trainer.grpo.context_tokens)."
    if metrics["solved/all"] > 0.5:
        return "Fix: take harder problems."
    return (
        "Fix: state the answer's form in the prompts, begin with a warm-up (trainer.warmup.steps), or take easier"
        " problems."
    )
