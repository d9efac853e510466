"""The section of a fork: the numbers of `prorl fork`'s table, and the paired difference by validation."""

import json
import statistics
from pathlib import Path
from typing import Any

import pytest

from nemo_prorl.errors import ConfigError
from nemo_prorl.files import write_json
from nemo_prorl.launcher.fork import table
from nemo_prorl.launcher.formats import ForkRecord
from nemo_prorl.report.data import page_data
from nemo_prorl.report.read import read_curves
from nemo_prorl.report.serve import PageSource
from tests.report.made import make_fork, make_run


def section(folder: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(json.dumps(page_data([folder], [], 10), allow_nan=False))["fork"]
    return found


def record_of(folder: Path) -> ForkRecord:
    found: ForkRecord = json.loads((folder / "fork.json").read_text())
    return found


@pytest.mark.parametrize("noise", [None, 0.005])
def test_the_numbers_are_those_of_the_printed_table(tmp_path: Path, noise: float | None) -> None:
    folder = make_fork(tmp_path / "fork", {"z": 0.0, "better": 0.2, "lr=1": -0.1}, noise)
    shown = section(folder)
    printed = table({folder: record_of(folder)}).splitlines()
    assert [" ".join(row[:5]).split() for row in [shown["heads"], *shown["rows"]]] == [
        line.split() for line in printed[:-1]
    ]
    assert shown["note"] == printed[-1]
    assert shown["rows"][0][2] == ""  # in the order of fork.json
    assert [float(row[2]) for row in shown["rows"][1:]] == [pytest.approx(gain, rel=0.03) for gain in (0.2, -0.1)]
    assert {row[5] for row in shown["rows"]} == {"0.0133"}  # 12 steps of 4 s
    state = "step 12 of 12"
    decided = f"{state}, decided" if noise else state
    assert [row[6] for row in shown["rows"]] == [state, decided, decided]


def test_the_chart_has_the_difference_at_each_validation_with_its_interval(tmp_path: Path) -> None:
    folder = make_fork(tmp_path / "fork", {"none": 0.0, "worse": -0.1})
    first, worse = section(folder)["series"]
    assert (first["name"], first["m"], worse["x"]) == ("none", [0.0] * 4, [3, 6, 9, 12])
    pairs = [
        [
            json.loads((folder / arm / "validations" / f"step-{3:06d}.json").read_text())[key]
            for arm in ("none", "worse")
        ]
        for key in map(str, range(40))
    ]
    values = [own - base for base, own in pairs]
    half = 1.959964 * statistics.stdev(values) / 40**0.5
    assert worse["m"][0] == pytest.approx(statistics.fmean(values), rel=1e-4)
    assert worse["m"][0] == pytest.approx(-0.1, abs=0.01)
    assert worse["hi"][0] - worse["m"][0] == pytest.approx(half, rel=1e-2)
    assert worse["m"][0] - worse["lo"][0] == pytest.approx(half, rel=1e-2)
    write_json(folder / "fork.json", record_of(folder) | {"early_noise": 0.01})
    wider = section(folder)["series"][1]  # of four looks, with the noise
    half = 2.497705 * (statistics.variance(values) / 40 + 0.01**2) ** 0.5
    assert wider["hi"][0] - wider["m"][0] == pytest.approx(half, rel=1e-2)


def test_the_arms_are_curves_in_the_order_of_the_fork(tmp_path: Path) -> None:
    folder = make_fork(tmp_path / "fork", {"z": 0.0, "a": 0.1})
    make_run(folder / "older", 2)  # an arm that the fork no longer has
    assert [curve.name for curve in read_curves([folder])] == ["z", "a"]
    assert page_data([folder / "a"], [], 10)["fork"] is None


@pytest.mark.parametrize("noise", [None, 0.005])
def test_an_arm_that_trains_or_is_missing_or_broken_is_told(tmp_path: Path, noise: float | None) -> None:
    folder = make_fork(tmp_path / "fork", dict.fromkeys(("none", "trains", "broken", "other", "odd"), 0.0), noise)
    record = record_of(folder)
    record["arms"].append({"text": "later", "folder": "later", "job": None})
    write_json(folder / "fork.json", record)
    for file in sorted((folder / "trains" / "validations").iterdir())[2:]:
        file.unlink()
    lines = (folder / "trains" / "metrics.jsonl").read_text().splitlines(keepends=True)
    (folder / "trains" / "metrics.jsonl").write_text("".join(lines[:7]))
    for file in (folder / "broken" / "validations").iterdir():
        file.write_text('{"0": 0.')
    for name, scores in (("other", {"x": 0.5}), ("odd", dict.fromkeys(map(str, range(40)), "x"))):
        for file in (folder / name / "validations").iterdir():
            write_json(file, scores)
    shown = section(folder)
    assert [row[1] for row in shown["rows"]][1:] == ["no validation"] * 5
    assert [row[6] for row in shown["rows"]][-5:] == ["step 7 of 12", *["step 12 of 12"] * 3, "not begun"]
    assert [(one["name"], one["x"]) for one in shown["series"]] == [
        ("none", [3, 6, 9, 12]),
        ("trains", [3, 6]),
        *((name, []) for name in ("broken", "other", "odd")),
    ]


def test_arms_are_compared_over_the_validations_that_both_have(tmp_path: Path) -> None:
    folder = make_fork(tmp_path / "fork", {"none": 0.0, "trains": 0.1})
    write_json(folder / "none" / "validations" / "step-000012.json", dict.fromkeys(map(str, range(40)), 1.0))
    (folder / "trains" / "validations" / "step-000012.json").unlink()
    assert float(section(folder)["rows"][1][2]) == pytest.approx(0.1, rel=0.03)


def test_one_prompt_has_no_interval(tmp_path: Path) -> None:
    folder = make_fork(tmp_path / "fork", {"none": 0.0, "one": 0.1}, prompts=1)
    assert section(folder)["series"][1]["lo"] == [None] * 4
    assert section(folder)["series"][1]["m"] != [None] * 4


def test_a_fork_without_a_run_or_of_another_format_is_refused(tmp_path: Path) -> None:
    write_json(tmp_path / "fork.json", {"format": 1, "arms": [{"text": "none", "folder": "none"}]})
    with pytest.raises(ConfigError, match="no arm of this fork has begun. Fix: repeat prorl report later"):
        read_curves([tmp_path])
    write_json(tmp_path / "fork.json", {"format": 2})
    with pytest.raises(ConfigError, match=r"fork.json: expected format 1; repeat the command of the fork"):
        read_curves([tmp_path])


def test_a_served_page_notices_a_validation_and_a_new_arm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from nemo_prorl.report import serve

    monkeypatch.setattr(serve, "_LEAST_S", 0.0)
    monkeypatch.setattr(serve, "_PAUSE", 0)
    folder = make_fork(tmp_path / "fork", {"none": 0.0, "reset": 0.1})
    source = PageSource([folder], [], 10)
    assert source.data()[0]["fork"]["series"][1]["x"] == [3, 6, 9, 12]
    (folder / "reset" / "validations" / "step-000012.json").unlink()
    assert source.data()[0]["fork"]["series"][1]["x"] == [3, 6, 9]
    record = record_of(folder)
    record["arms"].append({"text": "third", "folder": "third", "job": None})
    write_json(folder / "fork.json", record)
    assert len(source.data()[0]["fork"]["rows"]) == 3
    make_run(folder / "third", 2)
    assert source.data()[0]["fork"]["rows"][2][6] == "step 2 of 12"
