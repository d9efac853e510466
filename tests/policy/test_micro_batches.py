"""Micro-batches: every row once, within the limits, with little padding; and rows dealt out to data ranks."""

import itertools
import json
import random
from pathlib import Path

import pytest
import torch

from nemo_prorl.batch import Batch
from nemo_prorl.micro_batches import MOST_PADDING, Limits, _cheapest_at, deal, split_rows

RECORDED = json.loads((Path(__file__).parents[2] / "benchmarks" / "results" / "lengths-laptop.json").read_text())


def long_tail(rows: int, seed: int) -> list[int]:
    generator = random.Random(seed)
    return [min(8192, 200 + int(generator.lognormvariate(7.17, 0.9))) for _ in range(rows)]


def positions_of(part: list[int], lengths: list[int], limits: Limits) -> int:
    """Of a micro-batch, with padding; its rows are in the order of length."""
    if limits.packed:
        return limits.padded(sum(lengths[row] for row in part))
    return len(part) * limits.padded(lengths[part[-1]])


CASES = [
    (RECORDED, Limits(128, 8192)),
    (RECORDED, Limits(1000, 64)),
    (long_tail(32, 1), Limits(64, 8192)),
    (long_tail(300, 2), Limits(64, 16384)),
    (long_tail(32, 3), Limits(64, 8192, 16)),
    ([5], Limits(4, 8)),
    ([9, 9, 9], Limits(4, 8)),  # longer than the budget: one alone
    ([], Limits(4, 8)),
    (RECORDED, Limits(128, 1024, packed=True)),
    (RECORDED, Limits(10, packed=True)),
    (long_tail(300, 2), Limits(64, 16384, 16, packed=True)),
    ([9, 3, 9, 5], Limits(4, 8, packed=True)),
]


@pytest.mark.parametrize(("lengths", "limits"), CASES)
@pytest.mark.parametrize("at_least", [1, 7, 1000])
def test_every_row_is_in_one_micro_batch_within_the_limits(lengths: list[int], limits: Limits, at_least: int) -> None:
    parts = split_rows(lengths, limits, at_least)
    assert sorted(itertools.chain(*parts)) == list(range(len(lengths)))
    assert [lengths[row] for part in parts for row in part] == sorted(lengths)
    assert len(parts) >= at_least
    for part in filter(None, parts):
        assert len(part) <= limits.rows
        assert len(part) == 1 or limits.tokens is None or positions_of(part, lengths, limits) <= limits.tokens
    if at_least > len(lengths):
        assert [len(part) for part in parts] == [1] * len(lengths) + [0] * (at_least - len(lengths))


@pytest.mark.parametrize(("lengths", "limits"), [case for case in CASES if len(case[0]) > 10])
def test_padding_is_under_5_percent(lengths: list[int], limits: Limits) -> None:
    """Of a run's recorded lengths and of long tails; rows by number alone do not get there.  Packed there is none."""
    needed = sum(lengths) if limits.packed else sum(limits.padded(length) for length in lengths)
    parts = split_rows(lengths, limits)
    positions = sum(positions_of(part, lengths, limits) for part in parts)
    if limits.packed:
        assert needed <= positions < needed + limits.multiple_of * len(parts)
        fullest = sum(lengths) / (limits.tokens or sum(lengths)) + len(lengths) / limits.rows
        assert len(parts) <= 2 * fullest + 1
    assert 1 - needed / positions <= MOST_PADDING == 0.05
    by_number = Limits(128 if lengths is RECORDED else 32)
    wide = sum(positions_of(part, lengths, by_number) for part in split_rows(lengths, by_number))
    assert 1 - sum(lengths) / wide > 0.1


def test_the_cuts_are_the_cheapest_of_all() -> None:
    generator = random.Random(0)
    for _ in range(40):
        widths = sorted(generator.randint(1, 20) for _ in range(generator.randint(1, 9)))
        rows, tokens, cost = generator.randint(1, 9), generator.randint(20, 80), generator.randint(1, 15)

        def price(sizes: list[int], widths: list[int] = widths, rows: int = rows, tokens: int = tokens) -> int | None:
            ends = list(itertools.accumulate(sizes))
            positions = [size * widths[end - 1] for size, end in zip(sizes, ends, strict=True)]
            return sum(positions) if max(sizes) <= rows and max(positions) <= tokens else None

        cuts = itertools.chain(*(itertools.combinations(range(1, len(widths)), k) for k in range(len(widths))))
        every = [[b - a for a, b in itertools.pairwise([0, *cut, len(widths)])] for cut in cuts]
        prices = [price(sizes) + cost * len(sizes) for sizes in every if price(sizes) is not None]  # type: ignore[operator]
        found = _cheapest_at(widths, rows, tokens, cost)
        assert price(found) + cost * len(found) == min(prices)  # type: ignore[operator]


def test_without_a_budget_neighbours_by_number() -> None:
    assert split_rows([3, 1, 2, 1, 5], Limits(2)) == [[1, 3], [2, 0], [4]]
    assert split_rows([3, 1, 2, 1, 5], Limits(2), at_least=4) == [[1, 3], [2], [0], [4]]


@pytest.mark.parametrize("ranks", [1, 2, 5, 32])
def test_rows_are_dealt_evenly_by_number_and_by_tokens(ranks: int) -> None:
    lengths = long_tail(1024, 4)
    parts = deal(lengths, ranks)
    assert sorted(itertools.chain(*parts)) == list(range(1024))
    assert all(part == sorted(part) for part in parts)
    assert max(map(len, parts)) == -(-1024 // ranks)
    tokens = [sum(lengths[row] for row in part) for part in parts]
    assert max(tokens) <= 1.02 * sum(lengths) / ranks
    in_turn = [sum(lengths[rank::ranks]) for rank in range(ranks)]
    assert ranks < 32 or max(in_turn) > 1.1 * sum(lengths) / ranks
    assert deal([4, 4], 3) == [[0], [1], []]


def test_a_micro_batch_is_padded_to_its_longest_and_one_without_rows_counts_nowhere() -> None:
    batch = Batch.from_sequences([[1]] * 3, [[2] * n for n in (5, 1, 2)], [[-1.0] * n for n in (5, 1, 2)])
    found = batch.micro_batches(Limits(2, 6, multiple_of=2), at_least=4)
    assert [rows.tolist() for rows, _ in found] == [[1], [2], [0], []]
    assert [tuple(micro.tokens_BT.shape) for _, micro in found] == [(1, 2), (1, 4), (1, 6), (1, 2)]
    assert not found[-1][1].mask_BT.any()
    assert torch.equal(found[1][1].tokens_BT, torch.tensor([[1, 2, 2, 0]]))
