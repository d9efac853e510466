"""The command `prorl reverify`, which judges stored rollouts again with the installed plugins and reports differences.

Each line of `rollouts/step-N.jsonl` is a reward request with its `verdict`.  Without `--settings`, the settings of the
plugins are read from the run's config.yaml, if it exists.
"""

import argparse
import asyncio
import contextlib
import json
import logging
import math
import sys
from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, TextIO

from nemo_prorl.config import RewardsConfig
from nemo_prorl.errors import ConfigError, DataError
from nemo_prorl.files import shortened, step_files, step_of_file
from nemo_prorl.rewards.discovery import discover
from nemo_prorl.rewards.functions import settings_of
from nemo_prorl.rewards.interface import RewardRequest, Verdict, read_verdict
from nemo_prorl.rewards.judging import RewardService, pool_specs
from nemo_prorl.rewards.options import add_settings, add_unsafe, opened, printable, read_lines

_log = logging.getLogger(__name__)

_TOLERANCE = 1e-9  # maximum difference of equal scores
_JUDGED = ("score", "correct", "parts", "failure")  # a verdict has changed if one of these fields differs


@dataclass(frozen=True)
class Stored:
    """One stored response with its former verdict."""

    file: str
    line: int
    step: int | None  # None: the file is not named step-N.jsonl
    request: RewardRequest
    verdict: Verdict


def add_parser(commands: Any) -> None:
    """Add the command `reverify` to the main command line."""
    text = "judge the stored rollouts of a run again, and report which verdicts changed"
    parser = commands.add_parser("reverify", help=text, description=text)
    parser.add_argument("source", metavar="RUN_OR_FILE", type=Path, help="a run directory, or a file of its rollouts/")
    workers = "worker processes, divided among the plugins; default: 1"
    parser.add_argument("--workers", type=int, default=1, help=workers)
    add_unsafe(parser)
    add_settings(parser, default=None)
    out = "JSON Lines file to write: id, step, task, changed, old and new verdict; default: none"
    parser.add_argument("--out", default="", help=out)
    parser.add_argument("--only-changed", action="store_true", help="write only changed verdicts to --out")
    parser.set_defaults(run_command=run)


def run(args: argparse.Namespace) -> int:
    """Run the command and return 0, even if verdicts changed.

    Raises:
        DataError: A file or line is wrong; the message names file, line and field.  No worker was started.
        ConfigError: No installed plugin judges the task of a response, or --only-changed is given without --out.
    """
    if args.only_changed and not args.out:
        raise ConfigError("--only-changed: expected together with --out FILE, to which it applies")
    files = rollout_files(args.source)
    summary = judge_again(
        files,
        args.workers,
        settings=args.settings,
        unsafe_no_sandbox=args.unsafe_no_sandbox,
        out=args.out,
        only_changed=args.only_changed,
    )
    sys.stdout.write("\n".join(summary.lines()) + "\n")
    return 0


def judge_again(
    files: list[Path],
    workers: int = 1,
    settings: dict[str, Any] | None = None,
    unsafe_no_sandbox: bool = False,
    out: str = "",
    only_changed: bool = False,
) -> "Summary":
    """Judge the responses of rollout files again, print each changed verdict, and return the counts.

    Args:
        settings: of the plugins; None: those of the run that wrote the files.
        out: file to which old and new verdicts are written; empty: none.

    Raises as `run`.
    """
    tasks = sorted({stored.request.task for stored in read_all(files)})
    if not tasks:
        raise DataError(f"{files[0]}: contains no response; see trainer.grpo.save_rollout_groups")
    configured = _rewards_of(files[0], settings is None)
    configured = asdict(RewardsConfig()) | configured | ({} if settings is None else {"plugins": settings})
    registry = discover(functions=configured["functions"])
    if missing := [task for task in tasks if task not in registry.tasks()]:
        raise ConfigError(f"{registry.unknown(missing[0])}. Fix: install the plugin that judged these responses")
    specs = pool_specs(registry, tasks, workers, settings_of(configured), unsafe_no_sandbox=unsafe_no_sandbox)
    with opened(out) if out else contextlib.nullcontext() as file:
        return asyncio.run(_judge_all(RewardService(specs, registry), files, workers, file, only_changed))


# --- what is stored --------------------------------------------------------------------------------------------------


def rollout_files(source: Path) -> list[Path]:
    """Return the rollout files of a run in the order of steps, or `source` itself if it is not a folder.

    Raises:
        DataError: The folder contains no rollout file.
    """
    if not source.is_dir():
        return [source]
    folder = source / "rollouts" if (source / "rollouts").is_dir() else source
    files = list(step_files(folder).values())
    if not files:
        raise DataError(f"{source}: contains no rollouts/step-N.jsonl; see trainer.grpo.save_rollout_groups")
    return files


def _rewards_of(file: Path, needed: bool) -> dict[str, Any]:
    """Return the section `rewards` in the config.yaml of the run that wrote a rollout file; {} without config.yaml.

    Args:
        needed: True: raise ConfigError if the section cannot be read.  False: return {} in this case.
    """
    path = file.absolute().parent.parent / "config.yaml"
    if not path.is_file():
        return {}
    import yaml

    try:
        rewards: dict[str, Any] = yaml.safe_load(path.read_text())["rewards"]
        settings = rewards["plugins"]
    except (yaml.YAMLError, OSError, KeyError, TypeError) as error:
        if not needed:
            return {}
        raise ConfigError(f"{path}: rewards.plugins cannot be read ({error}).  Fix: give --settings") from error
    if settings and needed:
        _log.info("using the plugin settings of %s: %s", path, json.dumps(settings))
    return rewards


def read_all(files: list[Path]) -> Iterator[Stored]:
    """Yield the lines of all files.  Raises DataError that names file, line and field."""
    for path in files:
        for number, (request, verdict) in read_lines(path, _request_and_verdict):
            yield Stored(str(path), number, step_of_file(path), request, verdict)


def _request_and_verdict(obj: Any) -> tuple[RewardRequest, Verdict]:
    request = RewardRequest.from_json(obj)
    return request, read_verdict(obj.get("verdict"), request.id)


# --- judging again ---------------------------------------------------------------------------------------------------


async def _judge_all(
    service: RewardService, files: list[Path], workers: int, out: TextIO | None, only_changed: bool
) -> "Summary":
    """Judge all responses in order, print each changed verdict once it is known, and return the counts.

    `out`: file to which old and new verdicts are written; None: no file.  `only_changed`: write only changed verdicts.
    """
    summary = Summary()
    try:
        await service.start()
        async for stored, new in service.in_order(read_all(files), lambda stored: stored.request, workers):
            changed = differs(stored.verdict, new)
            summary.add(stored.request.task, stored.verdict, new, changed)
            if changed:
                sys.stdout.write(printable(_change_line(stored, new)) + "\n")
            if out is not None and (changed or not only_changed):
                out.write(json.dumps(_row(stored, new, changed)) + "\n")
    finally:
        await service.close()
    return summary


def differs(old: Mapping[str, Any], new: Mapping[str, Any]) -> bool:
    """Return whether two verdicts differ in a field other than id and detail."""
    return any(not _alike(old[key], new[key]) for key in _JUDGED)


def _alike(first: Any, second: Any) -> bool:
    if isinstance(first, dict) and isinstance(second, dict):
        return first.keys() == second.keys() and all(_alike(first[key], second[key]) for key in first)
    if any(isinstance(value, bool) or not isinstance(value, (int, float)) for value in (first, second)):
        return bool(first == second and isinstance(first, bool) == isinstance(second, bool))
    return math.isclose(first, second, rel_tol=0.0, abs_tol=_TOLERANCE)


def _row(stored: Stored, new: Verdict, changed: bool) -> dict[str, Any]:
    where = {"id": stored.request.id, "step": stored.step, "task": stored.request.task}
    where |= {"file": stored.file, "line": stored.line}
    return {**where, "changed": changed, "old": stored.verdict, "new": new}


def _change_line(stored: Stored, new: Verdict) -> str:
    old: Mapping[str, Any] = stored.verdict
    after: Mapping[str, Any] = new
    step = "" if stored.step is None else f"step {stored.step}, "
    changes = [
        f"{key} {_short(old[key])} -> {_short(after[key])}"
        for key in (*_JUDGED, "detail")
        if not _alike(old[key], after[key])
    ]
    return f"{stored.request.id} ({step}{stored.request.task}, {stored.file}:{stored.line}): {'; '.join(changes)}"


def _short(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:.6g}"
    return shortened(json.dumps(value, ensure_ascii=False), 120)


_HEADS = ("same", "reworded", "changed", "up", "down", "newly failed", "mean before", "mean after")


class Summary:
    """A table of unchanged and changed verdicts by task.  Mean scores are over the verdicts that have a score."""

    def __init__(self) -> None:
        self._counts: defaultdict[str, defaultdict[str, float]] = defaultdict(lambda: defaultdict(float))

    @property
    def changed(self) -> int:
        """Return the number of changed verdicts."""
        return sum(int(counts["changed"]) for counts in self._counts.values())

    def add(self, task: str, old: Verdict, new: Verdict, changed: bool) -> None:
        """Count one response of a task as "changed" or "same".

        A "same" response also counts as "reworded" if the detail of its new verdict differs from the old detail.
        """
        counts = self._counts[task]
        counts["changed" if changed else "same"] += 1
        counts["reworded"] += not changed and old["detail"] != new["detail"]
        counts["newly failed"] += old["failure"] is None and new["failure"] is not None
        for key, score in (("before", old["score"]), ("after", new["score"])):
            if score is not None:
                counts[f"scores {key}"] += 1
                counts[f"sum {key}"] += score
        if old["score"] is not None and new["score"] is not None:
            counts["up"] += new["score"] > old["score"] + _TOLERANCE
            counts["down"] += new["score"] < old["score"] - _TOLERANCE

    def lines(self) -> list[str]:
        """Return the table as lines of text: a header, then one line per task."""
        lines = [f"{'task':<16}" + "".join(f"{head:>13}" for head in _HEADS)]
        for task, counts in sorted(self._counts.items()):
            cells = [f"{counts[head]:.0f}" for head in _HEADS[:6]]
            for key in ("before", "after"):
                count = counts[f"scores {key}"]
                cells.append(f"{counts[f'sum {key}'] / count:.4f}" if count else "-")
            lines.append(f"{task:<16}" + "".join(f"{cell:>13}" for cell in cells))
        return lines
