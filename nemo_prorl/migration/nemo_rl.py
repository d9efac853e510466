"""The rules of NeMo-RL: they take settings out of `Converted.rest`, and set the overrides that these mean."""

import re
from typing import Any

from nemo_prorl.errors import ConfigError
from nemo_prorl.migration.converted import (
    ADVANTAGE,
    AGGREGATION,
    CONTEXT,
    ENTROPY,
    ESTIMATOR,
    GRPO,
    KL,
    LOSS,
    PROMPTS,
    SAMPLING,
    VALIDATE_EVERY,
    Converted,
    set_bf16,
    set_clip,
    set_correction,
    set_draws,
    set_kl_of_rewards,
    set_overlong,
    set_updates,
    set_validation,
    set_wandb,
    tell_cispo,
    tell_data,
    tell_layout,
    tell_token_weights,
)
from nemo_prorl.migration.files import BASE
from nemo_prorl.migration.names import table
from nemo_prorl.migration.schedules import nemo_rl_schedule

_DATA = ".dataset_name", ".data_path", ".prompt_file", ".system_prompt_file"


def nemo_rl(made: Converted) -> None:
    take = made.take
    if any(key.startswith("ppo.") for key in made.given):
        raise ConfigError("ppo: expected settings of run_grpo; got those of run_ppo, which also trains a value model")
    for base in take(BASE, []):
        made.notes.append(f"{BASE}={base} is not beside the file: {table('nemo_rl')['source']} takes its place")
    _nemo_rl_optimizer(made)
    set_clip(made, take("loss_fn.ratio_clip_min"), made.overrides.get(f"{GRPO}.clip_high"))
    made.overrides[ENTROPY] = 0
    made.overrides[AGGREGATION] = "token" if take("loss_fn.token_level_loss") else "sequence"
    of_responses, is_cispo = take("loss_fn.sequence_level_importance_ratios"), take("loss_fn.use_cispo")
    made.overrides[LOSS] = "gspo" if of_responses else "cispo" if is_cispo else "clip"
    tell_cispo(made, "loss_fn.use_cispo")
    _nemo_rl_advantage(made)
    whole = take("policy.train_global_batch_size")
    if whole is not None:
        set_updates(made, whole, "train_global_batch_size")
    _nemo_rl_correction(made)
    batches, multiplier = take("grpo.dynamic_sampling_max_gen_batches"), take("grpo.batch_multiplier")
    set_draws(made, (batches or 0) * (multiplier or 1))
    if made.overrides.get(f"{SAMPLING}.enabled") and PROMPTS in made.overrides:
        made.drawn = made.overrides[PROMPTS] * (multiplier or 1)
    _nemo_rl_shaping(made, _nemo_rl_scale(made))
    _nemo_rl_kl(made)
    _nemo_rl_async(made)
    if take("checkpointing.enabled") is False:
        every = f"{GRPO}.checkpoint_every"
        made.overrides.pop(every, None)
        made.notes.append(f"checkpointing.enabled=false means never; here {every} keeps its own value")
    if VALIDATE_EVERY in made.overrides:
        samples = (take("data.validation.repeat") or 1) * made.overrides.pop(f"{GRPO}.validation_samples", 1)
        set_validation(
            made, samples, made.overrides.get(f"{GRPO}.temperature"), made.rest.get("policy.generation.top_p", 1)
        )
    _nemo_rl_sizes(made)
    _nemo_rl_precision(made, take("policy.precision"))
    if made.rest.get("logger.wandb_enabled"):
        set_wandb(made, take("logger.wandb.project"))
    tell_data(made, *[key for key in made.rest if key.endswith(_DATA)])


def _nemo_rl_sizes(made: Converted) -> None:
    """Set the engine's context, and leave to the user what Megatron and the tokenizer get beside their sizes."""
    on, model = "policy.megatron_cfg", made.overrides.get("pretrained_checkpoint.restore_from_path")
    made.take(f"{on}.scheduler.start_weight_decay")  # with a constant weight decay it is the end's
    if not made.rest.get(f"{on}.mtp_loss_scaling_factor", 1):
        made.take(f"{on}.mtp_num_layers")
    neutral = table("nemo_rl")["neutral"]
    left = [key for key in made.rest if _LEFT.match(key) and key in made.given and key not in neutral]
    made.left |= {key: made.take(key) for key in left}
    longest, context = made.take("policy.generation.vllm_cfg.max_model_len"), made.overrides.get(CONTEXT)
    if isinstance(longest, int) and isinstance(context, int) and longest < context:
        made.overrides[CONTEXT] = longest
        made.notes.append(f"policy.generation.vllm_cfg.max_model_len={longest} ends a response before {context} tokens")
    if (name := made.take("policy.tokenizer.name")) not in (None, model):
        made.differs.append(f"policy.tokenizer.name={name}: the model's own tokenizer is used here")


def _nemo_rl_precision(made: Converted, precision: Any) -> None:
    if precision in ("bfloat16", "float32"):
        set_bf16(made, precision == "bfloat16")
    elif precision is not None:
        made.unknown["trainer.precision"] = f"policy.precision={precision}: it is bf16 or 32 here"


def _nemo_rl_kl(made: Converted) -> None:
    key, coefficient, estimator = "loss_fn.use_kl_in_reward", made.overrides.get(KL), made.overrides.get(ESTIMATOR)
    keys = "kl_input_clamp_value", "kl_output_clamp_value"
    clamps = {key: made.take(f"loss_fn.{key}") for key in keys}
    in_rewards = made.rest.get(key) is True and made.take(key)
    if in_rewards and made.overrides.get(ADVANTAGE) == "reinforce_pp_baseline":
        set_kl_of_rewards(made, key, coefficient, str(estimator), is_scaled=True, is_summed=False)
    elif in_rewards and coefficient:  # grpo's advantages leave it out
        made.overrides[KL] = 0
        made.differs.append(f"{key}: only adv_estimator.name=reinforce_plus_plus subtracts the KL there: {KL}=0 is set")
    elif coefficient:
        same = {"kl_input_clamp_value": 20.0} if estimator == "k3" else {}  # the clamp of k3 here
        bounds = {key: value for key, value in clamps.items() if value not in (None, same.get(key))}
        text = "a token beyond has no gradient of the KL there"
        made.differs += [f"{key}={value}: {text}" for key, value in bounds.items()]
        made.differs.append(
            "reference_policy_kl_penalty: the gradient of the KL term also weighs tokens by their probability there"
            " (arXiv 2506.09477)"
        )


def _nemo_rl_correction(made: Converted) -> None:
    take = made.take
    method, key = take("loss_fn.truncated_importance_sampling_type"), "truncated_importance_sampling_type"
    ratio = "loss_fn.truncated_importance_sampling_ratio"
    cap, floor = take(ratio), take(f"{ratio}_min")
    corrects = take("loss_fn.use_importance_sampling_correction")
    set_correction(made, f"{key}={method}", str(method or "tis") if corrects else "none", floor, cap)
    if corrects and made.overrides[LOSS] == "gspo":
        made.differs.append(
            f"{key}={method}: with sequence_level_importance_ratios the ratio is the product over the response there"
        )


def _nemo_rl_async(made: Converted) -> None:
    """Leave generation ahead of the trainer to the user: it needs GPUs of its own."""
    older, sampler = "grpo.async_grpo", "async_rl.sampler"
    is_on, name = made.take(f"{older}.enabled"), made.take(f"{sampler}.name")
    ages = f"{older}.max_trajectory_age_steps", f"{sampler}.max_staleness_versions", f"{sampler}.max_lookahead_versions"
    given = {key: value for key in ages if (value := made.take(key)) is not None}
    of_sampler = [value for key, value in given.items() if key.startswith(sampler)]
    if (not is_on and name is None) or (name is not None and of_sampler == [0]):
        made.needless += [f"{key}={value}" for key, value in given.items()]
        return
    key, value = (f"{older}.enabled", is_on) if is_on else (f"{sampler}.name", name)
    told = "".join(f", {key}={value}" for key, value in given.items())
    made.unknown["rollout.own_devices"] = (
        f"{key}={value}{told}: rollout.own_devices=true generates one step ahead here, never more, on GPUs of its own:"
        " choose trainer.devices and rollout.engines with it, as cluster=h100_4x8_split does (rollout.sleep=null)"
    )


def _nemo_rl_scale(made: Converted) -> float:
    """Return the factor by which differences of rewards are larger there; tell what else it changes."""
    key = "grpo.reward_scaling"
    is_on = made.take(f"{key}.enabled")
    source, target = ((made.take(f"{key}.{side}_min"), made.take(f"{key}.{side}_max")) for side in ("source", "target"))
    if not is_on:
        return 1.0
    if not all(isinstance(bound, int | float) for bound in (*source, *target)):
        made.unknown[f"{key}.enabled"] = (
            f"rewards are scaled there, between bounds without a value here: {source}, {target}"
        )
        return 1.0
    factor = (target[1] - target[0]) / (source[1] - source[0])
    text = (
        f"{key}.enabled=True: rewards from {source[0]:g} to {source[1]:g} become {target[0]:g} to {target[1]:g} there,"
    )
    if made.overrides[ADVANTAGE] in ("group_norm", "reinforce_pp_baseline"):
        made.differs.append(f"{text} and stay here: a std divides the factor {factor:g} out of the advantages")
    else:
        made.unknown["rewards.functions.TASK"] = (
            f"{text} and advantages without a std with them: let the reward function do it, or divide {KL} and"
            f" trainer.gradient_clip_val by {factor:g}"
        )
    return factor


def _nemo_rl_shaping(made: Converted, scale: float) -> None:
    lengths = "overlong_buffer_length", "overlong_buffer_penalty", "max_response_length"
    keys = "enabled", *lengths, "stop_properly_penalty_coef"
    shaping = {key: made.take(f"grpo.reward_shaping.{key}") for key in keys}
    if shaping["enabled"]:
        factor = shaping["stop_properly_penalty_coef"]
        if factor is not None:  # NeMo-RL then leaves the other penalty out
            made.overrides[f"{GRPO}.unfinished_factor"] = factor
        else:
            penalty, most = shaping["overlong_buffer_penalty"], "max_response_length"
            if scale != 1:
                made.differs.append(
                    f"grpo.reward_shaping.overlong_buffer_penalty={penalty}: divided by the factor {scale:g} of"
                    " grpo.reward_scaling here"
                )
            penalty = penalty if penalty is None else penalty / scale
            set_overlong(made, f"grpo.reward_shaping.{most}", shaping["overlong_buffer_length"], penalty, shaping[most])


_ADAMW = (".lr", ".weight_decay", ".betas", ".eps", ".foreach", ".fused")  # arguments of the optimizer
_OF_MEGATRON = (*_ADAMW, ".adam_beta1", ".adam_beta2", ".adam_eps", ".min_lr", ".clip_grad", ".optimizer")
_LEFT = re.compile(  # no sizes: they may change the numbers
    r"policy\.megatron_cfg\.(model_overrides|(optimizer|scheduler)\.(?!use_|overlap_|optimizer|params_dtype|bf16|sgd_))"
)


def _nemo_rl_optimizer(made: Converted) -> None:
    """Set the optimizer from the keys of the back end that is on, and drop those of the other one."""
    has_megatron = made.take("policy.megatron_cfg.enabled")
    on, off = "policy.megatron_cfg", "policy.dtensor_cfg"
    prefix = f"{on}.optimizer" if has_megatron else "policy.optimizer.kwargs"
    own = [key for key in made.rest if key.startswith(f"{prefix}.")]
    ends, neutral = _OF_MEGATRON if has_megatron else _ADAMW, table("nemo_rl")["neutral"]
    found = {key.rsplit(".", 1)[-1]: made.take(key) for key in own if key.endswith(ends)}
    is_adamw = made.rest.get("policy.optimizer.name", "torch.optim.AdamW") == "torch.optim.AdamW"
    for key in [key for key in own if key in made.rest and key not in neutral and not has_megatron]:
        if is_adamw:
            made.misspelt[f"{key}={made.take(key)}"] = "AdamW has lr, weight_decay, betas and eps"
        else:
            made.left[key] = made.take(key)
    if not has_megatron and (size := made.take(f"{off}.tensor_parallel_size")) is not None:
        made.overrides |= {"model.tensor_model_parallel_size": size, "model.pipeline_model_parallel_size": 1}
    parts = "context_parallel_size", "cpu_offload"
    layout = {f"{on if has_megatron else off}.{key}" for key in parts} & made.rest.keys()
    tell_layout(made, "" if has_megatron else "NeMo-RL's DTensor", {key: made.take(key) for key in sorted(layout)})
    if made.take(f"{on if has_megatron else off}.activation_checkpointing"):
        made.notes.append("activation_checkpointing: add +model.activations_checkpoint_granularity=full")
    names = {"model.optim.lr": "lr", "model.optim.weight_decay": "weight_decay", "model.optim.betas": "betas"}
    if has_megatron:
        found["betas"] = [found.get("adam_beta1"), found.get("adam_beta2")]
    names["model.optim.eps"] = "adam_eps" if has_megatron else "eps"
    if has_megatron:
        names["trainer.gradient_clip_val"] = "clip_grad"
        decay = made.take(f"{on}.scheduler.end_weight_decay")  # Megatron's schedule sets it
        found |= {"weight_decay": decay} if isinstance(decay, int | float) else {}
        if (kind := found.get("optimizer", "adam")) != "adam":
            made.unknown[f"{prefix}.optimizer={kind}"] = "the optimizer is AdamW here"
    made.overrides |= {ours: found[theirs] for ours, theirs in names.items() if theirs in found}
    nemo_rl_schedule(made, has_megatron, found.get("min_lr"))
    unused = (off, "policy.optimizer", "policy.scheduler") if has_megatron else (on,)
    for key in ("lr", "weight_decay"):
        other = f"policy.optimizer.kwargs.{key}" if has_megatron else f"{on}.optimizer.{key}"
        if other in made.given and made.rest.get(other) not in (None, found.get(key)):
            made.notes.append(
                f"{other}={made.rest[other]} has no effect there, because {on}.enabled={str(has_megatron).lower()}"
            )
    made.rest = {key: value for key, value in made.rest.items() if not key.startswith(unused)}


def _nemo_rl_advantage(made: Converted) -> None:
    take, own = made.take, "grpo.adv_estimator"
    kind, minus_baseline = take(f"{own}.name"), take(f"{own}.minus_baseline")
    options = {}
    for key in ("normalize_rewards", "use_leave_one_out_baseline"):
        general, special = take(f"grpo.{key}"), take(f"{own}.{key}")
        options[key] = general if special is None else special
    normalizes, leaves_one_out = options.values()
    if kind == "reinforce_plus_plus" and minus_baseline:
        made.overrides[ADVANTAGE] = "reinforce_pp_baseline"
        tell_token_weights(made, f"{own}.name={kind}")
    elif kind != "grpo":
        nearest = "group_norm" if kind == "gdpo" else "reinforce_pp_baseline"
        made.choose(ADVANTAGE, f"{own}.name", kind, {}, nearest)
    elif normalizes:
        made.overrides[ADVANTAGE] = "group_norm"
        if leaves_one_out:
            made.differs.append(
                "use_leave_one_out_baseline with normalize_rewards: mean and std are those of the other responses"
                " there, those of the whole group here"
            )
    elif leaves_one_out:
        made.overrides[ADVANTAGE] = "leave_one_out"
    else:
        made.overrides[ADVANTAGE] = "mean_only"
