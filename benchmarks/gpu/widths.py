"""The price of a new shape of micro-batches: 45 widths, each twice, as they are and rounded (sizing/widths.py).

Transformer Engine's attention builds a graph for each new (rows, width), forward and backward, while the GPU waits.  A
pass here is the log-probabilities of one response and an update on it.  The price of a shape: its first pass takes this
much longer than its second.
"""

import statistics
import tempfile
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from gpu import real
from gpu.common import Emit, Settings, require, synchronize
from nemo_prorl.sizing.widths import width_multiple

COUNT, LEAST = 45, 19  # number of widths; no width is smaller than LEAST


def run(emit: Emit, settings: Settings) -> None:
    require("megatron.core", "nemo", "nemo_aligner")
    emit("layers", note=real.layers())
    with tempfile.TemporaryDirectory(prefix="gpu-evidence-") as name:
        actor, cfg = real.build(settings, real.write_model(Path(name) / "model", settings))
        seconds = partial(seconds_of_pass, actor, real.updater(actor, cfg), settings)
        seconds(LEAST - 1)  # loads kernels and libraries
        for rounded in (False, True):
            # Rounded as for Transformer Engine, whether it is installed or not.
            multiple = width_multiple({**cfg.model, "transformer_engine": rounded, "packed_sequences": False})
            actor.limits = replace(actor.limits, multiple_of=multiple)
            prices: dict[int, float] = {}
            for width in widths(real.CONTEXT[settings.small]):
                first_s, second_s = seconds(width), seconds(width)
                padded = actor.limits.padded(width)
                prices.setdefault(padded, first_s - second_s)
                what = f"multiples of {multiple}: width {width}"
                emit(what, padded_to=padded, first_s=first_s, second_s=second_s)
            price_s, all_s = statistics.median(prices.values()), sum(prices.values())
            emit(f"multiples of {multiple}", shapes=len(prices), price_of_a_shape_s=price_s, all_shapes_s=all_s)


def widths(context: int) -> list[int]:
    """Return COUNT different widths, evenly spread from the context down."""
    return [context - number * ((context - LEAST) // COUNT) for number in range(COUNT)]


def seconds_of_pass(actor: Any, update: Callable[[Any], Any], settings: Settings, width: int) -> float:
    batch = real.batch(settings, 1, width)
    synchronize(settings.device)
    began = time.perf_counter()
    old_BT, _ = actor.logprobs(batch)
    update(real.with_logprobs(batch, old_BT, old_BT))
    synchronize(settings.device)
    return time.perf_counter() - began
