"""Comparison of an answer with the expected one: by form and exact value in microseconds, otherwise by math-verify.

An answer is right if DeepScaleR's grader or math-verify accepts it (paper sec. 2).  This package has its own
implementation of DeepScaleR's grader.
"""

import functools
import logging
import re
from fractions import Fraction
from typing import Any

from prorl_reward_math.doubts import MAX_PARSED_CHARS, is_huge, skips_math_verify
from prorl_reward_math.forms import Same, choice_verdict, listed, matched, same_elements
from prorl_reward_math.latex import CURRENCIES, canonical, clean, number, split_top
from prorl_reward_math.units import power_of_ten, same_unit, split_unit

_NAMED = re.compile(
    r"([A-Za-z]\w?(?:_\{?\w+\}?)?|\\[a-z]+|[A-Za-z]\([A-Za-z]\)|\([A-Za-z](?:,\s*[A-Za-z])+\))\s*(?:=|\\in(?![A-Za-z]))(.+)"
)

_TUPLE = re.compile(r"\(\s*([A-Za-z](?:\s*,\s*[A-Za-z])+)\s*\)\s*=\s*\((.*)\)")
_SUM = re.compile(r"(?:[\d\s+*/^().{}=-]|\\(?:[dt]?frac|sqrt|cdot|times)(?![A-Za-z]))+")


def _bare(name: str) -> str:
    """Return `x` for the name `x_1` or `x_{max}`."""
    return re.sub(r"_\{?\w+\}?$", "", name)


def same_answer(truth: str, answer: str, tolerance: float | None = None, unit: str = "") -> bool:
    """Return whether `answer` equals `truth`.

    Args:
        tolerance: accepted relative error of a number; None for 0.
        unit: unit of the truth; empty: the unit in the text of `truth`, if any.
    """
    truth, answer = clean(truth), clean(answer)
    if truth == answer:
        return True
    if (chosen := choice_verdict(truth, answer)) is not None:
        return chosen
    if len(answer) > MAX_PARSED_CHARS:
        return canonical(truth) == canonical(answer)
    if "=" in truth and "=" in answer:
        truth, answer = _named_apart(truth), _named_apart(answer)
    truth, answer = _without_name(truth, answer)

    def same(expected: str, actual: str) -> bool:
        return same_answer(expected, actual, tolerance, unit)

    verdict = same_elements(truth, answer, same)
    return _same_value(_last_side(truth, answer), answer, tolerance, unit) if verdict is None else verdict


def _without_name(truth: str, answer: str) -> tuple[str, str]:
    """Drop a name that only one side has: `x=5` and `5` are the same answer, `x=5` and `y=5` are not.  `x_1` is `x`."""
    left, right = _NAMED.fullmatch(truth), _NAMED.fullmatch(answer)
    if left and "=" not in answer:
        return left[2].strip(), answer
    if right and "=" not in truth:
        return truth, right[2].strip()
    if left and right and left[1] != right[1] and (_bare(left[1]) == right[1] or _bare(right[1]) == left[1]):
        return left[2].strip(), right[2].strip()
    return truth, answer


def _last_side(truth: str, answer: str) -> str:
    """Return 7 for the truth `3 + 4 = 7` and an answer without `=`; equations with variables stay."""
    return truth.rpartition("=")[2].strip() if "=" not in answer and _SUM.fullmatch(truth) else truth


def _named_apart(text: str) -> str:
    """Return `x=3, y=2` for `(x, y) = (3, 2)`."""
    match = _TUPLE.fullmatch(text)
    names, values = (split_top(part) for part in match.groups()) if match else ([], [])
    if len(names) < 2 or len(names) != len(values):
        return text
    return ", ".join(f"{name.strip()}={value.strip()}" for name, value in zip(names, values, strict=True))


def _same_value(truth: str, answer: str, tolerance: float | None, unit: str) -> bool:
    """Return whether two answers, as single values, are equal: by unit and exact value, otherwise by math-verify."""
    truth, own = split_unit(truth)
    if not own and not unit and (written := split_unit(answer)[1]):
        # The letter in `3000 m` may be a factor or a unit; `3000\text{ m}` or `3000 meters` says that it is a unit.
        number_only, letters = split_unit(truth, loose=True)
        if letters and same_unit(written, letters):
            truth, own = number_only, letters
    exponent, wanted = power_of_ten(unit)
    wanted = CURRENCIES.get(wanted.strip(), wanted.strip(" $")) or own
    value, answer_unit = split_unit(answer, loose=bool(wanted))
    percent = truth.endswith("%"), value.endswith("%")
    answer_unit = answer_unit or ("%" if percent == (False, True) else "")
    if answer_unit and wanted and not same_unit(answer_unit, wanted):
        return False
    expected, actual = canonical(truth), canonical(value)
    if not actual or (expected == actual and not exponent):
        return bool(actual)
    exact, total = number(expected), number(actual)
    if exact is not None and total is not None:
        scaled = exact * Fraction(10) ** exponent
        accepted = {scaled} if answer_unit else {scaled, exact}  # `3.2` and `3200000 m` for 3.2 of the unit 10^6 m
        if "%" in truth and "%" not in value:
            accepted.add(exact / 100)
        if "%" in value and "%" not in truth:
            accepted.add(exact * 100)
        return any(abs(total - right) <= (tolerance or 0) * abs(right) for right in accepted)
    if tolerance is not None and (near := _value(truth)) is not None and (close := _value(value)) is not None:
        return abs(close - near) <= tolerance * abs(near)
    if any(percent):
        return _same_percentage(expected, actual, *percent)
    return verify_with_math_verify(truth, value)


def _same_percentage(expected: str, actual: str, truth_has: bool, answer_has: bool) -> bool:
    """Compare canonical forms, one of a percentage at least; a number without `%` may be meant in hundredths."""
    pairs = [(expected, actual)]
    if not answer_has:
        pairs.append((f"({expected})/100", actual))
    if not truth_has:
        pairs.append((expected, f"({actual})/100"))
    return any(verify_with_math_verify(*pair) for pair in pairs)


def _value(text: str) -> float | None:
    """Return the number that an answer stands for; None if it is not a number or takes long to evaluate."""
    if (exact := number(canonical(text))) is not None or is_huge(text):
        return None if exact is None else float(exact)
    for parsed in parse_with_math_verify(text):
        try:
            return float(parsed)
        except (TypeError, ValueError, OverflowError, AttributeError):
            continue
    return None


def all_of(truths: list[str], answer: str, same: Same) -> bool:
    """Return whether `answer` lists exactly `truths`, in any order."""
    return matched(truths, listed(answer)[1], same) or (len(truths) == 1 and same(truths[0], answer))


def prepare() -> None:
    """Import math-verify and run it once, because its first call builds parsers."""
    for name in ("math_verify", "latex2sympy2_extended"):
        logging.getLogger(name).setLevel(logging.CRITICAL)  # no message for each malformed answer
    verify_with_math_verify("\\frac{1}{2}", "0.5")


def parse_with_math_verify(text: str) -> list[Any]:
    """Return the expressions that math-verify finds in an answer.  Has no time limit: the worker pool has one."""
    from latex2sympy2_extended import NormalizationConfig
    from math_verify import LatexExtractionConfig, parse

    # The caller has already removed units. math-verify's own removal would also drop a factor c or s.
    latex = LatexExtractionConfig(normalization_config=NormalizationConfig(True, False, True, True, "all", False))
    return list(parse(f"\\boxed{{{text}}}", [latex], parsing_timeout=None))


_parse_truth = functools.lru_cache(maxsize=512)(parse_with_math_verify)  # the answers to a prompt share its truth


def verify_with_math_verify(truth: str, answer: str) -> bool:
    """Return whether math-verify accepts the answer; False if `skips_math_verify` is true or memory runs out."""
    from math_verify import verify

    if skips_math_verify(truth, answer):
        return False
    try:
        sides = _parse_truth(truth), parse_with_math_verify(answer)
        return bool(verify(*sides, timeout_seconds=None, allow_set_relation_comp=True))
    except (MemoryError, RecursionError):
        return False
