"""Shaped rewards, for the loss only: dynamic sampling and validation use the raw rewards.

Suffixes: G groups, N samples per group.  Lengths are response tokens.
"""

from itertools import pairwise

import torch
from torch import Tensor

from nemo_prorl.config import GRPOConfig, ShapingConfig


def shaped_rewards(
    reward_GN: Tensor, ended_GN: Tensor, length_GN: Tensor, longest_GN: Tensor, config: GRPOConfig, step: int
) -> tuple[Tensor, dict[str, Tensor]]:
    """Return the rewards that advantages are computed from, and the change that each active shaping made, by name.

    The cosine reward, if active, first replaces the raw reward.  Then the reward of each response that did not end with
    eos is scaled (as in ProRL v2 and DLER, arXiv 2510.15110) and lowered (paper sec. 4.2, runs 4 to 8).  Then the
    overlong penalty is taken off.

    Args:
        reward_GN: raw rewards in [0, 1]; nan (of an invalid response) stays nan.
        ended_GN: bool, the response ended with eos.
        length_GN: tokens of the response.
        longest_GN: tokens that the response could have had; at least 1.
        config: `unfinished_*` and `shaping` are used.
        step: from 1, for the cosine's schedule.

    Returns:
        reward_GN, float32 (float64 for float64 rewards), and name -> change [G, N].
    """
    steps = [("raw", reward_GN.to(torch.promote_types(reward_GN.dtype, torch.float32)))]
    shaping = config.shaping
    if shaping.cosine and in_schedule(step, shaping.cosine_every, shaping.cosine_for):
        cosine_GN = cosine_length_reward(steps[-1][1], length_GN, longest_GN, ended_GN, shaping)
        steps.append(("cosine", cosine_GN.to(steps[0][1].dtype)))
    penalty, factor = config.unfinished_penalty, config.unfinished_factor
    if penalty or factor != 1.0:
        before_GN = steps[-1][1]
        steps.append(("unfinished", torch.where(ended_GN, before_GN, factor * before_GN - penalty)))
    if shaping.overlong_tokens:
        penalty_GN = soft_overlong_penalty(length_GN, longest_GN, shaping.overlong_tokens)
        steps.append(("overlong", steps[-1][1] + shaping.overlong_penalty * penalty_GN))
    changes = {name: after - before for (_, before), (name, after) in pairwise(steps)}
    return steps[-1][1], changes


def in_schedule(step: int, every: int, last: int) -> bool:
    """Return whether a step (from 1) is among the last `last` of its cycle of `every` steps; `every` 0: all are."""
    return every == 0 or (step - 1) % every >= every - last


def soft_overlong_penalty(length: Tensor, longest: Tensor, cache: int) -> Tensor:
    """Return the penalty that is added to the reward of a long response (DAPO, arXiv 2503.14476, eq. 13), float32.

    The penalty is 0 up to longest - cache tokens, then falls linearly to -1 at `longest` and beyond.
    """
    return ((longest - cache - length.float()) / cache).clamp(-1.0, 0.0)


def cosine_length_reward(
    score: Tensor, length: Tensor, longest: Tensor, ended: Tensor, shaping: ShapingConfig
) -> Tensor:
    """Return the cosine reward of "Demystifying long chain-of-thought reasoning" (arXiv 2502.03373).

    The reward goes from the `short` value at length 0 to the `long` value at `longest`, along half a cosine:
    long + (short - long) (1 + cos(pi length / longest)) / 2.  A response of `longest` tokens gets `cosine_exceeded`,
    unless its last token is eos.  A score between 0 and 1 gets a value interpolated linearly between the values of a
    wrong and a right response; nan stays nan.
    """
    correct_short, correct_long = shaping.cosine_correct
    wrong_short, wrong_long = shaping.cosine_wrong
    length = length.float()
    share = (1.0 + torch.cos(torch.pi * length / longest)) / 2.0
    right = correct_long + (correct_short - correct_long) * share
    wrong = wrong_long + (wrong_short - wrong_long) * share
    score = score.to(right.dtype)
    shaped = torch.where((length >= longest) & ~ended, shaping.cosine_exceeded, score * right + (1.0 - score) * wrong)
    return torch.where(score.isnan(), score, shaped)
