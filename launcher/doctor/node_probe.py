"""The probe of `prorl doctor --nodes`, which srun runs on each node.  Standard library only.

    python node_probe.py HOST PORT FOLDER

Reads doctor's clock from HOST:PORT, and tests FOLDER, in which doctor locks the file `lock` and replaces the file
`beat` continuously.  Prints one line: PRORL-NODE and a JSON object with the fields of `nodes.NodeFacts`.  Ends within
90 s.
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
STALE_S = 10.0  # limit in seconds until a replaced file shows its new content
PACKAGES = ("nemo_prorl", "torch", "nemo_toolkit", "nemo_aligner", "megatron_core", "nvidia-nccl-cu12")


def clock(host: str, port: int) -> dict[str, Any]:
    """Return how many seconds doctor's clock is ahead of this machine's clock, and the maximum error of this number."""
    steady, before = time.monotonic(), time.time()
    try:
        with socket.create_connection((host, port), timeout=15) as connection, connection.makefile() as doctor:
            doctor_time = float(doctor.readline())
    except (OSError, ValueError) as error:
        return {"reach_fault": f"{host}:{port}: {getattr(error, 'strerror', None) or error}"}
    half = (time.monotonic() - steady) / 2
    return {"ahead_s": doctor_time - before - half, "ahead_error_s": half}


def node_name() -> str:
    return os.environ.get("SLURMD_NODENAME") or socket.gethostname()


def shared(folder: Path) -> dict[str, Any]:
    """Write a file into the shared folder; return how replaced files and locks behave on this node."""
    own_file = folder / f"node-{node_name()}"
    temporary = own_file.with_suffix(".tmp")
    try:
        temporary.write_text(node_name())
        os.replace(temporary, own_file)
        return {"stale_s": stale(folder / "beat"), "lock_holds": lock_holds(folder / "lock")}
    except OSError as error:
        return {"folder_fault": f"{error.strerror or error}: {error.filename or folder}"}


def lock_holds(lock: Path) -> bool:
    """Return whether this node cannot lock a file that doctor has locked, perhaps on another machine."""
    with lock.open("r+") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
    return False


def stale(beat: Path) -> float | None:
    """Return the seconds until this node sees new content in doctor's `beat` file; None after STALE_S."""
    before, begin = _read(beat), time.monotonic()  # reading the file puts its old content into this machine's caches
    while _read(beat) == before:
        if time.monotonic() - begin > STALE_S:
            return None
        time.sleep(0.02)
    return time.monotonic() - begin


def _read(file: Path) -> str:
    """Return the content of a file; read it again after an error: over NFS, a replaced file gives a stale handle."""
    try:
        return file.read_text()
    except OSError:
        time.sleep(0.1)
        return file.read_text()


def versions() -> dict[str, str]:
    installed = {"python": ".".join(map(str, sys.version_info[:3]))}
    for name in PACKAGES:
        try:
            installed[name] = version(name)
        except PackageNotFoundError:
            installed[name] = "none"
    return installed


def gpus() -> list[str]:
    """Return name and driver of each GPU; an empty list if nvidia-smi fails."""
    query = ["nvidia-smi", "--query-gpu=name,driver_version", "--format=csv,noheader"]
    try:
        done = subprocess.run(query, capture_output=True, text=True, timeout=30, check=True)
    except (OSError, subprocess.SubprocessError):
        return []
    return done.stdout.strip().splitlines()


def main() -> None:
    host, port, folder = sys.argv[1], int(sys.argv[2]), Path(sys.argv[3])
    signal.alarm(90)
    machine = {"versions": versions(), "gpus": gpus(), "shm_free": shutil.disk_usage("/dev/shm").free}
    report = {"node": node_name(), **machine, **clock(host, port), **shared(folder)}
    sys.stdout.write(MARK + json.dumps(report) + "\n")


if __name__ == "__main__":
    main()
