"""The schedule of the learning rate in a run: its updates, its metrics, kills, hard resets, stages."""

from pathlib import Path
from typing import Any

import pytest

from nemo_prorl.config import ResetsConfig
from tests.lifecycle.faults import Killed, killed_at
from tests.lifecycle.small_run import LR, SmallRun, config
from tests.lifecycle.test_hard_resets import UPDATES, account, same, trained

SCHED = {"name": "linear", "warmup_steps": 2}
FALL = [0.5, 1.0, 1.0, 5 / 6, 4 / 6, 3 / 6, 2 / 6, 1 / 6]  # of eight steps


def run_of(folder: Path, resets: ResetsConfig | None = None, max_steps: int = 8) -> SmallRun:
    run = SmallRun(config(folder, resets, max_steps=max_steps))
    run.cfg.model["optim"]["sched"] = dict(SCHED)
    return run


def rates_of(run: SmallRun) -> list[float]:
    return [line["policy/lr"] for line in run.lines()]


def test_each_update_has_the_rate_of_the_schedule(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = run_of(tmp_path)
    trained(run, monkeypatch)
    assert rates_of(run) == pytest.approx([LR * share for share in FALL], rel=1e-12)
    assert [lr for _, lr, _ in run.policy.updates] == [lr for lr in rates_of(run) for _ in range(UPDATES)]


@pytest.mark.parametrize(
    ("parts", "again"),
    [("both", [1, 1, 1, 1, 0.5, 1, 1, 1]), ("optimizer", [1, 1, 1, 1, 0.5, 1, 1, 1]), ("reference", [1] * 8)],
)
def test_the_warm_up_begins_again_where_the_optimizer_is_reset(
    parts: str, again: list[float], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = run_of(tmp_path, ResetsConfig(at_steps=[4], parts=parts))
    trained(run, monkeypatch)
    wanted = [LR * share * rise for share, rise in zip(FALL, again, strict=True)]
    assert rates_of(run) == pytest.approx(wanted, rel=1e-12)


def test_after_a_roll_back_the_warm_up_begins_again_whatever_is_reset(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The moments belong to other weights, so they are emptied."""
    run = run_of(tmp_path, ResetsConfig(at_steps=[4], parts="reference", roll_back=True))
    trainer = trained(run, monkeypatch, {2: 0.9, 4: 0.1})
    assert trainer.resets.done[0]["rolled_back_to"] == 2
    assert rates_of(run)[4] == pytest.approx(LR * FALL[4] * 0.5, rel=1e-12)


def kill(run: SmallRun, point: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Start the run and kill it at a point of a reset, or between two checkpoints: `in step N`."""
    with killed_at(point, monkeypatch), pytest.raises(Killed):
        trainer = run.start(monkeypatch)
        train_step = trainer.train_step

        def dying(step: int) -> Any:
            metrics = train_step(step)
            if point == f"in step {step}":
                raise Killed(point)
            return metrics

        monkeypatch.setattr(trainer, "train_step", dying)
        trainer.train()
    run.close()


@pytest.mark.parametrize("point", ["reset:intent", "reset:optimizer", "reset:checkpointed", "in step 6", "in step 8"])
def test_killed_and_resumed_the_rates_and_the_weights_are_the_same(
    point: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The resets are in the checkpoint; the rest follows from the step."""
    whole, run = (run_of(tmp_path / name, ResetsConfig(at_steps=[4])) for name in ("whole", "killed"))
    trained(whole, monkeypatch)
    kill(run, point, monkeypatch)
    trained(run, monkeypatch)
    assert rates_of(run)[4] == pytest.approx(LR * FALL[4] * 0.5, rel=1e-12)
    found, wanted = account(run), account(whole)
    assert {key: found[key] for key in found if key != "heldout"} == {
        key: wanted[key] for key in wanted if key != "heldout"
    }


def test_more_steps_stretch_the_fall_and_keep_what_was_made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = run_of(tmp_path, max_steps=4)
    trained(run, monkeypatch)
    run.cfg.trainer.grpo.max_steps = 8
    trained(run, monkeypatch)
    of_four = [LR * share for share in (0.5, 1.0, 1.0, 0.5)]
    assert rates_of(run) == pytest.approx([*of_four, *(LR * share for share in FALL[4:])], rel=1e-12)


def lowered(folder: Path) -> SmallRun:
    """A run whose rate is halved for three steps after step 3; neither reference nor optimizer is reset."""
    resets = ResetsConfig(at_steps=[3], parts="none", lr_factor=0.5, lr_factor_steps=3)
    return SmallRun(config(folder, resets, max_steps=8))


def test_a_lower_rate_for_a_while_is_all_that_it_changes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run, plain = lowered(tmp_path / "lowered"), SmallRun(config(tmp_path / "plain", max_steps=8))
    trainer = trained(run, monkeypatch)
    trained(plain, monkeypatch)
    assert rates_of(run) == [LR] * 3 + [LR / 2] * 3 + [LR] * 2
    assert [line["kl"] for line in run.lines()[:4]] == [line["kl"] for line in plain.lines()[:4]]
    assert {int(moments["step"]) for moments in run.policy.moments().values()} == {8 * UPDATES}
    (commit,) = run.events("reset_commit")
    assert (commit["step"], commit["lr_factor"], commit["lr_until"]) == (3, 0.5, 6)
    assert trainer.resets.done[0]["lr_until"] == 6


@pytest.mark.parametrize("point", ["reset:intent", "reset:checkpointed", "in step 5", "in step 6", "in step 7"])
def test_killed_while_the_rate_is_lower_a_run_computes_the_same(
    point: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole, run = lowered(tmp_path / "whole"), lowered(tmp_path / "killed")
    trained(whole, monkeypatch)
    kill(run, point, monkeypatch)
    trained(run, monkeypatch)
    assert rates_of(run) == [LR] * 3 + [LR / 2] * 3 + [LR] * 2
    assert account(run) == account(whole)
    assert same(run.policy.state(), whole.policy.state())
