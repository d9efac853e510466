"""Checkpoints of a run: the policy in Megatron's format, and named parts in state.json.

A part is any object with `state_dict` and `load_state_dict`; `rank.build` names all parts.
`policy.checkpoint_files` lists the files of a checkpoint and their writers.  All trainer ranks must
call the methods of `Checkpoints` together, except `drain`.
"""

import logging
import os
import time
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any, Literal, Protocol, TypedDict

from nemo_prorl import __version__
from nemo_prorl.algorithms.reset_rules import policy_scores
from nemo_prorl.config import Config
from nemo_prorl.errors import DAMAGED, DamagedCheckpoint
from nemo_prorl.leader import Leader, LeaderOnly
from nemo_prorl.lifecycle import retention
from nemo_prorl.lifecycle.records import Records, code_sha256
from nemo_prorl.lifecycle.resets import Resets
from nemo_prorl.lifecycle.validation import Validation
from nemo_prorl.rewards.functions import files_sha256
from nemo_prorl.schema import Sha256
from nemo_prorl.tracing import RECORDER

_log = logging.getLogger(__name__)


class Stateful(Protocol):
    """A part of a run whose state is in each checkpoint as JSON, written by rank 0."""

    def state_dict(self) -> Mapping[str, Any]: ...
    def load_state_dict(self, state: Any) -> None: ...


class ImportedState(TypedDict):
    """The state.json of an imported model, written by prorl import-hf."""

    format: Literal[4]
    weights_sha256: Sha256
    reference_sha256: Sha256
    step: Literal[0]
    imported_from: str


class LeaderState:
    """A `Stateful` on every rank for a part that exists on rank 0 only, such as the data blend.

    All trainer ranks must call each method together.
    """

    def __init__(self, part: LeaderOnly[Any]) -> None:
        self._part = part

    def state_dict(self) -> Mapping[str, Any]:
        return self._part.call(lambda part: part.state_dict())

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._part.call(lambda part: part.load_state_dict(state))

    def carry(self, state: dict[str, Any]) -> None:
        """Begin a stage: give the part the state that the same part had at the end of the previous stage."""
        self._part.call(lambda part: part.carry(state))


class StoredPolicy(Protocol):
    """The methods of `policy.checkpoint_files.PolicyStore` that checkpoints use."""

    def save(self, folder: Path, state: dict[str, Any], on_complete: Callable[[], object] | None = None) -> None: ...
    def wait(self) -> None: ...
    def drain(self, seconds: float) -> None: ...
    def load(self, folder: Path) -> dict[str, Any]: ...
    def load_policy(self, folder: Path) -> dict[str, Any]: ...


class Checkpoints:
    """The checkpoints of a run, RUN/checkpoints/step-NNNNNN."""

    def __init__(
        self,
        cfg: Config,
        folder: Path,
        policy: StoredPolicy,
        parts: Mapping[str, Stateful],
        validation: Validation,
        resets: Resets,
        records: Records,
        leader: Leader,
    ) -> None:
        """Set up the checkpoints of a run in `folder`.

        Args:
            parts: parts of the run by their name in state.json, in the order of loading.
            validation: its scores decide which checkpoints are kept (`trainer.grpo.keep_best`).
            resets: its resets decide which checkpoints a roll-back needs.
        """
        self._cfg, self._folder, self._policy, self._parts = cfg, folder, policy, parts
        self._validation, self._resets, self._records = validation, resets, records
        self._disk = leader.only(
            lambda: folder
        )  # only rank 0 reads it: a slow shared disk may show other ranks older files
        self._saved: object = None  # key of the newest checkpoint
        code_sha256()  # hash of the running code: the files may change later
        own = {"loss": cfg.trainer.grpo.loss, "advantage": cfg.trainer.grpo.advantage}
        self._functions = files_sha256({**cfg.rewards.functions, **own})

    # --- resume and start of a stage -----------------------------------------------------------------------------

    def newest(self) -> Path | None:
        """Remove unfinished checkpoints; return the newest complete one, or None."""
        self._disk.call(retention.clean)
        found = self._disk.call(retention.complete)
        return found[-1] if found else None

    def resume(self, folder: Path) -> None:
        """Load the policy and all parts.  The run continues exactly as without the interruption.

        Raises CheckpointError.  In a Slurm job, which nobody watches, a damaged checkpoint is set aside first: the
        job's next attempt continues from the one before.
        """
        try:
            retention.check_continuable(folder)
            state = self._policy.load(folder)
        except DamagedCheckpoint:
            if "SLURM_JOB_ID" in os.environ and retention.set_aside(folder):
                _log.error("%s is damaged; it is now %s%s", folder, folder.name, DAMAGED)
            raise
        for name, part in self._parts.items():
            part.load_state_dict(state[name])
        self._saved = self._key(state["step"])
        self._records.event("resume", state["step"], stage=self._cfg.stage, version=__version__)
        if state["code"] != code_sha256():
            self._records.alarm(
                state["step"], "the code is not that which wrote the checkpoint: the run goes on, perhaps not exactly"
            )
        for file, digest in state.get("functions", {}).items():
            if self._functions.get(file, digest) != digest:
                self._records.alarm(
                    state["step"], f"{file} was changed after the checkpoint: later steps follow another rule"
                )

    def tell_damaged(self, step: int) -> None:
        """Alarm for each checkpoint of a step after `step` that was set aside: the run computes its steps again."""
        for path in self._disk.call(partial(retention.damaged_after, step=step)):
            self._records.alarm(step, f"{path} was damaged; the run goes on from the checkpoint of step {step}")

    def load_all(self, folder: Path) -> dict[str, Any]:
        """Load policy, reference and optimizer from any run's checkpoint; return its state.json."""
        return self._policy.load(folder)

    def carry(self, state: Mapping[str, Any]) -> None:
        """Begin a stage with the data position and the keep rates of the previous stage.

        Args:
            state: state.json of the previous stage's newest checkpoint.
        """
        for name in ("prompts", "rollouts"):
            self._parts[name].carry(state[name])  # type: ignore[attr-defined]

    def load_policy(self, step: int) -> None:
        """Load the weights of an earlier step of this run, for a roll-back."""
        self._policy.load_policy(retention.step_folder(self._folder, step))

    def has(self, step: int) -> bool:
        """Return whether the checkpoint of this step is complete and kept."""
        return self._disk.call(lambda folder: retention.step_folder(folder, step) in retention.complete(folder))

    # --- saving ----------------------------------------------------------------------------------------------------

    def due(self, step: int) -> bool:
        """Return whether a checkpoint follows this step.

        A run writes checkpoints every `checkpoint_every` steps, after the last step, and, with `keep_best`, after the
        best validation so far.  Step 0, the start of the run, gets a checkpoint only if a roll-back could return to it.
        """
        grpo = self._cfg.trainer.grpo
        is_best = step in self._validation.scores and step == self._validation.best_step(self._resets.done)
        if step == 0:
            return grpo.keep_best > 0 and is_best and self._cfg.trainer.resets.roll_back
        return step % grpo.checkpoint_every == 0 or step == grpo.max_steps or (grpo.keep_best > 0 and is_best)

    def save(self, step: int, wait: bool = False) -> None:
        """Write a checkpoint from which the run continues exactly.  A second call for the same state does nothing.

        With `trainer.grpo.async_checkpoints`, a thread may still write after this method has returned.  With `wait`,
        the method returns only when the checkpoint is complete.
        """
        with RECORDER.span("checkpoint", "phase"):
            if self._saved != (key := self._key(step)):
                self._save(step)
                self._saved = key
            if wait:
                self.wait()

    def _save(self, step: int) -> None:
        began = time.monotonic()
        about = {"step": step, "stage": self._cfg.stage, "version": __version__, "code": code_sha256()}
        state = {
            **about,
            "functions": self._functions,
            **{name: part.state_dict() for name, part in self._parts.items()},
        }
        self._policy.save(retention.step_folder(self._folder, step), state, partial(self._retain, *self._kept()))
        self._records.checkpoint_took(time.monotonic() - began)

    def _key(self, step: int) -> object:
        """Return (step, whether its line of metrics.jsonl is still to be written, number of hard resets).

        `save` writes a checkpoint only if this key differs from the key of the newest checkpoint.
        """
        return step, self._parts["trainer"].state_dict()["unfinished"] is not None, len(self._resets.done)

    def _kept(self) -> tuple[dict[int, float], list[int]]:
        """Return {step: mean validation score} to rank the checkpoints, and the steps that a roll-back may need."""
        best = self._validation.best_step(self._resets.done)
        needed = [best] if best is not None and self._cfg.trainer.resets.roll_back else []
        return policy_scores(self._validation.scores, self._resets.done), needed

    def _retain(self, scores: dict[int, float], needed: list[int]) -> None:
        """Remove checkpoints by the limits in `trainer.grpo`, as `retention.to_remove` explains."""
        grpo = self._cfg.trainer.grpo
        budget = None if grpo.checkpoint_budget_gb is None else int(grpo.checkpoint_budget_gb * 1e9)
        retention.retain(self._folder, scores, grpo.keep_checkpoints, grpo.keep_best, budget, needed=needed)

    def wait(self) -> None:
        """Wait until the last checkpoint is complete.  Raises CheckpointError if a write failed."""
        self._policy.wait()

    def drain(self, seconds: float) -> None:
        """After a failure, give a running write this many seconds to end.  Not a collective."""
        self._policy.drain(seconds)
