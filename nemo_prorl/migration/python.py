"""Reads the settings of a Python script with a GRPOConfig: evaluates what follows from the file, and runs nothing."""

import ast
import copy
import operator
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from functools import cache
from typing import Any

from nemo_prorl.migration.names import table
from nemo_prorl.migration.shell import UNREAD, Expression

_ARITHMETIC: dict[type[ast.operator], Callable[[Any, Any], Any]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
    ast.Pow: operator.pow,
}
_FUNCTIONS: dict[str, Callable[..., Any]] = {
    "int": int, "float": float, "str": str, "bool": bool, "min": min, "max": max, "dict": dict, "list": list,
}  # fmt: skip
_CONFIG, _TRAINER = "GRPOConfig", "GRPOTrainer"
_POSITIONS = {
    _CONFIG: ["output_dir"],
    _TRAINER: ["model", "reward_funcs", "args", "train_dataset", "eval_dataset", "processing_class"],
}
_CHANGES = {"append", "clear", "extend", "insert", "pop", "remove", "setdefault", "update"}
_BRANCHES = (ast.If, ast.For, ast.While, ast.Try, ast.IfExp, ast.Match)
_Options = dict[str, Any]


def of_python(text: str, flags: Mapping[str, Any] | None = None) -> Iterator[tuple[str, Any]]:
    """Yield (key, value) of the GRPOConfig and the GRPOTrainer of a script, in the order in which the script sets them.

    A value that does not follow from the file is an `Expression`, and so are all reward functions: there a text is the
    name of a model.  What cannot be read at all has a key that begins with `UNREAD`.

    Args:
        flags: {option without --: value} of the command line that starts the script.
    """
    script = _Script(ast.parse(text), dict(flags or {}))
    yield from script.settings()
    if flags is None and script.is_parsed:
        yield (
            f"{UNREAD}the command line",
            "the script takes its GRPOConfig from there: convert the command, or its YAML",
        )


class _Script:
    """The statements of a script, with what they bind to a configuration or a trainer."""

    def __init__(self, tree: ast.Module, flags: _Options) -> None:
        self.flags = flags
        self.fold = _Fold(tree, flags)
        self.nodes = list(_in_order(tree))
        self.parents = {id(child): node for node in self.nodes for child in ast.iter_child_nodes(node)}
        self.classes = {node.name: node for node in self.nodes if isinstance(node, ast.ClassDef)}
        names = {
            alias.asname: alias.name for node in self.nodes if isinstance(node, ast.ImportFrom) for alias in node.names
        }
        self.renamed = {new: old for new, old in names.items() if new is not None}
        self.configs = self._configs()
        self.trainers = {name for name, value in self._bindings() if self._kind(value) == _TRAINER}
        self.configs |= {f"{name}.args" for name in self.trainers}

    @property
    def is_parsed(self) -> bool:
        """Whether a parser of the script fills a GRPOConfig from the command line."""
        return bool(self._parsed_classes())

    def settings(self) -> Iterator[tuple[str, Any]]:
        found: dict[str, Any] = {}
        yield from self._unread()
        if parsed := self._parsed_classes():
            options = {name for one in parsed if one in self.classes for name in self.fold.fields(one)}
            own = {name for one in parsed if self._kind_of_class(one) == _CONFIG for name in self.fold.fields(one)}
            found |= {key: value for key, value in self.flags.items() if key not in options - own}
        calls = [node for node in self.nodes if isinstance(node, ast.Call) and self._kind(node) == _CONFIG]
        for key, value in self._of_calls(calls):
            found[key] = value
        for node in self.nodes:
            for key, value in self._of_statement(node, found):
                found[key] = value
        yield from found.items()

    def _unread(self) -> Iterator[tuple[str, Any]]:
        for name, own in self.classes.items():
            methods = [one.name for one in own.body if isinstance(one, ast.FunctionDef | ast.AsyncFunctionDef)]
            if self._kind_of_class(name) and methods:
                yield (
                    f"{UNREAD}class {name}",
                    f"its methods ({', '.join(methods)}) may change the algorithm: compare them",
                )
        if any(isinstance(node, ast.Call) and _last(node).endswith("get_peft_model") for node in self.nodes):
            yield "peft_config", Expression("get_peft_model(...)")
        for node in self.nodes:
            if isinstance(node, ast.Call) and _last(node).endswith("LoraConfig"):
                yield "peft_config", Expression(ast.unparse(node))

    def _kind_of_class(self, name: str) -> str | None:
        """Return whether a class is a configuration or a trainer, by its name or, if the file has it, by its base."""
        name = self.renamed.get(name, name)
        bases = (
            [ast.unparse(base).rsplit(".", 1)[-1] for base in self.classes[name].bases] if name in self.classes else []
        )
        kinds = [kind for kind in (_CONFIG, _TRAINER) if name.endswith(kind)]
        kinds += [kind for base in bases if base != name and (kind := self._kind_of_class(base))]
        return kinds[0] if kinds else None

    def _kind(self, node: ast.expr | None) -> str | None:
        return self._kind_of_class(_last(node)) if isinstance(node, ast.Call) else None

    def _bindings(self) -> Iterator[tuple[str, ast.expr]]:
        for node in self.nodes:
            targets = node.targets if isinstance(node, ast.Assign) else [getattr(node, "target", None)]
            value = getattr(node, "value", None)
            if isinstance(node, ast.Assign | ast.AnnAssign | ast.NamedExpr) and value is not None:
                yield from ((target.id, value) for target in targets if isinstance(target, ast.Name))

    def _parsed_classes(self) -> list[str]:
        """Return the classes that a parser of the file fills from the command line, if one of them is a GRPOConfig."""
        for node in self.nodes:
            if isinstance(node, ast.Call) and _last(node) in ("TrlParser", "HfArgumentParser") and node.args:
                names = [ast.unparse(one).rsplit(".", 1)[-1] for one in getattr(node.args[0], "elts", [node.args[0]])]
                if any(self._kind_of_class(name) == _CONFIG for name in names):
                    return names
        return []

    def _configs(self) -> set[str]:
        """Return the names that are bound to a configuration."""
        parsed = self._parsed_classes()
        found = {name for name, value in self._bindings() if self._kind(value) == _CONFIG}
        for node in self.nodes:
            target = node.targets[0] if isinstance(node, ast.Assign) else None
            if target is not None and _is_parsing(node.value):  # type: ignore[attr-defined]
                names = [ast.unparse(one) for one in getattr(target, "elts", [target])]
                pairs = zip(names, parsed, strict=False)
                found |= {name for name, kind in pairs if self._kind_of_class(kind) == _CONFIG}
        size = -1
        while size != len(found):
            size = len(found)
            found |= {
                name for name, value in self._bindings() if ast.unparse(value) in found or self._replaced(value, found)
            }
        return found

    def _replaced(self, node: ast.expr, configs: set[str]) -> bool:
        """Return whether an expression is a copy of a configuration."""
        names = ("replace", "copy", "deepcopy")
        return (
            isinstance(node, ast.Call)
            and _last(node) in names
            and bool(node.args)
            and ast.unparse(node.args[0]) in configs
        )

    def _of_calls(self, calls: list[ast.Call]) -> Iterator[tuple[str, Any]]:
        """Yield the settings of the constructor; of several, those that they share are known."""
        each = []
        for call in calls:
            own = self.classes.get(_last(call))
            each.append({**(self.fold.fields(own.name) if own else {}), **dict(self._arguments(call, _CONFIG))})
        if not calls and (parsed := [one for one in self._parsed_classes() if self._kind_of_class(one) == _CONFIG]):
            fields = self.fold.fields(parsed[0]) if parsed[0] in self.classes else {}
            each = [{key: self.flags.get(key, value) for key, value in fields.items()}]
        for key in dict.fromkeys(key for one in each for key in one):
            values = [one.get(key, Expression("the default")) for one in each]
            same = all(type(value) is type(values[0]) and value == values[0] for value in values)
            yield key, values[0] if same else Expression(" or ".join(map(str, values)))

    def _arguments(self, call: ast.Call, kind: str) -> Iterator[tuple[str, Any]]:
        named = list(zip(_POSITIONS[kind], call.args, strict=False))
        if len(call.args) > len(named) or any(isinstance(one, ast.Starred) for one in call.args):
            yield f"{UNREAD}{ast.unparse(call.func)}(...)", "it has arguments without a name: name them"
        for key, node in [*named, *((keyword.arg, keyword.value) for keyword in call.keywords)]:
            if key == "args" and kind == _TRAINER:
                continue
            value = self.fold.get(node)
            if key is not None:
                yield (
                    key,
                    Expression(repr(value)) if key == "reward_funcs" and not isinstance(value, Expression) else value,
                )
            elif isinstance(value, dict):
                yield from value.items()
            else:
                yield f"{UNREAD}**{value}", "the settings of this mapping have no value here"

    def _of_statement(self, node: ast.AST, found: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
        """Yield what a statement sets after the constructor; `found` has what is set before it."""
        if isinstance(node, ast.Call) and self._kind(node) == _TRAINER:
            yield from self._arguments(node, _TRAINER)
            return
        changes = self._of_call(node) if isinstance(node, ast.Call) else self._of_assignment(node, found)
        for key, value in changes:
            before = found.get(key, "the default")
            known = key.startswith(UNREAD) or self._is_certain(node) or value == before
            yield key, value if known else Expression(f"{before} or {value}")

    def _is_of_trainer(self, target: ast.Attribute) -> bool:
        """Return whether an attribute belongs to a trainer, and is no setting."""
        return target.attr not in _settings_of_trl() and ast.unparse(target.value) in self.trainers

    def _is_dictionary(self, node: ast.expr) -> bool:
        """Return whether an expression is the dictionary of a configuration's attributes."""
        text = ast.unparse(node)
        return any(text in (f"{name}.__dict__", f"vars({name})") for name in self.configs)

    def _is_setting(self, target: ast.Attribute) -> bool:
        """Return whether an attribute belongs to a configuration, of a known name or by its own name."""
        base = ast.unparse(target.value)
        return base in self.configs or (target.attr in _settings_of_trl() and base.partition(".")[0] != "self")

    def _of_assignment(self, node: ast.AST, found: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
        targets = node.targets if isinstance(node, ast.Assign) else [getattr(node, "target", None)]
        for target in targets:
            if isinstance(target, ast.Subscript) and self._is_dictionary(target.value):
                yield f"{UNREAD}{ast.unparse(target)}", "set it as an attribute, and convert again"
            if isinstance(target, ast.Attribute) and self._is_of_trainer(target):
                yield f"{UNREAD}{ast.unparse(target)}", "this attribute of the trainer may change the algorithm"
            if not isinstance(target, ast.Attribute) or not self._is_setting(target):
                continue
            if isinstance(node, ast.AugAssign):
                before = found.get(target.attr, Expression("the default"))
                yield target.attr, self._combined(before, node.op, node.value)
            elif isinstance(node, ast.Assign | ast.AnnAssign) and node.value is not None:
                yield target.attr, self.fold.get(node.value)
            else:  # of a loop
                yield target.attr, Expression(ast.unparse(target))

    def _of_call(self, node: ast.Call) -> Iterator[tuple[str, Any]]:
        used = {ast.unparse(one) for one in ast.walk(node) if isinstance(one, ast.expr)}
        match node:
            case ast.Call(ast.Name("setattr"), [base, name, value]) if ast.unparse(base) in self.configs:
                key = self.fold.get(name)
                if isinstance(key, Expression):
                    yield f"{UNREAD}{ast.unparse(node)}", "which settings it sets is unknown"
                else:
                    yield key, self.fold.get(value)
            case ast.Call() if self._replaced(node, self.configs):
                for one in node.keywords:
                    yield one.arg or f"{UNREAD}**{ast.unparse(one.value)}", self.fold.get(one.value)
            case ast.Call(ast.Attribute(_, name)) if (
                name.startswith("set_") or name == "update"
            ) and used & self.configs:
                yield f"{UNREAD}{ast.unparse(node)}", "which settings it sets is unknown"

    def _combined(self, before: Any, operation: ast.operator, node: ast.expr) -> Any:
        value = self.fold.get(node)
        if not isinstance(before, Expression) and not isinstance(value, Expression) and type(operation) in _ARITHMETIC:
            with suppress(TypeError, ArithmeticError):
                return _ARITHMETIC[type(operation)](before, value)
        return Expression(f"{before}, changed by {value}")

    def _is_certain(self, node: ast.AST) -> bool:
        """Return whether a node is outside of branches and loops; `if __name__ == ...` is none."""
        while (parent := self.parents.get(id(node))) is not None:
            node = parent
            if isinstance(node, _BRANCHES) and "__name__" not in ast.unparse(getattr(node, "test", ast.Constant(0))):
                return False
        return True


@cache
def _settings_of_trl() -> set[str]:
    """Return the names that only a configuration has, so that an attribute of this name is a setting."""
    parts = (table("trl")[part] for part in ("keys", "derived", "defaults", "neutral"))
    return {key for part in parts for key in part} - {"model"}


class _Fold(ast.NodeTransformer):
    """Replaces names by their constants, and arithmetic of constants by its result.

    A constant is a name that the file binds only once, by `NAME = VALUE` outside of a class, and does not change.
    Options of a command line have their value of `flags` or their default.
    """

    def __init__(self, tree: ast.Module, flags: _Options) -> None:
        self.flags = flags
        nodes = list(_in_order(tree))
        classes = [node for node in nodes if isinstance(node, ast.ClassDef)]
        fields = {id(one) for node in classes for one in node.body}
        stored = [node.id for node in nodes if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)]
        self._stored = Counter(stored)
        bound = Counter(stored)
        bound.update(node.arg for node in nodes if isinstance(node, ast.arg))
        bound.update(node.asname or node.name for node in nodes if isinstance(node, ast.alias))
        bound.update(_changed(nodes))
        self._known: dict[str, Any] = {}
        self._options: dict[str, _Options] = {}  # {name of a namespace: its attributes}
        self._fields: dict[str, _Options] = {}
        statements = [node for node in nodes if isinstance(node, ast.Assign | ast.AnnAssign) and id(node) not in fields]
        for _ in range(3):  # classes use constants, constants use classes, functions use both
            self._fields = {one.name: dict(self._of_class(one)) for one in classes}
            of_parser = dict(self._of_parser(nodes))
            for statement in statements:
                self._bind(statement, bound, nodes, of_parser)
            self._bind_parameters(nodes, of_parser)
        self._options |= {name: found for name, found in self._fields.items() if name not in self._options}
        for node in nodes:
            if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
                self._options.get(ast.unparse(node.value), {}).pop(node.attr, None)

    def _bind(
        self, node: ast.Assign | ast.AnnAssign, bound: Mapping[str, int], nodes: list[ast.AST], of_parser: _Options
    ) -> None:
        target = node.targets[0] if isinstance(node, ast.Assign) else node.target
        if node.value is None:
            return
        if isinstance(target, ast.Name) and bound[target.id] == 1:
            with suppress(ValueError, TypeError):
                self._known[target.id] = self.value(node.value)
            if isinstance(node.value, ast.Call) and _last(node.value) in self._fields:
                given = {one.arg: self.get(one.value) for one in node.value.keywords if one.arg}
                self._options[target.id] = self._fields[_last(node.value)] | given
        self._bind_parsed(target, node.value, nodes, of_parser)

    def fields(self, name: str) -> _Options:
        """Return {field: default} of a class of the file."""
        return self._fields.get(name, {})

    def get(self, node: ast.expr) -> Any:
        """Return the value of an expression, or an `Expression`."""
        try:
            return self.value(node)
        except (ValueError, TypeError):
            return Expression(ast.unparse(node))

    def value(self, node: ast.expr) -> Any:
        """Return the value of an expression; raises ValueError if it does not follow from literals."""
        return ast.literal_eval(self.visit(copy.deepcopy(node)))

    def _of_class(self, node: ast.ClassDef) -> Iterator[tuple[str, Any]]:
        for one in node.body:
            target = one.targets[0] if isinstance(one, ast.Assign) else getattr(one, "target", None)
            if isinstance(one, ast.Assign | ast.AnnAssign) and isinstance(target, ast.Name) and one.value is not None:
                value: ast.expr = one.value
                if isinstance(value, ast.Call) and _last(value) == "field":
                    given = [keyword.value for keyword in value.keywords if keyword.arg == "default"]
                    factory = [keyword.value for keyword in value.keywords if keyword.arg == "default_factory"]
                    lambdas = [made.body for made in factory if isinstance(made, ast.Lambda)]
                    value = (given or lambdas or [value])[0]
                yield target.id, self.get(value)

    def _of_parser(self, nodes: list[ast.AST]) -> Iterator[tuple[str, Any]]:
        """Yield (option, value) of each `add_argument`, with the value of the command line or the default."""
        for node in nodes:
            if isinstance(node, ast.Call) and _last(node) == "set_defaults":
                yield from ((one.arg, self.get(one.value)) for one in node.keywords if one.arg)
            if not isinstance(node, ast.Call) or _last(node) != "add_argument" or not node.args:
                continue
            words = [str(one) for one in map(self.get, node.args)]
            options = {one.arg: self.get(one.value) for one in node.keywords if one.arg}
            long = next((word for word in words if word.startswith("--")), words[0])
            name = str(options.get("dest", long.lstrip("-").replace("-", "_")))
            action = str(options.get("action", ""))
            default: Any = {"store_true": False, "store_false": True}.get(action)
            if options.get("required") or not long.startswith("-"):
                default = Expression(f"the option {long}")
            flag = long.lstrip("-").replace("-", "_")
            if flag in self.flags:
                yield name, False if action == "store_false" else self.flags[flag]
            else:
                yield name, options.get("default", default)

    def _bind_parsed(self, target: ast.expr, value: ast.expr, nodes: list[ast.AST], of_parser: _Options) -> None:
        """Bind the names on the left of `... = parser.parse_args()` to the options."""
        if not _is_parsing(value) and not self._returns_parsed(value, nodes):
            return
        names = [ast.unparse(one) for one in getattr(target, "elts", [target])]
        if any(self._stored[name] > 1 for name in names):  # which of them a use has is not evaluated
            return
        parsers = [
            n for n in nodes if isinstance(n, ast.Call) and _last(n) in ("TrlParser", "HfArgumentParser") and n.args
        ]
        if not parsers:
            self._options[names[0]] = dict(of_parser)
            return
        listed = parsers[0].args[0]
        kinds = [ast.unparse(one).rsplit(".", 1)[-1] for one in getattr(listed, "elts", [listed])]
        for name, kind in zip(names, kinds, strict=False):
            fields = {key: self.flags.get(key, default) for key, default in self._fields.get(kind, {}).items()}
            self._options[name] = (self.flags if kind not in self._fields else {}) | fields

    def _returns_parsed(self, value: ast.expr, nodes: list[ast.AST]) -> bool:
        name = _last(value) if isinstance(value, ast.Call) else ""
        return any(
            isinstance(node, ast.FunctionDef)
            and node.name == name
            and any(
                isinstance(one, ast.Return) and one.value and "parse" in ast.unparse(one.value)
                for one in ast.walk(node)
            )
            for node in nodes
        )

    def _bind_parameters(self, nodes: list[ast.AST], of_parser: _Options) -> None:
        """Bind the parameters of the file's functions that get the options."""
        functions = {node.name: node for node in nodes if isinstance(node, ast.FunctionDef)}
        for node in nodes:
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in functions:
                for parameter, given in zip(functions[node.func.id].args.args, node.args, strict=False):
                    text = ast.unparse(given)
                    if text in self._options:
                        self._options.setdefault(parameter.arg, self._options[text])
                    elif _is_parsing(given) or self._returns_parsed(given, nodes):
                        self._options.setdefault(parameter.arg, dict(of_parser))

    def visit_Name(self, node: ast.Name) -> ast.expr:
        return _literal(self._known[node.id], node) if node.id in self._known else node

    def visit_Attribute(self, node: ast.Attribute) -> ast.expr:
        options = self._options.get(ast.unparse(node.value), {})
        return _literal(options[node.attr], node) if node.attr in options else node

    def visit_Subscript(self, node: ast.Subscript) -> ast.expr:
        with suppress(ValueError, TypeError, LookupError):
            return _literal(self.value(node.value)[self.value(node.slice)], node)
        return node

    def visit_JoinedStr(self, node: ast.JoinedStr) -> ast.expr:
        with suppress(ValueError):
            parts = [one.value if isinstance(one, ast.FormattedValue) else one for one in node.values]
            plain = all(one.format_spec is None for one in node.values if isinstance(one, ast.FormattedValue))
            return ast.Constant("".join(str(self.value(one)) for one in parts)) if plain else node
        return node

    def visit_Dict(self, node: ast.Dict) -> ast.expr:
        if None not in node.keys:
            return self.generic_visit(node)  # type: ignore[return-value]
        merged: _Options = {}
        with suppress(ValueError, TypeError):
            for key, value in zip(node.keys, node.values, strict=True):
                merged |= self.value(value) if key is None else {self.value(key): self.value(value)}
            return _literal(merged, node)
        return node

    def visit_Call(self, node: ast.Call) -> ast.expr:
        name = ast.unparse(node.func)
        with suppress(ValueError, TypeError):
            if name in _FUNCTIONS:
                named: _Options = {}
                for one in node.keywords:
                    named |= {one.arg: self.value(one.value)} if one.arg else self.value(one.value)
                return _literal(_FUNCTIONS[name](*map(self.value, node.args), **named), node)
            if name in ("os.getenv", "os.environ.get") and len(node.args) == 2:
                variable = self.value(node.args[0])  # a variable of the environment counts as not set
                return node if "RANK" in variable or "WORLD" in variable else _literal(self.value(node.args[1]), node)
            if name.endswith(".from_pretrained") and name.startswith("AutoModel") and node.args:
                return _literal(self.value(node.args[0]), node)
        return node

    def visit_UnaryOp(self, node: ast.UnaryOp) -> ast.expr:
        self.generic_visit(node)
        match node:
            case ast.UnaryOp(ast.USub(), ast.Constant(int() | float() as number)):
                return ast.Constant(-number)
        return node

    def visit_IfExp(self, node: ast.IfExp) -> ast.expr:
        self.generic_visit(node)
        return (node.body if node.test.value else node.orelse) if isinstance(node.test, ast.Constant) else node

    def visit_BinOp(self, node: ast.BinOp) -> ast.expr:
        self.generic_visit(node)
        left, right = (one.value if isinstance(one, ast.Constant) else None for one in (node.left, node.right))
        if type(node.op) in _ARITHMETIC and isinstance(left, int | float) and isinstance(right, int | float):
            with suppress(ArithmeticError):
                return ast.Constant(_ARITHMETIC[type(node.op)](left, right))
        return node


def _in_order(tree: ast.AST) -> Iterator[ast.AST]:
    yield tree
    for child in ast.iter_child_nodes(tree):
        yield from _in_order(child)


def _last(node: ast.expr | None) -> str:
    """Return the last name of what a call calls."""
    return ast.unparse(node.func).rsplit(".", 1)[-1] if isinstance(node, ast.Call) else ""


def _is_parsing(node: ast.expr) -> bool:
    return _last(node) in ("parse_args", "parse_known_args", "parse_args_and_config", "parse_args_into_dataclasses")


def _literal(value: Any, node: ast.expr) -> ast.expr:
    return node if isinstance(value, Expression) else ast.parse(repr(value), mode="eval").body


def _changed(nodes: list[ast.AST]) -> Iterator[str]:
    """Yield the names of lists and mappings that the file changes after their binding."""
    for node in nodes:
        if isinstance(node, ast.Subscript) and isinstance(node.ctx, ast.Store | ast.Del):
            yield ast.unparse(node.value)
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in _CHANGES:
            yield ast.unparse(node.func.value)
