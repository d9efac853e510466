"""Comparison of a program's output, which is untrusted, with the expected output."""

import json
import math
import re
from typing import Any

# Floats may differ in their last digits, which depend on the order of additions and on the number of printed digits.
# The smaller of the absolute and the relative tolerance holds: an error of 0.5 in a large number is too much, and a
# tiny number must be right, too.
ABS_TOL = 1e-6
REL_TOL_TEXT = 1e-3
REL_TOL_VALUE = 1e-9
_ULPS = 4
_ZERO = 1e-12

_NUMBER = re.compile(rb"[+-]?(?:\d+\.?\d*|\.\d+)(?:[eE][+-]?\d{1,4})?")
_MAX_DIGITS = 60


def same_text(expected: str, output: bytes) -> bool:
    """Return whether both texts consist of equal tokens, which ASCII white space separates.

    A number with a decimal point may differ in its last digits.
    """
    wanted, printed = expected.encode("utf-8", "surrogatepass").split(), output.split()
    if wanted == printed:
        return True
    return len(wanted) == len(printed) and all(map(_same_token, wanted, printed))


def _same_token(wanted: bytes, printed: bytes) -> bool:
    if wanted == printed:
        return True
    if b"." not in wanted or max(len(wanted), len(printed)) > _MAX_DIGITS:
        return False
    if not _NUMBER.fullmatch(wanted) or not _NUMBER.fullmatch(printed):
        return False
    return _close(float(wanted), float(printed), REL_TOL_TEXT)


def same_value(expected: Any, output: bytes) -> bool:
    """Return whether `output` is JSON for a value equal to `expected`."""
    try:
        value = json.loads(output, parse_constant=_refuse)
        return equal(expected, value)
    except (ValueError, RecursionError, MemoryError):
        return False


def _refuse(constant: str) -> Any:
    raise ValueError(f"{constant} is not JSON")


def equal(expected: Any, value: Any) -> bool:
    """Return whether two JSON values are equal: true is not 1; 1 is 1.0; an expected float has a tolerance."""
    if isinstance(expected, bool) or isinstance(value, bool) or expected is None or value is None:
        return expected is value
    if isinstance(expected, int):
        return isinstance(value, (int, float)) and expected == value
    if isinstance(expected, float):
        return isinstance(value, (int, float)) and _close(expected, value, REL_TOL_VALUE)
    if isinstance(expected, str):
        return isinstance(value, str) and expected == value
    if isinstance(expected, (list, tuple)):
        same_length = isinstance(value, list) and len(expected) == len(value)
        return same_length and all(map(equal, expected, value))
    if isinstance(expected, dict):
        same_keys = isinstance(value, dict) and expected.keys() == value.keys()
        return same_keys and all(equal(item, value[key]) for key, item in expected.items())
    return False


def _close(expected: float, value: float, relative: float) -> bool:
    if expected == value:
        return True
    try:
        gap = abs(expected - value)
    except OverflowError:  # an integer beyond all floats
        return False
    if not math.isfinite(gap):
        return False
    return gap <= max(_ZERO, _ULPS * math.ulp(expected), min(ABS_TOL, relative * abs(expected)))
