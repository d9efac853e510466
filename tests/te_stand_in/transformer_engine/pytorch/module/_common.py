"""Matrix products, in FP8 or not, and what tensor parallel ranks tell each other around them."""

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.functional import layer_norm, rms_norm

from transformer_engine.pytorch.fp8 import FP8GlobalStateManager, Rounded, Scales


class Product(torch.autograd.Function):
    """inp [N, I] times weight [O, I] transposed; in FP8 where `kept` is the rounded weight."""

    @staticmethod
    def forward(
        ctx: Any,
        inp: Tensor,
        weight: Tensor,
        kept: Rounded | None,
        scales: tuple[Scales, Scales] | None,
        first: bool,
        adds_up: bool,
    ) -> Tensor:
        """`first`: the first layer's, whose gradient is the last.  `adds_up`: `weight.main_grad` gets the gradient."""
        ctx.kept, ctx.scales, ctx.first, ctx.parameter = kept, scales, first, weight if adds_up else None
        if kept is None or scales is None:
            ctx.save_for_backward(inp, weight)
            return inp @ weight.t()
        rounded = scales[0].rounded(inp, 0).value
        ctx.save_for_backward(rounded, kept.value)
        return (rounded @ kept.value.t()).to(inp.dtype)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor | None, None, None, None, None]:
        inp, weight = ctx.saved_tensors
        rounded, dtype = grad, grad.dtype
        if ctx.kept is not None:
            if not ctx.kept.with_transpose:
                raise RuntimeError(
                    "cublaslt_gemm: Assertion failed: Input A is not suitable for columnwise usage! (the FP8 weight was"
                    " kept by a forward pass without gradients)"
                )
            rounded = ctx.scales[1].rounded(grad, 0).value
        weight_grad = (rounded.t() @ inp).to(dtype)
        if ctx.parameter is not None:
            ctx.parameter.main_grad.add_(rounded.float().t() @ inp.float())
            ctx.parameter.grad_added_to_main_grad = True  # Megatron then adds nothing
        if ctx.kept is not None and ctx.first:
            FP8GlobalStateManager.reduce_and_update_fp8_tensors(forward=False)
        return (rounded @ weight).to(dtype), weight_grad, None, None, None, None


def check_for_fp8(*matrices: Tensor) -> None:
    for matrix in matrices:
        assert (matrix.shape[0] % 8, matrix.shape[1] % 16) == (0, 0), (
            "FP8 execution requires 2D input matrices with height divisible by 8 and width divisible by 16, "
            f"but got tensor with dims={list(matrix.shape)}"
        )


def normalized(kind: str, x: Tensor, weight: Tensor, bias: Tensor | None, eps: float, zero_centered: bool) -> Tensor:
    """RMSNorm or LayerNorm, in float32, given back in x's dtype."""
    gamma = weight.float() + 1 if zero_centered else weight.float()
    if kind == "RMSNorm":
        return rms_norm(x.float(), (x.shape[-1],), gamma, eps).to(x.dtype)
    return layer_norm(x.float(), (x.shape[-1],), gamma, None if bias is None else bias.float(), eps).to(x.dtype)


def _sum(x: Tensor, group: Any) -> Tensor:
    x = x.contiguous().clone()
    dist.all_reduce(x, group=group)
    return x


def _gathered(x: Tensor, group: Any) -> Tensor:
    parts = [torch.empty_like(x) for _ in range(dist.get_world_size(group))]
    dist.all_gather(parts, x.contiguous(), group=group)
    return torch.cat(parts)


def _own_part(x: Tensor, group: Any) -> Tensor:
    return x.chunk(dist.get_world_size(group))[dist.get_rank(group)].contiguous()


class CopyIn(torch.autograd.Function):
    """As it is; gradients are summed."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Any) -> Tensor:
        ctx.group = group
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return _sum(grad, ctx.group), None


class SumOut(torch.autograd.Function):
    """The sum; gradients as they are."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Any) -> Tensor:
        return _sum(x, group)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad, None


class GatherIn(torch.autograd.Function):
    """All ranks' rows; of the gradients' sum each rank gets its rows."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Any) -> Tensor:
        ctx.group = group
        return _gathered(x, group)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return _own_part(_sum(grad, ctx.group), ctx.group), None


class ScatterOut(torch.autograd.Function):
    """Of the sum each rank gets its rows; gradients of all rows."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Any) -> Tensor:
        ctx.group = group
        return _own_part(_sum(x, group), group)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return _gathered(grad, ctx.group), None
