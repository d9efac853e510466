"""Log-probabilities and entropies from last hidden states, without the logits of all tokens or all words in memory.

Suffixes: N tokens, C tokens of one chunk, V words of this rank's shard of the vocabulary, W words of one block of it,
H hidden size.
"""

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cached_property
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable

_log = logging.getLogger(__name__)

# torch 2.8 and later multiply 16-bit matrices into a float32 result on CUDA.
_HAS_WIDE_PRODUCT = "dtype" in torch.ops.aten.mm.overloads()  # type: ignore[no-untyped-call]


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
    float32_head: bool = True,
) -> tuple[Tensor, Tensor | None]:
    """Return log softmax(hidden weight^T / temperature) at the target, and the entropy of that distribution.

    The function works on `chunk` tokens and `block` words at a time, with a running maximum and sums, and computes the
    logits again in the backward pass: beside inputs and gradients the largest tensors are logits [chunk, block] and
    float32 copies of 16-bit inputs, [chunk, H] and [block, H].  In eager mode, the forward pass holds one tensor of
    logits, or two with entropy; the backward pass holds one, or two if the entropy has a gradient.  On GPUs the code
    between matrix products is compiled, and the backward pass always holds two.  Arithmetic on logits, and sums over
    chunks and blocks, are float32 (float64 for float64 inputs).

    With `float32_head`, logits of 16-bit inputs are sums of exact products in float32 on every device and torch
    version.  Gradients are rounded once, to the inputs' dtype, at the end.  On GPUs the gradient of the logits is
    rounded to TF32 (11 bits) before it is multiplied.  Without `float32_head`, logits are rounded to the inputs'
    dtype, as by an engine that computes logits in that dtype, and GPUs also round the gradient of the logits to it.

    Vocabulary-parallel: each rank of `group` holds a shard of the output weight and calls this with the same hidden
    states, targets and settings.  The backward pass communicates nothing.  The gradient of `hidden_NH` is only this
    rank's part of a sum over the group, which the caller's copy-to-tensor-parallel region computes.  The gradient of
    `weight_VH` is the complete gradient of this shard.

    Args:
        hidden_NH: hidden states of the positions that predict the targets; N may be 0.  Leave masked positions out:
            a nan in a row stays in its row of the results, but reaches the whole gradient of the weight.
        weight_VH: this rank's rows of the (padded) output weight, same dtype as hidden.
        target_N: int64 global token ids.
        temperature: the rollout temperature (paper sec. 5.1).
        vocab_size: number of real words over all ranks; rows with a global id from here on are padding, excluded from
            the distribution, and have gradient 0.
        vocab_start: global id of this shard's first row.
        group: the tensor-parallel process group, or None for one whole vocabulary.
        chunk: tokens at a time; results do not depend on it beyond rounding.
        block: words at a time; results do not depend on it beyond rounding.
        with_entropy: also compute entropies, in nats, differentiable.
        float32_head: keep the logits of 16-bit inputs in float32; without effect on float32 and float64 inputs.

    Returns:
        logp_N and entropy_N (or None), float32 (float64 for float64 inputs), the same on all ranks of the group.

    Raises:
        ValueError: a target is not in [0, vocab_size); all ranks of the group raise this error.
    """
    outside = ((target_N < 0) | (target_N >= vocab_size)).nonzero()
    if len(outside):
        place = int(outside[0])
        raise ValueError(f"target_N[{place}] is {int(target_N[place])}, outside the vocabulary of {vocab_size}")
    words = min(max(vocab_size - vocab_start, 0), weight_VH.shape[0])
    results: tuple[Tensor, Tensor | None] = _ChunkedLogprobs.apply(  # type: ignore[no-untyped-call]
        hidden_NH,
        weight_VH,
        target_N,
        float(temperature),
        words,
        vocab_start,
        group,
        chunk,
        block,
        with_entropy,
        float32_head,
    )
    return results


def _spans(total: int, size: int) -> Iterator[slice]:
    return (slice(start, min(start + size, total)) for start in range(0, total, size))


@contextmanager
def _tf32() -> Iterator[None]:
    """Context manager in which CUDA multiplies float32 matrices in TF32: 11 significant bits, float32 sums.

    Every bfloat16 (8 bits, the same exponents) and float16 (11 bits) number is a TF32 number, and a product of two has
    at most 22 bits: exact in float32.
    """
    before = torch.backends.cuda.matmul.allow_tf32
    torch.backends.cuda.matmul.allow_tf32 = True
    try:
        yield
    finally:
        torch.backends.cuda.matmul.allow_tf32 = before


def _logit_product(hidden_CH: Tensor, weight_WH: Tensor, dtype: torch.dtype, float32_head: bool) -> Tensor:
    """Return hidden weight^T in `dtype`: a new tensor, which the caller may change in place."""
    if hidden_CH.dtype == dtype:
        return torch.mm(hidden_CH, weight_WH.t())
    if hidden_CH.is_cuda and not float32_head:
        return torch.mm(hidden_CH, weight_WH.t()).to(dtype)
    if hidden_CH.is_cuda and _HAS_WIDE_PRODUCT:
        return torch.mm(hidden_CH, weight_WH.t(), out_dtype=dtype)
    with _tf32():
        logit_CW = torch.mm(hidden_CH.to(dtype), weight_WH.to(dtype).t())
    return logit_CW if float32_head else logit_CW.to(hidden_CH.dtype).to(dtype)


def _add_product(total: Tensor, grad: Tensor, operand: Tensor, float32_head: bool) -> None:
    """Add grad @ operand to `total`.

    `grad` is a gradient of logits and `operand` rows of the weight, or `grad` is transposed and `operand` rows of
    hidden states.
    """
    if operand.dtype == total.dtype:
        total.addmm_(grad, operand)
    elif float32_head or not operand.is_cuda:
        with _tf32():
            total.addmm_(grad, operand.to(total.dtype))
    elif _HAS_WIDE_PRODUCT:
        total.add_(torch.mm(grad.to(operand.dtype), operand, out_dtype=total.dtype))
    else:
        total.add_(torch.mm(grad.to(operand.dtype), operand))


# For each of C tokens, over the logits x of the words so far: highest logit m; sum of exp(x - m); logit of the target;
# sum of exp(x - m) (x - m), or None without entropy.
_Statistics = tuple[Tensor, Tensor, Tensor, Tensor | None]


def _nothing_seen(target_C: Tensor, dtype: torch.dtype, with_entropy: bool) -> _Statistics:
    highest_C = torch.full(target_C.shape, -torch.inf, dtype=dtype, device=target_C.device)
    exp_C, at_target_C = torch.zeros_like(highest_C), torch.zeros_like(highest_C)
    return highest_C, exp_C, at_target_C, torch.zeros_like(highest_C) if with_entropy else None


def _raise_maximum(
    highest_C: Tensor, raised_C: Tensor, exp_C: Tensor, product_C: Tensor | None
) -> tuple[Tensor, Tensor | None]:
    """Return the running sums of exp(x - m) and (x - m) exp(x - m) for a larger maximum m.

    m rises from `highest_C` to `raised_C`; without entropy there is no second sum.
    """
    moved_C = torch.where(exp_C == 0, 0.0, highest_C - raised_C)  # nothing was added yet: from -inf
    shrink_C = moved_C.exp()
    return exp_C * shrink_C, None if product_C is None else (product_C + moved_C * exp_C) * shrink_C


def _seen(product_CW: Tensor, temperature: float, local_C: Tensor, statistics: _Statistics, reuse: bool) -> _Statistics:
    """Return `statistics` extended by one block of words, whose logits are product_CW / temperature.

    `local_C`: each target's index in the block; outside of [0, W) if the target is in another block.
    `reuse`: overwrite `product_CW` with intermediate results; otherwise no argument is changed.
    """
    highest_C, exp_C, at_target_C, product_C = statistics
    logit_CW = product_CW.div_(temperature) if reuse else product_CW / temperature
    here_C = (local_C >= 0) & (local_C < logit_CW.shape[1])
    found_C = logit_CW.gather(1, torch.where(here_C, local_C, 0)[:, None]).squeeze(1)
    raised_C = torch.maximum(highest_C, logit_CW.amax(dim=1))
    exp_C, product_C = _raise_maximum(highest_C, raised_C, exp_C, product_C)
    logit_CW.sub_(raised_C[:, None])
    exp_CW = logit_CW.exp() if product_C is not None else logit_CW.exp_()
    exp_C = exp_C + exp_CW.sum(dim=1)
    if product_C is not None:
        product_C = product_C + exp_CW.mul_(logit_CW).sum(dim=1)
    return raised_C, exp_C, torch.where(here_C, found_C, at_target_C), product_C


def _logit_gradient(
    product_CW: Tensor,
    temperature: float,
    local_C: Tensor,
    log_sum_C: Tensor,
    grad_C: Tensor,
    entropy_C: Tensor | None,
    slope_C: Tensor | None,
    reuse: bool,
) -> Tensor:
    """Return the gradient with respect to hidden weight^T of one block of words.

    `grad_C` and `slope_C` are the gradients of log-probabilities and of entropies.  `local_C` and `reuse` are as in
    `_seen`.  The formulas are in `_ChunkedLogprobs.backward`.
    """
    grad_CW = (product_CW.div_(temperature) if reuse else product_CW / temperature).sub_(log_sum_C[:, None])
    here_C = (local_C >= 0) & (local_C < grad_CW.shape[1])
    if slope_C is None or entropy_C is None:
        grad_CW.exp_().mul_(-grad_C[:, None])
    else:
        probability_CW = grad_CW.exp()
        grad_CW.add_(entropy_C[:, None]).mul_(-slope_C[:, None])
        grad_CW.sub_(grad_C[:, None]).mul_(probability_CW)
    place_C = torch.where(here_C, local_C, 0)
    grad_CW.scatter_add_(1, place_C[:, None], torch.where(here_C, grad_C, 0.0)[:, None])
    return grad_CW.div_(temperature)


def _is_compiled(tensor: Tensor) -> bool:
    """Return whether blocks on this tensor's device are compiled: only on GPUs, as a CPU gains nothing."""
    return tensor.is_cuda


class _Block:
    """A function of one block of logits: compiled where `_is_compiled`, eager elsewhere and after a failed compilation.

    One compiled function serves all block sizes (`dynamic`).  The eager function reuses the logits' memory.
    """

    def __init__(self, name: str, body: Callable[..., Any]) -> None:
        self._name, self._body, self._broken = name, body, False

    @cached_property
    def _compiled(self) -> Callable[..., Any]:
        """Return the compiled function; torch imports its compiler here (two seconds), which a CPU never needs."""
        return torch.compile(self._body, dynamic=True)

    def __call__(self, product_CW: Tensor, *arguments: Any) -> Any:
        if _is_compiled(product_CW) and not self._broken and 1 not in product_CW.shape:  # torch compiles those again
            try:
                return self._compiled(product_CW, *arguments, reuse=False)
            except torch.OutOfMemoryError:
                raise
            except Exception as error:
                self._broken = True
                cause = getattr(error, "inner_exception", error)  # of torch's wrapper
                message = f"{type(cause).__name__}: {(str(cause).splitlines() or [''])[0]}"
                _log.warning("%s of log-probabilities is not compiled, which is slower: %s", self._name, message)
        return self._body(product_CW, *arguments, reuse=True)


_seen_block = _Block("the forward pass", _seen)
_gradient_block = _Block("the backward pass", _logit_gradient)


def _results(statistics: _Statistics, group: dist.ProcessGroup | None) -> tuple[Tensor, Tensor, Tensor | None]:
    """Return (log-probability of the target, log-sum-exp, entropy or None) of each token, over all shards."""
    highest_C, exp_C, at_target_C, product_C = statistics
    if group is not None:
        raised_C = highest_C.clone()
        dist.all_reduce(raised_C, op=dist.ReduceOp.MAX, group=group)
        exp_C, product_C = _raise_maximum(highest_C, raised_C, exp_C, product_C)
        sums = torch.stack([exp_C, at_target_C, *([] if product_C is None else [product_C])])
        dist.all_reduce(sums, op=dist.ReduceOp.SUM, group=group)
        highest_C, exp_C, at_target_C = raised_C, sums[0], sums[1]
        product_C = None if product_C is None else sums[2]
    log_sum_C = exp_C.log()
    entropy_C = None if product_C is None else log_sum_C - product_C / exp_C
    return at_target_C - highest_C - log_sum_C, log_sum_C + highest_C, entropy_C


class _ChunkedLogprobs(torch.autograd.Function):
    """The autograd function of `chunked_logprobs`; it keeps inputs and one float (two with entropy) per token."""

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
        float32_head: bool,
    ) -> tuple[Tensor, Tensor | None]:
        dtype = torch.promote_types(hidden_NH.dtype, torch.float32)
        logp_N = torch.empty(len(target_N), dtype=dtype, device=hidden_NH.device)
        log_sum_N = torch.empty_like(logp_N)
        entropy_N = torch.empty_like(logp_N) if with_entropy else None
        with torch.autocast(hidden_NH.device.type, enabled=False):
            for rows in _spans(len(target_N), chunk):
                statistics = _nothing_seen(target_N[rows], dtype, with_entropy)
                for part in _spans(words, block):
                    product_CW = _logit_product(hidden_NH[rows], weight_VH[part], dtype, float32_head)
                    local_C = target_N[rows] - (vocab_start + part.start)
                    statistics = _seen_block(product_CW, temperature, local_C, statistics)
                    del product_CW  # before the next block's is made
                logp_N[rows], log_sum_N[rows], entropy_C = _results(statistics, group)
                if entropy_N is not None and entropy_C is not None:
                    entropy_N[rows] = entropy_C
        ctx.save_for_backward(hidden_NH, weight_VH, target_N, log_sum_N, entropy_N)
        ctx.settings = (temperature, words, vocab_start, chunk, block, float32_head)
        ctx.set_materialize_grads(False)
        return logp_N, entropy_N

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_logp_N: Tensor | None, grad_entropy_N: Tensor | None) -> tuple[Tensor | None, ...]:
        """Return the gradients, with p the probabilities, x the logits, H the entropy and L the log-sum-exp.

        d logp / dx_j = 1[j = target] - p_j        d H / dx_j = -p_j (x_j - L + H)

        The sum goes over blocks of words, so that the weight's gradient is summed in float32 without a second copy.
        """
        hidden_NH, weight_VH, target_N, log_sum_N, entropy_N = ctx.saved_tensors
        temperature, words, vocab_start, chunk, block, float32_head = ctx.settings
        dtype = log_sum_N.dtype
        grad_logp_N = torch.zeros_like(log_sum_N) if grad_logp_N is None else grad_logp_N.to(dtype)
        slope_N = None if grad_entropy_N is None else grad_entropy_N.to(dtype)
        wants_hidden, wants_weight = ctx.needs_input_grad[:2]
        grad_hidden_NH = torch.zeros_like(hidden_NH, dtype=dtype) if wants_hidden else None
        grad_weight_VH = torch.zeros_like(weight_VH) if wants_weight else None
        with torch.autocast(hidden_NH.device.type, enabled=False):
            for part in _spans(words, block):
                grad_weight_WH = _sum_for(grad_weight_VH, part, dtype)
                for rows in _spans(len(target_N), chunk):
                    product_CW = _logit_product(hidden_NH[rows], weight_VH[part], dtype, float32_head)
                    grad_CW = _gradient_block(
                        product_CW,
                        temperature,
                        target_N[rows] - (vocab_start + part.start),
                        log_sum_N[rows],
                        grad_logp_N[rows],
                        None if slope_N is None else entropy_N[rows],
                        None if slope_N is None else slope_N[rows],
                    )
                    del product_CW
                    if grad_hidden_NH is not None:
                        _add_product(grad_hidden_NH[rows], grad_CW, weight_VH[part], float32_head)
                    if grad_weight_WH is not None:
                        _add_product(grad_weight_WH, grad_CW.t(), hidden_NH[rows], float32_head)
                    del grad_CW
                if grad_weight_VH is not None and grad_weight_WH is not None and grad_weight_VH.dtype != dtype:
                    grad_weight_VH[part] = grad_weight_WH.to(grad_weight_VH.dtype)
        return (None if grad_hidden_NH is None else grad_hidden_NH.to(hidden_NH.dtype), grad_weight_VH, *(None,) * 9)


def _sum_for(grad_weight_VH: Tensor | None, part: slice, dtype: torch.dtype) -> Tensor | None:
    """Return the tensor in which to sum the gradient of a block of the weight's rows, in `dtype`.

    If the whole gradient has this dtype, the tensor is a view of it, otherwise new zeros.  None without a gradient.
    """
    if grad_weight_VH is None or grad_weight_VH.dtype == dtype:
        return None if grad_weight_VH is None else grad_weight_VH[part]
    return torch.zeros_like(grad_weight_VH[part], dtype=dtype)
