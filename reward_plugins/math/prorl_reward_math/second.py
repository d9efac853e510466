"""The second verifier of math: math-verify alone, as its authors ship it.  Uses nothing of this package's grader."""

import logging
from typing import Any

from nemo_prorl.rewards.interface import Example, RewardPlugin, RewardRequest, RewardResult, no_answer

_AROUND = 500  # characters before and after the last box that math-verify reads; it takes minutes for deep brackets


class MathSecond(RewardPlugin):
    """Judges a sample of the responses to math tasks once more, by math-verify alone; not meant for training."""

    name = "math_second"
    tasks = ("math_second",)
    time_budget_s = 10.0

    def prepare(self) -> None:
        for name in ("math_verify", "latex2sympy2_extended"):
            logging.getLogger(name).setLevel(logging.CRITICAL)  # no message for each malformed answer
        _accepts("\\frac{1}{2}", "\\boxed{0.5}")  # the first call builds parsers

    def validate_truth(self, truth: dict[str, Any]) -> None:
        answers = truth.get("answer")
        texts = answers if isinstance(answers, list) else [answers]
        if not texts or not all(isinstance(text, str) and text.strip() for text in texts):
            raise ValueError(f"truth.answer is {answers!r}; it must be a string, or a list of which any is accepted")
        if extra := sorted(truth.keys() & {"all_of", "tolerance", "unit"}):
            raise ValueError(f"truth.{extra[0]} must be absent: math-verify has no such rule")

    @classmethod
    def examples(cls) -> tuple[Example, ...]:
        return (
            Example({"answer": "\\frac{3}{7}"}, "Three of seven: \\boxed{3/7}", "Seven of three: \\boxed{7/3}"),
            Example({"answer": ["4", "2^2"]}, "It is \\boxed{4}", "It is \\boxed{-4}"),
        )

    def score(self, request: RewardRequest) -> RewardResult:
        self.validate_truth(request.truth)
        text = request.answer_text
        if text is None:
            return no_answer()
        at = max(text.rfind("\\boxed"), text.rfind("\\fbox"))
        if at < 0:  # math-verify would take any number of the text
            return RewardResult(score=0.0, correct=False, detail="no answer in \\boxed{}")
        answers, near = request.truth["answer"], text[max(0, at - _AROUND) : at + _AROUND]
        accepted = any(_accepts(expected, near) for expected in ([answers] if isinstance(answers, str) else answers))
        return RewardResult(score=float(accepted), correct=accepted, detail="math-verify")


def _accepts(truth: str, response: str) -> bool:
    """Return whether math-verify accepts the response; without time limits of its own: the worker pool has one."""
    from math_verify import parse, verify

    gold = parse(truth if "\\boxed" in truth else f"\\boxed{{{truth}}}", parsing_timeout=None)
    try:
        return bool(verify(gold, parse(response, parsing_timeout=None), timeout_seconds=None))
    except (MemoryError, RecursionError):
        return False
