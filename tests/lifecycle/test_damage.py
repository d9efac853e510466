"""What a start takes from the files that it finds: the hash of the code, and a checkpoint that is damaged."""

import subprocess
from pathlib import Path

import pytest

from nemo_prorl.errors import DamagedCheckpoint
from nemo_prorl.lifecycle import retention
from nemo_prorl.lifecycle.run_records import code_sha256
from tests.lifecycle.small_run import SmallRun, config
from tests.lifecycle.test_wiring import go


def test_the_hash_of_the_code_is_taken_when_the_run_starts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Files that change later do not count for the code that runs."""
    code_sha256.cache_clear()
    run = SmallRun(config(tmp_path))
    run.start(monkeypatch)
    run.close()
    assert code_sha256.cache_info().currsize == 1


def test_a_damaged_checkpoint_ends_the_start_with_the_fix(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("SLURM_JOB_ID", raising=False)
    go(SmallRun(config(tmp_path, max_steps=4)), monkeypatch)
    newest = tmp_path / "checkpoints" / "step-000004"
    (newest / "state.json").write_text("")
    with pytest.raises(DamagedCheckpoint) as refused:
        go(SmallRun(config(tmp_path, max_steps=6)), monkeypatch)
    assert str(refused.value).startswith(f"{newest}/state.json cannot be read: Expecting value at character 1. Fix: mv")
    subprocess.run(str(refused.value).partition("Fix: ")[2].partition(";")[0], shell=True, check=True)
    run = SmallRun(config(tmp_path, max_steps=6))
    assert go(run, monkeypatch).progress.step == 6
    assert run.alarms() == [f"2: {newest}.damaged was damaged; the run goes on from the checkpoint of step 2"]


@pytest.mark.parametrize("damage", ["missing", "changed"])
def test_damaged_groups_end_the_start_with_the_fix(
    damage: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("SLURM_JOB_ID", raising=False)
    go(SmallRun(config(tmp_path, max_steps=4)), monkeypatch)
    file = tmp_path / "checkpoints" / "step-000004" / "groups.safetensors"
    data = file.read_bytes()
    file.unlink()
    if damage == "changed":
        file.write_bytes(data[:-1] + b" ")
    with pytest.raises(DamagedCheckpoint) as refused:
        go(SmallRun(config(tmp_path, max_steps=6)), monkeypatch)
    what = {"missing": "cannot be read: No such file", "changed": "was changed after the save: expected sha256"}[damage]
    assert str(refused.value).startswith(f"{file} {what}")
    assert f"Fix: mv {file.parent} {file.parent}.damaged; the same command" in str(refused.value)
    file.write_bytes(data)
    assert go(SmallRun(config(tmp_path, max_steps=6)), monkeypatch).progress.step == 6


def test_a_job_sets_a_damaged_checkpoint_aside_and_goes_on_from_the_one_before(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its weights at the end are those of a run without the damage.  The only checkpoint stays where it is."""
    monkeypatch.setenv("SLURM_JOB_ID", "7")
    whole = SmallRun(config(tmp_path / "whole", max_steps=6))
    go(whole, monkeypatch)
    for steps, kept in ((4, [2]), (2, [2])):
        go(SmallRun(config(folder := tmp_path / f"of-{steps}", max_steps=steps)), monkeypatch)
        newest = folder / "checkpoints" / f"step-{steps:06d}"
        (newest / "state.json").write_text("{}x")
        with pytest.raises(DamagedCheckpoint):
            go(SmallRun(config(folder, max_steps=6)), monkeypatch)
        assert [retention.step_of(path) for path in retention.complete(folder / "checkpoints")] == kept
        assert newest.exists() == (steps == 2)
    run = SmallRun(config(tmp_path / "of-4", max_steps=6))
    go(run, monkeypatch)
    assert run.policy.weights_sha256() == whole.policy.weights_sha256()
    assert len(run.alarms()) == 1


def test_a_resume_that_loses_no_step_leaves_no_file_of_lost_ones(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    go(SmallRun(config(tmp_path, max_steps=2)), monkeypatch)
    go(SmallRun(config(tmp_path, max_steps=4)), monkeypatch)
    assert not (tmp_path / "metrics.lost.jsonl").exists()
