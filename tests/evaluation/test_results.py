"""results.json and comparison.json from stored samples whose numbers are known."""

import json
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

from nemo_prorl.errors import ConfigError, DataError
from nemo_prorl.evaluation import compare
from nemo_prorl.evaluation.catalogue import catalogue, records_sha256
from nemo_prorl.evaluation.estimates import Interval
from nemo_prorl.evaluation.formats import EvaluationSample, EvaluationTime, ModelJson
from nemo_prorl.evaluation.results import results, scored, table
from nemo_prorl.evaluation.run import differences
from nemo_prorl.evaluation.store import Store, read_json
from nemo_prorl.rewards.interface import Verdict
from tests.test_formats import against

SHA = "0123456789abcdef" * 4
MODEL: ModelJson = {"name": "m", "kind": "hf", "sha256": SHA, "folder": "/m", "weights_sha256": SHA}

Scores = Sequence[Sequence[float | None]]  # of a prompt's samples; None: no verdict


def record(number: int, dataset: str = "gcd") -> dict[str, Any]:
    truth = {"dataset": dataset, "entry": {"question": "?", "answer": "1", "metadata": {}}}
    return {"id": f"p{number}", "task": "puzzles", "prompt": f"? {number}", "truth": truth, "source": "", "meta": {}}


def write(folder: Path, benchmark: str, scores: Scores, datasets: Sequence[str] = ()) -> Any:
    """An evaluation's files; its results.json."""
    one = catalogue()[benchmark].changed({"samples": max(map(len, scores))})
    records = [record(i, datasets[i] if datasets else "gcd") for i in range(len(scores))]
    store = Store(folder, benchmark)
    store.write_records(records)
    for i, row in enumerate(scores):
        for k, score in enumerate(row):
            line: EvaluationSample = {
                "id": f"p{i}",
                "sample": k,
                "seed": k,
                "response": str(score),
                "finished": k > 0,
                "tokens": 10 * (k + 1),
            }
            store.add(line)
            failure = "infrastructure" if score is None else None
            correct = None if score is None else score == 1.0
            verdict: Verdict = {
                "id": f"p{i}",
                "score": score,
                "correct": correct,
                "parts": {},
                "detail": "",
                "failure": failure,
            }
            store.judge(k, verdict)
    store.close()
    path = folder / "manifest.json"
    entries = json.loads(path.read_text())["benchmarks"] if path.exists() else {}
    entries[benchmark] = {
        **one.about(),
        "file_sha256": one.sha256,
        "prompts_sha256": records_sha256(records),
        "prompts": len(records),
        "sampling": asdict(one.sampling),
    }
    common = {"seed": 1, "data": None, "limit": None, "engine": None, "rewards": {}, "versions": {"python": "3.11"}}
    manifest = {"format": 1, "model": MODEL, "benchmarks": entries, **common}
    assert against("evaluation-manifest", manifest) == []
    path.write_text(json.dumps(manifest))
    found = {benchmark: scored(records, store.lines, store.verdicts, one.sampling.samples)}
    clock: EvaluationTime = {"seconds": 2.0, "generated_tokens": 40, "tokens_per_s": 20.0}
    result = results(read_json(path), [one], found, clock)
    assert against("evaluation-results", result) == []
    assert all(against("evaluation-sample", line) == [] for line in store.lines.values())
    return result


def test_the_numbers(tmp_path: Path) -> None:
    result = write(tmp_path, "laptop_gcd", [[1.0, 0.5, 0.0, 0.0], [1.0, 1.0, 0.0, 0.0]])
    entry = result["benchmarks"]["laptop_gcd"]
    assert entry["pass@1"]["mean"] == pytest.approx(0.375)
    assert entry["reward"]["mean"] == pytest.approx((0.375 + 0.5) / 2)
    assert entry["pass@k"]["2"]["mean"] == pytest.approx((1 / 2 + 5 / 6) / 2)
    assert set(entry["pass@k"]) == {"1", "2", "4"}
    assert entry["tokens"] == {"mean": 25.0, "se": 0.0}
    assert entry["truncated"] == 0.25
    assert result["complete"]
    assert result["domains"]["puzzles"]["headline"] == entry["reward"]
    assert result["out_of_distribution"] is None
    assert "laptop_gcd" in table(result)


def test_what_was_not_judged_is_no_zero(tmp_path: Path) -> None:
    result = write(tmp_path, "laptop_gcd", [[1.0, None], [1.0, 1.0], [None, None]])
    entry = result["benchmarks"]["laptop_gcd"]
    assert entry["pass@1"]["mean"] == 1.0
    assert entry["unjudged"] == 3
    assert not result["complete"]
    nothing = write(tmp_path / "none", "laptop_gcd", [[None, None]])
    assert nothing["benchmarks"]["laptop_gcd"]["pass@1"] is None
    assert nothing["domains"]["puzzles"]["pass@1"] is None


def test_parts_and_what_was_kept_out_of_training_stand_apart(tmp_path: Path) -> None:
    result = write(tmp_path, "acre", [[1.0, 1.0], [0.0, 0.0]], ["acre", "boxnet"])
    assert result["domains"] == {}
    assert result["out_of_distribution"]["benchmarks"] == ["acre"]
    parts = result["benchmarks"]["acre"]["parts"]
    assert [parts[name]["pass@1"]["mean"] for name in ("acre", "boxnet")] == [1.0, 0.0]
    assert parts["acre"]["pass@1"]["se"] is None


def test_numbers_are_told_apart_from_the_clock(tmp_path: Path) -> None:
    one = write(tmp_path / "a", "laptop_gcd", [[1.0, 0.0]])
    other = write(tmp_path / "b", "laptop_gcd", [[1.0, 1.0]])
    assert differences(one, {**one, "time": None, "model": None}) == []
    assert "benchmarks/laptop_gcd/pass@1/mean: 0.5 there, 1.0 here" in differences(one, other)


def test_new_solutions_are_told_from_old_ones_found_more_surely(tmp_path: Path) -> None:
    base = [[1.0] + [0.0] * 7] * 20 + [[0.0] * 8] * 20
    sharper = [[1.0] * 6 + [0.0] * 2] * 20 + [[0.0] * 8] * 20
    wider = [[1.0] + [0.0] * 7] * 40
    for name, scores in (("base", base), ("sharper", sharper), ("wider", wider)):
        write(tmp_path / name, "laptop_gcd", scores)
    models = compare.read([tmp_path / name for name in ("base", "sharper", "wider")])
    found = compare.compare(models)
    assert against("evaluation-comparison", found) == []
    sharp, wide = found["benchmarks"]["laptop_gcd"]["differences"]
    assert (sharp["model"], sharp["reading"]) == ("sharper", "sharpened")
    assert sharp["pass@1"]["difference"] == pytest.approx(0.3125)
    assert sharp["pass@1"]["low"] > 0.15
    assert sharp["pass@k"]["8"] == {"difference": 0.0, "low": 0.0, "high": 0.0}
    assert sharp["solved"] == {"both": 20, "gained": 0, "lost": 0, "neither": 20}
    assert sharp["base_k"] == 8
    assert wide["reading"] == "new solutions"
    assert wide["solved"] == {"both": 20, "gained": 20, "lost": 0, "neither": 0}
    assert found["domains"]["puzzles"]["differences"][0]["pass@1"]["difference"] == pytest.approx(0.3125)
    assert compare.compare(models) == found
    text = compare.table(found)
    assert (
        "  sharper is right more often than base at the first try; in 8 tries, no difference is seen: sharpened.\n"
        in text
    )
    assert "  wider solves more prompts in 8 tries than base: new solutions.\n" in text
    assert "by sharper alone 0, by base alone 0, by both 20. base needs 8 tries to reach sharper's pass@1.\n" in text


def test_two_models_without_a_right_answer(tmp_path: Path) -> None:
    for name in ("base", "final"):
        write(tmp_path / name, "laptop_gcd", [[0.0, 0.0]] * 4)
    text = compare.table(compare.compare(compare.read([tmp_path / "base", tmp_path / "final"])))
    assert "  final is not measurably different from base.\n  No prompt was solved by either of them.\n" in text
    assert "to reach" not in text
    assert "puzzles:" not in text  # the mean of one benchmark is that benchmark


def test_pass_at_k_of_a_graded_reward_is_not_shown(tmp_path: Path) -> None:
    """No response is right, so pass@k is 0 for each k; a response without any reward still shows its zeros."""
    graded = write(tmp_path / "base", "laptop_gcd", [[0.25, 0.5]] * 4)
    write(tmp_path / "final", "laptop_gcd", [[0.5, 0.75]] * 4)
    head, row = table(graded).splitlines()
    assert "pass@" not in head
    assert row.split()[1:6] == ["4", "2", "37.5", "±", "0.0"]
    text = compare.table(compare.compare(compare.read([tmp_path / "base", tmp_path / "final"])))
    assert text.splitlines()[1].split() == ["reward"]
    assert "  final - base  +25.0 [+25.0, +25.0]\n" in text
    assert "pass@1" in table(write(tmp_path / "wrong", "laptop_gcd", [[0.0, 0.0]] * 4))
    right = write(tmp_path / "right", "laptop_gcd", [[0.5, 1.0]] * 4)
    assert "pass@1" in table(right)
    right["benchmarks"]["graded"] = graded["benchmarks"]["laptop_gcd"]
    assert table(right).splitlines()[2].split()[3] == "-"  # beside a benchmark that has right responses


def test_the_share_without_the_answer_s_form(tmp_path: Path) -> None:
    """The responses are "1.0" and "0.0", without <answer>."""
    result = write(tmp_path, "laptop_gcd", [[1.0, 0.0]])
    assert result["benchmarks"]["laptop_gcd"]["without_form"] == 1.0
    head, row = table(result).splitlines()  # no row for the mean of a single benchmark
    assert "no form" in head
    assert row.split()[-2:] == ["100.0", "0"]


@pytest.mark.parametrize(
    ("one", "most", "told"),
    [
        ((-0.2, 0.1), (-0.1, 0.2), "closer"),
        ((0.1, 0.3), (0.1, 0.2), "new solutions"),
        ((-0.1, 0.1), (0.1, 0.2), "new solutions"),
        ((0.1, 0.3), (-0.1, 0.1), "sharpened"),
        ((0.1, 0.3), (-0.2, -0.1), "narrowed"),
        ((-0.1, 0.1), (-0.2, -0.1), "worse"),
        ((-0.2, -0.1), (-0.1, 0.1), "worse"),
        ((-0.1, 0.1), (-0.1, 0.1), "no difference"),
    ],
)
def test_readings(one: tuple[float, float], most: tuple[float, float], told: str) -> None:
    curve: dict[str, Interval] = {
        k: {"difference": sum(v) / 2, "low": v[0], "high": v[1]} for k, v in (("1", one), ("16", most))
    }
    reward: Interval = {"difference": 0.1, "low": 0.05 if told == "closer" else -0.05, "high": 0.2}
    assert compare.reading(curve, reward) == told


def test_only_the_same_prompts_are_compared(tmp_path: Path) -> None:
    write(tmp_path / "a", "laptop_gcd", [[1.0], [0.0]])
    write(tmp_path / "b", "laptop_gcd", [[1.0], [0.0], [0.0]])
    with pytest.raises(DataError, match="its prompts of laptop_gcd differ from those of"):
        compare.compare(compare.read([tmp_path / "a", tmp_path / "b"]))
    write(tmp_path / "c", "acre", [[1.0], [0.0]])
    with pytest.raises(ConfigError, match="no benchmark in common"):
        compare.compare(compare.read([tmp_path / "a", tmp_path / "c"]))
    with pytest.raises(ConfigError, match="two folders"):
        compare.read([tmp_path / "a"])
    with pytest.raises(ConfigError, match="manifest.json: cannot be read"):
        compare.read([tmp_path / "a", tmp_path / "nowhere"])


def test_prompts_that_one_model_has_no_verdict_on_are_left_out_of_the_pairs(tmp_path: Path) -> None:
    write(tmp_path / "a", "laptop_gcd", [[1.0, 1.0], [0.0, 0.0], [1.0, 1.0]])
    write(tmp_path / "b", "laptop_gcd", [[None, None], [1.0, 1.0], [1.0, 1.0]])
    found = compare.compare(compare.read([tmp_path / "a", tmp_path / "b"]))
    [one] = found["benchmarks"]["laptop_gcd"]["differences"]
    assert one["prompts"] == 2
    assert one["pass@1"]["difference"] == 0.5


def test_only_what_the_same_function_judged_is_compared(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    for name in ("a", "b"):
        write(tmp_path / name, "laptop_gcd", [[1.0], [0.0]])
        (tmp_path / name / "results.json").write_text('{"complete": true}')
    manifest = json.loads((tmp_path / "b" / "manifest.json").read_text())
    manifest["benchmarks"]["laptop_gcd"]["scorer"] = "0" * 64 + ":score"
    assert against("evaluation-manifest", manifest) == []
    compare.compare(compare.read([tmp_path / "a", tmp_path / "b"]))
    assert not caplog.records
    (tmp_path / "b" / "manifest.json").write_text(json.dumps(manifest))
    with pytest.raises(
        DataError, match=r"b: its responses to laptop_gcd were judged by another reward function .*:score, None"
    ):
        compare.compare(compare.read([tmp_path / "a", tmp_path / "b"]))
    for scorer, fits in (("plugin math 1", True), ("plugin math 2", False)):  # older versions recorded no plugin
        manifest["benchmarks"]["laptop_gcd"]["scorer"] = scorer
        (tmp_path / ("a" if fits else "b") / "manifest.json").write_text(json.dumps(manifest))
        if fits:
            (tmp_path / "b" / "manifest.json").write_text(json.dumps(manifest).replace(f'"{scorer}"', "null"))
            compare.compare(compare.read([tmp_path / "a", tmp_path / "b"]))
    with pytest.raises(DataError, match=r"scorer in manifest.json: plugin math 2, plugin math 1.*--judge-again"):
        compare.compare(compare.read([tmp_path / "a", tmp_path / "b"]))
    (tmp_path / "a" / "results.json").write_text('{"complete": false}')
    compare.read([tmp_path / "a", tmp_path / "b"])
    assert "a: not all responses are judged" in caplog.text


def test_other_settings_of_the_same_benchmark_are_told(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    for name in ("a", "b"):
        write(tmp_path / name, "laptop_gcd", [[1.0], [0.0]])
        (tmp_path / name / "results.json").write_text('{"complete": true}')
    file = tmp_path / "b" / "manifest.json"
    manifest = json.loads(file.read_text())
    manifest["benchmarks"]["laptop_gcd"]["sampling"] |= {"samples": 4, "max_response": 7}
    file.write_text(json.dumps(manifest))
    compare.compare(compare.read([tmp_path / "a", tmp_path / "b"]))
    [told] = caplog.messages
    assert told.startswith("laptop_gcd: max_response differs (")
    assert "7 in b), so the differences" in told
