"""Reader of run directories for the report, also of killed runs and of runs that continue.

The report lists missing and damaged files as problems.  An error is raised only for a folder that is not a run.
"""

import json
import math
import os
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from nemo_prorl.errors import ConfigError
from nemo_prorl.files import first_line, step_files
from nemo_prorl.launcher.fork import read_fork
from nemo_prorl.lifecycle.journal_events import standing
from nemo_prorl.lifecycle.stages import last_end

_SIGNS = ("config.yaml", "metrics.jsonl", "journal.jsonl")  # any of them makes a folder a run directory
_MAX_PROBLEMS = 12  # problems of a file that are listed one by one


@dataclass
class RunRecord:
    """Content of a run directory; a missing file leaves its field empty."""

    folder: Path
    name: str
    config: dict[str, Any] = field(default_factory=dict)  # config.yaml
    metrics: list[dict[str, Any]] = field(default_factory=list)  # metrics.jsonl in order of `step`, each step once
    events: list[dict[str, Any]] = field(default_factory=list)  # journal.jsonl
    launches: list[dict[str, Any]] = field(default_factory=list)  # launches.jsonl: starts and ends of Slurm attempts
    summary: dict[str, Any] = field(default_factory=dict)  # summary.json
    rollouts: dict[int, Path] = field(default_factory=dict)  # files of stored responses by step
    disagreements: dict[int, Path] = field(default_factory=dict)  # likewise, of those with a second verdict
    probe: dict[str, Any] = field(default_factory=dict)  # probe/probe.json, written by `prorl probe`
    problems: list[str] = field(default_factory=list)  # missing files and unreadable lines, shown in the report

    @property
    def last_step(self) -> int:
        return int(self.metrics[-1]["step"]) if self.metrics else 0

    def setting(self, key: str) -> Any:
        """Return a value of the configuration by its dotted key, or None if the configuration does not have the key."""
        value: Any = self.config
        for part in key.split("."):
            value = value.get(part) if isinstance(value, dict) else None
        return value

    @property
    def ending(self) -> dict[str, Any] | None:
        """Return the event with which the last process of the run ended; None if it still runs or was killed."""
        end = last_end(self.events)
        return None if end is None else dict(end)

    def counted(self, kind: str) -> list[dict[str, Any]]:
        """Return the events of one kind that have a step, except those that a resume or a lost trial discarded."""
        events = [event for event in self.events if step_of(event) is not None]
        return [dict(event) for event in standing(events) if event["event"] == kind]


@dataclass(frozen=True)
class Curve:
    """A line in the report's charts: one run, or the stages of a chain one after another."""

    name: str
    folder: Path
    runs: tuple[RunRecord, ...]
    is_chain: bool

    @property
    def offsets(self) -> list[int]:
        """Return the number of steps before each stage."""
        sums = [0]
        for run in self.runs[:-1]:
            sums.append(sums[-1] + run.last_step)
        return sums


def run_folders(folder: Path) -> tuple[list[Path], bool]:
    """Return the run directories of a RUN argument in order, and whether they are a chain.

    Raises ConfigError if the argument contains no run directory.
    """
    if not folder.is_dir():
        raise ConfigError(f"{folder}: no such folder; give a run directory, or the folder of a chain (run1, run2, ...)")
    if is_run(folder):
        return [folder], False
    inside = runs_inside(folder)
    if stages := [path for path in inside if _is_stage(path)]:
        return stages, True
    if inside:
        names = ", ".join(path.name for path in inside[:3])
        raise ConfigError(
            f"{folder}: contains runs ({names}), but no chain (run1, run2, ...). Fix: give the run directories instead"
        )
    raise ConfigError(
        f"{folder}: neither a run (it has none of {', '.join(_SIGNS)}) nor a chain of runs (run1, run2, ...)"
    )


def runs_inside(folder: Path) -> list[Path]:
    """Return the run directories in a folder, run10 after run9."""
    return sorted((path for path in folder.glob("*/") if is_run(path)), key=lambda path: _natural(path.name))


def is_run(folder: Path) -> bool:
    """Return whether the folder has any file that identifies a run directory."""
    return any((folder / name).is_file() for name in _SIGNS)


def _is_stage(folder: Path) -> bool:
    if re.fullmatch(r"run\d+", folder.name):
        return True
    return _mapping(folder / "config.yaml", []).get("stage") == folder.name != "none"  # `none`: an arm of `prorl fork`


def _natural(name: str) -> list[tuple[int, int, str]]:
    """Return a sort key that puts run10 after run9."""
    return [(0, int(part), "") if part.isdigit() else (1, 0, part) for part in re.split(r"(\d+)", name) if part]


def with_arms(folders: list[Path]) -> list[Path]:
    """Return RUN arguments, with the arms that have begun in place of a fork's folder."""
    runs: list[Path] = []
    for folder in folders:
        record = None if is_run(folder) else read_fork(folder)
        runs += [arm for entry in record["arms"] if is_run(arm := folder / entry["folder"])] if record else [folder]
    if not runs:
        raise ConfigError(f"{folders[0]}: no arm of this fork has begun. Fix: repeat prorl report later")
    return runs


def read_curves(folders: list[Path]) -> list[Curve]:
    """Return a curve for each RUN argument.  Raises ConfigError for a folder that is not a run."""
    folders = with_arms(folders)
    curves, names = [], _short_names(folders)
    for folder, name in zip(folders, names, strict=True):
        paths, is_chain = run_folders(folder)
        name = "".join(letter if letter.isprintable() else "?" for letter in name)
        curves.append(Curve(name, folder, tuple(read_run(path) for path in paths), is_chain))
    return curves


def _short_names(folders: list[Path]) -> list[str]:
    """Return the last part of each path, or as many parts as make the names differ."""
    parts = [Path(os.path.abspath(folder)).parts for folder in folders]  # named as in the argument, even for links
    for depth in range(1, max(map(len, parts)) + 1):
        names = ["/".join(part[-depth:]) for part in parts]
        if len(set(names)) == len(names):
            return names
    return [f"{'/'.join(part[-1:])} ({number})" for number, part in enumerate(parts, 1)]


def read_run(folder: Path) -> RunRecord:
    """Read all readable files of a run directory."""
    run = RunRecord(folder, folder.name)
    run.config = _mapping(folder / "config.yaml", run.problems)
    if isinstance(stage := run.config.get("stage"), str) and stage != "none":
        run.name = stage
    run.metrics = _steps(folder / "metrics.jsonl", run.problems)
    run.events = [e for e in objects_of(folder / "journal.jsonl", run.problems) if isinstance(e.get("event"), str)]
    run.launches = list(objects_of(folder / "launches.jsonl", [], missing_is_fine=True))
    run.summary = _mapping(folder / "summary.json", run.problems, missing_is_fine=True)  # written at the end of a run
    run.probe = _mapping(folder / "probe" / "probe.json", run.problems, missing_is_fine=True)
    run.rollouts = step_files(folder / "rollouts")
    run.disagreements = step_files(folder / "disagreements")
    return run


def _mapping(path: Path, problems: list[str], missing_is_fine: bool = False) -> dict[str, Any]:
    """Return the object of a yaml or JSON file, empty if it cannot be read."""
    try:
        text = path.read_bytes().decode(errors="replace")
        read = json.loads(text) if path.suffix == ".json" else yaml.safe_load(text)
        if not isinstance(read, dict):
            raise ValueError("expected an object (keys and values)")
    except FileNotFoundError:
        problems += [] if missing_is_fine else [f"{path.name}: missing"]
    except (OSError, ValueError, RecursionError, yaml.YAMLError) as error:
        problems.append(f"{path.name}: cannot be read: {first_line(error)}")
    else:
        return read
    return {}


def objects_of(path: Path, problems: list[str], missing_is_fine: bool = False) -> Iterator[dict[str, Any]]:
    """Yield the objects of a JSON-lines file; lines that are not objects are added to `problems`.

    A last line without a line end is skipped silently, because the run is still writing it.
    """
    try:
        *texts, _unfinished = path.read_bytes().split(b"\n")
    except FileNotFoundError:
        problems += [] if missing_is_fine else [f"{path.name}: missing"]
        return
    except OSError as error:
        problems.append(f"{path.name}: cannot be read: {first_line(error)}")
        return
    broken = []
    for number, text in enumerate(texts, 1):
        try:
            value = json.loads(text.decode(errors="replace"))
            if not isinstance(value, dict):
                raise ValueError(f"expected an object; got {type(value).__name__}")
            yield value
        except (ValueError, RecursionError) as error:
            broken.append(f"{path.name}:{number}: skipped: {first_line(error)}")
    problems += broken[:_MAX_PROBLEMS]
    if len(broken) > _MAX_PROBLEMS:
        problems.append(f"{path.name}: {len(broken) - _MAX_PROBLEMS} more lines skipped")


def _steps(path: Path, problems: list[str]) -> list[dict[str, Any]]:
    """Return the lines of metrics.jsonl in order of steps, each step once.

    A resumed run may write steps again: a line replaces all lines before it that have the same or a later step.
    """
    lines: list[dict[str, Any]] = []
    odd = 0
    for line in objects_of(path, problems):
        if (step := step_of(line)) is None:
            odd += 1
            continue
        while lines and lines[-1]["step"] >= step:
            lines.pop()
        lines.append(line)
    if odd:
        problems.append(f"{path.name}: {odd} {'line has' if odd == 1 else 'lines have'} no step and are skipped")
    return lines


def step_of(line: dict[str, Any]) -> int | None:
    """Return the step of a metrics line or an event, or None if the line has no valid step."""
    step = line.get("step")
    return step if isinstance(step, int) and not isinstance(step, bool) and 0 <= step < 2**53 else None


def number(value: Any) -> float | None:
    """Return `value` as a float if it is a finite number, otherwise None."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    try:
        read = float(value)
    except OverflowError:
        return None
    return read if math.isfinite(read) else None


def part_of(value: dict[str, Any], key: str) -> dict[str, Any]:
    """Return the object under `key`; {} if there is no object under this key."""
    part = value.get(key)
    return part if isinstance(part, dict) else {}
