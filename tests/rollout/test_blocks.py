"""Blocks of groups: the same whatever was judged when, and none is handed out that might not be trained on."""

import random
from typing import Any

import pytest

from nemo_prorl.rollout.blocks import Blocks, block_draws, block_sizes
from tests.rollout.test_groups import group_of


def test_a_block_is_large_enough_for_all_ranks() -> None:
    for size, draws in (((1, 8, 1), 16), ((32, 16, 1), 64), ((32, 1, 1), 1024), ((8, 16, 1), 16), ((8, 16, 4), 64)):
        assert block_draws(*size) == draws


def test_sizes_by_hand() -> None:
    assert block_sizes([0, 1, 3, 4, 9, 10], 4) == [3, 1, 2]
    assert block_sizes([2, 3, 5], 1) == [1, 1, 1]
    assert block_sizes([], 4) == []


@pytest.mark.parametrize("seed", range(30))
def test_what_is_handed_out_is_a_block_of_the_batch(seed: int) -> None:
    rng = random.Random(seed)
    draws, needed = rng.choice([1, 2, 3, 5]), rng.randint(1, 12)
    joins = [rng.random() < 0.7 for _ in range(30)]
    taught = [join and rng.random() < 0.9 for join in joins]
    groups: list[Any] = [group_of([0.0, 1.0]) for _ in joins]
    end = [place for place in range(30) if sum(joins[: place + 1]) <= needed and joins[place]][-1] + 1
    places = [place for place in range(end) if taught[place]]
    whole, rest = [], list(places)
    for size in block_sizes(places, draws):
        whole.append([groups[place] for place in rest[:size]])
        rest = rest[size:]
    blocks, handed = Blocks(needed, draws), []
    for place in range(30):
        assert blocks.open() == place
    assert blocks.ready() == []
    for place in rng.sample(range(30), 30):
        blocks.judged(place, joins[place], groups[place] if taught[place] else None)
        handed += blocks.ready()
    assert blocks.last(30) == joins
    assert blocks.last(0) == []
    assert all(any(_same(block, one) for one in whole) for block in handed)
    assert len(handed) == len({id(block[0]) for block in handed})
    ends = {(place // draws + 1) * draws for place in places}
    assert len(handed) == sum(end <= 30 and sum(joins[:end]) <= needed for end in ends)  # in the end all but the last


def _same(one: list[Any], other: list[Any]) -> bool:
    return [id(group) for group in one] == [id(group) for group in other]
