"""Whole runs that try their resets: equal to a run that had known the answer, also if they are killed anywhere."""

import json
from pathlib import Path
from typing import Any

import pytest

from nemo_prorl.lifecycle.ledger import read_ledger
from tests.test_formats import against
from tests.whole_runs import Job, events_of, metrics_of, without_time

pytestmark = [pytest.mark.nemo, pytest.mark.vllm, pytest.mark.slow, pytest.mark.timeout(1200)]

LAST = 7
COMMON = [f"trainer.grpo.max_steps={LAST}", "trainer.grpo.validate_every=1", "trainer.grpo.keep_batches=9"]
COMMON += ["trainer.trace_steps=[]", "trainer.grpo.keep_checkpoints=9"]
TRIAL = ["trainer.resets.mode=trial", "trainer.resets.trial_steps=3"]
# A rate at which every step ruins the policy, and a reset that goes back to the weights before, with a rate near 0.
RUIN = ["model.optim.lr=0.3", "trainer.resets.lr_factor=1e-6", "trainer.resets.roll_back=true"]


def finished(root: Path, run_dir: Path, *overrides: str) -> Path:
    job = Job(root, run_dir, *COMMON, *overrides)
    assert job.wait() == 0, job.text()
    return run_dir


def same(run: Path, wanted: Path) -> None:
    """Check that a run has the metrics, weights, checkpoints, ledger and responses of the other."""
    assert [without_time(m) for m in metrics_of(run)] == [without_time(m) for m in metrics_of(wanted)]
    ends = [without_time(json.loads((one / "summary.json").read_text())) for one in (run, wanted)]
    assert ends[0] == ends[1]
    assert read_ledger(run) == read_ledger(wanted)
    for name in ("rollouts", "validations"):
        files = [{file.name: file.read_text() for file in (one / name).iterdir()} for one in (run, wanted)]
        assert files[0] == files[1]
    assert [f.name for f in sorted((run / "batches").iterdir())] == [
        f.name for f in sorted((wanted / "batches").iterdir())
    ]


def trials_of(run: Path) -> list[dict[str, Any]]:
    ends = [event for event in events_of(run) if event["event"] == "trial_end"]
    assert all(against("journal-event", event) == [] for event in events_of(run))
    return ends


KILLS = ("trial:records", "trial:back", "reset:optimizer", "reset:checkpointed")
LOST = ("trial:lost", "trial:checkpoints back", "trial:records back")


@pytest.mark.parametrize("devices", [1, 2])
def test_a_reset_that_shows_nothing_is_not_made(root: Path, tmp_path: Path, devices: int) -> None:
    options = [f"trainer.devices={devices}"]
    wanted = finished(root, tmp_path / "without", *options, "trainer.resets.at_steps=[]")
    options += [*TRIAL, "trainer.resets.trial_noise=1"]
    for point in (*KILLS, *LOST) if devices == 1 else ():
        job = Job(root, tmp_path / "tried", *COMMON, *options, kill_at=point)
        assert job.wait() == 1, (point, job.text())
    run = finished(root, tmp_path / "tried", *options)
    same(run, wanted)
    assert trials_of(run)[0]["winner"] == "none"
    assert not (run / "checkpoints" / "step-000002").exists()  # it has the reset


def test_a_reset_that_wins_is_kept(root: Path, tmp_path: Path) -> None:
    wanted = finished(root, tmp_path / "with", *RUIN)
    for point in KILLS:
        job = Job(root, tmp_path / "tried", *COMMON, *RUIN, *TRIAL, kill_at=point)
        assert job.wait() == 1, (point, job.text())
    run = finished(root, tmp_path / "tried", *RUIN, *TRIAL)
    same(run, wanted)
    (end, *_) = trials_of(run)
    assert end["winner"] == "reset"
    assert end["difference"] > 0.05
    assert end["tokens"] > 0
