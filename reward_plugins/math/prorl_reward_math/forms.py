r"""Shapes of an answer: lists (`1 \text{ or } 2`, `\pm 2`), inequalities for intervals, choices, number bases."""

import re
from collections.abc import Callable

from prorl_reward_math.latex import canonical, number, split_top, strip_delimiters

MAX_ELEMENTS = 32
Same = Callable[[str, str], bool]  # (truth, answer)

_BRACKETS = {"(": ")", "[": "]"}
_CONNECTIVE = re.compile(
    r"\\(?:text|mathrm|textrm|mbox)\s*\{\s*,?\s*(?:and|or|,)\s*\}|\b(?:and|or)\b|\\(?:lor|vee|quad)(?![A-Za-z])"
)
_SIGNS = re.compile(r"\\(pm|mp)(?![A-Za-z])")


def elements(text: str) -> tuple[str, str, list[str]] | None:
    r"""Brackets and elements of a tuple, an interval or a set `\{...\}`; None for anything else."""
    if text.startswith("\\{") and text.endswith("\\}"):
        return "\\{", "\\}", split_top(text[2:-2], ",;")
    if text[:1] in _BRACKETS and text[-1:] in (")", "]") and len(text) > 2 and not re.search(r"\\c[ua]p", text):
        parts = split_top(text[1:-1], ",;")
        if len(parts) > 1 and all(part.count("(") == part.count(")") for part in parts):
            return text[0], text[-1], parts
    return None


def matched(truths: list[str], answers: list[str], same: Same) -> bool:
    """Whether each of `truths` equals a different one of `answers`, and none is left over."""
    if len(truths) != len(answers) or len(truths) > MAX_ELEMENTS:
        return False
    left = list(answers)
    for truth in truths:
        found = next((index for index, answer in enumerate(left) if same(truth, answer)), None)
        if found is None:
            return False
        del left[found]
    return True


def both_signs(text: str) -> list[str]:
    r"""`1 \pm 2` as its two values; anything else as it is."""
    if not _SIGNS.search(text):
        return [text]
    upper, lower = {"pm": "+", "mp": "-"}, {"pm": "-", "mp": "+"}
    return [_SIGNS.sub(lambda found, signs=signs: signs[found[1]], text) for signs in (upper, lower)]  # type: ignore[misc]


def listed(text: str) -> list[str]:
    r"""The answers that one text gives: `1, 2`, `$1$ and $2$`, `\{1, 2\}`, `x = \pm 1`; else itself."""
    text = strip_delimiters(text)
    if number(canonical(text)) is not None:
        return [text]
    text = re.sub(r"(?<!\\)\$|\\[()]|\\(?:left|right)(?![A-Za-z])", " ", text).strip()
    if text.startswith("\\{") and text.endswith("\\}") and "\\}" not in text[2:-2]:
        if re.search(r"\\mid|\\vert|[|:]", text):  # a set by its property
            return [text]
        text = text[2:-2]
    text = _CONNECTIVE.sub(" , ", text)
    rows = split_top(text, ";")
    if len(rows) > 1 and all(len(split_top(row)) > 1 for row in rows):  # `p=5, q=2; p=7, q=2` gives two pairs
        return [f"({row.strip()})" for row in rows]
    parts = [part.strip(" .") for part in split_top(text, ",;")]
    parts = [part for part in parts if part.strip(" $\\")]
    return [value for part in parts for value in both_signs(part)] or [text]


def is_prose(text: str) -> bool:
    """Whether words make up the text: commas and `and` do not separate answers there."""
    return len(re.findall(r"(?<![\\A-Za-z])[A-Za-z]{3,}", re.sub(r"\\[A-Za-z]+", " ", text))) >= 3


def same_list(truth: str, answer: str, same: Same) -> bool | None:
    """The verdict where one of both gives several answers; None where neither does, or the lists are in doubt."""
    truths, answers = listed(truth), listed(answer)
    if len(answers) > len(truths):  # one that is given twice counts once
        answers = list({canonical(one): one for one in answers}.values())
    if len(truths) == len(answers) == 1 or is_prose(truth):
        return None
    if len(truths) == len(answers):
        return matched(truths, answers, same) or (None if is_prose(answer) or "\\begin" in truth else False)
    if canonical(truth if len(truths) > 1 else answer).startswith("\\{"):
        return False
    for one, many in ((truths, answers), (answers, truths)):
        held = elements(canonical(one[0])) if len(one) == 1 else None
        if held and held[:2] == ("(", ")") and len(held[2]) == len(many):  # `1, 2` for `(1, 2)`: the order counts
            pairs = zip(held[2], many, strict=True)
            return all(same(left, right) if one is truths else same(right, left) for left, right in pairs)
    return False


_BUILDER = re.compile(r"^\\\{([A-Za-z])(?:\\in\\mathbb\{R\})?(?:\||:)(.+)\\\}$")


def condition(text: str) -> str:
    r"""Return what a canonical set is built by, `x>2` of `\{x|x>2\}`; anything else as it is."""
    found = _BUILDER.match(text)
    return found[2] if found else text


_LABEL = re.compile(r"^[(\[]?\s*([A-Za-z])\s*(?:[)\].:]+\s*(.*))?$", re.DOTALL)
_CHOICE_LEAD = re.compile(
    r"^(?:the\s+)?(?:(?:correct|final|right|best)\s+)*(?:answer|option|choice)(?:\s+is)?\s*:?\s*(?:option\s+|choice\s+)?(?=[(\[A-Za-z])",
    re.IGNORECASE,
)
_STYLED = re.compile(
    r"\\(?:text(?:rm|bf|it|sf|tt|normal)?|math(?:rm|bf|it|sf|bb|cal)|operatorname|mbox|hbox|rm|bf|boxed)\s*(?=\{)"
)


def unstyled(text: str) -> str:
    r"""Without `\text{}`, `$`, `**` and spaces that only set it in type."""
    text = _STYLED.sub("", text)
    text = re.sub(r"(?<!\\)[{}$]|\*\*|\\[,;:! ]|\\q?quad(?![A-Za-z])|~|\\[()\[\]]", " ", text)
    return " ".join(text.split())


def choice(text: str) -> tuple[str, str] | None:
    """The letter of `C`, `(C)`, `C.`, `C) text`, `Option C`, and the text behind it; None where there is no letter."""
    text = _CHOICE_LEAD.sub("", unstyled(text))
    found = _LABEL.match(text)
    return (found[1], (found[2] or "").strip()) if found else None


_IN_BASE = re.compile(r"^([+-]?[0-9A-Z]+)_\{?([0-9]{1,2})\}?$")


def base_verdict(truth: str, answer: str) -> bool | None:
    """The verdict on canonical numbers of which one names its base (`204_5`); None for anything else."""
    left, right = _IN_BASE.match(truth), _IN_BASE.match(answer)
    if left and right:
        return left.groups() == right.groups()
    if (left and answer == left[1]) or (right and truth == right[1]):
        return True
    return None
