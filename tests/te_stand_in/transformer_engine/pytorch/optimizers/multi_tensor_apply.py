"""One call for lists of tensors."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor


class MultiTensorApply:
    """Calls an operation with lists of tensors."""

    def __init__(self, chunk_size: int) -> None:
        self.chunk_size = chunk_size

    def __call__(self, op: Callable[..., Any], noop_flag_buffer: Tensor, tensor_lists: list[Any], *args: Any) -> Any:
        return op(self.chunk_size, noop_flag_buffer, tensor_lists, *args)


multi_tensor_applier = MultiTensorApply(65536)


def multi_tensor_l2norm(
    chunk_size: int, noop_flag: Tensor, tensor_lists: list[list[Tensor]], per_tensor: bool = False
) -> tuple[Tensor, Tensor]:
    norms = torch.stack([tensor.float().norm() for tensor in tensor_lists[0]])
    return norms.norm()[None], norms if per_tensor else torch.zeros(1)


def multi_tensor_scale(chunk_size: int, noop_flag: Tensor, tensor_lists: list[list[Tensor]], scale: float) -> None:
    for source, target in zip(*tensor_lists, strict=True):
        target.copy_(source * scale)
