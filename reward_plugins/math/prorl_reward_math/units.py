r"""Units of measure, compared by words and powers: `m/s^2`, `\mathrm{m\,s^{-2}}` and `meters per second^2` are equal.

Units are never converted: an answer in another unit than the truth's is wrong.
"""

import re

from prorl_reward_math.latex import TEXT
from prorl_reward_math.spelling import spelled

MAX_UNIT_CHARS = 80

_GAP = r"(?:\s|~|\$|/|\\[,;: ]|\\cdot(?![A-Za-z])|\{\s*\})*"
_POWER = r"(?:\s*\^\s*\{?\s*-?\d(?:\s*\})?)?"
_SYMBOLS = "[cmk]m|kg|min|Hz|kWh?|kPa|mph"  # read without a space; `2mg` may be a product
_STRICT = (
    r"(?<=[\s~$/,;:])(?:[A-Za-z]{2,}|[A-Za-z](?=\s*/))|(?<=/)[A-Za-z]"
    rf"|(?<=[\d}}])(?:{_SYMBOLS})(?![A-Za-z])|(?<=\\;)m"
)
_LOOSE = r"(?<![A-Za-z\\])[A-Za-z]+"
_QUOTIENT = re.compile(r"\\[dt]?frac\s*\{([^{}]*)\}\s*\{([^{}]*)\}")
_FACTOR = re.compile(r"/\s*(?!(?:hr|[ckm]m|kg)(?![A-Za-z]))[A-Za-z]{1,2}(?![A-Za-z])|\\cdot\s*[A-Za-z]")
_BELOW = re.compile(r"(?<=[A-Za-z}])\s*/\s*\(([^()]*)\)")  # `J/(mol K)`


def _ending(word: str, quotient: str) -> re.Pattern[str]:
    half = rf"\{{\s*(?:(?:{quotient})(?:\^\{{?-?\d\}}?)?(?:\s|\\cdot)*)+\}}"
    signs = r"\^?\{?\\circ\}?|°|\\(?:mu|Omega|AA)(?![A-Za-z])"
    part = rf"(?:\\[dt]?frac\s*{half}\s*{half}|{TEXT.pattern}|(?<![A-Za-z])[ap]\.m\b|{word}|{signs})"
    return re.compile(rf"(?:{_GAP}{part}{_POWER})+{_GAP}\.?$")


_ENDINGS = {False: _ending(_STRICT, TEXT.pattern), True: _ending(_LOOSE, rf"{TEXT.pattern}|{_LOOSE}")}
_NOT_UNITS = re.compile(
    r"\b(?:or|and|not?|to|than|least|most|more|less|if|when|where|mod|times|plus|minus|over|squared|cubed|half|dozen"
    r"|hundred|thousand|million|billion|trillion|pi|e|i)\b|[^\w\s^{}/$~.,;:\\-]"
)
_REPLACED = {
    r"\^?\{?\\circ\}?|°": " deg ",
    r"\\?%": " percent ",
    r"\\mu\s*": " u",
    r"\\cdot": " ",
    r"\b([ap])\.m\b\.?": r"\1m",
    r"\b(?:square|sq\.?)\s+([A-Za-z]+)": r"\1^2",
    r"\bcubic\s+([A-Za-z]+)": r"\1^3",
    r"\bper\b": "/",
    r"\b(lit|met)re": r"\1er",
    r"\bUS(?:D| dollars?)\b": "dollars",
    r"\bGBP\b": "pounds",
    r"\bJPY\b": "yen",
}

# Units that begin with the letter of another: `min` is no spelling of `m`.
_LITERS = {"l", "ml", "cl", "dl"}  # `L` and `l` are equal
_OTHERS = re.compile(r"(?:mins?|minutes?|mol|moles?|miles?|mi|months?|gal|gallons?|stones?|hectares?|hertz)$")

_WORD = re.compile(r"([A-Za-z]+)\s*(?:\^?\s*\{?\s*(-?)([1-9]))?")


def read_unit(text: str) -> list[tuple[str, int]]:
    r"""Return (word, power) pairs of a unit; [] if the text is not a unit.

    `m/s^{2}` and `m s^{-2}` give ("m", 1), ("s", -2): all words after the first `/` are below the line.
    """
    text = _QUOTIENT.sub(r"\1/\2", _BELOW.sub(r"/\1", TEXT.sub(r" \1", spelled(text))))
    for pattern, replacement in _REPLACED.items():
        text = re.sub(pattern, replacement, text)
    if _NOT_UNITS.search(text):
        return []
    above, _, below = text.partition("/")
    words = [(1, word) for word in _WORD.findall(above)] + [(-1, word) for word in _WORD.findall(below)]
    return [(name, (-sign if minus else sign) * int(power or 1)) for sign, (name, minus, power) in words]


def split_unit(text: str, loose: bool = False) -> tuple[str, str]:
    r"""Return (value, unit) of an answer: ("5", "eggs") for `5 eggs`.  The unit is "" if the answer has none.

    Args:
        text: the answer.
        loose: treat letters that may be a factor, as in `5 m` or `5m`, as a unit.  Otherwise they stay in the value.
    """
    text = _BELOW.sub(r"/\1", text) if loose else text
    if match := _ENDINGS[loose].search(text, max(1, len(text) - MAX_UNIT_CHARS)):
        value, unit = text[: match.start()].rstrip(), match.group().strip()
        if not loose and _FACTOR.match(unit):  # `6/x` and `3 \cdot ab` are formulas
            return text, ""
        complete = value[-1:] not in "+-*/^_(=,{\\" and value.count("{") == value.count("}")
        if complete and any(map(str.isdigit, value)) and read_unit(unit):
            return value, unit
    return text, ""


def _same_word(first: tuple[str, int], second: tuple[str, int]) -> bool:
    """Return whether two (word, power) pairs are equal; a word may abbreviate the other (`km`, `kilometers`)."""
    if {first[0].casefold(), second[0].casefold()} <= _LITERS:
        first, second = (first[0].casefold(), first[1]), (second[0].casefold(), second[1])
    short, long = sorted((first[0].casefold(), second[0].casefold()), key=len)
    letters = iter(long)
    spelled = (long in ("am", "pm") or len(long) > 2) and not (len(short) == 1 and _OTHERS.match(long))
    alike = spelled and short[0] == long[0] and all(letter in letters for letter in short)
    return first[1] == second[1] and (first[0] == second[0] or alike)


def same_unit(first: str, second: str) -> bool:
    left, right = (sorted(read_unit(unit), key=lambda word: word[0].casefold()) for unit in (first, second))
    return len(left) == len(right) and all(map(_same_word, left, right))


def power_of_ten(unit: str) -> tuple[int, str]:
    """Return (exponent, unit without the power of ten): (6, " m") for `10^6 m`, (0, "m") for `m`."""
    match = re.search(r"(?:\\mathrm\{)?10\^\{?([+-]?\d{1,3})\}?\}?", unit)
    return (int(match[1]), unit[: match.start()] + unit[match.end() :]) if match else (0, unit)
