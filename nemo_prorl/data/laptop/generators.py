"""Generates prompt records: any reasoning-gym task by name, and small problems of the other domains.

A generator is a pure function of its `DataSource`: the same name, options, size and seed give the same records with
the same ids on every machine.  A record's id ends in the number of its draw (`chain_sum-17`), so the id of a problem
stays the same when other problems are left out of training because they are in validation.
"""

import difflib
import itertools
import json
import logging
from collections.abc import Callable, Collection, Mapping
from dataclasses import fields
from fractions import Fraction

from nemo_prorl.config import DataSource
from nemo_prorl.data.laptop.problems import Draw, Record, plain_options
from nemo_prorl.data.laptop.problems.arithmetic import arithmetic
from nemo_prorl.data.laptop.problems.code import code
from nemo_prorl.data.laptop.problems.instructions import instructions
from nemo_prorl.data.laptop.problems.stem import stem
from nemo_prorl.data.prepared import GENERATORS
from nemo_prorl.errors import ConfigError, DataError

_log = logging.getLogger(__name__)

__all__ = ["LAPTOP_TEMPLATES", "Record", "generate", "warmup_target"]

# Prompts for the laptop's small model, as in conf/data/laptop.yaml; `config.DataConfig` has those for real models.
LAPTOP_TEMPLATES = {
    "math": "{problem}\nAnswer in \\boxed{}.",
    "stem": "{problem}\nAnswer in \\boxed{}.",
    "code": "{problem}\nAnswer in ```python.",
    "puzzles": "{problem}\nAnswer in <answer></answer>.",
}

_WARMUP_FIX = (
    "cluster=laptop sets trainer.warmup.steps=110 for models of fewer than 20 million parameters."
    " Fix: trainer.warmup.steps=0, or put a correct response into the field 'meta.target'"
)
_DRAWS_PER_RECORD = 20  # a generator fails after this many repeated problems in a row, per record made so far
_REASONING_GYM = "reasoning_gym:"
_MAKERS = (arithmetic, code, instructions, stem)
_PROBLEMS: dict[str, Callable[[DataSource], Draw]] = dict(zip(GENERATORS, _MAKERS, strict=True))


def generate(
    source: DataSource,
    held_out: Collection[str] = (),
    prefix: str = "",
    templates: Mapping[str, str] = LAPTOP_TEMPLATES,
) -> list[Record]:
    """Return `source.size` records with different prompts.

    Args:
        held_out: complete prompts, with the template around the problem, that no record may have.
        prefix: goes before each id.
        templates: task -> prompt, in which {problem} is replaced by the text of the problem.

    Raises:
        ConfigError: the generator, dataset or an option is unknown, or the options allow fewer than `source.size`
            different problems.
    """
    if source.size is None or source.size < 1:
        raise ConfigError(f"data source '{source.name}': size is {source.size}; a generator needs at least 1")
    draw = drawer(source)
    seen = set(held_out)
    records: list[Record] = []
    repeats = 0
    for number in itertools.count():
        record = {"id": f"{prefix}{source.name}-{number}", "source": source.name, "meta": {}, **draw(number)}
        template = templates.get(record["task"], "{problem}")
        record["prompt"] = template.replace("{problem}", record["prompt"], 1)
        if record["prompt"] not in seen:
            seen.add(record["prompt"])
            records.append(record)
            repeats = 0
        else:
            repeats += 1
        if len(records) == source.size:
            return records
        if repeats >= max(1000, _DRAWS_PER_RECORD * len(records)):
            raise ConfigError(
                f"data source '{source.name}': {source.generator} with options {source.options} gave only "
                f"{len(records)} different problems outside validation in {number + 1} draws; "
                f"expected size={source.size}. Fix: widen the options or lower size"
            )
    raise AssertionError("unreachable")


def warmup_target(record: Record) -> str:
    """Return the response that a supervised warm-up teaches for a record.

    The response is `meta.target`, otherwise the record's answer in the form of its task.  Raises DataError for a record
    without `meta.target` whose task is neither `puzzles` nor `math`, or whose answer is not one string.
    """
    truth, target = record["truth"], record["meta"].get("target")
    if isinstance(target, str):
        return target
    if record["task"] == "puzzles":
        answer = truth["entry"].get("answer")
        form = "<answer>{}</answer>"
    elif record["task"] == "math":
        answer = truth.get("answer")
        form = "\\boxed{{{}}}"
    else:
        raise DataError(
            f"record '{record['id']}': without 'meta.target', a warm-up can use only records of the tasks puzzles and"
            f" math; the task is '{record['task']}'. {_WARMUP_FIX}"
        )
    if not isinstance(answer, str):
        raise DataError(f"record '{record['id']}': its answer is {answer!r}; a warm-up needs one string. {_WARMUP_FIX}")
    return form.format(answer)


def _fraction_text(value: object) -> str:
    """Return a fraction as text such as `3/4`, for JSON.  Raises TypeError for any other value.

    Entries of gsm_symbolic have fractions in the metadata; the scorer of gsm_symbolic does not read these fractions.
    """
    if isinstance(value, Fraction):
        return str(value)
    raise TypeError(f"Object of type {type(value).__name__} is not JSON serializable")


def drawer(source: DataSource) -> Draw:
    """Return the source's draw function: draw number -> {"task", "prompt", "truth"}.

    Raises ConfigError: the generator or one of its options does not exist, or it refuses a value.
    """
    name = source.generator or ""
    if name in _PROBLEMS:
        return _PROBLEMS[name](source)
    if name.startswith(_REASONING_GYM):
        return _reasoning_gym(source, name.removeprefix(_REASONING_GYM))
    raise ConfigError(
        f"data source '{source.name}': unknown generator '{source.generator}'; "
        f"expected one of {', '.join(_PROBLEMS)}, reasoning_gym:DATASET"
    )


def _reasoning_gym(source: DataSource, dataset: str) -> Draw:
    """Return the draw function of a reasoning-gym dataset."""
    from reasoning_gym.factory import DATASETS, create_dataset  # 1 s to import

    if dataset not in DATASETS:
        close = difflib.get_close_matches(dataset, DATASETS, n=5, cutoff=0.4)
        hint = f"close names: {', '.join(close)}" if close else f"expected one of {', '.join(sorted(DATASETS))}"
        raise ConfigError(f"data source '{source.name}': unknown reasoning-gym dataset '{dataset}'; {hint}")
    known = {field.name for field in fields(DATASETS[dataset][1])} - {"seed", "size"}
    options = plain_options(source)
    if wrong := sorted(set(options) - known):
        raise ConfigError(
            f"data source '{source.name}': reasoning_gym:{dataset}: unknown option {', '.join(wrong)}; "
            f"expected one of {', '.join(sorted(known))}"
        )
    # A dataset is virtual: item i is generated from seed + i.  Some datasets check i against `size`, so it is ample.
    size = max(1000, (source.size or 1) * _DRAWS_PER_RECORD)
    try:
        items = create_dataset(dataset, seed=source.seed, size=size, **options)
    except (AssertionError, TypeError, ValueError) as error:
        raise ConfigError(f"data source '{source.name}': reasoning_gym:{dataset} refuses {options}: {error}") from error

    def draw(number: int) -> Record:
        try:
            entry = json.loads(json.dumps(items[number], default=_fraction_text))
        except TypeError as error:
            raise ConfigError(f"data source '{source.name}': an entry of {dataset} is not JSON: {error}") from error
        truth = {"dataset": dataset, "entry": entry}
        return {"task": "puzzles", "prompt": entry["question"].strip(), "truth": truth}

    return draw
