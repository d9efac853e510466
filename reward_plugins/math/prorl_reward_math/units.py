"""Units of measure: reads `m/s`, `\\mathrm{kJ\\,mol^{-1}}`, `^\\circ C`, and says how many of one make the other."""

import functools
import math
import re
from dataclasses import dataclass

MAX_UNIT_CHARS = 80

# Dimensions: one letter for each base (kg, m, s, A, K, mol, cd) and words for what does not convert to anything else.
_BASES: dict[str, tuple[float, dict[str, int]]] = {
    "g": (1e-3, {"kg": 1}), "m": (1, {"m": 1}), "s": (1, {"s": 1}), "A": (1, {"A": 1}), "K": (1, {"K": 1}),
    "mol": (1, {"mol": 1}), "cd": (1, {"cd": 1}), "Hz": (1, {"s": -1}), "N": (1, {"kg": 1, "m": 1, "s": -2}),
    "J": (1, {"kg": 1, "m": 2, "s": -2}), "W": (1, {"kg": 1, "m": 2, "s": -3}), "Pa": (1, {"kg": 1, "m": -1, "s": -2}),
    "V": (1, {"kg": 1, "m": 2, "s": -3, "A": -1}), "C": (1, {"A": 1, "s": 1}), "T": (1, {"kg": 1, "s": -2, "A": -1}),
    "Wb": (1, {"kg": 1, "m": 2, "s": -2, "A": -1}), "F": (1, {"kg": -1, "m": -2, "s": 4, "A": 2}),
    "H": (1, {"kg": 1, "m": 2, "s": -2, "A": -2}), "ohm": (1, {"kg": 1, "m": 2, "s": -3, "A": -2}),
    "L": (1e-3, {"m": 3}),
    "eV": (1.602176634e-19, {"kg": 1, "m": 2, "s": -2}), "bar": (1e5, {"kg": 1, "m": -1, "s": -2}),
    "cal": (4.184, {"kg": 1, "m": 2, "s": -2}), "rad": (1, {"angle": 1}), "sr": (1, {"sr": 1}), "Bq": (1, {"s": -1}),
    "Gy": (1, {"m": 2, "s": -2}), "Sv": (1, {"m": 2, "s": -2}), "lm": (1, {"cd": 1}),
    "S": (1, {"kg": -1, "m": -2, "s": 3, "A": 2}),
    "l": (1e-3, {"m": 3}), "pc": (3.0856775814913673e16, {"m": 1}), "M": (1e3, {"mol": 1, "m": -3}),
    "Torr": (101325 / 760, {"kg": 1, "m": -1, "s": -2}),
}  # fmt: skip
_PREFIXES = {
    "": 1.0, "k": 1e3, "c": 1e-2, "m": 1e-3, "u": 1e-6, "n": 1e-9, "p": 1e-12, "f": 1e-15, "d": 1e-1, "h": 1e2,
    "M": 1e6, "G": 1e9, "T": 1e12,
}  # fmt: skip
_PREFIX_NAMES = {
    "kilo": "k", "centi": "c", "milli": "m", "micro": "u", "nano": "n", "pico": "p", "femto": "f", "deci": "d",
    "mega": "M", "giga": "G", "tera": "T",
}  # fmt: skip
_NAMES = {
    "meter": "m", "metre": "m", "gram": "g", "second": "s", "sec": "s", "joule": "J", "newton": "N", "volt": "V",
    "ampere": "A", "amp": "A", "watt": "W", "pascal": "Pa", "kelvin": "K", "mole": "mol", "liter": "L", "litre": "L",
    "hertz": "Hz", "coulomb": "C", "tesla": "T", "farad": "F", "henry": "H", "ohm": "ohm", "radian": "rad",
    "calorie": "cal", "electronvolt": "eV", "bar": "bar", "torr": "Torr", "becquerel": "Bq", "weber": "Wb",
}  # fmt: skip
_ENERGY, _PRESSURE = {"kg": 1, "m": 2, "s": -2}, {"kg": 1, "m": -1, "s": -2}
_OTHERS: dict[str, tuple[float, dict[str, int]]] = {
    "min": (60, {"s": 1}), "h": (3600, {"s": 1}), "day": (86400, {"s": 1}), "week": (604800, {"s": 1}),
    "month": (1, {"month": 1}), "yr": (31557600, {"s": 1}), "deg": (math.pi / 180, {"angle": 1}),
    "degC": (1, {"degC": 1}), "degF": (1, {"degF": 1}), "percent": (0.01, {}), "in": (0.0254, {"m": 1}),
    "ft": (0.3048, {"m": 1}), "yd": (0.9144, {"m": 1}), "mi": (1609.344, {"m": 1}), "mph": (0.44704, {"m": 1, "s": -1}),
    "kph": (1 / 3.6, {"m": 1, "s": -1}), "lb": (0.45359237, {"kg": 1}), "oz": (0.028349523125, {"kg": 1}),
    "gal": (3.785411784e-3, {"m": 3}), "atm": (101325, _PRESSURE), "mmHg": (133.322387415, _PRESSURE),
    "psi": (6894.757293168, _PRESSURE), "angstrom": (1e-10, {"m": 1}), "amu": (1.66053906660e-27, {"kg": 1}),
    "dollar": (1, {"money": 1}), "cent": (0.01, {"money": 1}), "euro": (1, {"euro": 1}),
    "AU": (1.495978707e11, {"m": 1}),
    "ly": (9.4607304725808e15, {"m": 1}), "erg": (1e-7, _ENERGY), "dyn": (1e-5, {"kg": 1, "m": 1, "s": -2}),
    "rev": (2 * math.pi, {"angle": 1}), "rpm": (math.pi / 30, {"angle": 1, "s": -1}), "ton": (1000, {"kg": 1}),
}  # fmt: skip
_ALIASES = {
    "minute": "min", "mins": "min", "hour": "h", "hr": "h", "days": "day", "d": "day", "year": "yr", "degree": "deg",
    "inch": "in", "inches": "in", "foot": "ft", "feet": "ft", "yard": "yd", "mile": "mi", "pound": "lb",
    "ounce": "oz", "gallon": "gal",
    "atmosphere": "atm", "degrees": "deg", "tonne": "ton", "celsius": "degC",
    "fahrenheit": "degF", "tons": "ton", "revolution": "rev", "u": "amu", "kPA": "kPa", "KJ": "kJ",
    "dyne": "dyn", "Da": "amu",
}  # fmt: skip

_TOKEN = re.compile(
    r"(?P<word>[A-Za-z]+|\$)(?:\^\{?(?P<power>[+-]?\d)\}?|(?P<index>-?\d))?"
    r"|(?P<sign>[/()])|(?P<ten>10)\^?\{?(?P<exponent>[+-]?\d{1,3})\}?"
)
_WRAPPED = re.compile(
    r"\\(?:text(?:rm|bf|it|normal)?|math(?:rm|bf|it|sf|up)?|operatorname|mbox|hbox|rm|unit|si)\s*(?=\{)"
)
_REPLACED = (
    (re.compile(r"\\(?:text)?degrees?\s*(?![A-Za-z])|\{?\s*\}?\s*\^?\s*\{?\s*\\circ\s*\}?|°|º"), " deg "),
    (re.compile(r"deg\s*\{?\s*C(?![A-Za-z])"), "degC"), (re.compile(r"deg\s*\{?\s*F(?![A-Za-z])"), "degF"),
    (re.compile(r"\\(?:text)?mu(?![A-Za-z])\s*\{?\s*|[\u00b5\u03bc]"), " u"),
    (re.compile(r"\\Omega|[\u2126\u03a9]"), " ohm "),
    (re.compile(r"(?<=[A-Za-z]) ohm"), "ohm"), (re.compile(r"\\AA|[\u00c5\u212b]"), " angstrom "),
    (re.compile(r"\\?%"), " percent "), (re.compile(r"\\\$"), " $ "),
    (re.compile(r"\bsquare\s+([A-Za-z]+)|\bsq\.?\s+([A-Za-z]+)"), r"\1\2^2"),
    (re.compile(r"\bcubic\s+([A-Za-z]+)"), r"\1^3"), (re.compile(r"\bper\b"), "/"),
    (re.compile(r"\\\s?|[~.]|\\(?:cdot|times)"), " "),
)  # fmt: skip
_CDOT = re.compile(r"\\(?:cdot|times)(?![A-Za-z])|\\[,;:! ]|[\u00b7\u22c5*~]|\\quad")
_SUPERSCRIPTS = str.maketrans(
    {"\u207b": "-", "\u00b9": "1", "\u00b2": "2", "\u00b3": "3", "\u2074": "4", "\u2212": "-"}
)


@dataclass(frozen=True)
class Unit:
    """A factor to SI, and the exponents of its dimensions, sorted."""

    factor: float
    dims: tuple[tuple[str, int], ...]


def _word(word: str) -> tuple[float, dict[str, int]] | None:
    """One unit by symbol or name; None where it is unknown."""
    if word == "$":
        return _OTHERS["dollar"]
    for form in (word, word.lower(), word.lower().rstrip("s")) if len(word) > 2 else (word,):
        name = _ALIASES.get(form, form)
        if name in _OTHERS:
            return _OTHERS[name]
        if name in _NAMES:
            return _BASES[_NAMES[name]]
        for prefix, letter in _PREFIX_NAMES.items():
            if name.startswith(prefix) and name[len(prefix) :] in _NAMES:
                factor, dims = _BASES[_NAMES[name[len(prefix) :]]]
                return factor * _PREFIXES[letter], dims
    word = _ALIASES.get(word, word)
    for cut in (0, 1):
        if word[:cut] in _PREFIXES and word[cut:] in _BASES:
            factor, dims = _BASES[word[cut:]]
            return factor * _PREFIXES[word[:cut]], dims
    return None


def _plain(text: str) -> str:
    """A unit without LaTeX."""
    if text.strip(" \\") == "$":
        return "$"
    text = re.sub(r"(?<!\\)\$", " ", text.translate(_SUPERSCRIPTS))
    text = _CDOT.sub(" ", _WRAPPED.sub("", text))
    for pattern, replacement in _REPLACED:
        text = pattern.sub(replacement, text)
    text = re.sub(r"[{}]\s*(?=\^)", "", text)  # \mathrm{mol}^{-1}
    text = re.sub(r"\^\s*\{?\s*([+-]?\d+)\s*\}?", r"^\1 ", text)
    return re.sub(r"(?<=[A-Za-z])-(?=[A-Za-z])|[{}]", " ", text).strip()


@functools.lru_cache(maxsize=2048)
def units_of(text: str, powers_of_ten: bool = False) -> tuple[Unit, ...]:
    """The readings of a unit: `J/mol K` has two; none where a part of it is unknown."""
    if not 0 < len(text) <= MAX_UNIT_CHARS:
        return ()
    readings = []
    for slash_reaches_all in (False, True):
        unit = _read(_plain(text), slash_reaches_all, powers_of_ten)
        if unit is None:
            return ()
        if unit not in readings:
            readings.append(unit)
    return tuple(readings)


def _read(text: str, slash_reaches_all: bool, powers_of_ten: bool) -> Unit | None:
    factor, dims, at, sign, grouped, seen = 1.0, dict[str, int](), 0, 1, False, False
    while at < len(text):
        if text[at].isspace():
            at += 1
            continue
        token = _TOKEN.match(text, at)
        if token is None:
            return None
        at = token.end()
        if mark := token["sign"]:
            sign = -1 if mark == "/" else 1 if mark == ")" else sign
            grouped = mark == "(" or (grouped and mark != ")")
            continue
        power = int(token["power"] or token["index"] or 1) * sign
        if token["ten"]:
            if not powers_of_ten:
                return None
            factor *= 10.0 ** int(token["exponent"])
        else:
            found = _word(token["word"])
            if found is None:
                return None
            factor *= found[0] ** power
            for name, exponent in found[1].items():
                dims[name] = dims.get(name, 0) + exponent * power
        seen = True
        sign = sign if grouped or slash_reaches_all else 1
    return Unit(factor, tuple(sorted((name, power) for name, power in dims.items() if power))) if seen else None


def power_of_ten(unit: str) -> int:
    """The exponent in a unit such as `10^6 m`; 0 where there is none."""
    found = re.search(r"(?<![0-9])10\^\{?([+-]?[0-9]{1,3})\}?", unit)
    return int(found[1]) if found else 0


def ratio(expected: str, given: str) -> float | None:
    """How many `expected` one `given` is; 0 where they measure different things, None where one is unknown."""
    left, right = units_of(expected, True), units_of(given)
    if not left or not right:
        return None
    ratios = [theirs.factor / ours.factor for ours in left for theirs in right if ours.dims == theirs.dims]
    exact = next((value for value in ratios if abs(value - 1) < 1e-12), None)
    return 1.0 if exact is not None else ratios[0] if ratios else 0.0


_BOUNDARY = re.compile(
    r"\s|\\[,;: ]|~|\\(?:text|mathrm|textrm|mbox|rm|quad|mu|Omega|AA|degrees?)(?![A-Za-z])"
    r"|\\?%|\{?\s*\}?\^\s*\{?\s*\\circ|[°\u00b5\u03bc\u03a9\u2126]"
)
_ATTACHED = re.compile(r"(?<=[\d)}\]])(?=[A-Za-z$])")


def split_value(text: str, attached_letter: bool = False) -> tuple[str, str]:
    r"""An answer and the known unit behind it (`5\,\text{m/s}`); the unit is "" where there is none.

    `attached_letter`: whether `5m` is five metres (or, as in mathematics, a product).
    """
    tail = max(1, len(text) - MAX_UNIT_CHARS)
    cuts = sorted({found.start() for found in (*_BOUNDARY.finditer(text, tail), *_ATTACHED.finditer(text, tail))})
    for cut in cuts:
        value, unit = text[:cut].rstrip(), text[cut:].strip(" .~")
        if not value or value[-1] in "+-*/^_(=,{\\" or not any(char.isdigit() for char in value[-80:]):
            continue
        if not attached_letter and re.fullmatch(r"[A-Za-z](?:\^\{?\d\}?)?", text[cut:]):
            continue
        if value.count("{") != value.count("}") or (unit in ("am", "pm") and not attached_letter):
            continue
        if units_of(unit):
            return value, unit
    return text, ""
