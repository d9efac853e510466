"""The policy's ranks, started once for all tests."""

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch


@pytest.fixture(scope="session")
def ranks(tmp_path_factory: pytest.TempPathFactory, root: Path) -> Path:
    """The folder in which `ranks.py` wrote what the real actor computes at each layout."""
    out = tmp_path_factory.mktemp("ranks")
    command = [sys.executable, str(Path(__file__).with_name("ranks.py")), str(out)]
    env = {**os.environ, "PYTHONPATH": str(root), "OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"}
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=900, check=False)
    assert done.returncode == 0, (done.stdout + done.stderr)[-6000:]
    return out


@pytest.fixture(scope="session")
def measured(ranks: Path) -> Callable[[str], dict[str, Any]]:
    """What a layout computed, by its name."""
    return lambda name: torch.load(ranks / f"{name}.pt", weights_only=False)
