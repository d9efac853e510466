"""Small generated problems, one module per domain; a problem depends only on its source and the draw's number.

A draw is `{"task", "prompt", "truth"}`; its prompt is the problem without a template.  If the correct response does not
follow from the truth, the draw also has `"meta": {"target": RESPONSE}`.  Problems fit the laptop's model: with the
laptop's templates, a prompt has fewer than 48 tokens of that model, and a target has at most 16.
"""

import random
from collections.abc import Callable, Sequence
from typing import Any

from omegaconf import OmegaConf

from nemo_prorl.config import DataSource
from nemo_prorl.errors import ConfigError

Record = dict[str, Any]
Draw = Callable[[int], Record]

NOUNS = ("moon", "river", "house", "tree", "garden", "road", "cat", "sea")


def plain_options(source: DataSource) -> dict[str, Any]:
    """Return the source's options as plain Python objects."""
    return OmegaConf.to_container(OmegaConf.create(source.options), resolve=True)  # type: ignore[return-value]


def options_of(source: DataSource, defaults: dict[str, Any]) -> dict[str, Any]:
    """Return the source's options merged over `defaults`.  Raises ConfigError for an option not in `defaults`."""
    options = plain_options(source)
    if wrong := sorted(set(options) - set(defaults)):
        raise ConfigError(
            f"data source '{source.name}': {source.generator}: unknown option {', '.join(wrong)}; "
            f"expected one of {', '.join(sorted(defaults))}"
        )
    return {**defaults, **options}


def kinds_of(source: DataSource, kinds: Any, known: Sequence[str], least: int = 1) -> list[str]:
    """Return `kinds`, the value of the option of this name.

    Raises ConfigError unless `kinds` is a list of at least `least` names of `known`, each once.
    """
    fits = isinstance(kinds, list) and all(isinstance(kind, str) for kind in kinds) and len(set(kinds)) == len(kinds)
    if not fits or set(kinds) - set(known) or len(kinds) < least:
        raise ConfigError(
            f"data source '{source.name}': kinds is {kinds!r}; expected a list of at least {least} different names of "
            f"{', '.join(known)}"
        )
    return list(kinds)


def number_of(source: DataSource, options: dict[str, Any], key: str, low: int, high: int) -> int:
    """Return the option `key`.  Raises ConfigError unless it is a whole number from `low` to `high`."""
    value = options[key]
    if not isinstance(value, int) or isinstance(value, bool) or not low <= value <= high:
        raise ConfigError(
            f"data source '{source.name}': {key} is {value!r}; expected a whole number from {low} to {high}"
        )
    return value


def rng_of(source: DataSource, number: int) -> random.Random:
    """Return the random number generator of one draw."""
    return random.Random(f"{source.seed} {number}")
