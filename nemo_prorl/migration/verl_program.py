"""What verl's program, the module that a script starts, and the limits of its engine decide."""

from nemo_prorl.migration.converted import CONTEXT, PROMPT, PROMPTS, RESPONSE, SAMPLING, Converted, tell_unused


def verl_program(made: Converted) -> None:
    """Set dynamic sampling, which only DAPO's program has, the prompts that a step trains on, and one step off."""
    enabled, draws = f"{SAMPLING}.enabled", f"{SAMPLING}.max_draw_factor"
    if made.overrides.get(enabled) and "main_dapo" not in made.entry and made.entry not in {"", *made.unknown}:
        made.overrides[enabled] = False
        tell_unused(
            made, {"algorithm.filter_groups.enable": True}, f"in {made.entry}: only main_dapo draws more prompts"
        )
    prompts, drawn = made.overrides.get(PROMPTS), made.rest.get("data.gen_batch_size")
    if made.overrides.get(enabled) is False and "gen_batch_size" in made.unknown.get(draws, ""):
        made.unknown[PROMPTS] = made.unknown[draws]
    elif made.overrides.get(enabled) is False and prompts and drawn and drawn != prompts:
        made.overrides[PROMPTS] = drawn
        why = f"where a step trains on all prompts of data.gen_batch_size={drawn}, without filter_groups"
        tell_unused(made, {"data.train_batch_size": prompts}, why)
    if "one_step_off" in made.entry:
        _one_step_off(made)


def _one_step_off(made: Converted) -> None:
    made.rest.setdefault("algorithm.rollout_correction.bypass_mode", True)  # one_step_off_ppo_trainer.yaml
    made.overrides |= {"rollout.own_devices": True, "rollout.sleep": None}
    nodes, each = made.take("rollout.nnodes", 1), made.take("rollout.n_gpus_per_node", 8)
    sizes = [made.overrides.get(f"trainer.{key}") for key in ("num_nodes", "devices")]
    tensor_parallel = made.overrides.get("rollout.tensor_parallel_size")
    text = (
        f"{sizes[0]} x {sizes[1]} GPUs train there and {nodes} x {each} generate; here (rollout.own_devices) each node"
    )
    text += " has some of both, as with cluster=h100_4x8_split"
    are_known = all(isinstance(size, int) for size in (nodes, each, *sizes, tensor_parallel))
    if are_known and nodes == sizes[0] and each + sizes[1] <= 8 and each >= tensor_parallel:
        made.overrides["rollout.engines"] = each // tensor_parallel * nodes
        made.notes.append(text)
    else:
        made.unknown["rollout.engines"] = f"{text}: choose this, trainer.num_nodes and trainer.devices"


def verl_lengths(made: Converted) -> None:
    """Set the lengths that the engine's own limits give."""
    length, most = (made.take(f"actor_rollout_ref.rollout.{key}") for key in ("response_length", "max_model_len"))
    response, prompt = made.overrides.get(RESPONSE), made.overrides.get(PROMPT)
    if length not in (None, response):
        tell_unused(
            made, {"data.max_response_length": response}, f"where rollout.response_length={length} cuts responses"
        )
        made.overrides[RESPONSE] = response = length
    if most is not None and isinstance(prompt, int) and isinstance(response, int) and most < prompt + response:
        made.overrides[CONTEXT] = most
    elif most is not None:
        made.needless.append(f"actor_rollout_ref.rollout.max_model_len={most}")
