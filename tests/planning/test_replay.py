"""`prorl replay`, and that a live run decides as it says and a resumed one as an uninterrupted one."""

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

from nemo_prorl import cli, settings
from nemo_prorl.algorithms.reset_rules import Finding, replay
from nemo_prorl.config import Config, ResetsConfig
from nemo_prorl.lifecycle.journal_events import HeldOutScore
from nemo_prorl.lifecycle.run_records import Journal
from nemo_prorl.metrics import Metrics
from nemo_prorl.planning.replay import read_journal
from nemo_prorl.report.forecast import segments
from nemo_prorl.report.read import read_curves
from tests.lifecycle.parts import NoCheckpoints, Parts

SE = 0.01
STEPS = 400


def values(step: int) -> dict[str, float]:
    """Rising scores, of which `code` falls at 200; KL jumps at 330; responses are cut off from 371 on."""
    found = {"kl": 0.01 if step < 330 else 0.09, "rollout/truncated": 0.0 if step < 371 else 0.5}
    if step % 10 == 0:
        found |= {"validation/math": 0.2 + step / 1000, "validation/code": 0.5 if step < 200 else 0.3}
    return found


def validation(step: int) -> dict[str, Any] | None:
    scores = {k.removeprefix("validation/"): v for k, v in values(step).items() if k.startswith("validation/")}
    tasks = {name: {"mean": value, "se": SE, "prompts": 9} for name, value in scores.items()}
    return {"tasks": tasks, "all": {"mean": 0.3, "se": SE, "prompts": 18}} if scores else None


class Run:
    """The part of a run that decides on resets, with its files."""

    def __init__(self, folder: Path, mode: str, at_steps: tuple[int, ...] = ()) -> None:
        self.folder, self.config = folder, ResetsConfig(mode=mode, at_steps=list(at_steps))
        self.parts = Parts(folder, self.config)

    def go(self, steps: range) -> None:
        for step in steps:
            metrics = Metrics(step, "none")
            for key, value in values(step).items():
                metrics.put(key, value)
            if scores := validation(step):
                self.parts.validation.scores[step] = {**scores, "all": {"mean": 0.0}}  # type: ignore[typeddict-item]
                self.parts.records.event("validation", step, **scores)
            self.parts.records.log(metrics)
            if reason := self.parts.resets.reason(metrics):
                self.parts.resets.perform(step, reason, NoCheckpoints())

    def state(self) -> dict[str, Any]:
        """As a checkpoint has it."""
        parts = self.parts
        states = {name: getattr(parts, name).state_dict() for name in ("records", "validation", "resets")}
        return dict(json.loads(json.dumps(states)))

    def resume(self, state: dict[str, Any]) -> None:
        self.parts = Parts(self.folder, self.config)
        for name in ("records", "validation", "resets"):
            getattr(self.parts, name).load_state_dict(state[name])

    @property
    def found(self) -> list[Finding]:
        return [Finding(**finding) for finding in self.parts.resets.state_dict()["found"]]


def resets_of(run: Run) -> list[tuple[int, str]]:
    return [(reset["step"], reset["reason"].split(":")[0]) for reset in run.parts.resets.done]


def test_auto_resets_advise_tells_and_manual_is_silent(tmp_path: Path) -> None:
    runs = {mode: Run(tmp_path / mode, mode, (100,)) for mode in ("auto", "advise", "manual")}
    for run in runs.values():
        run.go(range(1, STEPS + 1))
    assert resets_of(runs["auto"]) == [(100, "at_steps"), (210, "validation_drop"), (331, "kl_spike")]
    assert resets_of(runs["advise"]) == resets_of(runs["manual"]) == [(100, "at_steps")]
    assert {("validation_drop", 210), ("kl_spike", 331)} <= {(f.rule, f.step) for f in runs["advise"].found}
    assert [(f.rule, f.step) for f in runs["auto"].found][-1] == ("truncation", 380)
    assert runs["manual"].found == []


@pytest.mark.parametrize("mode", ["auto", "advise"])
@pytest.mark.parametrize("killed_after", [150, 209, 210, 211, 331, 380])
def test_a_resumed_run_decides_as_an_uninterrupted_one(tmp_path: Path, mode: str, killed_after: int) -> None:
    whole, cut = Run(tmp_path / "whole", mode), Run(tmp_path / "cut", mode)
    whole.go(range(1, STEPS + 1))
    cut.go(range(1, killed_after + 1))
    cut.resume(cut.state())
    cut.go(range(killed_after + 1, STEPS + 1))
    assert cut.found == whole.found
    assert len(whole.found) >= 3
    assert cut.state()["resets"] == whole.state()["resets"]


@pytest.fixture
def recorded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    Run(tmp_path / "run", "manual").go(range(1, STEPS + 1))
    return tmp_path / "run"


def found_by(capsys: pytest.CaptureFixture[str], *arguments: str) -> list[tuple[str, int]]:
    assert cli.main(["replay", *arguments, "--json"]) == 0
    return [(f["rule"], f["step"]) for f in map(json.loads, capsys.readouterr().out.splitlines())]


def test_replay_finds_what_the_live_run_finds(recorded: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for mode in ("auto", "advise"):
        live = Run(recorded.parent / mode, mode)
        live.go(range(1, STEPS + 1))
        assert cli.main(["replay", str(recorded), "--json", "--mode", mode]) == 0
        assert [json.loads(line) for line in capsys.readouterr().out.splitlines()] == [asdict(f) for f in live.found]


def test_replay_shows_a_table(recorded: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["replay", str(recorded)]) == 0
    told = capsys.readouterr().out
    assert "steps 1 to 400, 40 validations, noise from standard errors and scatter" in told
    row = next(line for line in told.splitlines() if " validation_drop " in line)
    assert row.startswith("210 ")
    assert "asks for a reset" in row
    assert "code fell by 0.2, from 0.5 to 0.3" in row
    mute = ["drop_min=0.9", "kl_factor=50", "truncation_rise=1", "plateau_gain=0"]
    assert cli.main(["replay", str(recorded), "--rules", *mute]) == 0
    assert "no findings" in capsys.readouterr().out


def test_replay_takes_the_rules_and_resets_of_the_run(recorded: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert ("validation_drop", 210) in found_by(capsys, str(recorded / "metrics.jsonl"))
    own = ["trainer.resets.rules.drop_min=0.9", "trainer.resets.rules.asks=[plateau]"]
    (recorded / "config.yaml").write_text(settings.resolved_yaml(settings.load(own)) + "gone_since: 1\n")
    assert ("validation_drop", 210) not in found_by(capsys, str(recorded))
    assert ("validation_drop", 210) in found_by(capsys, str(recorded), "--rules", "drop_min=0.1")
    Journal(recorded).append("reset_commit", 205, reason="at_steps", reference_sha256="0" * 64)
    assert ("validation_drop", 210) not in found_by(capsys, str(recorded), "--rules", "drop_min=0.1")


def test_a_reset_behind_the_checkpoint_of_a_resume_does_not_count(tmp_path: Path) -> None:
    journal = Journal(tmp_path)
    journal.append("reset_commit", 5, reason="r", reference_sha256="0" * 64)
    journal.append("reset_commit", 9, reason="r", reference_sha256="0" * 64)
    journal.append("resume", 7, stage="none", version="0")
    assert read_journal(tmp_path) == ({}, {5})


def test_replay_and_forecast_count_the_same_validations(recorded: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Also the one before step 1, which has no line in metrics.jsonl; not one of a discarded step."""
    score: HeldOutScore = {"mean": 0.3, "se": SE, "prompts": 9}
    journal, rest = Journal(recorded), (recorded / "journal.jsonl").read_text()
    (recorded / "journal.jsonl").unlink()
    journal.append("validation", 0, all=score, tasks={"math": score})
    with (recorded / "journal.jsonl").open("a") as file:
        file.write(rest)
    journal.append("validation", 405, all=score, tasks={"math": score})
    journal.append("resume", 400, stage="none", version="0")
    [segment] = segments(read_curves([recorded])[0])
    assert cli.main(["replay", str(recorded)]) == 0
    told = capsys.readouterr().out
    assert (len(segment.steps), "steps 1 to 400, 41 validations" in told) == (41, True), told


@pytest.mark.parametrize(
    ("text", "code", "said"),
    [
        ('{"step": 1}\n{"step": 1}\n', 4, "metrics.jsonl:2: step: expected a number above 1; got 1"),
        ('{"step": 1}\n{"st\n{"step": 3}\n', 4, "metrics.jsonl:2: not JSON"),
        ('{"kl": 1}\n', 4, "metrics.jsonl:1: step"),
        ("", 4, "expected at least one step"),
        (None, 2, "cannot be read"),
    ],
)
def test_what_is_wrong_is_said(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, text: str | None, code: int, said: str
) -> None:
    file = tmp_path / "metrics.jsonl"
    if text is not None:
        file.write_text(text)
    assert cli.main(["replay", str(file)]) == code
    assert said in caplog.text


def test_a_wrong_rule_is_named(recorded: Path, caplog: pytest.LogCaptureFixture) -> None:
    assert cli.main(["replay", str(recorded), "--rules", "drop_sgma=1"]) == 2
    assert "Did you mean trainer.resets.rules.drop_sigma?" in caplog.text


NAMES = {"entropy": "entropy", "kl": "kl", "length": "rollout/response_tokens", "truncated": "rollout/truncated"}


def test_the_default_rules_are_quiet_over_the_recorded_runs_of_the_ablations(root: Path) -> None:
    """45 runs of 50 steps, all of which learned.  The one finding is right: responses were cut off."""
    rules, found, arms = Config().trainer.resets.rules, {}, set()
    for line in (root / "benchmarks" / "results" / "ablations.jsonl").read_text().splitlines():
        run = json.loads(line)
        steps = [{"step": k, **{new: run[old][k - 1] for old, new in NAMES.items()}} for k in range(1, 51)]
        for step in steps:
            if (score := run["validation"].get(str(step["step"]))) is not None:
                step["validation/blend"] = score
        errors = {int(step): {"blend": run["validation_se"]} for step in run["validation"]}
        arm = f"{run['arm']} {run['seed']}"
        arms.add(arm)
        if findings := [str(finding) for finding in replay(steps, rules, errors)]:
            found[arm] = findings
    assert len(arms) == 45
    assert found == {"clip_low_0p1 1": ["truncation: 15.9% of the responses are cut off; it was 3.1% (> 10.0% more)"]}


def test_the_rules_advise_by_default() -> None:
    assert Config().trainer.resets.mode == "advise"
