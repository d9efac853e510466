"""Small data sets made by hand, and the command that prepares them, in this process."""

import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from nemo_prorl import cli, settings
from nemo_prorl.data.records import read_records
from tests.lines import read_lines, write_lines

Rows = list[dict[str, Any]]

SUMS: Rows = [{"id": f"s{n}", "problem": f"What is {n} plus {n}?", "answer": str(2 * n)} for n in range(8)]
TRUTHS: dict[str, dict[str, Any]] = {
    "math": {"answer": "2"},
    "stem": {"answer": "2"},
    "code": {"asserts": ["assert f(1) == 2"]},
    "puzzles": {"dataset": "gcd", "entry": {"question": "gcd(2, 4)?", "answer": "2", "metadata": {}}},
    "instructions": {"instruction_id_list": ["punctuation:no_comma"], "kwargs": [{}]},
}
TEST = {"inputs": ["1 2\n"], "outputs": ["3\n"]}


def prepare(*words: object) -> int:
    """The exit code of `prorl data prepare`."""
    try:
        return cli.main(["data", "prepare", *map(str, words)])
    except SystemExit as end:
        return int(end.code or 0)


def made_anew(out: Path) -> Path:
    """The folder, in which a preparation may now replace one that was made with other options."""
    (out / "manifest.json").unlink(missing_ok=True)
    return out


def refused(capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture, code: int, *words: object) -> str:
    """What a preparation that must fail says."""
    caplog.clear()
    capsys.readouterr()
    assert prepare(*words) == code
    return caplog.text + capsys.readouterr().err


def manifest(out: Path) -> dict[str, Any]:
    value: dict[str, Any] = json.loads((out / "manifest.json").read_text())
    counts = value["counts"]
    assert counts["read"] == counts["kept"] + sum(counts["dropped"].values())
    assert counts["kept"] == counts.get("train", 0) + counts.get("validation", 0)
    return value


def records(out: Path, part: str = "train") -> Rows:
    return read_records(out / f"{part}.jsonl")


def dropped(out: Path) -> dict[int, str]:
    """Reason by line."""
    lines = read_lines(out / "dropped.jsonl")
    return {line["line"]: line["reason"] for line in lines}


def touch_prepared(folder: Path) -> None:
    """The files of `data=prorl` with one record of each task, for checks of a configuration."""
    shipped = yaml.safe_load((settings.conf_folder() / "data" / "prorl.yaml").read_text())
    for source in [*shipped["train"], *shipped["validation"]]:
        path = Path(source["path"].replace("${data.folder}", str(folder)))
        name = path.parent.name
        made = [{"id": f"{name}-{task}", "task": task, "prompt": name, "truth": TRUTHS[task]} for task in TRUTHS]
        write_lines(path, made)
