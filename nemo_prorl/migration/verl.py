"""The rules of verl: they take settings out of `Converted.rest`, and set the overrides that these mean."""

import re
from typing import Any

from nemo_prorl.migration import our, shared
from nemo_prorl.migration.converted import Converted
from nemo_prorl.migration.files import BASE
from nemo_prorl.migration.names import table
from nemo_prorl.migration.schedules import verl_schedule
from nemo_prorl.migration.shell import Expression

_ACTOR, _ROLLOUT, _OPTIM = (f"actor_rollout_ref.{part}" for part in ("actor", "rollout", "actor.optim"))
_CORRECTION, _FILTERS = "algorithm.rollout_correction", "algorithm.filter_groups"
_KIND, _BETAS = f"{our.CORRECTION}.kind", [0.9, 0.999]
_ESTIMATORS = {"kl": "k1", "k1": "k1", "mse": "k2", "k2": "k2", "low_var_kl": "k3", "k3": "k3"}
_ESTIMATORS |= dict.fromkeys(("kl+", "k1+", "low_var_kl+", "k3+", "abs+"), "k2")  # +: it has the gradient of k2
# Data with rewards of 1 and -1, and those with 1 and 0, in verl/utils/reward_score/__init__.py.
_SIGNED, _UNSIGNED = re.compile(r"dapo|aime"), re.compile(r"gsm8k|geo3k|geometry3k|lighteval|^math/")
_OWN_REWARD = "custom_reward_function.", "reward.custom_reward_function."


def verl(made: Converted) -> None:
    take = made.take
    both, low, high = (take(f"{_ACTOR}.clip_ratio{end}") for end in ("", "_low", "_high"))
    shared.set_clip(made, both if low is None else low, both if high is None else high)
    if both not in (low, high) and None not in (low, high):
        made.tell_unused({f"{_ACTOR}.clip_ratio": both}, "where clip_ratio_low and clip_ratio_high have values")
    name = str(take("config_name", "ppo_trainer"))
    if not re.fullmatch(r"(one_step_off_|fully_async_)?(ppo|dapo)(_megatron)?_trainer(\.yaml)?", name):
        made.unknown[f"config_name={name}"] = "what only this file sets was not read; the defaults are ppo_trainer's"
    made.unknown |= dict.fromkeys(map(str, take(BASE, [])), "this file is missing, and what it sets was not read")
    _set_entry(made, name)
    backend = _backend(made, name)
    is_fsdp = backend == "fsdp" and made.rest.get("trainer.use_legacy_worker_impl") != "disable"
    _optimizer(made, backend == "megatron", is_fsdp)
    verl_schedule(made, backend == "megatron")
    _advantage(made)
    in_loss = made.rest.get(f"{_ACTOR}.use_kl_loss")
    _kl(made)
    terms = our.KL if in_loss else our.ENTROPY, our.ENTROPY
    _loss(made, [key for key in dict.fromkeys(terms) if made.overrides.get(key)])
    _program(made)
    _engine_lengths(made)
    prompts, group = take(f"{_ACTOR}.ppo_mini_batch_size"), made.overrides.get(our.GROUP)
    if None not in (prompts, group) and made.overrides.get(our.PROMPTS) != 0:
        is_mixed = made.rest.get("trainer.balance_batch", True)
        shared.set_updates(made, prompts * group, "ppo_mini_batch_size", is_mixed=is_mixed)
    _overlong(made)
    _sampling(made, prompts)
    is_ahead = "one_step_off" in made.entry  # whose one_step_off_ppo_trainer.yaml has bypass_mode
    if take(f"{_CORRECTION}.bypass_mode", is_ahead):
        _bypass(made, is_fsdp)
    else:
        _correction(made, is_ahead or "fully_async" in made.entry)
    if is_ahead:
        _one_step_off(made)
    _rewards(made)
    shared.set_validation(made, 1, 0, 1, take("data.val_max_samples"))  # the defaults of val_kwargs
    shared.tell_layout(made, "" if backend == "megatron" else "verl's FSDP", table("verl")["layout"])
    loggers = take("trainer.logger") or []
    loggers = loggers if isinstance(loggers, list) else [loggers]
    if "wandb" in loggers:
        shared.set_wandb(made, take("trainer.project_name"))
    if others := [logger for logger in loggers if logger not in ("console", "tensorboard", "wandb")]:
        made.rest["trainer.logger"] = others


def _set_entry(made: Converted, config: str) -> None:
    """Set the program that a configuration without its script is of."""
    sections = {"async_training.": "fully_async_policy", "rollout.n": "one_step_off_policy"}
    programs = [program for start, program in sections.items() if any(key.startswith(start) for key in made.given)]
    programs += [f"{name}_policy" for name in ("fully_async", "one_step_off") if config.startswith(name)]
    made.entry = made.entry or next(iter(programs), "")


def _backend(made: Converted, config: str) -> str:
    text = f"{config} {made.rest.get(f'{_ACTOR}.strategy')} {made.rest.get('model_engine')}"
    starts = f"{_ACTOR}.megatron.", f"{_OPTIM}.lr_decay_style"  # FSDP has none of these
    text += " megatron" if any(key.startswith(starts) for key in made.given) else " fsdp"
    return next(backend for backend in ("veomni", "megatron", "fsdp") if backend in text)


def _optimizer(made: Converted, is_megatron: bool, is_fsdp: bool) -> None:
    """Set what verl's actors read at different places; engines (`use_legacy_worker_impl`) clip as Megatron does."""
    used, other = [f"{_ACTOR}.grad_clip", f"{_OPTIM}.clip_grad"][:: 1 if is_fsdp else -1]
    made.overrides["trainer.gradient_clip_val"] = made.take(used)
    made.tell_unused({other: made.take(other)}, f"where {used} clips the gradients")
    own, betas = f"{_OPTIM}.override_optimizer_config.adam", made.overrides.get("model.optim.betas")
    keys = [f"{own}_{name}" for name in ("beta1", "beta2", "eps")]
    values = [made.take(key) for key in keys]
    if is_megatron:  # it gets no betas (verl/utils/megatron/optimizer.py)
        unused = {
            f"{_OPTIM}.betas": betas,
            f"{_OPTIM}.override_optimizer_config.eps": made.overrides.get("model.optim.eps"),
        }
        made.tell_unused(unused, f"where {own}_beta1, {own}_beta2 and {own}_eps count")
        *_, eps = adam = [usual if item is None else item for item, usual in zip(values, (*_BETAS, 1e-8), strict=True)]
        made.overrides |= {"model.optim.betas": adam[:2], "model.optim.eps": eps}
    else:
        made.tell_unused(dict(zip(keys, values, strict=True)), "without Megatron")


def _span(made: Converted) -> int | None:
    """Return by how much rewards differ; 0: the script's own rewards, None: the names of the data do not say it."""
    if any(key.startswith(_OWN_REWARD) and key.endswith(".path") for key in made.rest):
        return 0
    files = re.findall(r"[^\s,'\"\[\]]+", str(made.rest.get("data.train_files", "")))
    names = ["/".join(file.lower().split("/")[-2:]) for file in files]  # folder and file
    spans = {(bool(_SIGNED.search(name)), bool(_UNSIGNED.search(name))) for name in names}
    return {(True, False): 2, (False, True): 1}.get(spans.pop()) if len(spans) == 1 else None


def _advantage(made: Converted) -> None:
    take = made.take
    kind, by_std = take("algorithm.adv_estimator"), take("algorithm.norm_adv_by_std_in_grpo")
    grpo = "mean_only" if by_std is False else "group_norm"
    known = {"grpo": grpo, "grpo_vectorized": grpo, "reinforce_plus_plus_baseline": "reinforce_pp_baseline"}
    known |= {"rloo": "leave_one_out", "rloo_vectorized": "leave_one_out"}
    nearest = "reinforce_pp_baseline" if kind == "reinforce_plus_plus" else "group_norm"
    made.choose(our.ADVANTAGE, "algorithm.adv_estimator", kind, known, nearest)
    if made.overrides.get(our.ADVANTAGE) in ("mean_only", "leave_one_out") and (span := _span(made)) != 1:
        text = f"{'' if span else 'where '}rewards are 1 and -1 there, 1 and 0 here, advantages are twice those here:"
        text += f" divide {our.KL}, {our.ENTROPY} and trainer.gradient_clip_val by 2"
        made.differs.append(f"algorithm.adv_estimator={kind} without a std: {text}")


def _loss(made: Converted, terms: list[str]) -> None:
    """Set the loss and its mean.  `terms`: coefficients of what `loss_agg_mode` averages besides the surrogate."""
    is_global = made.rest.get("trainer.use_legacy_worker_impl") == "disable"
    kind, mode = made.take(f"{_ACTOR}.policy_loss.loss_mode"), made.take(f"{_ACTOR}.loss_agg_mode")
    losses = {"vanilla": "clip", "gspo": "gspo", "cispo": "cispo"}
    made.choose(our.LOSS, f"{_ACTOR}.policy_loss.loss_mode", kind, losses, "clip")
    if kind in ("gspo", "cispo"):
        made.tell_unused({f"{_ACTOR}.clip_ratio_c": made.overrides.get(our.DUAL_CLIP)}, f"with loss_mode={kind}")
        made.overrides[our.DUAL_CLIP] = None
    if kind in ("gspo", "sapo", "geo_mean") and mode != "seq-mean-token-mean":
        text = f"{_ACTOR}.loss_agg_mode={mode} has no effect there with loss_mode={kind}, which averages responses"
        if terms:
            text += f", but for {' and '.join(terms)}, which average responses here"
        (made.differs if terms else made.notes).append(text)
        mode = "seq-mean-token-mean"
    if mode == "token-mean" and not is_global:
        mode = _mean_of_micro_batches(made)
    modes = {"token-mean": "token", "seq-mean-token-mean": "sequence", "seq-mean-token-sum-norm": "constant"}
    made.choose(our.AGGREGATION, "loss_agg_mode", mode, modes, "constant")
    factor = made.take(f"{_ACTOR}.loss_scale_factor")
    if factor is not None and not (is_global and mode == "seq-mean-token-sum-norm"):
        need = "loss_agg_mode=seq-mean-token-sum-norm and trainer.use_legacy_worker_impl=disable"
        made.tell_unused({f"{_ACTOR}.loss_scale_factor": factor}, f"without {need}")
        factor = None
    if mode == "seq-mean-token-sum-norm":
        size = made.overrides.get("model.micro_batch_size", "ppo_micro_batch_size_per_gpu")
        varies = made.rest.get(f"{_ACTOR}.use_dynamic_bsz")
        number = "a response's is their number, which use_dynamic_bsz changes" if varies else f"their number, {size}"
        batch, number = ("update on a data-parallel rank", "their number") if is_global else ("micro-batch", number)
        made.differs.append(
            f"loss_agg_mode={mode}: the responses of a{'n' * is_global} {batch} are added there, not averaged, so the"
            f" loss with its KL term has one more factor: {number}"
        )
        length, added = factor or made.overrides.get(our.RESPONSE), None if is_global or varies else size
        tokens = length / added if isinstance(length, int) and isinstance(added, int) else None
        made.divisor = str(factor or "data.max_response_length"), tokens


def _mean_of_micro_batches(made: Converted) -> str:
    """Return the mode that is verl's token-mean: its actor divides by the tokens of each micro-batch."""
    if made.overrides.get("model.micro_batch_size") == 1 and not made.rest.get(f"{_ACTOR}.use_dynamic_bsz"):
        made.notes.append(
            f"{_ACTOR}.loss_agg_mode=token-mean with ppo_micro_batch_size_per_gpu=1 divides each response by its own"
            f" tokens there: {our.AGGREGATION}=sequence"
        )
        return "seq-mean-token-mean"
    made.differs.append(
        f"{_ACTOR}.loss_agg_mode=token-mean: verl's FSDP and Megatron actors average over the tokens of a micro-batch,"
        " then over micro-batches; here the average is over the tokens of the whole update"
    )
    return "token-mean"


def _overlong(made: Converted) -> None:
    """Set DAPO's penalty for long responses, which only its reward manager has."""
    tokens, penalty, most = (
        made.take(f"overlong_buffer_cfg.{key}") for key in ("len", "penalty_factor", "max_resp_len")
    )
    if not made.take("overlong_buffer_cfg.enable"):
        return
    span = _span(made)
    share = penalty if span in (0, 1) or penalty is None else penalty / 2
    text = f"verl's DAPO rewards are 1 and -1, those here 1 and 0: half of it, {share}, weighs the same"
    text += "" if span else "; where they are 1 and 0 (gsm8k, MATH, geo3k), the whole does"
    if span == 0:
        text = "the same is set; if the script's own rewards are not 1 and 0, divide it by their distance"
    made.differs += [] if span == 1 else [f"overlong_buffer_cfg.penalty_factor={penalty}: {text}"]
    shared.set_overlong(made, "overlong_buffer_cfg.max_resp_len", tokens, share, most)


def _sampling(made: Converted, size: Any) -> None:
    """Set how many prompts a step draws; `size`: the prompts of an update."""
    take, prompts = made.take, made.overrides.get(our.PROMPTS)
    if prompts == 0 or "fully_async" in made.entry:
        keys = [f"async_training.{key}" for key in ("trigger_parameter_sync_step", "require_batches")]
        sizes = [
            *(f"{key}={made.rest.get(key, 'its default')}" for key in keys),
            f"{_ACTOR}.ppo_mini_batch_size={size}",
        ]
        made.unknown[our.PROMPTS] = (
            f"data.train_batch_size={prompts}, of fully_async_policy: nearest are {' * '.join(sizes)} prompts, and as"
            f" many {our.UPDATES} as the first two, with cluster=h100_4x8_split and {our.GRPO}.old_logp=engine; a batch"
            " there may be older than one step"
        )
        total = take(key := "rollout.total_rollout_steps", "its default")
        made.unknown[our.STEPS] = f"{key}={total}: divided by the prompts of a step"
    drawn, batches = take("data.gen_batch_size"), take(f"{_FILTERS}.max_num_gen_batches")
    made.drawn = drawn
    if prompts and f"{our.SAMPLING}.max_draw_factor" not in made.unknown:
        shared.set_draws(made, (batches or 0) * (drawn or prompts) / prompts)
    if drawn and not batches:
        made.unused["data.gen_batch_size"] = "speed and memory"


def _kl(made: Converted) -> None:
    take = made.take
    in_loss, coefficient, kind = (take(f"{_ACTOR}.{key}") for key in ("use_kl_loss", "kl_loss_coef", "kl_loss_type"))
    in_rewards, other = take("algorithm.use_kl_in_reward"), take("algorithm.kl_ctrl.kl_coef")
    if in_rewards and not in_loss:
        penalty = str(take("algorithm.kl_penalty", "kl")).rstrip("+")  # +: of a gradient, which rewards do not have
        is_scaled = made.overrides.get(our.ADVANTAGE) in ("group_norm", "reinforce_pp_baseline")
        key = "algorithm.use_kl_in_reward"
        shared.set_kl_of_rewards(made, key, other, _ESTIMATORS.get(penalty, penalty), is_scaled=is_scaled)
        return
    if in_rewards:
        made.unknown["algorithm.use_kl_in_reward"] = (
            f"a KL ({take('algorithm.kl_penalty', 'kl')}, coefficient {other}) in the rewards in addition to"
            " that of the loss: only the one of the loss is set"
        )
    made.overrides[our.KL] = coefficient if in_loss else 0
    kind = kind if in_loss else "k3"
    made.choose(our.ESTIMATOR, "kl_loss_type", kind, _ESTIMATORS, "k2", is_near=not coefficient)


def _bypass(made: Converted, is_fsdp: bool) -> None:
    """Set that the engine's log-probabilities are the old ones."""
    own = f"{_CORRECTION}."
    keys = [f"{own}rollout_{name}" for name in ("is", "rs", "is_threshold", "rs_threshold", "is_batch_normalize")]
    values, loss = {key: made.take(key) for key in keys}, made.take(f"{own}loss_type", "ppo_clip")
    older = [key for key in made.rest if key.startswith("algorithm.rollout_is") or key.endswith(".tis_imp_ratio_cap")]
    made.tell_unused({key: made.take(key) for key in older}, "with bypass_mode")
    made.overrides[_KIND] = "none"
    if is_fsdp and made.overrides.get(our.UPDATES) == 1:  # dp_actor.py, on_policy
        reason = "where a step's only update takes the actor's own log-probabilities as the old ones"
        made.tell_unused({f"{own}bypass_mode": True, f"{own}loss_type": loss, **values}, reason)
        return
    made.overrides[f"{our.GRPO}.old_logp"] = "engine"
    if values[keys[1]] is not None:
        reason = f"{our.GRPO}.old_logp=engine, which bypass_mode means, has no mask here; none leaves it out"
        made.unknown[_KIND] = f"{keys[1]}={values[keys[1]]}, {keys[3]}={values[keys[3]]}: {reason}"
    if loss == "ppo_clip":
        made.tell_unused({key: values[key] for key in (keys[0], *keys[2::2])}, "with bypass_mode")
        if made.overrides.get(our.LOSS) != "clip":
            made.differs.append(f"{own}bypass_mode means the loss of loss_mode=vanilla there")
    else:
        weights = ", ".join(f"{key}={value}" for key, value in {f"{own}loss_type": loss, **values}.items() if value)
        made.unknown[our.LOSS] = (
            f"{weights}: its loss is not clipped; with rollout_is=token alone it is cispo with"
            f" {our.CLIP_HIGH}={(values[keys[2]] or 1) - 1:g}, and no other has a counterpart"
        )


def _correction(made: Converted, is_logged: bool) -> None:
    """Set the correction, which verl leaves out without the engine's log-probabilities (default: `is_logged`)."""
    prefix, log = f"{_CORRECTION}.rollout", f"{_ROLLOUT}.calculate_log_probs"
    if not (logged := made.rest.get(log, is_logged)):
        starts = f"{prefix}_", "algorithm.rollout_is"
        unused = {key: made.take(key) for key in list(made.rest) if key.startswith(starts)}
        made.tell_unused(unused, f"without {log}=True")
    kind, cap, mask, bounds = (made.take(f"{prefix}_{key}") for key in ("is", "is_threshold", "rs", "rs_threshold"))
    if (older := _older_correction(made)) is not None:
        made.tell_unused({f"{prefix}_is": kind}, "beside the keys of verl 0.6")
        kind, cap = older
    if isinstance(logged, Expression) and (kind or mask):
        made.unknown[_KIND] = f"{log}={logged} has no value here; without it verl corrects nothing"
    if kind == "token" and made.overrides.get(our.LOSS) == "gspo":
        made.differs.append(
            "rollout_is with gspo: a token's weight is for its own gradient there, for its response's here"
        )
    if mask is not None:
        _mask(made, f"{prefix}_rs={mask}, {prefix}_rs_threshold={bounds}", str(mask), bounds, kind)
    elif kind is None:
        shared.set_correction(made, f"{prefix}_is", "none", None, None)
    else:
        shared.set_correction(made, f"{prefix}_is={kind}", "tis" if kind == "token" else "sequence_tis", None, cap)


def _mask(made: Converted, text: str, mask: str, bounds: Any, weights: Any) -> None:
    """Set the mask of responses whose mean ratio is out of bounds; leave others to the user, with what comes nearest.

    Args:
        mask: value of `rollout_rs`; `seq_mean_k1`, or `geometric` of verl 0.6, bounds the geometric mean of the ratios.
        weights: value of `rollout_is`; None: a response that is kept has the weight 1, as here.
    """
    least = made.take(f"{_CORRECTION}.rollout_rs_threshold_lower")
    parts = [float(part) for part in re.findall(r"[\d.]+(?:e-?\d+)?", str(bounds))]
    nearest = dict.fromkeys(("seq_mean_k1", "geometric", "sequence", "seq_sum_k1"), "sequence_mask")
    kind = (nearest | dict.fromkeys(("token_k1", "token"), "icepop")).get(mask)
    if kind is None or len(parts) not in (1, 2) or 0 in parts:
        made.unknown[_KIND] = f"{text}: this mask has no counterpart; none leaves it out"
        return
    floor, cap = parts if len(parts) == 2 else (float(least or 1 / parts[0]), parts[0])
    if mask.endswith("k1"):  # its ratio is the engine's probability by the trainer's
        floor, cap = 1 / cap, 1 / floor
    set_ = {_KIND: kind, f"{our.CORRECTION}.cap": cap, f"{our.CORRECTION}.floor": floor}
    if weights is None and mask in ("seq_mean_k1", "geometric"):
        made.overrides |= set_
        made.differs.append(f"{text}: the loss's mean leaves out a masked response there; here its tokens count as 0")
        return
    values = ", ".join(f"{key}={value if isinstance(value, str) else f'{value:g}'}" for key, value in set_.items())
    also = "" if weights is None else f", without the weights of rollout_is={weights}"
    made.unknown[_KIND] = f"{text} has no counterpart here; {values}{also} is what comes nearest"


def _older_correction(made: Converted) -> tuple[Any, Any] | None:
    """Return `rollout_is` and its threshold of today for the keys of verl up to 0.6; None if the file has none."""
    old = "algorithm.rollout_is"
    if (cap := made.take(f"{_ACTOR}.tis_imp_ratio_cap", -1)) > 0:
        return "token", cap
    applies, cap = made.take(old), made.take(f"{old}_threshold")
    level, mode = made.take(f"{old}_level", "token"), made.take(f"{old}_mode", "truncate")
    veto = made.take(f"{old}_veto_threshold", 1e-4)  # the default of verl 0.6
    if cap is None or (mode == "truncate" and not applies):
        made.tell_unused({old: applies, f"{old}_threshold": cap}, f"without {old} and its threshold")
        return None
    if mode != "truncate" or level not in ("token", "sequence"):
        made.unknown[_KIND] = f"{old}_level={level}, {old}_mode={mode}: see the methods here"
    if veto is not None:
        made.differs.append(f"{old}_veto_threshold={veto}: a response with a token's ratio below it is left out there")
    return level, cap


def _rewards(made: Converted) -> None:
    """Add a note with the override for verl's own reward function, if the file has one."""
    keys = [f"{prefix}{key}" for prefix in _OWN_REWARD for key in ("path", "name")]
    if settings := {key: made.take(key) for key in keys if key in made.rest}:
        name = next((value for key, value in settings.items() if key.endswith(".name")), "compute_score")
        made.notes.append(
            f"reward ({', '.join(f'{key}={value}' for key, value in settings.items())}): add"
            " rewards.functions.TASK=FILE.py:score, where score(prompt, response, truth) calls"
            f" {name} (docs/howto/reward_function.md)"
        )


def _program(made: Converted) -> None:
    """Set dynamic sampling, which only DAPO's program has, and the prompts that a step trains on."""
    enabled, filters = f"{our.SAMPLING}.enabled", f"{_FILTERS}.enable"
    if made.overrides.get(enabled) and made.entry in {"", *made.unknown}:
        text = "main_dapo draws more prompts, verl.trainer.main_ppo ignores it"
        made.differs.append(f"{filters}: {text}: then set {enabled}=false")
    elif made.overrides.get(enabled) and not made.entry.endswith("main_dapo"):
        made.overrides[enabled] = False
        made.tell_unused({filters: True}, f"in {made.entry}: only main_dapo draws more prompts")
    prompts, drawn = made.overrides.get(our.PROMPTS), made.rest.get("data.gen_batch_size")
    if made.overrides.get(enabled) is not False:
        return
    if "gen_batch_size" in (reason := made.unknown.get(f"{our.SAMPLING}.max_draw_factor", "")):
        made.unknown[our.PROMPTS] = reason
    elif prompts and drawn and drawn != prompts:
        made.overrides[our.PROMPTS] = drawn
        reason = f"where a step trains on all prompts of data.gen_batch_size={drawn}, without filter_groups"
        made.tell_unused({"data.train_batch_size": prompts}, reason)


def _one_step_off(made: Converted) -> None:
    """Set that the next batch is generated during the update, by engines with GPUs of their own."""
    made.overrides |= {"rollout.own_devices": True, "rollout.sleep": None}
    if made.overrides.get(_KIND) == "none" and f"{our.GRPO}.old_logp" not in made.overrides:
        made.overrides[f"{our.GRPO}.old_logp"] = "engine"  # else `none` is refused here
        made.differs.append("one step off: the old log-probabilities are the actor's own there, the engine's here")
    nodes, each = made.take("rollout.nnodes", 1), made.take("rollout.n_gpus_per_node", 8)
    keys = "trainer.num_nodes", "trainer.devices", "rollout.tensor_parallel_size"
    sizes = [made.overrides.get(key) for key in keys]
    text = f"{sizes[0]} x {sizes[1]} GPUs train there and {nodes} x {each} generate; here each node does both"
    is_same = nodes == sizes[0] and all(isinstance(size, int) for size in (nodes, each, *sizes))
    if is_same and each + sizes[1] <= 8 and each >= sizes[2]:
        made.overrides["rollout.engines"] = each // sizes[2] * nodes
    else:
        made.unknown["rollout.engines"] = f"{text}, as in cluster=h100_4x8_split: also set {keys[0]} and {keys[1]}"


def _engine_lengths(made: Converted) -> None:
    """Set the lengths that the engine's own limits give."""
    keys = [f"{_ROLLOUT}.{key}" for key in ("response_length", "max_model_len", "prompt_length")]
    length, most, of_prompt = (made.take(key) for key in keys)
    response, prompt = made.overrides.get(our.RESPONSE), made.overrides.get(our.PROMPT)
    if length not in (None, response):
        made.overrides[our.RESPONSE] = length
        reason = f"where rollout.response_length={length} cuts responses"
        made.tell_unused({"data.max_response_length": response}, reason)
    if of_prompt not in (None, prompt):
        made.differs.append(f"{keys[2]}={of_prompt}: the engine's limit is that of the data here, {prompt}")
    lengths = [tokens for tokens in (prompt, made.overrides.get(our.RESPONSE)) if isinstance(tokens, int)]
    if most is not None and len(lengths) == 2 and most < sum(lengths):
        made.overrides[our.CONTEXT] = most
    elif most is not None:
        made.unused[keys[1]] = "as long as prompt and response"
