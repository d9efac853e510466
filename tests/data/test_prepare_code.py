"""Published code data sets, from files in their own form to verdicts of the code plugin in the sandbox."""

import base64
import io
import json
import os
import pickle
import zlib
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from nemo_prorl.data.prepare import livecodebench as contests
from nemo_prorl.data.prepare.gold import failures
from nemo_prorl.data.prepare.rows import Row
from nemo_prorl.errors import DataError
from tests.data import published_code as published
from tests.data.preparing import Rows, dropped, made_anew, manifest, prepare, records, refused
from tests.lines import write_lines

pytestmark = pytest.mark.starts


def scored(rows: Rows, programs: list[str]) -> set[int]:
    """The positions of the programs that do not pass all tests."""
    return set(failures(rows, [f"```python\n{text}\n```" for text in programs], 1, False))  # type: ignore[arg-type]


def asked(row: dict[str, Any]) -> str:
    [message] = row["prompt"]
    assert message["role"] == "user"
    return str(message["content"])


def problem_of(row: dict[str, Any]) -> published.Problem:
    [found] = [problem for problem in published.PROBLEMS if problem.text in asked(row)]
    return found


def check_programs(rows: Rows) -> None:
    problems = [problem_of(row) for row in rows]
    assert scored(rows, [problem.right for problem in problems]) == set()
    assert scored(rows, [problem.wrong for problem in problems]) == set(range(len(rows)))


# --- Eurus-2-RL's validation set -------------------------------------------------------------------------------------


@pytest.mark.parametrize("only", published.SETS)
def test_one_file_of_prime_holds_four_benchmarks(tmp_path: Path, only: str) -> None:
    file, out = published.eurus_validation(tmp_path), tmp_path / "out"
    assert prepare("eurus2-rl-validation", "--only", only, "--from", file.parent, "--out", out) == 0
    rows = records(out, "validation")
    assert [problem_of(row) for row in rows] == [one for one in published.PROBLEMS if one.origin == only]
    assert all(row["meta"] == {"origin": only} and row["id"].startswith(f"{only}-") for row in rows)
    assert not any(text in asked(row) for row in rows for text in ("[ASSESS]", "Present the code in"))
    assert all("between triple backticks" in asked(row) for row in rows)


def test_all_rows_of_prime_are_counted_and_right_programs_score_one(tmp_path: Path) -> None:
    file, out = published.eurus_validation(tmp_path), tmp_path / "out"
    assert prepare("eurus2-rl-validation", "--from", file, "--out", out) == 0
    broken = Counter(reason for reason, _ in published.BROKEN)
    assert manifest(out)["counts"]["dropped"] == {**broken, "no code": 4}
    found = dropped(out)
    first = len(published.PROBLEMS) + 1
    assert [found[first + at] for at in range(len(published.BROKEN))] == [reason for reason, _ in published.BROKEN]
    check_programs(records(out, "validation"))


def test_a_part_that_does_not_exist_is_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    words = ("eurus2-rl-validation", "--only", "leetcode", "--from", tmp_path, "--out", tmp_path / "out")
    assert "apps, codecontests, codeforces, taco" in refused(capsys, caplog, 2, *words)


def test_a_folder_of_both_splits_gives_each_source_its_own(tmp_path: Path) -> None:
    """The whole data set downloaded by hand: the problems of the validation set do not become training data."""
    folder = published.eurus_validation(tmp_path).parent
    published.eurus_train(tmp_path).rename(folder / "train.parquet")
    for source, part in (("eurus2-rl", "train"), ("eurus2-rl-validation", "validation")):
        assert prepare(source, "--from", folder, "--out", tmp_path / source, "--check", 0) == 0
        rows = records(tmp_path / source, part)
        assert len(rows) == len(published.PROBLEMS)
        assert all(asked(row).startswith("On a Monday") == (part == "train") for row in rows)
        assert [entry["file"] for entry in manifest(tmp_path / source)["inputs"]] == [f"{part}.parquet"]


# --- LiveCodeBench ---------------------------------------------------------------------------------------------------


def test_livecodebench_of_the_papers_period(tmp_path: Path) -> None:
    folder, out = published.livecodebench(tmp_path), tmp_path / "out"
    assert prepare("livecodebench", "--from", folder, "--out", out) == 0
    made = manifest(out)
    assert [entry["file"] for entry in made["inputs"]] == list(contests.RELEASES["release_v5"])
    assert made["counts"]["dropped"] == {"broken tests": 1, "no tests": 1, "outside the period": 4}
    rows = records(out, "validation")
    dates = ["2024-08-01", "2024-08-31", "2024-09-14", "2024-12-07", "2025-01-04", "2025-01-31"]
    assert [row["meta"]["contest_date"] for row in rows] == dates
    assert rows[1]["meta"] == {
        "row": "3006",
        "contest_date": "2024-08-31",
        "platform": "leetcode",
        "difficulty": "easy",
    }
    assert [len(row["truth"]["tests"]) for row in rows] == [60, 2, 2, 2, 2, 2]  # the public and the private ones
    assert [row["truth"]["time_limit_s"] for row in rows] == [60, 12, 12, 12, 12, 12]
    assert "class Solution:\n    def shifted(self" in asked(rows[1])
    assert rows[3]["truth"]["tests"][1] == {"args": ["ab c"], "expected": ["c"]}  # a list with one entry stays a list
    check_programs(rows)


def test_livecodebench_of_another_period_and_release(tmp_path: Path) -> None:
    folder, out = published.livecodebench(tmp_path), tmp_path / "out"
    period = ("--since", "2023-01-01", "--until", "2024-07-31")
    assert prepare("livecodebench", "--from", folder, *period, "--out", out, "--check", 0) == 0
    dates = [row["meta"]["contest_date"] for row in records(out, "validation")]
    assert dates == ["2023-05-07", "2023-08-13", "2024-04-06", "2024-07-31"]
    command = ("livecodebench", "--from", folder, "--out", out, "--check", 0)
    made_anew(out)
    assert prepare(*command, "--only", "release_v1", *period) == 0
    assert len(records(made_anew(out), "validation")) == 2
    assert prepare(*command, "--only", "release_v6", "--until", "2025-12-31") == 0
    assert [row["meta"]["contest_date"] for row in records(out, "validation")][-1] == "2025-02-01"


def test_what_livecodebench_needs_is_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    folder = published.livecodebench(tmp_path)
    words = ("livecodebench", "--from", folder, "--out", tmp_path / "out")
    assert "expected a date, YYYY-MM-DD; got 'May'" in refused(capsys, caplog, 2, *words, "--since", "May")
    math = ("deepscaler", "--from", folder, "--out", tmp_path / "out", "--since", "2024-01-01")
    assert "the rows of deepscaler have no date" in refused(capsys, caplog, 2, *math)
    (folder / "test4.jsonl").unlink()
    assert "the folder lacks test4.jsonl" in refused(capsys, caplog, 2, *words, "--only", "release_v5")
    assert prepare(*words, "--only", "release_v3", "--check", 0) == 0


class Touches:
    """An object whose pickle creates a file when it is loaded."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (str(self.path),)


class Persistent(pickle.Pickler):
    def persistent_id(self, value: Any) -> Any:
        return "id" if isinstance(value, list) else None


def zipped(pickled: bytes) -> str:
    return base64.b64encode(zlib.compress(pickled)).decode()


@pytest.mark.parametrize("protocol", [0, 2, 4, 5])
def test_private_tests_that_are_a_program_are_not_executed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture, protocol: int
) -> None:
    trap = tmp_path / "made-by-a-pickle"
    row = published.contest_row(1, "2024-09-01", published.PROBLEMS[0], "stdin")
    row["private_test_cases"] = zipped(pickle.dumps(Touches(trap), protocol))
    good = published.contest_row(2, "2024-09-01", published.PROBLEMS[0], "stdin")
    file = write_lines(tmp_path / "lcb" / "test5.jsonl", [good, row])
    said = refused(capsys, caplog, 4, "livecodebench", "--from", file, "--out", tmp_path / "out")
    assert f"{file}:2: field 'private_test_cases'" in said
    assert "GLOBAL" in said
    assert not trap.exists()
    pickle.loads(pickle.dumps(Touches(trap), protocol))
    assert trap.exists()  # the trap works


def persistent() -> bytes:
    made = io.BytesIO()
    Persistent(made, 4).dump([1])
    return made.getvalue()


@pytest.mark.parametrize(
    ("text", "says"),
    [
        (lambda: zipped(pickle.dumps(["a"])), "the pickle contains EMPTY_LIST"),
        (lambda: zipped(pickle.dumps(b"[]")), "the pickle contains SHORT_BINBYTES"),
        (lambda: zipped(persistent()), "the pickle contains BINPERSID"),
        (lambda: zipped(pickle.dumps("[]")[:-1]), "pickle exhausted before seeing STOP"),
        (lambda: zipped(b"\x80\x04."), "the pickle contains 0 texts"),
        (lambda: zipped(pickle.dumps("[3]")), "it must be a JSON list of"),
        (lambda: zipped(pickle.dumps("{")), "it must be a JSON list of"),
        (lambda: base64.b64encode(b"plain").decode(), "incorrect header check"),
        (lambda: base64.b64encode(zlib.compress(pickle.dumps("[]"))[:-5]).decode(), "incomplete"),
        (lambda: "no base64!", "base64"),
    ],
)
def test_other_private_tests_are_refused_with_file_and_line(
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    caplog: pytest.LogCaptureFixture,
    text: Callable[[], str],
    says: str,
) -> None:
    row = published.contest_row(1, "2024-09-01", published.PROBLEMS[0], "stdin", private_test_cases=text())
    file = write_lines(tmp_path / "lcb" / "test5.jsonl", [row])
    said = refused(capsys, caplog, 4, "livecodebench", "--from", file, "--out", tmp_path / "out")
    assert f"{file}:1: field 'private_test_cases'" in said
    assert says in said


def test_private_tests_have_a_limit_of_size(monkeypatch: pytest.MonkeyPatch) -> None:
    text = json.dumps([{"input": "1" * 10_000, "output": "1", "testtype": "stdin"}])
    assert contests.pickled_text(pickle.dumps(text)) == text
    row = published.contest_row(1, "2024-09-01", published.PROBLEMS[0], "stdin")
    monkeypatch.setattr(contests, "MAX_TESTS_BYTES", 20)
    with pytest.raises(DataError, match="more than 20 bytes"):
        contests.livecodebench(Row("f.jsonl", 1, row))


# --- HumanEval+ ------------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_humanevalplus_of_the_hub(tmp_path: Path) -> None:
    file, out = published.humanevalplus(tmp_path), tmp_path / "out"
    assert prepare("humanevalplus", "--from", file.parent.parent, "--out", out, "--check", "all") == 0
    assert manifest(out)["checks"]["gold"] == {"checked": 12, "failed": 0, "without": 0}
    rows = records(out, "validation")[:4]
    for form, right in (("body", True), ("also_right", True), ("wrong", False)):
        programs = [f"{published.function_prompt(one)}    {getattr(one, form)}\n" for one in published.FUNCTIONS]
        assert scored(rows, programs) == (set() if right else set(range(4))), form


@pytest.mark.slow
def test_evalplus_own_files_keep_the_tolerance(tmp_path: Path) -> None:
    """The same function with `base_input`, `plus_input` and `atol`, as EvalPlus' package downloads it."""
    function = published.FUNCTIONS[1]
    row = {
        "task_id": "HumanEval/2",
        "prompt": published.function_prompt(function),
        "contract": "",
        "entry_point": function.name,
        "canonical_solution": f"    {function.body}\n",
        "base_input": [[3.5]],
        "plus_input": [[1.3333333333], [7.75]],
        "atol": 1e-6,
    }
    file, out = write_lines(tmp_path / "plus.jsonl", [row]), tmp_path / "out"
    assert prepare("humanevalplus", "--from", file, "--out", out) == 0
    rows = records(out, "validation")
    assert len(rows[0]["truth"]["asserts"]) == 3
    head = published.function_prompt(function)
    assert scored(rows, [f"{head}    {function.also_right}\n"]) == set()
    assert scored(rows, [f"{head}    {function.wrong}\n"]) == {0}
    assert scored(rows, [f"{head}    return round(x % 1.0, 4)\n"]) == {0}


# --- Codeforces' submissions -----------------------------------------------------------------------------------------


def test_submissions_become_problems_with_an_accepted_program(tmp_path: Path) -> None:
    file, out = published.codeforces_submissions(tmp_path), tmp_path / "out"
    words = ("--from", file.parent, "--out", out, "--check", "all")
    assert prepare("codeforces-submissions", *words) == 0
    made = manifest(out)
    assert (made["counts"]["read"], made["counts"]["kept"]) == (2, 2)
    assert made["checks"]["gold"] == {"checked": 2, "failed": 0, "without": 0}
    first, second = records(out)
    assert [row["meta"]["row"] for row in (first, second)] == ["4A", "4B"]
    assert first["truth"] == second["truth"]  # without the shortened test
    assert "Input\nA line of integers." in asked(first)
    assert "Example output\n3" in asked(first)
