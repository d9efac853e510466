"""An endless weighted blend of prompt sources whose order can be continued exactly.

The order is a pure function of (seed, sources, weights, number of prompts drawn): each epoch of a source is a
fresh shuffle that depends on the seed, the source's name and the epoch only, and the next source is the one
furthest behind its share.  So a state is a few counters, and a resumed blend goes on as if never stopped; the blend
of a later stage goes on in the orders of the one before.  Prompts that were solved often enough may be retired: then
the order also depends on the outcomes that `observe` was told, in their order, and on nothing else.
"""

import hashlib
import json
import logging
import random
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Annotated, Literal, NamedTuple, NotRequired, TypedDict

from nemo_prorl.config import DataConfig, DataSource
from nemo_prorl.data.laptop.generators import Record, generate
from nemo_prorl.errors import CheckpointError, ConfigError, DataError
from nemo_prorl.schema import Constraint, Count, Number, Sha256

_log = logging.getLogger(__name__)

_SAME: tuple[Literal["records", "hash", "weight"], ...] = ("records", "hash", "weight")  # while a run goes on

LoadedSource = tuple[DataSource, list[Record]]


class LoadedData(NamedTuple):
    """The data of a run: training sources with the records of all tasks, and validation sources."""

    train: list[LoadedSource]
    validation: list[LoadedSource]


class BlendSourceState(TypedDict):
    """Where a blend is in one of its sources."""

    drawn: Count
    carried: Count
    """of them, in stages before"""
    weight: Annotated[float, Constraint(exclusiveMinimum=0)]
    records: Number
    hash: Sha256
    """over the records"""
    skipped: NotRequired[Count]
    """positions of retired records that were passed over; this and the next two only with data.retire_after"""
    retired: NotRequired[list[str]]
    """ids, in the order in which they were retired"""
    solved: NotRequired[dict[str, Number]]
    """by id: draws in a row that all responses solved, so far"""


class BlendState(TypedDict):
    """Where a blend is in its sources, by their names."""

    seed: Count
    sources: dict[str, BlendSourceState]


class Blend:
    """Draws records from sources in proportion to their weights, each once an epoch of its source.

    `retire_after`: a record solved so many draws in a row is not drawn again (None: none is).  A source without any
    record left leaves its share to the others; when no source has one, all come back.
    Raises DataError for an empty source or a repeated id, ConfigError for a repeated name or a weight that is not
    positive, each naming the source.
    """

    def __init__(self, sources: Sequence[LoadedSource], seed: int, retire_after: int | None = None) -> None:
        _check(sources)
        self._sources = list(sources)
        self._seed = seed
        self._retire_after = retire_after
        self._drawn = [0] * len(sources)
        self._skipped = [0] * len(sources)  # positions of retired records that were passed over
        self._retired: list[dict[str, None]] = [{} for _ in sources]  # ids in the order of their retirement
        self._solved: list[dict[str, int]] = [{} for _ in sources]  # id -> solved draws in a row, so far
        self._source_of = {record["id"]: at for at, (_, records) in enumerate(sources) for record in records}
        self._carried = [0] * len(sources)  # of these, drawn by stages before; shares count what came after
        self._hashes = [ids_hash(records) for _, records in sources]
        self._orders: dict[int, tuple[int, list[int]]] = {}  # source -> (epoch, its order); derived, never saved
        self._shares = self._shares_now()

    def next(self) -> tuple[Record, int]:
        """The next record and its visit: 0 in the first epoch of its source, 1 in the second, and so on."""
        index = self._furthest_behind()
        records, retired = self._sources[index][1], self._retired[index]
        while True:
            epoch, position = divmod(self._drawn[index] + self._skipped[index], len(records))
            record = records[self._order(index, epoch)[position]]
            if record["id"] not in retired:
                self._drawn[index] += 1
                return record, epoch
            self._skipped[index] += 1

    def position(self) -> list[tuple[int, int]]:
        """How many records each source has given and passed over, for `return_to`."""
        return list(zip(self._drawn, self._skipped, strict=True))

    def return_to(self, position: list[tuple[int, int]]) -> None:
        """What was drawn since `position` counts as not drawn."""
        self._drawn = [drawn for drawn, _ in position]
        self._skipped = [skipped for _, skipped in position]

    @property
    def retired(self) -> int:
        """How many records are retired now."""
        return sum(map(len, self._retired))

    def observe(self, outcomes: Sequence[tuple[str, str]]) -> int:
        """Takes (record id, outcome) of decided groups, in order; how many records are retired now.

        Outcome `solved` counts, `unjudged` says nothing, any other begins the count anew.
        """
        if self._retire_after is None:
            return 0
        for identity, outcome in outcomes:
            at = self._source_of[identity]
            if outcome == "unjudged" or identity in self._retired[at]:  # drawn again before it was decided
                continue
            before = self._solved[at].pop(identity, 0)
            solved = before + 1 if outcome == "solved" else 0
            if solved >= self._retire_after:
                self._retire(at, identity)
            elif solved:
                self._solved[at][identity] = solved
        return self.retired

    def _retire(self, at: int, identity: str) -> None:
        self._retired[at][identity] = None
        if len(self._retired[at]) < len(self._sources[at][1]):
            return
        if self.retired == len(self._source_of):
            _log.warning("data blend: all %d training prompts are retired: they come back", self.retired)
            for retired in self._retired:
                retired.clear()
        else:
            _log.info("data source '%s': all its records are retired", self._sources[at][0].name)
        self._rebase()

    def _rebase(self) -> None:
        """Shares are those of the sources that have records, and count from here."""
        self._carried = list(self._drawn)
        self._shares = self._shares_now()

    def _shares_now(self) -> list[float]:
        weights = [
            source.weight if len(retired) < len(records) else 0.0
            for (source, records), retired in zip(self._sources, self._retired, strict=True)
        ]
        return [weight / sum(weights) for weight in weights]

    def state_dict(self) -> BlendState:
        sources = {source.name: self._state_of(at) for at, (source, _) in enumerate(self._sources)}
        return {"seed": self._seed, "sources": sources}

    def _state_of(self, at: int) -> BlendSourceState:
        source, records = self._sources[at]
        state: BlendSourceState = {
            "drawn": self._drawn[at],
            "carried": self._carried[at],
            "weight": source.weight,
            "records": len(records),
            "hash": self._hashes[at],
        }
        if self._retire_after is not None:
            state["skipped"] = self._skipped[at]
            state["retired"] = list(self._retired[at])
            state["solved"] = dict(self._solved[at])
        return state

    def _set_retirement(self, at: int, saved: BlendSourceState) -> None:
        """Take what a state says of a source; the states of runs without retirement say nothing."""
        self._skipped[at] = saved.get("skipped", 0)
        self._retired[at] = dict.fromkeys(saved.get("retired", ()))
        self._solved[at] = dict(saved.get("solved", {}))

    def load_state_dict(self, state: BlendState) -> None:
        """Continues where `state` was taken.  Raises CheckpointError when seed, sources or records changed."""
        if state["seed"] != self._seed:
            raise CheckpointError(f"data blend: the checkpoint's seed is {state['seed']}, this run's is {self._seed}")
        now = self.state_dict()["sources"]
        if list(state["sources"]) != list(now):
            raise CheckpointError(
                f"data blend: the checkpoint's sources are {', '.join(state['sources'])}, "
                f"this run's are {', '.join(now)}"
            )
        for name, saved in state["sources"].items():
            for key in _SAME:
                if saved[key] != now[name][key]:
                    raise CheckpointError(
                        f"data source '{name}': its {key} was {saved[key]} when the run was stopped and is "
                        f"{now[name][key]} now; continue with the same data, or start another run"
                    )
        self._drawn = [saved["drawn"] for saved in state["sources"].values()]
        self._carried = [saved["carried"] for saved in state["sources"].values()]
        for at, saved in enumerate(state["sources"].values()):
            self._set_retirement(at, saved)
        self._shares = self._shares_now()

    def carry(self, state: BlendState) -> None:
        """Begins a stage where the stage before it, whose blend had this `state`, stopped.

        A source with the same records goes on where it was, in position and epoch; shares count from here, so that
        a new source is not drawn alone until it has caught up.  Another seed, or other records, begin anew.
        """
        now = self.state_dict()["sources"]
        same_seed = state["seed"] == self._seed
        if not same_seed:
            _log.info("data blend: the stage before had seed %s, this has %s: begins anew", state["seed"], self._seed)
        for index, (name, own) in enumerate(now.items()):
            drawn = 0
            self._skipped[index], self._retired[index], self._solved[index] = 0, {}, {}
            if same_seed and name in state["sources"]:
                saved = state["sources"][name]
                if (saved["records"], saved["hash"]) == (own["records"], own["hash"]):
                    drawn = saved["drawn"]
                    self._set_retirement(index, saved)
                else:
                    _log.info("data source '%s': not the records of the stage before: begins anew", name)
            self._drawn[index] = self._carried[index] = drawn
        if self._retire_after is None or self.retired == len(self._source_of):
            for retired in self._retired:  # nobody retires in this stage, or nobody is left
                retired.clear()
        self._shares = self._shares_now()

    def _furthest_behind(self) -> int:
        """The source whose draws lag most behind its share of one draw more; the first of equals.

        Any prefix of n draws holds within one record of n times each share for two sources, and within
        (number of sources - 1) in general.
        """
        counted = [drawn - carried for drawn, carried in zip(self._drawn, self._carried, strict=True)]
        total = sum(counted) + 1
        behind = [share * total - drawn for share, drawn in zip(self._shares, counted, strict=True)]
        active = [index for index, share in enumerate(self._shares) if share]
        return max(active, key=lambda index: (behind[index], -index))

    def _order(self, index: int, epoch: int) -> list[int]:
        """The shuffled positions of one epoch of a source."""
        if self._orders.get(index, (-1, []))[0] != epoch:
            source, records = self._sources[index]
            order = list(range(len(records)))
            random.Random(f"{self._seed}/{source.name}/{epoch}").shuffle(order)
            self._orders[index] = (epoch, order)
        return self._orders[index][1]


def ids_hash(records: Sequence[Record]) -> str:
    """sha256 over the records' ids, prompts and truths, in their order: another data set has another hash."""
    digest = hashlib.sha256()
    for record in records:
        digest.update(json.dumps([record["id"], record["prompt"], record["truth"]], sort_keys=True).encode())
    return digest.hexdigest()


def load_sources(data: DataConfig) -> LoadedData:
    """Load the sources of a configuration, with no prompt in both training and validation.

    Validation is made first; a training record whose prompt (compared as JSON text) is held out is left out, and a
    generator draws another in its place.  Generated validation records have ids that begin with `heldout-`.
    Raises ConfigError for a bad source, DataError for bad or missing data.
    """
    validation = [(source, _load(source, frozenset(), "heldout-")) for source in data.validation]
    held_out = frozenset(prompt_key(record) for _, records in validation for record in records)
    train = [(source, _load(source, held_out, "")) for source in data.train]
    for loaded in (train, validation):
        if loaded:
            _check(loaded)
    _check_ids([*train, *validation])
    return LoadedData(train, validation)


def of_tasks(train: list[LoadedSource], data: DataConfig) -> list[LoadedSource]:
    """Return the training records of `data.tasks`; sources without any are left out.

    Raises ConfigError where a task has no record.
    """
    if data.tasks is None or not train:
        return train
    tasks = list(data.tasks)
    kept = [(source, [record for record in records if record["task"] in tasks]) for source, records in train]
    kept = [(source, records) for source, records in kept if records]
    held = {record["task"] for _, records in train for record in records}
    what = f"data.tasks={tasks}: the training sources hold {', '.join(sorted(held))}"
    if not tasks:
        raise ConfigError(f"{what}; name some of these, or null for all")
    if missing := [task for task in tasks if task not in held]:
        raise ConfigError(
            f"{what}, and none of {', '.join(missing)}; add a source of each (data=NAME), or leave it out"
        )
    return kept


def without_long(
    sources: Sequence[LoadedSource], length: Callable[[Record], int], most: int | None
) -> list[LoadedSource]:
    """Return the records whose prompts have at most `most` tokens, by `length`; None: all.  Log how many are left out.

    Raises DataError for a source without any such record.
    """
    if most is None:
        return list(sources)
    kept: list[LoadedSource] = []
    for source, records in sources:
        short = [record for record in records if length(record) <= most]
        told = f"data source '{source.name}': {len(records) - len(short)} of {len(records)} prompts have more than"
        if not short:
            raise DataError(f"{told} data.max_prompt_tokens={most}; none is left")
        if len(short) < len(records):
            _log.warning("%s %d tokens and are left out", told, most)
        kept.append((source, short))
    return kept


def prompt_key(record: Record) -> str:
    """What makes two prompts the same: the text, or the message list as JSON."""
    prompt = record["prompt"]
    return prompt if isinstance(prompt, str) else json.dumps(prompt, sort_keys=True)


def _load(source: DataSource, held_out: frozenset[str], prefix: str) -> list[Record]:
    if source.path is None and source.generator is not None:
        return generate(source, held_out, prefix)
    if source.path is None or source.generator is not None:
        raise ConfigError(f"data source '{source.name}': give it either a path or a generator")
    from nemo_prorl.data.records import read_records

    records = [record for record in read_records(source.path) if prompt_key(record) not in held_out]
    if source.size is not None:
        records = records[: source.size]
    if not records:
        raise DataError(f"data source '{source.name}': no record of {source.path} is left that is not held out")
    return records


def _check(sources: Sequence[LoadedSource]) -> None:
    if not sources:
        raise DataError("data: a blend needs at least one source; list them under data.train")
    names = Counter(source.name for source, _ in sources)
    for source, records in sources:
        if names[source.name] > 1:
            raise ConfigError(f"data source '{source.name}': {names[source.name]} sources have this name")
        if not source.weight > 0:
            raise ConfigError(f"data source '{source.name}': weight is {source.weight}; it must be above 0")
        if not records:
            raise DataError(f"data source '{source.name}' ({source.path or source.generator}) holds no records")
    _check_ids(sources)


def _check_ids(sources: Sequence[LoadedSource]) -> None:
    """A response's seed and verdict go by the record's id, so it must be one record's only."""
    seen: dict[str, str] = {}
    for source, records in sources:
        for record in records:
            if record["id"] in seen:
                raise DataError(f"data source '{source.name}': id '{record['id']}' is also in '{seen[record['id']]}'")
            seen[record["id"]] = source.name
