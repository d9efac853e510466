"""Reads the settings of a Python script with a GRPOConfig: evaluates what follows from the file, and runs nothing."""

import ast
import math
import re
from collections.abc import Iterator, Mapping
from contextlib import suppress
from functools import cache
from typing import Any

from nemo_prorl.errors import ConfigError
from nemo_prorl.migration.literals import (
    ARITHMETIC,
    Fold,
    Options,
    bound_names,
    in_order,
    is_parsing,
    last_name,
    parsed_classes,
    pretrained,
)
from nemo_prorl.migration.names import RLOO, table
from nemo_prorl.migration.shell import UNREAD, Expression

_CONFIG, _TRAINER = "GRPOConfig", "GRPOTrainer"
_POSITIONS = {
    _CONFIG: ["output_dir"],
    _TRAINER: ["model", "reward_funcs", "args", "train_dataset", "eval_dataset", "processing_class"],
}
_READ = re.compile("(GRPO|RLOO)(Config|Trainer)")
_OTHER = re.compile(r"(?!(GRPO|Model|Dataset|DatasetMixture|Merge)(Config|Trainer))\w+(Config|Trainer)")  # of TRL
_FREEZES = re.compile(r"\.requires_grad( = (?!True)|_\((?!True|\)))")
_WEIGHTS = {key: key for key in ("load_in_4bit", "load_in_8bit", "quantization_config")}
_WEIGHTS |= dict.fromkeys(("dtype", "torch_dtype"), "model_init_kwargs.dtype")
_OVERLONG = "get_soft_overlong_punishment"
_OF_MODEL = re.compile(r"\w+\.(model_revision|trust_remote_code|attn_implementation|dtype|torch_dtype)")
_BRANCHES = (ast.If, ast.For, ast.While, ast.Try, ast.IfExp, ast.Match)


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

    def __init__(self, tree: ast.Module, flags: Options) -> None:
        self.flags = flags
        self.fold = Fold(tree, flags)
        self.nodes = list(in_order(tree))
        self.parents = {id(child): node for node in self.nodes for child in ast.iter_child_nodes(node)}
        self.classes = {node.name: node for node in self.nodes if isinstance(node, ast.ClassDef)}
        names = {
            alias.asname: alias.name for node in self.nodes if isinstance(node, ast.ImportFrom) for alias in node.names
        }
        self.renamed = {new: old for new, old in names.items() if new is not None}
        used = [ast.unparse(node) for node in self.nodes if isinstance(node, ast.Name | ast.Attribute)]
        self.family = "RLOO" if {match[1] for name in used if (match := _READ.search(name))} == {"RLOO"} else "GRPO"
        self.others = self._others()
        self.configs = self._configs()
        self.trainers = {name for name, value in self._bindings() if self._kind(value) == _TRAINER}
        self.configs |= {f"{name}.args" for name in self.trainers}
        makers = [node for node in self.nodes if isinstance(node, ast.Call) and self._kind(node) == _TRAINER]
        self.made = {id(self._scope(node)): node.end_lineno or 0 for node in makers}

    @property
    def is_parsed(self) -> bool:
        """Whether a parser of the script fills a GRPOConfig from the command line."""
        return bool(self._parsed_classes())

    def settings(self) -> Iterator[tuple[str, Any]]:
        settings: dict[str, Any] = {}
        yield from self._unread()
        if self.family == "RLOO":
            yield RLOO, True
        if parsed := self._parsed_classes():
            options = {name for kind in parsed if kind in self.classes for name in self.fold.fields(kind)}
            own = {name for kind in parsed if self._kind_of_class(kind) == _CONFIG for name in self.fold.fields(kind)}
            settings |= {key: value for key, value in self.flags.items() if key not in options - own}
        calls = [node for node in self.nodes if isinstance(node, ast.Call) and self._kind(node) == _CONFIG]
        for names in parsed_classes(self.nodes) if not calls and not parsed else ():
            yield f"{UNREAD}{', '.join(names)}", f"what the parser fills has no value here: name {_CONFIG} in its call"
        for key, value in self._of_calls(calls):
            settings[key] = value
        for node in self.nodes:
            for key, value in self._of_statement(node, settings):
                settings[key] = value
        for key, value in settings.items():  # a mapping is a section, as in YAML
            yield from _leaves(key, self._init(value) if key == "model_init_kwargs" else value)

    def _init(self, value: Any) -> Any:
        """Return arguments of from_pretrained without those that are ModelConfig's, which has their defaults."""
        node = ast.parse(value, mode="eval").body if isinstance(value, Expression) else None
        if last_name(node) != "dict" or not isinstance(node, ast.Call) or node.args:
            return value
        own = {f"{pair.arg}": pair.value for pair in node.keywords if not _OF_MODEL.fullmatch(ast.unparse(pair.value))}
        return {name: self.fold.get(argument) for name, argument in own.items()} or None

    def _others(self) -> list[str]:
        """Return the classes of TRL's other trainers that the script uses."""
        imports = [node for node in self.nodes if isinstance(node, ast.Import | ast.ImportFrom)]
        of_trl = [alias for node in imports if re.match(r"\w+ trl\b", ast.unparse(node)) for alias in node.names]
        names = {"trl", *(alias.asname or alias.name for alias in of_trl)}
        used = [ast.unparse(node.func) for node in self.nodes if isinstance(node, ast.Call)]
        used += [ast.unparse(base) for node in self.classes.values() for base in node.bases]
        used += [name for some in parsed_classes(self.nodes) for name in some]
        classes = [self.renamed.get(name, name).rsplit(".", 1)[-1] for name in used if name.partition(".")[0] in names]
        return [name for name in dict.fromkeys(classes) if _OTHER.fullmatch(name) and not name.startswith(self.family)]

    def _of_classes(self) -> Iterator[tuple[str, Any]]:
        """Yield what is unread because of its class; raises ConfigError if the file trains with other classes only."""
        calls = [node for node in self.nodes if isinstance(node, ast.Call)]
        if self.others and not self._parsed_classes() and not any(map(self._kind, calls)):
            raise ConfigError(f"expected a {_CONFIG} of TRL; got {self.others[0]}, which is not converted")
        if any(re.match(r"(from|import) unsloth\b", ast.unparse(node)) for node in self.nodes):
            yield f"{UNREAD}unsloth", "it changes TRL's trainer and some of its defaults: only TRL's were read"
        for name in self.others:
            yield f"{UNREAD}{name}", f"this trainer is used, too: only {_CONFIG} and {_TRAINER} are read"
        for name in dict.fromkeys(self.renamed.get(last_name(node), last_name(node)) for node in calls):
            if name not in self.classes and not _READ.fullmatch(name) and self._kind_of_class(name):
                yield f"{UNREAD}class {name}", "another file has it: what it changes was not read"

    def _unread(self) -> Iterator[tuple[str, Any]]:
        yield from self._of_classes()
        yield from self._peft()
        for node in self.nodes:
            if isinstance(node, ast.Assign | ast.Expr) and _FREEZES.search(text := ast.unparse(node)):
                yield f"{UNREAD}{text}", "all weights are trained here; it may freeze some"
            if isinstance(node, ast.Call) and pretrained(node) and "Classification" not in ast.unparse(node.func):
                yield from (
                    (_WEIGHTS[pair.arg], self.fold.get(pair.value)) for pair in node.keywords if pair.arg in _WEIGHTS
                )
        for name, own in self.classes.items():
            methods = [member.name for member in own.body if isinstance(member, ast.FunctionDef | ast.AsyncFunctionDef)]
            if self._kind_of_class(name) and methods:
                yield (
                    f"{UNREAD}class {name}",
                    f"its methods ({', '.join(methods)}) may change the algorithm: compare them",
                )
        for node in self.nodes:
            if isinstance(node, ast.Call) and last_name(node) == "ModelConfig":
                yield from ((pair.arg, self.fold.get(pair.value)) for pair in node.keywords if pair.arg == "use_peft")
            asked = str(self.flags.get("reward_funcs", _OVERLONG))  # of a registry, those of the command line
            if isinstance(node, ast.Call) and last_name(node) == _OVERLONG and _OVERLONG in asked:
                pairs = zip(("max_completion_len", "soft_punish_cache"), node.args, strict=False)
                named = dict(pairs) | {keyword.arg: keyword.value for keyword in node.keywords}
                yield _OVERLONG, [self.fold.get(argument) for _, argument in sorted(named.items())]

    def _peft(self) -> Iterator[tuple[str, Any]]:
        """Yield what trains some weights only: a LoraConfig counts if it is used, but not if it is only printed."""
        uses = [node for node in self.nodes if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load)]
        parents = [(node.id, use) for node in uses if not isinstance(use := self.parents[id(node)], ast.FormattedValue)]
        used = {name for name, use in parents if not re.match(rf"{name}\.|print\(", ast.unparse(use))}
        idle = {id(value) for name, value in self._bindings() if name not in used}
        for node in self.nodes:
            if isinstance(node, ast.Call) and last_name(node).endswith("get_peft_model"):
                yield "peft_config", Expression("get_peft_model(...)")
            elif isinstance(node, ast.Call) and last_name(node).endswith("LoraConfig") and id(node) not in idle:
                yield "peft_config", Expression(ast.unparse(node))

    def _kind_of_class(self, name: str) -> str | None:
        """Return whether a class is a configuration or a trainer, by its name or, if the file has it, by its base."""
        name = self.renamed.get(name, name)
        if name in self.others:
            return None
        bases = (
            [ast.unparse(base).rsplit(".", 1)[-1] for base in self.classes[name].bases] if name in self.classes else []
        )
        kinds = [kind for kind in (_CONFIG, _TRAINER) if name.endswith(kind.replace("GRPO", self.family))]
        kinds += [kind for base in bases if base != name and (kind := self._kind_of_class(base))]
        return kinds[0] if kinds else None

    def _kind(self, node: ast.expr | None) -> str | None:
        return self._kind_of_class(last_name(node)) if isinstance(node, ast.Call) else None

    def _bindings(self) -> Iterator[tuple[str, ast.expr]]:
        for node in self.nodes:
            targets = node.targets if isinstance(node, ast.Assign) else [getattr(node, "target", None)]
            value = getattr(node, "value", None)
            if isinstance(node, ast.Assign | ast.AnnAssign | ast.NamedExpr) and value is not None:
                yield from ((target.id, value) for target in targets if isinstance(target, ast.Name))

    def _parsed_classes(self) -> list[str]:
        """Return the classes that a parser of the file fills from the command line, if one of them is a GRPOConfig."""
        parsers = parsed_classes(self.nodes)
        return next((names for names in parsers if any(self._kind_of_class(name) == _CONFIG for name in names)), [])

    def _configs(self) -> set[str]:
        """Return the names that are bound to a configuration."""
        parsed = self._parsed_classes()
        bound = {name for name, value in self._bindings() if self._kind(value) == _CONFIG}
        for names, value in bound_names(self.nodes):
            if is_parsing(value):
                pairs = zip(names, parsed, strict=False)
                bound |= {name for name, kind in pairs if self._kind_of_class(kind) == _CONFIG}
        size = -1
        while size != len(bound):
            size = len(bound)
            bound |= {
                name for name, value in self._bindings() if ast.unparse(value) in bound or self._replaced(value, bound)
            }
        return bound

    def _replaced(self, node: ast.expr, configs: set[str]) -> bool:
        """Return whether an expression is a copy of a configuration."""
        names = ("replace", "copy", "deepcopy")
        return (
            isinstance(node, ast.Call)
            and last_name(node) in names
            and bool(node.args)
            and ast.unparse(node.args[0]) in configs
        )

    def _of_calls(self, calls: list[ast.Call]) -> Iterator[tuple[str, Any]]:
        """Yield the settings of the constructor; of several, those that they share are known."""
        each = []
        for call in calls:
            own = self.classes.get(last_name(call))
            each.append({**(self.fold.fields(own.name) if own else {}), **dict(self._arguments(call, _CONFIG))})
        if not calls and (parsed := [name for name in self._parsed_classes() if self._kind_of_class(name) == _CONFIG]):
            fields = self.fold.fields(parsed[0]) if parsed[0] in self.classes else {}
            each = [{key: self.flags.get(key, value) for key, value in fields.items()}]
        for key in dict.fromkeys(key for settings in each for key in settings):
            values = [settings.get(key, Expression("the default")) for settings in each]
            same = all(type(value) is type(values[0]) and value == values[0] for value in values)
            yield key, values[0] if same else Expression(" or ".join(map(str, values)))

    def _arguments(self, call: ast.Call, kind: str) -> Iterator[tuple[str, Any]]:
        named = list(zip(_POSITIONS[kind], call.args, strict=False))
        if len(call.args) > len(named) or any(isinstance(argument, ast.Starred) for argument in call.args):
            yield f"{UNREAD}{ast.unparse(call.func)}(...)", "it has arguments without a name: name them"
        for key, node in [*named, *((keyword.arg, keyword.value) for keyword in call.keywords)]:
            if key == "args" and kind == _TRAINER:
                continue
            value = self.fold.get(node)
            if key == "reward_funcs" and isinstance(node, ast.Name) and key in self.flags:
                yield key, self.flags[key]  # they name what the script puts into this list
            elif key is not None:
                yield (
                    key,
                    Expression(repr(value)) if key == "reward_funcs" and not isinstance(value, Expression) else value,
                )
            elif isinstance(value, dict):
                yield from value.items()
            else:
                yield f"{UNREAD}**{value}", "the settings of this mapping have no value here"

    def _of_statement(self, node: ast.AST, settings: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
        """Yield what a statement sets after the constructor; `settings` has what is set before it."""
        if isinstance(node, ast.Call) and self._kind(node) == _TRAINER:
            yield from self._arguments(node, _TRAINER)
            return
        changes = self._of_call(node) if isinstance(node, ast.Call) else self._of_assignment(node, settings)
        for key, value in changes:
            before = settings.get(key, "the default")
            is_late = getattr(node, "lineno", 0) > self.made.get(id(self._scope(node)), math.inf)
            known = key.startswith(UNREAD) or (self._is_certain(node) and not is_late) or value == before
            late = " (set after the trainer was made, which copied it)" if is_late else ""
            yield key, value if known else Expression(f"{before} or {value}{late}")

    def _scope(self, node: ast.AST) -> ast.AST | None:
        """Return the function around a node; None if there is none."""
        while (parent := self.parents.get(id(node))) is not None:
            node = parent
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                return node
        return None

    def _is_of_trainer(self, target: ast.Attribute) -> bool:
        """Return whether an attribute belongs to a trainer or its class, and is no setting."""
        base = ast.unparse(target.value)
        is_class = self._kind_of_class(base.rsplit(".", 1)[-1]) == _TRAINER
        return is_class or (target.attr not in _settings_of_trl() and base in self.trainers)

    def _is_dictionary(self, node: ast.expr) -> bool:
        """Return whether an expression is the dictionary of a configuration's attributes."""
        text = ast.unparse(node)
        return any(text in (f"{name}.__dict__", f"vars({name})") for name in self.configs)

    def _is_setting(self, target: ast.Attribute) -> bool:
        """Return whether an attribute belongs to a configuration, of a known name or by its own name."""
        base = ast.unparse(target.value)
        return base in self.configs or (target.attr in _settings_of_trl() and base.partition(".")[0] != "self")

    def _of_assignment(self, node: ast.AST, settings: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
        targets = node.targets if isinstance(node, ast.Assign) else [getattr(node, "target", None)]
        for target in targets:
            if isinstance(target, ast.Subscript) and self._is_dictionary(target.value):
                yield f"{UNREAD}{ast.unparse(target)}", "set it as an attribute, and convert again"
            if isinstance(target, ast.Attribute) and self._is_of_trainer(target):
                yield f"{UNREAD}{ast.unparse(target)}", "this attribute of the trainer may change the algorithm"
            if not isinstance(target, ast.Attribute) or not self._is_setting(target):
                continue
            if isinstance(node, ast.AugAssign):
                before = settings.get(target.attr, Expression("the default"))
                yield target.attr, self._combined(before, node.op, node.value)
            elif isinstance(node, ast.Assign | ast.AnnAssign) and node.value is not None:
                yield target.attr, self.fold.get(node.value)
            else:  # of a loop
                yield target.attr, Expression(ast.unparse(target))

    def _of_call(self, node: ast.Call) -> Iterator[tuple[str, Any]]:
        used = {ast.unparse(part) for part in ast.walk(node) if isinstance(part, ast.expr)}
        match node:
            case ast.Call(ast.Name("setattr"), [base, name, value]) if ast.unparse(base) in self.configs:
                key = self.fold.get(name)
                if isinstance(key, Expression):
                    yield f"{UNREAD}{ast.unparse(node)}", "which settings it sets is unknown"
                else:
                    yield key, self.fold.get(value)
            case ast.Call(ast.Name("setattr"), [base, *_]) if self._kind_of_class(ast.unparse(base)) == _TRAINER:
                yield f"{UNREAD}{ast.unparse(node)}", "this attribute of the trainer may change the algorithm"
            case ast.Call() if self._replaced(node, self.configs):
                for keyword in node.keywords:
                    yield keyword.arg or f"{UNREAD}**{ast.unparse(keyword.value)}", self.fold.get(keyword.value)
            case ast.Call(ast.Attribute(_, name)) if (
                name.startswith("set_") or name == "update"
            ) and used & self.configs:
                yield f"{UNREAD}{ast.unparse(node)}", "which settings it sets is unknown"

    def _combined(self, before: Any, operation: ast.operator, node: ast.expr) -> Any:
        value = self.fold.get(node)
        if not isinstance(before, Expression) and not isinstance(value, Expression) and type(operation) in ARITHMETIC:
            with suppress(TypeError, ArithmeticError):
                return ARITHMETIC[type(operation)](before, value)
        return Expression(f"{before}, changed by {value}")

    def _is_certain(self, node: ast.AST) -> bool:
        """Return whether a node is outside of branches and loops; `if __name__ == ...` is none."""
        while (parent := self.parents.get(id(node))) is not None:
            node = parent
            if isinstance(node, _BRANCHES) and "__name__" not in ast.unparse(getattr(node, "test", ast.Constant(0))):
                return False
        return True


def _leaves(key: str, value: Any) -> Iterator[tuple[str, Any]]:
    if isinstance(value, dict) and value:
        for name, item in value.items():
            yield from _leaves(f"{key}.{name}", item)
    else:
        yield key, value


@cache
def _settings_of_trl() -> set[str]:
    """Return the names that only a configuration has, so that an attribute of this name is a setting."""
    parts = (table("trl")[part] for part in ("keys", "derived", "defaults", "differs", "decides"))
    return {key for part in parts for key in part} - {"model"}
