"""Log-probabilities and the GRPO loss at a real vocabulary: memory, time and gradients of three ways to compute them.

Suffixes: N tokens, V words, H hidden size.
"""

import gc
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from gpu import model
from gpu.common import Emit, Settings, peak_bytes, seconds_of
from nemo_prorl.algorithms.logprobs import chunked_logprobs
from nemo_prorl.algorithms.losses import grpo_loss
from nemo_prorl.config import GRPOConfig

TEMPERATURE = 1.2
REPEATS = 5
LogProbs = Callable[[Tensor, Tensor, Tensor], Tensor]


def naive(hidden_NH: Tensor, weight_VH: Tensor, target_N: Tensor) -> Tensor:
    """Return the log-probabilities by log-softmax of the float32 logits of all tokens; autograd keeps them."""
    logit_NV = torch.mm(hidden_NH, weight_VH.t()).float() / TEMPERATURE
    return torch.log_softmax(logit_NV, dim=-1).gather(1, target_N[:, None]).squeeze(1)


class _VocabParallel(torch.autograd.Function):
    """The formula of NeMo-Aligner's function: a float32 softmax over all logits, which is kept for the backward pass.

    NeMo-Aligner's backward pass also makes a one-hot tensor of 8 bytes per logit; this backward pass does not.
    """

    @staticmethod
    def forward(ctx: Any, logit_NV: Tensor, target_N: Tensor) -> Tensor:
        softmax_NV = (logit_NV - logit_NV.amax(dim=-1, keepdim=True)).exp_()
        softmax_NV.div_(softmax_NV.sum(dim=-1, keepdim=True))
        ctx.save_for_backward(softmax_NV, target_N)
        return softmax_NV.log().gather(1, target_N[:, None]).squeeze(1)

    @staticmethod
    def backward(ctx: Any, *grad_N: Tensor) -> tuple[Tensor, None]:
        softmax_NV, target_N = ctx.saved_tensors
        grad_NV = softmax_NV.neg()
        grad_NV.scatter_add_(1, target_N[:, None], torch.ones_like(target_N, dtype=grad_NV.dtype)[:, None])
        return grad_NV.mul_(grad_N[0][:, None]), None


def aligners(emit: Emit, settings: Settings) -> tuple[str, LogProbs]:
    """Return a name, and NeMo-Aligner's own function or, if it cannot be imported, its formula."""
    try:
        if settings.small:
            raise ImportError("a run with small sizes skips NeMo's slow imports")
        from nemo_aligner.utils.distributed import from_parallel_logits_to_logprobs
    except Exception as error:
        note = f"not imported ({error}); its formula is restated: vocab-parallel log-softmax in float32"
        emit("NeMo-Aligner's function", note=note)
        parallel = _VocabParallel.apply
        return "vocab-parallel softmax, restated", lambda h, w, t: parallel(
            (torch.mm(h, w.t()) / TEMPERATURE).float(), t
        )
    model.start(settings)

    def own(hidden_NH: Tensor, weight_VH: Tensor, target_N: Tensor) -> Tensor:
        logit_1NV = (torch.mm(hidden_NH, weight_VH.t()) / TEMPERATURE).float()[None]
        found: Tensor = from_parallel_logits_to_logprobs(
            logit_1NV, target_N[None], higher_stability=True, ignore_last=False
        )[0]
        return found

    return "NeMo-Aligner's own", own


def chunked(chunk: int, vocab: int) -> LogProbs:
    def compute(hidden_NH: Tensor, weight_VH: Tensor, target_N: Tensor) -> Tensor:
        return chunked_logprobs(hidden_NH, weight_VH, target_N, TEMPERATURE, vocab_size=vocab, chunk=chunk)[0]

    return compute


def step(compute: LogProbs, hidden_NH: Tensor, weight_VH: Tensor, target_N: Tensor, old_N: Tensor) -> Tensor:
    """Run `compute`, the GRPO loss (all tokens are one response) and backward; return the log-probabilities."""
    logp_N = compute(hidden_NH, weight_VH, target_N)
    mask_BT = torch.ones(1, len(target_N), dtype=torch.bool, device=target_N.device)
    advantage_B = torch.ones(1, device=target_N.device)
    loss, _ = grpo_loss(
        logp_N[None], old_N[None], old_N[None] - 0.01, advantage_B, mask_BT, None, float(len(target_N)), GRPOConfig()
    )
    loss.backward()
    return logp_N.detach()


def run(emit: Emit, settings: Settings) -> None:
    tokens, vocab, hidden = (64, 2048, 32) if settings.small else (8192, 151_936, 1536)
    chunks = (16,) if settings.small else (4096, 1024)
    generator = torch.Generator(settings.device).manual_seed(1)

    def normal(*shape: int, scale: float = 1.0) -> Tensor:
        made = torch.randn(*shape, generator=generator, device=settings.device) * scale
        return made.to(settings.dtype).requires_grad_()

    hidden_NH, weight_VH = normal(tokens, hidden), normal(vocab, hidden, scale=hidden**-0.5)
    target_N = torch.randint(vocab, (tokens,), generator=generator, device=settings.device)
    emit("sizes", tokens=tokens, words=vocab, hidden=hidden, dtype=str(settings.dtype).removeprefix("torch."))
    with torch.no_grad():
        old_N = chunked(chunks[0], vocab)(hidden_NH, weight_VH, target_N) + 0.02
    name, theirs = aligners(emit, settings)
    exact = exact_step(hidden_NH, weight_VH, target_N, old_N)
    peaks: dict[str, int] = {}
    for way, compute in {
        **{f"chunked, {chunk} tokens": chunked(chunk, vocab) for chunk in chunks},
        name: theirs,
        "naive": naive,
    }.items():
        try:
            peaks[way] = measure(emit, way, compute, (hidden_NH, weight_VH, target_N, old_N), exact, settings)
        except torch.OutOfMemoryError as error:
            emit(way, note=f"out of memory: {str(error).splitlines()[0]}")
        hidden_NH.grad = weight_VH.grad = None
        gc.collect()
    for way, peak in peaks.items():
        if "naive" in peaks and way != "naive":
            emit(f"{way}: peak memory", of_the_naive_form=peak / peaks["naive"])


def exact_step(hidden_NH: Tensor, weight_VH: Tensor, target_N: Tensor, old_N: Tensor) -> tuple[Tensor, ...]:
    """Return exact log-probabilities and gradients (of hidden states and weight), with which all ways are compared.

    They are computed by the naive form in float32 throughout; matrix products do not use TF32, as by torch's default.
    """
    wide = [t.detach().float().requires_grad_() for t in (hidden_NH, weight_VH)]
    logp_N = step(naive, wide[0], wide[1], target_N, old_N)
    assert wide[0].grad is not None
    assert wide[1].grad is not None
    return logp_N, wide[0].grad, wide[1].grad


def measure(
    emit: Emit, way: str, compute: LogProbs, given: tuple[Tensor, ...], exact: tuple[Tensor, ...], settings: Settings
) -> int:
    """Emit one row: memory and time of the forward pass alone, and of a whole step; the step's distance from `exact`.

    Returns:
        The peak in bytes of a whole step: forward pass, loss and backward pass, with the gradients included.
    """
    hidden_NH, weight_VH, target_N, _ = given
    repeats = 2 if settings.small else REPEATS

    def forward() -> None:
        with torch.no_grad():
            compute(hidden_NH, weight_VH, target_N)

    def whole() -> None:
        hidden_NH.grad = weight_VH.grad = None
        step(compute, *given)

    hidden_NH.grad = weight_VH.grad = None
    with peak_bytes(settings.device) as forward_peak:
        forward()
    with peak_bytes(settings.device) as peak:
        logp_N = step(compute, *given)
    assert hidden_NH.grad is not None
    assert weight_VH.grad is not None
    gaps = [float((logp_N - exact[0]).abs().max())]
    for grad, right in ((hidden_NH.grad, exact[1]), (weight_VH.grad, exact[2])):
        gaps.append(float((grad.float() - right).norm() / right.norm()))
    forward_s, whole_s = (seconds_of(work, settings.device, repeats) for work in (forward, whole))
    emit(
        way,
        forward_peak_bytes=forward_peak[0],
        peak_bytes=peak[0],
        forward_s=forward_s[0],
        seconds=whole_s[0],
        seconds_least=whole_s[1],
        seconds_most=whole_s[2],
        logp_gap=gaps[0],
        grad_hidden_gap=gaps[1],
        grad_weight_gap=gaps[2],
    )
    return peak[0]
