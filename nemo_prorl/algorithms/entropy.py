"""A coefficient of the entropy bonus that holds the entropy up (paper sec. 5.4)."""

from typing import TypedDict

from nemo_prorl.config import AdaptiveEntropyConfig


class EntropyState(TypedDict):
    """State of the adaptive entropy bonus in a checkpoint."""

    coefficient: float


class AdaptiveEntropy:
    """Coefficient of the entropy bonus that moves by a fixed step towards a target entropy.

    After Skywork-OR1 (arXiv 2505.22312, adaptive entropy control): at each step the bonus has coefficient c if the
    entropy is at or below the target, otherwise 0.  Then c grows by `step` if the entropy is below the target, and
    shrinks by `step` if the entropy is above.  c begins at 0 and is kept within [0, maximum], so that it does not
    run away while the entropy is far from the target.
    """

    def __init__(self, config: AdaptiveEntropyConfig) -> None:
        self._config = config
        self._coefficient = 0.0

    def update(self, entropy: float) -> float:
        """Return the coefficient for the step whose rollouts have this mean entropy (nats per token).

        Then adjust the coefficient for the next step.
        """
        target, step = self._config.target, self._config.step
        current = self._coefficient if entropy <= target else 0.0
        if entropy < target:
            self._coefficient = min(self._coefficient + step, self._config.maximum)
        elif entropy > target:
            self._coefficient = max(self._coefficient - step, 0.0)
        return current

    def state_dict(self) -> EntropyState:
        return {"coefficient": self._coefficient}

    def load_state_dict(self, state: EntropyState) -> None:
        self._coefficient = float(state["coefficient"])
