"""What `environments.py --in-place` and `--check` ask about a container's Python.  Standard library only."""

from __future__ import annotations

import importlib.metadata
import json
import re
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path

from lock import normal_name

# Modules without which no policy is built; they import most of torch, Megatron, NeMo and NeMo-Aligner.
IMPORTS = (
    "torch,megatron.core,nemo.collections.nlp.models.language_modeling.megatron_gpt_model,"
    "nemo_aligner.models.nlp.gpt.gpt_sft_model"
)


def installed() -> dict[str, str]:
    """{normal name: version} of all that this Python can import; of two of one name the one that it imports."""
    found: dict[str, str] = {}
    for there in importlib.metadata.distributions():
        if there.metadata["Name"]:
            found.setdefault(normal_name(there.metadata["Name"]), there.version)
    return found


def missing_lines(lock: Path, needed: Path, there: Mapping[str, str]) -> list[str]:
    """The lines of `lock` for those names in `needed` that are not there in any version."""
    names = [normal_name(line) for line in needed.read_text().splitlines() if line and not line.startswith("#")]
    locked = {normal_name(line.split("==")[0]): line for line in lock.read_text().splitlines() if "--hash=" in line}
    if unknown := sorted(set(names) - set(locked)):
        raise ValueError(f"{needed.name} names {', '.join(unknown)}, which {lock.name} does not pin.")
    return [locked[name] for name in names if name not in there]


# Runs inside the environment: prints each thing that is wrong, one line each.
_CHECK = """
import importlib, importlib.metadata, json, os, re, sys
from pip._vendor.packaging.requirements import Requirement
asked, found = json.load(sys.stdin), {}
say = os.fdopen(os.dup(1), "w")
os.dup2(2, 1)  # what the imports print is no finding
def normal(name):
    return re.sub(r"[-_.]+", "-", name).lower()
for d in importlib.metadata.distributions():
    if d.metadata["Name"]:
        found.setdefault(normal(d.metadata["Name"]), d)
for name, version in asked["kept"].items():
    if name not in found or found[name].version != version:
        print(name, "was", version, "and is", found[name].version if name in found else "gone", file=say)
for name, series in asked["series"].items():
    version = found[name].version if name in found else "missing"
    if not re.match(re.escape(series) + r"(\\D|$)", version):
        print(name, "is", version, "and must be", series + ".*", file=say)
seen, queue = set(), [(name, (), "this project") for name in asked["projects"]]
while queue:
    name, extras, who = queue.pop()
    if (name, extras) in seen:
        continue
    seen.add((name, extras))
    if name not in found:
        print(who, "needs", name, "which is missing", file=say)
        continue
    for text in found[name].requires or []:
        need = Requirement(text)
        if need.marker and not any(need.marker.evaluate({"extra": extra}) for extra in extras or ("",)):
            continue
        other = found.get(normal(need.name))
        if other and not need.specifier.contains(other.version, prereleases=True):
            print(name, "needs", text, "and not", other.version, file=say)
        queue.append((normal(need.name), tuple(sorted(need.extras)), name))
for module in asked["imports"]:
    try:
        importlib.import_module(module)
    except BaseException as error:
        print(f"import {module}: {type(error).__name__}: {error}".replace("\\n", " "), file=say)
"""


def faults(
    python: Path, kept: Mapping[str, str], series: Mapping[str, str], projects: Sequence[Path], imports: Sequence[str]
) -> list[str]:
    """What keeps `python` from running this project; empty when all is well.

    `kept` are versions {name: version} that must be as they were, `series` beginnings of versions, `projects` folders
    of installed projects whose dependencies must be there in fitting versions, `imports` modules that must import.
    """
    names = [re.search(r'^name = "(.*)"', (p / "pyproject.toml").read_text(), re.M) for p in projects]
    asked = {
        "kept": dict(kept),
        "series": dict(series),
        "projects": [name[1] for name in names if name],
        "imports": list(imports),
    }
    told = subprocess.run(
        [str(python), "-c", _CHECK], input=json.dumps(asked), capture_output=True, text=True, check=False
    )
    died = [f"the check itself ended with {told.returncode}: {told.stderr[-500:]}"] if told.returncode else []
    return [*told.stdout.splitlines(), *died]
