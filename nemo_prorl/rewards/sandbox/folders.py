"""What the caller looks up and keeps on the host: folders for programs, each named after its owner, and threads."""

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
    """When a process started, in clock ticks since boot; "" where there is none.

    psutil gives it by the wall clock, which may be set: then folders in use would look abandoned.
    """
    try:
        return Path(f"/proc/{pid}/stat").read_text(errors="replace").rpartition(")")[2].split()[19]
    except OSError:
        return ""


def make() -> str:
    """A new folder of this process."""
    sweep()
    prefix = f"{_PREFIX}{os.getpid()}-{_started(os.getpid())}-"
    return os.path.realpath(tempfile.mkdtemp(prefix=prefix))  # as a program in it sees where it is


def sweep() -> None:
    """Removes folders whose owners have ended."""
    for name in os.listdir(tempfile.gettempdir()):
        if not name.startswith(_PREFIX):
            continue
        pid, _, rest = name.removeprefix(_PREFIX).partition("-")
        if not pid.isdigit() or _started(int(pid)) != rest.partition("-")[0]:
            remove(os.path.join(tempfile.gettempdir(), name))


def remove(folder: str) -> None:
    """Removes a folder and all in it, if this user may."""
    from nemo_prorl.rewards.sandbox.zygote import empty_folder

    with contextlib.suppress(OSError):
        empty_folder(folder)
    shutil.rmtree(folder, ignore_errors=True)


def threads_behind(pidfd: int) -> int:
    """Threads of the process that a pidfd stands for, wherever its namespace; 0 when it has ended."""
    try:
        return int(psutil.Process(_pid(pidfd)).num_threads())
    except (psutil.Error, OSError, IndexError, ValueError):
        return 0


def queued_s(pidfd: int) -> float:
    """Seconds that a process was ready to run and had no CPU (its first thread); 0 where the kernel does not tell."""
    try:
        return int(Path(f"/proc/{_pid(pidfd)}/schedstat").read_text().split()[1]) / 1e9
    except (OSError, IndexError, ValueError):
        return 0.0


def _pid(pidfd: int) -> int:
    return int(Path(f"/proc/self/fdinfo/{pidfd}").read_text().partition("Pid:")[2].split()[0])


@lru_cache(maxsize=1)
def _tasks(uid: int, second: int) -> int:
    processes = psutil.process_iter(["uids", "num_threads"])
    return sum(one.info["num_threads"] or 0 for one in processes if one.info["uids"] and one.info["uids"].real == uid)


def tasks_of_user() -> int:
    """Processes and threads of this user, as RLIMIT_NPROC counts them; looked up once in five seconds."""
    return _tasks(os.getuid(), int(time.monotonic() / 5))
