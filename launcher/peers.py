"""Files in the shared run directory through which node supervisors start a run together and agree how it ended.

RUN/endpoints/launch-ATTEMPT.json    written by node 0 once the run is prepared
RUN/endpoints/node-K-ATTEMPT.json    written by node K when the node is fit to begin, and again when its processes have
                                     ended.  The file of node 0 then contains how the run ended; the batch script
                                     reads it too.

ATTEMPT identifies one start of all nodes, so that files of an earlier start are ignored.  The supervisors use no
sockets and no heartbeats: `srun` starts them, forwards their output and signals, and ends all of them when one exits
with an error or a node is lost.  What is done then is in the table of `slurm_driver.py`.

Standard library only, Python 3.9 at least (see `slurm_driver.py`).
"""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import time
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, TypedDict

from nemo_prorl.deadlines import Deadline
from nemo_prorl.errors import DeadlineExceeded, ProrlError
from nemo_prorl.files import read_object, write_json

_log = logging.getLogger(__name__)

CLEAN = (0, 75)  # exit codes of a rank that finished, or that stopped on request
_KILLED = tuple(-number for number in (signal.SIGKILL, signal.SIGSEGV, signal.SIGBUS, signal.SIGILL))
_ENDS_S = 15.0  # seconds for the other nodes to write how they ended
_LOOK_S = 1.0  # seconds between two reads of the other nodes' files


@dataclass(frozen=True)
class NodeAddress:
    """The number and name of this node, and the address at which the ranks of all nodes find each other.

    Attributes:
        node: number of this node, from 0.
        nodes: number of nodes of the run.
        host: name of this node.
        master: host of the rendezvous of the ranks (MASTER_ADDR).
        port: port of the rendezvous (MASTER_PORT).
    """

    node: int = 0
    nodes: int = 1
    host: str = "127.0.0.1"
    master: str = "127.0.0.1"
    port: int = 0


@dataclass(frozen=True)
class StepOutcome:
    """The end of a node's processes, or of the whole run.

    Attributes:
        code: exit code of `prorl`.
        what: cause, in one sentence.
        host: node that caused the end; empty if no node did.
        process: process that failed, such as trainer-3.
        status: exit status of that process; negative: the number of the signal that killed it.
        log: last lines of the log of that process.
        at: when the end was noticed, seconds since 1970.
    """

    code: int
    what: str = ""
    host: str = ""
    process: str = ""
    status: int | None = None
    log: list[str] = field(default_factory=list)
    at: float = field(default_factory=time.time, compare=False)

    @property
    def clean(self) -> bool:
        return self.code in CLEAN


class NodeState(TypedDict):
    """The state of one node of a run on several nodes, in endpoints/node-K-ATTEMPT.json."""

    host: str
    end: StepOutcome | None
    """null: the node is fit to begin, or at work; the end of node 0 is the end of the run"""


class Launch(TypedDict):
    """The start parameters that node 0 writes for the other nodes, in endpoints/launch-ATTEMPT.json."""

    tasks: list[str] | None
    """tasks that the reward servers judge; null: the run is already finished"""
    master: str
    """host of the rendezvous of all ranks (MASTER_ADDR)"""
    port: int
    """port of the rendezvous (MASTER_PORT)"""


class NodeEnded(ProrlError):
    """Another node of the run ended before the run began, for instance because it is not fit (exit code 3)."""

    def __init__(self, end: StepOutcome) -> None:
        super().__init__(f"{end.host}: {end.what}")
        self.exit_code, self.host = end.code, end.host


class Peers:
    """The other nodes of a run, as the supervisor of one node sees them through their files.

    Args:
        endpoints: folder of the files, shared by all nodes.
        attempt: identifier of this start of all nodes.
        seconds: how long node 0 waits for the other nodes to write how they ended.
    """

    def __init__(self, endpoints: Path, place: NodeAddress, attempt: str = "", seconds: float = _ENDS_S) -> None:
        self.place, self.launch = place, endpoints / f"launch-{attempt}.json"
        self.files = [node_file(endpoints, k, attempt) for k in range(place.nodes)]
        self._seconds, self._next_look = seconds, 0.0
        self.decision: StepOutcome | None = None  # the end of the run as node 0 decided it, once this node knows it

    def meet(self, deadline: Deadline) -> list[str]:
        """Report that this node is fit to begin, wait for the reports of all nodes, and return the other nodes' names.

        Raises:
            NodeEnded: another node ended, for instance because it is not fit.
            DeadlineExceeded: some nodes did not report; the message has their numbers.
        """
        self._write(None)
        while True:
            states = self.require_no_end()
            if len(states) == self.place.nodes - 1:
                return [state["host"] for state in states.values()]
            if deadline.passed:
                missing = ", ".join(str(k) for k in range(self.place.nodes) if k not in {*states, self.place.node})
                raise DeadlineExceeded(f"{deadline.error()}: node {missing} of {self.place.nodes} did not report")
            time.sleep(0.2)

    def require_no_end(self) -> dict[int, dict[str, Any]]:
        """Return the states that the other nodes have written, by node number.  Raises NodeEnded if one has ended."""
        states = self._states()
        for end in self._ends(states):
            raise NodeEnded(end)
        return states

    def look(self) -> StepOutcome | None:
        """Return how another node ended, from the file of that node; None if no other node has ended.

        Only node 0 looks: on other nodes the result is always None, because `srun` ends them after node 0.
        """
        if self.place.node > 0 or self.place.nodes == 1 or time.monotonic() < self._next_look:
            return None
        self._next_look = time.monotonic() + _LOOK_S
        return blame(self._ends(self._states()))

    def agree(self, end: StepOutcome | None, stop_requested: bool = False) -> StepOutcome:
        """Return how the run ended, as node 0 decides it.

        Rank 0 runs on node 0: its clean end is the end of the run.  Otherwise node 0 waits some seconds for the ends of
        the other nodes and selects the one that explains the others.  Another node that failed waits for this decision
        before it exits, because `srun` kills all nodes as soon as one exits with an error.

        Args:
            end: how the processes of this node ended; None: only processes of another node have ended.
            stop_requested: whether this node received a signal to stop.
        """
        if self.place.nodes == 1:
            return end or StepOutcome(1)
        if self.place.node == 0:
            self.decision = end if end is not None and end.clean else self._decide(end, stop_requested)
            self.write_end(self.decision)
            return self.decision
        own = end or StepOutcome(1)
        self.write_end(own)
        if own.clean:
            return own
        limit = time.monotonic() + 4 * self._seconds  # node 0 decides earlier, even if its disk is full
        while time.monotonic() < limit:
            leader = read(self.files[0])
            if leader is not None and leader["end"] is not None:
                self.decision = StepOutcome(**leader["end"])
                return self.decision
            time.sleep(0.2)
        return own

    def _decide(self, end: StepOutcome | None, stop_requested: bool) -> StepOutcome:
        # If this node cannot write, the other nodes probably cannot write either, so do not wait long for their files.
        can_write = self.write_end(None)
        limit = time.monotonic() + (self._seconds if can_write else min(_LOOK_S, self._seconds))
        while len(ends := self._ends(self._states())) < self.place.nodes - 1 and time.monotonic() < limit:
            time.sleep(0.2)
        known = [*ends, *([end] if end else [])]
        if end is None and all(other.clean for other in known):
            cause = "the ranks of node 0 did not end when those of the other nodes did"
            if stop_requested and known and all(other.code == 75 for other in known):
                return StepOutcome(75, f"stopped; {cause}", self.place.host)
            return StepOutcome(1, cause, self.place.host)
        blamed = blame(known) or StepOutcome(1)
        silent = [state["host"] for state in self._states().values() if state["end"] is None]
        if can_write and silent and blamed.code == 1 and blamed.status not in _KILLED:
            # A lost node leaves errors on the others.
            lost = f"{', '.join(silent)} gave no report within {self._seconds:g} s: lost, or still waiting for others"
            blamed = replace(blamed, what=f"{blamed.what}; {lost}")
        return blamed

    def write_end(self, end: StepOutcome | None) -> bool:
        """Write how this node ended (None: it has not).  Return False if the file cannot be written (full disk)."""
        try:
            self.files[self.place.node].parent.mkdir(exist_ok=True)
            self._write(end)
        except OSError as error:
            _log.warning("%s: the state of this node could not be written: %s", self.files[self.place.node], error)
            return False
        return True

    def _write(self, end: StepOutcome | None) -> None:
        write_json(self.files[self.place.node], {"host": self.place.host, "end": end and asdict(end)})

    def _states(self) -> dict[int, dict[str, Any]]:
        """Return the states that the other nodes have written, by node number."""
        others = ((k, read(file)) for k, file in enumerate(self.files) if k != self.place.node)
        return {k: state for k, state in others if state is not None}

    @staticmethod
    def _ends(states: dict[int, dict[str, Any]]) -> list[StepOutcome]:
        return [StepOutcome(**state["end"]) for state in states.values() if state["end"] is not None]


def blame(ends: list[StepOutcome]) -> StepOutcome | None:
    """Return the end that caused the other ends; None if `ends` is empty.

    It is the earliest end with a killed process; without a killed process the earliest error; without an error the
    earliest clean end.  SIGABRT does not count as killed: a rank whose peer is gone may abort itself.
    """

    def weight(end: StepOutcome) -> tuple[int, float]:
        if end.clean:
            return 2, end.at
        return 0 if end.status in _KILLED else 1, end.at

    return min(ends, key=weight, default=None)


def node_file(endpoints: Path, node: int, attempt: str) -> Path:
    """Return the file in which a node reports that it is fit to begin, and later how it ended."""
    return endpoints / f"node-{node}-{attempt}.json"


def read(file: Path) -> dict[str, Any] | None:
    """Return the content of a file of a node; None if the file does not exist."""
    with contextlib.suppress(OSError):
        os.listdir(file.parent)  # makes an NFS client notice a file that did not exist before
    return read_object(file)
