"""A Qwen2.5-0.5B shape goes through import, a step, checkpoint, resume and export on two cores and 24 GB."""

import os
import re
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

NEEDED = 22.6e9  # bytes free: what the plan says

pytestmark = [pytest.mark.slow, pytest.mark.nemo, pytest.mark.vllm, pytest.mark.timeout(4000)]


def test_half_a_billion_parameters_go_through_within_the_plan(
    root: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    if (free := psutil.virtual_memory().available) < NEEDED:
        pytest.skip(f"{free / 1e9:.0f} GB of memory are free, it needs {NEEDED / 1e9:.0f}")
    command = [sys.executable, str(root / "benchmarks" / "half_billion.py"), "--dir", str(tmp_path)]
    env = {**os.environ, "PYTHONPATH": str(root), "OMP_NUM_THREADS": str(len(os.sched_getaffinity(0)))}
    done = subprocess.run(command, env=env, cwd=root, capture_output=True, text=True, timeout=3900, check=False)
    assert done.returncode == 0, done.stderr[-4000:]
    with capsys.disabled():
        sys.stdout.write(f"\n{done.stdout}\n")
    found = re.search(r"^peak of training ([\d.]+) GB, the plan says ([\d.]+) GB", done.stdout, re.MULTILINE)
    assert found, done.stdout
    peak, plan = map(float, found.groups())
    assert 0.8 * plan < peak < 1.05 * plan, done.stdout
    gap = re.search(r"differ by ([\d.e+-]+) a token", done.stdout)
    assert gap, done.stdout
    assert float(gap[1]) < 1e-3
