"""Scripts that stand beside the package keep up with it."""

import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow

FOLDER = Path(__file__).parents[1] / "benchmarks"
HELPERS = {
    "engine.py",
    "machine.py",
    "reward_load.py",
    "evaluate_offline.py",
    "versus_trl_trainer.py",
}  # imported or started by others


def run(script: str, *words: str, seconds: float = 120) -> str:
    done = subprocess.run(
        [sys.executable, str(FOLDER / script), *words], capture_output=True, text=True, timeout=seconds, check=False
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


@pytest.mark.parametrize("script", sorted({path.name for path in FOLDER.glob("*.py")} - HELPERS))
def test_each_script_says_what_it_does(script: str) -> None:
    assert "usage:" in run(script, "--help")


@pytest.mark.nemo
def test_weak_scaling_makes_real_steps_on_two_ranks() -> None:
    last = run("weak_scaling.py", "--ranks", "2", "--rows", "64", "--steps", "1", seconds=300).splitlines()[-1]
    ranks, step, *_ = last.split()
    assert int(ranks) == 2
    assert float(step) > 0.0


@pytest.mark.nemo
@pytest.mark.vllm
@pytest.mark.timeout(1500)
def test_the_gpu_cluster_s_configurations_go_through_on_cpu_ranks(tmp_path: Path) -> None:
    """Import, engine, steps, kill, resume, next stage, export; Transformer Engine is a stand-in."""
    told = run("te_rehearsal.py", "--out", str(tmp_path / "rehearsal"), seconds=1500)
    assert told.count("the exported weights are run2's last, by sha256: True") == 2


def test_trl_s_side_needs_nothing_of_this_project_installed() -> None:
    code = """if True:
        import sys
        sys.meta_path = [finder for finder in sys.meta_path if "__editable__" not in repr(finder)]
        sys.path[:] = [folder for folder in sys.path if folder != sys.argv[1]]
        import versus_trl_trainer
        versus_trl_trainer.plugin_named("puzzles")"""
    done = subprocess.run(
        [sys.executable, "-c", code, str(FOLDER.parent)], cwd=FOLDER, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr[-3000:]
