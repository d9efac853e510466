"""One `srun` of the node supervisors, seen from the batch script: what they say, what `srun` says, how it ended.

Standard library only, Python 3.9 at least (see `slurm_driver.py`).
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO, Any

from nemo_prorl.launcher.peers import read
from nemo_prorl.launcher.slurm_queries import say

BEGUN = "the supervisor has begun on "  # in the first line of each supervisor, which SIGUSR1 can stop from then on
OUTCOME = "outcome of the run: "  # begins JSON on standard output; counts if a full disk takes no file
_BEGUN = re.compile(BEGUN + r"(\S+)")
_ENDING_S = 15.0  # for srun to end after a SIGTERM
_LAST_WORDS_S = 10.0  # for the last lines to arrive after srun has ended
_LOOK_S = 1.0  # between two looks for node 0's file
# srun's words for the first task that fails, or the first node that is lost.
_FAULT = re.compile(
    r"srun: error: (?:Node failure on (?P<lost>\S+)|(?P<host>\S+): tasks? (?P<tasks>[\d,-]+): (?P<how>.+))"
)
_EXITED = re.compile(r"Exited with exit code (\d+)")
_SAID = (2, 3, 4)  # exit codes that mean the same wherever they come from


class Step:
    """The supervisors of all nodes, as one `srun` runs them.  Their lines go to `log`, srun's own to standard error.

    Args:
        leader: the file in which node 0 writes how the run ended.
    """

    def __init__(self, command: Sequence[str], env: Mapping[str, str], nodes: int, log: Path, leader: Path) -> None:
        self.begun: set[str] = set()  # hosts whose supervisors have begun
        self._nodes, self._log, self._leader = nodes, log, leader
        self._stop, self._stopped = False, False  # whether to stop, and whether the supervisors were told so
        self._printed: dict[str, Any] | None = None  # the outcome on standard output
        self._fault: re.Match[str] | None = None  # the first one that srun reports before node 0's outcome is known
        self._has_outcome, self._look_at = False, 0.0
        self._open_log: IO[bytes] | None = None
        self.process = subprocess.Popen(
            list(command),
            env=dict(env),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            encoding="utf-8",
            errors="replace",
        )
        readers = ((self._read_supervisors, self.process.stdout), (self._read_srun, self.process.stderr))
        self._readers = [threading.Thread(target=read, args=(stream,), daemon=True) for read, stream in readers]
        for reader in self._readers:
            reader.start()

    def stop(self) -> None:
        """Ask the run to stop, once all supervisors have begun: srun forwards the signal to them.

        Call it from the main thread or from a signal handler.
        """
        self._stop = True
        self.forward_stop()

    def forward_stop(self) -> None:
        """Send the signal that is due, once: a supervisor takes a second one for an order to end at once."""
        if not self._stop or self._stopped or len(self.begun) < self._nodes:
            return
        self._stopped = True
        with contextlib.suppress(OSError):
            self.process.send_signal(signal.SIGUSR1)

    def kill(self) -> None:
        """End srun, and the supervisors with it, where it does not end by itself."""
        say("srun has not ended; it is ended, and its tasks with it")
        for number, seconds in ((signal.SIGTERM, _ENDING_S), (signal.SIGKILL, 5.0)):
            self.process.send_signal(number)
            with contextlib.suppress(subprocess.TimeoutExpired):
                self.process.wait(seconds)
                return

    def has_outcome(self) -> bool:
        """Return whether node 0 has said how the run ended.  Looks for its file once a second."""
        if not self._has_outcome and time.monotonic() >= self._look_at:
            self._look_at = time.monotonic() + _LOOK_S
            self._has_outcome = self.outcome() is not None
        return self._has_outcome

    def outcome(self) -> dict[str, Any] | None:
        """Return how the run ended, as node 0 says it.

        The file counts: on standard output, lines of several nodes can be mixed.
        """
        written = read(self._leader)
        return self._printed if written is None or written["end"] is None else written["end"]

    def result(self) -> dict[str, Any]:
        """Return how the run ended, after srun has.

        A supervisor that ended before node 0 had decided is the cause: node 0 knows only what that led to, and stops
        because srun asks it to.
        """
        for reader in self._readers:
            reader.join(_LAST_WORDS_S)
        outcome, fault = self.outcome(), self._fault
        if outcome is None:
            nothing = {"code": 1, "what": f"srun ended with status {self.process.returncode}"}
            return nothing if fault is None else _fault_of(fault)
        if fault is None or outcome["code"] == 0 or _is_end_of_leader(fault, outcome["code"]):
            return outcome
        return _fault_of(fault)

    def _read_supervisors(self, stream: IO[str]) -> None:
        for line in stream:
            self.begun.update(_BEGUN.findall(line))
            self._printed = _outcome_in(line) or self._printed
            with contextlib.suppress(OSError):  # no folder yet, or a full disk: neither stops anything
                if self._open_log is None:
                    self._open_log = self._log.open("ab", buffering=0)
                self._open_log.write(line.encode())

    def _read_srun(self, stream: IO[str]) -> None:
        for line in stream:
            os.write(sys.stderr.fileno(), line.encode())
            if self._fault is None and (found := _FAULT.match(line)) and self.outcome() is None:
                self._fault = found


def _outcome_in(line: str) -> dict[str, Any] | None:
    """Return the outcome that a line holds, whatever another node wrote before and behind it."""
    _, mark, text = line.partition(OUTCOME)
    try:
        found = json.JSONDecoder().raw_decode(text)[0] if mark else None
    except ValueError:
        return None
    return found if isinstance(found, dict) and {"code", "what"} <= found.keys() else None


def _is_end_of_leader(fault: re.Match[str], code: int) -> bool:
    """Return whether srun reports no more than that node 0, whose task is the first, ended with the outcome's code."""
    exited = _EXITED.match(fault["how"] or "")
    return exited is not None and int(exited[1]) == code and re.split("[,-]", fault["tasks"])[0] == "0"


def _fault_of(found: re.Match[str]) -> dict[str, Any]:
    if found["lost"]:
        return {"code": 1, "what": f"{found['lost']} was lost to Slurm", "host": found["lost"]}
    host, how = found["host"], found["how"].strip()
    exited = _EXITED.match(how)
    code = int(exited[1]) if exited and int(exited[1]) in _SAID else 1
    return {"code": code, "what": f"the supervisor of {host}: {how}", "host": "" if "[" in host else host}
