"""Whole runs in which something hangs: the alarm names it within the step, with the stacks of all processes."""

import time
from pathlib import Path
from typing import Any

import pytest

from tests.whole_runs import Job, events_of, metrics_of

pytestmark = [pytest.mark.nemo, pytest.mark.vllm, pytest.mark.slow, pytest.mark.timeout(900)]

LONG = [
    *("trainer.grpo.max_steps=40", "trainer.grpo.validate_every=40", "trainer.grpo.checkpoint_every=40"),
    *("trainer.resets.at_steps=[]", "trainer.trace_steps=[]", "trainer.warmup.steps=10", "data.tasks=[puzzles]"),
]
# Code at the start of each process.  Waits are reported from 2 s on, not from 60 s on.
ALL = """
import os, pathlib, sys, time
def begun():
    return pathlib.Path(__file__).with_name("now").exists()
if "nemo_prorl.rank" in sys.orig_argv:
    from nemo_prorl.lifecycle.watchdog import Watchdog
    Watchdog.__init__.__defaults__ = (2.0,)
"""
RANK_SLEEPS = """
if "nemo_prorl.rank" in sys.orig_argv:
    from nemo_prorl.trainer import Trainer
    before_updates = Trainer.before_updates
    def nap(self, metrics):
        while os.environ["RANK"] == "1" and begun():
            time.sleep(0.1)
        return before_updates(self, metrics)
    Trainer.before_updates = nap
"""
REWARD_SLEEPS = """
if "nemo_prorl.rewards.worker" in sys.orig_argv:
    from nemo_prorl.rewards import interface
    judge = interface.judge
    def slow(plugin, request):
        if begun():
            time.sleep(3.9 * plugin.time_budget_s)  # the limit of wall time is 4 times the budget
        return judge(plugin, request)
    interface.judge = slow
"""


@pytest.fixture
def faults(tmp_path: Path) -> Path:
    """A folder for a fault, which begins when the file `now` is there."""
    folder = tmp_path / "faults"
    folder.mkdir()
    return folder


def end(job: Job) -> None:
    if job.process.poll() is None:
        job.kill_supervisor()


def alarm_of(job: Job, faults: Path) -> tuple[dict[str, Any], str]:
    """Run four steps, let the fault begin, and return the watchdog's alarm and the stacks."""

    def alarms() -> list[dict[str, Any]]:
        return [
            event for event in events_of(job.run_dir) if event["event"] == "alarm" and "no progress" in event["what"]
        ]

    stacks = job.run_dir / "logs" / "stacks-0.txt"
    job.until(lambda: len(metrics_of(job.run_dir)) >= 4)
    began = len(metrics_of(job.run_dir))
    (faults / "now").touch()
    job.until(lambda: bool(alarms()), 400)
    assert alarms()[0]["step"] in (began + 1, began + 2)
    assert len(metrics_of(job.run_dir)) == alarms()[0]["step"] - 1  # within the step
    job.until(lambda: "\n---- trainer-" in stacks.read_text())
    time.sleep(5)  # for the processes that follow
    return alarms()[0], stacks.read_text()


def test_a_rank_that_sleeps_is_named(root: Path, tmp_path: Path, faults: Path) -> None:
    (faults / "sitecustomize.py").write_text(ALL + RANK_SLEEPS)
    job = Job(root, tmp_path / "run", *LONG, "trainer.devices=2", faults=faults)
    try:
        alarm, stacks = alarm_of(job, faults)
    finally:
        end(job)
    assert ": rank 1: in phase updates, " in alarm["what"]
    assert "> nap (sitecustomize.py:14); rank 0: waiting for other ranks in phase updates;" in alarm["what"]
    *_, first, second = stacks.split("\n---- ")
    assert first.startswith("trainer-0, process ")
    assert "distributed_c10d.py" in first
    assert second.startswith("trainer-1, process ")
    assert 'sitecustomize.py", line 14 in nap' in second
    assert "v1/engine/core.py" in stacks  # vLLM's core
    for name in ("rollout/engine/server.py", "rewards/server.py", "rewards/worker.py", "launcher/supervisor.py"):
        assert f'nemo_prorl/{name}", line' in stacks, name


def test_a_reward_that_comes_very_slowly_is_named(root: Path, tmp_path: Path, faults: Path) -> None:
    (faults / "sitecustomize.py").write_text(ALL + REWARD_SLEEPS)
    job = Job(root, tmp_path / "run", *LONG, faults=faults)
    try:
        alarm, stacks = alarm_of(job, faults)
    finally:
        end(job)
    assert ": rewards-0 has " in alarm["what"]
    assert "(task puzzles, prompt " in alarm["what"]
    assert "engine-0" not in alarm["what"]
    assert 'sitecustomize.py", line 14 in slow' in stacks
