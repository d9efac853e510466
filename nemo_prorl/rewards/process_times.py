"""The times and states of processes: they tell a judge that computes from one that gets no CPU.

psutil has these times, too, but looks through all processes of the machine for descendants: milliseconds a verdict.
A process that vanishes meanwhile raises OSError, or counts as 0 if it is a descendant.
"""

import contextlib
import os
import time
from pathlib import Path

_TICKS = os.sysconf("SC_CLK_TCK")  # ticks in a second
# Fields of /proc/PID/stat after the name; ticks of ended children count once their parent has waited for them.
_STATE, _ENDED, _WITH_ENDED = 0, slice(13, 15), slice(11, 15)
_CPU_CLOCK = 2  # of a process: CPUCLOCK_SCHED in Linux, as clock_getcpuclockid(3) gives it


def _stat(pid: int) -> list[str]:
    return Path(f"/proc/{pid}/stat").read_text(errors="replace").rpartition(")")[2].split()


def cpu_s(pid: int) -> float:
    """Return the CPU seconds of a process without its children, in one system call of a microsecond."""
    return time.clock_gettime(~pid << 3 | _CPU_CLOCK)


def cpu_s_below(pid: int) -> float:
    """Return the CPU seconds of all processes that a process started, ended or running."""
    return _seconds(pid, _ENDED) + sum(map(_cpu_s_with_below, _children(pid)))


def _seconds(pid: int, fields: slice) -> float:
    return sum(map(int, _stat(pid)[fields])) / _TICKS


def _cpu_s_with_below(pid: int) -> float:
    with contextlib.suppress(OSError, IndexError):
        return _seconds(pid, _WITH_ENDED) + sum(map(_cpu_s_with_below, _children(pid)))
    return 0.0


def _children(pid: int) -> list[int]:
    pids = []
    for task in os.listdir(f"/proc/{pid}/task"):
        with contextlib.suppress(OSError):  # the thread ended, or the kernel was built without this file
            pids += Path(f"/proc/{pid}/task/{task}/children").read_text().split()
    return list(map(int, pids))


def is_stopped(pid: int) -> bool:
    """Return whether a process is stopped, by SIGSTOP or a debugger; False if it has ended."""
    try:
        return _stat(pid)[_STATE] in ("T", "t")
    except (OSError, IndexError):
        return False
