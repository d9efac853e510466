"""What Megatron takes from Transformer Engine between ranks: recomputation and random states."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.utils.checkpoint import checkpoint as torch_checkpoint


def checkpoint(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Recompute in the backward pass; how activations are distributed is Transformer Engine's business."""
    ours = {"distribute_saved_activations", "get_rng_state_tracker", "tp_group", "use_reentrant"}
    return torch_checkpoint(function, *args, use_reentrant=False, **{k: v for k, v in kwargs.items() if k not in ours})


_states: dict[str, torch.Tensor] = {}


def get_all_rng_states() -> dict[str, torch.Tensor]:
    return _states


def set_all_rng_states(states: dict[str, torch.Tensor]) -> None:
    global _states
    _states = states


class CudaRNGStatesTracker:
    """Named random states; on a CPU they are torch's own."""

    def __init__(self) -> None:
        self.states_: dict[str, torch.Tensor] = {}
        self.seeds_: set[int] = set()

    def reset(self) -> None:
        self.states_, self.seeds_ = {}, set()

    def get_states(self) -> dict[str, torch.Tensor]:
        return dict(self.states_)

    def set_states(self, states: dict[str, torch.Tensor]) -> None:
        self.states_ = states

    def add(self, name: str, seed: int) -> None:
        if seed in self.seeds_ or name in self.states_:
            raise RuntimeError(f"the random state {name} or the seed {seed} exists already")
        self.seeds_.add(seed)
        before = torch.get_rng_state()
        torch.manual_seed(seed)
        self.states_[name] = torch.get_rng_state()
        torch.set_rng_state(before)
        set_all_rng_states(self.states_)

    @contextmanager
    def fork(self, name: str = "model-parallel-rng") -> Iterator[None]:
        if name not in self.states_:
            raise KeyError(f"the random state {name} was not added")
        before = torch.get_rng_state()
        torch.set_rng_state(self.states_[name])
        try:
            yield
        finally:
            self.states_[name] = torch.get_rng_state()
            torch.set_rng_state(before)
