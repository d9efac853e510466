"""Prompt records made on the spot: any reasoning-gym task by name, and short arithmetic for the `math` plugin.

A generator is a pure function of its `DataSource`: same name, options, size and seed give the same records with
the same ids on every machine.  A record's id holds the number of its draw (`chain_sum-17`), so it does not move
when other problems are held out.
"""

import difflib
import itertools
import json
import logging
import random
from collections.abc import Callable, Collection, Iterator
from dataclasses import fields
from typing import Any

from omegaconf import OmegaConf

from nemo_prorl.config import DataSource
from nemo_prorl.errors import ConfigError, DataError

_log = logging.getLogger(__name__)

Record = dict[str, Any]

PUZZLE_INSTRUCTION = "Answer in <answer></answer>."
MATH_INSTRUCTION = "Answer in \\boxed{}."

_DRAWS_PER_RECORD = 20  # a source gives up when so many draws in a row (times its size) were all seen before
_REASONING_GYM = "reasoning_gym:"


def generate(source: DataSource, held_out: Collection[str] = (), prefix: str = "") -> list[Record]:
    """`source.size` records with pairwise different prompts, none of them in `held_out`.

    `held_out` holds prompts as they stand in records (question with instruction); `prefix` goes before each id.
    Raises ConfigError for an unknown generator, dataset or option, and where the options leave fewer than
    `size` different problems.
    """
    if source.size is None or source.size < 1:
        raise ConfigError(f"data source '{source.name}': size is {source.size}; a generator needs at least 1")
    draw = _drawer(source)
    seen = set(held_out)
    records: list[Record] = []
    idle = 0
    for number in itertools.count():
        record = {"id": f"{prefix}{source.name}-{number}", **draw(number), "source": source.name, "meta": {}}
        if record["prompt"] not in seen:
            seen.add(record["prompt"])
            records.append(record)
            idle = 0
        else:
            idle += 1
        if len(records) == source.size:
            return records
        if idle >= max(1000, _DRAWS_PER_RECORD * len(records)):
            raise ConfigError(
                f"data source '{source.name}': {source.generator} with options {source.options} gave only "
                f"{len(records)} different new problems in {number + 1} draws, size asks for {source.size}: "
                "widen the options or lower size"
            )
    raise AssertionError("unreachable")


def warmup_target(record: Record) -> str:
    """The response that a supervised warm-up teaches: `meta.target`, or a known task's own answer in the asked form.

    Raises DataError for a record that has neither.
    """
    truth, given = record["truth"], record["meta"].get("target")
    if isinstance(given, str):
        return given
    if record["task"] == "puzzles":
        answer = truth["entry"].get("answer")
        form = "<answer>{}</answer>"
    elif record["task"] == "math":
        answer = truth.get("answer")
        form = "\\boxed{{{}}}"
    else:
        raise DataError(
            f"record '{record['id']}': a warm-up knows the answers of puzzles and math, not of task '{record['task']}';"
            " give a right response as 'meta.target', or set trainer.warmup.steps=0"
        )
    if not isinstance(answer, str):
        raise DataError(f"record '{record['id']}': its answer is {answer!r}; a warm-up needs one text")
    return form.format(answer)


def _options(source: DataSource) -> dict[str, Any]:
    """The source's options as plain Python, whether it comes from a yaml or from code."""
    return OmegaConf.to_container(OmegaConf.create(source.options), resolve=True)  # type: ignore[return-value]


def _drawer(source: DataSource) -> Callable[[int], Record]:
    """draw(number) -> {"task", "prompt", "truth"}, a pure function of the number."""
    name = source.generator or ""
    if name == "arithmetic":
        return _arithmetic(source)
    if name.startswith(_REASONING_GYM):
        return _reasoning_gym(source, name.removeprefix(_REASONING_GYM))
    raise ConfigError(
        f"data source '{source.name}': unknown generator '{source.generator}'; "
        "known are 'arithmetic' and 'reasoning_gym:DATASET'"
    )


def _reasoning_gym(source: DataSource, dataset: str) -> Callable[[int], Record]:
    """Draws of one reasoning-gym dataset (0.1.25); its own question, with the answer's form appended once."""
    from reasoning_gym.factory import DATASETS, create_dataset  # 1 s to import

    if dataset not in DATASETS:
        close = difflib.get_close_matches(dataset, DATASETS, n=5, cutoff=0.4)
        hint = f"close names: {', '.join(close)}" if close else f"known are {', '.join(sorted(DATASETS))}"
        raise ConfigError(f"data source '{source.name}': reasoning-gym has no dataset '{dataset}'; {hint}")
    known = {field.name for field in fields(DATASETS[dataset][1])} - {"seed", "size"}
    options = _options(source)
    if wrong := sorted(set(options) - known):
        raise ConfigError(
            f"data source '{source.name}': reasoning_gym:{dataset} has no option {', '.join(wrong)}; "
            f"known are {', '.join(sorted(known))}"
        )
    # A dataset is virtual: item i is drawn from seed + i.  Some check i against `size`, so that is made ample.
    size = max(1000, (source.size or 1) * _DRAWS_PER_RECORD)
    try:
        items = create_dataset(dataset, seed=source.seed, size=size, **options)
    except (AssertionError, TypeError, ValueError) as error:
        raise ConfigError(f"data source '{source.name}': reasoning_gym:{dataset} refuses {options}: {error}") from error

    def draw(number: int) -> Record:
        try:
            entry = json.loads(json.dumps(items[number]))
        except TypeError as error:
            raise ConfigError(f"data source '{source.name}': an entry of {dataset} is no JSON: {error}") from error
        prompt = f"{entry['question'].strip()}\n{PUZZLE_INSTRUCTION}"
        return {"task": "puzzles", "prompt": prompt, "truth": {"dataset": dataset, "entry": entry}}

    return draw


def _arithmetic(source: DataSource) -> Callable[[int], Record]:
    """Draws of expressions like `123 + 7`, answered by an integer and judged by the `math` plugin.

    Options: `max_values` (of each number, so their count is the number of terms), `min_value` (of all, 0 or more),
    `operators` (some of "+-*", the usual precedence).
    """
    defaults: dict[str, Any] = {"max_values": [99, 99], "min_value": 0, "operators": "+-"}
    options = {**defaults, **_options(source)}
    if wrong := sorted(set(options) - set(defaults)):
        raise ConfigError(
            f"data source '{source.name}': arithmetic has no option {', '.join(wrong)}; "
            f"known are {', '.join(sorted(defaults))}"
        )
    operators, low, highs = "".join(options["operators"]), options["min_value"], options["max_values"]
    if not operators or set(operators) - set("+-*"):
        raise ConfigError(f"data source '{source.name}': operators is {options['operators']!r}; use some of '+-*'")
    if not isinstance(highs, list) or len(highs) < 2 or not 0 <= low <= min(highs):
        raise ConfigError(
            f"data source '{source.name}': min_value={low}, max_values={highs}; right is 0 <= min_value and a list "
            "of two or more numbers, none below min_value"
        )

    def draw(number: int) -> Record:
        rng = random.Random(f"{source.seed} {number}")
        expression = str(rng.randint(low, highs[0]))
        for high in highs[1:]:
            expression += f" {rng.choice(operators)} {rng.randint(low, high)}"
        prompt = f"Compute {expression}.\n{MATH_INSTRUCTION}"
        return {"task": "math", "prompt": prompt, "truth": {"answer": str(_value(expression))}}

    return draw


def _value(expression: str) -> int:
    """The integer value of `a + b * c - d`, products first."""
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
    """`a`, `+`, `b * c`, `-`, `d` of `a + b * c - d`."""
    current: list[str] = []
    for token in expression.split(" "):
        if token in "+-":
            yield " ".join(current)
            yield token
            current = []
        else:
            current.append(token)
    yield " ".join(current)
