"""The metrics of one step: added wherever they arise, reduced once."""

import math
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, TypedDict

from nemo_prorl.schema import Count
from nemo_prorl.tracing import RECORDER


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
