"""Text tables that `prorl plan` prints: the settings of a run, the stages of its chain, and the memory it needs."""

import json
import os
from collections.abc import Sequence
from itertools import islice
from pathlib import Path
from typing import cast

from omegaconf import DictConfig

from nemo_prorl.algorithms.schedule import warmup_steps
from nemo_prorl.config import Config, num_data_ranks, responses_per_step, warms_up
from nemo_prorl.config_changes import FORKED, changes
from nemo_prorl.data.prepared import missing_files, task_of
from nemo_prorl.lifecycle.base_model import model_to_copy
from nemo_prorl.lifecycle.retention import complete, read_state, step_of
from nemo_prorl.lifecycle.stages import origin
from nemo_prorl.lifecycle.tolerances import engine_gap_alarm, kl_after_reset
from nemo_prorl.planning import algorithm, time_limit, timetable
from nemo_prorl.planning.columns import columns
from nemo_prorl.planning.plan import NAMES, PAPER_GPU_HOURS, RESET_BY, Chain, PlannedStage, careful_seconds
from nemo_prorl.planning.prompts import prompt_form
from nemo_prorl.settings import read_config
from nemo_prorl.sizing import roofline
from nemo_prorl.sizing.cores import Cores, engine_threads
from nemo_prorl.sizing.memory import (
    GB,
    PUBLISHED_VERSIONS,
    RESERVE_PARTS,
    Memory,
    ModelShape,
    device_source,
    layer_parameters,
    micro_batch_tokens,
    micro_batch_words,
)
from nemo_prorl.sizing.phases import phase_bytes
from nemo_prorl.sizing.widths import most_shapes, width_multiple


def plan(cfg: DictConfig, chain: Chain, lengths: str = "not checked") -> str:
    """Return five tables as text: run, algorithm, stages of the recipe's chain, sources of numbers, and memory.

    Args:
        lengths: the lengths of the prompts, as text.
    """
    parts = (
        columns(run_rows(cfg, lengths).items()),
        columns(algorithm.rows(cfg)),
        _stage_table(chain),
        columns(_sources(cfg, chain).items()),
        columns(_memory(cfg, chain).items()),
    )
    return "\n".join(parts)


def run_rows(cfg: DictConfig, lengths: str = "not checked") -> dict[str, str]:
    """Return {subject: settings as text} of a resolved configuration; `prorl plan --json` has the same keys.

    Args:
        lengths: the lengths of the prompts, as text.

    Raises:
        ConfigError: the run cannot begin with the checkpoint that `chain.start_from` names.
    """
    trainer, grpo, model, rollout = cfg.trainer, cfg.trainer.grpo, cfg.model, cfg.rollout
    tp, pp = model.tensor_model_parallel_size, model.pipeline_model_parallel_size
    responses = responses_per_step(cfg)
    millions = model.num_layers * layer_parameters(ModelShape.of(model, vocab=1)) / 1e6
    return {
        "run directory": cfg.run_dir,
        "stage": cfg.stage,
        "seed": f"{cfg.seed}{' (deterministic)' if cfg.deterministic else ''}",
        "policy": f"{model.num_layers} layers x {model.hidden_size}, {model.num_attention_heads} heads,"
        f" {model.num_query_groups} query groups, {millions:.1f} million parameters without the vocabulary",
        **_first_weights(cfg),
        "machines": f"{trainer.num_nodes} x {trainer.devices} {trainer.accelerator}, precision {trainer.precision}",
        **_cores(cfg),
        "parallel layout": f"TP {tp} x PP {pp} x DP {num_data_ranks(cfg)}",
        "rollout engines": f"{rollout.engines} x TP {rollout.tensor_parallel_size}, {rollout.dtype}"
        + (
            f", on separate {'GPUs' if trainer.accelerator == 'gpu' else 'cores'}; one step off policy"
            if rollout.own_devices
            else ""
        ),
        "warm-up": f"{trainer.warmup.steps} steps of {trainer.warmup.batch_size}, lr {trainer.warmup.lr:g}"
        if warms_up(cfg)
        else "none",
        "steps": str(grpo.max_steps),
        "a step": f"{grpo.prompts_per_step} prompts x {grpo.samples_per_prompt} = {responses} responses,"
        f" {grpo.updates_per_step} updates of {responses // grpo.updates_per_step}, lr {_rate(cfg)}",
        "micro-batches": _micro_batches(cfg),
        "context": f"{grpo.context_tokens} tokens, temperature {grpo.temperature:g}",
        "differences": f"policy to reference after a reset {kl_after_reset(cfg):g} per token; alarm if engine and"
        f" trainer differ by more than {engine_gap_alarm(cfg):g}",
        **timetable.rows(cfg),
        "checkpoints": f"every {grpo.checkpoint_every} steps, {grpo.keep_checkpoints} kept",
        "validation": f"every {grpo.validate_every} steps, {grpo.validation_samples} responses per prompt, temperature"
        f" {grpo.validation_temperature:g}",
        "prompts": prompt_form(cfg.data, cfg.pretrained_checkpoint.restore_from_path),
        "data": _data(cfg),
        "held out": ", ".join(s.name for s in cfg.data.validation) or "nothing",
        "data files": _files(cfg),
        "prompt lengths": lengths,
        **_functions(cfg),
    }


def _first_weights(cfg: DictConfig) -> dict[str, str]:
    """Return as text where the weights of the first step come from, and how a fork differs from the run before it.

    Raises ConfigError like `prorl train`.
    """
    run_dir, start_from = Path(cfg.run_dir), cfg.chain.start_from
    if own := complete(run_dir / "checkpoints"):
        step = step_of(own[-1])
        text = f"this run's own: it continues after step {step}"
        if step >= cfg.trainer.grpo.max_steps:
            text = (
                f"none: the run is finished at step {step}. To go on: trainer.grpo.max_steps=N above {step}, or another"
                f" run or stage from its end: run_dir=NEW chain.start_from={cfg.run_dir}"
            )
        return {"first weights": text}
    reset = "with a hard reset at step 0" if cfg.chain.hard_reset else "with its reference and optimizer"
    if start_from is None and cfg.chain.after is not None:
        which = "best" if cfg.trainer.resets.roll_back else "last"
        text = f"starts from the {which} checkpoint of {run_dir.parent / cfg.chain.after}, {reset}"
        return {"first weights": text}
    if (start := origin(cast(Config, cfg), run_dir)) is not None:
        model_to_copy(cfg, run_dir, start)
        step = read_state(start.checkpoint)["step"]
        text = f"starts from {start.run_dir or start.checkpoint}, step {step}, {reset}"
        if start.run_dir is None:
            return {"first weights": text}
        differences = changes(read_config(start.run_dir / "config.yaml"), cfg, FORKED)
        return {"first weights": text, "unlike that run": differences or "nothing"}
    return {
        "first weights": cfg.pretrained_checkpoint.restore_from_path or "random, with a tokenizer made for the data"
    }


def _rate(cfg: DictConfig) -> str:
    """Return the learning rate as text, and its schedule if it is not constant from the first step."""
    optim, sched = cfg.model.optim, cfg.model.optim.sched
    rise = warmup_steps(sched, cfg.trainer.grpo.max_steps)
    falls = f", {sched.name} to {sched.min_lr:g}" if sched.name != "constant" else ""
    return f"{optim.lr:g}{falls}" + (f", rising over {rise} steps" if rise else "")


def _micro_batches(cfg: DictConfig) -> str:
    """Return the limits of a micro-batch as text and, where Transformer Engine pads widths, the number of shapes."""
    text = f"at most {cfg.model.micro_batch_size} responses and {micro_batch_tokens(cfg):,} tokens"
    if cfg.model.get("packed_sequences"):
        return f"{text}, packed"
    shapes = most_shapes(cfg.model, cfg.trainer.grpo.context_tokens)
    return f"{text}, padded to a multiple of {width_multiple(cfg.model)}: at most {shapes:,} shapes"


def _functions(cfg: DictConfig) -> dict[str, str]:
    """Return {"reward functions": the user's functions by task}; {} if there are none."""
    texts = [f"{task} by {function}" for task, function in cfg.rewards.functions.items()]
    return {"reward functions": "; ".join(texts)} if texts else {}


def _cores(cfg: DictConfig) -> dict[str, str]:
    """Return {"cores": how a run on the CPU would use the cores of this machine, as text}; {} for a run on GPUs."""
    if cfg.trainer.accelerator != "cpu":
        return {}
    available = os.sched_getaffinity(0)
    threads = engine_threads(cfg, len(available))
    apart = Cores.of(cfg, available)
    ranks = len(apart.ranks[0]) if apart is not None else max(1, len(available) // cfg.trainer.devices)
    turns = "" if cfg.rollout.own_devices else "; they take turns"
    return {"cores": f"{len(available)} here: {ranks} for each trainer rank, {threads} for each engine rank{turns}"}


def _data(cfg: DictConfig) -> str:
    """Return the training sources as text: records and weight of each.

    If a step needs more prompts than a source has, the text says how often the step repeats each record.
    """
    every = [(source, _records(source, cfg.data.tasks)) for source in cfg.data.train]
    used = [(source, count) for source, count in every if count != 0]
    counts = [count for _, count in used]
    texts = []
    for source, count in used:
        weight = [] if len(counts) == 1 else [f"weight {source.weight:g}"]
        facts = [*([f"{count:,} records"] if count is not None else []), *weight]
        texts.append(f"{source.name} ({', '.join(facts)})" if facts else source.name)
    total = sum(count or 0 for count in counts)
    text, prompts = ", ".join(texts), cfg.trainer.grpo.prompts_per_step
    if unused := [source.name for source, count in every if count == 0]:
        text += f"; without {', '.join(unused)}, which data.tasks leaves out"
    if None not in counts and 0 < total < prompts:
        text += f"; each record comes about {prompts / total:.0f} times in a step, which takes {prompts} prompts"
    return text


def _records(source: DictConfig, tasks: Sequence[str] | None) -> int | None:
    """Return the number of records of a source; None if its file is missing or is not a .jsonl file.

    Args:
        tasks: count only records of these tasks; None: all records.
    """
    if source.path is None:
        return source.size if tasks is None or task_of(source.generator) in tasks else 0
    path = Path(source.path)
    if path.suffix != ".jsonl" or not path.is_file():
        return source.size
    with path.open("rb") as file:
        lines = list(islice((line for line in file if not line.isspace()), source.size))
    return len(lines) if tasks is None else sum(json.loads(line)["task"] in tasks for line in lines)


def _files(cfg: DictConfig) -> str:
    named = sum(source.path is not None for part in (cfg.data.train, cfg.data.validation) for source in part)
    if not named:
        return "none: all problems are generated during the run"
    missing = len(missing_files(cfg))
    return f"{missing} of {named} missing: the run would be refused" if missing else f"{named}, all present"


def _stage_table(chain: Chain) -> str:
    """Return a table with one line per stage, `>` before the chosen stage, and totals if there are several stages."""
    limits = any(stage.sbatch_time for stage in chain.stages)
    head = ["", "stage", "reset", "steps", "responses", "tokens <=", "generated ~", _hours(chain)]
    head += [*(["--time"] if limits else []), "memory", "changes"]
    rows = [head]
    for stage in chain.stages:
        if stage.refused:
            rows.append(["", stage.name, *["-"] * (len(head) - 3), f"refused: {stage.refused.splitlines()[0]}"])
            continue
        mark = ">" if stage.chosen else ""
        numbers = (stage.steps, stage.responses, stage.tokens_at_most, stage.tokens_estimated, stage.device_hours)
        limit = f"{stage.starts} x {stage.sbatch_time}" if (stage.starts or 1) > 1 else stage.sbatch_time
        reset = ", ".join(filter(None, ("yes", RESET_BY.get(stage.name)))) if stage.hard_reset else "no"
        row = [mark, stage.name, reset, *map(_count, numbers), *([limit or "-"] if limits else [])]
        rows.append([*row, _bytes(stage.memory_needed), _changes(stage)])
    if len(chain.stages) > 1:
        row = ["", "in all", "", *map(_count, chain.totals.values())]
        rows.append(row + [""] * (len(head) - len(row)))
    return columns(rows, right=range(3, len(head) - 1))


def _hours(chain: Chain) -> str:
    """Return the heading of the hours; `~` marks an estimate."""
    estimated = any(stage.step is not None for stage in chain.stages)
    return f"{chain.accelerator.upper()} hours{' ~' if estimated else ''}"


def _changes(stage: PlannedStage) -> str:
    texts = []
    for key, value in stage.changes.items():
        if value is None:
            text = "all"
        elif isinstance(value, list):
            text = ", ".join(map(str, value))
        else:
            text = f"{value:g}" if isinstance(value, float) else str(value)
        texts.append(f"{NAMES[key]} {text}" if key in NAMES else f"{key}={text}")
    return "; ".join(texts) or "-"


def _sources(cfg: DictConfig, chain: Chain) -> dict[str, str]:
    """Return {column of the stage table: how its numbers are computed}, as text."""
    rates, mean = chain.rates, chain.rates.mean_of(cfg)
    length = f"{mean:,.1f} tokens, " if mean is not None else ""
    dropped = f"; {rates.generated_per_trained:.2f} generated per response used for training" if length else ""
    if length and rates.generated_per_trained == 1.0:
        dropped = "; without the groups that dynamic sampling drops"
    rows = {
        "tokens <=": "upper bound: prompts and responses used for training, if each filled the context",
        "generated ~": f"responses x mean length, limited by the context{dropped}",
        "mean response": length + rates.length_source,
        _hours(chain): rates.speed_source,
    }
    if rates.device_seconds_per_token is not None:
        of = "generated ~" if length else "tokens <= (no mean length is known)"
        rows[_hours(chain)] = f"{of}; {rates.speed_source}"
    rows |= _time_rows(cfg, chain)
    rows["the paper's"] = (
        f"about {PAPER_GPU_HOURS:,} GPU hours in total on 4 x 8 H100 80 GB (arXiv 2507.12507), for comparison only"
    )
    if chain.note:
        rows["stages"] = chain.note
    return rows


def _time_rows(cfg: DictConfig, chain: Chain) -> dict[str, str]:
    """Return what an estimate assumes, the seconds of a step, and the time limit of the chosen stage's Slurm job."""
    stage = next(stage for stage in chain.stages if stage.chosen)
    rows, step = {}, stage.step
    if step is not None:
        per_device_s = (stage.tokens_estimated or 0.0) / 3600 / (stage.device_hours or 1.0)
        rows["  assumed"] = (
            f"H100 SXM: {roofline.BANDWIDTH / 1e12:g} TB/s at {roofline.BANDWIDTH_SHARE:.0%} to read weights and KV"
            f" cache, and {1e3 * roofline.TOKEN_S:g} ms + {1e3 * roofline.SEQUENCE_S:g} ms per sequence, for each"
            f" token; {roofline.FLOPS / 1e12:g} TFLOP/s at {roofline.FLOPS_SHARE:.0%} to train; prompts of"
            f" {roofline.PROMPT_TOKENS} tokens; no validation, checkpoints, restarts, or communication"
            " between GPUs (also within tensor parallelism)"
        )
        rows["  a step"] = (
            f"{step.seconds:,.0f} s: {step.rollout_s:,.0f} rollout ({step.responses:,.0f} responses per engine, at most"
            f" {step.running:,.0f} at once){' in parallel with' if step.apart else ','}"
            f" {step.training_s:,.0f} training, {roofline.OTHER_S:g} the rest; {per_device_s:,.0f} generated tokens/s"
            " per GPU over a whole step"
        )
    if stage.sbatch_time is not None and stage.device_hours is not None:
        seconds = careful_seconds(cfg, stage.device_hours, chain.rates)
        startup_s = cfg.trainer.deadlines.startup_s
        others = [(limit, time_limit.starts(seconds, startup_s, limit)) for limit in time_limit.SHORTER_S]
        shorter = ", ".join(f"{time_limit.slurm_format(limit)} {count} starts" for limit, count in others if count)
        margin = time_limit.MARGIN_ESTIMATED if chain.rates.estimated else time_limit.MARGIN_MEASURED
        rows["--time"] = (
            f"sbatch --time={stage.sbatch_time}, {stage.starts or 'no'} start{'s' if stage.starts != 1 else ''}:"
            f" {stage.device_hours / chain.devices:,.1f} h x {margin:g} as margin, and per start"
            f" {(startup_s + time_limit.STOP_S) / 60:g} min to begin and to stop. At its limit the job requeues itself"
            f" and continues, so a partition's limit will do: {shorter}"
        )
    return rows


def _memory(cfg: DictConfig, chain: Chain) -> dict[str, str]:
    """Return {part: its size as text} for a run's memory on a device and on a host, and for its disk space."""
    m, size = chain.memory, chain.device_bytes
    of = "a GPU" if chain.accelerator == "gpu" else "a rank"
    room = m.kv_room(size)
    fit = (
        f"{m.sequences(size)} sequences of {cfg.trainer.grpo.context_tokens} tokens" if room is not None else "unknown"
    )
    left = f"{_bytes(room)}: {fit} for each engine" if room is not None else "unknown: rollout.device_memory_gb is null"
    kv_source = "as configured" if m.kv_configured is not None else "what is left"
    budget = cfg.trainer.grpo.checkpoint_budget_gb
    fp8 = f"{_bytes(m.fp8_weights)}: of the layers' weights, while the trainer works"
    return {
        f"memory of {of}": f"at least {_bytes(m.needed)}"
        + (f", of {_bytes(size)} ({device_source(cfg)})" if size is not None else ""),
        "  weights": f"{_bytes(m.weights)}; the whole model has {m.parameters:,} parameters",
        "  vocabulary": f"{chain.vocabulary[0]:,} ({chain.vocabulary[1]})",
        "  gradients": _bytes(m.gradients),
        "  optimizer": f"{_bytes(m.optimizer)}, spread over data-parallel ranks",
        **({"  FP8 copies": fp8} if m.fp8_weights else {}),
        "  activations": f"{_bytes(m.activations)}: micro-batch of {micro_batch_tokens(cfg):,} tokens"
        f" ({micro_batch_words(cfg)}), recomputation"
        f" {cfg.model.get('activations_checkpoint_granularity') or 'none'}",
        "  one layer's work": _bytes(m.layer_work),
        "  logits": f"{_bytes(m.logits_forward)} forward, {_bytes(m.logits_backward)} backward, chunks of"
        f" {cfg.trainer.grpo.logprob_chunk_tokens} tokens x {cfg.trainer.grpo.logprob_chunk_words} words",
        "  reference in use": f"{_bytes(m.reference_swap)} in addition to the policy's own weights",
        "  trainer at most": f"{_bytes(m.trainer_peak)} of these at once"
        + (f"; {_bytes(m.trainer_resident)} while engines generate" if m.engines_sleep else ""),
        "  engine": f"{_bytes(m.engine_weights)} weights, {_bytes(m.engine_work)} work,"
        f" {_bytes(m.kv_sequence)} KV cache per full sequence",
        "  KV cache": f"{left} ({kv_source})" if room is not None else left,
        "  engine's sleep": _sleep(cfg, m, size),
        **({"  by phase": _phases(m)} if m.engines_sleep else {}),
        "  reserve": f"{_bytes(m.reserve)}, "
        + (
            "assumed: " + ", ".join(f"{name} {_bytes(part)}" for name, part in RESERVE_PARTS.items())
            if of == "a GPU"
            else "measured: the processes before any weights"
        ),
        "host of a node": f"{_bytes(m.reference_host)} reference policy, {_bytes(m.snapshot_host)} while a checkpoint"
        f" is written; /dev/shm {_bytes(m.published)}: {PUBLISHED_VERSIONS} versions of the weights",
        "disk": f"{_bytes(m.checkpoint)} per checkpoint, {_bytes(m.checkpoints)} for all kept and being written"
        + (f", limited to {budget:g} GB" if budget is not None else ""),
    }


def _phases(m: Memory) -> str:
    texts = [f"{phase} {_bytes(number)}" for phase, number in phase_bytes(m).items()]
    return ", ".join(texts) + ("; KV cache of one sequence" if m.kv_configured is None else "")


def _sleep(cfg: DictConfig, m: Memory, size: float | None) -> str:
    """Return as text how trainer and engine share the memory of a GPU of `size` bytes (None: unknown)."""
    if m.engines_apart:
        return (
            f"none: at least {_bytes(m.while_generating)} on an engine's GPU, {_bytes(m.while_training)} on a trainer's"
        )
    if cfg.rollout.sleep is None:
        return "none: engine and trainer keep their memory at the same time"
    kept = "weights in host memory" if cfg.rollout.sleep == 1 else "weights dropped"
    if not m.engines_sleep:
        return f"level {cfg.rollout.sleep}; on a CPU a sleeping engine keeps its memory"
    share = f"{_bytes(m.engine_bytes(size))} for the engine awake; " if size is not None else ""
    return (
        f"level {cfg.rollout.sleep}, {kept}; {share}{_bytes(m.while_training)} while the trainer works,"
        f" at least {_bytes(m.while_generating)} while engines generate"
    )


def _bytes(number: float | None) -> str:
    if number is None:
        return "-"
    for unit, size in (("GB", GB), ("MB", 1e6)):
        if number >= size:
            return f"{number / size:,.1f} {unit}"
    return f"{number / 1e3:,.1f} kB"


def _count(number: float | None) -> str:
    """Return a count in short form: 12,345; 6.55 million; 20.10 billion; a dash for None (unknown)."""
    if number is None:
        return "-"
    for size, unit in ((1e9, " billion"), (1e6, " million")):
        if number >= size:
            return f"{number / size:,.2f}{unit}"
    return f"{number:,.0f}" if number >= 100 or float(number).is_integer() else f"{number:.3g}"
