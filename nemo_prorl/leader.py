"""What rank 0 does for all ranks, and how they wait for it: without their GPU, and longer than rank 0 itself waits."""

from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any, TypeVar

import torch.distributed as dist

from nemo_prorl.config import DeadlinesConfig
from nemo_prorl.errors import ProrlError

T = TypeVar("T")
_Done = tuple[T | None, ProrlError | None]


class RankZero:
    """A process group of all ranks by gloo.  Its methods are collectives of all trainer ranks.

    A rank that waits in NCCL keeps a core and its GPU busy, which engines generate on.
    """

    def __init__(self, deadlines: DeadlinesConfig, data_rank: int) -> None:
        """Each rank's process group exists by now.  `data_rank`: this rank's, for `share`."""
        self._rank, self._alone = dist.get_rank(), dist.get_world_size() == 1
        self._group = None if self._alone else dist.new_group(backend="gloo", timeout=longest_wait(deadlines))
        self._data_ranks = [data_rank] * dist.get_world_size()
        if not self._alone:
            dist.all_gather_object(self._data_ranks, data_rank, group=self._group)

    def result(self, work: Callable[[], T]) -> T:
        """Return the result of `work` on rank 0, on every rank; raise on every rank what it raises there."""
        box = [self._done(work)]
        if not self._alone:
            dist.broadcast_object_list(box, 0, group=self._group)
        return _unpacked(box[0])

    def share(self, work: Callable[[], Sequence[T]]) -> T:
        """Return this data rank's entry of what `work` makes on rank 0: one entry for each data rank.

        No rank receives another data rank's entry.  What `work` raises is raised on every rank.
        """
        done = self._done(work)
        if self._alone:
            return _unpacked(done)[0]
        box: list[Any] = [None]
        entries = None
        if self._rank == 0:
            values, failure = done
            entries = [(None if values is None else values[data_rank], failure) for data_rank in self._data_ranks]
        dist.scatter_object_list(box, entries, 0, group=self._group)
        return _unpacked(box[0])

    def _done(self, work: Callable[[], T]) -> "_Done[T]":
        """Return what `work` gave or how it failed, on rank 0; elsewhere nothing."""
        if self._rank != 0:
            return None, None
        try:
            return work(), None
        except ProrlError as error:
            return None, error

    def barrier(self) -> None:
        """Wait until all ranks are here."""
        if not self._alone:
            dist.barrier(group=self._group)


def longest_wait(deadlines: DeadlinesConfig) -> timedelta:
    """Longer than anything that rank 0 waits for, since that has a deadline of its own and says what it was."""
    d = deadlines
    return timedelta(seconds=d.startup_s + d.rollout_s + d.reward_s + d.publish_s + d.collective_s)


def _unpacked(done: "_Done[T]") -> T:
    value, failure = done
    if failure is not None:
        raise failure
    return value  # type: ignore[return-value]  # None where that is what `work` gave
