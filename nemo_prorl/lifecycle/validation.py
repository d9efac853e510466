"""Validation on held-out prompts, and the step with the best weights.

Each validation samples the same prompts with the same seeds; scores differ only by the policy.
"""

import logging
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypedDict

from nemo_prorl.config import Config, GRPOConfig
from nemo_prorl.files import write_json
from nemo_prorl.leader import LeaderOnly
from nemo_prorl.lifecycle.journal_events import HeldOutScores
from nemo_prorl.lifecycle.run_records import Records
from nemo_prorl.lifecycle.summary import heldout_scores
from nemo_prorl.metrics import Metrics
from nemo_prorl.rollout.collector import Collector
from nemo_prorl.rollout.groups import PromptDraw
from nemo_prorl.rollout.rollouts import Rollouts

_log = logging.getLogger(__name__)


class ValidationState(TypedDict):
    """The state of a run's validations that a checkpoint stores."""

    scores: dict[int, HeldOutScores]
    """scores by step"""


@dataclass(frozen=True)
class HeldOut:
    """The held-out prompts (`draws`), the source of each (`names`), their collector, and the folder of the results."""

    names: list[str]
    draws: list[PromptDraw]
    collector: Collector
    folder: Path

    def judge(self, grpo: GRPOConfig, step: int) -> HeldOutScores:
        """Sample and score responses with the weights after `step`; write the score of each prompt to `folder`.

        Raises RewardFailure if a response cannot be judged.
        """
        sampling = (grpo.validation_samples, grpo.validation_temperature, grpo.validation_top_p)
        groups = self.collector.sample(self.draws, *sampling, step)
        scores = heldout_scores(self.names, groups)
        self.folder.mkdir(exist_ok=True)
        by_prompt = {f"{name}/{g.prompt_id}": g.mean_reward for name, g in zip(self.names, groups, strict=True)}
        write_json(self.folder / f"step-{step:06d}.json", by_prompt, indent=None)
        return scores


@dataclass(eq=False, repr=False)
class Validation:
    """The validations of a run; each checkpoint contains the scores.

    All trainer ranks must call `judge` and `run` together.
    """

    cfg: Config
    heldout: LeaderOnly[HeldOut]
    rollouts: Rollouts
    records: Records
    scores: dict[int, HeldOutScores] = field(default_factory=dict)  # by step

    @property
    def has_prompts(self) -> bool:
        return bool(self.cfg.data.validation)

    def due(self, step: int) -> bool:
        grpo = self.cfg.trainer.grpo
        return self.has_prompts and (step % grpo.validate_every == 0 or step == grpo.max_steps)

    def run(self, metrics: Metrics) -> None:
        """Score the policy; keep the scores by the step of `metrics`, and add the mean scores to `metrics`."""
        if not self.has_prompts:
            return
        scores = self.scores[metrics.step] = self.judge(metrics)
        for name, score in scores["tasks"].items():
            metrics.put(f"validation/{name}", score["mean"])
        metrics.put("validation/all", scores["all"]["mean"])

    def judge(self, metrics: Metrics) -> HeldOutScores:
        """Score the current policy; write the scores into the journal only, and return them.

        Raises RewardFailure if a response could not be judged.
        """
        step = metrics.step
        if step == 0:
            _log.info("validating the policy on held-out prompts before the first step")
        with metrics.phase("validate"):
            self.rollouts.publish(version=step)
            scores = self.heldout.call(lambda heldout: heldout.judge(self.cfg.trainer.grpo, step))
        self.records.event("validation", step, **scores)
        if step == 0:  # later ones are in the line of their step
            _log.info("held-out mean reward before the first step: %.3f", scores["all"]["mean"])
        return scores

    def state_dict(self) -> ValidationState:
        return {"scores": self.scores}

    def load_state_dict(self, state: ValidationState) -> None:
        self.scores = {int(step): scores for step, scores in state["scores"].items()}
