"""A GPU that is not there: CPU tensors count as its, unless they come from `device.host_memory`; and its live bytes."""

import weakref
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from nemo_prorl import device


class LiveBytes(TorchDispatchMode):
    """Adds up the bytes of storages that a mode below gives to `_count`: `now`, and `peak`, the most at a time."""

    def __init__(self) -> None:
        super().__init__()
        self.now = self.peak = 0
        self._new: dict[int, Any] = {}

    def _count(self, storage: torch.UntypedStorage) -> None:
        size, key = storage.nbytes(), storage._cdata
        if key in self._new:
            return

        def freed(_: Any) -> None:
            self._new.pop(key, None)
            self.now -= size

        self._new[key] = weakref.ref(storage, freed)
        self.now += size
        self.peak = max(self.peak, self.now)


class FakeGpu(LiveBytes):
    """Follows which tensors are in host memory: from `host_memory`, a file or calls that name the CPU, or made of such.

    All others are on the GPU.  `peak`: the most bytes at a time of tensors that are new there.  Bytes (uint8) are left
    out: they are objects that ranks exchange, of the same few kB for any size of a model.
    """

    def __init__(self) -> None:
        super().__init__()
        self._host: dict[int, torch.UntypedStorage] = {}  # kept alive, so that a key stays a tensor's own

    def host_memory(self, size: Sequence[int], dtype: torch.dtype, pinned: bool = False) -> Tensor:
        return torch.empty(size, dtype=dtype, device="cpu")

    def on_gpu(self, tensor: Tensor) -> bool:
        return tensor.untyped_storage()._cdata not in self._host

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        given = [t for t in tree_leaves((args, kwargs)) if isinstance(t, Tensor)]
        old = {t.untyped_storage()._cdata for t in given}
        out = func(*args, **kwargs)
        on_host = kwargs.get("device") == torch.device("cpu") or (given and not any(map(self.on_gpu, given)))
        on_host = on_host or func._schema.name == "aten::set_"  # memory that was there: of a file, from `torch.load`
        for tensor in (t for t in tree_leaves(out) if isinstance(t, Tensor)):
            if tensor.is_meta or tensor.dtype == torch.uint8:
                continue
            storage = tensor.untyped_storage()
            if on_host and storage._cdata not in old:
                self._host[storage._cdata] = storage
            elif storage._cdata not in old:
                self._count(storage)
        return out


@contextmanager
def fake_gpu(host: Sequence[Tensor] = ()) -> Iterator[FakeGpu]:
    """Inside, the model is on a GPU as far as `nemo_prorl.device` can tell; `host`: tensors that are in host memory."""
    gpu, real = FakeGpu(), (device.host_memory, device.on_gpu)
    gpu._host |= {t.untyped_storage()._cdata: t.untyped_storage() for t in host}
    device.host_memory, device.on_gpu = gpu.host_memory, gpu.on_gpu
    try:
        with gpu:
            yield gpu
    finally:
        device.host_memory, device.on_gpu = real
