"""The emulated cluster itself: it behaves as a cluster does, and leaves nothing behind."""

import os
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from tests.cluster.emulated import ROOT, Ended, NoSlurm, Slurm, cluster

pytestmark = pytest.mark.starts


def script(folder: Path, text: str) -> str:
    path = folder / "job.sh"
    path.write_text(f"#!/bin/bash\n{text}\n")
    return str(path)


def test_two_tasks_run_on_two_nodes(slurm: Slurm, tmp_path: Path) -> None:
    job = slurm.sbatch("--nodes=2", f"--output={tmp_path}/%j.out", "--wrap", "srun hostname; exit 3")
    assert slurm.wait(job, 30) == Ended("FAILED", 3, 0)
    assert sorted(slurm.output(job).split()) == ["node0", "node1"]
    slurm.no_orphans()


@pytest.mark.slow
def test_a_job_that_requeues_itself_keeps_its_number(slurm: Slurm, tmp_path: Path) -> None:
    text = 'n=${SLURM_RESTART_COUNT:-0}; echo "$SLURM_JOB_ID-$n"; [ $n = 1 ] || scontrol requeue $SLURM_JOB_ID'
    job = slurm.sbatch("--requeue", "--open-mode=append", f"--output={tmp_path}/%j.out", script(tmp_path, text))
    assert slurm.wait(job, 60) == Ended("COMPLETED", 0, 1)
    assert [word for word in slurm.output(job).split() if word.startswith(f"{job}-")] == [f"{job}-0", f"{job}-1"]


def test_processes_of_a_job_are_found_wherever_they_are(slurm: Slurm, tmp_path: Path) -> None:
    """A child in a session of its own whose task was killed is an orphan that Slurm itself does not find here."""
    task = f"setsid sleep 300 >/dev/null 2>&1 & echo $! > {tmp_path}/child; exec sleep 300"
    job = slurm.sbatch(f"--output={tmp_path}/%j.out", "--wrap", f"srun bash -c '{task}'")
    end = time.monotonic() + 20
    while not (tmp_path / "child").is_file() or len(slurm.processes()) < 5:  # batch script, srun (two), task, child
        assert time.monotonic() < end
        time.sleep(0.1)
    child = psutil.Process(int((tmp_path / "child").read_text()))
    task_process = child.parent()
    assert task_process is not None
    task_process.kill()
    slurm.wait(job, 20)
    with pytest.raises(AssertionError, match="sleep 300"):
        slurm.no_orphans(seconds=1)
    slurm.clean_up()
    slurm.no_orphans(seconds=10)  # a process lives a moment longer than its SIGKILL


@pytest.mark.slow
def test_a_job_goes_on_without_the_node_that_crashed(slurm: Slurm, tmp_path: Path) -> None:
    text = 'srun bash -c "echo on-$SLURM_RESTART_COUNT-\\$(hostname)"; [ -n "$SLURM_RESTART_COUNT" ] || sleep 300'
    options = ["--nodes=2", "--requeue", "--open-mode=append", f"--output={tmp_path}/%j.out"]
    job = slurm.sbatch(*options, script(tmp_path, text))
    slurm.wait_for(job, "RUNNING", seconds=20)
    slurm.node_crash("node1")
    assert slurm.wait(job, 90) == Ended("COMPLETED", 0, 1)
    second = {word for word in slurm.output(job).split() if word.startswith("on-1-")}
    assert len(second) == 2
    assert "on-1-node1" not in second


def test_it_is_taken_down_when_its_owner_is_killed(slurm_cluster: Slurm) -> None:
    code = (
        "import sys, time\nfrom tests.cluster.emulated import cluster\n"
        "with cluster(nodes=1) as slurm:\n    slurm.sbatch('--output=/dev/null', '--wrap', 'exec sleep 300')\n"
        "    print(slurm.folder, flush=True)\n    time.sleep(300)\n"
    )
    with subprocess.Popen([sys.executable, "-c", code], cwd=ROOT, stdout=subprocess.PIPE, text=True) as owner:
        assert owner.stdout is not None
        folder = Path(owner.stdout.readline().strip())
        assert (folder / "run" / "slurmctld.pid").is_file()
        daemons = [psutil.Process(int(path.read_text().split()[0])) for path in (folder / "run").glob("*d*.pid")]
        assert len(daemons) >= 3
        owner.kill()
    end = time.monotonic() + 40
    while folder.exists() or any(daemon.is_running() for daemon in daemons):
        assert time.monotonic() < end
        time.sleep(0.2)
    assert str(folder) not in Path("/etc/hosts").read_text()


def test_without_root_it_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    with pytest.raises(NoSlurm, match="as root"), cluster(nodes=1):
        pass
