r"""Gives mathematical signs one spelling: `\le` for `≤` and `\leq`, `\sqrt{2}` for `√2` and `sqrt(2)`."""

# ruff: noqa: RUF001 - the signs that look like others are the matter of this file

import re
import unicodedata
from collections.abc import Callable

# Signs that math-verify does not read; it reads π, × and ∪.
_SIGNS = str.maketrans(
    {
        "≤": "\\le ",
        "≥": "\\ge ",
        "≠": "\\neq ",
        "·": "\\cdot ",
        "∞": "\\infty ",
        "±": "\\pm ",
        "∈": "\\in ",
        "º": "°",
        "µ": "\\mu ",
        "μ": "\\mu ",
        "Ω": "\\Omega ",
        "\N{OHM SIGN}": "\\Omega ",
    }
)


def _power(match: re.Match[str]) -> str:
    digits = unicodedata.normalize("NFKC", match[0]).replace("\N{MINUS SIGN}", "-")
    return f"^{digits}" if len(digits) == 1 else f"^{{{digits}}}"


def _fraction(match: re.Match[str]) -> str:
    over, under = unicodedata.normalize("NFKC", match[0]).split("\N{FRACTION SLASH}")
    return rf"\frac{{{over}}}{{{under}}}"


def _root(match: re.Match[str]) -> str:
    return rf"\sqrt{{{match[1] or match[2] or match[3]}}}"


_FUNCTIONS = "sinh?|cosh?|tanh?|arc(?:sin|cos|tan)|ln|log|exp"
_ARGUMENT = r"\s*(?:[_^(\\\d|]|[a-z](?![A-Za-z]))"
_CURRENCY = "USD|EUR|GBP|CHF|JPY|INR|CNY|KRW|AUD|CAD|NZD|SEK|NOK|DKK|PLN|CZK|BRL|MXN|SGD|HKD|ZAR|Rs"
_Replacement = str | Callable[[re.Match[str]], str]
_UNICODE: list[tuple[re.Pattern[str], _Replacement]] = [
    (re.compile("[⁰¹²³⁴-⁹⁻]+"), _power),
    (re.compile("[₀-₉]+"), lambda match: f"_{{{unicodedata.normalize('NFKC', match[0])}}}"),
    (re.compile("[¼-¾⅐-⅞]"), _fraction),
    (re.compile(r"√\s*(?:(\d+(?:\.\d+)?|[A-Za-z])|\(([^()]*)\)|\{([^{}]*)\})"), _root),
    (re.compile(r"(?:^|(?<=[(\[=,]))\s*–(?=\s*\d)"), "-"),  # elsewhere it may mean a range
    (re.compile(r"°\s*([CF])(?![A-Za-z])"), r"^\\circ\\text{\1}"),
]
_TYPED: list[tuple[re.Pattern[str], _Replacement]] = [
    (re.compile(r"^\s*(?:=|≈|\\(?:approx|simeq)(?![A-Za-z]))\s*"), ""),
    (re.compile(rf"(?<![A-Za-z\\{{])({_FUNCTIONS})(?={_ARGUMENT})"), r"\\\1"),
    (re.compile(r"(?<![\w.,/^_}\\])(\d+)/(\d+) +(?=[A-Za-z\\(])"), r"\\frac{\1}{\2} "),
    (re.compile(r"(?<![A-Za-z\\])([a-z])(\d)(?=\s*=)"), r"\1_\2"),
    (re.compile(r"\\([lg]e)q(?:slant)?(?![A-Za-z])"), r"\\\1"),
    (re.compile(r"(?<![A-Za-z\\])sqrt\s*(?:(\d+)|\(([^()]*)\)|\{([^{}]*)\})"), _root),
    (re.compile(r"(?<![A-Za-z\\])pi(?![A-Za-z])"), r"\\pi"),
    (re.compile(r"\^-(\d+|[A-Za-z](?![A-Za-z]))"), r"^{-\1}"),
    (re.compile(r"(?:(?<=\d)\s+x\s+|(?<=\.\d)x|(?<=\.\d\d)x)(?=10\s*\^)"), r"\\times "),
    (re.compile(r"\^\{\\degrees?\}|\^?\\degrees?(?![A-Za-z])"), r"^\\circ"),
    (re.compile(r"\^\{\\circ\s*([CF])\}"), r"^\\circ\\text{\1}"),
    (re.compile(r"\\pounds(?![A-Za-z])"), "£"),
    (re.compile(r"\\yen(?![A-Za-z])"), "¥"),
    (re.compile(r"\\euro(?:\{\}|(?![A-Za-z]))"), "€"),
    (re.compile(r"(?<=\d)\s*([ckmd]?m)([23])(?![\w^])"), r" \1^\2"),
    (re.compile(rf"^({_CURRENCY})\.?\s*([+-]?\d[\d.,]*)$"), r"\2 \1"),
]


def spelled(text: str) -> str:
    r"""Return `text` with one spelling of its signs, Unicode or typed: `x^{-2}` for `x⁻²`, `5 CHF` for `CHF 5`."""
    if not text.isascii():
        for pattern, replacement in _UNICODE:
            text = pattern.sub(replacement, text)
        text = text.translate(_SIGNS)
    for pattern, replacement in _TYPED:
        text = pattern.sub(replacement, text)
    return text
