"""A norm and the linear layer behind it, in one."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from transformer_engine.pytorch.module._common import normalized
from transformer_engine.pytorch.module.linear import LinearParts


class LayerNormLinear(LinearParts):
    """y = norm(x) W^T + b; the norm's weight is `layer_norm_weight`."""

    def __init__(
        self,
        in_features: int,
        out_features: int,
        eps: float = 1e-5,
        sequence_parallel: bool = False,
        fuse_wgrad_accumulation: bool = False,
        tp_group: Any = None,
        tp_size: int = 1,
        get_rng_state_tracker: Callable[[], Any] | None = None,
        init_method: Callable[[Tensor], Any] | None = None,
        bias: bool = True,
        normalization: str = "LayerNorm",
        return_bias: bool = False,
        params_dtype: torch.dtype | None = None,
        parallel_mode: str | None = None,
        return_layernorm_output: bool = False,
        return_layernorm_output_gathered: bool = False,
        parameters_split: Any = None,
        zero_centered_gamma: bool = False,
        device: Any = "cuda",
        ub_overlap_ag: bool = False,
        ub_overlap_rs: bool = False,
        ub_overlap_rs_dgrad: bool = False,
        ub_bulk_wgrad: bool = False,
        ub_bulk_dgrad: bool = False,
        ub_name: str | None = None,
    ) -> None:
        settings = {k: v for k, v in locals().items() if k not in ("self", "__class__")}
        super().__init__()
        assert normalization in ("LayerNorm", "RMSNorm"), "Unsupported normalization type!"
        if return_layernorm_output or return_layernorm_output_gathered:
            raise NotImplementedError("the stand-in for Transformer Engine does not give the norm's output")
        dtype = params_dtype or torch.get_default_dtype()
        start = torch.zeros if zero_centered_gamma else torch.ones
        self.eps, self.normalization, self.zero_centered_gamma = eps, normalization, zero_centered_gamma
        self.layer_norm_weight = torch.nn.Parameter(start(in_features, dtype=dtype, device=device))
        self.layer_norm_bias: torch.nn.Parameter | None = None
        if normalization == "LayerNorm":
            self.layer_norm_bias = torch.nn.Parameter(torch.zeros(in_features, dtype=dtype, device=device))
        self._make((in_features, out_features), settings)
        for parameter in (self.layer_norm_weight, self.layer_norm_bias):
            if parameter is not None:
                parameter.sequence_parallel = self.sequence_parallel  # type: ignore[attr-defined]

    def forward(self, inp: Tensor, is_first_microbatch: bool | None = None, fp8_output: bool | None = False) -> Any:
        with self.prepare_forward(inp) as x:
            norm = normalized(
                self.normalization, x, self.layer_norm_weight, self.layer_norm_bias, self.eps, self.zero_centered_gamma
            )
            return self._product(norm, is_first_microbatch, transpose_if_no_grad=True)
