"""The older place of Float8Tensor."""

from transformer_engine.pytorch.tensor.float8_tensor import Float8Tensor as Float8Tensor
