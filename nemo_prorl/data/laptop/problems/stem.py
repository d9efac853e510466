"""Generates short science questions, with boxed answers, judged by the `stem` plugin."""

import random
from collections.abc import Callable
from typing import Any

from nemo_prorl.config import DataSource
from nemo_prorl.data.laptop.problems import Draw, Record, kinds_of, number_of, options_of, rng_of

_FACTORS = (("km", "m", 1000), ("m", "cm", 100), ("kg", "g", 1000), ("cm", "mm", 10), ("kV", "V", 1000))
_LAWS = (
    ("A car drives {} m/s for {} s. How far?", "m"),
    ("A force of {} N acts over {} m. Which work?", "J"),
    ("A current of {} A flows at {} V. Which power?", "W"),
    ("A mass of {} kg gains {} m/s^2. Which force?", "N"),
)
_SYMBOLS = {
    "iron": "Fe",
    "gold": "Au",
    "zinc": "Zn",
    "lead": "Pb",
    "tin": "Sn",
    "neon": "Ne",
    "copper": "Cu",
    "silver": "Ag",
}

_Question = tuple[str, str, dict[str, Any]]  # (question, boxed answer, truth)


def stem(source: DataSource) -> Draw:
    """Return the draw function for science questions.

    Options: `kinds` (some of `units`, `laws`, `elements`), `max_value` (largest quantity to convert), `max_factor`
    (largest first quantity in a question of the kind `laws`; the second quantity is 1 to 9).
    """
    options = options_of(source, {"kinds": KINDS, "max_value": 99, "max_factor": 19})
    kinds = kinds_of(source, options["kinds"], KINDS)
    highs = {key: number_of(source, options, key, 2, 999) for key in ("max_value", "max_factor")}

    def draw(number: int) -> Record:
        rng = rng_of(source, number)
        question, answer, truth = _MAKERS[rng.choice(kinds)](rng, highs)
        return {
            "task": "stem",
            "prompt": question,
            "truth": truth,
            "meta": {"target": f"\\boxed{{{answer}}}"},
        }

    return draw


def _units(rng: random.Random, highs: dict[str, int]) -> _Question:
    """Return a unit conversion; the answer may omit the unit, but not have another unit."""
    larger, smaller, factor = rng.choice(_FACTORS)
    value = rng.randint(1, highs["max_value"])
    answer = str(value * factor)
    return f"Convert {value} {larger} to {smaller}.", f"{answer} {smaller}", {"answer": answer, "unit": smaller}


def _laws(rng: random.Random, highs: dict[str, int]) -> _Question:
    """Return a question whose answer is a product of two quantities; the second has one digit."""
    question, unit = rng.choice(_LAWS)
    first, second = rng.randint(1, highs["max_factor"]), rng.randint(1, 9)
    answer = str(first * second)
    return question.format(first, second), f"{answer} {unit}", {"answer": answer, "unit": unit}


def _elements(rng: random.Random, highs: dict[str, int]) -> _Question:
    """Return a multiple-choice question with three options."""
    options = rng.sample(sorted(_SYMBOLS), 3)
    right = rng.randrange(3)
    listed = " ".join(f"{letter}) {name}" for letter, name in zip("ABC", options, strict=True))
    question = f"Which has the symbol {_SYMBOLS[options[right]]}? {listed}"
    return question, "ABC"[right], {"answer": "ABC"[right], "options": options}


_MAKERS: dict[str, Callable[[random.Random, dict[str, int]], _Question]] = {
    "units": _units,
    "laws": _laws,
    "elements": _elements,
}
KINDS = list(_MAKERS)
