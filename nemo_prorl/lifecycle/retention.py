"""Retention of checkpoints, and the possible names of their folders.

step-000040          complete
step-000040.tmp      being written, or left by a killed process: never loaded
step-000040.old      complete; removed once its replacement exists, otherwise `clean` renames it
step-000040.trash    being removed: never loaded
step-000040.damaged  set aside by a user or a job: never loaded, never removed
"""

import contextlib
import hashlib
import json
import logging
import os
import shutil
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from nemo_prorl import __version__
from nemo_prorl.errors import DAMAGED, CheckpointError, DamagedCheckpoint, json_fault
from nemo_prorl.files import TEMPORARY
from nemo_prorl.lifecycle.killpoints import killpoint

_log = logging.getLogger(__name__)

FORMAT: Literal[5] = 5  # format of state.json and the files next to it
_READABLE = 4, FORMAT  # in format 4, state.json held the groups: its weights can be used, but no run continues from it
OLD, TRASH = ".old", ".trash"


@dataclass(frozen=True)
class Saved:
    """A complete checkpoint: its step, its size in bytes, and the validation score of its policy, if there is one."""

    step: int
    bytes: int
    score: float | None = None


def step_folder(checkpoints: Path, step: int) -> Path:
    return checkpoints / f"step-{step:06d}"


def step_of(folder: Path) -> int:
    return int(folder.stem.rpartition("-")[2])


def complete(checkpoints: Path) -> list[Path]:
    """Return the complete checkpoints of a run, oldest first."""
    return sorted(p for p in checkpoints.glob("step-*") if p.suffix == "" and (p / "state.json").is_file())


def read_state(folder: Path) -> dict[str, Any]:
    """Return state.json of a checkpoint.

    Raises CheckpointError if this code cannot continue it, DamagedCheckpoint if the file cannot be read.
    """
    try:
        state: dict[str, Any] = json.loads((folder / "state.json").read_text())
    except FileNotFoundError as e:
        raise CheckpointError(f"{folder} is not a complete checkpoint: it has no state.json") from e
    except (OSError, ValueError) as e:
        raise DamagedCheckpoint(folder, f"{folder / 'state.json'} cannot be read: {json_fault(e)}") from e
    if state.get("format") not in _READABLE:
        raise CheckpointError(
            f"{folder}/state.json: format={state.get('format')!r}: expected {FORMAT}. Fix: use the version of"
            " nemo_prorl that wrote the checkpoint"
        )
    return state


def newest_state(run_dir: Path) -> dict[str, Any]:
    """Return the state in a run's newest checkpoint; {} if there is none, or if it cannot be read."""
    own = complete(run_dir / "checkpoints")
    try:
        return read_state(own[-1]) if own else {}
    except CheckpointError:  # the start of the run reports it
        return {}


def check_continuable(folder: Path) -> None:
    """Raise CheckpointError if this version cannot continue from the checkpoint `folder`."""
    state = read_state(folder)
    written, this = f"{state.get('version')}, format {state['format']}", f"{__version__}, format {FORMAT}"
    if written != this:
        raise CheckpointError(
            f"{folder} was written by version {written}; this is {this}. Fix: continue with that version, or start"
            f" another run from it: run_dir=OTHER chain.start_from={folder}"
        )


def read_file(folder: Path, name: str, state: Mapping[str, Any]) -> bytes:
    """Return the content of a file beside state.json.

    Args:
        state: content of state.json, with the file's sha256 in `files`.

    Raises DamagedCheckpoint if the file cannot be read, or was changed after the save.
    """
    try:
        data = (folder / name).read_bytes()
    except OSError as e:
        raise DamagedCheckpoint(folder, f"{folder / name} cannot be read: {e.strerror}") from e
    if (sha256 := hashlib.sha256(data).hexdigest()) != (expected := state["files"][name]):
        raise DamagedCheckpoint(
            folder, f"{folder / name} was changed after the save: expected sha256 {expected}; got {sha256}"
        )
    return data


def to_remove(
    saved: Collection[Saved], newest: int, best: int, budget: int | None, needed: Collection[int] = ()
) -> list[int]:
    """Return the steps whose checkpoints are to be removed, oldest first.

    The newest checkpoint is always kept.  Others are kept in the order `needed`, `best`, `newest`,
    up to the first that exceeds `budget`.

    Args:
        newest: number of newest checkpoints to keep.
        best: number of checkpoints with the highest scores to keep; of equal scores, the later.
        budget: maximum bytes of all kept checkpoints; None for no limit.
        needed: steps to keep for a possible roll-back.
    """
    by_step = sorted(saved, key=lambda s: s.step, reverse=True)
    scored = [s for s in by_step if s.score is not None]
    ranking = sorted(scored, key=lambda s: (s.score, s.step), reverse=True)
    wanted = [*by_step[:1], *(s for s in by_step if s.step in needed), *ranking[:best], *by_step[:newest]]
    kept: dict[int, Saved] = {}
    total = 0
    for checkpoint in wanted:
        if checkpoint.step in kept:
            continue
        total += checkpoint.bytes
        if kept and budget is not None and total > budget:
            break
        kept[checkpoint.step] = checkpoint
    return sorted(s.step for s in saved if s.step not in kept)


def size_of(folder: Path) -> int:
    """Return the total size of all files in a folder, in bytes."""
    return sum(file.stat().st_size for file in folder.rglob("*") if file.is_file())


def retain(
    checkpoints: Path,
    scores: Mapping[int, float],
    newest: int,
    best: int,
    budget: int | None,
    needed: Collection[int] = (),
) -> list[int]:
    """Remove checkpoints that need not stay (see `to_remove`) and leftovers of killed processes.

    Checkpoints that `prorl fork` continues (RUN/forks/STEP exists) are needed, too.
    Only the process that writes the run's checkpoints may call this, while it writes none.

    Returns:
        the removed steps.
    """
    clean(checkpoints)
    folders = {step_of(folder): folder for folder in complete(checkpoints)}
    saved = [Saved(step, size_of(folder), scores.get(step)) for step, folder in folders.items()]
    forked = [step for step in folders if (checkpoints.parent / "forks" / str(step)).is_dir()]
    steps = to_remove(saved, newest, best, budget, [*needed, *forked])
    kept = sum(s.bytes for s in saved if s.step not in steps)
    if budget is not None and kept > budget:
        _log.warning(
            "the newest checkpoint alone has %d bytes, more than trainer.grpo.checkpoint_budget_gb (%d bytes)",
            kept,
            budget,
        )
    remove([folders[step] for step in steps])
    return steps


def remove(folders: Sequence[Path]) -> None:
    """Remove checkpoints.  Each is renamed first, so that no incomplete one has a valid name."""
    for folder in folders:
        trash = folder.with_name(folder.name + TRASH)
        shutil.rmtree(trash, ignore_errors=True)
        os.replace(folder, trash)
        shutil.rmtree(trash, ignore_errors=True)


def clean(checkpoints: Path) -> None:
    """Remove unfinished and partly removed checkpoints, and rename an `.old` one back if its replacement is missing.

    Only the process that writes the run's checkpoints may call this, while it writes none.
    """
    for folder in sorted(checkpoints.glob("step-*")):
        if folder.suffix == OLD and not folder.with_suffix("").exists():
            os.replace(folder, folder.with_suffix(""))
        elif folder.suffix in (TEMPORARY, TRASH, OLD):
            shutil.rmtree(folder, ignore_errors=True)


def set_aside(folder: Path) -> bool:
    """In a Slurm job, rename a damaged checkpoint if a complete one is before it; return whether it is set aside.

    Several processes may call this: the first one renames.
    """
    if "SLURM_JOB_ID" not in os.environ:
        return False
    if folder.is_dir() and complete(folder.parent)[:1] in ([], [folder]):
        return False
    with contextlib.suppress(FileNotFoundError):
        os.replace(folder, f"{folder}{DAMAGED}")
    _log.error("%s is damaged; it is now %s%s", folder, folder.name, DAMAGED)
    return True


def damaged_after(checkpoints: Path, step: int) -> list[Path]:
    """Return the checkpoints of later steps that were set aside."""
    return sorted(path for path in checkpoints.glob(f"step-*{DAMAGED}") if step_of(path.with_suffix("")) > step)


def put_in_place(temporary: Path, folder: Path) -> None:
    """Give a written checkpoint its final name; replace an existing checkpoint of the same step.

    A kill at any moment leaves the old or the new checkpoint complete on disk.
    """
    old = folder.with_name(folder.name + OLD)
    if folder.exists():  # the same step again: a hard reset, a trial or a repeated validation
        shutil.rmtree(old, ignore_errors=True)
        os.replace(folder, old)
        killpoint("checkpoint:exchange")
    os.replace(temporary, folder)
    shutil.rmtree(old, ignore_errors=True)
