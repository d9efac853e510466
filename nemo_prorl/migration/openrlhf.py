"""The rules of OpenRLHF: they take settings out of `Converted.rest`, and set the overrides that these mean."""

from nemo_prorl.migration import our, shared
from nemo_prorl.migration.converted import SAME, Converted
from nemo_prorl.migration.names import table
from nemo_prorl.migration.schedules import openrlhf_schedule

_SHAPING = f"{our.GRPO}.shaping.overlong"


def openrlhf(made: Converted) -> None:
    take = made.take
    both, pair = take("actor.eps_clip"), take("actor.eps_clip_low_high")
    shared.set_clip(made, *(pair or (both, both)))
    made.overrides.setdefault(our.ENTROPY, 0)
    kind = take("actor.policy_loss_type")
    made.choose(our.LOSS, "actor.policy_loss_type", kind, {"ppo": "clip", "gspo": "gspo"}, "clip")
    made.overrides[our.AGGREGATION] = "token" if take("token_level_loss") else "sequence"  # gspo: it has none
    if our.PROMPT in made.overrides and isinstance(made.overrides.get(our.RESPONSE), int):  # the form before April 2026
        made.overrides[our.CONTEXT] = made.overrides[our.PROMPT] + made.overrides[our.RESPONSE]
    if (size := take("train.batch_size")) is not None:
        shared.set_updates(made, size, "train.batch_size", is_mixed=True)
    openrlhf_schedule(made)
    if our.VALIDATE_EVERY in made.overrides:
        shared.set_validation(made, 4, 0.6, made.rest.get("rollout.top_p", 1))  # the defaults of eval.*
    _advantage(made)
    _kl(made)
    _correction(made)
    _filter(made)
    _cut_off(made)
    _layout(made)
    if take("data.apply_chat_template"):
        made.overrides["data.prompt"] = "chat"
    if take("logger.wandb.key") is not None:
        shared.set_wandb(made, take("logger.wandb.project"))


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


def _filter(made: Converted) -> None:
    """Tell which groups are kept: a range of the mean score decides there, whether rewards differ here."""
    key = "algo.dynamic_filtering_range"
    bounds, group = made.take(key), made.overrides.get(our.GROUP)
    if not made.overrides.get(f"{our.SAMPLING}.enabled"):
        return
    setting, text = f"{key}={bounds}", "a group is kept there if its mean score is between, here if its rewards differ"
    if not (isinstance(bounds, list) and isinstance(group, int)):
        made.unknown[setting] = text
        return
    kept = {count: bounds[0] < count / group < bounds[1] for count in range(group + 1)}
    if others := [count for count in kept if kept[count] != (0 < count < group)]:
        means = ", ".join(f"{count / group:g} is {'kept' if kept[count] else 'left out'}" for count in others[:4])
        made.unknown[setting] = f"{text}: of groups with scores of 0 and 1 a mean of {means} there, and not here"
    else:
        made.differs.append(f"{setting}: {text}: the same for scores of 0 and 1 only")


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


def _advantage(made: Converted) -> None:
    key = "algo.advantage.estimator"
    kind, without_std = made.take(key), made.take("algo.advantage.no_std_norm")
    known = {"group_norm": "group_norm", "rloo": "leave_one_out", "reinforce_baseline": "reinforce_pp_baseline"}
    known |= {"dr_grpo": "mean_only"} | ({"reinforce_baseline": "mean_only"} if without_std else {})
    made.choose(our.ADVANTAGE, key, kind, known, "group_norm")


def _kl(made: Converted) -> None:
    if made.take("use_kl_estimator_k3"):  # the form before --kl_estimator
        made.overrides[our.ESTIMATOR] = "k3"
    if made.take("algo.kl.use_loss"):
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
    floor, cap = bounds = made.take(f"{key}_threshold") or (None, None)
    of_gspo = corrects and made.overrides.get(our.LOSS) == "gspo"
    if of_gspo:  # its ratios are to the engine's probabilities
        made.overrides[f"{our.GRPO}.old_logp"] = "engine"
        made.tell_unused({f"{key}_type": kind, f"{key}_threshold": bounds}, "with actor.policy_loss_type=gspo")
    shared.set_correction(made, f"{key}_type={kind}", str(kind) if corrects and not of_gspo else "none", floor, cap)
