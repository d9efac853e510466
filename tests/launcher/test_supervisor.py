"""What the processes of a node are started with.  Whole runs are in tests/test_main_job.py."""

import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from omegaconf import DictConfig

from nemo_prorl.launcher.peers import Peers, Place
from nemo_prorl.launcher.processes import Child, MergedLog
from nemo_prorl.launcher.supervisor import Node
from nemo_prorl.lifecycle.stopping import FORWARDED_AS
from nemo_prorl.settings import load

pytestmark = pytest.mark.starts

MEBIBYTES, TURNS = 40, 20
# Page faults while a process takes and frees the same memory again and again.
FAULTS = f"""
import resource
before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
for _ in range({TURNS}):
    bytearray({MEBIBYTES} << 20)
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""


def trainer(folder: Path, *overrides: str) -> Child:
    cfg: DictConfig = load([f"run_dir={folder}", *overrides])
    return Node(cfg, folder, ["chain_sum"], MergedLog(folder / "all.log"))._ranks(None)[0]


def test_memory_that_a_tensor_freed_on_a_cpu_is_there_for_the_next(tmp_path: Path) -> None:
    env = dict(trainer(tmp_path).env)
    said = subprocess.run([sys.executable, "-c", FAULTS], env=env, capture_output=True, text=True, check=True)
    once = MEBIBYTES * 2**20 // 4096
    assert int(said.stdout) < 2 * once


@pytest.mark.parametrize(("place", "host"), [(Place(0, 1, "node7"), "127.0.0.1"), (Place(1, 2, "node7"), "node7")])
def test_services_are_reached_where_they_listen(tmp_path: Path, place: Place, host: str) -> None:
    """On one node they listen at the loopback address, also in a Slurm job that knows the node by its name."""
    cfg: DictConfig = load(
        [f"run_dir={tmp_path}", f"trainer.num_nodes={place.nodes}", f"rollout.engines={place.nodes}"]
    )
    peers = Peers(tmp_path, place, "1", 0.1)
    node = Node(cfg, tmp_path, ["chain_sum"], MergedLog(tmp_path / "all.log"), None, place, peers)
    command = node._rewards().command
    assert command[command.index("--public-host") + 1] == host
    assert command[command.index("--host") + 1] == ("0.0.0.0" if place.nodes > 1 else host)


def test_what_the_user_set_stays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MALLOC_TRIM_THRESHOLD_", "1")
    env = trainer(tmp_path, "+launch.env.MALLOC_MMAP_THRESHOLD_='2'").env
    assert (env["MALLOC_TRIM_THRESHOLD_"], env["MALLOC_MMAP_THRESHOLD_"]) == ("1", "2")


def test_a_service_that_used_up_its_restarts_is_named(tmp_path: Path) -> None:
    """Without its name and status, this end would be blamed before the rank whose failure came first."""
    cfg: DictConfig = load([f"run_dir={tmp_path}"])
    merged, place = MergedLog(tmp_path / "all.log"), Place(1, 2, "b")
    engine = Child("engine-1", [sys.executable, "-c", "exit(7)"], {}, tmp_path / "engine-1.log", merged)
    engine.start()
    assert engine.process is not None
    engine.process.wait(20)
    node = Node(cfg, tmp_path, ["chain_sum"], merged, None, place, Peers(tmp_path, place, "1", 0.1))
    health: Any = None
    end = node._watch([engine], [], health)
    assert (end.code, end.host, end.process, end.status) == (1, "b", "engine-1", 7)


# Ends with the number of the first signal that it gets.
WAITS = f"""
import signal, sys
expected = {[int(number) for number in FORWARDED_AS.values()]}
signal.pthread_sigmask(signal.SIG_BLOCK, expected)
open(sys.argv[1], "w").close()
sys.exit(signal.sigwait(expected))
"""


@pytest.mark.parametrize("number", FORWARDED_AS)
def test_a_rank_learns_which_signal_it_was(number: signal.Signals, tmp_path: Path) -> None:
    cfg: DictConfig = load([f"run_dir={tmp_path}"])
    merged, ready = MergedLog(tmp_path / "all.log"), tmp_path / "ready"
    rank = Child("trainer-0", [sys.executable, "-c", WAITS, str(ready)], {}, tmp_path / "trainer-0.log", merged)
    rank.start()
    while not ready.exists():
        time.sleep(0.02)
    with Node(cfg, tmp_path, ["chain_sum"], merged)._forwarding_signals([rank]):
        signal.raise_signal(number)
    assert rank.process is not None
    assert rank.process.wait(20) == FORWARDED_AS[number]
