"""One node's part of `prorl doctor --nodes`: run as a program, once a node, by srun.  Standard library only.

    python node_probe.py HOST PORT TOKEN FOLDER

Asks doctor at HOST:PORT for its time, tries FOLDER, in which doctor holds `lock` and has written `token`, and prints
one line: PRORL-NODE and a JSON object, whose keys are the fields of `nodes.NodeFacts`.  Ends by itself within 90 s.
"""

import fcntl
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

MARK = "PRORL-NODE "
ASKS = 12  # times that the clock is asked; the fastest answer counts
STALE_S = 10.0  # how long a replaced file may go on to read as before
PACKAGES = ("nemo_prorl", "torch", "nemo_toolkit", "nemo_aligner", "megatron_core", "nvidia-nccl-cu12")


class Doctor:
    """The connection to doctor: a JSON object a line, each answered by one."""

    def __init__(self, host: str, port: int, token: str) -> None:
        self._socket = socket.create_connection((host, port), timeout=15)
        self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._file = self._socket.makefile("rw")
        self._token = token

    def ask(self, **what: Any) -> dict[str, Any]:
        """Raises OSError where doctor is gone."""
        self._file.write(json.dumps({"token": self._token, **what}) + "\n")
        self._file.flush()
        line = self._file.readline()
        if not line:
            raise ConnectionError("doctor closed the connection")
        answer: dict[str, Any] = json.loads(line)
        return answer

    def clock(self) -> tuple[float, float]:
        """(seconds that doctor's clock is ahead of this one, how far that may be wrong)."""
        best = (0.0, float("inf"))
        for _ in range(ASKS):
            steady, before = time.monotonic(), time.time()
            theirs = float(self.ask(what="time")["time"])
            half = (time.monotonic() - steady) / 2
            if half < best[1]:
                best = (theirs - before - half, half)
        return best


def node_name() -> str:
    return os.environ.get("SLURMD_NODENAME") or socket.gethostname()


def shared(folder: Path, token: str, doctor: Doctor | None) -> dict[str, Any]:
    """What the folder looks like from here."""
    try:
        if (folder / "token").read_text() != token:
            return {"folder_fault": "another folder of that name is here"}
        mine = folder / f"node-{node_name()}"
        temporary = mine.with_suffix(".tmp")
        before = time.time()
        with temporary.open("w") as file:
            file.write(node_name())
            file.flush()
            os.fsync(file.fileno())
        skew = temporary.stat().st_mtime - (before + time.time()) / 2
        os.replace(temporary, mine)
        return {"mtime_skew_s": skew, **locks(folder), **replaced(folder, doctor)}
    except OSError as error:
        return {"folder_fault": f"{error.strerror or error}: {error.filename or folder}"}


def locks(folder: Path) -> dict[str, Any]:
    """Whether doctor's lock, held on another machine, keeps this one out."""
    with (folder / "lock").open("r+") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return {"lock_holds": True}
    return {"lock_holds": False}


def replaced(folder: Path, doctor: Doctor | None) -> dict[str, Any]:
    """Seconds until a file that doctor replaces reads as new here; null: not within STALE_S, or not tried."""
    if doctor is None:
        return {"stale_s": None}
    name = f"seen-{node_name()}"
    doctor.ask(what="write", name=name, text="old")
    begin = time.monotonic()
    while not (folder / name).exists() and time.monotonic() - begin < STALE_S:
        time.sleep(0.02)
    (folder / name).read_text()  # now this machine has it in its caches
    doctor.ask(what="write", name=name, text="new")
    begin = time.monotonic()
    while (folder / name).read_text() != "new":
        if time.monotonic() - begin > STALE_S:
            return {"stale_s": None}
        time.sleep(0.02)
    return {"stale_s": time.monotonic() - begin}


def versions() -> dict[str, str]:
    found = {"python": ".".join(map(str, sys.version_info[:3]))}
    for name in PACKAGES:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            found[name] = "none"
    return found


def gpus() -> list[str]:
    """Name and driver of each GPU; none where nvidia-smi does not answer."""
    query = ["nvidia-smi", "--query-gpu=name,driver_version", "--format=csv,noheader"]
    try:
        told = subprocess.run(query, capture_output=True, text=True, timeout=30, check=True)
    except (OSError, subprocess.SubprocessError):
        return []
    return told.stdout.strip().splitlines()


def main() -> None:
    host, port, token, folder = sys.argv[1], int(sys.argv[2]), sys.argv[3], Path(sys.argv[4])
    signal.alarm(90)
    report: dict[str, Any] = {"node": node_name(), "versions": versions(), "gpus": gpus()}
    report["shm_free"] = shutil.disk_usage("/dev/shm").free
    doctor = None
    try:
        doctor = Doctor(host, port, token)
        report["ahead_s"], report["ahead_error_s"] = doctor.clock()
    except OSError as error:
        report["reach_fault"] = f"{host}:{port}: {error.strerror or error}"
    report |= shared(folder, token, doctor)
    sys.stdout.write(MARK + json.dumps(report) + "\n")


if __name__ == "__main__":
    main()
