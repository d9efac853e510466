"""Preparation of a run before any engine or rank starts: check the data and the node, make the first model."""

import copy
import json
import logging
import os
import shutil
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from omegaconf import DictConfig, OmegaConf

from nemo_prorl.config import Config, DataSource
from nemo_prorl.errors import ConfigError, DataError, UnfitMachine
from nemo_prorl.launcher.environment import cache_folder
from nemo_prorl.sizing.cores import Cores

if TYPE_CHECKING:
    from nemo_prorl.rewards.interface import RewardPlugin

_log = logging.getLogger(__name__)


def prepare(cfg: DictConfig, run_dir: Path, config_text: str) -> list[str]:
    """Check data, rewards and the rollout environment; make the run directory and the model that training starts from.

    Returns:
        The tasks of the data and of their second verifiers, sorted.

    Raises:
        ConfigError: the configuration is wrong.
        UnfitMachine: the node lacks something that the run needs.
        DataError: a record is wrong.
    """
    from nemo_prorl.checks import check_shape
    from nemo_prorl.data.blend import load_sources, of_tasks, without_long
    from nemo_prorl.data.render import PromptRenderer
    from nemo_prorl.launcher.doctor.network import wandb_fault
    from nemo_prorl.launcher.doctor.storage import check_storage
    from nemo_prorl.lifecycle.base_model import make_initial_model
    from nemo_prorl.lifecycle.retention import check_continuable, clean, complete
    from nemo_prorl.lifecycle.stages import origin
    from nemo_prorl.rewards.service import check_sandbox

    check_node(cfg)
    if fault := wandb_fault(cfg, os.environ):
        raise ConfigError(fault)
    for check in check_storage(cfg):
        if check.state == "fail":  # an estimate, so it does not refuse the run
            _log.warning("%s: %s. Fix: %s", check.name, check.text, check.cure)
    every_task, validation = load_sources(cfg.data)
    train = of_tasks(every_task, cfg.data)
    _warn_of_repeats(sum(len(records) for _, records in train), cfg.trainer.grpo.prompts_per_step)
    sources = [*train, *validation]
    plugins = _check_rewards(cfg, sources)
    if any(plugin.needs_sandbox for plugin in plugins.values()):
        check_sandbox(cfg.rewards.unsafe_no_sandbox)
    clean(run_dir / "checkpoints")
    if own := complete(run_dir / "checkpoints"):
        check_continuable(own[-1])
    start = None if own else origin(cast(Config, cfg), run_dir)
    if not (run_dir / "config.yaml").exists():  # written last: an earlier start failed, perhaps with other data
        shutil.rmtree(run_dir / "init", ignore_errors=True)
    folder = make_initial_model(cfg, run_dir, every_task, start)
    check_shape(cfg.model, json.loads((folder / "config.json").read_text()), str(folder))
    renderer = PromptRenderer(folder, cfg.trainer.grpo.context_tokens, cfg.data)
    short = without_long(train, renderer.length, cfg.data.max_prompt_tokens)
    _check_prompts(cfg, {"train": short, "validation": validation}, renderer.length)
    for name in ("logs", "endpoints", "checkpoints"):
        (run_dir / name).mkdir(exist_ok=True)
    (run_dir / "endpoints").chmod(0o700)
    (run_dir / "config.yaml").write_text(config_text)
    return sorted(plugins)


def check_files(cfg: DictConfig) -> None:
    """Check data files and reward functions for a command that starts nothing, with the errors of `prepare`.

    Generated sources and missing files are left out: generated records are right, and take seconds to make.

    Raises:
        ConfigError: a reward function cannot be loaded, or no plugin judges a task or is its second verifier.
        DataError: a record is wrong.
    """
    from nemo_prorl.data.blend import load_sources, of_tasks
    from nemo_prorl.data.prepared import generated_tasks

    data = copy.deepcopy(cfg.data)
    for part in ("train", "validation"):
        data[part] = [source for source in data[part] if source.path is not None and Path(source.path).is_file()]
    loaded = load_sources(data)
    if len(data.train) == len(cfg.data.train):
        train = of_tasks(loaded.train, data)
    else:  # the sources that are left out may have the other tasks
        tasks = data.tasks
        train = [(one, [r for r in records if tasks is None or r["task"] in tasks]) for one, records in loaded.train]
    _check_rewards(cfg, [*train, *loaded.validation], generated_tasks(cfg))


def _check_rewards(
    cfg: DictConfig, sources: "Sequence[tuple[DataSource, list[dict[str, Any]]]]", others: Collection[str] = ()
) -> "dict[str, RewardPlugin]":
    """Check reward functions, settings of plugins and the truth of each record.

    Args:
        others: tasks without records in `sources`; those that no plugin judges are left out.

    Returns:
        The plugin of each task, with the tasks of second verifiers.
    """
    from nemo_prorl.rewards.discovery import discover, make_plugin

    known = discover(functions=plain(cfg.rewards.functions))
    present = {record["task"] for _, records in sources for record in records}
    tasks = sorted(present.union(task for task in others if task in known.tasks()))
    classes = {task: known.plugin_of_task(task) for task in tasks}
    seconds = {second: task for task in tasks if (second := known.second_of(task))}
    if both := sorted(seconds.keys() & classes.keys()):
        raise ConfigError(
            f"data has records of task {both[0]!r}, the second verifier of task {seconds[both[0]]!r}: it has one worker"
            f" per node, for a sample of the responses. Fix: leave one of them out, as data.tasks=[{seconds[both[0]]}]"
        )
    classes |= {second: known.plugin_of_task(second) for second in seconds}
    settings = plain(cfg.rewards.plugins)
    for name, given in settings.items():  # unused plugins have settings, too
        make_plugin(known.plugin(name), given)
    plugins = {task: make_plugin(plugin, settings.get(plugin.name)) for task, plugin in classes.items()}
    _check_truths(sources, plugins)
    return plugins


def _warn_of_repeats(records: int, prompts: int) -> None:
    """Warn if a step takes more prompts than there are records to train on."""
    if records < prompts:
        text = "data.train has %d records, so a step (trainer.grpo.prompts_per_step=%d) takes each about %.1f times"
        _log.warning(text, records, prompts, prompts / records)


def _check_truths(
    sources: "Sequence[tuple[DataSource, list[dict[str, Any]]]]", plugins: "dict[str, RewardPlugin]"
) -> None:
    """Validate the truth of each record with its reward plugin.  Raises DataError with the source and the record."""
    for source, records in sources:
        for record in records:
            try:
                plugins[record["task"]].validate_truth(record["truth"])
            except ValueError as error:
                raise DataError(f"source {source.name!r}, record {record['id']!r}: {error}") from error


def _check_prompts(
    cfg: DictConfig,
    parts: "Mapping[str, Sequence[tuple[DataSource, list[dict[str, Any]]]]]",
    length: Callable[[dict[str, Any]], int],
) -> None:
    """Raise DataError, naming source and key, if a prompt leaves no room for a response in the context.

    Args:
        parts: sources with their records, by key of `data`: train, validation.
        length: returns the number of tokens of a record's prompt.
    """
    context, lines, longest = cfg.trainer.grpo.context_tokens, [], 0
    for part, sources in parts.items():
        for source, records in sources:
            lengths = [length(record) for record in records]
            long = sum(tokens >= context for tokens in lengths)
            if long:
                most = max(lengths)
                longest = max(longest, most)
                named = f"data.{part}, source {source.name!r}: {long} of {len(records)} prompts"
                lines.append(
                    f"  {named}; the longest, record {records[lengths.index(most)]['id']!r}, has {most} tokens"
                )
    if not lines:
        return
    fixes = [f"trainer.grpo.context_tokens above {longest}"]
    if any("data.train," in line for line in lines):
        fixes.append(f"data.max_prompt_tokens below {context} leaves long prompts of data.train out")
    if any("data.validation," in line for line in lines):
        fixes.append("data.validation=[{name: NAME, path: FILE}] with shorter prompts, or data.validation=[]")
    if cfg.pretrained_checkpoint.restore_from_path is None:
        lines.append("  The tokenizer was made for data.train, so words that data.train lacks take more tokens.")
    raise DataError(
        f"trainer.grpo.context_tokens={context} leaves no room for a response to these prompts:\n"
        + "\n".join([*lines, f"Fix: {'; or '.join(fixes)}"])
    )


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
        raise UnfitMachine("\n".join(f"{check.name}: {check.text}. Fix: {check.cure}" for check in failed))
    Cores.of(cfg, os.sched_getaffinity(0))
    cache_folder(os.environ)


def plain(value: Any) -> Any:
    """Return a part of the configuration as plain dicts, lists and values."""
    return OmegaConf.to_container(value, resolve=True) if OmegaConf.is_config(value) else value
