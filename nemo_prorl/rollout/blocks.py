"""Which groups of a step go through the trainer's model together, and which of them may do so before all are judged.

A block holds the groups trained on of some consecutive places in draw order.  So what is in it never depends on when a
verdict came, and neither do the last bits of its log-probabilities, which depend on who shares a micro-batch.
"""

import math
from collections.abc import Sequence
from itertools import groupby

from nemo_prorl.rollout.collected import Group

FEWEST_DRAWS, FEWEST_ROWS = 16, 32  # of a block: prompts drawn, and their responses for each data rank


def block_draws(data_ranks: int, samples: int, stages: int) -> int:
    """Places of a block where the trainer begins only when the engines are done.

    Enough that ranks share its rows out evenly, though about half of the groups are dropped, and that pipeline stages
    have several micro-batches each.
    """
    return max(FEWEST_DRAWS, math.ceil(FEWEST_ROWS * data_ranks / samples)) * stages


def block_sizes(places: Sequence[int], draws: int) -> list[int]:
    """Of a whole batch, whose groups stand at these places: how many of them, in their order, make up each block."""
    return [len(list(block)) for _, block in groupby(places, key=lambda place: place // draws)]


class Blocks:
    """Of one collection.

    needed: groups of a full batch.  draws: places of a block, at least 1.
    """

    def __init__(self, needed: int, draws: int) -> None:
        self.needed, self.draws = needed, draws
        self._joins: list[bool | None] = []  # by place: whether it counts for the batch; None: not judged
        self._groups: list[Group | None] = []  # by place: what is trained on, if it belongs to the batch
        self._handed: set[int] = set()

    def open(self) -> int:
        """The next place, whose group is not judged yet."""
        self._joins.append(None)
        self._groups.append(None)
        return len(self._joins) - 1

    def judged(self, place: int, joins: bool, group: Group | None) -> None:
        """`joins`: what the sampler will say to it while the batch has room; `group`: None if nothing is learnt from
        it all the same."""
        self._joins[place], self._groups[place] = joins, group

    def last(self, count: int) -> list[bool | None]:
        """Whether the groups at the last places join, None where that is not known."""
        return self._joins[len(self._joins) - count :]

    def ready(self) -> list[list[Group]]:
        """The blocks, not returned before, of which all groups are judged and surely belong to the batch.

        They do if the batch has room for them even when all that is open before them joins.
        """
        found, most = [], 0
        for first in range(0, len(self._joins) - self.draws + 1, self.draws):
            joins = self._joins[first : first + self.draws]
            most += sum(value is not False for value in joins)
            if most > self.needed:
                break
            if None in joins or first in self._handed:
                continue
            self._handed.add(first)
            if block := [group for group in self._groups[first : first + self.draws] if group is not None]:
                found.append(block)
        return found
