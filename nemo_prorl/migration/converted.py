"""The result of a conversion, and the steps that the rules of several trainers share."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

GRPO = "trainer.grpo"
PROMPTS, GROUP, UPDATES = (f"{GRPO}.{key}" for key in ("prompts_per_step", "samples_per_prompt", "updates_per_step"))
CONTEXT, RESPONSE, PROMPT = f"{GRPO}.context_tokens", f"{GRPO}.max_response_tokens", "data.max_prompt_tokens"
ADVANTAGE, AGGREGATION, LOSS = (f"{GRPO}.{key}" for key in ("advantage", "aggregation", "loss"))
CLIP_LOW, CLIP_HIGH, DUAL_CLIP = (f"{GRPO}.{key}" for key in ("clip_low", "clip_high", "dual_clip"))
KL, ESTIMATOR, ENTROPY = f"{GRPO}.kl_coef", f"{GRPO}.kl_estimator", f"{GRPO}.entropy_coef"
CORRECTION, SAMPLING = f"{GRPO}.correction", f"{GRPO}.dynamic_sampling"
VALIDATE_EVERY = f"{GRPO}.validate_every"
STEPS, LR, SCHED = f"{GRPO}.max_steps", "model.optim.lr", "model.optim.sched"


@dataclass
class Converted:
    """The result of a conversion.

    Attributes:
        rest: {key of the other trainer: value} of the settings that are not converted yet.
        overrides: {key of this project: value}.
        unknown: {key of this project: why the user must set it}.
        differs: sentences about what is not the same here.
        notes: sentences about what else the user must look at.
        needless: settings that need no override, as KEY=VALUE.
        misspelt: {key that the other trainer does not know: the key that may be meant}.
        left: {key of the other trainer: value} of the settings without a counterpart.
        given: keys that the file has; the others in `rest` are defaults.
        drawn: prompts of the data that the other trainer takes for a step; None: `prompts_per_step`.
        most: what limits the prompts of the data, as KEY=VALUE; None if nothing does.
        entry: the program that a script starts, such as `verl.trainer.main_ppo`; empty if it is not known.
    """

    rest: dict[str, Any]
    overrides: dict[str, Any] = field(default_factory=dict)
    unknown: dict[str, str] = field(default_factory=dict)
    differs: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    needless: list[str] = field(default_factory=list)
    misspelt: dict[str, str] = field(default_factory=dict)
    left: dict[str, Any] = field(default_factory=dict)
    given: frozenset[str] = frozenset()
    drawn: float | None = None
    most: str | None = None
    entry: str = ""

    def take(self, key: str, default: Any = None) -> Any:
        """Return the value of a setting of the other trainer, and remove the setting from `rest`."""
        return self.rest.pop(key, default)

    def choose(
        self, ours: str, key: str, value: Any, known: Mapping[str, str], nearest: str, is_near: bool = False
    ) -> None:
        """Set `ours` to this project's name for the method `value` of the other trainer.

        Args:
            nearest: value for a method without a name here.  The user must set it unless `is_near`; rules read it.
        """
        if ours in self.unknown:
            return
        self.overrides[ours] = known.get(str(value), nearest)
        if str(value) not in known:
            text = f"{key}={value} has no counterpart"
            if is_near:
                self.differs.append(f"{text}; {ours}={nearest} is set in its place")
            else:
                self.unknown[ours] = f"{text} here; {nearest} is what comes nearest"


def tell_unused(made: Converted, keys: Mapping[str, Any], why: str) -> None:
    """Tell which of these settings, {key: value}, the file has without an effect; 0 says so itself."""
    for key, value in keys.items():
        if key in made.given and value:
            made.differs.append(f"{key}={value} has no effect there, {why}")
        elif key in made.given:
            made.needless.append(f"{key}={value}")


def set_updates(made: Converted, responses_per_update: Any, what: str) -> None:
    """Set updates_per_step to the responses of a step divided by `responses_per_update`, if all are known.

    Args:
        what: the other trainer's key for this number, which a message names.
    """
    prompts, group = made.overrides.get(PROMPTS), made.overrides.get(GROUP)
    if prompts is None or group is None or {PROMPTS, GROUP, UPDATES} & made.unknown.keys():
        return
    updates, rest = divmod(prompts * group, responses_per_update)
    if rest or not updates or prompts % updates:
        made.unknown[UPDATES] = (
            f"{what}: the {prompts * group} responses of a step do not make whole updates of {responses_per_update}"
            " with whole groups"
        )
    else:
        made.overrides[UPDATES] = updates


def set_clip(made: Converted, low: Any, high: Any) -> None:
    made.overrides |= {CLIP_LOW: low, CLIP_HIGH: high}
    if isinstance(low, int | float) and low > 1:
        made.overrides[CLIP_LOW] = 1
        made.notes.append(f"the lower clip range {low} is written as 1: no ratio is below 0")


def set_kl_of_rewards(
    made: Converted, key: str, coefficient: Any, estimator: str, is_scaled: bool, is_summed: bool = True
) -> None:
    """Set the KL term that comes nearest to an estimate of the KL that is subtracted from the rewards.

    The gradient of k1 in the rewards is that of KL(policy || reference), and so is that of k2 as a loss.  k2 and k3 in
    the rewards are squares of the log-ratio near the reference: their gradient has no first order there.

    Args:
        is_scaled: whether the other trainer divides advantages by a std after the subtraction.
        is_summed: whether a token there also gets the KL of other tokens of its response.
    """
    made.overrides |= {KL: coefficient, ESTIMATOR: "k2"}
    if not coefficient:
        return
    text = f"{key}: the KL ({estimator}) is subtracted from the rewards there"
    if estimator == "k1":
        text += "; here it is a term of the loss with the same coefficient, and k2, whose gradient is that of a token's"
        text += " own k1 in the rewards" + (", without those of the response's other tokens" if is_summed else "")
    else:
        text += (
            f", which no override does: {estimator} is never negative, so it lowers a token's probability also below"
            f" the reference's, and near the reference hardly acts; {ESTIMATOR}=k2 is set, which in the loss does"
            f" what k1 in the rewards would; {KL}=0 leaves it out"
        )
    made.differs.append(text + ("; the std of the advantages divides it there, too" if is_scaled else ""))


def tell_k1(made: Converted, key: str) -> None:
    if made.overrides.get(KL) and made.overrides.get(ESTIMATOR) == "k1":
        made.notes.append(
            f"{key}: the expected gradient of k1 as a loss is 0, there as here: nothing holds the policy near the"
            f" reference; {ESTIMATOR}=k2 does"
        )


def set_correction(made: Converted, key: str, method: str, floor: Any, cap: Any) -> None:
    """Set the correction of the gap between engine and trainer; `method` is the other trainer's value of `key`."""
    kinds = {
        "none": ("none", ""),
        "tis": ("tis", ""),
        "icepop": ("icepop", ""),
        "sequence_tis": ("tis", "the ratio is that of the whole response there, that of each token here"),
        "sequence_mask": (
            "sequence_mask",
            "the ratio is the product over the response there, and is the weight; here it is the geometric mean, and"
            " the weight is 1",
        ),
        "seq-mask-tis": ("sequence_mask", "the weight of a response that is kept is its tokens' ratios there, 1 here"),
    }
    kind, difference = kinds[method]
    if kind == "tis" and floor:
        difference = difference or f"ratios are raised to {floor} there; tis here has no lower bound"
    made.overrides |= {f"{CORRECTION}.kind": kind}
    if kind != "none":
        made.overrides |= {f"{CORRECTION}.cap": cap}
    if kind in ("icepop", "sequence_mask"):
        made.overrides |= {f"{CORRECTION}.floor": floor or 0}
    if difference:
        made.differs.append(f"{key}: {difference}")


def tell_cispo(made: Converted, key: str) -> None:
    """Tell that the other trainer's CISPO also has a lower bound, if a ratio can be below it."""
    if made.overrides.get(LOSS) == "cispo" and (made.overrides.get(CLIP_LOW) or 0) < 1:
        made.differs.append(f"{key}: ratios below 1 - clip_low are raised to it there; cispo has no lower bound here")


def set_validation(made: Converted, samples: Any, temperature: Any, top_p: Any) -> None:
    """Set what the file leaves out of how validations sample to the values of the other trainer, and tell all."""
    values = {"samples": samples, "temperature": temperature, "top_p": top_p}
    known = {f"{GRPO}.validation_{key}": value for key, value in values.items() if isinstance(value, int | float)}
    made.overrides = known | made.overrides
    told = ", ".join(f"{key}={made.overrides[key]:g}" for key in known if key not in made.unknown)
    made.notes.append(f"validations sample as the evaluations there: {told}")


def tell_layout(made: Converted, what: str, keys: Mapping[str, Any]) -> None:
    """Tell that the sizes which decide how a model lies on the GPUs must be chosen here.

    Args:
        what: shards the weights there; empty if the file has sizes of Megatron, which are those here.
        keys: {key: value} of the file's settings for it; those that switch something off count as needless.
    """
    is_off = {key: value is not True and value in (False, None, 1, -1) for key, value in keys.items()}
    made.needless += [f"{key}={value}" for key, value in keys.items() if is_off[key]]
    used = ", ".join(f"{key}={value}" for key, value in keys.items() if not is_off[key])
    if not (used or what):
        return
    made.notes.append(
        f"layout{f' ({used})' if used else ''}: {f'{what} shards the weights over the GPUs; ' if what else ''}here only"
        " the optimizer is sharded by itself, nothing is offloaded, and a sequence lies on the GPUs of one"
        " tensor-parallel group: choose model.tensor_model_parallel_size, model.pipeline_model_parallel_size,"
        " rollout.tensor_parallel_size and rollout.engines so that the memory of `prorl plan` fits"
    )


def tell_constant(made: Converted, key: str, value: Any, length: str) -> None:
    if made.overrides.get(AGGREGATION) == "constant":
        made.differs.append(
            f"{key}={value}: the loss is divided by {length} there, by {CONTEXT} here; without gradient clipping Adam"
            " hides the factor, and the KL term has it too"
        )


def set_bf16(made: Converted, is_on: bool = True) -> None:
    made.overrides |= {"trainer.precision": "bf16" if is_on else 32, "model.megatron_amp_O2": is_on}


def tell_token_weights(made: Converted, kind: Any) -> None:
    if made.overrides.get(ADVANTAGE) == "reinforce_pp_baseline":
        made.differs.append(f"{kind}: the std weighs a response by its tokens there, each response once here")


def set_draws(made: Converted, factor: float) -> None:
    """Set how many prompts a step may draw, as a multiple of its prompts; 0: as many as it takes."""
    if not made.overrides.get(f"{SAMPLING}.enabled") or f"{SAMPLING}.max_draw_factor" in made.unknown:
        return
    if factor < 1:
        made.differs.append(f"dynamic sampling draws without a limit there, up to {SAMPLING}.max_draw_factor here")
    else:
        made.overrides[f"{SAMPLING}.max_draw_factor"] = float(factor)


def set_overlong(made: Converted, key: str, tokens: Any, penalty: Any, most: Any) -> None:
    """Set DAPO's penalty, which begins `tokens` before `most`, the value of `key`, there, and has no bound."""
    shaping, context = f"{GRPO}.shaping.overlong_", made.overrides.get(CONTEXT)
    longest = min((one for one in (context, made.overrides.get(RESPONSE)) if isinstance(one, int)), default=None)
    if longest and tokens and penalty is not None and most not in (None, longest):
        begin = most - tokens
        tokens, penalty = max(0, longest - begin), penalty * max(0, longest - begin) / tokens
        made.notes.append(
            f"{key}={most}: the penalty begins at {begin} tokens there, and grows to the longest response:"
            f" {shaping}tokens={tokens} with {shaping}penalty={penalty:g} is the same line"
        )
    made.overrides |= {f"{shaping}tokens": tokens, f"{shaping}penalty": penalty}
    if isinstance(context, int) and (longest or 0) + (made.overrides.get(PROMPT) or context) > context:
        text = "where the context limits a response, its penalty begins earlier here by the tokens of its prompt"
        made.differs.append(f"{key}={most}: {text}")


def set_wandb(made: Converted, project: Any = None) -> None:
    made.overrides["exp_manager.create_wandb_logger"] = True
    if project is not None:
        made.overrides["exp_manager.wandb_logger_kwargs.project"] = project
    made.notes.append("Weights & Biases: run `wandb login`, or set WANDB_API_KEY, before the start; else leave it out")


def tell_data(made: Converted, *keys: str, most: str | None = None, option: str = "") -> None:
    """Take these keys, and add a note on how to make prompt records from their data.

    Args:
        most: key of the largest number of prompts that the other trainer takes from the data.
        option: of `prorl data prepare`, which takes as many.
    """
    found = ", ".join(f"{key}={value}" for key in keys if (value := made.take(key)) is not None)
    limit = made.take(most) if most is not None else None
    if limit is not None and (isinstance(limit, str) or limit > 0):
        made.most = f"{most}={limit if isinstance(limit, str) else int(limit)}"
        made.notes.append(f"{made.most}: give `prorl data prepare` {option} {made.most.partition('=')[2]}")
    made.notes.append(
        f"data{f' ({found})' if found else ''}: make prompt records with `prorl data prepare math --from FILE --out"
        " DIR` (with `--task TASK` for a reward function of your own), then set data.train and data.validation; without"
        " data.train=[...] cluster=h100_4x8 looks for the paper's ten files in data.folder, and cluster=laptop trains"
        " on its puzzles"
    )
