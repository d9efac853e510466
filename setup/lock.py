"""Writes the hashes of a lock file anew, or a lock file from a few pins.

    python3.11 setup/lock.py setup/train.lock setup/rollout.lock
    python3.12 setup/lock.py --resolve setup/rollout-cuda.in setup/rollout-cuda.lock

Takes the pins of each file as they stand (change, add or remove a `name==version` line first; it needs no hash),
asks pip which archive it would install for each, and writes the file again with the sha256 of those archives.
The comments at the head are kept.  `--resolve` lets pip add all that the pins of the first file depend on, for the
Python that runs this, and writes that with its hashes into the second.  Standard library only.
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
from typing import Any

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


def pip_report(pins: dict[str, str], *options: str) -> list[dict[str, Any]]:
    """What this Python's pip would install for the pins, as it reports it; nothing is installed."""
    with tempfile.TemporaryDirectory() as folder:
        wanted, report = Path(folder, "pins.txt"), Path(folder, "report.json")
        wanted.write_text("".join(f"{name}=={version}\n" for name, version in pins.items()))
        pip = [sys.executable, "-m", "pip", "install", "--dry-run", "--ignore-installed", *options, "--quiet"]
        subprocess.run([*pip, "--report", str(report), "-r", str(wanted)], check=True)
        installs: list[dict[str, Any]] = json.loads(report.read_text())["install"]
    return installs


def archive_hashes(pins: dict[str, str]) -> dict[str, str]:
    """{normal name: sha256 of the archive that this Python's pip would install}; no dependency is looked at."""
    hashes = {normal_name(i["metadata"]["name"]): sha256_of(i) for i in pip_report(pins, "--no-deps")}
    if missing := sorted(set(pins) - set(hashes)):
        raise ValueError(f"pip reported no archive for {', '.join(missing)}")
    return hashes


def sha256_of(install: dict[str, Any]) -> str:
    return str(install["download_info"]["archive_info"]["hashes"]["sha256"])


def resolve(source: Path, lock: Path) -> None:
    """Writes `lock`: the pins of `source` with all they depend on, and what the torch of its head depends on.

    torch itself is installed in a step of its own, without a hash, since its build differs from place to place.
    Raises ValueError where another Python runs than the head names.
    """
    head, pins = read_pins(source.read_text())
    wanted = {m[1]: m[2] for line in head if (m := re.match(r"#\s*(python|torch):\s*(\S+)", line))}
    here = "{}.{}".format(*sys.version_info)
    if wanted.get("python") != here or "torch" not in wanted:
        raise ValueError(f"{source}: its head must name 'python: {here}', which runs this, and torch; it has {wanted}")
    _log.info("%s: asking pip for %s and all that they need", source, ", ".join(pins))
    installs = pip_report({**pins, "torch": wanted["torch"]})
    lines = [
        f"{name}=={i['metadata']['version'].split('+')[0]} --hash=sha256:{sha256_of(i)}"
        for name, i in sorted((normal_name(i["metadata"]["name"]), i) for i in installs)
        if name != "torch"
    ]
    lock.write_text("\n".join([*head, f"# Written by `setup/lock.py --resolve` from {source.name}.", *lines]) + "\n")


def write_lock(path: Path) -> None:
    head, pins = read_pins(path.read_text())
    _log.info("%s: asking pip for %d archives", path, len(pins))
    hashes = archive_hashes(pins)
    lines = [f"{name}=={pins[name]} --hash=sha256:{hashes[name]}" for name in sorted(pins)]
    path.write_text("\n".join(head + lines) + "\n")


def main() -> None:
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    parser = argparse.ArgumentParser(description="Write the hashes of lock files anew, or a lock file from a few pins.")
    parser.add_argument("locks", nargs="*", type=Path)
    parser.add_argument("--resolve", nargs=2, type=Path, metavar=("PINS", "LOCK"))
    arguments = parser.parse_args()
    if arguments.resolve:
        resolve(*arguments.resolve)
    for path in arguments.locks:
        write_lock(path)


if __name__ == "__main__":
    main()
