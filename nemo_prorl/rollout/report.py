"""Functions that compute the metrics of a collected batch for metrics.jsonl."""

from nemo_prorl.metrics import Metrics
from nemo_prorl.rollout.groups import CollectedBatch, TaskTally


def report_rollout(metrics: Metrics, batch: CollectedBatch) -> None:
    """Record a batch's metrics by task and in total (docs/reference/metrics.md); every rank records equal values."""
    for task, tally in sorted(batch.tasks.items()):
        for name, value in (group_metrics(tally) | response_metrics(tally)).items():
            metrics.put(f"{name}/{task}", value)
    total = TaskTally.total(batch.tasks.values())
    for name, value in group_metrics(total).items():
        metrics.put(f"{name}/all", value)
    metrics.add("rollout", response_metrics(total))
    metrics.put("rollout/groups", len(batch.groups))
    metrics.put("rollout/masked", total.masked)
    for name in ("drawn", "carried", "stale", "surplus", "generated_tokens"):
        metrics.put(f"rollout/{name}", getattr(batch, name))
    metrics.add("canaries", batch.canaries)
    metrics.add("second", batch.second)
    ages = [batch.step - 1 - group.version for group in batch.groups]
    metrics.put("rollout/staleness", sum(ages) / max(1, len(ages)))
    for name in ("engine_s", "reward_open_s", "reward_wait_s"):
        metrics.put(f"time/rollout/{name}", getattr(batch, name))
    metrics.add("time/rollout", batch.load)
    if batch.kv_cache_peak is not None:
        metrics.put("system/engine_kv_cache_peak", batch.kv_cache_peak)
    metrics.put("time/rollout/tokens_per_s", batch.generated_tokens / max(batch.wall_s, 1e-9))


def group_metrics(tally: TaskTally) -> dict[str, float]:
    """Return the mean raw reward (nan if there is none) and the shares of kept, solved, unsolved and tied groups."""
    decided = max(1, tally.decided)
    return {
        "reward": tally.mean_score,
        "keep_rate": tally.keep_rate,
        "solved": tally.solved / decided,
        "unsolved": tally.unsolved / decided,
        "tied": tally.tied / decided,
    }


def response_metrics(tally: TaskTally) -> dict[str, float]:
    """Return three means over all responses, dropped groups included.

    `response_tokens`: length in tokens.  `truncated`: share without a stop token.  `repetition`: repeated share, as
    computed by `algorithms.diagnostics.repetition`.
    """
    responses = max(1, tally.responses)
    return {
        "response_tokens": tally.tokens / responses,
        "truncated": 1.0 - tally.finished / responses,
        "repetition": tally.repetition_sum / responses,
    }
