"""Measures the seconds and bytes to distribute a step's tokens from rank 0: pickled lists, or arrays for each rank.

    .venv/train/bin/python benchmarks/batches.py                      1 million tokens
    .venv/train/bin/python benchmarks/batches.py --tokens 33554432    4096 responses of 8192 tokens; needs 8 GB

Two ways are compared, a column of the output each.  "before", the way of an earlier version: every rank receives all
groups as pickled lists of Python numbers, and pads all of them.  "after", the way of this version: rank 0 makes arrays
of the groups once, and each data rank receives and pads only its own rows.  The script checks that both ways give the
same rows.  The time on the network is not measured.
"""

import argparse
import pickle
import sys
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from machine import describe

from nemo_prorl.batch import Batch, JudgedGroups
from nemo_prorl.rewards.interface import RewardResult, verdict_of
from nemo_prorl.rollout.endpoints import Response
from nemo_prorl.rollout.groups import Group

SAMPLES, UPDATES = 16, 4


def groups_of(tokens: int, context: int) -> list[Group]:
    """Return groups of about `tokens` response tokens in all; each response fills at least a quarter of the context."""
    draw = torch.Generator().manual_seed(0)
    groups: list[Group] = []
    while tokens > 0:
        responses = []
        for k in range(SAMPLES):
            length = int(torch.randint(context // 4, context - 64, (1,), generator=draw))
            ids = torch.randint(150_000, (length,), generator=draw).tolist()
            responses.append(Response(k, ids, torch.randn(length, generator=draw).tolist(), "stop", 0))
            tokens -= length
        prompt = torch.randint(150_000, (64,), generator=draw).tolist()
        verdicts = [verdict_of("p", RewardResult(float(k % 2))) for k in range(SAMPLES)]
        groups.append(Group(f"p{len(groups)}", "math", {}, prompt, 0, responses, verdicts, 1, 0, len(groups)))
    return groups


def padded_lists(groups: list[Group]) -> Batch:
    """Return all responses of the groups as one batch of padded rows, made row by row from lists."""
    rows = [(g.prompt_ids, r) for g in groups for r in g.responses]
    lengths = [len(prompt) + len(r.token_ids) for prompt, r in rows]
    shape = (len(rows), max(lengths))
    tokens_BT, mask_BT = torch.zeros(shape, dtype=torch.int64), torch.zeros(shape, dtype=torch.bool)
    logp_BT, zeros_BT = torch.zeros(shape), torch.zeros(shape)
    for b, (prompt, r) in enumerate(rows):
        tokens_BT[b, : lengths[b]] = torch.tensor([*prompt, *r.token_ids])
        mask_BT[b, len(prompt) : lengths[b]] = True
        logp_BT[b, len(prompt) : lengths[b]] = torch.tensor(r.logprobs)
    ones_BT, zeros_B = torch.ones(shape), torch.zeros(len(rows))
    return Batch(
        tokens_BT, mask_BT, torch.tensor(lengths), logp_BT, zeros_BT, zeros_BT, ones_BT, zeros_B, mask_BT.sum(dim=1)
    )


def timed(work: Callable[[], Any]) -> tuple[Any, float]:
    """Return the result of a call and the CPU seconds that this process spent on it."""
    began = time.process_time()
    return work(), time.process_time() - began


def as_lists(groups: list[Group]) -> tuple[Batch, tuple[float, float, float], int]:
    """Send groups as pickled lists; return the padded batch, CPU seconds (pickle, unpickle, pad) and bytes."""
    text, dumps_s = timed(partial(pickle.dumps, groups))
    received, loads_s = timed(partial(pickle.loads, text))
    whole, pad_s = timed(partial(padded_lists, received))
    return whole, (dumps_s, loads_s, pad_s), len(text)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=1_000_000, help="total tokens of all responses; default: 1000000")
    parser.add_argument("--context", type=int, default=8192)
    parser.add_argument("--ranks", type=int, default=32, help="number of data-parallel ranks; default: 32")
    args = parser.parse_args()
    torch.set_num_threads(1)
    groups = groups_of(args.tokens, args.context)

    whole, before, before_bytes = as_lists(groups)
    rows = JudgedGroups.of(groups).rows_of_updates(UPDATES, args.ranks)
    wanted = whole.rows(torch.cat(rows[1 % args.ranks]))
    del whole

    def entries() -> list[bytes]:
        judged = JudgedGroups.of(groups)
        return [pickle.dumps(mine) for mine in judged.for_ranks(UPDATES, args.ranks)]

    texts, deal_s = timed(entries)
    mine, own_loads_s = timed(lambda: pickle.loads(texts[1 % args.ranks]))
    found, own_pad_s = timed(mine.batch)
    same = all(torch.equal(getattr(found, n), getattr(wanted, n)) for n in Batch.__dataclass_fields__)
    largest = max(map(len, texts))
    tokens = sum(len(r.token_ids) for g in groups for r in g.responses)
    lines = [
        ("rank 0 serialises, CPU seconds", f"{before[0]:.3f}", f"{deal_s:.3f}"),
        ("each rank unpickles, CPU seconds", f"{before[1]:.3f}", f"{own_loads_s:.4f}"),
        ("each rank pads, CPU seconds", f"{before[2]:.3f}", f"{own_pad_s:.4f}"),
        ("bytes that each rank receives", f"{before_bytes:,}", f"{largest:,}"),
        ("bytes that rank 0 sends to all", f"{before_bytes * args.ranks:,}", f"{sum(map(len, texts)):,}"),
    ]
    sys.stdout.write(
        f"{describe()}\n\n{tokens:,} tokens in {SAMPLES * len(groups):,} responses, {args.ranks} data ranks\n"
        f"{'':33s}{'before':>16s}{'after':>16s}\n"
        + "".join(f"{name:33s}{old:>16s}{new:>16s}\n" for name, old, new in lines)
        + f"same rows to the bit: {same}\n"
    )
    if not same:
        sys.exit(1)


if __name__ == "__main__":
    main()
