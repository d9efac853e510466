"""The plugin class for `math`: checks the truth, extracts the boxed answer and grades it."""

from dataclasses import dataclass
from typing import Any

from nemo_prorl.rewards.interface import Canary, Example, RewardPlugin, RewardRequest, RewardResult, no_answer, one_line
from prorl_reward_math import grading
from prorl_reward_math.latex import boxed

_LISTS = (list, tuple)


def expected_answers(truth: dict[str, Any]) -> tuple[list[str], bool]:
    """Return the accepted answers, and whether all of them must be given.

    Raises ValueError, with the name of the field, if a field of `truth` is missing or has a wrong value.
    """
    if ("answer" in truth) == ("all_of" in truth):
        raise ValueError("truth must have either 'answer' (a string, or a list of which any is accepted) or 'all_of'")
    key = "answer" if "answer" in truth else "all_of"
    value = [truth[key]] if key == "answer" and not isinstance(truth[key], _LISTS) else truth[key]
    if not isinstance(value, _LISTS) or not value:
        right = "a string or a list of strings" if key == "answer" else "a list of strings"
        raise ValueError(f"truth.{key} is {truth[key]!r}; it must be {right}")
    for item in value:
        if not isinstance(item, str) or not item.strip():
            raise ValueError(f"truth.{key} contains {item!r}; each item must be a non-empty string")
    return [(boxed(item) or item).strip() for item in value], key == "all_of"


class MathReward(RewardPlugin):
    """Binary reward: 1 if the plugin's grader or math-verify accepts the last boxed answer (paper sec. 2)."""

    name = "math"
    tasks = ("math",)
    second = "math_second"

    @dataclass(frozen=True)
    class Config:
        """Settings.  `time_budget_s`: CPU seconds per answer."""

        time_budget_s: float = 6.0

    config: Config

    def prepare(self) -> None:
        grading.prepare()

    def validate_truth(self, truth: dict[str, Any]) -> None:
        expected_answers(truth)
        tolerance, unit = truth.get("tolerance"), truth.get("unit")
        number = isinstance(tolerance, (int, float)) and not isinstance(tolerance, bool)
        if tolerance is not None and not (number and tolerance >= 0):
            raise ValueError(f"truth.tolerance is {tolerance!r}; it must be a number of at least 0 (a relative error)")
        if unit is not None and not isinstance(unit, str):
            raise ValueError(f"truth.unit is {unit!r}; it must be a string")

    @classmethod
    def examples(cls) -> tuple[Example, ...]:
        return (
            Example({"answer": "\\frac{3}{7}"}, "Three of seven: \\boxed{3/7}", "Seven of three: \\boxed{7/3}"),
            Example({"all_of": ["2", "-2"]}, "The roots are \\boxed{2, -2}", "The roots are \\boxed{2, 3}"),
            Example({"answer": "9.8", "tolerance": 0.01, "unit": "m/s^2"}, "\\boxed{9.81}", "\\boxed{1.6}"),
        )

    @classmethod
    def canaries(cls) -> tuple[Canary, ...]:
        right = {
            "0.5": "So half: \\boxed{\\frac12}",
            "\\frac{3}{4}": "$$\\boxed{\\;0.75}$$",
            "1000": "\\boxed{1{,}000}",
            "(x-1)(x+1)": "\\boxed{x^2-1}",
            "2\\sqrt{3}": "<think>or \\boxed{3}?</think>\\boxed{\\sqrt{12}}",
            "[2,\\infty)": "\\boxed{x \\ge 2}",
        }
        wrong = {
            "3.14159": "\\boxed{3.14158}",
            "\\frac{2}{3}": "\\boxed{\\frac{3}{2}}",
            "7": "It is \\boxed{7 \\text{ or } 8}",
            "(0,1]": "\\boxed{[0,1]}",
            "17": "The answer is 17.",
            "x^2-1": "\\boxed{x^2+1}",
        }
        canaries = [Canary({"answer": truth}, response, True) for truth, response in right.items()]
        return (*canaries, *(Canary({"answer": truth}, response, False) for truth, response in wrong.items()))

    def score(self, request: RewardRequest) -> RewardResult:
        self.validate_truth(request.truth)
        if request.answer_text is None:
            return no_answer()
        answer = boxed(request.answer_text)
        if not answer:
            return RewardResult(score=0.0, correct=False, detail="no answer in \\boxed{}")
        accepted = self._accepts(request.truth, answer)
        detail = f"{'accepted' if accepted else 'not accepted'}: {one_line(answer, 200)}"
        return RewardResult(score=float(accepted), correct=accepted, detail=detail)

    def _accepts(self, truth: dict[str, Any], answer: str) -> bool:
        answers, all_needed = expected_answers(truth)
        tolerance, unit = truth.get("tolerance"), truth.get("unit") or ""

        def same(expected: str, actual: str) -> bool:
            return grading.same_answer(expected, actual, tolerance, unit)

        if all_needed:
            return grading.all_of(answers, answer, same)
        return any(same(expected, answer) for expected in answers)
