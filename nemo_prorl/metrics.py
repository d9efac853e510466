"""The metrics of one step: added wherever they arise, reduced once."""

import math
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, TypedDict

from nemo_prorl.schema import Count
from nemo_prorl.tracing import RECORDER

# The keys of a line beside step and stage, as regular expressions.  docs/formats.md explains each.
KEYS = (
    "kl",
    "entropy",
    "reward/[^/]+",
    "shaping/(unfinished|overlong|cosine)",
    "(reward_shaped|keep_rate|solved|unsolved|tied|response_tokens|truncated|repetition|kl|entropy)/[^/]+",
    "validation/[^/]+",
    "rollout/(groups|truncated|repetition|response_tokens|masked|drawn|carried|stale|surplus|generated_tokens|staleness)",
    "data/retired",
    "stale_gap/(tokens|share|mean_abs|max_abs|mean_k3)",
    "engine_gap/(tokens|mean_abs|max_abs|mean_k3)",
    "correction/(tokens|mean_abs|max_abs|mean_k3|fraction_capped|fraction_masked)",
    "policy/(loss|grad_norm|max_grad_norm|surrogate|kl|approx_kl|weight|ratio|min_ratio|max_ratio|clipped_high"
    "|clipped_low|dual_clipped|nonfinite|lr|entropy_coef|padding)",
    "time/(publish|rollout|logprobs|advantages|updates|ahead|ahead/engines_wait_s|validate|step)",
    "time/rollout/(engine_s|reward_open_s|reward_wait_s|sleep_s|tokens_per_s|responses|tail_s|tail_responses|idle_s"
    "|lost_s)",
)


class MetricsState(TypedDict):
    """Everything that the metrics of a step hold."""

    step: Count
    stage: str
    values: dict[str, list[float]]
    """by key: sum of weight * value, or the extreme; sum of weights"""


class Metrics:
    """Named numbers of a step.

    A number added several times is averaged by weight; one whose last name begins with `max_` or `min_` takes that.
    Keys are those of `metrics.jsonl`: what depends on the clock stands under `time/`.
    """

    def __init__(self, step: int, stage: str) -> None:
        self.step, self.stage = step, stage
        self._values: dict[str, tuple[float, float]] = {}  # sum of weight * value, or the extreme; sum of weights

    def add(self, prefix: str, values: Mapping[str, Any], weight: float = 1.0) -> None:
        """Adds numbers under `prefix/`; numbers under a weight of 0 count only where nothing else does."""
        for name, value in values.items():
            self.put(f"{prefix}/{name}", float(value), weight)

    def put(self, key: str, value: float, weight: float = 1.0) -> None:
        name = key.rsplit("/", 1)[-1]
        old, total = self._values.get(key, (0.0, 0.0))
        if name.startswith(("max_", "min_")):
            extreme = max if name.startswith("max_") else min
            self._values[key] = (extreme(old, value) if total else value, 1.0)
        else:
            self._values[key] = (old + weight * value, total + weight)

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Put the seconds that the body takes under `time/NAME`, and record them as a phase of the step's timeline."""
        began = time.monotonic()
        with RECORDER.span(name, "phase"):
            yield
        self.put(f"time/{name}", time.monotonic() - began)

    def __getitem__(self, key: str) -> float:
        value, total = self._values[key]
        return value / total if total else math.nan

    def __contains__(self, key: str) -> bool:
        return key in self._values

    def to_json(self) -> MetricsState:
        """Everything, for a checkpoint; exact."""
        return {"step": self.step, "stage": self.stage, "values": {k: list(v) for k, v in self._values.items()}}

    @classmethod
    def from_json(cls, state: MetricsState) -> "Metrics":
        metrics = cls(state["step"], state["stage"])
        metrics._values = {key: (value, weight) for key, (value, weight) in state["values"].items()}
        return metrics

    def as_json(self) -> dict[str, Any]:
        """One line of metrics.jsonl; a number that is not finite is null."""
        numbers = {key: self[key] for key in sorted(self._values)}
        return {
            "step": self.step,
            "stage": self.stage,
            **{key: value if math.isfinite(value) else None for key, value in numbers.items()},
        }
