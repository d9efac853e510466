"""The policy's ranks, started once for all tests."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.background import Background


@pytest.fixture(scope="session")
def ranks(background: Background) -> Path:
    """The folder in which `ranks.py` wrote what the real actor computes at each layout."""
    return background.result("ranks")


@pytest.fixture(scope="session")
def te_ranks(background: Background) -> Path:
    """The folder in which `te_ranks.py` wrote what the real actor does on a stand-in for Transformer Engine."""
    return background.result("te_ranks")


@pytest.fixture(scope="session")
def measured(ranks: Path) -> Callable[[str], dict[str, Any]]:
    """What a layout computed, by its name."""
    return lambda name: torch.load(ranks / f"{name}.pt", weights_only=False)
