"""A linear layer, over tensor parallel ranks or not."""

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from transformer_engine.pytorch.fp8 import FP8GlobalStateManager
from transformer_engine.pytorch.module._common import CopyIn, GatherIn, Product, ScatterOut, SumOut, check_for_fp8
from transformer_engine.pytorch.module.base import TransformerEngineBaseModule


class LinearParts(TransformerEngineBaseModule):
    """The weight and the bias, and the product with both; what LayerNormLinear shares with Linear."""

    weight: Tensor
    bias: Tensor

    def _make(self, sizes: tuple[int, int], settings: dict[str, Any]) -> None:
        """Make parameters of (in_features, out_features); `settings`: the arguments of the layer."""
        self.in_features, self.out_features = sizes
        self.parallel_mode, self.use_bias = settings["parallel_mode"], settings["bias"]
        self.return_bias, self.apply_bias = settings["return_bias"], self.use_bias and not settings["return_bias"]
        self.fuse_wgrad_accumulation = settings["fuse_wgrad_accumulation"]
        self._take_group(settings["tp_group"], settings["tp_size"])
        assert self.parallel_mode in ("row", "column", None), f"parallel_mode {self.parallel_mode} not supported"
        if settings["parameters_split"] is not None:
            raise NotImplementedError("the stand-in for Transformer Engine does not split parameters")
        if any(value for name, value in settings.items() if name.startswith("ub_") and name != "ub_name"):
            raise NotImplementedError("the stand-in for Transformer Engine does not overlap communication")
        cut = {"column": "out_features", "row": "in_features"}.get(self.parallel_mode or "")
        if cut:
            assert getattr(self, cut) % self.tp_size == 0
            setattr(self, cut, getattr(self, cut) // self.tp_size)
        self.sequence_parallel = self.tp_size > 1 and settings["sequence_parallel"]
        dtype = settings["params_dtype"] or torch.get_default_dtype()
        self.weight = torch.nn.Parameter(
            torch.empty(self.out_features, self.in_features, dtype=dtype, device=settings["device"])
        )
        if self.use_bias:
            self.bias = torch.nn.Parameter(torch.zeros(self.out_features, dtype=dtype, device=settings["device"]))
        else:
            self.bias = torch.empty(0, dtype=dtype)
        self._initialise(settings["init_method"], settings["get_rng_state_tracker"], settings.get("rng_tracker_name"))

    def _initialise(
        self, method: Callable[[Tensor], Any] | None, tracker: Callable[[], Any] | None, name: str | None
    ) -> None:
        fill = method or (lambda weight: torch.nn.init.normal_(weight, mean=0.0, std=0.023))
        with torch.no_grad():
            if tracker is None:
                fill(self.weight)
            else:
                with tracker().fork(name) if name else tracker().fork():
                    fill(self.weight)
        weight: Any = self.weight
        weight.tensor_model_parallel, weight.partition_dim, weight.partition_stride = (
            True,
            1 if self.parallel_mode == "row" else 0,
            1,
        )
        if self.use_bias and self.parallel_mode == "row":
            self.bias.sequence_parallel = self.sequence_parallel  # type: ignore[attr-defined]
        elif self.use_bias and self.parallel_mode == "column":
            bias: Any = self.bias
            bias.tensor_model_parallel, bias.partition_dim, bias.partition_stride = True, 0, 1

    def _product(self, inp: Tensor, is_first_microbatch: bool | None, transpose_if_no_grad: bool) -> Any:
        """inp [..., I] -> [..., O], with what ranks tell each other before and after."""
        assert inp.shape[-1] == self.in_features, "GEMM not possible"
        lead, x = inp.shape[:-1], inp.reshape(-1, self.in_features)
        if self.parallel_mode == "column" and self.tp_size > 1:
            x = (GatherIn if self.sequence_parallel else CopyIn).apply(x, self.tp_group)
        kept = scales = None
        if self.fp8:
            check_for_fp8(x, self.weight)
            kept = self.get_weight_workspace(
                self.weight,
                transpose_if_no_grad or (torch.is_grad_enabled() and inp.requires_grad),
                None if is_first_microbatch is None else "weight",
                is_first_microbatch is None or is_first_microbatch,
            )
            scales = self.fp8_meta["scaling_fwd"], self.fp8_meta["scaling_bwd"]
        first = self.fp8 and torch.is_grad_enabled() and FP8GlobalStateManager.is_first_fp8_module()
        out = Product.apply(x, self.weight, kept, scales, first, self.fuse_wgrad_accumulation)
        if self.apply_bias and self.parallel_mode != "row":
            out = out + self.bias
        if self.parallel_mode == "row" and self.tp_size > 1:
            out = (ScatterOut if self.sequence_parallel else SumOut).apply(out, self.tp_group)
        if self.apply_bias and self.parallel_mode == "row":
            out = out + self.bias
        rows = out.shape[0] // math.prod(lead[1:])
        out = out.reshape(rows, *lead[1:], out.shape[-1])
        return (out, self.bias) if self.return_bias else out


class Linear(LinearParts):
    """y = x W^T + b."""

    def __init__(
        self,
        in_features: int,
        out_features: int,
        sequence_parallel: bool = False,
        fuse_wgrad_accumulation: bool = False,
        tp_group: Any = None,
        tp_size: int = 1,
        get_rng_state_tracker: Callable[[], Any] | None = None,
        rng_tracker_name: str | None = None,
        init_method: Callable[[Tensor], Any] | None = None,
        bias: bool = True,
        return_bias: bool = False,
        params_dtype: torch.dtype | None = None,
        parallel_mode: str | None = None,
        parameters_split: Any = None,
        device: Any = "cuda",
        ub_overlap_ag: bool = False,
        ub_overlap_rs: bool = False,
        ub_overlap_rs_dgrad: bool = False,
        ub_bulk_dgrad: bool = False,
        ub_bulk_wgrad: bool = False,
        ub_name: str | None = None,
    ) -> None:
        settings = {k: v for k, v in locals().items() if k not in ("self", "__class__")}
        super().__init__()
        self._make((in_features, out_features), settings)

    def forward(
        self,
        inp: Tensor,
        is_first_microbatch: bool | None = None,
        fp8_output: bool | None = False,
        fp8_grad: bool | None = False,
    ) -> Any:
        with self.prepare_forward(inp) as x:
            return self._product(x, is_first_microbatch, transpose_if_no_grad=False)
