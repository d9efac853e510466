"""The learning rate of each step, beside torch's schedulers in float64, and what a hard reset does to it."""

from collections.abc import Sequence

import pytest
import torch
from torch.optim.lr_scheduler import ConstantLR, CosineAnnealingLR, LambdaLR, LinearLR, LRScheduler, SequentialLR

from nemo_prorl.algorithms.schedule import learning_rate, optimizer_reset_steps, warmup_steps
from nemo_prorl.config import ResetsConfig, SchedKeys

BASE = 3e-4


def rates(
    sched: SchedKeys,
    steps: int,
    done: Sequence[int] = (),
    of_optimizer: Sequence[int] | None = None,
    resets: ResetsConfig | None = None,
    base: float = BASE,
) -> list[float]:
    """Return the learning rate of each step of a stage; `of_optimizer`: as `done` unless given."""
    of_optimizer = done if of_optimizer is None else of_optimizer
    config = resets or ResetsConfig()
    return [learning_rate(base, sched, config, step, steps, done, of_optimizer) for step in range(1, steps + 1)]


def of_torch(sched: SchedKeys, steps: int) -> list[float]:
    """Return the learning rate that torch's schedulers give each step: the rise, then the fall."""
    optimizer = torch.optim.SGD([torch.zeros(1, dtype=torch.float64, requires_grad=True)], lr=BASE)
    rise, fall = sched.warmup_steps, max(1, steps - sched.warmup_steps)
    after: LRScheduler
    if sched.name == "linear":
        after = LinearLR(optimizer, start_factor=1.0, end_factor=sched.min_lr / BASE, total_iters=fall)
    elif sched.name == "cosine":
        after = CosineAnnealingLR(optimizer, T_max=fall, eta_min=sched.min_lr)
    else:
        after = ConstantLR(optimizer, factor=1.0, total_iters=0)
    both: LRScheduler = after
    if rise > 1:
        both = SequentialLR(
            optimizer,
            [LinearLR(optimizer, start_factor=1.0 / rise, end_factor=1.0, total_iters=rise - 1), after],
            milestones=[rise],
        )
    found = []
    for _ in range(steps):
        found.append(float(optimizer.param_groups[0]["lr"]))
        optimizer.step()
        both.step()
    return found


@pytest.mark.parametrize("warmup", [0, 5, 40])
@pytest.mark.parametrize(
    ("name", "min_lr"), [("constant", 0.0), ("linear", 0.0), ("linear", 3e-5), ("cosine", 0.0), ("cosine", 3e-5)]
)
def test_each_step_has_the_rate_of_torch_s_schedulers(name: str, min_lr: float, warmup: int) -> None:
    sched = SchedKeys(name=name, warmup_steps=warmup, min_lr=min_lr)
    assert rates(sched, 40) == pytest.approx(of_torch(sched, 40), rel=1e-12)


@pytest.mark.parametrize(("warmup", "last"), [(0, 1 / 40), (8, 1 / 32)])
def test_linear_is_the_line_of_transformers(warmup: int, last: float) -> None:
    """The decay that TRL has by default; its warm-up is one step behind, and gives the first step a rate of 0."""

    def line(step: int) -> float:
        return step / warmup if step < warmup else (40 - step) / (40 - warmup)

    optimizer = torch.optim.SGD([torch.zeros(1, dtype=torch.float64, requires_grad=True)], lr=BASE)
    theirs, scheduler = [], LambdaLR(optimizer, line)
    for _ in range(40):
        theirs.append(scheduler.get_last_lr()[0])
        optimizer.step()
        scheduler.step()
    found = rates(SchedKeys(name="linear", warmup_steps=warmup), 40)
    assert found[warmup:] == pytest.approx(theirs[warmup:], rel=1e-12)
    assert found[: max(0, warmup - 1)] == pytest.approx(theirs[1:warmup] if warmup else [], rel=1e-12)
    assert found[-1] == pytest.approx(BASE * last, rel=1e-12)


def test_a_share_of_the_steps_is_rounded_up() -> None:
    assert [warmup_steps(SchedKeys(warmup_ratio=0.03), steps) for steps in (1, 33, 34, 100, 101)] == [1, 1, 2, 3, 4]
    assert warmup_steps(SchedKeys(warmup_steps=7), 100) == 7
    share, steps = SchedKeys(name="cosine", warmup_ratio=0.3), SchedKeys(name="cosine", warmup_steps=3)
    assert rates(share, 10) == rates(steps, 10)


def test_the_default_is_the_rate_itself_to_the_bit() -> None:
    assert rates(SchedKeys(), 9, base=0.1) == [0.1] * 9
    assert set(rates(SchedKeys(name="linear"), 9, base=0.0)) == {0.0}


def test_a_reset_begins_the_warm_up_again_and_not_the_decay() -> None:
    """A decay over the stage: the steps after the reset have the rate they would have, times their share of a rise."""
    plain = rates(SchedKeys(name="linear", warmup_steps=2), 10)
    found = rates(SchedKeys(name="linear", warmup_steps=2), 10, [5, 8])
    assert plain == pytest.approx([BASE * x for x in (1 / 2, 1, 1, 7 / 8, 6 / 8, 5 / 8, 4 / 8, 3 / 8, 2 / 8, 1 / 8)])
    assert found == pytest.approx(
        [share * rate for share, rate in zip((1, 1, 1, 1, 1, 0.5, 1, 1, 0.5, 1), plain, strict=True)], rel=1e-12
    )


def test_a_reset_of_the_reference_alone_leaves_the_warm_up_alone() -> None:
    """Adam's moments are as they were; the factor is that of any reset."""
    sched, halved = SchedKeys(name="cosine", warmup_steps=3), ResetsConfig(lr_factor=0.5)
    plain = rates(sched, 8)
    assert rates(sched, 8, [4], of_optimizer=[]) == plain
    assert rates(sched, 8, [4], of_optimizer=[], resets=halved) == pytest.approx(
        [*plain[:4], *(x / 2 for x in plain[4:])]
    )


@pytest.mark.parametrize(
    ("parts", "steps"), [("both", [3, 5]), ("optimizer", [3, 5]), ("reference", [5]), ("none", [5])]
)
def test_a_roll_back_resets_the_optimizer_whatever_the_parts_of_a_reset(parts: str, steps: list[int]) -> None:
    done = [{"step": 3}, {"step": 5, "rolled_back_to": 2}]
    assert optimizer_reset_steps(ResetsConfig(parts=parts), done) == steps


def test_the_warm_up_after_a_reset_may_have_its_own_length() -> None:
    """`lr_warmup_steps`, which also stands for the reset with which a stage begins; 0: the schedule's length."""
    four, sched = ResetsConfig(lr_factor=0.5, lr_warmup_steps=4), SchedKeys(warmup_steps=2)
    assert rates(sched, 6, [0], resets=four, base=1.0) == [0.25, 0.5, 0.75, 1.0, 1.0, 1.0]
    assert rates(sched, 6, [3], resets=four, base=1.0) == [0.5, 1.0, 1.0, 0.125, 0.25, 0.375]
    assert rates(sched, 6, [0, 3], base=1.0) == [0.5, 1.0, 1.0, 0.5, 1.0, 1.0]
    assert rates(SchedKeys(), 6, [3], resets=four, base=1.0) == [1.0, 1.0, 1.0, 0.125, 0.25, 0.375]
    assert rates(SchedKeys(), 6, [1, 5], resets=ResetsConfig(lr_factor=0.5), base=2.0) == [2.0, 1, 1, 1, 1, 0.5]


def test_a_reset_may_lower_the_rate_for_a_while() -> None:
    """Each reset for its own steps; where they overlap, twice."""
    resets = ResetsConfig(lr_factor=0.5, lr_factor_steps=3)
    assert rates(SchedKeys(), 8, [0, 2, 4], resets=resets, base=1.0) == [1, 1, 0.5, 0.5, 0.25, 0.5, 0.5, 1]
    fall = SchedKeys(name="linear")
    lower = [1, 1, 0.5, 0.5, 0.5, 1, 1, 1]
    wanted = [share * rate for share, rate in zip(lower, rates(fall, 8), strict=True)]
    assert rates(fall, 8, [2], of_optimizer=[], resets=resets) == wanted


def test_the_factor_of_a_reset_multiplies_the_whole_curve() -> None:
    sched = SchedKeys(name="linear", min_lr=1e-4)
    plain = rates(sched, 6)
    found = rates(sched, 6, [0, 3], resets=ResetsConfig(lr_factor=0.1))
    assert found == pytest.approx([*plain[:3], *(0.1 * rate for rate in plain[3:])], rel=1e-12)
