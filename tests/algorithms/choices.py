"""The choices of the keys under trainer.grpo: what is computed for each of them is tried."""

from typing import Any

from nemo_prorl.config import all_keys


def choices(key: str) -> tuple[Any, ...]:
    """Return the choices of `trainer.grpo.KEY`."""
    return next(known.rule.choices for known in all_keys() if known.name == f"trainer.grpo.{key}")
