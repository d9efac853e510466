"""Generates one-line programming problems, answered in a fenced block and judged by the `code` plugin.

If the problem asks for a function, a response with a wrong number still passes some of the tests, so its reward is
between 0 and 1.
"""

import random
from collections.abc import Callable, Sequence
from typing import Any

from nemo_prorl.config import DataSource
from nemo_prorl.data.laptop.problems import NOUNS, Draw, Record, kinds_of, number_of, options_of, rng_of

_Problem = tuple[str, str, dict[str, Any]]  # (problem text, correct program, truth)


def code(source: DataSource) -> Draw:
    """Return the draw function for small programming problems.

    Options: `kinds` (some of `sum`, `repeat`, `linear`, `bound`), `max_value` (largest number in a problem; in
    problems of the kind `bound`, the bound may be ten times as large).
    """
    options = options_of(source, {"kinds": KINDS, "max_value": 99})
    kinds = kinds_of(source, options["kinds"], KINDS)
    high = number_of(source, options, "max_value", 9, 999)

    def draw(number: int) -> Record:
        rng = rng_of(source, number)
        task, program, truth = _MAKERS[rng.choice(kinds)](rng, high)
        return {
            "task": "code",
            "prompt": f"Write {task}",
            "truth": truth,
            "meta": {"target": f"```python\n{program}\n```"},
        }

    return draw


def _prints(output: str) -> dict[str, Any]:
    return {"tests": [{"input": "", "output": f"{output}\n"}]}


def _function(function: Callable[[int], int], arguments: Sequence[int]) -> dict[str, Any]:
    return {"fn_name": "f", "tests": [{"args": [x], "expected": function(x)} for x in arguments]}


def _sum(rng: random.Random, high: int) -> _Problem:
    first, second = rng.randint(0, high), rng.randint(0, high)
    return f"a program that prints {first} plus {second}.", f"print({first} + {second})", _prints(str(first + second))


def _repeat(rng: random.Random, high: int) -> _Problem:
    word, times = rng.choice(NOUNS), rng.randint(2, min(high, 99))
    return (
        f"a program that prints {word} {times} times.",
        f'print(" {word}" * {times})',
        _prints(" ".join([word] * times)),
    )


def _linear(rng: random.Random, high: int) -> _Problem:
    factor, term = rng.randint(2, 9), rng.randint(1, high)
    truth = _function(lambda x: x * factor + term, [0, 1, 2, 11])  # x = 0 passes even with a wrong factor
    return f"f(x), x times {factor} plus {term}.", f"def f(x): return x * {factor} + {term}", truth


def _bound(rng: random.Random, high: int) -> _Problem:
    bound = rng.randint(1, 10 * high)
    name, words, best = rng.choice((("max", "at least", max), ("min", "at most", min)))
    around = [0, bound // 2, bound - 1, bound + 1, bound + 10, 2 * bound + 20]
    truth = _function(lambda x: best(x, bound), around)
    return f"f(x), x but {words} {bound}.", f"def f(x): return {name}({bound}, x)", truth


_MAKERS: dict[str, Callable[[random.Random, int], _Problem]] = {
    "sum": _sum,
    "repeat": _repeat,
    "linear": _linear,
    "bound": _bound,
}
KINDS = list(_MAKERS)
