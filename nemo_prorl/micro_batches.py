"""Which responses go through the model together: micro-batches of similar lengths, within a budget of tokens."""

import heapq
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

MOST_PADDING = 0.05  # of a batch's positions, beyond what `multiple_of` asks for


@dataclass(frozen=True)
class Limits:
    """Of one micro-batch.

    rows: responses, at most.  tokens: positions with padding, at most, unless one response alone has more; None: rows
    alone limit.  multiple_of: what the padded length is a multiple of (sequence parallelism, FP8).  packed: responses
    stand one after another, so that only their sum is padded to a multiple.
    """

    rows: int
    tokens: int | None = None
    multiple_of: int = 1
    packed: bool = False

    def padded(self, length: int) -> int:
        return -(-max(1, length) // self.multiple_of) * self.multiple_of

    def rows_of_length(self, length: int) -> int:
        """How many responses of a length one micro-batch takes."""
        return self.rows if self.tokens is None else max(1, min(self.rows, self.tokens // self.padded(length)))


def split_rows(lengths: Sequence[int], limits: Limits, at_least: int = 1) -> list[list[int]]:
    """Row numbers of each micro-batch: every row once, shortest first, within the limits.

    Without a budget of tokens: `limits.rows` neighbours in the order of length.  Packed: as many as the budget takes.
    Otherwise the cuts between neighbours that cost least, where a position costs 1 and a micro-batch as much as some
    positions: a sixteenth of the budget, halved until padding is MOST_PADDING or less.

    At least `at_least` micro-batches come out: where it takes more than that, those with most positions are halved,
    and at last empty ones are added.  Data ranks make equally many so, as a collective inside a layer needs
    (Transformer Engine sums its FP8 statistics over them).
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
    """Row numbers of each data rank, ascending: about equally many tokens, and none has more rows than an equal share.

    Longest first, each to the rank that has fewest tokens and not yet its share of rows.
    """
    if ranks == 1:
        return [list(range(len(lengths)))]
    most = -(-len(lengths) // ranks)
    parts: list[list[int]] = [[] for _ in range(ranks)]
    fewest = [(0, rank) for rank in range(ranks)]  # (tokens, rank)
    for row in sorted(range(len(lengths)), key=lambda row: -lengths[row]):
        tokens, rank = heapq.heappop(fewest)
        parts[rank].append(row)
        if len(parts[rank]) < most:
            heapq.heappush(fewest, (tokens + lengths[row], rank))
    return [sorted(part) for part in parts]


def _fullest(lengths: list[int], rows: int, tokens: int) -> list[int]:
    """Sizes of the micro-batches of sequences in this order: each begins where the one before it is full."""
    sizes: list[int] = []
    held = 0
    for length in lengths:
        if not sizes or sizes[-1] == rows or held + length > tokens:
            sizes.append(0)
            held = 0
        sizes[-1] += 1
        held += length
    return sizes


def _cheapest(widths: list[int], rows: int, tokens: int) -> list[int]:
    """Sizes of the micro-batches of rows in the order of their padded lengths; see `split_rows`."""
    cost = max(1, tokens // 16)
    while True:
        sizes = _cheapest_at(widths, rows, tokens, cost)
        ends = np.cumsum(sizes, dtype=int).tolist()
        positions = sum(size * widths[end - 1] for size, end in zip(sizes, ends, strict=True))
        if cost == 1 or positions - sum(widths) <= MOST_PADDING * positions:
            return sizes
        cost //= 2


def _cheapest_at(widths: list[int], rows: int, tokens: int, cost: int) -> list[int]:
    """The sizes with the least sum of positions and `cost` a micro-batch; of equals that with most rows at the end."""
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
    """The same rows in `count` micro-batches or more; empty ones, size 0, stand last."""
    sizes = list(sizes)
    while len(sizes) < count and any(size > 1 for size in sizes):
        ends = np.cumsum(sizes, dtype=int).tolist()
        place = max((p for p, size in enumerate(sizes) if size > 1), key=lambda p: sizes[p] * widths[ends[p] - 1])
        sizes[place : place + 1] = [sizes[place] // 2, sizes[place] - sizes[place] // 2]
    return sizes + [0] * (count - len(sizes))
