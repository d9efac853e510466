"""`prorl doctor --preflight`: run one step at full context on this node, and assess time, memory and errors.

The trial starts all processes of a run with its configuration (`nemo_prorl.preflight`).  It uses a temporary folder
beside the run directory.
"""

import copy
import re
import shutil
import tempfile
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from omegaconf import DictConfig, OmegaConf

from nemo_prorl.errors import ConfigError, ProrlError, disk_full
from nemo_prorl.files import read_objects
from nemo_prorl.launcher.doctor.check import Check, gb
from nemo_prorl.launcher.doctor.storage import available_memory, nearest
from nemo_prorl.launcher.events import Events
from nemo_prorl.lifecycle.control import is_locked
from nemo_prorl.sizing.memory import Memory, memory_of

if TYPE_CHECKING:
    from nemo_prorl.config import Config
    from nemo_prorl.preflight import PreflightSizes

# `launcher.one_node.preflight`: (configuration, it as YAML, receiver of failures) -> exit code of the trainer.
TryStep = Callable[[DictConfig, str, Events], int]

_PREFIX = ".prorl-preflight-"
_OUT_OF_MEMORY = re.compile(
    r"out of memory|OutOfMemory|can't allocate memory|Cannot allocate memory|MemoryError|bad_alloc"
    r"|No available memory for the cache blocks|larger than the available KV cache",
    re.IGNORECASE,
)
_ENGINE_ENDED = re.compile(r"\bengine-\d+ ended")
_LOG_NAME = re.compile(r"; its log is .*")  # cut from messages, because the log is removed with the folder
_KILLED = re.compile(r"status -9\b")
_ERROR = re.compile(r"\w(Error|Exception)\b")
_ENGINE = ("engines", "publish", "fill", "generate", "sleep", "wake")
_ENGINE_KEYS = (
    "lower rollout.kv_cache_mb, rollout.max_num_seqs or rollout.max_batched_tokens, raise"
    " rollout.tensor_parallel_size, or lower the trainer's memory (model.micro_batch_tokens, model.micro_batch_size)"
)
_STATE_KEYS = "raise model.tensor_model_parallel_size or model.pipeline_model_parallel_size, or use more GPUs"
_FORWARD_KEYS = (
    "lower model.micro_batch_size, model.micro_batch_tokens, trainer.grpo.logprob_chunk_tokens or rollout.kv_cache_mb"
)
_WORK_KEYS = (
    f"{_FORWARD_KEYS}, set model.activations_checkpoint_granularity=full, or raise model.tensor_model_parallel_size"
)
_HOST_KEYS = "request more memory for the job (Slurm: --mem=0), or lower trainer.devices"
_FIXES = {
    "build": _STATE_KEYS,
    **dict.fromkeys(_ENGINE, _ENGINE_KEYS),
    "batch": f"{_HOST_KEYS}, or lower trainer.grpo.prompts_per_step",
    "logprobs": _FORWARD_KEYS,
    "reference": _FORWARD_KEYS,
    "first update": _WORK_KEYS,
    "update": _WORK_KEYS,
    "checkpoint": f"{_HOST_KEYS}; or set trainer.grpo.async_checkpoints=false: memory then holds one checkpoint",
    "resume": f"{_STATE_KEYS}; or lower rollout.kv_cache_mb",
}
_SAME_FAILURE = "correct this first: a start of the run would fail in the same way"
# Log of all processes of a failed trial, kept in the run directory or its nearest existing parent.
LOG = "preflight.log"
SCARCE = 0.05  # a smaller share of free memory, of a device or of the machine, is a warning


@dataclass
class TrialOutcome:
    """The records and failures of a trial."""

    ranks: list[list[dict[str, Any]]]  # records of each rank (`preflight.TrialRecorder`)
    failures: list[str] = field(default_factory=list)  # messages; empty if the trial succeeded
    first_free: int = 0  # bytes of free host memory before the trial
    lowest_free: int = 0  # minimum bytes of free host memory during the trial
    log: Path | None = None  # log of a failed trial


def check_step(cfg: DictConfig, try_step: TryStep, rows: int | None = None) -> Iterator[Check]:
    """Run one step and assess it.  `rows`: use only this many rows of each rank's update; None: use all rows."""
    from nemo_prorl.preflight import PreflightSizes

    sizes = PreflightSizes.of(cast("Config", cfg), rows)
    try:
        beside = nearest(Path(cfg.run_dir).absolute())
        with _trial_folder(beside) as folder:
            trial = trial_config(cfg, folder)
            outcome = _try(trial, sizes, folder, try_step)
            if outcome.failures and (folder / "logs" / "all.log").is_file():
                outcome.log = beside / LOG
                shutil.copy(folder / "logs" / "all.log", outcome.log)
    except (ProrlError, OSError) as error:
        yield Check("preflight", "fail", disk_full(error) or str(error), _SAME_FAILURE)
        return
    yield from assess(outcome, sizes, trial, memory_of(trial))


def trial_config(cfg: DictConfig, folder: Path) -> DictConfig:
    """Return the run's configuration for this node alone.  Raises ConfigError if it cannot run on one node."""
    from nemo_prorl.checks import check, check_shape, pretrained_config, pretrained_name

    trial, nodes = copy.deepcopy(cfg), cfg.trainer.num_nodes
    init = Path(cfg.run_dir).absolute() / "init"
    trial.trainer.num_nodes, trial.rollout.engines = 1, cfg.rollout.engines // nodes
    trial.trainer.warmup.steps = 0
    trial.chain.after = trial.chain.start_from = trial.on_event = None
    trial.rollout.max_restarts = 0
    trial.run_dir = str(folder)
    if trial.pretrained_checkpoint.restore_from_path is None and init.is_dir():
        trial.pretrained_checkpoint.restore_from_path = str(init)
        check_shape(trial.model, pretrained_config(trial, need_weights=True), pretrained_name(trial))
    OmegaConf.update(trial, "exp_manager.explicit_log_dir", str(folder / "logs"))
    for logger in ("create_wandb_logger", "create_tensorboard_logger"):
        OmegaConf.update(trial, f"exp_manager.{logger}", False)
    try:
        check(trial)
    except ConfigError as error:
        if nodes == 1:
            raise
        raise ConfigError(
            f"trainer.num_nodes={nodes}: --preflight tries one node alone, where this is wrong: {error}"
        ) from error
    return trial


@contextmanager
def _trial_folder(beside: Path) -> Iterator[Path]:
    """Make a temporary folder on the run's disk; remove the temporary folders of earlier trials that were killed."""
    for old in beside.glob(f"{_PREFIX}*"):
        if (old / ".lock").is_file() and not is_locked(old):
            _remove_weights(old)
            shutil.rmtree(old, ignore_errors=True)
    with tempfile.TemporaryDirectory(prefix=_PREFIX, dir=beside, ignore_cleanup_errors=True) as folder:
        yield Path(folder)


def _remove_weights(trial: Path) -> None:
    """Remove the weights that a killed trial left in /dev/shm."""
    from nemo_prorl.rollout.weight_store import WeightStore, weights_folder

    if (published := weights_folder(trial)).is_dir():
        WeightStore(published).remove()


class _FailureList(Events):
    """An `Events` object that calls no hook: it collects the supervisor's failures in a list."""

    def __init__(self, run_dir: Path) -> None:
        super().__init__(None, run_dir)
        self.failures: list[str] = []

    def failure(self, message: str, **fields: Any) -> None:
        self.failures.append("\n".join([message, *map(str, fields.get("log", []))]))


@contextmanager
def _watched_memory(outcome: TrialOutcome) -> Iterator[None]:
    """Record the host's free memory before the trial, and its minimum during the trial."""
    end = threading.Event()
    outcome.first_free = outcome.lowest_free = available_memory({})[0]

    def watch() -> None:
        while not end.wait(0.5):
            outcome.lowest_free = min(outcome.lowest_free, available_memory({})[0])

    thread = threading.Thread(target=watch, daemon=True, name="preflight memory")
    thread.start()
    try:
        yield
    finally:
        end.set()
        thread.join()


def _try(trial: DictConfig, sizes: "PreflightSizes", folder: Path, try_step: TryStep) -> TrialOutcome:
    """Run the trial and return its outcome.

    Errors before any process has started (such as a bad configuration) are raised; later failures are in the outcome.
    """
    from nemo_prorl.settings import resolved_yaml

    sizes.write(folder)
    events, outcome = _FailureList(folder), TrialOutcome([])
    with _watched_memory(outcome):
        code = try_step(trial, resolved_yaml(trial), events)
    outcome.failures = events.failures or ([f"the trainer ended with status {code}"] if code else [])
    outcome.ranks = [read_objects(folder / f"preflight-{rank}.jsonl") for rank in range(trial.trainer.devices)]
    return outcome


# --- assessment ------------------------------------------------------------------------------------------------------


def assess(outcome: TrialOutcome, sizes: "PreflightSizes", trial: DictConfig, memory: Memory) -> Iterator[Check]:
    """Return the checks of a trial: failure, memory of the devices and the host, and time of a step.

    Args:
        trial: the configuration of the trial.
        memory: the planned memory of that configuration.
    """
    parts = ended_parts(outcome.ranks)
    for part, facts in parts.items():
        yield Check("preflight", "pass", describe_part(part, facts))
    if outcome.failures:
        yield assess_failure(outcome, trial)
        return
    if trial.trainer.accelerator == "gpu":
        yield assess_device(parts, memory)
    yield assess_host_headroom(outcome, parts, trial.trainer.devices)
    yield Check("preflight", "pass", estimate(parts, sizes))


def ended_parts(ranks: Sequence[Sequence[Mapping[str, Any]]]) -> dict[str, dict[str, Any]]:
    """Return {name: facts} of the parts of the trial that all ranks have finished.

    Each fact is the largest number of any rank; only `gpu_free` is the smallest.
    """
    ended: dict[str, list[Mapping[str, Any]]] = {}
    for records in ranks:
        for record in records:
            if record["event"] == "end":
                ended.setdefault(record["part"], []).append(record)
    return {
        part: {
            key: (min if key == "gpu_free" else max)(record[key] for record in records)
            for key in records[0]
            if key not in ("part", "event")
        }
        for part, records in ended.items()
        if len(records) == len(ranks)
    }


def describe_part(part: str, facts: Mapping[str, Any]) -> str:
    text = f"{part}: {facts['seconds']:.1f} s"
    if "tokens" in facts:
        text += f" for {facts['rows']} rows, {facts['tokens'] / max(facts['seconds'], 1e-9):,.0f} tokens/s"
    peak = facts.get("gpu_peak", facts["host_peak"])
    if part not in _ENGINE:  # in the engines' parts, engine processes use the memory, not the ranks
        text += f"; peak memory of a rank {gb(peak)}"
    return text + (f"; {gb(facts['gpu_free'])} of the GPU free" if "gpu_free" in facts else "")


def assess_failure(outcome: TrialOutcome, trial: DictConfig) -> Check:
    """Return a failed check with the error and the part of the trial in which it occurred.

    If memory ran out or a process was killed, the fix names keys to change.
    """
    part, text = _what_failed(outcome)
    killed, memory = _KILLED.search(text) is not None, _OUT_OF_MEMORY.search(text) is not None
    text = f"in {part!r}: {text}" + (f"; the log of all processes is {outcome.log}" if outcome.log is not None else "")
    if not killed and not memory:
        return Check("preflight", "fail", text, _SAME_FAILURE)
    host = trial.trainer.accelerator == "cpu" and part not in _ENGINE
    fixes = [f"the kernel kills a process if the host runs out of memory: {_HOST_KEYS}"] if killed else []
    fixes += [_FIXES[part]] if host or not killed else []
    fixes += [_HOST_KEYS] if host and _HOST_KEYS not in "; ".join(fixes) else []
    return Check("preflight", "fail", text, "; or ".join(fixes))


def _what_failed(outcome: TrialOutcome) -> tuple[str, str]:
    """Return (part, message) of the failure.

    The message is a rank's own error if that error is about memory, or if no process was killed.  Otherwise it is the
    supervisor's message, with the most informative line of the process's log.
    """
    errors = [record for records in outcome.ranks for record in records if record["event"] == "error"]
    errors.sort(key=lambda record: _OUT_OF_MEMORY.search(record["what"]) is None)
    first, *rest = [line.strip() for line in outcome.failures[0].splitlines() if line.strip()]
    first = _LOG_NAME.sub("", first)
    if errors and (_OUT_OF_MEMORY.search(errors[0]["what"]) or not _KILLED.search(first)):
        return str(errors[0]["part"]), str(errors[0]["what"])
    cut_off = [str(records[-1]["part"]) for records in outcome.ranks if records and records[-1]["event"] == "begin"]
    part = cut_off[0] if cut_off else "build"
    if _ENGINE_ENDED.search(first) and part not in _ENGINE:
        part = "engines"
    for sign in (_OUT_OF_MEMORY, _ERROR):
        if telling := next((line for line in reversed(rest) if sign.search(line)), ""):
            return part, f"{first}: {telling}"
    return part, first


def assess_device(parts: Mapping[str, Mapping[str, Any]], memory: Memory) -> Check:
    """Compare a rank's peak memory on its GPU with the planned bytes, and with the free memory."""
    part, peak = max(((name, facts["gpu_peak"]) for name, facts in parts.items()), key=lambda pair: pair[1])
    free = min(facts["gpu_free"] for facts in parts.values())
    total = max(facts["gpu_total"] for facts in parts.values())
    text = (
        f"GPU: peak memory of a rank {gb(peak)} in {part!r}, planned {gb(memory.trainer_peak)};"
        f" at least {gb(free)} of {gb(total)} stayed free"
    )
    if free < SCARCE * total:
        fix = f"fragmentation can still exhaust the memory: {_WORK_KEYS}"
        return Check("preflight", "warn", text, fix)
    if peak > memory.trainer_peak:
        fix = "this configuration fits; but for more nodes or other sizes, `prorl plan` underestimates the memory"
        return Check("preflight", "warn", text, fix)
    return Check("preflight", "pass", text)


def assess_host_headroom(outcome: TrialOutcome, parts: Mapping[str, Mapping[str, Any]], devices: int) -> Check:
    part, peak = max(((name, facts["host_peak"]) for name, facts in parts.items()), key=lambda pair: pair[1])
    text = f"host: peak memory of a rank {gb(peak)} in {part!r}; with {devices} ranks, engines and reward server,"
    text += f" at least {gb(outcome.lowest_free)} of {gb(outcome.first_free)} stayed free"
    if outcome.lowest_free < SCARCE * outcome.first_free:
        return Check("preflight", "warn", text, f"the kernel kills a process if memory runs out: {_HOST_KEYS}")
    return Check("preflight", "pass", text)


def estimate(parts: Mapping[str, Mapping[str, Any]], sizes: "PreflightSizes") -> str:
    """Return a sentence that estimates the seconds of a step whose responses all fill the context.

    The rollout's time is an upper bound, because the trial measures only the last tokens of the context, which take
    longest.
    """
    generated = parts["generate"]["tokens"] / max(parts["generate"]["seconds"], 1e-9)
    nodes = sizes.all_engines / sizes.engines
    rollout = sizes.prompts * sizes.samples * sizes.response / nodes / generated
    step_rows = sizes.rows * sizes.updates
    scoring = sum(parts[name]["seconds"] / parts[name]["rows"] * step_rows for name in ("logprobs", "reference"))
    updates = parts["update"]["seconds"] / parts["update"]["rows"] * step_rows
    rest = parts["publish"]["seconds"] + parts["batch"]["seconds"] * sizes.prompts / sizes.tried_prompts
    total = rollout + scoring + updates + rest
    return (
        f"estimate: a step whose responses all fill the context takes at most about {total:,.0f} s: rollout"
        f" {rollout:,.0f}, log-probabilities {scoring:,.0f}, updates {updates:,.0f}, publication and batch {rest:,.0f}"
    )
