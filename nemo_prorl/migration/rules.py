"""Conversion of another trainer's settings into overrides of this project."""

import ast
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from nemo_prorl.migration.files import Expression
from nemo_prorl.migration.names import names

_CLIP = "trainer.grpo.clip_low", "trainer.grpo.clip_high"
_ESTIMATORS = {"kl": "k1", "k1": "k1", "mse": "k2", "k2": "k2", "low_var_kl": "k3", "k3": "k3"}
_ADVANTAGES = {
    "grpo": "group_norm",
    "group_norm": "group_norm",
    "rloo": "leave_one_out",
    "reinforce_plus_plus_baseline": "reinforce_pp_baseline",
    "reinforce_baseline": "reinforce_pp_baseline",
}
_AGGREGATIONS = {
    "grpo": "sequence",
    "bnpo": "token",
    "dapo": "token",
    "dr_grpo": "constant",
    "token-mean": "token",
    "seq-mean-token-mean": "sequence",
    "seq-mean-token-sum-norm": "constant",
}
# Keys that need no counterpart: what they switch on is always on here, or has no effect on the result.
_ALWAYS = {
    "use_vllm",
    "vllm_mode",
    "critic_warmup",
    "use_remove_padding",
    "packing_samples",
    "use_kl_loss",
    "project_name",
    "experiment_name",
    "run_name",
    "logging_steps",
    "colocate_all_models",
    "vllm_sync_backend",
    "flash_attn",
    "save_path",
    "save_hf_ckpt",
    "filter_overlong_prompts",
    "truncation",
    "zero_stage",
    "use_dynamic_batch",
    "use_dynamic_bsz",
    "gamma",
    "logger.log_dir",
}
# Key here: note if the file does not set it.
_IF_ABSENT = {
    "trainer.grpo.dynamic_sampling.enabled": "dynamic sampling is on by default: to train without it, as this file"
    " does, add trainer.grpo.dynamic_sampling.enabled=false",
    "run_dir": "run_dir=DIR names the folder of the run; without it, the folder is runs/laptop",
}
_RECOMPUTE = "enable_gradient_checkpointing", "gradient_checkpointing"
# Settings of a Python file from which a rule below derives a key.
_DERIVED = {
    "per_device_train_batch_size": "trainer.grpo.prompts_per_step",
    "gradient_accumulation_steps": "trainer.grpo.prompts_per_step",
    "generation_batch_size": "trainer.grpo.prompts_per_step",
    "loss_type": "trainer.grpo.aggregation",
    "bf16": "trainer.precision",
    "model": "pretrained_checkpoint.restore_from_path",
}
# Settings that a note quotes, so that they need not be literals.
_QUOTED = "reward_funcs", "reward_weights", "train_dataset", "eval_dataset", "dataset_name"


@dataclass
class Converted:
    """The result of a conversion: overrides, notes, and the settings that have no counterpart in this project.

    Attributes:
        overrides: {key of this project: value}.
        notes: sentences about conversions that the user must look at.
        left: {key of the other trainer: value} of the settings without a counterpart.
    """

    overrides: dict[str, Any] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    left: dict[str, Any] = field(default_factory=dict)


def convert(trainer: str, given: Mapping[str, Any]) -> Converted:
    """Convert another trainer's settings into overrides of this project.

    Args:
        trainer: the other trainer by its key in names.yaml, such as `nemo_rl`.
        given: {dotted key: value} of that trainer's configuration.
    """
    computed = {key: value for key, value in given.items() if isinstance(value, Expression)}
    made, rest = Converted(), {k: v for k, v in given.items() if v is not None and k not in computed}
    for theirs, ours in (_DERIVED | names()[trainer]).items():
        if theirs in computed:
            made.overrides[ours] = None  # no default may take its place
            made.notes.append(f"{theirs}={computed.pop(theirs)} is not a literal: set {ours} yourself")
    for theirs, ours in names()[trainer].items():
        if theirs in rest:
            value = rest.pop(theirs)
            if made.overrides.get(ours) is None:
                made.overrides[ours] = value
    rest |= {key: computed.pop(key) for key in _QUOTED if key in computed}
    _RULES[trainer](rest, made)
    made.overrides = {key: value for key, value in made.overrides.items() if value is not None}
    _context(made.overrides)
    _devices(made.overrides)
    if (value := made.overrides.get("trainer.grpo.kl_estimator")) is not None:
        made.overrides["trainer.grpo.kl_estimator"] = _ESTIMATORS.get(str(value), value)
    made.notes += [note for key, note in _IF_ABSENT.items() if key not in made.overrides]
    made.notes.append("cluster=h100_4x8 is for GPUs; without a GPU take cluster=laptop")
    rest |= computed
    for key in [one for one in rest if one.rsplit(".", 1)[-1] in _RECOMPUTE]:
        made.notes.append(
            f"{key}={rest.pop(key)}: add +model.activations_checkpoint_granularity=full if memory is short"
        )
    if needless := [f"{key}={rest.pop(key)}" for key in list(rest) if _needs_nothing(key, rest[key])]:
        made.notes.append(f"no override needed: {', '.join(needless)}")
    made.left = rest
    return made


def _needs_nothing(key: str, value: Any) -> bool:
    if key.endswith("rollout.name"):
        return str(value) == "vllm"
    return key in _ALWAYS or key.rsplit(".", 1)[-1] in _ALWAYS


def _devices(overrides: dict[str, Any]) -> None:
    """Set the numbers of nodes and engines that fit the GPUs and the tensor parallelism; keep those that are set."""
    nodes, devices, tensor_parallel = "trainer.num_nodes", "trainer.devices", "rollout.tensor_parallel_size"
    if devices in overrides:
        overrides.setdefault(nodes, 1)  # the default of the other trainers
    elif nodes not in overrides and overrides.get(tensor_parallel, 1) == 1:
        return
    sizes = overrides.get(nodes, 4), overrides.get(devices, 8), overrides.get(tensor_parallel, 1)  # 4 x 8: the cluster
    if all(isinstance(size, int) and size > 0 for size in sizes):
        overrides.setdefault("rollout.engines", max(1, sizes[0] * sizes[1] // sizes[2]))


def _context(overrides: dict[str, Any]) -> None:
    """Set the context, if not set yet, to the longest prompt plus the longest response, if both are known."""
    prompt, response = (overrides.get(key) for key in ("data.max_prompt_tokens", "trainer.grpo.max_response_tokens"))
    if isinstance(prompt, int) and isinstance(response, int):
        overrides.setdefault("trainer.grpo.context_tokens", prompt + response)


def _updates(made: Converted, samples_per_update: Any, what: str) -> None:
    """Set updates_per_step to the responses of a step divided by `samples_per_update`.

    If the division has a remainder, add a note instead.  If one of the numbers is unknown, do nothing.

    Args:
        samples_per_update: responses of one update; None if unknown.
        what: the other trainer's key for this number, which the note names.
    """
    grpo = "trainer.grpo"
    prompts, group = (made.overrides.get(f"{grpo}.{key}") for key in ("prompts_per_step", "samples_per_prompt"))
    if not (isinstance(prompts, int) and isinstance(group, int) and isinstance(samples_per_update, int)):
        return
    updates, rest = divmod(prompts * group, max(1, samples_per_update))
    if rest or not updates:
        made.notes.append(
            f"{what}: the {prompts * group} responses of a step are no multiple of {samples_per_update}; set"
            f" {grpo}.updates_per_step"
        )
    else:
        made.overrides[f"{grpo}.updates_per_step"] = updates


def _chosen(rest: dict[str, Any], made: Converted, theirs: str, ours: str, known: Mapping[str, str]) -> None:
    """Translate the name of a method, the value of the key `theirs`, and set the override `ours` to the translation.

    Then remove the key `theirs` from `rest`.  If `known` lacks the name, change nothing.

    Args:
        rest: {key of the other trainer: value} of the settings that are not converted yet.
        known: {other trainer's name of a method: this project's name}.
    """
    if str(rest.get(theirs)) in known:
        made.overrides[ours] = known[str(rest.pop(theirs))]


def _trl(rest: dict[str, Any], made: Converted) -> None:
    made.overrides.setdefault("trainer.grpo.kl_coef", 0.0)  # TRL's default
    clip = made.overrides.setdefault(_CLIP[0], 0.2)
    made.overrides.setdefault(_CLIP[1], clip)
    made.overrides.setdefault("trainer.grpo.temperature", 1.0)
    if "wandb" in str(rest.pop("report_to", "")):
        _wandb(made)
    if str(rest.get("scale_rewards")) in ("True", "group"):
        made.overrides["trainer.grpo.advantage"] = "group_norm"
        del rest["scale_rewards"]
    if (model := rest.pop("model", None)) is not None:
        made.overrides.setdefault("pretrained_checkpoint.restore_from_path", model)
    _trl_batch(rest, made)
    _chosen(rest, made, "loss_type", "trainer.grpo.aggregation", _AGGREGATIONS)
    if rest.pop("mask_truncated_completions", False):
        made.notes.append("mask_truncated_completions: trainer.grpo.unfinished_factor=0 scores them 0 instead")
    if not rest.pop("sync_ref_model", False):
        made.overrides.pop("trainer.resets.every", None)
    if rest.pop("bf16", False):
        made.overrides |= {"trainer.precision": "bf16", "model.megatron_amp_O2": True}
    if isinstance(functions := rest.get("reward_funcs"), Expression):
        _trl_rewards(functions, rest, made)
    _data(rest, made, "train_dataset", "eval_dataset", "dataset_name", "dataset_config")


def _wandb(made: Converted, project: Any = None) -> None:
    made.overrides["exp_manager.create_wandb_logger"] = True
    if project is not None:
        made.overrides["exp_manager.wandb_logger_kwargs.project"] = project
    made.notes.append("Weights & Biases: run `wandb login`, or set WANDB_API_KEY, before the start; else leave it out")


def _trl_rewards(functions: Expression, rest: dict[str, Any], made: Converted) -> None:
    """Add a note with the override for TRL's reward functions and their weights.

    Args:
        functions: the source text of a function or of a list of functions.
    """
    node = ast.parse(functions, mode="eval").body
    parts = [f"FILE.py:{one.id if isinstance(one, ast.Name) else 'FUNCTION'}" for one in getattr(node, "elts", [node])]
    weights = rest.get("reward_weights")
    if isinstance(weights, list) and len(weights) == len(parts):
        parts = [f"{part}*{weight:g}" for part, weight in zip(parts, weights, strict=True)]
    given = [f"{key}={rest.pop(key)}" for key in ("reward_funcs", "reward_weights") if key in rest]
    made.notes.append(
        f"reward ({', '.join(given)}): add 'rewards.functions.TASK={' + '.join(parts)}', with functions of one"
        ' response made as in docs/howto/reward_function.md, "A reward function of TRL"'
    )


def _trl_batch(rest: dict[str, Any], made: Converted) -> None:
    """Set the prompts and updates of a step, unless one of the sizes that they follow from is unknown."""
    device, accumulated = rest.pop("per_device_train_batch_size", 8), rest.pop("gradient_accumulation_steps", 1)
    group = made.overrides.setdefault("trainer.grpo.samples_per_prompt", 8)
    batch = device * accumulated
    generated = rest.pop("generation_batch_size", None) or device * rest.pop("steps_per_generation", accumulated)
    prompts = "trainer.grpo.prompts_per_step"
    if prompts in made.overrides or group is None:  # `convert` sets the prompts to None if a size is not a literal
        made.notes.append(f"{prompts} and trainer.grpo.updates_per_step are omitted: they follow from these sizes")
        return
    made.overrides[prompts] = max(1, generated // group)
    made.overrides["trainer.grpo.updates_per_step"] = max(1, generated // batch)
    made.notes.append(f"TRL's batch is that of one process: multiply {prompts} by the processes")
    if generated % group:
        made.notes.append(
            f"{generated} responses of a process are no whole groups of {group}: {prompts} is rounded down"
        )
    if generated > batch:
        made.notes.append(
            f"a step here makes {generated // batch} updates; TRL counts each as a step: divide trainer.grpo.max_steps"
        )


def _verl(rest: dict[str, Any], made: Converted) -> None:
    actor = "actor_rollout_ref.actor"
    if (clip := rest.pop(f"{actor}.clip_ratio", None)) is not None:
        for key in _CLIP:
            made.overrides.setdefault(key, clip)
    if not rest.pop(f"{actor}.use_kl_loss", False):
        made.overrides["trainer.grpo.kl_coef"] = 0.0
    if rest.pop("algorithm.use_kl_in_reward", False):
        made.notes.append("algorithm.use_kl_in_reward: here the KL is a term of the loss (trainer.grpo.kl_coef)")
    _chosen(rest, made, f"{actor}.kl_loss_type", "trainer.grpo.kl_estimator", _ESTIMATORS)
    _chosen(rest, made, f"{actor}.loss_agg_mode", "trainer.grpo.aggregation", _AGGREGATIONS)
    _chosen(rest, made, "algorithm.adv_estimator", "trainer.grpo.advantage", _ADVANTAGES)
    prompts = rest.pop(f"{actor}.ppo_mini_batch_size", None)
    group = made.overrides.get("trainer.grpo.samples_per_prompt", 1)
    _updates(made, prompts * group if isinstance(prompts, int) else None, "ppo_mini_batch_size")
    if not rest.pop("reward_model.overlong_buffer.enable", True):
        made.overrides.pop("trainer.grpo.shaping.overlong_tokens", None)
    _verl_rewards(rest, made)
    if loggers := rest.pop("trainer.logger", None):
        loggers = loggers if isinstance(loggers, list) else [loggers]
        if "wandb" in loggers:
            _wandb(made, rest.pop("trainer.project_name", None))
        if others := [one for one in loggers if one not in ("console", "tensorboard", "wandb")]:
            rest["trainer.logger"] = others
    _data(rest, made, "data.train_files", "data.val_files")


def _verl_rewards(rest: dict[str, Any], made: Converted) -> None:
    """Add a note with the override for verl's own reward function, if the file has one."""
    prefixes = "custom_reward_function", "reward.custom_reward_function"
    keys = [f"{prefix}.{key}" for prefix in prefixes for key in ("path", "name")]
    if given := {key: rest.pop(key) for key in keys if key in rest}:
        name = next((value for key, value in given.items() if key.endswith(".name")), "compute_score")
        made.notes.append(
            f"reward ({', '.join(f'{key}={value}' for key, value in given.items())}): add"
            " rewards.functions.TASK=FILE.py:score, where score(prompt, response, truth) calls"
            f" {name} (docs/howto/reward_function.md)"
        )


def _nemo_rl(rest: dict[str, Any], made: Converted) -> None:
    _updates(made, rest.pop("policy.train_global_batch_size", None), "train_global_batch_size")
    made.overrides["trainer.grpo.aggregation"] = "token" if rest.pop("loss_fn.token_level_loss", True) else "sequence"
    leave_one_out = rest.pop("grpo.use_leave_one_out_baseline", True)
    normalize = rest.pop("grpo.normalize_rewards", True)
    made.overrides["trainer.grpo.advantage"] = "leave_one_out" if leave_one_out and not normalize else "group_norm"
    if leave_one_out and normalize:
        made.notes.append("use_leave_one_out_baseline with normalize_rewards: the nearest is group_norm")
    if not rest.pop("loss_fn.use_importance_sampling_correction", False):
        made.overrides["trainer.grpo.correction.kind"] = "none"
    if str(rest.pop("policy.precision", "")) == "bfloat16":
        made.overrides |= {"trainer.precision": "bf16", "model.megatron_amp_O2": True}
    _data(rest, made, "data.dataset_name", "data.train_data_path")


def _openrlhf(rest: dict[str, Any], made: Converted) -> None:
    low, high = _two(rest.pop("eps_clip_low_high", None) or rest.pop("eps_clip", 0.2))
    made.overrides |= {_CLIP[0]: low, _CLIP[1]: high}
    _updates(made, rest.pop("train_batch_size", None), "train_batch_size")
    _chosen(rest, made, "advantage_estimator", "trainer.grpo.advantage", _ADVANTAGES)
    correction = "trainer.grpo.correction"
    if rest.pop("enable_vllm_is_correction", False):
        made.overrides[f"{correction}.kind"] = "icepop" if rest.pop("use_icepop", False) else "tis"
        floor, cap = _two(rest.pop("vllm_is_truncated_threshold", [0.5, 5.0]))
        made.overrides |= {f"{correction}.floor": floor, f"{correction}.cap": cap}
    else:
        made.overrides[f"{correction}.kind"] = "none"
    if rest.pop("apply_chat_template", False):
        made.overrides["data.prompt"] = "chat"
    if rest.pop("vllm_enable_sleep", False):
        made.overrides["rollout.sleep"] = 1
    _data(rest, made, "prompt_data", "eval_dataset", "input_key", "label_key")


def _two(value: Any) -> tuple[Any, Any]:
    return (value[0], value[1]) if isinstance(value, list) and len(value) > 1 else (value, value)


def _data(rest: dict[str, Any], made: Converted, *keys: str) -> None:
    """Remove these keys from `rest`, and add a note on how to make prompt records from their data."""
    found = ", ".join(f"{key}={rest.pop(key)}" for key in keys if key in rest)
    made.notes.append(
        f"data{f' ({found})' if found else ''}: make prompt records with `prorl data prepare math --from FILE --out"
        " DIR` (with `--task TASK` for a reward function of your own), then set data.train and data.validation; without"
        " data.train=[...] cluster=laptop trains on its puzzles"
    )


_RULES: dict[str, Callable[[dict[str, Any], Converted], None]] = {
    "trl": _trl,
    "verl": _verl,
    "nemo_rl": _nemo_rl,
    "openrlhf": _openrlhf,
}
