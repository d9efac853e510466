"""The `srun` of one attempt: start the supervisors of all nodes, copy their output, and find out how the run ended.

The batch script (`slurm_driver`) uses this module.
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

BEGUN = "the supervisor has begun on "  # in the first line of each supervisor; SIGUSR1 can stop it from then on
OUTCOME = "outcome of the run: "  # precedes JSON on standard output; used if a full disk prevents node 0's file
_BEGUN = re.compile(BEGUN + r"(\S+)")
_ENDING_S = 15.0  # seconds for srun to end after SIGTERM
_LAST_LINES_S = 10.0  # seconds for the last lines of output to arrive after srun has ended
_LOOK_S = 1.0  # seconds between two reads of node 0's file
# The lines in which srun reports a failed task or a lost node.
_FAULT = re.compile(
    r"srun: error: (?:Node failure on (?P<lost>\S+)|(?P<host>\S+): tasks? (?P<tasks>[\d,-]+): (?P<how>.+))"
)
_EXITED = re.compile(r"Exited with exit code (\d+)")
_SPECIFIC_CODES = (2, 3, 4)  # exit codes of `prorl` that name a cause: configuration, machine, data


class Step:
    """The supervisors of all nodes, started by one `srun`.

    Lines of the supervisors go to `log`; lines of srun itself go to standard error.

    Args:
        nodes: number of nodes, one supervisor each.
        leader: file in which node 0 writes how the run ended.
    """

    def __init__(self, command: Sequence[str], env: Mapping[str, str], nodes: int, log: Path, leader: Path) -> None:
        self.begun: set[str] = set()  # hosts whose supervisors have begun
        self._nodes, self._log, self._leader = nodes, log, leader
        self._stop_requested, self._stop_sent = False, False
        self._printed: dict[str, Any] | None = None  # the outcome that node 0 printed on standard output
        self._fault: re.Match[str] | None = None  # first fault that srun reported before node 0 wrote its outcome
        self._has_outcome, self._next_look = False, 0.0
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
        """Request a clean stop of the run.  The signal is sent once all supervisors have begun.

        Call this method from the main thread or from a signal handler.
        """
        self._stop_requested = True
        self.forward_stop()

    def forward_stop(self) -> None:
        """Send a requested stop once all supervisors have begun: SIGUSR1, which srun forwards to them.

        The signal is sent only once, because a supervisor ends at once on a second one.
        """
        if not self._stop_requested or self._stop_sent or len(self.begun) < self._nodes:
            return
        self._stop_sent = True
        with contextlib.suppress(OSError):
            self.process.send_signal(signal.SIGUSR1)

    def kill(self) -> None:
        """Terminate an srun that does not end, and with it the supervisors of all nodes."""
        say(f"srun has not ended; sending it SIGTERM, and SIGKILL after {_ENDING_S:g} s, to end the node supervisors")
        for number, seconds in ((signal.SIGTERM, _ENDING_S), (signal.SIGKILL, 5.0)):
            self.process.send_signal(number)
            with contextlib.suppress(subprocess.TimeoutExpired):
                self.process.wait(seconds)
                return

    def has_outcome(self) -> bool:
        """Return whether node 0 has reported how the run ended.  The file of node 0 is read once per second."""
        if not self._has_outcome and time.monotonic() >= self._next_look:
            self._next_look = time.monotonic() + _LOOK_S
            self._has_outcome = self.outcome() is not None
        return self._has_outcome

    def outcome(self) -> dict[str, Any] | None:
        """Return how the run ended according to node 0: from its file, otherwise from its line on standard output.

        The file is preferred because lines of several nodes can be mixed on standard output.

        Returns:
            The fields of `peers.End`; None if node 0 has not reported.
        """
        written = read(self._leader)
        return self._printed if written is None or written["end"] is None else written["end"]

    def result(self) -> dict[str, Any]:
        """Return how the run ended, after srun has ended.

        If srun reported a failed supervisor before node 0 wrote its outcome, that supervisor is the cause: node 0 saw
        only the consequence, and stopped because srun sent it a signal.
        """
        for reader in self._readers:
            reader.join(_LAST_LINES_S)
        outcome, fault = self.outcome(), self._fault
        if outcome is None:
            unexplained = {
                "code": 1,
                "what": f"srun ended with status {self.process.returncode}, and node 0 wrote no outcome",
            }
            return unexplained if fault is None else _fault_of(fault)
        if fault is None or outcome["code"] == 0 or _is_end_of_leader(fault, outcome["code"]):
            return outcome
        return _fault_of(fault)

    def _read_supervisors(self, stream: IO[str]) -> None:
        for line in stream:
            self.begun.update(_BEGUN.findall(line))
            self._printed = _outcome_in(line) or self._printed
            with contextlib.suppress(OSError):  # the folder does not exist yet or the disk is full; the run goes on
                if self._open_log is None:
                    self._open_log = self._log.open("ab", buffering=0)
                self._open_log.write(line.encode())

    def _read_srun(self, stream: IO[str]) -> None:
        for line in stream:
            os.write(sys.stderr.fileno(), line.encode())
            if self._fault is None and (found := _FAULT.match(line)) and self.outcome() is None:
                self._fault = found


def _outcome_in(line: str) -> dict[str, Any] | None:
    """Return the outcome in a line, even if another node wrote text before or after it in the same line."""
    _, mark, text = line.partition(OUTCOME)
    try:
        found = json.JSONDecoder().raw_decode(text)[0] if mark else None
    except ValueError:
        return None
    return found if isinstance(found, dict) and {"code", "what"} <= found.keys() else None


def _is_end_of_leader(fault: re.Match[str], code: int) -> bool:
    """Return whether srun's report is only that node 0 (task 0) exited, with the exit code in node 0's outcome."""
    exited = _EXITED.match(fault["how"] or "")
    return exited is not None and int(exited[1]) == code and re.split("[,-]", fault["tasks"])[0] == "0"


def _fault_of(found: re.Match[str]) -> dict[str, Any]:
    if found["lost"]:
        return {"code": 1, "what": f"srun reported a failure of node {found['lost']}", "host": found["lost"]}
    host, how = found["host"], found["how"].strip()
    exited = _EXITED.match(how)
    code = int(exited[1]) if exited and int(exited[1]) in _SPECIFIC_CODES else 1
    return {"code": code, "what": f"the supervisor of {host}: {how}", "host": "" if "[" in host else host}
