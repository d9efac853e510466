"""What all layers share: FP8 state, its serialisation, and FP8 weights that are kept between micro-batches."""

import pickle
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from transformer_engine import KEEPS_WEIGHTS_WITHOUT_TRANSPOSE
from transformer_engine.pytorch.fp8 import FP8GlobalStateManager, Rounded, Scales

_DIRECTIONS = {"fwd": "scaling_fwd", "bwd": "scaling_bwd"}


class TransformerEngineBaseModule(torch.nn.Module):
    """A layer that may multiply in FP8."""

    def __init__(self) -> None:
        super().__init__()
        self.fp8 = self.fp8_initialized = False
        self.fp8_meta: dict[str, Any] = {"fp8_checkpoint": False, "fp8_group": None}
        self.tp_group: Any = None
        self.tp_size, self.tp_group_initialized = 1, False
        self.sequence_parallel = False
        self._fp8_workspaces: dict[str, Rounded] = {}
        self.activation_dtype: torch.dtype | None = None

    def set_tensor_parallel_group(self, tp_group: Any) -> None:
        self.tp_group, self.tp_group_initialized = tp_group, True

    def _take_group(self, tp_group: Any, tp_size: int) -> None:
        """Without a group a size above 1 waits for `set_tensor_parallel_group`."""
        self.tp_size = tp_size if tp_group is None else torch.distributed.get_world_size(tp_group)
        if tp_group is not None or tp_size == 1:
            self.set_tensor_parallel_group(tp_group)

    def init_fp8_metadata(self, num_gemms: int = 1) -> None:
        """Take over whether FP8 is on, and its recipe.  Each product has 3 tensors forward and 2 backward."""
        self.fp8 = FP8GlobalStateManager.is_fp8_enabled()
        self.fp8_meta["fp8_checkpoint"] = self.fp8
        if not self.fp8:
            self.fp8_initialized = False
            return
        recipe = FP8GlobalStateManager.get_fp8_recipe()
        if self.fp8_initialized and recipe == self.fp8_meta["recipe"]:
            return
        self.fp8_meta |= {"recipe": recipe, "num_gemms": num_gemms, "fp8_group": FP8GlobalStateManager.get_fp8_group()}
        self._make_scales(num_gemms)
        self.fp8_initialized = True

    def _make_scales(self, num_gemms: int) -> None:
        """Loaded scales stay where the recipe is of the same kind."""
        recipe = self.fp8_meta["recipe"]
        for direction, tensors in (("scaling_fwd", 3 * num_gemms), ("scaling_bwd", 2 * num_gemms)):
            present = self.fp8_meta.get(direction)
            if present is None or type(present.recipe) is not type(recipe):
                self.fp8_meta[direction] = Scales(recipe, direction == "scaling_fwd", tensors)
            else:
                present.recipe = recipe

    @contextmanager
    def prepare_forward(self, inp: Tensor, num_gemms: int = 1) -> Iterator[Tensor]:
        if self.tp_size > 1:
            assert self.tp_group_initialized, "TP group not initialized."
        for name, parameter in self.named_parameters():
            assert parameter.dtype == inp.dtype, (
                "Data types for parameters must match when outside of autocasted region. "
                f"Found input dtype: {inp.dtype} and {name!r} dtype: {parameter.dtype}"
            )
        self.activation_dtype = inp.dtype
        self.init_fp8_metadata(num_gemms)
        if self.fp8:
            FP8GlobalStateManager.join(self.fp8_meta)
        yield inp.contiguous()

    def get_weight_workspace(
        self, tensor: Tensor, with_transpose: bool, cache_name: str | None, update_workspace: bool
    ) -> Rounded:
        """The weight in FP8, kept under a name for the other micro-batches of a step.

        The fault of the pinned version: what was kept without a transpose is filled again without one.
        """
        scales: Scales = self.fp8_meta["scaling_fwd"]
        kept = self._fp8_workspaces.get(cache_name) if cache_name is not None else None
        if kept is None:
            kept = scales.rounded(tensor, 1, with_transpose)
            if cache_name is not None:
                self._fp8_workspaces[cache_name] = kept
            return kept
        if update_workspace:
            kept.value = scales.rounded(tensor, 1).value
        if with_transpose and not KEEPS_WEIGHTS_WITHOUT_TRANSPOSE:
            kept.with_transpose = True
        return kept

    def get_extra_state(self) -> Tensor:
        """A byte tensor: None before FP8 was used, else the recipe and the scales of a delayed recipe."""
        state: dict[str, Any] | None = None
        if self.fp8_meta["fp8_checkpoint"] or self.fp8:
            plain = bool, int, float, str, tuple, list
            extra = {key: value for key, value in self.fp8_meta.items() if isinstance(value, plain)}
            state = {"recipe": self.fp8_meta["recipe"], "extra_fp8_variables": extra}
            if state["recipe"].delayed():
                for suffix, direction in _DIRECTIONS.items():
                    state[f"scale_{suffix}"] = self.fp8_meta[direction].scale.clone()
                    state[f"amax_history_{suffix}"] = self.fp8_meta[direction].amax_history.clone()
        return torch.frombuffer(bytearray(pickle.dumps(state)), dtype=torch.uint8)

    def set_extra_state(self, state: Tensor | None) -> None:
        loaded = None if state is None else pickle.loads(state.detach().cpu().numpy().tobytes())
        if loaded is None:
            return
        self.fp8_meta.update(loaded["extra_fp8_variables"])
        self.fp8_meta["recipe"] = loaded["recipe"]
        self._make_scales(self.fp8_meta["num_gemms"])
        if loaded["recipe"].delayed():
            for suffix, direction in _DIRECTIONS.items():
                scales = self.fp8_meta[direction]
                scales.scale.copy_(loaded[f"scale_{suffix}"])
                scales.amax_history.copy_(loaded[f"amax_history_{suffix}"])
