"""Checks of a run's records and of the user's functions: the truth of each record, and the length of each prompt.

A start of a run uses the same functions, so what `prorl plan`, `train --dry-run`, `launch` and `doctor` accept is not
refused on the nodes.
"""

import copy
import itertools
import logging
from collections.abc import Collection, Iterator, Sequence
from dataclasses import asdict, dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from omegaconf import DictConfig, OmegaConf

from nemo_prorl.config import Config, DataSource, warms_up
from nemo_prorl.errors import ConfigError, DataError
from nemo_prorl.lifecycle.base_model import base_folder, initial_model, warmup_records
from nemo_prorl.own_functions import is_place

if TYPE_CHECKING:
    from nemo_prorl.data.blend import LoadedData, LoadedSource
    from nemo_prorl.data.lengths import FittedData
    from nemo_prorl.rewards.interface import RewardPlugin

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class CheckedFiles:
    """The result of `check_files`: the lengths of the prompts, or the reason why they were not checked."""

    fitted: "FittedData | None"
    reason: str = ""
    generated: int | None = None  # tokens of the longest prompt in a sample of the generated ones

    def words(self) -> str:
        """Return one line for `prorl plan`."""
        sample = f"in a sample of the generated problems at most {self.generated:,} tokens" if self.generated else ""
        if self.fitted is None:
            return sample or f"not checked: {self.reason}"
        return "; ".join(filter(None, (self.fitted.words(), sample)))

    def as_json(self) -> dict[str, Any]:
        """Return {"prompt_lengths": a list of one object per source}; null if lengths were not checked."""
        return {"prompt_lengths": self.fitted and [asdict(source) for source in self.fitted.sources]}

    def tell(self) -> None:
        """Log what the limit leaves out, or why lengths were not checked."""
        if self.fitted is None:
            _log.info("lengths of prompts: %s", self.words())
        else:
            self.fitted.tell()


def check_files(cfg: DictConfig, will_start: bool = True) -> CheckedFiles:
    """Check data files and the user's functions for a command that starts nothing, with the errors of a start.

    Missing files are left out.  Of generated sources only the lengths of a few prompts are checked: their records are
    right, and take seconds to make.

    Args:
        will_start: the run is about to start; False: a model folder without a tokenizer is not an error.

    Raises:
        ConfigError: a reward function cannot be loaded, `check_own_functions` refuses, no plugin judges a task or
            is its second verifier, or the model has no tokenizer.
        DataError: a record is wrong, or its prompt is too long.
    """
    return next(check_stages([cfg], will_start))


def check_stages(cfgs: Sequence[DictConfig], will_start: bool = True) -> Iterator[CheckedFiles]:
    """Yield the result of `check_files` for each run; runs of the same files read them once.

    A run that differs from an earlier one in nothing that is checked gets the earlier result.
    """
    from nemo_prorl.data.blend import load_sources

    loaded: dict[str, LoadedData] = {}
    checked: dict[str, CheckedFiles] = {}
    for cfg in cfgs:
        check_own_functions(cfg)
        check_generators(cfg)
        data = _present(cfg)
        files = OmegaConf.to_yaml({**data, "tasks": None})
        key = OmegaConf.to_yaml(
            {
                "data": data,
                "rewards": cfg.rewards,
                "context": cfg.trainer.grpo.context_tokens,
                "model": str(_tokenizer_folder(cfg)[0]),
                "warmup": cfg.trainer.warmup if warms_up(cfg) else None,
            }
        )
        if key not in checked:
            if files not in loaded:
                loaded[files] = load_sources(data)
            checked[key] = _check(cfg, data, loaded[files], will_start)
        yield checked[key]


def _present(cfg: DictConfig) -> Any:
    """Return the section `data` without generated sources and missing files."""
    data = copy.deepcopy(cfg.data)
    for part in ("train", "validation"):
        data[part] = [source for source in data[part] if source.path is not None and Path(source.path).is_file()]
    return data


def _check(cfg: DictConfig, data: Any, loaded: "LoadedData", will_start: bool) -> CheckedFiles:
    from nemo_prorl.data.blend import of_tasks
    from nemo_prorl.data.model_folder import tokenizer_fault
    from nemo_prorl.data.prepared import generated_tasks

    complete = len(data.train) == len(cfg.data.train)
    train = of_tasks(loaded.train, data) if complete else _of_some_tasks(loaded.train, data)
    check_rewards(cfg, [*train, *loaded.validation], generated_tasks(cfg))
    folder, reason = _tokenizer_folder(cfg)
    nothing = ""
    if not (train or loaded.validation):
        named = any(source.path is not None for source in (*cfg.data.train, *cfg.data.validation))
        nothing = "the data files are missing" if named else "all problems are generated by the run"
    if folder is None or (not will_start and tokenizer_fault(folder)):
        return CheckedFiles(None, nothing or reason or f"{folder} has no tokenizer")
    generated = _longest_generated(cfg, folder)
    if nothing:
        return CheckedFiles(None, nothing, generated)
    every = loaded.train if complete else []
    return CheckedFiles(check_prompts(cfg, every, train, loaded.validation, folder), generated=generated)


def _of_some_tasks(train: "list[LoadedSource]", data: Any) -> "list[LoadedSource]":
    """Return the records of `data.tasks`, as `of_tasks`; sources that are left out may have the other tasks."""
    tasks = data.tasks
    kept = [(source, [r for r in records if tasks is None or r["task"] in tasks]) for source, records in train]
    return [(source, records) for source, records in kept if records]


_SAMPLE = 64  # problems of each generated source, for their length
_LONGEST = 4  # of these, the prompts with the most characters are counted
_NEARLY = 0.9  # share of the context from which transformers counts exactly


def _longest_generated(cfg: DictConfig, folder: Path) -> int | None:
    """Return about how many tokens the longest prompt of a sample of each generated source has; None without any.

    Raises DataError: as `check_prompts`.
    """
    from nemo_prorl.data.blend import load_sources
    from nemo_prorl.data.model_folder import model_fault
    from nemo_prorl.planning.prompts import longest_prompt, template_fault

    data = copy.deepcopy(cfg.data)
    for part in ("train", "validation"):
        data[part] = [source for source in data[part] if source.path is None]
        for source in data[part]:
            source.size = min(source.size, _SAMPLE)
    can_count = find_spec("transformers") and find_spec("reasoning_gym")  # not without what trains
    if not (can_count and (data.train or data.validation)):
        return None
    if model_fault(folder) or template_fault(data, folder):  # `start_faults` names it
        return None
    loaded = load_sources(data)
    # Training leaves out what is longer than data.max_prompt_tokens.
    train = [] if data.max_prompt_tokens else _of_some_tasks(loaded.train, data)
    long = [
        sorted(records, key=lambda record: len(str(record["prompt"])))[-_LONGEST:]
        for _, records in (*train, *loaded.validation)
    ]
    longest = longest_prompt(data, folder, itertools.chain(*long))
    if long and (longest is None or longest >= _NEARLY * cfg.trainer.grpo.context_tokens):
        longest = max(source.longest for source in check_prompts(cfg, [], train, loaded.validation, folder).sources)
    return longest


def _tokenizer_folder(cfg: DictConfig) -> tuple[Path | None, str]:
    """Return the folder of the run's tokenizer; None, and the reason, if the run makes it when it starts."""
    folder = initial_model(cast(Config, cfg), Path(cfg.run_dir))
    if cfg.pretrained_checkpoint.restore_from_path is not None or (Path(cfg.run_dir) / "config.yaml").is_file():
        return folder, ""
    return None, "the run makes its tokenizer when it starts (pretrained_checkpoint.restore_from_path=null)"


def check_prompts(
    cfg: DictConfig,
    every: "Sequence[LoadedSource]",
    train: "list[LoadedSource]",
    validation: "list[LoadedSource]",
    folder: Path,
) -> "FittedData":
    """Compare the length of each prompt with the limits, and check that a warm-up has its correct responses.

    Args:
        every: training sources with the records of all tasks, from which a warm-up draws; empty: not known.
        train: the same without the records that `data.tasks` leaves out.
        folder: Hugging Face folder with the tokenizer.

    Raises:
        DataError: a prompt is too long or cannot be rendered, or the warm-up draws a record without a correct response.
    """
    from nemo_prorl.data.blend import LoadedData
    from nemo_prorl.data.laptop.generators import warmup_target
    from nemo_prorl.data.lengths import PromptLengths, fit

    lengths = PromptLengths(folder, cfg.data)
    fitted = fit(cfg, LoadedData(train, validation), lengths)
    will_warm_up = warms_up(cfg) and not base_folder(cast(Config, cfg), Path(cfg.run_dir)).exists()
    if will_warm_up and every:
        for record in warmup_records(cast(Config, cfg), fit(cfg, LoadedData(list(every), []), lengths).train):
            warmup_target(record)
    return fitted


def check_generators(cfg: DictConfig) -> None:
    """Raise ConfigError if a generator of problems does not have its options, or one of ours refuses a value."""
    from nemo_prorl.data.laptop.generators import drawer
    from nemo_prorl.data.prepared import reasoning_gym_options

    for source in (*cfg.data.train, *cfg.data.validation):
        package, _, dataset = str(source.generator).partition(":")
        if source.generator is None or not source.options:
            continue
        if package != "reasoning_gym":
            drawer(source)
        elif (known := reasoning_gym_options(dataset)) and (wrong := sorted(set(source.options) - known)):
            raise ConfigError(
                f"data source '{source.name}': {source.generator}: unknown option {', '.join(wrong)}; expected one of"
                f" {', '.join(sorted(known))}"
            )


def check_own_functions(cfg: DictConfig) -> None:
    """Try a loss, an advantage and reset rules of the user as `prorl check-function` does; log what is unusual.

    Imports torch, but only if the run has one of them.

    Raises:
        ConfigError: the function cannot be imported, or lacks a property.
    """
    grpo, rules = cfg.trainer.grpo, cfg.trainer.resets.rules
    named = [
        ("loss", "trainer.grpo.loss", grpo.loss, grpo),
        ("advantage", "trainer.grpo.advantage", grpo.advantage, grpo),
    ]
    named += [("reset-rule", "trainer.resets.rules.asks", place, rules) for place in rules.asks]
    for kind, key, place, config in named:
        if not is_place(place):
            continue
        from nemo_prorl.algorithms.properties import trial

        result = trial(kind, place, OmegaConf.to_object(config))
        if result.faults:
            raise ConfigError(
                f"{key}={place}: expected a function with the properties that training relies on; got\n"
                f"{result.words()}\nFix: the function; `prorl check-function {kind} {place}` tries it again"
            )
        for name, sentence in result.remarks.items():
            _log.info("%s=%s: %s: %s", key, place, name, sentence)


def check_rewards(
    cfg: DictConfig, sources: "Sequence[tuple[DataSource, list[dict[str, Any]]]]", others: Collection[str] = ()
) -> "dict[str, RewardPlugin]":
    """Check reward functions, settings of plugins and the truth of each record.

    Args:
        others: tasks without records in `sources`; those that no plugin judges are left out.

    Returns:
        The plugin of each task, with the tasks of second verifiers.
    """
    from nemo_prorl.rewards.discovery import discover, make_plugin
    from nemo_prorl.rewards.functions import settings_of

    known = discover(functions=plain(cfg.rewards.functions))
    present = {record["task"] for _, records in sources for record in records}
    tasks = sorted(present.union(task for task in others if task in known.tasks()))
    classes = {}
    for task in tasks:
        try:
            classes[task] = known.plugin_of_task(task)
        except ConfigError as error:
            own = ((source, record) for source, records in sources for record in records if record["task"] == task)
            raise ConfigError(f"{_place(*next(own))}: {error}") from error
    seconds = {second: task for task in tasks if (second := known.second_of(task))}
    if both := sorted(seconds.keys() & classes.keys()):
        raise ConfigError(
            f"data has records of task {both[0]!r}, the second verifier of task {seconds[both[0]]!r}: it has one worker"
            f" per node, for a sample of the responses. Fix: leave one of them out, as data.tasks=[{seconds[both[0]]}]"
        )
    classes |= {second: known.plugin_of_task(second) for second in seconds}
    settings = settings_of(plain(cfg.rewards))
    for name, values in settings.items():  # unused plugins have settings, too
        make_plugin(known.plugin(name), values)
    plugins = {task: make_plugin(plugin, settings.get(plugin.name)) for task, plugin in classes.items()}
    _check_truths(sources, plugins)
    return plugins


def _check_truths(
    sources: "Sequence[tuple[DataSource, list[dict[str, Any]]]]", plugins: "dict[str, RewardPlugin]"
) -> None:
    """Validate the truth of each record with its reward plugin.  Raises DataError with the source and the record."""
    for source, records in sources:
        for record in records:
            try:
                plugins[record["task"]].validate_truth(record["truth"])
            except ValueError as error:
                raise DataError(f"{_place(source, record)}: {error}") from error


def _place(source: DataSource, record: dict[str, Any]) -> str:
    """Return where a record is: file and line or row, source and id."""
    from nemo_prorl.data.records import line_of

    place = "" if source.path is None else f"{source.path}:{line_of(source.path, record['id'])}: "
    return f"{place}source {source.name!r}, record {record['id']!r}"


def plain(value: Any) -> Any:
    """Return a part of the configuration as plain dicts, lists and values."""
    return OmegaConf.to_container(value, resolve=True) if OmegaConf.is_config(value) else value
