"""Small problems made on the spot, one module a domain; each makes a pure function of a draw's number.

A draw is `{"task", "prompt", "truth"}`, with `"meta": {"target"}` where the right response does not follow from the
truth.  Short enough for the laptop's model: a prompt of less than 48 of its tokens, a target of 16 at most.
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
    """The source's options as plain Python, whether it comes from a yaml or from code."""
    return OmegaConf.to_container(OmegaConf.create(source.options), resolve=True)  # type: ignore[return-value]


def options_of(source: DataSource, defaults: dict[str, Any]) -> dict[str, Any]:
    """The source's options over `defaults`; raises ConfigError for one that is not among these."""
    given = plain_options(source)
    if wrong := sorted(set(given) - set(defaults)):
        raise ConfigError(
            f"data source '{source.name}': {source.generator} has no option {', '.join(wrong)}; "
            f"known are {', '.join(sorted(defaults))}"
        )
    return {**defaults, **given}


def kinds_of(source: DataSource, given: Any, known: Sequence[str], least: int = 1) -> list[str]:
    """The option `kinds`: at least `least` different ones of `known`."""
    fits = isinstance(given, list) and all(isinstance(kind, str) for kind in given) and len(set(given)) == len(given)
    if not fits or set(given) - set(known) or len(given) < least:
        raise ConfigError(
            f"data source '{source.name}': kinds is {given!r}; right is a list of {least} or more different ones of "
            f"{', '.join(known)}"
        )
    return list(given)


def number_of(source: DataSource, options: dict[str, Any], key: str, low: int, high: int) -> int:
    """The option `key`, a whole number from `low` to `high`."""
    value = options[key]
    if not isinstance(value, int) or isinstance(value, bool) or not low <= value <= high:
        raise ConfigError(f"data source '{source.name}': {key} is {value!r}; right is a whole number, {low} to {high}")
    return value


def rng_of(source: DataSource, number: int) -> random.Random:
    """The random numbers of one draw."""
    return random.Random(f"{source.seed} {number}")
