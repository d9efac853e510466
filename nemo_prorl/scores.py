"""Log-probabilities of a step's groups, each group by itself, so that some can be computed while others are generated.

A group's rows go through the model with no other group's, and are dealt out to data ranks by their lengths alone: so
what comes out does not depend on when a group was ready.

Shape suffixes: B responses, T token positions; K: policy's log-probability, its entropy, reference's log-probability.
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from nemo_prorl.batch import Batch, JudgedGroups
from nemo_prorl.micro_batches import deal
from nemo_prorl.rollout.collected import Group

if TYPE_CHECKING:
    from nemo_prorl.policy.actor import Actor


class GroupScores:
    """Of one step, by present weights.  Its methods that compute are collectives of all trainer ranks."""

    def __init__(self, policy: "Actor") -> None:
        self._policy = policy
        self._found: dict[int, tuple[list[int], Tensor]] = {}  # by draw: this rank's rows of the group, their KBT

    def add(self, groups: Sequence[Group]) -> None:
        """Computes those that are new."""
        new = [group for group in groups if group.draw_index not in self._found]
        shares = [self._share(group) for group in new]
        own = [self._policy.logprobs(batch) for _, batch in shares]
        reference = self._policy.reference_logprobs(*(batch for _, batch in shares))
        for group, (rows, _), values, ref_logp_BT in zip(new, shares, own, reference, strict=True):
            self._found[group.draw_index] = rows, torch.stack([*values, ref_logp_BT])

    def _share(self, group: Group) -> tuple[list[int], Batch]:
        """What this data rank computes of a group."""
        batch = JudgedGroups.of([group]).batch
        rows = deal(batch.length_B.tolist(), self._policy.data_size)[self._policy.data_rank]
        return rows, batch.rows(torch.tensor(rows, dtype=torch.int64))

    def shares(self, groups: Sequence[Group]) -> dict[str, float]:
        """`ahead_share`: of these groups, which are trained on, those that are computed; `wasted_share`: of those
        computed, the ones that are not among these."""
        trained = {group.draw_index for group in groups}
        useful = len(trained & self._found.keys())
        return {
            "ahead_share": useful / max(1, len(trained)),
            "wasted_share": 1.0 - useful / len(self._found) if self._found else 0.0,
        }

    def of_rows(self, groups: Sequence[Group], rows_B: Tensor, width: int) -> tuple[Tensor, ...]:
        """(logp_BT, entropy_BT, ref_logp_BT), `width` positions wide, of rows counted through these groups."""
        self.add(groups)
        mine = {group.draw_index: self._found[group.draw_index] for group in groups}
        value_of = {
            (draw, row): value_KT
            for part in self._policy.gather(mine)
            for draw, (rows, value_KBT) in part.items()
            for row, value_KT in zip(rows, value_KBT.unbind(1), strict=True)
        }
        found_KBT = torch.zeros(3, len(rows_B), width)
        for b, number in enumerate(rows_B.tolist()):
            group, row = divmod(number, len(groups[0].responses))
            value_KT = value_of[groups[group].draw_index, row]
            found_KBT[:, b, : value_KT.shape[1]] = value_KT
        return found_KBT.unbind()
