"""Splits a batch into micro-batches of responses with similar lengths, within a budget of tokens."""

import heapq
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

MOST_PADDING = 0.05  # largest share of padding in a batch's positions, not counting the rounding to `multiple_of`


@dataclass(frozen=True)
class Limits:
    """The limits of a micro-batch.

    rows: maximum number of responses.  tokens: maximum number of positions, padding included; a single longer response
    is still allowed; None: only `rows` limits.  multiple_of: divisor of the padded length (sizing/widths.py).  packed:
    responses are concatenated, so only their total length is padded to a multiple.
    """

    rows: int
    tokens: int | None = None
    multiple_of: int = 1
    packed: bool = False

    def padded(self, length: int) -> int:
        return -(-max(1, length) // self.multiple_of) * self.multiple_of

    def rows_of_length(self, length: int) -> int:
        """Return how many responses of this length fit into a micro-batch."""
        return self.rows if self.tokens is None else max(1, min(self.rows, self.tokens // self.padded(length)))


def split_rows(lengths: Sequence[int], limits: Limits, at_least: int = 1) -> list[list[int]]:
    """Sort rows by length, shortest first, and cut them into micro-batches; return the row numbers of each micro-batch.

    The place of the cuts depends on the limits:
    - Without `limits.tokens`, each micro-batch has `limits.rows` rows.
    - Packed micro-batches are filled until the next row would exceed a limit.
    - Padded micro-batches are cut at the least total cost.  Each position, padding included, costs 1, and each
      micro-batch costs a fixed amount.  The first amount tried is a sixteenth of `limits.tokens`.  The amount is halved
      until the share of padding is at most MOST_PADDING, or the amount is 1.

    Args:
        at_least: minimum number of micro-batches.  All data ranks need the same number if a layer contains a collective
            (Transformer Engine sums its FP8 statistics over the data ranks).  If there are fewer micro-batches, those
            with most positions are halved; if each has one row and there are still too few, empty ones are added.
    """
    order = sorted(range(len(lengths)), key=lambda row: lengths[row])  # stable
    widths = [limits.padded(lengths[row]) for row in order]
    if limits.tokens is None:
        sizes = [min(limits.rows, len(order) - start) for start in range(0, len(order), limits.rows)]
    elif limits.packed:
        sizes = _fullest([lengths[row] for row in order], limits.rows, limits.tokens)
    else:
        sizes = _cheapest(widths, limits.rows, limits.tokens)
    sizes = _at_least(sizes, widths, at_least)
    ends = np.cumsum(sizes, dtype=int).tolist()
    return [order[end - size : end] for end, size in zip(ends, sizes, strict=True)]


def deal(lengths: Sequence[int], ranks: int) -> list[list[int]]:
    """Distribute rows over data ranks; return the row numbers of each rank, ascending.

    A rank gets at most an equal share of the rows, and about an equal share of the tokens: rows are dealt longest
    first, each to the rank with the fewest tokens among the ranks that still have room.
    """
    if ranks == 1:
        return [list(range(len(lengths)))]
    max_rows = -(-len(lengths) // ranks)
    parts: list[list[int]] = [[] for _ in range(ranks)]
    loads = [(0, rank) for rank in range(ranks)]  # heap of (tokens, rank)
    for row in sorted(range(len(lengths)), key=lambda row: -lengths[row]):
        tokens, rank = heapq.heappop(loads)
        parts[rank].append(row)
        if len(parts[rank]) < max_rows:
            heapq.heappush(loads, (tokens + lengths[row], rank))
    return [sorted(part) for part in parts]


def _fullest(lengths: list[int], rows: int, tokens: int) -> list[int]:
    """Return the number of rows of each micro-batch: rows are taken in order until the next would exceed a limit."""
    sizes: list[int] = []
    used = 0
    for length in lengths:
        if not sizes or sizes[-1] == rows or used + length > tokens:
            sizes.append(0)
            used = 0
        sizes[-1] += 1
        used += length
    return sizes


def _cheapest(widths: list[int], rows: int, tokens: int) -> list[int]:
    """Return the rows per micro-batch at the least cost (see `split_rows`); `widths`: padded lengths, ascending."""
    cost = max(1, tokens // 16)
    while True:
        sizes = _cheapest_at(widths, rows, tokens, cost)
        ends = np.cumsum(sizes, dtype=int).tolist()
        positions = sum(size * widths[end - 1] for size, end in zip(sizes, ends, strict=True))
        if cost == 1 or positions - sum(widths) <= MOST_PADDING * positions:
            return sizes
        cost //= 2


def _cheapest_at(widths: list[int], rows: int, tokens: int, cost: int) -> list[int]:
    """Return the rows per micro-batch for which the number of positions, plus `cost` per micro-batch, is least.

    Ties go to the split whose last micro-batch has most rows.
    """
    best, begins = np.zeros(len(widths) + 1, dtype=np.int64), [0] * (len(widths) + 1)
    for end, width in enumerate(widths, start=1):
        first = end - max(1, min(rows, tokens // width, end))
        costs = best[first:end] + np.arange(end - first, 0, -1) * width
        place = int(costs.argmin())
        best[end], begins[end] = costs[place] + cost, first + place
    sizes, end = [], len(widths)
    while end:
        sizes.append(end - begins[end])
        end = begins[end]
    return sizes[::-1]


def _at_least(sizes: list[int], widths: list[int], count: int) -> list[int]:
    """Return sizes that split the same rows into at least `count` micro-batches; empty ones (size 0) come last."""
    sizes = list(sizes)
    while len(sizes) < count and any(size > 1 for size in sizes):
        ends = np.cumsum(sizes, dtype=int).tolist()
        place = max((p for p, size in enumerate(sizes) if size > 1), key=lambda p: sizes[p] * widths[ends[p] - 1])
        sizes[place : place + 1] = [sizes[place] // 2, sizes[place] - sizes[place] // 2]
    return sizes + [0] * (count - len(sizes))
