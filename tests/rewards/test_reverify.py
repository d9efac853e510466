"""`prorl reverify`: stored verdicts against those of the plugins as they are now."""

import json
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from nemo_prorl import cli
from nemo_prorl.errors import DataError, RewardFailure
from nemo_prorl.lifecycle.run_records import write_rollouts
from nemo_prorl.rewards import reverify
from nemo_prorl.rewards.interface import failed_verdict
from nemo_prorl.rewards.judging import RewardService

pytestmark = pytest.mark.starts

Prorl = Callable[..., subprocess.CompletedProcess[str]]
Capture = pytest.CaptureFixture[str]

SUM = {"dataset": "chain_sum", "entry": {"question": "2 + 3 =", "answer": "5", "metadata": {}}}


def stored(name: str, response: str, task: str = "math", **verdict: Any) -> dict[str, Any]:
    """A line of rollouts; the verdict that is right now, but for what is given."""
    truth = {"answer": "7"} if task == "math" else SUM
    right = "\\boxed{7}" in response or ">5<" in response
    base = {"id": name, "score": float(right), "correct": right, "parts": {}, "failure": None}
    said = f"{'accepted' if right else 'not accepted'}: {response[7:-1]}" if task == "math" else f"chain_sum: {right:d}"
    request = {"id": name, "task": task, "prompt": "?", "truth": truth, "response": response, "finished": True}
    return {**request, "verdict": {**base, "detail": said, **verdict}, "version": 3}


def write(path: Path, lines: list[dict[str, Any]]) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


def rows_of(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def table(out: str) -> dict[str, list[str]]:
    """The summary's cells by task."""
    lines = out.splitlines()
    at = next(at for at, line in enumerate(lines) if line.startswith("task "))
    return {line.split()[0]: line.split()[1:] for line in lines[at + 1 :]}


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    """Rollouts of steps 9 and 10 with five kinds of change, and none in the others."""
    infrastructure = failed_verdict("c", "infrastructure", "the server stopped")
    nine = [
        stored("a", "\\boxed{7}"),
        stored("a", "\\boxed{8}", score=1.0, correct=True, detail="accepted by an older grader"),
        stored("b", "\\boxed{7}", detail="accepted: 7 (in other words)"),
        stored("c", "\\boxed{7}", **infrastructure),
    ]
    ten = [
        stored("d", "<answer>5</answer>", "puzzles", score=0.25, correct=False),
        stored("e", "<answer>6</answer>", "puzzles", parts={"raw": 0.0}),
        stored("f", "<answer>5</answer>" + " " * 3, "puzzles", score=1.0 - 1e-12),
        stored("g", "<answer>" + "5" * 100_001 + "</answer>", "puzzles"),
        stored("h", "<answer>" + "5" * 100_001 + "</answer>", "puzzles", failure="invalid", detail="too long"),
    ]
    write(tmp_path / "run" / "rollouts" / "step-10.jsonl", ten)
    write(tmp_path / "run" / "rollouts" / "step-9.jsonl", nine)
    return tmp_path / "run"


CHANGED = [("a", 9, 2), ("c", 9, 4), ("d", 10, 1), ("e", 10, 2), ("g", 10, 4)]


def test_changed_verdicts_are_told_and_counted(run_dir: Path, tmp_path: Path, capsys: Capture) -> None:
    out = tmp_path / "out.jsonl"
    assert cli.main(["reverify", str(run_dir), "--out", str(out)]) == 0
    told = capsys.readouterr().out
    lines = told.splitlines()[: len(CHANGED)]
    for (name, step, at), line in zip(CHANGED, lines, strict=True):
        assert line.startswith(f"{name} (step {step}, {'math' if step == 9 else 'puzzles'}, ")
        assert f"rollouts/step-{step}.jsonl:{at}): " in line
    assert 'score 1 -> 0; correct true -> false; detail "accepted by an older grader" -> "not accepted: 8"' in lines[0]
    assert 'score null -> 1; correct null -> true; failure "infrastructure" -> null' in lines[1]
    assert 'parts {"raw": 0.0} -> {}' in lines[3]
    assert 'failure null -> "invalid"' in lines[4]
    # same, reworded, changed, up, down, newly failed, mean before, mean after
    assert table(told) == {
        "math": ["2", "1", "2", "0", "1", "0", "1.0000", "0.7500"],
        "puzzles": ["2", "1", "3", "1", "0", "1", "0.2500", "0.4000"],
    }
    rows = rows_of(out)
    assert len(rows) == 9
    assert [(row["id"], row["step"], row["line"]) for row in rows if row["changed"]] == CHANGED
    assert rows[3]["old"] == failed_verdict("c", "infrastructure", "the server stopped")
    assert (rows[3]["new"]["score"], rows[3]["task"]) == (1.0, "math")


def test_only_changed_verdicts_are_written(run_dir: Path, tmp_path: Path) -> None:
    out = tmp_path / "out.jsonl"
    words = ["reverify", str(run_dir / "rollouts"), "--out", str(out), "--only-changed", "--workers", "2"]
    assert cli.main(words) == 0
    assert [(row["id"], row["step"], row["line"]) for row in rows_of(out)] == CHANGED


def test_a_file_of_another_name_has_no_step(tmp_path: Path, capsys: Capture) -> None:
    path = write(tmp_path / "some.jsonl", [stored("a", "\\boxed{8}", score=1.0, correct=True)])
    assert cli.main(["reverify", str(path)]) == 0
    assert capsys.readouterr().out.startswith(f"a (math, {path}:1): score 1 -> 0")


def test_what_a_run_writes_can_be_read(tmp_path: Path, capsys: Capture) -> None:
    """The real writer of rollouts."""

    class Group:
        def __init__(self, line: dict[str, Any]) -> None:
            keys = ("id", "task", "prompt", "truth")
            self.record = {**{key: line[key] for key in keys}, "source": "s", "meta": {}}
            self.verdicts = [line["verdict"]]
            self.prompt_ids, self.draw_index = [0], 0
            self.responses = [
                type("Response", (), {"finished": True, "weight_version": 2, "token_ids": line["response"]})
            ]

    lines = [stored("a", "\\boxed{7}"), stored("b", "\\boxed{\U0001f642}")]
    write_rollouts(tmp_path, 4, [Group(line) for line in lines], {0}, lambda _, response: str(response))
    assert cli.main(["reverify", str(tmp_path)]) == 0
    assert table(capsys.readouterr().out) == {"math": ["2", "0", "0", "0", "0", "0", "0.5000", "0.5000"]}


def test_settings_are_the_runs_unless_given(tmp_path: Path, capsys: Capture) -> None:
    path = write(tmp_path / "rollouts" / "step-1.jsonl", [stored("a", "\\boxed{7}")])
    (tmp_path / "config.yaml").write_text("rewards: {plugins: {math: {nonsense: 1}}}\n")
    for source in (tmp_path, path):
        assert cli.main(["reverify", str(source)]) == 2  # the run's settings were used
    assert cli.main(["reverify", str(tmp_path), "--settings", "{}"]) == 0
    (tmp_path / "config.yaml").write_text("rewards: 3\n")
    assert cli.main(["reverify", str(tmp_path)]) == 2


@pytest.mark.parametrize("words", [[], ["--settings", "{}"]])
def test_the_seconds_of_a_function_are_the_runs(tmp_path: Path, capsys: Capture, words: list[str]) -> None:
    slow = "import time\n\n\ndef score(*_):\n    while time.process_time() < 60: pass\n"
    (tmp_path / "slow.py").write_text(slow)
    rewards = {"plugins": {}, "functions": {"own": f"{tmp_path}/slow.py:score"}, "functions_time_s": 0.5}
    (tmp_path / "config.yaml").write_text(json.dumps({"rewards": rewards}))
    out = tmp_path / "out.jsonl"
    write(tmp_path / "rollouts" / "step-1.jsonl", [stored("a", "7", "own")])
    assert cli.main(["reverify", str(tmp_path), "--out", str(out), *words]) == 0
    (row,) = rows_of(out)
    assert row["new"]["failure"] == "timeout"
    assert " 0.5 " in row["new"]["detail"]


BAD: list[tuple[Any, str]] = [
    ("{", "not JSON"),
    ([], "a request must be a JSON object"),
    ({"response": 3}, "field 'response' is int"),
    ({"verdict": None}, "field 'verdict' is None"),
    ({"verdict.detail": ...}, "field 'verdict.detail' is missing"),
    ({"verdict.score": 1.5}, "field 'verdict.score' is 1.5"),
    ({"verdict.score": True}, "field 'verdict.score' is True"),
    ({"verdict.score": None}, "'verdict.score' is None with failure None"),
    ({"verdict.failure": "broken"}, "field 'verdict.failure' is 'broken'"),
    ({"verdict.id": "z"}, "field 'verdict.id' is 'z'; the request's id is 'a'"),
    ({"verdict.parts": []}, "field 'verdict.parts'"),
    ({"verdict.detail": 1}, "field 'verdict.detail' is 1"),
]


@pytest.mark.parametrize(("change", "says"), BAD, ids=[says for _, says in BAD])
def test_a_bad_line_is_named_before_any_worker_starts(
    change: Any, says: str, tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def start(self: Any) -> None:
        raise RewardFailure("a worker was started")

    monkeypatch.setattr(RewardService, "start", start)
    line: Any = stored("a", "\\boxed{7}")
    if not isinstance(change, dict):
        line = change
    else:
        for key, value in change.items():
            place, name = (line["verdict"], key[8:]) if key.startswith("verdict.") else (line, key)
            place.pop(name) if value is ... else place.update({name: value})
    path = tmp_path / "step-1.jsonl"
    text = line if isinstance(line, str) else json.dumps(line)
    path.write_text(json.dumps(stored("a", "\\boxed{7}")) + "\n\n" + text + "\n")
    assert cli.main(["reverify", str(path)]) == 4
    assert f"{path}:3: " in caplog.text
    assert says in caplog.text


def test_missing_or_empty_sources_are_named(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="absent: cannot be read"):
        list(reverify.read_all(reverify.rollout_files(tmp_path / "absent")))
    with pytest.raises(DataError, match="save_rollout_groups"):
        reverify.rollout_files(tmp_path)
    (tmp_path / "empty.jsonl").write_text("\n")
    assert cli.main(["reverify", str(tmp_path / "empty.jsonl")]) == 4


def test_an_unknown_task_is_refused(tmp_path: Path, prorl: Prorl) -> None:
    write(tmp_path / "step-1.jsonl", [{**stored("a", "\\boxed{7}"), "task": "nothing"}])
    told = prorl("reverify", "step-1.jsonl")
    assert (told.returncode, told.stdout) == (2, "")
    assert "no reward plugin judges task 'nothing'; known: " in told.stderr
    assert "Fix: install the plugin that judged these responses" in told.stderr
    assert "rewards.functions" not in told.stderr
    assert "Traceback" not in told.stderr
