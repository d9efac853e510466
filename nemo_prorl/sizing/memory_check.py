"""Check that a run fits a GPU's memory; the error lists changes of the configuration that make it fit."""

import copy
import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

from omegaconf import DictConfig, OmegaConf

from nemo_prorl.config import num_ranks
from nemo_prorl.errors import ConfigError
from nemo_prorl.sizing.memory import GB, Memory, device_source, memory_of, micro_batch_tokens, micro_batch_words
from nemo_prorl.sizing.phases import allocations, phase_bytes

_ENOUGH = 3  # pairs of changes that an error names


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
        f"{_subject(cfg, memory)}: a GPU needs {memory.needed:,} bytes ({parts}),"
        f" {device_source(cfg)} has {int(device_bytes):,}. "
        + (
            f"Fix: {who} with {'; or '.join(fits)}"
            if fits
            else "No change of layout or batch makes it fit, nor do two of them"
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


def _what_fits(cfgs: Sequence[DictConfig], device_bytes: float) -> list[str]:
    """Return changes that each make all of `cfgs` fit, as text with the GB needed after the change.

    Pairs of changes are tried if no single change helps.

    Args:
        cfgs: the refused run, and the stages of its chain.
    """
    cfgs = sorted(cfgs, key=lambda cfg: memory_of(cfg).needed, reverse=True)  # the hardest first, which ends most tries
    singles = _changes(cfgs[0], max(cfg.trainer.grpo.context_tokens for cfg in cfgs))
    pairs = (a | b for a, b in itertools.combinations(singles, 2) if a.keys().isdisjoint(b))
    found = list(_fitting(cfgs, singles, device_bytes))
    return found or list(itertools.islice(_fitting(cfgs, pairs, device_bytes), _ENOUGH))


def _fitting(cfgs: Sequence[DictConfig], changes: Iterable[dict[str, Any]], device_bytes: float) -> Iterator[str]:
    """Yield, as text, those of `changes` that make all of `cfgs` fit; of several values of the same keys the first."""
    seen = set()
    for change in changes:
        if (keys := tuple(change)) in seen or (needed := _needed(cfgs, change, device_bytes)) is None:
            continue
        seen.add(keys)
        words = " ".join(f"{key}={'null' if value is None else value}" for key, value in change.items())
        yield f"{words} (needs {needed / GB:.1f} GB)"


def _needed(cfgs: Sequence[DictConfig], change: dict[str, Any], device_bytes: float) -> int | None:
    """Return the most bytes that one of `cfgs` needs with the change; None if one would still be refused."""
    most = 0
    for cfg in cfgs:
        changed = copy.deepcopy(cfg)
        for key, value in change.items():
            OmegaConf.update(changed, key, value, force_add=True)
        memory = memory_of(changed)
        most = max(most, memory.needed)
        if most > device_bytes or (memory.kv_configured is not None and memory.kv_configured < memory.kv_sequence):
            return None
    return most


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
