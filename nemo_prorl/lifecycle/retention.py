"""Which checkpoints of a run stay, and the names that a folder of theirs can have.

step-000040          complete
step-000040.tmp      being written, or left by a killed process: never loaded
step-000040.old      complete; a new one of the same step is about to take its place (else `clean` gives it back)
step-000040.trash    being removed: never loaded
"""

import json
import logging
import os
import shutil
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from nemo_prorl import __version__
from nemo_prorl.errors import CheckpointError
from nemo_prorl.lifecycle.killpoints import killpoint

_log = logging.getLogger(__name__)

FORMAT: Literal[4] = 4  # of state.json and of what lies beside it
TEMPORARY, OLD, TRASH = ".tmp", ".old", ".trash"


@dataclass(frozen=True)
class Saved:
    """A complete checkpoint: its step, its size, and the validation score of its policy, if there is one."""

    step: int
    bytes: int
    score: float | None = None


def step_folder(checkpoints: Path, step: int) -> Path:
    return checkpoints / f"step-{step:06d}"


def step_of(folder: Path) -> int:
    return int(folder.stem.removeprefix("step-"))


def complete(checkpoints: Path) -> list[Path]:
    """The complete checkpoints of a run, oldest first."""
    found = checkpoints.glob("step-*")
    return sorted(p for p in found if p.suffix == "" and (p / "state.json").is_file())


def check_format(folder: Path, state: Mapping[str, Any]) -> None:
    """Raises CheckpointError for a checkpoint whose state.json says another format than this code's."""
    if state.get("format") != FORMAT:
        raise CheckpointError(f"{folder}: format {state.get('format')!r}, this version continues format {FORMAT} only")


def read_state(folder: Path) -> dict[str, Any]:
    """Return state.json of a checkpoint.  Raises CheckpointError where this code cannot continue it."""
    try:
        state: dict[str, Any] = json.loads((folder / "state.json").read_text())
    except (OSError, ValueError) as e:
        raise CheckpointError(f"{folder} is no checkpoint: {e}") from e
    check_format(folder, state)
    return state


def check_continuable(folder: Path) -> None:
    """Raises CheckpointError, in time for a start to cost nothing, if a run cannot go on from its checkpoint."""
    state = read_state(folder)
    if state.get("version") != __version__:
        raise CheckpointError(f"{folder} was written by version {state.get('version')}; this is {__version__}")


def to_remove(
    saved: Collection[Saved], newest: int, best: int, budget: int | None, needed: Collection[int] = ()
) -> list[int]:
    """The steps whose checkpoints go, oldest first.

    Kept are, most important first: the newest, whatever its size; the `needed` ones (of a possible roll-back); the
    `best` with the highest scores (the later of equal ones); the `newest` newest.  `budget` bounds the bytes of all of
    them: from the first that does not fit, what is less important goes.
    """
    by_step = sorted(saved, key=lambda s: s.step, reverse=True)
    scored = [(s.score, s.step, s) for s in by_step if s.score is not None]
    ranking = [s for _, _, s in sorted(scored, key=lambda x: x[:2], reverse=True)]
    wanted = [*by_step[:1], *(s for s in by_step if s.step in needed), *ranking[:best], *by_step[:newest]]
    kept: dict[int, Saved] = {}
    total = 0
    for one in wanted:
        if one.step in kept:
            continue
        total += one.bytes
        if kept and budget is not None and total > budget:
            break
        kept[one.step] = one
    return sorted(s.step for s in saved if s.step not in kept)


def size_of(folder: Path) -> int:
    """Bytes of all files below a folder."""
    return sum(file.stat().st_size for file in folder.rglob("*") if file.is_file())


def retain(
    checkpoints: Path,
    scores: Mapping[int, float],
    newest: int,
    best: int,
    budget: int | None,
    needed: Collection[int] = (),
) -> list[int]:
    """Removes what need not stay (see `to_remove`) and what killed processes left; the steps removed.

    For the one process that writes the run's checkpoints, while it writes none.
    """
    clean(checkpoints)
    folders = {step_of(folder): folder for folder in complete(checkpoints)}
    saved = [Saved(step, size_of(folder), scores.get(step)) for step, folder in folders.items()]
    steps = to_remove(saved, newest, best, budget, needed)
    kept = sum(s.bytes for s in saved if s.step not in steps)
    if budget is not None and kept > budget:
        _log.warning("the newest checkpoint alone has %d bytes, more than the budget of %d", kept, budget)
    remove([folders[step] for step in steps])
    return steps


def remove(folders: Sequence[Path]) -> None:
    """Removes checkpoints; killed in between, it leaves nothing half under a complete one's name."""
    for folder in folders:
        trash = folder.with_name(folder.name + TRASH)
        shutil.rmtree(trash, ignore_errors=True)
        os.replace(folder, trash)
        shutil.rmtree(trash, ignore_errors=True)


def clean(checkpoints: Path) -> None:
    """Ends what killed processes left half done: for the one writer of these checkpoints, while it writes none.

    Removes unfinished and half removed checkpoints; one set aside for another of its step, which never came, returns.
    """
    for folder in sorted(checkpoints.glob("step-*")):
        if folder.suffix == OLD and not folder.with_suffix("").exists():
            os.replace(folder, folder.with_suffix(""))
        elif folder.suffix in (TEMPORARY, TRASH, OLD):
            shutil.rmtree(folder, ignore_errors=True)


def put_in_place(temporary: Path, folder: Path) -> None:
    """Gives a written checkpoint its own name, also where one of the same step stands: one of the two always counts."""
    old = folder.with_name(folder.name + OLD)
    if folder.exists():  # the same step again, after a run lost its later metrics
        shutil.rmtree(old, ignore_errors=True)
        os.replace(folder, old)
        killpoint("checkpoint:exchange")
    os.replace(temporary, folder)
    shutil.rmtree(old, ignore_errors=True)
