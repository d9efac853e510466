"""Rotary positions, SwiGLU and linear layers for CPUs, with fewer passes over memory than Megatron's own functions.

This file replaces on a CPU what Transformer Engine and compiled kernels do on a GPU.  `model.apply_rope_fusion`
turns on the rotary positions, and `model.bias_activation_fusion` turns on SwiGLU.

Shape suffixes: S positions, B responses, N tokens, T positions of a sequence, D size of a head, F width of the
feed-forward layer, I and O input and output width of a linear layer.
"""

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn.functional import silu


class _Rotary(torch.autograd.Function):
    """t * cos + rotate_half(t) * sin, where rotate_half puts the negative second half of t before its first half.

    With `place`, row k of t uses row place[k] of cos and sin.  The rows are looked up again in the backward pass,
    because cos and sin of all tokens would take too much memory.  If `place` is None, row k of t uses row k too.
    """

    @staticmethod
    def forward(ctx: Any, t: Tensor, cos: Tensor, sin: Tensor, place: Tensor | None = None) -> Tensor:
        ctx.save_for_backward(cos, sin, place)
        (cos, sin), (t_1, t_2) = _at(place, cos, sin), t.chunk(2, -1)
        sin_1, sin_2 = sin.chunk(2, -1)
        out = t * cos
        out_1, out_2 = out.chunk(2, -1)
        out_1.addcmul_(t_2, sin_1, value=-1.0)
        out_2.addcmul_(t_1, sin_2)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:
        cos, sin, place = ctx.saved_tensors
        (cos, sin), (grad_1, grad_2) = _at(place, cos, sin), grad.chunk(2, -1)
        sin_1, sin_2 = sin.chunk(2, -1)
        out = grad * cos
        out_1, out_2 = out.chunk(2, -1)
        out_1.addcmul_(grad_2, sin_2)
        out_2.addcmul_(grad_1, sin_1, value=-1.0)
        return out, None, None, None


def _at(place: Tensor | None, *angles: Tensor) -> tuple[Tensor, ...]:
    return angles if place is None else tuple(angle[place] for angle in angles)


def rotary(t: Tensor, freqs: Tensor, interleaved: bool = False, transpose_output_memory: bool = False) -> Tensor:
    """Rotate t [S, B, heads, D] by the angles `freqs` [S, 1, 1, D]; the signature is Transformer Engine's.

    Raises NotImplementedError: the model rotates only a part of each head, or neighbouring pairs (interleaved).
    """
    if interleaved or freqs.shape[-1] != t.shape[-1]:
        raise NotImplementedError(
            "model.apply_rope_fusion=true: got a partial or interleaved rotation. Fix: model.apply_rope_fusion=false"
        )
    out: Tensor = _Rotary.apply(t, freqs.cos().to(t.dtype), freqs.sin().to(t.dtype))
    return out


def rotary_of_packed(t: Tensor, position_N: Tensor, freqs: Tensor) -> Tensor:
    """Rotate t [N, heads, D] of packed sequences by the angles `freqs` [T, 1, 1, D].

    Args:
        position_N: int64, each token's position in its sequence.

    Raises NotImplementedError: the model rotates only a part of each head.
    """
    if freqs.shape[-1] != t.shape[-1]:
        raise NotImplementedError(
            "model.packed_sequences=true: expected rotary embeddings over whole heads; this model rotates only a part"
            " of each head. Fix: model.packed_sequences=false"
        )
    cos, sin = (angles.flatten(1, 2).to(t.dtype) for angles in (freqs.cos(), freqs.sin()))  # [T, 1, D]
    out: Tensor = _Rotary.apply(t, cos, sin, position_N)
    return out


class _SwiGLU(torch.autograd.Function):
    """silu(first half) * second half of the last dimension; saves only its input for the backward pass."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        gate, up = x.chunk(2, -1)
        return silu(gate).mul_(up)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        out = torch.empty_like(x)
        (gate, up), (gate_grad, up_grad) = x.chunk(2, -1), out.chunk(2, -1)
        torch.mul(grad, silu(gate), out=up_grad)
        torch.ops.aten.silu_backward.grad_input(grad * up, gate, grad_input=gate_grad)
        return out


def swiglu(x: Tensor, bias: Tensor | None, fp8_input_store: bool = False) -> Tensor:
    """Apply SwiGLU, x [S, B, 2F] -> [S, B, F]; the signature is that of Megatron's `bias_swiglu_impl`."""
    out: Tensor = _SwiGLU.apply(x if bias is None else x + bias)
    return out


def _product(x: Tensor, weight_OI: Tensor, bias_O: Tensor | None) -> Tensor:
    """Multiply x [..., I] -> [..., O] with oneDNN, which torch would use for bfloat16 only."""
    out: Tensor = torch.ops.mkldnn._linear_pointwise(x, weight_OI, bias_O, "none", [], "")
    return out


class _Linear(torch.autograd.Function):
    """Product of x [..., I] and the transposed weight [O, I]."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight_OI: Tensor, bias_O: Tensor | None) -> Tensor:
        ctx.save_for_backward(x, weight_OI)
        ctx.has_bias = bias_O is not None
        return _product(x, weight_OI, bias_O)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, Tensor | None]:
        x, weight_OI = ctx.saved_tensors
        grad_NO = grad.reshape(-1, grad.shape[-1])
        weight_grad_OI = grad_NO.t() @ x.reshape(-1, x.shape[-1])  # oneDNN is slower than torch for this product
        return _product(grad, weight_OI.t(), None), weight_grad_OI, grad_NO.sum(0) if ctx.has_bias else None


def linear(wrapped: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Return a function that uses oneDNN for float32 products without communication, otherwise calls `wrapped`.

    Args:
        wrapped: Megatron's `linear_with_grad_accumulation_and_async_allreduce`.
    """
    if not torch.backends.mkldnn.is_available():
        return wrapped

    @functools.wraps(wrapped)
    def one(
        input: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        gradient_accumulation_fusion: bool,
        allreduce_dgrad: bool,
        sequence_parallel: bool,
        grad_output_buffer: list[Tensor] | None = None,
        **more: Any,
    ) -> Tensor:
        plain = input.dtype == weight.dtype == torch.float32 and grad_output_buffer is None
        if plain and not (gradient_accumulation_fusion or allreduce_dgrad or sequence_parallel):
            out: Tensor = _Linear.apply(input, weight, bias)
            return out
        options = {"grad_output_buffer": grad_output_buffer, **more}
        return wrapped(input, weight, bias, gradient_accumulation_fusion, allreduce_dgrad, sequence_parallel, **options)

    return one
