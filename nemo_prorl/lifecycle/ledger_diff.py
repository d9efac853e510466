"""Finds the first object in which two ledgers part, and names the kind of cause."""

import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from nemo_prorl.files import listed
from nemo_prorl.lifecycle.ledger import digests_of, object_of

_SHOWN = 3  # parts named in a text
_ROUNDING = 1e-3  # log-probabilities in nats and relative gradient norms that differ by less differ by rounding
_MOST = 0.9  # share of the responses of groups that counts as all of them

Line = Mapping[str, Any]


@dataclass(frozen=True)
class Parting:
    """The first difference of two runs.

    `object`: name in the ledger, or `groups` if the batches have other groups.  `where`: the parts that differ.
    `kind`: data, scheduling, sampling, engine arithmetic, reward, trainer, order of sums, optimizer or configuration.
    """

    step: int
    phase: str
    object: str
    where: str
    kind: str

    def words(self) -> str:
        """Return one sentence."""
        about = "the groups of the batch" if self.object == "groups" else object_of(self.object).words
        update = f"{self.object.partition('/')[0]}, " if "/" in self.object else ""
        return f"step {self.step}, {self.phase}: {update}{about} ({self.where}); kind: {self.kind}"


def parting(first: Mapping[int, Line], second: Mapping[int, Line], norms: "Norms | None" = None) -> Parting | None:
    """Return the first difference in the steps that both ledgers have; None if these are equal."""
    return next(
        (p for step in sorted(first.keys() & second.keys()) if (p := of_step(first[step], second[step], norms))), None
    )


@dataclass(frozen=True)
class Norms:
    """The gradient norm of each step in two runs, from metrics.jsonl, to tell rounding from another loss."""

    first: Mapping[int, float]
    second: Mapping[int, float]

    def nearly_equal(self, step: int) -> bool:
        a, b = self.first.get(step), self.second.get(step)
        return a is not None and b is not None and abs(a - b) <= _ROUNDING * max(abs(a), abs(b))


def of_step(first: Line, second: Line, norms: Norms | None = None) -> Parting | None:
    """Return the first difference of a step in two ledgers, in the order in which the step computes."""
    a, b = first["objects"], second["objects"]
    common = [draw for draw in first.get("draws", []) if draw in second.get("draws", [])]
    same_groups = first.get("draws") == second.get("draws")
    for name in [*a, *(name for name in b if name not in a)]:
        about = object_of(name)
        if about.parts in ("groups", "responses"):
            base, other = (_by_part(line, name, common) for line in (first, second))
            if about.phase == "trainer" and not same_groups:
                break  # the batches differ, hence all that follows
        else:
            base, other = a.get(name, {}), b.get(name, {})
        different = [part for part in base if base[part] != other.get(part)] + [p for p in other if p not in base]
        if different:
            kind = _kind(name, base, other, different, norms is not None and norms.nearly_equal(first["step"]))
            return Parting(first["step"], about.phase, name, _named(different, len(base)), kind)
    return None if same_groups else _other_groups(first, second)


def _by_part(line: Line, name: str, draws: Sequence[int]) -> dict[str, str]:
    """Return the digests of an object by group or response, for the groups with these draw numbers."""
    digests, samples = digests_of(line["objects"].get(name, "")), line.get("samples", 1)
    if object_of(name).parts == "groups":
        names = [(draw, f"draw {draw}") for draw in line.get("draws", [])]
    else:
        names = [(draw, f"response {k} of draw {draw}") for draw in line.get("draws", []) for k in range(samples)]
    return {text: digest for (draw, text), digest in zip(names, digests, strict=False) if draw in draws}


def _kind(
    name: str, base: Mapping[str, str], other: Mapping[str, str], different: Sequence[str], rounding: bool
) -> str:
    short = name.rpartition("/")[2]
    if short == "first":
        gaps = [abs(_float(base[part]) - _float(other[part])) for part in different if part in other]
        touched = {_draw(part) for part in different}  # groups of an earlier step may be equal
        if len(different) < _MOST * sum(_draw(part) in touched for part in base):
            return "sampling: another seed"  # another token comes first in a few responses of a group only
        large = max(gaps, default=0.0) > _ROUNDING
        return "sampling: temperature, or other weights in the engine" if large else "engine arithmetic"
    if short == "gradient":
        return "order of sums" if rounding else "trainer"
    kinds = {
        **{"prompts": "data", "versions": "scheduling", "tokens": "sampling", "engine_logp": "engine arithmetic"},
        **{"verdicts": "reward", "settings": "configuration", "moments": "optimizer", "masters": "optimizer"},
    }
    values = (sorted(digests.get(part, "") for part in different) for digests in (base, other))
    if short not in kinds and len(different) > 1 and len({tuple(digests) for digests in values}) == 1:
        return "trainer: the same values in other rows"
    return kinds.get(short, "trainer")


def _draw(part: str) -> str:
    return part.rpartition(" ")[2]


def _float(digits: str) -> float:
    """Return the float32 whose bits are these hexadecimal digits."""
    return float(struct.unpack(">f", bytes.fromhex(digits))[0])


def _other_groups(first: Line, second: Line) -> Parting:
    """Describe batches with other groups: the first decision that differs, or the groups that one batch lacks."""
    pairs = list(zip(first.get("outcomes", []), second.get("outcomes", []), strict=False))
    for number, ((id_a, outcome_a), (id_b, outcome_b)) in enumerate(pairs):
        if id_a != id_b:
            where = f"decision {number}: prompt {id_a} / {id_b}"
            return Parting(first["step"], "data", "groups", where, "data")
        if outcome_a != outcome_b:
            where = f"decision {number}, prompt {id_a}: {outcome_a} / {outcome_b}"
            return Parting(first["step"], "rewards", "groups", where, "sampling or reward")
    a, b = set(first.get("draws", [])), set(second.get("draws", []))
    where = f"only in the first: {_named(sorted(a - b), 0)}; only in the second: {_named(sorted(b - a), 0)}"
    return Parting(first["step"], "selection", "groups", where, "data")


def _named(parts: Sequence[Any], total: int) -> str:
    if total > _SHOWN and len(parts) == total:
        return f"all {total}"
    return listed(parts, _SHOWN) or "none"
