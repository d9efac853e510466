"""Supervised steps before reinforcement learning, to teach a random model some right responses."""

import logging
from collections.abc import Sequence
from typing import Any

from torch import Tensor

from nemo_prorl.batch import Batch
from nemo_prorl.config import WarmupConfig

_log = logging.getLogger(__name__)


def supervised_loss(
    logp_BT: Tensor, entropy_BT: Tensor | None, micro: Batch, denominator: float
) -> tuple[Tensor, dict[str, Tensor]]:
    """Return the summed negative log-likelihood divided by `denominator`, and {"tokens": number of response tokens}.

    Args:
        logp_BT: log-probabilities of the response tokens; 0 at other positions.
        entropy_BT: not used; `policy.actor.LossFunction` has this argument.
    """
    return -logp_BT.sum() / denominator, {"tokens": micro.mask_BT.sum()}


def warm_up(policy: Any, examples: Sequence[tuple[list[int], list[int]]], config: WarmupConfig, lr: float) -> None:
    """Make `config.steps` supervised steps at temperature 1 on (prompt, response) token lists.  A collective.

    Afterwards the optimizer is new: learning rate `lr`, and master weights copied from the current
    weights.  A run killed before its first checkpoint starts again from exactly this state.
    """
    policy.set_learning_rate(config.lr)
    size = config.batch_size
    for step in range(1, config.steps + 1):
        part = [examples[k % len(examples)] for k in range((step - 1) * size, step * size)]
        own = part[policy.data_ranks.rank :: policy.data_ranks.size]
        batch = Batch.from_sequences([p for p, _ in own], [r for _, r in own], [[0.0] * len(r) for _, r in own])
        tokens = policy.data_ranks.sum(batch.num_response_tokens)
        sums = policy.update(batch, supervised_loss, tokens, temperature=1.0)
        if step % 50 == 0 or step == config.steps:
            _log.info("warm-up %d/%d: loss %.3f", step, config.steps, sums["loss"])
    policy.reset_optimizer()
    policy.reload_masters()
    policy.set_learning_rate(lr)
