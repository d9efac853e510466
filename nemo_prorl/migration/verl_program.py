"""What verl's program, the module that a script starts, and the limits of its engine decide."""

from nemo_prorl.migration.converted import (
    CONTEXT,
    CORRECTION,
    GRPO,
    PROMPT,
    PROMPTS,
    RESPONSE,
    SAMPLING,
    Converted,
    tell_unused,
)


def verl_program(made: Converted) -> None:
    """Set dynamic sampling, which only DAPO's program has, and the prompts that a step trains on."""
    enabled, filters = f"{SAMPLING}.enabled", "algorithm.filter_groups.enable"
    if made.overrides.get(enabled) and made.entry in {"", *made.unknown}:
        text = "main_dapo draws more prompts, verl.trainer.main_ppo ignores it"
        made.differs.append(f"{filters}: {text}: then set {enabled}=false")
    elif made.overrides.get(enabled) and not made.entry.endswith("main_dapo"):
        made.overrides[enabled] = False
        tell_unused(made, {filters: True}, f"in {made.entry}: only main_dapo draws more prompts")
    prompts, drawn = made.overrides.get(PROMPTS), made.rest.get("data.gen_batch_size")
    if made.overrides.get(enabled) is not False:
        return
    if "gen_batch_size" in (why := made.unknown.get(f"{SAMPLING}.max_draw_factor", "")):
        made.unknown[PROMPTS] = why
    elif prompts and drawn and drawn != prompts:
        made.overrides[PROMPTS] = drawn
        why = f"where a step trains on all prompts of data.gen_batch_size={drawn}, without filter_groups"
        tell_unused(made, {"data.train_batch_size": prompts}, why)


def verl_one_step_off(made: Converted) -> None:
    """Set that the next batch is generated beside the update, by engines with GPUs of their own."""
    made.overrides |= {"rollout.own_devices": True, "rollout.sleep": None}
    if made.overrides.get(f"{CORRECTION}.kind") == "none" and f"{GRPO}.old_logp" not in made.overrides:
        made.overrides[f"{GRPO}.old_logp"] = "engine"  # else `none` is refused here
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


def verl_lengths(made: Converted) -> None:
    """Set the lengths that the engine's own limits give."""
    length, most = (made.take(f"actor_rollout_ref.rollout.{key}") for key in ("response_length", "max_model_len"))
    response, prompt = made.overrides.get(RESPONSE), made.overrides.get(PROMPT)
    if length not in (None, response):
        made.overrides[RESPONSE] = length
        why = f"where rollout.response_length={length} cuts responses"
        tell_unused(made, {"data.max_response_length": response}, why)
    lengths = [one for one in (prompt, made.overrides.get(RESPONSE)) if isinstance(one, int)]
    if most is not None and len(lengths) == 2 and most < sum(lengths):
        made.overrides[CONTEXT] = most
    elif most is not None:
        made.needless.append(f"actor_rollout_ref.rollout.max_model_len={most}")
