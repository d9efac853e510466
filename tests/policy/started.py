"""Starts the processes in which the policy is tried; without torch, so that a session that needs none is quick."""

import os
import subprocess
import sys
from pathlib import Path


def run_ranks(root: Path, out: Path) -> Path:
    """The folder in which `ranks.py` wrote what the real actor computes at each layout."""
    command = [sys.executable, str(Path(__file__).with_name("ranks.py")), str(out)]
    env = {**os.environ, "PYTHONPATH": str(root), "OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"}
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=900, check=False)
    assert done.returncode == 0, (done.stdout + done.stderr)[-6000:]
    return out
