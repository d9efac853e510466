"""Floating-point operations of a step's updates, and what share of its GPUs' peak they are (MFU).  No torch."""

from dataclasses import dataclass

from nemo_prorl.sizing.memory import ModelShape, linear_weights

# Dense bf16 operations per second by NVIDIA's datasheets, for whole names of cards: an H100 NVL or PCIe has fewer.
PEAKS = {"NVIDIA H100 80GB HBM3": 989e12, "NVIDIA H200": 989e12}


def update_flops(shape: ModelShape, tokens: float, squares: float) -> float:
    """Return the operations of forward and backward pass over sequences: model FLOPs, as in "MFU".

    A matrix product takes 2 operations per weight and token (the output layer counts, the embedding does not), causal
    attention its two products over half of all pairs of a sequence.  The backward pass takes twice the forward pass.
    Recomputation, padding and the optimizer do not count.  A prompt counts with each of its responses.

    Args:
        tokens: sum of the lengths of the sequences, prompt and response together.
        squares: sum of the squares of these lengths.
    """
    weights = shape.layers * linear_weights(shape) + shape.hidden * shape.vocab
    return 3.0 * (2.0 * tokens * weights + 2.0 * squares * shape.layers * shape.queries)


@dataclass(frozen=True)
class UpdateSpeed:
    """The speed of a step's updates per device of the trainer.

    `card`: the name of the GPU of rank 0; None on a CPU.
    """

    shape: ModelShape
    devices: int
    card: str | None = None

    def metrics(self, tokens: float, squares: float, seconds: float) -> dict[str, float]:
        """Return the numbers of `time/updates/*` of metrics.jsonl; `mfu` only for the cards in PEAKS.

        Arguments as in `update_flops`, over all ranks; `seconds` is the time of the updates.
        """
        flops = update_flops(self.shape, tokens, squares) / self.devices / max(seconds, 1e-9)
        numbers = {"tokens": tokens, "tflops_per_device": flops / 1e12}
        return numbers | ({"mfu": flops / PEAKS[self.card]} if self.card in PEAKS else {})
