"""The plugin class for `stem`: the grading of `math`, plus multiple choice, chemistry, lists and truth values."""

import re
from typing import Any

from prorl_reward_math import grading
from prorl_reward_math.forms import unstyled
from prorl_reward_math.latex import boxed
from prorl_reward_math.plugin import MathReward, expected_answers

from nemo_prorl.rewards.interface import Canary, Example, RewardRequest, RewardResult, no_answer, one_line
from prorl_reward_stem.chemistry import formula, is_plain_symbol
from prorl_reward_stem.choices import MAX_OPTIONS, chosen, letters, right_letter, without_labels

_TRUTH_VALUES = {"true": True, "yes": True, "correct": True, "false": False, "no": False, "incorrect": False}


def check_options(truth: dict[str, Any]) -> None:
    """Raise ValueError that names the field if a multiple choice is malformed."""
    options = truth["options"]
    if not isinstance(options, list) or not 2 <= len(options) <= MAX_OPTIONS:
        raise ValueError(f"truth.options must be a list of 2 to {MAX_OPTIONS} strings, the texts of the options")
    for option in options:
        if not isinstance(option, str):
            raise ValueError(f"truth.options contains {option!r}; each option must be a string")
    if not isinstance(truth.get("answer"), str):
        raise ValueError(f"truth.answer is {truth.get('answer')!r}; with options it must be a letter")
    right_letter(truth["answer"], options)


def same_list(truth: str, answer: str, same: Any) -> bool | None:
    """Return whether the answer equals a truth that is an ordered list in square brackets (`[4, 2]`).

    The answer may omit the brackets or use `()` or `<>`.

    Returns:
        None if the truth is not such a list.  Also None if the truth has two elements and the answer is in `()` or
        `<>`, because the answer may be an interval.
    """
    if not re.fullmatch(r"\[[^\[\]]*\]", truth.strip()):
        return None
    inner = [part.strip() for part in truth.strip()[1:-1].split(",")]
    text = re.sub(r"\\(?:left|right)(?![A-Za-z])", "", unstyled_list(answer))
    if match := re.fullmatch(r"\[(.*)\]|[(<](.*)[)>]", text, re.DOTALL):
        if match[1] is None and len(inner) == 2:
            return None
        text = match[1] if match[1] is not None else match[2]
    actual = [part.strip() for part in text.split(",")]
    return len(inner) == len(actual) and all(same(left, right) for left, right in zip(inner, actual, strict=True))


def unstyled_list(answer: str) -> str:
    r"""Return an answer without `$`, with a column or row vector written as a list."""
    text = re.sub(r"(?<!\\)\$", "", answer).strip()
    vector = re.fullmatch(
        r"(?:\\left)?\\begin\{([bp]?)(?:matrix|array)\}(?:\{[lcr]+\})?(.*)\\end\{\1(?:matrix|array)\}", text, re.DOTALL
    )
    if vector:
        parts = [part.strip() for part in re.split(r"\\\\|&", vector[2]) if part.strip()]
        return f"[{', '.join(parts)}]"
    return text


def truth_value(text: str) -> bool | None:
    r"""Return the truth value of `True`, `Yes`, `\text{false}` and the like; None for anything else."""
    return _TRUTH_VALUES.get(unstyled(text).strip(" .").casefold())


_STATED = re.compile(
    r"^\W*(?:the )?(?:final |correct )?answer\W*(?:is\W+)?(\(?[A-Z]\b.*)$", re.IGNORECASE | re.MULTILINE
)


def stated_choice(text: str) -> str | None:
    """Return the choice in the last line of the form `Answer: C`; None without such a line."""
    lines = [line for line in text[-2000:].splitlines() if line.strip()]
    stated = [match[1] for line in lines if (match := _STATED.match(line))]
    return stated[-1].strip(" *.`") if stated else None


class StemReward(MathReward):
    """Binary reward: 1 if the last boxed answer to a science question is right (paper sec. 2).

    The settings are those of the plugin `math`.
    """

    name = "stem"
    tasks = ("stem",)
    second = ""  # math_second does not know the forms of science answers

    def validate_truth(self, truth: dict[str, Any]) -> None:
        super().validate_truth(truth)
        if "options" in truth:
            check_options(truth)

    @classmethod
    def examples(cls) -> tuple[Example, ...]:
        options = {"answer": "B", "options": ["iron", "copper", "zinc"]}
        return (
            Example(
                {"answer": "9.81", "unit": "m/s^2"}, "\\boxed{9.81\\,\\text{m/s}^2}", "\\boxed{9.81\\,\\text{m/s}}"
            ),
            Example(options, "So it is \\boxed{\\text{(B)}}", "So it is \\boxed{zinc}"),
            Example({"answer": "\\ce{H2O}"}, "\\boxed{\\mathrm{H_2O}}", "\\boxed{\\mathrm{H_2O_2}}"),
        )

    @classmethod
    def canaries(cls) -> tuple[Canary, ...]:
        metals: dict[str, Any] = {"answer": "B", "options": ["iron", "copper", "zinc"]}
        speed = {"answer": "3.0", "unit": "m/s"}
        return (
            Canary(metals, "\\boxed{copper}", True),
            Canary(metals, "\\boxed{B or C}", False),
            Canary(speed, "\\boxed{3.0\\ \\mathrm{m\\,s^{-1}}}", True),
            Canary(speed, "\\boxed{3.0\\ \\text{m/s}^2}", False),
            Canary({"answer": "\\ce{CO2}"}, "\\boxed{\\text{CO}_2}", True),
            Canary({"answer": "\\ce{CO2}"}, "\\boxed{\\ce{CO}}", False),
            Canary({"answer": "[4, 2]"}, "\\boxed{4, 2}", True),
            Canary({"answer": "[4, 2]"}, "\\boxed{[2, 4]}", False),
            Canary({"answer": "True"}, "\\boxed{\\text{yes}}", True),
            Canary({"answer": "True"}, "\\boxed{\\text{true or false}}", False),
        )

    def score(self, request: RewardRequest) -> RewardResult:
        self.validate_truth(request.truth)
        if request.answer_text is None:
            return no_answer()
        is_choice = "options" in request.truth
        answer = boxed(request.answer_text)
        if not answer and is_choice and "\\boxed" not in str(request.prompt):
            answer = stated_choice(request.answer_text)
        if not answer:
            return RewardResult(score=0.0, correct=False, detail="no answer in \\boxed{}")
        accepted = self._chooses(request.truth, answer) if is_choice else self._accepts(request.truth, answer)
        detail = f"{'accepted' if accepted else 'not accepted'}: {one_line(answer, 200)}"
        return RewardResult(score=float(accepted), correct=accepted, detail=detail)

    def _chooses(self, truth: dict[str, Any], answer: str) -> bool:
        """Return whether the answer names the right option and no option with a different text."""
        options = truth["options"]
        right = letters(len(options)).index(right_letter(truth["answer"], options))

        def same(option: str, text: str) -> bool:
            return grading.same_answer(option, text)

        texts = without_labels(options)
        named = chosen(answer, options, same)
        return right in named and all(texts[index].strip() == texts[right].strip() for index in named)

    def _accepts(self, truth: dict[str, Any], answer: str) -> bool:
        answers, all_needed = expected_answers(truth)
        tolerance, unit = truth.get("tolerance"), truth.get("unit") or ""

        def same(expected: str, actual: str) -> bool:
            return self._same(expected, actual, tolerance, unit)

        if all_needed:
            return grading.all_of(answers, answer, same)
        return any(same(expected, answer) for expected in answers)

    def _same(self, truth: str, answer: str, tolerance: float | None, unit: str) -> bool:
        value = truth_value(truth)
        if value is not None and len(truth.strip()) > 1:
            return truth_value(answer) == value
        if (verdict := self._by_form(truth, answer)) is not None:
            return verdict
        listed_verdict = same_list(truth, answer, lambda left, right: grading.same_answer(left, right, tolerance, unit))
        if listed_verdict is not None:
            return listed_verdict
        return grading.same_answer(truth, answer, tolerance, unit)

    def _by_form(self, truth: str, answer: str) -> bool | None:
        """Return whether two chemical formulas or two single letters are equal; None for anything else."""
        expected, actual = formula(truth), formula(answer)
        if expected and actual and not (is_plain_symbol(expected) and "\\ce" not in truth):
            return expected == actual
        if re.fullmatch(r"[A-J]", unstyled(truth)) and re.fullmatch(r"[a-j]", unstyled(answer)):
            return unstyled(truth) == unstyled(answer).upper()  # a choice whose options are in the question
        return None
