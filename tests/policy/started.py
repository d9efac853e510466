"""Starts the processes in which the policy is tried; without torch, so that a session that needs none is quick."""

import os
import subprocess
import sys
from pathlib import Path

from tests.ending import end_with_session

TE_STAND_IN = Path(__file__).parent.parent / "te_stand_in"


def run_ranks(root: Path, out: Path, slow: bool) -> Path:
    """The folder in which `ranks.py` wrote what the real actor computes at each layout; `slow`: at all of them."""
    return _run("ranks.py", root, out, [root], {}, *["slow"] * slow)


def run_te_ranks(root: Path, out: Path) -> Path:
    """The folder in which `te_ranks.py` wrote what the actor does on a stand-in for Transformer Engine."""
    # Megatron compiles a few fused functions, which costs more here than all that they compute.
    return _run("te_ranks.py", root, out, [TE_STAND_IN, root], {"TORCH_COMPILE_DISABLE": "1"})


def run_choice_ranks(root: Path, out: Path) -> Path:
    """The folder in which `choice_ranks.py` wrote what the actor does with each choice that NeMo dispatches on."""
    return _run("choice_ranks.py", root, out, [TE_STAND_IN, root], {"TORCH_COMPILE_DISABLE": "1"})


def _run(script: str, root: Path, out: Path, path: list[Path], variables: dict[str, str], *words: str) -> Path:
    command = [sys.executable, str(Path(__file__).with_name(script)), str(out), *words]
    env = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(map(str, path)),
        "OMP_NUM_THREADS": "1",
        "TOKENIZERS_PARALLELISM": "false",
        **variables,
    }
    done = subprocess.run(
        command, env=env, capture_output=True, text=True, timeout=900, check=False, preexec_fn=end_with_session
    )
    assert done.returncode == 0, (done.stdout + done.stderr)[-6000:]
    return out
