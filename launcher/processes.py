"""Child processes of the node supervisor: started with logs, watched, restarted, and never left behind."""

import contextlib
import io
import logging
import os
import random
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
from typing import Protocol

from nemo_prorl.errors import ProrlError

_log = logging.getLogger(__name__)

_LINE_CHARS = 1 << 14  # of a line in the log of all processes; the process's own file has all of it
_STOP = {signal.SIGUSR1}  # Slurm sends it to every process of a task; only the supervisor acts on it


class ProcessFailed(ProrlError, RuntimeError):
    """A child of the supervisor ended, and the run cannot go on without it."""


class Lines(Protocol):
    """The place where the lines of all processes come together."""

    def write(self, name: str, line: str) -> None: ...


class MergedLog:
    """RUN/logs/all.log: the lines of every process with its name in front.  One lock keeps lines whole."""

    def __init__(self, path: Path) -> None:
        self._file = path.open("a", buffering=1, errors="replace")
        self._lock = threading.Lock()

    def write(self, name: str, line: str) -> None:
        with self._lock:
            self._file.write(f"{name}: {line}\n")


class StandardOutput:
    """The lines of every process with its name in front, on standard output, which `srun` forwards; whole lines."""

    def __init__(self) -> None:
        if isinstance(sys.stdout, io.TextIOWrapper):  # whatever the locale: a line that cannot be written ends a copier
            sys.stdout.reconfigure(encoding="utf-8", errors="replace")
        self._file, self._lock = sys.stdout, threading.Lock()

    def write(self, name: str, line: str) -> None:
        self.line(f"{name}: {line[:_LINE_CHARS]}")

    def line(self, text: str) -> None:
        with self._lock:
            self._file.write(f"{text}\n")
            self._file.flush()


def free_port(host: str = "") -> int:
    """Return a port to listen at in a while: if possible below those that the system gives to connections meanwhile."""
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


@dataclass
class Child:
    """One process and all that is needed to start it again.  `restarts`: how often that may happen in an hour."""

    name: str
    command: Sequence[str]
    env: Mapping[str, str]
    log_file: Path
    merged: Lines
    restarts: int = 0
    endpoint: Path | None = None  # removed before a start: it names the process of before
    on_line: Callable[[str], None] | None = None
    cores: Collection[int] | None = None  # processors that it may use; None: all
    process: subprocess.Popen[str] | None = None
    tail: deque[str] = field(default_factory=lambda: deque(maxlen=30))
    _ended: list[float] = field(default_factory=list)
    _restart_at: float = 0.0
    _log_failed: bool = False
    _copier: threading.Thread | None = None

    def start(self) -> None:
        """Start the process in a session of its own, deaf to SIGUSR1.  Our programs end when this process does."""
        if self.endpoint is not None:
            self.endpoint.unlink(missing_ok=True)
        signal.pthread_sigmask(signal.SIG_BLOCK, _STOP)  # inherited
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
        if self.cores is not None:  # its threads and children, which do not exist yet, inherit it
            with contextlib.suppress(ProcessLookupError):  # it has ended already, which its watcher reports
                os.sched_setaffinity(self.process.pid, self.cores)
        self._copier = threading.Thread(
            target=self._copy_output, args=(self.process,), daemon=True, name=f"log {self.name}"
        )
        self._copier.start()

    def _copy_output(self, process: "subprocess.Popen[str]") -> None:
        assert process.stdout is not None
        for line in process.stdout:  # read on if the disk is full: a full pipe would stop the process
            line = line.rstrip("\n")
            try:
                with self.log_file.open("a", errors="replace") as log:
                    log.write(line + "\n")
                self.merged.write(self.name, line)
            except OSError as error:
                if not self._log_failed:
                    _log.error("%s cannot be written: %s; %s goes on without it", self.log_file, error, self.name)
                self._log_failed = True
            else:
                self._log_failed = False
            self.tail.append(line)
            if self.on_line is not None:
                self.on_line(line)

    def read_out(self, seconds: float = 1.0) -> None:
        """Wait for the last lines of an ended process, for a limited time: its children may hold its output open."""
        if self._copier is not None:
            self._copier.join(seconds)

    def signal(self, number: int) -> None:
        """Signal the process, if it runs."""
        if self.process is not None and self.process.poll() is None:
            self.process.send_signal(number)

    def kill_group(self) -> None:
        """Kill the process and all that it started in its session."""
        if self.process is None:
            return
        try:
            os.killpg(self.process.pid, signal.SIGKILL)
        except ProcessLookupError:
            pass

    def keep_up(self) -> None:
        """Restart an ended process, with a longer pause each time.  Raises ProcessFailed after too many restarts."""
        if self.process is None or self.process.poll() is None:
            return
        now = time.monotonic()
        if self._restart_at == 0.0:
            self.kill_group()
            self._ended = [t for t in self._ended if now - t < 3600.0] + [now]
            if len(self._ended) > self.restarts:
                self.read_out()
                raise ProcessFailed(
                    f"{self.name} ended with status {self.process.returncode}, {len(self._ended)} times within an hour;"
                    f" its log is {self.log_file}, and ends:\n" + "\n".join(list(self.tail)[-12:])
                )
            self._restart_at = now + min(30.0, 0.5 * 2.0 ** (len(self._ended) - 1))
            _log.warning("%s ended with status %s; starting it again", self.name, self.process.returncode)
        if now >= self._restart_at:
            self._restart_at = 0.0
            self.start()


def stop_all(children: Sequence[Child], seconds: float, quiet: bool = False) -> None:
    """Send SIGTERM to all, and SIGKILL to the groups of those that still run after `seconds`; wait for all."""
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
