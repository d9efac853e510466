"""The number of GPUs that a run uses, and their size."""

import functools
import shutil
import subprocess

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


@functools.cache
def smallest_gpu_bytes() -> int | None:
    """Return the memory of this machine's smallest GPU according to nvidia-smi; None if it reports no GPU."""
    if shutil.which("nvidia-smi") is None:
        return None
    command = ["nvidia-smi", "--query-gpu=memory.total", "--format=csv,noheader,nounits"]
    try:
        words = subprocess.run(command, capture_output=True, text=True, timeout=30, check=False).stdout.split()
    except (OSError, subprocess.TimeoutExpired):
        return None
    sizes = [int(word) for word in words if word.isdigit()]
    return min(sizes) << 20 if sizes else None
