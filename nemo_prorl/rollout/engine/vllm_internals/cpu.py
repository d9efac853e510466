"""Changes to vLLM's CPU build: compiled norms, and float32 logits that do not depend on the load of the engine.

Results are equal to vLLM's except for the last bits.

vLLM's worker imports this module before it builds the model; the import changes vLLM in that process.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from nemo_prorl.rollout.engine.vllm_internals import NORMS
from nemo_prorl.rollout.engine.weight_load import WeightLoader

_LANES = 32  # widest vector of a compiled norm, in elements; row lengths must be multiples of it
_ROWS = 4  # float32 products of at least this many rows are all summed in the same order


def _register_norms() -> None:
    """Register vLLM's compiled RMSNorm for CPUs, under the name NORMS.

    The RMSNorm that vLLM itself uses on CPUs passes over the data six times.
    """
    from vllm import ir
    from vllm.platforms import current_platform

    current_platform.import_kernels()

    def fits(x: Tensor, weight: Tensor | None, variance_size: int | None) -> bool:
        rows_fit = x.is_contiguous() and x.shape[-1] % _LANES == 0
        return rows_fit and variance_size is None and weight is not None and weight.dtype == x.dtype

    def takes(x: Tensor, weight: Tensor | None, epsilon: float, variance_size: int | None = None) -> bool:
        return fits(x, weight, variance_size)

    def takes_residual(
        x: Tensor, x_residual: Tensor, weight: Tensor | None, epsilon: float, variance_size: int | None = None
    ) -> bool:
        return fits(x, weight, variance_size) and x_residual.is_contiguous() and x_residual.dtype == x.dtype

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


def _pad_float32_heads() -> None:
    """Make vLLM pad the input of a 16-bit model's float32 `lm_head` to 4 rows (one row per running response).

    A matrix product with fewer than 4 rows is summed in another order.  Without padding, the log-probabilities of a
    response would therefore depend on how many other responses run.  Products in bf16, and the products of float32
    models, are equal at every load, so they are not padded.
    """
    from vllm.model_executor.layers.logits_processor import LogitsProcessor

    original: Callable[..., Tensor] = LogitsProcessor._apply_head

    def apply_head(self: Any, lm_head: Any, hidden_states: Tensor, embedding_bias: Tensor | None) -> Tensor:
        rows = hidden_states.shape[0]
        if self.head_dtype == hidden_states.dtype or rows >= _ROWS:
            return original(self, lm_head, hidden_states, embedding_bias)
        padded = torch.nn.functional.pad(hidden_states, (0, 0, 0, _ROWS - rows))
        return original(self, lm_head, padded, embedding_bias)[:rows]

    LogitsProcessor._apply_head = apply_head


class CpuWorker(WeightLoader):
    """The methods of `WeightLoader` for vLLM's worker on CPUs.

    The class adds no method.  vLLM loads it by its name, and this import of the module changes vLLM in the worker.
    """


_register_norms()
_pad_float32_heads()
