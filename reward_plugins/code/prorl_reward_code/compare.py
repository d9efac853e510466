"""Compares what a program gave with what is expected.  Trusts nothing of the first."""

import json
import math
import re
from typing import Any

# A float of which only the last digits differ is the same: they depend on the order of additions, and on how many are
# printed.  The bound is absolute and relative at once, so that half of a large number and all of a tiny one count.
ABS_TOL = 1e-6
REL_TOL_TEXT = 1e-3
REL_TOL_VALUE = 1e-9
_ULPS = 4
_ZERO = 1e-12

_NUMBER = re.compile(rb"[+-]?(?:\d+\.?\d*|\.\d+)(?:[eE][+-]?\d{1,4})?")
_MAX_DIGITS = 60


def same_text(expected: str, output: bytes) -> bool:
    """Equal tokens, separated by ASCII white space; a number with a decimal point may differ in its last digits."""
    wanted, given = expected.encode("utf-8", "surrogatepass").split(), output.split()
    if wanted == given:
        return True
    return len(wanted) == len(given) and all(map(_same_token, wanted, given))


def _same_token(wanted: bytes, given: bytes) -> bool:
    if wanted == given:
        return True
    if b"." not in wanted or max(len(wanted), len(given)) > _MAX_DIGITS:
        return False
    if not _NUMBER.fullmatch(wanted) or not _NUMBER.fullmatch(given):
        return False
    return _close(float(wanted), float(given), REL_TOL_TEXT)


def same_value(expected: Any, output: bytes) -> bool:
    """Whether `output` is the JSON of a value equal to `expected`."""
    try:
        value = json.loads(output, parse_constant=_refuse)
        return equal(expected, value)
    except (ValueError, RecursionError, MemoryError):
        return False


def _refuse(constant: str) -> Any:
    raise ValueError(f"{constant} is no JSON")


def equal(expected: Any, value: Any) -> bool:
    """Equal as JSON values: true is not 1, 1 is 1.0, and where a float is expected its tenth digit may differ."""
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
