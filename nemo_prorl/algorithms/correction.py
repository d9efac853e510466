"""Correction of the gap between the engine that samples and the trainer that learns.  Suffixes: B responses, T tokens.

Engine and trainer run different kernels in different precisions, so tokens drawn from pi_engine are trained on as if
they were drawn from pi_old.  The ratio pi_old / pi_engine of each token, without gradient, corrects for this.
"""

import math

import torch
from torch import Tensor

from nemo_prorl.algorithms.diagnostics import gap_statistics
from nemo_prorl.algorithms.losses import kl_estimate
from nemo_prorl.algorithms.objectives import MAX_LOG_RATIO
from nemo_prorl.config import CorrectionConfig


def rollout_correction(
    old_logp_BT: Tensor, engine_logp_BT: Tensor, mask_BT: Tensor, config: CorrectionConfig
) -> tuple[Tensor, dict[str, Tensor]]:
    """Return the weight of each token in the surrogate, from the ratio r = pi_old / pi_engine.

    - `none`: 1.
    - `tis`: min(r, cap), truncated importance sampling (Yao et al., "Your efficient RL framework secretly brings you
      off-policy RL training", 2025; truncation after Ionides 2008).
    - `icepop`: r within [floor, cap], else 0 (IcePop, Ling team 2025; as INTELLECT-3, arXiv 2512.16144, eq. 1).
    - `sequence_mask`: 1 for all tokens of a response whose geometric mean of r lies within [floor, cap], else 0
      (Liu et al., "When speed kills stability", 2025; the mean's length normalisation is GSPO's, arXiv 2507.18071).

    The bounds belong to the interval.  A token of weight 0 still counts in the loss's denominator.

    Args:
        old_logp_BT: log pi_old of the sampled tokens at the rollout temperature; ignored where the mask is False.
        engine_logp_BT: log pi_engine of the same tokens, likewise.
        mask_BT: bool, the response tokens that count.
        config: `kind`, `cap` (largest ratio; None: no bound) and `floor` (smallest ratio) are used.

    Returns:
        weight_BT: float32 without gradient, 0 where the mask is False.
        gap: `tokens`; `mean_abs` and `max_abs` of |log r| in nats; `mean_k3`: k3 estimate of KL(engine || trainer)
        (paper eq. 5; the engine is the first policy because it drew the tokens); `fraction_capped`: share of tokens
        whose ratio was cut to the cap; `fraction_masked`: share of tokens with weight 0.

    Raises:
        ValueError: a log-probability is nan or infinite at a token that counts (its index is named).
    """
    kind, cap, floor = config.kind, math.inf if config.cap is None else config.cap, config.floor
    old_logp = _counted(old_logp_BT, mask_BT, "old_logp_BT")
    engine_logp = _counted(engine_logp_BT, mask_BT, "engine_logp_BT")

    log_ratio_BT = old_logp - engine_logp
    ratio_BT = log_ratio_BT.clamp(max=MAX_LOG_RATIO).exp()
    capped_BT = masked_BT = torch.zeros_like(mask_BT)
    if kind == "none":
        weight_BT = torch.ones_like(ratio_BT)
    elif kind == "tis":
        capped_BT = mask_BT & (ratio_BT > cap)
        weight_BT = ratio_BT.clamp(max=cap)
    elif kind == "icepop":
        masked_BT = mask_BT & ((ratio_BT > cap) | (ratio_BT < floor))
        weight_BT = ratio_BT
    elif kind == "sequence_mask":
        length_B = mask_BT.sum(dim=-1).clamp(min=1)
        geometric_B = (log_ratio_BT.sum(dim=-1) / length_B).exp()
        masked_BT = mask_BT & ((geometric_B > cap) | (geometric_B < floor))[:, None]
        weight_BT = torch.ones_like(ratio_BT)
    else:
        raise ValueError(f"correction {kind!r}: expected none, tis, icepop or sequence_mask")
    weight_BT = torch.where(mask_BT & ~masked_BT, weight_BT, 0.0)

    gap = gap_statistics(log_ratio_BT, kl_estimate(engine_logp, old_logp, "k3"), mask_BT)
    counted = gap["tokens"].clamp(min=1)
    gap["fraction_capped"] = capped_BT.sum() / counted
    gap["fraction_masked"] = masked_BT.sum() / counted
    return weight_BT, gap


def _counted(logp_BT: Tensor, mask_BT: Tensor, name: str) -> Tensor:
    """Return `logp_BT` as float32 without gradient, and 0 where the mask is False.

    Raises ValueError for nan or inf where the mask is True.
    """
    logp_BT = logp_BT.detach().float()
    bad = (mask_BT & ~torch.isfinite(logp_BT)).nonzero()
    if len(bad):
        row, token = bad[0].tolist()
        value = logp_BT[row, token].item()
        raise ValueError(f"{name}[{row}, {token}]={value}: expected a finite number; {len(bad)} numbers are not finite")
    return torch.where(mask_BT, logp_BT, 0.0)
