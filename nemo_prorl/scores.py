"""Log-probabilities of a step's groups, block by block, so that some can be computed before all are judged.

A block's rows go through the model with no other block's, and are dealt out to data ranks by their lengths alone: so
what comes out does not depend on when a block was ready.  What a block is, `rollout.blocks` says.

Shape suffixes: B responses, T token positions; K: policy's log-probability, its entropy, reference's log-probability.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from nemo_prorl.batch import JudgedGroups
from nemo_prorl.micro_batches import deal
from nemo_prorl.rollout.collected import Group

if TYPE_CHECKING:
    from nemo_prorl.policy.actor import Actor

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

    def add(self, blocks: Sequence[Sequence[Group]]) -> None:
        """Computes those that are new."""
        new = [block for block in blocks if _key(block) not in self._found]
        if not new:
            return
        whole = [JudgedGroups.of(block).batch for block in new]
        lengths = [batch.length_B.tolist() for batch in whole]
        rows = [deal(length_B, self._policy.data_size) for length_B in lengths]
        mine = [
            batch.rows(torch.tensor(part[self._policy.data_rank], dtype=torch.int64))
            for batch, part in zip(whole, rows, strict=True)
        ]
        own = [self._policy.logprobs(batch) for batch in mine]
        reference = self._policy.reference_logprobs(*mine)
        for block, length_B, part, values, ref_logp_BT in zip(new, lengths, rows, own, reference, strict=True):
            self._found[_key(block)] = _Scored(length_B, part, torch.stack([*values, ref_logp_BT]))

    def shares(self, groups: Sequence[Group]) -> dict[str, float]:
        """`ahead_share`: of these groups, which are trained on, those that are computed; `wasted_share`: of those
        computed, the ones that are not among these."""
        trained = {group.draw_index for group in groups}
        found = {draw for key in self._found for draw in key}
        useful = len(trained & found)
        return {
            "ahead_share": useful / max(1, len(trained)),
            "wasted_share": 1.0 - useful / len(found) if found else 0.0,
        }

    def of_rows(self, blocks: Sequence[Sequence[Group]], rows_B: Tensor, width: int) -> tuple[Tensor, ...]:
        """(logp_BT, entropy_BT, ref_logp_BT), `width` positions wide, of rows counted through these blocks."""
        self.add(blocks)
        value_KT: list[Tensor] = []
        for block in blocks:  # one after the other: together they are hundreds of megabytes on a GPU
            scored = self._found[_key(block)]
            value_KT += scored.values(self._policy.gather_values(scored.flat(self._policy.data_rank)))
        found_KBT = torch.zeros(3, len(rows_B), width)
        for b, number in enumerate(rows_B.tolist()):
            found_KBT[:, b, : value_KT[number].shape[1]] = value_KT[number]
        return found_KBT.unbind()


def _key(block: Sequence[Group]) -> Key:
    return tuple(group.draw_index for group in block)


def in_blocks(groups: Sequence[Group], sizes: Sequence[int]) -> list[Sequence[Group]]:
    """Groups of a batch by its blocks' sizes.  Raises ValueError where they do not add up."""
    if sum(sizes) != len(groups):
        raise ValueError(f"blocks of {list(sizes)} groups for {len(groups)} groups")
    return [groups[end - size : end] for size, end in zip(sizes, accumulate(sizes), strict=True)]
