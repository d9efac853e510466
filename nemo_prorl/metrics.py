"""The metrics of one training step: numbers added during the step and averaged once, for metrics.jsonl."""

import math
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, TypedDict

from nemo_prorl.schema import Count
from nemo_prorl.tracing import RECORDER


class MetricsState(TypedDict):
    """The metrics of an unfinished step that a checkpoint stores."""

    step: Count
    stage: str
    values: dict[str, list[float]]
    """by key: [sum of weight * value, or the extreme; sum of weights]"""


class Metrics:
    """Named numbers of a step, under the keys of `metrics.jsonl`.

    A number that is added several times is averaged by weight.  If the last part of its key begins with `max_` or
    `min_`, the largest or smallest value is kept instead.  Numbers that depend on the clock have keys under `time/`.
    """

    current = ""  # phase that this process is in; one object at a time is filled, so it belongs to the class

    def __init__(self, step: int, stage: str) -> None:
        self.step = step
        self.stage = stage
        self._values: dict[str, tuple[float, float]] = {}  # sum of weight * value, or the extreme; sum of weights

    def add(self, prefix: str, values: Mapping[str, Any], weight: float = 1.0) -> None:
        """Add each number under the key `prefix/NAME`.  An average is nan if all its weights are 0."""
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
        """Context manager that records the body as a phase of the timeline, and its time as the metric `time/NAME`."""
        began = time.monotonic()
        Metrics.current = name
        with RECORDER.span(name, "phase"):
            yield
        Metrics.current = ""
        self.put(f"time/{name}", time.monotonic() - began)

    def __contains__(self, key: str) -> bool:
        return key in self._values

    def __getitem__(self, key: str) -> float:
        value, total = self._values[key]
        return value / total if total else math.nan

    def to_json(self) -> MetricsState:
        """Return the exact sums and weights, for a checkpoint."""
        return {"step": self.step, "stage": self.stage, "values": {k: list(v) for k, v in self._values.items()}}

    @classmethod
    def from_json(cls, state: MetricsState) -> "Metrics":
        metrics = cls(state["step"], state["stage"])
        metrics._values = {key: (value, weight) for key, (value, weight) in state["values"].items()}
        return metrics

    def as_json(self) -> dict[str, Any]:
        """Return one line of metrics.jsonl; a number that is not finite is null."""
        numbers = {key: self[key] for key in sorted(self._values)}
        return {
            "step": self.step,
            "stage": self.stage,
            **{key: value if math.isfinite(value) else None for key, value in numbers.items()},
        }
