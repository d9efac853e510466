"""Checks of a resolved configuration: each key by its line in `config`, and what must fit together with the arithmetic.

Each check raises ConfigError naming the full key, its value and what would be right.  Looks at the files that the
configuration names; imports OmegaConf and the standard library only.
"""

import json
import math
import operator
import shlex
import shutil
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, OmegaConf

from nemo_prorl.config import ConfigKey, all_keys
from nemo_prorl.data.hf_config import check_computed, rope_theta
from nemo_prorl.errors import ConfigError
from nemo_prorl.sizing.memory import device_bytes
from nemo_prorl.sizing.memory_check import check_memory

# NeMo's name of what a Hugging Face config.json says of the same model.
SHAPE_KEYS = {
    "num_layers": "num_hidden_layers",
    "hidden_size": "hidden_size",
    "ffn_hidden_size": "intermediate_size",
    "num_attention_heads": "num_attention_heads",
    "num_query_groups": "num_key_value_heads",
}


def check(cfg: DictConfig) -> None:
    """Raises ConfigError at the first thing in a resolved configuration that cannot work.

    Whether the data's files are there is checked by `data.prepared`: a plan and an evaluation do without them.
    """
    for key in all_keys():
        for name, value in _values(cfg, key.name):
            _check_value(name, value, key)
    _pairs(cfg)
    _model_shape(cfg.model)
    _layout(cfg)
    _kernels(cfg)
    _batch(cfg)
    _context(cfg)
    _engines(cfg)
    _one_step_off(cfg)
    _resets(cfg)
    _pretrained(cfg)
    _data(cfg)
    check_memory(cfg, device_bytes(cfg))


def _wrong(key: str, value: Any, why: str) -> ConfigError:
    return ConfigError(f"{key}={value}: {why}")


def _values(cfg: DictConfig, name: str) -> Iterator[tuple[str, Any]]:
    """Yield a key with its value; one with `*` in its name for each item of the list."""
    items, star, below = name.partition(".*.")
    if not star:
        yield name, OmegaConf.select(cfg, name)
        return
    for index in range(len(OmegaConf.select(cfg, items))):
        yield from _values(cfg, f"{items}.{index}.{below}")


def _check_value(name: str, value: Any, key: ConfigKey) -> None:
    """Check a value by its key's choices and bounds."""
    rule = key.rule
    if value is None and key.optional:
        return
    if rule.choices:
        items = value if OmegaConf.is_list(value) else [value]
        if any(item not in rule.choices or isinstance(item, bool) for item in items):
            known = dict.fromkeys([*(["null"] if key.optional else []), *map(str, rule.choices)])
            raise _wrong(name, value, f"must be one of {', '.join(known)}")
    for bound, word, holds in (
        (rule.least, "at least", operator.ge),
        (rule.above, "above", operator.gt),
        (rule.most, "at most", operator.le),
    ):
        if bound is None:
            continue
        if key.kind is int and not _is_int(value):
            raise _wrong(name, value, f"must be a whole number, {word} {bound:g}")
        if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
            raise _wrong(name, value, f"must be a finite number, {word} {bound:g}")
        if not holds(value, bound):
            raise _wrong(name, value, f"must be {word} {bound:g}")


def _pairs(cfg: DictConfig) -> None:
    """Check lists of two numbers, and keys that exclude or need each other."""
    for name in ("cosine_correct", "cosine_wrong"):
        if len(cfg.trainer.grpo.shaping[name]) != 2:
            key = f"trainer.grpo.shaping.{name}"
            raise _wrong(key, cfg.trainer.grpo.shaping[name], "must be two numbers: at length 0, at the longest")
    if cfg.on_event is not None and (fault := check_command(cfg.on_event)):
        raise ConfigError(fault)
    if cfg.trainer.grpo.adaptive_entropy.enabled and cfg.trainer.grpo.entropy_coef:
        key = "trainer.grpo.entropy_coef"
        raise _wrong(key, cfg.trainer.grpo.entropy_coef, "must be 0 where trainer.grpo.adaptive_entropy.enabled is")
    shaping = cfg.trainer.grpo.shaping
    if not 0 <= shaping.cosine_for <= shaping.cosine_every:
        key = "trainer.grpo.shaping.cosine_for"
        raise _wrong(key, shaping.cosine_for, f"must be 0 to cosine_every={shaping.cosine_every}")
    if shaping.cosine_every and not shaping.cosine_for:
        raise _wrong("trainer.grpo.shaping.cosine_for", 0, "with cosine_every the cosine needs 1 step at least")
    betas = OmegaConf.select(cfg, "model.optim.betas")
    if betas is not None and not (len(betas) == 2 and all(isinstance(b, int | float) and 0 <= b < 1 for b in betas)):
        raise _wrong("model.optim.betas", betas, "must be two numbers from 0 up to, not including, 1")


def _is_int(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _divides(divisor_key: str, divisor: int, key: str, value: int) -> None:
    if value % divisor:
        raise ConfigError(
            f"{divisor_key}={divisor} does not divide {key}={value} ({value} / {divisor} = {value / divisor:g});"
            f" possible: {', '.join(str(d) for d in range(1, min(value, 64) + 1) if value % d == 0)}"
        )


def _model_shape(model: DictConfig) -> None:
    heads, groups, hidden = model.num_attention_heads, model.num_query_groups, model.hidden_size
    if OmegaConf.select(model, "kv_channels") is None:
        _divides("model.num_attention_heads", heads, "model.hidden_size", hidden)
        if (hidden // heads) % 2:
            raise _wrong(
                "model.hidden_size", hidden, f"the head size {hidden} / {heads} = {hidden // heads} must be even"
            )
    _divides("model.num_query_groups", groups, "model.num_attention_heads", heads)


def _layout(cfg: DictConfig) -> None:
    """Tensor, pipeline and data parallel sizes against the model and the ranks."""
    model, tp_key, pp_key = cfg.model, "model.tensor_model_parallel_size", "model.pipeline_model_parallel_size"
    tp, pp = model.tensor_model_parallel_size, model.pipeline_model_parallel_size
    for key in ("num_attention_heads", "num_query_groups", "ffn_hidden_size", "hidden_size"):
        _divides(tp_key, tp, f"model.{key}", model[key])
    _divides(tp_key, tp, "model.make_vocab_size_divisible_by", model.make_vocab_size_divisible_by)
    _divides(pp_key, pp, "model.num_layers", model.num_layers)
    if virtual := OmegaConf.select(model, "virtual_pipeline_model_parallel_size"):
        raise _wrong("model.virtual_pipeline_model_parallel_size", virtual, "is not supported; set it to null")
    if OmegaConf.select(model, "sequence_parallel"):
        if tp == 1:
            raise _wrong("model.sequence_parallel", True, f"needs {tp_key} of 2 or more")
        _divides(tp_key, tp, "trainer.grpo.context_tokens", cfg.trainer.grpo.context_tokens)
    nodes, devices = cfg.trainer.num_nodes, cfg.trainer.devices
    if nodes * devices % (tp * pp):
        raise ConfigError(
            f"{tp_key}={tp} x {pp_key}={pp} = {tp * pp} does not divide the {nodes * devices} ranks of"
            f" trainer.num_nodes={nodes} x trainer.devices={devices}; set trainer.devices to a multiple of {tp * pp}"
        )


def _kernels(cfg: DictConfig) -> None:
    """Check the precision and the keys that need Transformer Engine or a rotary embedding of their own."""
    model, te = cfg.model, OmegaConf.select(cfg.model, "transformer_engine")
    if te and cfg.trainer.accelerator == "cpu" and find_spec("transformer_engine") is None:
        raise _wrong("model.transformer_engine", te, "needs a GPU; trainer.accelerator is cpu. Set it to false")
    precision, o2 = cfg.trainer.precision, bool(OmegaConf.select(model, "megatron_amp_O2"))
    if o2 != (half := str(precision).startswith("bf16")):
        why = "otherwise the model stays float32" if half else "it is for bf16 weights with float32 masters"
        raise _wrong("model.megatron_amp_O2", o2, f"must be {half} where trainer.precision={precision}; {why}")
    own_rotary = te or OmegaConf.select(model, "apply_rope_fusion")
    if OmegaConf.select(model, "packed_sequences") and not own_rotary:
        why = "needs model.apply_rope_fusion=true where model.transformer_engine=false, or packed_sequences=false"
        raise _wrong("model.packed_sequences", True, why)
    if OmegaConf.select(model, "fp8") and not te:
        raise _wrong("model.fp8", model.fp8, "is Transformer Engine's; set model.transformer_engine=true, or fp8=null")
    if OmegaConf.select(model, "fp8") and "fp8_recipe" in model and model.fp8_recipe is None:
        raise _wrong("model.fp8_recipe", None, f"says no scales for model.fp8={model.fp8}; set it to tensorwise")


def _batch(cfg: DictConfig) -> None:
    """Prompts, mini-batches and ranks.  A micro-batch may be smaller than the others, so its size need not divide."""
    grpo = cfg.trainer.grpo
    prompts, updates, samples = grpo.prompts_per_step, grpo.updates_per_step, grpo.samples_per_prompt
    _divides("trainer.grpo.updates_per_step", updates, "trainer.grpo.prompts_per_step", prompts)
    ranks = cfg.trainer.num_nodes * cfg.trainer.devices
    data_ranks = ranks // (cfg.model.tensor_model_parallel_size * cfg.model.pipeline_model_parallel_size)
    rows = prompts // updates * samples
    if rows < data_ranks:
        raise ConfigError(
            f"trainer.grpo.prompts_per_step={prompts} / trainer.grpo.updates_per_step={updates} x"
            f" trainer.grpo.samples_per_prompt={samples} = {rows} responses an update for {data_ranks} data-parallel"
            " ranks: each needs one at least"
        )
    if samples < 2:
        raise _wrong(
            "trainer.grpo.samples_per_prompt",
            samples,
            f"trainer.grpo.advantage={grpo.advantage} compares the responses to one prompt, so with one of them every"
            " advantage is 0; expected 2 at least",
        )
    correction = grpo.correction
    if correction.floor > correction.cap:
        raise _wrong("trainer.grpo.correction.floor", correction.floor, f"must not exceed cap={correction.cap}")


def _context(cfg: DictConfig) -> None:
    context, longest = cfg.trainer.grpo.context_tokens, cfg.trainer.grpo.max_response_tokens
    for key in ("max_position_embeddings", "encoder_seq_length"):
        limit = OmegaConf.select(cfg.model, key)
        if limit is not None and context > limit:
            raise _wrong("trainer.grpo.context_tokens", context, f"exceeds model.{key}={limit}")
    if longest is not None and longest >= context:
        raise _wrong(
            "trainer.grpo.max_response_tokens", longest, f"must leave room for a prompt in context_tokens={context}"
        )
    budget = OmegaConf.select(cfg, "model.micro_batch_tokens")
    if budget is not None and (not _is_int(budget) or budget < context):
        raise _wrong(
            "model.micro_batch_tokens",
            budget,
            f"must be a whole number, at least trainer.grpo.context_tokens={context}, so that a"
            " micro-batch holds the longest sequence; or null: model.micro_batch_size responses",
        )


def _engines(cfg: DictConfig) -> None:
    rollout, nodes, devices = cfg.rollout, cfg.trainer.num_nodes, cfg.trainer.devices
    _divides("trainer.num_nodes", nodes, "rollout.engines", rollout.engines)
    _divides(
        "rollout.tensor_parallel_size",
        rollout.tensor_parallel_size,
        "model.num_attention_heads",
        cfg.model.num_attention_heads,
    )
    tp = rollout.tensor_parallel_size
    needed = rollout.engines * tp
    if rollout.own_devices and rollout.sleep is not None:
        raise _wrong(
            "rollout.sleep", rollout.sleep, "must be null where rollout.own_devices=true: nobody needs the room"
        )
    if cfg.trainer.accelerator == "gpu" and not rollout.own_devices and needed > nodes * devices:
        raise ConfigError(
            f"rollout.engines={rollout.engines} x rollout.tensor_parallel_size={tp} = {needed}"
            f" GPUs; trainer.num_nodes={nodes} x trainer.devices={devices} = {nodes * devices} are there"
        )


def _one_step_off(cfg: DictConfig) -> None:
    """Engines with own devices work a step ahead: such a batch is a version old, must be taken, and be corrected."""
    grpo, key = cfg.trainer.grpo, "rollout.own_devices"
    if not cfg.rollout.own_devices:
        return
    if grpo.dynamic_sampling.max_staleness < 1:
        raise _wrong(key, True, "every batch is one version old; set trainer.grpo.dynamic_sampling.max_staleness=1")
    if grpo.correction.kind == "none":
        raise _wrong(key, True, "older weights made the batch, so trainer.grpo.correction.kind must not be none")


def _resets(cfg: DictConfig) -> None:
    steps, last = list(cfg.trainer.resets.at_steps), cfg.trainer.grpo.max_steps
    if outside := [step for step in steps if not 1 <= step <= last]:
        raise _wrong("trainer.resets.at_steps", steps, f"{outside[0]} is outside the run's steps, 1 to {last}")
    if len(set(steps)) < len(steps):
        raise _wrong("trainer.resets.at_steps", steps, "names a step twice")
    if outside := [step for step in cfg.trainer.trace_steps if not 1 <= step <= last]:
        traced = list(cfg.trainer.trace_steps)
        raise _wrong("trainer.trace_steps", traced, f"{outside[0]} is outside the run's steps, 1 to {last}")
    asks = list(cfg.trainer.resets.rules.asks)
    if cfg.trainer.resets.roll_back and cfg.trainer.grpo.keep_best == 0:
        raise _wrong("trainer.grpo.keep_best", 0, "trainer.resets.roll_back needs the best weights kept: 1 or more")
    if cfg.trainer.resets.mode == "auto" and not asks:
        raise _wrong("trainer.resets.rules.asks", asks, "no rule is left to reset; name one, or use mode=advise")


def _pretrained(cfg: DictConfig) -> None:
    """The folder with the first weights: there, complete, and of the model's shape."""
    key, path = "pretrained_checkpoint.restore_from_path", cfg.pretrained_checkpoint.restore_from_path
    if path is None:
        return
    folder = Path(path)
    if not folder.is_dir():
        raise _wrong(key, path, "is no folder; it must be a Hugging Face model folder, or null for random weights")
    if not (folder / "config.json").is_file():
        raise _wrong(key, path, "holds no config.json, so it is no Hugging Face model folder")
    if not any(folder.glob("*.safetensors")):
        raise _wrong(key, path, "is a model folder without weights: it holds no *.safetensors file")
    try:
        said = json.loads((folder / "config.json").read_text())
    except ValueError as error:
        raise _wrong(key, path, f"its config.json is not JSON: {error}") from error
    check_shape(cfg.model, said, f"{key}={path}")


def check_shape(model: DictConfig, said: dict[str, Any], whose: str) -> None:
    """Raise ConfigError if `model` differs from a Hugging Face config.json, or the actor cannot compute that model."""
    check_computed(said, whose)
    base = rope_theta(said)
    if base is not None and base != model.rotary_base:
        raise ConfigError(f"model.rotary_base={model.rotary_base} does not fit {whose}, whose rope_theta is {base:g}")
    for ours, theirs in SHAPE_KEYS.items():
        if theirs in said and said[theirs] != model[ours]:
            raise ConfigError(f"model.{ours}={model[ours]} does not fit {whose}, whose {theirs} is {said[theirs]}")


def _data(cfg: DictConfig) -> None:
    if not cfg.data.train:
        raise ConfigError(
            "data.train=[]: nothing to train on; choose data=... or list sources with name and path or generator"
        )
    most, context = cfg.data.max_prompt_tokens, cfg.trainer.grpo.context_tokens
    if most is not None and most >= context:
        raise _wrong("data.max_prompt_tokens", most, f"must leave room for a response in context_tokens={context}")
    for part in ("train", "validation"):
        names: set[str] = set()
        for index, source in enumerate(cfg.data[part]):
            _source(f"data.{part}.{index}", source)
            if source.name in names:
                raise _wrong(f"data.{part}.{index}.name", source.name, "is the name of another source too")
            names.add(source.name)


def _source(key: str, source: DictConfig) -> None:
    if (source.path is None) == (source.generator is None):
        both = "both given" if source.path else "both null"
        raise ConfigError(f"{key} ({source.name}): path and generator are {both}; a source has one of them")
    if source.generator is not None and source.size is None:
        raise _wrong(f"{key}.size", None, "a generator needs the number of records to make")


def check_command(text: str) -> str | None:
    """Return the fault of a value of `on_event`, or None.  Looks on this machine, in the present directory and PATH."""
    try:
        words = shlex.split(text)
    except ValueError as error:
        return f"on_event={text}: {error}; it is split as a shell would, without running one"
    if not words:
        return "on_event= is empty; a command, or null for none"
    if shutil.which(words[0]) is None:
        where = "is no file that may be executed" if "/" in words[0] else "is on PATH under no such name"
        return f"on_event={text}: {words[0]} {where}; a program or an executable file is needed"
    return None
