"""Creates the two Python environments of this project, or brings them up to date.

    python3.11 setup/environments.py [--train-lock FILE] [--rollout-lock FILE] [--torch-index URL]
    python3 setup/environments.py --in-place     # in NeMo's container: into the Python that is there
    python3 setup/environments.py --check        # is it still what it was, and can it run this project?

`.venv/train` holds NeMo and the `prorl` command, `.venv/rollout` holds vLLM.  A stamp inside an environment names the
lock file, the Python and the projects it was made for, and is written last.  An environment without a fitting stamp is
made anew from pip's cache, so a set-up that was interrupted is never used half-made.  Standard library only; exit code
3 when this machine is not fit.  All that pip says goes to `.venv/NAME.log`.

NVIDIA's container brings torch, NeMo and Megatron, built for its GPUs.  There `--in-place` adds this project, its
plugins and those packages of `setup/container.txt` that are not there, and replaces nothing.
"""

from __future__ import annotations

import argparse
import fcntl
import hashlib
import json
import logging
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Collection, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from in_place import IMPORTS, faults, installed, missing_lines, names_of, replacements
from lock import read_pins

ROOT = Path(__file__).resolve().parent.parent
VENVS = ROOT / ".venv"
UNFIT = 3
STAMP = "prorl-setup.json"
NEEDED = ROOT / "setup" / "container.txt"
KEPT = "in-place.json"  # in .venv: {name: version} of all that was there before `--in-place` added anything
BASE = ("torch", "nemo-toolkit", "megatron-core", "transformer-engine")  # what only the container can bring
BUILDERS = ("setuptools", "wheel")
PIP = ["-m", "pip", "--disable-pip-version-check", "--no-input"]
_log = logging.getLogger("setup")

# What pip says when a step fails, and what the user can do about it.  The first that fits is told.
ADVICE = [
    (
        r"No space left on device",
        "The disk is full. Free some room (7 GB in all; TMPDIR and PIP_CACHE_DIR move pip's own folders), run again.",
    ),
    (
        r"DO NOT MATCH THE HASHES",
        "The package index serves another file than the one the lock file names. Ask whoever runs the index, or make"
        " the hashes anew with setup/lock.py after checking the file.",
    ),
    (
        r"command '?\S*(gcc|cc|clang)\S*'? failed|Python\.h: No such file",
        "A package without a wheel (pycosat) could not be compiled. Install a C compiler and Python's headers (on"
        " Debian and Ubuntu: gcc python3.11-dev) and run again.",
    ),
    (
        r"NewConnectionError|name resolution|Max retries|timed out|ProxyError|SSLError|unreachable"
        r"|No matching distribution found|Connection broken|Connection refused",
        "The package index could not be reached, or lacks a file. Check the network. Behind a proxy set HTTPS_PROXY;"
        " for another index set PIP_INDEX_URL; for a company's certificate set PIP_CERT; for files on disk set"
        " PIP_FIND_LINKS. Then run again: what was fetched is kept.",
    ),
]


class Unfit(Exception):
    """This machine cannot hold the environments; the message says what is missing and how to get it."""


@dataclass(frozen=True)
class Environment:
    """One virtual environment: its lock file, the projects installed editable into it, and how big it gets."""

    name: str
    lock: Path
    projects: tuple[Path, ...]
    gigabytes: float
    minutes: float  # on two cores, from a package index nearby

    @property
    def folder(self) -> Path:
        return VENVS / self.name

    @property
    def python(self) -> Path:
        return self.folder / "bin" / "python"

    def stamp(self, torch_index: str) -> dict[str, str]:
        """Return what the environment is made from; nothing is to be done if the stamp inside is equal."""
        projects = "".join(p.name + (p / "pyproject.toml").read_text() for p in self.projects)
        return {
            "folder": str(self.folder),
            "python": "{}.{}".format(*sys.version_info),
            "lock": hashlib.sha256(self.lock.read_bytes()).hexdigest(),
            "torch_index": torch_index,
            "projects": hashlib.sha256(projects.encode()).hexdigest(),
        }

    def stamped(self) -> dict[str, str]:
        try:
            stamp: dict[str, str] = json.loads((self.folder / STAMP).read_text())
            return stamp if self.python.exists() else {}
        except (OSError, ValueError):
            return {}


def directive(lock: Path, key: str) -> str:
    """Return the value of a `# key: value` line at the head of a lock file."""
    for line in read_pins(lock.read_text())[0]:
        if match := re.match(rf"#\s*{key}:\s*(\S+)", line):
            return match[1]
    raise Unfit(f"{lock}: the head lacks a line '# {key}: ...'")


def pythons_found() -> list[str]:
    """Return the names of the Python commands on PATH."""
    folders = os.environ.get("PATH", "").split(os.pathsep)
    names = {path.name for folder in folders if folder for path in Path(folder).glob("python3*")}
    return sorted(name for name in names if re.fullmatch(r"python3(\.\d+)?", name))


def check_python(lock: Path) -> None:
    needed, here = directive(lock, "python"), "{}.{}".format(*sys.version_info)
    if needed != here:
        raise Unfit(
            f"{lock.name} is made for Python {needed}; this is Python {here} ({sys.executable}).\n"
            f"Found: {', '.join(pythons_found()) or 'no other Python'}.\n"
            f"Name the right one: make PYTHON=/path/to/python{needed} ..."
        )
    if subprocess.run([sys.executable, "-c", "import venv, ensurepip"], capture_output=True, check=False).returncode:
        raise Unfit(f"{sys.executable} lacks venv or ensurepip. On Debian and Ubuntu: apt install python{needed}-venv")


def check_room(environments: list[Environment]) -> None:
    """Looks for the room that the environments, pip's cache and its temporary files take, disk by disk."""
    cache = Path(os.environ.get("PIP_CACHE_DIR") or Path.home() / ".cache" / "pip")
    wanted = [(e.folder, e.gigabytes) for e in environments] + [(cache, 1.0), (Path(tempfile.gettempdir()), 0.5)]
    disks: dict[int, tuple[Path, float]] = {}
    for path, gigabytes in wanted:
        while not path.exists():
            path = path.parent
        first, sum_ = disks.get(path.stat().st_dev, (path, 0.0))
        disks[path.stat().st_dev] = (first, sum_ + gigabytes)
    for path, gigabytes in disks.values():
        free = shutil.disk_usage(path).free / 1e9
        if free < gigabytes:
            raise Unfit(
                f"The set-up needs about {gigabytes:.1f} GB on the disk of {path}, which has {free:.1f} GB free.\n"
                "Free some room, or move pip's own folders to another disk with TMPDIR and PIP_CACHE_DIR."
            )


def run_pip(env: Environment, arguments: list[str], doing: str, count: int = 0) -> None:
    """Runs pip inside the environment, tells its progress, and turns a failure into advice.

    pip compiles what it writes.  That takes a third of its time, but without it every start of NeMo takes twice as
    long where PYTHONDONTWRITEBYTECODE is set (37 s of CPU for 18 s).
    """
    _log.info("%s: %s", env.name, doing)
    start, seen = time.monotonic(), 0
    said: list[str] = []
    command = [str(env.python), *PIP, "install", "--progress-bar", "off", *arguments]
    with (VENVS / f"{env.name}.log").open("a") as log:
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, cwd=ROOT)
        assert process.stdout is not None
        for line in process.stdout:
            log.write(line)
            said.append(line)
            seconds = time.monotonic() - start
            if line.startswith("Installing collected"):
                _log.info("%s:   all fetched after %.0f s, writing them", env.name, seconds)
            elif line.startswith(("Collecting ", "Processing ", "Requirement already")):
                seen += 1
                if count and seen % 50 == 0:
                    _log.info("%s:   %d of %d packages fetched, %.0f s", env.name, seen, count, seconds)
    if process.wait():
        raise Unfit(failure(env, doing, "".join(said)))


def failure(env: Environment, doing: str, said: str) -> str:
    """Return the message for a failure of pip: the step, pip's own error lines, and a cure."""
    errors = [line for line in said.splitlines() if re.match(r"\s*(ERROR|error|OSError)", line)][:4]
    shown = "\n".join(f"  pip: {line.strip()}" for line in errors or said.splitlines()[-4:])
    advice = next((text for pattern, text in ADVICE if re.search(pattern, said)), "Run again, or read the log.")
    return f"{env.name}: this step failed: {doing}\n{shown}\n{advice}\nThe whole log: {VENVS / f'{env.name}.log'}"


def locked_lines(lock: Path) -> dict[str, str]:
    """Return {name: line} of a lock file."""
    return {line.split("==")[0]: line for line in lock.read_text().splitlines() if "--hash=" in line}


def install_lines(env: Environment, lines: Collection[str], doing: str, *options: str) -> None:
    """Installs what lines of a lock file name, as they stand."""
    with tempfile.TemporaryDirectory() as folder:
        wanted = Path(folder, "wanted.txt")
        wanted.write_text("\n".join(lines) + "\n")
        exact = ["--no-deps", "--require-hashes", "--no-build-isolation", *options]
        run_pip(env, [*exact, "-r", str(wanted)], doing, len(lines))


def install_locked(env: Environment, torch_index: str) -> None:
    """Installs everything the lock file names, as it stands; torch last, with the rest as constraints."""
    lines = locked_lines(env.lock)
    install_lines(env, [lines[name] for name in BUILDERS if name in lines], "what builds packages")
    install_lines(env, lines.values(), f"{len(lines)} packages from {env.lock.name} (usually {env.minutes:g} min)")
    torch = f"torch=={directive(env.lock, 'torch')}"
    index = ["--index-url", torch_index] if torch_index else []
    with tempfile.NamedTemporaryFile("w") as constraints:
        constraints.writelines(f"{name}=={version}\n" for name, version in read_pins(env.lock.read_text())[1].items())
        constraints.flush()
        doing = f"{torch} (usually 0.3 min; a CUDA build takes longer)"
        run_pip(env, [*index, "-c", constraints.name, torch], doing)


def install_projects(env: Environment) -> None:
    """Installs this project and its plugins, editable, without anything they depend on."""
    if env.projects:
        editable = [part for project in env.projects for part in ("--editable", str(project))]
        run_pip(env, ["--no-deps", "--no-build-isolation", *editable], "this project and its plugins")
    if env.name == "rollout":  # the command needs packages of the train environment
        (env.folder / "bin" / "prorl").unlink(missing_ok=True)


def make(env: Environment, torch_index: str) -> None:
    """Brings one environment to what its lock file says and stamps it."""
    stamp, old = env.stamp(torch_index), env.stamped()
    if stamp == old:
        return
    start = time.monotonic()
    _log.info("%s: setting up %s", env.name, env.folder)
    (env.folder / STAMP).unlink(missing_ok=True)
    if {**stamp, "projects": ""} != {**old, "projects": ""}:
        if env.folder.exists():
            shutil.rmtree(env.folder)
        _log.info("%s: a new environment for Python %s", env.name, stamp["python"])
        subprocess.run([sys.executable, "-m", "venv", str(env.folder)], check=True)
        install_locked(env, torch_index)
    install_projects(env)
    partial = env.folder / (STAMP + ".partial")
    partial.write_text(json.dumps(stamp, indent=1) + "\n")
    partial.replace(env.folder / STAMP)
    _log.info("%s: ready after %.0f s", env.name, time.monotonic() - start)


class InPlace(Environment):
    """The Python that runs this, with all that its container brought."""

    @property
    def python(self) -> Path:
        return Path(sys.executable)


def install_in_place(env: Environment, dry_run: bool) -> None:
    """Adds the packages of setup/container.txt that this Python lacks, and replaces those that are too old.

    Its own constraints on pip are put aside: they also hold back packages that are not there, and nothing that is
    there is touched anyway.
    """
    there, lines = installed(), locked_lines(env.lock)
    if lacking := [name for name in BASE if name not in there]:
        raise Unfit(
            f"{sys.executable} has no {', '.join(lacking)}: --in-place is for NVIDIA's NeMo container."
            " Elsewhere leave it out, and both environments are made."
        )
    missing = missing_lines(env.lock, NEEDED, there)
    added = [line.split()[0] for line in missing]
    _log.info(
        "in place: %s has %d packages, all kept; added: %s", sys.executable, len(there), " ".join(added) or "none"
    )
    if dry_run:
        return
    builders = [lines[name] for name in BUILDERS if not lines[name].startswith(f"{name}=={there.get(name)} ")]
    VENVS.mkdir(exist_ok=True)
    if not (VENVS / KEPT).exists():  # a second run must not take for the container's what the first one added
        write_kept(there)
    os.environ.pop("PIP_CONSTRAINT", None)
    with tempfile.TemporaryDirectory() as folder:
        if builders:  # beside the container's own, which stay
            install_lines(env, builders, "what builds packages", "--target", folder)
            os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, (folder, os.environ.get("PYTHONPATH"))))
        if missing:
            install_lines(env, missing, f"{len(missing)} packages")
        install_projects(env)
        replaced, _ = replacements(names_of(env.projects), env.lock, NEEDED)
        if replaced:
            _log.info("in place: replaced, as too old: %s", "; ".join(map(str, replaced.values())))
            install_lines(env, [lines[name] for name in replaced], "what was too old")
            pins, kept = read_pins(env.lock.read_text())[1], json.loads((VENVS / KEPT).read_text())
            write_kept({name: pins[name] if name in replaced else version for name, version in kept.items()})


def write_kept(versions: Mapping[str, str]) -> None:
    (VENVS / KEPT).write_text(json.dumps(versions, indent=1, sort_keys=True) + "\n")


def faults_in_place(env: Environment, imports: list[str]) -> list[str]:
    """Return what keeps this Python from running this project, and what was changed in it; empty when all is well."""
    pins = read_pins(env.lock.read_text())[1]
    kept = VENVS / KEPT
    if not kept.exists() and Path(sys.prefix) != env.folder:
        raise Unfit(f"{kept} is not there, so what the container brought is not known. Run --in-place first.")
    before = json.loads(kept.read_text()) if kept.exists() else {}
    series = {n: ".".join(pins[n].split(".")[:2]) for n in ("nemo-toolkit", "megatron-core", "nemo-aligner")}
    refused = replacements(names_of(env.projects), env.lock, NEEDED)[1]
    _log.info("checking %s: its packages, then importing %s (half a minute)", env.python, ", ".join(imports))
    return [*faults(before, series, env.projects, imports), *refused]


def check(arguments: argparse.Namespace, wanted: list[Environment]) -> None:
    """Raises Unfit with all that is wrong with this Python and with the rollout environment."""
    wrong = []
    for env in wanted:
        if env.name == "train":
            wrong += faults_in_place(env, [name for name in arguments.imports.split(",") if name])
        elif env.stamped().get("lock") != env.stamp("")["lock"]:
            wrong.append(f"{env.folder} is not there, or not made from {env.lock.name}; run --only {env.name} first")
    if wrong:
        raise Unfit("this is not fit to run the project:\n" + "\n".join(f"  {line}" for line in wrong))
    there = installed()
    _log.info("checked: %s", ", ".join(f"{n} {there[n]}" for n in (*BASE, "nemo-aligner", "nemo-prorl") if n in there))


def environments(arguments: argparse.Namespace) -> list[Environment]:
    plugins = sorted(p.parent for p in (ROOT / "reward_plugins").glob("*/pyproject.toml"))
    kind = InPlace if getattr(arguments, "in_place", False) or getattr(arguments, "check", False) else Environment
    train = kind("train", arguments.train_lock, (ROOT, *plugins), gigabytes=3.3, minutes=2)
    size = 7.0 if "cuda" in arguments.rollout_lock.name else 2.7
    rollout = Environment("rollout", arguments.rollout_lock, (ROOT,), gigabytes=size, minutes=1.5)
    if getattr(arguments, "only", None) == "trl":  # for benchmarks/versus_trl.py; nothing else makes or needs it
        return [Environment("trl", ROOT / "setup" / "trl.lock", (), gigabytes=1.8, minutes=1)]
    return [train, rollout]


def main() -> int:
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    parser = argparse.ArgumentParser(description="Create or update .venv/train and .venv/rollout.")
    parser.add_argument("--train-lock", type=Path, default=ROOT / "setup" / "train.lock")
    parser.add_argument("--rollout-lock", type=Path, default=ROOT / "setup" / "rollout.lock")
    parser.add_argument("--only", choices=["train", "rollout", "trl"], help="one environment; trl: for a benchmark")
    parser.add_argument("--torch-index", default="", help="package index that has the torch build to install")
    parser.add_argument("--in-place", action="store_true", help="add train to the Python that runs this, a container's")
    parser.add_argument("--check", action="store_true", help="only look whether that Python and rollout are fit")
    parser.add_argument("--imports", default=IMPORTS, metavar="A,B", help="modules that --check imports")
    parser.add_argument("--dry-run", action="store_true", help="say what would be done, and whether it can be")
    arguments = parser.parse_args()
    if arguments.in_place and arguments.only not in (None, "train"):
        parser.error(f"--in-place is for train; {arguments.only} has an environment of its own")
    try:
        wanted = [e for e in environments(arguments) if arguments.only in (None, e.name)]
        for env in wanted:
            if not env.lock.exists():
                raise Unfit(f"{env.lock} is not there. What writes it: docs/howto/container.md.")
        if arguments.check:
            check(arguments, wanted)
            return 0
        if arguments.in_place:
            install_in_place(wanted.pop(0), arguments.dry_run)
        todo = [e for e in wanted if e.stamp(arguments.torch_index) != e.stamped()]
        if not todo:
            return 0
        if arguments.dry_run:
            for env in todo:
                check_python(env.lock)
                _log.info("%s: %d packages of %s", env.folder, len(read_pins(env.lock.read_text())[1]), env.lock)
            return 0
        VENVS.mkdir(exist_ok=True)
        with (VENVS / ".lock").open("w") as held:
            try:
                fcntl.flock(held, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                _log.info("another set-up runs in %s: waiting for it", VENVS)
                fcntl.flock(held, fcntl.LOCK_EX)
            for env in todo:
                check_python(env.lock)
            check_room([env for env in todo if not env.python.exists()])
            with ThreadPoolExecutor(len(todo)) as pool:  # pip uses one core
                for made in [pool.submit(make, env, arguments.torch_index) for env in todo]:
                    made.result()
    except (Unfit, OSError, subprocess.CalledProcessError) as error:
        _log.error("\nset-up failed: %s", error)
        return UNFIT
    except KeyboardInterrupt:
        _log.error("\nset-up stopped; the same command begins again with what was fetched")
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main())
