"""The caller's helpers on the host: folders for programs, and the threads of processes."""

import contextlib
import os
import shutil
import tempfile
import time
from functools import lru_cache
from pathlib import Path

import psutil

_PREFIX = "prorl-box-"


def _started(pid: int) -> str:
    """Return the start time of a process in clock ticks since boot; "" if the process does not exist.

    psutil computes the time from the wall clock.  After a change of the clock, folders in use would look abandoned.
    """
    try:
        return Path(f"/proc/{pid}/stat").read_text(errors="replace").rpartition(")")[2].split()[19]
    except OSError:
        return ""


def make() -> str:
    """Create a folder that belongs to this process, and return its path."""
    sweep()
    prefix = f"{_PREFIX}{os.getpid()}-{_started(os.getpid())}-"
    return os.path.realpath(tempfile.mkdtemp(prefix=prefix))  # the path that a program in the folder sees as its own


def sweep() -> None:
    """Remove folders whose owners have ended."""
    for name in os.listdir(tempfile.gettempdir()):
        if not name.startswith(_PREFIX):
            continue
        pid, _, rest = name.removeprefix(_PREFIX).partition("-")
        if not pid.isdigit() or _started(int(pid)) != rest.partition("-")[0]:
            remove(os.path.join(tempfile.gettempdir(), name))


def remove(folder: str) -> None:
    """Remove a folder and its contents; raise no error for what cannot be removed."""
    from nemo_prorl.rewards.sandbox.zygote import empty_folder

    with contextlib.suppress(OSError):
        empty_folder(folder)
    shutil.rmtree(folder, ignore_errors=True)


def threads_behind(pidfd: int) -> int:
    """Return the number of threads of the process that a pidfd refers to; 0 if the process has ended."""
    try:
        return int(psutil.Process(pid_behind(pidfd)).num_threads())
    except (psutil.Error, OSError, IndexError, ValueError):
        return 0


def pid_behind(pidfd: int) -> int:
    """Return the id of the process that a pidfd refers to, as seen from here; -1 if the process has ended."""
    return int(Path(f"/proc/self/fdinfo/{pidfd}").read_text().partition("Pid:")[2].split()[0])


@lru_cache(maxsize=1)
def _tasks(uid: int, second: int) -> int:
    processes = psutil.process_iter(["uids", "num_threads"])
    return sum(one.info["num_threads"] or 0 for one in processes if one.info["uids"] and one.info["uids"].real == uid)


def tasks_of_user() -> int:
    """Return the number of this user's threads, as RLIMIT_NPROC counts them; cached for five seconds."""
    return _tasks(os.getuid(), int(time.monotonic() / 5))
