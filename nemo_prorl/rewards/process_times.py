"""The times and states of processes, from /proc: by them a judge that computes is told from one that gets no CPU.

psutil has these times, too, but looks through all processes of the machine for descendants: milliseconds a verdict.
A process that vanishes meanwhile raises OSError, or counts as 0 if it is a descendant.
"""

import contextlib
import os
from pathlib import Path

_TICKS = os.sysconf("SC_CLK_TCK")  # ticks in a second
_STATE, _OWN, _WITH_ENDED = 0, slice(11, 13), slice(11, 15)  # fields of /proc/PID/stat after the name


def _stat(pid: int) -> list[str]:
    return Path(f"/proc/{pid}/stat").read_text(errors="replace").rpartition(")")[2].split()


def cpu_s(pid: int, descendants: bool = False) -> float:
    """Return the CPU seconds of a process; `descendants`: together with all that it started, ended or running."""
    ticks = sum(map(int, _stat(pid)[_WITH_ENDED if descendants else _OWN]))
    return ticks / _TICKS + (sum(map(_cpu_s_below, _children(pid))) if descendants else 0.0)


def _cpu_s_below(pid: int) -> float:
    with contextlib.suppress(OSError, IndexError):
        return cpu_s(pid, descendants=True)
    return 0.0


def _children(pid: int) -> list[int]:
    found = []
    for task in os.listdir(f"/proc/{pid}/task"):
        with contextlib.suppress(OSError):  # the thread ended, or the kernel was built without this file
            found += Path(f"/proc/{pid}/task/{task}/children").read_text().split()
    return list(map(int, found))


def is_stopped(pid: int) -> bool:
    """Return whether a process is stopped, by SIGSTOP or a debugger; False if it has ended."""
    try:
        return _stat(pid)[_STATE] in ("T", "t")
    except (OSError, IndexError):
        return False
