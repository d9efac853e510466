"""The line between node supervisors: who is let in, what is heard, and that a silent or dead node is noticed."""

import socket
import time
from collections.abc import Iterator

import pytest

from nemo_prorl.deadlines import Deadline
from nemo_prorl.errors import DeadlineExceeded
from nemo_prorl.launcher.link import STARTER, LeadingNode, Line, NodeLost, join

SILENCE_S = 3.0


@pytest.fixture
def leader() -> Iterator[LeadingNode]:
    leader = LeadingNode(3, "secret", SILENCE_S)
    yield leader
    leader.close(0.0)


def joined(leader: LeadingNode, node: int | str, token: str = "secret") -> Line:
    return join("127.0.0.1", leader.port, token, node, f"host{node}", SILENCE_S, Deadline(5, "the leader"))


def until(ready: object, what: str, seconds: float = 10.0) -> None:
    Deadline(seconds, what).wait_until(ready)  # type: ignore[arg-type]


def test_messages_and_logs_go_both_ways(leader: LeadingNode) -> None:
    heard: list[tuple[str, str]] = []
    leader.on_log = lambda name, line: heard.append((name, line))
    nodes = [joined(leader, 1), joined(leader, 2)]
    leader.wait_for_all(Deadline(5, "the nodes"))
    leader.tell("go", port=7)
    assert [node.wait_for(("go", "stop"), Deadline(5, "go"))["port"] for node in nodes] == [7, 7]
    nodes[1].send("log", name="engine-2", line="ready")
    nodes[1].send("end", end={"code": 1})
    assert leader.lines[2].wait_for(("end",), Deadline(5, "the end"))["end"] == {"code": 1}
    until(lambda: heard == [("engine-2", "ready")], "the log, which another thread writes")
    assert leader.lines[1].messages() == []


def test_who_started_the_nodes_is_none_of_them(leader: LeadingNode) -> None:
    line = joined(leader, STARTER)
    until(lambda: leader.starter is not None, "the starter")
    line.send("stop", reason="time")
    assert leader.starter is not None
    assert leader.starter.wait_for(("stop",), Deadline(5, "a message"))["reason"] == "time"
    with pytest.raises(DeadlineExceeded, match="node 1, 2 of 3 did not come"):
        leader.wait_for_all(Deadline(0.2, "the nodes"))


@pytest.mark.parametrize(("node", "token"), [(1, "guess"), (3, "secret"), (-1, "secret"), ("x", "secret")])
def test_strangers_are_not_let_in(leader: LeadingNode, node: int | str, token: str) -> None:
    line = joined(leader, node, token)
    until(lambda: line.lost is not None, "the connection to be closed")
    assert not leader.lines
    assert leader.starter is None


@pytest.mark.parametrize("data", [b"GET / HTTP/1.1\r\n\r\n", b"[1]\n", b"\x00" * (1 << 21)])
def test_what_is_no_message_is_not_let_in(leader: LeadingNode, data: bytes) -> None:
    with socket.create_connection(("127.0.0.1", leader.port), timeout=5) as sock:
        try:
            sock.sendall(data)
            sock.settimeout(5)
            assert sock.recv(1) == b""
        except ConnectionError:
            pass  # hung up on while it still sent
    joined(leader, 1)
    until(lambda: 1 in leader.lines, "a node after the stranger")


def test_a_node_that_dies_is_noticed_at_once(leader: LeadingNode) -> None:
    node = joined(leader, 1)
    until(lambda: 1 in leader.lines, "the node")
    began = time.monotonic()
    node.close()
    until(lambda: leader.lines[1].lost is not None, "its loss")
    assert time.monotonic() - began < SILENCE_S / 2
    with pytest.raises(NodeLost, match="host1: .*closed.*, while waiting for its end"):
        leader.lines[1].wait_for(("end",), Deadline(5, "its end"))


def test_a_node_that_falls_silent_is_lost_and_one_that_lives_is_not(leader: LeadingNode) -> None:
    living = joined(leader, 1)
    with socket.create_connection(("127.0.0.1", leader.port)) as silent:
        silent.sendall(b'{"kind": "hello", "node": 2, "host": "frozen", "token": "secret"}\n')
        leader.wait_for_all(Deadline(5, "the nodes"))
        until(lambda: leader.lines[2].lost is not None, "the silent one's loss")
    assert "said nothing for 3 s (trainer.deadlines.node_s)" in str(leader.lines[2].lost)
    time.sleep(0.5)
    assert leader.lines[1].lost is None
    assert living.lost is None


def test_a_leader_that_never_listens_is_named() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
    with pytest.raises(DeadlineExceeded, match=f"the leader: 127.0.0.1:{port}: .*refused"):
        join("127.0.0.1", port, "secret", 1, "host1", SILENCE_S, Deadline(0.5, "the leader"))
