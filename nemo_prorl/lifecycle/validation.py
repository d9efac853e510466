"""Validation on held-out prompts, and which step's weights did best there.

Each validation asks for the same responses with the same seeds, so that differences are the policy's.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from nemo_prorl.algorithms.reset_rules import best_policy
from nemo_prorl.config import Config
from nemo_prorl.lifecycle.records import Records
from nemo_prorl.lifecycle.summary import heldout_scores
from nemo_prorl.metrics import Metrics
from nemo_prorl.rollout.prompts import PromptDraw
from nemo_prorl.rollout.rollouts import Rollouts

Scores = dict[str, Any]  # {"all": {"mean", "se", "prompts"}, "tasks": {NAME: the same}}


class Validation:
    """The validations of a run.  Part of a checkpoint.  `judge` and `run` are collectives of all trainer ranks."""

    def __init__(
        self, cfg: Config, heldout: Sequence[tuple[str, Sequence[PromptDraw]]], rollouts: Rollouts, records: Records
    ) -> None:
        """`heldout`: prompts of each validation source, by its name."""
        self._cfg, self._heldout, self._rollouts, self._records = cfg, list(heldout), rollouts, records
        self.scores: dict[int, Scores] = {}  # by step

    @property
    def has_prompts(self) -> bool:
        return bool(self._heldout)

    def due(self, step: int) -> bool:
        grpo = self._cfg.trainer.grpo
        return self.has_prompts and (step % grpo.validate_every == 0 or step == grpo.max_steps)

    def run(self, metrics: Metrics) -> None:
        """Score the policy, keep the scores under this step, and put their means into its metrics."""
        if not self.has_prompts:
            return
        scores = self.scores[metrics.step] = self.judge(metrics)
        for name, score in scores["tasks"].items():
            metrics.put(f"validation/{name}", score["mean"])
        metrics.put("validation/all", scores["all"]["mean"])

    def judge(self, metrics: Metrics) -> Scores:
        """Return the scores of the present policy, noted in the journal only.

        Raises RewardFailure if a response could not be judged.
        """
        grpo, step = self._cfg.trainer.grpo, metrics.step
        draws = [draw for _, part in self._heldout for draw in part]
        names = [name for name, part in self._heldout for _ in part]
        sampling = (grpo.validation_samples, grpo.validation_temperature, grpo.validation_top_p)
        with metrics.phase("validate"):
            self._rollouts.publish(version=step)
            scores = self._rollouts.collector.call(
                lambda collector: heldout_scores(names, collector.sample(draws, *sampling, step))
            )
        self._records.event("validation", step, **scores)
        return scores

    def best_step(self, resets: Sequence[Mapping[str, Any]]) -> int | None:
        """Return the step since the last of these hard resets whose weights scored best; None without a score."""
        return best_policy(self.scores, resets)

    def state_dict(self) -> dict[str, Any]:
        return {"scores": self.scores}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.scores = {int(step): scores for step, scores in state["scores"].items()}
