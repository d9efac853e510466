"""Filters for answers that must not reach math-verify: it would need seconds, or accept a wrong answer."""

import re

from prorl_reward_math.latex import canonical

MAX_PARSED_CHARS = 2000  # longer answers are compared only by their canonical form

_COMMANDS = re.compile(r"\\[A-Za-z]+|[A-Za-z]{3,}")
_NEGATED = re.compile(r"\bnot\b|\\(?:neq?|neg|lnot|not)(?![A-Za-z])")
_UNEVALUATED = re.compile(r"\\(?:sum|prod|int|iint|lim|limsup|liminf)(?![A-Za-z])")
_RELATION = re.compile(r"<|>|\\le|\\ge")
_NAME = re.compile(r"[A-Za-z](?:\([A-Za-z]\))?|\\[a-z]+")
_HUGE = re.compile(
    r"""(?:\^|\*\*)[{(]*[+-]?\d{5,}            # 2^{100000}
      | (?:\^|\*\*)[{(]*\d+(?:\^|\*\*|!)       # 9^{9^9}, 2^{9!}
      | \^\{?\d+\}?(?:\)+\^\{?\d+\}?){2}       # ((9^9)^9)^9
      | \^\{?\d+\}?\)+!                        # (10^{10})!
      | ![)}\]]*! | (?<!\d)\d{5,}!             # (9!)!, 99999!
      | \\sqrt\[\d{5,} | \\binom\{?\d{6,} | \\binom\{[^{}]*\^""",
    re.VERBOSE,
)
_SUM_RAISED = re.compile(
    r"[)}\]](?:\^|\*\*)[{(]?\d{3,}"
)  # math-verify would expand such a power of a sum with variables


def is_huge(text: str) -> bool:
    """Return whether an answer may take long to evaluate: nested powers, a large exponent or a large factorial."""
    text = text.replace(" ", "")
    if _HUGE.search(text):
        return True
    return bool(_SUM_RAISED.search(text) and re.search(r"[A-Za-z]", _COMMANDS.sub("", text)))


def _other_case(truth: str, answer: str) -> bool:
    """Return whether the answer writes a variable of the truth in the other case: `A` for `a`, a different quantity."""
    expected, names = (set(re.findall(r"[A-Za-z]", _COMMANDS.sub(" ", text))) for text in (truth, answer))
    return any(name not in expected and name.swapcase() in expected and name.swapcase() not in names for name in names)


def _unsolved(text: str) -> bool:
    """Return whether an inequality is unsolved (`2x+1 < 3`, not `x < 1`): math-verify may take seconds to solve it."""
    names = [side for side in _RELATION.split(text) if re.search("[A-Za-z]", _COMMANDS.sub("", side))]
    return len(names) > 1 or not all(map(_NAME.fullmatch, names))


def skips_math_verify(truth: str, answer: str) -> bool:
    """Return whether to judge the answer wrong without math-verify, whose verdict would be slow or unreliable."""
    if any(len(text) > MAX_PARSED_CHARS or is_huge(text) for text in (truth, answer)):
        return True
    if any(pattern.search(answer) and not pattern.search(truth) for pattern in (_NEGATED, _UNEVALUATED)):
        return True
    expected, actual = canonical(truth), canonical(answer)
    if _RELATION.search(actual) and not _RELATION.search(expected) and _unsolved(actual):
        return True
    return _other_case(expected, actual)
