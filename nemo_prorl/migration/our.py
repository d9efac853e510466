"""Names of this project's keys that the rules set."""

GRPO = "trainer.grpo"
PROMPTS, GROUP, UPDATES = (f"{GRPO}.{key}" for key in ("prompts_per_step", "samples_per_prompt", "updates_per_step"))
CONTEXT, RESPONSE, PROMPT = f"{GRPO}.context_tokens", f"{GRPO}.max_response_tokens", "data.max_prompt_tokens"
ADVANTAGE, AGGREGATION, LOSS = (f"{GRPO}.{key}" for key in ("advantage", "aggregation", "loss"))
CLIP_LOW, CLIP_HIGH, DUAL_CLIP = (f"{GRPO}.{key}" for key in ("clip_low", "clip_high", "dual_clip"))
KL, ESTIMATOR, ENTROPY = f"{GRPO}.kl_coef", f"{GRPO}.kl_estimator", f"{GRPO}.entropy_coef"
CORRECTION, SAMPLING = f"{GRPO}.correction", f"{GRPO}.dynamic_sampling"
VALIDATE_EVERY = f"{GRPO}.validate_every"
STEPS, LR, SCHED = f"{GRPO}.max_steps", "model.optim.lr", "model.optim.sched"
CLIP = "trainer.gradient_clip_val"
MODEL = "pretrained_checkpoint.restore_from_path"


def keeps(ours: str) -> str:
    """Return what becomes of a number of steps that is `never` there."""
    return f"{ours} keeps its own value{', and data.validation=[] switches validations off' * (ours == VALIDATE_EVERY)}"
