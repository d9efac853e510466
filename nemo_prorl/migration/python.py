"""Reads the settings of a Python script with a GRPOConfig: evaluates what follows from literals, and runs nothing."""

import ast
import copy
import operator
from collections import Counter
from collections.abc import Callable, Collection, Iterator
from contextlib import suppress
from typing import Any

from nemo_prorl.migration.shell import Expression

CONFIG, TRAINER = "GRPOConfig", "GRPOTrainer"
_POSITIONAL = ("model", "reward_funcs", "args", "train_dataset", "eval_dataset")  # of GRPOTrainer
_ARITHMETIC: dict[type[ast.operator], Callable[[Any, Any], Any]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv,
    ast.Pow: operator.pow,
}
_CASTS = {"int": int, "float": float, "str": str, "bool": bool}
_BRANCHES = (ast.If, ast.For, ast.While, ast.IfExp, ast.Match, ast.ExceptHandler)


def of_python(text: str, keys: Collection[str]) -> tuple[dict[str, Any], list[str]]:
    """Return the settings of a script, and notes on what was assumed of them.

    The settings are the arguments of each call whose name ends in GRPOConfig or GRPOTrainer, and what the script sets
    later, in the order of its lines: `args.beta = 0.1`, `setattr`, `replace(args, beta=0.1)`, items of a mapping that
    a call takes with `**`.  A value that does not follow from literals, or that a branch decides, is an `Expression`,
    and so are all reward functions: there a text is the name of a model.

    Args:
        keys: names of settings.  An attribute of this name belongs to the configuration, whatever holds it.
    """
    script = _Script(ast.parse(text), keys)
    for node in script.nodes:
        script.read(node)
    if not script.is_complete:
        return {}, []
    assumed = [f"{source} is {value!r}" for source, value in script.fold.assumed.items()]
    notes = [f"options of the script have their defaults: {', '.join(assumed)}"] if assumed else []
    return script.settings, notes


def method_of(text: str) -> str:
    """Return what a script without a setting has in place of GRPOConfig(...), as the end of a message; or nothing."""
    tree = ast.parse(text)
    names = {ast.unparse(node.func).rpartition(".")[2] for node in ast.walk(tree) if isinstance(node, ast.Call)}
    others = sorted(name for name in names if name.endswith("Config") and not name.endswith(CONFIG))
    if any(isinstance(node, ast.Name) and node.id == CONFIG for node in ast.walk(tree)):
        return "; its GRPOConfig comes from its command line: convert the shell script, or the YAML file, that sets it"
    return f"; {', '.join(others)} configures another method than GRPO" if others else ""


class _Script:
    """The settings that a script has made so far, when its nodes are read in the order of its lines."""

    def __init__(self, tree: ast.Module, keys: Collection[str]) -> None:
        self.settings: dict[str, Any] = {}
        nodes: list[Any] = [node for node in ast.walk(tree) if hasattr(node, "lineno")]
        nodes.sort(key=lambda node: (node.lineno, node.col_offset))
        self.nodes: list[ast.AST] = nodes
        self.fold = _Fold(self.nodes)
        self._keys = set(keys)
        self._parent = {id(below): node for node in ast.walk(tree) for below in ast.iter_child_nodes(node)}
        self._configs = 0  # number of calls of GRPOConfig
        self._called: set[str] = set()  # the keys that they set
        self._classes = {
            node.name: node
            for node in self.nodes
            if isinstance(node, ast.ClassDef) and any(ast.unparse(base).endswith(CONFIG) for base in node.bases)
        }

    @property
    def is_complete(self) -> bool:
        """Whether the settings are those of the script: False if its GRPOConfig comes from a command line."""
        return self._configs > 0 or not any(isinstance(node, ast.Name) and node.id == CONFIG for node in self.nodes)

    def read(self, node: ast.AST) -> None:
        """Add the settings that one node makes."""
        match node:
            case ast.Call(func=func):
                self._call(node, ast.unparse(func))
            case ast.Assign(targets=[*targets], value=value) if isinstance(targets[0], ast.Attribute):
                for target in targets:
                    self._attribute(node, target, value)
            case ast.AnnAssign(target=target, value=ast.expr() as value):
                self._attribute(node, target, value)
            case ast.AugAssign(target=ast.Attribute() as target, op=op, value=value):
                before = ast.Constant(self.settings.get(target.attr))
                self._attribute(node, target, ast.BinOp(before, op, value))

    def _call(self, node: ast.Call, name: str) -> None:
        last = name.rpartition(".")[2]
        if last.endswith("LoraConfig"):
            self.settings["peft_config"] = Expression(ast.unparse(node))
        elif last.endswith(TRAINER):
            self._set_all(node, [*zip(_POSITIONAL, node.args, strict=False), *self._keywords(node)])
        elif last.endswith(CONFIG) or last in self._classes:
            fields = self._classes[last].body if last in self._classes else []
            given = [(ast.unparse(n.target), n.value) for n in fields if isinstance(n, ast.AnnAssign) and n.value]
            self._set_all(node, [*given, *self._keywords(node)], earlier=frozenset(self._called))
            self._configs += 1
            self._called |= self.settings.keys()
        elif last == "replace" and node.keywords and len(node.args) == 1:
            self._set_all(node, list(self._keywords(node)))
        elif name == "setattr" and len(node.args) == 3:
            with suppress(ValueError):
                if (key := self.fold.value(node.args[1])) in self._keys:
                    self._set(node, key, node.args[2])

    def _set_all(self, node: ast.Call, given: list[tuple[str, ast.expr]], earlier: Collection[str] = ()) -> None:
        """Set the arguments of a call; `earlier`: keys that another call of the same kind has set."""
        for key, value in given:
            if key != "args":  # the GRPOConfig itself
                self._set(node, key, value, is_another=key in earlier)

    def _attribute(self, node: ast.AST, target: ast.expr, value: ast.expr) -> None:
        if isinstance(target, ast.Attribute) and target.attr in self._keys and ast.unparse(target.value) != "self":
            self._set(node, target.attr, value)

    def _keywords(self, call: ast.Call) -> Iterator[tuple[str, ast.expr]]:
        for keyword in call.keywords:
            if keyword.arg is not None:
                yield keyword.arg, keyword.value
            elif (items := self._mapping(keyword.value, call)) is not None:
                yield from items.items()
            else:
                yield "**", keyword.value

    def _set(self, node: ast.AST, key: str, source: ast.expr, is_another: bool = False) -> None:
        """Set a key to the value of an expression; to an `Expression` if a branch decides, or another call did."""
        value: Any = Expression(ast.unparse(source))
        with suppress(ValueError):
            if key != "**":
                folded = self.fold.value(source)
                value = Expression(repr(folded)) if key == "reward_funcs" else folded
        if key in self.settings and self.settings[key] == value:
            return
        if is_another:
            value = Expression(f"{self.settings[key]} or {ast.unparse(source)}")
        elif not isinstance(node, ast.Call) or not ast.unparse(node.func).endswith((CONFIG, TRAINER)):
            value = Expression(f"{ast.unparse(source)} in a branch") if self._in_branch(node) else value
        self.settings[key] = value

    def _in_branch(self, node: ast.AST) -> bool:
        while (node := self._parent.get(id(node))) is not None:  # type: ignore[assignment]
            if isinstance(node, _BRANCHES) and not (isinstance(node, ast.If) and "__name__" in ast.unparse(node.test)):
                return True
        return False

    def _mapping(self, node: ast.expr, use: ast.Call) -> dict[str, ast.expr] | None:
        """Return the items of a mapping as the call `use` finds it; None if its keys are not literals."""
        match node:
            case ast.Dict(keys=keys, values=values):
                pairs = [self._item(key, value, use) for key, value in zip(keys, values, strict=True)]
            case ast.Call(func=ast.Name("dict"), args=args):
                pairs = [*(self._mapping(arg, use) for arg in args), dict(self._keywords(node))]
            case ast.BinOp(left, ast.BitOr(), right):
                pairs = [self._mapping(left, use), self._mapping(right, use)]
            case ast.Name(name) if (source := self.fold.sources.get(name)) is not None:
                pairs = [self._mapping(source, use), *self._changes(name, use)]
            case _:
                return None
        return None if None in pairs else {key: value for items in pairs for key, value in (items or {}).items()}

    def _item(self, key: ast.expr | None, value: ast.expr, use: ast.Call) -> dict[str, ast.expr] | None:
        """Return the items that `key: value`, or `**value` if the key is None, adds to a mapping."""
        if key is None:
            return self._mapping(value, use)
        return {str(key.value): value} if isinstance(key, ast.Constant) else None

    def _changes(self, name: str, use: ast.Call) -> Iterator[dict[str, ast.expr] | None]:
        """Yield the items that the lines before `use` add to the mapping of this name; None if they are unknown."""
        for node in self.nodes:
            if node.lineno >= use.lineno:  # type: ignore[attr-defined]
                return
            match node:
                case ast.Assign(targets=[ast.Subscript(value=ast.Name(changed), slice=key)], value=value):
                    items = self._item(key, value, use)
                case ast.Call(func=ast.Attribute(value=ast.Name(changed), attr="update"), args=args):
                    maps = [*(self._mapping(arg, use) for arg in args), dict(self._keywords(node))]
                    items = None if None in maps else {k: v for one in maps for k, v in (one or {}).items()}
                case ast.AugAssign(target=ast.Name(changed), op=ast.BitOr(), value=value):
                    items = self._mapping(value, use)
                case _:
                    continue
            if changed == name:
                yield None if self._in_branch(node) else items


class _Fold(ast.NodeTransformer):
    """Replaces names by their constants, and arithmetic of constants by its result.

    A constant is a name that the file binds only once, by `NAME = VALUE` outside of a class.

    Attributes:
        sources: {name: the expression that it is bound to}.
        assumed: {expression: default of the script's option that was taken for it}.
    """

    def __init__(self, nodes: list[ast.AST]) -> None:
        fields = {id(one) for node in nodes if isinstance(node, ast.ClassDef) for one in node.body}
        bound = Counter(node.id for node in nodes if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store))
        bound.subtract(node.target.id for node in nodes if _joins(node))  # type: ignore[attr-defined]
        bound.update(node.arg for node in nodes if isinstance(node, ast.arg))
        bound.update((n.asname or n.name).partition(".")[0] for n in nodes if isinstance(n, ast.alias))
        self._modules = {(n.asname or n.name).partition(".")[0] for n in nodes if isinstance(n, ast.alias)}
        self.sources: dict[str, ast.expr] = {}
        self.assumed: dict[str, Any] = {}
        self._known: dict[str, Any] = {}
        self._options: dict[str, Any] = {}
        for node in nodes:
            target = node.targets[0] if isinstance(node, ast.Assign) else getattr(node, "target", None)
            if not isinstance(node, ast.Assign | ast.AnnAssign) or id(node) in fields or node.value is None:
                continue
            if isinstance(target, ast.Name) and bound[target.id] == 1:
                self.sources[target.id] = node.value
                with suppress(ValueError):
                    self._known[target.id] = self.value(node.value)
        self._options = dict(_options(nodes, self))

    def value(self, node: ast.expr) -> Any:
        """Return the value of an expression; raises ValueError if it does not follow from literals."""
        try:
            return ast.literal_eval(self.visit(copy.deepcopy(node)))
        except (TypeError, SyntaxError, MemoryError, RecursionError) as error:
            raise ValueError(str(error)) from error

    def visit_Name(self, node: ast.Name) -> ast.expr:
        return _literal(self._known[node.id]) if node.id in self._known else node

    def visit_Attribute(self, node: ast.Attribute) -> ast.expr:
        holder = node.value
        if not isinstance(holder, ast.Name) or holder.id in self._modules or node.attr not in self._options:
            return node
        self.assumed[ast.unparse(node)] = self._options[node.attr]
        return _literal(self._options[node.attr])

    def visit_Call(self, node: ast.Call) -> ast.expr:
        self.generic_visit(node)
        name, values = ast.unparse(node.func), node.args
        if name in ("os.getenv", "os.environ.get", "getenv") and len(values) == 2:
            self.assumed[ast.unparse(node)] = default = ast.literal_eval(values[1])
            return _literal(default)
        if name in _CASTS and len(values) == 1 and isinstance(values[0], ast.Constant):
            return _literal(_CASTS[name](values[0].value))
        return node

    def visit_IfExp(self, node: ast.IfExp) -> ast.expr:
        self.generic_visit(node)
        return (node.body if node.test.value else node.orelse) if isinstance(node.test, ast.Constant) else node

    def visit_UnaryOp(self, node: ast.UnaryOp) -> ast.expr:
        self.generic_visit(node)
        match node:
            case ast.UnaryOp(ast.USub(), ast.Constant(int() | float() as number)):
                return ast.Constant(-number)
        return node

    def visit_BinOp(self, node: ast.BinOp) -> ast.expr:
        self.generic_visit(node)
        left, right = (one.value if isinstance(one, ast.Constant) else None for one in (node.left, node.right))
        if type(node.op) in _ARITHMETIC and isinstance(left, int | float) and isinstance(right, int | float):
            with suppress(ArithmeticError):
                return ast.Constant(_ARITHMETIC[type(node.op)](left, right))
        return node


def _joins(node: ast.AST) -> bool:
    """Return whether a node is `NAME |= MAPPING`, which binds no other object to the name."""
    return isinstance(node, ast.AugAssign) and isinstance(node.op, ast.BitOr) and isinstance(node.target, ast.Name)


def _literal(value: Any) -> ast.expr:
    return ast.parse(repr(value), mode="eval").body


def _options(nodes: list[ast.AST], fold: _Fold) -> Iterator[tuple[str, Any]]:
    """Yield (name, default) of each option of a script whose default follows from literals.

    Options are those of argparse, and the fields of classes that are no GRPOConfig.  A name with two defaults has none.
    """
    found: dict[str, list[Any]] = {}
    for node in nodes:
        for name, default in _defaults(node):
            values = found.setdefault(name, [])
            with suppress(ValueError):
                if default is not None and (value := fold.value(default)) not in values:
                    values.append(value)
    for name, values in found.items():
        if len(values) == 1:
            yield name, values[0]


def _defaults(node: ast.AST) -> Iterator[tuple[str, ast.expr | None]]:
    if isinstance(node, ast.Call) and ast.unparse(node.func).endswith("add_argument"):
        given = {one.arg: one.value for one in node.keywords}
        flags = [str(one.value) for one in node.args if isinstance(one, ast.Constant)]
        if flags:
            yield max(flags, key=len).lstrip("-").replace("-", "_"), given.get("default")
    elif isinstance(node, ast.ClassDef) and not any(ast.unparse(base).endswith(CONFIG) for base in node.bases):
        for one in node.body:
            if isinstance(one, ast.AnnAssign) and isinstance(one.target, ast.Name):
                default = one.value
                if isinstance(default, ast.Call) and ast.unparse(default.func).endswith("field"):
                    default = next((k.value for k in default.keywords if k.arg == "default"), None)
                yield one.target.id, default
