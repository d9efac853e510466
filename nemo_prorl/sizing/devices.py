"""The number of GPUs that a run uses, and their size."""

import functools
import subprocess
import sys

from omegaconf import DictConfig


def node_devices(cfg: DictConfig) -> int:
    """Return how many GPUs the run uses per node, including the separate GPUs of engines (rollout.own_devices).

    For a run on the CPU, count processes instead: trainer ranks, and engine ranks with separate cores.
    """
    if not cfg.rollout.own_devices:
        return int(cfg.trainer.devices)
    return int(cfg.trainer.devices + cfg.rollout.engines // cfg.trainer.num_nodes * cfg.rollout.tensor_parallel_size)


def devices_words(cfg: DictConfig) -> str:
    """Return a text for messages: the keys that determine `node_devices`, with their values."""
    own = node_devices(cfg) - cfg.trainer.devices
    return f"trainer.devices={cfg.trainer.devices}" + (f" + {own} of rollout.own_devices" if own else "")


_CUDA = """
import ctypes
cuda, count = ctypes.CDLL("libcuda.so.1"), ctypes.c_int(0)
failed = cuda.cuInit(0) or cuda.cuDeviceGetCount(ctypes.byref(count))
for index in range(0 if failed else count.value):
    device, size = ctypes.c_int(0), ctypes.c_size_t(0)
    if not cuda.cuDeviceGet(ctypes.byref(device), index) and not cuda.cuDeviceTotalMem_v2(ctypes.byref(size), device):
        print(size.value)
"""


@functools.cache
def smallest_gpu_bytes() -> int | None:
    """Return the memory of the smallest visible GPU of this machine according to CUDA; None if it reports no GPU.

    nvidia-smi reports more: memory that the driver keeps for itself.  CUDA is asked in another process, because one
    that has initialised CUDA cannot fork ranks; without a context, because awake engines leave no room for it.
    """
    command = [sys.executable, "-c", _CUDA]
    try:
        words = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False).stdout.split()
    except (OSError, subprocess.TimeoutExpired):
        return None
    return min(map(int, words), default=None)
