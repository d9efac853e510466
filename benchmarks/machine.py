"""What benchmarks share: the first line of their output, which names machine and date, and how they take times."""

import os
import platform
import shutil
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import Any


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


def seconds(work: Callable[[], Any]) -> float:
    """Return how long `work` takes."""
    began = time.monotonic()
    work()
    return time.monotonic() - began


_CHANGED = ("status", "--porcelain", "--untracked-files=no")


def _git(*words: str) -> str:
    folder = Path(__file__).parent
    return subprocess.run(["git", *words], cwd=folder, capture_output=True, text=True, check=False).stdout.strip()


def describe() -> str:
    """Return one line with date, processor, cores, memory, load and the measured commit."""
    cpu = next(
        (line.split(":")[1].strip() for line in Path("/proc/cpuinfo").read_text().splitlines() if "model name" in line),
        platform.processor(),
    )
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
    commit = ""
    if shutil.which("git"):  # a bare machine may lack git
        head, changed = (_git(*words) for words in (("rev-parse", "--short", "HEAD"), _CHANGED))
        commit = head + (" with changes" if changed else "")
    load = os.getloadavg()[0]
    return (
        f"{datetime.now(UTC):%Y-%m-%d %H:%M} UTC, {cpu}, {os.cpu_count()} cores, {memory:.0f} GiB,"
        f" load {load:.1f}, commit {commit}"
    )
