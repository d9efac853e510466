"""What a key's value must be, for `settings`: whether a value is of the type, and the error if it is not."""

from dataclasses import fields, is_dataclass
from typing import Any, get_args, get_origin

from omegaconf import DictConfig, ListConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from nemo_prorl.config import DataSource
from nemo_prorl.errors import did_you_mean
from nemo_prorl.files import first_line


def same_kind(old: Any, new: Any) -> bool:
    """Return whether `new` has a type that can replace `old` in NeMo's yaml; interpolations and null always can."""
    if new is None or any(isinstance(value, str) and value.startswith("${") for value in (old, new)):
        return True
    if isinstance(old, bool) or isinstance(new, bool):
        return type(old) is type(new)
    kinds: dict[Any, Any] = {float: int | float, DictConfig: dict, ListConfig: list}
    return isinstance(new, kinds.get(type(old), type(old)))


def shown(value: Any) -> str:
    """Return a value as the user writes it."""
    return "null" if value is None else str(value).lower() if isinstance(value, bool) else str(value)


def kind_words(kind: Any, optional: bool) -> str:
    """Return a type as text, such as "a whole number or null"."""
    names = {int: "a whole number", float: "a number", bool: "true or false", str: "text"}
    if kind in names:
        name = names[kind]
    elif get_origin(kind) is list and get_args(kind) == (DataSource,):
        name = "a list of sources, such as [{name: mine, path: FILE}]"
    elif kind is ListConfig or get_origin(kind) is list:
        name = "a list [a, b, ...]"
    else:
        name = "a mapping {key: value, ...}"
    return name + (" or null" if optional else "")


def type_message(cfg: DictConfig, key: str, value: Any, error: OmegaConfBaseException) -> str:
    """Return the message for a value that the schema rejects, with the expected type if the schema has the key."""
    name = str(error.full_key or key)
    if key and not name.startswith(key) and is_dataclass(error.object_type):  # an unknown key in an item of a list
        known = [field.name for field in fields(error.object_type)]
        return f"{key}: unknown key {name}.{did_you_mean(name, known)} Known: {', '.join(known)}"
    label = f"{name}={shown(value)}" if name == key else name
    node = OmegaConf.select(cfg, name.rpartition(".")[0]) if "." in name else cfg
    last = name.rpartition(".")[2]
    child = node._get_node(last) if isinstance(node, DictConfig) and last in node.keys() else None  # noqa: SIM118
    if child is None or isinstance(child, list):
        return f"{label}: {first_line(error)}"
    kind = child._metadata.ref_type
    return f"{label}: expected {kind_words(kind, child._metadata.optional)}{likely_fix(name, value, kind, child)}"


def likely_fix(key: str, value: Any, kind: Any, node: Any) -> str:
    """Return the likely fix for a value that is not of the `kind` of a key, whose value now is `node`; empty: none."""
    fix = ""
    if isinstance(node, ListConfig) and isinstance(value, int | float):
        fix = f"{key}=[{value}]"
    elif isinstance(node, DictConfig):
        names = ["enabled"] if isinstance(value, bool) else ["name", "mode", "kind"] if isinstance(value, str) else []
        fix = next((f"{key}.{name}={str(value).lower()}" for name in names if name in node), "")
    elif kind is int and isinstance(value, float) and value.is_integer():
        fix = f"{key}={value:.0f}"
    elif key == "model.optim.sched.warmup_steps" and isinstance(value, float) and 0 < value < 1:
        fix = f"model.optim.sched.warmup_ratio={value}"
    return fix and f". Fix: {fix}"
