"""One `srun` of the node supervisors, seen from the batch script: what they say, what `srun` says, how it ended.

Standard library only, Python 3.9 at least (see `slurm.py`).
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
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO, Any

from nemo_prorl.launcher.slurm_job import say

BEGUN = "the supervisor has begun on "  # in the first line of each supervisor, which SIGUSR1 can stop from then on
OUTCOME = "outcome of the run: "  # begins the line of standard output that says how the run ended, as JSON
_ENDING_S = 15.0  # for srun to end after a SIGTERM
# srun's words for the first task that fails, or the first node that is lost.
_FAULT = re.compile(r"srun: error: (?:Node failure on (?P<lost>\S+)|(?P<host>\S+): tasks? [\d,-]+: (?P<how>.+))")
_EXITED = re.compile(r"Exited with exit code (\d+)")
_SAID = (2, 3, 4)  # exit codes that mean the same wherever they come from


class Step:
    """The supervisors of all nodes, as one `srun` runs them.  Their lines go to `log`, srun's own to standard error."""

    def __init__(self, command: Sequence[str], env: Mapping[str, str], nodes: int, log: Path) -> None:
        self.outcome: dict[str, Any] | None = None  # as node 0 says it
        self.missing = nodes  # supervisors that have not begun
        self._stop, self._stopped = False, False  # whether to stop, and whether the supervisors were told so
        self._log, self._fault = log, None  # type: Path, dict[str, Any] | None
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
        if not self._stop or self._stopped or self.missing > 0:
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

    def result(self, seconds: float) -> dict[str, Any]:
        """Return how the run ended, after srun has; wait at most `seconds` for the last lines.

        A supervisor that ended before node 0 had decided is the cause: node 0 knows only what that led to.
        """
        for reader in self._readers:
            reader.join(seconds)
        if self._fault is not None and (self.outcome is None or self.outcome["code"] not in (0, 75)):
            return self._fault
        return self.outcome or {"code": 1, "what": f"srun ended with status {self.process.returncode}"}

    def _read_supervisors(self, stream: IO[str]) -> None:
        for line in stream:
            self.missing -= BEGUN in line and self.missing > 0
            if line.startswith(OUTCOME):
                self.outcome = json.loads(line[len(OUTCOME) :])
                continue
            with contextlib.suppress(OSError), self._log.open("a", errors="replace") as log:
                log.write(line)  # a disk that is full stops nothing

    def _read_srun(self, stream: IO[str]) -> None:
        for line in stream:
            os.write(sys.stderr.fileno(), line.encode())
            if self.outcome is None and self._fault is None and (found := _FAULT.match(line)):
                self._fault = _fault_of(found)


def _fault_of(found: re.Match[str]) -> dict[str, Any]:
    if found["lost"]:
        return {"code": 1, "what": f"{found['lost']} was lost to Slurm", "host": found["lost"]}
    host, how = found["host"], found["how"].strip()
    exited = _EXITED.match(how)
    code = int(exited[1]) if exited and int(exited[1]) in _SAID else 1
    return {"code": code, "what": f"the supervisor of {host}: {how}", "host": "" if "[" in host else host}
