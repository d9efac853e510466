"""The steps that the rules of several trainers share."""

from collections.abc import Iterable
from fnmatch import fnmatchcase
from typing import Any

from nemo_prorl.migration import our
from nemo_prorl.migration.converted import SAME, Converted


def set_updates(made: Converted, responses_per_update: Any, key: str, is_mixed: bool = False) -> None:
    """Set updates_per_step to the responses of a step divided by `responses_per_update`, if all are known.

    Args:
        key: the other trainer's key for this number, which a message names.
        is_mixed: whether the other trainer shuffles the responses of a step over its updates.
    """
    prompts, group = made.overrides.get(our.PROMPTS), made.overrides.get(our.GROUP)
    if prompts is None or group is None or {our.PROMPTS, our.GROUP, our.UPDATES} & made.unknown.keys():
        return
    updates, rest = divmod(prompts * group, responses_per_update)
    if rest or not updates or prompts % updates:
        made.unknown[our.UPDATES] = (
            f"{key}: the {prompts * group} responses of a step do not make whole updates of {responses_per_update}"
            " with whole groups"
        )
    else:
        made.overrides[our.UPDATES] = updates
        if is_mixed and updates > 1:
            made.notes.append(f"{key}: an update takes responses of all groups of the step there, whole groups here")


def set_clip(made: Converted, low: Any, high: Any) -> None:
    made.overrides |= {our.CLIP_LOW: low, our.CLIP_HIGH: high}
    if isinstance(low, int | float) and low > 1:
        made.overrides[our.CLIP_LOW] = 1
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
    made.overrides |= {our.KL: coefficient, our.ESTIMATOR: "k2"}
    if not coefficient:
        return
    text = f"{key}: the KL ({estimator}) is subtracted from the rewards there"
    if estimator == "k1":
        text += "; here it is a term of the loss with the same coefficient, and k2, whose gradient is that of a token's"
        text += " own k1 in the rewards" + (", without those of the response's other tokens" if is_summed else "")
    else:
        text += (
            f", which no override does: {estimator} is never negative, so it lowers a token's probability also below"
            f" the reference's, and near the reference hardly acts; {our.ESTIMATOR}=k2 is set, which in the loss does"
            f" what k1 in the rewards would; {our.KL}=0 leaves it out"
        )
    made.differs.append(text + ("; the std of the advantages divides it there, too" if is_scaled else ""))


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
            " the weight is 1: a bound b there is b^(1/tokens) here, so the same number, which is set, leaves out long"
            " responses there, and hardly any here",
        ),
        "seq-mask-tis": ("sequence_mask", "the weight of a response that is kept is its tokens' ratios there, 1 here"),
    }
    if method not in kinds:
        made.unknown[f"{our.CORRECTION}.kind"] = f"{key}: this method has no counterpart here"
        return
    kind, difference = kinds[method]
    if kind == "tis" and floor:
        difference = difference or f"ratios are raised to {floor} there; tis here has no lower bound"
    made.overrides |= {f"{our.CORRECTION}.kind": kind}
    if kind != "none":
        made.overrides |= {f"{our.CORRECTION}.cap": cap}
    if kind in ("icepop", "sequence_mask"):
        made.overrides |= {f"{our.CORRECTION}.floor": floor or 0}
    if difference:
        made.differs.append(f"{key}: {difference}")


def set_validation(made: Converted, samples: Any, temperature: Any, top_p: Any, most: Any = None) -> None:
    """Set what the file leaves out of how validations sample to the values of the other trainer, and tell all.

    Args:
        most: prompts of a validation there; None: those of all its records, as here.
    """
    values = {"samples": samples, "temperature": temperature, "top_p": top_p}
    known = {f"{our.GRPO}.validation_{key}": value for key, value in values.items() if isinstance(value, int | float)}
    made.overrides = known | made.overrides
    text = ", ".join(f"{key}={made.overrides[key]:g}" for key in known if key not in made.unknown)
    text += "" if most in (None, -1) else f"; of at most {most} prompts there: `prorl data prepare --size`"
    made.notes.append(f"validations sample as the evaluations there: {text}")


def tell_layout(made: Converted, tool: str, patterns: Iterable[str]) -> None:
    """Tell that the sizes which decide how a model lies on the GPUs must be chosen here.

    Args:
        tool: what shards the weights there; empty if the file has sizes of Megatron, which are those here.
        patterns: of keys whose sizes have no counterpart; values that switch something off need none.
    """
    keys = [key for key in made.rest if any(fnmatchcase(key, pattern) for pattern in patterns)]
    sizes = {key: value for key in keys if (value := made.take(key)) is True or value not in (False, None, 1, -1)}
    made.unused |= dict.fromkeys((key for key in keys if key not in sizes and key in made.given), SAME)
    used = ", ".join(f"{key}={value}" for key, value in sizes.items())
    if used or tool:
        made.notes.append(
            f"layout{f' ({used})' if used else ''}: {f'{tool} shards the weights over the GPUs; ' if tool else ''}here"
            " only the optimizer is sharded by itself, nothing is offloaded, and a sequence lies on the GPUs of one"
            " tensor-parallel group: choose model.tensor_model_parallel_size, model.pipeline_model_parallel_size,"
            " rollout.tensor_parallel_size and rollout.engines so that the memory of `prorl plan` fits"
        )


def set_bf16(made: Converted, is_on: bool = True) -> None:
    made.overrides |= {"trainer.precision": "bf16" if is_on else 32, "model.megatron_amp_O2": is_on}


def set_draws(made: Converted, factor: float) -> None:
    """Set how many prompts a step may draw, as a multiple of its prompts; 0: as many as it takes."""
    if made.overrides.get(f"{our.SAMPLING}.enabled") and factor >= 1:
        made.overrides[f"{our.SAMPLING}.max_draw_factor"] = float(factor)


def set_overlong(made: Converted, key: str, tokens: Any, penalty: Any, most: Any) -> None:
    """Set DAPO's penalty, which begins `tokens` before `most`, the value of `key`, there, and has no bound."""
    shaping, context = f"{our.GRPO}.shaping.overlong_", made.overrides.get(our.CONTEXT)
    longest = min((size for size in (context, made.overrides.get(our.RESPONSE)) if isinstance(size, int)), default=None)
    if longest and tokens and penalty is not None and most not in (None, longest):
        begin = most - tokens
        tokens, penalty = max(0, longest - begin), penalty * max(0, longest - begin) / tokens
        made.notes.append(
            f"{key}={most}: the penalty begins at {begin} tokens there, and grows to the longest response:"
            f" {shaping}tokens={tokens} with {shaping}penalty={penalty:g} is the same line"
        )
    made.overrides |= {f"{shaping}tokens": tokens, f"{shaping}penalty": penalty}
    if isinstance(context, int) and (longest or 0) + (made.overrides.get(our.PROMPT) or context) > context:
        text = "where the context limits a response, its penalty begins earlier here by the tokens of its prompt"
        made.differs.append(f"{key}={most}: {text}")


def set_wandb(made: Converted, project: Any = None) -> None:
    made.overrides["exp_manager.create_wandb_logger"] = True
    if project is not None:
        made.overrides["exp_manager.wandb_logger_kwargs.project"] = project
    made.notes.append("Weights & Biases: run `wandb login`, or set WANDB_API_KEY, before the start; else leave it out")


def tell_data(made: Converted, patterns: Iterable[str], most: str | None = None, option: str = "") -> None:
    """Take the keys of these patterns, and add a note on how to make prompt records from their data.

    Args:
        most: key of the largest number of prompts that the other trainer takes from the data.
        option: of `prorl data prepare`, which takes as many.
    """
    keys = [key for pattern in patterns for key in list(made.rest) if fnmatchcase(key, pattern)]
    used = ", ".join(f"{key}={value}" for key in keys if (value := made.take(key)) is not None)
    limit = made.take(most) if most is not None else None
    if limit is not None and (isinstance(limit, str) or limit > 0):
        made.most = f"{most}={limit if isinstance(limit, str) else int(limit)}"
        made.notes.append(f"{made.most}: give `prorl data prepare` {option} {made.most.partition('=')[2]}")
    made.notes.append(
        f"data{f' ({used})' if used else ''}: make prompt records with `prorl data prepare math --from FILE --out"
        " DIR` (with `--task TASK` for a reward function of your own), then set data.train and data.validation; without"
        " data.train=[...] cluster=h100_4x8 looks for the paper's ten files in data.folder, and cluster=laptop trains"
        " on its puzzles"
    )
