"""The rules of each trainer for the learning rate's schedule: its course, its warm-up, its end."""

import math
from collections.abc import Mapping
from typing import Any

from nemo_prorl.migration import our
from nemo_prorl.migration.converted import Converted

_SAME = {name: name for name in ("constant", "linear", "cosine")}
_TRANSFORMERS = {**_SAME, "constant_with_warmup": "constant", "cosine_with_min_lr": "cosine"}
_NEAREST = {"polynomial": "linear", "cosine_with_restarts": "cosine", "cosine_warmup_with_min_lr": "cosine"}


def trl_schedule(made: Converted) -> None:
    """Set the schedule in numbers of TRL's steps, which are updates."""
    kind, steps, share = (made.take(key) for key in ("lr_scheduler_type", "warmup_steps", "warmup_ratio"))
    options = _options(made, "lr_scheduler_kwargs")
    floor = 0.0
    if "min_lr" in str(kind):
        least, of_rate = options.pop("min_lr", None), options.pop("min_lr_rate", None)
        floor = least or _share_of_rate(made, of_rate, "lr_scheduler_kwargs.min_lr_rate")
    _set_course(made, "lr_scheduler_type", kind, _TRANSFORMERS, floor)
    made.differs += [f"lr_scheduler_kwargs: {key}={value} has no counterpart" for key, value in options.items()]
    if steps and steps < 1:  # transformers 5: the warm-up is a share of the steps
        steps, share = None, steps
    if kind == "constant" and (steps or share):
        made.notes.append("lr_scheduler_type=constant: a warm-up has no effect there")
        steps = share = None
    _set_warmup(made, "warmup_steps" if steps else "warmup_ratio", steps, share)


def verl_schedule(made: Converted, is_megatron: bool) -> None:
    optim = "actor_rollout_ref.actor.optim"
    kinds = {key: made.take(f"{optim}.{key}") for key in ("warmup_style", "lr_scheduler_type", "lr_decay_style")}
    of_fsdp = "warmup_style" if kinds["warmup_style"] is not None else "lr_scheduler_type"  # the older name comes first
    kind = kinds.pop(used := "lr_decay_style" if is_megatron else of_fsdp) or "constant"
    made.tell_unused({f"{optim}.{key}": value for key, value in kinds.items()}, f"where {used} has the schedule")
    floors = {key: made.take(key) for key in (f"{optim}.min_lr", f"{optim}.min_lr_ratio")}
    least, of_rate = floors.values()
    floor = least or _share_of_rate(made, of_rate, f"{optim}.min_lr_ratio")
    length = made.take(f"{optim}.lr_decay_steps") if is_megatron else None
    _set_course(made, "lr_scheduler_type", kind, _SAME, floor, falls=floors | {f"{optim}.lr_decay_steps": length})
    _tell_length(made, "lr_decay_steps", length)
    steps, share = made.take(f"{optim}.lr_warmup_steps"), made.take(f"{optim}.lr_warmup_steps_ratio")
    if steps is not None and steps >= 0:
        _set_warmup(made, "lr_warmup_steps", steps)
    elif share and our.STEPS in made.overrides:
        _set_warmup(made, "lr_warmup_steps_ratio", math.floor(share * made.overrides[our.STEPS]))
    else:
        _set_warmup(made, "lr_warmup_steps_ratio", None, share)
        if share:
            made.differs.append("lr_warmup_steps_ratio: the number of steps is rounded down there, up here")


def openrlhf_schedule(made: Converted) -> None:
    keys = "actor.lr_scheduler", "actor.lr_warmup_ratio", "actor.min_lr_ratio"
    kind, share, of_rate = (made.take(key) for key in keys)
    _set_course(made, keys[0], kind, _TRANSFORMERS, _share_of_rate(made, of_rate, keys[2]))
    _set_warmup(made, keys[1], None, share)
    tell_updates(made, "actor.lr_scheduler")


def nemo_rl_schedule(made: Converted, has_megatron: bool, min_lr: Any) -> None:
    """Set the schedule from that of the back end that is on; `min_lr`: of Megatron's optimizer."""
    if not has_megatron:
        single = _options(made, "policy.scheduler.kwargs")
        name = made.take("policy.scheduler.name")
        if name is None and f"{our.SCHED}.name" in made.unknown:
            return
        _set_of_torch(made, [{"name": name, "kwargs": single}] if name else made.take("policy.scheduler") or [])
        return
    keys = "lr_decay_style", "lr_decay_iters", "lr_warmup_iters", "lr_warmup_init"
    on = "policy.megatron_cfg"
    style, length, steps, init = (made.take(f"{on}.scheduler.{key}") for key in keys)
    unused = {f"{on}.optimizer.min_lr": min_lr, f"{on}.scheduler.lr_decay_iters": length}
    _set_course(made, "lr_decay_style", style, _SAME, min_lr or 0.0, falls=unused)
    _tell_length(made, "lr_decay_iters", length)
    if not steps:
        made.tell_unused({f"{on}.scheduler.lr_warmup_init": init}, "without a warm-up")
    _set_warmup(made, "lr_warmup_iters", steps, begins=(init or 0.0) / (made.overrides.get(our.LR) or 1.0))


def _set_of_torch(made: Converted, schedulers: list[Any]) -> None:
    """Set the schedule of a list of torch's schedulers: {name, kwargs} of each, and the milestones between them."""
    if "${" in str(schedulers):
        made.unknown[f"{our.SCHED}.name"] = f"policy.scheduler={schedulers} has no value here"
        return
    parts = [(str(part["name"]).rsplit(".", 1)[-1], part.get("kwargs") or {}) for part in schedulers if "name" in part]
    rise = None
    if parts and parts[0][0] == "LinearLR" and parts[0][1].get("end_factor", 1) == 1:
        (_, rise), *parts = parts
    kinds = {"ConstantLR": "constant", "CosineAnnealingLR": "cosine"}
    kind, options = parts[0] if parts else ("ConstantLR", {"factor": 1})
    if len(parts) > 1 or kind not in kinds or (kind == "ConstantLR" and options.get("factor") != 1):
        written = [f"{name}({', '.join(f'{key}={value}' for key, value in more.items())})" for name, more in parts]
        kind, options = " and ".join(written), {}
    _set_course(made, "policy.scheduler", kind, kinds, float(options.get("eta_min", 0)))
    steps, begins = (rise.get("total_iters", 5), rise.get("start_factor", 1 / 3)) if rise is not None else (0, 0)
    _tell_length(made, "policy.scheduler: T_max", options.get("T_max"), steps)
    _set_warmup(made, "policy.scheduler", steps, begins=float(begins))


def tell_updates(made: Converted, key: str) -> None:
    """Tell that the learning rate changes within a step of here, if it changes at all."""
    parts = [made.overrides.get(f"{our.SCHED}.{part}") for part in ("name", "warmup_steps", "warmup_ratio")]
    if made.overrides.get(our.UPDATES, 1) > 1 and any(part not in (None, 0, "constant") for part in parts):
        made.differs.append(f"{key}: the learning rate changes with each update there, with each step here")


def _options(made: Converted, key: str) -> dict[str, Any]:
    """Return the mapping at a key, which a file has as a whole or as one setting per key of the mapping."""
    whole = made.take(key) or {}
    options = dict(whole) if isinstance(whole, dict) else {"": whole}
    below = [name for name in made.rest if name.startswith(f"{key}.")]
    return options | {name.removeprefix(f"{key}."): made.take(name) for name in below}


def _set_course(
    made: Converted, key: str, kind: Any, known: Mapping[str, str], min_lr: Any, falls: Mapping[str, Any] | None = None
) -> None:
    """Set the course of the learning rate after the warm-up; `key`, `kind`: the other trainer's key and value.

    Args:
        falls: settings of the other trainer for the fall, which a constant rate does not have.
    """
    is_near = str(kind) in _NEAREST
    made.choose(f"{our.SCHED}.name", key, kind, known, _NEAREST.get(str(kind), "constant"), is_near=is_near)
    if made.overrides.get(f"{our.SCHED}.name", "constant") != "constant":
        made.overrides[f"{our.SCHED}.min_lr"] = min_lr
    else:
        made.tell_unused(falls or {}, "with a constant learning rate")


def _share_of_rate(made: Converted, share: Any, key: str) -> float:
    """Return this share of the learning rate; if that has no value, the user must set what follows from it."""
    lr = made.overrides.get(our.LR)
    if share and lr is None:
        made.unknown[f"{our.SCHED}.min_lr"] = f"{key}={share} is a share of the learning rate, which has no value here"
    return float(f"{share * lr:.15g}") if share and lr is not None else 0.0


def _set_warmup(made: Converted, key: str, steps: Any, share: Any = None, begins: float = 0.0) -> None:
    """Set the steps over which the learning rate rises, and tell how the other trainer's rise differs.

    Args:
        steps: 0 or None: `share` of all steps instead.
        begins: share of the full rate that the first step has there.
    """
    if not steps and not share:
        made.overrides[f"{our.SCHED}.warmup_steps"] = 0
        return
    made.overrides |= {f"{our.SCHED}.warmup_steps": int(steps)} if steps else {f"{our.SCHED}.warmup_ratio": share}
    there = f"{begins:g} + {1 - begins:g} (k - 1) / W" if begins > 1e-6 else "(k - 1) / W"
    made.differs.append(f"{key}: step k of a warm-up of W steps has {there} of the learning rate there, k / W here")


def _tell_length(made: Converted, key: str, length: Any, rise: int = 0) -> None:
    """Leave a fall of another length to the user; `rise`: steps before it that `length` does not count."""
    falls = made.overrides.get(f"{our.SCHED}.name", "constant") != "constant"
    steps = made.overrides.get(our.STEPS)
    if falls and length is not None and length + rise != steps:
        all_steps = "all steps" if steps is None else f"all {steps} steps"
        made.unknown.setdefault(
            f"{our.SCHED}.name",
            f"{key}={length}: the learning rate falls over that many steps there, over {all_steps} here;"
            f" {made.overrides[f'{our.SCHED}.name']} is what comes nearest",
        )
