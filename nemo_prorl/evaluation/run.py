"""Runs one evaluation from its options to results.json: checks, engines and reward server, sampling and judging.

Engines, reward server and their supervisor are those of a run, without a trainer (`evaluation.services`).
"""

import asyncio
import logging
import os
import signal
from collections.abc import Coroutine, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from omegaconf import DictConfig, OmegaConf

from nemo_prorl import settings
from nemo_prorl.checks import check_heads
from nemo_prorl.data.hub import model_folder
from nemo_prorl.data.model_folder import eos_caution
from nemo_prorl.errors import ConfigError, DataError, ProrlError, StoppedCleanly
from nemo_prorl.evaluation import models
from nemo_prorl.evaluation.catalogue import Benchmark, catalogue, check_files, load_records
from nemo_prorl.evaluation.formats import EvaluationManifest, EvaluationResults, EvaluationTime
from nemo_prorl.evaluation.manifest import check_expected, is_given, manifest_of, merged, recorded_functions
from nemo_prorl.evaluation.models import Model
from nemo_prorl.evaluation.store import Store, verdicts_folder
from nemo_prorl.files import read_object, write_json
from nemo_prorl.launcher.run_data import plain
from nemo_prorl.rewards.discovery import Registry, discover, make_plugin
from nemo_prorl.rewards.functions import settings_of
from nemo_prorl.sizing.memory_check import check_memory

if TYPE_CHECKING:  # these import torch, which wrong use need not wait for
    from nemo_prorl.evaluation.sampling import BenchmarkWork, Work
    from nemo_prorl.evaluation.sources import LocalEngines, ResponseSource

_log = logging.getLogger(__name__)

T = TypeVar("T")


@dataclass(frozen=True)
class EvaluationOptions:
    """The options of `prorl evaluate`.  Fields not described here have the name and meaning of their option."""

    model: str  # the argument MODEL
    benchmarks: Sequence[Benchmark]
    out: Path
    seed: int = 1
    data: Path | None = None
    limit: int | None = None
    engines: int | None = None
    checkpoint: str = "newest"
    model_name: str | None = None  # name on the server; endpoints only
    opens_thought: bool = False  # the chat template of the endpoint ends the prompt in `<think>`
    token_env: str = "OPENAI_API_KEY"  # environment variable with the token of the endpoint
    requests: int = 32  # maximum concurrent requests to an endpoint
    overrides: tuple[str, ...] = ()  # KEY=VALUE
    expected: EvaluationManifest | None = None  # manifest that this evaluation must match


def evaluate(options: EvaluationOptions) -> EvaluationResults:
    """Run or complete the evaluation in `options.out` and return the content of its results.json.

    Raises:
        ConfigError, DataError, UnfitMachine: A check failed; no engine was started.
        StoppedCleanly: A signal stopped the evaluation; it can be completed later.
    """
    options = replace(options, model=os.path.expanduser(options.model))
    is_url = models.is_url(options.model)
    served = models.on_server(options.model, options.model_name, options.opens_thought) if is_url else None
    path = Path(options.model) if is_url else model_folder(options.model, "MODEL", weights=True)
    kind, folder = ("endpoint", None) if is_url else models.find(path, options.checkpoint)
    check_files(options.benchmarks, options.data)
    cfg = configuration(options, folder if kind == "hf" else None)
    known = discover(functions=plain(cfg.rewards.functions))
    _check_tasks(known, options.benchmarks)
    records = {benchmark.name: load_records(benchmark, options.data, options.limit) for benchmark in options.benchmarks}
    check_rewards(cfg, known, [record for some in records.values() for record in some])
    from nemo_prorl.evaluation.duration import estimate
    from nemo_prorl.evaluation.sampling import sample_and_judge
    from nemo_prorl.launcher.one_node import locked

    existed = options.out.exists()
    with locked(options.out):
        with _as_it_was(options.out, existed):
            model = served or models.draft(path, options.out, options.checkpoint)
            benchmarks = [_fitting(benchmark, model) for benchmark in options.benchmarks]
            cfg = _fitted(configuration(options, model.folder), model, benchmarks)
            entries = partial(manifest_of, seed=options.seed, data=options.data, limit=options.limit, known=known)
            merged(options.out, entries(cfg, model, benchmarks, records), benchmarks, known)  # before the export
            source, engines = _source(options, cfg, model), 0 if model.folder is None else cfg.rollout.engines
            _tell_other_eos(cfg, model, [record for benchmark in benchmarks for record in records[benchmark.name]])
            for benchmark in benchmarks:
                for record in records[benchmark.name]:
                    source.check(record, benchmark.sampling)
            if served is None:
                model = models.open_model(path, options.out, options.checkpoint)
                cfg.pretrained_checkpoint.restore_from_path = str(model.folder)
            manifest = entries(cfg, model, benchmarks, records)
            if options.expected is not None:
                check_expected(manifest, options.expected)
            benchmarks, manifest = merged(options.out, manifest, benchmarks, known)
        verdicts = verdicts_folder(manifest)
        parts = [_part(options.out, benchmark, records.get(benchmark.name), verdicts) for benchmark in benchmarks]
        write_json(options.out / "manifest.json", manifest)
        if engines and (text := estimate(options.out, parts, engines, cfg.trainer.accelerator == "gpu")):
            _log.info("%s", text)
        try:
            sampling = sample_and_judge(cfg, options.out, parts, source, seed=options.seed, num_engines=engines)
            work = asyncio.run(stoppable(sampling))
        finally:
            for part in parts:
                part.store.close()
        result = write_results(options.out, manifest, parts, work)
        if result["complete"]:
            models.remove_export(options.out)
        return result


@contextmanager
def _as_it_was(out: Path, existed: bool) -> Iterator[None]:
    """Remove, after an error of the project inside of the block, the export and the empty new folder `out`."""
    exported = (out / "model").exists()
    try:
        yield
    except ProrlError:
        if not exported:
            models.remove_export(out)
        if not existed and [path.name for path in out.iterdir()] == [".lock"]:
            (out / ".lock").unlink()
            out.rmdir()
        raise


def configuration(options: EvaluationOptions, folder: Path | None) -> DictConfig:
    """Return the configuration of a run on this machine alone.

    The evaluation uses the settings of the run's engines, reward server and deadlines.  Reward functions of the run
    whose model it is are known, too, and those of the evaluation that it continues (`out`) or repeats (`expected`).
    `folder`: the model's Hugging Face folder, or None for an endpoint or a checkpoint that is not exported yet.
    """
    model = "null" if folder is None else "'" + str(folder.resolve()).replace("'", "\\'") + "'"
    has_cluster = any(word.startswith("cluster=") for word in options.overrides)
    base = [*([] if has_cluster else ["cluster=laptop"]), f"pretrained_checkpoint.restore_from_path={model}"]
    cfg = settings.load([*base, *options.overrides])
    if folder is not None:
        check_heads(cfg)
    of_run, manifests = _rewards_of(options.model), _manifests(options)
    given = plain(cfg.rewards.functions)
    functions = {**of_run.get("functions", {}), **given}
    cfg.rewards.functions = {**functions, **_recorded(manifests, given, functions)}
    if not is_given("rewards.functions_time_s", options.overrides):
        for known in (of_run, *manifests):  # the last one that has it
            cfg.rewards.functions_time_s = known.get("functions_time_s", cfg.rewards.functions_time_s)
    if options.expected is not None:
        _take_settings(cfg, options.expected, options.overrides)
    engines = options.engines or max(1, cfg.rollout.engines // cfg.trainer.num_nodes)
    cfg.trainer.num_nodes, cfg.rollout.engines = 1, engines
    return cfg


def _take_settings(cfg: DictConfig, manifest: EvaluationManifest, overrides: Sequence[str]) -> None:
    """Use the settings of the manifest that is repeated, except those that the command gives."""
    cfg.rewards.plugins = OmegaConf.merge(manifest["rewards"], cfg.rewards.plugins)
    for key, value in (manifest["engine"] or {}).items():
        name = f"{'data' if key in ('prompt', 'system') else 'rollout'}.{key}"
        if not is_given(name, overrides):
            OmegaConf.update(cfg, name, value)


def _check_tasks(known: Registry, benchmarks: Sequence[Benchmark]) -> None:
    """Raise ConfigError if no plugin and no function judges the task of a benchmark."""
    for benchmark in benchmarks:
        try:
            known.plugin_of_task(benchmark.task)
        except ConfigError as error:
            raise ConfigError(f"{benchmark.file or benchmark.name}: task is {benchmark.task!r}: {error}") from None


def _manifests(options: EvaluationOptions) -> list[Mapping[str, Any]]:
    """Return the manifests of `out` and of `expected`, where they exist."""
    manifests = (read_object(options.out / "manifest.json"), options.expected)
    return [manifest for manifest in manifests if manifest is not None]


def _recorded(
    manifests: Sequence[Mapping[str, Any]], given: Mapping[str, str], known: Mapping[str, str]
) -> dict[str, str]:
    """Return the reward functions that the manifests name.

    Args:
        given: functions of the command, whose tasks are left out.
        known: all functions that are known without the manifests; older ones name none.
    """
    functions: dict[str, str] = {}
    for manifest in manifests:
        entries = manifest["benchmarks"]
        own = [entry["file"] for entry in entries.values() if "file" in entry]
        tasks = {name: benchmark.task for name, benchmark in catalogue(own).items()}
        named = {tasks.get(name) for name, entry in entries.items() if "function" in entry}
        functions |= recorded_functions(manifest, tasks, {*given, *(known.keys() - named)})
    return functions


def _rewards_of(model: str) -> dict[str, Any]:
    """Return the part `rewards` of the run to which the model belongs; {} if it is no run and no checkpoint."""
    path = Path(model).absolute()
    file = (path.parent.parent if (path / "state.json").is_file() else path) / "config.yaml"
    if models.is_url(model) or not file.is_file():
        return {}
    rewards: dict[str, Any] = plain(settings.read_config(file).rewards)
    return rewards


def check_rewards(cfg: DictConfig, known: Registry, records: Sequence[Mapping[str, Any]]) -> None:
    """Let the reward plugins validate the truth of every record, and try the sandbox if a plugin needs it."""
    from nemo_prorl.rewards.judging import check_sandbox

    configured = settings_of(plain(cfg.rewards))
    classes = {task: known.plugin_of_task(task) for task in sorted({record["task"] for record in records})}
    plugins = {task: make_plugin(plugin, configured.get(plugin.name)) for task, plugin in classes.items()}
    for record in records:
        try:
            plugins[record["task"]].validate_truth(record["truth"])
        except ValueError as error:
            raise DataError(f"record {record['id']!r} of task {record['task']!r}: {error}") from error
    if any(plugin.needs_sandbox for plugin in classes.values()):
        check_sandbox(cfg.rewards.unsafe_no_sandbox)


def _fitting(benchmark: Benchmark, model: Model) -> Benchmark:
    """Return the benchmark, with context and response length reduced to the model's maximum if they exceed it."""
    longest = None if model.folder is None else models.longest_context(model.folder)
    sampling = benchmark.sampling
    if longest is None or sampling.context <= longest:
        return benchmark
    _log.warning(
        "%s: context reduced from %d to %d tokens, the maximum of the model", benchmark.name, sampling.context, longest
    )
    most = None if sampling.max_response is None else min(sampling.max_response, longest - 1)
    return replace(benchmark, sampling=replace(sampling, context=longest, max_response=most))


def _fitted(cfg: DictConfig, model: Model, benchmarks: Sequence[Benchmark]) -> DictConfig:
    """Set the context to the longest context of the benchmarks, check that its KV cache fits, and return `cfg`.

    For a model on a server, return `cfg` unchanged.  Raises ConfigError if the KV cache does not fit.
    """
    from nemo_prorl.launcher.prepare import check_node

    if model.folder is None:
        return cfg
    check_node(cfg, trains=False)
    cfg.trainer.grpo.context_tokens = max(benchmark.sampling.context for benchmark in benchmarks)
    check_memory(cfg, None)
    return cfg


def _tell_other_eos(cfg: DictConfig, model: Model, records: Sequence[Mapping[str, Any]]) -> None:
    """Warn that the model may end its responses with another token than the tokenizer's eos."""
    if model.folder is None:
        return
    form = cfg.data.prompt
    chat = form == "chat" or (form == "as_written" and any(isinstance(record["prompt"], list) for record in records))
    if fault := eos_caution(model.folder, chat):
        _log.warning("%s", fault)


def _part(out: Path, benchmark: Benchmark, records: list[dict[str, Any]] | None, verdicts: str) -> "BenchmarkWork":
    """Return a benchmark with its stored samples and verdicts, ready to be continued.

    Args:
        records: prompt records to store; None: use the records that an earlier command stored.
        verdicts: folder of the verdicts.
    """
    from nemo_prorl.evaluation.sampling import BenchmarkWork

    store = Store(out, benchmark.name, verdicts=verdicts)
    if records is not None:
        store.write_records(records)
    return BenchmarkWork(benchmark, store, records or store.records())


# --- the work --------------------------------------------------------------------------------------------------------


def _source(options: EvaluationOptions, cfg: DictConfig, model: Model) -> "ResponseSource":
    from nemo_prorl.evaluation.sources import ServedModel

    if model.folder is not None:
        return local_engines(cfg, model.folder)
    about = model.about
    token, seconds = os.environ.get(options.token_env), cfg.trainer.deadlines.rollout_s
    return ServedModel(
        about["url"],
        about["name"],
        token,
        max_concurrent=options.requests,
        seconds=seconds,
        opens_thought=about.get("opens_thought", False),
    )


def local_engines(cfg: DictConfig, model: Path, context_tokens: int = 1 << 30) -> "LocalEngines":
    """Return a source of responses from this machine's engines; call `connect` once the engines run.

    `model`: Hugging Face folder.
    A prompt that leaves no room in `context_tokens` is refused; LocalEngines checks the context of each benchmark.
    """
    from nemo_prorl.data.render import PromptRenderer
    from nemo_prorl.evaluation.sources import LocalEngines

    renderer = PromptRenderer(model, context_tokens, cfg.data)
    stop = models.stop_tokens(model) | {renderer.eos_id}
    per_engine = 2 * cfg.rollout.max_num_seqs  # a full batch is running and another is waiting
    return LocalEngines(renderer, sorted(stop), per_engine, cfg.rollout.engines, cfg.trainer.deadlines.rollout_s)


async def stoppable(work: Coroutine[Any, Any, T], kept: str = "finished responses are stored") -> T:
    """Await the work and return its result.  SIGTERM, SIGINT and SIGUSR1 cancel it and raise StoppedCleanly.

    `kept`: what a stop leaves, for the error.
    """
    task, loop, received = asyncio.ensure_future(work), asyncio.get_running_loop(), list[str]()

    def stop(number: signal.Signals) -> None:
        received.append(number.name)
        task.cancel()

    signals = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)
    for number in signals:
        loop.add_signal_handler(number, stop, number)
    try:
        return await task
    except asyncio.CancelledError:
        if not received:
            raise
        raise StoppedCleanly(f"stopped by {received[0]}; {kept}. Run the same command to continue") from None
    finally:
        for number in signals:
            loop.remove_signal_handler(number)


# --- the numbers -----------------------------------------------------------------------------------------------------


def write_results(
    out: Path, manifest: EvaluationManifest, parts: "Sequence[BenchmarkWork]", work: "Work | None"
) -> EvaluationResults:
    """Write results.json and return its content.  `work`: None if nothing had to be sampled or judged."""
    from nemo_prorl.evaluation.results import results, scored

    samples = {
        one.benchmark.name: scored(one.records, one.store.lines, one.store.verdicts, one.benchmark.sampling.samples)
        for one in parts
    }
    clock: EvaluationTime = {"seconds": 0.0, "generated_tokens": 0, "tokens_per_s": None}
    if work is not None and work.source is not None:
        rate = work.tokens / work.seconds
        clock = {"seconds": work.seconds, "generated_tokens": work.tokens, "tokens_per_s": rate}
    elif earlier := read_object(out / "results.json"):
        clock = earlier["time"]
    if work is not None:
        clock = {**clock, "judged": datetime.now(UTC).isoformat(timespec="seconds")}
    result = results(manifest, [part.benchmark for part in parts], samples, clock)
    write_json(out / "results.json", result)
    return result


def differences(there: Any, here: Any, at: str = "") -> list[str]:
    """Return one line per number in which two results.json differ, without durations and the model's entry.

    `at`: path of keys to `there` and `here`; empty at the top.
    """
    if isinstance(there, dict) and isinstance(here, dict):
        # Categories follow from parts; older versions lack them.  The manifests were compared for the scorer.
        skipped = ("time", "model", "verdicts") if not at else ("categories", "scorer")
        keys = [key for key in (*there, *(key for key in here if key not in there)) if key not in skipped]
        return [text for key in keys for text in differences(there.get(key), here.get(key), f"{at}/{key}")]
    return [] if there == here else [f"{at.removeprefix('/')}: {there} there, {here} here"]
