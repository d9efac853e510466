"""Does what differs between a GPU and a CPU in the trainer: copies, random states, and memory that PyTorch keeps.

No other module of the trainer asks for `torch.cuda` or `is_cuda`, except kernels (algorithms/logprobs.py) and the shims
that replace CUDA (policy/cpu).  So tests can replace a GPU here.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor


def has_gpu() -> bool:
    return torch.cuda.is_available()


def card() -> str | None:
    """Return the name of this rank's GPU, such as "NVIDIA H200"; None without one."""
    return torch.cuda.get_device_name() if has_gpu() else None


def on_gpu(tensor: Tensor) -> bool:
    return tensor.is_cuda


# --- copies --------------------------------------------------------------------------------------------------------


def host_memory(size: Sequence[int], dtype: torch.dtype, pinned: bool = False) -> Tensor:
    """Return new host memory; `pinned`: page-locked, for copies from a GPU that do not wait."""
    return torch.empty(size, dtype=dtype, pin_memory=pinned)


def to_host(tensor: Tensor, into: Tensor | None = None) -> Tensor:
    """Return a copy in host memory; one from a GPU is page-locked, and complete after `synchronize`.

    Args:
        into: an earlier copy of a tensor of the same size, which is overwritten; None: new memory.
    """
    tensor, pinned = tensor.detach(), on_gpu(tensor)
    if into is None:
        into = host_memory(tensor.shape, tensor.dtype, pinned)
    return into.copy_(tensor, non_blocking=pinned)


@contextmanager
def exchanged(parameters: Mapping[str, Tensor], values: Mapping[str, Tensor]) -> Iterator[None]:
    """Context manager in which parameters have other values, from host memory.

    On a GPU the values are copied into the parameters, because kernels depend on the alignment of their memory; the own
    values stay beside them.  On a CPU the parameters use the memory of `values`: nothing may write to them.
    """
    own = {name: p.data for name, p in parameters.items()}
    copies = any(map(on_gpu, own.values()))
    kept = {name: tensor.clone() for name, tensor in own.items()} if copies else {}
    try:
        for name, p in parameters.items():
            if copies:
                own[name].copy_(values[name], non_blocking=True)  # later kernels of the stream wait for it
            else:
                p.data = values[name]
        yield
    finally:
        for name, p in parameters.items():
            if copies:
                own[name].copy_(kept[name])
            else:
                p.data = own[name]


def synchronize() -> None:
    """Wait until this process's copies and kernels on the GPU are complete."""
    if has_gpu():
        torch.cuda.current_stream().synchronize()


# --- random states -------------------------------------------------------------------------------------------------


def random_states() -> list[Tensor]:
    """Return the state of the GPU's generator that this rank uses; [] on a CPU."""
    return [torch.cuda.get_rng_state()] if has_gpu() else []


def set_random_states(states: Sequence[Tensor], rank: int) -> None:
    """Set the generator of this rank's GPU from a rank's `random_states`, whatever GPUs that rank saw.

    Args:
        states: one state; older checkpoints have one for each GPU of the rank's node.
        rank: the rank that saved the states.
    """
    if states and has_gpu():
        torch.cuda.set_rng_state(states[rank % len(states)])


# --- memory --------------------------------------------------------------------------------------------------------


def empty_cache() -> None:
    """Return the memory of freed tensors to the GPU, for engines on the same GPU."""
    if has_gpu():
        torch.cuda.empty_cache()


def reset_peak() -> None:
    if torch.cuda.is_initialized():
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()


def memory() -> dict[str, int]:
    """Return the peak of this process, and the GPU's free and total memory, in bytes; {} without a GPU in use."""
    if not torch.cuda.is_initialized():
        return {}
    torch.cuda.synchronize()
    free, total = torch.cuda.mem_get_info()
    return {"gpu_peak": torch.cuda.max_memory_allocated(), "gpu_free": free, "gpu_total": total}
