"""Values of a Python script: names that are constants, arithmetic, and options of its command line; runs nothing."""

import ast
import copy
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from operator import floordiv, mod, truediv
from typing import Any

from nemo_prorl.migration.expansion import OF_WHOLE
from nemo_prorl.migration.shell import Expression

ARITHMETIC = OF_WHOLE | {ast.Div: truediv, ast.FloorDiv: floordiv, ast.Mod: mod, ast.Pow: pow}
_FUNCTIONS: dict[str, Callable[..., Any]] = {
    "int": int, "float": float, "str": str, "bool": bool, "min": min, "max": max, "dict": dict, "list": list,
}  # fmt: skip
_MODEL_NAMES = "pretrained_model_name_or_path", "model_name"
_CHANGES = {"append", "clear", "extend", "insert", "pop", "remove", "setdefault", "update"}
Options = dict[str, Any]


class Fold(ast.NodeTransformer):
    """Replaces names by their constants, and arithmetic of constants by its result.

    A constant is a name that the file binds only once, by `NAME = VALUE` outside of a class, and does not change.
    Options of a command line have their value of `flags` or their default.
    """

    def __init__(self, tree: ast.Module, flags: Options) -> None:
        self.flags = flags
        nodes = list(in_order(tree))
        classes = [node for node in nodes if isinstance(node, ast.ClassDef)]
        own = [member for node in classes for member in node.body]
        fields = {id(node) for node in own}
        own_ids = {id(name) for node in own for name in (*getattr(node, "targets", ()), getattr(node, "target", None))}
        adapted = {id(node.targets[0]) for node in nodes if isinstance(node, ast.Assign) and _is_adapted(node)}
        places = [node for node in nodes if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)]
        stored = [node.id for node in places if id(node) not in adapted | own_ids]
        self._stored = Counter(stored)
        bound = Counter(stored)
        bound.update(node.arg for node in nodes if isinstance(node, ast.arg))
        bound.update(node.asname or node.name for node in nodes if isinstance(node, ast.alias))
        bound.update(_changed(nodes))
        self._known: dict[str, Any] = {}
        self._options: dict[str, Options] = {}  # {name of a namespace: its attributes}
        self._fields: dict[str, Options] = {}
        statements = [node for node in nodes if isinstance(node, ast.Assign | ast.AnnAssign) and id(node) not in fields]
        for _ in range(3):  # classes use constants, constants use classes, functions use both
            self._fields = {node.name: dict(self._of_class(node)) for node in classes}
            of_parser = dict(self._of_parser(nodes))
            for statement in statements:
                self._bind(statement, bound)
            for names, value in bound_names(nodes):
                self._bind_parsed(names, value, nodes, of_parser)
            self._bind_parameters(nodes, of_parser)
        self._options |= {name: defaults for name, defaults in self._fields.items() if name not in self._options}
        for node in nodes:
            if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
                self._options.get(ast.unparse(node.value), {}).pop(node.attr, None)

    def _bind(self, node: ast.Assign | ast.AnnAssign, bound: Mapping[str, int]) -> None:
        target = node.targets[0] if isinstance(node, ast.Assign) else node.target
        if node.value is None:
            return
        if isinstance(target, ast.Tuple) and last_name(node.value) == "from_pretrained":  # Unsloth's, with a tokenizer
            target = target.elts[0]
        if isinstance(target, ast.Name) and bound[target.id] == 1:
            with suppress(ValueError, TypeError):
                self._known[target.id] = self.value(node.value)
            if isinstance(node.value, ast.Call) and last_name(node.value) in self._fields:
                arguments = {keyword.arg: self.get(keyword.value) for keyword in node.value.keywords if keyword.arg}
                self._options[target.id] = self._fields[last_name(node.value)] | arguments

    def fields(self, name: str) -> Options:
        """Return {field: default} of a class of the file."""
        return self._fields.get(name, {})

    def get(self, node: ast.expr) -> Any:
        """Return the value of an expression, or an `Expression`."""
        has_gap = any(isinstance(part, ast.Constant) and part.value is ... for part in ast.walk(node))
        try:
            return Expression(ast.unparse(node)) if has_gap else self.value(node)
        except (ValueError, TypeError):
            return Expression(ast.unparse(node))

    def value(self, node: ast.expr) -> Any:
        """Return the value of an expression; raises ValueError if it does not follow from literals."""
        return ast.literal_eval(self.visit(copy.deepcopy(node)))

    def _of_class(self, node: ast.ClassDef) -> Iterator[tuple[str, Any]]:
        for item in node.body:
            name = item.targets[0] if isinstance(item, ast.Assign) else getattr(item, "target", None)
            if isinstance(item, ast.AnnAssign) and isinstance(name, ast.Name) and item.value is None:
                yield name.id, Expression(f"the option --{name.id}")
            elif isinstance(item, ast.Assign | ast.AnnAssign) and isinstance(name, ast.Name) and item.value is not None:
                value: ast.expr = item.value
                if isinstance(value, ast.Call) and last_name(value) == "field":
                    default = [keyword.value for keyword in value.keywords if keyword.arg == "default"]
                    factory = [keyword.value for keyword in value.keywords if keyword.arg == "default_factory"]
                    lambdas = [made.body for made in factory if isinstance(made, ast.Lambda)]
                    value = (default or lambdas or [value])[0]
                yield name.id, self.get(value)

    def _of_parser(self, nodes: list[ast.AST]) -> Iterator[tuple[str, Any]]:
        """Yield (option, value) of each `add_argument`, with the value of the command line or the default."""
        for node in nodes:
            if isinstance(node, ast.Call) and last_name(node) == "set_defaults":
                yield from ((keyword.arg, self.get(keyword.value)) for keyword in node.keywords if keyword.arg)
            if not isinstance(node, ast.Call) or last_name(node) != "add_argument" or not node.args:
                continue
            words = [str(value) for value in map(self.get, node.args)]
            options = {keyword.arg: self.get(keyword.value) for keyword in node.keywords if keyword.arg}
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

    def _bind_parsed(self, names: list[str], value: ast.expr, nodes: list[ast.AST], of_parser: Options) -> None:
        """Bind the names that get what `parser.parse_args()` returns to the options."""
        if not is_parsing(value) and not self._returns_parsed(value, nodes):
            return
        if any(self._stored[name] > 1 for name in names):  # which of them a use has is not evaluated
            return
        parsers = list(parsed_classes(nodes))
        if not parsers:
            self._options[names[0]] = dict(of_parser)
            return
        for name, kind in zip(names, parsers[0], strict=False):
            fields = {key: self.flags.get(key, default) for key, default in self._fields.get(kind, {}).items()}
            self._options[name] = (self.flags if kind not in self._fields else {}) | fields

    def _returns_parsed(self, value: ast.expr, nodes: list[ast.AST]) -> bool:
        name = last_name(value) if isinstance(value, ast.Call) else ""
        return any(
            isinstance(node, ast.FunctionDef)
            and node.name == name
            and any(
                isinstance(part, ast.Return) and part.value and "parse" in ast.unparse(part.value)
                for part in ast.walk(node)
            )
            for node in nodes
        )

    def _bind_parameters(self, nodes: list[ast.AST], of_parser: Options) -> None:
        """Bind the parameters of the file's functions that get the options."""
        functions = {node.name: node for node in nodes if isinstance(node, ast.FunctionDef)}
        for node in nodes:
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in functions:
                for parameter, argument in zip(functions[node.func.id].args.args, node.args, strict=False):
                    text = ast.unparse(argument)
                    if text in self._options:
                        self._options.setdefault(parameter.arg, self._options[text])
                    elif is_parsing(argument) or self._returns_parsed(argument, nodes):
                        self._options.setdefault(parameter.arg, dict(of_parser))

    def visit_Name(self, node: ast.Name) -> ast.expr:
        return _literal(self._known[node.id], node) if node.id in self._known else node

    def visit_Attribute(self, node: ast.Attribute) -> ast.expr:
        if ast.unparse(node) in ("torch.bfloat16", "torch.float16", "torch.float32"):
            return ast.Constant(node.attr)
        options = self._options.get(ast.unparse(node.value), {})
        return _literal(options[node.attr], node) if node.attr in options else node

    def visit_Subscript(self, node: ast.Subscript) -> ast.expr:
        with suppress(ValueError, TypeError, LookupError):
            return _literal(self.value(node.value)[self.value(node.slice)], node)
        return node

    def visit_JoinedStr(self, node: ast.JoinedStr) -> ast.expr:
        with suppress(ValueError):
            parts = [part.value if isinstance(part, ast.FormattedValue) else part for part in node.values]
            plain = all(part.format_spec is None for part in node.values if isinstance(part, ast.FormattedValue))
            return ast.Constant("".join(str(self.value(part)) for part in parts)) if plain else node
        return node

    def visit_Dict(self, node: ast.Dict) -> ast.expr:
        if None not in node.keys:
            return self.generic_visit(node)  # type: ignore[return-value]
        merged: Options = {}
        with suppress(ValueError, TypeError):
            for key, value in zip(node.keys, node.values, strict=True):
                merged |= self.value(value) if key is None else {self.value(key): self.value(value)}
            return _literal(merged, node)
        return node

    def visit_Call(self, node: ast.Call) -> ast.expr:
        name = ast.unparse(node.func)
        with suppress(ValueError, TypeError):
            if name in _FUNCTIONS:
                named: Options = {}
                for keyword in node.keywords:
                    named |= {keyword.arg: self.value(keyword.value)} if keyword.arg else self.value(keyword.value)
                return _literal(_FUNCTIONS[name](*map(self.value, node.args), **named), node)
            if name in ("os.getenv", "os.environ.get") and len(node.args) == 2:
                variable = self.value(node.args[0])  # a variable of the environment counts as not set
                return node if "RANK" in variable or "WORLD" in variable else _literal(self.value(node.args[1]), node)
            if (model := pretrained(node)) is not None:
                return _literal(self.value(model), node)
        return node

    def visit_UnaryOp(self, node: ast.UnaryOp) -> ast.expr:
        self.generic_visit(node)
        match node:
            case ast.UnaryOp(ast.USub(), ast.Constant(int() | float() as number)):
                return ast.Constant(-number)
            case ast.UnaryOp(ast.Not(), ast.Constant(value)):
                return ast.Constant(not value)
        return node

    def visit_IfExp(self, node: ast.IfExp) -> ast.expr:
        self.generic_visit(node)
        return (node.body if node.test.value else node.orelse) if isinstance(node.test, ast.Constant) else node

    def visit_BinOp(self, node: ast.BinOp) -> ast.expr:
        self.generic_visit(node)
        left, right = (side.value if isinstance(side, ast.Constant) else None for side in (node.left, node.right))
        if type(node.op) in ARITHMETIC and isinstance(left, int | float) and isinstance(right, int | float):
            with suppress(ArithmeticError):
                return ast.Constant(ARITHMETIC[type(node.op)](left, right))
        return node


def in_order(tree: ast.AST) -> Iterator[ast.AST]:
    yield tree
    for child in ast.iter_child_nodes(tree):
        yield from in_order(child)


def last_name(node: ast.expr | None) -> str:
    """Return the last name of what a call calls."""
    return ast.unparse(node.func).rsplit(".", 1)[-1] if isinstance(node, ast.Call) else ""


def is_parsing(node: ast.expr) -> bool:
    return last_name(node) in ("parse_args", "parse_known_args", "parse_args_and_config", "parse_args_into_dataclasses")


def parsed_classes(nodes: list[ast.AST]) -> Iterator[list[str]]:
    """Yield for each parser of transformers or TRL the names of the classes that it fills."""
    assigned = {names[0]: value for names, value in bound_names(nodes)}
    for node in nodes:
        if isinstance(node, ast.Call) and last_name(node) in ("TrlParser", "HfArgumentParser"):
            named = [keyword.value for keyword in node.keywords if keyword.arg == "dataclass_types"]
            for argument in [*node.args, *named][:1]:
                listed = assigned.get(ast.unparse(argument), argument)
                yield [ast.unparse(element).rsplit(".", 1)[-1] for element in getattr(listed, "elts", [listed])]


def bound_names(nodes: list[ast.AST]) -> Iterator[tuple[list[str], ast.expr]]:
    """Yield (names, value) of assignments, and of calls `f(*value)`, which bind the parameters of the file's `f`."""
    functions = {node.name: node for node in nodes if isinstance(node, ast.FunctionDef)}
    assigned: dict[str, ast.expr] = {}
    for node in nodes:
        if isinstance(node, ast.Assign | ast.AnnAssign) and node.value is not None:
            target = node.targets[0] if isinstance(node, ast.Assign) else node.target
            names = [ast.unparse(element) for element in getattr(target, "elts", [target])]
            assigned[names[0]] = node.value
            match node.value:
                case ast.Subscript(value, ast.Constant(int(place))) if is_parsing(value):  # one of what it returns
                    yield [""] * place + names, value
                case value:
                    yield names, value
    for node in nodes:
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in functions and node.args:
            parameters = [parameter.arg for parameter in functions[node.func.id].args.args]
            if parameters and isinstance(last := node.args[-1], ast.Starred):
                yield parameters[len(node.args) - 1 :], assigned.get(ast.unparse(last.value), last.value)


def pretrained(node: ast.Call) -> ast.expr | None:
    """Return the argument of `CLASS.frompretrained(...)` that names the model; None for other calls and classes."""
    if not isinstance(node.func, ast.Attribute) or node.func.attr != "from_pretrained":
        return None
    kind = ast.unparse(node.func.value).rsplit(".", 1)[-1]
    if "Peft" in kind or not ("Model" in kind or kind.endswith(("ForCausalLM", "ForConditionalGeneration"))):
        return None
    return next(iter([*node.args, *(keyword.value for keyword in node.keywords if keyword.arg in _MODEL_NAMES)]), None)


def _is_adapted(node: ast.Assign) -> bool:
    """Return whether an assignment gives a model its adapters: `model = get_peft_model(model, ...)`."""
    arguments = node.value.args if isinstance(node.value, ast.Call) else []
    is_same = len(node.targets) == 1 and bool(arguments) and ast.unparse(arguments[0]) == ast.unparse(node.targets[0])
    return is_same and last_name(node.value).endswith("get_peft_model")


def _literal(value: Any, node: ast.expr) -> ast.expr:
    return node if isinstance(value, Expression) else ast.parse(repr(value), mode="eval").body


def _changed(nodes: list[ast.AST]) -> Iterator[str]:
    """Yield the names of lists and mappings that the file changes after their binding."""
    for node in nodes:
        if isinstance(node, ast.Subscript) and isinstance(node.ctx, ast.Store | ast.Del):
            yield ast.unparse(node.value)
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in _CHANGES:
            yield ast.unparse(node.func.value)
