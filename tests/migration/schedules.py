"""The numbers of the learning rate's schedule, and how each follows from the settings of each trainer."""

from typing import Any

from tests.migration import numbers
from tests.migration.numbers import ACTOR, SAME, UNUSED, Number, Settings

SCHED = "model.optim.sched"


def _verl_steps(s: Settings) -> Any:
    steps, share = s[f"{ACTOR}.optim.lr_warmup_steps"], s[f"{ACTOR}.optim.lr_warmup_steps_ratio"]
    return steps if steps >= 0 else 0 if share == 0 else UNUSED


def _nemo_name(s: Settings) -> Any:
    if s["policy.megatron_cfg.enabled"]:
        return s["policy.megatron_cfg.scheduler.lr_decay_style"]
    rise, after, _ = s["policy.scheduler"]
    named = rise["name"].endswith(".LinearLR") and after["name"].endswith(".ConstantLR")
    return "constant" if named and rise["kwargs"]["end_factor"] == after["kwargs"]["factor"] == 1 else "others"


def _nemo_steps(s: Settings) -> Any:
    if s["policy.megatron_cfg.enabled"]:
        return s["policy.megatron_cfg.scheduler.lr_warmup_iters"]
    return s["policy.scheduler"][0]["kwargs"]["total_iters"]


def _least(s: Settings) -> Any:
    return float(f"{s['actor.min_lr_ratio'] * float(s['actor.adam.lr']):.9g}")


SCHEDULE = [
    Number(
        "course of the learning rate",
        f"{SCHED}.name",
        {
            "trl": (SAME, lambda s: s["lr_scheduler_type"]),
            "verl": (SAME, lambda s: s[f"{ACTOR}.optim.lr_scheduler_type"]),
            "openrlhf": (SAME, lambda s: {"cosine_with_min_lr": "cosine"}[s["actor.lr_scheduler"]]),
            "nemo_rl": (SAME, _nemo_name),
        },
    ),
    Number(
        "warm-up steps",
        f"{SCHED}.warmup_steps",
        {
            "trl": (SAME, lambda s: s["warmup_steps"]),
            "verl": (SAME, _verl_steps),
            "nemo_rl": (SAME, _nemo_steps),
        },
    ),
    Number("warm-up share", f"{SCHED}.warmup_ratio", {"openrlhf": (SAME, lambda s: s["actor.lr_warmup_ratio"])}),
    Number("least rate", f"{SCHED}.min_lr", {"openrlhf": (SAME, _least)}),
]
NUMBERS = [numbers.NUMBERS[0], *SCHEDULE, *numbers.NUMBERS[1:]]
