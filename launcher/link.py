"""The line between the node supervisors of a run: who is there, when to begin and to end, what the processes say.

Node 0, the leader, listens; the other nodes connect, and so does what started them all (`slurm.py`).  A message is one
JSON object a line.  Who says nothing for `silence_s` is lost: the others learn of a dead node at once where its
connection closes, and after that time where it only falls silent.

Standard library only, Python 3.9 at least: the Slurm script runs it with a node's own Python, outside any container.
"""

from __future__ import annotations

import contextlib
import hmac
import json
import logging
import queue
import random
import socket
import threading
import time
from collections.abc import Callable
from typing import Any

from nemo_prorl.deadlines import Deadline
from nemo_prorl.errors import ProrlError

_log = logging.getLogger(__name__)

Message = dict[str, Any]

STARTER = "starter"  # who starts the nodes, in the place of a node's number
_HELLO_S = 10.0  # for a new connection to say who it is
_LINE_BYTES = 1 << 20  # of a message
_LOG_CHARS = 1 << 14  # of a line of log; the process's own file has all of it
_LOG_LINES = 20_000  # that may wait, to be sent or written; more are dropped: nobody waits for a log
_RETRY_S = 0.3


def free_port(host: str = "") -> int:
    """A port to listen at in a while: below those that the system gives to connections meanwhile, if one is free."""
    try:
        with open("/proc/sys/net/ipv4/ip_local_port_range") as file:
            below = int(file.read().split()[0])
    except (OSError, ValueError):
        below = 32768
    tries = [random.SystemRandom().randrange(below - 12_000, below) for _ in range(100)] if below > 20_000 else []
    for port in (*tries, 0):
        with contextlib.suppress(OSError), socket.socket() as s:
            s.bind((host, port))
            found: int = s.getsockname()[1]
            return found
    raise OSError(f"no port of {host or 'this machine'} is free")


class NodeLost(ProrlError, ConnectionError):
    """A node of the run, `host`, said nothing any more, or its connection was closed."""

    def __init__(self, text: str, host: str = "") -> None:
        super().__init__(text)
        self.host = host


class Line:
    """One connection, its messages, and whether it is lost.  `on_log`: called for each line of log that comes."""

    def __init__(self, sock: socket.socket, silence_s: float, on_log: Callable[[str, str], None] | None = None) -> None:
        self.host = ""
        self.lost: str | None = None
        self._sock, self._silence_s, self._on_log = sock, silence_s, on_log
        self._inbox: queue.SimpleQueue[Message] = queue.SimpleQueue()
        self._logs: queue.Queue[tuple[str, str]] = queue.Queue(_LOG_LINES)
        self._sending = threading.Lock()
        self._rest = b""
        sock.settimeout(silence_s)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    def begin(self) -> None:
        """Reads from now on, and says now and then that this side lives."""
        threading.Thread(target=self._read, daemon=True, name=f"link {self.host}").start()
        threading.Thread(target=self._say_alive, daemon=True, name=f"link {self.host} alive").start()
        threading.Thread(target=self._pass_logs_on, daemon=True, name=f"link {self.host} logs").start()

    def log(self, name: str, line: str) -> None:
        """A line for the log of all; dropped where too many wait already."""
        with contextlib.suppress(queue.Full):
            self._logs.put_nowait((name, line[:_LOG_CHARS]))

    def _pass_logs_on(self) -> None:
        """To the other side, or, where this side keeps the log, to it; a disk that is full or slow stops nothing."""
        while True:
            name, line = self._logs.get()
            if self._on_log is None:
                if not self.send("log", name=name, line=line):
                    return
                continue
            with contextlib.suppress(OSError):
                self._on_log(name, line)

    def send(self, kind: str, **fields: Any) -> bool:
        """Whether it could be handed to the network; what becomes of it nobody knows."""
        data = json.dumps({"kind": kind, **fields}).encode() + b"\n"
        try:
            with self._sending:
                self._sock.sendall(data)
        except OSError as error:
            self._lose(f"{type(error).__name__}: {error}")
            return False
        return True

    def messages(self) -> list[Message]:
        """What has come since the last call."""
        found = []
        while True:
            try:
                found.append(self._inbox.get_nowait())
            except queue.Empty:
                return found

    def wait_for(self, kinds: tuple[str, ...], deadline: Deadline) -> Message:
        """The next message of these kinds; others before it are passed over.  Raises NodeLost and DeadlineExceeded."""
        while not deadline.passed:
            try:
                message = self._inbox.get(timeout=min(0.2, deadline.remaining))
            except queue.Empty:
                if self.lost is not None:
                    raise NodeLost(f"{self.host}: {self.lost}, while waiting for {deadline.what}", self.host) from None
                continue
            if message["kind"] in kinds:
                return message
        raise deadline.error()

    def read_one(self) -> Message:
        """The next message; raises OSError or ValueError."""
        while b"\n" not in self._rest:
            if len(self._rest) > _LINE_BYTES:
                raise ValueError("a message without an end")
            data = self._sock.recv(1 << 16)
            if not data:
                raise ConnectionError("the connection was closed")
            self._rest += data
        line, self._rest = self._rest.split(b"\n", 1)
        message = json.loads(line)
        if not isinstance(message, dict) or "kind" not in message:
            raise ValueError("a message that is none of ours")
        return message

    def _read(self) -> None:
        while self.lost is None:
            try:
                message = self.read_one()
            except TimeoutError:
                self._lose(f"it said nothing for {self._silence_s:g} s (trainer.deadlines.node_s)")
            except (OSError, ValueError) as error:
                self._lose(str(error))
            else:
                if message["kind"] == "log" and self._on_log is not None:
                    self.log(str(message["name"]), str(message["line"]))
                elif message["kind"] != "alive":
                    self._inbox.put(message)

    def _say_alive(self) -> None:
        while self.lost is None and self.send("alive"):
            time.sleep(self._silence_s / 6)

    def _lose(self, why: str) -> None:
        self.lost = self.lost or why

    def close(self) -> None:
        self._lose("closed here")
        try:
            self._sock.shutdown(socket.SHUT_RDWR)
        except OSError:
            pass
        self._sock.close()


class LeadingNode:
    """The leader's side: a line for each other node, and one to who started them."""

    def __init__(
        self, nodes: int, token: str, silence_s: float, port: int = 0, on_log: Callable[[str, str], None] | None = None
    ) -> None:
        """Listens at once; `port` 0: any free one.  Raises OSError where it is taken."""
        self.nodes, self.lines = nodes, {}  # type: int, dict[int, Line]
        self.starter: Line | None = None
        self.on_log = on_log
        self._token, self._silence_s = token, silence_s
        self._server = socket.create_server(("", port), backlog=256)
        self.port: int = self._server.getsockname()[1]
        self._changed = threading.Condition()
        self._last_words: dict[str, Any] | None = None  # for who comes after the end
        threading.Thread(target=self._accept, daemon=True, name="link").start()

    def _accept(self) -> None:
        while True:
            try:
                sock, _ = self._server.accept()
            except OSError:
                if self._server.fileno() < 0:
                    return  # closed
                time.sleep(_RETRY_S)  # out of file descriptors, or a connection that was given up
                continue
            threading.Thread(target=self._greet, args=(sock,), daemon=True, name="link hello").start()

    def _greet(self, sock: socket.socket) -> None:
        """Lets in who knows the token; a stranger's connection is closed without an answer."""
        line = Line(sock, self._silence_s, lambda name, text: self.on_log(name, text) if self.on_log else None)
        sock.settimeout(_HELLO_S)
        try:
            hello = line.read_one()
            node, host = hello["node"], str(hello["host"])
            if not hmac.compare_digest(str(hello["token"]).encode(), self._token.encode()):
                raise ValueError("a wrong token")
            if node != STARTER and not 0 < int(node) < self.nodes:
                raise ValueError(f"node {node} of {self.nodes}")
        except (OSError, ValueError, KeyError, TypeError) as error:
            _log.warning("a connection was refused: %s", error)
            sock.close()
            return
        sock.settimeout(self._silence_s)
        line.host = host
        with self._changed:
            if node == STARTER:
                self.starter = line
            else:
                self.lines[int(node)] = line
            line.begin()
            self._part_from(node, line)
            self._changed.notify_all()

    def wait_for_all(self, deadline: Deadline) -> None:
        """Returns when every node is there; raises DeadlineExceeded naming those that are not."""
        with self._changed:
            while len(self.lines) < self.nodes - 1:
                if deadline.passed:
                    missing = ", ".join(str(k) for k in range(1, self.nodes) if k not in self.lines)
                    raise type(deadline.error())(f"{deadline.error()}: node {missing} of {self.nodes} did not come")
                self._changed.wait(min(0.5, deadline.remaining))

    def tell(self, kind: str, **fields: Any) -> None:
        """Says it to all nodes."""
        for line in list(self.lines.values()):
            line.send(kind, **fields)

    def part(self, outcome: dict[str, Any]) -> None:
        """Tells how the run ended: the nodes its exit code, who started them everything; also those yet to come."""
        with self._changed:
            self._last_words = outcome
            for node, line in self.lines.items():
                self._part_from(node, line)
            if self.starter is not None:
                self._part_from(STARTER, self.starter)

    def _part_from(self, node: int | str, line: Line) -> None:
        if self._last_words is not None and node == STARTER:
            line.send("outcome", **self._last_words)
        elif self._last_words is not None:
            line.send("stop", code=self._last_words["code"])

    def close(self, seconds: float, starter: bool = False) -> None:
        """Gives the nodes, and with `starter` who started them, so long to come and to hear of the end."""
        end = time.monotonic() + seconds
        while time.monotonic() < end and not self._all_heard(starter):
            time.sleep(0.05)
        for line in [*self.lines.values(), *([self.starter] if self.starter else [])]:
            line.close()
        self._server.close()

    def _all_heard(self, starter: bool) -> bool:
        with self._changed:  # who is being greeted has not heard it yet
            gone = all(line.lost is not None for line in self.lines.values())
            return gone and len(self.lines) == self.nodes - 1 and (self.starter is not None or not starter)


def join(host: str, port: int, token: str, node: int | str, name: str, silence_s: float, deadline: Deadline) -> Line:
    """Connects to the leader, as soon as it listens.  Raises DeadlineExceeded naming it."""
    last = "no answer"
    while not deadline.passed:
        try:
            sock = socket.create_connection((host, port), timeout=min(10.0, deadline.remaining))
        except OSError as error:
            last = str(error)
            time.sleep(_RETRY_S)
            continue
        line = Line(sock, silence_s)
        line.host = host
        line.send("hello", token=token, node=node, host=name)
        line.begin()
        return line
    raise type(deadline.error())(f"{deadline.error()}: {host}:{port}: {last}")
