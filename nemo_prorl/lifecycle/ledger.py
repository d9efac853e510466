"""The ledger of a run: digests of everything that a step computes, in order of time, one line per step.

Two runs whose lines are equal computed the same to the bit.  `prorl bisect` names the first object in which two ledgers
part, and `prorl replay-training` computes stored steps again and compares.

Fields of a line of RUN/ledger.jsonl:

    step      step of the run
    chain     sha256 over the chain of the line before and the objects of this line
    draws     draw numbers of the groups, in the order of the batch
    samples   responses per group
    outcomes  prompt id and outcome of each group that the step decided on, also of dropped ones; not in the chain
    objects   digests by the name of the object, in the order of `OBJECTS`

Suffixes: G groups, B responses of all groups.
"""

import functools
import hashlib
import json
import os
import re
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from nemo_prorl.algorithms.digests import ragged_digests, row_digests, text_digest
from nemo_prorl.batch import JudgedGroups
from nemo_prorl.files import json_lines
from nemo_prorl.lifecycle.batches import Batches, gap_bytes
from nemo_prorl.metrics import Metrics

_FILE = "ledger.jsonl"
_DIGITS = 8  # hexadecimal digits of the digest of a response or a group
_HEAD = re.compile(rb'\{"step": (\d+), "chain": "(\w+)"')  # of a line; a long run has a gigabyte of them


class Object(NamedTuple):
    """An object of the ledger: the phase that computes it, what its digests are of, and its name in sentences."""

    phase: str
    parts: str  # layers | groups | responses | values
    words: str


OBJECTS = {
    "weights": Object("trainer", "layers", "the weights that the step begins with"),
    "reference": Object("trainer", "values", "the reference policy"),
    "prompts": Object("data", "groups", "prompts: id, visit and tokens"),
    "versions": Object("sampling", "groups", "version of the weights that the engines used"),
    "first": Object("sampling", "responses", "log-probability of a response's first token"),
    "tokens": Object("sampling", "responses", "tokens of a response"),
    "engine_logp": Object("sampling", "responses", "the engine's log-probabilities"),
    "verdicts": Object("rewards", "responses", "verdict: score, correct, parts and failure"),
    "old_logp": Object("trainer", "responses", "the trainer's log-probabilities before the updates"),
    "ref_logp": Object("trainer", "responses", "the reference policy's log-probabilities"),
    "advantage": Object("trainer", "responses", "advantage"),
    "weight": Object("trainer", "responses", "weights of the tokens in the loss"),
    # of each update; the names begin with `update N/`
    "settings": Object("trainer", "values", "learning rate and coefficient of entropy"),
    "gradient": Object("trainer", "layers", "clipped gradient"),
    "moments": Object("trainer", "layers", "Adam's moments after the update"),
    "masters": Object("trainer", "layers", "weights after the update"),
}


def object_of(name: str) -> Object:
    """Return what the ledger says about an object: `gradient`, or `update 2/gradient`."""
    return OBJECTS[name.rpartition("/")[2]]


def _timed(method: Callable[..., None]) -> Callable[..., None]:
    @functools.wraps(method)
    def timed(self: "Ledger", *arguments: Any, **named: Any) -> None:
        began = time.monotonic()
        method(self, *arguments, **named)
        self._seconds += time.monotonic() - began

    return timed


@dataclass(eq=False, repr=False)
class Ledger:
    """The ledger of a run.  Each rank has this object; rank 0 writes."""

    run_dir: Path
    writes: bool  # True on rank 0 only
    policy: Any  # a policy.actor.Actor
    batches: Batches | None = None  # None: the groups are not stored
    _objects: dict[str, Any] = field(default_factory=dict)
    _rows: dict[str, tuple[list[int], list[int]]] = field(default_factory=dict)  # (numbers, digests) of own responses
    _head: dict[str, Any] = field(default_factory=dict)
    _updates: int = 0
    _seconds: float = 0.0  # of this step
    chain: str = ""  # of the last line

    @_timed
    def begin(self) -> None:
        """Begin a step with the digests of policy and reference.  A collective."""
        self._objects, self._rows, self._updates, self._head, self._seconds = {}, {}, 0, {}, 0.0
        self._objects["weights"] = _by_layer(self.policy.digests("weights")["weights"])
        self._objects["reference"] = {"sha256": self.policy.reference_sha256()[:16]}

    @_timed
    def groups(self, step: int, groups: Sequence[Any], judged: JudgedGroups, outcomes: Sequence[Sequence[str]]) -> None:
        """Add the groups of the step, on rank 0: prompts, responses and verdicts.  Store them in the background.

        Args:
            step: the step that trains on them.
            groups: `rollout.groups.Group` objects.
            judged: the same groups, with the tokens of all responses.
            outcomes: prompt id and outcome of each group that the step decided on.
        """
        rows = judged.rows
        token_N, logp_M = torch.from_numpy(rows.token_N), torch.from_numpy(rows.logp_M)
        length_B, prompt_B, response_B = (torch.from_numpy(n) for n in (rows.length_B, rows.prompt_B, rows.response_B))
        position_N = torch.arange(len(token_N)) - torch.repeat_interleave(length_B.cumsum(0) - length_B, length_B)
        response_M = token_N[position_N >= torch.repeat_interleave(prompt_B, length_B)]
        first_B = logp_M[(response_B.cumsum(0) - response_B)[response_B > 0]]  # an empty response has none
        first_B = torch.zeros(len(response_B)).masked_scatter(response_B > 0, first_B).view(torch.int32)
        self._head = {"draws": list(judged.draws), "samples": judged.valid_GN.shape[1], "outcomes": outcomes}
        self._objects |= {
            "prompts": _hex(text_digest(json.dumps([g.prompt_id, g.visit, list(g.prompt_ids)])) for g in groups),
            "versions": _hex(g.version for g in groups),
            "first": _hex((first_B.long() & 0xFFFFFFFF).tolist()),
            "tokens": _hex(ragged_digests(response_M, response_B).tolist()),
            "engine_logp": _hex(ragged_digests(logp_M, response_B).tolist()),
            "verdicts": _hex(text_digest(_without_text(v)) for g in groups for v in g.verdicts),
        }
        if self.batches is not None:  # at the end, because its thread takes the interpreter from what is above
            self.batches.store(step, groups)

    @_timed
    def responses(self, numbers_B: Tensor, **values: Tensor) -> None:
        """Add values of this data rank's responses, by name of the object.

        Args:
            numbers_B: int64, positions of the responses among all responses of the step.
            values: [B, T], 0 outside of the response, or [B].
        """
        for name, value in values.items():
            digests = row_digests(value if value.ndim == 2 else value[:, None])
            self._rows[name] = numbers_B.tolist(), digests.tolist()

    @_timed
    def gaps(self, step: int, judged: JudgedGroups, numbers_B: Tensor, gap_BT: Tensor) -> None:
        """Store the trainer's log-probabilities, less the engine's, with the step's batch.  A collective.

        Args:
            judged: the groups, with the tokens of this data rank's responses.
            numbers_B: as in `responses`.
        """
        if self.batches is None or not self.batches.stores(step):
            return
        own = dict(zip(numbers_B.tolist(), judged.rows.of_responses(gap_bytes(gap_BT)), strict=True))
        parts = self.policy.data_ranks.gather(own)
        if self.writes:
            every = {number: gap_T.numpy() for part in parts for number, gap_T in part.items()}
            self.batches.store_gaps(step, [every[number] for number in sorted(every)])

    @_timed
    def update(self, **settings: float) -> None:
        """Add the update that was just made: its settings, and what it computed.  A collective."""
        self._updates += 1
        update = f"update {self._updates}"
        self._objects[f"{update}/settings"] = {name: repr(value) for name, value in settings.items()}
        for name, layers in self.policy.digests("gradient", "moments", "masters").items():
            self._objects[f"{update}/{name}"] = _by_layer(layers)

    def end(self, metrics: Metrics) -> None:
        """Write the line of the step, and put the seconds that the ledger took into its metrics.  A collective."""
        self._write(metrics.step)
        metrics.put("time/ledger/seconds", self._seconds)

    @_timed
    def _write(self, step: int) -> None:
        every = self.policy.data_ranks.gather(self._rows)
        if not self.writes:
            return
        objects = self._objects
        for name in every[0]:
            pairs = [pair for part in every for pair in zip(*part[name], strict=True)]
            objects[name] = _hex(digest for _, digest in sorted(pairs))
        order = list(OBJECTS)
        objects = dict(sorted(objects.items(), key=lambda item: _place(item[0], order)))
        text = json.dumps([self.chain, objects], separators=(",", ":"))
        self.chain = hashlib.sha256(text.encode()).hexdigest()[:16]
        with self._path.open("a") as file:
            file.write(json_lines([{"step": step, "chain": self.chain, **self._head, "objects": objects}]))

    def cut(self, step: int) -> None:
        """Remove lines and batches after `step`, at the start of a process: their steps are computed again."""
        if not self.writes:
            return
        if self.batches is not None:
            self.batches.cut(step)
        self.chain, end = "", 0
        if self._path.exists():
            with self._path.open("rb") as file:
                for line in file:
                    head = _HEAD.match(line)
                    if head is None or not line.endswith(b"\n") or int(head[1]) > step:
                        break
                    self.chain, end = head[2].decode(), end + len(line)
            os.truncate(self._path, end)

    def keep_batches(self) -> list[int]:
        """Keep the batches that are stored now for ever, on rank 0; return their steps."""
        return [] if self.batches is None else self.batches.keep()

    def close(self) -> None:
        """Wait until the last batch is written."""
        if self.batches is not None:
            self.batches.wait()

    @property
    def _path(self) -> Path:
        return self.run_dir / _FILE


def read_ledger(run_dir: Path) -> dict[int, dict[str, Any]]:
    """Return the lines of a run's ledger by step; empty if it has none.  A line that a kill cut short is left out."""
    path = run_dir / _FILE
    if not path.exists():
        return {}
    with path.open("rb") as file:
        return {value["step"]: value for line in file if (value := _parsed(line)) is not None}


def _parsed(line: bytes) -> dict[str, Any] | None:
    try:
        value: dict[str, Any] = json.loads(line)
    except ValueError:
        return None
    return value if line.endswith(b"\n") else None


def _place(name: str, order: Sequence[str]) -> tuple[int, int]:
    update, _, short = name.rpartition("/")
    return int(update.removeprefix("update ") or 0), order.index(short)


def _by_layer(digests: Mapping[str, int]) -> dict[str, str]:
    return {layer: f"{value:016x}" for layer, value in sorted(digests.items())}


def _hex(digests: Any) -> str:
    return "".join(f"{value:0{_DIGITS}x}" for value in digests)


def digests_of(value: str) -> list[str]:
    """Return the digests of an object that has one for each group or response."""
    return [value[start : start + _DIGITS] for start in range(0, len(value), _DIGITS)]


def _without_text(verdict: Mapping[str, Any]) -> str:
    return json.dumps([verdict[key] for key in ("score", "correct", "parts", "failure")], sort_keys=True)
