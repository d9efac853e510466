"""Log-probabilities and entropies from last hidden states, without ever holding logits of all tokens or of all words.

Suffixes: N tokens, C tokens of one chunk, V words of this rank's shard of the vocabulary, W words of one block of it,
H hidden size.
"""

import math
from collections.abc import Iterator
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
    block: int = 8192,
    with_entropy: bool = False,
) -> tuple[Tensor, Tensor | None]:
    """log softmax(hidden weight^T / temperature) at the target, and the entropy of that distribution.

    Works on `chunk` tokens and `block` words at a time, with a running maximum and sums, and computes the logits again
    in the backward pass: beside inputs and gradients the largest tensors are logits [chunk, block], one without
    entropy, two with, and a float32 [block, H].  All arithmetic on logits is float32 (float64 for float64 inputs), and
    so are sums over chunks and blocks.  16-bit matrices are multiplied with float32 accumulation and result; a CUDA
    build before torch 2.8 rounds the logits to 16 bits first.

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
        block: words at a time, at least 1; as above.
        with_entropy: also compute entropies, in nats, differentiable.

    Returns:
        logp_N and entropy_N (or None), float32 (float64 for float64 inputs), the same on all ranks of the group.

    Raises:
        ValueError: shapes or dtypes do not fit, temperature, chunk or block is out of range, or a target is not in
            [0, vocab_size); this is found on all ranks alike.
    """
    _check(hidden_NH, weight_VH, target_N, temperature, vocab_size, vocab_start, chunk, block)
    words = min(max(vocab_size - vocab_start, 0), weight_VH.shape[0])
    results: tuple[Tensor, Tensor | None] = _ChunkedLogprobs.apply(
        hidden_NH, weight_VH, target_N, float(temperature), words, vocab_start, group, chunk, block, with_entropy
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
    block: int,
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
    if block < 1:
        raise ValueError(f"block is {block}; at least 1 word at a time is right")
    if vocab_start < 0 or vocab_size < 1:
        raise ValueError(f"vocab_start is {vocab_start} and vocab_size {vocab_size}; at least 0 and 1 are right")
    outside = ((target_N < 0) | (target_N >= vocab_size)).nonzero()
    if len(outside):
        place = int(outside[0])
        raise ValueError(f"target_N[{place}] is {int(target_N[place])}, outside the vocabulary of {vocab_size}")


def _spans(total: int, size: int) -> Iterator[slice]:
    return (slice(start, min(start + size, total)) for start in range(0, total, size))


def _product(a: Tensor, b: Tensor, dtype: torch.dtype) -> Tensor:
    """a @ b with the result in `dtype`; a new tensor, which the caller may change in place."""
    if a.dtype == dtype:
        return torch.mm(a, b)
    if a.is_cuda and _HAS_WIDE_PRODUCT:
        return torch.mm(a, b, out_dtype=dtype)
    return torch.mm(a, b).to(dtype)


def _add_product(total: Tensor, a: Tensor, b: Tensor) -> None:
    """total += a @ b, without another tensor of its size where the dtypes agree."""
    if a.dtype == total.dtype:
        total.addmm_(a, b)
    else:
        total.add_(_product(a, b, total.dtype))


def _operand(part: Tensor, dtype: torch.dtype) -> Tensor:
    """Some rows of a matrix as they are multiplied: a CPU gains nothing from 16-bit products and takes exact ones."""
    return part if part.is_cuda else part.to(dtype)


def _local_targets(target_C: Tensor, first: int, words: int) -> tuple[Tensor, Tensor]:
    """Whether a target is among the `words` from `first` on, and its place there (0 where it is not)."""
    local_C = target_C - first
    here_C = (local_C >= 0) & (local_C < words)
    return here_C, torch.where(here_C, local_C, 0)


class _Statistics:
    """Of C tokens, over words as they come: the largest logit m, the target's logit, sums of exp(x - m) and its product
    with x - m, for logits x.
    """

    def __init__(self, target_C: Tensor, dtype: torch.dtype, with_entropy: bool) -> None:
        self.target_C = target_C
        self.highest_C = torch.full(target_C.shape, -torch.inf, dtype=dtype, device=target_C.device)
        self.exp_C = torch.zeros_like(self.highest_C)
        self.at_target_C = torch.zeros_like(self.highest_C)
        self.product_C = torch.zeros_like(self.highest_C) if with_entropy else None

    def _raise_maximum(self, highest_C: Tensor) -> None:
        moved_C = torch.where(self.exp_C == 0, 0.0, self.highest_C - highest_C)  # nothing was added yet: from -inf
        shrink_C = moved_C.exp()
        if self.product_C is not None:
            self.product_C = (self.product_C + moved_C * self.exp_C) * shrink_C
        self.exp_C, self.highest_C = self.exp_C * shrink_C, highest_C

    def add(self, logit_CW: Tensor, first: int) -> None:
        """Adds the words from `first` on; destroys their logits."""
        here_C, local_C = _local_targets(self.target_C, first, logit_CW.shape[1])
        at_target_C = logit_CW.gather(1, local_C[:, None]).squeeze(1)
        self.at_target_C = torch.where(here_C, at_target_C, self.at_target_C)
        self._raise_maximum(torch.maximum(self.highest_C, logit_CW.amax(dim=1)))
        logit_CW.sub_(self.highest_C[:, None])
        exp_CW = logit_CW.exp() if self.product_C is not None else logit_CW.exp_()
        self.exp_C = self.exp_C + exp_CW.sum(dim=1)
        if self.product_C is not None:
            self.product_C = self.product_C + exp_CW.mul_(logit_CW).sum(dim=1)

    def results(self, group: dist.ProcessGroup | None) -> tuple[Tensor, Tensor, Tensor | None]:
        """(log-probability of the target, log-sum-exp, entropy or None) of each token, over all shards."""
        if group is not None:
            highest_C = self.highest_C.clone()
            dist.all_reduce(highest_C, op=dist.ReduceOp.MAX, group=group)
            self._raise_maximum(highest_C)
            parts = [self.exp_C, self.at_target_C, *([] if self.product_C is None else [self.product_C])]
            sums = torch.stack(parts)
            dist.all_reduce(sums, op=dist.ReduceOp.SUM, group=group)
            self.exp_C, self.at_target_C = sums[0], sums[1]
            self.product_C = None if self.product_C is None else sums[2]
        log_sum_C = self.exp_C.log()
        entropy_C = None if self.product_C is None else log_sum_C - self.product_C / self.exp_C
        return self.at_target_C - self.highest_C - log_sum_C, log_sum_C + self.highest_C, entropy_C


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
        block: int,
        with_entropy: bool,
    ) -> tuple[Tensor, Tensor | None]:
        dtype = torch.promote_types(hidden_NH.dtype, torch.float32)
        logp_N = torch.empty(len(target_N), dtype=dtype, device=hidden_NH.device)
        log_sum_N = torch.empty_like(logp_N)
        entropy_N = torch.empty_like(logp_N) if with_entropy else None
        with torch.autocast(hidden_NH.device.type, enabled=False):
            for rows in _spans(len(target_N), chunk):
                hidden_CH = _operand(hidden_NH[rows], dtype)
                statistics = _Statistics(target_N[rows], dtype, with_entropy)
                for part in _spans(words, block):
                    weight_WH = _operand(weight_VH[part], dtype)
                    logit_CW = _product(hidden_CH, weight_WH.t(), dtype).div_(temperature)
                    statistics.add(logit_CW, vocab_start + part.start)
                    del logit_CW  # before the next block's is made
                logp_N[rows], log_sum_N[rows], entropy_C = statistics.results(group)
                if entropy_N is not None and entropy_C is not None:
                    entropy_N[rows] = entropy_C
        ctx.save_for_backward(hidden_NH, weight_VH, target_N, log_sum_N, entropy_N)
        ctx.settings = (temperature, words, vocab_start, chunk, block)
        ctx.set_materialize_grads(False)
        return logp_N, entropy_N

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_logp_N: Tensor | None, grad_entropy_N: Tensor | None) -> tuple[Tensor | None, ...]:
        """With p the probabilities, x the logits, H the entropy and L the log-sum-exp:

        d logp / dx_j = 1[j = target] - p_j        d H / dx_j = -p_j (x_j - L + H)

        Block by block of words, so that the weight's gradient is summed in float32 without a whole one beside it.
        """
        hidden_NH, weight_VH, target_N, log_sum_N, entropy_N = ctx.saved_tensors
        temperature, words, vocab_start, chunk, block = ctx.settings
        nothing = (None,) * 8
        if grad_logp_N is None and grad_entropy_N is None:
            return (None, None, *nothing)
        if grad_logp_N is None:
            grad_logp_N = torch.zeros_like(log_sum_N)
        dtype = log_sum_N.dtype
        wants_hidden, wants_weight = ctx.needs_input_grad[:2]
        grad_hidden_NH = torch.zeros_like(hidden_NH, dtype=dtype) if wants_hidden else None
        grad_weight_VH = torch.zeros_like(weight_VH) if wants_weight else None
        with torch.autocast(hidden_NH.device.type, enabled=False):
            for part in _spans(words, block):
                weight_WH = _operand(weight_VH[part], dtype)
                grad_weight_WH = _sum_for(grad_weight_VH, part, dtype)
                for rows in _spans(len(target_N), chunk):
                    hidden_CH = _operand(hidden_NH[rows], dtype)
                    grad_CW = _product(hidden_CH, weight_WH.t(), dtype).div_(temperature).sub_(log_sum_N[rows, None])
                    here_C, local_C = _local_targets(target_N[rows], vocab_start + part.start, grad_CW.shape[1])
                    grad_C = grad_logp_N[rows].to(dtype)
                    if grad_entropy_N is None:
                        grad_CW.exp_().mul_(-grad_C[:, None])
                    else:
                        slope_C = grad_entropy_N[rows].to(dtype)
                        probability_CW = grad_CW.exp()
                        grad_CW.add_(entropy_N[rows, None]).mul_(-slope_C[:, None])
                        grad_CW.sub_(grad_C[:, None]).mul_(probability_CW)
                        del probability_CW
                    grad_CW.scatter_add_(1, local_C[:, None], torch.where(here_C, grad_C, 0.0)[:, None])
                    grad_CW = grad_CW.div_(temperature).to(hidden_CH.dtype)
                    if grad_hidden_NH is not None:
                        _add_product(grad_hidden_NH[rows], grad_CW, weight_WH)
                    if grad_weight_WH is not None:
                        _add_product(grad_weight_WH, grad_CW.t(), hidden_CH)
                    del grad_CW
                if grad_weight_VH is not None and grad_weight_WH is not None and grad_weight_VH.dtype != dtype:
                    grad_weight_VH[part] = grad_weight_WH.to(grad_weight_VH.dtype)
        return (None if grad_hidden_NH is None else grad_hidden_NH.to(hidden_NH.dtype), grad_weight_VH, *nothing)


def _sum_for(grad_weight_VH: Tensor | None, part: slice, dtype: torch.dtype) -> Tensor | None:
    """Where a block's gradient is summed: its place in the whole one, or zeros in `dtype` where that is narrower."""
    if grad_weight_VH is None or grad_weight_VH.dtype == dtype:
        return None if grad_weight_VH is None else grad_weight_VH[part]
    return torch.zeros_like(grad_weight_VH[part], dtype=dtype)
