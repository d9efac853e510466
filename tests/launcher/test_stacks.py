"""The stacks of all processes of a node, written while they hang."""

import os
import signal
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from nemo_prorl import stacks
from nemo_prorl.deadlines import Deadline
from nemo_prorl.launcher.processes import Child, MergedLog, stop_all
from nemo_prorl.launcher.stack_writer import StackWriter

pytestmark = pytest.mark.starts

# A process whose only thread blocks within C code, below it a process that does not know the signal.
HANGS = """
import select, subprocess, sys
from nemo_prorl import stacks
stacks.register()
below = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
def wait_for_ever():
    print(below.pid, flush=True)
    select.select([], [], [])
wait_for_ever()
"""


@pytest.fixture
def hanging(tmp_path: Path) -> Iterator[Child]:
    variables = {stacks.VARIABLE: str(tmp_path / "stacks-0.txt"), stacks.SUPERVISOR: str(os.getpid())}
    command, merged = [sys.executable, "-c", HANGS], MergedLog(tmp_path / "all.log")
    child = Child("engine-3", command, {**os.environ, **variables}, tmp_path / "engine-3.log", merged)
    child.start()
    Deadline(60, "its first line").wait_until(lambda: bool(child.tail))
    yield child
    stop_all([child], 0.0, quiet=True)


def test_each_process_says_where_it_is_and_none_is_ended(hanging: Child, tmp_path: Path) -> None:
    assert hanging.process is not None
    StackWriter([hanging], tmp_path / "stacks-0.txt").write()
    text = (tmp_path / "stacks-0.txt").read_text()
    _, supervisor, engine, below = text.split("\n---- ")
    assert supervisor.startswith(f"supervisor, process {os.getpid()}, state R (running): ")
    assert "in test_each_process_says_where_it_is_and_none_is_ended" in supervisor
    assert engine.startswith(f"engine-3, process {hanging.process.pid}, state S (sleeping): ")
    assert "in wait_for_ever" in engine
    assert below.startswith(f"engine-3, process {hanging.tail[0]}, state S (sleeping): ")
    assert len(below.strip().splitlines()) == 1  # the signal would have ended it
    assert hanging.process.poll() is None
    assert Path(f"/proc/{hanging.tail[0]}").exists()


def test_a_stopped_process_is_named_as_such_and_does_not_hold_up_the_rest(hanging: Child, tmp_path: Path) -> None:
    hanging.signal(signal.SIGSTOP)
    assert hanging.process is not None
    stat = Path(f"/proc/{hanging.process.pid}/stat")
    Deadline(30, "its stop").wait_until(lambda: ") T " in stat.read_text())  # the kernel stops it a little later
    began = time.monotonic()
    StackWriter([hanging], tmp_path / "stacks-0.txt").write()
    assert time.monotonic() - began < 30
    assert ", state T (stopped): " in (tmp_path / "stacks-0.txt").read_text()


def test_requests_of_all_ranks_of_a_node_are_one(hanging: Child, tmp_path: Path) -> None:
    file = tmp_path / "stacks-0.txt"
    writer = StackWriter([hanging], file)
    before = signal.signal(stacks.SIGNAL, writer.ask)
    try:
        for _ in range(3):
            os.environ[stacks.SUPERVISOR] = str(os.getpid())
            stacks.request()
            time.sleep(0.1)
            writer.update()
    finally:
        signal.signal(stacks.SIGNAL, before)
        del os.environ[stacks.SUPERVISOR]
    Deadline(30, "the stacks").wait_until(lambda: "in wait_for_ever" in file.read_text())
    assert file.read_text().count("==== ") == 1
