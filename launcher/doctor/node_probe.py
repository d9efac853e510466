"""The part of `prorl doctor --nodes` that srun runs on each node.  Standard library only.

    python node_probe.py HOST PORT FOLDER

Asks doctor at HOST:PORT for its time, tries FOLDER, in which doctor holds `lock` and replaces `beat` all the time, and
prints one line: PRORL-NODE and a JSON object, whose keys are the fields of `nodes.NodeFacts`.  Ends within 90 s.
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
STALE_S = 10.0  # how long a replaced file may go on to read as before
PACKAGES = ("nemo_prorl", "torch", "nemo_toolkit", "nemo_aligner", "megatron_core", "nvidia-nccl-cu12")


def clock(host: str, port: int) -> dict[str, Any]:
    """Return how many seconds doctor's clock is ahead of this one, and how far that may be wrong."""
    steady, before = time.monotonic(), time.time()
    try:
        with socket.create_connection((host, port), timeout=15) as connection, connection.makefile() as doctor:
            theirs = float(doctor.readline())
    except (OSError, ValueError) as error:
        return {"reach_fault": f"{host}:{port}: {getattr(error, 'strerror', None) or error}"}
    half = (time.monotonic() - steady) / 2
    return {"ahead_s": theirs - before - half, "ahead_error_s": half}


def node_name() -> str:
    return os.environ.get("SLURMD_NODENAME") or socket.gethostname()


def shared(folder: Path) -> dict[str, Any]:
    """Return how the folder behaves as seen from this node."""
    mine = folder / f"node-{node_name()}"
    temporary = mine.with_suffix(".tmp")
    try:
        temporary.write_text(node_name())
        os.replace(temporary, mine)
        return {"stale_s": stale(folder / "beat"), **locks(folder)}
    except OSError as error:
        return {"folder_fault": f"{error.strerror or error}: {error.filename or folder}"}


def locks(folder: Path) -> dict[str, Any]:
    """Return whether doctor's lock, held on another machine, keeps this one out."""
    with (folder / "lock").open("r+") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return {"lock_holds": True}
    return {"lock_holds": False}


def stale(beat: Path) -> float | None:
    """Return the seconds until a file that doctor replaces all the time reads as new here; None: not in STALE_S."""
    before, begin = _read(beat), time.monotonic()  # now this machine has it in its caches
    while _read(beat) == before:
        if time.monotonic() - begin > STALE_S:
            return None
        time.sleep(0.02)
    return time.monotonic() - begin


def _read(file: Path) -> str:
    """Return the content of a file; read it again after an error: over NFS, the file just replaced may be stale."""
    try:
        return file.read_text()
    except OSError:
        time.sleep(0.1)
        return file.read_text()


def versions() -> dict[str, str]:
    found = {"python": ".".join(map(str, sys.version_info[:3]))}
    for name in PACKAGES:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            found[name] = "none"
    return found


def gpus() -> list[str]:
    """Return name and driver of each GPU; none if nvidia-smi does not answer."""
    query = ["nvidia-smi", "--query-gpu=name,driver_version", "--format=csv,noheader"]
    try:
        told = subprocess.run(query, capture_output=True, text=True, timeout=30, check=True)
    except (OSError, subprocess.SubprocessError):
        return []
    return told.stdout.strip().splitlines()


def main() -> None:
    host, port, folder = sys.argv[1], int(sys.argv[2]), Path(sys.argv[3])
    signal.alarm(90)
    here = {"versions": versions(), "gpus": gpus(), "shm_free": shutil.disk_usage("/dev/shm").free}
    report = {"node": node_name(), **here, **clock(host, port), **shared(folder)}
    sys.stdout.write(MARK + json.dumps(report) + "\n")


if __name__ == "__main__":
    main()
