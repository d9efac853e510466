"""Times and threads of processes, from /proc."""

import os
import time
from functools import lru_cache
from pathlib import Path

QUEUED_S = (
    30.0  # waiting for a busy CPU up to this is not the program's time; a program that waits longer is not judged
)


def started(pid: int) -> str:
    """Return the start time of a process in clock ticks since boot; "" if the process does not exist.

    Unlike a time of the wall clock, it stays the same when the clock is set.
    """
    try:
        return Path(f"/proc/{pid}/stat").read_text(errors="replace").rpartition(")")[2].split()[19]
    except OSError:
        return ""


def queued_s(pid: int) -> float:
    """Return the seconds that a process's first thread waited for a busy CPU; 0 if the kernel does not report them."""
    try:
        return int(Path(f"/proc/{pid}/schedstat").read_text().split()[1]) / 1e9
    except (OSError, IndexError, ValueError):
        return 0.0


def pid_behind(pidfd: int) -> int:
    """Return the id of the process that a pidfd refers to, as seen from here; -1 if the process has ended."""
    return int(Path(f"/proc/self/fdinfo/{pidfd}").read_text().partition("Pid:")[2].split()[0])


def _uid_and_threads(pid: int) -> tuple[int, int]:
    """Return the real user id of a process and the number of its threads; (-1, 0) if the process has ended."""
    try:
        status = Path(f"/proc/{pid}/status").read_text(errors="replace")
        uid, threads = (status.partition(f"\n{name}:")[2].split()[0] for name in ("Uid", "Threads"))
        return int(uid), int(threads)
    except (OSError, IndexError):
        return -1, 0


def threads_behind(pidfd: int) -> int:
    """Return the number of threads of the process that a pidfd refers to; 0 if the process has ended."""
    return _uid_and_threads(pid_behind(pidfd))[1]


@lru_cache(maxsize=1)
def _tasks(uid: int, period: int) -> int:
    processes = [_uid_and_threads(int(name)) for name in os.listdir("/proc") if name.isdigit()]
    return sum(threads for owner, threads in processes if owner == uid)


def tasks_of_user() -> int:
    """Return the number of this user's threads, as RLIMIT_NPROC counts them; cached for five seconds."""
    return _tasks(os.getuid(), int(time.monotonic() / 5))
