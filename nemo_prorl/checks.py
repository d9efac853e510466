"""Checks of a resolved configuration: each key against its range in `config`, and keys that must fit each other.

Each check raises ConfigError with the full key, its value, the expected value, and the arithmetic if there is any.  The
checks read the files that the configuration names, and import OmegaConf and the standard library only.
"""

import difflib
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

from nemo_prorl.config import ADVISING_RULES, RESET_RULES, ConfigKey, SchedKeys, all_keys, num_data_ranks
from nemo_prorl.data.hf_config import model_keys, read_config
from nemo_prorl.data.model_folder import missing_weights, no_config
from nemo_prorl.data.prepared import GENERATORS, reasoning_gym_names
from nemo_prorl.errors import ConfigError
from nemo_prorl.nemo_keys import check_model_keys
from nemo_prorl.own_functions import check_place, is_place
from nemo_prorl.rollout.engine.vllm_internals import CPU_HEAD_SIZES
from nemo_prorl.sizing.devices import devices_words, node_devices
from nemo_prorl.sizing.memory import device_bytes
from nemo_prorl.sizing.memory_check import check_memory
from nemo_prorl.value_types import shown

Fault = tuple[str, str]  # a key, and what is expected of its value


def check(cfg: DictConfig, stages: Callable[[], Sequence[DictConfig]] = tuple) -> None:
    """Raise ConfigError for the first value or combination in a resolved configuration that cannot work.

    Data files may be missing: a plan and an evaluation do not need them; for a run, `data/prepared.py` checks them.

    Args:
        stages: as in `check_memory`.
    """
    for part in (
        _ranges,
        _pairs,
        _schedule,
        check_model_keys,
        _model_shape,
        _layout,
        _kernels,
        _batch,
        _context,
        _engines,
        _one_step_off,
        _resets,
        _data,
    ):
        for key, reason in part(cfg):
            raise _wrong(cfg, key, reason)
    check_memory(cfg, device_bytes(cfg), stages)


# key -> end of the error about a number outside the key's range
_HINTS = {
    "trainer.grpo.validate_every": ". Fix: data.validation=[] switches validations off",
    "trainer.resets.every": ". Fix: null switches regular resets off",
    "trainer.resets.lr_factor": ". Fix: 1 leaves the rate as it is",
}


def _wrong(cfg: DictConfig, key: str, reason: str) -> ConfigError:
    return ConfigError(f"{key}={shown(OmegaConf.select(cfg, key))}: {reason}")


def _ranges(cfg: DictConfig) -> Iterator[Fault]:
    """Check the value of each key against the key's choices and bounds."""
    plain = OmegaConf.to_container(cfg, resolve=True)
    for key in all_keys():
        for name, value in _values(plain, key.name):
            if reason := _fault_of_value(name, value, key):
                yield name, reason


def _values(tree: Any, name: str) -> Iterator[tuple[str, Any]]:
    """Yield (key, value); a `*` in `name` stands for every index of a list."""
    name, star, below = name.partition(".*.")
    for part in name.split("."):
        tree = tree.get(part) if isinstance(tree, dict) else None
    if not star:
        yield name, tree
        return
    for index, item in enumerate(tree):
        yield from ((f"{name}.{index}.{key}", value) for key, value in _values(item, below))


def _fault_of_value(name: str, value: Any, key: ConfigKey) -> str | None:
    rule = key.rule
    if value is None and key.optional:
        return None
    if rule.choices and (reason := _fault_of_choice(name, value, key)):
        return reason
    for bound, word, is_within in (
        (rule.least, "at least", operator.ge),
        (rule.above, "above", operator.gt),
        (rule.most, "at most", operator.le),
    ):
        if bound is None:
            continue
        if key.kind is int and not _is_int(value):
            return f"expected a whole number, {word} {bound:g}"
        if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
            return f"expected a finite number, {word} {bound:g}"
        if not is_within(value, bound):
            return f"expected a number {word} {bound:g}{_HINTS.get(name, '')}"
    return None


def _fault_of_choice(name: str, value: Any, key: ConfigKey) -> str | None:
    rule = key.rule
    for item in value if isinstance(value, list) else [value]:
        if rule.own and is_place(item):
            check_place(item, name)
        elif item not in rule.choices or isinstance(item, bool):
            known = dict.fromkeys([*(["null"] if key.optional else []), *map(str, rule.choices)])
            own = ", or a function of your own: FILE.py:FUNCTION or MODULE:FUNCTION" if rule.own else ""
            return f"expected one of {', '.join(known)}{own}"
    return None


def _pairs(cfg: DictConfig) -> Iterator[Fault]:
    """Check the run directory's name, lists of two numbers, and keys that exclude or need each other."""
    grpo, shaping = cfg.trainer.grpo, cfg.trainer.grpo.shaping
    prefix = "trainer.grpo.shaping"
    if not cfg.run_dir:
        yield "run_dir", "expected a folder; an empty text would be the current one. Fix: run_dir=runs/NAME"
    for name in ("cosine_correct", "cosine_wrong"):
        if len(shaping[name]) != 2:
            yield f"{prefix}.{name}", "expected two numbers: the reward at length 0 and at the longest response"
    if cfg.on_event is not None and (fault := check_command(cfg.on_event)):
        raise ConfigError(fault)
    if grpo.adaptive_entropy.enabled and grpo.entropy_coef:
        yield "trainer.grpo.entropy_coef", "expected 0 if trainer.grpo.adaptive_entropy.enabled=true"
    if not 0 <= shaping.cosine_for <= shaping.cosine_every:
        yield f"{prefix}.cosine_for", f"expected 0 to {prefix}.cosine_every={shaping.cosine_every} steps"
    if shaping.cosine_every and not shaping.cosine_for:
        yield f"{prefix}.cosine_for", f"expected at least 1 step if {prefix}.cosine_every={shaping.cosine_every}"
    betas = OmegaConf.select(cfg, "model.optim.betas")
    if betas is not None and not (len(betas) == 2 and all(isinstance(b, int | float) and 0 <= b < 1 for b in betas)):
        yield "model.optim.betas", "expected two numbers, each at least 0 and below 1"


def _schedule(cfg: DictConfig) -> Iterator[Fault]:
    """Check the learning rate's schedule against the stage's steps and the rate."""
    prefix, sched, lr = "model.optim.sched", cfg.model.optim.sched, cfg.model.optim.lr
    known, steps = [item.name for item in fields(SchedKeys)], cfg.trainer.grpo.max_steps
    for key in sched:
        if key not in known:
            yield f"{prefix}.{key}", f"not supported. Known in {prefix}: {', '.join(known)}"
    if sched.warmup_steps and sched.warmup_ratio:
        reason = f"expected 0 together with {prefix}.warmup_steps={sched.warmup_steps}. Fix: set one of them"
        yield f"{prefix}.warmup_ratio", reason
    if sched.warmup_steps > steps:
        fix = f"Fix: fewer steps, or a share: {prefix}.warmup_ratio=0.1"
        yield f"{prefix}.warmup_steps", f"expected at most trainer.grpo.max_steps={steps}. {fix}"
    if sched.min_lr and sched.name == "constant":
        fix = f"Fix: {prefix}.name=linear or cosine"
        yield f"{prefix}.min_lr", f"expected 0 if {prefix}.name=constant, which does not fall. {fix}"
    if lr is not None and sched.min_lr > lr:
        fix = f"Fix: a lower {prefix}.min_lr"
        yield f"{prefix}.min_lr", f"expected at most model.optim.lr={lr}, from which the rate falls. {fix}"


def _is_int(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _divides(cfg: DictConfig, divisor_key: str, key: str, fix: str | None = None, also: Sequence[int] = ()) -> None:
    """Raise ConfigError unless the value of `divisor_key` divides the value of `key`.

    Args:
        fix: an override that fixes it; None: `divisor_key` with the largest divisor below its value.
        also: other numbers that a proposed divisor divides.
    """
    divisor, value = OmegaConf.select(cfg, divisor_key), OmegaConf.select(cfg, key)
    if value % divisor:
        possible = [d for d in range(1, value + 1) if math.gcd(value, *also) % d == 0]
        fix = fix or f"{divisor_key}={max(d for d in possible if d < divisor)}"
        raise ConfigError(
            f"{divisor_key}={divisor} does not divide {key}={value} ({value} / {divisor} = {value / divisor:g});"
            f" possible{' here' if also else ''}: {', '.join(str(d) for d in possible if d <= 64)}. Fix: {fix}"
        )


def _model_shape(cfg: DictConfig) -> Iterator[Fault]:
    heads, hidden = cfg.model.num_attention_heads, cfg.model.hidden_size
    if cfg.model.get("kv_channels") is None:
        _divides(cfg, "model.num_attention_heads", "model.hidden_size")
        if (hidden // heads) % 2:
            yield "model.hidden_size", f"expected an even head size; got {hidden} / {heads} = {hidden // heads}"
    _divides(cfg, "model.num_query_groups", "model.num_attention_heads")


def _layout(cfg: DictConfig) -> Iterator[Fault]:
    """Check tensor, pipeline and data parallel sizes against the model and the number of ranks."""
    model, tp_key, pp_key = cfg.model, "model.tensor_model_parallel_size", "model.pipeline_model_parallel_size"
    tp, pp = model.tensor_model_parallel_size, model.pipeline_model_parallel_size
    divided = (
        "num_attention_heads",
        "num_query_groups",
        "ffn_hidden_size",
        "hidden_size",
        "make_vocab_size_divisible_by",
    )
    ranks = cfg.trainer.num_nodes * cfg.trainer.devices
    others = [*(model[key] for key in divided), ranks if ranks % pp else ranks // pp]
    for key in divided:
        _divides(cfg, tp_key, f"model.{key}", also=others)
    _divides(cfg, pp_key, "model.num_layers")
    if model.get("virtual_pipeline_model_parallel_size"):
        reason = "expected null, because virtual stages are not supported"
        yield "model.virtual_pipeline_model_parallel_size", reason
    if model.get("sequence_parallel"):
        if tp == 1:
            fix = f"Fix: model.sequence_parallel=false, or {tp_key}=2"
            yield "model.sequence_parallel", f"needs {tp_key} of 2 or more; got 1. {fix}"
        _divides(cfg, tp_key, "trainer.grpo.context_tokens")
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
    return f"{fix} model.sequence_parallel=false" if model.get("sequence_parallel") else fix


def _kernels(cfg: DictConfig) -> Iterator[Fault]:
    """Check the precision, and the keys that need Transformer Engine or a fused rotary embedding."""
    model, te = cfg.model, cfg.model.get("transformer_engine")
    if te and cfg.trainer.accelerator == "cpu" and find_spec("transformer_engine") is None:
        yield "model.transformer_engine", "needs a GPU, but trainer.accelerator is cpu. Fix: set it to false"
    precision, o2 = cfg.trainer.precision, bool(model.get("megatron_amp_O2"))
    if o2 != (half := str(precision).startswith("bf16")):
        meaning = "otherwise the model stays float32" if half else "true means bf16 weights with float32 master weights"
        yield "model.megatron_amp_O2", f"expected {shown(half)} if trainer.precision={precision}; {meaning}"
    if model.get("packed_sequences") and not (te or model.get("apply_rope_fusion")):
        fix = "Fix: set one of them, or model.packed_sequences=false"
        yield "model.packed_sequences", f"needs model.transformer_engine=true or model.apply_rope_fusion=true. {fix}"
    if model.get("fp8") and not te:
        yield "model.fp8", "needs Transformer Engine. Fix: model.transformer_engine=true, or model.fp8=null"
    if model.get("fp8") and "fp8_recipe" in model and model.fp8_recipe is None:
        fix = "Fix: model.fp8_recipe=tensorwise"
        yield "model.fp8_recipe", f"expected a recipe for the scales of model.fp8={model.fp8}. {fix}"


def _batch(cfg: DictConfig) -> Iterator[Fault]:
    """Check prompts, mini-batches and ranks.

    The size of a micro-batch need not divide anything, because the last micro-batch may be smaller.
    """
    grpo, ranks = cfg.trainer.grpo, num_data_ranks(cfg)
    prompts, updates, samples = grpo.prompts_per_step, grpo.updates_per_step, grpo.samples_per_prompt
    _divides(cfg, "trainer.grpo.updates_per_step", "trainer.grpo.prompts_per_step")
    rows = prompts // updates * samples
    if rows < ranks:
        least = updates * -(-ranks // samples)
        raise ConfigError(
            f"trainer.grpo.prompts_per_step={prompts} / trainer.grpo.updates_per_step={updates} x"
            f" trainer.grpo.samples_per_prompt={samples} = {rows} responses per update; expected at least one for each"
            f" of the {ranks} data-parallel ranks. Fix: trainer.grpo.prompts_per_step={least}"
        )
    if samples < 2:
        yield (
            "trainer.grpo.samples_per_prompt",
            f"expected at least 2; trainer.grpo.advantage={grpo.advantage} compares the responses to one prompt, so"
            " with a single response every advantage is 0",
        )
    if grpo.advantage == "maxrl":
        for key in ("unfinished_penalty", "shaping.overlong_tokens", "shaping.cosine"):
            if value := OmegaConf.select(grpo, key):
                off = "false" if value is True else "0"
                yield (
                    f"trainer.grpo.{key}",
                    f"expected {off}: trainer.grpo.advantage=maxrl divides by the mean reward of a group, which such a"
                    f" reward may make negative. Fix: trainer.grpo.{key}={off}",
                )
    if grpo.correction.cap is not None and grpo.correction.floor > grpo.correction.cap:
        reason = f"expected at most trainer.grpo.correction.cap={grpo.correction.cap}"
        yield "trainer.grpo.correction.floor", reason
    if grpo.old_logp == "engine":
        start = "expected trainer, because"
        if grpo.correction.kind != "none":
            fix = f"trainer.grpo.correction.kind={grpo.correction.kind} weighs pi_old / pi_engine, which are one here"
            yield "trainer.grpo.old_logp", f"{start} {fix}. Fix: trainer.grpo.correction.kind=none, or old_logp=trainer"
        if grpo.adaptive_entropy.enabled:
            needs = "trainer.grpo.adaptive_entropy needs the trainer's entropy in each step"
            yield "trainer.grpo.old_logp", f"{start} {needs}. Fix: old_logp=trainer, or entropy_coef instead"


def _context(cfg: DictConfig) -> Iterator[Fault]:
    context, longest = cfg.trainer.grpo.context_tokens, cfg.trainer.grpo.max_response_tokens
    for key in ("max_position_embeddings", "encoder_seq_length"):
        limit = cfg.model.get(key)
        if limit is not None and context > limit:
            hint = "in a stage with long context chain.long_context_tokens sets it"
            yield "trainer.grpo.context_tokens", f"expected at most model.{key}={limit}; {hint}"
    if longest is not None and longest >= context:
        reason = f"expected less than trainer.grpo.context_tokens={context}, to leave room for the prompt"
        yield "trainer.grpo.max_response_tokens", reason
    budget = cfg.model.get("micro_batch_tokens")
    if budget is not None and (not _is_int(budget) or budget < context):
        yield (
            "model.micro_batch_tokens",
            f"expected a whole number, at least trainer.grpo.context_tokens={context}, so that the longest sequence"
            f" fits. Fix: model.micro_batch_tokens={context}, or null for model.micro_batch_size responses",
        )


def _engines(cfg: DictConfig) -> Iterator[Fault]:
    rollout, nodes, devices = cfg.rollout, cfg.trainer.num_nodes, cfg.trainer.devices
    engines, tp, heads = rollout.engines, rollout.tensor_parallel_size, cfg.model.num_attention_heads
    each_node = max(nodes, engines // nodes * nodes)
    _divides(cfg, "trainer.num_nodes", "rollout.engines", f"rollout.engines={each_node}")
    gpus = [cfg.launch.gpus_per_node or devices] if cfg.trainer.accelerator == "gpu" else []
    _divides(cfg, "rollout.tensor_parallel_size", "model.num_attention_heads", also=gpus)
    groups = cfg.model.num_query_groups
    if groups % tp and tp % groups:  # vLLM splits the key-value heads, or copies each
        fits = math.gcd(heads, groups, *gpus)
        reason = f"expected a divisor or a multiple of model.num_query_groups={groups}"
        yield "rollout.tensor_parallel_size", f"{reason}. Fix: rollout.tensor_parallel_size={fits}"
    needed = engines * tp
    if rollout.own_devices and rollout.sleep is not None:
        reason = "expected null if rollout.own_devices=true, because nothing else uses the engines' memory"
        yield "rollout.sleep", reason
    most, each = cfg.launch.gpus_per_node, node_devices(cfg)
    if cfg.trainer.accelerator == "gpu" and most is not None and each > most:
        fix, room = f"trainer.devices={most}", (most - devices) // tp * nodes
        if rollout.own_devices:
            fix = f"rollout.engines={room}" if room > 0 else f"rollout.own_devices=false {fix}"
        raise ConfigError(
            f"{devices_words(cfg)} = {each} GPUs per node (rollout.engines={engines}, trainer.num_nodes={nodes}):"
            f" expected at most launch.gpus_per_node={most}, the GPUs that a node has. Fix: {fix}"
        )
    if cfg.trainer.accelerator == "gpu" and not rollout.own_devices and needed > nodes * devices:
        fix = f"rollout.engines={devices // tp * nodes}"
        if tp > devices:
            fix = f"rollout.tensor_parallel_size={math.gcd(heads, devices)}"
        raise ConfigError(
            f"rollout.engines={engines} x rollout.tensor_parallel_size={tp} = {needed} GPUs: expected at most"
            f" trainer.num_nodes={nodes} x trainer.devices={devices} = {nodes * devices}. Fix: {fix}"
        )


def _one_step_off(cfg: DictConfig) -> Iterator[Fault]:
    """Check the keys that `rollout.own_devices` (engines with their own devices) needs.

    These engines work one step ahead, so each batch is one weight version old.  `dynamic_sampling.max_staleness` must
    allow this age, and `correction.kind` must not be none, unless pi_old is the engine's policy.
    """
    grpo, key = cfg.trainer.grpo, "rollout.own_devices"
    if not cfg.rollout.own_devices:
        return
    if grpo.dynamic_sampling.max_staleness < 1:
        yield key, "each batch is one weight version old. Fix: trainer.grpo.dynamic_sampling.max_staleness=1"
    if grpo.correction.kind == "none" and grpo.old_logp == "trainer":
        yield key, "each batch is from older weights. Fix: a trainer.grpo.correction.kind other than none"


def _resets(cfg: DictConfig) -> Iterator[Fault]:
    resets, last = cfg.trainer.resets, cfg.trainer.grpo.max_steps
    for key in ("trainer.resets.at_steps", "trainer.trace_steps"):
        if outside := [step for step in OmegaConf.select(cfg, key) if not 1 <= step <= last]:
            fix = "Fix: other steps, or more of them (trainer.grpo.max_steps)"
            yield key, f"expected steps of the run, 1 to {last}; got {outside[0]}. {fix}"
    if len(set(resets.at_steps)) < len(resets.at_steps):
        yield "trainer.resets.at_steps", "expected each step once; got a step twice"
    if resets.roll_back and cfg.trainer.grpo.keep_best == 0:
        need = "because trainer.resets.roll_back=true needs the checkpoint of the best validation"
        yield "trainer.grpo.keep_best", f"expected at least 1, {need}"
    if resets.mode in ("auto", "stop") and not resets.rules.asks:
        rules, fix = ", ".join((*RESET_RULES, *ADVISING_RULES)), "Fix: name one, or trainer.resets.mode=advise"
        reason = f"expected one or more of {rules} if trainer.resets.mode={resets.mode}. {fix}"
        yield "trainer.resets.rules.asks", reason
    yield from _trials(cfg)


def _trials(cfg: DictConfig) -> Iterator[Fault]:
    resets, grpo = cfg.trainer.resets, cfg.trainer.grpo
    if resets.mode != "trial":
        return
    if not cfg.data.validation:
        yield "data.validation", "expected held-out prompts, which decide the trials of trainer.resets.mode=trial"
    if resets.trial_steps < grpo.validate_every:
        fix = f"Fix: trainer.resets.trial_steps={4 * grpo.validate_every}, or more validations"
        yield (
            "trainer.resets.trial_steps",
            f"expected at least trainer.grpo.validate_every={grpo.validate_every}. {fix}",
        )
    if not (resets.rules.asks or resets.at_steps or resets.every):
        fix = "Fix: trainer.resets.every=500"
        yield "trainer.resets.mode", f"expected a rule (rules.asks), at_steps or every that asks for a trial. {fix}"


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
        reason = "expected a Hugging Face model folder, the name of a model on the hub, or null for random weights"
        missing = f"{folder.absolute()} does not exist. Fix: the path of such a folder"
        raise _wrong(cfg, key, no_config(folder) if folder.exists() else f"{reason}; {missing}")
    if not (folder / "config.json").is_file():
        raise _wrong(cfg, key, no_config(folder))
    if need_weights and (fault := missing_weights(folder)):
        raise ConfigError(f"{key}={fault}")
    try:
        return read_config(folder)
    except ConfigError as error:
        raise _wrong(cfg, key, str(error)) from error


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
    own = cfg.model.get("kv_channels")
    if cfg.trainer.accelerator != "cpu" or (own or hidden // heads) in CPU_HEAD_SIZES:
        return
    key = f"model.kv_channels={own}" if own else f"model.hidden_size={hidden}"
    got = "" if own else f"; got {hidden} / model.num_attention_heads={heads} = {hidden // heads}"
    raise ConfigError(
        f"{key}: expected attention heads of {', '.join(map(str, CPU_HEAD_SIZES))} values, for which vLLM has kernels"
        f" on CPUs (trainer.accelerator=cpu){got}. Fix: another model, or a cluster with GPUs"
    )


def _data(cfg: DictConfig) -> Iterator[Fault]:
    if not cfg.data.train:
        reason = "expected at least one source to train on"
        yield "data.train", f"{reason}. Fix: data=NAME, or a list of sources, each with name and path or generator"
    if cfg.data.retire_rate < 1 and cfg.data.retire_after is None:
        yield "data.retire_rate", "expected data.retire_after=N together with this key; got null"
    longest, context = cfg.data.max_prompt_tokens, cfg.trainer.grpo.context_tokens
    if longest is not None and longest >= context:
        reason = f"expected less than trainer.grpo.context_tokens={context}, to leave room for a response"
        yield "data.max_prompt_tokens", reason
    for task, template in cfg.data.templates.items():
        if template.count("{problem}") != 1:
            yield f"data.templates.{task}", "expected a text with {problem} once"
    for part in ("train", "validation"):
        names: set[str] = set()
        for index, source in enumerate(cfg.data[part]):
            yield from _source(f"data.{part}.{index}", source)
            if source.name in names:
                yield f"data.{part}.{index}.name", "expected a unique name; got the name of another source"
            names.add(source.name)


def _source(key: str, source: DictConfig) -> Iterator[Fault]:
    if (source.path is None) == (source.generator is None):
        both = "both" if source.path else "neither"
        raise ConfigError(f"{key} ({source.name}): expected either path or generator; got {both}")
    package, colon, dataset = str(source.generator).partition(":")
    if source.generator not in (None, *GENERATORS) and package + colon != "reasoning_gym:":
        yield f"{key}.generator", f"expected one of {', '.join(GENERATORS)}, reasoning_gym:DATASET"
    if colon and (known := reasoning_gym_names()) and dataset not in known:
        near = [f"{package}:{name}" for name in difflib.get_close_matches(dataset, known, n=3)]
        meant = f"Did you mean {' or '.join(near)}?" if near else f"Known: {', '.join(known)}"
        yield f"{key}.generator", f"expected a dataset of reasoning-gym. {meant}"
    if source.generator is not None and source.size is None:
        yield f"{key}.size", "expected the number of records that the generator makes"


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
