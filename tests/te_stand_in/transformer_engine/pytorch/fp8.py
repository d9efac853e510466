"""The state of FP8: whether it is on, its recipe, and the scales of delayed recipes."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
import torch.distributed as dist
from torch import Tensor

from transformer_engine.common.recipe import DelayedScaling, Format, Recipe

_FORWARD, _BACKWARD = "scaling_fwd", "scaling_bwd"


def dtype_of(recipe: Recipe, forward: bool) -> torch.dtype:
    hybrid = recipe.fp8_format == Format.HYBRID
    return torch.float8_e4m3fn if forward or not hybrid else torch.float8_e5m2


@dataclass
class Rounded:
    """A tensor as FP8 represents it, times its scale.  `with_transpose`: a backward pass can use it, too."""

    value: Tensor  # float32
    with_transpose: bool


def scale_for(amax: Tensor, largest: float, otherwise: Tensor, margin: int = 0) -> Tensor:
    """The scale that makes `amax` the largest value; `otherwise` where that is 0 or not finite."""
    scale = torch.where((amax > 0) & amax.isfinite(), largest / amax / 2**margin, otherwise)
    return torch.where(scale.isinf(), torch.finfo(torch.float32).max, scale)


class Scales:
    """The scales of a layer's tensors in one direction, with the history of a delayed recipe."""

    def __init__(self, recipe: Recipe, forward: bool, tensors: int) -> None:
        if recipe.mxfp8():
            raise RuntimeError("MXFP8 needs a Blackwell GPU; not there in the stand-in")
        self.recipe, self.forward = recipe, forward
        self.scale = torch.ones(tensors)
        rows = recipe.amax_history_len if isinstance(recipe, DelayedScaling) else 0
        self.amax_history = torch.zeros(rows, tensors)

    def rounded(self, tensor: Tensor, index: int, with_transpose: bool = True) -> Rounded:
        dtype = dtype_of(self.recipe, self.forward)
        amax, largest = tensor.detach().abs().max().float(), torch.finfo(dtype).max
        if self.recipe.delayed():
            self.amax_history[0, index] = torch.maximum(self.amax_history[0, index], amax)
            scale = self.scale[index]
        else:
            scale = scale_for(amax, largest, torch.ones(()))
        in_fp8 = (tensor.detach().float() * scale).clamp(-largest, largest).to(dtype)
        return Rounded(in_fp8.float() / scale, with_transpose)

    def renew(self, group: Any) -> None:
        """Makes the next scales from the history, which moves on."""
        recipe = self.recipe
        assert isinstance(recipe, DelayedScaling)
        if recipe.reduce_amax and dist.is_initialized() and dist.get_world_size(group) > 1:
            dist.all_reduce(self.amax_history[0], op=dist.ReduceOp.MAX, group=group)
        history = self.amax_history
        amax = history.max(dim=0).values if recipe.amax_compute_algo == "max" else history[0].clone()
        largest = torch.finfo(dtype_of(recipe, self.forward)).max
        self.scale.copy_(scale_for(amax, largest, self.scale, recipe.margin))
        history.copy_(history.roll(-1, 0))
        history[0] = 0


class FP8GlobalStateManager:
    """What holds for all layers at this moment."""

    FP8_ENABLED = False
    FP8_RECIPE: Recipe | None = None
    FP8_DISTRIBUTED_GROUP: Any = None
    FP8_AUTOCAST_DEPTH = 0
    IS_FIRST_FP8_MODULE = False
    delayed: ClassVar[dict[str, list[tuple[Scales, Any]]]] = {_FORWARD: [], _BACKWARD: []}

    @classmethod
    def is_fp8_enabled(cls) -> bool:
        return cls.FP8_ENABLED

    @classmethod
    def is_fp8_calibration(cls) -> bool:
        return False

    @classmethod
    def with_fp8_parameters(cls) -> bool:
        return False

    @classmethod
    def get_fp8_recipe(cls) -> Recipe:
        return DelayedScaling() if cls.FP8_RECIPE is None else cls.FP8_RECIPE

    @classmethod
    def get_fp8_group(cls) -> Any:
        return cls.FP8_DISTRIBUTED_GROUP

    @classmethod
    def is_first_fp8_module(cls) -> bool:
        first, cls.IS_FIRST_FP8_MODULE = cls.IS_FIRST_FP8_MODULE, False
        return first

    @classmethod
    def reset(cls) -> None:
        cls.FP8_ENABLED, cls.FP8_RECIPE, cls.FP8_AUTOCAST_DEPTH = False, None, 0
        cls.delayed = {_FORWARD: [], _BACKWARD: []}

    @classmethod
    def join(cls, meta: dict[str, Any]) -> None:
        """From now on the scales of this layer are renewed with all others'; once for each layer."""
        if meta["recipe"].delayed() and not any(scales is meta[_FORWARD] for scales, _ in cls.delayed[_FORWARD]):
            for direction in (_FORWARD, _BACKWARD):
                cls.delayed[direction].append((meta[direction], meta["fp8_group"]))

    @classmethod
    def reduce_and_update_fp8_tensors(cls, forward: bool = True) -> None:
        for scales, group in cls.delayed[_FORWARD if forward else _BACKWARD]:
            scales.renew(group)


@contextmanager
def fp8_autocast(
    enabled: bool = True,
    calibrating: bool = False,
    fp8_recipe: Recipe | None = None,
    fp8_group: Any = None,
    _graph: bool = False,
) -> Iterator[None]:
    """Inside, layers multiply in FP8.  Scales of delayed recipes are renewed on leaving, if gradients are on."""
    state = FP8GlobalStateManager
    before = (state.FP8_ENABLED, state.FP8_RECIPE, state.FP8_DISTRIBUTED_GROUP, state.IS_FIRST_FP8_MODULE)
    state.FP8_ENABLED, state.FP8_RECIPE = enabled, DelayedScaling() if fp8_recipe is None else fp8_recipe
    state.FP8_DISTRIBUTED_GROUP = fp8_group
    if state.FP8_AUTOCAST_DEPTH == 0:
        state.IS_FIRST_FP8_MODULE = True
    state.FP8_AUTOCAST_DEPTH += 1
    try:
        yield
    finally:
        state.FP8_ENABLED, state.FP8_RECIPE, state.FP8_DISTRIBUTED_GROUP, state.IS_FIRST_FP8_MODULE = before
        state.FP8_AUTOCAST_DEPTH -= 1
        if enabled and state.FP8_AUTOCAST_DEPTH == 0 and torch.is_grad_enabled():
            state.reduce_and_update_fp8_tensors(forward=True)


@contextmanager
def fp8_model_init(enabled: bool = True, recipe: Recipe | None = None) -> Iterator[None]:
    """Parameters in FP8: not there in the stand-in."""
    if enabled:
        raise NotImplementedError("the stand-in for Transformer Engine has no FP8 parameters")
    yield
