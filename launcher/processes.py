"""Child processes of the node supervisor: start with logs, restart, and stop together with their own children."""

import contextlib
import io
import logging
import os
import random
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TextIO

from nemo_prorl.errors import ProrlError

_log = logging.getLogger(__name__)

_LINE_CHARS = 1 << 14  # longest line in the log of all processes; the log of the process has the full line
_SHOWN_CHARS = 500  # longest exception in a message
_STOP_S = 2.0  # seconds for a service to stop
_STOP = {signal.SIGUSR1}  # Slurm sends this signal to every process of a task; only the supervisor acts on it
_RAISED = re.compile(  # the last line of a traceback, also where vLLM begins each line with process, level and place
    r"(?:\(\w+ pid=\d+\) )*(?:[A-Z]+ [\d-]+ [\d:]+ \[[^]]*\] )?"
    r"((?:[A-Za-z_]\w*\.)*[A-Z]\w*(?:Error|Exception|Failure|Exit|Interrupt)(?:: .*)?)"
)
_FOLLOWS = ("See root cause above", "See stack trace (above)")  # vLLM: another process of the engine failed first


class ProcessFailed(ProrlError, RuntimeError):
    """A child of the supervisor ended too often, and the run cannot go on without it."""


class NeverServed(ProcessFailed):
    """A child of the supervisor ended twice with the same exception before it was of use, so a restart cannot help."""


class MergedLog:
    """The lines of all processes, each prefixed with the name of its process.  A lock keeps lines whole.

    Args:
        path: file to append to; None: standard output, which `srun` forwards.
    """

    def __init__(self, path: Path | None) -> None:
        # A line that the locale cannot encode would end a copier thread.
        if path is not None:
            self._file: TextIO = path.open("a", encoding="utf-8", errors="replace")
        else:
            self._file = sys.stdout
            if isinstance(sys.stdout, io.TextIOWrapper):
                sys.stdout.reconfigure(encoding="utf-8", errors="replace")
        self._lock = threading.Lock()

    def write(self, name: str, line: str) -> None:
        with self._lock:
            self._file.write(f"{name}: {line[:_LINE_CHARS]}\n")
            self._file.flush()


def free_port(host: str = "") -> int:
    """Return a free port, preferably below the range from which the system takes ports of outgoing connections.

    The caller listens at the port later; outgoing connections in between do not take a port below that range.
    """
    try:
        with open("/proc/sys/net/ipv4/ip_local_port_range") as file:
            below = int(file.read().split()[0])
    except (OSError, ValueError):
        below = 32768
    tries = [random.SystemRandom().randrange(below - 12_000, below) for _ in range(100)] if below > 20_000 else []
    for port in (*tries, 0):
        with contextlib.suppress(OSError), socket.socket() as s:
            s.bind((host, port))
            return int(s.getsockname()[1])
    raise OSError(f"{host or 'this machine'}: no TCP port is free")


@dataclass
class Child:
    """A child process, with everything needed to start it again.

    Attributes:
        merged: destination for the lines of all processes.
        restarts: maximum restarts within an hour.
        endpoint: file in which the process publishes its address; removed before each start.
        on_line: function called with each line of output.
        cores: processors that the process may use; None: all.
        has_served: whether the process's service was of use once, so that ends with the same exception are retried;
            None: they are always retried.
        raised: last line of the last exception that the process printed, or None.
        tail: last lines of output.
    """

    name: str
    command: Sequence[str]
    env: Mapping[str, str]
    log_file: Path
    merged: MergedLog
    restarts: int = 0
    endpoint: Path | None = None
    on_line: Callable[[str], None] | None = None
    cores: Collection[int] | None = None
    has_served: Callable[[], bool] | None = None
    raised: str | None = None
    process: subprocess.Popen[str] | None = None
    tail: deque[str] = field(default_factory=lambda: deque(maxlen=30))
    _ended: list[float] = field(default_factory=list)
    _raised_before: list[str] | None = None  # words of the exception that ended the process before this one
    _restart_at: float = 0.0
    _down_since: float = 0.0  # monotonic time of the end after which it has not served again; 0: it serves
    _kill_at: float = 0.0  # monotonic time at which a requested stop becomes a kill; 0: none was requested
    _log_failed: bool = False
    _copier: threading.Thread | None = None

    @property
    def status(self) -> int | None:
        """Return the exit status of the process; negative: the signal that killed it; None: it runs or never ran."""
        return None if self.process is None else self.process.poll()

    def start(self) -> None:
        """Start the process in a new session, with SIGUSR1 blocked."""
        if self.endpoint is not None:
            self.endpoint.unlink(missing_ok=True)
        signal.pthread_sigmask(signal.SIG_BLOCK, _STOP)  # the child inherits the mask
        try:
            self._launch()
        finally:
            signal.pthread_sigmask(signal.SIG_UNBLOCK, _STOP)

    def _launch(self) -> None:
        self.process = subprocess.Popen(
            list(self.command),
            env=dict(self.env),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            start_new_session=True,
        )
        self.raised = None
        if self.cores is not None:  # threads and children that the process starts later inherit the cores
            with contextlib.suppress(ProcessLookupError):  # the process has ended already; `keep_up` notices that
                os.sched_setaffinity(self.process.pid, self.cores)
        self._copier = threading.Thread(
            target=self._copy_output, args=(self.process,), daemon=True, name=f"log {self.name}"
        )
        self._copier.start()

    def _copy_output(self, process: "subprocess.Popen[str]") -> None:
        assert process.stdout is not None
        for line in process.stdout:  # keep reading if the disk is full: a full pipe would block the process
            line = line.rstrip("\n")
            try:
                with self.log_file.open("a", errors="replace") as log:
                    log.write(line + "\n")
                self.merged.write(self.name, line)
            except OSError as error:
                if not self._log_failed:
                    _log.error("%s cannot be written: %s; %s continues without log", self.log_file, error, self.name)
                self._log_failed = True
            else:
                self._log_failed = False
            self.tail.append(line)
            if process is self.process and (match := _RAISED.fullmatch(line)) and not any(w in line for w in _FOLLOWS):
                self.raised = match[1][:_SHOWN_CHARS]
            if self.on_line is not None:
                self.on_line(line)

    def read_out(self, seconds: float = 1.0) -> None:
        """Wait for the last lines of an ended process, at most `seconds`: its children may keep its output open."""
        if self._copier is not None:
            self._copier.join(seconds)

    def signal(self, number: int) -> None:
        """Signal the process, if it runs."""
        if self.process is not None and self.status is None:
            self.process.send_signal(number)

    def kill_group(self) -> None:
        """Kill the process and all processes of its group."""
        if self.process is not None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.process.pid, signal.SIGKILL)

    def restart(self) -> None:
        """Stop the process, after 2 s by SIGKILL; `keep_up` starts it again without counting this as a failure."""
        self.signal(signal.SIGTERM)
        self._kill_at = time.monotonic() + _STOP_S

    def keep_up(self) -> None:
        """Restart the process if it has ended; the pause before a restart doubles each time, up to 30 s.

        Raises:
            ProcessFailed: the process ended more than `restarts` times within an hour.
            NeverServed: the process ended twice with the same exception before `has_served`.
        """
        now = time.monotonic()
        if self.process is None or self.process.poll() is None:
            if self._down_since and self.endpoint is not None and os.path.exists(self.endpoint):  # no error of a disk
                _log.info("%s serves again after %.0f s", self.name, now - self._down_since)
                self._down_since = 0.0
            if 0.0 < self._kill_at <= now:
                self.kill_group()
            return
        if self._kill_at:  # `restart` stopped it
            self.kill_group()
            self._kill_at = self._restart_at = 0.0
            self._down_since = now
            self.start()
            return
        if self._restart_at == 0.0:
            self.kill_group()
            self.read_out()
            self._ended = [t for t in self._ended if now - t < 3600.0] + [now]
            cause = self._cause(self.process.returncode)
            if len(self._ended) > self.restarts:
                raise ProcessFailed(
                    f"{self.name} ended with status {self.process.returncode}, {len(self._ended)} times within an hour"
                    f" (maximum restarts: {self.restarts}); its log is {self.log_file}, and ends:\n"
                    + "\n".join(list(self.tail)[-12:])
                )
            self._restart_at = now + min(30.0, 0.5 * 2.0 ** (len(self._ended) - 1))
            self._down_since = self._down_since or now
            text = f" ({cause})" if cause else ""
            _log.warning("%s ended with status %s%s; starting it again", self.name, self.process.returncode, text)
        if now >= self._restart_at:
            self._restart_at = 0.0
            self.start()

    def _cause(self, status: int) -> str | None:
        """Return the exception that ended the process; None if it printed none, or if a signal ended it (`status` < 0).

        Raises NeverServed if the same exception ended the process before, and `has_served` is still false.
        """
        cause = self.raised if status > 0 else None
        words = None if cause is None else sorted(re.findall(r"\w+", cause))  # a set is printed in any order
        before, self._raised_before = self._raised_before, words
        if words is not None and words == before and self.has_served is not None and not self.has_served():
            raise NeverServed(
                f"{self.name} ended twice with the same exception before any response was generated: {cause};"
                f" its log is {self.log_file}"
            )
        return cause


def stop_all(children: Sequence[Child], seconds: float, quiet: bool = False) -> None:
    """Stop all children: send SIGTERM, after `seconds` SIGKILL to their process groups, and wait for their ends.

    Args:
        quiet: log a child that had to be killed at level DEBUG instead of WARNING.
    """
    for child in children:
        child.signal(signal.SIGTERM)
    end = time.monotonic() + seconds
    for child in children:
        if child.process is None:
            continue
        try:
            child.process.wait(max(0.0, end - time.monotonic()))
        except subprocess.TimeoutExpired:
            level = logging.DEBUG if quiet else logging.WARNING
            _log.log(level, "%s did not stop within %g s (trainer.deadlines.stop_s); killed", child.name, seconds)
        child.kill_group()
        child.process.wait()
