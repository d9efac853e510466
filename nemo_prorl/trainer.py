"""The GRPO training step and the loop around it (paper sec. 3).  Start reading the code here.

Every trainer rank runs this file on its share of the batch.  `rank.py` builds the parts that `Trainer` combines.  The
parts do not know the trainer, and this file does not know NeMo, vLLM or HTTP.

Shape suffixes: B responses of this data rank, T token positions, G groups (one per prompt), N responses per group.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any, TypedDict

import torch
from torch import Tensor

from nemo_prorl.algorithms.advantages import group_advantages
from nemo_prorl.algorithms.correction import rollout_correction
from nemo_prorl.algorithms.diagnostics import (
    gap_numbers,
    gap_profile,
    means_by_task,
    policy_diagnostics,
    reference_gap,
    sums_by_task,
    temperature_ratio,
    temperature_sums,
)
from nemo_prorl.algorithms.entropy import AdaptiveEntropy
from nemo_prorl.algorithms.losses import denominator_terms, grpo_loss
from nemo_prorl.algorithms.schedule import learning_rate
from nemo_prorl.algorithms.shaping import shaped_rewards
from nemo_prorl.batch import Batch, JudgedGroups
from nemo_prorl.config import Config, GRPOConfig, SchedKeys
from nemo_prorl.errors import ConfigError, NonFiniteUpdate, RolloutAbandoned, StoppedCleanly
from nemo_prorl.lifecycle.control import reset_reason
from nemo_prorl.lifecycle.no_signal import diagnosis
from nemo_prorl.lifecycle.tolerances import RATIO_PER_GAP, TEMPERATURE, engine_gap_alarm
from nemo_prorl.metrics import Metrics, MetricsState
from nemo_prorl.schema import Count

if TYPE_CHECKING:  # parts that `rank.py` builds and passes in
    from nemo_prorl.leader import Leader
    from nemo_prorl.lifecycle.checkpoints import Checkpoints
    from nemo_prorl.lifecycle.control import Control
    from nemo_prorl.lifecycle.ledger import Ledger
    from nemo_prorl.lifecycle.resets import Resets
    from nemo_prorl.lifecycle.run_records import Records
    from nemo_prorl.lifecycle.step_traces import StepTraces
    from nemo_prorl.lifecycle.stopping import Stopping
    from nemo_prorl.lifecycle.trials import Trials
    from nemo_prorl.lifecycle.validation import Validation
    from nemo_prorl.lifecycle.watchdog import Watchdog
    from nemo_prorl.rollout.rollouts import Rollouts
    from nemo_prorl.sizing.flops import UpdateSpeed


_CONTROL_EVERY = 10  # steps between two measurements of the gap, where pi_old is the engine's


class ProgressState(TypedDict):
    """The progress of a run."""

    step: Count
    """last step whose updates were made; 0 before the first step"""
    without_signal: Count
    """number of steps in a row, up to `step`, without a group to train on"""
    signal_lost: Count
    """how often the run had such a step after one with a signal, or as its first"""
    nonfinite: Count
    """number of updates in a row, up to the last one, that were skipped because they were not finite"""
    unfinished: MetricsState | None
    """metrics of `step` if its validation was abandoned at a stop, otherwise null; a resumed run validates first"""


@dataclass
class RunProgress:
    """The progress of a run, saved in each checkpoint."""

    step: int = 0  # last step whose batch was collected; in a checkpoint, its updates are made
    unfinished: Metrics | None = None  # metrics of `step` from the end of its updates until they are logged
    without_signal: int = 0  # steps in a row without a group to train on
    signal_lost: int = 0  # stretches of such steps so far
    nonfinite: int = 0  # updates in a row that were skipped because they were not finite

    def state_dict(self) -> ProgressState:
        unfinished = self.unfinished.to_json() if self.unfinished is not None else None
        return {
            "step": self.step,
            "without_signal": self.without_signal,
            "signal_lost": self.signal_lost,
            "nonfinite": self.nonfinite,
            "unfinished": unfinished,
        }

    def load_state_dict(self, state: ProgressState) -> None:
        self.step = state["step"]
        self.without_signal = state["without_signal"]
        self.signal_lost = state.get("signal_lost", 0)  # absent in checkpoints of earlier commits
        self.nonfinite = state.get("nonfinite", 0)  # the same
        unfinished = state["unfinished"]
        self.unfinished = Metrics.from_json(unfinished) if unfinished is not None else None


@dataclass
class Trainer:
    """A trainer rank.  All ranks must call each method together, because the methods use collectives."""

    cfg: Config
    policy: Any  # a policy.actor.Actor: log-probabilities, updates, weights, reference
    progress: RunProgress
    rollouts: "Rollouts"
    validation: "Validation"
    resets: "Resets"
    trials: "Trials"
    checkpoints: "Checkpoints"
    control: "Control"
    records: "Records"
    stopping: "Stopping"
    entropy: AdaptiveEntropy
    speed: "UpdateSpeed"
    traces: "StepTraces"
    watchdog: "Watchdog"
    leader: "Leader"
    ledger: "Ledger"

    # --- the loop --------------------------------------------------------------------------------------------------

    def train(self) -> None:
        """Train from the current step to `max_steps`.  A run that is killed at any point can be resumed.

        Raises:
            StoppedCleanly: a stop was requested, or steps found nothing to train on; a checkpoint is complete.
        """
        progress = self.progress
        try:
            self.stop_if_requested(progress.step)  # the request may have come while engines started
            if progress.unfinished is not None:
                self.finish_step(progress.unfinished)
            if progress.step == 0 and not self.validation.scores:
                self.validate(Metrics(0, self.cfg.stage))
                if self.checkpoints.due(0):
                    self.checkpoints.save(0)
            while self.steps_are_left():
                step = progress.step + 1
                with self.traces.step(step):
                    with self.watchdog.watch(step):
                        metrics = self.train_step(step)
                        self.rollouts.await_next(metrics)
                    self.finish_step(metrics)
                self.stop_without_signal(metrics)
        except RolloutAbandoned as stop:  # raised before a step's first update, or in a validation
            reason = self.leader.call(self.stopping.reason)
            self.checkpoints.save(progress.step, wait=True)
            raise StoppedCleanly(f"{reason}: {stop}; finished steps are saved; the same command continues") from stop

    def steps_are_left(self) -> bool:
        """Return whether another step follows.  A trial of a reset may go back to an earlier step first."""
        self.trials.change_arm(self.progress.step)
        return self.progress.step < self.cfg.trainer.grpo.max_steps

    def finish_step(self, metrics: Metrics) -> None:
        """Do the work that follows a step's updates: validation, log, hard reset or checkpoint, control requests."""
        step, self.progress.unfinished = metrics.step, metrics
        if self.validation.due(step):
            with self.watchdog.watch(step, "validation"):
                self.validate(metrics)
        self.records.log(metrics)  # before the checkpoint, which records the length of metrics.jsonl
        self.progress.unfinished = None
        requests = self.control.pending(step)
        asked = self.resets.reason(metrics)  # after the log, whose lines the rules use
        tries = self.trials.begin(step, asked)
        if reason := reset_reason(requests, None if self.trials.on else asked):
            self.trials.end_by_request(step)
            with self.watchdog.watch(step, "reset"):
                self.resets.perform(step, reason, self.checkpoints)  # includes a checkpoint
        elif tries or self.checkpoints.due(step):
            with self.watchdog.watch(step, "checkpoint"):
                self.checkpoints.save(step, wait=tries)
        self.control.serve(requests, step)
        self.stop_if_requested(step)
        if self.resets.stop is not None and step < self.cfg.trainer.grpo.max_steps:
            self.checkpoints.save(step, wait=True)
            cause = f"{self.resets.stop} (trainer.resets.mode=stop)"
            raise StoppedCleanly(f"stopped after step {step}, which is saved: {cause}; the same command continues")

    def validate(self, metrics: Metrics) -> None:
        """Validate the current weights, and write the scores into the metrics and summary.json."""
        self.validation.run(metrics)
        self.write_summary()

    def write_summary(self, hashes: Mapping[str, str] | None = None) -> None:
        self.records.summary(self.progress.step, self.validation.scores, self.resets.done, hashes)

    def stop_if_requested(self, step: int) -> None:
        """Save a checkpoint and raise StoppedCleanly if a signal, a user or the end of the job requests a stop."""
        if reason := self.leader.call(self.stopping.reason):
            self.checkpoints.save(step, wait=True)
            raise StoppedCleanly(f"{reason}: stopped after step {step}, which is saved; the same command continues")

    def stop_without_signal(self, metrics: Metrics) -> None:
        """Save a checkpoint and raise StoppedCleanly after `max_steps_without_signal` steps without an update."""
        most, steps = self.cfg.trainer.grpo.max_steps_without_signal, self.progress.without_signal
        if most and steps >= most and metrics.step < self.cfg.trainer.grpo.max_steps:
            self.checkpoints.save(metrics.step, wait=True)
            raise StoppedCleanly(
                f"stopped after step {metrics.step}: {steps} steps in a row made no update"
                f" (trainer.grpo.max_steps_without_signal={most}): {self.leader.call(lambda: self._diagnosis(metrics))}"
            )

    def _note_no_signal(self, metrics: Metrics) -> None:
        """Count a step without a group to train on; alarm at the 1st, 2nd, 4th, 8th ... loss of the signal."""
        progress = self.progress
        progress.without_signal += 1
        progress.signal_lost += progress.without_signal == 1
        if progress.without_signal == 1 and progress.signal_lost.bit_count() == 1:
            often = f" ({progress.signal_lost} times so far)" if progress.signal_lost > 1 else ""
            text = self.leader.call(lambda: self._diagnosis(metrics))
            self.records.alarm(metrics.step, f"no group carries a signal{often}: {text}")

    def _diagnosis(self, metrics: Metrics) -> str:
        return diagnosis(metrics, self.records.lines(), self.records.stored_responses(metrics.step))

    def finish(self) -> None:
        """Complete the records of a run that has made all its steps."""
        self.checkpoints.wait()
        self.leader.call(self.traces.close)  # all ranks wait, because a node's services end with its ranks
        policy = self.policy
        self.write_summary({"weights_sha256": policy.weights_sha256(), "reference_sha256": policy.reference_sha256()})
        self.records.event("finish", self.progress.step)
        self.control.close(self.progress.step)

    # --- the step --------------------------------------------------------------------------------------------------

    def train_step(self, step: int) -> Metrics:
        """Roll out one batch of groups and make its gradient updates.

        Raises:
            DeadlineExceeded: a wait took too long; the error names the peer or file.
            ResetFailure: policy and reference differ on the first step of a run or right after a hard reset.
            NonFiniteUpdate: `max_nonfinite_updates` updates in a row were inf or nan; none of them changed anything.
            RolloutAbandoned: a stop was requested and the rollout took too long; the step has not begun its updates.
        """
        cfg, policy, metrics = self.cfg.trainer.grpo, self.policy, Metrics(step, self.cfg.stage)
        with metrics.phase("publish"):
            self.ledger.begin()
            self.rollouts.publish(version=step - 1)
        with metrics.phase("rollout"):  # includes rewards and dynamic sampling, which overlap with generation
            groups = self.rollouts.collect(metrics)
        self.progress.step = step
        if not len(groups.draws):
            self._note_no_signal(metrics)
            self.ledger.end(metrics)
            return metrics
        self.progress.without_signal = 0

        with metrics.phase("logprobs"):
            # `groups` has the rewards of all responses, and the tokens of this data rank's responses only.
            update_rows = groups.rows_of_updates(cfg.updates_per_step, policy.data_ranks.size)[policy.data_ranks.rank]
            row_B = torch.cat(update_rows)  # this rank's responses, as positions among all responses of the step
            batch = groups.batch()
            measures = self.measures_logprobs(step)
            old_logp_BT, entropy_BT = policy.logprobs(batch) if measures else (batch.engine_logp_BT, None)
            ref_logp_BT = policy.reference_logprobs(batch)
            gap = policy.data_ranks.reduce(reference_gap(old_logp_BT, ref_logp_BT, batch.mask_BT))
            self.resets.check_reference(step, gap["mean_abs"])
            task_B = groups.task_B[row_B]
            sums = sums_by_task(old_logp_BT, ref_logp_BT, entropy_BT, batch.mask_BT, task_B=task_B, tasks=groups.tasks)
            for key, value in means_by_task(policy.data_ranks.reduce(sums), groups.tasks).items():
                metrics.put(key, value)

        with metrics.phase("advantages"):
            advantage_B = advantages(groups, cfg, metrics)[row_B]
            weight_BT, corrected = rollout_correction(old_logp_BT, batch.engine_logp_BT, batch.mask_BT, cfg.correction)
            if entropy_BT is not None:
                self.ledger.gaps(step, groups, row_B, old_logp_BT - batch.engine_logp_BT)
                metrics.add("correction", policy.data_ranks.reduce(corrected))
                self.report_gaps(metrics, batch, old_logp_BT, entropy_BT=entropy_BT, version_B=groups.version_B[row_B])
            batch = batch.with_targets(
                old_logp_BT=batch.engine_logp_BT if cfg.old_logp == "engine" else old_logp_BT,
                ref_logp_BT=ref_logp_BT,
                advantage_B=advantage_B,
                weight_BT=weight_BT,
                group_tokens_B=groups.group_tokens_B()[row_B],
            )
            self.ledger.responses(
                row_B, old_logp=old_logp_BT, ref_logp=ref_logp_BT, advantage=advantage_B, weight=weight_BT
            )

        with metrics.phase("updates"):
            config = self.before_updates(metrics)
            for minibatch_rows in torch.arange(len(batch)).split([len(rows) for rows in update_rows]):
                self.update_or_skip(batch.rows(minibatch_rows), config, metrics)
        length_B = batch.length_B.double()
        tokens, squares = (policy.data_ranks.sum(float(value_B.sum())) for value_B in (length_B, length_B**2))
        self.ledger.end(metrics)
        metrics.add("time/updates", self.speed.metrics(tokens, squares, metrics["time/updates"]))
        return metrics

    def update_or_skip(self, minibatch: Batch, config: GRPOConfig, metrics: Metrics) -> None:
        """Make one optimizer step.  If it is not finite, skip it with an alarm: weights and optimizer stay as they are.

        Raises NonFiniteUpdate: this was number `max_nonfinite_updates` in a row.
        """
        progress, most = self.progress, config.max_nonfinite_updates
        try:
            update(self.policy, minibatch, config, metrics)
        except NonFiniteUpdate as error:
            progress.nonfinite += 1
            metrics.put("policy/max_skipped", progress.nonfinite)
            if progress.nonfinite >= most:
                raise NonFiniteUpdate(f"{error}; {most} in a row (trainer.grpo.max_nonfinite_updates)") from error
            batch = f"; its batch is batches/step-{metrics.step:06d}.safetensors" if config.keep_batches else ""
            self.records.alarm(metrics.step, f"an update was skipped ({progress.nonfinite} in a row): {error}{batch}")
        else:
            progress.nonfinite = 0
        self.ledger.update(lr=metrics["policy/lr"], entropy_coef=float(config.entropy_coef))

    def measures_logprobs(self, step: int) -> bool:
        """Return whether the trainer computes the log-probabilities of its policy in this step.

        With `old_logp=engine` it does so in every tenth step, for the gap to the engine, and where policy and reference
        should be equal.
        """
        return self.cfg.trainer.grpo.old_logp == "trainer" or self.resets.fresh or step % _CONTROL_EVERY == 1

    def before_updates(self, metrics: Metrics) -> GRPOConfig:
        """Set the step's learning rate; return the loss settings with the step's entropy coefficient."""
        optim, grpo, resets = self.cfg.model["optim"], self.cfg.trainer.grpo, self.cfg.trainer.resets
        lr = learning_rate(
            base=float(optim["lr"]),
            sched=SchedKeys(**optim.get("sched", {})),
            resets=resets,
            step=metrics.step,
            steps=grpo.max_steps,
            done=self.resets.steps,
            of_optimizer=self.resets.of_optimizer,
        )
        self.policy.set_learning_rate(lr)
        metrics.put("policy/lr", lr)
        if not grpo.adaptive_entropy.enabled:
            return grpo
        coefficient = self.entropy.update(self.leader.call(lambda: metrics["entropy"]))
        metrics.put("policy/entropy_coef", coefficient)
        return replace(grpo, entropy_coef=coefficient)

    def report_gaps(
        self, metrics: Metrics, batch: Batch, own_logp_BT: Tensor, *, entropy_BT: Tensor, version_B: Tensor
    ) -> None:
        """Report the gap between the log-probabilities of engine and trainer; raise alarms if it is too large.

        `engine_gap` covers responses that the engine made with the trainer's present weights, and only it can raise
        alarms.  `stale_gap` covers responses made with older weights.

        Args:
            own_logp_BT: log-probabilities by the trainer's weights, in nats.
            entropy_BT: entropy of the trainer's distribution of each token, in nats.
            version_B: int64, version of the weights that made each response.

        Raises:
            ConfigError: pi_old is the engine's policy, and differs from the trainer's by more than the alarm allows.
        """
        fresh_BT = batch.mask_BT & (version_B == metrics.step - 1)[:, None]
        masks = {"engine_gap": fresh_BT, "stale_gap": batch.mask_BT & ~fresh_BT}
        gaps = {
            name: self.policy.data_ranks.reduce(reference_gap(batch.engine_logp_BT, own_logp_BT, mask_BT))
            for name, mask_BT in masks.items()
        }
        profile = gap_profile(batch.engine_logp_BT, own_logp_BT, fresh_BT)
        gaps["engine_gap"] |= gap_numbers(sum(self.policy.data_ranks.gather(profile)))
        tokens = sum(gap["tokens"] for gap in gaps.values())
        for name, gap in gaps.items():
            if gap["tokens"]:
                metrics.add(name, gap)
        if gaps["stale_gap"]["tokens"]:
            metrics.put("stale_gap/share", gaps["stale_gap"]["tokens"] / tokens)
        mean, limit = gaps["engine_gap"]["mean_abs"], engine_gap_alarm(self.cfg)  # type: ignore[arg-type]
        ratio, most = gaps["engine_gap"].get("mean_ratio", 1.0), 1.0 + RATIO_PER_GAP * max(limit, mean)
        sums = temperature_sums(batch.engine_logp_BT, own_logp_BT, entropy_BT, fresh_BT)
        warmer = temperature_ratio(self.policy.data_ranks.reduce(sums))
        if abs(warmer - 1.0) > TEMPERATURE:
            percent, way = 100.0 * abs(warmer - 1.0), "higher" if warmer > 1.0 else "lower"
            self.records.alarm(
                metrics.step,
                f"the temperature of the engine is at least {percent:.3g} % {way} than trainer.grpo.temperature",
            )
        if mean > limit and self.cfg.trainer.grpo.old_logp == "engine":
            raise ConfigError(
                f"trainer.grpo.old_logp=engine: in step {metrics.step} engine and trainer differ by {mean:.3g} nats per"
                f" token; at most {limit:g} is allowed (trainer.grpo.correction.alarm). Fix: old_logp=trainer"
            )
        if mean > limit:
            self.records.alarm(
                metrics.step,
                f"engine and trainer differ by {mean:.3g} nats per token; {limit:g} is allowed (correction.alarm)",
            )
        if ratio > most:
            self.records.alarm(
                metrics.step,
                f"engine and trainer differ much in few tokens: their ratio of probabilities is {ratio:.3g} on average;"
                f" {most:.3g} is allowed (1 + {RATIO_PER_GAP:g} x correction.alarm, or x a larger mean difference)",
            )


def update(policy: Any, minibatch: Batch, config: GRPOConfig, metrics: Metrics) -> None:
    """Make one optimizer step on this rank's rows of a mini-batch."""
    constant = float(config.context_tokens)
    share = denominator_terms(minibatch.mask_BT, config.aggregation, constant, minibatch.group_tokens_B)
    denominator = policy.data_ranks.sum(float(share))
    if denominator > 0:  # 0 if no rank has a token to train on
        loss, with_entropy = partial(policy_loss, config=config), config.entropy_coef != 0.0
        report_update(metrics, policy.update(minibatch, loss, denominator, with_entropy=with_entropy))


def advantages(groups: JudgedGroups, cfg: GRPOConfig, metrics: Metrics) -> Tensor:
    """Return the advantages of all responses of the step, from their shaped rewards (paper eq. 2).

    Returns:
        float32 [G * N], group after group; the caller selects the rows of its rank.
    """
    longest_GN = groups.longest_GN(cfg.context_tokens, cfg.max_response_tokens)
    reward_GN, changes = shaped_rewards(
        groups.reward_GN, groups.ended_GN, groups.length_GN, longest_GN, config=cfg, step=metrics.step
    )
    advantage_GN = group_advantages(reward_GN, groups.valid_GN, cfg.advantage)
    if bool(groups.valid_GN.any()):
        metrics.put("reward/shaped", float(reward_GN[groups.valid_GN].mean()))
        for task, valid_GN in groups.valid_by_task().items():
            metrics.put(f"reward_shaped/{task}", float(reward_GN[valid_GN].mean()))
        for name, change_GN in changes.items():
            metrics.put(f"shaping/{name}", float(change_GN[groups.valid_GN].mean()))
    return advantage_GN.reshape(-1).float()


def policy_loss(
    logp_BT: Tensor, entropy_BT: Tensor | None, micro: Batch, denominator: float, config: GRPOConfig
) -> tuple[Tensor, dict[str, Tensor]]:
    """Return a micro-batch's share of the update's loss, and sums for `report_update`.

    Args:
        denominator: global denominator of the whole update, over all micro-batches and ranks.
    """
    loss, sums = grpo_loss(
        logp_BT,
        old_logp_BT=micro.old_logp_BT,
        ref_logp_BT=micro.ref_logp_BT,
        advantage_B=micro.advantage_B,
        mask_BT=micro.mask_BT,
        weight_BT=micro.weight_BT,
        denominator=denominator,
        config=config,
        entropy_BT=entropy_BT,
        group_tokens_B=micro.group_tokens_B,
    )
    diagnostics = policy_diagnostics(logp_BT, micro.old_logp_BT, micro.advantage_B, micro.mask_BT, config)
    return loss, {**diagnostics, **sums}


def report_update(metrics: Metrics, sums: dict[str, float]) -> None:
    """Add an update's sums to the metrics, averaged over the tokens of all updates of the step."""
    tokens = sums["tokens"]
    for key in ("surrogate", "kl", "weight", "clipped_high", "clipped_low", "dual_clipped", "ratio", "approx_kl"):
        metrics.put(f"policy/{key}", sums[key] / tokens, weight=tokens)
    for key in ("loss", "grad_norm", "max_ratio", "min_ratio", "nonfinite"):
        metrics.put(f"policy/{key}", sums[key])
    metrics.put("policy/max_grad_norm", sums["grad_norm"])
    metrics.put("policy/padding", sums["padding"] / sums["positions"], weight=sums["positions"])
    metrics.put("system/max_shapes", sums["max_shapes"])
