"""Parameters in FP8 with one scale: Megatron looks for them, and finds none."""

from transformer_engine.pytorch.tensor import QuantizedTensor


class Float8Tensor(QuantizedTensor):
    """The class by which Megatron's checkpoints recognise FP8 parameters."""
