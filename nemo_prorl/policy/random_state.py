"""Random states of a process as tensors and plain values, so that loading them from a file runs no code."""

import random
from typing import Any, TypedDict

import numpy as np
import torch

from nemo_prorl import device


class RandomState(TypedDict):
    """States of the random generators of a process that can affect training."""

    python: list[Any]  # version, words, next Gaussian
    numpy: list[Any]  # algorithm, words, position, whether there is a next Gaussian, next Gaussian
    torch: torch.Tensor
    cuda: list[torch.Tensor]  # state of the rank's GPU; older checkpoints: one per GPU of the rank's node
    megatron: dict[str, torch.Tensor]  # generator's name in Megatron's tracker: state


def random_state() -> RandomState:
    from megatron.core.tensor_parallel import get_cuda_rng_tracker

    version, words, gaussian = random.getstate()
    algorithm, keys, position, has_gaussian, next_gaussian = np.random.get_state(legacy=True)  # a tuple
    return {
        "python": [version, list(words), gaussian],
        "numpy": [algorithm, np.asarray(keys).tolist(), position, has_gaussian, next_gaussian],
        "torch": torch.get_rng_state(),
        "cuda": device.random_states(),
        "megatron": get_cuda_rng_tracker().get_states(),
    }


def set_random_state(state: RandomState, rank: int = 0) -> None:
    """Set all generators of this process; `rank`: the rank that saved the state."""
    from megatron.core.tensor_parallel import get_cuda_rng_tracker

    version, words, gaussian = state["python"]
    random.setstate((version, tuple(words), gaussian))
    algorithm, keys, *rest = state["numpy"]
    np.random.set_state((algorithm, np.array(keys, dtype=np.uint32), *rest))
    torch.set_rng_state(state["torch"])
    device.set_random_states(state["cuda"], rank)
    get_cuda_rng_tracker().set_states(state["megatron"])
