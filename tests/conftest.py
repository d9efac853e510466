"""What every test may use, and how tests are shared out over the workers of `make test`."""

import gc
import os
import subprocess
import sys
from collections.abc import Callable, Generator
from pathlib import Path
from typing import Any

import pytest

from tests import whole_runs

os.environ.setdefault("OMP_NUM_THREADS", "1")

ROOT = Path(__file__).resolve().parent.parent

# Files that take longest, begun first so that the workers end together.  Files of one row share a run, an engine,
# ranks or a cluster, which one worker starts once.
LONG = (
    ("tests/test_main_job.py", "tests/test_frozen.py", "tests/cluster/test_whole_run.py"),
    (
        "tests/policy/test_layouts.py",
        "tests/policy/test_wiring.py",
        "tests/policy/test_half.py",
        "tests/policy/test_checkpoints.py",
    ),
    (
        "tests/rollout/test_engine.py",
        "tests/rollout/test_collector.py",
        "tests/rollout/test_float32_head.py",
        "tests/rollout/test_sleep.py",
        "tests/rollout/test_checksums.py",
        "tests/rollout/test_stopped_engines.py",  # last, because it kills the engine
    ),
    ("tests/rewards/test_attacks.py",),
    (
        "tests/policy/test_te.py",
        "tests/policy/test_packing.py",  # these three import Megatron
        "tests/policy/test_random_state.py",
        "tests/policy/test_nemo_config.py",
    ),
    ("tests/cluster/test_stage.py", "tests/cluster/test_emulated.py"),
)


def place(nodeid: str) -> int:
    """Return the row of LONG that a test is in; the number of rows if it is in none."""
    file = nodeid.split("::")[0]
    return next((row for row, files in enumerate(LONG) if file in files), len(LONG))


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """While tests are collected nothing becomes garbage; later looks for garbage skip what was imported until then."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.enable()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Put the long files first."""
    items.sort(key=lambda item: place(item.nodeid))


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """Give each worker whole files, and all files of a row of LONG, in the order of the items.

    Not where another way is asked for: quick tests start nothing that they could share.
    """
    if config.option.dist != "load":  # what `--numprocesses` alone means
        return None
    from xdist.scheduler import LoadFileScheduling

    class WholeFiles(LoadFileScheduling):
        def _split_scope(self, nodeid: str) -> str:
            row = place(nodeid)
            return str(LONG[row][0]) if row < len(LONG) else super()._split_scope(nodeid)

    config.option.loadscopereorder = False
    return WholeFiles(config, log)


@pytest.fixture(scope="session")
def root() -> Path:
    """The repository."""
    return ROOT


@pytest.fixture(scope="session")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of the whole runs that several tests look at."""
    if not (ROOT / ".venv" / "rollout").is_dir():
        pytest.skip("no rollout environment: make setup")
    return tmp_path_factory.mktemp("job")


@pytest.fixture(scope="session")
def undisturbed(runs: Path) -> Path:
    """A finished run."""
    return whole_runs.run_undisturbed(ROOT, runs)


@pytest.fixture(scope="session")
def disturbed(undisturbed: Path) -> Path:
    """The same run, killed in several ways and resumed each time."""
    return whole_runs.run_disturbed(ROOT, undisturbed)


@pytest.fixture
def in_an_empty_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The current folder of a test, or of a file that names this fixture in its `pytestmark`, is its own and empty."""
    monkeypatch.chdir(tmp_path)


@pytest.fixture
def prorl(tmp_path: Path) -> Callable[..., subprocess.CompletedProcess[str]]:
    """Runs the `prorl` command in a process of its own, in an empty folder."""

    def run(*arguments: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-m", "nemo_prorl.cli", *arguments]
        environment = {**os.environ, "PYTHONPATH": str(ROOT)}
        return subprocess.run(
            command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=120, check=False
        )

    return run
