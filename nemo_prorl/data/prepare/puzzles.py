"""reasoning-gym: entries made on the spot by the installed package, or read from a file of them."""

import json
import logging
import os
import random
import sys
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager, redirect_stdout
from datetime import date
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import yaml

from nemo_prorl.config import DataSource
from nemo_prorl.data.laptop.generators import generate
from nemo_prorl.data.prepare.drafts import Draft, Drop
from nemo_prorl.data.prepare.rows import Row
from nemo_prorl.errors import ConfigError

_log = logging.getLogger(__name__)

_HASH_SEED = "PYTHONHASHSEED"
TAGGED = "Put the final answer between <answer> and </answer>."
TASKS_FILE = Path(__file__).with_name("reasoning_gym.yaml")
HELD_OUT_SEED = 20_000_000  # a data set draws item i from its seed + i, so the two never meet

# Entries without an answer of their own carry one in their metadata.
_ANSWER_IN_METADATA = {
    "graph_color": "possible_answer",
    "propositional_logic": "example_answer",
    "rubiks_cube": "example_correct_answer",
}


def _draft(dataset: str, entry: dict[str, Any], theirs: str) -> Draft | Drop:
    question, answer = entry["question"], entry["answer"]
    if answer is None and dataset in _ANSWER_IN_METADATA:
        answer = entry["metadata"].get(_ANSWER_IN_METADATA[dataset])
    if not isinstance(question, str) or not question.strip():
        return Drop("no problem", "the text is empty")
    text = answer if isinstance(answer, str) or answer is None else json.dumps(answer)
    gold = None if text is None else f"<answer>{text}</answer>"
    truth = {"dataset": dataset, "entry": entry}
    return Draft("puzzles", question.strip(), truth, TAGGED, gold, theirs, {"dataset": dataset})


def entry(row: Row) -> Draft | Drop:
    """An entry of reasoning-gym: `question`, `answer`, `metadata`, and `dataset`, or its name in the metadata."""
    question, answer = row.text("question"), row.needed("answer")
    metadata = row.needed("metadata")
    if isinstance(metadata, str):
        try:
            metadata = json.loads(metadata)
        except ValueError:
            raise row.wrong("metadata", metadata, "an object, or one as JSON") from None
    if not isinstance(metadata, dict):
        raise row.wrong("metadata", metadata, "an object")
    dataset = row.first("dataset") or metadata.get("source_dataset")
    if not isinstance(dataset, str):
        raise row.wrong("dataset", dataset, "the name of a reasoning-gym data set")
    return _draft(dataset, {"question": question, "answer": answer, "metadata": metadata}, "")


def read_tasks(path: Path) -> dict[str, dict[str, Any]]:
    """Name -> options of each task in a yaml file, as the shipped one.  Raises ConfigError naming file and key."""
    try:
        value = yaml.safe_load(path.read_text())
    except (OSError, yaml.YAMLError) as error:
        raise ConfigError(f"--from {path}: no readable list of tasks: {error}") from error
    tasks = value.get("tasks") if isinstance(value, dict) else None
    if not isinstance(tasks, dict) or not tasks:
        raise ConfigError(f"--from {path}: key 'tasks' must be a map of reasoning-gym's task names to their options")
    for name, options in tasks.items():
        if options is not None and not isinstance(options, dict):
            raise ConfigError(f"--from {path}: tasks.{name} is {options!r}; it must be a map of options, or nothing")
    return {str(name): dict(options or {}) for name, options in tasks.items()}


def shares(total: int, count: int) -> list[int]:
    """`total` over `count` tasks, as evenly as whole numbers can be; the first get one more."""
    each, more = divmod(total, count)
    return [each + (index < more) for index in range(count)]


def make(
    tasks: dict[str, dict[str, Any]], size: int, holdout: int, seed: int, workers: int = 1
) -> tuple[list[Draft | Drop], list[Draft | Drop]]:
    """(training, validation) drafts: `size` and `holdout` problems over the tasks, all different, and fixed by `seed`.

    `workers`: processes that share the tasks out; how many changes nothing in the result.  There is always one: some
    data sets go through sets of strings, whose order is Python's hash seed, which only a new process can be given.
    Raises ConfigError naming the task whose options do not give enough different problems.
    """
    train: list[Draft | Drop] = []
    held: list[Draft | Drop] = []
    wanted, kept = shares(size, len(tasks)), shares(holdout, len(tasks))
    orders = (list(tasks), list(tasks.values()), wanted, kept, [seed] * len(tasks))
    with _hash_seed("0"), ProcessPoolExecutor(workers, get_context("spawn")) as pool:
        made = zip(tasks, pool.map(_of_task, *orders), strict=True)
        for number, (name, (others, mine)) in enumerate(made, 1):
            train += [_draft(name, record["truth"]["entry"], record["id"]) for record in others]
            held += [_draft(name, record["truth"]["entry"], record["id"]) for record in mine]
            _log.info("%d of %d tasks: %s, %d and %d problems", number, len(tasks), name, len(others), len(mine))
    return train, held


@contextmanager
def _hash_seed(value: str) -> Iterator[None]:
    """Of processes that start meanwhile."""
    before = os.environ.get(_HASH_SEED)
    os.environ[_HASH_SEED] = value
    try:
        yield
    finally:
        if before is None:
            del os.environ[_HASH_SEED]
        else:
            os.environ[_HASH_SEED] = before


_Records = list[dict[str, Any]]


def _of_task(name: str, options: dict[str, Any], size: int, holdout: int, seed: int) -> tuple[_Records, _Records]:
    """(training, held-out) records of one task."""
    if name == "time_intervals":
        _stop_the_clock()
    random.seed(f"{seed}/{name}")  # list_functions draws from the process's own random numbers too
    with redirect_stdout(sys.stderr):  # some data sets print
        held = _made(name, options, holdout, seed + HELD_OUT_SEED, frozenset())
        return _made(name, options, size, seed, frozenset(record["prompt"] for record in held)), held


def _stop_the_clock() -> None:
    """time_intervals builds its times of day upon today, and offsets to UTC differ by season: one day for all."""
    from reasoning_gym.arithmetic import time_intervals

    class Day(date):
        @classmethod
        def today(cls) -> "Day":
            return cls(2025, 1, 15)

    time_intervals.date = Day


def _without_today(entry: dict[str, Any]) -> dict[str, Any]:
    """Its metadata gives the day of the generation to times that have none; the scorer does not look at it."""
    metadata = dict(entry["metadata"])
    if str(metadata.get("task_type", "")).startswith("time"):
        for key in ("start_time", "end_time"):
            metadata[key] = str(metadata[key]).partition(" ")[2]
    return {**entry, "metadata": metadata}


def _made(name: str, options: dict[str, Any], size: int, seed: int, held_out: frozenset[str]) -> _Records:
    if size == 0:
        return []
    source = DataSource(name=name, generator=f"reasoning_gym:{name}", size=size, seed=seed, options=options)
    records = generate(source, held_out)
    if name == "time_intervals":
        for record in records:
            record["truth"]["entry"] = _without_today(record["truth"]["entry"])
    return records
