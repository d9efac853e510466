"""Faults for a run of `small_run`: a kill at a kill point, and updates that are not finite."""

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from types import SimpleNamespace
from typing import Any

from nemo_prorl.lifecycle import killpoints
from nemo_prorl.trainer import Trainer
from tests.lifecycle.small_run import SmallRun


class Killed(BaseException):
    """A SIGKILL: no code of the package catches it."""


@contextmanager
def killed_at(point: str, monkeypatch: Any) -> Iterator[None]:
    """Context manager in which the run is killed at a kill point, once."""
    with monkeypatch.context() as patch:
        system = SimpleNamespace(kill=partial(_kill, point), getpid=os.getpid)
        patch.setattr(killpoints, "os", system)
        name, _, passing = point.partition("#")
        patch.setattr(killpoints, "_WANTED", name)
        patch.setattr(killpoints, "_PASSING", passing)
        patch.setattr(killpoints, "_passed", 0)
        yield


def _kill(point: str, pid: int, number: int) -> None:
    raise Killed(point)


def infinite_in(run: SmallRun, updates: set[tuple[int, int]]) -> Callable[[Trainer], None]:
    """Return a preparation after which the loss of each (step, number of the update in it) is infinite."""

    def prepare(trainer: Trainer) -> None:
        update, begin, numbers = run.policy.update, trainer.before_updates, iter(range(0))  # type: Any, Any, Any

        def begun(metrics: Any) -> Any:
            nonlocal numbers
            numbers = iter(range(100))
            return begin(metrics)

        def poisoned(batch: Any, loss: Any, *given: Any, **named: Any) -> Any:
            factor = float("inf") if (trainer.progress.step, next(numbers)) in updates else 1.0

            def scaled(*parts: Any) -> Any:
                value, sums = loss(*parts)
                return value * factor, sums

            return update(batch, scaled, *given, **named)

        trainer.before_updates = begun  # type: ignore[method-assign]
        run.policy.update = poisoned  # type: ignore[method-assign]

    return prepare
