"""Samples of what a node's processes use, written by its supervisor to endpoints/usage-NODE.json (`nemo_prorl.usage`).

A thread takes the samples, so that a slow disk or a process with much memory delays nothing.
"""

import contextlib
import os
import threading
import time
from collections.abc import Sequence
from pathlib import Path

import psutil

from nemo_prorl.files import write_json
from nemo_prorl.launcher.doctor.storage import available_memory, bytes_under
from nemo_prorl.launcher.peers import NodeAddress
from nemo_prorl.launcher.processes import Child
from nemo_prorl.usage import NodeUsage, ProcessUsage

_EVERY_S = 10.0  # seconds between samples
_SHARE = 0.005  # share of the time that samples take at most, and likewise the size of the run directory
_FIRST_S = 2.0


class UsageSampler:
    """A thread that samples the supervisor and its children until `close`."""

    def __init__(self, children: Sequence[Child], run_dir: Path, place: NodeAddress) -> None:
        self._children, self._dir, self._place = children, run_dir, place
        self._file = run_dir / "endpoints" / f"usage-{place.node}.json"
        self._run_dir_bytes: int | None = None
        self._walk_at = 0.0
        self._closed = threading.Event()
        threading.Thread(target=self._work, daemon=True, name="usage").start()

    def close(self) -> None:
        self._closed.set()

    def _work(self) -> None:
        pause = _FIRST_S
        while not self._closed.wait(pause):
            began = time.thread_time()  # CPU time: on a busy node samples do not become rare
            with contextlib.suppress(OSError):  # a disk that is full or away is reported elsewhere
                write_json(self._file, self.sample())
            pause = max(_EVERY_S, (time.thread_time() - began) / _SHARE)

    def sample(self) -> NodeUsage:
        """Return what the processes use now.  A process that has just ended is left out."""
        processes = {name: _together(family) for name, family in families(self._children).items()}
        processes[f"supervisor-{self._place.node}"] = _together([psutil.Process()])
        shm = os.statvfs("/dev/shm")
        return {
            "host": self._place.host or os.uname().nodename,
            "time": time.time(),
            "free_bytes": available_memory({})[0],  # without Slurm's --mem, which says nothing about what is left
            "shm_bytes": (shm.f_blocks - shm.f_bfree) * shm.f_frsize,
            "run_dir_bytes": self._size() if self._place.node == 0 else None,
            "processes": {name: usage for name, usage in processes.items() if usage["threads"]},
        }

    def _size(self) -> int | None:
        """Return the size of the run directory; it is measured again after 200 times the seconds that this took."""
        began = time.monotonic()
        if began >= self._walk_at:
            self._run_dir_bytes = bytes_under(self._dir)
            self._walk_at = began + (time.monotonic() - began) / _SHARE
        return self._run_dir_bytes


def families(children: Sequence[Child]) -> dict[str, list[psutil.Process]]:
    """Return by name the process of each running child, followed by all processes below it."""
    names = {child.process.pid: child.name for child in children if child.process is not None}
    below: dict[str, list[psutil.Process]] = {name: [] for name in names.values()}
    for process in psutil.Process().children(recursive=True):  # a parent comes before its children
        with contextlib.suppress(psutil.NoSuchProcess):
            if name := names.get(process.pid) or names.get(process.ppid()):
                names[process.pid] = name
                below[name].append(process)
    return {name: processes for name, processes in below.items() if processes}


def _together(processes: Sequence[psutil.Process]) -> ProcessUsage:
    """Return the sums over processes; all 0 if none of them runs."""
    total: ProcessUsage = {
        "pid": processes[0].pid,
        "resident_bytes": 0,
        "proportional_bytes": 0,
        "open_files": 0,
        "threads": 0,
    }
    for process in processes:
        with contextlib.suppress(psutil.Error, OSError), process.oneshot():
            memory, open_files, threads = process.memory_full_info(), process.num_fds(), process.num_threads()
            total["resident_bytes"] += memory.rss
            total["proportional_bytes"] += memory.pss
            total["open_files"] += open_files
            total["threads"] += threads
    return total
