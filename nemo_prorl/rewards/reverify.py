"""`prorl reverify`: judges stored rollouts again, with the plugins as installed now, and says which verdicts changed.

A line of `rollouts/step-N.jsonl` is a reward request with its `verdict`.  The settings of the plugins are those of the
run's config.yaml, where there is one, unless given.
"""

import argparse
import asyncio
import contextlib
import json
import logging
import math
import re
import sys
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TextIO

from nemo_prorl.errors import ConfigError, DataError
from nemo_prorl.rewards.cli import opened, printable
from nemo_prorl.rewards.discovery import discover
from nemo_prorl.rewards.interface import FAILURES, RewardRequest
from nemo_prorl.rewards.options import add_unsafe, parse_settings
from nemo_prorl.rewards.service import RewardService, plan_pools

_log = logging.getLogger(__name__)

_IN_FLIGHT = 256  # requests read ahead for each worker
_SAME = 1e-9  # scores this close are the same
_JUDGED = ("score", "correct", "parts", "failure")  # a verdict that differs in one of these has changed


@dataclass(frozen=True)
class Stored:
    """One response with the verdict that it once got."""

    file: str
    line: int
    step: int | None
    request: RewardRequest
    verdict: dict[str, Any]


def add_parser(commands: Any) -> None:
    """Adds `reverify` to the main command line."""
    text = "judge a run's stored rollouts again, and say which verdicts changed"
    parser = commands.add_parser("reverify", help=text, description=text)
    parser.add_argument("source", metavar="RUN_OR_FILE", type=Path, help="a run directory, or a file of its rollouts/")
    parser.add_argument("--workers", type=int, default=1, help="worker processes, shared out over the plugins")
    add_unsafe(parser)
    parser.add_argument("--settings", type=parse_settings, help="JSON object: plugin name -> its settings")
    parser.add_argument("--out", default="", help="file of JSON Lines: id, step, task, changed, old and new verdict")
    parser.add_argument("--only-changed", action="store_true", help="write only changed verdicts to --out")
    parser.set_defaults(run_command=run)


def run(args: argparse.Namespace) -> int:
    """0 also where verdicts changed.  Raises DataError (bad file, line and field) before any worker starts."""
    files = rollout_files(args.source)
    tasks = sorted({stored.request.task for stored in read_all(files)})
    if not tasks:
        raise DataError(f"{args.source}: holds no response; see trainer.grpo.save_rollout_groups")
    settings = _settings_of(files[0]) if args.settings is None else args.settings
    registry = discover()
    service = RewardService(
        plan_pools(registry, tasks, args.workers, settings, unsafe_no_sandbox=args.unsafe_no_sandbox), registry
    )
    with opened(args.out) if args.out else contextlib.nullcontext() as out:
        summary = asyncio.run(_judge_all(service, files, args.workers * _IN_FLIGHT, out, args.only_changed))
    sys.stdout.write("\n".join(summary.lines()) + "\n")
    return 0


# --- what is stored --------------------------------------------------------------------------------------------------


def rollout_files(source: Path) -> list[Path]:
    """The files of a run in the order of steps, or the one that is named.  Raises DataError where there is none."""
    if not source.is_dir():
        return [source]
    folder = source / "rollouts" if (source / "rollouts").is_dir() else source
    files = sorted(folder.glob("step-*.jsonl"), key=lambda path: (_step_of(path) or 0, path.name))
    if not files:
        raise DataError(f"{source}: holds no rollouts/step-N.jsonl; see trainer.grpo.save_rollout_groups")
    return files


def _step_of(path: Path) -> int | None:
    found = re.fullmatch(r"step-(\d+)\.jsonl", path.name)
    return int(found[1]) if found else None


def _settings_of(file: Path) -> dict[str, dict[str, Any]]:
    """`rewards.plugins` of the run that a file of rollouts belongs to; none without a config.yaml."""
    path = file.absolute().parent.parent / "config.yaml"
    if not path.is_file():
        return {}
    import yaml

    try:
        settings: dict[str, dict[str, Any]] = yaml.safe_load(path.read_text())["rewards"]["plugins"]
    except (yaml.YAMLError, OSError, KeyError, TypeError) as error:
        raise ConfigError(f"{path}: has no rewards.plugins ({error}); give --settings") from error
    if settings:
        _log.info("settings of %s: %s", path, json.dumps(settings))
    return settings


def read_all(files: list[Path]) -> Iterator[Stored]:
    """All lines of all files, one at a time.  Raises DataError naming file, line and field."""
    for path in files:
        try:
            with path.open(encoding="utf-8", newline="\n") as file:
                for at, line in enumerate(file, 1):
                    if line.strip():
                        yield _stored(path, at, line)
        except (OSError, UnicodeDecodeError) as error:
            raise DataError(f"{path}: cannot be read: {error}") from error


def _stored(path: Path, at: int, line: str) -> Stored:
    try:
        obj = json.loads(line)
        request = RewardRequest.from_json(obj)
        verdict = _checked(obj.get("verdict"), request.id)
    except (ValueError, RecursionError) as error:
        kind = "not JSON: " if isinstance(error, json.JSONDecodeError) else ""
        raise DataError(f"{path}:{at}: {kind}{error}") from error
    return Stored(str(path), at, _step_of(path), request, verdict)


def _checked(verdict: Any, request_id: str) -> dict[str, Any]:
    if not isinstance(verdict, dict):
        raise ValueError(f"field 'verdict' is {verdict!r}; it must be an object, as `prorl rewards score` writes it")
    for key in ("id", "score", "correct", "parts", "detail", "failure"):
        if key not in verdict:
            raise ValueError(f"field 'verdict.{key}' is missing")
    score, failure = verdict["score"], verdict["failure"]
    number = isinstance(score, (int, float)) and not isinstance(score, bool)
    if score is not None and not (number and 0 <= score <= 1):
        raise ValueError(f"field 'verdict.score' is {score!r}; it must be a number from 0 to 1, or null")
    if failure is not None and failure not in FAILURES:
        raise ValueError(f"field 'verdict.failure' is {failure!r}; it must be null or one of {', '.join(FAILURES)}")
    if (score is None) != (failure == "infrastructure"):
        raise ValueError(f"field 'verdict.score' is {score!r} with failure {failure!r}; only infrastructure has null")
    if verdict["id"] != request_id:
        raise ValueError(f"field 'verdict.id' is {verdict['id']!r}; the request's id is {request_id!r}")
    if not isinstance(verdict["parts"], dict):
        raise ValueError(f"field 'verdict.parts' is {verdict['parts']!r}; it must be an object")
    if not isinstance(verdict["detail"], str):
        raise ValueError(f"field 'verdict.detail' is {verdict['detail']!r}; it must be a string")
    return verdict


# --- judging again ---------------------------------------------------------------------------------------------------


async def _judge_all(
    service: RewardService, files: list[Path], in_flight: int, out: TextIO | None, only_changed: bool
) -> "Summary":
    """Rescores in order, `in_flight` requests ahead; changed verdicts go to standard output as they are known."""
    summary = Summary()
    waiting: deque[tuple[Stored, asyncio.Future[dict[str, Any]]]] = deque()

    async def settle() -> None:
        stored, future = waiting.popleft()
        new = await future
        changed = differs(stored.verdict, new)
        summary.add(stored, new, changed)
        if changed:
            sys.stdout.write(printable(_told(stored, new)) + "\n")
        if out is not None and (changed or not only_changed):
            out.write(json.dumps(_row(stored, new, changed)) + "\n")

    await service.start()
    try:
        for stored in read_all(files):
            waiting.append((stored, service.submit(stored.request)))
            if len(waiting) >= in_flight:
                await settle()
        while waiting:
            await settle()
    finally:
        await service.close()
    return summary


def differs(old: dict[str, Any], new: dict[str, Any]) -> bool:
    """Whether two verdicts differ in more than their wording."""
    return any(not _alike(old[key], new[key]) for key in _JUDGED)


def _alike(one: Any, other: Any) -> bool:
    if isinstance(one, dict) and isinstance(other, dict):
        return one.keys() == other.keys() and all(_alike(one[key], other[key]) for key in one)
    if any(isinstance(value, bool) or not isinstance(value, (int, float)) for value in (one, other)):
        return bool(one == other and isinstance(one, bool) == isinstance(other, bool))
    return math.isclose(one, other, rel_tol=0.0, abs_tol=_SAME)


def _row(stored: Stored, new: dict[str, Any], changed: bool) -> dict[str, Any]:
    where = {"id": stored.request.id, "step": stored.step, "task": stored.request.task}
    where |= {"file": stored.file, "line": stored.line}
    return {**where, "changed": changed, "old": stored.verdict, "new": new}


def _told(stored: Stored, new: dict[str, Any]) -> str:
    """One line on a changed verdict."""
    old = stored.verdict
    step = "" if stored.step is None else f"step {stored.step}, "
    changes = [
        f"{key} {_short(old[key])} -> {_short(new[key])}"
        for key in (*_JUDGED, "detail")
        if not _alike(old[key], new[key])
    ]
    return f"{stored.request.id} ({step}{stored.request.task}, {stored.file}:{stored.line}): {'; '.join(changes)}"


def _short(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:.6g}"
    text = json.dumps(value, ensure_ascii=False)
    return text if len(text) <= 120 else text[:117] + '..."'


@dataclass
class _Counts:
    """Of one task; sums of scores are over verdicts that have one."""

    same: int = 0
    reworded: int = 0
    changed: int = 0
    up: int = 0
    down: int = 0
    newly_failed: int = 0
    old: list[float] = field(default_factory=list)
    new: list[float] = field(default_factory=list)


@dataclass
class Summary:
    """What became of the verdicts, by task."""

    tasks: dict[str, _Counts] = field(default_factory=dict)

    def add(self, stored: Stored, new: dict[str, Any], changed: bool) -> None:
        counts, old = self.tasks.setdefault(stored.request.task, _Counts()), stored.verdict
        counts.changed += changed
        counts.same += not changed
        counts.reworded += not changed and old["detail"] != new["detail"]
        counts.newly_failed += old["failure"] is None and new["failure"] is not None
        counts.old += [] if old["score"] is None else [old["score"]]
        counts.new += [] if new["score"] is None else [new["score"]]
        if old["score"] is not None and new["score"] is not None:
            counts.up += new["score"] > old["score"] + _SAME
            counts.down += new["score"] < old["score"] - _SAME

    def lines(self) -> list[str]:
        """A table; `reworded` are those among `same` whose detail differs."""
        heads = ("same", "reworded", "changed", "up", "down", "newly failed", "mean before", "mean after")
        lines = [f"{'task':<16}" + "".join(f"{head:>13}" for head in heads)]
        for task, counts in sorted(self.tasks.items()):
            numbers = (counts.same, counts.reworded, counts.changed, counts.up, counts.down, counts.newly_failed)
            cells = [*map(str, numbers), _mean(counts.old), _mean(counts.new)]
            lines.append(f"{task:<16}" + "".join(f"{cell:>13}" for cell in cells))
        return lines


def _mean(scores: list[float]) -> str:
    return f"{sum(scores) / len(scores):.4f}" if scores else "-"
