"""Where a stage begins: the run beside it, one that is named, or a single checkpoint."""

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from nemo_prorl import settings
from nemo_prorl.algorithms.reset_rules import best_policy, policy_scores
from nemo_prorl.errors import ConfigError
from nemo_prorl.launcher.chain import stage_names
from nemo_prorl.lifecycle.retention import FORMAT
from nemo_prorl.lifecycle.run_records import Journal
from nemo_prorl.lifecycle.stages import (
    begun_from,
    chosen_checkpoint,
    end_text,
    origin,
    take_over_model,
)

Make = Callable[..., Path]


@pytest.fixture
def make(tmp_path: Path) -> Make:
    """Writes what a run directory of a stage holds, as far as the next stage looks."""

    def run(name: str, steps: tuple[int, ...] = (0, 2, 4), finished: bool = True, **means: float) -> Path:
        folder = tmp_path / name
        (folder / "checkpoints").mkdir(parents=True)
        (folder / "config.yaml").write_text("stage: run1\n")
        validations = {key[1:]: {"all": {"mean": mean}} for key, mean in means.items()}
        for step in steps:
            checkpoint = folder / "checkpoints" / f"step-{step:06d}"
            checkpoint.mkdir()
            state = {"format": FORMAT, "step": step, "resets": {"done": []}, "validation": {"scores": validations}}
            (checkpoint / "state.json").write_text(json.dumps(state))
        (folder / "summary.json").write_text(json.dumps({"finished": finished, "step": max(steps, default=0)}))
        return folder

    return run


def config(run_dir: Path, *overrides: str, stage: str = "run2") -> Any:
    return settings.load([f"stage={stage}", f"run_dir={run_dir}", *overrides])


def test_a_stage_finds_the_one_before_beside_it(make: Make, tmp_path: Path) -> None:
    before = make("run1")
    found = origin(config(tmp_path / "run2"), tmp_path / "run2")
    assert found is not None
    assert found.checkpoint == before / "checkpoints" / "step-000004"
    assert found.run_dir == before


def test_the_first_stage_and_runs_without_one_begin_with_the_model(tmp_path: Path) -> None:
    assert origin(config(tmp_path / "run1", stage="run1"), tmp_path / "run1") is None
    assert origin(config(tmp_path / "x", stage="none"), tmp_path / "x") is None
    assert origin(config(tmp_path / "run3", "chain.after=null", stage="run3"), tmp_path / "run3") is None


def test_a_run_or_a_checkpoint_can_be_named(make: Make, tmp_path: Path) -> None:
    elsewhere = make("other")
    found = origin(config(tmp_path / "run2", f"chain.start_from={elsewhere}"), tmp_path / "run2")
    assert found is not None
    assert found.checkpoint.name == "step-000004"
    one = elsewhere / "checkpoints" / "step-000002"
    found = origin(config(tmp_path / "run2", f"chain.start_from={one}"), tmp_path / "run2")
    assert found is not None
    assert (found.checkpoint, found.run_dir) == (one, elsewhere)


@pytest.mark.parametrize(
    ("prepare", "overrides", "says"),
    [
        (lambda make: None, [], ["stage=run2 follows run1", "run1", "chain.after=null"]),
        (lambda make: make("run1", finished=False), [], ["not finished", "step-000004", "chain.start_from"]),
        (lambda make: make("run1", steps=()), [], ["not finished", "it has no checkpoint"]),
        (lambda make: None, ["chain.start_from=/nowhere"], ["chain.start_from=/nowhere", "neither"]),
    ],
    ids=["missing", "unfinished", "empty", "nowhere"],
)
def test_what_is_missing_is_said(
    make: Make, tmp_path: Path, prepare: Callable[[Make], None], overrides: list[str], says: list[str]
) -> None:
    prepare(make)
    with pytest.raises(ConfigError) as error:
        origin(config(tmp_path / "run2", *overrides), tmp_path / "run2")
    assert [text for text in says if text not in str(error.value).replace(": follows", " follows")] == []


def test_a_checkpoint_that_is_gone_is_answered_with_those_that_exist(make: Make, tmp_path: Path) -> None:
    gone = make("other") / "checkpoints" / "step-000003"
    with pytest.raises(ConfigError) as error:
        origin(config(tmp_path / "run2", f"chain.start_from={gone}"), tmp_path / "run2")
    assert f"chain.start_from={gone}: this checkpoint does not exist" in str(error.value)
    assert "has step-000000, step-000002, step-000004." in str(error.value)
    assert str(error.value).endswith(f"Fix: chain.start_from={gone.with_name('step-000004')}")


def test_with_roll_back_a_stage_begins_with_the_best_validation(make: Make, tmp_path: Path) -> None:
    before = make("run1", v0=0.1, v2=0.5, v4=0.3)
    found = origin(config(tmp_path / "run2", "trainer.resets.roll_back=true"), tmp_path / "run2")
    assert found is not None
    assert (found.checkpoint.name, found.newest.name) == ("step-000002", "step-000004")
    assert found.run_dir == before


def test_the_best_is_that_since_the_last_reset_and_kept() -> None:
    scores = {step: {"all": {"mean": mean}} for step, mean in ((0, 0.9), (4, 0.2), (6, 0.4), (8, 0.4), (10, 0.3))}
    resets = [{"step": 4}]
    assert best_policy(scores, resets, {4, 6, 8, 10}) == 8  # the newest of equals; 0 lies before the reset
    assert best_policy(scores, resets, {4, 10}) == 10
    assert best_policy(scores, resets, {5}) is None


def test_after_a_roll_back_a_checkpoint_counts_as_what_it_went_back_to() -> None:
    """Step 30's checkpoint holds the weights of step 20: better than the 0.2 that step 30 was judged with."""
    scores = {step: {"all": {"mean": mean}} for step, mean in ((10, 0.3), (20, 0.5), (30, 0.2), (40, 0.4))}
    done = [{"step": 10}, {"step": 30, "rolled_back_to": 20}]
    assert policy_scores(scores, done) == {10: 0.3, 20: 0.5, 30: 0.5, 40: 0.4}
    assert best_policy(scores, done, {20, 30, 40}) == 30


def test_a_checkpoint_is_chosen_by_its_age_its_score_or_its_step(make: Make, caplog: pytest.LogCaptureFixture) -> None:
    run = make("run1", v0=0.5, v2=0.5, v4=0.3)
    names = [chosen_checkpoint(run, which).name for which in ("newest", "best", "0")]
    assert names == ["step-000004", "step-000002", "step-000000"]  # of equal ones the newest
    assert not caplog.messages
    gone = make("run4", steps=(2, 4), v0=0.367, v2=0.3, v4=0.2)
    assert chosen_checkpoint(gone, "best").name == "step-000002"
    assert caplog.messages == [
        "--checkpoint=best is step 2 (held-out 0.300); step 0 was better (0.367), and has no checkpoint"
    ]
    with pytest.raises(ConfigError, match="--checkpoint=3: expected newest, best, or one of the steps 0, 2, 4 of"):
        chosen_checkpoint(run, "3")
    with pytest.raises(ConfigError, match="none of the steps 0, 2, 4 of .* was validated"):
        chosen_checkpoint(make("run2", v9=0.5), "best")
    with pytest.raises(ConfigError, match="expected a run directory with a complete checkpoint; it has none"):
        chosen_checkpoint(make("run3", steps=()), "newest")


@pytest.mark.parametrize(
    ("given", "words"),
    [
        (None, None),
        ("/runs/prorl/run3/checkpoints/step-000180", "run3, step 180"),
        ("run3/checkpoints/step-000180/", "run3, step 180"),
        ("/models/imported/run3/final", "imported/run3/final"),
    ],
)
def test_where_a_stage_began_as_text(given: str | None, words: str | None) -> None:
    start = {"event": "start", "step": 0} if given is None else {"event": "start", "step": 0, "start_from": given}
    others = [{"event": "reset_commit", "start_from": "no"}, {"event": "resume", "start_from": "later"}]
    assert begun_from([others[0], start, *(others[1:] if given else [])]) == words


def test_the_end_of_a_run_as_text() -> None:
    def asked(name: str) -> dict[str, str]:
        return {"event": "control", "request": name, "user": name, "host": "login-1"}

    start, stop, alarm = {"event": "start"}, {"event": "stop", "reason": "control ann"}, {"event": "alarm"}
    for events, words in (
        ([], "not ended"),
        ([start, alarm], "not ended"),
        ([start, {"event": "finish"}], "done"),
        ([start, {"event": "failure"}, alarm], "failed"),
        ([start, asked("ann"), {"event": "stop", "reason": "SIGTERM"}], "stopped"),
        ([start, asked("bob"), asked("ann"), asked("eve"), stop], "stopped by ann@login-1"),
        ([start, asked("ann"), stop, {"event": "resume"}], "not ended"),
        ([start, asked("ann"), {"event": "finish"}], "done"),
    ):
        assert end_text(events) == words


def test_what_is_still_being_written_is_no_beginning(make: Make, tmp_path: Path) -> None:
    folder = make("other") / "checkpoints" / "step-000006.tmp"
    folder.mkdir()
    (folder / "state.json").write_text("{}")
    with pytest.raises(ConfigError, match=r"not a complete checkpoint\. Fix: chain.start_from=.*/step-000006$"):
        origin(config(tmp_path / "run2", f"chain.start_from={folder}"), tmp_path / "run2")


def refused(*_: Any) -> None:
    raise OSError("no hard links here")


@pytest.mark.parametrize("links", [True, False])
def test_the_model_of_the_stage_before_outlives_it(
    links: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where a file system has no hard links, too."""
    if not links:
        monkeypatch.setattr(os, "link", refused)
    source = tmp_path / "run1" / "init"
    source.mkdir(parents=True)
    (source / "config.json").write_text("{}")
    (source / "folder").mkdir()
    killed = tmp_path / "run2" / "init.tmp"
    killed.mkdir(parents=True)
    (killed / "half.json").write_text("{")
    take_over_model(source, tmp_path / "run2" / "init")
    (source / "config.json").unlink()
    assert (tmp_path / "run2" / "init" / "config.json").read_text() == "{}"
    assert [path.name for path in (tmp_path / "run2" / "init").iterdir()] == ["config.json"]


def test_stages_by_range_list_and_name() -> None:
    known = ["none", *(f"run{k}" for k in range(1, 9))]
    assert stage_names("run1..run8", known) == known[1:]
    assert stage_names("run2..run3", known) == ["run2", "run3"]
    assert stage_names("run5", known) == ["run5"]
    assert stage_names("run1,run3", known) == ["run1", "run3"]
    for wrong in ("none", "run9", "run3..run1", "run1..none", ""):
        with pytest.raises(ConfigError, match="--stages"):
            stage_names(wrong, known)


@pytest.mark.starts
def test_each_stage_is_the_recipes() -> None:
    """Paper section 4.2, and budgets of ours: tasks, n, context, factor without eos, reset, steps; rules advise."""
    four, five = ["math", "code", "stem", "puzzles"], ["math", "code", "stem", "puzzles", "instructions"]
    wanted = {
        "run1": (None, False, four, 16, 8192, 1.0, 400),
        "run2": ("run1", True, four, 16, 8192, 1.0, 300),
        "run3": ("run2", True, five, 16, 8192, 1.0, 300),
        "run4": ("run3", True, five, 16, 8192, 0.1, 200),
        "run5": ("run4", True, five, 16, 8192, 0.1, 200),
        "run6": ("run5", True, five, 32, 8192, 0.1, 300),
        "run7": ("run6", True, five, 32, 8192, 0.1, 300),
        "run8": ("run7", True, five, 16, 16384, 0.1, 200),
    }
    for stage, values in wanted.items():
        paper = "pretrained_checkpoint.restore_from_path=null"
        cfg = settings.load(["cluster=h100_4x8", f"stage={stage}", paper])
        grpo, chain = cfg.trainer.grpo, cfg.chain
        found = (chain.after, chain.hard_reset, list(cfg.data.tasks), grpo.samples_per_prompt, grpo.context_tokens)
        assert (*found, grpo.unfinished_factor, grpo.max_steps) == values, stage
        assert (grpo.unfinished_penalty, cfg.trainer.resets.mode) == (0.0, "advise")
        assert grpo.prompts_per_step // grpo.updates_per_step == 64
        laptop = settings.load([f"stage={stage}"])
        assert laptop.trainer.grpo.max_steps == round(grpo.max_steps * 0.05)
        assert laptop.run_dir == f"runs/prorl/{stage}"
        assert settings.load([f"stage={stage}", "trainer.grpo.max_steps=7"]).trainer.grpo.max_steps == 7


def test_an_event_after_a_torn_line_has_a_line_of_its_own(tmp_path: Path) -> None:
    """A full disk or a kill may cut the line before it short."""
    journal = Journal(tmp_path)
    journal.append("stop", 3, reason="SIGUSR1")
    with journal.path.open("a") as file:
        file.write('{"event": "alarm", "st')
    journal.append("resume", 3, stage="none", version="0")
    journal.append("finish", 4)
    assert [event["event"] for event in journal.events()] == ["stop", "resume", "finish"]
    assert journal.path.read_text().count("\n") == 4
