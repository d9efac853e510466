"""The training step and the loop around it (paper sec. 3).

`rank.py` builds the parts that are handed in; none of them knows the trainer.  Nothing here knows NeMo, vLLM or HTTP.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any, TypedDict

import torch
from torch import Tensor

from nemo_prorl.algorithms.advantages import group_advantages
from nemo_prorl.algorithms.correction import rollout_correction
from nemo_prorl.algorithms.diagnostics import means_by_task, policy_diagnostics, reference_gap, sums_by_task
from nemo_prorl.algorithms.entropy import AdaptiveEntropy
from nemo_prorl.algorithms.losses import denominator_terms, grpo_loss
from nemo_prorl.algorithms.reset_rules import learning_rate
from nemo_prorl.algorithms.shaping import shaped_rewards
from nemo_prorl.batch import Batch, JudgedGroups
from nemo_prorl.config import Config, GRPOConfig
from nemo_prorl.errors import RolloutAbandoned, StoppedCleanly
from nemo_prorl.lifecycle.control import reset_reason
from nemo_prorl.lifecycle.tolerances import engine_gap_alarm
from nemo_prorl.metrics import Metrics, MetricsState
from nemo_prorl.schema import Count

if TYPE_CHECKING:  # what is handed in
    from nemo_prorl.leader import Leader
    from nemo_prorl.lifecycle.checkpoints import Checkpoints
    from nemo_prorl.lifecycle.control import Control
    from nemo_prorl.lifecycle.records import Records
    from nemo_prorl.lifecycle.resets import Resets
    from nemo_prorl.lifecycle.step_traces import StepTraces
    from nemo_prorl.lifecycle.stopping import Stopping
    from nemo_prorl.lifecycle.validation import Validation
    from nemo_prorl.rollout.rollouts import Rollouts


class ProgressState(TypedDict):
    """Where a run is."""

    step: Count
    unfinished: MetricsState | None
    """the metrics of a step whose validation was given up at a stop, and is due"""


@dataclass
class TrainerState:
    """Where a run is.  Part of a checkpoint.  `unfinished`: metrics of a step that is updated and not logged."""

    step: int = 0
    unfinished: Metrics | None = None

    def state_dict(self) -> ProgressState:
        return {"step": self.step, "unfinished": self.unfinished.to_json() if self.unfinished is not None else None}

    def load_state_dict(self, state: ProgressState) -> None:
        self.step, unfinished = state["step"], state["unfinished"]
        self.unfinished = Metrics.from_json(unfinished) if unfinished is not None else None


@dataclass
class Trainer:
    """One trainer rank.  Its methods are collectives of all ranks."""

    cfg: Config
    policy: Any  # policy.actor.Actor: log-probabilities, updates, weights, reference
    progress: TrainerState
    rollouts: "Rollouts"
    validation: "Validation"
    resets: "Resets"
    checkpoints: "Checkpoints"
    control: "Control"
    records: "Records"
    stopping: "Stopping"
    entropy: AdaptiveEntropy
    traces: "StepTraces"
    leader: "Leader"

    # --- the loop --------------------------------------------------------------------------------------------------

    def train(self) -> None:
        """Step until the run ends; resumable at any kill.  Raises StoppedCleanly when asked to stop in between."""
        progress = self.progress
        try:
            self.stop_if_asked(progress.step)  # while engines started
            if progress.unfinished is not None:
                self.finish_step(progress.unfinished)
            if progress.step == 0 and not self.validation.scores:
                self.validate(Metrics(0, self.cfg.stage))
                if self.checkpoints.due(0):
                    self.checkpoints.save(0)
            for step in range(progress.step + 1, self.cfg.trainer.grpo.max_steps + 1):
                with self.traces.step(step):
                    metrics = self.train_step(step)
                    self.rollouts.await_next(metrics)
                    self.finish_step(metrics)
        except RolloutAbandoned as stop:  # of a step whose updates are not begun, or of a validation
            self.checkpoints.save(progress.step, wait=True)
            raise StoppedCleanly(f"{stop}; what is done is saved, the same command continues") from stop

    def finish_step(self, metrics: Metrics) -> None:
        """Do what follows a step's updates: validation, log, hard reset, checkpoint, and what somebody asked for."""
        step, self.progress.unfinished = metrics.step, metrics
        if self.validation.due(step):
            self.validate(metrics)
        self.records.log(metrics)  # before the checkpoint, which records the log's length
        self.progress.unfinished = None
        asked = self.control.pending(step)
        if reason := reset_reason(asked, self.resets.due(metrics)):  # after the log: the rules go by what it holds
            self.resets.perform(step, reason, self.checkpoints)
        elif self.checkpoints.due(step):
            self.checkpoints.save(step)
        self.control.serve(asked, step)
        self.stop_if_asked(step)

    def validate(self, metrics: Metrics) -> None:
        self.validation.run(metrics)
        self.write_summary()

    def write_summary(self, hashes: Mapping[str, str] | None = None) -> None:
        self.records.summary(self.progress.step, self.validation.scores, self.resets.done, hashes)

    def stop_if_asked(self, step: int) -> None:
        """Raise StoppedCleanly, with everything saved, if somebody or the job's end asks for it."""
        if reason := self.leader.call(self.stopping.reason):
            self.checkpoints.save(step, wait=True)
            raise StoppedCleanly(f"{reason}: stopped after step {step}; the same command continues")

    def finish(self) -> None:
        """End a run that has made all its steps."""
        self.checkpoints.wait()
        self.traces.close()
        policy = self.policy
        self.write_summary({"weights_sha256": policy.weights_sha256(), "reference_sha256": policy.reference_sha256()})
        self.records.event("finish", self.progress.step)
        self.control.close(self.progress.step)

    # --- the step --------------------------------------------------------------------------------------------------

    def train_step(self, step: int) -> Metrics:
        """Roll out one batch and make its gradient updates.

        Raises DeadlineExceeded naming what it waited for, ResetFailure when the policy is not its reference right after
        a reset, and NonFiniteUpdate with weights and optimizer as they were before the update.
        """
        cfg, policy, metrics = self.cfg.trainer.grpo, self.policy, Metrics(step, self.cfg.stage)
        with metrics.phase("publish"):
            self.rollouts.publish(version=step - 1)
        with metrics.phase("rollout"):  # judged while others still generate; dynamic sampling inside
            judged = self.rollouts.collect(metrics)
        self.progress.step = step
        if not len(judged.draws):
            self.records.alarm(step, "no group carries a signal; the step makes no update")
            return metrics

        with metrics.phase("logprobs"):
            rows = judged.rows_of_updates(cfg.updates_per_step, policy.data_ranks.size)[policy.data_ranks.rank]
            numbers_B = torch.cat(rows)
            mine = judged.batch()
            old_logp_BT, entropy_BT = policy.logprobs(mine)
            ref_logp_BT = policy.reference_logprobs(mine)
            gap = policy.data_ranks.reduce(reference_gap(old_logp_BT, ref_logp_BT, mine.mask_BT))
            self.resets.check_reference(step, gap["mean_abs"])
            task_B = judged.task_B[numbers_B]
            sums = sums_by_task(old_logp_BT, ref_logp_BT, entropy_BT, mine.mask_BT, task_B, judged.tasks)
            for key, value in means_by_task(policy.data_ranks.reduce(sums), judged.tasks).items():
                metrics.put(key, value)

        with metrics.phase("advantages"):
            advantage_B = advantages(judged, cfg, metrics)[numbers_B]
            weight_BT, corrected = rollout_correction(old_logp_BT, mine.engine_logp_BT, mine.mask_BT, cfg.correction)
            metrics.add("correction", policy.data_ranks.reduce(corrected))
            mine = mine.with_targets(
                old_logp_BT=old_logp_BT, ref_logp_BT=ref_logp_BT, advantage_B=advantage_B, weight_BT=weight_BT
            )
            self.report_gaps(metrics, mine, judged.version_B[numbers_B])

        with metrics.phase("updates"):
            config = self.before_updates(metrics)
            for update_rows in torch.arange(len(mine)).split([len(r) for r in rows]):
                update(policy, mine.rows(update_rows), config, metrics)
        return metrics

    def before_updates(self, metrics: Metrics) -> GRPOConfig:
        """Set the learning rate of this step; return its loss, with the coefficient that its entropy asks for."""
        resets, grpo = self.cfg.trainer.resets, self.cfg.trainer.grpo
        base = float(self.cfg.model["optim"]["lr"])
        lr = learning_rate(base, metrics.step, self.resets.steps, resets.lr_factor, resets.lr_warmup_steps)
        self.policy.set_learning_rate(lr)
        metrics.put("policy/lr", lr)
        if not grpo.adaptive_entropy.enabled:
            return grpo
        coefficient = self.entropy.update(self.leader.call(lambda: metrics["entropy"]))
        metrics.put("policy/entropy_coef", coefficient)
        return replace(grpo, entropy_coef=coefficient)

    def report_gaps(self, metrics: Metrics, mine: Batch, version_B: Tensor) -> None:
        """Report how far engine and trainer are apart, with the same weights and with older ones in the engine.

        An alarm goes by the former.
        """
        fresh_BT = mine.mask_BT & (version_B == metrics.step - 1)[:, None]
        parts = {"engine_gap": fresh_BT, "stale_gap": mine.mask_BT & ~fresh_BT}
        gaps = {
            name: self.policy.data_ranks.reduce(reference_gap(mine.engine_logp_BT, mine.old_logp_BT, part_BT))
            for name, part_BT in parts.items()
        }
        tokens = sum(gap["tokens"] for gap in gaps.values())
        for name, gap in gaps.items():
            if gap["tokens"]:
                metrics.add(name, gap)
        if gaps["stale_gap"]["tokens"]:
            metrics.put("stale_gap/share", gaps["stale_gap"]["tokens"] / tokens)
        mean = gaps["engine_gap"]["mean_abs"]
        if mean > engine_gap_alarm(self.cfg):  # type: ignore[arg-type]
            self.records.alarm(metrics.step, f"engine and trainer differ by {mean:.3g} a token (correction.alarm)")


def update(policy: Any, minibatch: Batch, config: GRPOConfig, metrics: Metrics) -> None:
    """Make one optimizer step on a mini-batch."""
    share = denominator_terms(minibatch.mask_BT, config.aggregation, float(config.context_tokens))
    denominator = policy.data_ranks.sum(float(share))
    if denominator > 0:  # otherwise nothing was left to learn from
        loss, with_entropy = partial(policy_loss, config=config), config.entropy_coef != 0.0
        report_update(metrics, policy.update(minibatch, loss, denominator, with_entropy=with_entropy))


def advantages(judged: JudgedGroups, cfg: GRPOConfig, metrics: Metrics) -> Tensor:
    """advantage_B, float32, of all responses from their shaped rewards (paper eq. 2)."""
    longest_GN = judged.longest_GN(cfg.context_tokens, cfg.max_response_tokens)
    reward_GN, changes = shaped_rewards(
        judged.reward_GN, judged.ended_GN, judged.length_GN, longest_GN, cfg, metrics.step
    )
    advantage_GN = group_advantages(reward_GN, judged.valid_GN, cfg.advantage)
    if bool(judged.valid_GN.any()):
        metrics.put("reward/shaped", float(reward_GN[judged.valid_GN].mean()))
        for task, valid_GN in judged.valid_by_task().items():
            metrics.put(f"reward_shaped/{task}", float(reward_GN[valid_GN].mean()))
        for name, change_GN in changes.items():
            metrics.put(f"shaping/{name}", float(change_GN[judged.valid_GN].mean()))
    return advantage_GN.reshape(-1).float()


def policy_loss(
    logp_BT: Tensor, entropy_BT: Tensor | None, micro: Batch, denominator: float, config: GRPOConfig
) -> tuple[Tensor, dict[str, Tensor]]:
    """A micro-batch's share of the loss of an update, and its sums to report."""
    loss, sums = grpo_loss(
        logp_BT,
        micro.old_logp_BT,
        micro.ref_logp_BT,
        micro.advantage_B,
        micro.mask_BT,
        micro.weight_BT,
        denominator,
        config,
        entropy_BT,
    )
    moved = policy_diagnostics(logp_BT, micro.old_logp_BT, micro.advantage_B, micro.mask_BT, config)
    return loss, {**moved, **sums}


def report_update(metrics: Metrics, sums: dict[str, float]) -> None:
    """An update's numbers: sums over tokens as means over the tokens of all updates of the step."""
    tokens = sums["tokens"]
    for key in ("surrogate", "kl", "weight", "clipped_high", "clipped_low", "dual_clipped", "ratio", "approx_kl"):
        metrics.put(f"policy/{key}", sums[key] / max(1.0, tokens), weight=tokens)
    for key in ("loss", "grad_norm", "max_ratio", "min_ratio", "nonfinite"):
        metrics.put(f"policy/{key}", sums[key])
    metrics.put("policy/max_grad_norm", sums["grad_norm"])
    metrics.put("policy/padding", sums["padding"] / sums["positions"], weight=sums["positions"])
