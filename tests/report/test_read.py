"""What the report makes of run directories: whole ones, cut ones, odd ones."""

import json
import math
from pathlib import Path
from typing import Any

import pytest

from nemo_prorl.errors import ConfigError
from nemo_prorl.report import data, outcome, read, samples, series, status, tables
from tests.lines import write_lines
from tests.report.made import journal, make_run, make_spoilt, rollouts


def curve_of(folder: Path) -> read.Curve:
    [curve] = read.read_curves([folder])
    return curve


def with_metrics(folder: Path, lines: list[Any]) -> read.Curve:
    make_run(folder, 1)
    write_lines(folder / "metrics.jsonl", lines)
    return curve_of(folder)


# --- folders ---------------------------------------------------------------------------------------------------------


def test_a_chain_is_one_curve_over_its_stages_in_order(tmp_path: Path) -> None:
    for number in (10, 2, 1):
        make_run(tmp_path / "chain" / f"run{number}", 10 + number, {"stage": f"run{number}"})
    (tmp_path / "chain" / "logs").mkdir()
    curve = curve_of(tmp_path / "chain")
    assert [run.name for run in curve.runs] == ["run1", "run2", "run10"]
    assert curve.offsets == [0, 11, 23]
    grid = series.grid_of(curve, 1000)
    assert grid.steps(curve)["x"] == list(range(1, 44))
    marks = [(mark["kind"], mark["x"]) for mark in series.marks(curve)]
    assert marks == [("stage", 0.5), ("reset", 6.5), ("stage", 11.5), ("reset", 17.5), ("stage", 23.5), ("reset", 29.5)]


@pytest.mark.parametrize(
    ("names", "told"),
    [([], "neither a run"), (["a-seed1", "b-seed1"], "give the run directories"), (None, "no such folder")],
)
def test_what_is_no_run_is_refused(tmp_path: Path, names: list[str] | None, told: str) -> None:
    folder = tmp_path / "folder"
    if names is not None:
        folder.mkdir()
    for name in names or []:
        make_run(folder / name, 1)
    with pytest.raises(ConfigError, match=told):
        read.read_curves([folder])


def test_the_status_of_a_fork_s_folder_has_all_arms(tmp_path: Path) -> None:
    for arm in ("none", "reset", "model.optim.lr_1e-3"):
        make_run(tmp_path / arm, 2, {"stage": "none"})
    rows = status.status(tmp_path).splitlines()[1:]
    assert [row.split()[0] for row in rows] == ["model.optim.lr_1e-3", "none", "reset"]
    with pytest.raises(ConfigError, match=r"contains runs \(model"):  # it is no chain with one stage `none`
        read.read_curves([tmp_path])


def test_the_status_of_a_run_says_that_it_is_in_a_trial(tmp_path: Path) -> None:
    folder = make_run(tmp_path / "run", 12, {"trainer": {"resets": {"trial_noise": 0.003}}})

    def told(arm: str) -> str | None:
        state = folder / "checkpoints" / "step-000006" / "state.json"
        state.parent.mkdir(parents=True, exist_ok=True)
        trial = {"step": 6, "reason": "every", "steps": 8, "arm": arm}
        state.write_text(json.dumps({"format": 5, "resets": {"trial": trial}}))
        rows = [line.split(maxsplit=1) for line in status.status(folder).splitlines()]
        return next((text for name, text in rows if name == "trial"), None)

    assert told("over") is None
    text = "of a hard reset after step 6 (every): arm {}, up to step 14"
    assert told("none") == text.format("none")
    assert told("reset") == text.format("reset") + "; no look so far"
    for arm, gain in ((folder / "trials" / "step-000006" / "none", 0.0), (folder, 0.1)):
        (arm / "validations").mkdir(parents=True)
        for step in (4, 8, 12, 14)[: 4 if gain == 0 else 3]:  # the run had a validation before the trial
            scores = {"a": 0.2 + gain, "b": 0.3 + gain + (0.02 if gain else 0.0)}
            (arm / "validations" / f"step-{step:06d}.json").write_text(json.dumps(scores))
    half = 2.394 * math.hypot(0.01, 0.003)  # of three looks
    assert told("reset") == (
        f"{text.format('reset')}; with the reset at the last look +0.1100 ({0.11 - half:+.4f} to {0.11 + half:+.4f})"
    )
    assert json.loads(status.status(folder, as_json=True))["trial"] == told("reset")


def test_the_status_of_a_run_says_that_a_reset_has_lowered_its_learning_rate(tmp_path: Path) -> None:
    folder = make_run(tmp_path / "run", 12)
    reset = {"event": "reset_commit", "time": 2.0, "reason": "every", "lr_factor": 0.5}
    with (folder / "journal.jsonl").open("a") as file:
        file.writelines(json.dumps({**reset, "step": step, "lr_until": step + 6}) + "\n" for step in (6, 7))
    told = "x 0.5 until step 13 (hard reset after step 7)"  # the other one holds until step 12, which is made
    assert json.loads(status.status(folder, as_json=True))["learning_rate"] == told
    assert told in status.status(folder)


def test_runs_of_the_same_name_are_told_apart(tmp_path: Path) -> None:
    folders = [make_run(tmp_path / part / "laptop", 1) for part in ("a", "b")]
    assert [curve.name for curve in read.read_curves(folders)] == ["a/laptop", "b/laptop"]
    assert [curve.name for curve in read.read_curves([folders[0]] * 2)] == ["laptop (1)", "laptop (2)"]


# --- the outcome -----------------------------------------------------------------------------------------------------


def judged(step: int, **tasks: float) -> dict[str, Any]:
    scores = {name: {"mean": mean, "se": 0.03, "prompts": 50} for name, mean in tasks.items()}
    mean = sum(tasks.values()) / len(tasks)
    whole = {"mean": mean, "se": 0.02, "prompts": 50 * len(tasks)}
    return {"event": "validation", "step": step, "time": 1.75e9 + step, "all": whole, "tasks": scores}


def test_the_outcome_compares_the_first_and_the_last_validation(tmp_path: Path) -> None:
    folder = make_run(tmp_path / "run")
    lines = [judged(0, sums=0.2, words=0.3), judged(6, sums=0.9, words=0.9), judged(12, sums=0.5, words=0.3)]
    write_lines(folder / "journal.jsonl", lines)
    found = outcome.outcome(curve_of(folder))
    assert found["steps"] == [0, 12]
    assert [(row["name"], row["before"], row["after"], row["prompts"]) for row in found["scores"]] == [
        ("all", 0.25, 0.4, 100),
        ("sums", 0.2, 0.5, 50),
        ("words", 0.3, 0.3, 50),
    ]
    assert found["words"] == "5.3 standard errors: the policy got better at problems it has never seen."
    assert (found["updated"], found["note"]) == (True, "")


def test_the_outcome_says_what_cannot_be_compared(tmp_path: Path) -> None:
    folder = make_run(tmp_path / "run")
    write_lines(folder / "journal.jsonl", [judged(0, sums=0.2, words=0.3), judged(12, sums=0.5, codes=0.3)])
    found = outcome.outcome(curve_of(folder))
    assert [row["name"] for row in found["scores"]] == ["sums"]
    assert "only the common ones" in found["note"]
    write_lines(folder / "journal.jsonl", [judged(0, sums=0.2)])
    write_lines(folder / "metrics.jsonl", [{"step": 1, "reward/all": 0.0}])
    found = outcome.outcome(curve_of(folder))
    assert (found["scores"], found["updated"]) == ([], False)


def test_the_page_has_the_settings_and_the_command_that_repeats_the_run(tmp_path: Path) -> None:
    sources, launch = {"train": [{"name": "mine", "path": "x.jsonl"}]}, {"env": {"WANDB_API_KEY": "secret"}}
    folder = make_run(tmp_path / "a run", config={"data": sources, "launch": launch})
    found = tables.configuration(curve_of(folder).runs[0])
    assert found["command"] == f"prorl train --config '{folder}/config.yaml' run_dir=NEW"
    assert ["trainer.grpo.max_steps", "12"] in found["settings"]
    assert ["data.train", '[{"name": "mine", "path": "x.jsonl"}]'] in found["settings"]
    assert "secret" not in str(data.page_data([folder], [], 10))  # a page is shared


# --- odd files -------------------------------------------------------------------------------------------------------


def test_a_last_line_that_is_being_written_says_nothing_and_a_broken_one_is_named(tmp_path: Path) -> None:
    folder = make_run(tmp_path / "run", 3)
    path = folder / "metrics.jsonl"
    path.write_text(path.read_text() + '{"step": 4, "kl"')
    assert (curve := curve_of(folder)).runs[0].last_step == 3
    assert curve.runs[0].problems == []
    path.write_text('{"step": 1, "kl": 1}\n{"step": 2\n[3]\n{"kl": 5}\n{"step": true}\n{"step": 4}\n')
    run = curve_of(folder).runs[0]
    assert [line["step"] for line in run.metrics] == [1, 4]
    assert run.problems[0].startswith("metrics.jsonl:2: skipped")
    assert "expected an object; got list" in run.problems[1]
    assert run.problems[2] == "metrics.jsonl: 2 lines have no step and are skipped"


def test_steps_that_stand_twice_count_as_they_were_done_last(tmp_path: Path) -> None:
    lines = [{"step": s, "kl": 0.0} for s in (1, 2, 3, 4)] + [{"step": s, "kl": 1.0} for s in (3, 5)]
    curve = with_metrics(tmp_path / "run", lines)
    assert [(line["step"], line["kl"]) for line in curve.runs[0].metrics] == [(1, 0), (2, 0), (3, 1), (5, 1)]


@pytest.mark.parametrize("name", ["config.yaml", "metrics.jsonl", "journal.jsonl", "summary.json", "rollouts"])
@pytest.mark.parametrize("what", ["missing", "empty", "binary", "cut", "folder"])
def test_any_file_may_be_missing_or_broken(tmp_path: Path, name: str, what: str) -> None:
    folder = make_run(tmp_path / "run", 3)
    path = folder / name
    content = b"" if path.is_dir() else path.read_bytes()
    if path.is_dir():
        for file in path.iterdir():
            file.unlink()
        path.rmdir()
    else:
        path.unlink()
    if what == "folder":
        path.mkdir()
    elif what != "missing":
        path.write_bytes({"empty": b"", "binary": bytes(range(256)) * 9, "cut": content[: len(content) // 2]}[what])
    json.dumps(data.page_data([folder], [], 10), allow_nan=False)


@pytest.mark.parametrize("seed", range(25))
def test_any_value_may_be_something_else(tmp_path: Path, seed: int) -> None:
    make_spoilt(tmp_path, seed)
    text = json.dumps(data.page_data([tmp_path], [], -1), allow_nan=False)
    assert '"curves"' in text


def test_a_run_without_a_step_is_shown(tmp_path: Path) -> None:
    folder = make_run(tmp_path / "run", 0)
    [curve] = data.page_data([folder], [], 10)["curves"]
    assert curve["steps"] == 0
    assert curve["metrics"] == {}
    assert curve["stages"][0]["step"] == 0


# --- numbers ---------------------------------------------------------------------------------------------------------


def test_numbers_that_are_none_are_gaps_and_counted(tmp_path: Path) -> None:
    values = [0.5, None, math.nan, math.inf, "text", True, 10**400, 0.75]
    curve = with_metrics(tmp_path / "run", [{"step": k + 1, "kl": v} for k, v in enumerate(values)] + [{"step": 9}])
    grid = series.grid_of(curve, 100)
    assert (found := series.metric(curve, "kl", grid)) is not None
    assert list(zip(found["x"], found["m"], strict=True)) == [(1, 0.5), (8, 0.75)]
    assert found["stats"]["lost"] == 6
    assert found["stats"]["count"] == 2


def test_buckets_keep_every_spike_and_never_cross_a_stage(tmp_path: Path) -> None:
    for number, steps in ((1, 1003), (2, 500)):
        folder = make_run(tmp_path / f"run{number}", 1)
        lines = [{"step": k, "grad": 500.0 if k == 777 else -3.0 if k == 13 else float(k % 2)} for k in range(1, steps)]
        write_lines(folder / "metrics.jsonl", lines)
    curve = curve_of(tmp_path)
    grid = series.grid_of(curve, 100)
    assert grid.size == 16
    assert len(grid.buckets) <= 102
    drawn = grid.steps(curve)
    assert drawn["x1"][62] == 1002
    assert drawn["x0"][63] == 1003
    found = series.metric(curve, "grad", grid)
    assert found is not None
    assert max(found["hi"][:63]) == 500.0
    assert found["hi"].index(500.0) == 776 // 16
    assert min(found["lo"]) == -3.0
    assert found["m"][20] == 0.5
    assert found["stats"] | {"mean": 0} == {
        **{"first": 1, "last": 1, "min": -3, "max": 500, "mean": 0},
        **{"max_step": 777, "count": 1501, "lost": 0},
    }


def test_few_points_of_a_long_run_stay_exact(tmp_path: Path) -> None:
    lines = [{"step": k} | ({"rare": k / 10} if k % 100 == 0 else {}) for k in range(1, 1001)]
    curve = with_metrics(tmp_path / "run", lines)
    found = series.metric(curve, "rare", series.grid_of(curve, 50))
    assert found is not None
    assert found["x"] == list(range(100, 1001, 100))
    assert "lo" not in found


def test_validations_come_from_the_journal_with_the_one_before_the_first_step(tmp_path: Path) -> None:
    folder = make_run(tmp_path / "run", 12)
    lines = journal(12)
    score = {"mean": 0.5, "se": 0.1, "prompts": 9}
    lines += [{"event": "validation", "step": 9, "all": score, "tasks": {"sums": score}, "time": 2e9}]
    lines += [{"event": "resume", "step": 8, "stage": "none", "version": "0", "time": 2e9}]  # step 9 was lost
    lines += [{"event": "validation", "step": 12, "all": score, "tasks": {"sums": score}, "time": 2e9}]
    write_lines(folder / "journal.jsonl", lines)
    found = series.validations(curve_of(folder), 100)
    assert found["sums"] == {"x": [0, 12], "m": [0.25, 0.5], "lo": [0.23, 0.4], "hi": [0.27, 0.6]}
    assert found["all"]["x"] == [0, 12]
    assert series.validations(curve_of(folder), 1)["all"]["x"] == [12]
    assert series.validations(curve_of(folder), 1)["all"]["left_out"] == 1


def test_a_reset_that_a_resume_threw_away_is_not_marked(tmp_path: Path) -> None:
    folder = make_run(tmp_path / "run", 12)
    resume = {"event": "resume", "step": 4, "stage": "none", "version": "0", "time": 2e9}
    write_lines(folder / "journal.jsonl", [*journal(12), resume])
    assert series.marks(curve_of(folder)) == []


# --- tables ----------------------------------------------------------------------------------------------------------


def test_what_changes_between_stages_and_runs(tmp_path: Path) -> None:
    one, two = ({"stage": f"run{k}", "algo": {"lr": lr}, "on_event": f"tell {k}"} for k, lr in ((1, 0.1), (2, 0.2)))
    make_run(tmp_path / "run1", 2, one)
    make_run(tmp_path / "run2", 3, two)
    rows = tables.stage_rows(curve_of(tmp_path))
    assert rows[0]["changes"] == {}
    assert rows[1]["changes"] == {"algo.lr": "0.1 → 0.2", "trainer.grpo.max_steps": "2 → 3"}
    both = read.read_curves([tmp_path / "run1", tmp_path / "run2"])
    assert [row["key"] for row in tables.differences(both)] == ["algo.lr", "trainer.grpo.max_steps"]


def test_seconds_by_phase_are_those_of_all_steps(tmp_path: Path) -> None:
    folder = make_run(tmp_path / "run", 12)
    found = tables.phases(curve_of(folder))
    assert (found["names"], found["seconds"]) == (["rollout", "updates", "validate"], [36, 12, 4])
    assert (found["bottleneck"], found["steps"]) == (None, 10)  # its lines are of an older version


def test_alarms_stay_when_there_are_too_many_events(tmp_path: Path) -> None:
    folder = make_run(tmp_path / "run", 7)
    alarms = [{"event": "alarm", "step": 1, "time": float(k), "what": f"alarm {k}"} for k in range(20)]
    others = [{"event": "validation", "step": 1, "time": 100.0 + k, "all": {}, "tasks": {}} for k in range(3000)]
    write_lines(folder / "journal.jsonl", [*alarms, *others])
    found = tables.events(curve_of(folder))
    assert len(found["rows"]) == 1000
    assert found["left_out"] == 2020
    assert found["alarms"] == 20
    assert [row["what"] for row in found["rows"][:20]] == [f"alarm {k}" for k in range(20)]


def test_a_job_that_failed_is_among_the_events(tmp_path: Path) -> None:
    folder = make_run(tmp_path / "run", 7)
    end = {"event": "end", "job": "5", "attempt": 1, "time": 3e9, "code": 1, "what": "a rank died", "next": "again"}
    write_lines(folder / "launches.jsonl", [end])
    last = tables.events(curve_of(folder))["rows"][-1]
    assert (last["event"], last["what"]) == ("failure", "a rank died; code 1, next: again")


def test_a_failure_is_an_alarm_and_the_state_of_its_run(tmp_path: Path) -> None:
    folder = make_run(tmp_path / "run", 7)
    failure = {"event": "failure", "step": 7, "time": 1.76e9, "reason": "RewardFailure: x"}
    with (folder / "journal.jsonl").open("a") as file:
        file.write(json.dumps(failure) + "\n")
    end = {"event": "end", "job": "5", "attempt": 1, "time": 1.77e9, "code": 1, "what": "a rank died", "next": "again"}
    write_lines(folder / "launches.jsonl", [end])
    curve = curve_of(folder)
    assert tables.stage_rows(curve)[0]["failed"] == "after step 7: RewardFailure: x"
    found = tables.events(curve)
    assert found["alarms"] == 2  # with the alarm of make_run; the launch's end is the same failure
    assert [row["event"] for row in found["rows"][-2:]] == ["failure", "launch end"]
    with (folder / "journal.jsonl").open("a") as file:
        file.write(json.dumps({"event": "resume", "step": 5, "time": 1.78e9}) + "\n")
    assert tables.stage_rows(curve_of(folder))[0]["failed"] == ""


def test_rates_of_errors_are_those_of_all_steps(tmp_path: Path) -> None:
    lines: list[dict[str, Any]] = [
        {"canaries/right/math": 8, "canaries/false_rejects/math": 0, "canaries/wrong/math": 4},
        {"canaries/wrong/math": 4, "canaries/false_accepts/math": 2, "second/judged/math": 1e9},
        {"canaries/wrong/code": 1, "canaries/false_accepts/code": 2},  # more errors than verdicts
    ]
    curve = with_metrics(tmp_path / "run", [{"step": step, **line} for step, line in enumerate(lines, 1)])
    accepts, rejects = tables.rates(curve, "canaries", {"right": "false_rejects", "wrong": "false_accepts"})
    assert (accepts["task"], accepts["kind"], accepts["judged"], accepts["errors"]) == ("math", "false accepts", 8, 2)
    assert accepts["low"] < 2 / 8 < accepts["high"]
    assert (rejects["kind"], rejects["judged"], rejects["errors"], rejects["low"]) == ("false rejects", 8, 0, 0.0)
    assert [row["judged"] for row in tables.rates(curve, "second", {"judged": "disagreed"})] == [10**6]


# --- samples ---------------------------------------------------------------------------------------------------------


def test_samples_are_spread_over_steps_and_tasks_and_the_rest_is_counted(tmp_path: Path) -> None:
    curve = curve_of(make_run(tmp_path / "run", 12))
    found = samples.samples(curve, 32)
    assert len(found["items"]) == 32
    assert {group["own_step"] for group in found["groups"]} == {1, 5, 8, 12}
    assert {group["task"] for group in found["groups"] if group["own_step"] == 8} == {"code", "math"}
    assert (found["stored"], found["read"], found["left_out"]) == (12, 4, 0)
    assert samples.samples(curve, 8)["left_out"] == 0
    assert len(samples.samples(curve, -1)["items"]) == 96
    assert samples.samples(curve, 0)["items"] == []


def test_of_a_large_group_the_telling_responses_are_shown(tmp_path: Path) -> None:
    folder = make_run(tmp_path / "run", 1)
    lines = rollouts(1, responses=16)[:16]
    for number, line in enumerate(lines):
        line["verdict"]["score"] = 0.5
        line["finished"] = number != 11
    lines[9]["verdict"]["score"], lines[13]["verdict"]["score"], lines[14]["verdict"]["score"] = 1.0, 0.0, None
    lines[14]["verdict"]["failure"] = "infrastructure"
    write_lines(folder / "rollouts" / "step-1.jsonl", lines)
    found = samples.samples(curve_of(folder), 4)
    assert [item["response"].split()[1] for item in found["items"]] == ["9", "11", "13", "14"]
    assert found["left_out"] == 12
    assert found["groups"][0]["n"] == 16
    assert found["groups"][0]["mean"] == pytest.approx(0.5)


def test_shaping_is_told_as_far_as_it_is_known(tmp_path: Path) -> None:
    folder = make_run(tmp_path / "run", 1)
    found = samples.samples(curve_of(folder), -1)["items"]
    assert [(item["shaped"], item["shaping"]) for item in found[:4]] == [
        (1.0, "none"),
        (0.25, "none"),
        (0.0, "none"),
        (-0.25, "unfinished: -0.5"),
    ]
    grpo = {"unfinished_penalty": 0.5, "unfinished_factor": 1.0, "shaping": {"overlong_tokens": 64, "cosine": False}}
    run = read.RunRecord(folder, "run", {"trainer": {"grpo": grpo}})
    told = samples.shaping(run, found[0])
    assert told["shaped"] is None
    assert "overlong: by token length" in told["shaping"]


def test_long_texts_lose_their_middle_and_say_so() -> None:
    text = samples.cut("a" * 5000 + "b" * 5000, 1000)
    assert text.startswith("a" * 500)
    assert text.endswith("b" * 500)
    assert "9,000 characters left out" in text


def test_a_page_holds_only_so_much_text(tmp_path: Path) -> None:
    folder = make_run(tmp_path / "run", 1)
    lines = [{**line, "id": f"p{k}", "response": "x" * 50_000} for k in range(700) for line in rollouts(1)[:1]]
    write_lines(folder / "rollouts" / "step-1.jsonl", lines)
    found = samples.samples(curve_of(folder), -1)
    assert sum(len(item["response"]) for item in found["items"]) < 3_000_000
    assert found["left_out"] == 700 - len(found["items"]) > 0


def test_the_probe_of_a_run(tmp_path: Path) -> None:
    folder = make_run(tmp_path / "run")
    found = data.page_data([folder], [], 10)["curves"][0]["probe"]
    assert found["rows"][0]["without_form"] == 0.75
    assert [(one["kind"], one["score"], one["finished"]) for one in found["examples"]] == [
        ("best", 1.0, False),
        ("worst", 1.0, False),
        ("longest", 1.0, False),
    ]
    (folder / "probe" / "probe.json").write_text("{}")
    assert data.page_data([folder], [], 10)["curves"][0]["probe"] is None
