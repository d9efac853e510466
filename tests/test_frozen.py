"""Runs of a fixed seed compute what they computed when they were recorded: to the bit on the same processor.

Where a change is meant to change a number, record the run again and say in the commit which number and why:

    python -m tests.test_frozen small RUN        RUN: made by `tests.whole_runs.run_undisturbed`
    python -m tests.test_frozen twelve RUN       the same with the overrides TWELVE

The twelve steps are those of the commit before the redesign (f490a69) except for last bits of log-probabilities: its
engines and trainer computed them in blocks of complete groups, hence in micro-batches of other rows.  With one row in
each micro-batch both were equal to the bit.
"""

import hashlib
import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.whole_runs import Job, metrics_of, run_undisturbed, without_time

pytestmark = [pytest.mark.nemo, pytest.mark.vllm, pytest.mark.timeout(900)]

RECORDS = Path(__file__).parent / "frozen"
TWELVE = (
    "trainer.grpo.max_steps=12",
    "trainer.resets.at_steps=[6]",
    "trainer.grpo.validate_every=4",
    "trainer.trace_steps=[]",
)


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
        "prompts of step 1": sorted({rollout["id"] for rollout in rollouts if rollout["trained"]}),
        "metrics": [without_time(metrics) for metrics in metrics_of(run)],
        **{key: summary[key] for key in ("weights_sha256", "reference_sha256", "heldout", "resets")},
    }


def assert_recorded(name: str, run: Path) -> None:
    recorded, found = json.loads((RECORDS / f"{name}.json").read_text()), account_of(run)
    assert found["prompts of step 1"] == recorded["prompts of step 1"]  # on any processor
    assert [set(m) for m in found["metrics"]] == [set(m) for m in recorded["metrics"]]
    if found["processor"] != recorded["processor"]:
        pytest.skip("recorded on another processor, which rounds otherwise: only prompts and names are compared")
    for now, before in zip(found["metrics"], recorded["metrics"], strict=True):
        assert {key: (before[key], now[key]) for key in now if now[key] != before[key]} == {}
    assert found == recorded


def test_the_run_is_the_recorded_one(undisturbed: Path) -> None:
    assert_recorded("small", undisturbed)


@pytest.mark.slow
def test_twelve_steps_are_the_recorded_ones_also_when_killed_in_their_reset(root: Path, tmp_path: Path) -> None:
    """Four validations, a hard reset after step 6, and a kill inside it."""
    undisturbed = run_undisturbed(root, tmp_path, *TWELVE)
    assert Job(root, tmp_path / "killed", *TWELVE, kill_at="reset:checkpointed").wait() == 1
    resumed = Job(root, tmp_path / "killed", *TWELVE)
    assert resumed.wait() == 0, resumed.text()
    assert account_of(resumed.run_dir) == account_of(undisturbed)
    assert_recorded("twelve", undisturbed)


if __name__ == "__main__":
    (RECORDS / f"{sys.argv[1]}.json").write_text(json.dumps(account_of(Path(sys.argv[2])), indent=1) + "\n")
