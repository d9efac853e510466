"""An endless weighted blend of prompt sources whose order a resumed run continues exactly.

The order is a pure function of (seed, sources, weights, number of prompts drawn).  Each epoch of a source is a fresh
shuffle that depends only on the seed, the source's name and the epoch.  The next prompt comes from
the source whose number of draws is furthest below its share by weight.  The state is therefore a
few counters: a resumed blend continues exactly, and the blend of a later stage continues the orders
of the previous stage.  Prompts that are solved often enough may be retired; the order then also
depends on the outcomes passed to `observe`, in their order.
"""

import hashlib
import json
import logging
import random
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Annotated, Literal, NamedTuple, NotRequired, TypedDict

from nemo_prorl.config import DataConfig, DataSource
from nemo_prorl.data.laptop.generators import Record, generate
from nemo_prorl.errors import CheckpointError, ConfigError, DataError
from nemo_prorl.schema import Constraint, Count, Number, Sha256

_log = logging.getLogger(__name__)

_SAME: tuple[Literal["records", "hash", "weight"], ...] = ("records", "hash", "weight")  # fixed while a run lasts

LoadedSource = tuple[DataSource, list[Record]]


class LoadedData(NamedTuple):
    """The training and validation sources of a run.  Tasks that `data.tasks` leaves out are still in the records."""

    train: list[LoadedSource]
    validation: list[LoadedSource]


class BlendSourceState(TypedDict):
    """The position of a blend in one of its sources."""

    drawn: Count
    """records drawn in all stages"""
    carried: Count
    """records drawn in earlier stages"""
    weight: Annotated[float, Constraint(exclusiveMinimum=0)]
    records: Number
    """number of records of the source"""
    hash: Sha256
    """sha256 over the records' ids, prompts and truths"""
    skipped: NotRequired[Count]
    """positions skipped because their record is retired; this and the next two only with data.retire_after"""
    retired: NotRequired[list[str]]
    """ids, in the order in which they were retired"""
    solved: NotRequired[dict[str, Number]]
    """by id: consecutive draws so far that all responses solved"""


class BlendState(TypedDict):
    """The position of a blend in its sources, by source name."""

    seed: Count
    sources: dict[str, BlendSourceState]


class Blend:
    """A sampler that draws records from sources in proportion to their weights, each record once per source epoch.

    A source whose records are all retired leaves its share to the other sources.  When the records of all sources are
    retired, all of them are drawn again.

    Args:
        retire_after: consecutive solved draws after which a record is retired, so never drawn; None retires no record.

    Raises:
        DataError: a source is empty or an id is repeated.
        ConfigError: a source name is repeated or a weight is not positive.
    """

    def __init__(self, sources: Sequence[LoadedSource], seed: int, retire_after: int | None = None) -> None:
        _check(sources)
        self._sources = list(sources)
        self._seed = seed
        self._retire_after = retire_after
        self._drawn = [0] * len(sources)
        self._skipped = [0] * len(sources)  # positions skipped because their record is retired
        self._retired: list[dict[str, None]] = [{} for _ in sources]  # ids in the order of their retirement
        self._solved: list[dict[str, int]] = [{} for _ in sources]  # id -> consecutive solved draws
        self._source_of = {record["id"]: at for at, (_, records) in enumerate(sources) for record in records}
        self._carried = [0] * len(sources)  # part of `_drawn` that shares do not count, such as earlier stages' draws
        self._hashes = [ids_hash(records) for _, records in sources]
        self._orders: dict[int, tuple[int, list[int]]] = {}  # source -> (epoch, its order); derived, never saved
        self._shares = self._shares_now()

    def next(self) -> tuple[Record, int]:
        """Draw the next record; return it with its source's epoch, counted from 0."""
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
        """Return the position that `return_to` accepts: for each source, (records drawn, retired records skipped)."""
        return list(zip(self._drawn, self._skipped, strict=True))

    def return_to(self, position: list[tuple[int, int]]) -> None:
        """Undo all draws since `position`, a result of the method `position`."""
        self._drawn = [drawn for drawn, _ in position]
        self._skipped = [skipped for _, skipped in position]

    @property
    def retired(self) -> int:
        """Return the number of retired records."""
        return sum(map(len, self._retired))

    def observe(self, outcomes: Sequence[tuple[str, str]]) -> int:
        """Count the outcomes of judged groups, retire records, and return how many records are now retired.

        Args:
            outcomes: (record id, outcome) in order.  `solved` adds one to the record's consecutive solved draws,
                `unjudged` leaves the number unchanged, and any other outcome sets it to 0.
        """
        if self._retire_after is None:
            return 0
        for identity, outcome in outcomes:
            at = self._source_of[identity]
            if outcome == "unjudged" or identity in self._retired[at]:  # retired while this draw was being judged
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
            _log.warning(
                "data.retire_after: all %d training prompts are retired; from now on all are drawn again", self.retired
            )
            for retired in self._retired:
                retired.clear()
        else:
            _log.info(
                "data source '%s': all its records are retired; none is drawn any more", self._sources[at][0].name
            )
        self._rebase()

    def _rebase(self) -> None:
        """Recompute the shares; a source whose records are all retired gets 0.

        Draws made before this call no longer count towards the shares.
        """
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
        """Restore the retirement counters of the source at index `at`; a counter that `saved` lacks starts empty."""
        self._skipped[at] = saved.get("skipped", 0)
        self._retired[at] = dict.fromkeys(saved.get("retired", ()))
        self._solved[at] = dict(saved.get("solved", {}))

    def load_state_dict(self, state: BlendState) -> None:
        """Restore the position in `state`.

        Raises CheckpointError if seed, sources, records or weights changed.
        """
        if state["seed"] != self._seed:
            raise CheckpointError(
                f"seed={self._seed}: expected seed={state['seed']}, as in the checkpoint. Fix: use this seed, or start"
                " another run with run_dir=FOLDER"
            )
        now = self.state_dict()["sources"]
        if list(state["sources"]) != list(now):
            raise CheckpointError(
                f"data.train: expected the sources of the checkpoint, {', '.join(state['sources'])}; got"
                f" {', '.join(now)}. Fix: use the same sources, or start another run with run_dir=FOLDER"
            )
        for name, saved in state["sources"].items():
            for key in _SAME:
                if saved[key] != now[name][key]:
                    raise CheckpointError(
                        f"data source '{name}': its {key} was {saved[key]} when the run was stopped and is now "
                        f"{now[name][key]}. Fix: continue with the same data, or start another run"
                    )
        self._drawn = [saved["drawn"] for saved in state["sources"].values()]
        self._carried = [saved["carried"] for saved in state["sources"].values()]
        for at, saved in enumerate(state["sources"].values()):
            self._set_retirement(at, saved)
        self._shares = self._shares_now()

    def begin_stage(self, state: BlendState) -> None:
        """Begin a stage at `state`, the blend state at the end of the stage before.

        A source with the same records continues at its position and epoch.  A source whose
        records have changed starts from the beginning; if the seed has changed, all sources do.
        Shares count only this stage's draws; otherwise a new source would be drawn alone until it
        had caught up.
        """
        now = self.state_dict()["sources"]
        same_seed = state["seed"] == self._seed
        if not same_seed:
            _log.info(
                "data blend: the previous stage had seed %s, this stage has %s; all sources start from the beginning",
                state["seed"],
                self._seed,
            )
        for index, (name, own) in enumerate(now.items()):
            drawn = 0
            self._skipped[index], self._retired[index], self._solved[index] = 0, {}, {}
            if same_seed and name in state["sources"]:
                saved = state["sources"][name]
                if (saved["records"], saved["hash"]) == (own["records"], own["hash"]):
                    drawn = saved["drawn"]
                    self._set_retirement(index, saved)
                else:
                    _log.info("data source '%s': its records differ from the previous stage's; it starts again", name)
            self._drawn[index] = self._carried[index] = drawn
        if self._retire_after is None or self.retired == len(self._source_of):
            for retired in self._retired:  # this stage retires no records, or no record would be left
                retired.clear()
        self._shares = self._shares_now()

    def _furthest_behind(self) -> int:
        """Return the index of the source to draw from: the source whose draws are furthest below its share.

        The share is a share of all draws, with the next draw included.  If several sources are equally far below
        their shares, the first is returned.  After n draws, a source's draws differ from n
        times its share by at most 1 with two sources, and by at most (number of sources - 1) in general.
        """
        counted = [drawn - carried for drawn, carried in zip(self._drawn, self._carried, strict=True)]
        total = sum(counted) + 1
        behind = [share * total - drawn for share, drawn in zip(self._shares, counted, strict=True)]
        active = [index for index, share in enumerate(self._shares) if share]
        return max(active, key=lambda index: (behind[index], -index))

    def _order(self, index: int, epoch: int) -> list[int]:
        """Return the shuffled positions of one epoch of a source."""
        known, order = self._orders.get(index, (None, []))
        if known != epoch:
            source, records = self._sources[index]
            order = list(range(len(records)))
            random.Random(f"{self._seed}/{source.name}/{epoch}").shuffle(order)
            self._orders[index] = (epoch, order)
        return order


def ids_hash(records: Sequence[Record]) -> str:
    """Return the sha256 over the records' ids, prompts and truths, in order."""
    digest = hashlib.sha256()
    for record in records:
        digest.update(json.dumps([record["id"], record["prompt"], record["truth"]], sort_keys=True).encode())
    return digest.hexdigest()


def load_sources(data: DataConfig) -> LoadedData:
    """Load the sources of a configuration; no prompt is in both training and validation.

    A training record whose prompt is in validation is left out; a generator draws another record in its place.  The
    ids of generated validation records begin with `heldout-`.
    Raises ConfigError for a bad source, DataError for bad or missing data.
    """
    templates = data.templates
    validation = [(source, _load(source, frozenset(), "heldout-", templates)) for source in data.validation]
    held_out = frozenset(prompt_key(record) for _, records in validation for record in records)
    train = [(source, _load(source, held_out, "", templates)) for source in data.train]
    for loaded in (train, validation):
        if loaded:
            _check(loaded)
    _check_ids([*train, *validation])
    return LoadedData(train, validation)


def of_tasks(train: list[LoadedSource], data: DataConfig) -> list[LoadedSource]:
    """Return the training records of `data.tasks`; sources without such records are left out.

    Raises ConfigError if a task does not have a record.
    """
    if data.tasks is None or not train:
        return train
    tasks = list(data.tasks)
    kept = [(source, [record for record in records if record["task"] in tasks]) for source, records in train]
    kept = [(source, records) for source, records in kept if records]
    available = {record["task"] for _, records in train for record in records}
    problem = f"data.tasks={tasks}: the training sources have records of {', '.join(sorted(available))}"
    if not tasks:
        raise ConfigError(f"{problem}. Fix: name some of these tasks, or null for all")
    if missing := [task for task in tasks if task not in available]:
        raise ConfigError(
            f"{problem}, but not of {', '.join(missing)}. Fix: add a source of these tasks (data=NAME), or"
            " remove the tasks from data.tasks"
        )
    return kept


def prompt_key(record: Record) -> str:
    """Return the text by which prompts are compared: the prompt, one user message, or roles and contents as JSON."""
    prompt = record["prompt"]
    if isinstance(prompt, str):
        return prompt
    messages = [(message["role"], message["content"]) for message in prompt]
    return messages[0][1] if len(messages) == 1 and messages[0][0] == "user" else json.dumps(messages)


def _load(source: DataSource, held_out: frozenset[str], prefix: str, templates: Mapping[str, str]) -> list[Record]:
    if source.path is None and source.generator is not None:
        return generate(source, held_out, prefix, templates)
    if source.path is None or source.generator is not None:
        raise ConfigError(f"data source '{source.name}': expected either a path or a generator, not both or neither")
    from nemo_prorl.data.records import read_records

    records = [record for record in read_records(source.path) if prompt_key(record) not in held_out]
    if source.size is not None:
        records = records[: source.size]
    if not records:
        raise DataError(
            f"data source '{source.name}': no record of {source.path} is left after the prompts of data.validation"
            " are taken out. Fix: validate on other records"
        )
    return records


def _check(sources: Sequence[LoadedSource]) -> None:
    if not sources:
        raise DataError("data: a blend needs at least one source. Fix: list the sources under data.train")
    names = Counter(source.name for source, _ in sources)
    for source, records in sources:
        if names[source.name] > 1:
            raise ConfigError(f"data source '{source.name}': {names[source.name]} sources have this name. Fix: rename")
        if not source.weight > 0:
            raise ConfigError(f"data source '{source.name}': weight is {source.weight}; it must be above 0")
        if not records:
            raise DataError(f"data source '{source.name}' ({source.path or source.generator}) has no records")
    _check_ids(sources)


def _check_ids(sources: Sequence[LoadedSource]) -> None:
    """Raise DataError for a repeated id; ids identify the seeds and verdicts of responses."""
    seen: dict[str, str] = {}
    for source, records in sources:
        for record in records:
            if record["id"] in seen:
                raise DataError(f"data source '{source.name}': id '{record['id']}' is also in '{seen[record['id']]}'")
            seen[record["id"]] = source.name
