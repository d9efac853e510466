"""What a hard reset does to every part of a run, without and with a roll-back, and after a kill anywhere in it."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from nemo_prorl.config import ResetRulesConfig, ResetsConfig, ShapingConfig
from nemo_prorl.errors import ResetFailure
from nemo_prorl.trainer import Trainer
from tests.lifecycle.faults import Killed, killed_at
from tests.lifecycle.small_run import LR, SmallPolicy, SmallRun, config, parts_of
from tests.test_frozen import RECORDS, assert_recorded, processor

UPDATES = 2  # a step
POINTS = ("intent", "reference", "optimizer", "checkpointed", "committed")


def same(one: Any, other: Any) -> bool:
    """Return whether two trees of tensors are equal to the bit."""
    left, right = torch.utils._pytree.tree_flatten(one), torch.utils._pytree.tree_flatten(other)
    return left[1] == right[1] and all(
        bool(torch.equal(torch.as_tensor(a), torch.as_tensor(b))) for a, b in zip(left[0], right[0], strict=True)
    )


def trained(run: SmallRun, monkeypatch: pytest.MonkeyPatch, scores: dict[int, float] | None = None) -> Trainer:
    """Start or resume the run, and make all its steps.

    Args:
        scores: held-out scores by step, instead of the measured ones; 0.1 where there is none.
    """
    trainer = run.start(monkeypatch)
    heldout = trainer.validation.heldout

    class Heldout:
        @staticmethod
        def call(work: Any) -> Any:
            found = heldout.call(work)
            if scores is not None:
                found["all"]["mean"] = scores.get(trainer.progress.step, 0.1)
            return found

    monkeypatch.setattr(trainer.validation, "heldout", Heldout)
    try:
        trainer.train()
        trainer.finish()
    finally:
        run.close()
    return trainer


def saved(run: SmallRun, step: int) -> dict[str, Any]:
    """Return the policy of a checkpoint."""
    return dict(torch.load(run.folder / "checkpoints" / f"step-{step:06d}" / "policy.pt"))


def account(run: SmallRun) -> dict[str, Any]:
    """Return all that a finished run computed, without times."""
    summary = json.loads((run.folder / "summary.json").read_text())
    resets = [{k: v for k, v in event.items() if k != "time"} for event in run.events("reset_commit")]
    steps = len(run.lines())
    return {
        "metrics": run.lines(),
        "commits": resets,
        "alarms": sorted(set(run.alarms())),
        "rollouts": [run.rollouts(step) for step in range(1, steps + 1)],
        **{key: summary[key] for key in ("step", "heldout", "resets", "weights_sha256", "reference_sha256")},
    }


# --- what is reset ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("parts", ["both", "reference", "optimizer", "none"])
def test_reference_and_optimizer_are_reset_as_configured(
    parts: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = SmallRun(config(tmp_path, ResetsConfig(at_steps=[3], parts=parts), max_steps=3))
    trainer = trained(run, monkeypatch)
    new, at_start = run.policy.state(), SmallPolicy(1.0).state()
    assert not same(new["weights"], at_start["weights"])
    keeps = parts in ("optimizer", "none")
    assert same(new["reference"], at_start["weights"] if keeps else new["weights"])
    counts = {int(moments["step"]) for moments in new["adam"].values()}
    assert counts == ({3 * UPDATES} if parts in ("reference", "none") else set())
    assert trainer.resets.state_dict()["fresh"] is not keeps
    (reset,) = trainer.resets.done
    assert reset == {"step": 3, "reason": "at_steps", "reference_sha256": run.policy.reference_sha256()}
    assert same(saved(run, 3), new)  # the checkpoint was written after the reset
    state = json.loads((run.folder / "checkpoints" / "step-000003" / "state.json").read_text())
    assert state["resets"] == trainer.resets.state_dict()


def test_regular_resets_come_every_so_many_steps(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = SmallRun(config(tmp_path, ResetsConfig(every=2), max_steps=5))
    trainer = trained(run, monkeypatch)
    assert [(reset["step"], reset["reason"]) for reset in trainer.resets.done] == [(2, "every"), (4, "every")]


@pytest.mark.parametrize(
    "changed",
    [
        {"at_steps": [4], "roll_back": True},
        {"every": 4, "mode": "auto", "rules": ResetRulesConfig(cooldown_steps=7), "kl_after_reset": 0.1},
    ],
    ids=" ".join,
)
def test_resets_changed_in_a_continued_run_act_from_there_on(
    changed: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With each key that may change, it equals a run that had the new value from the start, if nothing came before."""
    scores = {0: 0.1, 1: 0.9, 2: 0.5, 3: 0.2, 4: 0.1}
    undisturbed = SmallRun(config(tmp_path / "a", ResetsConfig(**changed), max_steps=6, validate_every=1))
    trained(undisturbed, monkeypatch, scores)
    assert [event["step"] for event in undisturbed.events("reset_commit")] == [4]
    run = SmallRun(config(tmp_path / "b", ResetsConfig(), max_steps=2, validate_every=1))
    trained(run, monkeypatch, scores)
    run.cfg = config(tmp_path / "b", ResetsConfig(**changed), max_steps=6, validate_every=1)
    trained(run, monkeypatch, scores)
    assert account(run) == account(undisturbed)
    assert same(run.policy.state(), undisturbed.policy.state())


def test_after_a_reset_adam_counts_from_0_and_kl_is_measured_to_the_new_reference(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = SmallRun(config(tmp_path, ResetsConfig(at_steps=[3]), max_steps=5))
    trained(run, monkeypatch)
    assert {int(moments["step"]) for moments in run.policy.moments().values()} == {2 * UPDATES}
    assert [line["kl"] == 0.0 for line in run.lines()] == [True, False, False, True, False]


@pytest.mark.parametrize("roll_back", [False, True])
def test_surplus_and_data_position_after_a_reset(
    roll_back: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The groups left over are kept; after a roll-back they are those of the weights that were given up."""
    states = []
    for at in ([3], []):
        run = SmallRun(config(tmp_path / str(at), ResetsConfig(at_steps=at, roll_back=roll_back), max_steps=3))
        states.append(parts_of(trained(run, monkeypatch, {2: 0.9}).checkpoints))
    reset, plain = states
    assert plain["rollouts"]["surplus"]  # otherwise nothing is shown
    assert reset["rollouts"]["surplus"] == ([] if roll_back else plain["rollouts"]["surplus"])
    assert reset["rollouts"]["draws"] == plain["rollouts"]["draws"]
    assert reset["prompts"] == plain["prompts"]
    assert reset["trainer"] == plain["trainer"]


def test_the_rules_forget_what_was_measured_before_a_reset(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = SmallRun(config(tmp_path, ResetsConfig(at_steps=[3]), max_steps=4, validate_every=1))
    trainer = trained(run, monkeypatch)
    history = trainer.resets.history._made[0]
    assert history is not None
    assert (history.last_reset, history.step) == (3, 4)
    assert {"kl", "validation/held", "entropy"} <= history.series.keys()
    assert {step for points in history.series.values() for step, _ in points} == {4}


# --- the learning rate -----------------------------------------------------------------------------------------------


def test_each_update_has_the_learning_rate_of_its_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    resets = ResetsConfig(at_steps=[2, 5], lr_factor=0.5, lr_warmup_steps=2)
    run = SmallRun(config(tmp_path, resets, max_steps=7))
    trained(run, monkeypatch)
    by_hand = [LR, LR, LR * 0.5 * 0.5, LR * 0.5, LR * 0.5, LR * 0.25 * 0.5, LR * 0.25]
    assert [lr for _, lr, _ in run.policy.updates] == pytest.approx([lr for lr in by_hand for _ in range(UPDATES)])
    assert [line["policy/lr"] for line in run.lines()] == pytest.approx(by_hand)


# --- roll-back -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("parts", ["both", "reference", "optimizer", "none"])
def test_a_roll_back_starts_from_the_best_weights(
    parts: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    run = SmallRun(config(tmp_path, ResetsConfig(at_steps=[6], roll_back=True, parts=parts), validate_every=1))
    trainer = trained(run, monkeypatch, {2: 0.9, 4: 0.5, 5: 0.7})
    before, new = saved(run, 2), run.policy.state()
    assert same(new["weights"], before["weights"])
    assert not same(new["weights"], saved(run, 4)["weights"])
    assert same(new["reference"], before["reference"] if parts in ("optimizer", "none") else new["weights"])
    assert new["adam"] == {}  # also with parts=reference: the moments belong to other weights
    (reset,) = trainer.resets.done
    assert (reset["step"], reset["rolled_back_to"]) == (6, 2)
    (commit,) = run.events("reset_commit")
    assert commit["rolled_back_to"] == 2
    assert "hard reset after step 6 (at_steps), back to the weights of step 2" in caplog.messages
    assert same(saved(run, 6), new)


def test_after_a_roll_back_engines_get_the_restored_weights(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = SmallRun(config(tmp_path, ResetsConfig(at_steps=[4], roll_back=True), max_steps=5))
    trainer = trained(run, monkeypatch, {2: 0.9})
    (reset,) = trainer.resets.done
    assert reset["rolled_back_to"] == 2
    assert run.engines.published[4] == reset["reference_sha256"]  # published again under the same number
    assert run.lines()[4]["kl"] == 0.0
    assert all(line["version"] == 4 for line in run.rollouts(5))


def test_no_roll_back_where_the_last_weights_are_the_best_or_the_best_are_gone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = SmallRun(config(tmp_path, ResetsConfig(at_steps=[3], roll_back=True), max_steps=3))
    trainer = run.start(monkeypatch)
    mean: Any = {"mean": 0.5, "se": 0.1, "prompts": 8}
    for step, last, kept in ((1, 1.0, True), (2, 0.0, False)):
        score: Any = {"all": {**mean, "mean": last}, "tasks": {"held": mean}}
        trainer.validation.scores = {0: {"all": mean, "tasks": {"held": mean}}, step: score}
        trainer.resets.done.clear()
        monkeypatch.setattr(trainer.checkpoints, "has", lambda step, kept=kept: kept)
        weights = run.policy.state()["weights"]
        trainer.resets.perform(step, "by hand", trainer.checkpoints)
        assert "rolled_back_to" not in trainer.resets.done[-1]
        assert same(run.policy.state()["weights"], weights)
    run.close()
    assert run.alarms() == ["2: no roll-back: the checkpoint of step 0, the best validation, is not kept"]


@pytest.mark.parametrize("roll_back", [False, True])
def test_each_best_validation_so_far_has_a_checkpoint(
    roll_back: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """That of step 0 only where a roll-back may need it."""
    resets = ResetsConfig(roll_back=roll_back)
    run = SmallRun(config(tmp_path, resets, max_steps=5, validate_every=1, checkpoint_every=99, keep_best=1))
    trained(run, monkeypatch, {1: 0.2, 2: 0.9, 3: 0.5, 4: 0.95, 5: 0.3})
    found = [int(path.name[5:]) for path in sorted((tmp_path / "checkpoints").iterdir())]
    assert found == [*([0] if roll_back else []), 1, 2, 4, 5]


# --- kills -----------------------------------------------------------------------------------------------------------


def rich(folder: Path, roll_back: bool) -> SmallRun:
    """A run with shaping, two resets, validations, surplus, retirement and an adaptive entropy bonus."""
    resets = ResetsConfig(at_steps=[3, 5], roll_back=roll_back, lr_factor=0.8, lr_warmup_steps=2, mode="advise")
    run = SmallRun(
        config(
            folder, resets, max_steps=7, unfinished_penalty=0.3, shaping=ShapingConfig(overlong_tokens=3), keep_best=2
        )
    )
    run.cfg.trainer.grpo.adaptive_entropy.enabled = True
    run.cfg.trainer.grpo.adaptive_entropy.target = 2.0
    run.cfg.data.retire_after = 2
    run.cfg.seed = 4
    return run


@pytest.fixture(scope="module", params=[False, True], ids=["reset", "roll-back"])
def whole(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[bool, dict[str, Any]]:
    run = rich(tmp_path_factory.mktemp("whole"), request.param)
    with pytest.MonkeyPatch.context() as monkeypatch:
        trainer = trained(run, monkeypatch)
    found = account(run)
    assert [("rolled_back_to" in reset) for reset in found["resets"]] == [request.param] * 2
    assert any(line["rollout/carried"] for line in found["metrics"])
    return request.param, {**found, "parts": parts_of(trainer.checkpoints), "policy": run.policy.state()}


def test_the_run_computes_what_it_computed_when_it_was_recorded(whole: tuple[bool, dict[str, Any]]) -> None:
    """To record it again: tests/frozen/tiny-*.json are removed, and this test writes them and fails once."""
    roll_back, found = whole
    name = "tiny-roll-back" if roll_back else "tiny-reset"
    prompts = sorted({line["id"] for line in found["rollouts"][0]})
    kept = ("metrics", "weights_sha256", "reference_sha256", "heldout", "resets")
    account = {"processor": processor(), "prompts of step 1": prompts, **{key: found[key] for key in kept}}
    if not (RECORDS / f"{name}.json").exists():
        (RECORDS / f"{name}.json").write_text(json.dumps(account, indent=1) + "\n")
        pytest.fail(f"{name}.json was missing and is recorded now")
    assert_recorded(name, json.loads(json.dumps(account)))


@pytest.mark.parametrize("point", [*(f"reset:{name}#{k}" for name in POINTS for k in (1, 2)), "checkpoint:exchange"])
def test_killed_in_a_reset_and_resumed_a_run_computes_the_same(
    point: str, whole: tuple[bool, dict[str, Any]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    roll_back, wanted = whole
    run = rich(tmp_path, roll_back)
    killed = False
    with killed_at(point, monkeypatch):
        try:
            trainer = trained(run, monkeypatch)
        except Killed:
            killed = True
    assert killed == (point != "checkpoint:exchange")
    if killed:
        trainer = trained(run, monkeypatch)
    found = account(run)
    assert found == {key: wanted[key] for key in found}
    parts = parts_of(trainer.checkpoints)
    for state in (parts, wanted["parts"]):
        state["records"].pop("checkpoint_s", None)
    assert {k: v for k, v in parts.items() if k != "records"} == {
        k: v for k, v in wanted["parts"].items() if k != "records"
    }
    assert same(run.policy.state(), wanted["policy"])


@pytest.mark.parametrize("step", [0, 3])
def test_the_step_after_a_reset_is_checked_also_after_a_kill(
    step: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A policy that differs from its reference then ends the run; in other steps nobody expects them equal."""
    run = SmallRun(config(tmp_path, ResetsConfig(at_steps=[3])))
    if step:
        with killed_at("reset:checkpointed", monkeypatch), pytest.raises(Killed):
            trained(run, monkeypatch)
    trainer = run.start(monkeypatch)
    assert trainer.progress.step == step
    with torch.no_grad():
        run.policy.reference["embed"].add_(torch.randn(12, 8, generator=torch.Generator().manual_seed(0)))
    try:
        with pytest.raises(ResetFailure, match=f"step {step + 1} is the first of a run or follows a hard reset"):
            trainer.train()
    finally:
        run.close()


@pytest.mark.parametrize("parts", ["both", "optimizer"])
def test_the_check_comes_once_and_only_where_the_reference_is_new(
    parts: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = SmallRun(config(tmp_path, ResetsConfig(at_steps=[3], parts=parts), max_steps=5))
    trainer = run.start(monkeypatch)
    checked: list[tuple[int, float]] = []
    check = trainer.resets.check_reference

    def checking(step: int, gap: float) -> None:
        checked.append((step, gap))
        check(step, gap)

    monkeypatch.setattr(trainer.resets, "check_reference", checking)
    trainer.train()
    run.close()
    assert [step for step, _ in checked] == [1, 2, 3, 4, 5]
    assert [gap == 0.0 for _, gap in checked] == [True, False, False, parts == "both", False]


def test_policy_and_reference_that_are_equal_fit_an_allowed_difference_of_0(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = SmallRun(config(tmp_path, ResetsConfig(kl_after_reset=0.0, at_steps=[1]), max_steps=2))
    trainer = run.start(monkeypatch)
    trainer.train()
    run.close()
    assert trainer.progress.step == 2
