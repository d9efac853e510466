"""The numbers that decide an algorithm, and how each follows from the settings of each trainer.

Nothing here uses the tables of `nemo_prorl/migration`, with which the results are compared.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch

Settings = dict[str, Any]
There = str | tuple[str, Callable[[Settings], Any]]
SAME = "\0"  # no line can name a difference: the numbers must be equal
UNUSED = "-"  # a number without a part in this example


class Number(NamedTuple):
    """One number of an algorithm.

    Attributes:
        here: the key of this project; `=VALUE` for what is fixed here.
        there: the key of each trainer; or a word of the line that must name a difference, and how the number follows.
    """

    name: str
    here: str
    there: dict[str, There]


ACTOR, ROLLOUT, VERL = "actor_rollout_ref.actor", "actor_rollout_ref.rollout", "algorithm"


def _means(key: str, known: dict[Any, Any]) -> tuple[str, Callable[[Settings], Any]]:
    """Return a number whose values have other names here; a value without a name is itself, and so not the same."""
    return key, lambda s: known.get(s[key], s[key])


def _batch(s: Settings) -> int:
    return s["per_device_train_batch_size"] * s["gradient_accumulation_steps"]


def _generated(s: Settings) -> int:
    steps = s["steps_per_generation"] or s["gradient_accumulation_steps"]
    return s["generation_batch_size"] or s["per_device_train_batch_size"] * steps


def _whole(a: int, b: int) -> Any:
    return a // b if a % b == 0 else a / b


def _nemo_optimizer(name: str, megatron: str) -> tuple[str, Callable[[Settings], Any]]:
    def value(s: Settings) -> Any:
        has_megatron = s["policy.megatron_cfg.enabled"]
        return s[f"policy.megatron_cfg.optimizer.{megatron}" if has_megatron else f"policy.optimizer.kwargs.{name}"]

    return name, value


def _nemo_estimator(s: Settings) -> Any:
    has_kl = s["loss_fn.reference_policy_kl_penalty"] and not s.get("loss_fn.use_kl_in_reward")
    return f"weighed {s['loss_fn.reference_policy_kl_type']}" if has_kl else UNUSED


def _overlong(s: Settings, name: str) -> Any:
    for prefix in ("reward_model.overlong_buffer", "reward_model.reward_kwargs.overlong_buffer_cfg"):
        if s.get(f"{prefix}.enable"):
            return s[f"{prefix}.{name}"]
    return 0 if name == "len" else UNUSED


def _verl_kl(s: Settings) -> Any:
    if s[f"{ACTOR}.use_kl_loss"]:
        return s[f"{ACTOR}.kl_loss_coef"]
    return s[f"{VERL}.kl_ctrl.kl_coef"] if s[f"{VERL}.use_kl_in_reward"] else 0


def _verl_estimator(s: Settings) -> Any:
    if s[f"{VERL}.use_kl_in_reward"]:
        return "in rewards"
    return {"low_var_kl": "k3", "mse": "k2", "kl": "k1"}[s[f"{ACTOR}.kl_loss_type"]]


def _nemo_advantage(s: Settings) -> str:
    if s["grpo.adv_estimator.name"] != "grpo":
        return s["grpo.adv_estimator.name"]
    std, others = s["grpo.adv_estimator.normalize_rewards"], s["grpo.adv_estimator.use_leave_one_out_baseline"]
    return {(True, False): "group_norm", (False, True): "leave_one_out"}.get((std, others), "normalized leave-one-out")


def _nemo_correction(s: Settings) -> str:
    return (
        s["loss_fn.truncated_importance_sampling_type"] if s["loss_fn.use_importance_sampling_correction"] else "none"
    )


def _nemo_draws(s: Settings) -> Any:
    return (
        s["grpo.dynamic_sampling_max_gen_batches"] * s["grpo.batch_multiplier"]
        if s["grpo.use_dynamic_sampling"]
        else UNUSED
    )


def _verl_draws(s: Settings) -> Any:
    drawn = s["algorithm.filter_groups.max_num_gen_batches"] * s.get("data.gen_batch_size", 0)
    return drawn / s["data.train_batch_size"] if s["algorithm.filter_groups.enable"] else UNUSED


def _trl_correction(s: Settings) -> str:
    if not s["use_vllm"]:
        return "no engine"
    mode = s["vllm_importance_sampling_mode"] if s["vllm_importance_sampling_correction"] else "none"
    return {"token_mask": "icepop", "token_truncate": "tis", "sequence_mask": "product mask"}.get(mode, mode)


def _openrlhf_correction(s: Settings) -> str:
    kind = s["algo.advantage.is_correction_type"] if s["algo.advantage.is_correction_enable"] else "none"
    return "tis, raised to 0.5" if kind == "tis" else kind


def _nemo_betas(s: Settings) -> Any:
    megatron = [s[f"policy.megatron_cfg.optimizer.adam_beta{index}"] for index in (1, 2)]
    return megatron if s["policy.megatron_cfg.enabled"] else s["policy.optimizer.kwargs.betas"]


def _openrlhf_bound(s: Settings, index: int) -> Any:
    is_used = s["algo.advantage.is_correction_enable"]
    return s["algo.advantage.is_correction_threshold"][index] if is_used else UNUSED


def _nemo_bound(s: Settings, key: str) -> Any:
    return s[key] if s["loss_fn.use_importance_sampling_correction"] else UNUSED


def _or_one(value: Any) -> Any:
    return 1 if value is None else value


def _nemo_limit(key: str) -> tuple[str, Callable[[Settings], Any]]:
    return key, lambda s: None if s[key] >= s["policy.max_total_sequence_length"] else s[key]


GRPO = "trainer.grpo"
NUMBERS = [  # without those of the learning rate's schedule, which `schedules.py` has
    Number(
        "learning rate",
        "model.optim.lr",
        {
            "trl": "learning_rate",
            "verl": f"{ACTOR}.optim.lr",
            "openrlhf": "actor.adam.lr",
            "nemo_rl": _nemo_optimizer("lr", "lr"),
        },
    ),
    Number(
        "weight decay",
        "model.optim.weight_decay",
        {
            "trl": "weight_decay",
            "verl": f"{ACTOR}.optim.weight_decay",
            "openrlhf": "actor.adam.weight_decay",
            "nemo_rl": _nemo_optimizer("weight_decay", "weight_decay"),
        },
    ),
    Number(
        "Adam's betas",
        "model.optim.betas",
        {
            "trl": (SAME, lambda s: [s["adam_beta1"], s["adam_beta2"]]),
            "verl": f"{ACTOR}.optim.betas",
            "openrlhf": "actor.adam.betas",
            "nemo_rl": (SAME, _nemo_betas),
        },
    ),
    Number(
        "Adam's eps",
        "model.optim.eps",
        {
            "trl": "adam_epsilon",
            "verl": (SAME, lambda s: torch.optim.AdamW([torch.zeros(1)]).defaults["eps"]),
            "openrlhf": "actor.adam.eps",
            "nemo_rl": _nemo_optimizer("eps", "adam_eps"),
        },
    ),
    Number(
        "gradient clip",
        "trainer.gradient_clip_val",
        {
            "trl": "max_grad_norm",
            "verl": f"{ACTOR}.grad_clip",
            "openrlhf": "actor.max_norm",
            "nemo_rl": "policy.max_grad_norm",
        },
    ),
    Number(
        "temperature",
        f"{GRPO}.temperature",
        {
            "trl": "temperature",
            "verl": f"{ROLLOUT}.temperature",
            "openrlhf": "rollout.temperature",
            "nemo_rl": "policy.generation.temperature",
        },
    ),
    Number(
        "top-p",
        "=1",
        {
            "trl": "top_p",
            "verl": f"{ROLLOUT}.top_p",
            "openrlhf": "rollout.top_p",
            "nemo_rl": "policy.generation.top_p",
        },
    ),
    Number(
        "top-k",
        "=all",
        {
            "trl": _means("top_k", {0: "all"}),
            "verl": _means(f"{ROLLOUT}.top_k", {-1: "all"}),
            "nemo_rl": _means("policy.generation.top_k", {None: "all"}),
        },
    ),
    Number(
        "prompts per step",
        f"{GRPO}.prompts_per_step",
        {
            "trl": ("responses of a process", lambda s: _whole(max(_batch(s), _generated(s)), s["num_generations"])),
            "verl": "data.train_batch_size",
            "openrlhf": "rollout.batch_size",
            "nemo_rl": "grpo.num_prompts_per_step",
        },
    ),
    Number(
        "responses per prompt",
        f"{GRPO}.samples_per_prompt",
        {
            "trl": "num_generations",
            "verl": f"{ROLLOUT}.n",
            "openrlhf": "rollout.n_samples_per_prompt",
            "nemo_rl": "grpo.num_generations_per_prompt",
        },
    ),
    Number(
        "updates per step",
        f"{GRPO}.updates_per_step",
        {
            "trl": ("it follows", lambda s: _whole(max(_batch(s), _generated(s)), _batch(s))),
            "verl": ("mini_batch", lambda s: _whole(s["data.train_batch_size"], s[f"{ACTOR}.ppo_mini_batch_size"])),
            "openrlhf": (
                "train.batch_size",
                lambda s: _whole(s["rollout.batch_size"] * s["rollout.n_samples_per_prompt"], s["train.batch_size"]),
            ),
            "nemo_rl": (
                "train_global_batch_size",
                lambda s: _whole(
                    s["grpo.num_prompts_per_step"] * s["grpo.num_generations_per_prompt"],
                    s["policy.train_global_batch_size"],
                ),
            ),
        },
    ),
    Number(
        "uses of a response",
        "=1",
        {"trl": "num_iterations", "verl": f"{ACTOR}.ppo_epochs", "openrlhf": "train.max_epochs"},
    ),
    Number(
        "response tokens",
        f"{GRPO}.max_response_tokens",
        {
            "trl": "max_completion_length",
            "verl": "data.max_response_length",
            "openrlhf": "rollout.max_new_tokens",
            "nemo_rl": _nemo_limit("policy.generation.max_new_tokens"),
        },
    ),
    Number(
        "prompt tokens",
        "data.max_prompt_tokens",
        {
            "trl": (SAME, lambda s: None),
            "verl": "data.max_prompt_length",
            "openrlhf": (SAME, lambda s: None),
            "nemo_rl": _nemo_limit("data.max_input_seq_length"),
        },
    ),
    Number(
        "context tokens",
        f"{GRPO}.context_tokens",
        {
            "verl": (SAME, lambda s: s["data.max_prompt_length"] + s["data.max_response_length"]),
            "openrlhf": "data.max_len",
            "nemo_rl": "policy.max_total_sequence_length",
        },
    ),
    Number(
        "clip low",
        f"{GRPO}.clip_low",
        {
            "trl": ("lower clip range", lambda s: s["epsilon"]),
            "verl": ("lower clip range", lambda s: s[f"{ACTOR}.clip_ratio_low"]),
            "openrlhf": (SAME, lambda s: (s["actor.eps_clip_low_high"] or [s["actor.eps_clip"]])[0]),
            "nemo_rl": "loss_fn.ratio_clip_min",
        },
    ),
    Number(
        "clip high",
        f"{GRPO}.clip_high",
        {
            "trl": (SAME, lambda s: s["epsilon"] if s["epsilon_high"] is None else s["epsilon_high"]),
            "verl": f"{ACTOR}.clip_ratio_high",
            "openrlhf": (SAME, lambda s: (s["actor.eps_clip_low_high"] or [s["actor.eps_clip"]])[-1]),
            "nemo_rl": "loss_fn.ratio_clip_max",
        },
    ),
    Number(
        "dual clip",
        f"{GRPO}.dual_clip",
        {
            "trl": "delta",
            "verl": f"{ACTOR}.clip_ratio_c",
            "openrlhf": "actor.dual_clip",
            "nemo_rl": "loss_fn.ratio_clip_c",
        },
    ),
    Number(
        "loss",
        f"{GRPO}.loss",
        {
            "trl": _means("importance_sampling_level", {"token": "clip", "sequence": "gspo"}),
            "verl": _means(f"{ACTOR}.policy_loss.loss_mode", {"vanilla": "clip"}),
            "openrlhf": _means("actor.policy_loss_type", {"ppo": "clip"}),
            "nemo_rl": _means("loss_fn.sequence_level_importance_ratios", {False: "clip", True: "gspo"}),
        },
    ),
    Number(
        "KL coefficient",
        f"{GRPO}.kl_coef",
        {
            "trl": "beta",
            "verl": (SAME, _verl_kl),
            "openrlhf": "algo.kl.init_coef",
            "nemo_rl": "loss_fn.reference_policy_kl_penalty",
        },
    ),
    Number(
        "KL estimator",
        f"{GRPO}.kl_estimator",
        {
            "trl": (SAME, lambda s: "k3"),
            "verl": ("use_kl_in_reward", _verl_estimator),
            "openrlhf": (
                "algo.kl.use_loss",
                lambda s: s["algo.kl.estimator"] if s["algo.kl.use_loss"] else "in rewards",
            ),
            "nemo_rl": ("reference_policy_kl_type", _nemo_estimator),
        },
    ),
    Number(
        "entropy bonus",
        f"{GRPO}.entropy_coef",
        {
            "trl": "entropy_coef",
            "verl": f"{ACTOR}.entropy_coeff",
            "openrlhf": (SAME, lambda s: s["actor.entropy_coef"] or 0),
            "nemo_rl": (SAME, lambda s: 0),
        },
    ),
    Number(
        "advantage",
        f"{GRPO}.advantage",
        {
            "trl": _means("scale_rewards", {"group": "group_norm", "batch": "std of batch"}),
            "verl": _means(
                f"{VERL}.adv_estimator",
                {"grpo": "group_norm", "rloo": "leave_one_out", "reinforce_plus_plus_baseline": "std by tokens"},
            ),
            "openrlhf": _means(
                "algo.advantage.estimator", {"rloo": "leave_one_out", "reinforce_baseline": "std by tokens"}
            ),
            "nemo_rl": ("std", _nemo_advantage),
        },
    ),
    Number(
        "mean over",
        f"{GRPO}.aggregation",
        {
            "trl": _means("loss_type", {"grpo": "sequence", "dapo": "token"}),
            "verl": _means(f"{ACTOR}.loss_agg_mode", {"token-mean": "micro-batch", "seq-mean-token-mean": "sequence"}),
            "openrlhf": (SAME, lambda s: "token"),
            "nemo_rl": _means("loss_fn.token_level_loss", {True: "token", False: "sequence"}),
        },
    ),
    Number(
        "rewards",
        "=as they are",
        {"nemo_rl": _means("grpo.reward_scaling.enabled", {False: "as they are", True: "scaled"})},
    ),
    Number(
        "dynamic sampling",
        f"{GRPO}.dynamic_sampling.enabled",
        {
            "trl": (SAME, lambda s: False),
            "verl": "algorithm.filter_groups.enable",
            "openrlhf": "algo.dynamic_filtering_enable",
            "nemo_rl": "grpo.use_dynamic_sampling",
        },
    ),
    Number(
        "draws up to",
        f"{GRPO}.dynamic_sampling.max_draw_factor",
        {
            "verl": ("max_draw_factor", _verl_draws),
            "openrlhf": ("max_draw_factor", lambda s: "no limit" if s["algo.dynamic_filtering_enable"] else UNUSED),
            "nemo_rl": ("max_draw_factor", _nemo_draws),
        },
    ),
    Number(
        "engine correction",
        f"{GRPO}.correction.kind",
        {
            "trl": ("vllm", _trl_correction),
            "verl": _means("algorithm.rollout_correction.rollout_is", {None: "none", "token": "tis"}),
            "openrlhf": ("is_correction_type", _openrlhf_correction),
            "nemo_rl": ("truncated_importance_sampling_type", _nemo_correction),
        },
    ),
    Number(
        "its largest ratio",
        f"{GRPO}.correction.cap",
        {
            "trl": (SAME, lambda s: s["vllm_importance_sampling_clip_max"] if s["use_vllm"] else UNUSED),
            "verl": (
                SAME,
                lambda s: (
                    s["algorithm.rollout_correction.rollout_is_threshold"]
                    if s["algorithm.rollout_correction.rollout_is"]
                    else UNUSED
                ),
            ),
            "openrlhf": (SAME, lambda s: _openrlhf_bound(s, 1)),
            "nemo_rl": (SAME, lambda s: _nemo_bound(s, "loss_fn.truncated_importance_sampling_ratio")),
        },
    ),
    Number(
        "its smallest ratio",
        f"{GRPO}.correction.floor",
        {
            "trl": (SAME, lambda s: s["vllm_importance_sampling_clip_min"] if s["use_vllm"] else UNUSED),
            "openrlhf": (SAME, lambda s: _openrlhf_bound(s, 0)),
            "nemo_rl": (SAME, lambda s: _nemo_bound(s, "loss_fn.truncated_importance_sampling_ratio_min")),
        },
    ),
    Number(
        "overlong tokens",
        f"{GRPO}.shaping.overlong_tokens",
        {
            "verl": (SAME, lambda s: _overlong(s, "len")),
            "nemo_rl": (
                "max_response_length",
                lambda s: (
                    s["grpo.reward_shaping.overlong_buffer_length"]
                    if s["grpo.reward_shaping.enabled"] and s["grpo.reward_shaping.stop_properly_penalty_coef"] is None
                    else 0
                ),
            ),
        },
    ),
    Number(
        "overlong penalty",
        f"{GRPO}.shaping.overlong_penalty",
        {
            "verl": ("penalty_factor", lambda s: _overlong(s, "penalty_factor")),
            "nemo_rl": (
                "overlong_buffer_penalty",
                lambda s: (
                    s["grpo.reward_shaping.overlong_buffer_penalty"]
                    if s["grpo.reward_shaping.enabled"] and s["grpo.reward_shaping.stop_properly_penalty_coef"] is None
                    else UNUSED
                ),
            ),
        },
    ),
    Number(
        "cut-off factor",
        f"{GRPO}.unfinished_factor",
        {
            "openrlhf": (SAME, lambda s: _or_one(s["reward.stop_properly_penalty_coef"])),
            "nemo_rl": (SAME, lambda s: _or_one(s["grpo.reward_shaping.stop_properly_penalty_coef"])),
        },
    ),
    Number(
        "reference follows after",
        "trainer.resets.every",
        {"trl": (SAME, lambda s: s["ref_model_sync_steps"] if s["sync_ref_model"] else None)},
    ),
]
