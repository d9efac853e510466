"""The diary of a chain on made runs; tests/launcher/test_chain_from.py reads one that a real chain wrote."""

import json
from pathlib import Path

import pytest

from nemo_prorl import cli
from nemo_prorl.report.diary import diary, diary_text
from nemo_prorl.report.read import read_curves
from nemo_prorl.report.tables import events
from tests.lines import write_lines
from tests.report.made import make_run, make_spoilt


def rows_of(folder: Path) -> list[list[tuple[str, str]]]:
    [curve] = read_curves([folder])
    return [[(title, text) for title, text in stage["rows"]] for stage in diary(curve)]


@pytest.fixture
def chain(tmp_path: Path) -> Path:
    """run1 of 12 steps and run2 of 30, in which n changed, and which failed."""
    folder = tmp_path / "chain"
    for number, (steps, n) in enumerate(((12, 16), (30, 32)), 1):
        grpo = {"max_steps": 40, "samples_per_prompt": n}
        make_run(folder / f"run{number}", steps, {"stage": f"run{number}", "trainer": {"grpo": grpo}})
    with (folder / "run1" / "journal.jsonl").open("a") as file:
        file.write(json.dumps({"event": "finish", "step": 12, "time": 1.8e9}) + "\n")
    journal = folder / "run2" / "journal.jsonl"
    start = {"event": "start", "step": 0, "time": 1.0, "start_from": f"{folder}/run1/checkpoints/step-000010"}
    alarms = [{"event": "alarm", "step": step, "time": 2.0, "what": f"length: {step}"} for step in range(7, 23)]
    failure = {"event": "failure", "step": 30, "time": 3.0, "reason": "no memory"}
    score = {"mean": 0.5, "se": 0.02, "prompts": 64}
    judged = [{"event": "validation", "step": s, "all": score | {"mean": m}} for s, m in ((20, 0.5), (30, 0.3))]
    lines = [start, *map(json.loads, journal.read_text().splitlines()[1:]), *alarms, *judged, failure]
    write_lines(journal, lines)
    return folder


def test_a_stage_says_how_it_began_what_changed_and_why_it_ended(chain: Path) -> None:
    first, second = (dict(rows) for rows in rows_of(chain))
    assert first["began"] == "from the model"
    assert first["ended"] == "done, after step 12 of 40"
    assert first["picked"] == "run2 began from run1, step 10"
    assert second["began"] == "from run1, step 10"
    assert second["changed"] == "trainer.grpo.samples_per_prompt: 16 → 32"
    assert second["ended"] == "failed, after step 30 of 40: no memory"
    assert second["hard reset"] == "after step 6: at_steps"
    assert second["validation"] == "0.250 at step 0, 0.300 at step 30; best 0.500 at step 20 of 3 validations"


def test_signals_have_means_of_both_ends_and_their_range(chain: Path) -> None:
    first, second = (dict(rows) for rows in rows_of(chain))
    length = "106 -> 126 (means of 10 steps); lowest 101 at step 1, highest 130 at step 30"
    assert second["response length, tokens"] == length
    assert first["KL, nats per token"].startswith("0.0025 -> 0.0085 (means of 6 steps)")


def test_alarms_are_listed_up_to_a_number(chain: Path) -> None:
    alarms = [text for title, text in rows_of(chain)[1] if title == "alarm"]
    assert alarms[:2] == ["step 6: engine gap 0.2 is beyond 0.05", "step 7: length: 7"]
    assert alarms[-1] == "5 more, in journal.jsonl"
    assert len(alarms) == 13


def test_a_reset_says_what_it_does_to_weights_and_learning_rate(chain: Path) -> None:
    reset = {"event": "reset_commit", "step": 9, "time": 2.0, "reason": "every", "lr_factor": 0.5, "lr_until": 19}
    with (chain / "run1" / "journal.jsonl").open("a") as file:
        file.writelines(json.dumps(line) + "\n" for line in (reset, {**reset, "step": 10, "rolled_back_to": 6}))
    assert [text for title, text in rows_of(chain)[0] if title == "hard reset"][-2:] == [
        "after step 9: every, learning rate x 0.5 until step 19",
        "after step 10: every, back to the weights of step 6, learning rate x 0.5 until step 19",
    ]


def test_trials_of_resets_say_what_they_showed(chain: Path) -> None:
    """The interval is that of the looks that could decide; in a report of one run it is among the events."""
    trial = {"event": "trial_end", "step": 9, "time": 2.0, "trial": 5, "winner": "none", "tokens": 100}
    ends = [
        trial | {"difference": -0.0048, "se": 0.01, "looks": 4, "because": "no difference is shown"},
        trial | {"difference": 0.0, "se": 0.0, "because": "a reset was requested"},
    ]
    with (chain / "run1" / "journal.jsonl").open("a") as file:
        file.writelines(json.dumps(end) + "\n" for end in ends)
    told = [
        "trial after step 5: the arm none wins; with the reset -0.0048 (-0.0298 to +0.0202) held out; no difference is"
        " shown",
        "trial after step 5: the arm none wins; a reset was requested",
    ]
    assert [text for title, text in rows_of(chain)[0] if title == "trial"] == told
    [curve] = read_curves([chain / "run1"])
    assert [row["what"] for row in events(curve)["rows"] if row["event"] == "trial_end"] == told


def test_the_command_prints_it_for_a_chain_only(chain: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["report", str(chain), "--samples", "0"]) == 0
    out = capsys.readouterr().out
    assert out.startswith("run1\n  began")
    assert "\nrun2\n" in out
    assert out.endswith(f"{chain / 'report.html'}\n")
    assert cli.main(["report", str(chain / "run1"), "--samples", "0"]) == 0
    assert capsys.readouterr().out == f"{chain / 'run1' / 'report.html'}\n"


@pytest.mark.parametrize("seed", range(8))
def test_any_files_have_a_diary(seed: int, tmp_path: Path) -> None:
    [curve] = read_curves([make_spoilt(tmp_path / "chain", seed)])
    assert "run1\n  began" in f"\n{diary_text(curve)}" or curve.runs[0].name != "run1"
