"""How the supervisors of a run's nodes meet, and agree on how the run ended: one small file per node.

RUN/endpoints/launch-ATTEMPT.json is written by node 0 once the run is prepared.  RUN/endpoints/node-K-ATTEMPT.json is
written by node K when it is fit to begin, and again when its processes have ended; that of node 0 then says how the run
ended, also to the batch script.  ATTEMPT is of one start of all nodes: what an earlier start left behind says nothing
to this one.  Nothing listens and nothing beats: `srun` starts the supervisors, forwards their output and signals, and
ends them all when one ends with an error or a node is lost.

Standard library only, Python 3.9 at least (see `slurm_driver.py`).
"""

from __future__ import annotations

import json
import logging
import os
import signal
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, TypedDict

from nemo_prorl.deadlines import Deadline
from nemo_prorl.errors import DeadlineExceeded, ProrlError

_log = logging.getLogger(__name__)

CLEAN = (0, 75)  # exit codes of a rank that has done its work, or stopped when it was asked
_KILLED = tuple(-number for number in (signal.SIGKILL, signal.SIGSEGV, signal.SIGBUS, signal.SIGILL))
_ENDS_S = 15.0  # for the other nodes to write how they ended
_LOOK_S = 1.0  # between two looks at the files of the others


@dataclass(frozen=True)
class Place:
    """Which node of the run this is, its own name, and where the ranks of all nodes meet."""

    node: int = 0
    nodes: int = 1
    host: str = "127.0.0.1"
    master: str = "127.0.0.1"
    port: int = 0


@dataclass(frozen=True)
class End:
    """How the processes of a node ended.  `code` is an exit code of `prorl`."""

    code: int
    what: str = ""
    host: str = ""
    process: str = ""
    status: int | None = None
    log: list[str] = field(default_factory=list)
    at: float = field(default_factory=time.time, compare=False)  # seconds since 1970, when it was seen

    @property
    def clean(self) -> bool:
        return self.code in CLEAN

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


class NodeState(TypedDict):
    """What a node of a run on several says of itself, in endpoints/node-K-ATTEMPT.json."""

    host: str
    end: End | None
    """null: the node is fit to begin, or at work; the end of node 0 is that of the run"""


class Launch(TypedDict):
    """What node 0 has prepared for the other nodes, in endpoints/launch-ATTEMPT.json."""

    tasks: list[str] | None
    """of the reward servers; null: the run is finished"""
    master: str
    """the host where the ranks meet, at `port`"""
    port: int


class NodeEnded(ProrlError):
    """Another node of the run ended before the run began, for instance because it is not fit (exit code 3)."""

    def __init__(self, end: End) -> None:
        super().__init__(f"{end.host}: {end.what}")
        self.exit_code, self.host = end.code, end.host


class Peers:
    """The other nodes of a run, as the supervisor of one node sees them."""

    def __init__(self, endpoints: Path, place: Place, attempt: str = "", seconds: float = _ENDS_S) -> None:
        self.place, self.launch = place, endpoints / f"launch-{attempt}.json"
        self.files = [node_file(endpoints, k, attempt) for k in range(place.nodes)]
        self._seconds, self._look_at = seconds, 0.0
        self.decision: End | None = None  # node 0's, once it is known here

    def meet(self, deadline: Deadline) -> list[str]:
        """Say that this node is fit, wait until all nodes are, and return the names of the others.

        Raises:
            NodeEnded: another node ended, for instance because it is not fit.
            DeadlineExceeded: with the numbers of the missing nodes.
        """
        self._write(None)
        while True:
            states = self.require_no_end()
            if len(states) == self.place.nodes - 1:
                return [state["host"] for state in states.values()]
            if deadline.passed:
                missing = ", ".join(str(k) for k in range(self.place.nodes) if k not in {*states, self.place.node})
                raise DeadlineExceeded(f"{deadline.error()}: node {missing} of {self.place.nodes} did not come")
            time.sleep(0.2)

    def require_no_end(self) -> dict[int, dict[str, Any]]:
        """Return what the other nodes have written so far, by their numbers.  Raises NodeEnded."""
        states = self._states()
        for end in self._ends(states):
            raise NodeEnded(end)
        return states

    def look(self) -> End | None:
        """Return what ends the run, if a node wrote it.  Only node 0 looks: `srun` ends the other nodes."""
        if self.place.node > 0 or self.place.nodes == 1 or time.monotonic() < self._look_at:
            return None
        self._look_at = time.monotonic() + _LOOK_S
        return blame(self._ends(self._states()))

    def agree(self, end: End | None, asked_to_stop: bool = False) -> End:
        """Return how the run ended, after the processes of this node have ended (None: those of another node).

        Node 0 decides.  A clean end of rank 0, which is there, is one of the run.  Otherwise node 0 waits a moment for
        the ends of the other nodes, and blames one.  Another node that failed waits for this decision before it exits,
        because `srun` kills all nodes as soon as one exits with an error.
        """
        if self.place.nodes == 1:
            return end or End(1)
        if self.place.node == 0:
            self.decision = end if end is not None and end.clean else self._decide(end, asked_to_stop)
            self.write_end(self.decision)
            return self.decision
        mine = end or End(1)
        self.write_end(mine)
        if mine.clean:
            return mine
        limit = time.monotonic() + 4 * self._seconds  # also on a full disk: node 0 decides before
        while time.monotonic() < limit:
            leader = read(self.files[0])
            if leader is not None and leader["end"] is not None:
                self.decision = End(**leader["end"])
                return self.decision
            time.sleep(0.2)
        return mine

    def _decide(self, end: End | None, asked_to_stop: bool) -> End:
        # Where this node cannot write, the others cannot either, and do not wait for ever.
        limit = time.monotonic() + (self._seconds if self.write_end(None) else min(_LOOK_S, self._seconds))
        while len(ends := self._ends(self._states())) < self.place.nodes - 1 and time.monotonic() < limit:
            time.sleep(0.2)
        known = [*ends, *([end] if end else [])]
        if end is None and all(one.clean for one in known):
            if asked_to_stop and known and all(one.code == 75 for one in known):
                return End(75, "stopped; the leading node's ranks did not end with the others", self.place.host)
            return End(1, "the leading node's ranks did not end with the others", self.place.host)
        return blame(known) or End(1)

    def write_end(self, end: End | None) -> bool:
        """Write how this node ended, if it has; return whether that was possible (a disk may be full)."""
        try:
            self.files[self.place.node].parent.mkdir(exist_ok=True)
            self._write(end)
        except OSError as error:
            _log.warning("how this node ended could not be written: %s", error)
            return False
        return True

    def _write(self, end: End | None) -> None:
        write(self.files[self.place.node], {"host": self.place.host, "end": end and end.to_json()})

    def _states(self) -> dict[int, dict[str, Any]]:
        """What the other nodes have written so far, by their numbers."""
        found = {k: read(file) for k, file in enumerate(self.files) if k != self.place.node}
        return {k: state for k, state in found.items() if state is not None}

    @staticmethod
    def _ends(states: dict[int, dict[str, Any]]) -> list[End]:
        return [End(**state["end"]) for state in states.values() if state["end"] is not None]


def blame(ends: list[End]) -> End | None:
    """Return the end that explains the others: of a killed process, otherwise the first error.

    Not every signal counts: a rank whose peer is gone may end itself by SIGABRT.
    """

    def weight(end: End) -> tuple[int, float]:
        if end.clean:
            return 2, end.at
        return 0 if end.status in _KILLED else 1, end.at

    return min(ends, key=weight, default=None)


def node_file(endpoints: Path, node: int, attempt: str) -> Path:
    """Return the file in which a node says that it is fit, and how it ended."""
    return endpoints / f"node-{node}-{attempt}.json"


def write(file: Path, content: Mapping[str, object]) -> None:
    """Write a file of JSON that appears whole.  Raises OSError."""
    half = file.with_suffix(".tmp")
    half.write_text(json.dumps(content))
    os.replace(half, file)


def read(file: Path) -> dict[str, Any] | None:
    """Return the content of a file that `write` wrote; None if it is not there."""
    try:
        os.listdir(file.parent)  # makes NFS look again for a file that was not there before
        found = json.loads(file.read_text())
    except (OSError, ValueError):
        return None
    return found if isinstance(found, dict) else None
