"""Categories of reasoning-gym and gains by task in comparison.json, and how long an evaluation takes."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from nemo_prorl.evaluation import compare
from nemo_prorl.evaluation.duration import estimate
from nemo_prorl.evaluation.gains import correlation, gain_text, gains_by_start
from nemo_prorl.evaluation.results import categories
from nemo_prorl.evaluation.sampling import BenchmarkWork
from nemo_prorl.evaluation.store import Store
from tests.evaluation.test_published import SHA, evaluation, rate
from tests.test_formats import against

PER_TASK = 4  # prompts


def tasks(count: int) -> list[str]:
    wanted = [name for name, category in categories().items() if category in ("algebra", "games", "logic")]
    return sorted(wanted)[:count]


def both(folder: Path, names: list[str], before: Any, after: Any, samples: int) -> Any:
    """Compare two models whose share of right answers by task number is `before` and `after`."""
    parts = [name for name in names for _ in range(PER_TASK)]
    for model, share in (("base", before), ("end", after)):
        scores = [list(row) for i in range(len(names)) for row in rate(share(i), PER_TASK, samples)]
        evaluation(folder / model, {"reasoning_gym": scores}, parts=parts)
    found = compare.compare(compare.read([folder / "base", folder / "end"]))
    assert against("evaluation-comparison", found) == []
    return found


def test_a_weak_start_gains_most(tmp_path: Path) -> None:
    names = tasks(12)
    found = both(tmp_path, names, lambda i: i / 12, lambda i: min(1.0, i / 24 + 0.5), 8)
    (gain,) = found["gains"]
    assert (gain["model"], gain["k"]) == ("end", 8)
    assert gain["tasks"][0]["task"] == f"reasoning_gym/{names[0]}"
    starts = [row["base"] for row in gain["tasks"]]
    assert starts == sorted(starts)
    parts = found["benchmarks"]["reasoning_gym"]["parts"]
    difference = parts[names[0]]["differences"][0]["pass@k"]["8"]["difference"]
    assert gain["tasks"][0]["gain"] == difference == 1.0
    its = gain["correlation"]
    expected = np.corrcoef(starts, [row["gain"] for row in gain["tasks"]])[0, 1]
    assert its["r"] == pytest.approx(expected)
    assert -1.0 <= its["low"] <= its["r"] <= its["high"] < 0.0
    text = compare.table(found)
    assert "end - base in pass@8, against base's pass@8, over 12 tasks: correlation -" in text
    assert "The paper's figure has pass@128: --samples 128." in text
    assert f"most: reasoning_gym/{names[0]} +100.0 (from 0.0)" in text


def test_128_samples_give_the_papers_k(tmp_path: Path) -> None:
    found = both(tmp_path, tasks(2), lambda i: 0.01, lambda i: 0.5, 256)
    (gain,) = found["gains"]
    assert gain["k"] == 128  # not 256
    assert gain["correlation"] is None  # of two tasks
    assert "no correlation, which needs 8 tasks that differ" in compare.table(found)
    assert "--samples 128" not in gain_text(gain, "base")


def test_a_single_sample_shows_no_gain_of_pass_at_k(tmp_path: Path) -> None:
    assert both(tmp_path, tasks(9), lambda i: 0.2, lambda i: 0.5, 1)["gains"] == []


def test_benchmarks_count_as_tasks_and_a_missing_pair_does_not(tmp_path: Path) -> None:
    for model, share in (("base", 0.2), ("end", 0.6)):
        none = [[None] * 4] * 3 if model == "end" else rate(0.5, 3, 4)
        evaluation(tmp_path / model, {"aime24": rate(share, 5, 4), "amc": none})
    found = compare.compare(compare.read([tmp_path / "base", tmp_path / "end"]))
    (gain,) = found["gains"]
    assert [row["task"] for row in gain["tasks"]] == ["aime24"]
    assert gains_by_start(found["benchmarks"], [], "base", 100, 0.95) == []


def test_the_interval_is_that_of_a_known_correlation() -> None:
    """Of pairs drawn with r = -0.6 the interval has the truth in 95 of 100 draws, within chance."""
    rng, inside = np.random.default_rng(3), 0
    for _ in range(100):
        base, noise = rng.standard_normal((2, 40))
        pairs = zip(base.tolist(), (-0.6 * base + 0.8 * noise).tolist(), strict=True)
        found = correlation([{"task": "", "base": x, "gain": y} for x, y in pairs], 400, 0.95)
        assert found is not None
        inside += found["low"] <= -0.6 <= found["high"]
    assert 84 <= inside <= 100
    flat = [{"task": "", "base": 0.5, "gain": y} for y in range(10)]
    assert correlation(flat, 100, 0.95) is None  # type: ignore[arg-type]


def test_categories_stand_in_results_and_comparison(tmp_path: Path) -> None:
    names = ["gcd", "chain_sum", "complex_arithmetic", "mini_sudoku"]
    found = both(tmp_path, names, lambda i: 0.0, lambda i: [0.5, 1.0, 0.25, 1.0][i], 4)
    its = found["benchmarks"]["reasoning_gym"]["categories"]
    assert set(its) == {"arithmetic", "algebra", "games"}
    assert its["arithmetic"]["models"]["end"]["pass@1"]["mean"] == 0.75
    assert its["arithmetic"]["models"]["end"]["prompts"] == 2 * PER_TASK
    assert its["games"]["differences"][0]["pass@1"]["difference"] == 1.0
    assert "    arithmetic: end" in compare.table(found)


def works(folder: Path, stored: int, tokens: int | None) -> list[BenchmarkWork]:
    from nemo_prorl.evaluation.catalogue import catalogue

    store = Store(folder, "aime24")
    for k in range(stored):
        store.add({"id": "p0", "sample": k, "seed": k, "response": "", "finished": True, "tokens": tokens})
    return [BenchmarkWork(catalogue()["aime24"], store, [{"id": f"p{i}"} for i in range(30)])]


def test_how_long_it_takes(tmp_path: Path) -> None:
    guess = estimate(tmp_path, works(tmp_path, 0, None), 8, on_gpu=True)
    hours = 480 * 8000 / 80_000 / 3600
    assert guess is not None
    assert guess.startswith("480 responses of 8,000 tokens each (a guess for 480 of them) at 80,000 tokens/s (a guess")
    assert guess.endswith(f"about {hours:.1f} h with 8 GPUs, {8 * hours:.1f} GPU hours")
    assert estimate(tmp_path, works(tmp_path, 0, None), 2, on_gpu=False) is None  # nothing tells a CPU's speed
    time = {"seconds": 10.0, "generated_tokens": 4000, "tokens_per_s": 400.0}
    (tmp_path / "results.json").write_text(json.dumps({"format": 1, "sha": SHA, "time": time}))
    measured = estimate(tmp_path, works(tmp_path, 16, 12_000), 2, on_gpu=False)
    assert measured == (
        "464 responses of 12,000 tokens each (as the stored ones) at 400 tokens/s (as before): about 3.9 h"
    )
    assert estimate(tmp_path, works(tmp_path, 480, 1), 2, on_gpu=True) is None  # nothing is missing
