"""The objective of each token that a policy loss maximizes, by the name in `trainer.grpo.loss`.

A function has the arguments (logp_BT, old_logp_BT, advantage_BT, mask_BT, config) and returns the objective of each
token: [B, T], higher is better.  B responses, T token positions.  Log-probabilities and advantages are 0 where the mask
is False; what the function returns there is ignored.  Only logp_BT has a gradient.  `losses.grpo_loss` adds weights, KL
and entropy, and averages (docs/howto/own_loss.md).
"""

from collections.abc import Callable

import torch
from torch import Tensor

from nemo_prorl.algorithms.registry import NamedFunctions
from nemo_prorl.config import GRPOConfig

MAX_LOG_RATIO = 20.0  # exp(20) is 4.9e8: far outside any clip range, and sums of it stay finite in float32
MOST_VARIATION = 0.2  # of `dppo`: largest change of a token's probability (arXiv 2602.04879)

Objective = Callable[[Tensor, Tensor, Tensor, Tensor, GRPOConfig], Tensor]
OBJECTIVES: NamedFunctions[Objective] = NamedFunctions("trainer.grpo.loss")


def token_ratio(logp_BT: Tensor, old_logp_BT: Tensor) -> Tensor:
    """Return pi_theta / pi_old of each token, in the dtype of the arguments.

    The ratio is clamped at exp(20).  Above the clamp the gradient is 0; without it, the gradient would be inf or nan.
    """
    return (logp_BT - old_logp_BT).clamp(max=MAX_LOG_RATIO).exp()


def clipped_surrogate(ratio_BT: Tensor, advantage_BT: Tensor, config: GRPOConfig) -> Tensor:
    """Return min(r A, clip(r, 1 - clip_low, 1 + clip_high) A) of each token (paper eq. 1, 3): an objective.

    With `dual_clip` c, a token of negative advantage never counts for less than c A (arXiv 1912.09729, eq. 5).
    """
    clipped_BT = ratio_BT.clamp(1.0 - config.clip_low, 1.0 + config.clip_high)
    objective_BT = torch.minimum(ratio_BT * advantage_BT, clipped_BT * advantage_BT)
    if config.dual_clip is None:
        return objective_BT
    bounded_BT = torch.maximum(objective_BT, config.dual_clip * advantage_BT)
    return torch.where(advantage_BT < 0, bounded_BT, objective_BT)


@OBJECTIVES.register
def clip(logp_BT: Tensor, old_logp_BT: Tensor, advantage_BT: Tensor, mask_BT: Tensor, config: GRPOConfig) -> Tensor:
    """Return the clipped surrogate of each token's ratio: the paper's loss."""
    return clipped_surrogate(token_ratio(logp_BT, old_logp_BT), advantage_BT, config)


@OBJECTIVES.register
def cispo(logp_BT: Tensor, old_logp_BT: Tensor, advantage_BT: Tensor, mask_BT: Tensor, config: GRPOConfig) -> Tensor:
    """Return min(r, 1 + clip_high) A log pi, without gradient through the ratio r (CISPO, arXiv 2506.13585).

    Every token keeps a gradient; the ratio only weights it.  The bound is 1 + clip_high, as MiniMax and verl write it;
    where a paper gives the bound itself (ScaleRL's eps_max = 5), clip_high is 1 less (4).  There is no lower bound.
    """
    weight_BT = token_ratio(logp_BT.detach(), old_logp_BT).clamp(max=1.0 + config.clip_high)
    return weight_BT * advantage_BT * logp_BT


@OBJECTIVES.register
def gspo(logp_BT: Tensor, old_logp_BT: Tensor, advantage_BT: Tensor, mask_BT: Tensor, config: GRPOConfig) -> Tensor:
    """Return the clipped surrogate of the response's ratio: exp of the mean log ratio of its tokens (arXiv 2507.18071).

    All tokens of a response have the same objective; with `aggregation=sequence` the loss is the paper's eq. 5.
    """
    length_B1 = mask_BT.sum(dim=-1, keepdim=True).clamp(min=1)
    mean_B1 = (logp_BT - old_logp_BT).sum(dim=-1, keepdim=True) / length_B1
    ratio_B1 = mean_B1.clamp(max=MAX_LOG_RATIO).exp()
    return clipped_surrogate(ratio_B1.expand_as(logp_BT), advantage_BT, config)


@OBJECTIVES.register
def dppo(logp_BT: Tensor, old_logp_BT: Tensor, advantage_BT: Tensor, mask_BT: Tensor, config: GRPOConfig) -> Tensor:
    """Return r A, or 0 where the update leaves a trust region (DPPO with binary total variation, arXiv 2602.04879).

    A token leaves it if its probability differs from the old one by more than 0.2 and the advantage moves it further.
    """
    ratio_BT = token_ratio(logp_BT, old_logp_BT)
    is_far_BT = (logp_BT.detach().exp() - old_logp_BT.exp()).abs() > MOST_VARIATION
    moves_away_BT = (ratio_BT.detach() - 1.0) * advantage_BT > 0
    return torch.where(is_far_BT & moves_away_BT, 0.0, ratio_BT * advantage_BT)
