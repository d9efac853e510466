"""`prorl launch --from CHECKPOINT`: a stage is stopped, a checkpoint is picked, and the chain goes on from there."""

import fcntl
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest
import yaml

from nemo_prorl import cli
from nemo_prorl.report.diary import diary_text
from nemo_prorl.report.read import read_curves
from tests.launcher.test_chain import (  # noqa: F401  fixtures among them
    Slurm,
    Told,
    finish,
    jobs_of,
    launch,
    project,
    record_of,
    rows_of,
    slurm,
    small_by_default,
)
from tests.lines import write_lines
from tests.whole_runs import SMALL, Job, events_of, metrics_of

pytestmark = pytest.mark.starts


def stop(folder: Path, stage: str = "run3", step: int = 12) -> Path:
    """Leave what a stage that ann stopped leaves; return its checkpoint of step 10."""
    finish(folder, stage)
    run = folder / stage
    (run / "summary.json").write_text(json.dumps({"finished": False, "step": step, "heldout": {}}))
    asked = {"event": "control", "step": step, "time": 2.0, "request": "x1", "what": "stop", "status": "done"}
    events = [
        {"event": "start", "step": 0, "time": 1.0, "stage": stage, "version": "0.1.0"},
        {**asked, "detail": "stopped", "user": "ann", "host": "login"},
        {"event": "stop", "step": step, "time": 2.0, "reason": f"control x1: stopped after step {step}"},
    ]
    write_lines(run / "journal.jsonl", events)
    scores = {"10": {"all": {"mean": 0.4125}}}
    picked = run / "checkpoints" / "step-000010"
    (run / "checkpoints" / "step-000020").rename(picked)
    (picked / "state.json").write_text(json.dumps({"validation": {"scores": scores}}))
    return picked


def go_on(*words: object) -> int:
    return cli.main(["launch", "--from", *map(str, words)])


def test_the_rest_of_the_chain_begins_from_the_checkpoint(slurm: Slurm, capsys: Told) -> None:  # noqa: F811
    work = Path.cwd()
    assert launch("run_dir=chain", "chain.after=null", stages="run3..run5") == 0
    picked = stop(Path("chain"))
    assert go_on(picked, "seed=2") == 0
    calls = slurm.calls("sbatch")[3:]
    assert [call[2] for call in calls] == [f"--job-name=chain-run{k}" for k in range(4, 9)]
    assert calls[0][-3:] == [f"run_dir={work}/chain/run4", "seed=2", f"chain.start_from={work / picked}"]
    assert not any("chain.start_from" in word for call in calls[1:] for word in call)
    assert "--dependency=afterok:20" in calls[1]
    assert list(jobs_of(Path("chain"))) == [f"run{k}" for k in range(3, 9)]
    assert jobs_of(Path("chain"))["run3"] == "17"
    again = record_of(Path("chain"))["command"]  # it repeats this call, whatever the folder
    assert {f"chain.start_from={work / picked}", f"run_dir={work}/chain", "run4..run8"} <= set(again)
    capsys.readouterr()
    assert cli.main(["status", "chain"]) == 0
    first = rows_of(capsys.readouterr().out)[1]
    assert first[:7] == ["run3", "17", "gone", "-", "20 of 15", "-", "stopped by ann@login"]


def test_here_too_and_stages_and_folder_may_be_named(project: Path, capsys: Told) -> None:  # noqa: F811
    picked = stop(Path("chain")).absolute()
    assert go_on(picked, "--here", "--dry-run", "--stages", "run4,run5", "run_dir=other", "data=domains") == 0
    assert capsys.readouterr().out.splitlines() == [
        f"prorl train stage=run4 run_dir=other/run4 data=domains chain.start_from={picked}",
        "prorl train stage=run5 run_dir=other/run5 data=domains",
    ]


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["chain/run3"], "expected a complete checkpoint: one of {picked} (held-out 0.412)"),
        (["nowhere"], "a folder such as RUN/checkpoints/step-000100"),
        (["chain/run3/checkpoints/step-000099"], "expected a complete checkpoint: one of {picked} (held-out 0.412)"),
        (["chain/run3/checkpoints/step-000010.tmp"], "expected a complete checkpoint"),
        (["chain/run3/checkpoints/step-000010", "chain.start_from=x"], "Fix: give one of the two"),
        (["single"], "no stage follows its run. Fix: name the stages with --stages"),
    ],
    ids=["run", "nothing", "gone", "unfinished", "twice", "alone"],
)
def test_what_is_no_checkpoint_is_answered(
    slurm: Slurm,  # noqa: F811
    words: Sequence[str],
    says: str,
    caplog: pytest.LogCaptureFixture,
) -> None:
    picked = stop(Path("chain")).absolute()
    shutil.copytree(picked, picked.with_name("step-000010.tmp"))
    shutil.copytree(picked, "single")
    assert go_on(*words) == 2
    assert says.format(picked=picked) in caplog.text
    assert slurm.calls("sbatch") == []


def test_stages_or_a_checkpoint_are_named(caplog: pytest.LogCaptureFixture) -> None:
    assert cli.main(["launch", "--here"]) == 2
    assert "Fix: name the stages, or --from CHECKPOINT" in caplog.text


def test_a_run_that_is_still_active_is_refused(slurm: Slurm, caplog: pytest.LogCaptureFixture) -> None:  # noqa: F811
    assert launch("run_dir=chain", "chain.after=null", stages="run3") == 0
    picked = stop(Path("chain"))
    slurm.add("squeue", 'echo "17 RUNNING None"')
    assert go_on(picked) == 2
    assert "Fix: wait for its end (prorl status" in caplog.text
    slurm.add("squeue", 'echo "17 CANCELLED None"')
    with (Path("chain") / "run3" / ".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        assert go_on(picked) == 2
    assert len(slurm.calls("sbatch")) == 1
    assert go_on(picked) == 0


def test_the_command_before_the_stop_does_not_go_back(
    slurm: Slurm,  # noqa: F811
    caplog: pytest.LogCaptureFixture,
) -> None:
    """It warns that it continues the stopped stage, and is refused once a later stage began from its checkpoint."""
    picked = stop(Path("chain")).absolute()
    assert launch("run_dir=chain", stages="run3..run4") == 0
    assert "stage run3, which ann@login stopped after step 12, is continued" in caplog.text
    finish(Path("chain"), "run4", f"chain.start_from={picked}")
    assert launch("run_dir=chain", stages="run3..run4") == 2
    assert f"run4 began from the checkpoint {picked}" in caplog.text
    assert f"chain.start_from={picked} --stages run4..run4" in caplog.text


def test_a_chain_without_slurm_has_a_status(project: Path, capsys: Told) -> None:  # noqa: F811
    picked = stop(Path("chain")).absolute()
    finish(Path("chain"), "run4", f"chain.start_from={picked}")
    start = {"event": "start", "step": 0, "time": 1.0, "stage": "run4", "version": "0", "start_from": str(picked)}
    events = [start, {"event": "finish", "step": 20, "time": 2.0}]
    write_lines(Path("chain") / "run4" / "journal.jsonl", events)
    assert cli.main(["status", "chain"]) == 0
    _, three, four = rows_of(capsys.readouterr().out)
    assert three[:7] == ["run3", "-", "-", "-", "20 of 15", "-", "stopped by ann@login"]
    assert four[:7] == ["run4", "-", "-", "-", "20 of 10, finished", "run3, step 10", "done"]


@pytest.mark.slow
@pytest.mark.nemo
@pytest.mark.vllm
@pytest.mark.timeout(900)
def test_a_real_stage_is_stopped_and_the_next_begins_from_its_checkpoint(root: Path, tmp_path: Path) -> None:
    folder = tmp_path / "chain"
    folder.mkdir()
    words = ["data=domains", "trainer.resets.at_steps=[]", "trainer.trace_steps=[]", "chain.after=null"]
    words += ["trainer.grpo.checkpoint_every=1"]
    job = Job(root, folder / "run3", "stage=run3", *words, "trainer.grpo.max_steps=100")
    job.until(lambda: len(metrics_of(folder / "run3")) >= 2)
    prorl = [sys.executable, "-m", "nemo_prorl.cli"]
    env = {**os.environ, "PYTHONPATH": str(root), "OMP_NUM_THREADS": "1"}
    subprocess.run([*prorl, "control", str(folder / "run3"), "stop"], check=True, cwd=root, env=env, timeout=300)
    assert job.wait() == 75, job.text()
    picked = sorted((folder / "run3" / "checkpoints").glob("step-*"))[-2]
    command = [*prorl, "launch", "--from", str(picked), "--stages", "run4", "--here", *SMALL, *words[:3]]
    command += ["trainer.grpo.max_steps=2"]
    told = subprocess.run(command, cwd=root, env=env, timeout=600, check=True, stdout=subprocess.PIPE, text=True).stdout
    start = events_of(folder / "run4")[0]
    assert start["start_from"] == str(picked)
    assert metrics_of(folder / "run4")[0]["kl"] == 0.0
    where = f"run3, step {int(picked.name[5:])}"
    table = rows_of(told)
    [three] = [row for row in table if row[0] == "run3"]
    [four] = [row for row in table if row[0] == "run4"]
    assert three[3].startswith("stopped by ")
    assert four[2:4] == [where, "done"]
    [curve] = read_curves([folder])
    text = diary_text(curve)
    before, after = text.split("\nrun4\n")
    assert "stopped by " in before
    assert f"run4 began from {where}" in before
    assert f"from {where}" in after
    assert "trainer.grpo.unfinished_factor: 1.0 → 0.1" in after
    assert "after step 0: stage run4 begins" in after
    for signal in ("validation", "KL", "entropy", "response length", "responses without eos"):
        assert signal in before
        assert signal in after
    assert yaml.safe_load((folder / "run4" / "config.yaml").read_text())["trainer"]["resets"]["mode"] == "advise"
