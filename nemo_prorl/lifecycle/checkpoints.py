"""Checkpoints of a run: the policy in Megatron's format, named parts in state.json, and groups of responses.

A part is any object with `state_dict` and `load_state_dict`; `rank.build` names them.  `prompts` and `rollouts` also
have `begin_stage`, and the rollouts `groups`, the responses that wait for a later step.  `policy.checkpoint_files`
lists the files and the parts.  All trainer ranks must call the methods of `Checkpoints` together.
"""

import time
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Protocol, TypedDict

from nemo_prorl import __version__
from nemo_prorl.algorithms.reset_rules import best_policy, policy_scores
from nemo_prorl.config import Config
from nemo_prorl.errors import DamagedCheckpoint
from nemo_prorl.leader import Leader, LeaderOnly
from nemo_prorl.lifecycle import retention
from nemo_prorl.lifecycle.resets import Resets
from nemo_prorl.lifecycle.run_records import Records, code_sha256
from nemo_prorl.lifecycle.validation import Validation
from nemo_prorl.rewards.functions import changed_code, code_of
from nemo_prorl.schema import Sha256
from nemo_prorl.tracing import RECORDER

if TYPE_CHECKING:
    from nemo_prorl.policy.checkpoint_files import CheckpointFiles

GROUPS = "groups.safetensors"  # file of the groups that the state of the rollouts refers to (`rollout.group_arrays`)


class Stateful(Protocol):
    """A part of a run whose state is in each checkpoint as JSON, written by rank 0."""

    def state_dict(self) -> Mapping[str, Any]: ...
    def load_state_dict(self, state: Any) -> None: ...


class ImportedState(TypedDict):
    """The state.json of an imported model, written by prorl import-hf."""

    format: Literal[5]
    weights_sha256: Sha256
    reference_sha256: Sha256
    step: Literal[0]
    imported_from: str


@dataclass(eq=False, repr=False)
class LeaderState:
    """A `Stateful` on every rank for a part that exists on rank 0 only, such as the data blend.

    All trainer ranks must call each method together.
    """

    part: LeaderOnly[Any]

    def state_dict(self) -> Mapping[str, Any]:
        return self.part.call(lambda part: part.state_dict())

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.part.call(lambda part: part.load_state_dict(state))

    def begin_stage(self, state: dict[str, Any]) -> None:
        """Begin a stage: give the part the state that the same part had at the end of the previous stage."""
        self.part.call(lambda part: part.begin_stage(state))


@dataclass(eq=False, repr=False)
class Checkpoints:
    """The checkpoints of a run, RUN/checkpoints/step-NNNNNN."""

    cfg: Config
    folder: Path
    files: "CheckpointFiles"  # writes and loads the files of any checkpoint
    parts: Mapping[str, Stateful]  # by their names in state.json, in the order of loading
    validation: Validation  # its scores decide which checkpoints are kept (`trainer.grpo.keep_best`)
    resets: Resets  # they decide which checkpoints a roll-back needs
    records: Records
    leader: Leader

    def __post_init__(self) -> None:
        # Only rank 0 reads the folder, because a slow shared disk may show other ranks older files.
        self.disk = self.leader.only(lambda: self.folder)
        self.saved: object = None  # key of the newest checkpoint
        code_sha256()  # hash of the running code: the files may change later
        self.functions = code_of(self.cfg)

    # --- resume and start of a stage -----------------------------------------------------------------------------

    def newest(self) -> Path | None:
        """Remove unfinished checkpoints; return the newest complete one, or None."""
        self.disk.call(retention.clean)
        complete = self.disk.call(retention.complete)
        return complete[-1] if complete else None

    def resume(self, folder: Path) -> None:
        """Load the policy and all parts.  The run continues exactly as without the interruption.

        Raises CheckpointError.  In a Slurm job, which nobody watches, a damaged checkpoint is set aside first: the
        job's next attempt continues from the one before.
        """
        state = self.load(folder)
        self.records.event("resume", state["step"], stage=self.cfg.stage, version=__version__)
        if state["code"] != code_sha256():
            self.records.alarm(
                state["step"], "this code differs from the code that wrote the checkpoint; results may differ"
            )
        for file in changed_code(state.get("functions", {}), self.functions):
            self.records.alarm(
                state["step"], f"{file} was changed after the checkpoint: later steps follow another rule"
            )

    def load(self, folder: Path) -> dict[str, Any]:
        """Load the policy and all parts, at a resume or to go back in a run that trains; return state.json."""
        try:
            retention.check_continuable(folder)
            state = self.files.load(folder)
            groups = self.leader.only(lambda: retention.read_file(folder, GROUPS, state))
        except DamagedCheckpoint:
            retention.set_aside(folder)
            raise
        groups.run_on_leader(lambda data: state["rollouts"].update(groups=data))
        for name, part in self.parts.items():
            part.load_state_dict(state[name])
        self.saved = self._key(state["step"])
        return state

    def tell_damaged(self, step: int) -> None:
        """Alarm for each checkpoint of a step after `step` that was set aside: the run computes its steps again."""
        for path in self.disk.call(partial(retention.damaged_after, step=step)):
            self.records.alarm(step, f"{path} was damaged; the run goes on from the checkpoint of step {step}")

    def begin_stage(self, state: Mapping[str, Any]) -> None:
        """Begin a stage with the data position and the keep rates of the previous stage.

        Args:
            state: state.json of the previous stage's newest checkpoint.
        """
        for name in ("prompts", "rollouts"):
            self.parts[name].begin_stage(state[name])  # type: ignore[attr-defined]

    def load_policy(self, step: int) -> None:
        """Load the weights of an earlier step of this run, for a roll-back."""
        self.files.load_policy(retention.step_folder(self.folder, step))

    def has(self, step: int) -> bool:
        """Return whether the checkpoint of this step is complete and kept."""
        return self.disk.call(lambda folder: retention.step_folder(folder, step) in retention.complete(folder))

    # --- saving ----------------------------------------------------------------------------------------------------

    def due(self, step: int) -> bool:
        """Return whether a checkpoint follows this step.

        A run writes checkpoints every `checkpoint_every` steps, after the last step, and, with `keep_best`, after the
        best validation so far.  Step 0, the start of the run, gets a checkpoint only if a roll-back could return to it.
        """
        grpo = self.cfg.trainer.grpo
        is_best = step in self.validation.scores and step == best_policy(self.validation.scores, self.resets.done)
        if step == 0:
            return grpo.keep_best > 0 and is_best and self.cfg.trainer.resets.roll_back
        return step % grpo.checkpoint_every == 0 or step == grpo.max_steps or (grpo.keep_best > 0 and is_best)

    def save(self, step: int, wait: bool = False) -> None:
        """Write a checkpoint from which the run continues exactly.  A second call for the same state does nothing.

        With `trainer.grpo.async_checkpoints`, a thread may still write after this method has returned.  With `wait`,
        the method returns only when the checkpoint is complete.
        """
        with RECORDER.span("checkpoint", "phase"):
            if self.saved != (key := self._key(step)):
                self._save(step)
                self.saved = key
            if wait:
                self.wait()

    def _save(self, step: int) -> None:
        began = time.monotonic()
        about = {"step": step, "stage": self.cfg.stage, "version": __version__, "code": code_sha256()}
        state = about | {"functions": self.functions} | {name: p.state_dict() for name, p in self.parts.items()}
        best, done = best_policy(self.validation.scores, self.resets.done), self.resets.done
        grpo, roll_back = self.cfg.trainer.grpo, self.cfg.trainer.resets.roll_back
        retain = partial(
            retention.retain,
            self.folder,
            policy_scores(self.validation.scores, done),
            newest=grpo.keep_checkpoints,
            best=grpo.keep_best,
            budget=None if grpo.checkpoint_budget_gb is None else int(grpo.checkpoint_budget_gb * 1e9),
            needed=[*([best] if best is not None and roll_back else []), *self.resets.goes_back_to],
        )
        files = {GROUPS: self.parts["rollouts"].groups()}  # type: ignore[attr-defined]
        self.files.save(retention.step_folder(self.folder, step), state, retain, files)
        self.records.checkpoint_s += time.monotonic() - began

    def _key(self, step: int) -> object:
        """Return (step, whether its line of metrics.jsonl is still to be written, number of hard resets, trial's arm).

        `save` writes a checkpoint only if this key differs from the key of the newest checkpoint.
        """
        arm = self.resets.trial and self.resets.trial["arm"]
        return step, self.parts["trainer"].state_dict()["unfinished"] is not None, len(self.resets.done), arm

    def wait(self) -> None:
        """Wait until the last checkpoint is complete.  Raises CheckpointError if a write failed."""
        self.files.wait()
