"""Generates expressions like `123 + 7`, answered by a boxed integer and judged by the `math` plugin."""

from collections.abc import Iterator
from typing import Any

from nemo_prorl.config import DataSource
from nemo_prorl.data.laptop.problems import Draw, Record, options_of, rng_of
from nemo_prorl.errors import ConfigError


def arithmetic(source: DataSource) -> Draw:
    """Return the draw function for sums and products with the usual precedence.

    Options: `max_values` (one per term), `min_value` (for all terms, at least 0), `operators` (some of "+-*").
    """
    defaults: dict[str, Any] = {"max_values": [99, 99], "min_value": 0, "operators": "+-"}
    options = options_of(source, defaults)
    operators, low, highs = "".join(options["operators"]), options["min_value"], options["max_values"]
    if not operators or set(operators) - set("+-*"):
        raise ConfigError(f"data source '{source.name}': operators is {options['operators']!r}; use some of '+-*'")
    if not isinstance(highs, list) or len(highs) < 2 or not 0 <= low <= min(highs):
        raise ConfigError(
            f"data source '{source.name}': min_value={low}, max_values={highs}; expected 0 <= min_value and a list "
            "of two or more numbers, none below min_value"
        )

    def draw(number: int) -> Record:
        rng = rng_of(source, number)
        expression = str(rng.randint(low, highs[0]))
        for high in highs[1:]:
            expression += f" {rng.choice(operators)} {rng.randint(low, high)}"
        return {"task": "math", "prompt": f"Compute {expression}.", "truth": {"answer": str(_value(expression))}}

    return draw


def _value(expression: str) -> int:
    """Return the integer value of `a + b * c - d`, products first."""
    total, sign = 0, 1
    for token in _summands(expression):
        if token in "+-":
            sign = 1 if token == "+" else -1
        else:
            product = 1
            for factor in token.split(" * "):
                product *= int(factor)
            total += sign * product
    return total


def _summands(expression: str) -> Iterator[str]:
    """Yield `a`, `+`, `b * c`, `-`, `d` for `a + b * c - d`."""
    current: list[str] = []
    for token in expression.split(" "):
        if token in "+-":
            yield " ".join(current)
            yield token
            current = []
        else:
            current.append(token)
    yield " ".join(current)
