"""Rewards as the loss sees them.  The raw reward stays what dynamic sampling and validation see.

Suffixes: G groups, N samples a group.  Lengths are response tokens.
"""

from itertools import pairwise

import torch
from torch import Tensor

from nemo_prorl.config import GRPOConfig


def shaped_rewards(
    reward_GN: Tensor, ended_GN: Tensor, length_GN: Tensor, longest_GN: Tensor, config: GRPOConfig, step: int
) -> tuple[Tensor, dict[str, Tensor]]:
    """Return the rewards that the advantages are made of, and what each shaping that is on changed, by its name.

    The cosine comes first, in place of the raw reward; then an unfinished response is scaled and lowered; then the
    overlong penalty is taken off.

    Args:
        reward_GN: raw rewards in [0, 1]; nan (of an invalid response) stays nan.
        ended_GN: bool, the response ended with eos.
        length_GN, longest_GN: the response's tokens, and how many it might have had; at least 1.
        config: `unfinished_*` and `shaping` are used.
        step: from 1, for the cosine's schedule.

    Returns:
        reward_GN, float32 (float64 for float64 rewards), and name -> change [G, N].
    """
    steps = [("raw", reward_GN.to(torch.promote_types(reward_GN.dtype, torch.float32)))]
    shaping = config.shaping
    if shaping.cosine and in_schedule(step, shaping.cosine_every, shaping.cosine_for):
        values = dict(zip(("correct_short", "correct_long"), shaping.cosine_correct, strict=True))
        values |= dict(zip(("wrong_short", "wrong_long"), shaping.cosine_wrong, strict=True))
        values |= {"exceeded": shaping.cosine_exceeded}
        cosine_GN = cosine_length_reward(steps[-1][1], length_GN, longest_GN, ended=ended_GN, **values)
        steps.append(("cosine", cosine_GN.to(steps[0][1].dtype)))
    penalty, factor = config.unfinished_penalty, config.unfinished_factor
    if penalty or factor != 1.0:
        steps.append(("unfinished", shape_rewards(steps[-1][1], ended_GN, penalty, factor)))
    if shaping.overlong_tokens:
        penalty_GN = soft_overlong_penalty(length_GN, longest_GN, shaping.overlong_tokens)
        steps.append(("overlong", steps[-1][1] + shaping.overlong_penalty * penalty_GN))
    changes = {name: after - before for (_, before), (name, after) in pairwise(steps)}
    return steps[-1][1], changes


def in_schedule(step: int, every: int, last: int) -> bool:
    """Whether a step (from 1) is among the `last` of its `every` steps; with `every` 0 all are."""
    return every == 0 or (step - 1) % every >= every - last


def shape_rewards(
    reward_GN: Tensor, ended_GN: Tensor, unfinished_penalty: float, unfinished_factor: float = 1.0
) -> Tensor:
    """Scale and lower the reward of each response that did not end with eos.

    The penalty is the paper's (sec. 4.2, runs 4 to 8), the factor is that of ProRL v2 and DLER (arXiv 2510.15110).

    Args:
        reward_GN: raw rewards; nan (of an invalid response) stays nan.
        ended_GN: bool, the response ended with eos.
        unfinished_penalty: at least 0, else ValueError.
        unfinished_factor: from 0 to 1, applied before the penalty, else ValueError.

    Returns:
        A new tensor [G, N], float32 (float64 for float64 rewards).
    """
    if not unfinished_penalty >= 0.0:
        raise ValueError(f"unfinished_penalty is {unfinished_penalty}; it is taken off, so 0 or more is right")
    if not 0.0 <= unfinished_factor <= 1.0:
        raise ValueError(f"unfinished_factor is {unfinished_factor}; expected 0 (no reward) to 1 (the reward as it is)")
    if ended_GN.dtype != torch.bool or ended_GN.shape != reward_GN.shape:
        raise ValueError(f"ended_GN must be bool {list(reward_GN.shape)}, got {ended_GN.dtype} {list(ended_GN.shape)}")
    reward_GN = reward_GN.to(torch.promote_types(reward_GN.dtype, torch.float32))
    return torch.where(ended_GN, reward_GN, unfinished_factor * reward_GN - unfinished_penalty)


def soft_overlong_penalty(length: Tensor, max_length: int | Tensor, cache: int) -> Tensor:
    """What is added to the reward of a long response: 0, then linearly down to -1 (DAPO, arXiv 2503.14476, eq. 13).

    0 up to max_length - cache, -1 at max_length and beyond.

    Args:
        length: any shape, in tokens.
        max_length: the longest response; a tensor where it differs, as with prompts of different lengths.
        cache: over how many tokens the penalty builds up, 1 to max_length, else ValueError (1 at least for tensors).

    Returns:
        float32, shape of `length`.
    """
    if cache < 1 or (isinstance(max_length, int) and cache > max_length):
        raise ValueError(f"cache is {cache}; 1 to max_length ({max_length}) tokens is right")
    return ((max_length - cache - length.float()) / cache).clamp(-1.0, 0.0)


def cosine_length_reward(
    correct: Tensor,
    length: Tensor,
    max_length: int | Tensor,
    *,
    ended: Tensor | None = None,
    correct_short: float = 2.0,
    correct_long: float = 1.0,
    wrong_short: float = -10.0,
    wrong_long: float = 0.0,
    exceeded: float = -10.0,
) -> Tensor:
    """The cosine reward of "Demystifying long chain-of-thought reasoning" (arXiv 2502.03373), in place of a binary one.

    From the `short` value at length 0 to the `long` value at max_length, along half a cosine:
    long + (short - long) (1 + cos(pi length / max_length)) / 2.  A response of max_length or more gets `exceeded`,
    unless it ended: eos may be its very last token.

    Args:
        correct: bool, any shape; or a score in [0, 1], which lies as far between the wrong and the right value.
        length: same shape, in tokens.
        max_length: at least 1, otherwise ValueError; or a tensor.
        ended: bool, same shape, the response ended with eos; without it, none of max_length did.

    Returns:
        float32, shape of `length`.
    """
    if isinstance(max_length, int) and max_length < 1:
        raise ValueError(f"max_length is {max_length}; at least 1 token is right")
    length = length.float()
    share = (1.0 + torch.cos(torch.pi * length / max_length)) / 2.0
    right = correct_long + (correct_short - correct_long) * share
    wrong = wrong_long + (wrong_short - wrong_long) * share
    score = correct.to(right.dtype)
    cut_off = length >= max_length if ended is None else (length >= max_length) & ~ended
    shaped = torch.where(cut_off, exceeded, score * right + (1.0 - score) * wrong)
    return torch.where(score.isnan(), score, shaped)
