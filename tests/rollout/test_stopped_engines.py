"""What an engine leaves behind when one of its processes is killed.  Runs after the tests that share the engine."""

import os
import signal
from pathlib import Path

import pytest

from nemo_prorl.deadlines import Deadline
from tests.rollout.engines import (
    EngineProcess,
    group_members,
    launcher_of,
    rss_mb,
)

pytestmark = pytest.mark.vllm


@pytest.mark.slow
def test_no_process_is_left_when_the_guard_is_killed(engine: EngineProcess) -> None:
    guard = next(p for p in group_members(engine.pid) if p != engine.pid and rss_mb(p) < 100)
    os.kill(guard, signal.SIGKILL)
    engine.wait_gone(20)
    assert engine.process is not None
    assert engine.process.returncode == 70


@pytest.mark.slow
@pytest.mark.parametrize("victim", ["launcher", "server"])
def test_no_process_is_left_after_a_kill_during_the_start(
    vllm_python: str, models: dict[str, Path], tmp_path: Path, victim: str
) -> None:
    engine = EngineProcess(vllm_python, models["tied0"], tmp_path)
    launcher = launcher_of(engine)
    pid_file = tmp_path / "launched.pid"
    try:
        Deadline(60, "the engine's process").wait_until(pid_file.exists)
        server = int(pid_file.read_text())
        # server, guard, multiprocessing's tracker, and the core, which has not come to any code of ours yet
        Deadline(120, "the core's process").wait_until(lambda: len(group_members(server)) >= 4)
        assert not engine.endpoint_file.exists()
        os.kill(launcher.pid if victim == "launcher" else server, signal.SIGKILL)
        Deadline(10, "the end of all processes").wait_until(lambda: not group_members(server))
    finally:
        launcher.kill()
        launcher.wait()
    assert not engine.endpoint_file.exists()


@pytest.mark.slow
def test_no_process_is_left_when_the_server_is_killed(engine: EngineProcess) -> None:
    assert len(group_members(engine.pid)) >= 4  # server, guard, core, multiprocessing's tracker
    os.kill(engine.pid, signal.SIGKILL)
    engine.wait_gone(10)
