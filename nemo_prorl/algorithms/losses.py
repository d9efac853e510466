"""The policy loss of one micro-batch (paper eq. 1, 3, 4, 5).  Suffixes: B responses, T token positions.

The objective of each token comes from `objectives`, by name.  Signs: an objective is better if it is higher;
`grpo_loss` returns a loss (lower is better).
"""

import torch
from torch import Tensor

from nemo_prorl.algorithms.objectives import MAX_LOG_RATIO, OBJECTIVES
from nemo_prorl.config import GRPOConfig


def kl_estimate(logp: Tensor, other_logp: Tensor, estimator: str) -> Tensor:
    """Estimate KL(p || q) from tokens drawn from p: one value per token.

    With d = log q - log p: k1 = -d, k2 = d^2 / 2, k3 = exp(d) - d - 1 (Schulman, "Approximating KL divergence", 2020;
    k3 is paper eq. 5).  All are differentiable in both arguments.  As losses, for tokens drawn from p: the expected
    gradient of k1 is 0, that of k2 is the gradient of KL(p || q), that of k3 is the gradient of KL(q || p).

    For k3, d is clamped at 20 (k3 is 4.9e8 there): above it the gradient is 0.  Small d loses no digits (expm1), and
    equal arguments give exactly 0.

    Args:
        logp: log p of the tokens, float32 or float64.
        other_logp: log q of the tokens, same shape and dtype.
        estimator: k1, k2 or k3.
    """
    difference = other_logp - logp
    if estimator == "k1":
        return -difference
    if estimator == "k2":
        return difference.square() / 2
    if estimator == "k3":
        difference = difference.clamp(max=MAX_LOG_RATIO)
        return torch.expm1(difference) - difference
    raise ValueError(f"KL estimator {estimator!r}: expected k1, k2 or k3")


def denominator_terms(
    mask_BT: Tensor, aggregation: str, constant: float = 1.0, group_tokens_B: Tensor | None = None
) -> Tensor:
    """Return what these responses add to the global denominator of an optimizer step.

    The denominator is the sum of these terms over all micro-batches and ranks.

    Args:
        mask_BT: bool, the response tokens that count.
        aggregation: `token`: number of tokens that count (DAPO, arXiv 2503.14476).  `sequence`: number of responses
            with a token that counts (GRPO's mean of means).  `constant`: the argument `constant` times this number of
            responses (Dr. GRPO, arXiv 2503.20783, where `constant` is the generation budget in tokens).  `prompt`:
            number of prompts (ScaleRL, arXiv 2510.13786): each response adds its share of its group's tokens.
        constant: tokens per response, for `constant` only.
        group_tokens_B: tokens that count in the whole group of each response, for `prompt` only.

    Returns:
        A float64 scalar tensor on the mask's device: NCCL and gloo sum it exactly.
    """
    if aggregation == "token":
        return mask_BT.sum().double()
    responses = mask_BT.any(dim=-1).sum().double()
    if aggregation == "sequence":
        return responses
    if aggregation == "constant":
        return responses * constant
    if aggregation == "prompt":
        return _share_B1(mask_BT.sum(dim=-1, keepdim=True).double(), group_tokens_B).sum()
    raise ValueError(f"aggregation {aggregation!r}: expected token, sequence, constant or prompt")


def _share_B1(value_B1: Tensor, group_tokens_B: Tensor | None) -> Tensor:
    assert group_tokens_B is not None
    return value_B1 / group_tokens_B.clamp(min=1)[:, None]


def aggregate(value_BT: Tensor, mask_BT: Tensor, aggregation: str, group_tokens_B: Tensor | None = None) -> Tensor:
    """Return the numerator that belongs to `denominator_terms`: the sum over tokens, or over the means of responses.

    `value_BT` must be 0 where the mask is False.
    """
    if aggregation == "sequence":
        length_B = mask_BT.sum(dim=-1).clamp(min=1)
        return (value_BT.sum(dim=-1) / length_B).sum()
    if aggregation == "prompt":
        return _share_B1(value_BT.sum(dim=-1, keepdim=True), group_tokens_B).sum()
    return value_BT.sum()


def grpo_loss(  # noqa: PLR0913  # one argument for each tensor of the batch
    logp_BT: Tensor,
    old_logp_BT: Tensor,
    ref_logp_BT: Tensor,
    advantage_B: Tensor,
    mask_BT: Tensor,
    weight_BT: Tensor | None,
    denominator: Tensor | float,
    config: GRPOConfig,
    entropy_BT: Tensor | None = None,
    group_tokens_B: Tensor | None = None,
) -> tuple[Tensor, dict[str, Tensor]]:
    """Return the share of a micro-batch in the loss of an optimizer step; shares add up over micro-batches and ranks.

    loss = sum of (-weight * objective + kl_coef * KL(pi_theta || pi_ref) - entropy_coef * entropy) / denominator

    (paper eq. 4 with the sign of a loss; the sum is `aggregate`'s).  All terms have the same denominator.  The weight
    corrects the sampling distribution of the surrogate only; a token of weight 0 still counts in the denominator.
    Values where the mask is False, nan included, reach neither the loss nor the gradient.  Without any token that
    counts, the loss is 0 with gradient 0.  nan at a token that counts makes the loss nan, so that the update can be
    refused; an infinite log-probability may be hidden by a clamp, but is counted in `nonfinite`.

    Args:
        logp_BT: log pi_theta at the rollout temperature, with gradient.
        old_logp_BT: log pi_old: from the weights before the updates of this step.
        ref_logp_BT: log pi_ref.
        advantage_B: one advantage per response.
        mask_BT: bool, the response tokens that count.
        weight_BT: weights from `correction.rollout_correction`; None means 1 everywhere.
        denominator: sum of `denominator_terms` over the whole optimizer step, all ranks; above 0.
        config: `loss`, `clip_*`, `dual_clip`, `kl_*`, `entropy_coef` and `aggregation` are used.
        entropy_BT: entropy of each token's distribution; needed when entropy_coef is not 0, else only reported.
        group_tokens_B: tokens that count in the whole group of each response; needed for aggregation `prompt`.

    All floating inputs are converted to float32 (float64 if logp is float64); only logp and entropy have gradients.

    Returns:
        loss: scalar, already divided by the global denominator.
        diagnostics: sums (see `algorithms/__init__.py`).  `loss` adds up to the global loss; `surrogate`, `kl`,
        `weight` and, where given, `entropy` are sums over `tokens` tokens; `sequences` counts responses with a token;
        `nonfinite` counts tokens whose log-probability, new, old or reference, is nan or infinite.
    """
    dtype = torch.promote_types(logp_BT.dtype, torch.float32)

    def masked(value: Tensor) -> Tensor:
        # Masked before the arithmetic, because nan * 0 is nan, also in the backward pass.
        return torch.where(mask_BT, value.to(dtype), 0.0)

    logp, old_logp = masked(logp_BT), masked(old_logp_BT.detach())
    advantage = masked(advantage_B.detach()[:, None])
    surrogate = OBJECTIVES[config.loss](logp, old_logp, advantage, mask_BT, config)
    OBJECTIVES.check_shape(config.loss, surrogate.shape, logp.shape)
    surrogate = masked(surrogate)
    weight = masked(torch.ones_like(logp) if weight_BT is None else weight_BT.detach())
    loss_BT = -weight * surrogate
    ref_logp = masked(ref_logp_BT.detach())
    kl = kl_estimate(logp, ref_logp, config.kl_estimator)
    nonfinite = ~torch.isfinite(logp) | ~torch.isfinite(old_logp) | ~torch.isfinite(ref_logp)
    if config.kl_coef != 0.0:
        loss_BT = loss_BT + config.kl_coef * kl
    entropy = torch.zeros_like(logp) if entropy_BT is None else masked(entropy_BT)
    if config.entropy_coef != 0.0:
        loss_BT = loss_BT - config.entropy_coef * entropy

    divisor = torch.as_tensor(denominator, dtype=dtype, device=logp.device)
    loss = aggregate(loss_BT, mask_BT, config.aggregation, group_tokens_B) / divisor

    sums = {"loss": loss, "surrogate": surrogate, "kl": kl, "weight": weight, "nonfinite": nonfinite, "tokens": mask_BT}
    if entropy_BT is not None:
        sums["entropy"] = entropy
    diagnostics = {name: value.detach().sum(dtype=torch.float64) for name, value in sums.items()}
    diagnostics["sequences"] = denominator_terms(mask_BT, "sequence")
    return loss, diagnostics
