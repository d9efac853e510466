"""Builds a run's configuration: composes `conf/` with Hydra, applies the overrides to the typed schema, checks it.

    cfg = load(["cluster=laptop", "trainer.grpo.max_steps=6"])          # reads only conf/ and the files that keys name
    cfg = load_run(["run_dir=runs/laptop"])                             # continues the run in that directory, if any
    cfg = load([], Path("runs/laptop/config.yaml"))                     # a saved configuration

Every mistake raises ConfigError with the full key, its value and the expected value.  This file imports neither torch
nor NeMo, so that `prorl` reports a wrong key within a second.
"""

import difflib
import functools
import importlib.resources
import logging
import os
import pickle
import sys
from pathlib import Path
from typing import Any

import yaml
from hydra import compose, initialize_config_dir
from hydra.core.config_store import ConfigStore
from hydra.core.global_hydra import GlobalHydra
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override
from hydra.errors import HydraException
from omegaconf import DictConfig, ListConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from nemo_prorl import own_functions
from nemo_prorl.cautions import cautions
from nemo_prorl.checks import check, check_heads, check_shape, pretrained_config, pretrained_name
from nemo_prorl.config import MISSING, Config, all_keys
from nemo_prorl.config_changes import check_same_run, leaves
from nemo_prorl.data.hf_config import model_keys
from nemo_prorl.data.hub import model_folder
from nemo_prorl.data.prepared import check_data
from nemo_prorl.errors import ConfigError, did_you_mean
from nemo_prorl.files import first_line
from nemo_prorl.migration.names import meant
from nemo_prorl.nemo_keys import adapter_fault, is_read
from nemo_prorl.rewards.functions import with_absolute_paths
from nemo_prorl.sizing.memory import is_small
from nemo_prorl.value_types import kind_words, likely_fix, same_kind, shown, type_message

_log = logging.getLogger(__name__)


# Sections whose keys the schema does not list: NeMo's keys are in the yaml files of conf/; the free sections accept any
# key, which the plugin, the program or the generator that reads them checks.
NEMO_SECTIONS = ("model", "exp_manager")
FREE_SECTIONS = (
    "rewards.plugins",
    "rewards.functions",
    "launch.env",
    "data.train.*.options",
    "data.validation.*.options",
)


def load(overrides: list[str], config_file: Path | None = None, need_weights: bool = False) -> DictConfig:
    """Return the resolved, checked configuration, typed by `config.Config`; raises ConfigError.

    If `pretrained_checkpoint.restore_from_path` is the name of a model on the hub, the model is downloaded unless it is
    cached.  The returned configuration then has the folder of the model in the hub's cache instead of the name.

    Args:
        overrides: in Hydra's syntax: groups (`cluster=laptop`) and values (`trainer.grpo.max_steps=6`).
        config_file: a complete configuration to use instead of conf/; then only values can be overridden.
        need_weights: raise ConfigError if the model that the run begins with has no weights files; False: its
            config.json is enough.
    """
    cfg = _unchecked(overrides, config_file, need_weights)
    check(cfg, lambda: _other_stages(cfg, overrides) if config_file is None else [])
    return cfg


def _other_stages(cfg: DictConfig, overrides: list[str]) -> list[DictConfig]:
    """Return the configurations, not checked, that the overrides give at the other stages; [] without a stage."""
    others = [text for text in overrides if _parse([text])[0].key_or_group != "stage"]
    names = [name for name in group_options(cfg.config_dir)["stage"] if name not in ("none", cfg.stage)]
    return [_unchecked([*others, f"stage={name}"]) for name in names] if cfg.stage != "none" else []


def _unchecked(overrides: list[str], config_file: Path | None = None, need_weights: bool = False) -> DictConfig:
    """Return the configuration like `load`, before `check`."""
    parsed = _parse(overrides)
    groups = [o for o in parsed if o.key_or_group in group_options()]
    values = [o for o in parsed if o.key_or_group not in (*group_options(), "config_dir")]
    if config_file is None:
        cfg = _compose(groups, _own_folder(parsed))
    elif groups:
        name = groups[0].key_or_group
        raise ConfigError(
            f"{groups[0].input_line}: {config_file} is a whole configuration, so the group {name} cannot be chosen."
            " Fix: override single keys"
        )
    else:
        cfg = read_config(config_file)
    stated = set()
    for number, override in enumerate(values):
        if _is_replaced(override, values[number + 1 :]):
            continue
        for key, value in leaves(override.value(), override.key_or_group, into_lists=False):
            _apply(cfg, key, _with_home(value), override.is_add())
            stated.add(key)
    try:
        _take_model(cfg, stated, need_weights)
        # `OmegaConf.missing_keys` would resolve each interpolation, too, which takes as long as all the rest.
        missing = sorted(key for key, value in leaves(OmegaConf.to_container(cfg)) if value == MISSING)
        OmegaConf.resolve(cfg)
    except OmegaConfBaseException as error:
        raise ConfigError(f"{error.full_key}: the interpolation cannot be resolved: {first_line(error)}") from error
    if missing:
        raise ConfigError(f"{missing[0]} must be given: prorl train {missing[0]}=...")
    _make_absolute(cfg)
    cfg.rollout.python = rollout_python(cfg.rollout.python)
    if cfg.rollout.dtype is None:
        # An engine in bf16 beside a trainer in float32 would miss updates that are smaller than bf16's spacing.
        cfg.rollout.dtype = "bfloat16" if str(cfg.trainer.precision).startswith("bf16") else "float32"
    return cfg


def load_run(overrides: list[str], config_file: Path | None = None, need_files: bool = True) -> DictConfig:
    """Return the configuration like `load`, but continue the run in `run_dir`, if there is one.

    The overrides are applied to the first of these configurations that exists: `config_file`; conf/, if `overrides`
    choose groups (as the command that started the run may do); the saved configuration of the run; conf/.  In every
    case `check_same_run` refuses changes that would make another run.  Logs the warnings of `cautions`.

    Args:
        need_files: False if the caller starts nothing: missing data files (`data.prepared`) and missing weights are not
            an error, and a change that `check_same_run` refuses is only a warning.
    """
    _warn_of_repeated_keys(overrides)
    cfg, old = load(overrides, config_file, need_files), None
    saved = Path(cfg.run_dir) / "config.yaml"
    if saved.is_file():
        old = read_config(saved)
        if config_file is None and not any(o.key_or_group in group_options() for o in _parse(overrides)):
            cfg = load(overrides, saved, need_files)
        try:
            check_same_run(old, cfg)
        except ConfigError as error:
            if need_files:
                raise
            _log.warning("what if: %s `prorl train` would refuse it", first_line(error))
    check_heads(cfg)
    for text in cautions(cfg, old):
        _log.warning("%s", text)
    if need_files:
        check_data(cfg)
    return cfg


def _with_home(value: Any) -> Any:
    """Return a value in which `~/` at the beginning of each text is the home folder."""
    if isinstance(value, list):
        return [_with_home(item) for item in value]
    if isinstance(value, dict):
        return {key: _with_home(item) for key, item in value.items()}
    return os.path.expanduser(value) if isinstance(value, str) and value.startswith("~/") else value


def _is_replaced(override: Any, later: list[Any]) -> bool:
    """Return whether a later override replaces what this one changes: `data.validation.0.size=16 data.validation=[]`.

    In a continued run the list may not have this item any more.
    """
    above = (other for other in later if override.key_or_group.startswith(f"{other.key_or_group}."))
    return any(not isinstance(other.value(), dict) for other in above)


def _warn_of_repeated_keys(overrides: list[str]) -> None:
    """Warn of each key that is given twice with different values."""
    values: dict[str, Any] = {}
    for override in _parse(overrides):
        key, value = override.key_or_group, override.value()
        if values.setdefault(key, value) != value:
            _log.warning("%s is given twice, as %s and as %s: the last is used", key, shown(values[key]), shown(value))
        values[key] = value


def _make_absolute(cfg: DictConfig) -> None:
    """Make the paths of the user's files absolute, because ranks and workers may run in another folder."""
    if cfg.chain.start_from is not None:
        cfg.chain.start_from = str(Path(cfg.chain.start_from).absolute())
    for task, place in cfg.rewards.functions.items():
        cfg.rewards.functions[task] = with_absolute_paths(place)
    for name in ("loss", "advantage"):
        cfg.trainer.grpo[name] = own_functions.with_absolute_path(cfg.trainer.grpo[name])
    rules = cfg.trainer.resets.rules
    rules.asks = [own_functions.with_absolute_path(rule) for rule in rules.asks]


def make_data_absolute(cfg: DictConfig) -> None:
    """Make the paths of the data and of the model absolute, for a job that runs in another folder."""
    for source in (*cfg.data.train, *cfg.data.validation):
        if source.path is not None:
            source.path = os.path.abspath(source.path)
    cfg.data.folder = os.path.abspath(cfg.data.folder)
    if (model := cfg.pretrained_checkpoint.restore_from_path) is not None:
        cfg.pretrained_checkpoint.restore_from_path = os.path.abspath(model)


def resolved_yaml(cfg: DictConfig) -> str:
    """Return the configuration as yaml without interpolations: the text of a run directory's `config.yaml`."""
    return OmegaConf.to_yaml(cfg, resolve=True)


def read_config(path: Path) -> DictConfig:
    """Return a saved configuration merged into the schema, without `check`; raises ConfigError."""
    try:
        read = yaml.safe_load(path.read_text())
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise ConfigError(f"{path} cannot be read as yaml: {error}") from error
    if not isinstance(read, dict):
        got = "an empty file" if read is None else type(read).__name__
        raise ConfigError(f"{path}: expected a configuration (a yaml mapping); got {got}")
    cfg = OmegaConf.structured(Config)
    try:
        for key, value in leaves(read):
            _require_known(cfg, key, value)
        return _with_defaults(OmegaConf.merge(cfg, read))  # type: ignore[arg-type]
    except ConfigError as error:
        raise ConfigError(f"{path}: {error}") from error
    except OmegaConfBaseException as error:
        raise ConfigError(f"{path}: {type_message(cfg, str(error.full_key or ''), None, error)}") from error


def conf_folder() -> Path:
    """Return the folder of the shipped configuration in the installed package."""
    return Path(str(importlib.resources.files("nemo_prorl") / "conf"))


def group_options(own: Path | str | None = None) -> dict[str, list[str]]:
    """Return the names of the options of each group: the shipped ones, and those in the folder `own` (`config_dir`)."""
    shipped = _shipped().items()
    folder = Path(own).expanduser() if own else None
    return {group: sorted(names | _names(folder / group) if folder else names) for group, names in shipped}


@functools.cache
def _shipped() -> dict[str, set[str]]:
    return {folder.name: _names(folder) for folder in sorted(conf_folder().iterdir()) if folder.is_dir()}


def _names(folder: Path) -> set[str]:
    return {path.stem for path in folder.glob("*.yaml")}


def _own_folder(overrides: list[Override]) -> Path | None:
    """Return the folder that the override `config_dir=...` names; None without this override.

    Raises ConfigError if the folder contains no GROUP/NAME.yaml, or one with the name of a shipped file.
    """
    folders = [override.value() for override in overrides if override.key_or_group == "config_dir"]
    if not folders or folders[-1] is None:
        return None
    folder, shipped = Path(os.path.abspath(_with_home(str(folders[-1])))), group_options()
    own = {group: _names(folder / group) for group in shipped}
    if not any(own.values()):
        raise ConfigError(
            f"config_dir={folders[-1]}: expected a folder with files of the groups, such as data/NAME.yaml; found no"
            f" such file. Groups: {', '.join(shipped)}"
        )
    if twice := sorted(f"{group}/{name}.yaml" for group, names in own.items() for name in names & set(shipped[group])):
        raise ConfigError(f"config_dir={folders[-1]}: {twice[0]} has the name of a shipped file. Fix: rename it")
    return folder


def _take_model(cfg: DictConfig, stated: set[str], need_weights: bool) -> None:
    """Find the folder of the model that the run begins with; set the `model` keys that follow from its config.json.

    Args:
        stated: keys that the user has set; ConfigError if one of them contradicts the config.json.
        need_weights: as in `load`.
    """
    source = cfg.pretrained_checkpoint
    if OmegaConf.is_missing(source, "restore_from_path") or source.restore_from_path is None:
        return
    option = "pretrained_checkpoint.restore_from_path"
    source.restore_from_path = str(model_folder(source.restore_from_path, option, need_weights))
    hf = pretrained_config(cfg, need_weights)
    for key, value in model_keys(hf, pretrained_name(cfg)).items():
        if f"model.{key}" not in stated:
            OmegaConf.update(cfg, f"model.{key}", value, force_add=True)
    check_shape(cfg.model, hf, pretrained_name(cfg))


def rollout_python(path: str) -> str:
    """Return the path of the Python interpreter that runs the engines.

    Args:
        path: the path in the configuration.  If a relative path does not exist in the current folder, but exists in
            this checkout, the path in this checkout is returned.
    """
    there = Path(sys.prefix).parent.parent / path  # this Python is CHECKOUT/.venv/train/bin/python
    return str(there) if not Path(path).exists() and there.exists() else path


def _parse(overrides: list[str]) -> list[Override]:
    parsed = []
    for text in overrides:
        key, equals, value = text.partition("=")
        if value.startswith("~/"):  # a shell leaves `~` as it is after a key with a dot, and Hydra refuses it
            value = "'" + value.replace("'", "\\'") + "'"
        try:
            [override] = OverridesParser.create().parse_overrides([f"{key}{equals}{value}"])
        except HydraException as error:
            raise ConfigError(
                f"{text!r}: expected an override KEY=VALUE ({first_line(error)})."
                " Fix: correct the override; in a shell, put it in quotes, and a text with blanks, braces or ~ in"
                " quotes of its own: 'KEY=\"some text\"'"
            ) from error
        if override.is_delete() or override.is_sweep_override():
            kind = "a key cannot be deleted" if override.is_delete() else "expected one value, not a sweep"
            raise ConfigError(f"{text}: {kind}")
        parsed.append(override)
    return parsed


def _compose(groups: list[Override], own: Path | None) -> DictConfig:
    """Return the configuration with these groups chosen, merged into the schema.

    Args:
        groups: overrides GROUP=NAME.
        own: the user's folder with further files GROUP/NAME.yaml (`config_dir`), or None.
    """
    options = group_options(own)
    for chosen in groups:
        group, name = chosen.key_or_group, chosen.value()
        if name not in options[group]:
            raise ConfigError(
                f"{group}={name}: no such option.{did_you_mean(str(name), options[group])} "
                f"Known: {', '.join(options[group])}{_for_a_model(group, name)}"
            )
    choices = tuple(f"{o.key_or_group}={o.value()}" for o in groups)
    if own is None:
        return pickle.loads(_composed(choices))  # a tenth of the time of a deepcopy
    cfg = _hydra((*choices, f"hydra.searchpath=['file://{own}']"), own)  # not cached: the user edits these files
    cfg.config_dir = str(own)
    return cfg


@functools.lru_cache
def _composed(choices: tuple[str, ...]) -> bytes:
    return pickle.dumps(_hydra(choices, conf_folder()))


def _hydra(choices: tuple[str, ...], folder: Path) -> DictConfig:
    """Return the configuration that Hydra composes from conf/ with the overrides `choices`.

    Raises ConfigError that names `folder`, because its files are the likely cause.
    """
    _store_schema()
    GlobalHydra.instance().clear()
    try:
        OmegaConf.register_new_resolver("scaled", _scaled, replace=True)
        OmegaConf.register_new_resolver("by_size", _by_size, replace=True)
        OmegaConf.register_new_resolver("folder_of_stage", _folder_of_stage, replace=True)
        with initialize_config_dir(config_dir=str(conf_folder().resolve()), version_base="1.3"):
            return _with_defaults(compose("config", overrides=list(choices)))
    except (HydraException, OmegaConfBaseException, yaml.YAMLError) as error:
        raise ConfigError(f"{folder}: Hydra cannot compose the configuration: {error}") from error


@functools.cache
def _store_schema() -> None:
    """Store the schema for Hydra, once: this takes a quarter of the time in which Hydra composes."""
    ConfigStore.instance().store(name="schema", node=Config)


def _with_defaults(cfg: DictConfig) -> DictConfig:
    """Return the configuration with the defaults of the keys of `model.optim` that its file leaves out."""
    if OmegaConf.select(cfg, "model.optim") is not None:
        for key in all_keys():
            has_default = key.name.startswith("model.optim.") and key.default != MISSING
            if has_default and OmegaConf.select(cfg, key.name) is None:
                OmegaConf.update(cfg, key.name, key.default, force_add=True)
    return cfg


def _scaled(steps: int, _root_: DictConfig) -> int:
    """Return the value of `${scaled:STEPS}`: STEPS times `chain.step_scale`, rounded, at least 1."""
    return max(1, round(steps * _root_.chain.step_scale))


def _by_size(small: Any, large: Any, _root_: DictConfig) -> Any:
    """Return the value of `${by_size:SMALL,LARGE}`: SMALL if the model has fewer than 20 million parameters."""
    try:
        return small if is_small(_root_) else large
    except TypeError:  # a key with a size of the model is not a number, which `check` reports
        return small


def _folder_of_stage(stage: str) -> str:
    """Return the value of `${folder_of_stage:STAGE}`, the default of `run_dir`.

    All stages have the same parent folder, because a stage looks there for the run of the previous stage.
    """
    return "runs/laptop" if stage == "none" else f"runs/prorl/{stage}"


def _apply(cfg: DictConfig, key: str, value: Any, add: bool) -> None:
    """Set one value; raise ConfigError for an unknown key or a value of another type.

    `add`: the override is written +KEY=VALUE, so that a NeMo key that no shipped file sets is accepted.
    """
    if add and key.startswith(tuple(f"{section}." for section in NEMO_SECTIONS)):
        OmegaConf.update(cfg, key, value, force_add=True)  # a NeMo key that no shipped file sets
        return
    node, nemo = _require_known(cfg, key, value), key.split(".")[0] in NEMO_SECTIONS
    if nemo and node is not None and not same_kind(node, value):
        kind, like = type(node), "" if isinstance(node, DictConfig) else f", like the shipped value {node}"
        raise ConfigError(
            f"{key}={shown(value)}: expected {kind_words(kind, False)}{like}{likely_fix(key, value, kind, node)}"
        )
    try:
        OmegaConf.update(cfg, key, value, force_add=_is_free(key))
    except OmegaConfBaseException as error:
        raise ConfigError(type_message(cfg, key, value, error)) from error


def _require_known(cfg: DictConfig, key: str, value: Any) -> Any:
    """Return the current value at `key`; raise ConfigError with suggestions if the configuration has no such key."""
    node: Any = cfg
    parts = key.split(".")
    for depth, part in enumerate(parts):
        here = ".".join(parts[:depth])
        if _is_free(".".join(parts[: depth + 1])) or (here in NEMO_SECTIONS and not node):
            return None
        if isinstance(node, ListConfig) and part.isdigit() and int(part) < len(node):
            node = node._get_node(int(part))
        elif isinstance(node, DictConfig) and part in node.keys():  # noqa: SIM118  `in` denies MISSING
            node = node._get_node(part)
        elif isinstance(node, ListConfig) and part.isdigit() and not len(node):
            return None  # a list that only the file fills; it is empty in the schema
        else:
            raise ConfigError(_unknown(cfg, key, value, here=here, part=part, node=node))
        node = node._value() if not isinstance(node, DictConfig | ListConfig) else node
    return node


def _unknown(cfg: DictConfig, key: str, value: Any, here: str, part: str, node: Any) -> str:
    where = here or "the configuration"
    if isinstance(node, ListConfig) and not part.isdigit():
        return f"{key}={value}: {where} is a list. Fix: write {where}=[{{{part}: {value}, ...}}]"
    if not isinstance(node, DictConfig):
        length = f"a list of {len(node)}" if isinstance(node, ListConfig) else "a single value"
        return f"unknown key {key} (={shown(value)}): {where} is {length}"
    known = sorted({str(k) for k in node} | (set(group_options()) if not here else set()))
    everywhere = [k for k, _ in leaves(OmegaConf.to_container(cfg, resolve=False))]
    same_name = [k for k in everywhere if k.split(".")[-1] == key.split(".")[-1]]
    # A key of another framework comes before a key with similar letters: `lr` is not trainer.warmup.lr.
    translated = [own] if (own := meant(key)) in everywhere else []
    prefix = f"{here}." if here else ""
    longer = [prefix + name for name in known if "." in here and name.endswith(f"_{part}")]
    near = [prefix + name for name in difflib.get_close_matches(part, known, n=1)]
    message = f"unknown key {key} (={shown(value)}): {where} has no '{part}'."
    if fault := adapter_fault(key):
        return f"{message} {fault[0].upper()}{fault[1:]}"
    if suggestion := (
        longer or translated or same_name or near or difflib.get_close_matches(key, everywhere, n=1, cutoff=0.8)
    ):
        message += f" Did you mean {suggestion[0]}?"
    if here == "model.optim.sched":  # `checks` refuses other keys
        message += f" It is a rate: {value} x model.optim.lr." if part.startswith("min_lr_") else ""
    elif here.split(".")[0] in NEMO_SECTIONS and is_read(key):
        message += f" To set a NeMo key that no shipped file sets, write +{key}={value}."
    return f"{message} Known in {where}: {', '.join(known)}"


def _is_free(key: str) -> bool:
    """Return whether a key is in a section that accepts any key (`FREE_SECTIONS`)."""
    parts = key.split(".")
    for section in FREE_SECTIONS:
        pattern = section.split(".")
        if len(parts) > len(pattern) and all(p in ("*", part) for p, part in zip(pattern, parts, strict=False)):
            return True
    return False


def _for_a_model(group: str, name: Any) -> str:
    """Return the key for the folder or hub name of a model that is given as an option of the group `model`."""
    is_model = group == "model" and "/" in str(name)
    return f". Fix for a model's folder or hub name: pretrained_checkpoint.restore_from_path={name}" if is_model else ""
