"""The learning rate of each step: a pure function of the step, the stage's length and its hard resets.

A resumed run needs no state for it.  NeMo's own schedulers are not built (`policy.build`).
"""

import math
from collections.abc import Sequence

from nemo_prorl.config import ResetsConfig, SchedKeys


def learning_rate(
    base: float,
    sched: SchedKeys,
    resets: ResetsConfig,
    step: int,
    steps: int,
    done: Sequence[int],
    emptied: Sequence[int],
) -> float:
    """Return the learning rate of a step's updates.

    It falls from `base` over the stage (`sched.name`), and each reset within the stage multiplies it by
    `resets.lr_factor`.  At the stage's start and after each reset of the optimizer it rises linearly, because Adam's
    moments begin at 0, and has its full value in the last step of the rise.  A rise does not hold up the fall.

    Args:
        step: step of the stage, from 1.
        steps: number of steps of the stage.
        done: steps after which hard resets were made, in order; 0 is the stage's start.
        emptied: those of `done` that reset the optimizer.
    """
    first = warmup_steps(sched, steps)
    full = _fallen(base, sched, step - 1 - first, steps - first)
    full *= resets.lr_factor ** sum(0 < reset < step for reset in done)
    begun = [reset for reset in emptied if reset < step]
    since, rise = (begun[-1], resets.lr_warmup_steps or first) if begun else (0, first)
    return full * min(1.0, (step - since) / rise) if rise else full


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
