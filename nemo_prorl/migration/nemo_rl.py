"""The rules of NeMo-RL: they take settings out of `Converted.rest`, and set the overrides that these mean."""

from typing import Any

from nemo_prorl.errors import ConfigError
from nemo_prorl.migration import our, shared
from nemo_prorl.migration.converted import SAME, Converted
from nemo_prorl.migration.files import BASE
from nemo_prorl.migration.names import table
from nemo_prorl.migration.schedules import nemo_rl_schedule

_ON, _OFF = "policy.megatron_cfg", "policy.dtensor_cfg"  # the sections of the two back ends
_ADAMW = "lr", "weight_decay", "betas", "eps", "foreach", "fused"  # arguments of the optimizer
_OF_MEGATRON = "lr", "weight_decay", "adam_beta1", "adam_beta2", "adam_eps", "min_lr", "clip_grad", "optimizer"


def nemo_rl(made: Converted) -> None:
    take = made.take
    if any(key.startswith("ppo.") for key in made.given):
        raise ConfigError("ppo: expected settings of run_grpo; got those of run_ppo, which also trains a value model")
    for base in take(BASE, []):
        made.notes.append(f"{BASE}={base} is not beside the file: {table('nemo_rl')['source']} takes its place")
    _optimizer(made)
    shared.set_clip(made, take("loss_fn.ratio_clip_min"), made.overrides.get(f"{our.GRPO}.clip_high"))
    made.overrides[our.ENTROPY] = 0
    made.overrides[our.AGGREGATION] = "token" if take("loss_fn.token_level_loss") else "sequence"
    of_responses, is_cispo = take("loss_fn.sequence_level_importance_ratios"), take("loss_fn.use_cispo")
    made.overrides[our.LOSS] = "gspo" if of_responses else "cispo" if is_cispo else "clip"
    if of_responses and is_cispo:
        made.unknown[our.LOSS] = "NeMo-RL refuses use_cispo with sequence_level_importance_ratios"
    _advantage(made)
    whole = take("policy.train_global_batch_size")
    if whole is not None:
        shared.set_updates(made, whole, "train_global_batch_size")
    if made.overrides.get(our.UPDATES) == 1 and take("loss_fn.force_on_policy_ratio"):
        made.unused["loss_fn.force_on_policy_ratio"] = SAME  # the ratios of a step's only update are 1
    _correction(made)
    batches, multiplier = take("grpo.dynamic_sampling_max_gen_batches"), take("grpo.batch_multiplier")
    shared.set_draws(made, (batches or 0) * (multiplier or 1))
    if made.overrides.get(f"{our.SAMPLING}.enabled") and our.PROMPTS in made.overrides:
        made.drawn = made.overrides[our.PROMPTS] * (multiplier or 1)
    _shaping(made, _scale(made))
    _kl(made)
    _async(made)
    if take("checkpointing.enabled") is False:
        every = f"{our.GRPO}.checkpoint_every"
        made.overrides.pop(every, None)
        made.notes.append(f"checkpointing.enabled=false means never; here {our.keeps(every)}")
    if our.VALIDATE_EVERY in made.overrides:
        samples = (take("data.validation.repeat") or 1) * made.overrides.pop(f"{our.GRPO}.validation_samples", 1)
        temperature, top_p = made.overrides.get(f"{our.GRPO}.temperature"), made.rest.get("policy.generation.top_p", 1)
        shared.set_validation(made, samples, temperature, top_p, take("grpo.max_val_samples"))
    _sizes(made)
    _precision(made, take("policy.precision"))
    if made.rest.get("logger.wandb_enabled"):
        shared.set_wandb(made, take("logger.wandb.project"))


def _sizes(made: Converted) -> None:
    """Set the engine's context, and tell what Megatron and the tokenizer get in addition to their sizes."""
    if not made.rest.get(f"{_ON}.mtp_loss_scaling_factor", 1):
        made.take(f"{_ON}.mtp_num_layers")
    length = "policy.generation.vllm_cfg.max_model_len"
    longest, context = made.take(length), made.overrides.get(our.CONTEXT)
    if isinstance(longest, int) and isinstance(context, int) and longest < context:
        made.overrides[our.CONTEXT] = longest
        made.notes.append(f"{length}={longest} ends a response before {context} tokens")
    elif longest is not None:
        made.unused[length] = SAME
    own = "policy.generation.colocated"
    if made.rest.get(f"{own}.enabled") is False:
        sizes = ", ".join(f"{key}={made.take(key)}" for key in sorted(made.rest) if key.startswith(f"{own}."))
        text = "these GPUs of the cluster generate only there; here all train and generate"
        made.differs.append(f"{sizes}: {text}, and cluster=h100_4x8_split parts them")
    if (name := made.take("policy.tokenizer.name")) not in (None, made.overrides.get(our.MODEL)):
        made.differs.append(f"policy.tokenizer.name={name}: the model's own tokenizer is used here")


def _precision(made: Converted, precision: Any) -> None:
    if precision in ("bfloat16", "float32"):
        shared.set_bf16(made, precision == "bfloat16")
    elif precision is not None:
        made.unknown["trainer.precision"] = f"policy.precision={precision}: it is bf16 or 32 here"


def _kl(made: Converted) -> None:
    key = "loss_fn.use_kl_in_reward"
    coefficient, estimator = made.overrides.get(our.KL), str(made.take("loss_fn.reference_policy_kl_type"))
    weighed = dict.fromkeys(("k1", "k2", "k3"), "k2")  # by a weight that has a gradient
    made.choose(our.ESTIMATOR, "loss_fn.reference_policy_kl_type", estimator, weighed, "k2")
    keys = "kl_input_clamp_value", "kl_output_clamp_value"
    clamps = {key: made.take(f"loss_fn.{key}") for key in keys}
    in_rewards = made.rest.get(key) is True and made.take(key)
    if in_rewards or not coefficient:
        unused = {f"loss_fn.{key}": value for key, value in clamps.items()}
        made.tell_unused(unused, "without a KL in the loss")
    if in_rewards and made.overrides.get(our.ADVANTAGE) == "reinforce_pp_baseline":
        shared.set_kl_of_rewards(made, key, coefficient, estimator, is_scaled=True, is_summed=False)
    elif in_rewards and coefficient:  # grpo's advantages leave it out
        made.overrides[our.KL] = 0
        made.differs.append(
            f"{key}: only adv_estimator.name=reinforce_plus_plus subtracts the KL there: {our.KL}=0 is set"
        )
    elif coefficient:
        bounds = [f"{key}={value}" for key, value in clamps.items() if value is not None]
        made.differs += [f"{', '.join(bounds)}: a token beyond has no gradient of the KL there"] if bounds else []


def _correction(made: Converted) -> None:
    take = made.take
    method, key = take("loss_fn.truncated_importance_sampling_type"), "truncated_importance_sampling_type"
    ratio = "loss_fn.truncated_importance_sampling_ratio"
    cap, floor = take(ratio), take(f"{ratio}_min")
    corrects = take("loss_fn.use_importance_sampling_correction")
    shared.set_correction(made, f"{key}={method}", str(method or "tis") if corrects else "none", floor, cap)


def _async(made: Converted) -> None:
    """Leave generation ahead of the trainer to the user: it needs GPUs of its own."""
    older, sampler = "grpo.async_grpo", "async_rl.sampler"
    is_on = made.take(f"{older}.enabled")
    is_single = any(key.startswith("async_rl.") for key in made.given)  # the settings of run_grpo_single_controller
    name = made.take(f"{sampler}.name", "in_order" if is_single else None)
    ages = f"{older}.max_trajectory_age_steps", f"{sampler}.max_staleness_versions", f"{sampler}.max_lookahead_versions"
    values = {key: value for key in ages if (value := made.take(key)) is not None}
    of_sampler = [value for key, value in values.items() if key.startswith(sampler)]
    if "rollout.own_devices" in made.unknown:
        return
    if (not is_on and name is None) or (name is not None and of_sampler == [0]):
        made.unused |= dict.fromkeys(values.keys() & made.given, SAME)
        return
    values = {key: value for key, value in ((f"{older}.enabled", is_on), (f"{sampler}.name", name)) if value} | values
    text = ", ".join(f"{key}={value}" for key, value in values.items())
    made.unknown["rollout.own_devices"] = (
        f"{text}: rollout.own_devices=true generates one step ahead here, never more, on GPUs of its own:"
        " choose trainer.devices and rollout.engines with it, as cluster=h100_4x8_split does (rollout.sleep=null)"
    )


def _scale(made: Converted) -> float:
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
    if made.overrides[our.ADVANTAGE] in ("group_norm", "reinforce_pp_baseline"):
        made.differs.append(f"{text} and stay here: a std divides the factor {factor:g} out of the advantages")
    else:
        made.unknown["rewards.functions.TASK"] = (
            f"{text} and advantages without a std with them: let the reward function do it, or divide {our.KL} and"
            f" trainer.gradient_clip_val by {factor:g}"
        )
    return factor


def _shaping(made: Converted, scale: float) -> None:
    own = "grpo.reward_shaping"
    keys = "overlong_buffer_length", "overlong_buffer_penalty", "max_response_length", "stop_properly_penalty_coef"
    is_on = made.take(f"{own}.enabled")
    length, penalty, most, factor = (made.take(f"{own}.{key}") for key in keys)
    if not is_on:
        unused = None if most == made.overrides.get(our.CONTEXT) else most  # which it refers to
        made.tell_unused({f"{own}.max_response_length": unused}, f"without {own}.enabled")
    elif factor is not None:  # NeMo-RL then leaves the other penalty out
        made.overrides[f"{our.GRPO}.unfinished_factor"] = factor
        made.tell_unused({f"{own}.{keys[0]}": length, f"{own}.{keys[1]}": penalty}, f"with {own}.{keys[3]}")
    else:
        if scale != 1:
            text = f"divided by the factor {scale:g} of grpo.reward_scaling here"
            made.differs.append(f"{own}.overlong_buffer_penalty={penalty}: {text}")
        penalty = penalty if penalty is None else penalty / scale
        shared.set_overlong(made, f"{own}.max_response_length", length, penalty, most)


def _optimizer(made: Converted) -> None:
    """Set the optimizer from the keys of the back end that is on, and drop those of the other one."""
    has_megatron = made.take(f"{_ON}.enabled")
    prefix = f"{_ON}.optimizer" if has_megatron else "policy.optimizer.kwargs"
    ends, tables = _OF_MEGATRON if has_megatron else _ADAMW, table("nemo_rl")
    values = {key: made.take(f"{prefix}.{key}") for key in ends if f"{prefix}.{key}" in made.rest}
    is_adamw = made.rest.get("policy.optimizer.name", "torch.optim.AdamW") == "torch.optim.AdamW"
    others = [key for key in made.rest if key.startswith(f"{prefix}.") and not has_megatron]
    for key in [key for key in others if key not in tables["differs"] | tables["decides"]]:
        if is_adamw:
            made.misspelt[f"{key}={made.take(key)}"] = "AdamW has lr, weight_decay, betas and eps"
        else:
            made.left[key] = made.take(key)
    if not has_megatron and (size := made.take(f"{_OFF}.tensor_parallel_size")) is not None:
        made.overrides |= {"model.tensor_model_parallel_size": size, "model.pipeline_model_parallel_size": 1}
    names = {"model.optim.lr": "lr", "model.optim.weight_decay": "weight_decay", "model.optim.betas": "betas"}
    names["model.optim.eps"] = "adam_eps" if has_megatron else "eps"
    if has_megatron:
        values["betas"] = [values.get("adam_beta1"), values.get("adam_beta2")]
        names["trainer.gradient_clip_val"] = "clip_grad"
        start, decay = (made.take(f"{_ON}.scheduler.{point}_weight_decay") for point in ("start", "end"))
        if start not in (None, decay):  # with a constant weight decay it is the end's
            made.tell_unused({f"{_ON}.scheduler.start_weight_decay": start}, "where end_weight_decay counts")
        values |= {"weight_decay": decay} if isinstance(decay, int | float) else {}  # Megatron's schedule sets it
        if (kind := values.get("optimizer", "adam")) != "adam":
            made.unknown[f"{prefix}.optimizer={kind}"] = "the optimizer is AdamW here"
    made.overrides |= {ours: values[key] for ours, key in names.items() if key in values}
    nemo_rl_schedule(made, has_megatron, values.get("min_lr"))
    _drop(made, has_megatron, values)
    shared.tell_layout(made, "" if has_megatron else "NeMo-RL's DTensor", tables["layout"])


def _drop(made: Converted, has_megatron: bool, used: dict[str, Any]) -> None:
    """Drop the settings of the back end that is off; tell where its optimizer has other numbers than the `used`."""
    for key in ("lr", "weight_decay"):
        other = f"policy.optimizer.kwargs.{key}" if has_megatron else f"{_ON}.optimizer.{key}"
        if made.rest.get(other) != used.get(key):
            made.tell_unused({other: made.take(other)}, f"with {_ON}.enabled={str(has_megatron).lower()}")
    starts = (_OFF, "policy.optimizer", "policy.scheduler") if has_megatron else (_ON,)
    keys = {key for key in made.rest if key.startswith(starts)}
    made.unused |= dict.fromkeys(keys & made.given, "of the back end that is off")
    made.rest = {key: value for key, value in made.rest.items() if key not in keys}


def _advantage(made: Converted) -> None:
    take, own = made.take, "grpo.adv_estimator"
    kind, minus_baseline = take(f"{own}.name"), take(f"{own}.minus_baseline")
    keys = "normalize_rewards", "use_leave_one_out_baseline"
    of_grpo, of_estimator = ({f"{prefix}.{key}": take(f"{prefix}.{key}") for key in keys} for prefix in ("grpo", own))
    pairs = zip(of_grpo.values(), of_estimator.values(), strict=True)
    normalizes, leaves_one_out = (general if special is None else special for general, special in pairs)
    if kind == "reinforce_plus_plus" and minus_baseline:
        made.overrides[our.ADVANTAGE] = "reinforce_pp_baseline"
    elif kind != "grpo":
        nearest = "group_norm" if kind == "gdpo" else "reinforce_pp_baseline"
        made.choose(our.ADVANTAGE, f"{own}.name", kind, {}, nearest)
    elif normalizes:
        made.overrides[our.ADVANTAGE] = "group_norm"
        if leaves_one_out:
            made.differs.append(
                "use_leave_one_out_baseline with normalize_rewards: mean and std are those of the other responses"
                " there, those of the whole group here"
            )
    elif leaves_one_out:
        made.overrides[our.ADVANTAGE] = "leave_one_out"
    else:
        made.overrides[our.ADVANTAGE] = "mean_only"
