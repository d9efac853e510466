"""The training step and the loop around it (paper sec. 3).

`run` is handed in (see `run.py`): its `policy` knows log-probabilities, updates and weights, its `rollouts` judged
groups.  Nothing here knows NeMo, vLLM or HTTP.
"""

from functools import partial
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from nemo_prorl.algorithms.advantages import group_advantages
from nemo_prorl.algorithms.correction import rollout_correction
from nemo_prorl.algorithms.diagnostics import means_by_task, policy_diagnostics, reference_gap, sums_by_task
from nemo_prorl.algorithms.losses import LossConfig, denominator_terms, grpo_loss
from nemo_prorl.algorithms.shaping import Shaping, in_schedule, shaped_rewards
from nemo_prorl.batch import Batch, JudgedGroups
from nemo_prorl.errors import RolloutAbandoned, StoppedCleanly
from nemo_prorl.lifecycle.control import reset_reason
from nemo_prorl.metrics import Metrics
from nemo_prorl.planning.tolerances import engine_gap_alarm

if TYPE_CHECKING:
    from nemo_prorl.rank import Run


def train(run: "Run") -> None:
    """Steps until the run ends; resumable at any kill.  Raises StoppedCleanly when asked to stop in between."""
    try:
        stop_if_asked(run, run.step)  # while engines started
        if run.unfinished is not None:
            finish_step(run, run.unfinished)
        if run.step == 0 and not run.validations:
            run.validate(Metrics(0, run.cfg.stage))
            if run.checkpoint_due(0):
                run.save_checkpoint(0)
        for step in run.remaining_steps():
            with run.traced(step):
                metrics = train_step(run, step)
                run.await_next(metrics)
                finish_step(run, metrics)
    except RolloutAbandoned as stop:  # of a step whose updates are not begun, or of a validation
        run.save_checkpoint(run.step, wait=True)
        raise StoppedCleanly(f"{stop}; what is done is saved, the same command continues") from stop


def finish_step(run: "Run", metrics: Metrics) -> None:
    """What follows a step's updates: validation, log, hard reset, checkpoint, and what somebody asked for meanwhile."""
    step, run.unfinished = metrics.step, metrics
    if run.validation_due(step):
        run.validate(metrics)
    run.log(metrics)  # before the checkpoint, which records the log's length
    run.unfinished = None
    asked = run.asked(step)
    if reason := reset_reason(asked, run.reset_due(metrics)):  # after the log: the rules go by what it holds
        run.hard_reset(step, reason)
    elif run.checkpoint_due(step):
        run.save_checkpoint(step)
    run.serve(asked, step)
    stop_if_asked(run, step)


def stop_if_asked(run: "Run", step: int) -> None:
    """Raises StoppedCleanly, with everything saved, if somebody or the job's end asks for it."""
    if reason := run.stop_reason():
        run.save_checkpoint(step, wait=True)
        raise StoppedCleanly(f"{reason}: stopped after step {step}; the same command continues")


def train_step(run: "Run", step: int) -> Metrics:
    """Rolls out one batch and makes its gradient updates.  A collective of all trainer ranks.

    Raises DeadlineExceeded naming what it waited for, ResetFailure when the policy is not its reference right after
    a reset, and NonFiniteUpdate with weights and optimizer as they were before the update.
    """
    cfg, policy, metrics = run.cfg.trainer.grpo, run.policy, Metrics(step, run.cfg.stage)
    with run.phase("publish", metrics):
        run.publish(version=step - 1)

    with run.phase("rollout", metrics):  # scored while others still generate; dynamic sampling inside
        judged = run.collect(metrics)
    run.step = step
    if not len(judged.draws):
        run.alarm(step, "no group carries a signal; the step makes no update")
        return metrics

    with run.phase("logprobs", metrics):
        rows = judged.rows_of_updates(cfg.updates_per_step, policy.data_size)[policy.data_rank]
        mine = judged.batch()
        old_logp_BT, entropy_BT, ref_logp_BT = run.logprobs(mine, torch.cat(rows))
        gap = policy.reduce(reference_gap(old_logp_BT, ref_logp_BT, mine.mask_BT))
        run.resets.check_reference(step, gap["mean_abs"])
        task_B = judged.task_B[torch.cat(rows)]
        sums = sums_by_task(old_logp_BT, ref_logp_BT, entropy_BT, mine.mask_BT, task_B, judged.tasks)
        for key, value in means_by_task(policy.reduce(sums), judged.tasks).items():
            metrics.put(key, value)

    with run.phase("advantages", metrics):
        advantage_B = advantages(judged, cfg, metrics)[torch.cat(rows)]
        correction = cfg.correction
        weight_BT, corrected = rollout_correction(
            old_logp_BT, mine.engine_logp_BT, mine.mask_BT, correction.kind, correction.cap, correction.floor
        )
        metrics.add("correction", policy.reduce(corrected))
        report_gaps(run, metrics, mine.with_targets(old_logp_BT=old_logp_BT), judged.version_B[torch.cat(rows)])
        mine = mine.with_targets(
            old_logp_BT=old_logp_BT, ref_logp_BT=ref_logp_BT, advantage_B=advantage_B, weight_BT=weight_BT
        )

    with run.phase("updates", metrics):
        config = run.before_updates(step, metrics)
        loss = partial(policy_loss, config=config)
        for update_rows in torch.arange(len(mine)).split([len(r) for r in rows]):
            minibatch = mine.rows(update_rows)
            share = denominator_terms(minibatch.mask_BT, cfg.aggregation, float(cfg.context_tokens))
            denominator = policy.sum_over_data_ranks(float(share))
            if denominator > 0:  # else nothing was left to learn from
                with_entropy = config.entropy_coef != 0.0
                report_update(metrics, policy.update(minibatch, loss, denominator, with_entropy=with_entropy))
    return metrics


def report_gaps(run: "Run", metrics: Metrics, mine: Batch, version_B: Tensor) -> None:
    """How far engine and trainer are apart where both have the same weights, which is what an alarm goes by, and where
    the engine's were older."""
    fresh_BT = mine.mask_BT & (version_B == metrics.step - 1)[:, None]
    parts = {"engine_gap": fresh_BT, "stale_gap": mine.mask_BT & ~fresh_BT}
    gaps = {
        name: run.policy.reduce(reference_gap(mine.engine_logp_BT, mine.old_logp_BT, part_BT))
        for name, part_BT in parts.items()
    }
    tokens = sum(gap["tokens"] for gap in gaps.values())
    for name, gap in gaps.items():
        if gap["tokens"]:
            metrics.add(name, gap)
    if gaps["stale_gap"]["tokens"]:
        metrics.put("stale_gap/share", gaps["stale_gap"]["tokens"] / tokens)
    mean = gaps["engine_gap"]["mean_abs"]
    if mean > engine_gap_alarm(run.cfg):  # type: ignore[arg-type]
        run.alarm(metrics.step, f"engine and trainer differ by {mean:.3g} a token (correction.alarm)")


def advantages(judged: JudgedGroups, cfg: "GRPOConfig", metrics: Metrics) -> Tensor:
    """advantage_B, float32, of all responses from their shaped rewards (paper eq. 2)."""
    longest_GN = judged.longest_GN(cfg.context_tokens, cfg.max_response_tokens)
    reward_GN, changes = shaped_rewards(
        judged.reward_GN, judged.ended_GN, judged.length_GN, longest_GN, shaping_of(cfg, metrics.step)
    )
    advantage_GN = group_advantages(reward_GN, judged.valid_GN, cfg.advantage)
    if bool(judged.valid_GN.any()):
        metrics.put("reward/shaped", float(reward_GN[judged.valid_GN].mean()))
        for task, valid_GN in judged.valid_by_task().items():
            metrics.put(f"reward_shaped/{task}", float(reward_GN[valid_GN].mean()))
        for name, change_GN in changes.items():
            metrics.put(f"shaping/{name}", float(change_GN[judged.valid_GN].mean()))
    return advantage_GN.reshape(-1).float()


def shaping_of(cfg: "GRPOConfig", step: int) -> Shaping:
    """The shapings that a configuration asks for at a step."""
    by_length = cfg.shaping
    return Shaping(
        cfg.unfinished_penalty,
        by_length.overlong_tokens,
        by_length.overlong_penalty,
        by_length.cosine and in_schedule(step, by_length.cosine_every, by_length.cosine_for),
        tuple(by_length.cosine_correct),  # type: ignore[arg-type]
        tuple(by_length.cosine_wrong),  # type: ignore[arg-type]
        by_length.cosine_exceeded,
        cfg.unfinished_factor,
    )


def policy_loss(
    logp_BT: Tensor, entropy_BT: Tensor | None, micro: Batch, denominator: float, config: LossConfig
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


if TYPE_CHECKING:
    from nemo_prorl.config import GRPOConfig
