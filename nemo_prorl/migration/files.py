"""Reads another trainer's configuration: YAML, JSON, a shell script with its command, or Python with a GRPOConfig."""

import ast
import copy
import operator
import re
import shlex
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import yaml

from nemo_prorl.errors import ConfigError

_ASSIGNMENT = re.compile(r"[A-Za-z_]\w*=")
_VARIABLE = re.compile(r"\$\{(\w+)(?::?-([^}]*))?\}|\$(\w+)")
_ARITHMETIC: dict[type[ast.operator], Callable[[Any, Any], Any]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv,
}


class Expression(str):
    """The source text of a setting that only the other trainer's program can compute."""


def read(path: Path) -> dict[str, Any]:
    """Return {dotted key: value} of a file; raises ConfigError if the file cannot be read or has no setting."""
    try:
        text = path.read_text(encoding="utf-8")
        if path.suffix in (".yaml", ".yml", ".json"):
            found = dict(_leaves(yaml.safe_load(text)))
        else:
            found = dict(_of_python(text) if path.suffix == ".py" else _of_shell(text))
    except (OSError, UnicodeDecodeError, yaml.YAMLError, SyntaxError) as error:
        raise ConfigError(f"{path}: cannot be read: {error}") from error
    if not found:
        raise ConfigError(
            f"{path}: expected a configuration: YAML, JSON, a shell script with the command of the trainer, or Python"
            " with a GRPOConfig(...); got a file without any setting"
        )
    return found


def _leaves(tree: Any, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yield (dotted key, value); a reference such as ${a.b} becomes the value of the key a.b in the file."""
    flat = dict(_plain_leaves(tree, prefix))
    for key, value in flat.items():
        for _ in range(5):  # a reference to a reference
            match = re.fullmatch(r"\$\{([\w.]+)\}", value) if isinstance(value, str) else None
            value = flat.get(match[1], value) if match else value
        if not (isinstance(value, str) and "${" in value):
            yield key, value


def _plain_leaves(tree: Any, prefix: str) -> Iterator[tuple[str, Any]]:
    if isinstance(tree, dict):
        for key, value in tree.items():
            yield from _plain_leaves(value, f"{prefix}.{key}" if prefix else str(key))
    elif prefix:
        yield prefix, tree


def _of_python(text: str) -> Iterator[tuple[str, Any]]:
    """Yield the named arguments of each call whose name ends in GRPOConfig or GRPOTrainer.

    A value that does not follow from literals of the file is an `Expression`.
    """
    tree = ast.parse(text)
    fold = _Fold(tree)
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and ast.unparse(node.func).endswith(("GRPOConfig", "GRPOTrainer")):
            for keyword in node.keywords:
                if keyword.arg == "args":  # the GRPOConfig itself
                    continue
                try:
                    yield keyword.arg or "**", fold.value(keyword.value)
                except ValueError:
                    yield keyword.arg or "**", Expression(ast.unparse(keyword.value))


class _Fold(ast.NodeTransformer):
    """Replaces names by their constants, and arithmetic of constants by its result.

    A constant is a name that the file binds only once, by `NAME = VALUE` outside of a class.
    """

    def __init__(self, tree: ast.Module) -> None:
        nodes = list(ast.walk(tree))
        fields = {id(one) for node in nodes if isinstance(node, ast.ClassDef) for one in node.body}
        bound = Counter(node.id for node in nodes if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store))
        bound.update(node.arg for node in nodes if isinstance(node, ast.arg))
        bound.update(node.asname or node.name for node in nodes if isinstance(node, ast.alias))
        self._known: dict[str, Any] = {}
        simple = (ast.Assign, ast.AnnAssign)
        for node in sorted((n for n in nodes if isinstance(n, simple) and id(n) not in fields), key=lambda n: n.lineno):
            target = node.targets[0] if isinstance(node, ast.Assign) else node.target
            if isinstance(target, ast.Name) and bound[target.id] == 1 and node.value is not None:
                with suppress(ValueError):
                    self._known[target.id] = self.value(node.value)

    def value(self, node: ast.expr) -> Any:
        """Return the value of an expression; raises ValueError if it does not follow from literals."""
        return ast.literal_eval(self.visit(copy.deepcopy(node)))

    def visit_Name(self, node: ast.Name) -> ast.expr:
        return ast.parse(repr(self._known[node.id]), mode="eval").body if node.id in self._known else node

    def visit_BinOp(self, node: ast.BinOp) -> ast.expr:
        self.generic_visit(node)
        left, right = (one.value if isinstance(one, ast.Constant) else None for one in (node.left, node.right))
        if type(node.op) in _ARITHMETIC and isinstance(left, int | float) and isinstance(right, int | float):
            with suppress(ArithmeticError):
                return ast.Constant(_ARITHMETIC[type(node.op)](left, right))
        return node


def _of_shell(text: str) -> Iterator[tuple[str, Any]]:
    """Yield (key, value) of each `key=value` and `--key value` of all commands; the script's variables are replaced."""
    variables: dict[str, str] = {}
    for line in text.replace("\\\n", " ").splitlines():
        try:
            words = shlex.split(line, comments=True)
        except ValueError:
            continue  # a quotation over several lines
        words = [_VARIABLE.sub(lambda m: variables.get(m[1] or m[3], m[2] or m[0]), word) for word in words]
        words = words[1:] if words[:1] in (["export"], ["declare"]) else words
        if words and all(_ASSIGNMENT.match(word) for word in words):
            variables.update(word.split("=", 1) for word in words)  # type: ignore[misc]
        else:
            yield from _of_words(words)


def _of_words(words: list[str]) -> Iterator[tuple[str, Any]]:
    flag: str | None = None
    values: list[str] = []
    for word in [*words, "--"]:
        if not word.startswith("--"):
            if flag is not None:
                values.append(word)
            elif "=" in word and "." in word.split("=")[0]:
                key, _, value = word.partition("=")
                yield key.lstrip("+~"), yaml.safe_load(value)
            continue
        if flag is not None:
            yield flag, [yaml.safe_load(value) for value in values] if len(values) > 1 else _only(values)
        name, equals, value = word[2:].partition("=")
        flag, values = name.replace("-", "_") or None, [value] if equals else []


def _only(values: list[str]) -> Any:
    return yaml.safe_load(values[0]) if values else True
