"""What every test may use."""

import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests import whole_runs
from tests.background import Background
from tests.policy.started import run_ranks, run_te_ranks
from tests.rewards.attack_runs import run_attacks

os.environ.setdefault("OMP_NUM_THREADS", "1")

ROOT = Path(__file__).resolve().parent.parent


LONG = (
    "attacked",
    "ranks",
    "te_ranks",
    "undisturbed",
    "on_four_nodes",
    "stage_run",
    "disturbed",
)  # in the order in which they are done


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """What waits for a long run comes last, when it is done."""

    def needs(item: pytest.Item) -> int:
        names = getattr(item, "fixturenames", ())
        return max((LONG.index(name) + 1 for name in names if name in LONG), default=0)

    items.sort(key=needs)


@pytest.fixture(scope="session")
def root() -> Path:
    """The repository."""
    return ROOT


@pytest.fixture(scope="session", autouse=True)
def background(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Background]:
    """The long runs that the selected tests need, under way from now on."""
    runs = Background()
    wanted = {name for item in request.session.items for name in getattr(item, "fixturenames", ())}
    if "attacked" in wanted:
        runs.start("attacked", run_attacks, ROOT, tmp_path_factory.mktemp("attacked"), lane="sleeps")
    if "ranks" in wanted:
        runs.start("ranks", run_ranks, ROOT, tmp_path_factory.mktemp("ranks"))
    if "te_ranks" in wanted:
        runs.start("te_ranks", run_te_ranks, ROOT, tmp_path_factory.mktemp("te_ranks"))
    if (ROOT / ".venv" / "rollout").is_dir():
        folder = tmp_path_factory.mktemp("job")
        if "undisturbed" in wanted:
            runs.start("undisturbed", whole_runs.run_undisturbed, ROOT, folder)
        of_it = {
            "on_four_nodes": whole_runs.run_on_four_nodes,
            "stage_run": whole_runs.run_stage,
            "disturbed": whole_runs.run_disturbed,
        }
        for name, run in of_it.items():
            if name in wanted:
                runs.start(name, run, ROOT, folder / "undisturbed")
    yield runs
    runs.close()


def result_of(background: Background, name: str) -> Path:
    if not (ROOT / ".venv" / "rollout").is_dir():
        pytest.skip("no rollout environment: make setup")
    return background.result(name)


@pytest.fixture(scope="session")
def undisturbed(background: Background) -> Path:
    """A finished run."""
    return result_of(background, "undisturbed")


@pytest.fixture(scope="session")
def disturbed(undisturbed: Path, background: Background) -> Path:
    """The same run, killed in several ways and resumed each time."""
    return result_of(background, "disturbed")


@pytest.fixture(scope="session")
def stage_run(undisturbed: Path, background: Background) -> Path:
    """A stage that begins from the finished run and was stopped."""
    return result_of(background, "stage_run")


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
