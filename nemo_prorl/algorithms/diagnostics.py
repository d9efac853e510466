"""Statistics of a training step (B responses, T token positions), reduced as `nemo_prorl.algorithms` documents."""

import functools
import math
from array import array
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from nemo_prorl.algorithms.losses import kl_estimate
from nemo_prorl.algorithms.objectives import token_ratio
from nemo_prorl.config import GRPOConfig

_QUARTERS = 4
_GAP_EDGES = torch.logspace(-9, 2, 11 * 24 + 1, dtype=torch.float64)  # nats; a difference belongs to the next edge
_MAX_GAP = 50.0  # nats; limits exp(|difference|)
_MAX_OF_TEMPERATURE = 0.5  # nats; limits the part of a single token in the estimate of a temperature
_SIGMAS = 6.0  # certainty of a difference of temperatures
_REDUCTIONS = {"mean_": "mean", "fraction_": "mean", "max_": "max", "min_": "min"}


def reduction(key: str) -> str:
    """Return how a diagnostic is reduced: `sum`, `max`, `min`, or `mean` (weighted with the dict's `tokens`)."""
    return next((how for prefix, how in _REDUCTIONS.items() if key.startswith(prefix)), "sum")


def merge(first: dict[str, Tensor], second: dict[str, Tensor]) -> dict[str, Tensor]:
    """Merge the dicts of two disjoint sets of tokens, by the prefixes of the keys (see the package's docstring).

    A dict of 0 tokens takes no part in means, maxima and minima.
    """
    merged: dict[str, Tensor] = {}
    for key, a in first.items():
        b = second[key]
        how = reduction(key)
        if how == "sum":
            merged[key] = a + b
            continue
        in_a, in_b = first["tokens"], second["tokens"]
        if how == "mean":
            both = (a * in_a + b * in_b) / (in_a + in_b).clamp(min=1)
        else:
            both = torch.maximum(a, b) if how == "max" else torch.minimum(a, b)
        merged[key] = torch.where(in_b == 0, a, torch.where(in_a == 0, b, both))
    return merged


def gap_statistics(difference_BT: Tensor, k3_BT: Tensor, mask_BT: Tensor) -> dict[str, Tensor]:
    """Return `tokens`, `mean_abs`, `max_abs` and `mean_k3` of a gap between two policies; all 0 if no token counts.

    Both value tensors must be 0 where the mask is False.
    """
    tokens = mask_BT.sum().double()
    size_BT = difference_BT.detach().double().abs()
    return {
        "tokens": tokens,
        "mean_abs": size_BT.sum() / tokens.clamp(min=1),
        "max_abs": size_BT.max() if size_BT.numel() else size_BT.new_zeros(()),
        "mean_k3": k3_BT.detach().sum(dtype=torch.float64) / tokens.clamp(min=1),
    }


def reference_gap(old_logp_BT: Tensor, ref_logp_BT: Tensor, mask_BT: Tensor) -> dict[str, Tensor]:
    """Measure how far the policy is from the reference policy before a step's updates.

    The distance is 0 right after a hard reset.

    Args:
        old_logp_BT: log pi_old of the sampled tokens, ignored where the mask is False.
        ref_logp_BT: log pi_ref of the same tokens, likewise.
        mask_BT: bool, the response tokens that count.

    Returns:
        `tokens`; `mean_abs`, `max_abs`: of the absolute difference, in nats; `mean_k3`: KL(pi_old || pi_ref) by paper
        eq. 5, of tokens drawn from pi_old.  All 0 if no token counts.
    """
    old_logp = torch.where(mask_BT, old_logp_BT.detach().float(), 0.0)
    ref_logp = torch.where(mask_BT, ref_logp_BT.detach().float(), 0.0)
    return gap_statistics(ref_logp - old_logp, kl_estimate(old_logp, ref_logp, "k3"), mask_BT)


def gap_profile(first_logp_BT: Tensor, second_logp_BT: Tensor, mask_BT: Tensor) -> Tensor:
    """Count the absolute differences of two policies' log-probabilities by size and by place in the response.

    Args:
        first_logp_BT: log-probabilities of one policy in nats, ignored where the mask is False.
        second_logp_BT: log-probabilities of the other policy for the same tokens, likewise.
        mask_BT: bool, the response tokens that count.

    Returns:
        float64 [4, 2 + bins] on the CPU: for each quarter of the responses the sums of |difference| and of
        exp(|difference|), and the number of tokens in each of the bins of `_GAP_EDGES`.  Profiles of disjoint tokens
        add up.
    """
    size_BT = torch.where(mask_BT, second_logp_BT.detach().double() - first_logp_BT.detach().double(), 0.0).abs()
    place_BT = (mask_BT.cumsum(1) - 1) * _QUARTERS // mask_BT.sum(1, keepdim=True).clamp(min=1)
    size_N, place_N = size_BT[mask_BT].cpu(), place_BT[mask_BT].cpu()
    bin_N = torch.bucketize(size_N, _GAP_EDGES)
    profile = torch.zeros(_QUARTERS, 3 + len(_GAP_EDGES), dtype=torch.float64)
    profile[:, 0].index_add_(0, place_N, size_N)
    profile[:, 1].index_add_(0, place_N, size_N.clamp(max=_MAX_GAP).exp())
    profile.view(-1).index_add_(0, place_N * profile.shape[1] + 2 + bin_N, torch.ones_like(size_N))
    return profile


def gap_numbers(profile: Tensor) -> dict[str, float]:
    """Return numbers of a `gap_profile`; {} if it has no tokens.

    Returns:
        `mean_ratio`: mean of exp(|difference|), which few tokens with a large difference raise.
        `p999`: 99.9th percentile of the absolute difference in nats, rounded up to the next of 24 bins per decade.
        `mean_abs_quarter1` to `mean_abs_quarter4`: mean absolute difference in the quarters of the responses.
    """
    counts = profile[:, 2:].sum(0)
    tokens = counts.sum()
    if not tokens:
        return {}
    place = int((counts.cumsum(0) < 0.999 * tokens).sum())
    numbers = {
        "mean_ratio": float(profile[:, 1].sum() / tokens),
        "p999": float(_GAP_EDGES[min(place, len(_GAP_EDGES) - 1)]),
    }
    of_quarters = profile[:, 2:].sum(1)
    for quarter in range(_QUARTERS):
        if of_quarters[quarter]:
            numbers[f"mean_abs_quarter{quarter + 1}"] = float(profile[quarter, 0] / of_quarters[quarter])
    return numbers


def temperature_sums(
    engine_logp_BT: Tensor, old_logp_BT: Tensor, entropy_BT: Tensor, mask_BT: Tensor
) -> dict[str, Tensor]:
    """Return sums from which `temperature_ratio` estimates the engine's temperature.

    At temperature T / (1 + c) a log-probability is larger by c (log p + H) than at T, to first order in c.  H is the
    entropy of the token's distribution.  The mean of log p + H is 0, so c is the slope of a line through 0.

    Args:
        engine_logp_BT: log-probabilities by the engine in nats, ignored where the mask is False.
        old_logp_BT: log-probabilities by the trainer of the same tokens, likewise.
        entropy_BT: entropy of the trainer's distributions in nats, likewise.
        mask_BT: bool, the response tokens that count.
    """
    x_N = (old_logp_BT + entropy_BT).detach().double()[mask_BT]
    y_N = (engine_logp_BT - old_logp_BT).detach().double()[mask_BT].clamp(-_MAX_OF_TEMPERATURE, _MAX_OF_TEMPERATURE)
    return {"tokens": mask_BT.sum().double(), "xx": (x_N * x_N).sum(), "xy": (x_N * y_N).sum(), "yy": (y_N * y_N).sum()}


def temperature_ratio(sums: Mapping[str, float]) -> float:
    """Return the engine's temperature divided by the trainer's, estimated from the sums of `temperature_sums`.

    The result is 1 unless the difference is certain (6 standard deviations).  Outside of 0.95 to 1.05 the result is
    nearer to 1 than the true ratio, because differences are limited to 0.5 nats and the formula is of first order: 2
    reads as 1.1 to 1.2.
    """
    xx, xy, yy = sums["xx"], sums["xy"], sums["yy"]
    if sums["tokens"] * xy * xy <= _SIGMAS**2 * xx * yy:
        return 1.0
    return 1.0 / max(0.01, 1.0 + xy / xx)


def policy_diagnostics(
    logp_BT: Tensor, old_logp_BT: Tensor, advantage_B: Tensor, mask_BT: Tensor, config: GRPOConfig
) -> dict[str, Tensor]:
    """Measure how far an update has moved the policy, and how much of it is clipped.

    The arguments are those of `losses.grpo_loss`.

    Returns:
        Counts of tokens where the mask is True:
        `tokens`: all; `positive_tokens`, `negative_tokens`: those with positive and with negative advantage.
        `clipped_high`: positive advantage, ratio above 1 + clip_high: no gradient from the surrogate.
        `clipped_low`: negative advantage, ratio below 1 - clip_low: no gradient from the surrogate.
        `unclipped_high`: negative advantage, ratio above 1 + clip_high, not in `dual_clipped`: full gradient.
        `unclipped_low`: positive advantage, ratio below 1 - clip_low: full gradient.
        `dual_clipped`: negative advantage, ratio above dual_clip: no gradient (0 if dual_clip is not set).
        Other values: `ratio`: sum of ratios; `approx_kl`: sum of k3 of KL(pi_old || pi_theta); `min_ratio`,
        `max_ratio`: inf and -inf if there are no tokens, which changes no minimum or maximum when merged.
    """
    logp = torch.where(mask_BT, logp_BT.detach().float(), 0.0)
    old_logp = torch.where(mask_BT, old_logp_BT.detach().float(), 0.0)
    ratio = token_ratio(logp, old_logp)
    positive = mask_BT & (advantage_B.detach()[:, None] > 0)
    negative = mask_BT & (advantage_B.detach()[:, None] < 0)
    high, low = ratio > 1.0 + config.clip_high, ratio < 1.0 - config.clip_low
    dual = torch.zeros_like(negative) if config.dual_clip is None else negative & (ratio > config.dual_clip)
    sums = {
        "tokens": mask_BT,
        "positive_tokens": positive,
        "negative_tokens": negative,
        "clipped_high": positive & high,
        "clipped_low": negative & low,
        "unclipped_high": negative & high & ~dual,
        "unclipped_low": positive & low,
        "dual_clipped": dual,
        "ratio": torch.where(mask_BT, ratio, 0.0),
        "approx_kl": kl_estimate(old_logp, logp, "k3"),
    }
    result = {name: value.sum(dtype=torch.float64) for name, value in sums.items()}
    counted = ratio[mask_BT].double()
    result["min_ratio"] = counted.min() if counted.numel() else torch.full_like(result["ratio"], math.inf)
    result["max_ratio"] = counted.max() if counted.numel() else torch.full_like(result["ratio"], -math.inf)
    return result


def sums_by_task(
    old_logp_BT: Tensor,
    ref_logp_BT: Tensor,
    entropy_BT: Tensor | None,
    mask_BT: Tensor,
    task_B: Tensor,
    tasks: Sequence[str],
) -> dict[str, Tensor]:
    """Return entropy and KL to the reference of each task, as sums over its response tokens.

    Args:
        old_logp_BT: log pi_old in nats, ignored where the mask is False.
        ref_logp_BT: log pi_ref, likewise.
        entropy_BT: entropy of each token's distribution in nats, likewise; None: not known.
        mask_BT: bool, the response tokens that count.
        task_B: int64, index of each response's task in `tasks`.

    Returns:
        `tokens/TASK`, `entropy/TASK` (if it is known) and `kl/TASK` (k3) of every task in `tasks`, even if no response
        here belongs to it: all ranks have the same keys.
    """
    old_logp = torch.where(mask_BT, old_logp_BT.detach().float(), 0.0)
    ref_logp = torch.where(mask_BT, ref_logp_BT.detach().float(), 0.0)
    values = {"tokens": mask_BT, "kl": kl_estimate(old_logp, ref_logp, "k3")}
    if entropy_BT is not None:
        values["entropy"] = torch.where(mask_BT, entropy_BT.detach(), 0.0)
    sums: dict[str, Tensor] = {}
    for name, value_BT in values.items():
        value_B = value_BT.sum(dim=1, dtype=torch.float64)
        of_tasks = value_B.new_zeros(len(tasks)).index_add_(0, task_B, value_B)
        sums |= {f"{name}/{task}": of_tasks[index] for index, task in enumerate(tasks)}
    return sums


def means_by_task(sums: Mapping[str, float], tasks: Sequence[str]) -> dict[str, float]:
    """Return `entropy` and `kl` per token over all tasks, and `entropy/TASK` and `kl/TASK` per token of each task.

    Without entropies in `sums`, there are none in the result.

    `sums` are the results of `sums_by_task`, summed over all ranks.  A task without a token that counts is left out.
    """
    tokens = {task: sums[f"tokens/{task}"] for task in tasks}
    means: dict[str, float] = {}
    for name in sorted({key.partition("/")[0] for key in sums} - {"tokens"}):
        of_tasks = {task: sums[f"{name}/{task}"] for task in tasks}
        means[name] = sum(of_tasks.values()) / max(1.0, sum(tokens.values()))
        means |= {f"{name}/{task}": value / tokens[task] for task, value in of_tasks.items() if tokens[task]}
    return means


def repetition(token_ids: Sequence[int]) -> float:
    """Return the share of a response's n-grams that occurred earlier in it: near 0 in ordinary text, near 1 in a loop.

    n is 16: in windows of 8,000 BPE tokens of English prose, read-me files and Python source 3 to 4 % of 16-grams
    repeat, but 5 to 13 % of 8-grams and 13 to 33 % of 4-grams.  16-grams detect loops of any period.  Below 64 tokens,
    n is a quarter of the response's length, but at least 4.  n-grams are compared by a 64-bit hash.
    """
    n = min(16, max(4, len(token_ids) // 4))
    places = len(token_ids) - n + 1
    if places < 2:
        return 0.0
    ids = torch.frombuffer(array("q", token_ids), dtype=torch.int64)
    hashes = (ids.unfold(0, n, 1) * _powers(n)).sum(1).numpy()
    hashes.sort()  # several times as fast as torch's
    return int((hashes[1:] == hashes[:-1]).sum()) / places


@functools.cache
def _powers(count: int) -> Tensor:
    """Return `count` powers of an odd number, modulo 2^64, for a polynomial hash."""
    return torch.full((count,), 6364136223846793005, dtype=torch.int64).cumprod(0)
