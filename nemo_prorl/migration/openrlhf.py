"""The rules of OpenRLHF: they take settings out of `Converted.rest`, and set the overrides that these mean."""

from nemo_prorl.migration import our, shared
from nemo_prorl.migration.converted import SAME, Converted
from nemo_prorl.migration.names import table
from nemo_prorl.migration.schedules import openrlhf_schedule

_SHAPING = f"{our.GRPO}.shaping.overlong"


def openrlhf(made: Converted) -> None:
    take = made.take
    both, pair = take("actor.eps_clip"), take("actor.eps_clip_low_high")
    if pair:
        made.tell_unused({"actor.eps_clip": both}, "where actor.eps_clip_low_high has both")
    shared.set_clip(made, *(pair or (both, both)))
    made.overrides.setdefault(our.ENTROPY, 0)
    kind = take("actor.policy_loss_type")
    made.choose(our.LOSS, "actor.policy_loss_type", kind, {"ppo": "clip", "gspo": "gspo"}, "clip")
    made.overrides[our.AGGREGATION] = "sequence" if kind == "gspo" else "token"
    if our.PROMPT in made.overrides and isinstance(made.overrides.get(our.RESPONSE), int):  # the form before April 2026
        made.overrides[our.CONTEXT] = made.overrides[our.PROMPT] + made.overrides[our.RESPONSE]
    if (size := take("train.batch_size")) is not None:
        shared.set_updates(made, size, "train.batch_size", is_mixed=True)
    openrlhf_schedule(made)
    if our.VALIDATE_EVERY in made.overrides:
        shared.set_validation(made, 4, 0.6, made.rest.get("rollout.top_p", 1))  # the defaults of eval.*
    _advantage(made)
    in_loss = made.rest.get("algo.kl.use_loss")
    _kl(made)
    terms = [key for key in (our.KL, our.ENTROPY) if made.overrides.get(key) and (key == our.ENTROPY or in_loss)]
    if kind == "gspo" and terms:
        text = f"actor.policy_loss_type=gspo: {' and '.join(terms)} weigh means over tokens there"
        made.differs.append(f"{text}, means of responses' own means here, as the loss")
    _correction(made)
    if made.overrides.get(f"{our.SAMPLING}.enabled"):
        made.differs.append(
            f"algo.dynamic_filtering_range={take('algo.dynamic_filtering_range')}: a group is kept there if its mean"
            " score is between, here if its rewards differ: the same for scores of 0 and 1 only"
        )
    shared.set_draws(made, 0)
    _cut_off(made)
    _layout(made)
    if take("data.apply_chat_template"):
        made.overrides["data.prompt"] = "chat"
    if take("logger.wandb.key") is not None:
        shared.set_wandb(made, take("logger.wandb.project"))
    if (url := take("reward.remote_url")) is not None:
        made.notes.append(
            f"reward (reward.remote_url={url}): add rewards.functions.TASK=FILE.py:score, where score(prompt, response,"
            " truth) calls its function (docs/howto/reward_function.md)"
        )
    data = ["data.prompt_dataset", "data.prompt_split", "eval.dataset", "eval.split", "data.input_key"]
    shared.tell_data(made, *data, "data.label_key", most="data.max_samples", option="--limit")


def _layout(made: Converted) -> None:
    """Set the precision, and what of the layout has a counterpart."""
    dtype = made.take("ds.param_dtype")
    if made.take("bf16"):
        made.unused["bf16"], dtype = SAME, "bf16"
    if dtype == "bf16":
        shared.set_bf16(made)
    elif dtype is not None:
        text = f"ds.param_dtype={dtype} has no counterpart here; bf16 is what comes nearest"
        made.unknown["trainer.precision"] = text
    if made.take("vllm.enable_sleep"):
        made.overrides["rollout.sleep"] = 1
    if made.overrides.get("rollout.engines") == 0:  # there: no engine
        del made.overrides["rollout.engines"]
    is_sharded = made.take("ds.zero_stage") == 3
    shared.tell_layout(made, "DeepSpeed ZeRO-3" if is_sharded else "", table("openrlhf")["layout"])


def _cut_off(made: Converted) -> None:
    """Set what cut-off responses get: there the factor is for the reward with its overlong penalty."""
    factor, buffer = made.take("reward.stop_properly_penalty_coef"), made.overrides.get(f"{_SHAPING}_tokens")
    penalty = made.overrides.get(f"{_SHAPING}_penalty", 1)
    if factor is not None:
        made.overrides[f"{our.GRPO}.unfinished_factor"] = max(factor, 0)
        if factor < 0:  # it is the whole reward of such a response
            made.overrides[f"{our.GRPO}.unfinished_penalty"] = -factor
        if buffer and factor != 1:
            made.differs.append(
                f"reward.stop_properly_penalty_coef={factor}: it is for the reward with its overlong penalty, so that a"
                f" cut-off response has {max(factor, 0) * penalty:g} of that penalty there, {penalty:g} here"
            )
    if buffer and made.overrides.get(our.RESPONSE) is None:
        made.differs.append(
            "reward.overlong_buffer_len: without rollout.max_new_tokens the buffer ends at a response of data.max_len"
            " tokens there, at the end of the context here"
        )


def _advantage(made: Converted) -> None:
    key = "algo.advantage.estimator"
    kind, without_std = made.take(key), made.take("algo.advantage.no_std_norm")
    if kind not in ("gae", "reinforce"):
        unused = {"algo.advantage.gamma": made.take("algo.advantage.gamma")}
        if kind != "reinforce_baseline":
            unused["algo.advantage.no_std_norm"] = without_std
        made.tell_unused(unused, f"with {key}={kind}")
    known = {"group_norm": "group_norm", "rloo": "leave_one_out", "reinforce_baseline": "reinforce_pp_baseline"}
    known |= {"dr_grpo": "mean_only"} | ({"reinforce_baseline": "mean_only"} if without_std else {})
    made.choose(our.ADVANTAGE, key, kind, known, "group_norm")
    shared.tell_token_weights(made, f"{key}={kind}")
    if kind == "reinforce_baseline" and without_std:
        made.differs.append(f"{key}={kind}: the mean over all tokens is also subtracted there")


def _kl(made: Converted) -> None:
    if made.take("use_kl_estimator_k3"):  # the form before --kl_estimator
        made.overrides[our.ESTIMATOR] = "k3"
    if made.take("algo.kl.use_loss"):
        shared.tell_k1(made, "algo.kl.use_loss with algo.kl.estimator=k1")
        return
    # group_norm divides before the subtraction
    is_scaled = made.overrides.get(our.ADVANTAGE) == "reinforce_pp_baseline"
    coefficient, estimator = made.overrides.get(our.KL), str(made.overrides.get(our.ESTIMATOR))
    shared.set_kl_of_rewards(made, "algo.kl.use_loss=false", coefficient, estimator, is_scaled=is_scaled)


def _correction(made: Converted) -> None:
    key = "algo.advantage.is_correction"
    corrects, kind = made.take(f"{key}_enable"), made.take(f"{key}_type")
    if made.take("use_icepop"):
        kind = "icepop"
    floor, cap = made.take(f"{key}_threshold") or (None, None)
    if corrects and made.overrides.get(our.LOSS) == "gspo":
        corrects = False
        made.differs.append("is_correction_enable with gspo: ratios are to the engine's probabilities there, not here")
    shared.set_correction(made, f"{key}_type={kind}", str(kind) if corrects else "none", floor, cap)
