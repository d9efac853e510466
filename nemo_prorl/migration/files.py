"""Reads another trainer's configuration: YAML, JSON, a shell script with its command, or Python with a GRPOConfig."""

import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import yaml
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from nemo_prorl.errors import ConfigError
from nemo_prorl.migration.names import table
from nemo_prorl.migration.python import method_of, of_python
from nemo_prorl.migration.shell import LAUNCHER_FILE, NODES, PROCESSES, Expression, of_shell

BASE = "defaults"  # key with the name of a file that a YAML file of NeMo-RL is based on


class Settings(dict[str, Any]):
    """{dotted key: value} of a file.  `notes`: what was assumed of the file, for the user."""

    notes: Sequence[str] = ()


def read(path: Path) -> Settings:
    """Return the settings of a file; raises ConfigError if it, or a file that it names, cannot be read or has none."""
    more, notes = "", list[str]()
    try:
        if path.suffix in (".yaml", ".yml", ".json"):
            found = dict(_leaves(_tree(path)))
        elif path.suffix == ".py":
            text = path.read_text(encoding="utf-8")
            tables = table("trl")
            keys = {one for part in ("keys", "derived", "defaults", "aliases", "neutral") for one in tables[part]}
            found, notes = of_python(text, keys - {"model"})
            more = "" if found else method_of(text)
        else:
            found = _with_files(path, dict(of_shell(path.read_text(encoding="utf-8"))))
    except (OSError, UnicodeDecodeError, yaml.YAMLError, SyntaxError) as error:
        raise ConfigError(f"{path}: cannot be read: {error}") from error
    if not found:
        raise ConfigError(
            f"{path}: expected a configuration: YAML, JSON, a shell script with the command of the trainer, or Python"
            f" with a GRPOConfig(...); got a file without any setting{more}"
        )
    settings = Settings({key: _number(value) for key, value in found.items()})
    settings.notes = notes
    return settings


def _with_files(script: Path, found: dict[str, Any]) -> dict[str, Any]:
    """Return the settings of a shell script over those of the file that its command names by `--config`."""
    if isinstance(given := found.pop(LAUNCHER_FILE, None), str):
        file = _beside(script, given)
        tree = {} if file is None else _tree(file)
        why = "is not there" if file is None else "has no num_processes"
        found[PROCESSES] = tree.get("num_processes", Expression(f"--config_file {given}, which {why}"))
        found[NODES] = tree.get("num_machines", 1)
    if not isinstance(given := found.get("config"), str) or not given.endswith((".yaml", ".yml", ".json")):
        if isinstance(given, Expression):
            raise ConfigError(
                f"{script}: --config {given} has no value here. Fix: prorl convert TRAINER with that file"
            )
        return found
    if (file := _beside(script, given)) is None:
        raise ConfigError(
            f"{script}: --config {given} has the settings, and is not in {script.parent.absolute()}, a parent of it, or"
            f" {Path.cwd()}. Fix: put it there, or convert that file instead"
        )
    del found["config"]
    below = dict(_leaves(_tree(file)))
    if "num_processes" in below and isinstance(found.get(PROCESSES), Expression):  # `trl grpo` takes it from there
        found[PROCESSES] = below["num_processes"]
    return below | found


def _beside(script: Path, name: str) -> Path | None:
    """Return a file that a script names: from its folder, a parent of this, or the working directory."""
    folders = [script.absolute().parent, *script.absolute().parent.parents, Path.cwd()]
    return next((folder / name for folder in folders if (folder / name).is_file()), None)


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
