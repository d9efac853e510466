"""Plan of the recipe's chain before it starts: changes at each stage, tokens, hours and memory.  No torch, no GPU.

    rates = read_rates(cfg, mean_tokens=4000, tokens_per_s=None, measured=Path("runs/other"))
    chain = plan_chain(cfg, ["cluster=h100_4x8", "stage=run3"], rates)

The upper bound for tokens assumes that each response fills the context.  Lengths and throughput are those that the user
gives or that a run of the same model on the same kind of machine measured.  Without them, a plan for GPUs assumes
lengths, and estimates hours from the peaks of an H100 (`sizing.roofline`); its `Rates` say so.
"""

import logging
import math
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, OmegaConf

from nemo_prorl import settings
from nemo_prorl.config import responses_per_step
from nemo_prorl.config_changes import leaves
from nemo_prorl.errors import ConfigError, DataError
from nemo_prorl.planning import time_limit
from nemo_prorl.planning.replay import read_lines
from nemo_prorl.sizing.devices import node_devices
from nemo_prorl.sizing.memory import Memory, device_bytes, memory_of, vocabulary
from nemo_prorl.sizing.memory_check import check_memory
from nemo_prorl.sizing.phases import phase_bytes
from nemo_prorl.sizing.roofline import DRAWN, MEAN_SHARE, StepTime, longest_response, step_time

_log = logging.getLogger(__name__)

PAPER_GPU_HOURS = 16_000  # GPU hours of the whole chain, on 4 x 8 H100 with 80 GB (arXiv 2507.12507)
GROUP = "stage"
# Who decided on the hard reset at the start of a stage: section 4.2 of the paper names those of runs 2, 6 and 7.
RESET_BY = {f"run{k}": "paper" if k in (2, 6, 7) else "ours" for k in range(2, 9)}
# Short names in the table for keys that usually change between stages; other changed keys appear in full.
NAMES = {
    "data.tasks": "tasks",
    "trainer.grpo.samples_per_prompt": "n",
    "trainer.grpo.context_tokens": "context",
    "trainer.grpo.unfinished_factor": "factor without eos",
}
# Changed keys that the table leaves out: they have their own columns, or follow from other keys.
NO_CHANGE = (
    "stage",
    "run_dir",
    "chain.",
    "trainer.grpo.max_steps",
    "model.encoder_seq_length",
    "model.micro_batch_tokens",
    "exp_manager.",
)
# A measured throughput is used only if these keys (kind of model and machine) are the same in both runs.
SAME_KIND = (
    "trainer.accelerator",
    "trainer.precision",
    "rollout.dtype",
    *(f"model.{key}" for key in ("num_layers", "hidden_size", "ffn_hidden_size", "num_query_groups")),
)


@dataclass(frozen=True)
class Rates:
    """Response length and throughput, and the source of each number as text; an unknown number is None."""

    mean_tokens: float | None = None  # mean length of a response, prompt excluded
    mean_share: float | None = None  # without `mean_tokens`: assumed mean, as a share of the longest possible response
    length_source: str = "not given: --mean-tokens N or --measured RUN would estimate it"
    generated_per_trained: float = 1.0  # responses generated per response used; dynamic sampling drops the others
    device_seconds_per_token: float | None = None  # wall time of whole steps x devices / all generated tokens
    speed_source: str = "not given: --tokens-per-s X or --measured RUN would estimate the hours"

    @property
    def estimated(self) -> bool:
        """Return whether the hours are an estimate from an H100's peaks, if there are any."""
        return self.device_seconds_per_token is None

    def mean_of(self, cfg: DictConfig) -> float | None:
        """Return the mean length of a response of a stage, at most the longest that is possible; None if unknown."""
        longest = longest_response(cfg)
        if self.mean_tokens is not None:
            return min(self.mean_tokens, longest)
        return None if self.mean_share is None else self.mean_share * longest

    @classmethod
    def assumed(cls, cfg: DictConfig) -> "Rates":
        """Return what a plan for GPUs assumes where nothing is given or measured; for a CPU nothing."""
        if cfg.trainer.accelerator != "gpu":
            return cls()
        return cls(
            mean_share=MEAN_SHARE,
            length_source=f"assumed, not measured: {MEAN_SHARE:g} of the longest response, as benchmarks/simulate.py"
            " assumes for a context of 8,192; --mean-tokens N or --measured RUN replace it",
            generated_per_trained=DRAWN if cfg.trainer.grpo.dynamic_sampling.enabled else 1.0,
            speed_source="estimated, not measured; --tokens-per-s X or --measured RUN replace it",
        )


@dataclass(frozen=True)
class PlannedStage:
    """A stage of the chain, or a run outside of stages: one line of the table."""

    name: str
    chosen: bool
    changes: dict[str, Any] = field(default_factory=dict)  # key: new value, compared with the previous stage
    hard_reset: bool = False  # at the start of the stage
    steps: int = 0
    responses: int = 0  # used for training
    tokens_at_most: int = 0  # prompts and responses used for training, if each filled the context
    tokens_estimated: float | None = None  # generated tokens; includes dropped responses if a run measured their share
    device_hours: float | None = None  # hours of the stage x devices; None if the throughput is unknown
    step: StepTime | None = None  # if the hours are estimated
    sbatch_time: str | None = None  # --time of the stage's job; None on a CPU
    starts: int | None = None  # starts that a job with this limit needs
    memory_needed: int = 0  # bytes per GPU
    refused: str | None = None  # why `prorl train` would refuse this stage, which is not the chosen one


@dataclass(frozen=True)
class Chain:
    """The planned stages with their totals, and devices, vocabulary and memory of the chosen run.

    Attributes:
        totals: {field of `PlannedStage`: sum over the stages}.
        devices: number of devices on all nodes.
        accelerator: cpu or gpu.
        vocabulary: rows of the embedding, and the source of this number.
        device_bytes: memory of one GPU; None on a CPU or if unknown.
        note: why the table has only one line; None if it has all stages.
    """

    stages: list[PlannedStage]
    totals: dict[str, float | None]
    rates: Rates
    devices: int
    accelerator: str
    vocabulary: tuple[int, str]
    memory: Memory
    device_bytes: float | None
    note: str | None

    def as_json(self) -> dict[str, Any]:
        """Return the plan as one JSON object; sizes are in bytes, times in hours."""
        memory, size = self.memory, self.device_bytes
        source = "arXiv 2507.12507, 4 x 8 H100 80 GB; no forecast of this run"
        return {key: value for key, value in asdict(self).items() if key != "device_bytes"} | {
            "paper": {"gpu_hours": PAPER_GPU_HOURS, "source": source},
            "vocabulary": {"rows": self.vocabulary[0], "source": self.vocabulary[1]},
            "memory": {
                **memory.numbers(),
                "kv_room": memory.kv_room(size),
                "sequences": memory.sequences(size),
                "device_bytes": size,
                "phases": phase_bytes(memory),
            },
        }


def read_rates(cfg: DictConfig, mean_tokens: float | None, tokens_per_s: float | None, measured: Path | None) -> Rates:
    """Return response length and throughput, as given by the user or measured by the run in the folder `measured`.

    A given number has precedence over a measured number.  A number that is neither given nor measured is assumed on
    GPUs, and None on a CPU.

    Args:
        mean_tokens: mean length of a response in tokens, without its prompt.
        tokens_per_s: generated tokens per second of all devices of this run together.

    Raises:
        ConfigError: a number is not finite and positive; `measured` is not a run directory; or `tokens_per_s` is not
            given and the measured run has another kind of model or machine.
        DataError: metrics.jsonl of `measured` is damaged or empty.
    """
    rates = Rates.assumed(cfg) if measured is None else _measured(cfg, measured, tokens_per_s is None)
    devices = _devices(cfg)
    changed: dict[str, Any] = {}
    for option, value in (("--mean-tokens", mean_tokens), ("--tokens-per-s", tokens_per_s)):
        if value is not None and not (math.isfinite(value) and value > 0):
            raise ConfigError(f"{option}={value:g}: expected a finite number above 0")
    if mean_tokens is not None:
        changed |= {"mean_tokens": mean_tokens, "length_source": "given: --mean-tokens"}
    if tokens_per_s is not None:
        source = f"given: --tokens-per-s, {tokens_per_s:g} generated tokens/s by {devices} devices together"
        changed |= {"device_seconds_per_token": devices / tokens_per_s, "speed_source": source}
    return replace(rates, **changed)


def _measured(cfg: DictConfig, run: Path, with_speed: bool) -> Rates:
    """Return a run's mean response length and, if `with_speed`, its throughput, over all steps in its metrics.jsonl."""
    file = run / "config.yaml"
    if not file.is_file():
        raise ConfigError(f"--measured {run}: expected a run directory; it has no config.yaml")
    old, lines = settings.read_config(file), read_lines(run / "metrics.jsonl")
    sums = {"rollout/generated_tokens": 0.0, "time/step": 0.0, "rollout/groups": 0.0}
    in_responses = 0.0
    for line in lines:
        for key in (*sums, "rollout/response_tokens"):
            if not isinstance(line.get(key), int | float):
                raise DataError(
                    f"{run / 'metrics.jsonl'}: step {line['step']}: {key}: expected a number; got {line.get(key)!r}"
                )
        for key in sums:
            sums[key] += line[key]
        in_responses += line["rollout/response_tokens"] * line["rollout/groups"]
    generated, seconds, groups = sums.values()
    if min(generated, seconds, groups, in_responses) <= 0:
        raise DataError(
            f"{run / 'metrics.jsonl'}: expected steps with more than 0 tokens, seconds and groups; got"
            f" {generated:g} tokens, {seconds:g} s and {groups:g} groups"
        )
    per_trained = generated / (in_responses * old.trainer.grpo.samples_per_prompt)
    steps = f"{run}, steps {lines[0]['step']} to {lines[-1]['step']}"
    lengths = {
        "mean_tokens": in_responses / groups,
        "length_source": f"measured: {steps}, context {old.trainer.grpo.context_tokens}",
        "generated_per_trained": per_trained,
    }
    if not with_speed:
        return Rates(**lengths)
    for key in SAME_KIND:
        was, wanted = OmegaConf.select(old, key), OmegaConf.select(cfg, key)
        if was != wanted:
            raise ConfigError(
                f"--measured {run}: expected {key}={wanted}, as in this plan; got {key}={was}, so its throughput does"
                " not apply. Fix: measure a run of the same model and kind of machine, or give --tokens-per-s X"
            )
    devices, here = _devices(old), _devices(cfg)
    source = f"measured: {steps}, {generated / seconds:,.0f} tokens/s on {devices} {old.trainer.accelerator}"
    source += f", scaled to {here}" if here != devices else ""
    return Rates(**lengths, device_seconds_per_token=seconds * devices / generated, speed_source=source)


def plan_chain(cfg: DictConfig, overrides: list[str], rates: Rates, config_file: Path | None = None) -> Chain:
    """Return the plan of the chain, with the same overrides at each stage, and the memory of the chosen run `cfg`.

    In two cases the plan has only one line, for the run `cfg`: no stage is chosen (stage=none), or `cfg` was read from
    `config_file` or from a run directory, not from conf/.

    Another stage of the chain that would be refused has only this reason in its line, and the totals are unknown.

    Raises ConfigError: the chosen run is refused or does not fit the memory.
    """
    stages, note = [_stage(cfg, None, chosen=True, rates=rates)], None
    if cfg.stage == "none":
        note = "none: this is one run; stage=run1 plans the recipe's chain of eight"
    elif config_file is not None or settings.load(overrides) != cfg:
        note = "only this saved run; to plan the whole chain, use conf/ and another run_dir"
    else:
        stages = _stages(cfg, overrides, rates)
    return Chain(
        stages=stages,
        totals=_totals(stages),
        rates=rates,
        devices=_devices(cfg),
        accelerator=cfg.trainer.accelerator,
        vocabulary=vocabulary(cfg),
        memory=memory_of(cfg),
        device_bytes=device_bytes(cfg),
        note=note,
    )


def _stages(cfg: DictConfig, overrides: list[str], rates: Rates) -> list[PlannedStage]:
    others = [text for text in overrides if text.lstrip("+").split("=")[0] != GROUP]
    stages: list[PlannedStage] = []
    before: DictConfig | None = None
    for name in (option for option in settings.group_options(cfg.config_dir)[GROUP] if option != "none"):
        try:
            now = cfg if name == cfg.stage else settings.load([*others, f"{GROUP}={name}"])
        except ConfigError as error:
            stages.append(PlannedStage(name, chosen=False, refused=str(error)))
            _log.warning("stage %s of the same chain would be refused: %s", name, error)
            continue
        stages.append(_stage(now, before, chosen=name == cfg.stage, rates=rates))
        before = now
    return stages


def _stage(cfg: DictConfig, before: DictConfig | None, chosen: bool, rates: Rates) -> PlannedStage:
    memory = check_memory(cfg, device_bytes(cfg))
    grpo, mean = cfg.trainer.grpo, rates.mean_of(cfg)
    responses = grpo.max_steps * responses_per_step(cfg)
    bound, hours, step = responses * grpo.context_tokens, None, None
    estimated = None if mean is None else responses * mean * rates.generated_per_trained
    if rates.device_seconds_per_token is not None:
        hours = (bound if estimated is None else estimated) * rates.device_seconds_per_token / 3600
    elif mean is not None and cfg.trainer.accelerator == "gpu":
        step = step_time(cfg, memory, device_bytes(cfg), mean, rates.generated_per_trained)
        hours = step.seconds * grpo.max_steps * _devices(cfg) / 3600
    limit, starts = None, None
    if hours is not None and cfg.trainer.accelerator == "gpu":
        seconds, startup_s = careful_seconds(cfg, hours, rates), cfg.trainer.deadlines.startup_s
        limit = time_limit.time_limit(seconds, startup_s)
        starts = time_limit.starts(seconds, startup_s, limit)
    return PlannedStage(
        name=cfg.stage,
        chosen=chosen,
        changes=_changes(before, cfg),
        hard_reset=cfg.chain.hard_reset and (cfg.stage != "none" or cfg.chain.start_from is not None),
        steps=grpo.max_steps,
        responses=responses,
        tokens_at_most=bound,
        tokens_estimated=estimated,
        device_hours=hours,
        step=step,
        sbatch_time=None if limit is None else time_limit.slurm_format(limit),
        starts=starts,
        memory_needed=memory.needed,
    )


def careful_seconds(cfg: DictConfig, device_hours: float, rates: Rates) -> float:
    """Return the seconds of a stage with the margin for its time limit."""
    margin = time_limit.MARGIN_ESTIMATED if rates.estimated else time_limit.MARGIN_MEASURED
    return margin * 3600 * device_hours / _devices(cfg)


def _changes(before: DictConfig | None, now: DictConfig) -> dict[str, Any]:
    """Return {key: new value} of the keys that changed since the previous stage, without the keys of `NO_CHANGE`.

    For the first stage (`before` is None), return the values of all keys of `NAMES`, such as context and penalty.
    """
    new = dict(leaves(OmegaConf.to_container(now, resolve=True), into_lists=False))
    if before is None:
        return {key: new.get(key) for key in NAMES}
    old = dict(leaves(OmegaConf.to_container(before, resolve=True), into_lists=False))
    keys = [*NAMES, *sorted((old.keys() | new.keys()) - NAMES.keys())]
    return {key: new.get(key) for key in keys if old.get(key) != new.get(key) and not key.startswith(NO_CHANGE)}


def _totals(stages: list[PlannedStage]) -> dict[str, float | None]:
    """Return {field of `PlannedStage`: sum over the stages}; a sum is None if the number of a stage is unknown."""
    totals: dict[str, float | None] = {}
    for name in ("steps", "responses", "tokens_at_most", "tokens_estimated", "device_hours"):
        values: list[Any] = [None if stage.refused else getattr(stage, name) for stage in stages]
        totals[name] = None if None in values else sum(values)
    return totals


def _devices(cfg: DictConfig) -> int:
    return int(cfg.trainer.num_nodes) * node_devices(cfg)
