"""Compares what a program gave with what is expected.  Trusts nothing of the first."""

import json
import math
from typing import Any

REL_TOL = 1e-9  # of floats in results: the last digits depend on the order of additions


def same_text(expected: str, output: bytes) -> bool:
    """Equal tokens, separated by ASCII white space."""
    return output.split() == expected.encode("utf-8", "surrogatepass").split()


def same_value(expected: Any, output: bytes) -> bool:
    """Whether `output` is the JSON of a value equal to `expected`."""
    try:
        value = json.loads(output, parse_constant=_refuse)
    except (ValueError, RecursionError):
        return False
    return equal(expected, value)


def _refuse(constant: str) -> Any:
    raise ValueError(f"{constant} is no JSON")


def equal(expected: Any, value: Any) -> bool:
    """Equal as JSON values: true is not 1, 1 is 1.0, and floats may differ in the tenth digit."""
    if isinstance(expected, bool) or isinstance(value, bool) or expected is None or value is None:
        return expected is value
    if isinstance(expected, (int, float)):
        return isinstance(value, (int, float)) and _close(expected, value)
    if isinstance(expected, str):
        return isinstance(value, str) and expected == value
    if isinstance(expected, (list, tuple)):
        same_length = isinstance(value, list) and len(expected) == len(value)
        return same_length and all(map(equal, expected, value))
    if isinstance(expected, dict):
        same_keys = isinstance(value, dict) and expected.keys() == value.keys()
        return same_keys and all(equal(item, value[key]) for key, item in expected.items())
    return False


def _close(expected: float, value: float) -> bool:
    if isinstance(expected, int) and isinstance(value, int):
        return expected == value
    try:
        return math.isclose(expected, value, rel_tol=REL_TOL, abs_tol=1e-12)
    except OverflowError:  # an integer beyond all floats
        return False
