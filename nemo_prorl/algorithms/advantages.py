"""Advantages of a group of responses to one prompt.  Suffixes: G groups, N samples per group."""

import torch
from torch import Tensor

STD_EPSILON = 1e-6


def reward_spread(reward_GN: Tensor, valid_GN: Tensor) -> Tensor:
    """Return the largest minus the smallest valid reward of each group, float64 [G]; 0 with fewer than 2 valid ones."""
    if reward_GN.numel() == 0:
        return reward_GN.new_zeros(reward_GN.shape[0], dtype=torch.float64)
    reward_GN = reward_GN.double()
    highest_G = reward_GN.masked_fill(~valid_GN, -torch.inf).amax(dim=1)
    lowest_G = reward_GN.masked_fill(~valid_GN, torch.inf).amin(dim=1)
    return torch.where(valid_GN.sum(dim=1) >= 2, highest_G - lowest_G, 0.0)


def group_advantages(reward_GN: Tensor, valid_GN: Tensor, kind: str) -> Tensor:
    """Return the advantage of each response: one number for all of its tokens.

    With mean and std over the n valid responses of the group (std is the sample's, divided by n - 1):

    - `group_norm`: (R - mean) / (std + 1e-6), paper eq. 2; 1e-6 and n - 1 are verl's, on which the paper ran.
    - `leave_one_out`: R - mean of the others = (R - mean) n / (n - 1) (RLOO, arXiv 2402.14740).
    - `reinforce_pp_baseline`: (R - mean) / (std of all these differences in the batch + 1e-6), REINFORCE++ with
      baseline (arXiv 2501.03262).  The differences have mean 0 by construction.  Their std is over the valid responses,
      each counted once whatever its length, divided by their number - 1.  This kind needs the GLOBAL batch.

    Args:
        reward_GN: shaped rewards, any real dtype; ignored where not valid, nan included.
        valid_GN: bool; False where infrastructure failed; mean and std leave these responses out.
        kind: as `trainer.grpo.advantage`.

    Returns:
        [G, N], float32 (float64 for float64 rewards), without gradient.  Exactly 0 for invalid responses, in groups
        whose valid rewards are all equal, and in groups with fewer than 2 valid responses (these also do not count in
        the batch-wide std).
    """
    dtype = torch.promote_types(reward_GN.dtype, torch.float32)
    spread_G1 = reward_spread(reward_GN, valid_GN)[:, None]
    reward_GN = torch.where(valid_GN, reward_GN.detach().double(), 0.0)

    count_G1 = valid_GN.sum(dim=1, keepdim=True)
    mean_G1 = reward_GN.sum(dim=1, keepdim=True) / count_G1.clamp(min=1)
    # Equal rewards give exact zeros: their mean need not be the reward itself in floating point.
    centred_GN = torch.where(valid_GN & (spread_G1 > 0), reward_GN - mean_G1, 0.0)
    others_G1 = (count_G1 - 1).clamp(min=1)

    if kind == "group_norm":
        std_G1 = (centred_GN.square().sum(dim=1, keepdim=True) / others_G1).sqrt()
        advantage_GN = centred_GN / (std_G1 + STD_EPSILON)
    elif kind == "leave_one_out":
        advantage_GN = centred_GN * count_G1 / others_G1
    elif kind == "reinforce_pp_baseline":
        with_baseline = count_G1[count_G1 >= 2].sum()
        std = (centred_GN.square().sum() / (with_baseline - 1).clamp(min=1)).sqrt()
        advantage_GN = centred_GN / (std + STD_EPSILON)
    else:
        raise ValueError(f"advantage {kind!r}: expected group_norm, leave_one_out or reinforce_pp_baseline")
    return advantage_GN.to(dtype)
