"""The files of examples/: each runs in an empty folder, small."""

import subprocess
import sys
from pathlib import Path

import pytest

from tests.report.made import make_run
from tests.whole_runs import SMALL

SHORT = (
    "trainer.grpo.max_steps=2",
    "trainer.grpo.validate_every=2",
    "trainer.trace_steps=[]",
    "trainer.resets.at_steps=[]",
)
QUICK = ("trainer.grpo.prompts_per_step=8", "trainer.grpo.samples_per_prompt=8", "rollout.kv_cache_mb=128", *SHORT)


def run_example(root: Path, folder: Path, name: str, *words: str) -> str:
    command = [sys.executable, str(root / "examples" / name), *words]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=500, check=False)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    return done.stdout


def test_every_example_is_in_the_table_and_in_a_test(root: Path) -> None:
    names = {path.name for path in (root / "examples").glob("*.py")}
    table, tests = (root / "examples" / "README.md").read_text(), Path(__file__).read_text()
    assert names
    for name in names:
        assert f"[{name}]({name})" in table
        assert f'"{name}"' in tests


@pytest.mark.starts
def test_reading_a_run(root: Path, tmp_path: Path) -> None:
    run = make_run(tmp_path / "run")
    shown = run_example(root, tmp_path, "read_run.py", str(run))
    assert "12 steps, finished: True" in shown
    assert "step    0  held-out mean reward 0.250 +- 0.020" in shown
    assert "score 1.0:" in shown
    assert (run / "three-curves.png").stat().st_size > 1000


@pytest.mark.slow
@pytest.mark.nemo
@pytest.mark.vllm
@pytest.mark.timeout(900)
class TestRuns:
    def test_own_reward(self, root: Path, tmp_path: Path) -> None:
        shown = run_example(root, tmp_path, "own_reward.py", *QUICK)
        assert "share of vowels: " in shown
        assert "after 2 steps" in shown

    def test_own_data(self, root: Path, tmp_path: Path) -> None:
        rows = "".join(f"What is {n} plus {n + 1}?,{2 * n + 1}\n" for n in range(60))
        (tmp_path / "sums.csv").write_text("problem,answer\n" + rows)
        shown = run_example(root, tmp_path, "own_data.py", "sums.csv", "trainer.warmup.steps=0", *QUICK)
        assert "finished: True" in shown

    def test_own_model(self, root: Path, tmp_path: Path, undisturbed: Path) -> None:
        model = str(undisturbed / "base")
        shown = run_example(root, tmp_path, "own_model.py", model, "trainer.warmup.steps=0", *SMALL, *SHORT)
        assert "before: mean reward" in shown
        assert "after: mean reward" in shown
        assert (tmp_path / "runs" / "own-model" / "model.safetensors").is_file()

    def test_seeds(self, root: Path, tmp_path: Path) -> None:
        shown = run_example(root, tmp_path, "seeds.py", *SMALL, *SHORT)
        assert "gain on held-out problems: " in shown
        assert (tmp_path / "runs" / "seeds" / "3" / "summary.json").is_file()
