"""Copies of a GPU's tensors in host memory that a GPU reads and writes at full speed."""

from torch import Tensor, empty


def to_host(tensor: Tensor) -> Tensor:
    """Return a copy in host memory, page-locked if the tensor is on a GPU; complete after a synchronisation only."""
    tensor = tensor.detach()
    if not tensor.is_cuda:
        return tensor.clone()
    return empty(tensor.shape, dtype=tensor.dtype, pin_memory=True).copy_(tensor, non_blocking=True)
