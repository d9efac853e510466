"""Rewards as the loss sees them.  The raw reward stays what dynamic sampling and validation see.

Suffixes: G groups, N samples a group.  Lengths are response tokens.
"""

import torch
from torch import Tensor


def shape_rewards(reward_GN: Tensor, ended_GN: Tensor, unfinished_penalty: float) -> Tensor:
    """Takes `unfinished_penalty` off each response that did not end with eos (paper sec. 4.2, runs 4 to 8).

    Args:
        reward_GN: raw rewards; nan (of an invalid response) stays nan.
        ended_GN: bool, the response ended with eos.
        unfinished_penalty: at least 0, else ValueError.

    Returns:
        A new tensor [G, N], float32 (float64 for float64 rewards).
    """
    if not unfinished_penalty >= 0.0:
        raise ValueError(f"unfinished_penalty is {unfinished_penalty}; it is taken off, so 0 or more is right")
    if ended_GN.dtype != torch.bool or ended_GN.shape != reward_GN.shape:
        raise ValueError(f"ended_GN must be bool {list(reward_GN.shape)}, got {ended_GN.dtype} {list(ended_GN.shape)}")
    reward_GN = reward_GN.to(torch.promote_types(reward_GN.dtype, torch.float32))
    return torch.where(ended_GN, reward_GN, reward_GN - unfinished_penalty)


def soft_overlong_penalty(length: Tensor, max_length: int, cache: int) -> Tensor:
    """What is added to the reward of a long response: 0, then linearly down to -1 (DAPO, arXiv 2503.14476, eq. 13).

    0 up to max_length - cache, -1 at max_length and beyond.

    Args:
        length: any shape, in tokens.
        max_length: the longest response without the full penalty.
        cache: over how many tokens the penalty builds up, 1 to max_length, else ValueError.

    Returns:
        float32, shape of `length`.
    """
    if not 1 <= cache <= max_length:
        raise ValueError(f"cache is {cache}; 1 to max_length ({max_length}) tokens is right")
    return ((max_length - cache - length.float()) / cache).clamp(-1.0, 0.0)


def cosine_length_reward(
    correct: Tensor,
    length: Tensor,
    max_length: int,
    *,
    correct_short: float = 2.0,
    correct_long: float = 1.0,
    wrong_short: float = -10.0,
    wrong_long: float = 0.0,
    exceeded: float = -10.0,
) -> Tensor:
    """The cosine reward of "Demystifying long chain-of-thought reasoning" (arXiv 2502.03373), in place of a binary one.

    From the `short` value at length 0 to the `long` value at max_length, along half a cosine:
    long + (short - long) (1 + cos(pi length / max_length)) / 2.  A response of max_length or more gets `exceeded`.

    Args:
        correct: bool, any shape.
        length: same shape, in tokens.
        max_length: at least 1, else ValueError.

    Returns:
        float32, shape of `length`.
    """
    if max_length < 1:
        raise ValueError(f"max_length is {max_length}; at least 1 token is right")
    length = length.float()
    share = (1.0 + torch.cos(torch.pi * length / max_length)) / 2.0
    right = correct_long + (correct_short - correct_long) * share
    wrong = wrong_long + (wrong_short - wrong_long) * share
    return torch.where(length >= max_length, exceeded, torch.where(correct, right, wrong))
