"""The `srun` of one attempt: start the supervisors of all nodes, copy their output, and find out how the run ended.

The batch script (`slurm_driver`) uses this module.
Standard library only, Python 3.9 at least (see `slurm_driver.py`).
"""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO

from nemo_prorl.launcher.peers import StepOutcome, read
from nemo_prorl.launcher.slurm_queries import say

BEGUN = "the supervisor has begun on "  # in the first line of each supervisor; SIGUSR1 can stop it from then on
_BEGUN = re.compile(BEGUN + r"(\S+)")
_ENDING_S = 15.0  # seconds for srun to end after SIGTERM
_LAST_LINES_S = 10.0  # seconds for the last lines of output to arrive after srun has ended
_LOOK_S = 1.0  # seconds between two reads of node 0's file
# The lines in which srun reports a failed task or a lost node.
_FAULT = re.compile(
    r"srun: error: (?:Node failure on (?P<lost>\S+)|(?P<host>\S+): tasks? (?P<tasks>[\d,-]+): (?P<how>.+))"
)
_EXITED = re.compile(r"Exited with exit code (\d+)")


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
        self._fault: re.Match[str] | None = None  # first fault that srun reported before node 0 wrote its end
        self._has_end, self._next_look = False, 0.0
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

        The signal is sent only once, because a second one makes a supervisor kill its processes.
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

    def has_end(self) -> bool:
        """Return whether node 0 has reported how the run ended.  The file of node 0 is read once per second."""
        if not self._has_end and time.monotonic() >= self._next_look:
            self._next_look = time.monotonic() + _LOOK_S
            self._has_end = self.reported() is not None
        return self._has_end

    def reported(self) -> StepOutcome | None:
        """Return how the run ended, from the file of node 0; None if node 0 has not reported."""
        written = read(self._leader)
        return None if written is None or written["end"] is None else StepOutcome(**written["end"])

    def result(self) -> StepOutcome:
        """Return how the run ended, after srun has ended.

        If srun reported a failed supervisor before node 0 wrote its end, that supervisor is the cause: node 0 saw only
        the consequence, and stopped because srun sent it a signal.  The exit status of srun counts if node 0 wrote
        nothing, for instance because the disk was full.
        """
        for reader in self._readers:
            reader.join(_LAST_LINES_S)
        end, fault = self.reported(), self._fault
        if fault is not None and not (end is not None and (end.code == 0 or _is_exit_of_leader(fault))):
            return _end_of(fault)
        if end is not None:
            return end
        status = self.process.returncode
        return StepOutcome(_code_of(status), f"srun ended with status {status}, and node 0 wrote no outcome")

    def _read_supervisors(self, stream: IO[str]) -> None:
        for line in stream:
            self.begun.update(_BEGUN.findall(line))
            with contextlib.suppress(OSError):  # the folder does not exist yet or the disk is full; the run goes on
                if self._open_log is None:
                    self._open_log = self._log.open("ab", buffering=0)
                self._open_log.write(line.encode())

    def _read_srun(self, stream: IO[str]) -> None:
        for line in stream:
            os.write(sys.stderr.fileno(), line.encode())
            if self._fault is None and (fault := _FAULT.match(line)) and self.reported() is None:
                self._fault = fault


def _is_exit_of_leader(fault: re.Match[str]) -> bool:
    """Return whether srun only reported that node 0 (task 0) exited, whose exit code is the outcome of the run."""
    return fault["how"] is not None and _EXITED.match(fault["how"]) is not None and fault["tasks"].startswith("0")


def _code_of(status: int) -> int:
    """Return the exit code of a run whose supervisors or srun ended with `status`.

    0 without a report of node 0 is a clean stop (75): the same command then shows whether the run is finished.
    """
    return {0: 75, 2: 2, 3: 3, 4: 4}.get(status, 1)


def _end_of(fault: re.Match[str]) -> StepOutcome:
    if fault["lost"]:
        return StepOutcome(1, f"srun reported a failure of node {fault['lost']}", fault["lost"])
    host, how = fault["host"], fault["how"].strip()
    exited = _EXITED.match(how)
    code, no_host = _code_of(int(exited[1])) if exited else 1, "[" in host or _is_exit_of_leader(fault)
    return StepOutcome(code, f"the supervisor of {host}: {how}", "" if no_host else host)
