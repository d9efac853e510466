"""Gives all trainer ranks the results of objects that exist on rank 0 only.

    leader = Leader(deadlines, data_rank)
    collector = leader.only(lambda: Collector(...))              # made on rank 0; every rank gets a handle
    batch = collector.call(lambda c: c.take(step))               # runs on rank 0; every rank gets the result
    mine = collector.share(lambda c: [part for part in ...])     # runs on rank 0; each data rank gets its entry only

The object is passed to the function as an argument, so no other rank can use it by mistake.  The other ranks wait in
gloo with a deadline, and do not keep their GPU busy.
"""

from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any, Generic, TypeVar

import torch.distributed as dist

from nemo_prorl.config import DeadlinesConfig
from nemo_prorl.errors import ProrlError

P = TypeVar("P")
T = TypeVar("T")
_Outcome = tuple[T | None, ProrlError | None]  # result or failure of a function on rank 0


class Leader:
    """A gloo process group of all trainer ranks.  All ranks must call each method together.

    If a function that rank 0 runs for a method raises ProrlError, every rank raises the error; any other error is
    raised on rank 0 only.  The group does not use NCCL: a rank that waits in NCCL keeps a CPU core busy, and keeps its
    GPU busy while engines may generate on the same GPU.
    """

    def __init__(self, deadlines: DeadlinesConfig, data_rank: int) -> None:
        """Create the group.  Without a default process group this rank is the only one.

        Args:
            data_rank: data-parallel rank of this process, for `LeaderOnly.share`.
        """
        self.rank, ranks = 0, 1
        if dist.is_initialized():
            self.rank, ranks = dist.get_rank(), dist.get_world_size()
        self._alone = ranks == 1
        self._group = None if self._alone else dist.new_group(backend="gloo", timeout=longest_wait(deadlines))
        self._data_ranks = [data_rank] * ranks
        if not self._alone:
            dist.all_gather_object(self._data_ranks, data_rank, group=self._group)

    def only(self, make: Callable[[], P]) -> "LeaderOnly[P]":
        """Make an object on rank 0, and return its handle.  A ProrlError of `make` is raised on every rank."""
        made: list[P] = []
        self.call(lambda: made.append(make()))
        return LeaderOnly(self, made)

    def barrier(self) -> None:
        """Wait until all ranks have called this method."""
        if not self._alone:
            dist.barrier(group=self._group)

    def call(self, work: Callable[[], T]) -> T:
        """Run `work` on rank 0, and return its result on every rank.  A ProrlError is raised on every rank."""
        box = [self._attempt(work)]
        if not self._alone:
            dist.broadcast_object_list(box, 0, group=self._group)
        return _unpacked(box[0])

    def share(self, work: Callable[[], Sequence[T]]) -> T:
        """Run `work` on rank 0, and return only this data rank's entry of its result.

        The result of `work` has one entry per data rank.  A ProrlError of `work` is raised on every rank.
        """
        values, failure = self._attempt(work)
        entries = [(None if values is None else values[data_rank], failure) for data_rank in self._data_ranks]
        box: list[Any] = entries[:1]
        if not self._alone:
            dist.scatter_object_list(box, entries if self.rank == 0 else None, 0, group=self._group)
        return _unpacked(box[0])

    def _attempt(self, work: Callable[[], T]) -> "_Outcome[T]":
        if self.rank > 0:
            return None, None
        try:
            return work(), None
        except ProrlError as error:
            return None, error


class LeaderOnly(Generic[P]):
    """A handle of an object that exists on rank 0 only; every rank has the handle.

    All trainer ranks must call each method together, except `run_on_leader`, which does not communicate.  The methods
    are those of `Leader`; their functions get the object.
    """

    def __init__(self, leader: Leader, made: list[P]) -> None:
        """`made`: the object, on rank 0; an empty list on other ranks."""
        self._leader = leader
        self._made = made

    def only(self, make: Callable[[P], T]) -> "LeaderOnly[T]":
        return self._leader.only(lambda: make(self._made[0]))

    def call(self, work: Callable[[P], T]) -> T:
        return self._leader.call(lambda: work(self._made[0]))

    def share(self, work: Callable[[P], Sequence[T]]) -> T:
        return self._leader.share(lambda: work(self._made[0]))

    def run_on_leader(self, work: Callable[[P], object]) -> None:
        """Run `work` on rank 0, while the other ranks continue.  An error is raised on rank 0 only."""
        for part in self._made:
            work(part)


def longest_wait(deadlines: DeadlinesConfig) -> timedelta:
    """Return the time limit of ranks that wait for rank 0: longer than any time limit of rank 0 itself.

    If rank 0 waits too long, for example for an engine, its own time limit ends first.  The error of rank 0 then says
    what was missing; a time limit in gloo could not.
    """
    d = deadlines
    return timedelta(seconds=d.startup_s + d.rollout_s + d.reward_s + d.publish_s + d.collective_s)


def _unpacked(outcome: "_Outcome[T]") -> T:
    value, failure = outcome
    if failure is not None:
        raise failure
    return value  # type: ignore[return-value]  # None only if `work` returned None
