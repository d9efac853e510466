"""Writes the stacks of all processes of a node to RUN/logs/stacks-NODE.txt when the supervisor gets SIGUSR2."""

import contextlib
import faulthandler
import logging
import os
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import IO, Any

from nemo_prorl.launcher.processes import Child
from nemo_prorl.launcher.usage_sampler import families
from nemo_prorl.stacks import SIGNAL

_log = logging.getLogger(__name__)

_AGAIN_S = 60.0  # seconds in which further requests are ignored, because all ranks of a node ask at about the same time
_ANSWER_S, _SETTLE_S = 1.0, 0.05  # seconds for a process to begin its stacks, and to end them


class StackWriter:
    """Writes stacks on request: `ask` is a signal handler, and `update`, called often, starts a thread that writes.

    Args:
        children: processes of the supervisor; the processes that they started are included.
        file: file to append to.
    """

    def __init__(self, children: Sequence[Child], file: Path) -> None:
        self._children, self._file = children, file
        self._asked, self._again_at = False, 0.0

    def ask(self, *_: Any) -> None:
        self._asked = True

    def update(self) -> None:
        asked, self._asked = self._asked, False
        if asked and time.monotonic() >= self._again_at:
            self._again_at = time.monotonic() + _AGAIN_S
            threading.Thread(target=self.write, daemon=True, name="stacks").start()

    def write(self) -> None:
        """Append the stacks of the supervisor and of all processes below it."""
        try:
            with self._file.open("a") as out:
                out.write(f"==== {time.strftime('%Y-%m-%d %H:%M:%S')} on {os.uname().nodename}\n")
                _append(out, "supervisor", os.getpid())
                for name, processes in families(self._children).items():
                    for process in processes:
                        _append(out, name, process.pid)
        except OSError as error:
            _log.warning("%s cannot be written: %s", self._file, error)


def _append(out: IO[str], name: str, pid: int) -> None:
    """Write a line about a process, and let the process append its stacks if it catches the signal.

    The signal would end a process that does not catch it.
    """
    try:
        status = dict(line.split(":", 1) for line in Path(f"/proc/{pid}/status").read_text().splitlines())
        command = Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace").strip()
    except OSError:  # the process has ended
        return
    out.write(f"\n---- {name}, process {pid}, state {status['State'].strip()}: {command[:160]}\n")
    out.flush()
    if pid == os.getpid():
        faulthandler.dump_traceback(out)
    elif int(status["SigCgt"], 16) >> (SIGNAL - 1) & 1:
        size, end = os.fstat(out.fileno()).st_size, time.monotonic() + _ANSWER_S
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, SIGNAL)
        while os.fstat(out.fileno()).st_size == size and time.monotonic() < end:
            time.sleep(_SETTLE_S)
        time.sleep(_SETTLE_S)
