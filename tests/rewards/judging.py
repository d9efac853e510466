"""What a plugin says of one response."""

from typing import Any

from nemo_prorl.rewards.interface import RewardPlugin, RewardRequest, RewardResult


def judged(plugin: RewardPlugin, truth: Any, response: str, prompt: str = "?") -> RewardResult:
    truth = truth if isinstance(truth, dict) else {"answer": truth}
    return plugin.score(RewardRequest("x", plugin.tasks[0], prompt, truth, response))


def score(plugin: RewardPlugin, truth: Any, answer: str) -> float:
    return judged(plugin, truth, f"so it is \\boxed{{{answer}}}.").score
