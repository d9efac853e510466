"""What rank 0 alone has and does for all ranks, and how the others wait for it: without their GPU, and with a deadline.

    leader = Leader(deadlines, data_rank)
    collector = leader.only(lambda: Collector(...))              # made on rank 0; the other ranks hold nothing
    batch = collector.call(lambda c: c.take(step))               # on rank 0; its result on every rank
    mine = collector.share(lambda c: [part for part in ...])     # each data rank gets its entry alone

What only rank 0 has is the argument of the work, so no other rank can reach for it.
"""

from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any, Generic, TypeVar

import torch.distributed as dist

from nemo_prorl.config import DeadlinesConfig
from nemo_prorl.errors import ProrlError

P = TypeVar("P")
T = TypeVar("T")
_Done = tuple[T | None, ProrlError | None]


class Leader:
    """A process group of all ranks by gloo.  Its methods are collectives of all trainer ranks.

    A rank that waits in NCCL keeps a core and its GPU busy, on which engines generate.
    """

    def __init__(self, deadlines: DeadlinesConfig, data_rank: int) -> None:
        """Without a default process group this is the only rank.  `data_rank`: this rank's, for `LeaderOnly.share`."""
        self.rank, ranks = 0, 1
        if dist.is_initialized():
            self.rank, ranks = dist.get_rank(), dist.get_world_size()
        self._alone = ranks == 1
        self._group = None if self._alone else dist.new_group(backend="gloo", timeout=longest_wait(deadlines))
        self._data_ranks = [data_rank] * ranks
        if not self._alone:
            dist.all_gather_object(self._data_ranks, data_rank, group=self._group)

    def only(self, make: Callable[[], P]) -> "LeaderOnly[P]":
        """Make a part on rank 0.  Raise on every rank what `make` raises there."""
        made: list[P] = []
        self.call(lambda: made.append(make()))
        return LeaderOnly(self, made[0] if made else None)

    def barrier(self) -> None:
        """Wait until all ranks are here."""
        if not self._alone:
            dist.barrier(group=self._group)

    def call(self, work: Callable[[], T]) -> T:
        """Return the result of `work` on rank 0, on every rank; raise on every rank what it raises there."""
        return self._from_rank_0(_attempt(work) if self.rank == 0 else (None, None))

    def _from_rank_0(self, done: "_Done[T]") -> T:
        """Return on every rank what rank 0 gives here, or raise its failure."""
        box = [done]
        if not self._alone:
            dist.broadcast_object_list(box, 0, group=self._group)
        return _unpacked(box[0])

    def _one_each(self, done: "_Done[Sequence[T]]") -> T:
        """Return this data rank's entry of what rank 0 gives here, or raise its failure."""
        if self._alone:
            return _unpacked(done)[0]
        box: list[Any] = [None]
        entries = None
        if self.rank == 0:
            values, failure = done
            entries = [(None if values is None else values[data_rank], failure) for data_rank in self._data_ranks]
        dist.scatter_object_list(box, entries, 0, group=self._group)
        return _unpacked(box[0])


class LeaderOnly(Generic[P]):
    """A part that rank 0 alone has.  `call` and `share` are collectives of all trainer ranks; `tell` is not."""

    def __init__(self, leader: Leader, part: P | None) -> None:
        self._leader, self._part = leader, part

    def only(self, make: Callable[[P], T]) -> "LeaderOnly[T]":
        """Make another part of this one on rank 0.  A collective.  Raise on every rank what `make` raises there."""
        made: list[T] = []
        self.call(lambda part: made.append(make(part)))
        return LeaderOnly(self._leader, made[0] if made else None)

    def call(self, work: Callable[[P], T]) -> T:
        """Return the result of `work` on rank 0, on every rank; raise on every rank what it raises there."""
        return self._leader._from_rank_0(self._done(work))

    def share(self, work: Callable[[P], Sequence[T]]) -> T:
        """Return this data rank's entry of what `work` makes on rank 0: one entry for each data rank.

        No rank receives another data rank's entry.  What `work` raises is raised on every rank.
        """
        return self._leader._one_each(self._done(work))

    def tell(self, work: Callable[[P], object]) -> None:
        """Do `work` on rank 0; the other ranks go on.  What it raises is raised on rank 0 alone."""
        if self._part is not None:
            work(self._part)

    def _done(self, work: Callable[[P], T]) -> "_Done[T]":
        if self._part is None:
            return None, None
        part = self._part
        return _attempt(lambda: work(part))


def longest_wait(deadlines: DeadlinesConfig) -> timedelta:
    """Return more than anything that rank 0 waits for, since that has a deadline of its own and names what it was."""
    d = deadlines
    return timedelta(seconds=d.startup_s + d.rollout_s + d.reward_s + d.publish_s + d.collective_s)


def _attempt(work: Callable[[], T]) -> "_Done[T]":
    try:
        return work(), None
    except ProrlError as error:
        return None, error


def _unpacked(done: "_Done[T]") -> T:
    value, failure = done
    if failure is not None:
        raise failure
    return value  # type: ignore[return-value]  # None where that is what `work` gave
