"""Prompt records made on the spot: any reasoning-gym task by name, and small problems of the other domains.

A generator is a pure function of its `DataSource`: same name, options, size and seed give the same records with
the same ids on every machine.  A record's id holds the number of its draw (`chain_sum-17`), so it does not move
when other problems are held out.
"""

import difflib
import itertools
import json
import logging
from collections.abc import Callable, Collection
from dataclasses import fields
from fractions import Fraction

from nemo_prorl.config import DataSource
from nemo_prorl.data.laptop.problems import Draw, Record, plain_options
from nemo_prorl.data.laptop.problems.arithmetic import INSTRUCTION as MATH_INSTRUCTION
from nemo_prorl.data.laptop.problems.arithmetic import arithmetic
from nemo_prorl.data.laptop.problems.code import code
from nemo_prorl.data.laptop.problems.instructions import instructions
from nemo_prorl.data.laptop.problems.stem import stem
from nemo_prorl.errors import ConfigError, DataError

_log = logging.getLogger(__name__)

__all__ = ["MATH_INSTRUCTION", "PUZZLE_INSTRUCTION", "Record", "generate", "warmup_target"]

PUZZLE_INSTRUCTION = "Answer in <answer></answer>."

_DRAWS_PER_RECORD = 20  # a source gives up when so many draws in a row (times its size) were all seen before
_REASONING_GYM = "reasoning_gym:"
_PROBLEMS: dict[str, Callable[[DataSource], Draw]] = {
    "arithmetic": arithmetic,
    "code": code,
    "instructions": instructions,
    "stem": stem,
}


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
        record = {"id": f"{prefix}{source.name}-{number}", "source": source.name, "meta": {}, **draw(number)}
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


def _fraction_text(value: object) -> str:
    """A fraction as `3/4`: gsm_symbolic keeps its variables as such; its scorer does not look at them."""
    if isinstance(value, Fraction):
        return str(value)
    raise TypeError(f"Object of type {type(value).__name__} is not JSON serializable")


def _drawer(source: DataSource) -> Draw:
    """draw(number) -> {"task", "prompt", "truth"}, a pure function of the number."""
    name = source.generator or ""
    if name in _PROBLEMS:
        return _PROBLEMS[name](source)
    if name.startswith(_REASONING_GYM):
        return _reasoning_gym(source, name.removeprefix(_REASONING_GYM))
    raise ConfigError(
        f"data source '{source.name}': unknown generator '{source.generator}'; "
        f"known are {', '.join(_PROBLEMS)} and reasoning_gym:DATASET"
    )


def _reasoning_gym(source: DataSource, dataset: str) -> Draw:
    """Draws of one reasoning-gym dataset (0.1.25); its own question, with the answer's form appended once."""
    from reasoning_gym.factory import DATASETS, create_dataset  # 1 s to import

    if dataset not in DATASETS:
        close = difflib.get_close_matches(dataset, DATASETS, n=5, cutoff=0.4)
        hint = f"close names: {', '.join(close)}" if close else f"known are {', '.join(sorted(DATASETS))}"
        raise ConfigError(f"data source '{source.name}': reasoning-gym has no dataset '{dataset}'; {hint}")
    known = {field.name for field in fields(DATASETS[dataset][1])} - {"seed", "size"}
    options = plain_options(source)
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
            entry = json.loads(json.dumps(items[number], default=_fraction_text))
        except TypeError as error:
            raise ConfigError(f"data source '{source.name}': an entry of {dataset} is no JSON: {error}") from error
        prompt = f"{entry['question'].strip()}\n{PUZZLE_INSTRUCTION}"
        return {"task": "puzzles", "prompt": prompt, "truth": {"dataset": dataset, "entry": entry}}

    return draw
