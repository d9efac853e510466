"""What the services of a run (engines, reward servers) and their clients share: token, address, pause after a failure.

A service writes an endpoint file once it is ready.  All services of a run need the token of the file endpoints/token.
"""

import hmac
import http.client
import json
import os
import socket
import stat
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal, TypedDict

from nemo_prorl.deadlines import Deadline
from nemo_prorl.errors import ConfigError
from nemo_prorl.files import read_object, write_json
from nemo_prorl.schema import Constraint, Count, Number

_LONGEST_PAUSE_S = 5.0
_DIRECT = urllib.request.build_opener(urllib.request.ProxyHandler({}))  # a run's processes need no proxy


class RewardEndpoint(TypedDict):
    """The endpoint file of a reward server."""

    kind: Literal["rewards"]
    url: Annotated[str, Constraint(pattern="^http://")]
    pid: Number
    state: Literal["ready", "stopped"]


class EngineEndpoint(TypedDict):
    """The endpoint file of a rollout engine."""

    kind: Literal["engine"]
    index: Count
    url: Annotated[str, Constraint(pattern="^http://")]
    pid: Number
    state: Literal["ready"]
    weights_dir: str
    """the only folder from which the engine loads weights, on its own node"""
    weight_version: Literal[-1]
    """-1: the engine has the weights of its model folder; GET /health returns the current version"""


def write_endpoint(file: Path, endpoint: RewardEndpoint | EngineEndpoint) -> None:
    """Write an endpoint file atomically: readers see the old content or the new."""
    file.parent.mkdir(parents=True, exist_ok=True)
    write_json(file, endpoint)


@dataclass(frozen=True)
class ServiceEndpoint:
    """The address of a service, as its clients read it from the endpoint file.

    `kind`: engine or rewards.  `weights_dir`: folder of the weights on the engine's node; None: not stated.
    """

    name: str
    kind: str
    url: str
    pid: int
    ready: bool
    weights_dir: Path | None = None

    @classmethod
    def read(cls, file: Path) -> "ServiceEndpoint | None":
        """Return the content of an endpoint file; None if it is missing, incomplete, or of another kind."""
        content = read_object(file) or {}
        try:
            weights_dir = Path(content["weights_dir"]) if content.get("weights_dir") else None
            ready = content["state"] == "ready"
            return cls(
                file.stem,
                str(content["kind"]),
                url=str(content["url"]),
                pid=int(content["pid"]),
                ready=ready,
                weights_dir=weights_dir,
            )
        except (KeyError, TypeError, ValueError):
            return None


def awaited_services(endpoints: Path, kind: str, count: int, seconds: float) -> tuple[Deadline, Callable[[], bool]]:
    """Return the deadline by which so many services of a kind must be ready, and the function that says if they are."""
    what = f"{count} x {endpoints}/{kind}-*.json (trainer.deadlines.startup_s; a busy machine needs more)"
    deadline = Deadline(seconds, f"{what}; see {endpoints.parent / 'logs'}")
    return deadline, lambda: len(list(endpoints.glob(f"{kind}-*.json"))) >= count


def is_own(file: Path) -> bool:
    """Return whether this process wrote the endpoint file; False if it is missing, or of a successor."""
    return (endpoint := ServiceEndpoint.read(file)) is not None and endpoint.pid == os.getpid()


def endpoints_in(folder: Path, pattern: str = "*.json") -> Iterator[ServiceEndpoint]:
    """Return an iterator over the endpoints in a folder, by name."""
    return filter(None, map(ServiceEndpoint.read, sorted(folder.glob(pattern))))


@dataclass
class Pause:
    """A client's pause after failures of a server: 0.2 s after the first, doubled with each, at most 5 s."""

    failures: int = 0  # in a row
    until: float = 0.0  # on the monotonic clock; requests may be sent again then

    @property
    def left_s(self) -> float:
        return max(0.0, self.until - time.monotonic())

    @property
    def over(self) -> bool:
        return self.left_s == 0.0

    def failed(self) -> bool:
        """Record a failure; return whether to log it.

        Only failures 1, 2, 4, 8, ... are logged, because all open requests of a dead server fail together.
        """
        self.failures += 1
        pause_s = min(_LONGEST_PAUSE_S, 0.1 * 2.0 ** min(self.failures, 10))
        self.until = max(self.until, time.monotonic() + pause_s)
        return self.failures & (self.failures - 1) == 0

    def succeeded(self) -> None:
        self.failures, self.until = 0, 0.0


def read_token(path: str | Path) -> str:
    """Return a run's access token.  Raises ConfigError if the file is missing or empty, or if others can read it."""
    file = Path(path)
    try:
        token, mode = file.read_text(encoding="ascii").strip(), file.stat().st_mode
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or error
        fix = "Fix: give the token file of a run, RUN/endpoints/token"
        raise ConfigError(f"token file {file}: {reason}.  {fix}") from error
    if not token:
        raise ConfigError(f"token file {file} is empty; it must contain the run's token")
    if mode & (stat.S_IRWXG | stat.S_IRWXO):
        raise ConfigError(f"token file {file}: other users can read it.  Fix: chmod 600 {file}")
    return token


def ask(url: str, token: str, timeout_s: float, body: Any = None) -> bytes:
    """Return the reply of a service of this run: to a GET, or to a POST of `body` as JSON.

    Raises OSError if it does not answer with status 200; `timeout_s` limits each wait.
    """
    headers = {"Authorization": f"Bearer {token}", "Content-Type": "application/json"}
    data = None if body is None else json.dumps(body).encode()
    try:
        with _DIRECT.open(urllib.request.Request(url, data, headers), timeout=timeout_s) as reply:
            return bytes(reply.read())
    except urllib.error.HTTPError as error:
        raise ConnectionError(f"HTTP {error.code}: {error.read(200).decode(errors='replace')}") from error
    except (http.client.HTTPException, ValueError) as error:
        raise ConnectionError(f"{type(error).__name__}: {error}") from error


def is_authorized(header: str | None, token: str) -> bool:
    """Return whether the header Authorization carries the token; the time of the answer does not depend on it."""
    return hmac.compare_digest((header or "").encode("latin-1", "replace"), f"Bearer {token}".encode())


def listening_socket(host: str, port: int, backlog: int) -> socket.socket:
    """Return a listening TCP socket whose connections send small replies without delay."""
    listener = socket.create_server((host, port), backlog=backlog)
    # Without this option a small reply waits 40 ms for an ACK.  asyncio sets it only on sockets made with IPPROTO_TCP.
    listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return listener
