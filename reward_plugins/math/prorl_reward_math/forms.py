r"""Comparison of answers that are lists (`1 \text{ or } 2`), tuples, intervals, sets or letters of multiple choice."""

import re
from collections.abc import Callable

from prorl_reward_math.latex import STYLE, canonical, clean, number, split_top, wrapped
from prorl_reward_math.units import split_unit

MAX_ELEMENTS = 32
LIST, SET = ",", "\\{"  # kinds whose elements have no order
Same = Callable[[str, str], bool]  # (truth, answer) -> whether they are equal

_MANY_VALUED = re.compile(r"[<>]|\\(?:le|ge|cup|pm|mathbb)")  # one text with many values
_CONNECTIVE = re.compile(rf"{STYLE}\{{\s*,?\s*(?:and|or|,)\s*\}}|\b(?:and|or)\b|\\(?:lor|vee|quad)(?![A-Za-z])")

_AND_AFTER = re.compile(rf"({STYLE}\{{[^{{}}]*[A-Za-z]),?\s+(?:and|or)\s*\}}")  # `12 \text{ boys and }`


def listed(text: str) -> tuple[str, list[str]]:
    r"""Return the kind of an answer and its elements.

    Kinds: LIST for `1, 2` or `1 \text{ and } 2`, SET for `\{1, 2\}`, the brackets of a tuple or an interval
    (`(]` for `(1, 2]`), and "" for a single answer.
    """
    text = clean(text)
    if number(canonical(split_unit(text)[0])) is not None:
        return "", [text]
    is_set = text.startswith("\\{") and wrapped(text)
    plain = _CONNECTIVE.sub(" , ", _AND_AFTER.sub(r"\1} , ", text[2:-2] if is_set else text))
    rows = split_top(plain, ";")
    if len(rows) > 1 and all(len(split_top(row)) > 1 for row in rows):  # `p=5, q=2; p=7, q=2` gives two pairs
        return LIST, [f"({row.strip()})" for row in rows]
    parts = [part.strip() for part in split_top(plain, ",;") if part.strip(" .\\")]
    if len(parts) > 1:
        return SET if is_set else LIST, parts
    if plain[:1] in ("(", "[") and plain[-1:] in (")", "]") and wrapped(plain):
        inner = split_top(plain[1:-1], ",;")
        if len(inner) > 1:
            return plain[0] + plain[-1], inner
    return "", [text]


def matched(truths: list[str], answers: list[str], same: Same) -> bool:
    """Return whether `truths` and `answers` have the same elements in any order; False above MAX_ELEMENTS."""
    if len(truths) != len(answers) or len(truths) > MAX_ELEMENTS:
        return False
    left = list(answers)
    for truth in truths:
        index = next((index for index, answer in enumerate(left) if same(truth, answer)), None)
        if index is None:
            return False
        del left[index]
    return True


def same_elements(truth: str, answer: str, same: Same) -> bool | None:
    """Return whether two lists, sets, tuples or intervals are equal; None if they cannot be compared by elements."""
    (expected, truths), (actual, answers) = listed(truth), listed(answer)
    if not expected or not actual:
        unequal = {expected, actual} & {LIST, SET} and not _MANY_VALUED.search(truth + answer)
        return False if unequal else None
    if expected in (LIST, SET) and actual in (LIST, SET):
        if len(answers) > len(truths):  # an element that is given twice counts once
            answers = list({canonical(element): element for element in answers}.values())
        return matched(truths, answers, same)
    if expected != actual and {expected, actual} != {"()", LIST}:  # `1, 2` is accepted for `(1, 2)`
        return False
    return len(truths) == len(answers) <= MAX_ELEMENTS and all(map(same, truths, answers))


_LABEL = re.compile(r"^[(\[]?\s*([A-Za-z])\s*(?:[)\].:]+\s*(.*))?$", re.DOTALL)
_CHOICE_LEAD = re.compile(
    r"^(?:the\s+)?(?:(?:correct|final|right|best)\s+)*(?:answer|option|choice)(?:\s+is)?\s*:?\s*(?:option\s+|choice\s+)?(?=[(\[A-Za-z])",
    re.IGNORECASE,
)
_STYLED = re.compile(rf"(?:{STYLE}|\\(?:mathbb|mathcal|rm|bf|boxed)\s*)(?=\{{)")


def unstyled(text: str) -> str:
    r"""Remove typesetting from a text: `\text{}`, `$`, `**` and extra spaces."""
    text = _STYLED.sub("", text)
    text = re.sub(r"(?<!\\)[{}$]|\*\*|\\[,;:! ]|\\q?quad(?![A-Za-z])|~|\\[()\[\]]", " ", text)
    return " ".join(text.split())


def choice(text: str) -> tuple[str, str] | None:
    """Return letter and text of a choice: `C`, `(C)`, `Option C`, `C) text`; None if `text` has another form."""
    text = _CHOICE_LEAD.sub("", unstyled(text))
    match = _LABEL.match(text)
    return (match[1], (match[2] or "").strip()) if match else None


def choice_verdict(truth: str, answer: str) -> bool | None:
    r"""Return whether the answer names the truth's letter (`\text{(C)}`, `C`); None unless both name a letter."""
    expected = unstyled(truth)
    marked = re.fullmatch(r"[(\[][A-Za-z][)\]]|[A-Z][)\]]", expected)
    chosen, letter = choice(answer), expected.strip("()[]")
    if chosen is None or not (marked or re.fullmatch("[A-Z]", expected)):
        return None
    if re.search(r"\b(?:or|and)\b|[(]?\b[A-Z][).]|[A-Z]\b\s*$", chosen[1]):  # the text names another letter
        return None
    bare = re.fullmatch(r"[A-Za-z]", unstyled(answer)) is not None
    return chosen[0] == letter if bare and not marked else chosen[0].upper() == letter.upper()
