"""Is an answer the expected one?  First by form and exact value, in microseconds; then by math-verify.

The rule is DeepScaleR's grader OR math-verify (paper sec. 2); the first half is written anew from that idea.
"""

import functools
import logging
import re
from collections.abc import Callable
from fractions import Fraction
from typing import Any

from prorl_reward_math.doubts import MAX_PARSED_CHARS, foreign_digits, is_huge, must_not_ask
from prorl_reward_math.forms import (
    MAX_ELEMENTS,
    Same,
    base_verdict,
    choice,
    condition,
    elements,
    listed,
    matched,
    same_list,
    unstyled,
)
from prorl_reward_math.latex import canonical, number, split_unit, strip_delimiters
from prorl_reward_math.units import power_of_ten, ratio, split_value

_PLAIN = re.compile(r"[+-]?(?:\d{1,60}(?:\.\d{0,60})?|\.\d{1,60})", re.ASCII)
_INTEGER = re.compile(r"[+-]?\d{1,60}", re.ASCII)
_ROUNDED = re.compile(r"[+-]?\d{1,60}\.(\d{6,60})", re.ASCII)
_ARITHMETIC = re.compile(r"[\d\s.,+\-*/^()%]+", re.ASCII)
_ASSIGNED = re.compile(
    r"^(?:[A-Za-z]\w?(?:_\{?\w+\}?)?|\\[a-z]+|[A-Za-z]\([A-Za-z]\)|\([A-Za-z](?:,[A-Za-z])+\))(?:=|\\(?:in|approx)(?![A-Za-z]))(.+)$"
)
_ROUGHLY = re.compile(r"[\s$]*(?:\\\$)?[+-]?[\d.,]+\s*(?:\\?%)?\s*(?:\\(?:text|mathrm)\{[^{}]*\})?[\s$.]*", re.ASCII)
_CONSTANT = re.compile(r"\+\s*[CcKk]\s*\$?$")
_CONVERTED = 1e-6  # relative, where a value is converted into another unit


def plain_verdict(truth: str, answer: str) -> bool | None:
    """The verdict where both are plain numbers and there is no doubt; None where more must be looked at."""
    if not (_PLAIN.fullmatch(truth) and _PLAIN.fullmatch(answer)):
        return None
    if Fraction(truth) == Fraction(answer):
        return True
    return False if _INTEGER.fullmatch(truth) and _INTEGER.fullmatch(answer) else None


def _same_canonical(truth: str, answer: str, verify: Same, depth: int = 0) -> bool:
    """Equal canonical strings, equal exact values, or equal tuples, intervals and sets, element by element."""
    if truth == answer:
        return True
    left, right = number(truth), number(answer)
    if left is not None and right is not None:
        return left == right
    expected, given = elements(truth), elements(answer)
    if expected is None or given is None or depth > 2 or expected[:2] != given[:2]:
        return False
    if not len(expected[2]) == len(given[2]) <= MAX_ELEMENTS:
        return False

    def same(one: str, other: str) -> bool:
        sides = _without_name(canonical(one), canonical(other))
        return _same_canonical(*sides, verify, depth + 1) or verify(one, other)

    if expected[0] == "\\{":
        return matched(expected[2], given[2], same)
    return all(map(same, expected[2], given[2]))


def _without_name(truth: str, answer: str) -> tuple[str, str]:
    """`x=5` and `5` are the same answer, `x=5` and `y=5` are not: drops a name that only one side has."""
    left, right = _ASSIGNED.match(truth), _ASSIGNED.match(answer)
    if left and not right and "=" not in answer:
        return canonical(left[1]), answer
    if right and not left and "=" not in truth:
        return truth, canonical(right[1])
    return truth, answer


def _close(truth: str, answer: str, tolerance: float, value: Callable[[str], float | None]) -> bool:
    expected, given = value(truth), value(answer)
    return expected is not None and given is not None and abs(given - expected) <= tolerance * abs(expected)


def _exact_value(text: str) -> float | None:
    exact = number(canonical(text))
    return None if exact is None else float(exact)


def _value(text: str) -> float | None:
    """The number that an answer stands for, as a float; None where it is none."""
    exact = _exact_value(text)
    if exact is not None or is_huge(text):
        return exact
    for parsed in parse_with_math_verify(text):
        try:
            value = float(parsed)
        except (TypeError, ValueError, OverflowError, AttributeError):
            continue
        return value
    return None


def _rounds_to(expected: Fraction, answer: str) -> bool:
    """Whether the answer is the truth rounded or cut to six or more places: `0.333333` for a third."""
    found = _ROUNDED.fullmatch(answer)
    endless = expected.denominator
    for prime in (2, 5):
        while endless % prime == 0:
            endless //= prime
    return found is not None and endless > 1 and abs(Fraction(answer) - expected) < Fraction(1, 10 ** len(found[1]))


def _is_percent(unit: str) -> bool:
    return "%" in unit or "percent" in unit.lower()


def in_unit(truth: str, answer: str, unit: str, tolerance: float | None) -> tuple[str, str] | bool:
    """Truth and answer without their units, or the verdict where the units decide.

    The truth's unit is `unit` or stands behind its number; an answer without one passes, one in another unit of the
    same kind is converted (`500 cm` for `5 m`).
    """
    answer = re.sub(r"(?<!\\)\$", " ", answer).strip() if answer.count("$") > 1 else answer
    if not unit and ("," in answer or ";" in answer) and len(listed(answer)) > 1:
        return truth, answer  # each of a list has its own
    value, given = split_value(answer, attached_letter=bool(unit))
    bare, own = split_value(re.sub(r"(?<!\\)\$", " ", truth).strip(), attached_letter=bool(unit))
    wanted = unit or own
    if unit and not given and (bare_number := _before_same_unit(answer, unit)):
        return truth, bare_number
    exponent = power_of_ten(unit) if unit else 0
    exact = number(canonical(bare if own else truth))
    scaled = None if exact is None else exact * Fraction(10) ** exponent
    if not given or not wanted or (_is_percent(given) and not _is_percent(wanted)):
        total = number(canonical(answer))
        if exponent and scaled and total is not None and abs(total - scaled) <= (tolerance or _CONVERTED) * abs(scaled):
            return True
        if given and not wanted and not _is_percent(given) and not any(mark in value for mark in ",;"):
            return truth, value
        return (bare if own and not unit and not _is_percent(own) else truth), answer
    factor = ratio(wanted, given)
    if factor is None:
        return bare, value
    if factor == 1.0:
        return bare, value
    total = number(canonical(value))
    if factor == 0.0 or exact is None or total is None:
        return False
    return abs(float(total) * factor - float(exact)) <= (tolerance or _CONVERTED) * abs(float(exact))


def _before_same_unit(answer: str, unit: str) -> str | None:
    """The number before the very unit that is asked for, where that is no known one (`4 dB`); else None."""
    words, wanted = unstyled(answer).replace(" ", ""), unstyled(unit).replace(" ", "")
    value = words.removesuffix(wanted) if wanted else words
    return value if value != words and number(canonical(value)) is not None else None


def _names_other_unit(unit: str, answer: str) -> bool:
    """Whether the answer names another unit, where both are plain words that are no known units (`photons`)."""
    _, given = split_unit(strip_delimiters(answer))
    return given.isalpha() and unit.isalpha() and given != unit and ratio(unit, given) is None


def _choice_verdict(truth: str, answer: str) -> bool | None:
    r"""The verdict where the truth is one letter: `\text{(C)}`, `C`; None for anything else."""
    expected = unstyled(truth)
    marked = re.fullmatch(r"[(\[]([A-Za-z])[)\]]", expected)
    if not marked and not re.fullmatch("[A-Z]", expected):
        return None
    found, letter = choice(answer), expected.strip("()[]")
    if found is None:
        return None
    if found[1] and re.search(r"\b(?:or|and)\b|[(]?\b[A-Z][).]|[A-Z]\b\s*$", found[1]):
        return None
    bare = re.fullmatch(r"[A-Za-z]", unstyled(answer)) is not None
    return found[0] == letter if bare and not marked else found[0].upper() == letter.upper()


def same_answer(
    truth: str, answer: str, tolerance: float | None = None, unit: str = "", math_verify: bool = True
) -> bool:
    """Whether `answer` is `truth`; `tolerance` is relative; `unit` is that of the truth."""
    plain = plain_verdict(truth, answer)
    if plain or (plain is not None and tolerance is None and not power_of_ten(unit)):
        return bool(plain)
    if foreign_digits(answer) and not foreign_digits(truth):
        return False
    if strip_delimiters(truth) == strip_delimiters(answer):
        return True
    chosen = _choice_verdict(truth, answer)
    if chosen is not None:
        return chosen
    if len(answer) > MAX_PARSED_CHARS:
        return canonical(truth) == canonical(answer)
    if unit and _names_other_unit(unit, answer):
        return False
    measured = in_unit(truth, answer, unit, tolerance)
    if isinstance(measured, bool):
        return measured
    return _same_value(*measured, tolerance, math_verify)


def _same_value(truth: str, answer: str, tolerance: float | None, math_verify: bool) -> bool:
    """`same_answer` behind the units."""
    truth, answer = _with_one_constant(_before_approximation(truth), _before_approximation(answer))
    expected, given = canonical(truth), canonical(answer)
    if not given:
        return False
    if expected == given:
        return True
    if (verdict := base_verdict(expected, given)) is not None:
        return verdict
    verify = verify_with_math_verify if math_verify else _never
    if _same_canonical(*_without_name(expected, given), verify):
        return True
    if built := [side for side in (expected, given) if condition(side) != side]:
        return (len(built) == 2 and condition(expected) == condition(given)) or verify(
            condition(expected), condition(given)
        )
    exact, total = number(expected), number(given)
    if tolerance is not None and _close(truth, answer, tolerance, _value if math_verify else _exact_value):
        return True
    if exact is not None and total is not None:
        return _rounds_to(exact, given) or _percent_of(exact, total, truth, answer)

    def same(one: str, other: str) -> bool:
        return same_answer(one, other, tolerance, "", math_verify)

    verdict = same_list(truth, answer, same)
    return verify(truth, answer) if verdict is None else verdict


def _percent_of(exact: Fraction, total: Fraction, truth: str, answer: str) -> bool:
    """`0.5` for `50%` and the other way round."""
    if "%" in truth and "%" not in answer:
        return exact == total * 100
    return "%" in answer and "%" not in truth and total == exact * 100


def _before_approximation(answer: str) -> str:
    r"""`\frac{3}{7}` of `\frac{3}{7} \approx 0.43`."""
    exact, sign, rounded = answer.partition("\\approx")
    exact = exact.strip(" $")
    return exact if sign and len(exact) > 1 and _ROUGHLY.fullmatch(rounded) else answer


def _with_one_constant(truth: str, answer: str) -> tuple[str, str]:
    """A constant of integration may be called C, c, K or k."""
    if _CONSTANT.search(truth) and _CONSTANT.search(answer):
        return _CONSTANT.sub("+C", truth), _CONSTANT.sub("+C", answer)
    return truth, answer


def _never(truth: str, answer: str) -> bool:
    return False


def all_of(truths: list[str], answer: str, same: Same) -> bool:
    """Whether `answer` lists exactly `truths`, in any order, separated by commas, semicolons, `and` or `or`."""
    return matched(truths, listed(answer), same) or (len(truths) == 1 and same(truths[0], answer))


def prepare() -> None:
    """Imports math-verify and runs it once: its first call builds parsers."""
    for name in ("math_verify", "latex2sympy2_extended"):
        logging.getLogger(name).setLevel(logging.CRITICAL)  # a malformed answer is no news
    verify_with_math_verify("\\frac{1}{2}", "0.5")


def parse_with_math_verify(text: str) -> list[Any]:
    """Math-verify's reading of one boxed answer; empty where it finds none.  No time limit: the pool holds one."""
    from latex2sympy2_extended import NormalizationConfig
    from math_verify import ExprExtractionConfig, LatexExtractionConfig, parse

    text = _for_math_verify(text)
    # Units are dealt with before: math-verify would drop a factor c or s as well.
    latex = LatexExtractionConfig(normalization_config=NormalizationConfig(True, False, True, True, "all", False))
    configs = [latex, ExprExtractionConfig()] if _ARITHMETIC.fullmatch(text) else [latex]
    return list(parse(f"\\boxed{{{text}}}", configs, parsing_timeout=None))


_FUNCTIONS = re.compile(r"(?<![\\A-Za-z])(arcsin|arccos|arctan|sin|cos|tan|cot|sec|csc|log|ln|exp)(?=\s*\()")


def _for_math_verify(text: str) -> str:
    """The answer as math-verify reads it best: no inner `$`, functions as commands, `i` apart from its factor."""
    text = strip_delimiters(text).replace("np.", "")
    text = re.sub(r"(?<!\\)\$|\\checkmark", " ", text).strip()
    text = re.sub(r"\\(sin|cos|tan)\s*\^\s*\{\s*-1\s*\}", r"\\arc\1 ", text)
    text = re.sub(r"(?<![A-Za-z\\])sqrt\(([^()]*)\)", r"\\sqrt{\1}", _FUNCTIONS.sub(r"\\\1", text))
    return re.sub(r"(?<![A-Za-z\\{])i(?![A-Za-z])", " i ", text)


_parse_truth = functools.lru_cache(maxsize=512)(parse_with_math_verify)  # one prompt's answers come together


def verify_with_math_verify(truth: str, answer: str) -> bool:
    """Math-verify's verdict; what it cannot read is not equal."""
    from math_verify import verify

    if must_not_ask(truth, answer):
        return False
    try:
        sides = _parse_truth(truth), parse_with_math_verify(answer)
        return bool(verify(*sides, timeout_seconds=None, allow_set_relation_comp=True))
    except (MemoryError, RecursionError):
        return False
