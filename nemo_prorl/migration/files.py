"""Reads another trainer's configuration: YAML, JSON, a shell script with its command, or Python with a GRPOConfig."""

import contextlib
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import yaml
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from nemo_prorl.errors import ConfigError
from nemo_prorl.migration.names import RLOO
from nemo_prorl.migration.python import of_python
from nemo_prorl.migration.shell import ENTRY, LAUNCH, UNREAD, Command, Expression, Script, without_marks

_OF_TRL = {"single_gpu": 1} | dict.fromkeys(("multi_gpu", "zero1", "zero2", "zero3", "fsdp1", "fsdp2"), 8)
_VERL = "ppo_trainer", "_self_"  # the defaults of the table
# These have the values of the table; `verl_program` sets what else those of a step off have.
_IN_VERL = re.compile(r"(\./|verl/trainer/)?config/((one_step_off_)?ppo_(megatron_)?trainer)\.yaml")
_IS_TRL = re.compile(r"(?s)(GRPO|RLOO)Config|\b(from|import) trl\b.*?\b(?!GRPOTrainer)[A-Z]\w*Trainer\b")
_TRAINS = {  # in the name of a program that trains otherwise
    "sft": "by supervised fine-tuning",
    "dpo|kto|orpo|cpo|bco|nash_md|xpo": "on preferences",
    "(train|run)_rm|reward_modeling|prm": "a reward model",
    "distillation|gkd|gold": "by distillation",
    "^ppo|run_ppo": "a value model, too",  # of TRL and NeMo-RL
}
_PROGRAM = re.compile(r"(main|train)_ppo|main_dapo|fully_async_main|run_\w*grpo|(scripts[/.]|trl )(grpo|rloo)")
_MAY_TRAIN = re.compile(r"(main|train|run|ppo|grpo|rloo)[^/.]*(\.py)?$")  # by the name of the program
_OF_SFT = {"packing", "dataset_text_field", "assistant_only_loss", "completion_only_loss"}  # keys of an SFTConfig
_OF_GRPO = {"num_generations", "max_completion_length", "beta", "reward_funcs", "use_vllm"}
_ALONE = "_override_"  # true in a section of NeMo-RL leaves out that of the base
SCRIPT = "script"  # key with the name of a Python file that was not found
BASE = "defaults"  # key with the names of files that a YAML file of NeMo-RL is based on, and that are missing
TABLE_BASE = "grpo_math_1B.yaml"  # the table has it
_OF_NEMO_RL = {"run_grpo.py": TABLE_BASE, "run_grpo_math.py": TABLE_BASE, "run_vlm_grpo.py": "vlm_grpo_3B.yaml"}


def read(path: Path) -> dict[str, Any]:
    """Return {dotted key: value} of a file; raises ConfigError if the file cannot be read or has no setting."""
    try:
        if path.suffix in (".yaml", ".yml", ".json"):
            settings = dict(_leaves(_tree(path)))
        else:
            text = path.read_text(encoding="utf-8")
            settings = dict(of_python(text)) if path.suffix == ".py" else _of_script(text, path)
        if isinstance(name := settings.get("deepspeed"), str) and (beside := _Files({}, path.parent).path(name)):
            settings |= dict(_leaves({"deepspeed": _tree(beside)}))
            del settings["deepspeed"]
    except RecursionError as error:
        raise ConfigError(f"{path}: cannot be read: its {BASE} lead back to itself") from error
    except ConfigError as error:
        raise ConfigError(f"{path}: {error}") from error
    except (OSError, UnicodeDecodeError, yaml.YAMLError, SyntaxError) as error:
        raise ConfigError(f"{path}: cannot be read: {error}") from error
    if _OF_SFT & settings.keys() and not _OF_GRPO & settings.keys():
        raise ConfigError(
            f"{path}: {', '.join(sorted(_OF_SFT & settings.keys()))} trains by supervised fine-tuning; expected the"
            " configuration of an RL trainer, which rewards responses"
        )
    if not settings.keys() - {ENTRY}:
        raise ConfigError(
            f"{path}: expected a configuration: YAML, JSON, a shell script with the command of the trainer, or Python"
            " with a GRPOConfig(...); got a file without any setting"
        )
    return {key: _number(value) for key, value in settings.items()}


def _number(value: Any) -> Any:
    """Return a number for a text such as 1e-6, which is no number in YAML 1.1; any other value as it is."""
    if isinstance(value, list):
        return [_number(item) for item in value]
    is_text = isinstance(value, str) and not isinstance(value, Expression)
    return float(value) if is_text and re.fullmatch(r"[+-]?(\d+\.?\d*|\.\d+)([eE][+-]?\d+)?", value) else value


def _tree(path: Path, *folders: Path) -> dict[str, Any]:
    """Return the mapping of a YAML file over those of the files that its key `defaults` names, if these exist."""
    return _based(yaml.safe_load(path.read_text(encoding="utf-8")), path, *folders)


def _based(tree: Any, path: Path, *folders: Path) -> dict[str, Any]:
    """Return a mapping over those of its bases, of which a later one counts more; `BASE` keeps those that are missing.

    A base has its name relative to the file that names it, as in NeMo-RL, or lies beside that file or in `folders`.
    """
    if not isinstance(tree, dict):
        return {}
    bases, below, missing = tree.pop(BASE, []), dict[str, Any](), list[Any]()
    for base in [bases] if isinstance(bases, str) else bases if isinstance(bases, list) else []:
        name = Path(str(base))
        near = [path.parent / name, *(folder / name.name for folder in (path.parent, *folders))]
        near = [file for file in near if file.is_file() and (file == near[0] or file.resolve() != path.resolve())]
        if near:
            base_tree = _tree(near[0], *folders)
            missing += base_tree.pop(BASE, [])
            below = _merged(below, base_tree)
        else:
            missing.append(base)
    alone = {key for key, value in tree.items() if isinstance(value, dict) and value.pop(_ALONE, False)}
    tree = _merged({key: value for key, value in below.items() if key not in alone}, tree)
    missing = [base for base in missing if base not in _VERL]
    return tree | ({BASE: missing} if missing else {})


def _merged(below: dict[str, Any], above: dict[str, Any]) -> dict[str, Any]:
    pairs = {key: (below[key], value) for key, value in above.items() if key in below}
    both = {key: _merged(*pair) for key, pair in pairs.items() if all(isinstance(value, dict) for value in pair)}
    return below | above | both


def _leaves(tree: dict[str, Any], over: Mapping[str, Any] | None = None) -> Iterator[tuple[str, Any]]:
    """Yield (dotted key, value); references such as ${a.b} are resolved, or the value is an `Expression`.

    Args:
        over: {dotted key: value} that count more, also for references to them.
    """
    if not OmegaConf.has_resolver("mul"):  # NeMo-RL's
        OmegaConf.register_new_resolver("mul", lambda a, b: a * b)
    whole = OmegaConf.create(tree)
    for key, value in (over or {}).items():
        if "." in key and not isinstance(value, Expression):
            with contextlib.suppress(OmegaConfBaseException):  # below a single value
                OmegaConf.update(whole, key, value, force_add=True)

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


def _of_script(text: str, path: Path) -> dict[str, Any]:
    """Return the settings of a shell script's commands, and of the files that these name.

    A key to which two commands give different values has none.  Commands of other trainings count only if no other
    is left: they raise ConfigError.  Beside a program of a trainer, those of programs that train nothing do not count.
    """
    script, merged, entries, others = Script(text), dict[str, Any](), list[str](), list[str]()
    is_alone = not any(_PROGRAM.search(command.entry or "") for command in Script(text).commands())
    for command in script.commands():
        if not (is_alone or not command.entry or _MAY_TRAIN.search(command.entry)):
            continue
        if other := _other_training(command, _Files(script.files, path.parent)):
            others.append(f"{command.entry} trains {other}")
            continue
        settings = _of_command(command, script.files, path.parent)
        entries += [command.entry] if command.entry and settings else []
        for key, value in settings.items():
            differs = key in merged and merged[key] != value
            merged[key] = Expression(f"{merged[key]} or {value} (of two commands)") if differs else value
    if others and not merged:
        raise ConfigError(f"{others[0]}; expected the command of an RL trainer, which rewards responses")
    return merged | ({ENTRY: entries} if entries else {})


def _other_training(command: Command, files: "_Files") -> str | None:
    """Return what a command trains otherwise, by the name of its program; None for the trainers of the tables."""
    name = re.sub(r"\.py$", "", str(command.entry)).replace("/", ".").rsplit(".", 1)[-1]
    is_read = command.script is not None and re.search("(GRPO|RLOO)Config", files.text(command.script) or "")
    trainings = [training for part, training in _TRAINS.items() if re.search(rf"(?<![a-z])({part})(?![a-z])", name)]
    return trainings[0] if trainings and not is_read and not re.search("(main|train)_ppo|grpo", name) else None


def _of_command(command: Command, written: Mapping[str, str], folder: Path) -> dict[str, Any]:
    """Return the settings of a command over those of its files.

    Args:
        written: {name: text} of files that the script itself writes.
        folder: of the script; names of files are relative to it, to a folder above it, or to the working directory.
    """
    flags, settings = dict(command.settings), dict[str, Any]()
    launcher, files = dict(command.launcher), _Files(written, folder)
    for options in (flags, launcher):
        for key in {"config_file", "accelerate_config"} & options.keys():
            settings |= _processes(options.pop(key), files)
    own = dict[str, Any]()
    if "config" in flags:
        own |= files.settings(flags.pop("config"), over=flags)
    elif (base := _OF_NEMO_RL.get(str(command.script).rsplit("/", 1)[-1])) is not None:
        own |= files.settings(str(Path(str(command.script)).parent / "configs" / base), over=flags)
    if "config_name" in flags and "config_path" in flags:
        own |= files.settings(f"{flags.pop('config_path')}/{flags.pop('config_name')}", ".yaml", over=flags)
    flags = {**own, **flags}
    text = command.text
    if command.script is not None and (text := files.text(command.script)) is None:
        settings[SCRIPT] = command.script
    if text is not None and _IS_TRL.search(text):
        parsed = dict(of_python(text, flags))
        return {**settings, **launcher, **{key: value for key, value in flags.items() if key in LAUNCH}, **parsed}
    settings |= {RLOO: True} if re.fullmatch(r"(trl |(.*/)?(.*\.)?)rloo(\.py)?", str(command.entry)) else {}
    return {**settings, **launcher, **flags}


def _processes(name: Any, files: "_Files") -> dict[str, Any]:
    """Return the number of processes and machines of a configuration of accelerate, or its name if it is missing."""
    if name in _OF_TRL:
        return {"num_processes": _OF_TRL[name]}
    settings = files.settings(name)
    if any(key.startswith(UNREAD) for key in settings):
        return {"config_file": name}
    return {key: value for key, value in settings.items() if key in LAUNCH}


class _Files(NamedTuple):
    """The files that a script can name: those that it writes, and those beside it."""

    written: Mapping[str, str]
    folder: Path

    def path(self, name: str) -> Path | None:
        """Return the path of a file; names are relative to the script, a folder above it, or the working directory."""
        folders = (self.folder, Path(), *self.folder.resolve().parents)
        return next((folder / name for folder in folders if (folder / name).is_file()), None)

    def text(self, name: str) -> str | None:
        path = None if name in self.written else self.path(name)
        return self.written.get(name) if path is None else path.read_text(encoding="utf-8")

    def settings(self, name: Any, ending: str = "", over: Mapping[str, Any] | None = None) -> dict[str, Any]:
        """Return the settings of a YAML file; if it cannot be read, a setting that says which file is missing.

        Args:
            over: settings of the command, to which references of the file lead.
        """
        name = Expression(name) if isinstance(name, Expression) else f"{str(name).removesuffix(ending)}{ending}"
        text = None if isinstance(name, Expression) else self.text(name)
        if text is None:
            if name.endswith(TABLE_BASE):
                return {BASE: [str(name)]}
            if match := _IN_VERL.fullmatch(name):
                return {"config_name": match[2]}
            return {f"{UNREAD}{name}": "this file is missing: put it where the script names it, and convert again"}
        path = self.path(name) or self.folder / name
        settings = dict(_leaves(_based(yaml.safe_load(text), path, self.folder), over))
        return {key: without_marks(value) for key, value in settings.items()}
