"""Writes the hashes of a lock file anew, or a lock file from a few pins.

    python3.11 setup/lock.py --also python3.12 setup/train.lock
    python3.11 setup/lock.py setup/rollout.lock
    python3.12 setup/lock.py --resolve setup/rollout-cuda.in setup/rollout-cuda.lock

Takes the pins of each file as they stand (change, add or remove a `name==version` line first; it needs no hash),
asks pip which archive it would install for each, and writes the file again with the sha256 of those archives.
The comments at the head are kept.  `--also` asks the pip of another Python too, and writes both hashes where the
archives differ.  `--resolve` lets pip add all that the pins of the first file depend on, for the Python that runs this,
and writes that with its hashes into the second.  The comment that ends each line tells the archive of each hash: a
wheel's tag (cp312, abi3, py3) or sdist.  Standard library only.
"""

from __future__ import annotations

import argparse
import json
import logging
import re
import subprocess
import sys
import tempfile
from collections.abc import Sequence
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


def pip_report(pins: dict[str, str], *options: str, python: str = sys.executable) -> list[dict[str, Any]]:
    """Return what `python`'s pip would install for the pins, as pip reports it; nothing is installed."""
    with tempfile.TemporaryDirectory() as folder:
        wanted, report = Path(folder, "pins.txt"), Path(folder, "report.json")
        wanted.write_text("".join(f"{name}=={version}\n" for name, version in pins.items()))
        pip = [python, "-m", "pip", "install", "--dry-run", "--ignore-installed", *options, "--quiet"]
        subprocess.run([*pip, "--report", str(report), "-r", str(wanted)], check=True)
        installs: list[dict[str, Any]] = json.loads(report.read_text())["install"]
    return installs


def archives_of(installs: list[dict[str, Any]]) -> dict[str, tuple[str, str, str]]:
    """Return {normal name: (version, sha256, kind)} of what pip reported; for kinds see `kind_of`."""
    found = {}
    for install in installs:
        info, version = install["download_info"], install["metadata"]["version"].split("+")[0]
        sha256 = str(info["archive_info"]["hashes"]["sha256"])
        found[normal_name(install["metadata"]["name"])] = (version, sha256, kind_of(info["url"]))
    return found


def kind_of(url: str) -> str:
    """Return what an archive fits: cp312 (only that), abi3 and py37 (that and newer), py3 (any), sdist."""
    name = url.split("#")[0].rsplit("/", 1)[-1]
    if not name.endswith(".whl"):
        return "sdist"
    python, abi = name.removesuffix(".whl").split("-")[-3:-1]
    return "py3" if "py3" in python.split(".") else "abi3" if "abi3" in abi else python


def pinned(name: str, version: str, archives: Sequence[tuple[str, str]]) -> str:
    """Return the line of a lock file; `archives` are (sha256, kind), each written once."""
    once = dict.fromkeys(archives)
    hashes = " ".join(f"--hash=sha256:{sha256}" for sha256, _ in once)
    return f"{name}=={version} {hashes}  # {' '.join(kind for _, kind in once)}"


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
    found = archives_of(pip_report({**pins, "torch": wanted["torch"]}))
    lines = [pinned(name, found[name][0], [found[name][1:]]) for name in sorted(found) if name != "torch"]
    lock.write_text("\n".join([*head, f"# Written by `setup/lock.py --resolve` from {source.name}.", *lines]) + "\n")


def write_lock(path: Path, also: Sequence[str]) -> None:
    """Write the hashes of `path` anew, as this Python's pip and those of `also` report them."""
    head, pins = read_pins(path.read_text())
    archives: dict[str, list[tuple[str, str]]] = {name: [] for name in pins}
    for python in (sys.executable, *also):
        _log.info("%s: asking the pip of %s for %d archives", path, python, len(pins))
        found = archives_of(pip_report(pins, "--no-deps", python=python))
        if missing := sorted(set(pins) - set(found)):
            raise ValueError(f"{path}: the pip of {python} reported no archive for {', '.join(missing)}")
        for name in pins:
            archives[name].append(found[name][1:])
    lines = [pinned(name, pins[name], archives[name]) for name in sorted(pins)]
    path.write_text("\n".join(head + lines) + "\n")


def main() -> None:
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    parser = argparse.ArgumentParser(description="Write the hashes of lock files anew, or a lock file from a few pins.")
    parser.add_argument("locks", nargs="*", type=Path)
    parser.add_argument("--also", action="append", default=[], metavar="PYTHON", help="hashes for this Python, too")
    parser.add_argument("--resolve", nargs=2, type=Path, metavar=("PINS", "LOCK"))
    arguments = parser.parse_args()
    if arguments.resolve:
        resolve(*arguments.resolve)
    for path in arguments.locks:
        write_lock(path, arguments.also)


if __name__ == "__main__":
    main()
