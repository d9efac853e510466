"""The paper's benchmarks, all of them, through the command: stand-in problems, real rewards, `--compare paper`."""

import json
from pathlib import Path
from typing import Any

import pytest

from nemo_prorl.config import DataSource
from nemo_prorl.data.laptop.generators import generate
from nemo_prorl.evaluation.catalogue import catalogue, choose
from tests.evaluation.test_evaluate import (
    VLLM,
    Address,
    Wrong,
    address,
    ended,
    laptop_model,
    nothing_stays,
    prorl,
    wrong,
)
from tests.evaluation.test_published import TRUTHS
from tests.test_formats import against

__all__ = ["address", "laptop_model", "nothing_stays", "wrong"]  # fixtures

pytestmark = pytest.mark.starts

TASKS = ("gcd", "complex_arithmetic", "zebra_puzzles")


def stand_ins(folder: Path) -> Path:
    """A file of short problems for each of the paper's benchmarks that needs one: 30 for AIME, as many as it has."""
    folder.mkdir()
    for one in choose("paper"):
        if one.generate is not None:
            continue
        records: list[dict[str, Any]] = [
            {"id": f"{one.name}-{i}", "task": one.task, "prompt": f"{i} + 1 ?", "truth": TRUTHS.get(one.task, {})}
            for i in range(30 if one.name == "aime24" else 2)
        ]
        if one.task == "puzzles":
            sources = [DataSource(name=task, generator=f"reasoning_gym:{task}", size=2) for task in TASKS]
            records = [record for source in sources for record in generate(source)]
        lines = [json.dumps({"source": one.name, "meta": {}, **record}) for record in records]
        (folder / f"{one.prompts}.jsonl").write_text("\n".join(lines) + "\n")
    return folder


def published(folder: Path) -> Any:
    found = json.loads((folder / "published.json").read_text())
    assert against("evaluation-published", found) == []
    return found["models"]


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_all_of_the_papers_benchmarks_in_one_command(address: Address, tmp_path: Path) -> None:
    data, out = stand_ins(tmp_path / "data"), tmp_path / "out"
    options = ["--model", "tiny", "--benchmarks", "paper", "--data", str(data), "--samples", "2"]
    options += ["--context", "8192", "--max-response", "64", "--out", str(out)]
    code, text, err = ended(prorl(address.url, *options, "--compare", "paper", "--as", "base"))
    assert code == 0, err
    assert "lower by 28.5" in text
    (model,) = published(out)
    assert model["column"] == "base"
    assert {name: row["verdict"] for name, row in model["benchmarks"].items() if row["ours"] is None} == {}
    assert set(model["benchmarks"]) == {one.name for one in choose("paper")}
    assert {name for name, row in model["categories"].items() if row["ours"]} == {"algebra", "arithmetic", "logic"}
    assert "the server's chat template?" in model["benchmarks"]["aime24"]["hints"]
    results = json.loads((out / "results.json").read_text())
    assert against("evaluation-results", results) == []
    assert set(results["benchmarks"]["reasoning_gym"]["categories"]) == {"algebra", "arithmetic", "logic"}
    assert set(results["domains"]) == {"math", "code", "stem", "puzzles", "instructions"}
    asked = address.asked
    code, again, err = ended(prorl("--compare", "paper", "--as", "base", "--out", str(out)))
    assert code == 0, err
    assert text.endswith(again)
    assert address.asked == asked


@VLLM
@pytest.mark.vllm
@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_real_model_beside_the_paper(laptop_model: Path, tmp_path: Path) -> None:
    data, out = stand_ins(tmp_path / "data"), tmp_path / "out"
    options = ["--benchmarks", "aime24,reasoning_gym", "--data", str(data), "--samples", "2", "--max-response", "16"]
    code, _, err = ended(prorl(str(laptop_model), *options, "--context", "2048", "--out", str(out)))
    assert code == 0, err
    code, text, err = ended(prorl("--compare", "paper", str(out), "--as", "end", "--out", str(tmp_path / "table")))
    assert code == 0, err
    (model,) = published(tmp_path / "table")
    row = model["benchmarks"]["aime24"]
    assert (row["verdict"], row["same_prompts"], row["ours"]["mean"]) == ("lower", True, 0.0)
    assert "responses of 16 tokens" in row["hints"]
    assert any(hint.endswith("% without the asked form: prompt?") for hint in row["hints"])
    assert "context 2048, not 32768" in row["hints"]
    assert "6 prompts, not 9600" in model["benchmarks"]["reasoning_gym"]["hints"]
    assert "aime24" in text


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["--compare", "paper", "nowhere", "--out", "out"], "nowhere/manifest.json: cannot be read"),
        (["--compare", "paper", "cluster=laptop"], "--compare paper: expected folders of evaluations"),
        (["--compare", "paper"], "--compare paper: expected folders of evaluations"),
        (["--compare", "paper", "a", "b", "--as", "base", "--out", "out"], "--as=base: expected 2 names"),
        (["--compare", "a", "b", "--as", "base", "--out", "out"], "--as=base: expected --compare paper DIR"),
        (["http://h/v1", "--as", "base", "--out", "out"], "--as=base: expected --compare paper, too"),
        (["http://h/v1", "--compare", "a", "b", "--out", "out"], "http://h/v1: expected no MODEL with --compare a b"),
        (
            ["http://h/v1", "--model", "m", "--benchmarks", "acre", "--compare", "paper", "--out", "out"],
            "--compare paper: m: expected a run directory, or the name of a published model in the path",
        ),
    ],
)
def test_wrong_use_of_the_papers_scores(wrong: Wrong, words: list[str], told: str) -> None:
    code, err = wrong(*words)
    assert code == 2
    assert told in err


def test_the_paper_s_set() -> None:
    """The names that docs/howto/evaluation.md lists."""
    known = catalogue()
    assert len(choose("paper")) == 18
    assert {one.name for one in choose("paper") if one.out_of_distribution} == {one.name for one in choose("ood")}
    assert set(known) - {one.name for one in choose("paper,laptop")} == {"gsm8k"}
