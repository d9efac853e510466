"""Arguments of instructions: a function for each kind of argument, which checks a value, and `read` for `kwargs`."""

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

# The 55 language codes that langdetect returns.
_CODES = """
af ar bg bn ca cs cy da de el en es et fa fi fr gu he hi hr hu id it ja kn ko lt lv mk ml mr ne nl no pa pl pt ro ru sk
sl so sq sv sw ta te th tl tr uk ur vi zh-cn zh-tw
"""
LANGUAGES = frozenset(_CODES.split())
RELATIONS = ("less than", "at least")

Kind = Callable[[Any], Any]  # converts a value for the check; its ValueError names the expected form
Check = Callable[..., bool]  # (text that is not blank, arguments by name) -> whether the text follows the instruction


@dataclass(frozen=True)
class Instruction:
    """A type of instruction: its check, and the kinds of the check's arguments by name."""

    check: Check
    arguments: Mapping[str, Kind] = field(default_factory=dict)


def count(value: Any) -> int:
    whole = isinstance(value, int) or (isinstance(value, float) and value.is_integer())  # tables store 3 as 3.0
    if isinstance(value, bool) or not whole or value < 0:
        raise ValueError("must be a whole number of at least 0")
    return int(value)


def position(value: Any) -> int:
    if count(value) < 1:
        raise ValueError("must be a whole number of at least 1")
    return int(value)


def relation(value: Any) -> str:
    if value not in RELATIONS:
        raise ValueError(f"must be {' or '.join(map(repr, RELATIONS))}")
    return str(value)


def text(value: Any) -> str:
    if not isinstance(value, str) or not value.strip():
        raise ValueError("must be a string that is not blank")
    return value


def stripped(value: Any) -> str:
    return text(value).strip()


def word(value: Any) -> str:
    """Return a word without outer spaces.  Some training data has a list instead: its first item is the word."""
    return stripped(value[0] if isinstance(value, list) and value else value)


def texts(value: Any) -> list[str]:
    if not isinstance(value, list) or not value or not all(isinstance(item, str) and item.strip() for item in value):
        raise ValueError("must be a list of strings, none of them blank")
    return value


def letter(value: Any) -> str:
    if not isinstance(value, str) or len(value) != 1:
        raise ValueError("must be a single character")
    return value.strip().lower()


def language(value: Any) -> str:
    if value not in LANGUAGES:
        raise ValueError(f"must be a language that langdetect knows: {', '.join(sorted(LANGUAGES))}")
    return str(value)


def satisfies(number: int, relation: str, limit: int) -> bool:
    """Return whether `number` is less than `limit` or, if `relation` is "at least", not less than `limit`."""
    return number < limit if relation == "less than" else number >= limit


def pattern(expression: str, frame: str = "{}", flags: int = re.IGNORECASE) -> re.Pattern[str]:
    """Return the compiled regular expression of a keyword, as IFEval uses it.

    Args:
        expression: the keyword.  If it is not a valid regular expression, such as "a)", it is matched literally.
        frame: regular expression with `{}` in place of the keyword.
    """
    try:
        return re.compile(frame.format(expression), flags)
    except re.error:
        return re.compile(frame.format(re.escape(expression)), flags)


def read(where: str, instruction: Instruction, values: Mapping[str, Any]) -> dict[str, Any]:
    """Return the arguments of one instruction from `values`; other entries of `values` are ignored.

    Raises ValueError that names the argument, as `where`.NAME.
    """
    arguments = {}
    for name, kind in instruction.arguments.items():
        value = values.get(name)
        try:
            arguments[name] = kind(value)
        except ValueError as error:
            state = "missing" if value is None else repr(value)
            raise ValueError(f"{where}.{name} is {state}; it {error}") from None
    return arguments
