"""What every benchmark says first: the machine and the date."""

import os
import platform
import shutil
import subprocess
from datetime import UTC, datetime
from pathlib import Path


def describe() -> str:
    """One line: date, processor, cores, memory, load, and the commit that was measured."""
    cpu = next(
        (line.split(":")[1].strip() for line in Path("/proc/cpuinfo").read_text().splitlines() if "model name" in line),
        platform.processor(),
    )
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
    commit = ""
    if shutil.which("git"):  # a bare machine may have none
        told = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=False)
        commit = told.stdout.strip()
    load = os.getloadavg()[0]
    return (
        f"{datetime.now(UTC):%Y-%m-%d %H:%M} UTC, {cpu}, {os.cpu_count()} cores, {memory:.0f} GiB,"
        f" load {load:.1f}, commit {commit}"
    )
