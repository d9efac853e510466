"""Forecasts: intervals that hold what they promise, refusals, and the words."""

import importlib
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml

from nemo_prorl import settings
from nemo_prorl.cli import main
from nemo_prorl.report.forecast import advice, backtests, forecast, segments, text_of
from nemo_prorl.report.read import Curve, read_curves
from nemo_prorl.report.scaling import at, fit
from tests.lines import write_lines

PROMPTS = 512
ROOT = Path(__file__).parents[2]


SHARES = {  # of the gain, after a compute in midpoints
    "ScaleRL's": lambda c: c**1.5 / (1.0 + c**1.5),
    "shallow": lambda c: c**0.6 / (1.0 + c**0.6),
    "exponential": lambda c: 1.0 - 0.5**c,
    "logistic": lambda c: (1.0 / (1.0 + np.exp(4.0 * (1.0 - c))) - 0.018) / 0.982,
    "power law": lambda c: 1.0 - 1.0 / np.sqrt(1.0 + 3.0 * c),
}


def noisy_run(random: np.random.Generator, cut: tuple[float, float], family: str = "ScaleRL's") -> tuple[float, Any]:
    """Asymptote, and the scores of a run with the same prompts that ends at a random multiple of its midpoint."""
    asymptote = random.uniform(0.3, 0.9)
    start, middle = random.uniform(0.02, 0.5) * asymptote, 10 ** random.uniform(-1.0, 1.0)
    compute = np.linspace(0.0, random.uniform(*cut), int(random.integers(25, 80)))
    true = np.clip(start + (asymptote - start) * SHARES[family](compute), 0.0, 1.0)
    scores = true + 0.5 * (random.binomial(PROMPTS, true) / PROMPTS - true)
    return asymptote, (middle * compute, scores, np.sqrt(np.maximum(scores * (1 - scores), 1 / PROMPTS) / PROMPTS))


class TestFit:
    @pytest.mark.parametrize("family", SHARES)
    def test_intervals_hold_the_asymptotes_of_noisy_runs(self, family: str) -> None:
        random, held, refused = np.random.default_rng(5), 0, 0
        for _ in range(40):
            asymptote, scores = noisy_run(random, (2.0, 6.0), family)
            curves = fit(*scores)
            refused += curves.refusal is not None
            held += curves.refusal is None and curves.asymptote[1] <= asymptote <= curves.asymptote[2]
        assert held >= 0.8 * (40 - refused)
        assert refused <= 14 or family != "ScaleRL's"

    def test_runs_cut_before_half_of_their_midpoint_are_refused(self) -> None:
        random = np.random.default_rng(6)
        refusals = [fit(*noisy_run(random, (0.05, 0.5))[1]).refusal for _ in range(100)]
        assert sum(text is not None for text in refusals) >= 98
        assert any("half of the gain may still lie ahead" in text for text in refusals if text)

    def test_without_noise_it_finds_the_curve(self) -> None:
        compute = np.linspace(0.0, 5.0, 30)
        scores = np.array([float(at(np.array([[0.7, 0.8, 1.5, 0.1]]), c)[0]) for c in compute])
        curves = fit(compute, scores, np.full(30, 1e-3))
        assert curves.asymptote[0] == pytest.approx(0.7, abs=0.01)
        assert curves.best[1] == pytest.approx(0.8, abs=0.08)
        assert curves.score_at(5.0)[0] == pytest.approx(scores[-1], abs=0.003)
        median, low, high = curves.gain(5.0)
        assert low <= median <= high
        assert median == pytest.approx(float(at(np.array([[0.7, 0.8, 1.5, 0.1]]), 10.0)[0]) - scores[-1], abs=0.005)

    def test_a_flat_run_has_no_forecast(self) -> None:
        random = np.random.default_rng(7)
        scores = random.binomial(PROMPTS, 0.3, 40) / PROMPTS
        refusal = fit(np.linspace(0.0, 1.0, 40), scores, np.full(40, 0.02)).refusal
        assert refusal is not None
        assert "noise may explain" in refusal

    def test_no_asymptote_is_below_0(self) -> None:
        scores = np.array([0.152, 0.171, 0.181, 0.153, 0.166, 0.18, 0.169, 0.161])  # rise by no more than their noise
        assert fit(np.arange(8.0), scores, np.full(8, 0.016)).asymptote[1] >= 0.0

    def test_no_asymptote_is_above_1(self) -> None:
        compute = np.linspace(0.0, 4.0, 30)
        curves = fit(compute, np.minimum(0.99, 0.3 + 0.25 * compute), np.full(30, 0.02))
        assert all(drawn[:, 0].max() <= 1.0 for drawn in curves.draws.values())


def run_folder(
    folder: Path, scores: dict[int, float], resets: tuple[int, ...] = (), seconds: float = 36.0, devices: int = 100
) -> Path:
    """A run whose steps take so long on so many GPUs: 1 GPU hour a step by default."""
    folder.mkdir()
    config = {
        "stage": "none",
        "trainer": {"num_nodes": 1, "devices": devices, "accelerator": "gpu"},
        "rollout": {"own_devices": False},
    }
    (folder / "config.yaml").write_text(yaml.safe_dump(config))
    steps = range(1, max(scores) + 1)
    lines = [{"step": s, "time/step": seconds + 5, "time/validate": 5.0, "keep_rate/all": s / 1000} for s in steps]
    write_lines(folder / "metrics.jsonl", lines)
    events: list[dict[str, Any]] = [
        {"event": "validation", "step": s, "all": {"mean": v, "se": 0.005, "prompts": PROMPTS}}
        for s, v in scores.items()
    ]
    events += [{"event": "reset_commit", "step": step} for step in resets]
    events.sort(key=lambda event: event["step"])
    write_lines(folder / "journal.jsonl", events)
    return folder


def curve_of(folder: Path) -> Curve:
    return read_curves([folder])[0]


def rise(step: float, start: float, end: float, middle: float) -> float:
    return float(at(np.array([[end, middle, 1.5, start]]), step)[0])


@pytest.fixture
def saturated(tmp_path: Path) -> Path:
    return run_folder(tmp_path / "saturated", {s: rise(s, 0.1, 0.5, 30) for s in range(0, 601, 20)})


class TestRuns:
    def test_a_hard_reset_begins_a_segment(self, tmp_path: Path) -> None:
        run = run_folder(tmp_path / "run", {s: 0.1 + s / 1000 for s in range(0, 101, 10)}, resets=(40,))
        first, second = segments(curve_of(run))
        assert (first.begin, first.steps, first.hours[-1]) == (0, (0, 10, 20, 30, 40), pytest.approx(40.0))
        assert (second.begin, second.steps[0], second.hours[0]) == (40, 40, 0.0)
        assert second.hours[-1] == pytest.approx(60.0)  # validations take no hours
        assert (first.keep_rate, second.keep_rate) == (pytest.approx(0.0355), pytest.approx(0.0955))  # of ten steps

    def test_stages_of_a_chain_are_segments(self, tmp_path: Path) -> None:
        chain = tmp_path / "chain"
        chain.mkdir()
        for name in ("run1", "run2"):
            run_folder(chain / name, dict.fromkeys(range(0, 31, 10), 0.2))
        assert [(s.begin, s.steps[-1]) for s in segments(curve_of(chain))] == [(0, 30), (30, 60)]

    def test_a_saturated_run_is_told_to_reset(self, saturated: Path) -> None:
        found = forecast(curve_of(saturated))
        assert found["refused"] is None
        assert found["unit"] == "GPU hours"
        assert found["asymptote"][0] == pytest.approx(0.5, abs=0.01)
        assert found["midpoint"] == pytest.approx(30, rel=0.1)
        assert found["ahead"] == 100.0
        assert found["advice"].startswith("reset: this segment is near its asymptote, and no hard reset has been tried")
        config = (saturated / "config.yaml").read_text()
        (saturated / "config.yaml").write_text(config.replace("accelerator: gpu", "accelerator: cpu"))
        on_cpus = forecast(curve_of(saturated))
        assert (on_cpus["unit"], on_cpus["ahead"]) == ("hours", on_cpus["spent"])

    def test_few_validations_are_refused(self, tmp_path: Path) -> None:
        found = forecast(curve_of(run_folder(tmp_path / "run", {s: 0.1 + s / 1000 for s in range(0, 61, 10)})))
        assert found["refused"] == "7 validations since step 0; 8 are needed"

    @pytest.mark.parametrize(
        ("keys", "on", "said"),
        [
            ({"validate_every": 20, "max_steps": 120}, "cpu", "prorl train run_dir={run} trainer.grpo.max_steps=140"),
            ({"validate_every": 50, "max_steps": 120}, "gpu", "continue with trainer.grpo.max_steps=150"),
            ({"validate_every": 20, "max_steps": 400}, "cpu", "wait for step 140"),
        ],
    )
    def test_few_validations_are_refused_with_the_command_that_adds_enough(
        self, tmp_path: Path, keys: dict[str, int], on: str, said: str
    ) -> None:
        """The first run of the README has 7: before step 1, and every 20 steps up to step 120."""
        run = run_folder(tmp_path / "a run", {s: 0.1 + s / 1000 for s in range(0, 121, 20)})
        config = yaml.safe_load((run / "config.yaml").read_text())
        config["trainer"] |= {"grpo": keys, "accelerator": on}
        (run / "config.yaml").write_text(yaml.safe_dump(config))
        refused = forecast(curve_of(run))["refused"]
        assert refused == f"7 validations since step 0; 8 are needed. Fix: {said}".replace("{run}", f"'{run}'")

    def test_a_run_without_validations_is_refused_with_the_reason(self, tmp_path: Path) -> None:
        run = run_folder(tmp_path / "run", {9: 0.1})
        config = yaml.safe_load((run / "config.yaml").read_text()) | {"data": {"validation": []}}
        (run / "config.yaml").write_text(yaml.safe_dump(config))
        assert "data.validation=[]" in forecast(curve_of(run))["refused"]

    def test_the_readme_s_run_reaches_a_forecast_by_the_command_of_its_refusal(self, tmp_path: Path) -> None:
        """With the laptop's own keys, which the refusal reads."""
        cfg = settings.load([f"run_dir={tmp_path / 'run'}"])
        grpo = cfg.trainer.grpo
        due = [s for s in range(grpo.max_steps + 1) if s % grpo.validate_every == 0]
        run = run_folder(tmp_path / "run", {s: 0.1 + s / 1000 for s in due}, devices=1)
        (run / "config.yaml").write_text(settings.resolved_yaml(cfg))
        command = forecast(curve_of(run))["refused"].partition(". Fix: prorl train ")[2].split()
        longer = settings.load_run(command).trainer.grpo.max_steps
        due = [s for s in range(longer + 1) if s % grpo.validate_every == 0]
        assert forecast(curve_of(run_folder(tmp_path / "longer", {s: 0.1 + s / 1000 for s in due}))).get("now")

    def test_scores_that_do_not_bend_have_a_gain_but_no_asymptote(self, tmp_path: Path) -> None:
        curve = curve_of(run_folder(tmp_path / "run", {s: 0.1 + s / 1000 for s in range(0, 301, 10)}))
        found = forecast(curve)
        assert found["refused"].startswith("the scores do not bend yet")
        assert not {"asymptote", "advice"} & found.keys()
        assert 0.03 < found["gain"][1] < found["gain"][2] < 0.1  # over the next 100 hours
        assert all(test["interval"] for test in found["backtests"])
        lines = text_of(found)
        assert "no asymptote: the scores do not bend yet" in lines[0]
        assert "the next 100 GPU hours bring +0." in lines[1]

    def test_a_run_that_forecasts_its_own_end(self, saturated: Path) -> None:
        tests = backtests(segments(curve_of(saturated))[0])
        assert [test["share"] for test in tests] == [0.4, 0.6, 0.8]
        assert all(test["hit"] for test in tests)


@pytest.mark.parametrize(
    ("gain", "before", "keep_rate", "word"),
    [
        (0.03, None, 0.5, "continue"),
        (0.001, None, 0.5, "reset"),
        (0.001, 0.57, 0.5, "reset"),
        (0.001, 0.59, 0.5, "broaden"),
        (0.001, 0.59, 0.1, "stop"),
    ],
)
def test_advice(gain: float, before: float | None, keep_rate: float, word: str) -> None:
    said = advice((gain, 0.0, 2 * gain), 0.01, 0.58, before, keep_rate, 1)
    assert said.split(":")[0].split(",")[0].split()[0] == word


def test_a_reset_after_a_segment_without_forecast_is_a_reset() -> None:
    assert "no hard reset has been tried" in advice((0.0, 0.0, 0.0), 0.01, 0.48, None, 0.5, 0)
    assert "is not known" in advice((0.0, 0.0, 0.0), 0.01, 0.48, None, 0.5, 1)


def test_what_a_reset_brought_is_told_from_the_segment_before_it_only(tmp_path: Path) -> None:
    """Level at 0.5, then too short, then level at 0.6: the first segment says nothing about the second reset."""
    scores = {s: rise(s, 0.1, 0.5, 20) for s in range(0, 401, 10)}
    scores |= {s: rise(s - 440, 0.3, 0.6, 20) for s in range(450, 841, 10)}
    apart = forecast(curve_of(run_folder(tmp_path / "apart", scores, resets=(400, 440))))
    assert [segment["begin"] for segment in apart["segments"]] == [0, 440]
    assert "the gain from the last hard reset is not known" in apart["advice"]
    next_to = forecast(curve_of(run_folder(tmp_path / "next", scores, resets=(440,))))
    assert "the last hard reset raised it" in next_to["advice"]


def test_a_reset_that_may_have_gained_nothing_asks_for_more_samples_while_the_last_groups_have_a_signal(
    tmp_path: Path,
) -> None:
    """The last asymptote is higher, but its interval holds that of the first segment, whose groups had no signal."""
    scores = {s: rise(s, 0.1, 0.5, 20) for s in range(0, 191, 10)}
    scores |= {s: rise(s - 190, 0.3, 0.51, 20) for s in range(200, 691, 10)}
    found = forecast(curve_of(run_folder(tmp_path / "run", scores, resets=(190,))))
    first, last = (segment["asymptote"] for segment in found["segments"])
    assert last[1] < first[0] < last[0]
    assert found["advice"].startswith("broaden the group: the last hard reset gained nothing")


def test_a_reset_after_a_short_segment_counts_as_one(tmp_path: Path) -> None:
    scores = {0: 0.1, 10: 0.3} | {s: rise(s - 20, 0.3, 0.6, 20) for s in range(30, 421, 10)}
    found = forecast(curve_of(run_folder(tmp_path / "run", scores, resets=(20,))))
    assert [segment["begin"] for segment in found["segments"]] == [20]
    assert "the gain from the last hard reset is not known" in found["advice"]


def test_after_a_reset_no_forecast_comes_from_the_segment_before(tmp_path: Path) -> None:
    scores = {s: rise(s, 0.1, 0.5, 20) for s in range(0, 401, 10)}
    found = forecast(curve_of(run_folder(tmp_path / "run", scores | {405: 0.4}, resets=(401,))))
    assert found["refused"] == "1 validation since step 401; 8 are needed"


@pytest.mark.parametrize("devices", ["auto", [1, 2], None, 1e300, -3])
def test_damaged_files_end_no_report(saturated: Path, devices: Any) -> None:
    config = yaml.safe_load((saturated / "config.yaml").read_text())
    config["trainer"]["devices"] = devices
    (saturated / "config.yaml").write_text(yaml.safe_dump(config))
    lines = (saturated / "metrics.jsonl").read_text().splitlines()
    lines[299] = "{damaged"  # step 300, after which a hard reset was made
    (saturated / "metrics.jsonl").write_text("\n".join(lines) + "\n")
    with (saturated / "journal.jsonl").open("a") as file:
        file.write(json.dumps({"event": "reset_commit", "step": 300}) + "\n")
        file.write(json.dumps({"event": "validation", "step": 590, "all": {"mean": 1e300, "se": 0.1}}) + "\n")
    curve = curve_of(saturated)
    first, second = segments(curve)
    assert all(0.0 <= score <= 1.0 for score in (*first.scores, *second.scores))
    assert second.hours[0] == 0.0
    assert second.hours[-1] == pytest.approx(300 / 299 * first.hours[-1])  # of 300 steps, and of 299
    assert forecast(curve)["name"] == "saturated"


class TestCommand:
    def test_text(self, saturated: Path, capsys: pytest.CaptureFixture[str]) -> None:
        assert main(["forecast", str(saturated)]) == 0
        lines = capsys.readouterr().out.splitlines()
        assert lines[0].startswith("saturated, from step 0: 0.49")
        assert "GPU hours; it approaches 0.5" in lines[0]
        assert "the next 100 GPU hours bring +0.00" in lines[2]
        assert lines[3].strip().startswith("reset: ")
        assert lines[4].startswith("  from the first 40%: ")

    def test_recipes_are_compared_by_asymptote(
        self, saturated: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        slow = run_folder(tmp_path / "slow", {s: rise(s, 0.1, 0.6, 90) for s in range(0, 601, 20)})
        assert main(["forecast", str(saturated), str(slow)]) == 0
        table = capsys.readouterr().out.rpartition("\n\n")[2].splitlines()
        assert [line.split()[0] for line in table] == ["run", "slow", "saturated"]

    def test_json(self, saturated: Path, capsys: pytest.CaptureFixture[str]) -> None:
        assert main(["forecast", "--json", str(saturated)]) == 0
        assert json.loads(capsys.readouterr().out)["name"] == "saturated"

    def test_a_folder_that_is_no_run_is_refused(self, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
        assert main(["forecast", str(tmp_path)]) == 2
        assert "neither a run" in caplog.text


def test_the_page_has_the_table_of_the_recorded_simulation(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    families = importlib.import_module("forecast_families")
    assert families.page() == families.PAGE.read_text()
    assert "| scalerl | 3%, 100% |" in families.page()
