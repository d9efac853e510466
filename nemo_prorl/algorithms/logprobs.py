"""Log-probabilities and entropies from last hidden states, without ever holding a row of logits for every token.

Suffixes: N tokens, C tokens of one chunk, V words of this rank's shard of the vocabulary, H hidden size.
"""

import math
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable

# torch 2.8 and later multiply 16-bit matrices into a float32 result on CUDA.
_HAS_WIDE_PRODUCT = "dtype" in torch.ops.aten.mm.overloads()


def chunked_logprobs(
    hidden_NH: Tensor,
    weight_VH: Tensor,
    target_N: Tensor,
    temperature: float,
    *,
    vocab_size: int,
    vocab_start: int = 0,
    group: dist.ProcessGroup | None = None,
    chunk: int = 4096,
    with_entropy: bool = False,
) -> tuple[Tensor, Tensor | None]:
    """log softmax(hidden weight^T / temperature) at the target, and the entropy of that distribution.

    Works on `chunk` tokens at a time and computes the logits again in the backward pass: the largest tensor is
    [chunk, V], one of it without entropy, two with.  All arithmetic on logits is float32 (float64 for float64 inputs).
    16-bit matrices are multiplied with float32 accumulation and result; a CUDA build before torch 2.8 rounds the logits
    to 16 bits first.

    Vocabulary-parallel: each rank of `group` holds a shard of the output weight and calls this with the same hidden
    states, targets and settings.  Gradients are LOCAL: to `hidden_NH` this rank's partial sum, which the caller's
    copy-to-tensor-parallel region sums over the group; to `weight_VH` the complete gradient of this shard.
    The backward pass communicates nothing.

    Args:
        hidden_NH: hidden states of the positions that predict the targets; N may be 0.  Leave masked positions out:
            a nan in a row stays in its row of the results, but reaches the whole gradient of the weight.
        weight_VH: this rank's rows of the (padded) output weight, same dtype as hidden.
        target_N: int64 global token ids.
        temperature: the rollout temperature, above 0 (paper sec. 5.1).
        vocab_size: number of real words over all ranks; rows with a global id from here on are padding, excluded from
            the distribution, and have gradient 0.
        vocab_start: global id of this shard's first row.
        group: the tensor-parallel process group, or None for one whole vocabulary.
        chunk: tokens at a time, at least 1; results do not depend on it beyond rounding.
        with_entropy: also compute entropies, in nats, differentiable.

    Returns:
        logp_N and entropy_N (or None), float32 (float64 for float64 inputs), the same on all ranks of the group.

    Raises:
        ValueError: shapes or dtypes do not fit, temperature or chunk is out of range, or a target is not in
            [0, vocab_size); this is found on all ranks alike.
    """
    _check(hidden_NH, weight_VH, target_N, temperature, vocab_size, vocab_start, chunk)
    words = min(max(vocab_size - vocab_start, 0), weight_VH.shape[0])
    results: tuple[Tensor, Tensor | None] = _ChunkedLogprobs.apply(
        hidden_NH, weight_VH, target_N, float(temperature), words, vocab_start, group, chunk, with_entropy
    )
    return results


def _check(
    hidden_NH: Tensor,
    weight_VH: Tensor,
    target_N: Tensor,
    temperature: float,
    vocab_size: int,
    vocab_start: int,
    chunk: int,
) -> None:
    if hidden_NH.ndim != 2 or weight_VH.ndim != 2 or hidden_NH.shape[1] != weight_VH.shape[1]:
        raise ValueError(
            f"hidden states [N, H] and weight [V, H] do not fit: {list(hidden_NH.shape)}, {list(weight_VH.shape)}"
        )
    if hidden_NH.dtype != weight_VH.dtype or not hidden_NH.is_floating_point():
        raise ValueError(
            f"hidden states are {hidden_NH.dtype}, weight is {weight_VH.dtype}: one floating type is right"
        )
    if target_N.shape != hidden_NH.shape[:1] or target_N.dtype != torch.int64:
        raise ValueError(
            f"targets are {target_N.dtype} {list(target_N.shape)}, right is torch.int64 [{hidden_NH.shape[0]}]"
        )
    if not 0.0 < temperature < math.inf:
        raise ValueError(f"temperature is {temperature}; a positive number is right")
    if chunk < 1:
        raise ValueError(f"chunk is {chunk}; at least 1 token at a time is right")
    if vocab_start < 0 or vocab_size < 1:
        raise ValueError(f"vocab_start is {vocab_start} and vocab_size {vocab_size}; at least 0 and 1 are right")
    outside = ((target_N < 0) | (target_N >= vocab_size)).nonzero()
    if len(outside):
        place = int(outside[0])
        raise ValueError(f"target_N[{place}] is {int(target_N[place])}, outside the vocabulary of {vocab_size}")


def _product(a: Tensor, b: Tensor, dtype: torch.dtype) -> Tensor:
    """a @ b with the result in `dtype`; a new tensor, which the caller may change in place."""
    if a.dtype == dtype:
        return torch.mm(a, b)
    if a.is_cuda and _HAS_WIDE_PRODUCT:
        return torch.mm(a, b, out_dtype=dtype)
    return torch.mm(a, b).to(dtype)


def _operands(hidden_NH: Tensor, weight_VH: Tensor, words: int) -> tuple[Tensor, Tensor, torch.dtype]:
    """Hidden states and the real words' weight as they are multiplied, and the dtype of the logits."""
    dtype = torch.promote_types(hidden_NH.dtype, torch.float32)
    weight_VH = weight_VH[:words]
    if not hidden_NH.is_cuda:
        # A CPU gains nothing from 16-bit products, so it takes the exact ones.
        return hidden_NH.to(dtype), weight_VH.to(dtype), dtype
    return hidden_NH, weight_VH, dtype


def _local_targets(target_C: Tensor, vocab_start: int, words: int) -> tuple[Tensor, Tensor]:
    """Whether a target lies in this shard, and its local row (0 where it does not)."""
    local_C = target_C - vocab_start
    here_C = (local_C >= 0) & (local_C < words)
    return here_C, torch.where(here_C, local_C, 0)


def _chunk_statistics(
    logit_CV: Tensor, target_C: Tensor, vocab_start: int, group: dist.ProcessGroup | None, with_entropy: bool
) -> tuple[Tensor, Tensor, Tensor | None]:
    """(log-probability of the target, log-sum-exp, entropy or None) of each row, over all shards.

    Destroys `logit_CV`.
    """
    rows, words = logit_CV.shape
    highest_C = logit_CV.amax(dim=1) if words else logit_CV.new_full((rows,), -torch.inf)
    if group is not None:
        dist.all_reduce(highest_C, op=dist.ReduceOp.MAX, group=group)

    logit_CV.sub_(highest_C[:, None])
    here_C, local_C = _local_targets(target_C, vocab_start, words)
    sums = logit_CV.new_zeros((3 if with_entropy else 2, rows))
    if words:
        at_target_C = logit_CV.gather(1, local_C[:, None]).squeeze(1)
        sums[1] = torch.where(here_C, at_target_C, 0.0)
        exp_CV = logit_CV.exp() if with_entropy else logit_CV.exp_()
        sums[0] = exp_CV.sum(dim=1)
        if with_entropy:
            sums[2] = exp_CV.mul_(logit_CV).sum(dim=1)
    if group is not None:
        dist.all_reduce(sums, op=dist.ReduceOp.SUM, group=group)
    log_sum_C = sums[0].log()
    entropy_C = log_sum_C - sums[2] / sums[0] if with_entropy else None
    return sums[1] - log_sum_C, log_sum_C + highest_C, entropy_C


class _ChunkedLogprobs(torch.autograd.Function):
    """See `chunked_logprobs`.  Keeps its inputs and one float (two with entropy) a token for the backward pass."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden_NH: Tensor,
        weight_VH: Tensor,
        target_N: Tensor,
        temperature: float,
        words: int,
        vocab_start: int,
        group: dist.ProcessGroup | None,
        chunk: int,
        with_entropy: bool,
    ) -> tuple[Tensor, Tensor | None]:
        with torch.autocast(hidden_NH.device.type, enabled=False):
            hidden, weight, dtype = _operands(hidden_NH, weight_VH, words)
            logp_N = torch.empty(len(target_N), dtype=dtype, device=hidden.device)
            log_sum_N = torch.empty_like(logp_N)
            entropy_N = torch.empty_like(logp_N) if with_entropy else None
            for start in range(0, len(target_N), chunk):
                rows = slice(start, start + chunk)
                logit_CV = _product(hidden[rows], weight.t(), dtype).div_(temperature)
                logp_C, log_sum_C, entropy_C = _chunk_statistics(
                    logit_CV, target_N[rows], vocab_start, group, with_entropy
                )
                del logit_CV  # before the next chunk's is made
                logp_N[rows], log_sum_N[rows] = logp_C, log_sum_C
                if entropy_N is not None and entropy_C is not None:
                    entropy_N[rows] = entropy_C
        ctx.save_for_backward(hidden_NH, weight_VH, target_N, log_sum_N, entropy_N)
        ctx.settings = (temperature, words, vocab_start, chunk)
        ctx.set_materialize_grads(False)
        return logp_N, entropy_N

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_logp_N: Tensor | None, grad_entropy_N: Tensor | None) -> tuple[Tensor | None, ...]:
        """With p the probabilities, x the logits, H the entropy and L the log-sum-exp:

        d logp / dx_j = 1[j = target] - p_j        d H / dx_j = -p_j (x_j - L + H)
        """
        hidden_NH, weight_VH, target_N, log_sum_N, entropy_N = ctx.saved_tensors
        temperature, words, vocab_start, chunk = ctx.settings
        nothing = (None,) * 7
        if grad_logp_N is None and grad_entropy_N is None:
            return (None, None, *nothing)
        if grad_logp_N is None:
            grad_logp_N = torch.zeros_like(log_sum_N)
        wants_hidden, wants_weight = ctx.needs_input_grad[:2]
        with torch.autocast(hidden_NH.device.type, enabled=False):
            hidden, weight, dtype = _operands(hidden_NH, weight_VH, words)
            grad_hidden_NH = torch.zeros_like(hidden_NH) if wants_hidden else None
            grad_weight_VH = torch.zeros(weight_VH.shape, dtype=dtype, device=weight.device) if wants_weight else None
            for start in range(0, len(target_N), chunk):
                rows = slice(start, start + chunk)
                grad_CV = _product(hidden[rows], weight.t(), dtype).div_(temperature).sub_(log_sum_N[rows, None])
                grad_C = grad_logp_N[rows].to(dtype)
                if grad_entropy_N is None:
                    grad_CV.exp_().mul_(-grad_C[:, None])
                else:
                    slope_C = grad_entropy_N[rows].to(dtype)
                    probability_CV = grad_CV.exp()
                    grad_CV.add_(entropy_N[rows, None]).mul_(-slope_C[:, None])
                    grad_CV.sub_(grad_C[:, None]).mul_(probability_CV)
                    del probability_CV
                here_C, local_C = _local_targets(target_N[rows], vocab_start, words)
                if words:
                    grad_CV.scatter_add_(1, local_C[:, None], torch.where(here_C, grad_C, 0.0)[:, None])
                grad_CV = grad_CV.div_(temperature).to(hidden.dtype)
                if grad_hidden_NH is not None:
                    grad_hidden_NH[rows] = torch.mm(grad_CV, weight).to(hidden_NH.dtype)
                if grad_weight_VH is not None:
                    grad_weight_VH[:words] += _product(grad_CV.t(), hidden[rows], dtype)
                del grad_CV
        if grad_weight_VH is not None:
            grad_weight_VH = grad_weight_VH.to(weight_VH.dtype)
        return (grad_hidden_NH, grad_weight_VH, *nothing)
