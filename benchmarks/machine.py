"""The first line of every benchmark's output: the machine and the date."""

import os
import platform
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path


@contextmanager
def libraries_on_stderr() -> Iterator[None]:
    """Redirect prints of NeMo and other libraries to standard error, so that standard output has results only."""
    kept = os.dup(1)
    os.dup2(2, 1)
    try:
        yield
    finally:
        os.dup2(kept, 1)
        os.close(kept)


def describe() -> str:
    """Return one line with date, processor, cores, memory, load and the measured commit."""
    cpu = next(
        (line.split(":")[1].strip() for line in Path("/proc/cpuinfo").read_text().splitlines() if "model name" in line),
        platform.processor(),
    )
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
    commit = ""
    if shutil.which("git"):  # a bare machine may lack git
        head = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=False)
        changed = subprocess.run(
            ["git", "status", "--porcelain", "--untracked-files=no"], capture_output=True, text=True, check=False
        )
        commit = head.stdout.strip() + (" with changes" if changed.stdout.strip() else "")
    load = os.getloadavg()[0]
    return (
        f"{datetime.now(UTC):%Y-%m-%d %H:%M} UTC, {cpu}, {os.cpu_count()} cores, {memory:.0f} GiB,"
        f" load {load:.1f}, commit {commit}"
    )
