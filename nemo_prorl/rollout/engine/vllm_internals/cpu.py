"""What vLLM's CPU build does in many small steps, in few; answers stay the same but for the norms' last bits.

vLLM's worker imports this module before it makes the model: importing it changes vLLM in that process.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from nemo_prorl.rollout.engine.vllm_internals import NORMS
from nemo_prorl.rollout.engine.weights import WeightLoader

_LANES = 32  # numbers that a compiled norm takes at a time, at most
_ROWS = 4  # rows of a float32 product, at least


def _register_norms() -> None:
    """RMSNorm by vLLM's own compiled functions, which it takes on GPUs alone; on CPUs it makes six passes instead."""
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
    """A float32 product of fewer than 4 rows is summed in another order: pad those of a 16-bit model's float32 head.

    Otherwise a response's log-probabilities would depend on how many others are under way, and so on the machine's
    load.  Products in bf16, and float32 models' own, do not differ.
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
    """Mixed into vLLM's worker on CPUs."""


_register_norms()
_float32_heads_of_few_responses()
