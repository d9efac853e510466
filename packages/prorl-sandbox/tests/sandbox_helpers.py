"""Helpers for tests: other processes, and processes that start with this package on their path."""

import contextlib
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

PACKAGE = Path(__file__).resolve().parents[1]  # the folder that contains `prorl_sandbox`
ENVIRONMENT = {**os.environ, "PYTHONPATH": str(PACKAGE)}


@contextlib.contextmanager
def sharing_one_cpu(pids: Iterable[int], others: int = 5) -> Iterator[None]:
    """These processes share one CPU with `others` that spin."""
    all_cpus, pids = os.sched_getaffinity(0), list(pids)
    spin = [sys.executable, "-S", "-c", "while True: pass"]
    spinning = [subprocess.Popen(spin, start_new_session=True) for _ in range(others)]
    try:
        for pid in [*pids, *(other.pid for other in spinning)]:
            os.sched_setaffinity(pid, {min(all_cpus)})
        yield
    finally:
        for other in spinning:
            other.kill()
            other.wait()
        for pid in pids:
            with contextlib.suppress(ProcessLookupError):  # it was replaced
                os.sched_setaffinity(pid, all_cpus)


def children_of(pid: int) -> set[int]:
    """Processes whose parent is `pid`."""
    found = set()
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                fields = (entry / "stat").read_text().rpartition(")")[2].split()
            except OSError:
                continue
            if int(fields[1]) == pid:
                found.add(int(entry.name))
    return found


def is_alive(pid: int) -> bool:
    """Neither gone nor a zombie."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def in_child(work: Callable[[], Any]) -> Any:
    """Return what `work` returns, as JSON gives it back, in a fork of this process whose rights it may give up."""
    read, write = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            os.write(write, json.dumps(work()).encode())
        finally:
            os._exit(0)
    os.close(write)
    with os.fdopen(read, "rb") as file:
        text = file.read()
    os.waitpid(pid, 0)
    return json.loads(text)


def wait_until(ready: Callable[[], bool], seconds: float = 20.0) -> None:
    """Wait until `ready` returns true; fail after so many seconds."""
    end = time.monotonic() + seconds
    while not ready():
        assert time.monotonic() < end, "it did not happen in time"
        time.sleep(0.05)
