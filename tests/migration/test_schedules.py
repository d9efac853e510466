"""Schedules of the learning rate of other trainers: a converted run has their rates, beside their own schedulers."""

import math
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from torch.optim.lr_scheduler import ConstantLR, CosineAnnealingLR, LinearLR, LRScheduler, SequentialLR
from transformers import get_scheduler

from nemo_prorl import settings
from nemo_prorl.algorithms.schedule import learning_rate, warmup_steps
from nemo_prorl.config import ResetsConfig, SchedKeys
from tests import paper_model
from tests.migration.test_convert import converted

N, LR = 60, 2e-6
SCHED = "model.optim.sched"
STEPS = f"trainer.grpo.max_steps={N}"
BEHIND = "step k of a warm-up of W steps has (k - 1) / W of the learning rate there, k / W here"


def rates(overrides: list[str], folder: Path) -> tuple[list[float], int]:
    """Return the learning rate of each step of the converted run, and the number of steps of its warm-up."""
    steps = [] if any(one.startswith("trainer.grpo.max_steps=") for one in overrides) else [STEPS]
    few = [one for one in overrides if one.startswith(("model.optim.", "trainer.grpo.max_steps"))]
    model = f"pretrained_checkpoint.restore_from_path={paper_model.write(folder / 'model')}"
    cfg = settings.load(["cluster=h100_4x8", *few, *steps, model, "rollout.device_memory_gb=1000"])
    sched, resets = SchedKeys(**cfg.model.optim.sched), cast(ResetsConfig, cfg.trainer.resets)
    lr, last = cfg.model.optim.lr, cfg.trainer.grpo.max_steps
    return [learning_rate(lr, sched, resets, step, last, [], []) for step in range(1, last + 1)], warmup_steps(
        sched, last
    )


def optimizer() -> torch.optim.Optimizer:
    return torch.optim.SGD([torch.zeros(1, dtype=torch.float64, requires_grad=True)], lr=LR)


def run_of(scheduler: LRScheduler, steps: int = N) -> list[float]:
    found = []
    for _ in range(steps):
        found.append(float(scheduler.get_last_lr()[0]))
        scheduler.optimizer.step()
        scheduler.step()
    return found


def assert_same_but_for_the_warm_up(ours: list[float], theirs: list[float], warmup: int) -> None:
    """The warm-up of the others is a step behind and begins at 0; after it all is the same."""
    assert ours[warmup:] == pytest.approx(theirs[warmup:], rel=1e-9)
    assert ours[: max(0, warmup - 1)] == pytest.approx(theirs[1 : max(1, warmup)], rel=1e-9)


@pytest.mark.parametrize(
    ("arguments", "kind", "warmup", "options"),
    [
        ("", "linear", 0, {}),
        ("warmup_steps=7", "linear", 7, {}),
        ("warmup_ratio=0.11, lr_scheduler_type='cosine'", "cosine", math.ceil(0.11 * N), {}),
        ("warmup_steps=0.11", "linear", math.ceil(0.11 * N), {}),  # transformers 5
        ("lr_scheduler_type='constant_with_warmup', warmup_steps=3", "constant_with_warmup", 3, {}),
        ("lr_scheduler_type='constant'", "constant", 0, {}),
        (
            "lr_scheduler_type='cosine_with_min_lr', lr_scheduler_kwargs={'min_lr': 3e-7}, warmup_steps=5",
            "cosine_with_min_lr",
            5,
            {"min_lr": 3e-7},
        ),
        (
            "lr_scheduler_type='cosine_with_min_lr', lr_scheduler_kwargs=dict(min_lr_rate=0.2)",
            "cosine_with_min_lr",
            0,
            {"min_lr_rate": 0.2},
        ),
    ],
)
def test_the_rates_of_trl_are_those_of_transformers(
    arguments: str, kind: str, warmup: int, options: dict[str, Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    text = f"GRPOConfig(learning_rate={LR}, max_steps={N}, {arguments})"
    text = text.replace("dict(min_lr_rate=0.2)", "{'min_lr_rate': 0.2}")
    overrides, comments = converted("trl", text, tmp_path / "train.py", capsys)
    found, rise = rates(overrides, tmp_path)
    theirs = run_of(get_scheduler(kind, optimizer(), warmup, N, scheduler_specific_kwargs=options))
    assert rise == warmup
    assert_same_but_for_the_warm_up(found, theirs, warmup)
    assert any(line.endswith(BEHIND) for line in comments) == (warmup > 0)
    assert not any("each update there" in line or "no counterpart" in line for line in comments)


def test_a_yaml_file_of_trl_says_the_same(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text = "lr_scheduler_type: cosine_with_min_lr\nlr_scheduler_kwargs: {min_lr_rate: 0.1, num_cycles: 2}\n"
    overrides, comments = converted("trl", text, tmp_path / "trl.yaml", capsys)
    assert {f"{SCHED}.name=cosine", f"{SCHED}.min_lr=1e-07"} <= set(overrides)
    assert "  lr_scheduler_kwargs: num_cycles=2 has no counterpart" in comments


def test_steps_of_trl_are_updates(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text = "GRPOConfig(max_steps=100, warmup_steps=10, per_device_train_batch_size=8, steps_per_generation=4)"
    overrides, comments = converted("trl", text, tmp_path / "train.py", capsys)
    assert {"trainer.grpo.updates_per_step=4", "trainer.grpo.max_steps=25", f"{SCHED}.warmup_steps=3"} <= set(overrides)
    told = "  lr_scheduler_type: the learning rate changes with each update there, with each step here"
    assert told in comments
    text = text.replace("warmup_steps=10", "lr_scheduler_type='constant', warmup_steps=10")
    overrides, comments = converted("trl", text, tmp_path / "train.py", capsys)
    assert {f"{SCHED}.name=constant", f"{SCHED}.warmup_steps=0"} <= set(overrides)
    assert "lr_scheduler_type=constant: a warm-up has no effect there" in comments
    assert told not in comments


@pytest.mark.parametrize(
    ("kind", "nearest"), [("polynomial", "linear"), ("cosine_with_restarts", "cosine"), ("inverse_sqrt", None)]
)
def test_a_schedule_without_a_counterpart_is_named(
    kind: str, nearest: str | None, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    text, code = f"GRPOConfig(lr_scheduler_type='{kind}')", 0 if nearest else 2
    overrides, comments = converted("trl", text, tmp_path / "train.py", capsys, code)
    if nearest is None:
        told = f"  {SCHED}.name: lr_scheduler_type={kind} has no counterpart here; constant is what comes nearest"
        assert told in comments
        return
    assert f"{SCHED}.name={nearest}" in overrides
    assert f"  lr_scheduler_type={kind} has no counterpart; {SCHED}.name={nearest} is set in its place" in comments


VERL = f"python3 -m verl.trainer.main_ppo algorithm.adv_estimator=grpo actor_rollout_ref.actor.optim.lr={LR} "


@pytest.mark.parametrize(
    ("words", "kind", "warmup", "least"),
    [
        ("", "constant", 0, 0.0),
        ("lr_warmup_steps=10", "constant_with_warmup", 10, 0.0),
        ("lr_warmup_steps=0 lr_warmup_steps_ratio=0.5", "constant", 0, 0.0),
        ("lr_scheduler_type=cosine min_lr_ratio=0.1 lr_warmup_steps_ratio=0.03", "cosine_with_min_lr", 1, 0.1),
        ("warmup_style=cosine lr_warmup_steps=4", "cosine", 4, 0.0),
        ("lr_decay_style=linear lr_warmup_steps=4", "linear", 4, 0.0),  # Megatron's name
    ],
)
def test_the_rates_of_verl_are_those_of_its_formulas(
    words: str, kind: str, warmup: int, least: float, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """They are those of transformers, whose functions verl copied; a share of the steps is rounded down."""
    text = VERL + " ".join(f"actor_rollout_ref.actor.optim.{word}" for word in words.split())
    overrides, comments = converted("verl", f"{text} trainer.total_training_steps={N}", tmp_path / "run.sh", capsys)
    options = {"min_lr_rate": least} if least else {}
    theirs = run_of(get_scheduler(kind, optimizer(), warmup, N, scheduler_specific_kwargs=options))
    found, rise = rates(overrides, tmp_path)
    assert rise == warmup
    assert_same_but_for_the_warm_up(found, theirs, warmup)
    assert any(line.endswith(BEHIND) for line in comments) == (warmup > 0)
    assert not any("each update there" in line for line in comments)  # verl's schedule goes by steps, too


def test_a_share_of_unknown_steps_stays_a_share(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text = VERL + "actor_rollout_ref.actor.optim.lr_warmup_steps_ratio=0.03 trainer.total_epochs=2"
    overrides, comments = converted("verl", text, tmp_path / "run.sh", capsys)
    assert f"{SCHED}.warmup_ratio=0.03" in overrides
    assert not any("warmup_steps" in one for one in overrides)
    assert "  lr_warmup_steps_ratio: the number of steps is rounded down there, up here" in comments


@pytest.mark.parametrize(
    ("words", "kind", "share", "options"),
    [
        ("", "cosine_with_min_lr", 0.03, {"min_lr_rate": 0.1}),
        ("--actor.min_lr_ratio 0.3 --actor.lr_warmup_ratio 0.2", "cosine_with_min_lr", 0.2, {"min_lr_rate": 0.3}),
        ("--lr_scheduler linear --lr_warmup_ratio 0", "linear", 0, {}),
        ("--actor.lr_scheduler constant", "constant", 0, {}),
    ],
)
def test_the_rates_of_openrlhf_are_those_of_transformers(
    words: str, kind: str, share: float, options: dict[str, Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    text = f"python3 -m openrlhf.cli.train_ppo_ray --rollout.n_samples_per_prompt 8 --actor.adam.lr {LR} {words}"
    overrides, comments = converted("openrlhf", text, tmp_path / "run.sh", capsys)
    warmup = math.ceil(share * N)
    theirs = run_of(get_scheduler(kind, optimizer(), warmup, N, scheduler_specific_kwargs=options))
    found, rise = rates(overrides, tmp_path)
    assert rise == warmup
    assert_same_but_for_the_warm_up(found, theirs, warmup)
    assert any("each update there" in line for line in comments) == (kind != "constant")


NEMO = "grpo: {max_num_steps: 60}\npolicy:\n  optimizer: {kwargs: {lr: 2.0e-6}}\n"


def test_the_rates_of_nemo_rl_are_those_of_torch(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Its default begins at a tenth of the rate, which is told; a rise from nearly 0 is a step behind."""
    overrides, comments = converted("nemo_rl", NEMO, tmp_path / "grpo.yaml", capsys)
    found, rise = rates(overrides, tmp_path)
    assert (rise, found[50:]) == (50, [LR] * 10)
    assert (
        "  policy.scheduler: step k of a warm-up of W steps has 0.1 + 0.9 (k - 1) / W of the learning rate there, k / W"
        " here" in comments
    )

    text = NEMO + (
        "  scheduler:\n"
        "  - {name: torch.optim.lr_scheduler.LinearLR, kwargs: {start_factor: 1.0e-08, total_iters: 10}}\n"
        "  - {name: torch.optim.lr_scheduler.CosineAnnealingLR, kwargs: {T_max: 50, eta_min: 5.0e-7}}\n"
        "  - {milestones: [10]}\n"
    )
    overrides, comments = converted("nemo_rl", text, tmp_path / "grpo.yaml", capsys)
    one = optimizer()
    parts = [LinearLR(one, 1e-8, 1.0, 10), CosineAnnealingLR(one, 50, 5e-7)]
    found, rise = rates(overrides, tmp_path)
    assert_same_but_for_the_warm_up(found, run_of(SequentialLR(one, parts, [10])), rise)
    assert any(line.endswith(BEHIND) for line in comments)
    assert not any("T_max" in line for line in comments)

    overrides, comments = converted("nemo_rl", text.replace("50", "40"), tmp_path / "grpo.yaml", capsys, code=2)
    assert (
        f"  {SCHED}.name: policy.scheduler: T_max=40: the learning rate falls over that many steps there, over all 60"
        " steps here; cosine is what comes nearest" in comments
    )


@pytest.mark.parametrize(("length", "code"), [(60, 0), (90, 2)])
def test_a_fall_of_verl_of_another_length_is_asked_for(
    length: int, code: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    optim = "actor_rollout_ref.actor.optim"
    text = f"python3 -m verl.trainer.main_ppo algorithm.adv_estimator=grpo trainer.total_training_steps={N}"
    text += f" {optim}.lr_decay_style=cosine {optim}.lr_decay_steps={length}"
    overrides, comments = converted("verl", text, tmp_path / "run.sh", capsys, code)
    assert (f"{SCHED}.name=cosine" in overrides) == (not code)
    assert [f"over all {N} steps here" in line for line in comments if "lr_decay_steps" in line] == [True] * (code > 0)


@pytest.mark.parametrize(
    ("scheduler", "name", "warmup", "told"),
    [
        ("null", "constant", 0, None),
        ("{name: torch.optim.lr_scheduler.ConstantLR, kwargs: {factor: 1}}", "constant", 0, None),
        ("{name: torch.optim.lr_scheduler.CosineAnnealingLR, kwargs: {T_max: 60}}", "cosine", 0, None),
        (
            "[{name: torch.optim.lr_scheduler.ConstantLR, kwargs: {factor: 0.5}}]",
            "constant",
            0,
            "ConstantLR(factor=0.5) has no counterpart here",
        ),
        ("[{name: a.LinearLR}]", "constant", 5, None),  # torch's defaults
        (
            "[{name: torch.optim.lr_scheduler.LinearLR, kwargs: {end_factor: 0.1}}]",
            "constant",
            0,
            "LinearLR(end_factor=0.1) has no counterpart here",
        ),
        (
            "[{name: a.LinearLR, kwargs: {total_iters: 5, start_factor: 0}}, {name: a.StepLR}, {name: a.ConstantLR}]",
            "constant",
            5,
            "StepLR() and ConstantLR() has no counterpart here",
        ),
        (
            "{name: torch.optim.lr_scheduler.OneCycleLR, kwargs: {max_lr: 0.001}}",
            "constant",
            0,
            "OneCycleLR(max_lr=0.001) has no counterpart here",
        ),
    ],
)
def test_other_schedulers_of_nemo_rl(
    scheduler: str, name: str, warmup: int, told: str | None, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    text = f"{NEMO}  scheduler: {scheduler}\n"
    overrides, comments = converted("nemo_rl", text, tmp_path / "grpo.yaml", capsys, code=2 if told else 0)
    assert f"{SCHED}.warmup_steps={warmup}" in overrides
    assert (f"{SCHED}.name={name}" in overrides) == (told is None)
    found = [line for line in comments if line.startswith(f"  {SCHED}.name: policy.scheduler=")]
    assert [line.split("policy.scheduler=")[1].split(";")[0] for line in found] == ([told] if told else [])


def test_a_scheduler_of_nemo_rl_without_a_value_must_be_set(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text = f"{NEMO}  scheduler: [{{name: a.LinearLR, kwargs: {{total_iters: '${{mine.steps}}'}}}}]\n"
    overrides, comments = converted("nemo_rl", text, tmp_path / "grpo.yaml", capsys, code=2)
    assert not any(one.startswith(SCHED) for one in overrides)
    assert any(line.startswith(f"  {SCHED}.name: policy.scheduler=[") for line in comments)


@pytest.mark.nemo
@pytest.mark.parametrize(
    ("scheduler", "told"),
    [
        ("{lr_decay_style: cosine, lr_decay_iters: 60, lr_warmup_iters: 6, lr_warmup_init: 0}", None),
        (
            "{lr_decay_style: linear, lr_decay_iters: 90, lr_warmup_iters: 0}",
            "lr_decay_iters=90: the learning rate falls",
        ),
    ],
)
def test_the_rates_of_nemo_rl_with_megatron_are_those_of_megatron(
    scheduler: str, told: str | None, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler

    text = (
        "grpo: {max_num_steps: 60}\npolicy:\n  megatron_cfg:\n    enabled: true\n"
        f"    optimizer: {{lr: 2.0e-6, min_lr: 4.0e-7}}\n    scheduler: {scheduler}\n"
    )
    overrides, comments = converted("nemo_rl", text, tmp_path / "grpo.yaml", capsys, 0 if told is None else 2)
    assert [line for line in comments if told is not None and told in line] or told is None
    assert any("lr_decay_iters" in line for line in comments) == (told is not None)
    if told is None:
        found, rise = rates(overrides, tmp_path)
        theirs = OptimizerParamScheduler(optimizer(), 0.0, LR, 4e-7, rise, 60, "cosine", 0.0, 0.0, 60, "constant")
        group = theirs.optimizer.param_groups[0]
        wanted = []
        for _ in range(N):
            wanted.append(theirs.get_lr(group))
            theirs.step(1)
        assert_same_but_for_the_warm_up(found, wanted, rise)


def test_torch_s_schedulers_begin_where_nemo_rl_s_default_does() -> None:
    """What the converted line says of the default: 0.1 + 0.9 (k - 1) / W."""
    one = optimizer()
    theirs = run_of(SequentialLR(one, [LinearLR(one, 0.1, 1.0, 50), ConstantLR(one, 1.0, 10**10)], [50]))
    assert theirs[:50] == pytest.approx([LR * (0.1 + 0.9 * (k - 1) / 50) for k in range(1, 51)], rel=1e-9)
    assert theirs[50:] == pytest.approx([LR] * 10)
