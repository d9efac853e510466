"""What math-verify must not be asked: answers it would take too long over, or accept though they say something else."""

import re

from prorl_reward_math.forms import elements
from prorl_reward_math.latex import GAP_MARK, canonical, number, split_top

MAX_PARSED_CHARS = 2000  # longer answers are compared by their form only
MAX_DEPTH = 24
MAX_POWER = 10_000

_COMMANDS = re.compile(r"\\[A-Za-z]+|[A-Za-z]{3,}")
_HEDGES = re.compile(
    r"\b(?:or|not|either|neither|maybe|perhaps|possibly|wait|but|and|unless|except)\b|\\(?:ne|neq|lor|vee|neg|lnot|not)(?![A-Za-z])|\u2260"
)
_HEAVY = re.compile(r"\\(?:sum|prod|int|iint|lim|limsup|liminf)(?![A-Za-z])")
_MANY_VALUED = re.compile(r"[<>]|\\(?:le|ge|cup|pm|mathbb)")  # one text for many values: nothing to count
_RELATION = re.compile(r"<|>|\\le|\\ge")
_ALONE = re.compile(r"[A-Za-z](?:\([A-Za-z]\))?|\\[a-z]+")
_FACTORIALS = re.compile(r"!\s*[)}\]]*\s*!|(?<![0-9])[0-9]{5,}!")
_FUNCTION_OF = re.compile(r"([A-Za-z])\([A-Za-z]\)=")
_SUM_RAISED = re.compile(r"[)}\]](?:\^|\*\*)[{(]?[0-9]{3,}")
_POWERS_OF_POWERS = re.compile(r"\^\{?[0-9]+\}?(?:\)+\^\{?[0-9]+\}?){2}")
_BINOMIAL = re.compile(r"\\binom\{?[0-9]{6,}|\\binom\{[^{}]*\^")


def foreign_digits(text: str) -> bool:
    """Whether it holds digits of other scripts, which Python would read as numbers."""
    return not text.isascii() and any(char.isdecimal() and not char.isascii() for char in text)


def other_case(truth: str, answer: str) -> bool:
    """Whether the answer names `a` where the truth names `A` and no `a`: other quantities."""
    named = [set(re.findall(r"[A-Za-z]", _COMMANDS.sub(" ", canonical(text)))) for text in (truth, answer)]
    expected, given = named
    return any(name not in expected and name.swapcase() in expected and name.swapcase() not in given for name in given)


def _exponents(text: str) -> list[str]:
    """What is raised to: the argument of each `^`, and the index of each root."""
    found = re.findall(r"\\sqrt\[([^\]]*)\]", text)
    for caret in re.finditer(r"\^|\*\*", text):
        at = caret.end()
        if text[at : at + 1] not in ("{", "("):
            plain = re.match(r"[+-]?[0-9.]+(?:\^.*)?", text[at:])
            found.append(plain[0] if plain else "")
            continue
        depth, end = 0, at
        while end < len(text):
            depth += {"{": 1, "(": 1, "}": -1, ")": -1}.get(text[end], 0)
            end += 1
            if depth == 0:
                break
        found.append(text[at + 1 : end - 1])
    return found


def is_huge(text: str) -> bool:
    """Whether to compute it could take long: towers of powers, great exponents, factorials of great numbers."""
    text = text.replace(" ", "")
    if re.search(r"[)}\]]!", text) and not re.search(r"[A-Za-z]", _COMMANDS.sub("", text)) and "^" in text:
        return True
    if _FACTORIALS.search(text) or _BINOMIAL.search(text) or _POWERS_OF_POWERS.search(text):
        return True
    if _SUM_RAISED.search(text) and re.search(r"[A-Za-z]", _COMMANDS.sub("", text)):
        return True  # a power of a sum that would be expanded
    for exponent in _exponents(text):
        if "^" in exponent or "!" in exponent:
            small = re.fullmatch(r"\{?([0-9])\^\{?([0-9])\}?\}?", exponent)
            if small is None and re.search(r"[0-9]", exponent) and not re.search(r"[A-Za-z]", exponent):
                return True
            if small and int(small[1]) ** int(small[2]) > MAX_POWER:
                return True
        if any(int(digits) > MAX_POWER for digits in re.findall(r"[0-9]{5,12}", exponent)) or len(exponent) > 200:
            return True
    return False


def _depth(text: str) -> int:
    deepest = depth = 0
    for char in text:
        depth += 1 if char in "({[" else -1 if char in ")}]" else 0
        deepest = max(deepest, depth)
    return deepest


def unsolved(text: str) -> bool:
    """Return whether a canonical inequality has to be solved for its name, which math-verify may take seconds over."""
    names = [side for side in _RELATION.split(text) if re.search("[A-Za-z]", _COMMANDS.sub("", side))]
    return len(names) > 1 or not all(map(_ALONE.fullmatch, names))


def false_chain(answer: str) -> bool:
    """Whether it equates different numbers, as `6 = 5` does."""
    values = [number(canonical(part)) for part in answer.split("=")]
    known = {value for value in values if value is not None}
    return len(known) > 1


def must_not_ask(truth: str, answer: str) -> bool:
    """Whether math-verify's word would count for nothing, or take too long."""
    if max(len(truth), len(answer)) > MAX_PARSED_CHARS or max(_depth(truth), _depth(answer)) > MAX_DEPTH:
        return True
    if is_huge(answer) or is_huge(truth):
        return True
    if any(pattern.search(answer) and not pattern.search(truth) for pattern in (_HEDGES, _HEAVY)):
        return True
    expected, given = canonical(truth), canonical(answer)
    if GAP_MARK in given and GAP_MARK not in expected:
        return True
    if _RELATION.search(given) and not _RELATION.search(expected) and unsolved(given):
        return True
    names = [_FUNCTION_OF.match(text) for text in (expected, given)]
    if names[0] and names[1] and names[0][1] != names[1][1]:
        return True
    if expected[-2:] in ("am", "pm") and given[-2:] in ("am", "pm"):  # times of day
        return True
    left, right = elements(expected), elements(given)
    if left and right:  # compared element by element before; to math-verify [4,2] and (5,3) are the same empty set
        return True
    return false_chain(answer) or other_case(truth, answer) or _other_count(expected, given)


def _other_count(truth: str, answer: str) -> bool:
    """Whether one lists more than the other; a bracketed one counts as what it holds."""
    counts = []
    for text in (truth, answer):
        held = elements(text)
        counts.append(len(held[2]) if held else len(split_top(text)))
    return counts[0] != counts[1] and not _MANY_VALUED.search(truth + answer)
