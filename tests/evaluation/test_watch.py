"""`prorl watch`: which checkpoints it evaluates, in which order, and what becomes of failures."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from nemo_prorl.cli import main
from nemo_prorl.evaluation import watch
from nemo_prorl.report.data import page_data

# In place of `prorl evaluate`: notes the step, and writes the results unless the step is told to fail.
EVALUATE = """
import json, pathlib, sys
words = sys.argv[1:]
step, out = int(words[words.index("--checkpoint") + 1]), pathlib.Path(words[words.index("--out") + 1])
run = out.parent.parent
with (run / "asked").open("a") as file:
    file.write(f"{step}\\n")
(run / "words").write_text(" ".join(words))
if (run / f"fail-{step}").exists():
    sys.exit(3)
if (run / f"gone-{step}").exists():
    (run / "checkpoints" / f"step-{step:06d}" / "state.json").unlink()
    sys.exit(2)
out.mkdir(parents=True)
scores = {"1": {"mean": step / 100, "se": 0.01}, "8": {"mean": step / 50, "se": 0.02}}
(out / "results.json").write_text(json.dumps({"complete": True, "benchmarks": {"gcd": {"pass@k": scores}}}))
"""


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """A finished run with the checkpoints of steps 10, 20 and 30."""
    for step in (10, 20, 30):
        (tmp_path / "checkpoints" / f"step-{step:06d}").mkdir(parents=True)
        (tmp_path / "checkpoints" / f"step-{step:06d}" / "state.json").write_text("{}")
    (tmp_path / "config.yaml").write_text("stage: none\n")
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps({"step": s, "kl": 0.1}) + "\n" for s in range(1, 31)))
    (tmp_path / "summary.json").write_text(json.dumps({"finished": True, "step": 30}))
    return tmp_path


@pytest.fixture(autouse=True)
def in_its_place(monkeypatch: pytest.MonkeyPatch) -> None:
    real: Any = subprocess.Popen
    monkeypatch.setattr(
        "nemo_prorl.evaluation.watch.subprocess.Popen", lambda words: real([sys.executable, "-c", EVALUATE, *words[3:]])
    )
    monkeypatch.setattr("nemo_prorl.evaluation.watch._PAUSE_S", 0.0)


def asked(run: Path) -> list[int]:
    return [int(line) for line in (run / "asked").read_text().split()]


def test_each_checkpoint_is_evaluated_once_the_oldest_first(run: Path) -> None:
    assert main(["watch", str(run), "--benchmarks", "gsm8k"]) == 0
    assert asked(run) == [10, 20, 30]
    assert main(["watch", str(run), "--benchmarks", "gsm8k"]) == 0
    assert asked(run) == [10, 20, 30]
    assert [step for step, _ in watch.results(run)] == [10, 20, 30]


def test_a_run_that_has_steps_left_is_waited_for(
    run: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    (run / "summary.json").write_text(json.dumps({"finished": False, "step": 20}))
    caplog.set_level("INFO")
    monkeypatch.setattr(
        "nemo_prorl.evaluation.watch.time.sleep", lambda _: (run / "summary.json").write_text('{"finished": true}')
    )
    assert main(["watch", str(run), "--benchmarks", "gsm8k"]) == 0
    assert f"this ends once {run} has made all its steps; a stopped run is waited for" in caplog.text
    caplog.clear()
    assert main(["watch", str(run), "--benchmarks", "gsm8k"]) == 0
    assert "this ends once" not in caplog.text


def test_the_report_draws_them(run: Path) -> None:
    main(["watch", str(run), "--benchmarks", "gsm8k"])
    (run / "evaluations" / "step-odd").mkdir()
    curve = page_data([run], [], 0)["curves"][0]
    assert set(curve["benchmarks"]) == {"gcd", "gcd pass@8"}
    assert curve["benchmarks"]["gcd"]["x"] == [10, 20, 30]
    assert curve["benchmarks"]["gcd"]["m"] == [0.1, 0.2, 0.3]
    assert curve["benchmarks"]["gcd pass@8"]["hi"] == [0.22, 0.42, 0.62]


def test_only_every_so_many_steps(run: Path) -> None:
    assert main(["watch", str(run), "--benchmarks", "gsm8k", "--every", "20", "rollout.max_num_seqs=8"]) == 0
    assert asked(run) == [20]


def test_what_is_asked_for_is_handed_on(run: Path) -> None:
    given = ["--samples", "2", "--limit", "3", "--data", "sets"]
    assert main(["watch", str(run), "--benchmarks", "gsm8k", *given, "--every", "30", "rollout.max_num_seqs=8"]) == 0
    words = (run / "words").read_text().split()
    assert words == ["evaluate", str(run), "rollout.max_num_seqs=8", "--benchmarks", "gsm8k", *given, *words[-4:]]


def test_a_failure_is_tried_again_and_does_not_stop_the_others(run: Path, caplog: pytest.LogCaptureFixture) -> None:
    (run / "fail-10").touch()
    assert main(["watch", str(run), "--benchmarks", "gsm8k"]) == 1
    assert asked(run) == [10, 10, 20, 30]
    assert "step 10: prorl evaluate ended with status 3" in caplog.text


def test_a_checkpoint_that_the_run_deletes_meanwhile_is_no_failure(run: Path, caplog: pytest.LogCaptureFixture) -> None:
    (run / "gone-10").touch()
    assert main(["watch", str(run), "--benchmarks", "gsm8k"]) == 0
    assert asked(run) == [10, 20, 30]
    assert "Fix: trainer.grpo.keep_checkpoints, or --every" in caplog.text


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["--every", "0"], "--every 0: expected 1 or more"),
        ([], "run directory"),
        (["--benchmarks", "gdc"], "--benchmarks gdc: no such benchmark"),
    ],
)
def test_wrong_use(words: list[str], told: str, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    if "--benchmarks" in words:
        (tmp_path / "config.yaml").touch()
    assert main(["watch", str(tmp_path), "--benchmarks", "gsm8k", *words]) == 2
    assert told in caplog.text
