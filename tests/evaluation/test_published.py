"""`--compare paper`: published.json from stored samples whose numbers are known, and of a real evaluation."""

import json
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from nemo_prorl.errors import ConfigError
from nemo_prorl.evaluation import compare, published
from nemo_prorl.evaluation.catalogue import catalogue, choose, records_sha256
from nemo_prorl.evaluation.estimates import mean_of_means
from nemo_prorl.evaluation.formats import EvaluationSample, PublishedRow
from nemo_prorl.evaluation.results import categories
from nemo_prorl.evaluation.store import Store
from nemo_prorl.rewards.interface import Verdict
from tests.test_formats import against

SHA = "0123456789abcdef" * 4
BASE = "/models/DeepSeek-R1-Distill-Qwen-1.5B"

TRUTHS: dict[str, dict[str, Any]] = {
    "math": {"answer": "1"},
    "stem": {"answer": "1"},
    "code": {"tests": [{"input": "", "output": "1"}]},
    "instructions": {"instruction_id_list": ["punctuation:no_comma"], "kwargs": [{}]},
}

Scores = Sequence[Sequence[float | None]]  # of a prompt's samples; None: no verdict


def evaluation(
    folder: Path,
    scores: dict[str, Scores],
    model: str = BASE,
    kind: str = "hf",
    limit: int | None = None,
    parts: Sequence[str] = (),
    response: str = "\\boxed{1} <answer>1</answer> ```",
    finished: bool = True,
    failure: str | None = None,
    samples: int | None = None,
    **sampling: Any,
) -> Path:
    """An evaluation's folder with one entry of `scores` for each benchmark."""
    entries = {}
    for name, rows in scores.items():
        one = catalogue()[name].changed({"samples": samples or max(map(len, rows)), **sampling})
        names = parts or [name] * len(rows)
        entry = {"question": "?", "answer": "1", "metadata": {}}
        truths = [TRUTHS.get(one.task, {"dataset": part, "entry": entry}) for part in names]
        records = [
            {"id": f"p{i}", "task": one.task, "prompt": f"? {i}", "truth": truth, "source": name, "meta": {}}
            for i, truth in enumerate(truths)
        ]
        store = Store(folder, name)
        store.write_records(records)
        for i, row in enumerate(rows):
            for k, score in enumerate(row):
                line: EvaluationSample = {
                    "id": f"p{i}", "sample": k, "seed": k, "response": response, "finished": finished, "tokens": 10,
                }  # fmt: skip
                store.add(line)
                verdict: Verdict = {
                    "id": f"p{i}",
                    "score": score,
                    "correct": None if score is None else score == 1.0,
                    "parts": {},
                    "detail": "",
                    "failure": "infrastructure" if score is None else failure,
                }
                store.judge(k, verdict)
        store.close()
        hashes = {"file_sha256": one.sha256, "prompts_sha256": records_sha256(records), "prompts": len(records)}
        entries[name] = {**one.about(), **hashes, "sampling": asdict(one.sampling)}
    where = {"url": model} if kind == "endpoint" else {"folder": model}
    its = {"name": Path(model).name, "kind": kind, "sha256": SHA, **where, **({"step": 80} if kind == "run" else {})}
    common = {"seed": 1, "data": None, "limit": limit, "engine": None, "rewards": {}, "versions": {"python": "3.11"}}
    manifest = {"format": 1, "model": its, "benchmarks": entries, **common}
    assert against("evaluation-manifest", manifest) == []
    (folder / "manifest.json").write_text(json.dumps(manifest))
    return folder


def rate(share: float, prompts: int, samples: int = 16) -> Scores:
    """Prompts of which this share is right, spread over the samples of each."""
    right = np.arange(prompts * samples) < round(share * prompts * samples)
    return np.random.default_rng(0).permutation(right).reshape(prompts, samples).astype(float).tolist()


def compared(*folders: Path, given: Sequence[str | None] | None = None) -> Any:
    found = published.compare(compare.read(folders, least=1), given or [None] * len(folders))
    assert against("evaluation-published", found) == []
    assert published.table(found)
    return found


def row(folder: Path, benchmark: str = "aime24", given: str | None = None) -> PublishedRow:
    found: PublishedRow = compared(folder, given=[given])["models"][0]["benchmarks"][benchmark]
    return found


def test_the_published_tables_agree_with_themselves() -> None:
    known = published.scores()
    assert set(known["benchmarks"]) == {one.name for one in choose("paper")}
    assert len(known["benchmarks"]) == 18
    for column, model in known["models"].items():
        assert model["source"] in known["sources"]
        for domain in known["domains"].values():
            if column in domain["scores"]:
                mean = np.mean([known["benchmarks"][name]["scores"][column] for name in domain["benchmarks"]])
                assert mean == pytest.approx(domain["scores"][column], abs=0.0051)
    for entry in known["benchmarks"].values():
        assert set(entry["scores"]) <= set(known["models"])
    assert set(known["categories"]) <= set(categories().values())


def test_each_verdict(tmp_path: Path) -> None:
    folder = evaluation(
        tmp_path / "base",
        {
            "aime24": rate(0.2854, 30),  # as published
            "aime25": rate(0.0, 30),
            "amc": rate(1.0, 83),
            "math500": [[None] * 16] * 500,
            "gsm8k": rate(0.5, 20),
        },
    )
    rows = compared(folder)["models"][0]["benchmarks"]
    verdicts = {name: rows[name]["verdict"] for name in ("aime24", "aime25", "amc", "math500", "gsm8k", "minerva")}
    assert verdicts == {
        "aime24": "within",
        "aime25": "lower",
        "amc": "higher",
        "math500": "no number",
        "gsm8k": "not published",
        "minerva": "not evaluated",
    }
    assert published.verdict(rows["aime24"]) == "within the paper's"
    assert published.verdict(rows["aime25"]) == "lower by 22.7 ± 1.9: prompt? grader?"
    assert rows["math500"]["hints"] == ["8000 responses without a verdict: run it again"]
    text = published.table(compared(folder))
    assert "base compared with DeepSeek-R1-Distill-Qwen-1.5B: 2 of 3 rows are outside" in text
    assert "arXiv 2505.24864v1" in text


def lower(tmp_path: Path, share: float = 0.0, prompts: int = 30, **how: Any) -> list[str]:
    found = row(evaluation(tmp_path / "one", {"aime24": rate(share, prompts)}, **how))
    assert found["verdict"] == "lower"
    return found["hints"]


@pytest.mark.parametrize(
    ("how", "told"),
    [
        ({"finished": False}, ["100.0 % cut off"]),
        ({"finished": False, "context": 8192}, ["context 8192, not 32768", "100.0 % cut off"]),
        ({"max_response": 4096}, ["responses of 4096 tokens"]),
        ({"response": "the answer is 1"}, ["100.0 % without the asked form: prompt?"]),
        ({"failure": "timeout"}, ["100.0 % out of the grader's time"]),
        ({"temperature": 1.0, "top_p": 1.0}, ["temperature 1, not 0.6", "top_p 1, not 0.95"]),
        ({"prompts": 20, "limit": 20}, ["20 prompts, not 30"]),
        ({"prompts": 29}, ["29 prompts, not 30"]),
        ({"samples": 32}, ["16 of 32 samples: run it again", "prompt? grader?"]),
        (
            {"model": "http://host/v1/DeepSeek-R1-Distill-Qwen-1.5B", "kind": "endpoint"},
            ["the server's chat template?"],
        ),
        ({"model": "/runs/chain/run8", "kind": "run"}, ["training? prompt? grader?"]),
        ({}, ["prompt? grader?"]),
    ],
)
def test_hints_are_what_the_evaluation_knows(how: dict[str, Any], told: list[str], tmp_path: Path) -> None:
    assert lower(tmp_path, **how) == told


def test_a_loss_smaller_than_the_difference_is_no_hint(tmp_path: Path) -> None:
    half = evaluation(tmp_path / "half", {"aime24": rate(0.0, 30)})
    samples = half / "samples" / "aime24.jsonl"
    lines = samples.read_text().splitlines()
    cut = [line.replace('"finished": true', '"finished": false') for line in lines[: len(lines) // 5]]  # 20 % < 28.5 %
    samples.write_text("\n".join([*cut, *lines[len(cut) :]]) + "\n")
    assert row(half)["hints"] == ["prompt? grader?"]


def test_a_score_of_another_model_or_source_is_told(tmp_path: Path) -> None:
    folder = evaluation(tmp_path / "base", {"aime24": rate(0.4813, 30), "gpqa_diamond": rate(0.338, 198)})
    rows = compared(folder)["models"][0]["benchmarks"]
    assert rows["aime24"]["hints"] == ["as end or end-v2: is it this model?"]
    assert rows["gpqa_diamond"]["hints"] == ["another curated subset?", "33.8 by deepseek"]
    assert not rows["gpqa_diamond"]["same_prompts"]


def test_what_was_not_judged_is_told_beside_the_verdict(tmp_path: Path) -> None:
    scores = [list(one) for one in rate(0.2854, 30)]
    scores[3][2] = None
    found = row(evaluation(tmp_path / "base", {"aime24": scores}))
    assert (found["verdict"], found["hints"]) == ("within", ["1 responses without a verdict: run it again"])


def test_a_single_prompt_has_no_verdict(tmp_path: Path) -> None:
    found = row(evaluation(tmp_path / "base", {"aime24": rate(1.0, 1)}, limit=1))
    assert (found["verdict"], found["hints"]) == ("no number", ["a single prompt has no standard error"])


def test_a_few_wrong_answers_tell_nothing(tmp_path: Path) -> None:
    found = row(evaluation(tmp_path / "few", {"aime24": rate(0.0, 4)}, limit=4))
    assert (found["verdict"], found["same_prompts"]) == ("within", False)


def test_the_column(tmp_path: Path) -> None:
    def column(model: str, kind: str = "hf", given: str | None = None) -> str:
        folder = evaluation(tmp_path / "one", {"aime24": rate(0.3, 30)}, model=model, kind=kind)
        return str(compared(folder, given=[given])["models"][0]["column"])

    snapshot = "/hub/models--nvidia--Nemotron-Research-Reasoning-Qwen-1.5B{}/snapshots/0123"
    assert column("/hub/models--deepseek-ai--DeepSeek-R1-Distill-Qwen-1.5B/snapshots/0123") == "base"
    assert column(snapshot.format("")) == "end"
    assert column(snapshot.format("-v2")) == "end-v2"
    assert column("/runs/DeepSeek-R1-Distill-Qwen-1.5B/run8", "run") == "end"
    assert column("/runs/chain/run8", "run", given="base") == "base"
    with pytest.raises(
        ConfigError, match="expected a run directory, or the name of a published model.* Fix: --as base"
    ):
        column("/models/mine")
    with pytest.raises(ConfigError, match="--as=bse: expected one of base, end, end-v2, deepscaler, deepcoder"):
        column("/models/mine", given="bse")


def test_several_models_and_a_column_without_all_scores(tmp_path: Path) -> None:
    first = evaluation(tmp_path / "base", {"aime24": rate(0.2854, 30), "apps": rate(0.2, 40)})
    second = evaluation(
        tmp_path / "other", {"aime24": rate(0.4, 30), "apps": rate(0.2, 40)}, model="/m/DeepScaleR-1.5B"
    )
    found = compared(first, second)
    assert [one["column"] for one in found["models"]] == ["base", "deepscaler"]
    assert found["models"][1]["benchmarks"]["apps"]["verdict"] == "not published"
    assert list(found["models"][1]["domains"]) == ["math"]


def test_means_of_a_domain(tmp_path: Path) -> None:
    known = published.scores()
    six = known["domains"]["math"]["benchmarks"]
    scores = {name: rate(known["benchmarks"][name]["scores"]["base"] / 100, 83) for name in six}
    found = compared(evaluation(tmp_path / "base", scores))["models"][0]
    rows = [found["benchmarks"][name] for name in six]
    mean = found["domains"]["math"]
    assert mean["ours"] == mean_of_means([one["ours"] for one in rows])
    assert mean["se"] == pytest.approx(np.sqrt(sum(one["se"] ** 2 for one in rows)) / 6)
    assert mean["verdict"] == "within"
    assert found["domains"]["code"]["verdict"] == "not evaluated"
    del scores["amc"]
    assert compared(evaluation(tmp_path / "five", scores))["models"][0]["domains"]["math"]["verdict"] == "no number"


def test_categories_of_reasoning_gym(tmp_path: Path) -> None:
    tasks = ["complex_arithmetic", "polynomial_equations", "zebra_puzzles", "gcd"]
    parts = [task for task in tasks for _ in range(40)]
    share = {"complex_arithmetic": 0.5, "polynomial_equations": 0.3, "zebra_puzzles": 0.109, "gcd": 0.0536}
    scores = [list(one) for task in tasks for one in rate(share[task], 40)]
    found = compared(evaluation(tmp_path / "base", {"reasoning_gym": scores}, parts=parts))["models"][0]
    its = found["categories"]
    assert list(its) == list(published.scores()["categories"])
    verdicts = {name: one["verdict"] for name, one in its.items() if one["verdict"] != "not evaluated"}
    assert verdicts == {"algebra": "higher", "arithmetic": "within", "logic": "within"}
    assert its["algebra"]["ours"]["mean"] == pytest.approx(np.mean(np.asarray(scores[:80], float)))
    form = "100 % have <answer>; the paper's base mostly wrote \\boxed{} (its F.1)"
    assert its["algebra"]["hints"] == [form]
    assert found["benchmarks"]["reasoning_gym"]["hints"] == ["160 prompts, not 9600", "4 tasks, not 96", form]


@pytest.mark.parametrize("same", [True, False])
@pytest.mark.parametrize("samples", [1, 16])
def test_the_standard_error_covers_what_chance_does(same: bool, samples: int, tmp_path: Path) -> None:
    """Both sides drawn again and again from the same solver: never more than the errors say, and not far less."""
    rng = np.random.default_rng(1)
    known = rng.beta(0.5, 1.2, size=60)  # of each prompt: the chance of a right answer
    squares = []
    for _ in range(150):
        ours_P, theirs_P = (known, known) if same else rng.beta(0.5, 1.2, size=(2, 60))
        ours = (rng.random((60, samples)) < ours_P[:, None]).astype(float)
        theirs = float((rng.random((60, 16)) < theirs_P[:, None]).mean())
        measured = published.Measured(_scored(ours.tolist()), None, None, None, False, False)  # type: ignore[arg-type]
        se = published.standard_error(measured, "pass@1", theirs, same, None)
        assert se is not None
        squares.append(((ours.mean() - theirs) / se) ** 2)
    assert 0.2 < np.mean(squares) < 1.2


def _scored(values: list[list[float]]) -> Any:
    from nemo_prorl.evaluation.results import PromptSamples, Sample, Scored

    rows = [[Sample(one == 1.0, one, 1, True, None) for one in row] for row in values]
    return Scored([PromptSamples(str(i), "a", row) for i, row in enumerate(rows)])


def test_an_evaluation_like_the_papers_is_rarely_outside_anywhere(tmp_path: Path) -> None:
    known = published.scores()["benchmarks"]
    shares = {name: entry["scores"]["base"] / 100 for name, entry in known.items()}
    found = compared(evaluation(tmp_path / "base", {name: rate(share, 83) for name, share in shares.items()}))
    assert {row["verdict"] for row in found["models"][0]["benchmarks"].values()} == {"within"}
    assert found["models"][0]["threshold"] == pytest.approx(3.03, abs=0.01)  # 20 rows: 18 and two means
