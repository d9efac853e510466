"""Updates the hashes of a lock file, or creates a lock file from a few pins.

    python3.11 setup/lock.py --also python3.12 setup/train.lock
    python3.11 setup/lock.py setup/rollout.lock
    python3.12 setup/lock.py --resolve setup/rollout-cuda.in setup/rollout-cuda.lock

To change a version, edit its line `name==version` first; a new line needs no hash.  The command asks pip which archive
it would install for each pin, and writes the file again with the sha256 of each archive.  The first comment of the file
is kept.  `--also` asks the pip of another Python too, and writes both hashes if the archives differ.  `--resolve` lets
pip find all dependencies of the pins in the first file, for the running Python, and writes pins and dependencies with
their hashes to the second file.  The comment at the end of each line names the archive of each hash: a wheel's tag
(cp312, abi3, py3) or sdist.  This file uses the standard library only.
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
    """Return a distribution's name in the normal form of PEP 503."""
    return re.sub(r"[-_.]+", "-", name).lower()


def read_pins(text: str) -> tuple[list[str], dict[str, str]]:
    """Return the lines of the first comment of a lock file's `text`, and its pins as {normal name: version}.

    Raises:
        ValueError: a line is neither a comment, a pin nor a hash.
    """
    head: list[str] = []
    pins: dict[str, str] = {}
    for line in text.splitlines():
        stripped = line.strip()
        if stripped.startswith("#") and not pins:
            head.append(line)
        elif match := _PIN.match(stripped):
            pins[normal_name(match[1])] = match[2]
        elif stripped and not stripped.startswith("--hash="):
            raise ValueError(f"expected a pin (name==version) or a hash; got {line!r}")
    return head, pins


def pip_report(pins: dict[str, str], *options: str, python: str = sys.executable) -> list[dict[str, Any]]:
    """Return what the pip of `python` would install for the pins: the list `install` of pip's report."""
    with tempfile.TemporaryDirectory() as folder:
        requirements, report = Path(folder, "pins.txt"), Path(folder, "report.json")
        requirements.write_text("".join(f"{name}=={version}\n" for name, version in pins.items()))
        pip = [python, "-m", "pip", "install", "--dry-run", "--ignore-installed", *options, "--quiet"]
        subprocess.run([*pip, "--report", str(report), "-r", str(requirements)], check=True)
        installs: list[dict[str, Any]] = json.loads(report.read_text())["install"]
    return installs


def archives_of(installs: list[dict[str, Any]]) -> dict[str, tuple[str, str, str]]:
    """Return {normal name: (version, sha256, kind)} of the archives in pip's report; `kind_of` lists the kinds."""
    found = {}
    for install in installs:
        info, version = install["download_info"], install["metadata"]["version"].split("+")[0]
        sha256 = str(info["archive_info"]["hashes"]["sha256"])
        found[normal_name(install["metadata"]["name"])] = (version, sha256, kind_of(info["url"]))
    return found


def kind_of(url: str) -> str:
    """Return the kind of the archive at `url`, which tells for which Pythons the archive is.

    Returns:
        "cp312" (or another version): wheel for Python 3.12 only; "py37": wheel for Python 3.7 and newer; "abi3": wheel
        for the Python in the archive's name and newer; "py3": wheel for each Python 3; "sdist": sources, not a wheel.
    """
    name = url.split("#")[0].rsplit("/", 1)[-1]
    if not name.endswith(".whl"):
        return "sdist"
    python, abi = name.removesuffix(".whl").split("-")[-3:-1]
    return "py3" if "py3" in python.split(".") else "abi3" if "abi3" in abi else python


def pinned(name: str, version: str, archives: Sequence[tuple[str, str]]) -> str:
    """Return the line of a lock file for a package; `archives` are (sha256, kind), and duplicates are left out."""
    unique = dict.fromkeys(archives)
    hashes = " ".join(f"--hash=sha256:{sha256}" for sha256, _ in unique)
    return f"{name}=={version} {hashes}  # {' '.join(kind for _, kind in unique)}"


def resolve(source: Path, lock: Path) -> None:
    """Write the file `lock` with the pins of the file `source` and all dependencies of the pins and of torch.

    The first comment of `source` names the version of torch.  torch itself is left out, because its build differs
    between machines; it is installed separately, without a hash.

    Raises:
        ValueError: the first comment does not name a version of torch and the version of the running Python.
    """
    head, pins = read_pins(source.read_text())
    versions = {m[1]: m[2] for line in head if (m := re.match(r"#\s*(python|torch):\s*(\S+)", line))}
    here = "{}.{}".format(*sys.version_info)
    if versions.get("python") != here or "torch" not in versions:
        raise ValueError(
            f"{source}: expected the lines '# python: {here}' (the running Python) and '# torch: ...' in its first"
            f" comment; got {versions}"
        )
    _log.info("%s: asking pip for %s and their dependencies", source, ", ".join(pins))
    found = archives_of(pip_report({**pins, "torch": versions["torch"]}))
    lines = [pinned(name, found[name][0], [found[name][1:]]) for name in sorted(found) if name != "torch"]
    lock.write_text("\n".join([*head, f"# Written by `setup/lock.py --resolve` from {source.name}.", *lines]) + "\n")


def write_lock(path: Path, also: Sequence[str]) -> None:
    """Update the hashes in the lock file `path`, for this Python and the Python commands in `also`."""
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
    parser = argparse.ArgumentParser(
        description="Update the hashes of lock files, or create a lock file from a few pins."
    )
    parser.add_argument("locks", nargs="*", type=Path, help="lock files to update")
    parser.add_argument(
        "--also",
        action="append",
        default=[],
        metavar="PYTHON",
        help="command of another Python, such as python3.12, whose archives' hashes are written too; repeatable",
    )
    parser.add_argument(
        "--resolve",
        nargs=2,
        type=Path,
        metavar=("PINS", "LOCK"),
        help="create the lock file LOCK from the pins in the file PINS",
    )
    arguments = parser.parse_args()
    if arguments.resolve:
        resolve(*arguments.resolve)
    for path in arguments.locks:
        write_lock(path, arguments.also)


if __name__ == "__main__":
    main()
