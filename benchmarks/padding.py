"""Share of padding in the positions of a forward pass, by model.micro_batch_size and by model.micro_batch_tokens.

    .venv/train/bin/python benchmarks/padding.py                    recorded lengths, and a synthetic long tail
    .venv/train/bin/python benchmarks/padding.py --run RUN          the lengths of a run's stored rollouts
    .venv/train/bin/python benchmarks/padding.py --time             also times the updates of the laptop's model
    .venv/train/bin/python benchmarks/padding.py --shapes           counts shapes of micro-batches over 20 steps

The long tail: 1,024 sequences of one update of cluster=h100_4x8 (32 data ranks), 200 tokens of prompt and a log-normal
response, median 1,300 tokens, cut at a context of 8,192.  "slowest rank": largest number of positions of a data rank,
divided by the mean of all.  Without micro_batch_tokens the ranks get sequences in turn, as in an earlier version; with
it, all ranks get about the same number of tokens.

--shapes simulates 20 steps with contexts of 8,192 and 16,384: 256 prompts x 16 responses of log-normal length, dealt to
32 data ranks, log-probabilities and 4 updates.  A shape is a new (rows, width) of a pass without or with
gradients; Transformer Engine's attention builds one graph for the first kind and two for the second.
"""

import argparse
import json
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from itertools import chain
from pathlib import Path
from typing import Any

from machine import describe, libraries_on_stderr, seconds

from nemo_prorl.files import read_objects, step_files

RECORDED = Path(__file__).parent / "results" / "lengths-laptop.json"


def long_tail(rows: int, seed: int) -> list[int]:
    generator = random.Random(seed)
    return [min(8192, 200 + int(generator.lognormvariate(7.17, 0.9))) for _ in range(rows)]


def lengths_of_run(run: Path, rows: int) -> list[int]:
    """Return the lengths in tokens, prompt included, of a run's last `rows` stored responses, in stored order."""
    from nemo_prorl.data.render import PromptRenderer
    from nemo_prorl.settings import read_config

    grpo = read_config(run / "config.yaml").trainer.grpo
    base = next(folder for folder in (run / "base", run / "init") if folder.is_dir())
    renderer = PromptRenderer(base, grpo.context_tokens)
    lines = [line for file in step_files(run / "rollouts").values() for line in read_objects(file)][-rows:]
    return [renderer.length(x) + len(renderer.encode(x["response"])) + int(x["finished"]) for x in lines]


def padded_positions(lengths: Sequence[int], parts: Sequence[Sequence[int]], limits: Any) -> int:
    """Return the positions of all micro-batches: rows times padded length, or, if packed, the padded sum of lengths.

    Args:
        lengths: length of each row in tokens.
        parts: row numbers of each micro-batch.
        limits: `nemo_prorl.micro_batches.Limits`, by which lengths are padded.
    """
    if limits.packed:
        return sum(limits.padded(sum(lengths[row] for row in part)) for part in parts)
    return sum(len(part) * limits.padded(max(lengths[row] for row in part)) for part in parts)


def table(lengths: list[int], ranks: int, schemes: dict[str, Any]) -> Iterator[str]:
    """Yield a line for each scheme: share of padding, micro-batches per rank, and the slowest rank's positions."""
    from nemo_prorl.micro_batches import deal, split_rows

    yield f"{'':44s} {'padding':>8s} {'micro-batches':>14s} {'positions':>10s} {'slowest rank':>13s} {'made in':>13s}"
    in_turn = [list(range(rank, len(lengths), ranks)) for rank in range(ranks)]
    for name, limits in schemes.items():
        shares = in_turn if limits.tokens is None else deal(lengths, ranks)
        positions, counts, began = [], [], time.monotonic()
        for rows in shares:
            mine = [lengths[row] for row in rows]
            parts = split_rows(mine, limits)
            counts.append(len(parts))
            positions.append(padded_positions(mine, parts, limits))
        seconds = (time.monotonic() - began) / ranks
        yield (
            f"{name:44s} {100 * (1 - sum(lengths) / sum(positions)):6.2f} % {statistics.mean(counts):14.1f}"
            f" {sum(positions):10,d} {max(positions) / statistics.mean(positions):13.2f} {1e3 * seconds:10.2f} ms"
        )


STEPS, RANKS, UPDATES, RESPONSES = 20, 32, 4, 4096
LENGTHS = [(8192, 4700, 0.6), (8192, 1300, 0.9), (16384, 7600, 0.6), (16384, 2000, 0.9)]  # context, median, sigma


def split_of_all(shares: Sequence[Sequence[int]], limits: Any) -> list[list[list[int]]]:
    """Return the row numbers of each micro-batch of each rank; all ranks get the same number (`Actor._parts`)."""
    from nemo_prorl.micro_batches import split_rows

    found = [split_rows(lengths, limits) for lengths in shares]
    most = max(map(len, found))
    return [
        parts if len(parts) == most else split_rows(x, limits, most) for x, parts in zip(shares, found, strict=True)
    ]


def counted_shapes(context: int, median: int, sigma: float, limits: Any) -> Iterator[str]:
    """Yield one line for `STEPS` simulated steps: the shapes of the rank with most, and the padding of all ranks."""
    from nemo_prorl.micro_batches import deal

    generator, needed, positions = random.Random(1), 0, 0
    shapes: list[set[tuple[bool, int, int]]] = [set() for _ in range(RANKS)]
    before, counts = 0, [0, 0]  # micro-batches of log-probabilities and of updates, of one rank
    for _ in range(STEPS):
        before = max(map(len, shapes))
        rows = [min(context, 200 + int(median * generator.lognormvariate(0, sigma))) for _ in range(RESPONSES)]
        updates = [rows[k::UPDATES] for k in range(UPDATES)]
        dealt = [[[part[row] for row in rank] for rank in deal(part, RANKS)] for part in updates]
        passes = [(False, [list(chain(*(shares[rank] for shares in dealt))) for rank in range(RANKS)])]
        passes += [(True, shares) for shares in dealt]
        for with_gradients, shares in passes:
            split = split_of_all(shares, limits)
            counts[with_gradients] += len(split[0])
            for seen, lengths, parts in zip(shapes, shares, split, strict=True):
                for part in parts:
                    width = limits.padded(max((lengths[row] for row in part), default=1))
                    seen.add((with_gradients, max(1, len(part)), width))
                    needed, positions = needed + sum(lengths[row] for row in part), positions + len(part) * width
    most = max(shapes, key=len)
    kinds = [sum(kind is with_gradients for kind, _, _ in most) for with_gradients in (False, True)]
    yield (
        f"{context:7,d} {median:7,d} {sigma:5.1f} {limits.multiple_of:9d} {counts[0] / STEPS:10.1f} +"
        f"{counts[1] / STEPS:6.1f} {kinds[0]:11d} +{kinds[1]:5d} ={sum(kinds):5d} {len(most) - before:7d}"
        f" {100 * (1 - needed / positions):8.2f} %"
    )


def shapes_of_stages() -> Iterator[str]:
    """Yield a table: what the multiple of the width changes in micro-batches, shapes and padding."""
    from nemo_prorl.micro_batches import Limits

    yield f"{'responses':>21s} {'':9s} {'micro-batches':>18s} {'shapes':>22s} {'new in':>8s}"
    yield (
        f"{'context':>7s} {'median':>7s} {'sigma':>5s} {'multiple':>9s} {'without + with gr.':>18s}"
        f" {'without + with = all':>22s} {'step 20':>8s} {'padding':>10s}"
    )
    for context, median, sigma in LENGTHS:
        for multiple in (1, 64, 128, 256, 512, 1024):
            yield from counted_shapes(context, median, sigma, Limits(64, 16384, multiple))


def timed(lengths: list[int], schemes: dict[str, Any], rounds: int) -> Iterator[str]:
    """Yield a line for each scheme: median seconds of an update and of log-probabilities of the laptop's actor."""
    import torch

    from nemo_prorl.batch import Batch
    from nemo_prorl.data.laptop.model import build_base_model
    from nemo_prorl.policy.build import build_actor
    from nemo_prorl.settings import load

    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder, libraries_on_stderr():
        cfg = load([])
        build_base_model(Path(folder) / "hf", cfg.model, 0, ["one two three"])
        actor = build_actor(cfg, Path(folder) / "hf").actor
    batch = Batch.from_sequences(
        [[3]] * len(lengths), [[4] * (n - 1) for n in lengths], [[-1.0] * (n - 1) for n in lengths]
    )

    def loss(logp_BT: Any, _: Any, micro: Any, denominator: float) -> tuple[Any, dict[str, Any]]:
        return -(logp_BT * micro.mask_BT).sum() / denominator, {}

    found: dict[str, list[tuple[float, float]]] = {name: [] for name in schemes}
    for _ in range(rounds + 1):
        for name, limits in schemes.items():
            actor.limits = limits
            updates = seconds(lambda: actor.gradients(batch, loss, float(batch.mask_BT.sum()), 1.2))
            found[name].append((updates, seconds(lambda: actor.logprobs(batch))))
    yield f"{'':44s} {'forward and backward':>21s} {'log-probabilities':>18s}"
    for name, times in found.items():
        both = [statistics.median(column) for column in zip(*times[1:], strict=True)]
        yield f"{name:44s} {both[0]:19.3f} s {both[1]:16.3f} s"


def main() -> None:
    from nemo_prorl.micro_batches import Limits

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--run", type=Path, help="run directory with stored rollouts; default: recorded lengths")
    parser.add_argument("--write", type=Path, help="write the token lengths of the run's sequences to this file")
    parser.add_argument(
        "--rows", type=int, metavar="N", default=192, help="last N stored responses of the run; default: 192"
    )
    parser.add_argument("--time", action="store_true")
    parser.add_argument("--shapes", action="store_true", help="count shapes of micro-batches only")
    parser.add_argument("--rounds", type=int, default=7)
    args = parser.parse_args()
    if args.shapes:
        say([describe(), "", f"{STEPS} steps of {RESPONSES:,} responses on {RANKS} data ranks, {UPDATES} updates each"])
        say(shapes_of_stages())
        return
    lengths = lengths_of_run(args.run, args.rows) if args.run else json.loads(RECORDED.read_text())
    if args.write:
        args.write.write_text(json.dumps(lengths) + "\n")
    laptop = {"micro_batch_size=128 (before)": Limits(128)}
    laptop |= {f"micro_batch_size=128 micro_batch_tokens={n}": Limits(128, n) for n in (1024, 2048, 4096, 8192)}
    laptop |= {f"the same, packed_sequences=true, {n}": Limits(128, n, packed=True) for n in (2048, 8192)}
    say([describe(), "", f"{len(lengths)} recorded sequences, mean {statistics.mean(lengths):.0f} tokens, one rank"])
    say(table(lengths, 1, laptop))
    if args.time:
        say(["", f"the laptop's actor on one thread, medians of {args.rounds} rounds"])
        say(timed(lengths, laptop, args.rounds))
    tail = long_tail(1024, 1)
    cluster = {f"micro_batch_size={n}{' (before)' if n == 1 else ''}": Limits(n) for n in (1, 2, 4, 8)}
    cluster |= {f"micro_batch_size=64 micro_batch_tokens={n}": Limits(64, n) for n in (8192, 16384, 32768)}
    cluster["micro_batch_size=64, 16384, packed_sequences=true"] = Limits(64, 16384, packed=True)
    cluster["micro_batch_size=64 micro_batch_tokens=8192 FP8"] = Limits(64, 8192, 16)
    say(["", f"{len(tail)} sequences with a long tail, mean {statistics.mean(tail):.0f} tokens, 32 data ranks"])
    say(table(tail, 32, cluster))


def say(lines: Any) -> None:
    for line in lines:
        sys.stdout.write(line + "\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main()
