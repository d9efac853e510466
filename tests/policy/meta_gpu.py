"""A GPU of any size on a CPU, and its live bytes: its tensors are on the meta device, with sizes and no content.

`enable` is for a process of its own, after `nemo_prorl.policy.cpu.shims.enable`, and changes torch for good.
"""

import functools
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import FakeWork
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._pytree import tree_leaves, tree_map

from nemo_prorl import device
from nemo_prorl.policy.cpu import shims
from tests.policy.fake_gpu import LiveBytes

META = torch.device("meta")
LARGE = 1 << 18  # elements; larger tensors in host memory get no content either, so that they take no memory


class MetaGpu(LiveBytes):
    """Follows the bytes of the GPU, and lets work go on that needs contents which are not there.

    A number that is read from the GPU is 1.  A mask that selects rows must be in host memory.  Copies between GPU and
    host copy nothing.  A copy from the GPU of a tensor that is not contiguous first makes it so there, as CUDA does.
    """

    def __init__(self) -> None:
        super().__init__()
        self._elsewhere = False

    @contextmanager
    def elsewhere(self) -> Iterator[None]:
        """Inside, new tensors without content are not the GPU's: their maker asked for the meta device itself."""
        before, self._elsewhere = self._elsewhere, True
        try:
            yield
        finally:
            self._elsewhere = before

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        given = [t for t in tree_leaves((args, kwargs)) if isinstance(t, Tensor)]
        out = self._result(func, args, kwargs, given)
        old = {t.untyped_storage()._cdata for t in given if t.is_meta}
        for tensor in (t for t in tree_leaves(out) if isinstance(t, Tensor) and t.is_meta):
            if not self._elsewhere and tensor.untyped_storage()._cdata not in old:
                self._count(tensor.untyped_storage())
        return out

    def _result(self, func: Any, args: Any, kwargs: dict[str, Any], given: list[Tensor]) -> Any:
        schema, on_gpu = func._schema, any(t.is_meta for t in given)
        if schema.name in ("aten::_to_copy", "aten::copy_"):
            return self._copy(func, args, kwargs)
        writes = any(a.alias_info is not None and a.alias_info.is_write for a in schema.arguments)
        is_view = not writes and any(r.alias_info is not None for r in schema.returns)
        if not on_gpu and (is_view or all(t.numel() < LARGE for t in given)):
            return func(*args, **kwargs)
        if schema.name.startswith("c10d::"):
            work = FakeWork().boxed()
            return work if len(schema.returns) == 1 else (args[0], work)
        if schema.name == "aten::_local_scalar_dense":
            return 1.0 if args[0].dtype.is_floating_point else 1
        if schema.name.startswith("aten::index") and isinstance(args[1], list | tuple):
            args = (args[0], self._places(args[1]), *args[2:])
        named = kwargs.get("device")
        return self._without_content(func, args, kwargs, on_gpu if named is None else torch.device(named) == META)

    def _without_content(self, func: Any, args: Any, kwargs: dict[str, Any], on_gpu: bool) -> Any:
        """Call `func` for the sizes of its results."""
        arguments: dict[int, Tensor] = {}

        def sized(x: Any) -> Any:
            if isinstance(x, Tensor) and not x.is_meta:
                copy = torch.empty_strided(x.size(), x.stride(), dtype=x.dtype, device=META)
                arguments[id(copy)] = x
                return copy
            return META if isinstance(x, torch.device) else x

        def placed(x: Any) -> Any:
            if not isinstance(x, Tensor) or id(x) in arguments:
                return arguments.get(id(x), x)
            if x.dtype == torch.bool and x.dim() == 0 and not on_gpu:  # a check of values that are not there: it holds
                return torch.ones((), dtype=torch.bool)
            return x if on_gpu else torch.empty_strided(x.size(), x.stride(), dtype=x.dtype)

        args, kwargs = tree_map(sized, (args, kwargs))
        return tree_map(placed, func(*args, **kwargs))

    def _places(self, indices: Sequence[Tensor | None]) -> list[Tensor | None]:
        """Return the indices on the GPU, masks as numbers of rows and columns."""
        found: list[Tensor | None] = []
        for index in indices:
            if index is not None and index.dtype == torch.bool:
                found += [place.to(META) for place in index.nonzero().unbind(1)]
            else:
                found.append(None if index is None else index.to(META))
        return found

    def _copy(self, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        new = func._schema.name == "aten::_to_copy"
        source, target = (args[0], None) if new else (args[1], args[0])
        to = torch.device(kwargs.get("device") or source.device) if target is None else target.device
        if not source.is_meta and to.type == "cpu" and source.numel() < LARGE:
            return func(*args, **kwargs)
        if source.is_meta and to.type == "cpu" and not source.is_contiguous():
            self.peak = max(self.peak, self.now + source.nbytes)
        if target is not None:
            return target
        dtype = kwargs.get("dtype") or source.dtype
        like = torch.empty_strided(source.size(), source.stride(), dtype=dtype, device=META)
        out = torch.empty_like(like)  # its strides are a copy's
        if to.type == "meta":
            return out
        made = torch.empty_strided(out.size(), out.stride(), dtype=dtype)
        return made.zero_() if source.numel() < LARGE else made


def enable(gpu: MetaGpu, ranks: int) -> None:
    """Let device "cuda" be the meta device, and let this process be rank 0 of so many ranks, of which no other runs."""
    for name in shims._FACTORIES:
        setattr(torch, name, _on(gpu, getattr(torch, name)))
    tensor: Any = torch.Tensor
    type_of, cuda, autocast = tensor.type, vars(torch.cuda), torch.autocast
    tensor.to = _on(gpu, tensor.to)
    tensor.cuda = lambda self, *_, **__: self.to(META)
    cuda["current_device"] = lambda: META

    def type_(self: Tensor, *to: Any, **options: Any) -> Any:
        found = type_of(self, *to, **options)
        return found.replace(".meta.", ".") if isinstance(found, str) else found

    tensor.type = type_
    vars(torch)["autocast"] = lambda kind, **more: autocast("cpu" if kind == "meta" else kind, **more)
    vars(device)["host_memory"] = lambda size, dtype, pinned=False: torch.empty(size, dtype=dtype)
    vars(device)["on_gpu"] = lambda t: t.is_meta
    start, group = dist.init_process_group, dist.new_group
    vars(dist)["init_process_group"] = lambda *_, **__: start("fake", store=FakeStore(), rank=0, world_size=ranks)
    vars(dist)["new_group"] = lambda *args, **more: group(*args, **{**more, "backend": "fake"})


def _on(gpu: MetaGpu, make: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(make)
    def made(*args: Any, **kwargs: Any) -> Any:
        where = kwargs.get("device")
        if where == "meta":
            with gpu.elsewhere():
                return make(*args, **kwargs)
        if where is not None and torch.device(where).type == "cuda":
            kwargs["device"] = META
        return make(*args, **kwargs)

    return made
