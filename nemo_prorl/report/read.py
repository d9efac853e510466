"""Reads run directories for the report, whatever is missing, cut or being written: it says what it passed over.

Only what is no run at all raises.  Everything here may come from a run that was killed, or still goes on.
"""

import json
import math
import os
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from nemo_prorl.errors import ConfigError

_SIGNS = ("config.yaml", "metrics.jsonl", "journal.jsonl")  # any of them makes a folder a run directory
_MAX_PROBLEMS = 12  # of a file, told one by one


@dataclass
class Run:
    """What one run directory holds.  `metrics` are in order of `step`, each step once; `problems` are told."""

    folder: Path
    name: str
    config: dict[str, Any] = field(default_factory=dict)
    metrics: list[dict[str, Any]] = field(default_factory=list)
    events: list[dict[str, Any]] = field(default_factory=list)
    launches: list[dict[str, Any]] = field(default_factory=list)
    summary: dict[str, Any] = field(default_factory=dict)
    rollouts: dict[int, Path] = field(default_factory=dict)
    problems: list[str] = field(default_factory=list)

    @property
    def last_step(self) -> int:
        return int(self.metrics[-1]["step"]) if self.metrics else 0

    def setting(self, key: str) -> Any:
        """A value of the configuration by its dotted key; None where the file does not say."""
        value: Any = self.config
        for part in key.split("."):
            value = value.get(part) if isinstance(value, dict) else None
        return value


@dataclass(frozen=True)
class Curve:
    """One line in the comparison: a run, or the stages of a chain in their order."""

    name: str
    folder: Path
    runs: tuple[Run, ...]
    is_chain: bool

    @property
    def offsets(self) -> list[int]:
        """How many steps come before each stage."""
        sums = [0]
        for run in self.runs[:-1]:
            sums.append(sums[-1] + run.last_step)
        return sums


def run_folders(folder: Path) -> tuple[list[Path], bool]:
    """The run directories of a RUN argument in order, and whether they are a chain; raises ConfigError without one."""
    if not folder.is_dir():
        raise ConfigError(f"{folder}: no such folder; give a run directory, or the folder of a chain (run1, run2, ...)")
    if is_run(folder):
        return [folder], False
    inside = [path for path in folder.iterdir() if path.is_dir() and is_run(path)]
    stages = sorted((path for path in inside if _is_stage(path)), key=lambda path: _natural(path.name))
    if stages:
        return stages, True
    if inside:
        names = ", ".join(sorted(path.name for path in inside)[:3])
        raise ConfigError(f"{folder} holds runs ({names}), but no stages of a chain (run1, run2, ...): name the runs")
    raise ConfigError(f"{folder} holds no run (none of {', '.join(_SIGNS)}), nor a chain (run1, run2, ...)")


def is_run(folder: Path) -> bool:
    """Whether a folder has any file by which a run directory is known."""
    return any((folder / name).is_file() for name in _SIGNS)


def _is_stage(folder: Path) -> bool:
    if re.fullmatch(r"run\d+", folder.name):
        return True
    config, _ = _yaml(folder / "config.yaml")
    return config.get("stage") == folder.name


def _natural(name: str) -> list[tuple[int, int, str]]:
    """run10 after run9."""
    return [(0, int(part), "") if part.isdigit() else (1, 0, part) for part in re.split(r"(\d+)", name) if part]


def read_curves(folders: list[Path]) -> list[Curve]:
    """A curve for each RUN argument; raises ConfigError where one is no run."""
    curves, names = [], _short_names(folders)
    for folder, name in zip(folders, names, strict=True):
        found, is_chain = run_folders(folder)
        name = "".join(letter if letter.isprintable() else "?" for letter in name)
        curves.append(Curve(name, folder, tuple(read_run(path) for path in found), is_chain))
    return curves


def _short_names(folders: list[Path]) -> list[str]:
    """The last part of each path; as many more as it takes to tell them apart."""
    parts = [Path(os.path.abspath(folder)).parts for folder in folders]  # by the name that was given, links too
    for depth in range(1, max(map(len, parts)) + 1):
        names = ["/".join(part[-depth:]) for part in parts]
        if len(set(names)) == len(names):
            return names
    return [f"{'/'.join(part[-1:])} ({number})" for number, part in enumerate(parts, 1)]


def read_run(folder: Path) -> Run:
    """All of a run directory that can be read."""
    run = Run(folder, folder.name)
    run.config, problem = _yaml(folder / "config.yaml")
    run.problems += problem
    if isinstance(stage := run.config.get("stage"), str) and stage != "none":
        run.name = stage
    run.metrics = _steps(folder / "metrics.jsonl", run.problems)
    run.events = [e for e in _lines(folder / "journal.jsonl", run.problems) if isinstance(e.get("event"), str)]
    run.launches = list(_lines(folder / "launches.jsonl", [], missing_is_fine=True))
    run.summary = _summary(folder / "summary.json", run.problems)
    run.rollouts = _rollouts(folder / "rollouts")
    return run


def _yaml(path: Path) -> tuple[dict[str, Any], list[str]]:
    import yaml

    try:
        read = yaml.safe_load(path.read_bytes())
    except FileNotFoundError:
        return {}, [f"{path.name}: missing; settings are not shown"]
    except (OSError, ValueError, RecursionError, yaml.YAMLError) as error:
        return {}, [f"{path.name}: cannot be read: {_first_line(error)}"]
    return (read, []) if isinstance(read, dict) else ({}, [f"{path.name}: holds no settings"])


def _first_line(error: BaseException) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0]


def _lines(path: Path, problems: list[str], missing_is_fine: bool = False) -> Iterator[dict[str, Any]]:
    """The objects of a JSON-lines file; others are told.  A last line without its end is being written: no word."""
    try:
        data = path.read_bytes()
    except FileNotFoundError:
        if not missing_is_fine:
            problems.append(f"{path.name}: missing")
        return
    except OSError as error:
        problems.append(f"{path.name}: cannot be read: {_first_line(error)}")
        return
    told = 0
    texts = data.split(b"\n")
    for number, text in enumerate(texts, 1):
        if not text.strip():
            continue
        try:
            value = json.loads(text.decode(errors="replace"))
            if not isinstance(value, dict):
                raise ValueError(f"{type(value).__name__}, not an object")
        except (ValueError, RecursionError) as error:
            told += number < len(texts)
            if number < len(texts) and told <= _MAX_PROBLEMS:
                problems.append(f"{path.name}:{number}: passed over: {_first_line(error)}")
            continue
        yield value
    if told > _MAX_PROBLEMS:
        problems.append(f"{path.name}: {told - _MAX_PROBLEMS} more lines passed over")


def _steps(path: Path, problems: list[str]) -> list[dict[str, Any]]:
    """Metrics in order of steps.  Where a step stands again, the later line counts and those after it are dropped."""
    lines: list[dict[str, Any]] = []
    odd = 0
    for line in _lines(path, problems):
        if (step := step_of(line)) is None:
            odd += 1
            continue
        while lines and lines[-1]["step"] >= step:
            lines.pop()
        lines.append(line)
    if odd:
        problems.append(f"{path.name}: {odd} {'line has' if odd == 1 else 'lines have'} no step and are passed over")
    return lines


def _summary(path: Path, problems: list[str]) -> dict[str, Any]:
    """summary.json; a run without a validation has none until its end."""
    try:
        read = json.loads(path.read_bytes().decode(errors="replace"))
    except FileNotFoundError:
        return {}
    except (OSError, ValueError, RecursionError) as error:
        problems.append(f"{path.name}: cannot be read: {_first_line(error)}")
        return {}
    return read if isinstance(read, dict) else {}


def _rollouts(folder: Path) -> dict[int, Path]:
    found = {}
    try:
        for path in folder.iterdir():
            if match := re.fullmatch(r"step-(\d{1,15})\.jsonl", path.name):
                found[int(match[1])] = path
    except OSError:
        return {}
    return dict(sorted(found.items()))


def step_of(line: dict[str, Any]) -> int | None:
    """The step of a metrics line or an event; None where it is none."""
    step = line.get("step")
    return step if isinstance(step, int) and not isinstance(step, bool) and 0 <= step < 2**53 else None


def number(value: Any) -> float | None:
    """A finite number, else None."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    try:
        read = float(value)
    except OverflowError:
        return None
    return read if math.isfinite(read) else None
