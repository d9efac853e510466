"""The learning rate of each step: a pure function of the step, the stage's length and its hard resets.

A resumed run needs no state for it.  NeMo's own schedulers are not built (`policy.build`).
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from nemo_prorl.config import ResetsConfig, SchedKeys


def learning_rate(
    base: float,
    sched: SchedKeys,
    resets: ResetsConfig,
    step: int,
    steps: int,
    done: Sequence[int],
    of_optimizer: Sequence[int],
) -> float:
    """Return the learning rate of a step's updates.

    It falls from `base` over the stage (`sched.name`), and each reset within the stage multiplies it by
    `resets.lr_factor`, for good or for `resets.lr_factor_steps` steps.  At the stage's start and after each reset of
    the optimizer it rises linearly, because Adam's moments begin at 0, and has its full value in the last step of the
    rise.  A rise does not hold up the fall.

    Args:
        step: step of the stage, from 1.
        steps: number of steps of the stage.
        done: steps after which hard resets were made, in order; 0 is the stage's start.
        of_optimizer: those of `done` that reset the optimizer.
    """
    first = warmup_steps(sched, steps)
    full = _fallen(base, sched, step - 1 - first, steps - first)
    full *= resets.lr_factor ** sum(0 < reset < step <= reset + (resets.lr_factor_steps or step) for reset in done)
    begun = [reset for reset in of_optimizer if reset < step]
    since, rise = (begun[-1], resets.lr_warmup_steps or first) if begun else (0, first)
    return full * min(1.0, (step - since) / rise) if rise else full


def resets_optimizer(resets: ResetsConfig, rolled_back: bool) -> bool:
    """Return whether a reset resets the optimizer: after a roll-back always, as its moments belong to other weights."""
    return resets.parts in ("both", "optimizer") or rolled_back


def optimizer_reset_steps(resets: ResetsConfig, done: Iterable[Mapping[str, Any]]) -> list[int]:
    """Return the steps of those of the resets `done` that reset the optimizer."""
    return [reset["step"] for reset in done if resets_optimizer(resets, "rolled_back_to" in reset)]


def rate_of_run(cfg: Any, step: int, done: Sequence[Mapping[str, Any]]) -> float:
    """Return `learning_rate` of a step of the run `cfg` after the resets `done`."""
    optim, resets, steps = cfg.model.optim, cfg.trainer.resets, cfg.trainer.grpo.max_steps
    made, of_optimizer = [reset["step"] for reset in done], optimizer_reset_steps(resets, done)
    return learning_rate(optim.lr, optim.sched, resets, step=step, steps=steps, done=made, of_optimizer=of_optimizer)


def begins_with_reset(cfg: Any) -> bool:
    """Return whether the run follows another one and begins with a reset, after step 0."""
    return bool(cfg.chain.hard_reset) and (cfg.chain.after is not None or cfg.chain.start_from is not None)


def fixed_resets(resets: ResetsConfig, made: int, steps: int) -> list[int]:
    """Return the steps after `made` after which a run of `steps` steps makes resets, without those of rules or users.

    A reset that is due after the last step is made, too.
    """
    every = range(resets.every, steps + 1, resets.every) if resets.every is not None else ()
    return sorted(step for step in {*every, *resets.at_steps} if made < step <= steps)


def warmup_steps(sched: SchedKeys, steps: int) -> int:
    """Return the number of steps over which the learning rate rises at the start of a stage with `steps` steps."""
    return sched.warmup_steps or math.ceil(sched.warmup_ratio * steps)


def _fallen(base: float, sched: SchedKeys, step: int, steps: int) -> float:
    """Return the learning rate after `step` of the `steps` steps of the fall; 0 or less: before the fall."""
    if sched.name == "constant" or step <= 0:
        return base
    fallen = step / steps
    left = 1.0 - fallen if sched.name == "linear" else 0.5 * (1.0 + math.cos(math.pi * fallen))
    return sched.min_lr + (base - sched.min_lr) * left
