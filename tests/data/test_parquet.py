"""Prompt records in Parquet files: the same records as in JSON Lines, faults named by row, null fields left out."""

import datetime
import math
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet
import pytest

from nemo_prorl.data import parquet as tables
from nemo_prorl.data.records import read_records
from nemo_prorl.errors import DataError
from tests.data.preparing import SUMS, prepare, records
from tests.lines import write_lines


def test_parquet_holds_the_same_records(tmp_path: Path) -> None:
    file = write_lines(tmp_path / "f.jsonl", SUMS)
    for form in ("jsonl", "parquet"):
        assert prepare("math", "--from", file, "--out", tmp_path / form, "--format", form, "--check", 0) == 0
    lines, rows = read_records(tmp_path / "jsonl" / "train.jsonl"), read_records(tmp_path / "parquet" / "train.parquet")
    assert lines == rows
    assert tables.has_messages(tmp_path / "parquet" / "train.parquet")
    (tmp_path / "parquet" / "manifest.json").unlink()  # or the other options are refused
    assert prepare("math", "--from", file, "--out", tmp_path / "parquet", "--prompt", "text", "--check", 0) == 0
    assert not (tmp_path / "parquet" / "train.parquet").exists()  # the form before is no part of the folder now
    texts: Any = [{**one, "prompt": one["prompt"][0]["content"]} for one in lines]
    assert records(tmp_path / "parquet") == texts
    tables.write_records(tmp_path / "t.parquet", texts)
    assert read_records(tmp_path / "t.parquet") == texts
    assert not tables.has_messages(tmp_path / "t.parquet")
    assert not tables.has_messages(file)


def test_a_bad_parquet_file_is_named_with_its_row(tmp_path: Path) -> None:
    good = {"id": "a", "task": "math", "prompt": "1 + 1?", "truth": '{"answer": "2"}'}
    path = tmp_path / "f.parquet"
    for change, says in (
        ({"truth": "{"}, "f.parquet:2: field 'truth' is not JSON"),
        ({"truth": '{"answer": ""}'}, "f.parquet:2: field 'truth.answer' is \"\""),
        ({"id": "a"}, "f.parquet:2: field 'id' is 'a', as in line 1"),
        ({"task": None}, "f.parquet:2: field 'task' is missing"),
    ):
        pyarrow.parquet.write_table(pyarrow.Table.from_pylist([good, {**good, "id": "b", **change}]), path)
        with pytest.raises(DataError) as caught:
            read_records(path)
        assert says in str(caught.value)
    structs = [
        {**good, "truth": {"answer": "2", "unit": None}},
        {**good, "id": "b", "truth": {"answer": "2", "unit": "m"}},
    ]
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(structs), path)
    assert [one["truth"] for one in read_records(path)] == [{"answer": "2"}, {"answer": "2", "unit": "m"}]
    for value in (datetime.date(2026, 1, 2), math.nan):
        pyarrow.parquet.write_table(pyarrow.Table.from_pylist([{**good, "truth": {"answer": value}}]), path)
        with pytest.raises(DataError, match=r"f.parquet:1: field 'truth': .*; expected values that JSON has"):
            read_records(path)
    path.write_bytes(b"PAR1 nonsense")
    with pytest.raises(DataError, match=r"f.parquet: not a readable Parquet file"):
        read_records(path)
    assert tables.has_messages(path) is False
    pyarrow.parquet.write_table(pyarrow.table({"other": [1]}), path)
    assert tables.has_messages(path) is False
