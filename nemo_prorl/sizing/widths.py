"""Shapes of micro-batches: the multiple to which rows are padded, and the number of shapes that can occur.

Transformer Engine's attention is a cuDNN graph on Hopper GPUs.  It builds a graph for each new (rows, width) of a
padded micro-batch, forward and backward, on the host, while the GPU waits; it never drops one.  `WIDTHS` different
widths make few shapes and little padding (benchmarks/padding.py --shapes).  Packed micro-batches need none of this:
Transformer Engine rounds their number of tokens itself.
"""

from collections.abc import Mapping
from typing import Any

WIDTHS = 32  # different widths of padded micro-batches for Transformer Engine
_FP8_ROWS = 16  # on every rank, the number of rows in an FP8 matrix product must be a multiple of 16


def width_multiple(model: Mapping[Any, Any]) -> int:
    """Return the divisor of a micro-batch's padded length, from the `model` section of a configuration.

    Sequence parallelism cuts the length over tensor ranks, and FP8 needs a multiple of 16 rows on each.
    """
    needed = int(model["tensor_model_parallel_size"]) if model.get("sequence_parallel") else 1
    needed *= _FP8_ROWS if model.get("fp8") else 1
    if not model.get("transformer_engine") or model.get("packed_sequences"):
        return needed
    return _round_up(-(-int(model["encoder_seq_length"]) // WIDTHS), needed)


def widest(model: Mapping[Any, Any], context: int) -> int:
    """Return the width of a micro-batch with a row that fills the context."""
    return context if model.get("packed_sequences") else _round_up(context, width_multiple(model))


def most_shapes(model: Mapping[Any, Any], context: int) -> int:
    """Return the largest number of shapes (rows, width) that padded micro-batches of a run can have.

    A shape counts once for passes without gradients, and once for passes with gradients.
    """
    rows, tokens, step = int(model["micro_batch_size"]), model.get("micro_batch_tokens"), width_multiple(model)
    widths = range(step, widest(model, context) + 1, step)
    return 2 * sum(rows if tokens is None else max(1, min(rows, int(tokens) // width)) for width in widths)


def _round_up(number: int, multiple: int) -> int:
    return -(-number // multiple) * multiple
