"""Trials of hard resets: the run equals one that had known the answer, also if it is killed anywhere in a trial."""

import functools
import json
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest

from nemo_prorl.algorithms.paired import PairedDifference
from nemo_prorl.config import ResetsConfig
from nemo_prorl.lifecycle import trials
from nemo_prorl.lifecycle.ledger import read_ledger
from nemo_prorl.lifecycle.retention import complete, step_folder
from nemo_prorl.lifecycle.run_records import Journal
from nemo_prorl.report import status
from nemo_prorl.trainer import Trainer
from tests.lifecycle.faults import Killed, killed_at
from tests.lifecycle.small_run import SmallRun, config
from tests.lifecycle.test_control import answers, place
from tests.lifecycle.test_hard_resets import account
from tests.lifecycle.test_wiring import always_plateau, go

STEPS, BEGIN, LENGTH, NOISE = 9, 3, 4, 0.25
GO_BACK = ("trial:records", "trial:back", "reset:intent", "reset:optimizer", "reset:checkpointed", "reset:committed")
LOSE = ("trial:lost", "trial:checkpoints back", "trial:records back")
Known = Callable[..., SmallRun]
BETTER, WORSE, EQUAL = PairedDifference(0.3, 0.01), PairedDifference(-0.3, 0.01), PairedDifference(0.1, 1.0)


def run_in(folder: Path, mode: str = "trial", **resets: Any) -> SmallRun:
    values = {"at_steps": [BEGIN], "trial_steps": LENGTH, "trial_noise": NOISE, **resets}
    grpo = {"max_steps": STEPS, "validate_every": 1, "keep_batches": 99, "keep_best": 0}
    return SmallRun(config(folder, ResetsConfig(mode=mode, **values), **grpo))


@pytest.fixture(scope="module")
def known(tmp_path_factory: pytest.TempPathFactory) -> Known:
    """Gives the finished run without trials that is reset after some steps; tests only read it."""

    @functools.cache
    def run_with(*at_steps: int) -> SmallRun:
        with pytest.MonkeyPatch.context() as monkeypatch:
            run = run_in(tmp_path_factory.mktemp("known"), "advise", at_steps=list(at_steps))
            go(run, monkeypatch)
        return run

    return run_with


def shown(found: PairedDifference, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let each comparison of two arms show this."""

    def look(first: Any, second: Any, noise: float) -> Any:
        assert noise == NOISE
        return (found, found.decided(len(first))) if second else None

    monkeypatch.setattr(trials, "look", look)


def equal(run: SmallRun, wanted: SmallRun) -> bool:
    """Return whether two runs have the same numbers, ledgers, batches, validations and checkpoints that count."""

    def files(one: SmallRun) -> dict[str, bytes]:
        found = (file for name in ("validations", "batches", "rollouts") for file in (one.folder / name).iterdir())
        return {f"{file.parent.name}/{file.name}": file.read_bytes() for file in found}

    assert read_ledger(run.folder) == read_ledger(wanted.folder)
    assert files(run) == files(wanted)
    assert Journal(run.folder).resets() == Journal(wanted.folder).resets()
    one, other = account(run), account(wanted)
    for key in ("commits", "alarms"):  # the journal has those of both arms
        one.pop(key), other.pop(key)
    return one == other


def ends(run: SmallRun) -> list[tuple[Any, ...]]:
    return [(e["trial"], e["step"], e["winner"]) for e in run.events("trial_end")]


@pytest.mark.parametrize(
    ("found", "steps", "kill"),
    [(WORSE, 1, kill) for kill in (None, *GO_BACK, *LOSE)]
    + [(EQUAL, LENGTH, None)]
    + [pytest.param(EQUAL, LENGTH, kill, marks=pytest.mark.slow) for kill in (*GO_BACK, *LOSE)],
)
def test_a_reset_that_does_not_win_is_not_made(
    known: Known, found: PairedDifference, steps: int, kill: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    wanted = known()
    shown(found, monkeypatch)
    run = run_in(tmp_path / "tried")
    if kill is not None:
        with killed_at(kill, monkeypatch), pytest.raises(Killed):
            go(run, monkeypatch)
    trainer = go(run, monkeypatch)
    assert equal(run, wanted)
    assert ends(run) == [(BEGIN, BEGIN + LENGTH, "none")]
    lost = run.folder / "trials" / f"step-{BEGIN:06d}" / "reset" / "metrics.jsonl"
    assert lost.read_text().count("\n") == steps
    assert trainer.resets.done == []
    history = trainer.resets.history.call(lambda history: history.series["kl"])
    assert history == [(line["step"], line["kl"]) for line in wanted.lines()]
    end = step_folder(run.folder / "checkpoints", BEGIN + LENGTH) / "state.json"
    assert json.loads(end.read_text())["resets"]["trial"]["arm"] == "over"
    saved = [folder.name for folder in complete(run.folder / "checkpoints")]
    assert saved == [f"step-{step:06d}" for step in (2, 4, 6, BEGIN + LENGTH, 8, 9)]  # not 3, which has the reset


@pytest.mark.parametrize("kill", [None, *GO_BACK])
def test_a_reset_that_wins_is_kept(
    known: Known, kill: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    wanted = known(BEGIN)
    shown(BETTER, monkeypatch)
    run = run_in(tmp_path / "tried")
    if kill is not None:
        with killed_at(kill, monkeypatch), pytest.raises(Killed):
            go(run, monkeypatch)
    trainer = go(run, monkeypatch)
    assert equal(run, wanted)
    assert ends(run) == [(BEGIN, BEGIN + 1, "reset")]
    assert [reset["step"] for reset in trainer.resets.done] == [BEGIN]
    assert complete(run.folder / "trials" / f"step-{BEGIN:06d}" / "none") == []
    assert all(line["kl"] == 0.0 for line in run.lines() if line["step"] == BEGIN + 1)


def test_the_held_out_prompts_decide(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without the reset the verifier rejects everything: the first look shows it."""
    run = run_in(tmp_path, trial_noise=0.005)

    def prepare(trainer: Trainer) -> None:
        monkeypatch.setattr(run.verifier, "score", _score_by(run, trainer, run.verifier.score))

    go(run, monkeypatch, prepare)
    (end,) = run.events("trial_end")
    assert (end["winner"], end["because"]) == ("reset", "decided after 1 steps")
    assert 0 < end["se"] < end["difference"]
    assert end["looks"] == LENGTH
    lost = run.folder / "trials" / f"step-{BEGIN:06d}" / "none" / "metrics.jsonl"
    assert lost.read_text().count("\n") == LENGTH
    assert end["tokens"] > 0


def _score_by(run: SmallRun, trainer: Trainer, score: Any) -> Any:
    async def scored(request: Any, deadline: Any) -> Any:
        trial = trainer.resets.trial
        run.verifier.hopeless = request["id"].startswith("held") and trial is not None and trial["arm"] == "none"
        return await score(request, deadline)

    return scored


@pytest.mark.parametrize(("kill", "arm"), [("trial:records", "none"), ("reset:committed", "reset"), (None, None)])
def test_the_status_names_the_arm(
    kill: str | None, arm: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = run_in(tmp_path)
    with killed_at(kill, monkeypatch) if kill else nullcontext(), pytest.raises(Killed) if kill else nullcontext():
        go(run, monkeypatch)
    (run.folder / "config.yaml").write_text("trainer: {}")
    told = status.run_state(run.folder)["trial"]
    begin = f"of a hard reset after step {BEGIN} (at_steps): arm {arm}, up to step {BEGIN + LENGTH}"
    assert told == arm if arm is None else str(told).startswith(begin)


def test_trials_keep_their_distance_and_need_room(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shown(EQUAL, monkeypatch)
    run = run_in(tmp_path, at_steps=[1, 2, 4, 6, 8], trial_steps=2, trial_every=4)
    go(run, monkeypatch)
    assert [end[0] for end in ends(run)] == [1, 6]  # 2: in the first; 4: too early; 8: no room


def test_a_requested_reset_ends_the_trial(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = run_in(tmp_path)

    def prepare(trainer: Trainer) -> None:
        step_of = trainer.train_step

        def train_step(step: int) -> Any:
            if step == BEGIN + 2:
                place(tmp_path, "reset", "r-1", 1.0)
            return step_of(step)

        monkeypatch.setattr(trainer, "train_step", train_step)

    trainer = go(run, monkeypatch, prepare)
    assert ends(run) == [(BEGIN, BEGIN + 2, "none")]
    assert [(reset["step"], reset["reason"]) for reset in trainer.resets.done] == [(BEGIN + 2, "control r-1")]
    assert [answer["status"] for answer in answers(tmp_path)] == ["done"]


@pytest.mark.parametrize("kill", ["trial:checkpoints back", "trial:records back"])
def test_the_first_checkpoint_is_kept_and_a_damaged_end_of_the_winner_is_trained_again(
    known: Known, kill: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    wanted = known()
    shown(WORSE, monkeypatch)
    run = run_in(tmp_path / "tried")
    run.cfg.trainer.grpo.keep_checkpoints, run.cfg.trainer.grpo.checkpoint_every = 2, 1
    with killed_at(kill, monkeypatch), pytest.raises(Killed):
        go(run, monkeypatch)
    checkpoints = run.folder / "checkpoints"
    end = step_folder(checkpoints, BEGIN + LENGTH)
    end.rename(end.with_suffix(".damaged"))
    assert complete(checkpoints)[-1] == step_folder(checkpoints, BEGIN + LENGTH - 1)
    go(run, monkeypatch)
    assert ends(run) == [(BEGIN, BEGIN + LENGTH - 1, "none")]
    assert read_ledger(run.folder) == read_ledger(wanted.folder)
    assert run.lines() == wanted.lines()


def test_a_rule_asks_for_a_trial(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shown(BETTER, monkeypatch)
    resets = always_plateau("trial")
    resets.trial_steps, resets.trial_noise = 2, NOISE
    run = SmallRun(config(tmp_path, resets, validate_every=1, max_steps=6))
    trainer = go(run, monkeypatch)
    assert [event["arm"] for event in run.events("trial")] == ["none", "reset"]
    assert [reset["step"] for reset in trainer.resets.done] == [4]
    assert trainer.resets.done[0]["reason"].startswith("plateau: ")
