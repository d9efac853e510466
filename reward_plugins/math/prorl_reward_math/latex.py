"""Extraction of the boxed answer from a text, and the canonical form of answers.  Standard library only."""

import re
from fractions import Fraction

from prorl_reward_math.spelling import spelled

MAX_WRAPPED_CHARS = 2000  # longer answers keep their outer braces: removing each layer costs one pass
MAX_EXPONENT = 400  # largest exponent of scientific notation that is evaluated

_BOX_TOKENS = re.compile(r"\\(?:boxed|fbox)(?![A-Za-z])|\\.|[{}]", re.DOTALL)
_BARE_BOX = re.compile(r"\s*([^\s{}$\\]+)")


def boxes(text: str) -> list[tuple[int, int]]:
    r"""Return (start, end) in `text` of the content of each complete `\boxed{...}`, `\fbox{...}` or `\boxed 7`.

    Braces must balance; escaped braces (`\{`) are not counted.  Nested boxes are all returned.  Takes one pass.
    """
    spans: list[tuple[int, int]] = []
    opened: list[int | None] = []  # for each open brace: where its box command starts, None for other braces
    box_at = box_end = -1
    for token in _BOX_TOKENS.finditer(text):
        word = token.group()
        if word == "{":
            of_box = box_at >= 0 and not text[box_end : token.start()].strip()
            opened.append(token.start() + 1 if of_box else None)
        elif word == "}" and opened:
            start = opened.pop()
            if start is not None:
                spans.append((start, token.start()))
        box_at = -1
        if word in ("\\boxed", "\\fbox"):
            box_at, box_end = token.start(), token.end()
            bare = _BARE_BOX.match(text, box_end)
            if bare:
                spans.append(bare.span(1))
    return sorted(spans)


_BETWEEN_BOXES = re.compile(  # `} and \boxed{`, `}, y = \boxed{`, `}\boxed{`
    r"\}?\\(?:boxed|fbox)\{|[}$.)\]\s\\]*(?:(?:,|;|&|\\q?quad|\\(?:text|mathrm|mbox|textbf)\{\s*,?\s*(?:and|or)\s*\}|\b(?:and|or)\b)[$()\[\]\s\\]*)+"
    r"(?:[A-Za-z]\w{0,2}(?:_\{?\w+\}?)?\s*=\s*)?[{$]?\s*\\(?:boxed|fbox)\s*\{?"
)


def boxed(text: str) -> str | None:
    r"""Return the content of the last complete box and of the boxes joined to it; None without a box.

    `\boxed{2} and \boxed{3}` gives `2, 3`.  Commas, semicolons, `and` and `or` join boxes; other words do not.
    """
    spans = boxes(text)
    if not spans:
        return None
    begin, end = spans[-1]
    parts = [text[begin:end].strip()]
    for span in reversed(spans[:-1]):
        if span[1] <= begin:
            if not _BETWEEN_BOXES.fullmatch(text, span[1], begin):
                break
            parts.append(text[span[0] : span[1]].strip())
            begin = span[0]
    return ", ".join(dict.fromkeys(reversed(parts)))


_LAYOUT = re.compile(r"(?<!\\)(?:\$|\\[()\[\]])|\\(?:left|right|[bB]igg?[lrm]?|displaystyle|checkmark)(?![A-Za-z])\.?")
_MIXED = re.compile(r"(?<![\d.,/^_{\\])(\d{1,9}) +([1-9]\d{0,8})/([1-9]\d{0,8})(?![\d.])", re.ASCII)
_BUILDER = re.compile(r"^\\\{\s*[A-Za-z]\s*(?:\\in\s*\\mathbb\{R\})?\s*(?:\||:|\\mid)(.+)\\\}$")
_UNITLESS = re.compile(r"(?:\^?\{?\\circ\}?|\\?%)$|(?<![^+-])\\\$")  # degrees, percent, dollars
STYLE = r"\\(?:text(?:rm|bf|it|normal)?|math(?:rm|bf|it|sf)|operatorname|mbox|hbox)\s*"
TEXT = re.compile(STYLE + r"\{([^{}]*(?:\{[^{}]*\}[^{}]*)*)\}")
_WORDS = re.compile(r"[A-Za-z][A-Za-z\s'.-]{2,}|no", re.IGNORECASE)
_THOUSANDS = re.compile(r"([+-]?\d{1,3})((?:(?:,|\{,\}|\\,|\s)\d{3})+)(\.\d+)?")
CURRENCIES = {
    **{"€": "euros", "£": "pounds", "¥": "yen", "₹": "rupees", "₩": "won"},
    **{"$": "dollars", "\\$": "dollars"},
}
_SYMBOL = re.compile(STYLE + r"\{\s*([€£¥₹₩])\s*\}")
_MONEY = re.compile(r"([+-]?)\s*([€£¥₹₩]|\\\$)([^$€£¥₹₩]+)|([^$€£¥₹₩]+)([€£¥₹₩]|\\\$)")
_BARE_DOLLAR = re.compile(r"\A(?=[+-]?\$\d[^$A-Za-z]*\Z)([+-]?)\$")  # `$5`; the signs of `$5$` are layout
_LETTER = re.compile(r"(?<![\\A-Za-z])[A-Za-z]")  # outside a command
_RUNS = re.compile(r"\s{2,}")
_EDGES = re.compile(r"^(?:\\[,;: ]|\s)+|(?:(?<!\\)\\(?:[,;: ]|$)|\s)+$")
_SPACES = re.compile(r"(?<!\\)\\[,;:! ]|\\q?quad(?![A-Za-z])|~|\s")


def wrapped(text: str) -> bool:
    """Return whether the last character of `text` closes the bracket at its start."""
    depth = 0
    for match in re.finditer(r"\\\\|\\?[([{]|(\\?[)\]}])", text):
        depth += -1 if match[1] else 0 if match[0] == "\\\\" else 1
        if depth == 0:
            return match.end() == len(text) > 1
    return False


def clean(answer: str) -> str:
    r"""Remove typesetting from an answer: `$`, `\(`, `\left`, `\!`, braces around it, punctuation at its end.

    Also rewrites notation that math-verify cannot read: `np.arcsin` as `\arcsin`, `7./4` as `7/4`, `\{x|x>2\}` as
    `x>2`, `2i` as `2 i`, `$5` as `5 dollars`, the mixed number `2 2/5` as `2\frac{2}{5}`, and signs (see `spelled`).
    """
    text = _BARE_DOLLAR.sub(r"\1\\$", _RUNS.sub(" ", answer).strip())
    text = _LAYOUT.sub(" ", re.sub(r"\\!\s*", "", text)).replace("np.", "\\").replace("./", "/")
    text = _EDGES.sub("", text).rstrip(".,;: \n")
    while text.startswith("{") and len(text) <= MAX_WRAPPED_CHARS and wrapped(text):
        text = text[1:-1].strip(" .,;:\n")
    if match := TEXT.fullmatch(text):
        text = match[1].strip()
    text = _SYMBOL.sub(r"\1", spelled(text))
    if match := _MONEY.fullmatch(text):
        sign, before, behind, amount, after = match.groups(default="")
        if not _LETTER.search(amount := sign + (behind or amount).strip()):
            text = f"{amount} {CURRENCIES[before or after]}"
    text = _MIXED.sub(_mixed, _BUILDER.sub(r"\1", text))
    return re.sub(r"(?<![A-Za-z\\{])i(?![A-Za-z])", " i ", text).strip()


def _mixed(match: re.Match[str]) -> str:
    whole, over, under = match.groups()
    return rf"{whole}\frac{{{over}}}{{{under}}}" if int(over) < int(under) else match[0]


def canonical(answer: str) -> str:
    r"""Return an answer in one form: uniform numbers and spaces, no degree, % or $ signs, words in lower case."""
    text = TEXT.sub(r"\1", _UNITLESS.sub("", clean(answer))).strip()
    if _WORDS.fullmatch(text):
        text = text.casefold()
    if thousands := _THOUSANDS.fullmatch(text):
        text = thousands[1] + re.sub(r"\D", "", thousands[2]) + (thousands[3] or "")
    text = re.sub(r"\s+(?!\d)|(?<!\d)\s+", "", _SPACES.sub(" ", text).replace("\\times", "\\cdot"))
    return text.rstrip(".").removeprefix("+")


_NUMBER = re.compile(
    r"([+-]?)(?:(\d{1,60}(?:\.\d{0,60})?|\.\d{1,60})(?:(?:[eE]|(?:\\cdot|\*)10\^)\{?([+-]?\d{1,4})\}?)?|10\^\{?([+-]?\d{1,4})\}?)",
    re.ASCII,
)


def number(text: str) -> Fraction | None:
    r"""Return the exact value of a canonical decimal number, such as -0.5, 3e-4, 3\cdot10^{4}; otherwise None."""
    match = _NUMBER.fullmatch(text)
    if match is None:
        return None
    sign, digits, exponent = match[1], match[2] or "1", int(match[3] or match[4] or 0)
    return Fraction(sign + digits) * Fraction(10) ** exponent if abs(exponent) <= MAX_EXPONENT else None


def split_top(text: str, separators: str = ",") -> list[str]:
    """Split `text` at separators that are outside all brackets."""
    parts, depth, start, escaped = [], 0, 0, False
    for at, char in enumerate(text):
        if escaped:
            escaped = False
            depth += {"{": 1, "}": -1}.get(char, 0)
            continue
        escaped = char == "\\"
        depth += 1 if char in "([{" else -1 if char in ")]}" else 0
        if char in separators and depth == 0:
            parts.append(text[start:at])
            start = at + 1
    return [*parts, text[start:]]
