"""Micro-batches: every row once, within the limits, with little padding; and rows dealt out to data ranks."""

import itertools
import json
import random
from pathlib import Path

import pytest
import torch

from nemo_prorl import settings
from nemo_prorl.batch import Batch
from nemo_prorl.micro_batches import MOST_PADDING, Limits, _cheapest_at, deal, split_rows
from nemo_prorl.sizing.widths import most_shapes, width_multiple

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


@pytest.mark.parametrize(("stage", "median"), [("run1", 4700), ("run8", 7600)])
def test_twenty_steps_of_the_shipped_cluster_have_few_shapes(stage: str, median: int) -> None:
    """Contexts of 8,192 and 16,384, two data ranks.  Transformer Engine builds graphs for each shape."""
    cfg = settings.load(["cluster=h100_4x8", f"stage={stage}", "pretrained_checkpoint.restore_from_path=null"])
    context, generator = cfg.trainer.grpo.context_tokens, random.Random(1)
    limits = Limits(cfg.model.micro_batch_size, cfg.model.micro_batch_tokens, width_multiple(cfg.model))
    found: set[tuple[bool, int, int]] = set()
    needed = positions = 0
    for _ in range(20):
        step = [min(context, 200 + int(median * generator.lognormvariate(0, 0.6))) for _ in range(4 * 64)]
        dealt = [
            [[update[row] for row in rows] for rows in deal(update, 2)] for update in (step[k::4] for k in range(4))
        ]
        whole = [list(itertools.chain(*(update[rank] for update in dealt))) for rank in range(2)]
        for with_gradients, shares in [(False, whole), *((True, update) for update in dealt)]:
            most = max(len(split_rows(lengths, limits)) for lengths in shares)
            for part in split_rows(shares[0], limits, most):
                width = limits.padded(shares[0][part[-1]])
                found.add((with_gradients, len(part), width))
                needed, positions = needed + sum(shares[0][row] for row in part), positions + len(part) * width
    assert len(found) < 150
    assert len(found) <= most_shapes(cfg.model, context)
    assert 1 - needed / positions < 0.07


def test_widths_of_transformer_engine_are_rounded_and_others_are_not() -> None:
    """For its attention alone, to a 32nd of the context: not on Megatron's own layers, nor packed."""
    model = {"tensor_model_parallel_size": 2, "transformer_engine": True, "encoder_seq_length": 8192}
    assert width_multiple(model) == 256
    assert width_multiple(model | {"fp8": "hybrid", "sequence_parallel": True}) == 256
    assert width_multiple(model | {"sequence_parallel": True, "tensor_model_parallel_size": 3}) == 258
    assert width_multiple(model | {"encoder_seq_length": 16384}) == 512
    assert width_multiple(model | {"encoder_seq_length": 60}) == 2
    assert width_multiple(model | {"encoder_seq_length": 60, "fp8": "hybrid"}) == 16
    assert (
        width_multiple(model | {"packed_sequences": True}) == width_multiple(model | {"transformer_engine": False}) == 1
    )
    assert width_multiple(model | {"packed_sequences": True, "sequence_parallel": True, "fp8": "e4m3"}) == 32
    batch = {"micro_batch_size": 3, "micro_batch_tokens": 768}
    assert most_shapes(model | batch, 1000) == 2 * (3 + 1 + 1 + 1)  # widths 256, 512, 768, 1024
    assert most_shapes(model | batch | {"micro_batch_tokens": None}, 1000) == 2 * 4 * 3
