"""What the small run computes is what it computed when it was last recorded: to the bit on the same processor.

Where a change is meant to change a number, record the run again and say in the commit which number and why:

    python -m tests.test_frozen RUN        RUN: of `tests.whole_runs.run_undisturbed`

`test_main_job` shows that the same run, killed and resumed, is equal to the undisturbed one.
"""

import hashlib
import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.whole_runs import metrics_of, without_time

pytestmark = [pytest.mark.nemo, pytest.mark.vllm, pytest.mark.timeout(900)]

RECORD = Path(__file__).parent / "frozen" / "small.json"


def processor() -> str:
    """Return what decides how numbers are rounded: the processor's abilities, and torch."""
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    flags = next((line for line in lines if line.startswith(("flags", "Features"))), "")
    return f"{hashlib.sha256(flags.encode()).hexdigest()[:16]}, torch {torch.__version__}"


def account_of(run: Path) -> dict[str, Any]:
    """Return all that a run computed, without times."""
    summary = json.loads((run / "summary.json").read_text())
    rollouts = [json.loads(line) for line in (run / "rollouts" / "step-1.jsonl").read_text().splitlines()]
    return {
        "processor": processor(),
        "prompts of step 1": sorted({rollout["id"] for rollout in rollouts}),
        "metrics": [without_time(metrics) for metrics in metrics_of(run)],
        **{key: summary[key] for key in ("weights_sha256", "reference_sha256", "heldout", "resets")},
    }


def test_the_run_is_the_recorded_one(undisturbed: Path) -> None:
    recorded, found = json.loads(RECORD.read_text()), account_of(undisturbed)
    assert found["prompts of step 1"] == recorded["prompts of step 1"]  # on any processor
    assert [set(m) for m in found["metrics"]] == [set(m) for m in recorded["metrics"]]
    if found["processor"] != recorded["processor"]:
        pytest.skip("recorded on another processor, which rounds otherwise: only prompts and names are compared")
    for now, before in zip(found["metrics"], recorded["metrics"], strict=True):
        assert {key: (before[key], now[key]) for key in now if now[key] != before[key]} == {}
    assert found == recorded


if __name__ == "__main__":
    RECORD.write_text(json.dumps(account_of(Path(sys.argv[1])), indent=1) + "\n")
