"""Advantages of a group of responses to one prompt.  Suffixes: G groups, N samples per group."""

from collections.abc import Callable

import torch
from torch import Tensor

from nemo_prorl.algorithms.registry import NamedFunctions

STD_EPSILON = 1e-6

# Each function has the arguments (centred_GN, reward_GN, valid_GN): rewards minus the mean of their group, rewards, and
# which of them count.  Both are float64, and 0 where not valid; centred_GN also where all rewards of a group are equal.
# It returns the advantages, [G, N]; `group_advantages` sets those to 0 that must be.
ADVANTAGES: NamedFunctions[Callable[[Tensor, Tensor, Tensor], Tensor]] = NamedFunctions("trainer.grpo.advantage")


def reward_spread(reward_GN: Tensor, valid_GN: Tensor) -> Tensor:
    """Return the largest minus the smallest valid reward of each group, float64 [G]; 0 with fewer than 2 valid ones."""
    if reward_GN.numel() == 0:
        return reward_GN.new_zeros(reward_GN.shape[0], dtype=torch.float64)
    reward_GN = reward_GN.double()
    highest_G = reward_GN.masked_fill(~valid_GN, -torch.inf).amax(dim=1)
    lowest_G = reward_GN.masked_fill(~valid_GN, torch.inf).amin(dim=1)
    return torch.where(valid_GN.sum(dim=1) >= 2, highest_G - lowest_G, 0.0)


def _others_G1(valid_GN: Tensor) -> Tensor:
    return (valid_GN.sum(dim=1, keepdim=True) - 1).clamp(min=1)


@ADVANTAGES.register
def group_norm(centred_GN: Tensor, reward_GN: Tensor, valid_GN: Tensor) -> Tensor:
    """Return (R - mean) / (std + 1e-6), paper eq. 2.

    std is the sample's, divided by n - 1; 1e-6 and n - 1 are verl's, on which the paper ran.
    """
    std_G1 = (centred_GN.square().sum(dim=1, keepdim=True) / _others_G1(valid_GN)).sqrt()
    return centred_GN / (std_G1 + STD_EPSILON)


@ADVANTAGES.register
def leave_one_out(centred_GN: Tensor, reward_GN: Tensor, valid_GN: Tensor) -> Tensor:
    """Return R - mean of the others = (R - mean) n / (n - 1) (RLOO, arXiv 2402.14740)."""
    return centred_GN * valid_GN.sum(dim=1, keepdim=True) / _others_G1(valid_GN)


@ADVANTAGES.register
def reinforce_pp_baseline(centred_GN: Tensor, reward_GN: Tensor, valid_GN: Tensor) -> Tensor:
    """Return (R - mean) / (std of all these differences in the batch + 1e-6), REINFORCE++ with baseline (2501.03262).

    The differences have mean 0 by construction.  Their std is over the valid responses of groups with two or more,
    each counted once whatever its length, divided by their number - 1.  This needs the GLOBAL batch.
    """
    count_G1 = valid_GN.sum(dim=1, keepdim=True)
    with_baseline = count_G1[count_G1 >= 2].sum()
    std = (centred_GN.square().sum() / (with_baseline - 1).clamp(min=1)).sqrt()
    return centred_GN / (std + STD_EPSILON)


@ADVANTAGES.register
def mean_only(centred_GN: Tensor, reward_GN: Tensor, valid_GN: Tensor) -> Tensor:
    """Return R - mean (Dr. GRPO, arXiv 2503.20783)."""
    return centred_GN


@ADVANTAGES.register
def maxrl(centred_GN: Tensor, reward_GN: Tensor, valid_GN: Tensor) -> Tensor:
    """Return (R - mean) / mean, for rewards of at least 0 (maximum likelihood RL, arXiv 2602.02710)."""
    mean_G1 = reward_GN.sum(dim=1, keepdim=True) / valid_GN.sum(dim=1, keepdim=True).clamp(min=1)
    return torch.where(mean_G1 > 0, centred_GN / mean_G1, 0.0)


def group_advantages(reward_GN: Tensor, valid_GN: Tensor, kind: str) -> Tensor:
    """Return the advantage of each response: one number for all of its tokens.

    Args:
        reward_GN: shaped rewards, any real dtype; ignored where not valid, nan included.
        valid_GN: bool; False where infrastructure failed; mean and std leave these responses out.
        kind: as `trainer.grpo.advantage`: a name in ADVANTAGES, or the place of a function of the user.

    Returns:
        [G, N], float32 (float64 for float64 rewards), without gradient.  Exactly 0 for invalid responses, in groups
        whose valid rewards are all equal, and in groups with fewer than 2 valid responses (these also do not count in
        the batch-wide std).
    """
    dtype = torch.promote_types(reward_GN.dtype, torch.float32)
    has_signal_GN = valid_GN & (reward_spread(reward_GN, valid_GN)[:, None] > 0)
    reward_GN = torch.where(valid_GN, reward_GN.detach().double(), 0.0)
    mean_G1 = reward_GN.sum(dim=1, keepdim=True) / valid_GN.sum(dim=1, keepdim=True).clamp(min=1)
    # Equal rewards give exact zeros: their mean need not be the reward itself in floating point.
    centred_GN = torch.where(has_signal_GN, reward_GN - mean_G1, 0.0)
    advantage_GN = ADVANTAGES[kind](centred_GN, reward_GN, valid_GN)
    ADVANTAGES.check_shape(kind, advantage_GN.shape, reward_GN.shape)
    return torch.where(has_signal_GN, advantage_GN, 0.0).to(dtype)
