"""Settings, rows of results, clocks and memory peaks for the sections of `gpu_evidence.py`."""

import functools
import importlib.util
import json
import statistics
import time
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map_only

from gpu import Skipped

PEAK_BF16_FLOPS = {"H100": 989e12, "H200": 989e12}  # dense, by NVIDIA's datasheets
Emit = Callable[..., None]


@dataclass(frozen=True)
class Settings:
    """The choices of the user, the same for all sections."""

    device: str  # cuda | cpu
    small: bool  # laptop sizes, which test a section but measure nothing
    engine_python: str | None = None  # a Python that has vLLM; None: this one

    @property
    def cuda(self) -> bool:
        return self.device == "cuda"

    @property
    def dtype(self) -> torch.dtype:
        return torch.float32 if self.small else torch.bfloat16

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


def require(*modules: str) -> None:
    """Raise Skipped, which names the first module that is not installed, if any."""
    for name in modules:
        try:
            found = importlib.util.find_spec(name) is not None
        except ModuleNotFoundError:  # the parent package is missing
            found = False
        if not found:
            raise Skipped(f"{name} is not installed here")


def emitter(file: Path) -> Emit:
    """Return a function that appends a row of results to `file` at once, so that finished rows survive a crash."""

    def emit(what: str, **values: Any) -> None:
        with file.open("a") as out:
            out.write(json.dumps({"what": what, **values}) + "\n")

    return emit


def synchronize(device: str) -> None:
    if device == "cuda":
        torch.cuda.synchronize()


def seconds_of(work: Callable[[], Any], device: str, repeats: int, warm: int = 1) -> tuple[float, float, float]:
    """Return (median, least, most) wall seconds of a call of `work`, until the device has finished.

    Args:
        repeats: number of timed calls.
        warm: number of calls before them that are not timed.
    """
    for _ in range(warm):
        work()
    found = []
    for _ in range(repeats):
        synchronize(device)
        began = time.perf_counter()
        work()
        synchronize(device)
        found.append(time.perf_counter() - began)
    return statistics.median(found), min(found), max(found)


@contextmanager
def peak_bytes(device: str) -> Iterator[list[int]]:
    """Yield a list that gets one number when the `with` block ends: the peak of bytes allocated in it."""
    found: list[int] = []
    if device == "cuda":
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        yield found
        torch.cuda.synchronize()
        found.append(torch.cuda.max_memory_allocated() - before)
    else:
        with _LiveTensors() as live:
            yield found
        found.append(live.peak)


class _LiveTensors(TorchDispatchMode):
    """Counts the bytes of live tensor storages that operations have created on a CPU; `peak` is the largest count."""

    def __init__(self) -> None:
        super().__init__()
        self.live = self.peak = 0
        self._known: set[int] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given: set[int] = set()  # views of existing memory are not new
        tree_map_only(torch.Tensor, lambda t: given.add(t.untyped_storage()._cdata), (args, kwargs))
        result = func(*args, **(kwargs or {}))
        tree_map_only(torch.Tensor, lambda t: self._seen(t, given), result)
        return result

    def _seen(self, tensor: torch.Tensor, given: set[int]) -> torch.Tensor:
        storage = tensor.untyped_storage()
        key, size = storage._cdata, storage.nbytes()
        if key not in self._known and key not in given:
            self._known.add(key)
            self.live += size
            self.peak = max(self.peak, self.live)
            weakref.finalize(storage, self._gone, key, size)
        return tensor

    def _gone(self, key: int, size: int) -> None:
        self._known.discard(key)
        self.live -= size


@functools.cache
def peak_flops() -> tuple[float, str] | None:
    """Return (FLOP/s, description): of this GPU by its datasheet, of a CPU by a matrix product of 2048 x 2048 here.

    None for a GPU that PEAK_BF16_FLOPS lacks.
    """
    if not torch.cuda.is_available():
        a = torch.randn(2048, 2048)
        flops = 2 * 2048**3 / seconds_of(lambda: torch.mm(a, a), "cpu", 5, warm=2)[0]
        return flops, f"CPU, float32, {flops / 1e12:.2g} TFLOP/s in a matrix product here"
    name = torch.cuda.get_device_name()
    for chip, flops in PEAK_BF16_FLOPS.items():
        if chip in name:
            return flops, f"{chip}, bf16 dense, {flops / 1e12:g} TFLOP/s by its datasheet"
    return None
