"""Entropy of a distribution, and a coefficient that holds it up (paper sec. 5.4)."""

import math
from typing import TypedDict

import torch
from torch import Tensor


def entropy_of_logits(logits: Tensor, temperature: float = 1.0) -> Tensor:
    """Entropy in nats of softmax(logits / temperature) over the last dimension.

    The plain form for small tensors; `logprobs.chunked_logprobs` computes the same from hidden states.  A logit of
    -inf is an excluded word.  float32 (float64 for float64 logits), differentiable.
    """
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32)) / temperature
    logp = torch.log_softmax(logits, dim=-1)
    # p log p is 0 where p is; before the product, because 0 * -inf is nan.
    return -(logp.exp() * torch.where(torch.isneginf(logp), 0.0, logp)).sum(dim=-1)


class EntropyState(TypedDict):
    """What a checkpoint keeps of the adaptive entropy bonus."""

    coefficient: float


class AdaptiveEntropy:
    """Coefficient of the entropy bonus that moves by a fixed step towards a target entropy.

    After Skywork-OR1 (arXiv 2505.22312, adaptive entropy control): at each step the bonus has coefficient c if the
    entropy is at or below the target, else 0; then c grows by `step` if the entropy is below the target and shrinks by
    it if above.  c is kept within [minimum, maximum], so that it does not run away while the entropy is far off.

    Args:
        target: entropy in nats a token, at least 0.
        step: positive.
        start: the first c.
        minimum, maximum: bounds of c, 0 <= minimum <= start <= maximum.

    Raises:
        ValueError: a number out of its range, named.
    """

    def __init__(
        self, target: float, step: float, *, start: float = 0.0, minimum: float = 0.0, maximum: float = 0.01
    ) -> None:
        if not 0.0 <= target < math.inf:
            raise ValueError(f"target entropy is {target}; 0 or more nats is right")
        if not 0.0 < step < math.inf:
            raise ValueError(f"step of the entropy coefficient is {step}; a positive number is right")
        if not 0.0 <= minimum <= start <= maximum < math.inf:
            raise ValueError(
                f"entropy coefficient: 0 <= minimum <= start <= maximum, got {minimum}, {start}, {maximum}"
            )
        self.target, self.step, self.minimum, self.maximum = target, step, minimum, maximum
        self._coefficient = start

    def update(self, entropy: float) -> float:
        """The coefficient for the step whose rollouts have this mean entropy (nats a token); then moves on.

        Raises ValueError if the entropy is nan or infinite.
        """
        if not math.isfinite(entropy):
            raise ValueError(f"entropy is {entropy}; a finite number is right")
        current = self._coefficient if entropy <= self.target else 0.0
        if entropy < self.target:
            self._coefficient = min(self._coefficient + self.step, self.maximum)
        elif entropy > self.target:
            self._coefficient = max(self._coefficient - self.step, self.minimum)
        return current

    def state_dict(self) -> EntropyState:
        """For a checkpoint; JSON keeps it exactly."""
        return {"coefficient": self._coefficient}

    def load_state_dict(self, state: EntropyState) -> None:
        self._coefficient = float(state["coefficient"])
