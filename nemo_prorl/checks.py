"""Checks of a resolved configuration: each key against its range in `config`, and keys that must fit each other.

Each check raises ConfigError with the full key, its value, the expected value, and the arithmetic if there is any.  The
checks read the files that the configuration names, and import OmegaConf and the standard library only.
"""

import json
import math
import operator
import shlex
import shutil
from collections.abc import Callable, Iterator, Sequence
from dataclasses import fields
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, OmegaConf

from nemo_prorl.config import RESET_RULES, ConfigKey, SchedKeys, all_keys
from nemo_prorl.data.hf_config import model_keys
from nemo_prorl.data.prepared import GENERATORS
from nemo_prorl.errors import ConfigError
from nemo_prorl.own_functions import check_place, is_place
from nemo_prorl.rollout.engine.vllm_internals import CPU_HEAD_SIZES
from nemo_prorl.sizing.memory import device_bytes
from nemo_prorl.sizing.memory_check import check_memory


def check(cfg: DictConfig, stages: Callable[[], Sequence[DictConfig]] = tuple) -> None:
    """Raise ConfigError for the first value or combination in a resolved configuration that cannot work.

    Data files may be missing: a plan and an evaluation do not need them; for a run, `data/prepared.py` checks them.

    Args:
        stages: as in `check_memory`.
    """
    for key in all_keys():
        for name, value in _values(cfg, key.name):
            _check_value(name, value, key)
    _pairs(cfg)
    _schedule(cfg)
    _model_shape(cfg.model)
    _layout(cfg)
    _kernels(cfg)
    _batch(cfg)
    _context(cfg)
    _engines(cfg)
    _one_step_off(cfg)
    _resets(cfg)
    _data(cfg)
    check_memory(cfg, device_bytes(cfg), stages)


# key -> end of the error about a number outside the key's range
_HINTS = {"trainer.grpo.validate_every": ". Fix: data.validation=[] switches validations off"}


def _wrong(key: str, value: Any, why: str) -> ConfigError:
    return ConfigError(f"{key}={value}: {why}")


def _values(cfg: DictConfig, name: str) -> Iterator[tuple[str, Any]]:
    """Yield a key with its value; a `*` in the name stands for every index of a list."""
    items, star, below = name.partition(".*.")
    if not star:
        yield name, OmegaConf.select(cfg, name)
        return
    for index in range(len(OmegaConf.select(cfg, items))):
        yield from _values(cfg, f"{items}.{index}.{below}")


def _check_value(name: str, value: Any, key: ConfigKey) -> None:
    """Check a value against the choices and bounds of its key."""
    rule = key.rule
    if value is None and key.optional:
        return
    if rule.choices:
        _check_choice(name, value, key)
    for bound, word, is_within in (
        (rule.least, "at least", operator.ge),
        (rule.above, "above", operator.gt),
        (rule.most, "at most", operator.le),
    ):
        if bound is None:
            continue
        if key.kind is int and not _is_int(value):
            raise _wrong(name, value, f"expected a whole number, {word} {bound:g}")
        if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
            raise _wrong(name, value, f"expected a finite number, {word} {bound:g}")
        if not is_within(value, bound):
            raise _wrong(name, value, f"expected a number {word} {bound:g}{_HINTS.get(name, '')}")


def _check_choice(name: str, value: Any, key: ConfigKey) -> None:
    rule = key.rule
    for item in value if OmegaConf.is_list(value) else [value]:
        if rule.own and is_place(item):
            check_place(item, name)
        elif item not in rule.choices or isinstance(item, bool):
            known = dict.fromkeys([*(["null"] if key.optional else []), *map(str, rule.choices)])
            own = ", or a function of your own: FILE.py:FUNCTION or MODULE:FUNCTION" if rule.own else ""
            raise _wrong(name, value, f"expected one of {', '.join(known)}{own}")


def _pairs(cfg: DictConfig) -> None:
    """Check lists of two numbers, and keys that exclude or need each other."""
    for name in ("cosine_correct", "cosine_wrong"):
        if len(cfg.trainer.grpo.shaping[name]) != 2:
            key = f"trainer.grpo.shaping.{name}"
            why = "expected two numbers: the reward at length 0 and at the longest response"
            raise _wrong(key, cfg.trainer.grpo.shaping[name], why)
    if cfg.on_event is not None and (fault := check_command(cfg.on_event)):
        raise ConfigError(fault)
    if cfg.trainer.grpo.adaptive_entropy.enabled and cfg.trainer.grpo.entropy_coef:
        key = "trainer.grpo.entropy_coef"
        raise _wrong(key, cfg.trainer.grpo.entropy_coef, "expected 0 if trainer.grpo.adaptive_entropy.enabled=true")
    shaping = cfg.trainer.grpo.shaping
    if not 0 <= shaping.cosine_for <= shaping.cosine_every:
        key = "trainer.grpo.shaping.cosine_for"
        raise _wrong(
            key, shaping.cosine_for, f"expected 0 to trainer.grpo.shaping.cosine_every={shaping.cosine_every} steps"
        )
    if shaping.cosine_every and not shaping.cosine_for:
        why = f"expected at least 1 step if trainer.grpo.shaping.cosine_every={shaping.cosine_every}"
        raise _wrong("trainer.grpo.shaping.cosine_for", 0, why)
    betas = OmegaConf.select(cfg, "model.optim.betas")
    if betas is not None and not (len(betas) == 2 and all(isinstance(b, int | float) and 0 <= b < 1 for b in betas)):
        raise _wrong("model.optim.betas", betas, "expected two numbers, each at least 0 and below 1")


def _schedule(cfg: DictConfig) -> None:
    """Check the learning rate's schedule against the stage's steps and the rate."""
    prefix, sched, lr = "model.optim.sched", cfg.model.optim.sched, cfg.model.optim.lr
    known = [item.name for item in fields(SchedKeys)]
    for key in sched:
        if key not in known:
            raise _wrong(f"{prefix}.{key}", sched[key], f"not supported. Known in {prefix}: {', '.join(known)}")
    if sched.warmup_steps and sched.warmup_ratio:
        why = f"expected 0 beside {prefix}.warmup_steps={sched.warmup_steps}. Fix: set one of them"
        raise _wrong(f"{prefix}.warmup_ratio", sched.warmup_ratio, why)
    if sched.warmup_steps > (steps := cfg.trainer.grpo.max_steps):
        why = (
            f"expected at most trainer.grpo.max_steps={steps}. Fix: fewer steps, or a share: {prefix}.warmup_ratio=0.1"
        )
        raise _wrong(f"{prefix}.warmup_steps", sched.warmup_steps, why)
    if sched.min_lr and sched.name == "constant":
        why = f"expected 0 if {prefix}.name=constant, which does not fall. Fix: {prefix}.name=linear or cosine"
        raise _wrong(f"{prefix}.min_lr", sched.min_lr, why)
    if lr is not None and sched.min_lr > lr:
        why = f"expected at most model.optim.lr={lr}, from which the rate falls. Fix: a lower {prefix}.min_lr"
        raise _wrong(f"{prefix}.min_lr", sched.min_lr, why)


def _is_int(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _divides(divisor_key: str, divisor: int, key: str, value: int, fix: str | None = None) -> None:
    """Raise ConfigError unless `divisor` divides `value`.

    Args:
        fix: an override that mends it; None: `divisor_key` with the largest divisor below `divisor`.
    """
    if value % divisor:
        possible = [d for d in range(1, value + 1) if value % d == 0]
        fix = fix or f"{divisor_key}={max(d for d in possible if d < divisor)}"
        raise ConfigError(
            f"{divisor_key}={divisor} does not divide {key}={value} ({value} / {divisor} = {value / divisor:g});"
            f" possible: {', '.join(str(d) for d in possible if d <= 64)}. Fix: {fix}"
        )


def _model_shape(model: DictConfig) -> None:
    heads, groups, hidden = model.num_attention_heads, model.num_query_groups, model.hidden_size
    if OmegaConf.select(model, "kv_channels") is None:
        _divides("model.num_attention_heads", heads, "model.hidden_size", hidden)
        if (hidden // heads) % 2:
            raise _wrong(
                "model.hidden_size", hidden, f"expected an even head size; got {hidden} / {heads} = {hidden // heads}"
            )
    _divides("model.num_query_groups", groups, "model.num_attention_heads", heads)


def _layout(cfg: DictConfig) -> None:
    """Check tensor, pipeline and data parallel sizes against the model and the number of ranks."""
    model, tp_key, pp_key = cfg.model, "model.tensor_model_parallel_size", "model.pipeline_model_parallel_size"
    tp, pp = model.tensor_model_parallel_size, model.pipeline_model_parallel_size
    for key in ("num_attention_heads", "num_query_groups", "ffn_hidden_size", "hidden_size"):
        _divides(tp_key, tp, f"model.{key}", model[key])
    _divides(tp_key, tp, "model.make_vocab_size_divisible_by", model.make_vocab_size_divisible_by)
    _divides(pp_key, pp, "model.num_layers", model.num_layers)
    if virtual := OmegaConf.select(model, "virtual_pipeline_model_parallel_size"):
        raise _wrong(
            "model.virtual_pipeline_model_parallel_size",
            virtual,
            "expected null, because virtual stages are not supported",
        )
    if OmegaConf.select(model, "sequence_parallel"):
        if tp == 1:
            raise _wrong(
                "model.sequence_parallel",
                True,
                f"needs {tp_key} of 2 or more; got 1. Fix: model.sequence_parallel=false, or {tp_key}=2",
            )
        _divides(tp_key, tp, "trainer.grpo.context_tokens", cfg.trainer.grpo.context_tokens)
    nodes, devices = cfg.trainer.num_nodes, cfg.trainer.devices
    if nodes * devices % (tp * pp):
        raise ConfigError(
            f"{tp_key}={tp} x {pp_key}={pp} = {tp * pp} does not divide the {nodes * devices} ranks of"
            f" trainer.num_nodes={nodes} x trainer.devices={devices}. Fix: {_layout_fix(model, nodes, devices)}"
        )


def _layout_fix(model: DictConfig, nodes: int, devices: int) -> str:
    """Return overrides for a number of ranks that the model's ranks do not divide.

    They lower trainer.devices, which leaves GPUs of a node unused; with too few GPUs they give up the parallel sizes.
    """
    ranks = model.tensor_model_parallel_size * model.pipeline_model_parallel_size
    if fitting := [count for count in range(1, devices) if nodes * count % ranks == 0]:
        return f"trainer.devices={fitting[-1]}"
    fix = "model.tensor_model_parallel_size=1 model.pipeline_model_parallel_size=1"
    return f"{fix} model.sequence_parallel=false" if OmegaConf.select(model, "sequence_parallel") else fix


def _kernels(cfg: DictConfig) -> None:
    """Check the precision, and the keys that need Transformer Engine or a fused rotary embedding."""
    model, te = cfg.model, OmegaConf.select(cfg.model, "transformer_engine")
    if te and cfg.trainer.accelerator == "cpu" and find_spec("transformer_engine") is None:
        raise _wrong(
            "model.transformer_engine", te, "needs a GPU, but trainer.accelerator is cpu. Fix: set it to false"
        )
    precision, o2 = cfg.trainer.precision, bool(OmegaConf.select(model, "megatron_amp_O2"))
    if o2 != (half := str(precision).startswith("bf16")):
        why = "otherwise the model stays float32" if half else "true means bf16 weights with float32 master weights"
        raise _wrong("model.megatron_amp_O2", o2, f"expected {half} if trainer.precision={precision}; {why}")
    fused_rotary = te or OmegaConf.select(model, "apply_rope_fusion")
    if OmegaConf.select(model, "packed_sequences") and not fused_rotary:
        why = (
            "needs model.transformer_engine=true or model.apply_rope_fusion=true. Fix: set one of them, or"
            " model.packed_sequences=false"
        )
        raise _wrong("model.packed_sequences", True, why)
    if OmegaConf.select(model, "fp8") and not te:
        why = "needs Transformer Engine. Fix: model.transformer_engine=true, or model.fp8=null"
        raise _wrong("model.fp8", model.fp8, why)
    if OmegaConf.select(model, "fp8") and "fp8_recipe" in model and model.fp8_recipe is None:
        why = f"expected a recipe for the scales of model.fp8={model.fp8}. Fix: model.fp8_recipe=tensorwise"
        raise _wrong("model.fp8_recipe", None, why)


def _batch(cfg: DictConfig) -> None:
    """Check prompts, mini-batches and ranks.

    The size of a micro-batch need not divide anything, because the last micro-batch may be smaller.
    """
    grpo = cfg.trainer.grpo
    prompts, updates, samples = grpo.prompts_per_step, grpo.updates_per_step, grpo.samples_per_prompt
    _divides("trainer.grpo.updates_per_step", updates, "trainer.grpo.prompts_per_step", prompts)
    ranks = cfg.trainer.num_nodes * cfg.trainer.devices
    data_ranks = ranks // (cfg.model.tensor_model_parallel_size * cfg.model.pipeline_model_parallel_size)
    rows = prompts // updates * samples
    if rows < data_ranks:
        least = updates * -(-data_ranks // samples)
        raise ConfigError(
            f"trainer.grpo.prompts_per_step={prompts} / trainer.grpo.updates_per_step={updates} x"
            f" trainer.grpo.samples_per_prompt={samples} = {rows} responses per update; expected at least one for each"
            f" of the {data_ranks} data-parallel ranks. Fix: trainer.grpo.prompts_per_step={least}"
        )
    if samples < 2:
        raise _wrong(
            "trainer.grpo.samples_per_prompt",
            samples,
            f"expected at least 2; trainer.grpo.advantage={grpo.advantage} compares the responses to one prompt, so"
            " with a single response every advantage is 0",
        )
    if grpo.advantage == "maxrl":
        for key in ("unfinished_penalty", "shaping.overlong_tokens", "shaping.cosine"):
            if value := OmegaConf.select(grpo, key):
                off = "false" if value is True else "0"
                raise _wrong(
                    f"trainer.grpo.{key}",
                    value,
                    f"expected {off}: trainer.grpo.advantage=maxrl divides by the mean reward of a group, which such a"
                    f" reward may make negative. Fix: trainer.grpo.{key}={off}",
                )
    correction = grpo.correction
    if correction.floor > correction.cap:
        why = f"expected at most trainer.grpo.correction.cap={correction.cap}"
        raise _wrong("trainer.grpo.correction.floor", correction.floor, why)


def _context(cfg: DictConfig) -> None:
    context, longest = cfg.trainer.grpo.context_tokens, cfg.trainer.grpo.max_response_tokens
    for key in ("max_position_embeddings", "encoder_seq_length"):
        limit = OmegaConf.select(cfg.model, key)
        if limit is not None and context > limit:
            raise _wrong(
                "trainer.grpo.context_tokens",
                context,
                f"expected at most model.{key}={limit}; in a stage with long context chain.long_context_tokens sets it",
            )
    if longest is not None and longest >= context:
        why = f"expected less than trainer.grpo.context_tokens={context}, to leave room for the prompt"
        raise _wrong("trainer.grpo.max_response_tokens", longest, why)
    budget = OmegaConf.select(cfg, "model.micro_batch_tokens")
    if budget is not None and (not _is_int(budget) or budget < context):
        raise _wrong(
            "model.micro_batch_tokens",
            budget,
            f"expected a whole number, at least trainer.grpo.context_tokens={context}, so that the longest sequence"
            " fits into a micro-batch; or null for model.micro_batch_size responses",
        )


def _engines(cfg: DictConfig) -> None:
    rollout, nodes, devices = cfg.rollout, cfg.trainer.num_nodes, cfg.trainer.devices
    engines, tp, heads = rollout.engines, rollout.tensor_parallel_size, cfg.model.num_attention_heads
    each_node = max(nodes, engines // nodes * nodes)
    _divides("trainer.num_nodes", nodes, "rollout.engines", engines, f"rollout.engines={each_node}")
    _divides("rollout.tensor_parallel_size", tp, "model.num_attention_heads", heads)
    needed = engines * tp
    if rollout.own_devices and rollout.sleep is not None:
        why = "expected null if rollout.own_devices=true, because nothing else uses the engines' memory"
        raise _wrong("rollout.sleep", rollout.sleep, why)
    if cfg.trainer.accelerator == "gpu" and not rollout.own_devices and needed > nodes * devices:
        fix = f"rollout.engines={devices // tp * nodes}"
        if tp > devices:
            fix = f"rollout.tensor_parallel_size={max(d for d in range(1, devices + 1) if heads % d == 0)}"
        raise ConfigError(
            f"rollout.engines={engines} x rollout.tensor_parallel_size={tp} = {needed} GPUs: expected at most"
            f" trainer.num_nodes={nodes} x trainer.devices={devices} = {nodes * devices}. Fix: {fix}"
        )


def _one_step_off(cfg: DictConfig) -> None:
    """Check the keys that `rollout.own_devices` (engines with their own devices) needs.

    These engines work one step ahead, so each batch is one weight version old.  `dynamic_sampling.max_staleness` must
    allow this age, and `correction.kind` must not be none.
    """
    grpo, key = cfg.trainer.grpo, "rollout.own_devices"
    if not cfg.rollout.own_devices:
        return
    if grpo.dynamic_sampling.max_staleness < 1:
        why = "each batch is one weight version old. Fix: trainer.grpo.dynamic_sampling.max_staleness=1"
        raise _wrong(key, True, why)
    if grpo.correction.kind == "none":
        why = "each batch is from older weights. Fix: a trainer.grpo.correction.kind other than none"
        raise _wrong(key, True, why)


def _resets(cfg: DictConfig) -> None:
    steps, last = list(cfg.trainer.resets.at_steps), cfg.trainer.grpo.max_steps
    if outside := [step for step in steps if not 1 <= step <= last]:
        raise _wrong("trainer.resets.at_steps", steps, f"expected steps of the run, 1 to {last}; got {outside[0]}")
    if len(set(steps)) < len(steps):
        raise _wrong("trainer.resets.at_steps", steps, "expected each step once; got a step twice")
    if outside := [step for step in cfg.trainer.trace_steps if not 1 <= step <= last]:
        traced = list(cfg.trainer.trace_steps)
        raise _wrong("trainer.trace_steps", traced, f"expected steps of the run, 1 to {last}; got {outside[0]}")
    asks = list(cfg.trainer.resets.rules.asks)
    if cfg.trainer.resets.roll_back and cfg.trainer.grpo.keep_best == 0:
        why = "expected at least 1, because trainer.resets.roll_back=true needs the checkpoint of the best validation"
        raise _wrong("trainer.grpo.keep_best", 0, why)
    if cfg.trainer.resets.mode == "auto" and not asks:
        rules = ", ".join(RESET_RULES)
        why = (
            f"expected one or more of {rules} if trainer.resets.mode=auto. Fix: name one, or trainer.resets.mode=advise"
        )
        raise _wrong("trainer.resets.rules.asks", asks, why)


def pretrained_name(cfg: DictConfig) -> str:
    """Return the key and folder of the first weights, as error messages name them."""
    return f"pretrained_checkpoint.restore_from_path={cfg.pretrained_checkpoint.restore_from_path}"


def pretrained_config(cfg: DictConfig, need_weights: bool) -> dict[str, Any]:
    """Return the config.json of the folder with the first weights.

    Raises:
        ConfigError: the folder does not exist, or is not complete.
    """
    key, path = "pretrained_checkpoint.restore_from_path", cfg.pretrained_checkpoint.restore_from_path
    folder = Path(path)
    if not folder.is_dir():
        why = "expected a Hugging Face model folder, the name of a model on the hub, or null for random weights"
        raise _wrong(key, path, f"{why}; {folder.absolute()} does not exist")
    if not (folder / "config.json").is_file():
        raise _wrong(key, path, "expected a Hugging Face model folder; got a folder without config.json")
    if need_weights and not any(folder.glob("*.safetensors")):
        raise _wrong(key, path, "expected *.safetensors files; got a model folder without weights")
    try:
        hf = json.loads((folder / "config.json").read_text())
    except ValueError as error:
        raise _wrong(key, path, f"its config.json is not JSON: {error}") from error
    if not isinstance(hf, dict):
        raise _wrong(key, path, f"its config.json: expected a JSON object; got {type(hf).__name__}")
    return hf


def check_shape(model: DictConfig, hf: dict[str, Any], source: str) -> None:
    """Raise ConfigError if `model` differs from a Hugging Face config.json, or if the trainer does not support it.

    Args:
        hf: content of the config.json.
        source: name of the folder in error messages.
    """
    for key, value in model_keys(hf, source).items():
        if (model.get(key) or None) != (value or None):
            raise ConfigError(
                f"model.{key}={model.get(key)}: expected {value}, as in the config.json of {source}. Fix: leave"
                f" model.{key} out, or choose another folder"
            )


def check_heads(cfg: DictConfig) -> None:
    """Raise ConfigError if the engines run on CPUs and vLLM's CPU build has no attention kernels for the model."""
    hidden, heads = cfg.model.hidden_size, cfg.model.num_attention_heads
    own = OmegaConf.select(cfg.model, "kv_channels")
    if cfg.trainer.accelerator != "cpu" or (own or hidden // heads) in CPU_HEAD_SIZES:
        return
    key = f"model.kv_channels={own}" if own else f"model.hidden_size={hidden}"
    got = "" if own else f"; got {hidden} / model.num_attention_heads={heads} = {hidden // heads}"
    raise ConfigError(
        f"{key}: expected attention heads of {', '.join(map(str, CPU_HEAD_SIZES))} values, for which vLLM has kernels"
        f" on CPUs (trainer.accelerator=cpu){got}. Fix: another model, or a cluster with GPUs"
    )


def _data(cfg: DictConfig) -> None:
    if not cfg.data.train:
        raise ConfigError(
            "data.train=[]: expected at least one source to train on. Fix: data=NAME, or a list of sources, each with"
            " name and path or generator"
        )
    if cfg.data.retire_rate < 1 and cfg.data.retire_after is None:
        raise _wrong("data.retire_rate", cfg.data.retire_rate, "expected data.retire_after=N beside it; got null")
    most, context = cfg.data.max_prompt_tokens, cfg.trainer.grpo.context_tokens
    if most is not None and most >= context:
        why = f"expected less than trainer.grpo.context_tokens={context}, to leave room for a response"
        raise _wrong("data.max_prompt_tokens", most, why)
    for task, template in cfg.data.templates.items():
        if template.count("{problem}") != 1:
            raise _wrong(f"data.templates.{task}", template, "expected a text with {problem} once")
    for part in ("train", "validation"):
        names: set[str] = set()
        for index, source in enumerate(cfg.data[part]):
            _source(f"data.{part}.{index}", source)
            if source.name in names:
                why = "expected a unique name; got the name of another source"
                raise _wrong(f"data.{part}.{index}.name", source.name, why)
            names.add(source.name)


def _source(key: str, source: DictConfig) -> None:
    if (source.path is None) == (source.generator is None):
        both = "both" if source.path else "neither"
        raise ConfigError(f"{key} ({source.name}): expected either path or generator; got {both}")
    if source.generator not in (None, *GENERATORS) and not source.generator.startswith("reasoning_gym:"):
        why = f"expected one of {', '.join(GENERATORS)}, reasoning_gym:DATASET"
        raise _wrong(f"{key}.generator", source.generator, why)
    if source.generator is not None and source.size is None:
        raise _wrong(f"{key}.size", None, "expected the number of records that the generator makes")


def check_command(text: str) -> str | None:
    """Return the error message for a value of `on_event`, or None if its program exists on this machine.

    A program without `/` is searched on PATH, a relative path in the current directory.
    """
    try:
        words = shlex.split(text)
    except ValueError as error:
        return f"on_event={text}: expected a command that splits into words like in a shell; got {error}"
    if not words:
        return "on_event=: expected a command, or null for none; got an empty value"
    if shutil.which(words[0]) is None:
        where = "which is not an executable file" if "/" in words[0] else "which is not on PATH"
        return f"on_event={text}: expected a program or an executable file; got {words[0]}, {where}"
    return None
