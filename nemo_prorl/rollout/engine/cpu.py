"""What vLLM's CPU build does in many small steps, in few; answers stay the same but for the norms' last bits.

vLLM's worker imports this module before it makes the model: importing it changes vLLM in that process.
"""

from collections.abc import Callable
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Generator, Tensor

from nemo_prorl.rollout.engine.weights import WeightLoader

_NORMS = "prorl_cpu"  # as vLLM calls who implements an operation; setup.py chooses it
_LANES = 32  # numbers that a compiled norm takes at a time, at most
_ROWS = 4  # rows of a float32 product, at least
_AHEAD = 64  # seeds of a response that are drawn at a time


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

    @ir.ops.rms_norm.register_impl(_NORMS, supported=compiled, supports_args=takes)  # type: ignore[untyped-decorator]
    def rms_norm(x: Tensor, weight: Tensor | None, epsilon: float, variance_size: int | None = None) -> Tensor:
        out = torch.empty_like(x)
        torch.ops._C.rms_norm(out, x, weight, epsilon)
        return out

    @ir.ops.fused_add_rms_norm.register_impl(  # type: ignore[untyped-decorator]
        _NORMS, supported=compiled, supports_args=takes_residual, inplace=True
    )
    def fused_add_rms_norm(
        x: Tensor, x_residual: Tensor, weight: Tensor | None, epsilon: float, variance_size: int | None = None
    ) -> tuple[Tensor, Tensor]:
        torch.ops._C.fused_add_rms_norm(x, x_residual, weight, epsilon)
        return x, x_residual


class _Seeds:
    """The numbers that a sampler asks each response's generator for, one a token: the same ones, drawn ahead."""

    def __init__(self) -> None:
        # The next one last.  As long as the response lives: one that is put off and comes back goes on where it was.
        self._ahead: WeakKeyDictionary[Generator, list[int]] = WeakKeyDictionary()

    def of(self, generators: dict[int, Generator], rows: int) -> Tensor:
        """int64 [rows]; rows without a generator get torch's own numbers."""
        if len(generators) == rows:
            return torch.tensor([self._next(generators[row]) for row in range(rows)], dtype=torch.int64)
        seeds = torch.randint(0, 2**31, (rows,), dtype=torch.int64)
        for row, generator in generators.items():
            seeds[row] = self._next(generator)
        return seeds

    def _next(self, generator: Generator) -> int:
        left = self._ahead.get(generator)
        if not left:
            left = torch.randint(0, 2**31, (_AHEAD,), generator=generator, dtype=torch.int64).tolist()[::-1]
            self._ahead[generator] = left
        return left.pop()


def _sample_without_a_draw_a_token() -> None:
    """vLLM draws a seed for each token from its response's generator, in a call of its own."""
    from vllm.v1.sample.ops.topk_topp_sampler import TopKTopPSampler, apply_top_k_top_p

    theirs: Callable[..., tuple[Tensor, Tensor | None]] = TopKTopPSampler.forward_cpu
    seeds = _Seeds()

    def forward_cpu(
        self: Any, logits: Tensor, generators: dict[int, Generator], k: Tensor | None, p: Tensor | None
    ) -> tuple[Tensor, Tensor | None]:
        if self.logprobs_mode != "processed_logprobs" or self.use_fp64_gumbel:
            return theirs(self, logits, generators, k, p)
        logits = apply_top_k_top_p(logits, k, p)
        noise = seeds.of(generators, len(logits))
        logprobs = logits.log_softmax(dim=-1, dtype=torch.float32)
        tokens: Tensor = torch.ops._C.fused_gumbel_argmax(logits.to(torch.float32), noise)
        return tokens, logprobs

    TopKTopPSampler.forward_cpu = forward_cpu


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
_sample_without_a_draw_a_token()
_float32_heads_of_few_responses()
