"""A stand-in for apex's kernels that add a weight's gradient to its buffer; Megatron's own linear layers call them."""

from torch import Tensor


def wgrad_gemm_accum_fp32(input: Tensor, d_output: Tensor, d_weight: Tensor) -> None:
    d_weight.add_(d_output.flatten(0, -2).float().t() @ input.flatten(0, -2).float())


def wgrad_gemm_accum_fp16(input: Tensor, d_output: Tensor, d_weight: Tensor) -> None:
    d_weight.add_(d_output.flatten(0, -2).t() @ input.flatten(0, -2))
