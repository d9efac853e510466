"""Check that a run fits a GPU's memory; the error lists single changes of the configuration that make it fit."""

import copy
from typing import Any

from omegaconf import DictConfig, OmegaConf

from nemo_prorl.config import num_ranks
from nemo_prorl.errors import ConfigError
from nemo_prorl.sizing.memory import GB, Memory, device_source, memory_of, micro_batch_tokens, micro_batch_words
from nemo_prorl.sizing.phases import allocations, phase_bytes


def check_memory(cfg: DictConfig, device_bytes: float | None) -> Memory:
    """Return the sizes of a checked configuration, if the run fits.

    Args:
        device_bytes: memory of a GPU; None (on a CPU, or unknown): only the KV cache is checked.

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
    fits = _what_fits(cfg, device_bytes)
    parts = ", ".join(f"{name} {value / GB:.1f} GB" for name, value in _parts(memory).items())
    raise ConfigError(
        f"{_subject(cfg, memory)}: a GPU needs {memory.needed:,} bytes ({parts}),"
        f" {device_source(cfg)} has {int(device_bytes):,}. "
        + (f"Fix: it fits with {'; or '.join(fits)}" if fits else "No single change of layout or batch makes it fit")
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


def _what_fits(cfg: DictConfig, device_bytes: float) -> list[str]:
    """Return changes of the configuration that each make the run fit, as text with the GB needed after the change."""
    changes: list[dict[str, Any]] = []
    if cfg.rollout.sleep is None and not cfg.rollout.own_devices:
        changes.append({"rollout.sleep": 2})
    if cfg.rollout.kv_cache_mb is not None:
        changes.append({"rollout.kv_cache_mb": None})
    context, micro = cfg.trainer.grpo.context_tokens, micro_batch_tokens(cfg) // cfg.trainer.grpo.context_tokens // 2
    while micro >= 1:
        changes.append({"model.micro_batch_size": micro})
        micro //= 2
    if micro_batch_tokens(cfg) > context:
        changes.append({"model.micro_batch_tokens": context})
    changes.append({"trainer.grpo.logprob_chunk_tokens": 1024})
    recompute = {"granularity": "full", "method": "uniform", "num_layers": 1}
    changes.append({f"model.activations_checkpoint_{name}": value for name, value in recompute.items()})
    tp = 2 * cfg.model.tensor_model_parallel_size
    if not any(n % tp for n in (cfg.model.num_query_groups, cfg.model.make_vocab_size_divisible_by, num_ranks(cfg))):
        changes.append({"model.tensor_model_parallel_size": tp, "model.sequence_parallel": True})
    fits: dict[tuple[str, ...], str] = {}  # by the changed keys: the first change of a key that is enough
    for change in changes:
        other = copy.deepcopy(cfg)
        for key, value in change.items():
            OmegaConf.update(other, key, value, force_add=True)
        if (needed := memory_of(other).needed) <= device_bytes:
            words = " ".join(f"{key}={'null' if value is None else value}" for key, value in change.items())
            fits.setdefault(tuple(change), f"{words} (needs {needed / GB:.1f} GB)")
    return list(fits.values())
