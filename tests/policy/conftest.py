"""The policy's ranks, started once for all tests."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.policy.started import run_ranks, run_te_ranks


@pytest.fixture(scope="session")
def ranks(root: Path, tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> Path:
    """The folder in which `ranks.py` wrote what the real actor computes at each layout that is looked at."""
    slow = any(
        "ranks" in getattr(x, "fixturenames", ()) and x.get_closest_marker("slow") for x in request.session.items
    )
    return run_ranks(root, tmp_path_factory.mktemp("ranks"), slow)


@pytest.fixture(scope="session")
def te_ranks(root: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder in which `te_ranks.py` wrote what the real actor does on a stand-in for Transformer Engine."""
    return run_te_ranks(root, tmp_path_factory.mktemp("te_ranks"))


@pytest.fixture(scope="session")
def measured(ranks: Path) -> Callable[[str], dict[str, Any]]:
    """What a layout computed, by its name."""
    return lambda name: torch.load(ranks / f"{name}.pt", weights_only=False)
