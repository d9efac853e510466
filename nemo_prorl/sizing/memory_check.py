"""Check that a run fits a GPU's memory; the error lists changes of the configuration that make it fit."""

import copy
import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from omegaconf import DictConfig, OmegaConf

from nemo_prorl.config import num_ranks
from nemo_prorl.errors import ConfigError
from nemo_prorl.sizing.memory import GB, Memory, device_source, memory_of, micro_batch_tokens, micro_batch_words
from nemo_prorl.sizing.phases import allocations, phase_bytes
from nemo_prorl.sizing.roofline import DRAWN, MEAN_SHARE, longest_response, step_time

_ENOUGH = 3  # changes that an error names


def check_memory(
    cfg: DictConfig, device_bytes: float | None, stages: Callable[[], Sequence[DictConfig]] = tuple
) -> Memory:
    """Return the sizes of a checked configuration, if the run fits.

    Args:
        device_bytes: memory of a GPU; None (on a CPU, or unknown): only the KV cache is checked.
        stages: returns the configurations, perhaps unchecked, of all stages of the same chain; called if the run does
            not fit.  A change that the error names makes each of them fit.

    Raises:
        ConfigError: the KV cache is too small for one sequence that fills the context (vLLM would refuse to start), or
            a GPU is too small.  The error names keys and values, bytes needed and available, and changes that help.
    """
    memory = memory_of(cfg)
    configured, context = memory.kv_configured, cfg.trainer.grpo.context_tokens
    if configured is not None and configured < memory.kv_sequence:
        raise ConfigError(
            f"rollout.kv_cache_mb={cfg.rollout.kv_cache_mb}: expected at least {memory.kv_sequence:,} bytes, for one"
            f" sequence of trainer.grpo.context_tokens={context}; got {configured:,} bytes."
            f" Fix: set it to {-(-memory.kv_sequence // 2**20)} or more, or null"
        )
    if device_bytes is None or memory.needed <= device_bytes:
        return memory
    others = stages()
    fits, who = _what_fits([cfg, *others], device_bytes), "it fits"
    if others and not fits:
        fits, who = _what_fits([cfg], device_bytes), "this stage fits, but not the whole chain,"
    parts = ", ".join(f"{name} {value / GB:.1f} GB" for name, value in _parts(memory).items())
    raise ConfigError(
        f"{_subject(cfg, memory)}: a GPU needs{_of_stage(cfg)} {memory.needed:,} bytes ({parts}),"
        f" {device_source(cfg)} has {int(device_bytes):,}. "
        + (
            f"Fix: {who} with {'; or '.join(fits)}"
            if fits
            else "No change of layout or batch makes it fit, nor do two of them. Fix: "
            + _more_gpus([cfg, *others], device_bytes)
        )
    )


def _subject(cfg: DictConfig, memory: Memory) -> str:
    """Return a text that names the keys, with values, that cause the peak of memory use, and the phase of the peak."""
    work = f"{micro_batch_words(cfg)} with trainer.grpo.context_tokens={cfg.trainer.grpo.context_tokens}"
    if not memory.engines_sleep and not memory.engines_apart:
        return work
    if memory.while_training >= memory.while_generating:
        asleep = f", while the engines sleep (rollout.sleep={cfg.rollout.sleep})"
        return f"{work}{'' if memory.engines_apart else asleep}"
    kv_mb = "null" if cfg.rollout.kv_cache_mb is None else cfg.rollout.kv_cache_mb
    if memory.engines_apart:
        return f"rollout.kv_cache_mb={kv_mb} on an engine's own GPU (rollout.own_devices)"
    return f"rollout.kv_cache_mb={kv_mb} in addition to the trainer's state, while engines generate"


def _parts(memory: Memory) -> dict[str, int]:
    """Return the parts of `Memory.needed` by name, in bytes: the allocations of the fullest phase."""
    sums = phase_bytes(memory)
    fullest = max(sums, key=lambda phase: sums[phase])
    return {part.name: part.bytes for part in allocations(memory) if fullest in part.phases}


@dataclass(frozen=True)
class _Fit:
    """A change with which a run fits: the GB that it needs, the sequences that fit the KV cache, the estimated time."""

    change: dict[str, Any]
    needed: int  # bytes
    sequences: int  # that fill the context, in the KV cache of one engine: the fewest of all stages
    context: str  # the tokens of such a sequence, and the stage that has so few of them
    seconds: float  # of a step of each stage together
    roomy: bool  # the KV cache is as configured, or holds a group of such sequences

    def __str__(self) -> str:
        plural = "" if self.sequences == 1 else "s"
        room = f"room for {self.sequences} full sequence{plural} of {self.context}"
        return f"{_words(self.change)} (needs {self.needed / GB:.1f} GB, {room})"


def _what_fits(cfgs: Sequence[DictConfig], device_bytes: float) -> list[str]:
    """Return changes that each make all of `cfgs` fit, as text, those with the shortest estimated steps first.

    A change should leave each engine the KV cache of a group of full sequences, because with fewer a rollout takes
    many times as long.  What barely fits is named if nothing else fits.  Of a pair of changes, each must be needed.

    Args:
        cfgs: the refused run, and the stages of its chain.
    """
    distinct = {(memory_of(cfg), cfg.trainer.grpo.samples_per_prompt): cfg for cfg in reversed(cfgs)}  # to save time
    cfgs = sorted(distinct.values(), key=lambda cfg: memory_of(cfg).needed, reverse=True)  # the hardest first, as well
    singles = _changes(cfgs[0], max(cfg.trainer.grpo.context_tokens for cfg in cfgs))
    pairs = [a | b for a, b in itertools.combinations(singles, 2) if a.keys().isdisjoint(b)]
    tried = [(change, _fit(cfgs, change, device_bytes)) for change in singles]
    alone = [change for change, fit in tried if fit is not None and fit.roomy]
    needed = [pair for pair in pairs if not any(change.items() <= pair.items() for change in alone)]
    fits = [fit for _, fit in tried if fit is not None]
    fits += [fit for pair in needed if (fit := _fit(cfgs, pair, device_bytes)) is not None]
    return _cheapest([fit for fit in fits if fit.roomy] or fits)


def _more_gpus(cfgs: Sequence[DictConfig], device_bytes: float) -> str:
    """Return the fix for what no change of `_changes` makes fit: the nodes, up to 8 times as many, that would.

    Engines then have several GPUs, because more nodes alone leave an engine's GPU as full as it was.
    """
    trainer, groups = cfgs[0].trainer, cfgs[0].model.num_query_groups
    tp = math.gcd(groups, trainer.devices)
    for nodes in [trainer.num_nodes * factor for factor in (1, 2, 4, 8) if not cfgs[0].rollout.own_devices]:
        gpus = nodes * trainer.devices
        layout = {"trainer.num_nodes": nodes, "rollout.tensor_parallel_size": tp, "rollout.engines": gpus // tp}
        wider = [_changed(cfg, layout) for cfg in cfgs]
        if fits := _what_fits(wider, device_bytes):
            return f"a smaller model; or, on {gpus} GPUs, {_words(layout)} {fits[0]}"
    return "more GPUs, or a smaller model"


def _changed(cfg: DictConfig, change: dict[str, Any]) -> DictConfig:
    changed = copy.deepcopy(cfg)
    for key, value in change.items():
        OmegaConf.update(changed, key, value, force_add=True)
    return changed


def _words(change: dict[str, Any]) -> str:
    return " ".join(f"{key}={'null' if value is None else value}" for key, value in change.items())


def _cheapest(fits: Sequence[_Fit]) -> list[str]:
    """Return the first changes by time, as text; of equal times those listed first, of the same keys the first only."""
    by_keys = {tuple(fit.change): fit for fit in reversed(fits)}
    mildest = [fit for fit in fits if by_keys[tuple(fit.change)] is fit]
    return [str(fit) for fit in sorted(mildest, key=lambda fit: float(f"{fit.seconds:.2g}"))[:_ENOUGH]]


def _fit(cfgs: Sequence[DictConfig], change: dict[str, Any], device_bytes: float) -> _Fit | None:
    """Return the most that one of `cfgs` needs with the change; None if one would still be refused."""
    needed, seconds, roomy, rooms = 0, 0.0, True, []
    for cfg in cfgs:
        changed = _changed(cfg, change)
        memory = memory_of(changed)
        room = memory.sequences(device_bytes)
        if memory.needed > device_bytes or not room:
            return None
        wanted = min(cfg.trainer.grpo.samples_per_prompt, cfg.rollout.max_num_seqs)
        roomy = roomy and (memory.kv_configured is not None or room >= wanted)
        needed = max(needed, memory.needed)
        rooms.append((room, f"{cfg.trainer.grpo.context_tokens:,} tokens{_of_stage(cfg)}"))
        seconds += step_time(changed, memory, device_bytes, MEAN_SHARE * longest_response(cfg), DRAWN).seconds
    return _Fit(change, needed, *min(rooms), seconds=seconds, roomy=roomy)


def _of_stage(cfg: DictConfig) -> str:
    return "" if cfg.stage == "none" else f" in {cfg.stage}"


def _changes(cfg: DictConfig, longest: int) -> list[dict[str, Any]]:
    """Return changes, as {key: new value}, that may make a run smaller; of several values of a key the mildest first.

    Args:
        longest: tokens of the longest context of the chain.
    """
    changes: list[dict[str, Any]] = []
    if cfg.rollout.sleep is None and not cfg.rollout.own_devices:
        changes.append({"rollout.sleep": 2})
    if cfg.rollout.kv_cache_mb is not None:
        changes.append({"rollout.kv_cache_mb": None})
    micro = micro_batch_tokens(cfg) // cfg.trainer.grpo.context_tokens // 2
    while micro >= 1:
        changes.append({"model.micro_batch_size": micro})
        micro //= 2
    if micro_batch_tokens(cfg) > longest:
        changes.append({"model.micro_batch_tokens": longest})
    changes.append({"trainer.grpo.logprob_chunk_tokens": 1024})
    recompute = {"granularity": "full", "method": "uniform", "num_layers": 1}
    changes.append({f"model.activations_checkpoint_{name}": value for name, value in recompute.items()})
    tp = 2 * cfg.model.tensor_model_parallel_size
    ranks = num_ranks(cfg)
    while not any(n % tp for n in (cfg.model.num_query_groups, cfg.model.make_vocab_size_divisible_by, ranks)):
        changes.append({"model.tensor_model_parallel_size": tp, "model.sequence_parallel": True})
        tp *= 2
    return changes
