"""How several nodes agree on the end of a run.  Whole runs on several nodes are in tests/cluster."""

import argparse
import signal
from pathlib import Path
from typing import Any

import pytest

from nemo_prorl.deadlines import Deadline
from nemo_prorl.launcher.link import STARTER, LeadingNode, Line, join
from nemo_prorl.launcher.node import TOKEN, Following, Leading, blame, main
from nemo_prorl.launcher.supervisor import End

pytestmark = pytest.mark.starts

KILLED = End(1, "trainer-2 ended with status -9", "node2", "trainer-2", -9, at=3.0)
ABORTED = End(1, "trainer-3 ended with status -6", "node3", "trainer-3", -6, at=2.0)  # NCCL's, when a peer is gone
FAILED = End(1, "trainer-0 ended with status 1", "node0", "trainer-0", 1, at=1.0)
BAD_DATA = End(4, "trainer-1 ended with status 4", "node1", "trainer-1", 4, at=0.5)
LOST = End(1, "node 3 was lost: it said nothing", "node3", at=4.0)
STOPPED = End(75, at=0.1)


@pytest.mark.parametrize(
    ("ends", "cause"),
    [
        ([FAILED, KILLED], KILLED),
        ([FAILED, LOST, FAILED], LOST),
        ([FAILED, BAD_DATA], BAD_DATA),
        ([ABORTED, FAILED], FAILED),
        ([STOPPED, FAILED], FAILED),
        ([STOPPED, STOPPED], STOPPED),
        ([], None),
    ],
)
def test_the_cause_is_what_explains_the_other_ends(ends: list[End], cause: End | None) -> None:
    assert blame(ends) == cause


def line_to(leader: LeadingNode, node: int | str) -> Line:
    return join("127.0.0.1", leader.port, "secret", node, f"node{node}", 5.0, Deadline(5, "the leader"))


def test_all_nodes_end_by_the_leader_s_word() -> None:
    leader = LeadingNode(3, "secret", 5.0)
    lines = [line_to(leader, 1), line_to(leader, 2)]
    leader.wait_for_all(Deadline(5, "the nodes"))
    leading, following = Leading(leader, seconds=3.0), [Following(line) for line in lines]
    lines[1].send("end", end=KILLED.to_json())
    Deadline(5, "the end of a node").wait_until(lambda: leading.look(lambda number: None) is not None)
    lines[0].send("end", end=FAILED.to_json())
    assert leading.agree(FAILED) == KILLED
    assert [peer.agree(None).code for peer in following] == [1, 1]
    leader.close(0.0)


def test_a_clean_end_of_rank_0_is_one_whatever_a_node_does_afterwards() -> None:
    leader = LeadingNode(2, "secret", 5.0)
    line = line_to(leader, 1)
    leader.wait_for_all(Deadline(5, "the nodes"))
    line.close()
    assert Leading(leader, seconds=3.0).agree(End(0)) == End(0)
    leader.close(0.0)


def test_a_node_ends_when_the_leader_is_gone() -> None:
    leader = LeadingNode(2, "secret", 5.0)
    peer = Following(line_to(leader, 1))
    leader.wait_for_all(Deadline(5, "the nodes"))
    assert peer.look(lambda number: None) is None
    leader.close(0.0)
    Deadline(5, "the loss").wait_until(lambda: peer.look(lambda number: None) is not None)
    assert "the leader was lost" in peer.agree(FAILED).what


def test_the_starter_s_stop_reaches_the_ranks() -> None:
    leader, signals = LeadingNode(1, "secret", 5.0), []  # type: ignore[var-annotated]
    starter = line_to(leader, STARTER)
    leading = Leading(leader)
    starter.send("stop", reason="the time limit is near")

    def arrived() -> bool:
        leading.look(signals.append)
        return bool(signals)

    Deadline(5, "the stop").wait_until(arrived)
    assert signals == [signal.SIGTERM]
    leader.close(0.0)


@pytest.mark.parametrize(
    ("override", "code", "told"),
    [
        ("trainer.grpo.max_stps=3", 2, "trainer.grpo.max_steps"),
        ("trainer.num_nodes=4", 2, "1 nodes were started"),
        ("rollout.python=/no/python", 3, "/no/python"),
    ],
)
def test_what_is_wrong_is_told_to_who_started_the_nodes(
    override: str, code: int, told: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Any
) -> None:
    import threading

    from nemo_prorl.launcher.link import free_port

    port, heard = free_port("127.0.0.1"), []
    monkeypatch.setenv(TOKEN, "secret")

    def listen() -> None:
        line = join("127.0.0.1", port, "secret", STARTER, "here", 20.0, Deadline(20, "the leader"))
        heard.append(line.wait_for(("outcome",), Deadline(20, "the outcome")))

    thread = threading.Thread(target=listen)
    thread.start()
    overrides = [f"run_dir={tmp_path / 'run'}", override, *(["rollout.engines=4"] if "num_nodes" in override else [])]
    assert main(["--nodes=1", "--node=0", "--starter", f"--leader=127.0.0.1:{port}", *overrides]) == code
    thread.join()
    assert heard[0]["code"] == code
    assert told in heard[0]["what"]


def test_the_ranks_port_is_chosen_when_the_run_is_prepared(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Preparing takes up to an hour, in which another process may take a port that was free before."""
    from nemo_prorl.launcher import node, prepare
    from nemo_prorl.launcher.supervisor import Place

    order: list[Any] = []

    class Started:
        def __init__(self, *parts: Any) -> None:
            order.append(parts[5].port)

        def run(self) -> int:
            return 75

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
    monkeypatch.setattr(node, "Node", Started)
    leader = LeadingNode(1, "secret", 5.0)
    words = [f"run_dir={tmp_path}", "cluster=slurm_dev", "trainer.num_nodes=1", "rollout.engines=1"]
    args = argparse.Namespace(overrides=words, expect=None, lock_wait_s=0.0)
    assert node.lead(args, leader, Place(host="a", master="a")).code == 75
    assert order == ["prepared", "chosen", 4711]
    leader.close(0.0)
