"""How several nodes agree on the end of a run.  Whole runs on several nodes are in tests/cluster."""

import argparse
import errno
import json
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from nemo_prorl.deadlines import Deadline
from nemo_prorl.errors import DeadlineExceeded
from nemo_prorl.launcher import node, one_node, prepare
from nemo_prorl.launcher import peers as peers_module
from nemo_prorl.launcher.node import main
from nemo_prorl.launcher.peers import NodeAddress, NodeEnded, Peers, StepOutcome, blame
from nemo_prorl.launcher.processes import MergedLog

pytestmark = pytest.mark.starts


@pytest.fixture(autouse=True)
def signals_as_before() -> Iterator[None]:
    """A supervisor ignores SIGUSR1 in the end, and processes inherit that."""
    before = signal.getsignal(signal.SIGUSR1)
    yield
    signal.signal(signal.SIGUSR1, before)


KILLED = StepOutcome(1, "trainer-2 ended with status -9", "node2", "trainer-2", -9, at=3.0)
# NCCL aborts a rank when a peer is gone.
ABORTED = StepOutcome(1, "trainer-3 ended with status -6", "node3", "trainer-3", -6, at=2.0)
FAILED = StepOutcome(1, "trainer-0 ended with status 1", "node0", "trainer-0", 1, at=1.0)
BAD_DATA = StepOutcome(4, "trainer-1 ended with status 4", "node1", "trainer-1", 4, at=0.5)
WORN_OUT = StepOutcome(1, "engine-3 ended with status 1, 9 times within an hour", "node3", "engine-3", 1, at=4.0)
STOPPED = StepOutcome(75, at=0.1)


@pytest.mark.parametrize(
    ("ends", "cause"),
    [
        ([FAILED, KILLED], KILLED),
        ([WORN_OUT, FAILED], FAILED),
        ([WORN_OUT, STOPPED], WORN_OUT),
        ([FAILED, BAD_DATA], BAD_DATA),
        ([ABORTED, FAILED], FAILED),
        ([STOPPED, FAILED], FAILED),
        ([STOPPED, STOPPED], STOPPED),
        ([], None),
    ],
)
def test_the_cause_is_what_explains_the_other_ends(ends: list[StepOutcome], cause: StepOutcome | None) -> None:
    assert blame(ends) == cause


def peers_of(folder: Path, nodes: int, attempt: str = "1", seconds: float = 5.0) -> list[Peers]:
    return [Peers(folder, NodeAddress(k, nodes, f"node{k}"), attempt, seconds) for k in range(nodes)]


def test_nodes_begin_when_all_are_fit(tmp_path: Path) -> None:
    peers, met = peers_of(tmp_path, 3), list[list[str]]()
    others = [threading.Thread(target=lambda p=p: met.append(p.meet(Deadline(10, "the nodes")))) for p in peers[1:]]
    for thread in others:
        thread.start()
    assert not met
    assert peers[0].meet(Deadline(10, "the nodes")) == ["node1", "node2"]
    for thread in others:
        thread.join(10)
    assert sorted(met) == [["node0", "node1"], ["node0", "node2"]]


def test_a_node_that_does_not_come_is_named(tmp_path: Path) -> None:
    earlier = peers_of(tmp_path, 3, "0")
    earlier[2].write_end(KILLED)  # an earlier start's, whose processes may still be there
    leader, *_ = peers_of(tmp_path, 3)
    with pytest.raises(DeadlineExceeded, match="waited 0.1 s for the nodes: node 1, 2 of 3 did not report"):
        leader.meet(Deadline(0.1, "the nodes"))


def test_a_node_that_is_not_fit_ends_the_others_with_its_code(tmp_path: Path) -> None:
    leader, other = peers_of(tmp_path, 2, seconds=0.1)
    other.agree(StepOutcome(3, "rollout.python=/no/python is no Python", "node1"))
    with pytest.raises(NodeEnded, match="node1: rollout.python=/no/python") as caught:
        leader.meet(Deadline(10, "the nodes"))
    assert (caught.value.exit_code, caught.value.host) == (3, "node1")


def test_all_nodes_end_as_node_0_decides(tmp_path: Path) -> None:
    peers, decisions = peers_of(tmp_path, 3), dict[int, StepOutcome]()
    assert peers[0].look() is None

    def agree(node: int, end: StepOutcome) -> None:
        decisions[node] = peers[node].agree(end)

    threads = [threading.Thread(target=agree, args=(k, end)) for k, end in ((1, FAILED), (2, KILLED))]
    for thread in threads:
        thread.start()
    Deadline(5, "the end of a node").wait_until(lambda: peers[0].look() is not None)
    assert peers[0].agree(FAILED) == KILLED
    for thread in threads:
        thread.join(10)
    assert decisions == {1: KILLED, 2: KILLED}
    assert peers[1].decision == KILLED


@pytest.mark.parametrize(("end", "told"), [(FAILED, True), (KILLED, False), (BAD_DATA, False), (STOPPED, False)])
def test_a_node_that_reports_nothing_may_be_the_cause(tmp_path: Path, end: StepOutcome, told: bool) -> None:
    peers = peers_of(tmp_path, 3, seconds=0.2)
    peers[2].write_end(None)  # it has begun, and is lost
    peers[1].write_end(end)
    lost = "; node2 gave no report within 0.2 s: lost, or still waiting for others" if told else ""
    assert peers[0].agree(StepOutcome(75) if end is STOPPED else None).what == end.what + lost


def test_a_clean_end_of_rank_0_is_one_whatever_another_node_says(tmp_path: Path) -> None:
    leader, other = peers_of(tmp_path, 2, seconds=0.1)
    other.agree(FAILED)
    assert leader.agree(STOPPED) == STOPPED
    assert other.agree(FAILED) == STOPPED


def test_ranks_of_node_0_that_outlive_the_others_have_failed(tmp_path: Path) -> None:
    leader, other = peers_of(tmp_path, 2)
    assert other.agree(STOPPED) == STOPPED
    assert leader.agree(None).what == "the ranks of node 0 did not end when those of the other nodes did"


def test_ranks_of_node_0_that_outlive_the_others_after_a_stop_have_stopped(tmp_path: Path) -> None:
    leader, other = peers_of(tmp_path, 2)
    assert other.agree(STOPPED) == STOPPED
    assert leader.agree(None, stop_requested=True).code == 75


def test_on_a_full_disk_a_node_waits_for_node_0_which_does_not_wait_for_its_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A node that ends before node 0 has decided is to blame by srun's words."""
    peers, took = peers_of(tmp_path, 2, seconds=5.0), dict[int, float]()
    for place in peers:
        place.write_end(None)

    def full(*_: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(peers_module, "write_json", full)

    def agree(node: int) -> None:
        began = time.monotonic()
        assert peers[node].agree(FAILED) == FAILED  # and no node is called silent
        took[node] = time.monotonic() - began

    other = threading.Thread(target=agree, args=(1,), daemon=True)
    other.start()
    agree(0)
    assert took[0] < 4
    other.join(1)
    assert other.is_alive()


def test_an_end_that_another_node_wrote_before_the_launch_is_heard(tmp_path: Path) -> None:
    """It may be over before node 0 has prepared the run and removes what earlier starts left."""
    endpoints = tmp_path / "endpoints"
    endpoints.mkdir()
    for name in ("engine-1.json", "node-1-0.json", "node-1-0.tmp", "token"):
        (endpoints / name).touch()
    leader, other = peers_of(endpoints, 2, seconds=0.1)
    other.agree(StepOutcome(3, "launches.jsonl: not visible on this node", "node1"))
    one_node.clear_endpoints(tmp_path, keep=leader.files)
    with pytest.raises(NodeEnded, match="node1: launches.jsonl: not visible on this node"):
        leader.require_no_end()
    assert sorted(path.name for path in endpoints.iterdir()) == ["node-1-1.json", "token"]


def test_a_file_that_another_node_renames_meanwhile_is_no_matter(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "endpoints").mkdir()
    monkeypatch.setattr(Path, "iterdir", lambda self: iter([self / "node-1-0.tmp"]))
    one_node.clear_endpoints(tmp_path)


def test_a_stop_while_a_node_waits_for_the_decision_does_not_hide_why_it_ended(tmp_path: Path) -> None:
    (tmp_path / "endpoints").mkdir()
    code = "from nemo_prorl.launcher import node; node._VISIBLE_S = 0.1; raise SystemExit(node.main())"
    words = ["--nodes=2", "--node=1", "--host=b", f"--run-dir={tmp_path}", "--attempt=1", f"--expect={tmp_path}/none"]
    process = subprocess.Popen([sys.executable, "-c", code, *words], stderr=subprocess.DEVNULL)
    end = tmp_path / "endpoints" / "node-1-1.json"
    Deadline(30, "the end of the node").wait_until(end.exists)
    process.send_signal(signal.SIGUSR1)
    time.sleep(0.5)
    assert process.poll() is None
    Peers(tmp_path / "endpoints", NodeAddress(0, 2, "a"), "1").write_end(BAD_DATA)
    assert process.wait(30) == 0  # node 0 has decided
    assert json.loads(end.read_text())["end"]["code"] == 3


def test_the_outcome_is_in_node_0_s_file_also_where_it_ends_early(tmp_path: Path) -> None:
    words = [f"run_dir={tmp_path}", "trainer.grpo.max_stps=3"]
    assert main(["--nodes=1", "--node=0", f"--run-dir={tmp_path}", "--attempt=17.0.1", *words]) == 2
    assert json.loads((tmp_path / "endpoints" / "node-0-17.0.1.json").read_text())["end"]["code"] == 2


def test_a_node_without_a_decision_ends_with_its_own_end(tmp_path: Path) -> None:
    _, other = peers_of(tmp_path / "missing" / "folder", 2, seconds=0.1)
    assert (other.agree(FAILED), other.decision) == (FAILED, None)


@pytest.mark.parametrize(
    ("override", "code", "told"),
    [
        ("trainer.grpo.max_stps=3", 2, "trainer.grpo.max_steps"),
        ("trainer.num_nodes=4", 2, "number of supervisors that srun started; got 1"),
        ("rollout.python=/no/python", 3, "/no/python"),
    ],
)
def test_what_is_wrong_is_told_to_who_started_the_nodes(
    override: str, code: int, told: str, capfd: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    run = tmp_path / "run"
    run.mkdir()  # as the batch script does
    overrides = [f"run_dir={run}", override, *(["rollout.engines=4"] if "num_nodes" in override else [])]
    assert main(["--nodes=1", "--node=0", f"--run-dir={run}", "--attempt=1", *overrides]) == code
    assert capfd.readouterr().out.startswith("node-0: the supervisor has begun on ")
    end = end_in(run)
    assert (end["code"], told in end["what"]) == (code, True)


def test_what_a_node_says_has_its_time_and_its_name(tmp_path: Path) -> None:
    words = ["--nodes=1", "--node=0", "--host=node7", f"--run-dir={tmp_path}", "--attempt=1", "trainer.foo=1"]
    command = [sys.executable, "-m", "nemo_prorl.launcher.node", *words]
    said = subprocess.run(command, capture_output=True, text=True, check=False).stderr
    assert re.match(r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d node7: unknown key trainer.foo", said), said


def end_in(run: Path) -> Any:
    """Return how the run ended, as node 0 of the attempt 1 wrote it."""
    return json.loads((run / "endpoints" / "node-0-1.json").read_text())["end"]


def test_a_stop_before_the_run_began_is_a_clean_end(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A lead that takes long, as while data is checked."""
    monkeypatch.setattr(node, "lead", lambda *_: signal.raise_signal(signal.SIGUSR1))
    assert main(["--nodes=1", "--node=0", f"--run-dir={tmp_path}", "--attempt=1"]) == 0
    assert end_in(tmp_path)["code"] == 75


def test_the_ranks_port_is_chosen_when_the_run_is_prepared(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Preparing takes up to an hour, in which another process may take a port that was free before."""
    order: list[Any] = []

    class Started:
        def __init__(self, *_: Any, peers: Peers) -> None:
            order.append(peers.place.port)

        def run(self) -> StepOutcome:
            return StepOutcome(75)

    def prepared(*_: Any) -> list[str]:
        order.append("prepared")
        return ["chain_sum"]

    def chosen() -> int:
        order.append("chosen")
        return 4711

    for name in ("logs", "endpoints"):
        (tmp_path / name).mkdir()
    monkeypatch.setattr(prepare, "prepare", prepared)
    monkeypatch.setattr(node, "free_port", chosen)
    monkeypatch.setattr(node, "NodeSupervisor", Started)
    words = [f"run_dir={tmp_path}", "cluster=slurm_dev", "trainer.num_nodes=1", "rollout.engines=1"]
    args = argparse.Namespace(overrides=words, lock_wait_s=0.0)
    place = NodeAddress(host="a")
    assert node.lead(args, Peers(tmp_path / "endpoints", place), MergedLog(None)).code == 75
    assert order == ["prepared", "chosen", 4711]


def test_a_run_directory_that_stays_in_use_is_told_to_the_hook(tmp_path: Path) -> None:
    """Without an event in the journal, which belongs to the other process."""
    hook = tmp_path / "hook.sh"
    hook.write_text(f"#!/bin/sh\ncat > {tmp_path}/told\n")
    hook.chmod(0o755)
    words = [f"run_dir={tmp_path / 'run'}", "cluster=slurm_dev", "trainer.num_nodes=1", f"on_event={hook}"]
    args = argparse.Namespace(overrides=[*words, "rollout.engines=1"], lock_wait_s=0.1)
    peers = Peers(tmp_path / "run" / "endpoints", NodeAddress(host="a"))
    with one_node.locked(tmp_path / "run"), pytest.raises(one_node.StillInUse):
        node.lead(args, peers, MergedLog(None))
    told = json.loads((tmp_path / "told").read_text())
    assert (told["event"], told["kind"], "is in use by another process" in told["what"]) == (
        "failure",
        "StillInUse",
        True,
    )
    assert not (tmp_path / "run" / "journal.jsonl").exists()
