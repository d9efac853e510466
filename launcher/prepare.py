"""Preparation of a run before any engine or rank starts: check the data and the node, make the first model."""

import logging
import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import cast

from omegaconf import DictConfig

from nemo_prorl.caches import cache_folder
from nemo_prorl.config import Config
from nemo_prorl.errors import ConfigError, DamagedCheckpoint, ProrlError, UnfitMachine
from nemo_prorl.files import write_text
from nemo_prorl.launcher.run_data import check_own_functions, check_prompts, check_rewards
from nemo_prorl.sizing.cores import Cores

_log = logging.getLogger(__name__)


def prepare(cfg: DictConfig, run_dir: Path, config_text: str) -> list[str]:
    """Check data, rewards, the user's functions and the node; make the run directory and the model to start from.

    Returns:
        The tasks of the data and of their second verifiers, sorted.

    Raises:
        ConfigError: the configuration is wrong.
        UnfitMachine: the node lacks something that the run needs.
        DataError: a record is wrong.
    """
    from nemo_prorl.config_changes import changes
    from nemo_prorl.data.blend import load_sources, of_tasks
    from nemo_prorl.launcher.doctor.network import wandb_fault
    from nemo_prorl.launcher.doctor.storage import check_storage
    from nemo_prorl.lifecycle.base_model import make_initial_model
    from nemo_prorl.lifecycle.retention import clean, step_of
    from nemo_prorl.lifecycle.run_records import Journal
    from nemo_prorl.lifecycle.stages import origin
    from nemo_prorl.rewards.judging import check_sandbox
    from nemo_prorl.settings import read_config

    if fault := run_dir_fault(run_dir):
        raise ConfigError(fault)
    check_node(cfg)
    check_own_functions(cfg)
    if fault := wandb_fault(cfg, os.environ):
        raise ConfigError(fault)
    for check in check_storage(cfg):
        if check.state == "fail":  # an estimate, so it does not refuse the run
            _log.warning("%s: %s. Fix: %s", check.name, check.text, check.fix)
    every_task, validation = load_sources(cfg.data)
    train = of_tasks(every_task, cfg.data)
    _warn_of_repeats(sum(len(records) for _, records in train), cfg.trainer.grpo.prompts_per_step)
    sources = [*train, *validation]
    plugins = check_rewards(cfg, sources)
    if any(plugin.needs_sandbox for plugin in plugins.values()):
        check_sandbox(cfg.rewards.unsafe_no_sandbox)
    clean(run_dir / "checkpoints")
    saved, changed = run_dir / "config.yaml", ""
    if own := _continuable(run_dir / "checkpoints"):
        changed = changes(read_config(saved), cfg) if saved.is_file() else ""
    start = None if own else origin(cast(Config, cfg), run_dir)
    if not (saved.exists() or cfg.pretrained_checkpoint.restore_from_path):
        # config.yaml is written last: an earlier start failed, perhaps with other data
        shutil.rmtree(run_dir / "init", ignore_errors=True)
    folder = make_initial_model(cfg, run_dir, every_task, start)
    check_weights(cfg, folder)
    check_prompts(cfg, every_task, train, validation, folder).tell()
    for name in ("logs", "endpoints", "checkpoints"):
        (run_dir / name).mkdir(exist_ok=True)
    (run_dir / "endpoints").chmod(0o700)
    if changed:  # before config.yaml, so that a kill between the two does not lose the event
        _log.info("the run goes on with other settings: %s", changed)
        Journal(run_dir).append("change", step_of(own[-1]), what=changed)
    write_text(saved, config_text, sync=True)  # a full disk must not empty it
    return sorted(plugins)


def _continuable(checkpoints: Path) -> list[Path]:
    """Return the complete checkpoints, of which this version can continue the newest.

    A Slurm job sets a damaged one aside.  Raises CheckpointError if the newest one cannot be continued.
    """
    from nemo_prorl.lifecycle.retention import check_continuable, complete, set_aside

    while own := complete(checkpoints):
        try:
            check_continuable(own[-1])
        except DamagedCheckpoint:
            if not set_aside(own[-1]):
                raise
        else:
            break
    return own


def check_beginning(cfg: DictConfig) -> None:
    """Check what does not depend on the node, for a command that starts the run later or not at all.

    Warns if the run directory cannot be made here, because in a container it may be another folder.  Raises ConfigError
    if Weights & Biases has no key.
    """
    from nemo_prorl.launcher.doctor.network import wandb_fault

    if fault := run_dir_fault(Path(cfg.run_dir)):
        _log.warning("%s", fault)
    if fault := wandb_fault(cfg, os.environ):
        raise ConfigError(fault)


def check_weights(cfg: DictConfig, folder: Path) -> None:
    """Raise ConfigError if the key `model`, config.json, weights and tokenizer of a folder are not of one model."""
    from nemo_prorl.checks import check_shape
    from nemo_prorl.data.hf_config import read_config
    from nemo_prorl.data.model_folder import model_fault

    check_shape(cfg.model, read_config(folder), str(folder))
    if fault := model_fault(folder):
        raise ConfigError(fault)


def start_faults(cfg: DictConfig) -> Iterator[tuple[ProrlError, bool]]:
    """Yield each error with which `prorl train` would refuse the run, and whether another machine may not have it.

    `settings.load_run` and `check_files` find other errors, `check_node` those of the machine.
    """
    from nemo_prorl.config_changes import check_same_run
    from nemo_prorl.data.hub import will_be_completed
    from nemo_prorl.data.model_folder import missing_weights, model_fault
    from nemo_prorl.data.prepared import faults, is_elsewhere
    from nemo_prorl.launcher.doctor.network import wandb_fault
    from nemo_prorl.lifecycle.retention import check_continuable, complete
    from nemo_prorl.planning.prompts import template_fault
    from nemo_prorl.settings import read_config

    run_dir = Path(cfg.run_dir)
    try:
        if (saved := run_dir / "config.yaml").is_file():
            check_same_run(read_config(saved), cfg)
        if own := complete(run_dir / "checkpoints"):
            check_continuable(own[-1])
    except ProrlError as error:
        yield error, False
    yield from ((ConfigError(fault), is_elsewhere(cfg)) for fault in faults(cfg))
    path = cfg.pretrained_checkpoint.restore_from_path
    if path and not will_be_completed(folder := Path(path)):
        if of_model := model_fault(folder) or template_fault(cfg.data, folder):
            yield ConfigError(f"pretrained_checkpoint.restore_from_path={of_model}"), False
        if fault := missing_weights(folder):
            yield ConfigError(f"pretrained_checkpoint.restore_from_path={fault}"), True
    if fault := run_dir_fault(run_dir):
        yield ConfigError(fault), _nearest(run_dir) == Path(run_dir.absolute().anchor)
    if fault := wandb_fault(cfg, os.environ):
        yield ConfigError(fault), True


def check_origin(cfg: DictConfig) -> None:
    """Raise ConfigError if the stage can neither continue nor begin: its first checkpoint or model is missing."""
    from nemo_prorl.lifecycle.base_model import model_to_copy
    from nemo_prorl.lifecycle.retention import complete
    from nemo_prorl.lifecycle.stages import origin

    run_dir = Path(cfg.run_dir)
    if not complete(run_dir / "checkpoints"):
        model_to_copy(cfg, run_dir, origin(cast(Config, cfg), run_dir))


def warn_of_origin(cfg: DictConfig) -> None:
    """Warn of what `check_origin` refuses, for a command that does not start the stage now."""
    try:
        check_origin(cfg)
    except ConfigError as error:
        _log.warning("this stage cannot begin yet: %s", error)


def run_dir_fault(run_dir: Path) -> str | None:
    """Return why the run directory cannot be made or written; None if it can.  Makes no folder."""
    init, saved = run_dir / "init", run_dir / "config.yaml"
    if init.is_dir() and not ((init / "config.json").is_file() or saved.is_file()):
        return f"run_dir={run_dir}: {init} is not the model of a run; a start would remove it. Fix: run_dir=FOLDER"
    if (run_dir / "config.json").is_file() and any(run_dir.glob("*.safetensors")) and not saved.is_file():
        return f"run_dir={run_dir}: it is the folder of a model. Fix: run_dir=FOLDER, a new one"
    nearest, fault = _nearest(run_dir), "is not a folder"
    if nearest.is_dir():
        try:  # to ask for the rights is not enough: root has all of them, also in /proc or on a disk that is full
            with tempfile.TemporaryFile(dir=nearest):
                return None
        except OSError as error:
            fault = f"cannot be written ({error.strerror})"
    return f"run_dir={run_dir}: expected a folder that exists or can be made; {nearest} {fault}. Fix: run_dir=FOLDER"


def _nearest(folder: Path) -> Path:
    """Return the folder, or the nearest parent that exists."""
    return next(path for path in (folder.absolute(), *folder.absolute().parents) if os.path.lexists(path))


def _warn_of_repeats(records: int, prompts: int) -> None:
    """Warn if a step takes more prompts than there are records to train on."""
    if records < prompts:
        text = "data.train has %d records, so a step (trainer.grpo.prompts_per_step=%d) takes each about %.1f times"
        _log.warning(text, records, prompts, prompts / records)


def check_node(cfg: DictConfig, trains: bool = True) -> None:
    """Raise UnfitMachine with everything that this node lacks for a run.

    Args:
        trains: False if only engines run on the node, as in an evaluation.
    """
    from nemo_prorl.launcher.doctor.devices import check_node_gpus

    python = Path(cfg.rollout.python)
    if not os.access(python, os.X_OK):
        raise UnfitMachine(
            f"rollout.python={python}: expected a Python that runs on this node. Fix: make setup in the"
            " checkout of the project, or rollout.python=PATH"
        )
    failed = [check for check in check_node_gpus(cfg, os.environ, python, trains) if check.state == "fail"]
    if failed:
        raise UnfitMachine("\n".join(f"{check.name}: {check.text}. Fix: {check.fix}" for check in failed))
    Cores.of(cfg, os.sched_getaffinity(0))
    cache_folder(os.environ)
