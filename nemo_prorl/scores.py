"""Log-probabilities of a step's groups, block by block, so that some can be computed before all are judged.

A block's rows go through the model with no other block's, and are dealt out to data ranks by their lengths alone: so
what comes out does not depend on when a block was ready.  What a block is, `rollout.blocks` says.

Shape suffixes: B responses, T token positions; K: policy's log-probability, its entropy, reference's log-probability.
"""

from collections.abc import Sequence
from itertools import accumulate
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from nemo_prorl.batch import Batch, JudgedGroups
from nemo_prorl.micro_batches import deal
from nemo_prorl.rollout.collected import Group

if TYPE_CHECKING:
    from nemo_prorl.policy.actor import Actor

Key = tuple[int, ...]  # of a block: the draws of its groups


class GroupScores:
    """Of one step, by present weights.  Its methods that compute are collectives of all trainer ranks."""

    def __init__(self, policy: "Actor") -> None:
        self._policy = policy
        self._found: dict[Key, tuple[list[int], Tensor]] = {}  # this rank's rows of a block, their KBT

    def add(self, blocks: Sequence[Sequence[Group]]) -> None:
        """Computes those that are new."""
        new = [block for block in blocks if _key(block) not in self._found]
        shares = [self._share(block) for block in new]
        own = [self._policy.logprobs(batch) for _, batch in shares]
        reference = self._policy.reference_logprobs(*(batch for _, batch in shares))
        for block, (rows, _), values, ref_logp_BT in zip(new, shares, own, reference, strict=True):
            self._found[_key(block)] = rows, torch.stack([*values, ref_logp_BT])

    def _share(self, block: Sequence[Group]) -> tuple[list[int], Batch]:
        """What this data rank computes of a block."""
        batch = JudgedGroups.of(block).batch
        rows = deal(batch.length_B.tolist(), self._policy.data_size)[self._policy.data_rank]
        return rows, batch.rows(torch.tensor(rows, dtype=torch.int64))

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
        mine = {_key(block): self._found[_key(block)] for block in blocks}
        value_of = {
            (key, row): value_KT
            for part in self._policy.gather(mine)
            for key, (rows, value_KBT) in part.items()
            for row, value_KT in zip(rows, value_KBT.unbind(1), strict=True)
        }
        counts = [sum(len(group.responses) for group in block) for block in blocks]
        places = [(_key(block), row) for block, count in zip(blocks, counts, strict=True) for row in range(count)]
        found_KBT = torch.zeros(3, len(rows_B), width)
        for b, number in enumerate(rows_B.tolist()):
            value_KT = value_of[places[number]]
            found_KBT[:, b, : value_KT.shape[1]] = value_KT
        return found_KBT.unbind()


def _key(block: Sequence[Group]) -> Key:
    return tuple(group.draw_index for group in block)


def in_blocks(groups: Sequence[Group], sizes: Sequence[int]) -> list[Sequence[Group]]:
    """Groups of a batch by its blocks' sizes."""
    return [groups[end - size : end] for size, end in zip(sizes, accumulate(sizes), strict=True)]
