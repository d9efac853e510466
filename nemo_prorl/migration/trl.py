"""The rules of TRL: they take settings out of `Converted.rest`, and set the overrides that these mean."""

import ast
import re
from typing import Any

from nemo_prorl.migration import our, shared
from nemo_prorl.migration.converted import Converted
from nemo_prorl.migration.names import RLOO
from nemo_prorl.migration.schedules import tell_updates, trl_schedule
from nemo_prorl.migration.shell import Expression

_WARMUP = f"{our.SCHED}.warmup_steps"
_OVERLONG = "get_soft_overlong_punishment"
_NAME = re.compile(r"[\w.]*\w")
_SAVE_EVERY = f"{our.GRPO}.checkpoint_every"
_FEWER_BITS = re.compile(r"(paged_)?adamw_((bnb_|torch_)?[48]bit|anyprecision)")
_UPDATE_COUNTS = [our.STEPS, _SAVE_EVERY, our.VALIDATE_EVERY, "trainer.resets.every", _WARMUP]
_OF_OPTIMIZER = [our.LR, f"{our.SCHED}.name", *(f"model.optim.{key}" for key in ("betas", "eps", "weight_decay"))]


def trl(made: Converted) -> None:
    take = made.take
    kind, level = made.rest.get("loss_type"), made.rest.get("importance_sampling_level")
    _trl_loss(made)
    _trl_sampling(made)
    made.overrides["model.optim.betas"] = [take("adam_beta1"), take("adam_beta2")]
    made.overrides[our.ESTIMATOR] = "k3"
    if kind != RLOO and made.rest.get("use_bias_correction_kl") is True and level == "token":
        made.take("use_bias_correction_kl")
        made.overrides[our.ESTIMATOR] = "k2"
    made.overrides[f"{our.SAMPLING}.enabled"] = False
    if "wandb" in str(made.rest.get("report_to")):
        shared.set_wandb(made)
        take("report_to")
    scale, normalizes = str(take("scale_rewards")).lower(), take("normalize_advantages")
    scales = {"false": "mean_only", "none": "mean_only", "true": "group_norm", "group": "group_norm"}
    scales |= {RLOO: "reinforce_pp_baseline" if normalizes else "leave_one_out"}
    near = "reinforce_pp_baseline, with the std of the differences in place of the rewards'"
    made.choose(our.ADVANTAGE, "scale_rewards", scale, scales, near if scale == "batch" else "group_norm")
    if (model := take("model")) is not None:
        made.overrides.setdefault(our.MODEL, model)
    if (length := take("vllm_max_model_length")) is not None:
        made.overrides[our.CONTEXT] = length
    trl_schedule(made)  # in TRL's steps, of which `_trl_batch` makes steps of here
    _trl_reference(made)
    _trl_batch(made, kind)
    if kind == RLOO:
        _trl_rloo(made, bool(normalizes))
    tell_updates(made, "lr_scheduler_type")
    _trl_validation(made)
    _trl_engine(made)
    _trl_entropy(made)
    if "trainer.precision" not in made.unknown:  # without bf16 and fp16 the numbers have 32 bits (base_config.py:128)
        shared.set_bf16(made, take("bf16") is not False or made.rest.get("fp16") is True)
    _trl_weights(made)
    if (more := take("**")) is not None:
        made.unknown[f"**{more}"] = "the settings of this mapping have no value here"
    _trl_optimizer(made)
    _trl_rewards(made)


def _trl_weights(made: Converted) -> None:
    """Leave a LoRA to the user, unless the command line decides whether there is one."""
    for key in ("quantization_config", "peft_config"):  # load_in_4bit, load_in_8bit and use_peft decide
        if str(made.rest.get(key)).startswith(f"get_{key}("):
            del made.rest[key]
    if (lora := made.take("peft_config")) is not None:
        made.unknown[f"peft_config={lora}"] = "all weights are trained here"


def _trl_rloo(made: Converted, is_scaled: bool) -> None:
    """Set the KL of RLOOTrainer; leave to the user what follows from its sum and product over a response's tokens."""
    made.take(RLOO)
    shared.set_kl_of_rewards(made, "beta", made.overrides.get(our.KL), "k1", is_scaled)
    made.divisor = "1 (a sum over a response's tokens)", 1
    if made.overrides.get(our.UPDATES) != 1:
        made.unknown[our.LOSS] = (
            "from a step's second update on, RLOO clips the product of a response's ratios, which no loss here does;"
            " clip, with the ratio of each token, is what comes nearest"
        )


def _trl_optimizer(made: Converted) -> None:
    """Leave the optimizer's numbers to the user if the script makes its own."""
    for key in ("optimizers", "optimizer_cls_and_kwargs"):
        if (own := made.take(key)) is not None:
            reason = f"{key}={own}: the script's own optimizer and schedule decide it"
            made.unknown |= dict.fromkeys(_OF_OPTIMIZER, reason)
    clip, of_trl = made.take("deepspeed.gradient_clipping", "auto"), made.overrides.get(our.CLIP)
    if clip not in ("auto", of_trl):
        made.unknown[our.CLIP] = (
            f"deepspeed.gradient_clipping={clip}, max_grad_norm={of_trl}: transformers wants them equal"
        )
    if _FEWER_BITS.fullmatch(str(made.rest.get("optim"))):
        made.differs.append(f"optim={made.take('optim')}: AdamW's moments have fewer bits there")


def _trl_loss(made: Converted) -> None:
    kind, level, low, high = map(made.take, ("loss_type", "importance_sampling_level", "epsilon", "epsilon_high"))
    high = low if high is None else high
    shared.set_clip(made, low, high)
    known = {"grpo": "sequence", "dr_grpo": "constant", RLOO: "constant"}
    known |= dict.fromkeys(("bnpo", "dapo", "cispo"), "token")
    made.choose(our.AGGREGATION, "loss_type", kind, known, "sequence" if kind in ("sapo", "luspo") else "token")
    if our.AGGREGATION in made.unknown and "loss_type" in made.given:
        return
    made.choose(our.LOSS, "importance_sampling_level", level, {"token": "clip", "sequence": "gspo"}, "clip")
    if kind == "dr_grpo":
        tokens = made.overrides.get(our.RESPONSE)
        made.divisor = f"max_completion_length={tokens} (loss_type=dr_grpo)", tokens
    if kind != "cispo":
        return
    made.tell_unused({"delta": made.overrides.get(our.DUAL_CLIP)}, "with loss_type=cispo")
    made.overrides |= {our.LOSS: "cispo", our.DUAL_CLIP: None}
    if isinstance(high, int | float):
        bound = f"loss_type=cispo: ratios are capped at epsilon_high={high} there, at 1 + {our.CLIP_HIGH} here"
        if high > 1:
            made.overrides[our.CLIP_HIGH] = round(high - 1, 12)
            made.notes.append(bound)
        else:
            made.unknown[our.CLIP_HIGH] = f"{bound}, which is above 1"


def _trl_entropy(made: Converted) -> None:
    """Set the entropy bonus: a mean over tokens there; here it has the denominator of the loss."""
    take, begins, updates = made.take, made.overrides.get(our.ENTROPY), made.overrides.get(our.UPDATES, 1)
    is_adaptive, delta, least = take("use_adaptive_entropy"), take("entropy_coef_delta"), take("entropy_coef_min", 0)
    keys = [our.ENTROPY]
    if is_adaptive:
        *keys, target, enabled = (
            f"{our.GRPO}.adaptive_entropy.{key}" for key in ("step", "maximum", "target", "enabled")
        )
        made.overrides |= dict(zip(keys, (delta and delta * updates, take("entropy_coef_max")), strict=True))
        made.overrides |= {target: take("entropy_target"), enabled: True, our.ENTROPY: 0}
        if updates > 1:
            made.notes.append(f"entropy_coef_delta={delta}: of an update there, of a step's {updates} updates here")
        if begins or least:
            text = f"use_adaptive_entropy: the coefficient begins at {begins} there, and is at least {least}; here both"
            made.differs.append(f"{text} are 0")
    elif not begins:
        return
    if made.overrides.get(our.AGGREGATION) == "sequence":
        made.differs.append("entropy bonus: the mean over a micro-batch's tokens there, of responses' own means here")
    elif made.overrides.get(our.AGGREGATION) == "constant":
        for key in keys:
            made.unknown.setdefault(
                key,
                "the entropy is a mean over tokens there, and its sum is divided as the loss here:"
                f" {made.overrides.get(key)} * max_completion_length / (mean tokens of a response) weighs the same",
            )


def _trl_sampling(made: Converted) -> None:
    """Set what generation_kwargs has over the settings of the configuration."""
    ours = f"{our.GRPO}.temperature"
    if (value := made.take("generation_kwargs.temperature")) is not None:
        text = f"generation_kwargs.temperature={value} samples there, and is set; the loss has log-probabilities of"
        made.differs.append(f"{text} temperature={made.overrides.get(ours)} there, of that of the samples here")
        made.overrides[ours] = value
    for key in ("max_new_tokens", "max_tokens"):
        made.overrides[our.RESPONSE] = made.take(f"generation_kwargs.{key}", made.overrides.get(our.RESPONSE))


def _trl_engine(made: Converted) -> None:
    take = made.take
    has_engine, corrects = take("use_vllm"), take("vllm_importance_sampling_correction")
    mode, key = take("vllm_importance_sampling_mode"), "vllm_importance_sampling_mode"
    floor, cap = take("vllm_importance_sampling_clip_min"), take("vllm_importance_sampling_clip_max")
    known = {"token_truncate": "tis", "token_mask": "icepop", "sequence_truncate": "sequence_tis"}
    if not has_engine:
        shared.set_correction(made, key, "tis", None, 2.0)
    else:
        method = known.get(mode, mode) if corrects else "none"
        shared.set_correction(made, f"{key}={mode}", method, floor, cap)


def _trl_reference(made: Converted) -> None:
    every, share = made.take("ref_model_sync_steps"), made.take("ref_model_mixup_alpha")
    if made.take("sync_ref_model") and made.overrides.get(our.KL) != 0:
        if share == 1 or "trainer.resets.parts" in made.unknown:
            made.overrides |= {"trainer.resets.every": every, "trainer.resets.parts": "reference"}
        else:
            made.unknown["trainer.resets.every"] = (
                f"sync_ref_model: every {every} steps the reference becomes {share} (ref_model_mixup_alpha) of the"
                " policy and the rest of itself there; trainer.resets.parts=reference makes it the policy"
            )


def _trl_processes(made: Converted) -> int | None:
    """Return the number of processes of the run, and set the nodes and devices; None if it has no value."""
    keys = "num_processes", "nproc_per_node", "num_gpus", "nnodes", "num_machines", "num_nodes"
    counts = {key: value for key in keys if (value := made.take(key)) is not None}
    config = made.take("config_file")
    unclear = [f"{key}={value}" for key, value in counts.items() if not isinstance(value, int | float) or value < 1]
    if config is not None and not counts:
        unclear.append(f"{config} (missing: put it where the script names it, and convert again)")
    if unclear:
        made.unknown[our.PROMPTS] = made.unknown["trainer.devices"] = (
            f"TRL's batch is that of one process, and {', '.join(unclear)} does not say how many there are"
        )
        return None
    nodes = int(counts.get("nnodes") or counts.get("num_machines") or counts.get("num_nodes") or 1)
    each = counts.get("nproc_per_node") or counts.get("num_gpus")
    if each is None and "num_processes" not in counts:
        more = f"N times {our.PROMPTS}"
        if (all_of_them := made.rest.get("generation_batch_size")) is not None:
            more = (
                f"N times the responses of an update, and so {our.UPDATES} / N: generation_batch_size={all_of_them} is"
            )
            more += " that of all processes"
        made.differs.insert(
            0,
            f"one process was assumed, because no file says how many there are: N processes have {more}; for them"
            " convert a shell script with `accelerate launch --num_processes N FILE.py`",
        )
    whole = int(counts["num_processes"]) if each is None and "num_processes" in counts else int(each or 1) * nodes
    made.overrides |= {"trainer.num_nodes": nodes, "trainer.devices": max(1, whole // nodes)}
    return whole


def _trl_batch(made: Converted, kind: Any) -> None:
    """Set the prompts and updates of a step, unless a size that they follow from is unknown."""
    take, group = made.take, made.overrides.get(our.GROUP)
    device, accumulated = take("per_device_train_batch_size"), take("gradient_accumulation_steps")
    processes = _trl_processes(made)
    whole, steps = take("generation_batch_size"), take("steps_per_generation")
    if {our.PROMPTS, our.GROUP} & made.unknown.keys() or None in (device, accumulated, group, processes):
        return
    batch, slice_ = device * accumulated * processes, device * processes
    generated = whole or (steps or accumulated) * slice_
    of = "a process" if processes == 1 else f"{processes} processes"
    if whole and (steps or whole % slice_):
        reason = "steps_per_generation is set, too" if steps else f"it is no multiple of {slice_} responses of {of}"
        made.unknown[our.PROMPTS] = f"generation_batch_size={whole}: TRL refuses it, because {reason}"
    elif generated % group:
        made.unknown[our.PROMPTS] = f"{generated} responses of {of} are no whole groups of {group}"
    elif generated < batch and batch % generated:
        made.unknown[our.PROMPTS] = (
            f"an update of {batch} responses is no multiple of the {generated} that TRL generates"
        )
    if our.PROMPTS in made.unknown:
        return
    made.overrides["model.micro_batch_size"] = device
    if kind in ("dapo", "cispo"):
        _tell_denominator(made, f"loss_type={kind}", generated, batch)
    generated = max(batch, generated)
    made.overrides[our.PROMPTS] = generated // group
    size = "per_device_train_batch_size * gradient_accumulation_steps * processes"
    shared.set_updates(made, batch, size, is_mixed=True)
    if (updates := made.overrides.get(our.UPDATES, 1)) > 1:
        for key in [key for key in _UPDATE_COUNTS if key in made.overrides]:
            made.overrides[key] = -(-made.overrides[key] // updates)
        made.notes.append(
            f"a step here makes {updates} of TRL's steps: numbers of steps are divided by {updates}, rounded up"
        )


def _tell_denominator(made: Converted, key: str, generated: int, batch: int) -> None:
    """Tell that a loss over all tokens of a generation has smaller gradients than one over those of an update."""
    clip = made.overrides.get(our.CLIP, "max_grad_norm")
    if generated == batch or not clip:
        return
    same = f"{clip} * {generated / batch:g}" if isinstance(clip, str) else f"{clip * generated / batch:g}"
    made.differs.append(
        f"{key}: the denominator is the tokens of a generation of {generated} responses there, those of an update of"
        f" {batch} here: a gradient there is {batch / generated:g} of that here, which Adam hides, but not the"
        f" clipping: {our.CLIP}={same} clips as there"
    )


def _trl_validation(made: Converted) -> None:
    """Set how validations sample, if the file has any: in TRL as training does."""
    saves, strategy = (
        str(made.take(key, default)).rpartition(".")[2].lower()
        for key, default in (("save_strategy", "steps"), ("eval_strategy", "no"))
    )
    for key, value, ours in (("save", saves, _SAVE_EVERY), ("eval", strategy, our.VALIDATE_EVERY)):
        if value not in ("steps", *(("no", "false") if key == "eval" else ())):
            made.overrides.pop(ours, None)
            made.unknown.pop(ours, None)
            made.notes.append(f"{key}_strategy={value}: not after a number of steps there; set {ours}")
    if strategy in ("no", "false"):  # `no` of a YAML file is False
        every = made.overrides.pop(our.VALIDATE_EVERY, None)
        setting = "eval_strategy=no" if every is None else f"eval_steps={every} without eval_strategy=steps"
        made.notes.append(f"{setting}: TRL never evaluates; here {our.keeps(our.VALIDATE_EVERY)}")
    else:
        top_p = made.rest.get("generation_kwargs.top_p", made.rest.get("top_p", 1))
        steps = made.rest.get("logging_steps", 10)  # of TRL, not of transformers
        if strategy == "steps" and our.VALIDATE_EVERY not in made.overrides | made.unknown:
            if isinstance(steps, int | float) and steps >= 1:
                made.overrides[our.VALIDATE_EVERY] = -(-int(steps) // made.overrides.get(our.UPDATES, 1))
            else:
                made.unknown[our.VALIDATE_EVERY] = f"eval_steps is logging_steps={steps} there, which is no number"
        shared.set_validation(made, made.overrides.get(our.GROUP), made.overrides.get(f"{our.GRPO}.temperature"), top_p)


def _trl_rewards(made: Converted) -> None:
    """Add a note with the override for TRL's reward functions and their weights; name a reward model as different."""
    functions, weights = made.take("reward_funcs"), made.rest.get("reward_weights")
    of_script = [1280, 256] if _OVERLONG in str(functions) else None  # trl/scripts/grpo.py
    if (limits := made.take(_OVERLONG, of_script)) is not None:
        made.notes.append(
            f"{_OVERLONG}: in its place, {our.GRPO}.shaping.overlong_tokens={limits[-1]} with"
            f" {our.GRPO}.shaping.overlong_penalty=(its weight) / (sum of the others' weights) does the same where"
            f" responses are limited to {limits[0]} tokens"
        )
    if isinstance(functions, Expression):
        node = ast.parse(functions, mode="eval").body
        terms = [ast.unparse(element) for element in getattr(node, "elts", [node])]
    else:  # of a YAML file: a text that cannot be a function is quoted, as a model is in Python
        listed = functions if isinstance(functions, list) else [functions]
        terms = [str(term) if _NAME.fullmatch(str(term)) else repr(term) for term in listed if term is not None]
    is_none, terms = "None" in terms, [term for term in terms if term != "None"]
    models = [term for term in terms if term[0] in "'\""]
    if (model := made.take("reward_model_name_or_path")) is not None:
        models.append(repr(model))
    text = "a reward model is not supported here; a reward that asks a server: docs/howto/reward_server.md"
    made.unknown |= dict.fromkeys((f"reward_funcs={model}" for model in models), text)
    values = weights if isinstance(weights, list) and len(weights) == len(terms) else None
    pairs = zip(terms, values or [1] * len(terms), strict=True)
    used = {name: weight for name, weight in pairs if name not in models}
    if not used:
        if is_none:
            made.unknown["rewards.functions.TASK"] = (
                "reward_funcs=None: no reward function was found; set rewards.functions.TASK=FILE.py:FUNCTION"
                " (docs/howto/reward_function.md)"
            )
        if weights is not None:
            made.notes.append(
                f"reward_weights={made.take('reward_weights')}: weights are factors of the reward functions here:"
                " 'rewards.functions.TASK=FILE.py:FIRST*0.5 + FILE.py:SECOND*1' (docs/howto/reward_function.md)"
            )
        return
    if weights is not None and values is None:
        made.unknown[f"reward_weights={weights}"] = f"expected a list of {len(terms)} numbers, one per reward function"
    names = [name.rsplit(".", 1)[-1] if _NAME.fullmatch(name) else "FUNCTION" for name in used]
    factors = [f"*{weight:g}" if values else "" for weight in used.values()]
    parts = [f"FILE.py:{name}{factor}" for name, factor in zip(names, factors, strict=True)]
    settings = [f"reward_funcs=[{', '.join(names)}]" if len(terms) > 1 else f"reward_funcs={names[0]}"]
    settings += [f"reward_weights={made.take('reward_weights')}"] if weights is not None else []
    made.notes.append(
        f"reward ({', '.join(settings)}): add 'rewards.functions.TASK={' + '.join(parts)}', with functions of one"
        ' response made as in docs/howto/reward_function.md, "A reward function of TRL"'
    )
    total = f"{sum(used.values()):g}" if values or weights is None else "the sum of reward_weights"
    if total == "1":
        return
    text = f"reward_funcs: a sum of rewards becomes a mean: divided by {total}"
    if made.overrides.get(our.ADVANTAGE, "mean_only") in ("mean_only", "leave_one_out"):
        others = f"{our.KL}, {our.ENTROPY} and trainer.gradient_clip_val"
        made.differs.append(f"{text}, and so are advantages without a std; divide {others} by it, too")
    else:
        made.notes.append(f"{text}, which cancels where advantages are divided by a std")
