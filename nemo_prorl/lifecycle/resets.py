"""Decides on hard resets, makes them and checks them (paper sec. 3.3.1).

A hard reset makes the policy the new reference (pi_ref <- pi_theta) and resets the optimizer (`trainer.resets.parts`).
`Resets.perform` does it as one transaction: write `reset_intent` into the journal, reset reference and optimizer, write
a checkpoint.  The reset is committed once that checkpoint has its final name (`retention.put_in_place`); `reset_commit`
in the journal only records it.  A run killed before that continues from the previous checkpoint and makes the same
reset again.  A run killed afterwards finds the reset in the checkpoint, and `settle` adds `reset_commit`.

`Trainer.finish_step` begins a reset if the rules (`Resets.reason`) or a user's request (`reset_reason`) give a reason;
`rank.begin_stage` at the start of a stage; and `lifecycle.trials` for the arm with the reset.
"""

import logging
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Annotated, Any, Literal, NotRequired, TypedDict

from nemo_prorl.algorithms.reset_rules import Finding, History, best_policy, decide
from nemo_prorl.algorithms.schedule import optimizer_reset_steps, resets_optimizer
from nemo_prorl.config import ResetsConfig
from nemo_prorl.errors import ResetFailure
from nemo_prorl.leader import Leader
from nemo_prorl.lifecycle.journal_events import HeldOutScores, Reset, effects_text
from nemo_prorl.lifecycle.killpoints import killpoint
from nemo_prorl.lifecycle.run_records import Records
from nemo_prorl.lifecycle.summary import standard_errors
from nemo_prorl.lifecycle.validation import Validation
from nemo_prorl.metrics import Metrics
from nemo_prorl.rollout.rollouts import Rollouts
from nemo_prorl.schema import Count, JsonOf

if TYPE_CHECKING:
    from nemo_prorl.lifecycle.checkpoints import Checkpoints

_log = logging.getLogger(__name__)

FindingJson = Annotated[dict[str, Any], JsonOf(Finding)]


class TrialState(TypedDict):
    """A trial of a hard reset; `lifecycle.trials` makes it."""

    step: Count
    """step after which both arms begin"""
    reason: str
    """why a reset was asked for"""
    steps: Count
    """steps of each arm"""
    arm: Literal["none", "reset", "over"]
    """the arm that trains: without the reset, with it; over: the trial is decided"""


class ResetsState(TypedDict):
    """The state of a stage's hard resets that a checkpoint stores."""

    done: list[Reset]
    """hard resets of this stage"""
    fresh: bool
    """true: the policy should equal its reference; the next step must measure a KL of about 0"""
    found: list[FindingJson]
    """findings of the rules for hard resets"""
    trial: NotRequired[TrialState | None]
    """the last trial of a hard reset (trainer.resets.mode=trial)"""


@dataclass(eq=False, repr=False)
class Resets:
    """Decides on hard resets and makes them; each checkpoint contains its state.

    Only rank 0 has the metrics history that the rules need; all ranks receive the decision.
    """

    config: ResetsConfig
    gap_allowed: float  # largest `mean_abs_gap` of `check_reference` in the first step of a run or after a reset
    policy: Any  # a policy.actor.Actor
    rollouts: Rollouts
    validation: Validation
    records: Records
    leader: Leader
    done: list[Reset] = field(default_factory=list)  # resets of this stage
    findings: list[FindingJson] = field(default_factory=list)  # so far; a resume rebuilds the history with them
    fresh: bool = True  # the policy should equal its reference now, as at the start of a run
    stop: str | None = None  # the finding that stops the run after this step
    trial: TrialState | None = None  # the last one

    def __post_init__(self) -> None:
        self.history = self.leader.only(History)

    @property
    def steps(self) -> list[int]:
        """Return the steps after which resets were made; 0 is the start of a stage."""
        return [reset["step"] for reset in self.done]

    @property
    def of_optimizer(self) -> list[int]:
        """Return those of `steps` after which the optimizer was reset."""
        return optimizer_reset_steps(self.config, self.done)

    @property
    def goes_back_to(self) -> list[int]:
        """Return the step whose checkpoint a running trial needs for its second arm."""
        return [self.trial["step"]] if self.trial is not None and self.trial["arm"] == "none" else []

    @property
    def _renews_reference(self) -> bool:
        return self.config.parts in ("both", "reference")

    # --- decision ------------------------------------------------------------------------------------------------

    def reason(self, metrics: Metrics) -> str | None:
        """Return the reason for a reset after this step's updates, or None.  A collective, called once per step."""
        line, scores = metrics.as_json(), self.validation.scores.get(metrics.step)
        findings = self.history.call(lambda history: self._observe(history, line, scores))
        self.findings += [asdict(finding) for finding in findings]
        for finding in findings:
            self.records.alarm(metrics.step, str(finding))
        asking = next((str(finding) for finding in findings if finding.asks), None)
        self.stop = asking if self.config.mode == "stop" else None
        if metrics.step in self.config.at_steps:
            return "at_steps"
        if self.config.every is not None and metrics.step % self.config.every == 0:
            return "every"
        return asking if self.config.mode in ("auto", "trial") else None

    def _observe(self, history: History, line: Mapping[str, Any], scores: HeldOutScores | None) -> list[Finding]:
        history.add(line, standard_errors(scores))
        findings = [] if self.config.mode == "manual" else decide(history, self.config.rules)
        history.note(findings)
        return findings

    # --- the transaction -------------------------------------------------------------------------------------------

    def perform(self, step: int, reason: str, checkpoints: "Checkpoints") -> None:
        """Reset reference and optimizer after the updates of `step`.

        With `roll_back` the reset starts from the best weights since the last reset.
        """
        checkpoints.wait()
        back_to = self._best_before(step, checkpoints) if self.config.roll_back else None
        self.records.event("reset_intent", step, reason=reason)
        killpoint("reset:intent")
        if back_to is not None:
            self.rollouts.discard()  # step count and data position continue; the surplus of the bad weights is lost
        self._reset_policy(back_to, checkpoints.load_policy)
        reset: Reset = {"step": step, "reason": reason, "reference_sha256": self.policy.reference_sha256()}
        if back_to is not None:
            reset["rolled_back_to"] = back_to
        if step and self.config.lr_factor != 1.0:  # a stage begins with its own rate
            reset["lr_factor"] = self.config.lr_factor
            if self.config.lr_factor_steps is not None:
                reset["lr_until"] = step + self.config.lr_factor_steps
        self.done.append(reset)
        self.history.run_on_leader(lambda history: history.reset(step))
        checkpoints.save(step, wait=True)
        killpoint("reset:checkpointed")
        self.records.event("reset_commit", **self.done[-1])
        killpoint("reset:committed")
        _log.info("hard reset after step %d (%s)%s", step, reason, effects_text(reset))

    def _reset_policy(self, back_to: int | None, load_policy: Callable[[int], object]) -> None:
        if back_to is not None:
            load_policy(back_to)
        if self._renews_reference:
            self.policy.set_reference()
        killpoint("reset:reference")
        if resets_optimizer(self.config, back_to is not None):
            self.policy.reset_optimizer()
        killpoint("reset:optimizer")
        self.fresh = self._renews_reference

    def repeat(self, reset: Reset, load_policy: Callable[[int], object]) -> None:
        """Make a hard reset of a finished step again, without records and checkpoint.

        Args:
            load_policy: loads the weights of an earlier step, for a roll-back.
        """
        self._reset_policy(reset.get("rolled_back_to"), load_policy)
        self.done.append(reset)

    def _best_before(self, step: int, checkpoints: "Checkpoints") -> int | None:
        """Return the earlier step to roll back to: the best validation since the last reset.

        Return None if there is no validation, if the best step is `step`, or if its checkpoint was
        removed: another checkpoint with a lower score is not used instead.
        """
        best = best_policy(self.validation.scores, self.done)
        if best is None or best == step:
            return None
        if checkpoints.has(best):
            return best
        self.records.alarm(step, f"no roll-back: the checkpoint of step {best}, the best validation, is not kept")
        return None

    def settle(self, step: int) -> None:
        """Write `reset_commit` on a resume if the checkpoint contains the reset but the journal lacks this event."""
        resets = [event for event in self.records.events() if event["event"] in ("reset_intent", "reset_commit")]
        interrupted = resets and resets[-1]["event"] == "reset_intent" and resets[-1]["step"] == step
        if interrupted and self.steps[-1:] == [step]:
            self.records.event("reset_commit", **self.done[-1])

    # --- the check -------------------------------------------------------------------------------------------------

    def continue_reference(self) -> None:
        """Note that a stage begins without a reset and keeps its reference.

        Policy and reference may then differ: `check_reference` accepts any difference in the first step.
        """
        self.fresh = False

    def check_reference(self, step: int, mean_abs_gap: float) -> None:
        """Raise ResetFailure if the policy should equal its reference but does not.

        Call this before a step's updates.

        Args:
            mean_abs_gap: mean absolute difference per token between the log-probabilities of policy and reference.
        """
        fresh, self.fresh = self.fresh, False
        if fresh and not mean_abs_gap <= self.gap_allowed:
            raise ResetFailure(
                f"step {step} is the first of a run or follows a hard reset, so the policy should equal its reference;"
                f" their log-probabilities differ by {mean_abs_gap:.3g} per token on average, expected at most"
                f" {self.gap_allowed:g} (trainer.resets.kl_after_reset)"
            )

    # --- in a checkpoint -------------------------------------------------------------------------------------------

    def state_dict(self) -> ResetsState:
        return {"done": self.done, "fresh": self.fresh, "found": self.findings, "trial": self.trial}

    def load_state_dict(self, state: ResetsState) -> None:
        """Load the resets, and rebuild the metrics history that the rules need.

        Records and validation must be loaded before, because the history is made from their values.
        """
        self.done = list(state["done"])
        self.fresh = bool(state["fresh"])
        self.findings = list(state["found"])
        self.trial = state.get("trial")  # absent in checkpoints of earlier commits
        self.history = self.leader.only(History)
        self.history.run_on_leader(self._recall)

    def _recall(self, history: History) -> None:
        by_step: dict[int, list[Finding]] = {}
        for finding in self.findings:
            by_step.setdefault(finding["step"], []).append(Finding(**finding))
        for line in self.records.lines():
            step = int(line["step"])
            history.add(line, standard_errors(self.validation.scores.get(step)))
            history.note(by_step.get(step, []))
            if step in self.steps:
                history.reset(step)
