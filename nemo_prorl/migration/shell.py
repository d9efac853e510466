"""Reads the settings of a shell script: it evaluates what follows from the script itself, and runs nothing."""

import ast
import operator
import os
import re
import shlex
from collections.abc import Callable, Iterator
from typing import Any

import yaml

# Marks what cannot be evaluated; the text behind the mark is the script's.
_UNKNOWN = "\0"
_COMMENT = re.compile(r"^\s*#.*\n", re.M)
_ASSIGNMENT = re.compile(r"([A-Za-z_]\w*)(\+?)=(.*)", re.S)
_ASSIGNED = re.compile(r"\s*((export|declare|local|readonly)\s+(-\w+\s+)*)?[A-Za-z_]\w*\+?=")
_ARRAY = re.compile(r"\s*([A-Za-z_]\w*)(\+?)=(?=\()")
_OVERRIDE = re.compile(r"\+*([A-Za-z_]\w*\.[\w.@/-]+)=(.*)", re.S)
_ALL_ITEMS = re.compile(r'"?\$\{(\w+)\[[@*]\]\}"?')
_NAME = re.compile(r"[A-Za-z_]\w*|[0-9@*#?$!-]")
_PARAMETER = re.compile(r"(\w+)(?:(:?[-=+])(.*))?", re.S)
_PREFIXES = ("then", "do", "else", "{", "export", "declare", "local", "readonly")
_OPEN, _CLOSED = ("if", "for", "while", "until", "case"), ("fi", "done", "esac")
# Keys for what a launcher says: all processes, machines, and a file of accelerate's.
PROCESSES, NODES, LAUNCHER_FILE = "launcher.processes", "launcher.nodes", "launcher.file"
_LAUNCHERS = re.compile(r"(.*/)?(accelerate|torchrun|deepspeed)|torch\.distributed\.(run|launch)")
_ARITHMETIC: dict[type[ast.operator], Callable[[int, int], int]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: lambda a, b: int(a / b),  # bash divides whole numbers
    ast.Mod: lambda a, b: a - b * int(a / b),
}


class Expression(str):
    """The source text of a setting that only the other trainer's program, or a shell, can compute."""


def of_shell(text: str) -> Iterator[tuple[str, Any]]:
    """Yield (key, value) of each `key=value` and `--key value` of all commands of a script.

    Variables, `${NAME:-DEFAULT}`, `$((...))` and arrays get the values that the script gives them; variables of the
    environment count as not set.  A value that needs more, such as `$(date)`, is an `Expression`.
    """
    known = {"HOME": os.path.expanduser("~"), "@": "", "*": ""}
    yield from _of_lines(_COMMENT.sub("", text + "\n").replace("\\\n", " ").splitlines(), known, {})


def _of_lines(lines: list[str], known: dict[str, str], arrays: dict[str, list[str]]) -> Iterator[tuple[str, Any]]:
    depth, begun = 0, 0
    for end in range(1, len(lines) + 1):
        try:
            commands = _commands("\n".join(lines[begun:end]), known, arrays)
        except ValueError:  # an open quotation or bracket: the next line belongs to it
            continue
        begun = end
        for words in commands:
            depth += words[0] in _OPEN
            depth -= sum(word in _CLOSED for word in words)
            while words and (words[0] in _PREFIXES or re.fullmatch(r"-[a-zA-Z]", words[0])):  # export, declare -i
                words = words[1:]
            yield from _of_command(words, known, is_certain=depth == 0)
    if begun < len(lines):
        yield from _of_lines(lines[begun + 1 :], known, arrays)


def _commands(text: str, known: dict[str, str], arrays: dict[str, list[str]]) -> list[list[str]]:
    """Return the words of each command of a line; raises ValueError for an open quotation or bracket."""
    if match := _ARRAY.match(text):
        end = _closing(text, match.end())
        words = _words(text[match.end() + 1 : end - 1], known, arrays)
        arrays[match[1]] = [*arrays.get(match[1], []), *words] if match[2] else words
        return []
    commands: list[list[str]] = [[]]
    for word in _words(text, known, arrays, punctuation=";&|"):
        if word and set(word) <= set(";&|"):
            commands.append([])
        else:
            commands[-1].append(word)
    return [words for words in commands if words]


def _words(text: str, known: dict[str, str], arrays: dict[str, list[str]], punctuation: str = "") -> list[str]:
    text = _ALL_ITEMS.sub(lambda match: " ".join(map(shlex.quote, arrays.get(match[1], []))), text)
    lexer = shlex.shlex(_expand(text, known), posix=True, punctuation_chars=punctuation or False)
    lexer.whitespace_split = True
    return list(lexer)


def _of_command(words: list[str], known: dict[str, str], is_certain: bool) -> Iterator[tuple[str, Any]]:
    if words and all(_ASSIGNMENT.match(word) for word in words):
        for word in words:
            name, added, value = _ASSIGNMENT.match(word).groups()  # type: ignore[union-attr]
            value = known.get(name, "") + value if added else value
            known[name] = value if is_certain or known.get(name) == value else f"{_UNKNOWN}${name}"
        return
    words = words[: next((at for at, word in enumerate(words) if re.match(r"\d?[<>]", word)), None)]
    launcher = next((at for at, word in enumerate(words) if _LAUNCHERS.fullmatch(word)), None)
    begin = 0 if launcher is None else launcher + 1
    pattern = r"(^|/)python[\d.]*$|\.py$" if launcher is None else r"\.py$|^(-m|--module)$"
    program = next((at for at, word in enumerate(words) if at >= begin and re.search(pattern, word)), -1)
    if launcher is not None or words[:2] == ["trl", "grpo"]:
        yield from _of_launcher(words[launcher or 0 : program if program > 0 else None])
    if words[:2] != ["trl", "vllm-serve"] and (program >= 0 or words[:1] != ["ray"]):  # these have flags of their own
        yield from _of_words(words[program + 1 :])


def _of_launcher(words: list[str]) -> Iterator[tuple[str, Any]]:
    """Yield the numbers of processes and machines of a launcher's command, or the file that has them."""
    name = words[0].rpartition("/")[2]
    given = dict(_of_words(words[1:]))
    nodes = next((given[key] for key in ("num_machines", "nnodes", "num_nodes") if key in given), 1)
    each = next((given[key] for key in ("nproc_per_node", "num_gpus") if key in given), None)
    yield NODES, nodes
    if (count := given.get("num_processes")) is not None:
        yield PROCESSES, count
    elif isinstance(each, int) and isinstance(nodes, int):
        yield PROCESSES, each * nodes
    elif (file := given.get("config_file")) is not None:
        yield LAUNCHER_FILE, file
    elif each is None and name == "torchrun":
        yield PROCESSES, nodes  # one of each machine is the default
    else:
        yield PROCESSES, Expression(f"{name} without a number of processes" if each is None else f"{each} of {nodes}")


def _of_words(words: list[str]) -> Iterator[tuple[str, Any]]:
    flag: str | None = None
    values: list[Any] = []
    for word in [*words, "--"]:
        override = _OVERRIDE.fullmatch(word)
        if flag and not override and not word.startswith("--"):
            values.append(_value(word))
            continue
        if flag:
            yield flag, values if len(values) > 1 else values[0] if values else True
        flag, values = None, []
        if override:
            yield override[1], _value(override[2])
        elif word.startswith("--"):
            name, equals, value = word[2:].partition("=")
            name = name.replace("-", "_")
            if equals:
                yield name, _value(value)
            else:
                flag = name


def _value(word: str) -> Any:
    if _UNKNOWN in word:
        return Expression(word.replace(_UNKNOWN, ""))
    try:
        return yaml.safe_load(word)
    except yaml.YAMLError:
        return word


def _expand(text: str, known: dict[str, str]) -> str:
    """Return the text with its `$` expressions replaced, escaped so that `shlex` reads each as plain text."""
    special = r"(\W)" if _ASSIGNED.match(text) else r"([^\w\s])"  # elsewhere, blanks of a value separate words
    done, at, quoted = "", 0, False
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
        elif char in "$`":
            value, end = _dollar(text, at, known)
            escaped = r'([\\"])' if quoted else r"(\W)" if value is None or _UNKNOWN in value else special
            done += re.sub(escaped, r"\\\1", f"{_UNKNOWN}{text[at:end]}" if value is None else value)
            at = end
            continue
        done += text[at:end]
        at = end
    return done


def _dollar(text: str, at: int, known: dict[str, str]) -> tuple[str | None, int]:
    """Return the value of the expression that begins at `at`, None if unknown, and the position behind it."""
    if text[at] == "`":
        return None, text.index("`", at + 1) + 1
    if text[at + 1 : at + 2] in ("{", "("):
        end = _closing(text, at + 1)
        inner = text[at + 2 : end - 1]
        if text[at + 1] == "{":
            return _parameter(inner, known), end
        is_sum = inner[:1] == "(" and inner[-1:] == ")"
        return _sum(inner[1:-1], known) if is_sum else None, end
    match = _NAME.match(text, at + 1)
    return (known.get(match[0]), match.end()) if match else ("$", at + 1)


def _closing(text: str, at: int) -> int:
    """Return the position behind the bracket that closes the one at `at`; raises ValueError if none does."""
    depth, opening = 0, text[at]
    closing = {"(": ")", "{": "}"}[opening]
    for place in range(at, len(text)):
        depth += (text[place] == opening) - (text[place] == closing)
        if depth == 0:
            return place + 1
    raise ValueError(f"no closing {closing}")


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
    return " ".join(_words(word, known, {}))


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
            case ast.BinOp(left, operation, right) if type(operation) in _ARITHMETIC:
                return _ARITHMETIC[type(operation)](value(left), value(right))
        raise ValueError

    try:
        return str(value(ast.parse(_expand(text, known).strip(), mode="eval").body))
    except (SyntaxError, ValueError, KeyError, ZeroDivisionError):
        return None
