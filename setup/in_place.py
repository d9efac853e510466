"""Checks of the packages in a container's Python, for `environments.py`.  Uses the standard library and pip only."""

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

# Modules that a policy needs; importing them imports most of torch, Megatron, NeMo and NeMo-Aligner.
IMPORTS = (
    "torch,megatron.core,nemo.collections.nlp.models.language_modeling.megatron_gpt_model,"
    "nemo_aligner.models.nlp.gpt.gpt_sft_model"
)


def installed() -> dict[str, str]:
    """Return {normal name: version} of the installed distributions."""
    return {name: distribution.version for name, distribution in distributions().items()}


def missing_lines(lock: Path, needed: Path, present: Mapping[str, str]) -> list[str]:
    """Return the lines of the file `lock` for the packages that the file `needed` names and `present` does not have."""
    names = [normal_name(line) for line in needed.read_text().splitlines() if line and not line.startswith("#")]
    locked = {normal_name(line.split("==")[0]): line for line in lock.read_text().splitlines() if "--hash=" in line}
    if unknown := sorted(set(names) - set(locked)):
        raise ValueError(f"{needed.name} names {', '.join(unknown)}, which {lock.name} does not pin.")
    return [locked[name] for name in names if name not in present]


class Need(NamedTuple):
    """An unmet dependency: package `who` needs `text`; `version` of package `name` is installed (None: it is not)."""

    who: str
    name: str
    text: str
    version: str | None

    def __str__(self) -> str:
        return (
            f"{self.who} needs {self.text}; installed is {self.version}"
            if self.version
            else f"{self.who} needs {self.name}, which is not installed"
        )


def distributions() -> dict[str, importlib.metadata.Distribution]:
    """Return {normal name: installed distribution}; of two distributions with one name, the one that Python imports."""
    importlib.invalidate_caches()
    found: dict[str, importlib.metadata.Distribution] = {}
    for distribution in importlib.metadata.distributions():
        if distribution.metadata["Name"]:
            found.setdefault(normal_name(distribution.metadata["Name"]), distribution)
    return found


def requirements(distribution: importlib.metadata.Distribution, extras: Sequence[str] = ()) -> Iterator[Any]:
    """Yield the `packaging` Requirements of a distribution, with these extras, that apply to this Python."""
    from pip._vendor.packaging.requirements import Requirement

    for text in distribution.requires or []:
        need = Requirement(text)
        if need.marker is None or any(need.marker.evaluate({"extra": extra}) for extra in extras or ("",)):
            yield need


def unmet(projects: Iterable[str]) -> Iterator[Need]:
    """Yield each direct or indirect dependency of the distributions `projects` that is missing, too old or too new."""
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
            dependency = normal_name(wanted.name)
            version = found[dependency].version if dependency in found else None
            dependency_need = Need(name, dependency, str(wanted), version)
            if version and not wanted.specifier.contains(version, prereleases=True):
                yield dependency_need
            queue.append((dependency, tuple(sorted(wanted.extras)), dependency_need))


def replacements(projects: Iterable[str], lock: Path, needed: Path) -> tuple[dict[str, Need], list[str]]:
    """Find installed packages that are too old for the projects and must be replaced by the locked version.

    numpy is never replaced, because the container's packages are compiled against its version.

    Args:
        projects: names of the distributions whose dependencies are examined.
        needed: file with the names of packages that may be replaced.

    Returns:
        {name: unmet dependency} of the packages to replace; and messages about packages that are too old but cannot be
        replaced, because another installed package does not accept the locked version.
    """
    names = {normal_name(line) for line in needed.read_text().splitlines()} - {"numpy"}
    pins = read_pins(lock.read_text())[1]
    found, chosen, conflicts = distributions(), {}, []
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
        conflicts += against
        if not against:
            chosen[need.name] = need
    return chosen, conflicts


def names_of(projects: Iterable[Path]) -> list[str]:
    """Return the distribution names of these project folders, from their pyproject.toml files."""
    found = [re.search(r'^name = "(.*)"', (p / "pyproject.toml").read_text(), re.M) for p in projects]
    return [match[1] for match in found if match]


# A program that prints one line for each module that cannot be imported.
_IMPORT = """
import importlib, os, sys
say = os.fdopen(os.dup(1), "w")
os.dup2(2, 1)  # output of the imports must not mix with these lines
for module in sys.argv[1:]:
    try:
        importlib.import_module(module)
    except BaseException as error:
        print(f"import {module}: {type(error).__name__}: {error}".replace("\\n", " "), file=say)
"""


def faults(
    kept: Mapping[str, str], series: Mapping[str, str], projects: Sequence[Path], imports: Sequence[str]
) -> list[str]:
    """Return the reasons why this Python cannot run the project; empty if it can.

    Args:
        kept: {name: version} of packages that must be unchanged.
        series: {name: prefix of the version, such as 2.0} of packages whose version must begin with the prefix.
        projects: folders of installed projects whose dependencies must be met.
        imports: modules that must be importable.
    """
    found = installed()
    wrong = [
        f"{n} was {version} and is now {found.get(n, 'not installed')}"
        for n, version in kept.items()
        if found.get(n) != version
    ]
    for name, begin in series.items():
        if not re.match(re.escape(begin) + r"(\D|$)", version := found.get(name, "not installed")):
            wrong.append(f"{name}: expected {begin}.*; got {version}")
    wrong += map(str, unmet(names_of(projects)))
    with tempfile.TemporaryDirectory() as folder:  # NeMo creates a folder in its cache when it is imported
        command, env = [sys.executable, "-c", _IMPORT, *imports], {**os.environ, "XDG_CACHE_HOME": folder}
        done = subprocess.run(command, capture_output=True, text=True, env=env, check=False)
    died = [f"the import test ended with status {done.returncode}: {done.stderr[-500:]}"] if done.returncode else []
    return [*wrong, *done.stdout.splitlines(), *died]
