"""What the processes of a node are started with.  Whole runs are in tests/test_main_job.py."""

import argparse
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from omegaconf import DictConfig

from nemo_prorl import stacks
from nemo_prorl.launcher import supervisor
from nemo_prorl.launcher.health import Health
from nemo_prorl.launcher.peers import NodeAddress, Peers, StepOutcome
from nemo_prorl.launcher.processes import Child, MergedLog, ProcessFailed
from nemo_prorl.launcher.supervisor import NodeSupervisor
from nemo_prorl.lifecycle.stopping import FORWARDED_AS, JOB_START
from nemo_prorl.rewards.options import add_server_arguments
from nemo_prorl.rollout.engine.endpoint import served_file
from nemo_prorl.rollout.engine.server import arguments
from nemo_prorl.rollout.weight_store import WeightStore, weights_folder
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
    return NodeSupervisor(cfg, folder, ["chain_sum"], MergedLog(folder / "all.log"))._ranks(None)[0]


def test_memory_that_a_tensor_freed_on_a_cpu_is_there_for_the_next(tmp_path: Path) -> None:
    env = dict(trainer(tmp_path).env)
    said = subprocess.run([sys.executable, "-c", FAULTS], env=env, capture_output=True, text=True, check=True)
    once = MEBIBYTES * 2**20 // 4096
    assert int(said.stdout) < 2 * once


@pytest.mark.parametrize(
    ("place", "host"), [(NodeAddress(0, 1, "node7"), "127.0.0.1"), (NodeAddress(1, 2, "node7"), "node7")]
)
def test_services_are_reached_where_they_listen(tmp_path: Path, place: NodeAddress, host: str) -> None:
    """On one node they listen at the loopback address, also in a Slurm job that knows the node by its name."""
    cfg: DictConfig = load(
        [f"run_dir={tmp_path}", f"trainer.num_nodes={place.nodes}", f"rollout.engines={place.nodes}"]
    )
    peers = Peers(tmp_path, place, "1", 0.1)
    node = NodeSupervisor(cfg, tmp_path, ["chain_sum"], MergedLog(tmp_path / "all.log"), None, peers)
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
    merged, place = MergedLog(tmp_path / "all.log"), NodeAddress(1, 2, "b")
    engine = Child("engine-1", [sys.executable, "-c", "exit(7)"], {}, tmp_path / "engine-1.log", merged)
    engine.start()
    assert engine.process is not None
    engine.process.wait(20)
    node = NodeSupervisor(cfg, tmp_path, ["chain_sum"], merged, None, Peers(tmp_path, place, "1", 0.1))
    health: Any = None
    end = node._watch([engine], [], health)
    assert (end.code, end.host, end.process, end.status) == (1, "b", "engine-1", 7)


# Ends with the number of the first signal that reaches a handler, as a rank's do.
WAITS = f"""
import signal, sys, time
for number in {[int(number) for number in FORWARDED_AS.values()]}:
    signal.signal(number, lambda number, _: sys.exit(number))
open(sys.argv[1], "w").close()
time.sleep(20)
"""


@pytest.mark.parametrize("number", FORWARDED_AS)
def test_a_rank_learns_which_signal_it_was(number: signal.Signals, tmp_path: Path) -> None:
    cfg: DictConfig = load([f"run_dir={tmp_path}"])
    merged, ready = MergedLog(tmp_path / "all.log"), tmp_path / "ready"
    rank = Child("trainer-0", [sys.executable, "-c", WAITS, str(ready)], {}, tmp_path / "trainer-0.log", merged)
    rank.start()
    while not ready.exists():
        time.sleep(0.02)
    with NodeSupervisor(cfg, tmp_path, ["chain_sum"], merged)._forwarding_signals([], [rank]):
        signal.raise_signal(number)
    assert rank.process is not None
    assert rank.process.wait(20) == FORWARDED_AS[number]


# --- what processes are told -----------------------------------------------------------------------------------------


def node_of_two(folder: Path, *overrides: str) -> NodeSupervisor:
    """The second node of two, each with two ranks and two engines."""
    sizes = ["trainer.num_nodes=2", "trainer.devices=2", "rollout.engines=4", "rollout.eager=true"]
    cfg: DictConfig = load([f"run_dir={folder}", *sizes, *overrides])
    place = NodeAddress(1, 2, "node1", "node0", 4321)
    return NodeSupervisor(cfg, folder, ["math", "mine"], MergedLog(folder / "all.log"), None, Peers(folder, place, "1"))


def test_an_engine_is_told_the_settings_of_the_run(tmp_path: Path) -> None:
    overrides = ["rollout.dtype=bfloat16", "rollout.kv_cache_mb=77", "trainer.grpo.context_tokens=333"]
    overrides += ["rollout.max_num_seqs=44", "rollout.max_batched_tokens=555"]
    [_, *engines] = node_of_two(tmp_path, *overrides).services(tmp_path / "weights")
    assert [engine.name for engine in engines] == ["engine-2", "engine-3"]
    args = arguments(list(engines[1].command)[2:])
    assert (args.index, args.dtype, args.kv_mb, args.max_model_len) == (3, "bfloat16", 77, 333)
    assert (args.max_num_seqs, args.max_batched_tokens, args.tp, args.eager) == (44, 555, 1, True)
    alone = node_of_two(tmp_path, *overrides).services(tmp_path / "weights", engines=1, alone=True)[1]
    assert arguments(list(alone.command)[2:]).kv_mb == 77
    assert (args.host, args.public_host, args.parent_pid) == ("0.0.0.0", "node1", os.getpid())
    assert Path(args.endpoint_file) == engines[1].endpoint == tmp_path / "endpoints" / "engine-3.json"


def test_an_engine_may_end_as_before_once_any_engine_of_the_run_has_served(tmp_path: Path) -> None:
    rewards, *engines = node_of_two(tmp_path).services(tmp_path / "weights")
    (tmp_path / "endpoints").mkdir()
    assert rewards.has_served is None
    told = [engine.has_served for engine in engines if engine.has_served is not None]
    assert [has_served() for has_served in told] == [False, False]
    served_file(str(tmp_path / "endpoints" / "engine-0.json")).touch()  # of the other node
    assert [has_served() for has_served in told] == [True, True]


def test_the_reward_server_is_told_tasks_functions_and_settings(tmp_path: Path) -> None:
    overrides = ["+rewards.functions.mine=/f.py:score", "rewards.workers=3", "rewards.unsafe_no_sandbox=true"]
    overrides += ["rewards.functions_time_s=33", "+rewards.functions.unused=/f.py:other"]
    server = node_of_two(tmp_path, *overrides, "+rewards.plugins.math.time_budget_s=9.5")._rewards()
    parser = argparse.ArgumentParser()
    add_server_arguments(parser)
    args = parser.parse_args(list(server.command)[3:])
    assert (args.tasks, args.workers, args.unsafe_no_sandbox) == ("math,mine=/f.py:score", 3, True)
    assert args.settings == {"math": {"time_budget_s": 9.5}, "mine=/f.py:score": {"time_budget_s": 33.0}}
    assert args.endpoint_file == server.endpoint == tmp_path / "endpoints" / "rewards-1.json"


def test_a_rank_knows_its_place_and_when_its_job_began(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SLURM_PROCID", "1")
    monkeypatch.setenv("SLURM_JOB_ID", "8")
    monkeypatch.delenv(JOB_START, raising=False)
    ranks = node_of_two(tmp_path)._ranks(None)
    assert [rank.name for rank in ranks] == ["trainer-2", "trainer-3"]
    env = dict(ranks[1].env)
    wanted = {"RANK": "3", "LOCAL_RANK": "1", "WORLD_SIZE": "4", "LOCAL_WORLD_SIZE": "2", "GROUP_RANK": "1"}
    wanted |= {"GROUP_WORLD_SIZE": "2", "MASTER_ADDR": "node0", "MASTER_PORT": "4321", "SLURM_JOB_ID": "8"}
    assert {key: env.get(key) for key in wanted} == wanted
    assert "SLURM_PROCID" not in env  # libraries would take the rank for a task of Slurm
    assert (env[stacks.SUPERVISOR], float(env[JOB_START])) == (str(os.getpid()), supervisor._STARTED)
    for name in ("SLURM_JOB_START_TIME", JOB_START):
        monkeypatch.setenv(name, f"{len(name)}")
        assert node_of_two(tmp_path)._ranks(None)[0].env[JOB_START] == f"{len(name)}"


# --- a whole node, of processes that only wait or end ---------------------------------------------------------------


class SmallNode(NodeSupervisor):
    """A node of one engine and ranks that run these programs.

    `WAIT` in the program of a rank waits until the engine has begun as often as it says.
    """

    def __init__(self, folder: Path, engine: str, *ranks: str, stop_s: float = 0.2) -> None:
        for name in ("endpoints", "logs"):
            (folder / name).mkdir(parents=True, exist_ok=True)
        cfg: DictConfig = load([f"run_dir={folder}", f"trainer.deadlines.stop_s={stop_s}"])
        self.failures: list[Any] = []
        self.stops: list[str] = []
        events: Any = SimpleNamespace(
            update=lambda: None,
            failure=lambda what, **about: self.failures.append(about),
            stopped=self.stops.append,
        )
        super().__init__(cfg, folder, ["chain_sum"], MergedLog(folder / "all.log"), events)
        wait = f"import time, os\nwhile not os.path.exists('{folder}/begun') or os.path.getsize('{folder}/begun') < "
        self.programs = [program.replace("WAIT ", wait) for program in ranks]
        self.engine = f"open('{folder}/begun', 'a').write('x')\n{engine}"
        self.children: list[Child] = []

    def services(self, weights: Path, engines: int | None = None, alone: bool = False) -> list[Child]:
        engine = self.child("engine-0", self.engine, 3)
        engine.has_served = self._has_engine_served
        return [engine]

    def _ranks(self, only: str | None) -> list[Child]:
        return [self.child(f"trainer-{k}", program, 0) for k, program in enumerate(self.programs)]

    def child(self, name: str, program: str, restarts: int) -> Child:
        child = self._child(name, [sys.executable, "-c", program], {}, restarts, False)
        self.children.append(child)
        return child

    def codes(self) -> list[int | None]:
        return [None if child.process is None else child.process.poll() for child in self.children]


SLEEPS = "import time; time.sleep(60)"


@pytest.mark.parametrize(
    ("ranks", "code", "process", "status"),
    [
        (["", ""], 0, "", None),
        (["exit(75)", ""], 75, "", None),
        (["exit(4)", "exit(75)"], 4, "trainer-0", 4),
        (["exit(7)"], 1, "trainer-0", 7),
        (["exit(1)", "import os; os.kill(os.getpid(), 9)"], 1, "trainer-1", -9),  # the cause of the other's end
    ],
)
def test_a_run_ends_as_its_ranks(
    ranks: Sequence[str], code: int, process: str, status: int | None, tmp_path: Path
) -> None:
    node = SmallNode(tmp_path, SLEEPS, *ranks)
    store = WeightStore(weights_folder(tmp_path))
    stale = store.path_of(3)
    stale.touch()  # of an earlier process, killed
    end = node.run()
    assert (end.code, end.process, end.status) == (code, process, status)
    assert [about["process"] for about in node.failures] == ([process] if process else [])
    assert node.codes()[0] == -signal.SIGTERM
    assert not stale.parent.exists()


def test_a_rank_that_was_killed_may_have_lacked_memory(tmp_path: Path) -> None:
    killed = "import os; os.kill(os.getpid(), 9)"
    node = SmallNode(tmp_path, SLEEPS, killed)
    says = "; it was killed by SIGKILL, often because memory was exhausted (dmesg, or the memory limit of the job);"
    assert node.run().what.endswith(f"{says} the same command begins again, because no checkpoint was complete")
    assert "SIGKILL" not in SmallNode(tmp_path / "other", SLEEPS, "exit(7)").run().what
    assert "; it was killed by SIGKILL" in SmallNode(tmp_path / "shell", SLEEPS, "exit(137)").run().what


def test_stale_weights_are_gone_before_anything_starts(tmp_path: Path) -> None:
    stale = WeightStore(weights_folder(tmp_path)).path_of(3)
    stale.touch()
    assert SmallNode(tmp_path, SLEEPS, f"import os; exit(4 if os.path.exists('{stale}') else 0)").run().code == 0


def test_a_service_that_ends_or_is_to_be_restarted_starts_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    looks: list[int] = []
    monkeypatch.setattr(Health, "update", lambda self: looks.append(1))
    assert SmallNode(tmp_path / "ended", "exit(1)", "WAIT 2: time.sleep(0.02)").run().code == 0
    asked = tmp_path / "asked" / "endpoints" / "engine-0.restart"
    asks = f"WAIT 1: time.sleep(0.02)\nopen('{asked}', 'w').close()\nWAIT 2: time.sleep(0.02)"
    assert SmallNode(tmp_path / "asked", SLEEPS, asks).run().code == 0
    assert not asked.exists()
    assert looks


def deaf(number: int, times: int) -> str:
    """Return the program of a rank that sends signals to the node, and does not end by those that it gets."""
    ignored = [int(signal.SIGTERM), *(int(one) for one in FORWARDED_AS.values())]
    return f"""import os, signal, time
for number in {ignored}: signal.signal(number, signal.SIG_IGN)
for _ in range({times}): os.kill({os.getpid()}, {int(number)}); time.sleep(0.3)
time.sleep(600)"""


@pytest.mark.parametrize("number", FORWARDED_AS)
@pytest.mark.parametrize("kept", [False, True])
def test_a_second_signal_kills_all_processes(number: signal.Signals, kept: bool, tmp_path: Path) -> None:
    """The rank would be given 500 s otherwise."""
    if kept:
        (tmp_path / "checkpoints" / "step-000007").mkdir(parents=True)
        (tmp_path / "checkpoints" / "step-000007" / "state.json").write_text("{}")
    node = SmallNode(tmp_path, SLEEPS, deaf(number, 2), stop_s=500.0)
    end = node.run()
    assert node.codes() == [-signal.SIGKILL, -signal.SIGKILL]
    onward = "continues after step-000007" if kept else "begins again, because no checkpoint was complete"
    assert (end.code, end.what) == (75 if kept else 1, f"all processes were killed; the same command {onward}")


@pytest.mark.parametrize("served", [False, True])
def test_ranks_are_given_time_to_save_only_after_the_first_response(served: bool, tmp_path: Path) -> None:
    saves = "import signal, time; signal.signal(15, lambda *_: exit(75)); time.sleep(600)"
    node = SmallNode(tmp_path, "raise ValueError('no kernel')", saves, stop_s=500.0)
    if served:
        served_file(str(tmp_path / "endpoints" / "engine-0.json")).touch()
    with pytest.raises(ProcessFailed, match="4 times within an hour" if served else "twice .*: ValueError: no kernel"):
        node.run()
    assert node.codes() == [1, 75 if served else -signal.SIGKILL]


def test_a_second_signal_while_processes_are_stopped_kills_them(tmp_path: Path) -> None:
    """A run that failed gives its other ranks, too, time to end; this one asks for a stop instead."""
    asks = f"""import os, signal, time
def ask(number, frame):
    signal.signal(15, signal.SIG_IGN)
    for _ in range(2): os.kill({os.getpid()}, 15); time.sleep(0.3)
signal.signal(15, ask)
while True: time.sleep(1)"""
    node = SmallNode(tmp_path, SLEEPS, "import time; time.sleep(1); exit(7)", asks, stop_s=500.0)
    assert node.run().status == 7
    assert node.codes()[2] == -signal.SIGKILL


def test_a_rank_that_does_not_handle_signals_yet_ends_the_run_at_the_first(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    sends = f"import os, time; os.kill({os.getpid()}, {int(signal.SIGINT)}); time.sleep(600)"
    end = (node := SmallNode(tmp_path, SLEEPS, sends)).run()
    assert (end.code, end.process, node.failures) == (1, "", [])
    assert node.stops == [end.what]
    assert end.what.startswith("stopped while the trainer started; the same command begins again")
    assert "received SIGINT; the run stops after this step, or now if it is starting" in caplog.text


def test_the_other_nodes_are_told_that_a_stop_was_requested(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[bool] = []

    def agree(self: Peers, end: StepOutcome | None, stop_requested: bool = False) -> StepOutcome:
        told.append(stop_requested)
        return end or StepOutcome(1)

    monkeypatch.setattr(Peers, "agree", agree)
    stops = (
        f"import os, signal, time\nsignal.signal(15, lambda *_: exit(75))\nos.kill({os.getpid()}, 15)\ntime.sleep(60)"
    )
    assert SmallNode(tmp_path, SLEEPS, stops).run().code == 75
    assert SmallNode(tmp_path, SLEEPS, "").run().code == 0
    assert told == [True, False]


def test_only_node_0_tells_why_the_run_failed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The lines of all nodes are in one log."""
    monkeypatch.setattr(Peers, "agree", lambda self, end, stop_requested=False: end)
    told = []
    for number in (0, 1):
        caplog.clear()
        node = SmallNode(tmp_path, SLEEPS)
        node.place = NodeAddress(node=number, nodes=2)
        node._here = f"node{number}"
        node._over(StepOutcome(1, "the engine is lost", "node0"))
        told.append((len(node.failures), [record.getMessage() for record in caplog.records]))
    assert told == [(1, ["the engine is lost"]), (0, [])]  # each line begins with the name of its node
