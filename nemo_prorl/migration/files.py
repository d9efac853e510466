"""Reads another trainer's configuration: YAML, JSON, a shell script with its command, or Python with a GRPOConfig."""

import ast
import copy
import operator
import re
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import yaml
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from nemo_prorl.errors import ConfigError
from nemo_prorl.migration.shell import Expression, of_shell

_ARITHMETIC: dict[type[ast.operator], Callable[[Any, Any], Any]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv,
}
BASE = "defaults"  # key with the name of a file that a YAML file of NeMo-RL is based on


def read(path: Path) -> dict[str, Any]:
    """Return {dotted key: value} of a file; raises ConfigError if the file cannot be read or has no setting."""
    try:
        if path.suffix in (".yaml", ".yml", ".json"):
            found = dict(_leaves(_tree(path)))
        else:
            text = path.read_text(encoding="utf-8")
            found = dict(_of_python(text) if path.suffix == ".py" else of_shell(text))
    except (OSError, UnicodeDecodeError, yaml.YAMLError, SyntaxError) as error:
        raise ConfigError(f"{path}: cannot be read: {error}") from error
    if not found:
        raise ConfigError(
            f"{path}: expected a configuration: YAML, JSON, a shell script with the command of the trainer, or Python"
            " with a GRPOConfig(...); got a file without any setting"
        )
    return {key: _number(value) for key, value in found.items()}


def _number(value: Any) -> Any:
    """Return a number for a text such as 1e-6, which is no number in YAML 1.1; any other value as it is."""
    if isinstance(value, list):
        return [_number(item) for item in value]
    is_text = isinstance(value, str) and not isinstance(value, Expression)
    return float(value) if is_text and re.fullmatch(r"[+-]?(\d+\.?\d*|\.\d+)([eE][+-]?\d+)?", value) else value


def _tree(path: Path) -> dict[str, Any]:
    """Return the mapping of a YAML file over those of the files that its key `defaults` names, if these exist."""
    tree = yaml.safe_load(path.read_text(encoding="utf-8"))
    if not isinstance(tree, dict):
        return {}
    bases = tree.get(BASE)
    for base in [bases] if isinstance(bases, str) else bases if isinstance(bases, list) else []:
        if isinstance(base, str) and (path.parent / base).is_file():
            tree.pop(BASE)
            tree = _merged(_tree(path.parent / base), tree)
    return tree


def _merged(below: dict[str, Any], above: dict[str, Any]) -> dict[str, Any]:
    both = {key: _merged(below[key], value) for key, value in above.items() if _are_mappings(below.get(key), value)}
    return below | above | both


def _are_mappings(*values: Any) -> bool:
    return all(isinstance(value, dict) for value in values)


def _leaves(tree: dict[str, Any]) -> Iterator[tuple[str, Any]]:
    """Yield (dotted key, value); references such as ${a.b} are resolved, or the value is an `Expression`."""
    if not OmegaConf.has_resolver("mul"):  # NeMo-RL's
        OmegaConf.register_new_resolver("mul", lambda a, b: a * b)
    whole = OmegaConf.create(tree)

    def below(node: Any, prefix: str) -> Iterator[tuple[str, Any]]:
        for key in node:
            name = f"{prefix}{key}"
            try:
                value = node[key]
            except OmegaConfBaseException:
                raw: Any = OmegaConf.to_container(node)
                value = Expression(raw[key])
            if isinstance(value, DictConfig):
                yield from below(value, f"{name}.")
            else:
                yield name, OmegaConf.to_container(value) if OmegaConf.is_config(value) else value

    yield from below(whole, "")


def _of_python(text: str) -> Iterator[tuple[str, Any]]:
    """Yield the named arguments of each call whose name ends in GRPOConfig or GRPOTrainer, and a LoraConfig.

    A value that does not follow from literals of the file is an `Expression`, and so are all reward functions: there a
    text is the name of a model.
    """
    tree = ast.parse(text)
    fold = _Fold(tree)
    for node in ast.walk(tree):
        name = ast.unparse(node.func) if isinstance(node, ast.Call) else ""
        if name.endswith("LoraConfig"):
            yield "peft_config", Expression(ast.unparse(node))
        if isinstance(node, ast.Call) and name.endswith(("GRPOConfig", "GRPOTrainer")):
            for keyword in node.keywords:
                if keyword.arg == "args":  # the GRPOConfig itself
                    continue
                try:
                    value = fold.value(keyword.value)
                    yield keyword.arg or "**", Expression(repr(value)) if keyword.arg == "reward_funcs" else value
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
