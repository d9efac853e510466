"""When the reference policy and the optimizer are reset (paper sec. 3.3.1), and the check that a reset is one."""

from typing import Any

from nemo_prorl.config import ResetsConfig
from nemo_prorl.errors import ResetFailure
from nemo_prorl.metrics import Metrics


class Resets:
    """Decides on hard resets, and checks that the step after one sees the policy equal to its reference."""

    def __init__(self, config: ResetsConfig) -> None:
        self.config = config
        self.done: list[dict[str, Any]] = []
        self._fresh = True  # at a run's start the policy is its reference too

    def decide(self, metrics: Metrics) -> str | None:
        """The reason to reset after this step's updates, if there is one."""
        return "at_steps" if metrics.step in self.config.at_steps else None

    def record(self, step: int, reason: str, reference_sha256: str) -> None:
        self.done.append({"step": step, "reason": reason, "reference_sha256": reference_sha256})
        self._fresh = True

    def check_reference(self, step: int, mean_abs_gap: float) -> None:
        """Before a step's updates.  Raises ResetFailure if the policy should be its reference and is not."""
        fresh, self._fresh = self._fresh, False
        if fresh and not mean_abs_gap <= self.config.kl_after_reset:
            raise ResetFailure(
                f"step {step} follows a reset, but policy and reference differ by {mean_abs_gap:.3g} on average"
                f" (trainer.resets.kl_after_reset={self.config.kl_after_reset:g} is allowed)"
            )

    def state_dict(self) -> dict[str, Any]:
        return {"done": self.done, "fresh": self._fresh}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.done, self._fresh = list(state["done"]), bool(state["fresh"])
