"""Answers questions of `environments.py` about a container's Python.  Standard library and pip only."""

from __future__ import annotations

import importlib
import importlib.metadata
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from lock import normal_name, read_pins

# Modules without which no policy is built; they import most of torch, Megatron, NeMo and NeMo-Aligner.
IMPORTS = (
    "torch,megatron.core,nemo.collections.nlp.models.language_modeling.megatron_gpt_model,"
    "nemo_aligner.models.nlp.gpt.gpt_sft_model"
)


def installed() -> dict[str, str]:
    """{normal name: version} of all that this Python can import; of two of one name the one that it imports."""
    return {name: there.version for name, there in distributions().items()}


def missing_lines(lock: Path, needed: Path, there: Mapping[str, str]) -> list[str]:
    """Return the lines of `lock` for the names in `needed` that are not installed in any version."""
    names = [normal_name(line) for line in needed.read_text().splitlines() if line and not line.startswith("#")]
    locked = {normal_name(line.split("==")[0]): line for line in lock.read_text().splitlines() if "--hash=" in line}
    if unknown := sorted(set(names) - set(locked)):
        raise ValueError(f"{needed.name} names {', '.join(unknown)}, which {lock.name} does not pin.")
    return [locked[name] for name in names if name not in there]


class Need(NamedTuple):
    """A dependency that is not met: `who` needs `text`, and finds `version` of `name`, or None of it."""

    who: str
    name: str
    text: str
    version: str | None

    def __str__(self) -> str:
        return (
            f"{self.who} needs {self.text} and not {self.version}"
            if self.version
            else f"{self.who} needs {self.name} which is missing"
        )


def distributions() -> dict[str, importlib.metadata.Distribution]:
    """Return {normal name: what this Python imports}."""
    importlib.invalidate_caches()
    found: dict[str, importlib.metadata.Distribution] = {}
    for there in importlib.metadata.distributions():
        if there.metadata["Name"]:
            found.setdefault(normal_name(there.metadata["Name"]), there)
    return found


def requirements(of: importlib.metadata.Distribution, extras: Sequence[str] = ()) -> Iterator[Any]:
    """Yield what a distribution requires here, as packaging's Requirement."""
    from pip._vendor.packaging.requirements import Requirement

    for text in of.requires or []:
        need = Requirement(text)
        if need.marker is None or any(need.marker.evaluate({"extra": extra}) for extra in extras or ("",)):
            yield need


def unmet(projects: Iterable[str]) -> Iterator[Need]:
    """Yield each dependency of these distributions, and of what they depend on, that is missing or does not fit."""
    found = distributions()
    seen: set[tuple[str, tuple[str, ...]]] = set()
    queue = [(name, (), Need("this project", name, name, None)) for name in projects]
    while queue:
        name, extras, need = queue.pop()
        if (name, extras) in seen:
            continue
        seen.add((name, extras))
        if name not in found:
            yield need
            continue
        for wanted in requirements(found[name], extras):
            other = normal_name(wanted.name)
            version = found[other].version if other in found else None
            below = Need(name, other, str(wanted), version)
            if version and not wanted.specifier.contains(version, prereleases=True):
                yield below
            queue.append((other, tuple(sorted(wanted.extras)), below))


def replacements(projects: Iterable[str], lock: Path, needed: Path) -> tuple[dict[str, Need], list[str]]:
    """Return what `lock` may replace because it is too old for the projects, and what it may not, with the reason.

    Only names in `needed` are replaced; not numpy, against which the container's own packages are compiled; and nothing
    that another package of the container then no longer accepts.
    """
    names = {normal_name(line) for line in needed.read_text().splitlines()} - {"numpy"}
    pins = read_pins(lock.read_text())[1]
    found, chosen, refused = distributions(), {}, []
    for need in unmet(projects):
        if not need.version or need.name not in names:
            continue
        against = [
            f"{need}; {pins[need.name]} would fit, but {who} needs {wanted}"
            for who, other in found.items()
            for wanted in requirements(other)
            if normal_name(wanted.name) == need.name
            and wanted.specifier.contains(need.version, prereleases=True)
            and not wanted.specifier.contains(pins[need.name], prereleases=True)
        ]
        refused += against
        if not against:
            chosen[need.name] = need
    return chosen, refused


def names_of(projects: Iterable[Path]) -> list[str]:
    """Return the names of projects, from their pyproject.toml."""
    found = [re.search(r'^name = "(.*)"', (p / "pyproject.toml").read_text(), re.M) for p in projects]
    return [match[1] for match in found if match]


# Prints what does not import, one line each.
_IMPORT = """
import importlib, os, sys
say = os.fdopen(os.dup(1), "w")
os.dup2(2, 1)  # what the imports print is no finding
for module in sys.argv[1:]:
    try:
        importlib.import_module(module)
    except BaseException as error:
        print(f"import {module}: {type(error).__name__}: {error}".replace("\\n", " "), file=say)
"""


def faults(
    kept: Mapping[str, str], series: Mapping[str, str], projects: Sequence[Path], imports: Sequence[str]
) -> list[str]:
    """Return what keeps this Python from running this project; empty when all is well.

    `kept` are versions {name: version} that must be as they were, `series` beginnings of versions, `projects` folders
    of installed projects whose dependencies must be there in fitting versions, `imports` modules that must import.
    """
    found = installed()
    wrong = [
        f"{n} was {version} and is {found.get(n, 'gone')}" for n, version in kept.items() if found.get(n) != version
    ]
    for name, begin in series.items():
        if not re.match(re.escape(begin) + r"(\D|$)", version := found.get(name, "missing")):
            wrong.append(f"{name} is {version} and must be {begin}.*")
    wrong += map(str, unmet(names_of(projects)))
    with tempfile.TemporaryDirectory() as folder:  # NeMo makes one below its cache when it is imported
        command, env = [sys.executable, "-c", _IMPORT, *imports], {**os.environ, "XDG_CACHE_HOME": folder}
        done = subprocess.run(command, capture_output=True, text=True, env=env, check=False)
    died = [f"the imports ended with {done.returncode}: {done.stderr[-500:]}"] if done.returncode else []
    return [*wrong, *done.stdout.splitlines(), *died]
