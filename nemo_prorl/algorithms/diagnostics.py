"""What a step says about itself.  Suffixes: B responses, T token positions.  Reduction rules: see the package."""

import torch
from torch import Tensor

from nemo_prorl.algorithms.losses import LossConfig, kl_estimate, token_ratio

_REDUCTIONS = {"mean_": "mean", "fraction_": "mean", "max_": "max", "min_": "min"}


def reduction(key: str) -> str:
    """How a diagnostic of this name is reduced: `sum`, `max`, `min`, or `mean` (weighted with the dict's `tokens`)."""
    return next((how for prefix, how in _REDUCTIONS.items() if key.startswith(prefix)), "sum")


def merge(first: dict[str, Tensor], second: dict[str, Tensor]) -> dict[str, Tensor]:
    """One dict for two disjoint sets of tokens, by the keys' prefixes (see the package's docstring).

    A dict of 0 tokens takes no part in means, maxima and minima.  Both must have the same keys, `tokens` among them
    where a mean, maximum or minimum is.  Raises ValueError if they have not.
    """
    if first.keys() != second.keys():
        raise ValueError(f"cannot merge diagnostics with different keys: {sorted(first.keys() ^ second.keys())}")
    merged: dict[str, Tensor] = {}
    for key, a in first.items():
        b = second[key]
        how = reduction(key)
        if how == "sum":
            merged[key] = a + b
            continue
        if "tokens" not in first:
            raise ValueError(f"cannot merge {key} without a count of tokens")
        in_a, in_b = first["tokens"], second["tokens"]
        if how == "mean":
            both = (a * in_a + b * in_b) / (in_a + in_b).clamp(min=1)
        else:
            both = torch.maximum(a, b) if how == "max" else torch.minimum(a, b)
        merged[key] = torch.where(in_b == 0, a, torch.where(in_a == 0, b, both))
    return merged


def gap_statistics(difference_BT: Tensor, k3_BT: Tensor, mask_BT: Tensor) -> dict[str, Tensor]:
    """`tokens`, `mean_abs`, `max_abs` and `mean_k3` of a gap between two policies; all 0 if no token counts.

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
    """How far the policy before a step's updates is from the reference; exactly 0 right after a hard reset.

    Args:
        old_logp_BT, ref_logp_BT: log-probabilities of the sampled tokens, ignored where the mask is False.
        mask_BT: bool, the response tokens that count.

    Returns:
        `tokens`; `mean_abs`, `max_abs`: of the absolute difference, in nats; `mean_k3`: KL(pi_old || pi_ref) by paper
        eq. 5, of tokens drawn from pi_old.  All 0 if no token counts.
    """
    old_logp = torch.where(mask_BT, old_logp_BT.detach().float(), 0.0)
    ref_logp = torch.where(mask_BT, ref_logp_BT.detach().float(), 0.0)
    return gap_statistics(ref_logp - old_logp, kl_estimate(old_logp, ref_logp, "k3"), mask_BT)


def policy_diagnostics(
    logp_BT: Tensor, old_logp_BT: Tensor, advantage_B: Tensor, mask_BT: Tensor, config: LossConfig
) -> dict[str, Tensor]:
    """How far an update has moved the policy, and what the clipping does to it.

    Args: as `losses.grpo_loss`.

    Returns, as sums over tokens except the last two:
        `tokens`, `positive_tokens`, `negative_tokens`: that count; those of positive and negative advantage.
        `clipped_high`: positive advantage and ratio above 1 + clip_high; `clipped_low`: negative advantage and ratio
        below 1 - clip_low.  These get no gradient from the surrogate.
        `unclipped_high`, `unclipped_low`: beyond the same bounds with the other sign of the advantage: full gradient.
        `dual_clipped`: negative advantage and ratio above dual_clip; no gradient either (0 without dual_clip).
        `ratio`: sum of ratios.  `approx_kl`: sum of k3 of KL(pi_old || pi_theta).
        `min_ratio`, `max_ratio`: 1 if no token counts.
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
    one = ratio.new_ones((), dtype=torch.float64)
    result["min_ratio"] = counted.min() if counted.numel() else one
    result["max_ratio"] = counted.max() if counted.numel() else one
    return result


def response_statistics(mask_BT: Tensor, ended_B: Tensor, entropy_BT: Tensor | None = None) -> dict[str, Tensor]:
    """Lengths, endings and entropy of responses as sums and counts.

    Args:
        mask_BT: bool, the response tokens that count; a response without any is not counted.
        ended_B: bool, the response ended with eos.
        entropy_BT: entropy of each token's distribution, nats, ignored where the mask is False.

    Returns:
        `responses`, `tokens`, `ended`, `max_length` (tokens), and with entropies `entropy` (sum over tokens).
        Mean length is tokens / responses, mean entropy is entropy / tokens.
    """
    length_B = mask_BT.sum(dim=-1).double()
    result = {
        "responses": (length_B > 0).sum().double(),
        "tokens": length_B.sum(),
        "ended": (ended_B & (length_B > 0)).sum().double(),
        "max_length": length_B.max() if length_B.numel() else length_B.new_zeros(()),
    }
    if entropy_BT is not None:
        result["entropy"] = torch.where(mask_BT, entropy_BT.detach().double(), 0.0).sum()
    return result
