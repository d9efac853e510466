"""What rank 0 does for all ranks, and how they wait for it: without their GPU, and longer than rank 0 itself waits."""

from collections.abc import Callable
from datetime import timedelta
from typing import Any, TypeVar

import torch.distributed as dist

from nemo_prorl.config import DeadlinesConfig
from nemo_prorl.errors import ProrlError

T = TypeVar("T")


class RankZero:
    """A process group of all ranks by gloo.  Its methods are collectives of all trainer ranks.

    A rank that waits in NCCL keeps a core and its GPU busy, which engines generate on.
    """

    def __init__(self, deadlines: DeadlinesConfig) -> None:
        """Each rank's process group exists by now."""
        self._rank, self._alone = dist.get_rank(), dist.get_world_size() == 1
        self._group = None if self._alone else dist.new_group(backend="gloo", timeout=longest_wait(deadlines))

    def result(self, work: Callable[[], T]) -> T:
        """The result of `work` on rank 0, on every rank; what it raises there is raised on every rank."""
        box: list[Any] = [None]
        if self._rank == 0:
            try:
                box = [(work(), None)]
            except ProrlError as error:
                box = [(None, error)]
        if not self._alone:
            dist.broadcast_object_list(box, 0, group=self._group)
        value, failure = box[0]
        if failure is not None:
            raise failure
        return value

    def barrier(self) -> None:
        """Until all ranks are here."""
        if not self._alone:
            dist.barrier(group=self._group)


def longest_wait(deadlines: DeadlinesConfig) -> timedelta:
    """Longer than anything that rank 0 waits for, since that has a deadline of its own and says what it was."""
    d = deadlines
    return timedelta(seconds=d.startup_s + d.rollout_s + d.reward_s + d.publish_s + d.collective_s)
