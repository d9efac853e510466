"""Finds the boxed answer in a text, and writes answers in one canonical form.  Standard library only."""

import re
from fractions import Fraction

GAP_MARK = "\u2423"  # stands for white space between two numbers
MAX_WRAPPED_CHARS = 2000  # of an answer whose bare braces are looked through, layer by layer
MAX_EXPONENT = 400  # of a number in scientific notation; beyond it nothing is computed

_BOX_TOKENS = re.compile(r"\\(?:boxed|fbox)(?![A-Za-z])|\\.|[{}]", re.DOTALL)
_BARE_BOX = re.compile(r"\s*([^\s{}$\\]+)")


def boxes(text: str) -> list[tuple[int, int]]:
    r"""Return begin and end of the contents of all complete \boxed{...} and \fbox{...}, in one pass; also `\boxed 7`.

    Braces must balance; escaped ones (`\{`) do not count.  Of nested boxes, all are returned.
    """
    found: list[tuple[int, int]] = []
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
                found.append((start, token.start()))
        box_at = -1
        if word in ("\\boxed", "\\fbox"):
            box_at, box_end = token.start(), token.end()
            bare = _BARE_BOX.match(text, box_end)
            if bare:
                found.append(bare.span(1))
    return sorted(found)


_BETWEEN_BOXES = re.compile(  # `} and \boxed{`, `}, y = \boxed{`, `}\boxed{`
    r"\}?\\(?:boxed|fbox)\{|[}$.)\]\s\\]*(?:(?:,|;|&|\\q?quad|\\(?:text|mathrm|mbox|textbf)\{\s*,?\s*(?:and|or)\s*\}|\b(?:and|or)\b)[$()\[\]\s\\]*)+"
    r"(?:[A-Za-z]\w{0,2}(?:_\{?\w+\}?)?\s*=\s*)?[{$]?\s*\\(?:boxed|fbox)\s*\{?"
)


def boxed(text: str) -> str | None:
    r"""Return the content of the last complete box, and of those that it is listed with; None without a box.

    `\boxed{2} and \boxed{3}` gives `2, 3`: commas, semicolons and connectives join boxes, sentences do not.
    """
    found = boxes(text)
    if not found:
        return None
    begin, end = found[-1]
    parts = [text[begin:end].strip()]
    for one in reversed(found[:-1]):
        if one[1] <= begin:
            if not _BETWEEN_BOXES.fullmatch(text, one[1], begin):
                break
            parts.append(text[one[0] : one[1]].strip())
            begin = one[0]
    return ", ".join(dict.fromkeys(reversed(parts)))


# Words behind a number that say more than a unit: `5 or more` is not 5, `5 million` is not 5.
_BLOCKING = frozenset(
    """or and not no to than least most more less fewer greater about if when where mod hundred thousand million billion
    trillion dozen half times plus minus over squared cubed either neither wait maybe but through until pi infinity
    am pm""".split()  # noqa: SIM905
)
_SPACES = re.compile(r"(?<!\\)\\[,;:! ]|\\q?quad(?![A-Za-z])|\\hspace\{[^{}]*\}|\\displaystyle|\\limits|~|\s")
_SIZES = re.compile(r"\\(?:left|right|[bB]igg?[lrm]?)(?![A-Za-z])\.?")
_DEGREES = re.compile(r"\^?\{?\\circ\}?|\\degrees?(?![A-Za-z])|°")
_TEXT = re.compile(r"\\(?:text(?:rm|bf|it|normal)?|math(?:rm|bf|it|sf)|operatorname|mbox|hbox|rm|bf)\s*\{([^{}]*)\}")
_TRAILING_TEXT = re.compile(
    r"(?<=[\w)}\]])(?:[\s~]|\\[,;! ])*\\(?:text|textrm|textnormal|mathrm|mbox)\s*\{[^{}]*\}(?:\^\{?[-\d]+\}?)?[\s.]*$"
)
_TRAILING_WORDS = re.compile(r"^(.*[\d)}\]])(\s*[A-Za-z][A-Za-z .]*)(?:\^\{?\d\}?)?$", re.DOTALL)
_FRAC = re.compile(r"\\frac\s*(?:\{([^{}]*)\}|([^{}\s\\]))\s*(?:\{([^{}]*)\}|([^{}\s\\]))")
_SQRT = re.compile(r"\\sqrt\s*([^\[\{\s\\])")
_SLASH = re.compile(r"^([+-]?)(\d+)/(\d+)$")
_ZERO_POINT = re.compile(r"(?<![\d.])\.(?=\d)")
_TRAILING_ZEROS = re.compile(r"(?<!\d)(\d+)\.(\d*[1-9])?0+(?!\d)")  # one pass over a long run of digits
_THOUSANDS = re.compile(r"^([+-]?)(\d{1,3}(?:(?:,|\{,\})\d{3})+)(\.\d+)?$")
_SAME = {
    "\\dfrac": "\\frac", "\\tfrac": "\\frac", "\\cfrac": "\\frac", "\\leq": "\\le", "\\geq": "\\ge", "\\neq": "\\ne",
    "\\times": "\\cdot", "\\ast": "\\cdot", "\\infin": "\\infty", "\\varnothing": "\\emptyset", "\\lbrace": "\\{",
    "\\rbrace": "\\}", "\\mid": "|", "\\vert": "|", "\\rightarrow": "\\to", "\\land": "\\wedge", "\\lor": "\\vee",
    "\\geqslant": "\\ge", "\\leqslant": "\\le", "\\dbinom": "\\binom", "\\tbinom": "\\binom", "\\lt": "<", "\\gt": ">",
}  # fmt: skip
_COMMAND = re.compile(r"\\[A-Za-z]+")
_CHARACTERS = str.maketrans(
    {
        "\u2212": "-", "\u2013": "-", "π": "\\pi ", "∞": "\\infty ", "\u00d7": "\\cdot ", "·": "\\cdot ",
        "√": "\\sqrt ", "\u00b2": "^2", "\u00b3": "^3", "\u2264": "\\le ", "\u2265": "\\ge ", "\u2260": "\\ne ",
        "\u222a": "\\cup ", "\u00b1": "\\pm ", "\u2248": "\\approx ",
    }
)  # fmt: skip


def strip_delimiters(text: str) -> str:
    r"""Without the `$`, `\(`, `\[` or bare braces around the whole, and without a full stop or comma at its end."""
    text = text.strip()
    while True:
        shorter = text.rstrip(".,;: \n").strip() if not text.endswith("\\,") else text[:-2]
        for left, right in (("$$", "$$"), ("$", "$"), ("\\(", "\\)"), ("\\[", "\\]")):
            inner = shorter[len(left) : len(shorter) - len(right)]
            around = len(shorter) > len(left + right) and shorter.startswith(left) and shorter.endswith(right)
            if around and ("$" not in inner or left[0] != "$"):
                shorter = inner.strip()
        if len(shorter) <= MAX_WRAPPED_CHARS and _WRAPPED.match(shorter) and _closes_last(shorter):
            shorter = shorter[1:-1].strip()
        if shorter == text:
            return text
        text = shorter


_WRAPPED = re.compile(r"\{.*[^\\]\}$", re.DOTALL)


def _closes_last(text: str) -> bool:
    """Return whether the first brace is closed by the last one."""
    depth = 0
    for found in re.finditer(r"\\.|[{}]", text, re.DOTALL):
        depth += {"{": 1, "}": -1}.get(found[0], 0)
        if depth == 0:
            return found.end() == len(text) and found[0] == "}"
    return False


def split_unit(text: str) -> tuple[str, str]:
    r"""An answer and the unit written behind it: `5\text{ cm}`, `5 eggs`; the unit is "" without one."""
    if found := _TRAILING_TEXT.search(text):
        unit = _TEXT.search(found.group())
        name = unit.group(1).strip(" ~.") if unit else ""
        if _BLOCKING.isdisjoint(re.findall(r"[a-z]+", name.lower().replace(".", ""))):
            return text[: found.start()].strip(), name
    found = _TRAILING_WORDS.match(text)
    if found and _is_noun_phrase(found.group(2)) and number(canonical(found.group(1))) is not None:
        return found.group(1).strip(), found.group(2).strip()
    return text, ""


def _is_noun_phrase(text: str) -> bool:
    """Whether it reads like ` eggs` or ` red balls`: words, not a product of letters."""
    words = text.lower().split()
    spoken = all(len(word) > 2 and not _BLOCKING & {word} and set(word) & set("aeiou") for word in words)
    return text[0].isspace() and spoken and len(words[0]) > 3


_REPEATED = re.compile(r"\\circ|°|%|(?<!\\)\$[^$]+\$")
_GAP = r"(?:\s|~|\\[,;:! ])+"
_SPACED_DIGITS = re.compile(rf"(?<![\d.,])\d+(?:{_GAP}\d+)+", re.ASCII)
_MIXED = re.compile(r"^([+-]?\d+)\s+(\d+)/(\d+)$", re.ASCII)
_SCALED = re.compile(r"(?<=\d)(?:[\s~]|\\[,; ])*(\\text\{)?\s*(thousand|million|billion|trillion)\b\s*(\})?")
_SCALES = {"thousand": 3, "million": 6, "billion": 9, "trillion": 12}
_LEAD = re.compile(
    r"^(?:\\text\{)?\s*(?:the\s+)?(?:final\s+)?answer(?:\s+is)?\s*:?\s*(?:\}\s*:?)?(?=[\s\d\\$-])", re.IGNORECASE
)
_CLOCK = re.compile(r"(?<=\d)\s*(?:\\[,; ]|~)*(?:\\text\{)?\s*([ap])\.?m\b\.?\s*\}?", re.IGNORECASE)


def _close_gap(found: re.Match[str]) -> str:
    """`12 345` is one number, `1 2` are two: what is no thousands separator becomes a mark."""
    groups = re.split(_GAP, found[0])
    thousands = len(groups[0]) <= 3 and all(len(group) == 3 for group in groups[1:])
    return ("" if thousands else GAP_MARK).join(groups)


def _scaled(found: re.Match[str]) -> str:
    rest = "\\text{" if found[1] and not found[3] else ""
    return f"\\cdot10^{{{_SCALES[found[2]]}}}{rest}"


def _canonical_fracs(text: str) -> str:
    return _FRAC.sub(lambda found: f"\\frac{{{found[1] or found[2] or ''}}}{{{found[3] or found[4] or ''}}}", text)


def canonical(answer: str) -> str:
    r"""One form for the many ways to write one answer: spaces, sizes, fractions, units, degrees, percent, money."""
    text = strip_delimiters(strip_delimiters(answer).removeprefix("\\displaystyle"))
    one_number = len(_REPEATED.findall(text)) <= 1  # `$48$,$384$` and `45^\circ,135^\circ` are lists
    text = _LEAD.sub("", text.translate(_CHARACTERS)).strip()
    text = (
        text.replace("\\checkmark", "").replace("np.", "").replace("\\!", "") if "\\" in text or "np." in text else text
    )
    text = _SCALED.sub(_scaled, _CLOCK.sub(lambda found: f"{found[1].lower()}m", text))
    text = _SIZES.sub("", text.replace("\\left\\{", "\\{").replace("\\right\\}", "\\}"))
    text = _DEGREES.sub("", text).replace("\\%", "").replace("%", "").replace("\\$", "").replace("$", "").strip()
    text, _ = split_unit(text)
    text = _TEXT.sub(lambda found: found[1], text)
    text = re.sub(r"\\overline\s*\{([A-Z]{2})\}", r"\1", text)
    text = re.sub(r"(?<![0-9])!=", r"\\ne ", text)
    text = _COMMAND.sub(lambda found: _SAME.get(found[0], found[0]), text)
    text = _SQRT.sub(r"\\sqrt{\1}", _canonical_fracs(text)).strip()
    if re.fullmatch(r"[A-Za-z][A-Za-z\s'.-]{2,}|[Nn][Oo]", text):  # words: letter case does not matter
        text = text.casefold()
    if one_number and (thousands := _THOUSANDS.match(re.sub(r",\s+", ",", text) if "\\!" in answer else text)):
        text = thousands[1] + re.sub(r"[^\d]", "", thousands[2]) + (thousands[3] or "")
    text = _SPACED_DIGITS.sub(_close_gap, _MIXED.sub(r"\1\\frac{\2}{\3}", text))
    text = re.sub(r"(?<=\d)\.(?=/)", "", _SPACES.sub("", text))
    text = _ZERO_POINT.sub("0.", text)
    text = _TRAILING_ZEROS.sub(lambda found: f"{found[1]}.{found[2]}" if found[2] else found[1], text)
    text = re.sub(r"([\^_])\{(\w)\}", r"\1\2", text)
    text = _SLASH.sub(r"\1\\frac{\2}{\3}", text)
    text = re.sub(r"^\(([A-Za-z])\)$", r"\1", text)  # a choice
    return text.rstrip(".").removeprefix("+")


_DECIMAL = re.compile(r"([+-]?)(\d{1,60}(?:\.\d{0,60})?)", re.ASCII)
_SCIENTIFIC = re.compile(r"([+-]?\d{1,60}(?:\.\d{0,60})?)(?:[eE]|(?:\\cdot|\*)10\^)\{?([+-]?\d{1,4})\}?", re.ASCII)
_POWER_OF_TEN = re.compile(r"([+-]?)10\^\{?([+-]?\d{1,4})\}?", re.ASCII)
_REPEATING = re.compile(r"([+-]?)(\d{1,30})\.(\d{0,30})\\overline\{(\d{1,30})\}", re.ASCII)
_FRACTION = re.compile(r"([+-]?)(\d{0,60})\\frac\{([+-]?\d{1,60})\}\{([+-]?\d{1,60})\}", re.ASCII)


def number(text: str) -> Fraction | None:
    r"""The exact value of a canonical number: 12, -0.5, \frac{3}{4}, 1\frac{1}{2}, 3e-4, 3\cdot10^{4}; else None."""
    if found := _DECIMAL.fullmatch(text):
        return Fraction(found[0])
    if found := _FRACTION.fullmatch(text):
        sign, whole, above, below = found.groups()
        if int(below) == 0 or (whole and (above.startswith(("-", "+")) or below.startswith(("-", "+")))):
            return None
        return (-1 if sign == "-" else 1) * (int(whole or 0) + Fraction(int(above), int(below)))
    if (found := _SCIENTIFIC.fullmatch(text)) and abs(int(found[2])) <= MAX_EXPONENT:
        return Fraction(found[1]) * Fraction(10) ** int(found[2])
    if (found := _POWER_OF_TEN.fullmatch(text)) and abs(int(found[2])) <= MAX_EXPONENT:
        return Fraction(f"{found[1]}1") * Fraction(10) ** int(found[2])
    if found := _REPEATING.fullmatch(text):
        sign, whole, still, again = found.groups()
        value = Fraction(f"{whole}.{still or 0}") + Fraction(int(again), (10 ** len(again) - 1) * 10 ** len(still))
        return -value if sign == "-" else value
    return None


def split_top(text: str, separators: str = ",") -> list[str]:
    """Parts of `text` between separators that stand outside all brackets."""
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
