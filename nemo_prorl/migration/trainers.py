"""The rules of each trainer: they take settings out of `Converted.rest`, and set the overrides that these mean."""

import re
from collections.abc import Callable
from typing import Any

from nemo_prorl.migration.converted import (
    ADVANTAGE,
    AGGREGATION,
    CLIP_HIGH,
    CONTEXT,
    CORRECTION,
    DUAL_CLIP,
    ENTROPY,
    ESTIMATOR,
    GROUP,
    GRPO,
    KL,
    LOSS,
    PROMPT,
    PROMPTS,
    RESPONSE,
    SAMPLING,
    UPDATES,
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
    tell_constant,
    tell_data,
    tell_k1,
    tell_layout,
    tell_token_weights,
    tell_unused,
)
from nemo_prorl.migration.nemo_rl import nemo_rl
from nemo_prorl.migration.schedules import (
    openrlhf_schedule,
    verl_schedule,
)
from nemo_prorl.migration.trl import trl
from nemo_prorl.migration.verl_program import verl_lengths, verl_one_step_off, verl_program

_ROLLOUT_CORRECTION, _BETAS = "algorithm.rollout_correction", [0.9, 0.999]
# Data with rewards of 1 and -1, and those with 1 and 0, in verl/utils/reward_score/__init__.py.
_SIGNED, _UNSIGNED = re.compile(r"dapo|aime"), re.compile(r"gsm8k|geo3k|geometry3k|lighteval|^math/")


def _verl(made: Converted) -> None:
    take, actor = made.take, "actor_rollout_ref.actor"
    both, low, high = (take(f"{actor}.clip_ratio{end}") for end in ("", "_low", "_high"))
    set_clip(made, both if low is None else low, both if high is None else high)
    is_given = f"{actor}.clip_ratio" in made.given
    if is_given and both is not None and both not in (low, high) and None not in (low, high):
        made.notes.append(
            f"clip_ratio={both} has no effect there, because clip_ratio_low and clip_ratio_high have values"
        )
    name = str(take("config_name", "ppo_trainer"))
    if not re.fullmatch(r"(one_step_off_|fully_async_)?(ppo|dapo)(_megatron)?_trainer(\.yaml)?", name):
        made.unknown[f"config_name={name}"] = "what only this file sets was not read; the defaults are ppo_trainer's"
    backend = _verl_backend(made, actor, name)
    is_fsdp = backend == "fsdp" and made.rest.get("trainer.use_legacy_worker_impl") != "disable"
    _verl_optimizer(made, f"{actor}.optim", backend == "megatron", is_fsdp)
    verl_schedule(made)
    _verl_advantage(made)
    in_loss = made.rest.get(f"{actor}.use_kl_loss")
    _verl_kl(made, actor)
    _verl_loss(made, actor, [key for key in (KL, ENTROPY) if made.overrides.get(key) and (in_loss or key != KL)])
    verl_program(made)
    verl_lengths(made)
    prompts, group = take(f"{actor}.ppo_mini_batch_size"), made.overrides.get(GROUP)
    if prompts is not None and group is not None:
        set_updates(made, prompts * group, "ppo_mini_batch_size")
    _verl_sampling(made)
    is_ahead = "one_step_off" in made.entry  # whose one_step_off_ppo_trainer.yaml has bypass_mode
    if made.take(f"{_ROLLOUT_CORRECTION}.bypass_mode", is_ahead):
        _verl_bypass(made, is_fsdp)
    else:
        _verl_correction(made)
    if is_ahead:
        verl_one_step_off(made)
    _verl_rewards(made)
    set_validation(made, 1, 0, 1)  # the defaults of val_kwargs
    _verl_layout(made, backend == "megatron")
    _verl_loggers(made)
    if made.rest.get("actor_rollout_ref.rollout.name") == "vllm":
        made.needless.append(f"actor_rollout_ref.rollout.name={take('actor_rollout_ref.rollout.name')}")
    tell_data(made, "data.train_files", "data.val_files", most="data.train_max_samples", option="--size")


def _verl_backend(made: Converted, actor: str, config: str) -> str:
    told = f"{config} {made.rest.get(f'{actor}.strategy')} {made.rest.get('model_engine')}"
    told += " megatron" if any(key.startswith(f"{actor}.megatron.") for key in made.given) else " fsdp"
    return next(one for one in ("veomni", "megatron", "fsdp") if one in told)


def _verl_optimizer(made: Converted, optim: str, is_megatron: bool, is_fsdp: bool) -> None:
    """Set what verl's actors read at different places; engines (`use_legacy_worker_impl`) clip as Megatron does."""
    clips = [f"{optim.removesuffix('.optim')}.grad_clip", f"{optim}.clip_grad"]
    used, other = clips if is_fsdp else reversed(clips)
    made.overrides["trainer.gradient_clip_val"] = made.take(used)
    tell_unused(made, {other: made.take(other)}, f"where {used} clips the gradients")
    own, betas = f"{optim}.override_optimizer_config.adam", made.overrides.get("model.optim.betas")
    if is_megatron:  # it gets no betas (verl/utils/megatron/optimizer.py)
        if betas != _BETAS:
            tell_unused(made, {f"{optim}.betas": betas}, f"where {own}_beta1 and {own}_beta2 count")
        made.overrides["model.optim.betas"] = [made.take(f"{own}_beta{at + 1}", _BETAS[at]) for at in (0, 1)]
        made.overrides["model.optim.eps"] = made.take(f"{own}_eps", 1e-8)


def _verl_span(made: Converted) -> int | None:
    """Return by how much rewards differ; 0: the script's own rewards, None: the names of the data do not say it."""
    if any("custom_reward_function" in key and key.endswith(".path") for key in made.rest):
        return 0
    files = re.findall(r"[^\s,'\"\[\]]+", str(made.rest.get("data.train_files", "")))
    names = ["/".join(file.lower().split("/")[-2:]) for file in files]  # folder and file
    spans = {(bool(_SIGNED.search(name)), bool(_UNSIGNED.search(name))) for name in names}
    return {(True, False): 2, (False, True): 1}.get(spans.pop()) if len(spans) == 1 else None


def _verl_advantage(made: Converted) -> None:
    take = made.take
    kind, by_std = take("algorithm.adv_estimator"), take("algorithm.norm_adv_by_std_in_grpo")
    known = {"grpo": "group_norm", "grpo_vectorized": "group_norm", "rloo": "leave_one_out"}
    known |= {"rloo_vectorized": "leave_one_out", "reinforce_plus_plus_baseline": "reinforce_pp_baseline"}
    known |= {"grpo": "mean_only", "grpo_vectorized": "mean_only"} if by_std is False else {}
    if kind in known and "algorithm.gamma" in made.rest:  # only gae and reinforce_plus_plus discount
        tell_unused(made, {"algorithm.gamma": take("algorithm.gamma")}, f"with adv_estimator={kind}")
    nearest = "reinforce_pp_baseline" if kind == "reinforce_plus_plus" else "group_norm"
    made.choose(ADVANTAGE, "algorithm.adv_estimator", kind, known, nearest)
    tell_token_weights(made, f"algorithm.adv_estimator={kind}")
    if made.overrides.get(ADVANTAGE) in ("mean_only", "leave_one_out") and (span := _verl_span(made)) != 1:
        text = f"{'' if span else 'where '}rewards are 1 and -1 there, 1 and 0 here, advantages are twice those here:"
        text += f" divide {KL}, {ENTROPY} and trainer.gradient_clip_val by 2"
        made.differs.append(f"algorithm.adv_estimator={kind} without a std: {text}")


def _verl_loss(made: Converted, actor: str, terms: list[str]) -> None:
    """Set the loss and its mean; `terms`: the coefficients of what `loss_agg_mode` averages beside the surrogate."""
    is_global = made.rest.get("trainer.use_legacy_worker_impl") == "disable"
    kind, mode = made.take(f"{actor}.policy_loss.loss_mode"), made.take(f"{actor}.loss_agg_mode")
    losses = {"vanilla": "clip", "gspo": "gspo", "cispo": "cispo"}
    made.choose(LOSS, f"{actor}.policy_loss.loss_mode", kind, losses, "clip")
    tell_cispo(made, f"policy_loss.loss_mode={kind}")
    if kind in ("gspo", "cispo"):
        made.overrides[DUAL_CLIP] = None  # clip_ratio_c has no effect there
    if kind in ("gspo", "sapo", "geo_mean") and mode != "seq-mean-token-mean":
        text = f"{actor}.loss_agg_mode={mode} has no effect there with loss_mode={kind}, which averages responses"
        if terms:
            text += f", but for {' and '.join(terms)}, which average responses here"
        (made.differs if terms else made.notes).append(text)
        mode = "seq-mean-token-mean"
    if mode == "token-mean" and not is_global:
        mode = _mean_of_micro_batches(made, actor)
    modes = {"token-mean": "token", "seq-mean-token-mean": "sequence", "seq-mean-token-sum-norm": "constant"}
    made.choose(AGGREGATION, "loss_agg_mode", mode, modes, "constant")
    factor = made.take(f"{actor}.loss_scale_factor")
    if factor is not None and not (is_global and mode == "seq-mean-token-sum-norm"):
        need = "loss_agg_mode=seq-mean-token-sum-norm and trainer.use_legacy_worker_impl=disable"
        made.notes.append(f"loss_scale_factor={factor} has no effect there without {need}")
        factor = None
    if mode == "seq-mean-token-sum":
        made.differs.append(
            f"loss_agg_mode={mode}: a response's sum is not divided there, by {CONTEXT} here, and so are its gradients:"
            f" divide trainer.gradient_clip_val by {CONTEXT}, too"
        )
    else:
        tell_constant(made, "loss_agg_mode", mode, "data.max_response_length" if factor is None else str(factor))
    if mode == "seq-mean-token-sum-norm":
        size = made.overrides.get("model.micro_batch_size", "ppo_micro_batch_size_per_gpu")
        varies = made.rest.get(f"{actor}.use_dynamic_bsz")
        number = "a response's is their number, which use_dynamic_bsz changes" if varies else f"their number, {size}"
        batch, number = ("update on a data-parallel rank", "their number") if is_global else ("micro-batch", number)
        made.differs.append(
            f"loss_agg_mode={mode}: the responses of a{'n' * is_global} {batch} are added there, not averaged, so the"
            f" loss with its KL term has one more factor: {number}"
        )


def _mean_of_micro_batches(made: Converted, actor: str) -> str:
    """Return the mode that is verl's token-mean: its actor divides by the tokens of each micro-batch."""
    if made.overrides.get("model.micro_batch_size") == 1 and not made.rest.get(f"{actor}.use_dynamic_bsz"):
        made.notes.append(
            f"{actor}.loss_agg_mode=token-mean with ppo_micro_batch_size_per_gpu=1 divides each response by its own"
            f" tokens there: {AGGREGATION}=sequence"
        )
        return "seq-mean-token-mean"
    made.differs.append(
        f"{actor}.loss_agg_mode=token-mean: verl's FSDP and Megatron actors average over the tokens of a micro-batch,"
        " then over micro-batches; here the average is over the tokens of the whole update"
    )
    return "token-mean"


def _verl_sampling(made: Converted) -> None:
    take = made.take
    tokens, penalty, most = (take(f"overlong_buffer_cfg.{key}") for key in ("len", "penalty_factor", "max_resp_len"))
    if take("overlong_buffer_cfg.enable"):
        span = _verl_span(made)
        share = penalty if span in (0, 1) or penalty is None else penalty / 2
        text = f"verl's DAPO rewards are 1 and -1, those here 1 and 0: half of it, {share}, weighs the same"
        text += "" if span else "; where they are 1 and 0 (gsm8k, MATH, geo3k), the whole does"
        if span == 0:
            text = "the same is set; if the script's own rewards are not 1 and 0, divide it by their distance"
        made.differs += [] if span == 1 else [f"overlong_buffer_cfg.penalty_factor={penalty}: {text}"]
        set_overlong(made, "overlong_buffer_cfg.max_resp_len", tokens, share, most)
    if made.overrides.get(PROMPTS) == 0 or "fully_async" in made.entry:
        text = "its prompts are trigger_parameter_sync_step * require_batches * ppo_mini_batch_size; nearest is their"
        text += " product, with cluster=h100_4x8_split and trainer.grpo.old_logp=engine"
        made.unknown[PROMPTS] = f"data.train_batch_size={made.overrides.get(PROMPTS)}, of fully_async_policy: {text}"
    drawn, batches = take("data.gen_batch_size"), take("algorithm.filter_groups.max_num_gen_batches")
    made.drawn = drawn
    if (prompts := made.overrides.get(PROMPTS)) and f"{SAMPLING}.max_draw_factor" not in made.unknown:
        set_draws(made, (batches or 0) * (drawn or prompts) / prompts)
    if take("algorithm.filter_groups.metric", "acc") not in ("acc", "seq_reward"):
        made.differs.append("algorithm.filter_groups.metric: a group is kept here if its rewards differ")


def _verl_loggers(made: Converted) -> None:
    if loggers := made.take("trainer.logger"):
        loggers = loggers if isinstance(loggers, list) else [loggers]
        if "wandb" in loggers:
            set_wandb(made, made.take("trainer.project_name"))
        if others := [one for one in loggers if one not in ("console", "tensorboard", "wandb")]:
            made.rest["trainer.logger"] = others


def _verl_kl(made: Converted, actor: str) -> None:
    take, of_loss, of_rewards = made.take, f"{actor}.kl_loss_coef", "algorithm.kl_ctrl.kl_coef"
    in_loss, coefficient, kind = take(f"{actor}.use_kl_loss"), take(of_loss), take(f"{actor}.kl_loss_type")
    in_rewards, other = take("algorithm.use_kl_in_reward"), take(of_rewards)
    estimators = {"kl": "k1", "k1": "k1", "mse": "k2", "k2": "k2", "low_var_kl": "k3", "k3": "k3"}
    of_gradient = dict.fromkeys(("kl+", "k1+", "low_var_kl+", "k3+", "abs+"), "k2")  # +: it has the gradient of k2
    if not in_loss:
        tell_unused(made, {of_loss: coefficient}, f"without {actor}.use_kl_loss")
    if not in_rewards:
        tell_unused(made, {of_rewards: other}, "without algorithm.use_kl_in_reward")
    if in_rewards and not in_loss:
        penalty = str(take("algorithm.kl_penalty", "kl")).rstrip("+")  # +: of a gradient, which rewards do not have
        is_scaled = made.overrides.get(ADVANTAGE) in ("group_norm", "reinforce_pp_baseline")
        set_kl_of_rewards(
            made, "algorithm.use_kl_in_reward", other, estimators.get(penalty, penalty), is_scaled=is_scaled
        )
        return
    if in_rewards:
        made.differs.append("algorithm.use_kl_in_reward beside use_kl_loss: only the term of the loss is set")
    made.overrides[KL] = coefficient if in_loss else 0
    made.choose(ESTIMATOR, "kl_loss_type", kind, estimators | of_gradient, "k2", is_near=not made.overrides[KL])
    tell_k1(made, f"kl_loss_type={kind}")


def _verl_bypass(made: Converted, is_fsdp: bool) -> None:
    """Set that the engine's log-probabilities are the old ones."""
    own = f"{_ROLLOUT_CORRECTION}."
    keys = [f"{own}rollout_{name}" for name in ("is", "rs", "is_threshold", "rs_threshold", "is_batch_normalize")]
    given, loss = {key: made.take(key) for key in keys}, made.take(f"{own}loss_type", "ppo_clip")
    made.overrides[f"{CORRECTION}.kind"] = "none"
    if is_fsdp and made.overrides.get(UPDATES) == 1:  # dp_actor.py, on_policy
        why = "where a step's only update takes the actor's own log-probabilities as the old ones"
        tell_unused(made, {f"{own}bypass_mode": True, f"{own}loss_type": loss, **given}, why)
        return
    made.overrides[f"{GRPO}.old_logp"] = "engine"
    if given[keys[1]] is not None:
        why = f"{GRPO}.old_logp=engine, which bypass_mode means, has no mask here; none leaves it out"
        made.unknown[f"{CORRECTION}.kind"] = f"{keys[1]}={given[keys[1]]}: {why}"
    if loss == "ppo_clip":
        tell_unused(made, {keys[0]: given[keys[0]]}, "with bypass_mode")
        if made.overrides.get(LOSS) != "clip":
            made.differs.append(f"{own}bypass_mode means the loss of loss_mode=vanilla there")
    else:
        made.unknown[LOSS] = (
            f"{own}loss_type={loss}, {keys[0]}={given[keys[0]]}: its loss is not clipped; with rollout_is=token it is"
            f" cispo with {CLIP_HIGH}={(given[keys[2]] or 1) - 1:g}, and no other has a counterpart"
        )


def _verl_correction(made: Converted) -> None:
    prefix = f"{_ROLLOUT_CORRECTION}.rollout"
    kind, cap, mask, bounds = (made.take(f"{prefix}_{key}") for key in ("is", "is_threshold", "rs", "rs_threshold"))
    if (older := _verl_older_correction(made)) is not None:
        kind, cap = older
    if kind == "token" and made.overrides.get(LOSS) == "gspo":
        made.differs.append(
            "rollout_is with gspo: a token's weight is for its own gradient there, for its response's here"
        )
    if mask is not None:
        _verl_mask(made, f"{prefix}_rs={mask}, {prefix}_rs_threshold={bounds}", str(mask), bounds, kind)
    elif kind is None:
        set_correction(made, f"{prefix}_is", "none", None, None)
    else:
        set_correction(made, f"{prefix}_is={kind}", "tis" if kind == "token" else "sequence_tis", None, cap)


def _verl_mask(made: Converted, told: str, mask: str, bounds: Any, weights: Any) -> None:
    """Set the mask of responses whose mean ratio is out of bounds; leave others to the user, with what comes nearest.

    Args:
        mask: value of `rollout_rs`; `seq_mean_k1`, or `geometric` of verl 0.6, bounds the geometric mean of the ratios.
        weights: value of `rollout_is`; None: a response that is kept has the weight 1, as here.
    """
    least = made.take("algorithm.rollout_correction.rollout_rs_threshold_lower")
    parts = [float(part) for part in re.findall(r"[\d.]+(?:e-?\d+)?", str(bounds))]
    nearest = {"seq_mean_k1": "sequence_mask", "geometric": "sequence_mask", "sequence": "sequence_mask"}
    nearest |= {"seq_sum_k1": "sequence_mask", "token_k1": "icepop", "token": "icepop"}
    kind = nearest.get(mask)
    if kind is None or len(parts) not in (1, 2) or 0 in parts:
        made.unknown[f"{CORRECTION}.kind"] = f"{told}: this mask has no counterpart; none leaves it out"
        return
    floor, cap = parts if len(parts) == 2 else (float(least or 1 / parts[0]), parts[0])
    if mask.endswith("k1"):  # its ratio is the engine's probability by the trainer's
        floor, cap = 1 / cap, 1 / floor
    set_ = {f"{CORRECTION}.kind": kind, f"{CORRECTION}.cap": cap, f"{CORRECTION}.floor": floor}
    if weights is None and mask in ("seq_mean_k1", "geometric"):
        made.overrides |= set_
        made.differs.append(f"{told}: the loss's mean leaves out a masked response there; here its tokens count as 0")
        return
    values = ", ".join(f"{key}={value if isinstance(value, str) else f'{value:g}'}" for key, value in set_.items())
    also = "" if weights is None else f", without the weights of rollout_is={weights}"
    made.unknown[f"{CORRECTION}.kind"] = f"{told} has no counterpart here; {values}{also} is what comes nearest"


def _verl_layout(made: Converted, has_megatron: bool) -> None:
    """Tell that the layout must be chosen; sizes of Megatron in the file are those here."""
    ends = "fsdp_size", "param_offload", "optimizer_offload", "grad_offload", "sequence_parallel_size"
    keys = [key for key in made.rest if key.startswith("actor_rollout_ref.")]
    keys = [key for key in keys if key.endswith((*ends, "context_parallel_size"))]
    tell_layout(made, "" if has_megatron else "verl's FSDP", {key: made.take(key) for key in keys})


def _verl_older_correction(made: Converted) -> tuple[Any, Any] | None:
    """Return `rollout_is` and its threshold of today for the keys of verl up to 0.6; None if the file has none."""
    old = "algorithm.rollout_is"
    if (cap := made.take("actor_rollout_ref.actor.tis_imp_ratio_cap", -1)) > 0:
        return "token", cap
    applies, cap = made.take(old), made.take(f"{old}_threshold")
    level, mode = made.take(f"{old}_level", "token"), made.take(f"{old}_mode", "truncate")
    veto = made.take(f"{old}_veto_threshold", 1e-4)  # the default of verl 0.6
    if cap is None or (mode == "truncate" and not applies):
        return None
    if mode != "truncate" or level not in ("token", "sequence"):
        made.unknown[f"{CORRECTION}.kind"] = f"{old}_level={level}, {old}_mode={mode}: see the methods here"
    if veto is not None:
        made.differs.append(f"{old}_veto_threshold={veto}: a response with a token's ratio below it is left out there")
    return level, cap


def _verl_rewards(made: Converted) -> None:
    """Add a note with the override for verl's own reward function, if the file has one."""
    prefixes = "custom_reward_function", "reward.custom_reward_function"
    keys = [f"{prefix}.{key}" for prefix in prefixes for key in ("path", "name")]
    if given := {key: made.take(key) for key in keys if key in made.rest}:
        name = next((value for key, value in given.items() if key.endswith(".name")), "compute_score")
        made.notes.append(
            f"reward ({', '.join(f'{key}={value}' for key, value in given.items())}): add"
            " rewards.functions.TASK=FILE.py:score, where score(prompt, response, truth) calls"
            f" {name} (docs/howto/reward_function.md)"
        )


def _openrlhf(made: Converted) -> None:
    take = made.take
    both, pair = take("actor.eps_clip"), take("actor.eps_clip_low_high")
    set_clip(made, *(pair or (both, both)))
    made.overrides.setdefault(ENTROPY, 0)
    kind = take("actor.policy_loss_type")
    made.choose(LOSS, "actor.policy_loss_type", kind, {"ppo": "clip", "gspo": "gspo"}, "clip")
    made.overrides[AGGREGATION] = "sequence" if kind == "gspo" else "token"
    if PROMPT in made.overrides and isinstance(made.overrides.get(RESPONSE), int):  # the form before April 2026
        made.overrides[CONTEXT] = made.overrides[PROMPT] + made.overrides[RESPONSE]
    if (size := take("train.batch_size")) is not None:
        set_updates(made, size, "train.batch_size")
    openrlhf_schedule(made)
    if VALIDATE_EVERY in made.overrides:
        set_validation(made, 4, 0.6, made.rest.get("rollout.top_p", 1))  # the defaults of eval.*
    _openrlhf_advantage(made)
    in_loss = made.rest.get("algo.kl.use_loss")
    _openrlhf_kl(made)
    terms = [key for key in (KL, ENTROPY) if made.overrides.get(key) and (key == ENTROPY or in_loss)]
    if kind == "gspo" and terms:
        text = f"actor.policy_loss_type=gspo: {' and '.join(terms)} weigh means over tokens there"
        made.differs.append(f"{text}, means of responses' own means here, as the loss")
    _openrlhf_correction(made)
    set_draws(made, 0)
    _openrlhf_groups(made)
    _openrlhf_cut_off(made)
    dtype = take("ds.param_dtype")
    if take("bf16") or dtype == "bf16":
        set_bf16(made)
    elif dtype is not None:
        made.unknown["trainer.precision"] = (
            f"ds.param_dtype={dtype} has no counterpart here; bf16 is what comes nearest"
        )
    if take("data.apply_chat_template"):
        made.overrides["data.prompt"] = "chat"
    if take("vllm.enable_sleep"):
        made.overrides["rollout.sleep"] = 1
    if (url := take("reward.remote_url")) is not None:
        made.notes.append(
            f"reward (reward.remote_url={url}): add rewards.functions.TASK=FILE.py:score, where score(prompt, response,"
            " truth) calls its function (docs/howto/reward_function.md)"
        )
    data = ["data.prompt_dataset", "eval.dataset", "data.input_key", "data.label_key"]
    tell_data(made, *data, most="data.max_samples", option="--limit")


def _openrlhf_groups(made: Converted) -> None:
    """Tell which groups are kept; set the loggers and the engines."""
    key, take = "algo.dynamic_filtering_range", made.take
    bounds = take(key)
    if made.overrides.get(f"{SAMPLING}.enabled"):
        text = (
            f"{key}={bounds}: a group is kept there if its mean score is between, here if its rewards differ: the same"
        )
        made.differs.append(f"{text} for scores of 0 and 1 only")
    else:
        tell_unused(made, {key: bounds}, "without algo.dynamic_filtering_enable")
    if made.overrides.get("rollout.engines") == 0:  # there: no engine
        del made.overrides["rollout.engines"]
    if take("logger.wandb.key") is not None:
        set_wandb(made, take("logger.wandb.project"))


def _openrlhf_cut_off(made: Converted) -> None:
    """Set what cut-off responses get: there the factor is for the reward with its overlong penalty."""
    factor, buffer = (
        made.take("reward.stop_properly_penalty_coef"),
        made.overrides.get(f"{GRPO}.shaping.overlong_tokens"),
    )
    penalty = made.overrides.get(f"{GRPO}.shaping.overlong_penalty", 1)
    if factor is not None:
        made.overrides[f"{GRPO}.unfinished_factor"] = max(factor, 0)
        if factor < 0:  # it is the whole reward of such a response
            made.overrides[f"{GRPO}.unfinished_penalty"] = -factor
        if buffer and factor != 1:
            made.differs.append(
                f"reward.stop_properly_penalty_coef={factor}: it is for the reward with its overlong penalty, so that a"
                f" cut-off response has {max(factor, 0) * penalty:g} of that penalty there, {penalty:g} here"
            )
    if buffer and made.overrides.get(RESPONSE) is None:
        text = (
            "reward.overlong_buffer_len: without rollout.max_new_tokens the buffer ends at a response of data.max_len"
        )
        made.differs.append(f"{text} tokens there, at the end of the context here")


def _openrlhf_advantage(made: Converted) -> None:
    take = made.take
    kind, without_std = take("algo.advantage.estimator"), take("algo.advantage.no_std_norm")
    if kind not in ("gae", "reinforce") and "algo.advantage.gamma" in made.rest:
        gamma = take("algo.advantage.gamma")
        tell_unused(made, {"algo.advantage.gamma": gamma}, f"with algo.advantage.estimator={kind}")
    known = {"group_norm": "group_norm", "rloo": "leave_one_out", "reinforce_baseline": "reinforce_pp_baseline"}
    known |= {"dr_grpo": "mean_only"} | ({"reinforce_baseline": "mean_only"} if without_std else {})
    made.choose(ADVANTAGE, "algo.advantage.estimator", kind, known, "group_norm")
    tell_token_weights(made, f"algo.advantage.estimator={kind}")
    if kind == "reinforce_baseline" and without_std:
        made.differs.append(f"algo.advantage.estimator={kind}: the mean over all tokens is also subtracted there")


def _openrlhf_kl(made: Converted) -> None:
    if made.take("use_kl_estimator_k3"):  # the form before --kl_estimator
        made.overrides[ESTIMATOR] = "k3"
    if made.take("algo.kl.use_loss"):
        tell_k1(made, "algo.kl.use_loss with algo.kl.estimator=k1")
        return
    is_scaled = made.overrides.get(ADVANTAGE) == "reinforce_pp_baseline"  # group_norm divides before the subtraction
    estimator = str(made.overrides.get(ESTIMATOR))
    set_kl_of_rewards(made, "algo.kl.use_loss=false", made.overrides.get(KL), estimator, is_scaled=is_scaled)


def _openrlhf_correction(made: Converted) -> None:
    take = made.take
    corrects, kind = take("algo.advantage.is_correction_enable"), take("algo.advantage.is_correction_type")
    if take("use_icepop"):
        kind = "icepop"
    floor, cap = take("algo.advantage.is_correction_threshold") or (None, None)
    if corrects and made.overrides.get(LOSS) == "gspo":
        corrects = False
        made.differs.append("is_correction_enable with gspo: ratios are to the engine's probabilities there, not here")
    set_correction(made, f"algo.advantage.is_correction_type={kind}", str(kind) if corrects else "none", floor, cap)


RULES: dict[str, Callable[[Converted], None]] = {
    "trl": trl,
    "verl": _verl,
    "nemo_rl": nemo_rl,
    "openrlhf": _openrlhf,
}
