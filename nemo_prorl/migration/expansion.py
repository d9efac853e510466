"""Expands the text of a shell script: variables, arithmetic, arrays and quotation marks, to the words of commands."""

import ast
import operator
import re
import shlex
from collections.abc import Callable
from typing import Any

# Marks what cannot be evaluated; the text behind the mark is the script's.
UNKNOWN = "\ue000"
BLANK = "\ue001"  # a blank in that text
_ASSIGNED = re.compile(r"\s*((export|declare|local|readonly)\s+)?(-\w+\s+)*[A-Za-z_]\w*\+?=")
_ALL_ITEMS = re.compile(r'"?\$\{(\w+)\[[@*]\]\}"?')
_NAME = re.compile(r"[A-Za-z_]\w*|[0-9@*#?$!-]")
_PARAMETER = re.compile(r"(\w+)(?:(:?[-=+])(.*))?", re.S)
OF_WHOLE: dict[type[ast.operator], Callable[[Any, Any], Any]]
OF_WHOLE = {ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul}
OF_WHOLE |= {ast.Div: lambda a, b: int(a / b), ast.Mod: lambda a, b: a - b * int(a / b)}  # as bash divides


def words_of(text: str, known: dict[str, str], arrays: dict[str, list[str]], punctuation: str = "") -> list[str]:
    """Return the words of a text.

    Args:
        known: values of variables.
        arrays: values of arrays.
        punctuation: characters that are words of their own.

    Raises ValueError: a quotation or bracket is open.
    """
    text = _ALL_ITEMS.sub(lambda match: " ".join(map(shlex.quote, arrays.get(match[1], []))), text)
    lexer = shlex.shlex(_expand(text, known), posix=True, punctuation_chars=punctuation or False)
    lexer.whitespace_split = True
    return list(lexer)


def _expand(text: str, known: dict[str, str]) -> str:
    """Return the text with its `$` expressions replaced, escaped so that `shlex` reads each as plain text."""
    done, at, quoted, is_assigned = "", 0, False, _ASSIGNED.match(text) is not None  # else blanks of a value count
    while at < len(text):
        char, end = text[at], at + 1
        if char == "\\":
            end += 1
        elif char == "'" and not quoted:
            end = text.index("'", at + 1) + 1
        elif char == "#" and not quoted and (at == 0 or text[at - 1].isspace()):
            at = text.find("\n", at) % (len(text) + 1)  # -1, no further line, becomes the end
            continue
        elif char == '"':
            quoted = not quoted
        elif not quoted and (char.isspace() or char in ";&|"):
            is_assigned = (is_assigned or char in ";&|") and _ASSIGNED.match(text, at + (char in ";&|")) is not None
        elif char in "$`":
            value, end = dollar(text, at, known)
            escaped = r'([\\"])' if quoted else r"(\W)" if is_assigned else r"([^\w\s])"
            unknown = UNKNOWN + re.sub(r"\s+", BLANK, text[at:end])
            done, at = done + re.sub(escaped, r"\\\1", unknown if value is None else value), end
            continue
        done, at = done + text[at:end], end
    return done


def dollar(text: str, at: int, known: dict[str, str]) -> tuple[str | None, int]:
    """Return the value of the expression that begins at `at`, None if unknown, and the position behind it."""
    if text[at] == "`":
        return None, text.index("`", at + 1) + 1
    if text[at + 1 : at + 2] in ("{", "("):
        end = closing(text, at + 1)
        inner = text[at + 2 : end - 1]
        if text[at + 1] == "{":
            return _parameter(inner, known), end
        is_sum = inner[:1] == "(" and inner[-1:] == ")"
        return _sum(inner[1:-1], known) if is_sum else None, end
    match = _NAME.match(text, at + 1)
    return (known.get(match[0]), match.end()) if match else ("$", at + 1)


def closing(text: str, at: int) -> int:
    """Return the position behind the bracket that closes the one at `at`; raises ValueError if none does."""
    depth, opening = 0, text[at]
    bracket = {"(": ")", "{": "}"}[opening]
    for place in range(at, len(text)):
        depth += (text[place] == opening) - (text[place] == bracket)
        if depth == 0:
            return place + 1
    raise ValueError(f"no closing {bracket}")


def _parameter(inner: str, known: dict[str, str]) -> str | None:
    """Return the value of `${inner}`; None for a variable that is not set, and for forms such as `${NAME%.*}`."""
    match = _PARAMETER.fullmatch(inner)
    if not match:
        return None
    name, operation, word = match.groups()
    value = known.get(name)
    is_set = value is not None and (value != "" or ":" not in (operation or ""))
    if operation is None or (is_set and "+" not in operation):
        return value
    if not is_set and "+" in operation:
        return ""
    return " ".join(words_of(word, known, {}))


def _sum(text: str, known: dict[str, str]) -> str | None:
    """Return the value of `$((text))`, None if it does not follow from whole numbers."""

    def value(node: ast.expr) -> int:
        match node:
            case ast.Constant(int(number)):
                return number
            case ast.Name(name):
                return int(known[name])
            case ast.UnaryOp(ast.USub(), operand):
                return -value(operand)
            case ast.BinOp(left, operation, right) if type(operation) in OF_WHOLE:
                return OF_WHOLE[type(operation)](value(left), value(right))
        raise ValueError

    try:
        return str(value(ast.parse(_expand(text, known).strip(), mode="eval").body))
    except (SyntaxError, ValueError, KeyError, ZeroDivisionError):
        return None
