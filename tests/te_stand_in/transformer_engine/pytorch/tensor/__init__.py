"""Tensors that are kept in FP8: parameters are not, here."""

import torch


class QuantizedTensor(torch.Tensor):
    """The class by which Megatron recognises FP8 parameters."""
