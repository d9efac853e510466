"""Trials of hard resets (`trainer.resets.mode=trial`): a reset that loses is not made.

Where the rules or the schedule ask for a reset after step K, the run goes on twice from there: without the reset (arm
`none`), and then, from the checkpoint of step K, with it (arm `reset`), `trial_steps` steps each.  Both arms draw the
same prompts with the same seeds and validate the same held-out prompts.  The run continues from the end of the winner,
as if there had been no other arm.

    RUN/trials/step-K/none/         records and checkpoints of the arm without the reset, while the other one trains
    RUN/trials/step-K/reset/        records of the arm with the reset, if it lost
    RUN/trials/step-K/result.json   the decision (`TrialResult`)

A checkpoint says which arm it belongs to, and each move of files can be repeated, so a killed run goes on with its
trial, whatever it was at.
"""

import logging
import os
import re
import shutil
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from nemo_prorl.algorithms.paired import PairedDifference, look
from nemo_prorl.config import Config
from nemo_prorl.files import TEMPORARY, new_file, read_object, read_objects, write_json
from nemo_prorl.leader import Leader
from nemo_prorl.lifecycle import retention
from nemo_prorl.lifecycle.checkpoints import Checkpoints
from nemo_prorl.lifecycle.journal_events import TrialResult
from nemo_prorl.lifecycle.killpoints import killpoint
from nemo_prorl.lifecycle.ledger import Ledger
from nemo_prorl.lifecycle.resets import Resets, TrialState
from nemo_prorl.lifecycle.run_records import Records
from nemo_prorl.lifecycle.summary import validations_of

_log = logging.getLogger(__name__)

_LINES = "metrics.jsonl", "ledger.jsonl"
_STEP_FILES = "rollouts", "validations", "batches", "disagreements"
_STEP = re.compile(rb'\{"step": (\d+)')
_ALL_MOVED = "moved"  # name of a file: the records in its folder are complete


@dataclass(frozen=True)
class Trials:
    """The trials of a run.  All trainer ranks must call each method together."""

    cfg: Config
    run_dir: Path
    resets: Resets
    checkpoints: Checkpoints
    records: Records
    ledger: Ledger
    leader: Leader

    @property
    def on(self) -> bool:
        return self.cfg.trainer.resets.mode == "trial"

    def begin(self, step: int, reason: str | None) -> bool:
        """Begin a trial after `step` if `reason` asks for a reset and a trial may begin; return whether it does.

        The caller must then write the checkpoint of `step`, from which both arms begin.
        """
        resets, trial = self.cfg.trainer.resets, self.resets.trial
        if not self.on or reason is None or self._running is not None:
            return False
        if trial is not None and step - trial["step"] < resets.trial_every:
            _log.info("no trial after step %d (%s): trainer.resets.trial_every=%d", step, reason, resets.trial_every)
            return False
        if (left := self.cfg.trainer.grpo.max_steps - step) < resets.trial_steps:
            _log.info("no trial after step %d (%s): %d steps are left", step, reason, left)
            return False
        self.leader.call(lambda: shutil.rmtree(self._folder(step), ignore_errors=True))  # of steps that were lost
        self.resets.trial = {"step": step, "reason": reason, "steps": resets.trial_steps, "arm": "none"}
        self.records.event("trial", step, arm="none", reason=reason)
        _log.info("trial after step %d (%s): %d steps without a reset", step, reason, resets.trial_steps)
        return True

    def end_by_request(self, step: int) -> None:
        """End a running trial, because a user has requested a hard reset: the run goes on with the present arm."""
        if (trial := self._running) is not None:
            result: TrialResult = {"winner": "reset", "difference": 0.0, "se": 0.0, "because": "a reset was requested"}
            if trial["arm"] == "none":
                result["winner"] = "none"
            self._note_end(trial, step, result)
            self.leader.call(lambda: retention.remove(retention.complete(self._folder(trial["step"]) / "none")))

    def change_arm(self, step: int) -> None:
        """After `step`: at the end of an arm, go back for the other arm, or continue from the winner."""
        if (trial := self._running) is None:
            return
        result = self.leader.call(partial(self._result, trial, step))
        if result is not None:
            self._continue_from(result, trial, step)
        elif trial["arm"] == "none" and self.leader.call(partial(self._has_arm, trial, step)):
            self._go_back(trial, step)

    @property
    def _running(self) -> TrialState | None:
        return None if self.resets.trial is None or self.resets.trial["arm"] == "over" else self.resets.trial

    def _folder(self, step: int) -> Path:
        return self.run_dir / "trials" / f"step-{step:06d}"

    def _last(self, trial: TrialState) -> int:
        return trial["step"] + trial["steps"]

    # --- the second arm --------------------------------------------------------------------------------------------

    def _has_arm(self, trial: TrialState, step: int) -> bool:
        """Return whether the arm without the reset is complete, here or put away."""
        return step >= self._last(trial) or bool(retention.complete(self._folder(trial["step"]) / "none"))

    def _go_back(self, trial: TrialState, step: int) -> None:
        """Put the arm without the reset away, and make the reset in the state after the trial's first step."""
        begun, arm = trial["step"], self._folder(trial["step"]) / "none"
        self.checkpoints.save(step, wait=True)
        self.ledger.close()
        self.leader.call(lambda: put_away(self.run_dir, arm, begun))
        killpoint("trial:records")
        self.leader.call(lambda: _move_checkpoints(self.checkpoints.folder, arm, begun))
        killpoint("trial:back")
        self.ledger.cut(begun)
        self.records.event("trial", begun, arm="reset", reason=trial["reason"])
        self.checkpoints.load(retention.step_folder(self.checkpoints.folder, begun))
        self.resets.trial = {**trial, "arm": "reset"}
        self.resets.perform(begun, trial["reason"], self.checkpoints)

    # --- the decision ----------------------------------------------------------------------------------------------

    def _result(self, trial: TrialState, step: int) -> TrialResult | None:
        """Return the result of the trial, on rank 0; None if there is none yet."""
        begun, file = trial["step"], self._folder(trial["step"]) / "result.json"
        if (known := read_object(file)) is not None:
            return known  # type: ignore[return-value]
        if trial["arm"] == "none":
            return None
        without = validations_of(self._folder(begun) / "none", begun, self._last(trial))
        with_reset, at_end = validations_of(self.run_dir, begun, step), step >= self._last(trial)
        comparison = look(without, with_reset, self.cfg.trainer.resets.trial_noise)
        shown, decided = comparison or (PairedDifference(0.0, 0.0), False)  # no validation: the file of one is damaged
        if not at_end and not (decided and step in with_reset):
            return None
        because = f"decided after {step - begun} steps" if decided else "no difference is shown"
        result: TrialResult = {
            "winner": "reset" if decided and shown.mean > 0 else "none",
            "difference": shown.mean,
            "se": shown.se,
            "looks": max(1, len(without)),
            "because": because,
        }
        write_json(file, result)
        return result

    def _continue_from(self, result: TrialResult, trial: TrialState, step: int) -> None:
        """Continue from the winner's end.  This may be called again after a kill at any point of an earlier call."""
        begun, folder = trial["step"], self._folder(trial["step"])
        if result["winner"] == "reset":
            self._note_end(trial, step, result)
            self.checkpoints.save(step, wait=True)
            self.leader.call(lambda: retention.remove(retention.complete(folder / "none")))
            return
        # A killed run that resumed from the winner is at its end, or before, if the end was damaged.
        end = step if trial["arm"] == "none" else self._last(trial)
        self.checkpoints.wait()
        self.ledger.close()
        self.leader.call(lambda: put_away(self.run_dir, folder / "reset", begun))
        killpoint("trial:lost")
        self.leader.call(lambda: _bring_checkpoints_back(folder / "none", self.checkpoints.folder, begun))
        killpoint("trial:checkpoints back")
        self.leader.call(lambda: bring_back(self.run_dir, folder / "none", begun))
        killpoint("trial:records back")
        self.ledger.cut(end)
        self.checkpoints.load(retention.step_folder(self.checkpoints.folder, end))
        self._note_end(trial, end, result)
        self.checkpoints.save(end, wait=True)

    def _note_end(self, trial: TrialState, step: int, result: TrialResult) -> None:
        loser = self._folder(trial["step"]) / ("reset" if result["winner"] == "none" else "none")
        lost = self.leader.call(lambda: read_objects(loser / "metrics.jsonl"))
        tokens = int(sum(line.get("rollout/generated_tokens") or 0 for line in lost))
        self.resets.trial = {**trial, "arm": "over"}
        self.records.event("trial_end", step, trial=trial["step"], tokens=tokens, **result)
        text = "trial after step %d: the arm %s wins; with the reset %+.4f +- %.4f held out (%s)"
        _log.info(text, trial["step"], result["winner"], result["difference"], result["se"], result["because"])


# --- files -----------------------------------------------------------------------------------------------------------


def put_away(run_dir: Path, arm: Path, after: int) -> None:
    """Move the records of the steps after `after` to the folder `arm`; does nothing if this was completed before."""
    if (arm / _ALL_MOVED).exists():
        return
    arm.mkdir(parents=True, exist_ok=True)
    for name in _LINES:
        if (file := run_dir / name).exists():
            begin = _offset(file, after)
            if not (arm / name).exists():
                with new_file(arm / name) as temporary, file.open("rb") as lines, temporary.open("wb") as copy:
                    lines.seek(begin)
                    shutil.copyfileobj(lines, copy)
            os.truncate(file, begin)
    for name in _STEP_FILES:
        _move(run_dir / name, arm / name, after)
    (arm / _ALL_MOVED).touch()


def bring_back(run_dir: Path, arm: Path, after: int) -> None:
    """Make the records in the folder `arm` those of the run's steps after `after`; may be repeated."""
    for name in _LINES:
        if (arm / name).exists():
            with (run_dir / name).open("rb+") as file, (arm / name).open("rb") as lines:
                file.truncate(file.seek(_offset(run_dir / name, after)))
                shutil.copyfileobj(lines, file)
    for name in _STEP_FILES:
        _move(arm / name, run_dir / name, after)


def _move(source: Path, target: Path, after: int) -> None:
    for file in (*source.glob("step-*.json*"), *source.glob("*.safetensors")):
        if file.suffix != TEMPORARY and retention.step_of(file) > after:
            target.mkdir(exist_ok=True)
            os.replace(file, target / file.name)


def _offset(file: Path, after: int) -> int:
    """Return the bytes of a JSON Lines file up to the first line of a step after `after`."""
    end = 0
    with file.open("rb") as lines:
        for line in lines:
            step = _STEP.match(line)
            if step is None or int(step[1]) > after:
                break
            end += len(line)
    return end


def _move_checkpoints(checkpoints: Path, arm: Path, after: int) -> None:
    """Move the checkpoints after `after` away, the newest last: until then a resume finds it."""
    for folder in retention.complete(checkpoints):
        if retention.step_of(folder) > after:
            os.replace(folder, arm / folder.name)


def _bring_checkpoints_back(arm: Path, checkpoints: Path, after: int) -> None:
    """Replace the checkpoints from `after` on by those of `arm`, the newest first: a resume then finds it.

    The checkpoint of step `after` has the reset, so it goes, too.
    """
    kept = retention.complete(arm)
    if kept:
        retention.remove([f for f in reversed(retention.complete(checkpoints)) if retention.step_of(f) > after])
    for folder in reversed(kept):
        os.replace(folder, checkpoints / folder.name)
    retention.remove([f for f in retention.complete(checkpoints) if retention.step_of(f) == after])
