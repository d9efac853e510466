"""Choice of a run's checkpoint: the one from which a stage begins (paper sec. 4.2), or the one that a command names.

`rank.begin_stage` begins the stage from that checkpoint.
"""

import logging
import os
import re
import shutil
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from nemo_prorl.algorithms.reset_rules import best_policy, policy_scores
from nemo_prorl.config import Config
from nemo_prorl.errors import ConfigError
from nemo_prorl.files import TEMPORARY, new_folder, read_object
from nemo_prorl.lifecycle.retention import OLD, TRASH, complete, read_state, step_of

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Origin:
    """The checkpoint from which a stage begins, and the run directory of this checkpoint (None: outside of a run)."""

    checkpoint: Path
    run_dir: Path | None
    newest: Path  # the stage continues the data position of this checkpoint: the newest of run_dir, or `checkpoint`


def origin(cfg: Config, run_dir: Path) -> Origin | None:
    """Return the checkpoint from which this stage begins, or None if it begins with the initial model.

    `chain.start_from` names a checkpoint or a run directory.  If it is null, `chain.after` names a
    run directory next to `run_dir`.  From a run directory, the newest checkpoint is used; with
    `trainer.resets.roll_back`, the checkpoint of the best validation.

    Raises:
        ConfigError: the checkpoint is missing or incomplete, or the previous run is not finished.
    """
    chain, start_from = cfg.chain, cfg.chain.start_from
    if start_from is None and chain.after is None:
        return None
    folder = Path(start_from) if start_from is not None else run_dir.parent / str(chain.after)
    if (folder / "state.json").is_file() and folder.suffix in (TEMPORARY, OLD, TRASH):
        raise ConfigError(
            f"chain.start_from={start_from}: a {folder.suffix} folder is not a complete checkpoint."
            f" Fix: chain.start_from={folder.with_suffix('')}"
        )
    if (folder / "state.json").is_file():
        run = folder.parent.parent
        return Origin(folder, run if (run / "config.yaml").is_file() else None, folder)
    key = f"chain.start_from={start_from}" if start_from is not None else f"stage={cfg.stage}"
    if not (folder / "config.yaml").is_file():
        fault = "is neither a run directory nor a checkpoint"
        if start_from is None:
            fault = f"follows {chain.after}, and there is no run in {folder}"
        if left := complete(folder.parent) or complete(folder.parent / "checkpoints"):
            names = ", ".join(path.name for path in left)
            raise ConfigError(
                f"{key}: this checkpoint does not exist or is not complete; {left[-1].parent} has {names}."
                f" Fix: chain.start_from={left[-1]}"
            )
        raise ConfigError(
            f"{key}: {fault}. Fix: train the previous stage first; or name its run directory or one of its checkpoints"
            " with chain.start_from=PATH; or begin with the initial model: chain.start_from=null chain.after=null"
        )
    checkpoints = complete(folder / "checkpoints")
    summary = read_object(folder / "summary.json") or {}
    if not summary.get("finished") or not checkpoints:
        names = ", ".join(path.name for path in checkpoints)
        there = f"it has {names}" if checkpoints else "it has no checkpoint"
        instead = f", or begin from a checkpoint: chain.start_from={checkpoints[-1]}" if checkpoints else ""
        raise ConfigError(f"{key}: the run in {folder} is not finished; {there}. Fix: finish it{instead}")
    newest = checkpoints[-1]
    if step_of(newest) != summary["step"]:
        raise ConfigError(
            f"{key}: expected a checkpoint of step {summary['step']}, the last step of the run in {folder}; its newest"
            f" checkpoint is {newest}. Fix: begin from that checkpoint: chain.start_from={newest}"
        )
    return Origin(best_checkpoint(folder) if cfg.trainer.resets.roll_back else newest, folder, newest)


def best_checkpoint(run_dir: Path) -> Path:
    """Return the checkpoint of the best validation since the last hard reset, or the newest."""
    checkpoints = {step_of(p): p for p in complete(run_dir / "checkpoints")}
    newest = checkpoints[max(checkpoints)]
    state = read_state(newest)
    best = best_policy(state["validation"]["scores"], state["resets"]["done"], checkpoints)
    return newest if best is None else checkpoints[best]


def chosen_checkpoint(run_dir: Path, which: str) -> Path:
    """Return the checkpoint of a run directory that a command's `--checkpoint` names.

    Args:
        which: newest; best: the best validation of all kept checkpoints, of equal ones the newest; or a step.

    Raises:
        ConfigError: the run directory does not have this checkpoint.
        CheckpointError: the newest checkpoint, which has the scores, is damaged or has another format.
    """
    checkpoints = {str(step_of(folder)): folder for folder in complete(run_dir / "checkpoints")}
    if not checkpoints:
        raise ConfigError(f"{run_dir}: expected a run directory with a complete checkpoint; it has none")
    *_, newest = checkpoints.values()
    steps = ", ".join(checkpoints)
    if which == "newest":
        return newest
    if which == "best":
        state = read_state(newest)
        scores = policy_scores(state["validation"]["scores"], state["resets"]["done"])
        judged = [(score, step) for step, score in scores.items() if str(step) in checkpoints]
        if not judged:
            raise ConfigError(
                f"--checkpoint=best: expected a validated checkpoint; none of the steps {steps} of {run_dir} was"
                " validated. Fix: --checkpoint newest, or a step"
            )
        best, chosen = max(zip(scores.values(), scores, strict=True)), max(judged)
        if best[0] > chosen[0]:
            _log.warning(
                "--checkpoint=best is step %d (held-out %.3f); step %d was better (%.3f), and has no checkpoint",
                *(chosen[1], chosen[0], best[1], best[0]),
            )
        return checkpoints[str(chosen[1])]
    if which not in checkpoints:
        raise ConfigError(f"--checkpoint={which}: expected newest, best, or one of the steps {steps} of {run_dir}")
    return checkpoints[which]


def begun_from(events: Iterable[Mapping[str, Any]]) -> str | None:
    """Return the checkpoint from which a stage began, such as `run3, step 180`; None if it began with a model.

    Args:
        events: the lines of its journal.jsonl.
    """
    starts = (e["start_from"] for e in events if e["event"] in ("start", "resume") and e.get("start_from"))
    if (checkpoint := next((str(path) for path in starts), None)) is None:
        return None
    if match := re.fullmatch(r"(?:.*/)?([^/]+)/checkpoints/step-(\d{1,15})/?", checkpoint):
        return f"{match[1]}, step {int(match[2])}"
    return "/".join(checkpoint.split("/")[-3:])


def last_end(events: Sequence[Mapping[str, Any]]) -> Mapping[str, Any] | None:
    """Return the event with which the last process of a run ended; None if it still runs or was killed."""
    kinds = ("start", "resume", "stop", "failure", "finish")
    last = next((event for event in reversed(events) if event["event"] in kinds), None)
    return None if last is None or last["event"] in ("start", "resume") else last


def stop_requested(events: Sequence[Mapping[str, Any]]) -> str | None:
    """Return who stopped the run with `prorl control`, as user@host; None if its last process did not end so."""
    end = last_end(events)
    if end is None or end["event"] != "stop":
        return None
    for event in reversed(events):
        if event["event"] == "control" and f"control {event.get('request')}" in str(end.get("reason")):
            return f"{event.get('user')}@{event.get('host')}"
    return None


def end_text(events: Sequence[Mapping[str, Any]]) -> str:
    """Return `done`, `stopped by USER@HOST` (with `prorl control`), `stopped`, `failed` or `not ended`."""
    end = last_end(events)
    if who := stop_requested(events):
        return f"stopped by {who}"
    words = {"finish": "done", "stop": "stopped", "failure": "failed"}
    return "not ended" if end is None else words[end["event"]]


def take_over_model(source: Path, folder: Path) -> None:
    """Copy the files of `source` to the new folder `folder`, with hard links where possible."""
    with new_folder(folder) as temporary:
        for file in source.iterdir():
            if file.is_file():
                try:
                    os.link(file, temporary / file.name)
                except OSError:
                    shutil.copyfile(file, temporary / file.name)
