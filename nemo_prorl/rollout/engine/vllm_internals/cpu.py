"""Fewer and larger operations in vLLM's CPU build.  Results are equal except for the last bits of norms.

vLLM's worker imports this module before it builds the model; the import changes vLLM in that process.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from nemo_prorl.rollout.engine.vllm_internals import NORMS
from nemo_prorl.rollout.engine.weights import WeightLoader

_LANES = 32  # maximum of numbers per call of a compiled norm
_ROWS = 4  # minimum of rows in a float32 product


def _register_norms() -> None:
    """Register vLLM's compiled RMSNorm, which it uses on GPUs only; its CPU version makes six passes over the data."""
    from vllm import ir
    from vllm.platforms import current_platform

    current_platform.import_kernels()

    def whole(x: Tensor, weight: Tensor | None, variance_size: int | None) -> bool:
        fits = x.is_contiguous() and x.shape[-1] % _LANES == 0
        return fits and variance_size is None and weight is not None and weight.dtype == x.dtype

    def takes(x: Tensor, weight: Tensor | None, epsilon: float, variance_size: int | None = None) -> bool:
        return whole(x, weight, variance_size)

    def takes_residual(
        x: Tensor, x_residual: Tensor, weight: Tensor | None, epsilon: float, variance_size: int | None = None
    ) -> bool:
        return whole(x, weight, variance_size) and x_residual.is_contiguous() and x_residual.dtype == x.dtype

    compiled = hasattr(torch.ops._C, "rms_norm") and hasattr(torch.ops._C, "fused_add_rms_norm")

    @ir.ops.rms_norm.register_impl(NORMS, supported=compiled, supports_args=takes)  # type: ignore[untyped-decorator]
    def rms_norm(x: Tensor, weight: Tensor | None, epsilon: float, variance_size: int | None = None) -> Tensor:
        out = torch.empty_like(x)
        torch.ops._C.rms_norm(out, x, weight, epsilon)
        return out

    @ir.ops.fused_add_rms_norm.register_impl(  # type: ignore[untyped-decorator]
        NORMS, supported=compiled, supports_args=takes_residual, inplace=True
    )
    def fused_add_rms_norm(
        x: Tensor, x_residual: Tensor, weight: Tensor | None, epsilon: float, variance_size: int | None = None
    ) -> tuple[Tensor, Tensor]:
        torch.ops._C.fused_add_rms_norm(x, x_residual, weight, epsilon)
        return x, x_residual


def _float32_heads_of_few_responses() -> None:
    """Pad the float32 head of a 16-bit model to 4 rows: products of fewer rows are summed in another order.

    Without padding the log-probabilities of a response would depend on the number of running responses, and so on the
    load of the machine.  Products in bf16, and those of float32 models, do not differ.
    """
    from vllm.model_executor.layers.logits_processor import LogitsProcessor

    theirs: Callable[..., Tensor] = LogitsProcessor._apply_head

    def apply_head(self: Any, lm_head: Any, hidden_states: Tensor, embedding_bias: Tensor | None) -> Tensor:
        rows = hidden_states.shape[0]
        if self.head_dtype == hidden_states.dtype or rows >= _ROWS:
            return theirs(self, lm_head, hidden_states, embedding_bias)
        padded = torch.nn.functional.pad(hidden_states, (0, 0, 0, _ROWS - rows))
        return theirs(self, lm_head, padded, embedding_bias)[:rows]

    LogitsProcessor._apply_head = apply_head


class CpuWorker(WeightLoader):
    """Mixin for vLLM's worker on CPUs."""


_register_norms()
_float32_heads_of_few_responses()
