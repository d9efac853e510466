"""Writes the hashes of a lock file anew.

    python3.11 setup/lock.py setup/train.lock setup/rollout.lock

Takes the pins of each file as they stand (change, add or remove a `name==version` line first; it needs no hash),
asks pip which archive it would install for each, and writes the file again with the sha256 of those archives.
The comments at the head are kept.  Standard library only.
"""

from __future__ import annotations

import argparse
import json
import logging
import re
import subprocess
import sys
import tempfile
from pathlib import Path

_log = logging.getLogger("lock")
_PIN = re.compile(r"^([A-Za-z0-9][A-Za-z0-9._-]*)==([^\s\\;]+)")


def normal_name(name: str) -> str:
    """The name of a distribution as PEP 503 compares it."""
    return re.sub(r"[-_.]+", "-", name).lower()


def read_pins(text: str) -> tuple[list[str], dict[str, str]]:
    """Comment lines at the head, and {normal name: version}; raises ValueError for a line that is neither."""
    head: list[str] = []
    pins: dict[str, str] = {}
    for line in text.splitlines():
        stripped = line.strip()
        if stripped.startswith("#") and not pins:
            head.append(line)
        elif match := _PIN.match(stripped):
            pins[normal_name(match[1])] = match[2]
        elif stripped and not stripped.startswith("--hash="):
            raise ValueError(f"neither a pin (name==version) nor a hash: {line!r}")
    return head, pins


def archive_hashes(pins: dict[str, str]) -> dict[str, str]:
    """{normal name: sha256 of the archive that this Python's pip would install}; no dependency is looked at."""
    with tempfile.TemporaryDirectory() as folder:
        wanted, report = Path(folder, "pins.txt"), Path(folder, "report.json")
        wanted.write_text("".join(f"{name}=={version}\n" for name, version in pins.items()))
        pip = [sys.executable, "-m", "pip", "install", "--dry-run", "--ignore-installed", "--no-deps", "--quiet"]
        subprocess.run([*pip, "--report", str(report), "-r", str(wanted)], check=True)
        installs = json.loads(report.read_text())["install"]
    hashes = {
        normal_name(i["metadata"]["name"]): i["download_info"]["archive_info"]["hashes"]["sha256"] for i in installs
    }
    if missing := sorted(set(pins) - set(hashes)):
        raise ValueError(f"pip reported no archive for {', '.join(missing)}")
    return hashes


def write_lock(path: Path) -> None:
    head, pins = read_pins(path.read_text())
    _log.info("%s: asking pip for %d archives", path, len(pins))
    hashes = archive_hashes(pins)
    lines = [f"{name}=={pins[name]} --hash=sha256:{hashes[name]}" for name in sorted(pins)]
    path.write_text("\n".join(head + lines) + "\n")


def main() -> None:
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    parser = argparse.ArgumentParser(description="Write the hashes of lock files anew.")
    parser.add_argument("locks", nargs="+", type=Path)
    for path in parser.parse_args().locks:
        write_lock(path)


if __name__ == "__main__":
    main()
