"""No key of another trainer is lost: another value changes what `prorl convert` says, or the table says why not."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from nemo_prorl.migration.converted import NO_EFFECT, Converted
from nemo_prorl.migration.names import TITLES, table
from nemo_prorl.migration.rules import _matches, convert

VALUES: dict[str, Any] = yaml.safe_load((Path(__file__).parent / "other_values.yaml").read_text())
CASES = [(one, switch) for one in TITLES for switch in ({}, *VALUES[one]["switches"])]


def leaves(tree: dict[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for name, value in tree.items():
        yield from leaves(value, f"{prefix}{name}.") if isinstance(value, dict) else [(f"{prefix}{name}", value)]


def others(trainer: str, base: dict[str, Any]) -> dict[str, Any]:
    """Return {key: a value that is not its default} of the trainer's own configuration, and of its table."""
    tables, found = table(trainer), dict(leaves(VALUES[trainer]["others"]))
    usual = {key: values[0] for key, values in (tables["differs"] | tables["decides"]).items() if "*" not in key}
    usual |= dict.fromkeys(tables["keys"] | tables["derived"]) | tables["defaults"]
    for key, value in usual.items():
        number = 3 if value is None or isinstance(value, str) else value * 2 or 3
        new = [0.5, 0.7] if isinstance(value, list) else not value if isinstance(value, bool) else number
        found.setdefault(key, new if value is None or not isinstance(value, str) else "other")
    return {key: value for key, value in found.items() if base.get(key, tables["defaults"].get(key)) != value}


def said(made: Converted) -> tuple[Any, ...]:
    return made.overrides, made.unknown, made.differs, made.notes


@pytest.mark.parametrize(
    ("trainer", "switch"), CASES, ids=[f"{one}-{' '.join(keys) or 'plain'}" for one, keys in CASES]
)
def test_another_value_of_any_key_is_converted_or_told(trainer: str, switch: dict[str, Any]) -> None:
    base = VALUES[trainer]["base"] | dict(leaves(switch))
    before, lost = said(convert(trainer, base)), {}
    for key, value in others(trainer, base).items():
        made = convert(trainer, base | {key: value})
        if made.misspelt or (said(made) == before and made.unused.get(key, NO_EFFECT) == NO_EFFECT):
            lost[key] = value
    assert lost == {}


@pytest.mark.parametrize("trainer", TITLES)
def test_no_pattern_of_keys_without_an_effect_swallows_one_that_has_an_effect(trainer: str) -> None:
    tables = table(trainer)
    patterns = [one for some in tables["unused"].values() for one in some]
    assert [key for key in tables["keys"] | tables["derived"] if _matches(key, patterns)] == []
