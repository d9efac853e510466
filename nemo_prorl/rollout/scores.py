"""Log-probabilities of a step's groups, block by block, so that some can be computed before all are judged.

A block's rows go through the model with no other block's, and are dealt out to data ranks by their lengths alone: so
what comes out does not depend on when a block was ready.  What a block is, `rollout.blocks` says.

Shape suffixes: B responses, T token positions; K: policy's log-probability, its entropy, reference's log-probability.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import TYPE_CHECKING, TypeVar

import torch
from torch import Tensor

from nemo_prorl.batch import JudgedGroups
from nemo_prorl.policy.micro_batches import deal
from nemo_prorl.rollout.collected import CollectedBatch

if TYPE_CHECKING:
    from nemo_prorl.policy.actor import Actor

T = TypeVar("T")
Dealt = tuple[CollectedBatch, JudgedGroups, list[JudgedGroups]]  # account, rows to train on, blocks to score
Key = tuple[int, ...]  # of a block: the draws of its groups


@dataclass(frozen=True)
class _Scored:
    """A block's rows: their lengths, which of them each data rank computed, and this rank's values."""

    length_B: list[int]
    rows: list[list[int]]
    value_KBT: Tensor

    def flat(self, rank: int) -> Tensor:
        """This rank's values, one row after the other, without what follows a row's end."""
        parts = [self.value_KBT[:, b, : self.length_B[row]].flatten() for b, row in enumerate(self.rows[rank])]
        return torch.cat(parts) if parts else torch.zeros(0)

    def values(self, flat_of_rank: Sequence[Tensor]) -> list[Tensor]:
        """value_KT of each row, from what `flat` gives on each rank."""
        found: dict[int, Tensor] = {}
        for rows, flat in zip(self.rows, flat_of_rank, strict=True):
            ends = list(accumulate(len(self.value_KBT) * self.length_B[row] for row in rows))
            for row, start, end in zip(rows, [0, *ends], ends, strict=False):
                found[row] = flat[start:end].view(len(self.value_KBT), self.length_B[row])
        return [found[row] for row in range(len(self.length_B))]


class GroupScores:
    """Of one step, by present weights.  Its methods that compute are collectives of all trainer ranks."""

    def __init__(self, policy: "Actor") -> None:
        self._policy = policy
        self._found: dict[Key, _Scored] = {}

    def deal(self, blocks: Sequence[JudgedGroups]) -> list[list[JudgedGroups]]:
        """Return for each data rank what it needs of these blocks: its rows of those that are not computed yet."""
        size = self._policy.data_size
        dealt = [
            block.dealt([[]] * size if block.draws in self._found else deal(block.length_B.tolist(), size))
            for block in blocks
        ]
        return [list(blocks) for blocks in zip(*dealt, strict=True)] or [[] for _ in range(size)]

    def add(self, blocks: Sequence[JudgedGroups]) -> None:
        """Compute the blocks that are new, of which each data rank has the rows that `deal` gives it."""
        new = [block for block in blocks if block.draws not in self._found]
        if not new:
            return
        lengths = [block.length_B.tolist() for block in new]
        rows = [deal(length_B, self._policy.data_size) for length_B in lengths]
        mine = [block.batch() for block in new]
        own = [self._policy.logprobs(batch) for batch in mine]
        reference = self._policy.reference_logprobs(*mine)
        for block, length_B, part, values, ref_logp_BT in zip(new, lengths, rows, own, reference, strict=True):
            self._found[block.draws] = _Scored(length_B, part, torch.stack([*values, ref_logp_BT]))

    def shares(self, draws: Sequence[int]) -> dict[str, float]:
        """`ahead_share`: of the groups of these draws, which are trained on, those that are computed; `wasted_share`:
        of those computed, the ones that are not among these."""
        trained = set(draws)
        found = {draw for key in self._found for draw in key}
        useful = len(trained & found)
        return {
            "ahead_share": useful / max(1, len(trained)),
            "wasted_share": 1.0 - useful / len(found) if found else 0.0,
        }

    def of_rows(self, blocks: Sequence[JudgedGroups], rows_B: Tensor, width: int) -> tuple[Tensor, ...]:
        """(logp_BT, entropy_BT, ref_logp_BT), `width` positions wide, of rows counted through these blocks."""
        self.add(blocks)
        value_KT: list[Tensor] = []
        for block in blocks:  # one after the other: together they are hundreds of megabytes on a GPU
            scored = self._found[block.draws]
            value_KT += scored.values(self._policy.gather_values(scored.flat(self._policy.data_rank)))
        found_KBT = torch.zeros(3, len(rows_B), width)
        for b, number in enumerate(rows_B.tolist()):
            found_KBT[:, b, : value_KT[number].shape[1]] = value_KT[number]
        return found_KBT.unbind()


def deal_batch(batch: CollectedBatch, updates: int, size: int, scores: GroupScores | None) -> list[Dealt]:
    """Return for each of `size` data ranks its part of a batch: the rows that it trains on, and those that it scores.

    The former are those of `updates` mini-batches; the latter are none without `scores`.
    """
    judged, account = JudgedGroups.of(batch.groups), batch.account()
    trained = judged.dealt([torch.cat(rows).tolist() for rows in judged.rows_of_updates(updates, size)])
    scored: list[list[JudgedGroups]] = [[] for _ in range(size)]
    if scores is not None:
        scored = scores.deal([JudgedGroups.of(block) for block in in_blocks(batch.groups, batch.blocks)])
    return [(account, mine, blocks) for mine, blocks in zip(trained, scored, strict=True)]


def in_blocks(groups: Sequence[T], sizes: Sequence[int]) -> list[Sequence[T]]:
    """Groups of a batch by its blocks' sizes.  Raises ValueError where they do not add up."""
    if sum(sizes) != len(groups):
        raise ValueError(f"blocks of {list(sizes)} groups for {len(groups)} groups")
    return [groups[end - size : end] for size, end in zip(sizes, accumulate(sizes), strict=True)]
