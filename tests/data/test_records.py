"""Prompt records: every fault names file, line and field, and says what would be right."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from nemo_prorl.data.records import TRUTHS, read_records, validate_record
from nemo_prorl.errors import DataError
from nemo_prorl.rewards.discovery import discover, make_plugin
from tests.lines import write_lines

GOOD: dict[str, Any] = {
    "id": "a",
    "task": "math",
    "prompt": "1 + 1?",
    "truth": {"answer": "2"},
    "source": "s",
    "meta": {"k": 1},
}
ENTRY: dict[str, Any] = {"question": "q", "answer": None, "metadata": {}}
GOOD_TRUTHS: list[tuple[str, dict[str, Any]]] = [
    ("math", {"answer": "\\frac{3}{7}"}),
    ("math", {"answer": ["1", "2"], "tolerance": 0, "unit": "m"}),
    ("math", {"all_of": ["1", "2"], "tolerance": 0.01}),
    ("stem", {"answer": "C", "options": ["a", "b", "c"]}),
    ("code", {"tests": [{"input": "", "output": "1"}], "time_limit_s": 2, "setup": "import math"}),
    ("code", {"fn_name": "f", "tests": [{"args": [1], "expected": None}]}),
    ("code", {"asserts": ["assert f(1) == 2"]}),
    ("code", {"tests": [{"input": ["1", "2"], "output": ["3"]}]}),
    ("puzzles", {"dataset": "chain_sum", "entry": ENTRY}),
    ("instructions", {"instruction_id_list": ["a:b"], "kwargs": [{}]}),
    ("instructions", {"instruction_id_list": ["a:b", "c:d"], "kwargs": [None, {}]}),
    ("a_task_of_another_plugin", {"anything": 1}),
]
BAD_TRUTHS: list[tuple[str, Any, str]] = [
    ("math", {}, "field 'truth.answer' is missing"),
    (
        "math",
        "3000 m",
        '"3000 m"; it must be an object: the truth that responses are judged by. For an answer write {"',
    ),
    ("math", {"answer": ""}, "field 'truth.answer' is \"\""),
    ("math", {"answer": 2}, "field 'truth.answer' is 2"),
    ("math", {"answer": ["1", ""]}, "field 'truth.answer'"),
    ("math", {"answer": []}, "field 'truth.answer'"),
    ("math", {"answer": "1", "all_of": ["1"]}, "both 'answer' and 'all_of'"),
    ("math", {"all_of": "1"}, "field 'truth.all_of'"),
    ("math", {"answer": "1", "tolerance": -1}, "field 'truth.tolerance' is -1"),
    ("math", {"answer": "1", "tolerance": True}, "field 'truth.tolerance'"),
    ("math", {"answer": "1", "unit": 1}, "field 'truth.unit'"),
    ("math", "2", "field 'truth' is \"2\""),
    ("stem", {"answer": "C", "options": ["a"]}, "field 'truth.options'"),
    ("code", {}, "field 'truth.tests' is missing"),
    ("code", {"tests": []}, "field 'truth.tests'"),
    ("code", {"tests": [{"input": "1"}]}, "field 'truth.tests[0].output' is missing"),
    ("code", {"tests": [{"input": 1, "output": "1"}]}, "field 'truth.tests[0].input' is 1"),
    ("code", {"tests": ["x"]}, "field 'truth.tests[0]'"),
    ("code", {"fn_name": "f", "tests": [{"args": 1, "expected": 1}]}, "field 'truth.tests[0].args'"),
    (
        "code",
        {"fn_name": "f", "tests": [{"args": []}]},
        "'truth.tests[0].expected' is missing; it must be the value that the function must return",
    ),
    ("code", {"asserts": []}, "field 'truth.asserts'"),
    ("code", {"asserts": ["assert 1"], "time_limit_s": 0}, "field 'truth.time_limit_s' is 0"),
    ("code", {"asserts": ["assert 1"], "time_limit_s": 61}, "field 'truth.time_limit_s' is 61"),
    ("code", {"asserts": ["assert 1"], "tests": [{"input": "", "output": ""}]}, "has both 'tests' and 'asserts'"),
    ("puzzles", {"entry": ENTRY}, "field 'truth.dataset' is missing"),
    (
        "puzzles",
        {"dataset": "x", "entry": {"question": "q", "answer": "a"}},
        "field 'truth.entry.metadata' is missing; it must be an object, as generated",
    ),
    (
        "instructions",
        {"instruction_id_list": ["a"], "kwargs": []},
        "field 'truth.kwargs' is []; it must be a list of 1",
    ),
]


def test_records_are_read_in_order(tmp_path: Path) -> None:
    bare = {key: GOOD[key] for key in ("task", "truth")} | {"id": "b", "prompt": [{"role": "user", "content": "?"}]}
    path = write_lines(tmp_path / "f.jsonl", [GOOD, bare])
    path.write_text(path.read_text() + "\n")  # an empty line at the end is no record
    assert read_records(path) == [GOOD, {**bare, "source": "", "meta": {}}]


@pytest.mark.parametrize(("task", "truth"), GOOD_TRUTHS)
def test_truths_of_each_task_pass(task: str, truth: dict[str, Any]) -> None:
    record = {**GOOD, "task": task, "truth": truth}
    assert validate_record(record, "f:1") == record


@pytest.mark.parametrize(
    ("task", "truth", "left"),
    [
        ("math", {"answer": "2", "all_of": None, "unit": None}, {"answer": "2"}),
        ("stem", {"answer": None, "all_of": ["2"]}, {"all_of": ["2"]}),
        ("code", {"tests": [{"args": [1], "expected": None}], "fn_name": "f", "setup": None}, None),
        ("code", {"asserts": ["assert f(1) == 2"], "tests": None}, None),
        ("instructions", {"instruction_id_list": ["punctuation:no_comma"], "kwargs": [None]}, None),
        ("another", {"x": None, "y": [None]}, {"y": [None]}),
    ],
)
def test_a_plugin_sees_no_null_field_of_a_truth(task: str, truth: dict[str, Any], left: dict[str, Any] | None) -> None:
    record = validate_record({"id": "a", "task": task, "prompt": "?", "truth": dict(truth)}, "here")
    assert record["truth"] == (left or {name: value for name, value in truth.items() if value is not None})
    if task != "another":
        make_plugin(discover().plugin_of_task(task)).validate_truth(record["truth"])


LONG = "x" * 90


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"truth": {"answer": 2}}, "'truth.answer' is 2; it must be a string, or a list of strings, not empty"),
        (
            {"truth": LONG},
            f"'truth' is \"{LONG[:76]}...; it must be an object: the truth that responses are judged by. For an answer"
            f' write {{"answer": "{LONG[:80]}"}}',
        ),
        (
            {"truth": [LONG[:76]]},
            f"'truth' is [\"{LONG[:76]}\"]; it must be an object: the truth that responses are judged by",
        ),
        ({"meta": LONG[:78]}, f"'meta' is \"{LONG[:78]}\"; it must be an object"),
        ({"meta": LONG[:79]}, f"'meta' is \"{LONG[:76]}...; it must be an object"),
        (
            {"task": "code", "truth": {"tests": [{"args": [], "expected": 1}]}},
            "'truth.tests[0].input' is missing; it must be a string, or a list of lines; also missing: 'output'",
        ),
        (
            {"task": "instructions", "truth": {"instruction_id_list": ["a"], "kwargs": [{"x": LONG}, None]}},
            f'\'truth.kwargs\' is [{{"x": "{LONG[:72]}; it must be a list of 1 objects or nulls: one per instruction in'
            " truth.instruction_id_list",
        ),
    ],
)
def test_a_fault_is_a_sentence(change: dict[str, Any], says: str) -> None:
    with pytest.raises(DataError) as caught:
        validate_record({**GOOD, **change}, "f:1")
    assert str(caught.value) == f"f:1: field {says}"


def test_every_task_is_covered_by_the_cases() -> None:
    assert set(TRUTHS) == {task for task, _ in GOOD_TRUTHS} - {"a_task_of_another_plugin"}
    assert set(TRUTHS) == {task for task, _, _ in BAD_TRUTHS}


@pytest.mark.parametrize(("task", "truth", "says"), BAD_TRUTHS)
def test_a_bad_truth_names_its_field(tmp_path: Path, task: str, truth: Any, says: str) -> None:
    path = write_lines(tmp_path / "f.jsonl", [GOOD, {**GOOD, "id": "b", "task": task, "truth": truth}])
    with pytest.raises(DataError) as caught:
        read_records(path)
    assert str(caught.value).startswith(f"{path}:2: ")
    assert says in str(caught.value)
    assert caught.value.exit_code == 4


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"id": None}, "field 'id' is null"),
        ({"id": " "}, "field 'id'"),
        ({"prompt": ""}, "field 'prompt'"),
        ({"prompt": []}, "field 'prompt'"),
        ({"prompt": ["x"]}, "field 'prompt[0]'"),
        ({"prompt": [{"role": "user"}]}, "field 'prompt[0].content' is missing"),
        ({"prompt": [{"role": "human", "content": "?"}]}, "field 'prompt[0].role' is \"human\""),
        ({"source": 1}, "field 'source' is 1"),
        ({"meta": None}, "field 'meta' is null"),
    ],
)
def test_a_bad_field_is_named(change: dict[str, Any], says: str) -> None:
    with pytest.raises(DataError) as caught:
        validate_record({**GOOD, **change}, "f.jsonl:7")
    assert str(caught.value).startswith(f"f.jsonl:7: {says}")


@pytest.mark.parametrize("key", ["id", "task", "prompt", "truth"])
def test_a_missing_field_is_named(key: str) -> None:
    with pytest.raises(DataError, match=f"f:1: field '{key}' is missing; it must be (a|an|text)[ ,]"):
        validate_record({k: v for k, v in GOOD.items() if k != key}, "f:1")


def test_all_missing_fields_are_named_at_once() -> None:
    with pytest.raises(DataError, match="f:1: field 'id' is missing; it must be .*; also missing: 'prompt', 'truth'$"):
        validate_record({"task": "math"}, "f:1")


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (b"", "has no records"),
        (b"\n \n", "has no records"),
        (b'{"id": 1\n', ":1: not JSON: Expecting ',' delimiter at character 10; each line"),
        (b"[1]\n", ":1: a record must be a JSON object, not list"),
        (json.dumps(GOOD).encode() + b"\n\xff\xfe\n", ":2: not UTF-8"),
        (json.dumps({**GOOD, "meta": {"x": float("nan")}}).encode(), ":1: not JSON: NaN is not JSON"),
        (b"[" * 100_000, ":1: not JSON"),
        ((json.dumps(GOOD) + "\n\n" + json.dumps(GOOD)).encode(), ":3: field 'id' is 'a', as in line 1"),
    ],
)
def test_a_bad_file_is_named_with_its_line(tmp_path: Path, content: bytes, says: str) -> None:
    path = tmp_path / "f.jsonl"
    path.write_bytes(content)
    with pytest.raises(DataError) as caught:
        read_records(path)
    assert str(path) in str(caught.value)
    assert says in str(caught.value)


def test_a_csv_file_is_no_file_of_records(tmp_path: Path) -> None:
    (tmp_path / "own.csv").write_text("problem,answer\n1+1?,2\n")
    with pytest.raises(DataError, match=r"own.csv: prompt records are .* prorl data prepare math --from .*own.csv"):
        read_records(tmp_path / "own.csv")


def test_an_absent_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"absent\.jsonl: cannot be read: No such file"):
        read_records(tmp_path / "absent.jsonl")


def test_records_import_neither_torch_nor_numpy() -> None:
    code = "import sys; import nemo_prorl.data.records; print('torch' in sys.modules, 'numpy' in sys.modules)"
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert found.stdout.split() == ["False", "False"]
