"""Fixtures of the rollout tests.  One real engine is shared by all of them: a start takes 12 s."""

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from tests.rollout.engines import ROOT, EngineProcess, write_model

torch.set_num_threads(1)


@pytest.fixture(scope="session")
def vllm_python() -> str:
    """The Python of the rollout environment."""
    path = os.environ.get("PRORL_ROLLOUT_PYTHON", str(ROOT / ".venv/rollout/bin/python"))
    if not os.access(path, os.X_OK):
        pytest.skip(f"no rollout environment at {path}: run `make setup`, or set PRORL_ROLLOUT_PYTHON")
    return path


@pytest.fixture(scope="session")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Tiny Qwen2 folders: tied0 and tied1, untied0 and untied1."""
    base = tmp_path_factory.mktemp("models")
    return {
        f"{kind}{seed}": write_model(base / f"{kind}{seed}", kind == "tied", seed)
        for kind in ("tied", "untied")
        for seed in (0, 1)
    }


@pytest.fixture(scope="session")
def _shared_engine(
    vllm_python: str, models: dict[str, Path], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[EngineProcess]:
    engine = EngineProcess(
        vllm_python, models["tied0"], tmp_path_factory.mktemp("engine"), 0, "--health-s=3", "--sleep"
    )
    engine.start()
    yield engine
    engine.stop()


@pytest.fixture
def engine(_shared_engine: EngineProcess) -> EngineProcess:
    """The shared engine, running (started again if a test killed it)."""
    if not _shared_engine.running:
        _shared_engine.start()
    return _shared_engine.wait_ready()
