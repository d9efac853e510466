"""Creates or updates the two Python environments of this project.

    python3.11 setup/environments.py [--train-lock FILE] [--rollout-lock FILE] [--torch-index URL]
    python3 setup/environments.py --in-place     # in NeMo's container: install into the running Python
    python3 setup/environments.py --check        # check that the container's packages are unchanged and can run prorl

`.venv/train` contains NeMo and the `prorl` command, `.venv/rollout` contains vLLM.  The last step of a set-up writes a
stamp file into the environment, with the Python version and hashes of the lock file and projects.  An environment whose
stamp is missing or does not match is deleted and created again from pip's cache, so an interrupted set-up never leaves
a broken environment in use.  The output of pip goes to `.venv/NAME.log`.  Exit code 3: the set-up or the check failed,
and the message gives the reason.  This file uses the standard library only.

NVIDIA's container has torch, NeMo and Megatron, built for its GPUs.  There `--in-place` adds this project, its plugins
and the missing packages of `setup/container.txt`.  It replaces an installed package only if `setup/container.txt` names
the package and the installed version is too old.
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
KEPT = "in-place.json"  # in .venv: {name: version} of the packages installed before the first `--in-place`
BASE = ("torch", "nemo-toolkit", "megatron-core", "transformer-engine")  # packages that the container must have
BUILDERS = ("setuptools", "wheel")
PIP = ["-m", "pip", "--disable-pip-version-check", "--no-input"]
_log = logging.getLogger("setup")

# Patterns in pip's output after a failure, with advice for the user; the first match is shown.
ADVICE = [
    (
        r"No space left on device",
        "The disk is full. Fix: free disk space (7 GB are needed in total), or set TMPDIR and PIP_CACHE_DIR to move"
        " pip's folders to another disk; then run the same command again.",
    ),
    (
        r"DO NOT MATCH THE HASHES",
        "The package index serves another file than the lock file names. Fix: ask the operators of the index; or check"
        " the file and update the hashes with setup/lock.py.",
    ),
    (
        r"command '?\S*(gcc|cc|clang)\S*'? failed|Python\.h: No such file",
        "A package without a wheel (pycosat) could not be compiled. Fix: install a C compiler and Python's headers (on"
        " Debian and Ubuntu: gcc python3.11-dev), then run the same command again.",
    ),
    (
        r"NewConnectionError|name resolution|Max retries|timed out|ProxyError|SSLError|unreachable"
        r"|No matching distribution found|Connection broken|Connection refused",
        "The package index could not be reached, or does not have a file. Fix: check the network. For a proxy set"
        " HTTPS_PROXY, for another index PIP_INDEX_URL, for a company's certificate PIP_CERT, for files on disk"
        " PIP_FIND_LINKS. Then run the same command again; pip's cache has the downloaded files.",
    ),
]


class Unfit(Exception):
    """The environments cannot be created or used on this machine.  The message gives the reason and a fix."""


@dataclass(frozen=True)
class Environment:
    """A virtual environment with the packages of a lock file and with projects that are installed as editable."""

    name: str
    lock: Path
    projects: tuple[Path, ...]
    gigabytes: float  # size on disk
    minutes: float  # duration of the installation on two cores, from a nearby package index

    @property
    def folder(self) -> Path:
        return VENVS / self.name

    @property
    def python(self) -> Path:
        return self.folder / "bin" / "python"

    def stamp(self, torch_index: str) -> dict[str, str]:
        """Return the stamp that this environment has if it is up to date.

        A stamp has the folder, the Python version, `torch_index`, and hashes of the lock file and of the projects.
        """
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
    raise Unfit(f"{lock}: expected a line '# {key}: ...' in its first comment")


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
            f"On PATH: {', '.join(pythons_found()) or 'no other Python'}.\n"
            f"Fix: make PYTHON=/path/to/python{needed} ..."
        )
    if subprocess.run([sys.executable, "-c", "import venv, ensurepip"], capture_output=True, check=False).returncode:
        raise Unfit(
            f"{sys.executable} does not have venv or ensurepip. Fix (Debian, Ubuntu): apt install python{needed}-venv"
        )


def check_room(environments: list[Environment]) -> None:
    """Raise Unfit if a disk is too full for the environments, pip's cache and pip's temporary files on it."""
    cache = Path(os.environ.get("PIP_CACHE_DIR") or Path.home() / ".cache" / "pip")
    needs = [(e.folder, e.gigabytes) for e in environments] + [(cache, 1.0), (Path(tempfile.gettempdir()), 0.5)]
    disks: dict[int, tuple[Path, float]] = {}
    for path, gigabytes in needs:
        while not path.exists():
            path = path.parent
        first, sum_ = disks.get(path.stat().st_dev, (path, 0.0))
        disks[path.stat().st_dev] = (first, sum_ + gigabytes)
    for path, gigabytes in disks.values():
        free = shutil.disk_usage(path).free / 1e9
        if free < gigabytes:
            raise Unfit(
                f"The set-up needs about {gigabytes:.1f} GB on the disk of {path}, which has {free:.1f} GB free.\n"
                "Fix: free disk space, or set TMPDIR and PIP_CACHE_DIR to move pip's folders to another disk."
            )


def run_pip(env: Environment, arguments: list[str], step: str, count: int = 0) -> None:
    """Run `pip install` inside the environment and log the progress; raise Unfit with advice if pip fails.

    pip compiles the installed files to bytecode, which takes a third of its time.  Without bytecode, and with
    PYTHONDONTWRITEBYTECODE set, each start of NeMo would take 37 s of CPU instead of 18 s.

    Args:
        arguments: further arguments of `pip install`.
        step: name of the step in the log and in the error.
        count: number of packages, to log the progress every 50; 0: no progress.
    """
    _log.info("%s: %s", env.name, step)
    start, fetched = time.monotonic(), 0
    output: list[str] = []
    command = [str(env.python), *PIP, "install", "--progress-bar", "off", *arguments]
    with (VENVS / f"{env.name}.log").open("a") as log:
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, cwd=ROOT)
        assert process.stdout is not None
        for line in process.stdout:
            log.write(line)
            output.append(line)
            seconds = time.monotonic() - start
            if line.startswith("Installing collected"):
                _log.info("%s:   all packages fetched after %.0f s, installing them", env.name, seconds)
            elif line.startswith(("Collecting ", "Processing ", "Requirement already")):
                fetched += 1
                if count and fetched % 50 == 0:
                    _log.info("%s:   %d of %d packages fetched after %.0f s", env.name, fetched, count, seconds)
    if process.wait():
        raise Unfit(failure(env, step, "".join(output)))


def failure(env: Environment, step: str, output: str) -> str:
    """Return the message for a failure of pip: the step, the error lines of pip's `output`, and advice."""
    errors = [line for line in output.splitlines() if re.match(r"\s*(ERROR|error|OSError)", line)][:4]
    shown = "\n".join(f"  pip: {line.strip()}" for line in errors or output.splitlines()[-4:])
    unknown = "Fix: run the same command again, or read the log."
    advice = next((text for pattern, text in ADVICE if re.search(pattern, output)), unknown)
    return f"{env.name}: this step failed: {step}\n{shown}\n{advice}\nThe whole log: {VENVS / f'{env.name}.log'}"


def locked_lines(lock: Path) -> dict[str, str]:
    """Return {name: line} of the pinned packages of a lock file."""
    return {line.split("==")[0]: line for line in lock.read_text().splitlines() if "--hash=" in line}


def install_lines(env: Environment, lines: Collection[str], step: str, *options: str) -> None:
    """Install locked packages without their dependencies; pip checks the hashes.

    Args:
        lines: lines of a lock file, one per package.
        step: name of the step in the log and in the error.
        options: further options of `pip install`.
    """
    with tempfile.TemporaryDirectory() as folder:
        requirements = Path(folder, "requirements.txt")
        requirements.write_text("\n".join(lines) + "\n")
        exact = ["--no-deps", "--require-hashes", "--no-build-isolation", *options]
        run_pip(env, [*exact, "-r", str(requirements)], step, len(lines))


def install_locked(env: Environment, torch_index: str) -> None:
    """Install all packages of the lock file, then torch; fail if torch does not accept the locked versions.

    A lock with the line `# torch: none` is for an environment without torch.
    """
    lines = locked_lines(env.lock)
    install_lines(env, [lines[name] for name in BUILDERS if name in lines], "build tools")
    install_lines(env, lines.values(), f"{len(lines)} packages from {env.lock.name} (usually {env.minutes:g} min)")
    if (version := directive(env.lock, "torch")) == "none":
        return
    torch = f"torch=={version}"
    index = ["--index-url", torch_index] if torch_index else []
    with tempfile.NamedTemporaryFile("w") as constraints:
        constraints.writelines(f"{name}=={version}\n" for name, version in read_pins(env.lock.read_text())[1].items())
        constraints.flush()
        run_pip(env, [*index, "-c", constraints.name, torch], f"{torch} (usually 0.3 min; a CUDA build takes longer)")


def install_projects(env: Environment) -> None:
    """Install the projects of the environment as editable, without dependencies: prorl; in train all others, too."""
    if env.projects:
        editable = [part for project in env.projects for part in ("--editable", str(project))]
        run_pip(env, ["--no-deps", "--no-build-isolation", *editable], "this project, its packages and plugins")
    if env.name == "rollout":  # the `prorl` command needs packages of the train environment
        (env.folder / "bin" / "prorl").unlink(missing_ok=True)


def make(env: Environment, torch_index: str) -> None:
    """Create or update one environment and write its stamp; do nothing if the stamp is up to date."""
    stamp, old = env.stamp(torch_index), env.stamped()
    if stamp == old:
        return
    start = time.monotonic()
    _log.info("%s: setting up %s", env.name, env.folder)
    (env.folder / STAMP).unlink(missing_ok=True)
    if {**stamp, "projects": ""} != {**old, "projects": ""}:
        if env.folder.exists():
            shutil.rmtree(env.folder)
        _log.info("%s: creating an environment for Python %s", env.name, stamp["python"])
        subprocess.run([sys.executable, "-m", "venv", str(env.folder)], check=True)
        install_locked(env, torch_index)
    install_projects(env)
    partial = env.folder / (STAMP + ".partial")
    partial.write_text(json.dumps(stamp, indent=1) + "\n")
    partial.replace(env.folder / STAMP)
    _log.info("%s: ready after %.0f s", env.name, time.monotonic() - start)


class InPlace(Environment):
    """The environment of --in-place and --check: the Python that runs this file, with the packages of its container."""

    @property
    def python(self) -> Path:
        return Path(sys.executable)


def install_in_place(env: Environment, dry_run: bool) -> None:
    """Add the packages of setup/container.txt that are missing in this Python, and replace packages that are too old.

    `dry_run`: only log the missing packages.  Raises Unfit outside NVIDIA's container.  The container's PIP_CONSTRAINT
    is removed from the environment variables, because it also blocks missing packages.
    """
    present, lines = installed(), locked_lines(env.lock)
    if absent := [name for name in BASE if name not in present]:
        raise Unfit(
            f"{sys.executable} does not have {', '.join(absent)}: --in-place is for NVIDIA's NeMo container."
            " Fix: outside the container, leave out --in-place to create both environments."
        )
    missing = missing_lines(env.lock, NEEDED, present)
    added = [line.split()[0] for line in missing]
    _log.info(
        "in place: %s has %d packages; packages to add: %s", sys.executable, len(present), " ".join(added) or "none"
    )
    if dry_run:
        return
    builders = [lines[name] for name in BUILDERS if not lines[name].startswith(f"{name}=={present.get(name)} ")]
    VENVS.mkdir(exist_ok=True)
    if not (VENVS / KEPT).exists():  # only the first run sees the container's packages alone
        write_kept(present)
    os.environ.pop("PIP_CONSTRAINT", None)
    with tempfile.TemporaryDirectory() as folder:
        if builders:  # in a temporary folder, so that the container's build tools stay unchanged
            install_lines(env, builders, "build tools", "--target", folder)
            os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, (folder, os.environ.get("PYTHONPATH"))))
        if missing:
            install_lines(env, missing, f"{len(missing)} packages")
        install_projects(env)
        replaced, _ = replacements(names_of(env.projects), env.lock, NEEDED)
        if replaced:
            _log.info("in place: replacing packages that are too old: %s", "; ".join(map(str, replaced.values())))
            install_lines(env, [lines[name] for name in replaced], "packages that were too old")
            pins, kept = read_pins(env.lock.read_text())[1], json.loads((VENVS / KEPT).read_text())
            write_kept({name: pins[name] if name in replaced else version for name, version in kept.items()})


def write_kept(versions: Mapping[str, str]) -> None:
    (VENVS / KEPT).write_text(json.dumps(versions, indent=1, sort_keys=True) + "\n")


def faults_in_place(env: Environment, imports: list[str]) -> list[str]:
    """Return one line for each reason why this Python cannot run the project.

    A package of the container that has changed since the first `--in-place` is such a reason, too.

    Args:
        imports: names of modules that must be importable.
    """
    pins = read_pins(env.lock.read_text())[1]
    kept = VENVS / KEPT
    if not kept.exists() and Path(sys.prefix) != env.folder:
        raise Unfit(
            f"{kept} does not exist, so the container's original packages are unknown."
            " Fix: run setup/environments.py --in-place first."
        )
    before = json.loads(kept.read_text()) if kept.exists() else {}
    series = {n: ".".join(pins[n].split(".")[:2]) for n in ("nemo-toolkit", "megatron-core", "nemo-aligner")}
    conflicts = replacements(names_of(env.projects), env.lock, NEEDED)[1]
    _log.info("checking the packages of %s, then importing %s (about 30 s)", env.python, ", ".join(imports))
    return [*faults(before, series, env.projects, imports), *conflicts]


def check(arguments: argparse.Namespace, selected: list[Environment]) -> None:
    """Check the environments `selected` for --check; raise Unfit with all faults found.

    The environment `train` is checked in the Python that runs this file, not in .venv/train.
    """
    wrong = []
    for env in selected:
        if env.name == "train":
            wrong += faults_in_place(env, [name for name in arguments.imports.split(",") if name])
        elif env.stamped().get("lock") != env.stamp("")["lock"]:
            wrong.append(f"{env.folder}: missing, or not made from {env.lock.name}. Fix: run --only {env.name} first")
    if wrong:
        raise Unfit("the environments cannot run the project:\n" + "\n".join(f"  {line}" for line in wrong))
    found, shown = installed(), (*BASE, "nemo-aligner", "nemo-prorl")
    _log.info("checked: %s", ", ".join(f"{name} {found[name]}" for name in shown if name in found))


def environments(arguments: argparse.Namespace) -> list[Environment]:
    folders = (ROOT / "packages", ROOT / "reward_plugins")
    others = [p.parent for folder in folders for p in sorted(folder.glob("*/pyproject.toml"))]
    kind = InPlace if getattr(arguments, "in_place", False) or getattr(arguments, "check", False) else Environment
    train = kind("train", arguments.train_lock, (ROOT, *others), gigabytes=3.3, minutes=2)
    size = 7.0 if "cuda" in arguments.rollout_lock.name else 2.7
    rollout = Environment("rollout", arguments.rollout_lock, (ROOT,), gigabytes=size, minutes=1.5)
    if getattr(arguments, "only", None) == "trl":  # only benchmarks/versus_trl.py needs this environment
        return [Environment("trl", ROOT / "setup" / "trl.lock", (), gigabytes=1.8, minutes=1)]
    if getattr(arguments, "only", None) == "triton":  # only benchmarks/sampler_v2.py needs this environment
        return [Environment("triton", ROOT / "setup" / "triton.lock", (), gigabytes=0.8, minutes=1)]
    return [train, rollout]


def main() -> int:
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    parser = argparse.ArgumentParser(description="Create or update .venv/train and .venv/rollout.")
    lock_help = "lock file of the {0} environment; default: setup/{0}.lock"
    parser.add_argument(
        "--train-lock", type=Path, default=ROOT / "setup" / "train.lock", help=lock_help.format("train")
    )
    parser.add_argument(
        "--rollout-lock", type=Path, default=ROOT / "setup" / "rollout.lock", help=lock_help.format("rollout")
    )
    only_help = (
        "create only this environment; trl and triton: for benchmarks/versus_trl.py and benchmarks/sampler_v2.py;"
    )
    only_help += " default: train and rollout"
    parser.add_argument("--only", choices=["train", "rollout", "trl", "triton"], help=only_help)
    parser.add_argument("--torch-index", default="", help="URL of the package index with torch; default: pip's index")
    in_place_help = (
        "install the environment 'train' into this Python, that of NVIDIA's NeMo container, and not into .venv/train"
    )
    parser.add_argument("--in-place", action="store_true", help=in_place_help)
    check_help = "install nothing; check that this Python (train) and .venv/rollout can run the project"
    parser.add_argument("--check", action="store_true", help=check_help)
    imports_help = "modules that --check imports, comma-separated; default: those that a policy needs"
    parser.add_argument("--imports", default=IMPORTS, metavar="A,B", help=imports_help)
    parser.add_argument(
        "--dry-run", action="store_true", help="print the steps and check that they are possible; change nothing"
    )
    arguments = parser.parse_args()
    if arguments.in_place and arguments.only not in (None, "train"):
        parser.error(f"--in-place installs only 'train'; got --only {arguments.only}")
    try:
        selected = [e for e in environments(arguments) if arguments.only in (None, e.name)]
        for env in selected:
            if not env.lock.exists():
                raise Unfit(f"{env.lock} does not exist. docs/howto/container.md shows how to create it.")
        if arguments.check:
            check(arguments, selected)
            return 0
        if arguments.in_place:
            install_in_place(selected.pop(0), arguments.dry_run)
        todo = [e for e in selected if e.stamp(arguments.torch_index) != e.stamped()]
        if not todo:
            return 0
        if arguments.dry_run:
            for env in todo:
                check_python(env.lock)
                _log.info("%s: %d packages of %s", env.folder, len(read_pins(env.lock.read_text())[1]), env.lock)
            return 0
        VENVS.mkdir(exist_ok=True)
        with (VENVS / ".lock").open("w") as lock_file:
            try:
                fcntl.flock(lock_file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                _log.info("waiting for another set-up that is running in %s", VENVS)
                fcntl.flock(lock_file, fcntl.LOCK_EX)
            for env in todo:
                check_python(env.lock)
            check_room([env for env in todo if not env.python.exists()])
            with ThreadPoolExecutor(len(todo)) as pool:  # pip uses one core
                for future in [pool.submit(make, env, arguments.torch_index) for env in todo]:
                    future.result()
    except (Unfit, OSError, subprocess.CalledProcessError) as error:
        _log.error("\nset-up failed: %s", error)
        return UNFIT
    except KeyboardInterrupt:
        _log.error("\nset-up interrupted; the same command starts again, with the files that pip has downloaded")
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main())
