"""Is an answer the expected one?  First by form and exact value, in microseconds; then by math-verify.

The rule is DeepScaleR's grader OR math-verify (paper sec. 2); the first half is written anew from that idea.
"""

import functools
import logging
import re
from collections.abc import Callable
from fractions import Fraction
from typing import Any

from prorl_reward_math.latex import canonical, number, split_top, split_unit, strip_delimiters

MAX_PARSED_CHARS = 2000  # longer answers are compared by their form only
MAX_ELEMENTS = 32
_PLAIN = re.compile(r"[+-]?(?:\d{1,60}(?:\.\d{0,60})?|\.\d{1,60})")
_INTEGER = re.compile(r"[+-]?\d{1,60}")
_ASSIGNED = re.compile(r"^(?:[A-Za-z]\w?(?:_\{?\w+\}?)?|\\[a-z]+|[A-Za-z]\([A-Za-z]\))(?:=|\\in(?![A-Za-z]))(.+)$")
_BRACKETS = {"(": ")", "[": "]"}

Verify = Callable[[str, str], bool]  # (truth, answer)


def plain_verdict(truth: str, answer: str) -> bool | None:
    """The verdict where both are plain numbers and there is no doubt; None where more must be looked at."""
    if not (_PLAIN.fullmatch(truth) and _PLAIN.fullmatch(answer)):
        return None
    if Fraction(truth) == Fraction(answer):
        return True
    return False if _INTEGER.fullmatch(truth) and _INTEGER.fullmatch(answer) else None


def _elements(text: str) -> tuple[str, str, list[str]] | None:
    r"""Brackets and elements of a tuple, an interval or a set `\{...\}`; None for anything else."""
    if text.startswith("\\{") and text.endswith("\\}"):
        return "\\{", "\\}", split_top(text[2:-2])
    if text[:1] in _BRACKETS and text[-1:] in (")", "]") and len(text) > 2:
        inside = text[1:-1]
        parts = split_top(inside)
        if len(parts) > 1 and all(part.count("(") == part.count(")") for part in parts):
            return text[0], text[-1], parts
    return None


def _matched(truths: list[str], answers: list[str], same: Verify) -> bool:
    """Whether each of `truths` equals a different one of `answers`, and none is left over."""
    if len(truths) != len(answers):
        return False
    left = list(answers)
    for truth in truths:
        found = next((index for index, answer in enumerate(left) if same(truth, answer)), None)
        if found is None:
            return False
        del left[found]
    return True


def _same_canonical(truth: str, answer: str, verify: Verify, depth: int = 0) -> bool:
    """Equal canonical strings, equal exact values, or equal tuples, intervals and sets, element by element."""
    if truth == answer:
        return True
    left, right = number(truth), number(answer)
    if left is not None and right is not None:
        return left == right
    expected, given = _elements(truth), _elements(answer)
    if expected is None or given is None or depth > 2 or expected[:2] != given[:2]:
        return False
    if not len(expected[2]) == len(given[2]) <= MAX_ELEMENTS:
        return False

    def same(one: str, other: str) -> bool:
        return _same_canonical(canonical(one), canonical(other), verify, depth + 1) or verify(one, other)

    if expected[0] == "\\{":
        return _matched(expected[2], given[2], same)
    return all(map(same, expected[2], given[2]))


def _without_name(truth: str, answer: str) -> tuple[str, str]:
    """`x=5` and `5` are the same answer, `x=5` and `y=5` are not: drops a name that only one side has."""
    left, right = _ASSIGNED.match(truth), _ASSIGNED.match(answer)
    if left and not right and "=" not in answer:
        return left[1], answer
    if right and not left and "=" not in truth:
        return truth, right[1]
    return truth, answer


def _close(truth: str, answer: str, tolerance: float, value: Callable[[str], float | None]) -> bool:
    expected, given = value(truth), value(answer)
    return expected is not None and given is not None and abs(given - expected) <= tolerance * abs(expected)


def _value(text: str) -> float | None:
    """The number that an answer stands for, as a float; None where it is none."""
    exact = number(canonical(text))
    if exact is not None:
        return float(exact)
    for parsed in parse_with_math_verify(text):
        try:
            value = float(parsed)
        except (TypeError, ValueError, OverflowError, AttributeError):
            continue
        return value
    return None


def _units_differ(unit: str, answer: str) -> bool:
    """Whether the answer names another unit, where both are plain words (`cm` for `m`); other notations pass."""
    _, given = split_unit(strip_delimiters(answer))
    return given.isalpha() and unit.isalpha() and given != unit


def same_answer(
    truth: str, answer: str, tolerance: float | None = None, unit: str = "", math_verify: bool = True
) -> bool:
    """Whether `answer` is `truth`; `tolerance` is relative; `unit` is that of the truth."""
    plain = plain_verdict(truth, answer)
    if plain or (plain is not None and tolerance is None):
        return bool(plain)
    if unit and _units_differ(unit, answer):
        return False
    expected, given = canonical(truth), canonical(answer)
    if not given:
        return False
    verify = verify_with_math_verify if math_verify else _never
    if _same_canonical(*_without_name(expected, given), verify):
        return True
    if len(answer) > MAX_PARSED_CHARS:
        return False
    if tolerance is not None and _close(truth, answer, tolerance, _value):
        return True
    values = number(expected), number(given)
    if all(value is not None and value.denominator == 1 for value in values):
        return False  # two different integers, whatever stood around them
    return verify(truth, answer)


def _never(truth: str, answer: str) -> bool:
    return False


def all_of(truths: list[str], answer: str, same: Verify) -> bool:
    """Whether `answer` lists exactly `truths`, in any order, separated by commas, semicolons, `and` or `or`."""
    text = strip_delimiters(answer)
    bare = canonical(text)
    if (listed := _elements(bare)) and listed[0] == "\\{":
        text = bare[2:-2]
    text = re.sub(r"\\(?:text|mathrm)\s*\{\s*(?:and|or|,)\s*\}|\b(?:and|or)\b|\\(?:lor|vee)(?![A-Za-z])", ",", text)
    parts = [part.strip() for part in split_top(text, ",;") if part.strip(" $\\")]
    return _matched(truths, parts, same) or (len(truths) == 1 and same(truths[0], answer))


def prepare() -> None:
    """Imports math-verify and runs it once: its first call builds parsers."""
    for name in ("math_verify", "latex2sympy2_extended"):
        logging.getLogger(name).setLevel(logging.CRITICAL)  # a malformed answer is no news
    verify_with_math_verify("\\frac{1}{2}", "0.5")


def parse_with_math_verify(text: str) -> list[Any]:
    """Math-verify's reading of one boxed answer; empty where it finds none.  No time limit: the pool holds one."""
    from math_verify import ExprExtractionConfig, LatexExtractionConfig, parse

    configs = [LatexExtractionConfig(), ExprExtractionConfig()]
    return list(parse(f"\\boxed{{{strip_delimiters(text)}}}", configs, parsing_timeout=None))


_parse_truth = functools.lru_cache(maxsize=512)(parse_with_math_verify)  # one prompt's answers come together


def verify_with_math_verify(truth: str, answer: str) -> bool:
    """Math-verify's verdict; what it cannot read is not equal."""
    from math_verify import verify

    if max(len(truth), len(answer)) > MAX_PARSED_CHARS:
        return False
    try:
        return bool(verify(_parse_truth(truth), parse_with_math_verify(answer), timeout_seconds=None))
    except (MemoryError, RecursionError):
        return False
