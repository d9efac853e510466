"""slurm/stage.sbatch on a real Slurm: what a job does after each kind of end.

The training is a stand-in (short_run.py), so that only the job is slow.  With a real one: the tests marked slow here,
and benchmarks/cluster_faults.py.
"""

import json
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.cluster.emulated import Ended, Slurm
from tests.lines import read_lines

pytestmark = pytest.mark.starts

STEPS = 5


class Stage:
    """A stage in a run directory of its own; each `submit` is the same command."""

    def __init__(self, slurm: Slurm, folder: Path) -> None:
        self.slurm, self.run, self.log = slurm, folder / "run", folder / "job.log"
        self.python = folder / "python"
        here = Path(__file__).with_name("short_run.py")
        self.python.write_text(f'#!/bin/sh\nexec "{sys.executable}" "{here}" "$@"\n')
        self.python.chmod(0o755)
        (self.run / "orders").mkdir(parents=True)

    def submit(self, *flags: str, overrides: tuple[str, ...] = ()) -> int:
        ours = ["--nodes=2", "--gpus-per-node=0", "--mem=0", f"--output={self.log}", *flags]
        stage = ["slurm/stage.sbatch", "none", f"--python={self.python}", "cluster=slurm_dev", f"run_dir={self.run}"]
        settings = ["trainer.num_nodes=2", "rollout.engines=2"]
        return self.slurm.sbatch(*ours, *stage, *settings, f"trainer.grpo.max_steps={STEPS}", *overrides)

    def order(self, what: str) -> None:
        (self.run / "orders" / what).touch()

    def steps(self) -> list[str]:
        """The node of rank 0 at each step."""
        states = sorted((self.run / "checkpoints").glob("step-*/state.json"))
        return [json.loads(path.read_text())["by"] for path in states]

    def until_step(self, step: int) -> None:
        end = time.monotonic() + 60
        while len(self.steps()) < step:
            assert time.monotonic() < end, self.log.read_text() if self.log.exists() else "no log"
            time.sleep(0.05)

    def launches(self, event: str = "end") -> list[dict[str, Any]]:
        told = read_lines(self.run / "launches.jsonl")
        return [line for line in told if line["event"] == event]

    def next(self) -> list[tuple[int, str]]:
        """(exit code, what followed) of each attempt."""
        return [(told["code"], told["next"]) for told in self.launches()]


@pytest.fixture
def stage(slurm: Slurm, tmp_path: Path) -> Stage:
    return Stage(slurm, tmp_path)


def ended(stage: Stage, job: int, seconds: float) -> Ended:
    """How it ended; nothing of it may be left."""
    found = stage.slurm.wait(job, seconds)
    stage.slurm.no_orphans()
    return found


def test_a_stage_to_its_end(stage: Stage) -> None:
    job = stage.submit()
    assert ended(stage, job, 60) == Ended("COMPLETED", 0, 0)
    assert len(stage.steps()) == STEPS
    [begun], [end] = stage.launches("begin"), stage.launches()
    assert (begun["attempt"], begun["nodes"], begun["step"], begun["job"]) == (1, ["node0", "node1"], -1, str(job))
    assert (end["code"], end["next"], end["step"]) == (0, "done", STEPS)


@pytest.mark.parametrize("rank", [pytest.param(0, marks=pytest.mark.slow), 1])
def test_a_killed_rank_starts_the_run_again_on_the_same_nodes(stage: Stage, rank: int) -> None:
    stage.order("hold-2")
    job = stage.submit()
    stage.until_step(2)
    stage.order(f"kill-once-{rank}")
    assert ended(stage, job, 60) == Ended("COMPLETED", 0, 0)
    assert stage.next() == [(1, "again"), (0, "done")]
    told = stage.launches()[0]
    assert (told["host"], told["process"], told["status"]) == (f"node{rank}", f"trainer-{rank}", -9)
    assert stage.launches("begin")[1]["step"] >= 2


@pytest.mark.slow
def test_a_killed_supervisor_starts_the_run_again_and_is_the_cause(stage: Stage) -> None:
    """srun then sends SIGTERM to node 0."""
    stage.order("hold-2")
    job = stage.submit()
    stage.until_step(2)
    ours = [p for p in stage.slurm.processes() if p.environ().get("SLURM_NODEID") == "1"]
    (supervisor,) = [p for p in ours if any("launcher.node" in word for word in p.cmdline())]
    supervisor.kill()
    found = stage.slurm.wait(job, 90)  # unlike ours, the stand-ins of its services live on
    assert (found, stage.next()) == (Ended("COMPLETED", 0, 0), [(1, "again"), (0, "done")])
    assert stage.launches()[0]["host"] == "node1"


@pytest.mark.slow
def test_scancel_is_the_end_and_the_same_command_goes_on(stage: Stage) -> None:
    stage.order("hold-1")
    job = stage.submit()
    stage.until_step(1)
    stage.slurm.scancel(job)
    assert ended(stage, job, 20).state == "CANCELLED"
    assert stage.slurm.job(job)["Restarts"] == "0"
    assert len(stage.steps()) < STEPS  # a rank that is asked to stop lets go, and rank 0 may be at its next
    (stage.run / "orders" / "hold-1").unlink(missing_ok=True)  # scancel may kill before it asks
    again = stage.submit()
    assert ended(stage, again, 60) == Ended("COMPLETED", 0, 0)
    assert stage.slurm.state(job) == "CANCELLED"


@pytest.mark.slow
def test_near_the_time_limit_it_stops_and_requeues_itself(stage: Stage) -> None:
    stage.order("hold-1")
    job = stage.submit()
    stage.until_step(1)
    stage.slurm.scancel(job, "--batch", "--signal=USR1")  # what Slurm sends by --signal=B:USR1@600
    assert ended(stage, job, 90) == Ended("COMPLETED", 0, 1)
    assert stage.next() == [(75, "requeue"), (0, "done")]
    assert len(stage.steps()) == STEPS


def test_a_run_that_was_stopped_on_purpose_is_not_started_again(stage: Stage) -> None:
    stage.order("stop")
    job = stage.submit()
    assert ended(stage, job, 60) == Ended("FAILED", 75, 0)
    assert stage.next() == [(75, "give_up")], stage.log.read_text()


def test_another_number_of_nodes_is_refused(stage: Stage) -> None:
    job = stage.submit("--nodes=1")
    assert ended(stage, job, 30) == Ended("FAILED", 3, 0)
    assert "expected a job of 2 nodes (trainer.num_nodes=2); got 1" in stage.log.read_text()


@pytest.mark.slow
@pytest.mark.timeout(500)
def test_slurm_s_own_signal_before_the_limit_is_enough(stage: Stage) -> None:
    """100 s of work in starts of at most two minutes each, of which Slurm takes the last 90 s, or some more."""
    job = stage.submit("--time=2", "--signal=B:USR1@90", overrides=("trainer.grpo.max_steps=250",))
    found = ended(stage, job, 450)
    assert (found.state, found.code) == ("COMPLETED", 0)
    assert stage.next() == [*[(75, "requeue")] * found.restarts, (0, "done")]
    assert found.restarts >= 1
    assert len(stage.steps()) == 250


@pytest.mark.slow
def test_three_starts_without_a_new_checkpoint_are_enough(stage: Stage) -> None:
    stage.order("kill-0")
    job = stage.submit()
    assert ended(stage, job, 180) == Ended("FAILED", 1, 1)
    assert stage.next() == [(1, "again"), (1, "requeue"), (1, "again")]  # the second without the node to blame
    assert "made no new checkpoint" in stage.log.read_text()


@pytest.mark.slow
def test_a_node_that_fails_twice_is_left_out(stage: Stage) -> None:
    stage.order("kill-1")
    job = stage.submit()
    found = stage.slurm.wait_for(job, "RUNNING", seconds=20)
    assert found["NodeList"] == "node[0-1]"
    end = time.monotonic() + 120
    while stage.slurm.job(job)["Restarts"] == "0":
        assert time.monotonic() < end, stage.log.read_text()
        time.sleep(0.2)
    (stage.run / "orders" / "kill-1").unlink()
    assert ended(stage, job, 90) == Ended("COMPLETED", 0, 1)
    assert stage.next() == [(1, "again"), (1, "requeue"), (0, "done")]
    assert "node1" not in stage.launches()[-1]["nodes"]
    assert stage.slurm.job(job)["ExcNodeList"] == "node1"


@pytest.mark.slow
@pytest.mark.parametrize("fault", [Slurm.node_kill, Slurm.node_crash, Slurm.slurmd_kill])
@pytest.mark.parametrize("node", ["node0", "node1"])
def test_a_lost_node(stage: Stage, node: str, fault: Callable[[Slurm, str], None]) -> None:
    """Whoever notices first, Slurm or the job: the run goes on elsewhere, and no process of before takes part in it."""
    if node == "node0" and fault is Slurm.node_crash:
        pytest.skip("here the frozen leader keeps its lock, which a machine without power does not")
    job = stage.submit(overrides=("trainer.grpo.max_steps=100",))
    stage.until_step(2)
    fault(stage.slurm, node)
    end = time.monotonic() + 150
    while not any(node not in begun["nodes"] for begun in stage.launches("begin")):
        assert time.monotonic() < end, stage.log.read_text()
        time.sleep(0.5)
    assert stage.slurm.wait(job, 150) == Ended("COMPLETED", 0, 1)
    if fault is not Slurm.slurmd_kill:
        stage.slurm.node_start(node)  # what is frozen there is no orphan: the machine was off
    stage.slurm.no_orphans()
    assert stage.launches()[-1]["next"] == "done"
    assert len(stage.steps()) == 100


@pytest.mark.slow
def test_a_second_job_on_the_run_directory_is_refused(stage: Stage) -> None:
    longer = ("trainer.grpo.max_steps=60",)
    first = stage.submit(overrides=longer)
    stage.until_step(1)
    second = stage.submit(overrides=longer)
    assert stage.slurm.wait(second, 60) == Ended("FAILED", 2, 0)
    assert stage.slurm.state(first) == "RUNNING"
    assert f"Slurm job {first}" in stage.log.read_text()
    assert ended(stage, first, 90) == Ended("COMPLETED", 0, 0)
    assert len(stage.steps()) == 60
