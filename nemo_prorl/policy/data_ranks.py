"""Collectives over the policy's data-parallel ranks: gathered objects, sums, maxima and merged diagnostics."""

import functools
import operator
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from torch import Tensor

from nemo_prorl.algorithms.diagnostics import merge, reduction


class DataRanks:
    """The data-parallel group of this rank.  The methods are collectives: all ranks call them."""

    def __init__(self, device: torch.device) -> None:
        self.rank: int = parallel_state.get_data_parallel_rank()
        self.size: int = parallel_state.get_data_parallel_world_size()
        self._device = device

    def gather(self, value: Any) -> list[Any]:
        """Return the `value` of each data rank, in the order of ranks; the same list on every rank."""
        parts: list[Any] = [value] * self.size
        if self.size > 1:
            dist.all_gather_object(parts, value, group=parallel_state.get_data_parallel_group())
        return parts

    def sum(self, value: float) -> float:
        """Return the sum of a number over data ranks, in float64; the same on all tensor and pipeline ranks."""
        return float(self._reduced(float(value), torch.float64, dist.ReduceOp.SUM))

    def most(self, count: int) -> int:
        """Return the largest `count` of any data rank; the same on every rank."""
        return int(self._reduced(count, torch.int64, dist.ReduceOp.MAX))

    def _reduced(self, value: float, dtype: torch.dtype, how: Any) -> Tensor:
        total = torch.tensor(value, dtype=dtype, device=self._device)
        if self.size > 1:
            dist.all_reduce(total, op=how, group=parallel_state.get_data_parallel_group())
        return total

    def reduce_sums(self, sums: dict[str, float]) -> dict[str, float]:
        """Return the sums of all data ranks, merged key by key (see `merge_sums`)."""
        return merge_sums(self.gather(sums))

    def reduce(self, diagnostics: dict[str, Tensor]) -> dict[str, float]:
        """Merge the diagnostics of all data ranks; return the diagnostics for the rows of all data ranks together.

        Args:
            diagnostics: diagnostics for the rows of this rank.
        """
        merged = functools.reduce(merge, self.gather(diagnostics))
        return {key: float(value) for key, value in merged.items()}


def merge_sums(parts: list[dict[str, float]]) -> dict[str, float]:
    """Add values key by key; for keys that begin with max_ or min_, take the largest or smallest value."""
    merged: dict[str, float] = {}
    combine: dict[str, Callable[[float, float], float]] = {"sum": operator.add, "max": max, "min": min}
    for part in parts:
        for key, value in part.items():
            merged[key] = combine[reduction(key)](merged[key], value) if key in merged else value
    return merged
