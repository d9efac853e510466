"""Peak memory of log-probabilities plus loss at a large vocabulary: the naive form, ours, and NeMo-Aligner's function.

    .venv/train/bin/python benchmarks/logprobs.py                       151,936 words, hidden 1,536, 3,072 tokens, CPU
    .venv/train/bin/python benchmarks/logprobs.py --device cuda --tokens 8192 --dtype bfloat16

Each form runs in a separate process: hidden states and output weight -> log-probabilities at temperature 1.2 -> the
GRPO loss -> gradients of both.  Naive: float32 logits, their log-softmax, gather, and autograd.  NeMo-Aligner's:
`from_parallel_logits_to_logprobs` on float32 logits (it sums over a tensor-parallel group, here of one).

Two numbers are measured: the peak memory beyond the inputs until both gradients are computed; and this peak minus the
bytes of the two gradients, which every form must return.  On CUDA, torch's allocator counts.  On a CPU, the process's
peak resident set (VmHWM) counts, which is reset once the inputs exist; memory that libc keeps is included.  The goal:
ours is at most 1/8 of the naive form's, and the gradients differ by at most 1e-5, relative, in norm.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from machine import describe

TEMPERATURE = 1.2
FORMS = {"naive": "naive form", "ours": "algorithms.logprobs", "aligner": "NeMo-Aligner"}


def resident(key: str) -> int:
    """Return the bytes in a line of /proc/self/status: VmRSS is the present memory, VmHWM the peak since its reset."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return 1024 * next(int(line.split()[1]) for line in lines if line.startswith(f"{key}:"))


class Memory:
    """Peak memory in bytes since construction, beyond the memory in use at that time."""

    def __init__(self, device: str) -> None:
        import torch

        self._torch, self._cuda = torch, device == "cuda"
        if self._cuda:
            torch.cuda.synchronize()
            torch.cuda.reset_peak_memory_stats()
            self._before = torch.cuda.memory_allocated()
        else:
            Path("/proc/self/clear_refs").write_text("5")
            self._before = resident("VmRSS")

    def peak(self) -> int:
        if self._cuda:
            self._torch.cuda.synchronize()
            return int(self._torch.cuda.max_memory_allocated()) - self._before
        return resident("VmHWM") - self._before


def logprobs_of(form: str, hidden_NH: Any, weight_VH: Any, target_N: Any, chunk: int, block: int) -> Any:
    import torch

    if form == "ours":
        from nemo_prorl.algorithms.logprobs import chunked_logprobs

        words = weight_VH.shape[0]
        return chunked_logprobs(
            hidden_NH, weight_VH, target_N, TEMPERATURE, vocab_size=words, chunk=chunk, block=block
        )[0]
    logits = (hidden_NH @ weight_VH.T).float().div_(TEMPERATURE)
    if form == "naive":
        return torch.log_softmax(logits, dim=1).gather(1, target_N[:, None])[:, 0]
    from nemo_aligner.utils.distributed import from_parallel_logits_to_logprobs

    return from_parallel_logits_to_logprobs(
        logits[None], target_N[None], inference_only=False, higher_stability=True, ignore_last=False
    )[0]


def measure(form: str, args: argparse.Namespace, out: Path) -> dict[str, float]:
    import torch

    from nemo_prorl.algorithms.losses import grpo_loss
    from nemo_prorl.config import GRPOConfig

    torch.set_num_threads(args.threads)
    if form == "aligner":
        _one_rank(args.device, out)
    generator = torch.Generator().manual_seed(0)
    dtype = getattr(torch, args.dtype)

    def noise(*shape: int, scale: float) -> Any:
        values = torch.empty(shape, dtype=dtype)
        for rows in values.split(4096):  # avoids a float32 copy of all rows
            rows.copy_(torch.randn(rows.shape, generator=generator) * scale)
        return values.to(args.device).requires_grad_()

    hidden_NH = noise(args.tokens, args.hidden, scale=1.0)
    weight_VH = noise(args.words, args.hidden, scale=args.hidden**-0.5)
    target_N = torch.randint(args.words, (args.tokens,), generator=generator).to(args.device)
    advantage_B = torch.randn(1, generator=generator).to(args.device)
    mask_BT = torch.ones(1, args.tokens, dtype=torch.bool, device=args.device)
    if args.device == "cpu":  # allocates the memory of thread pools and libraries before the measurement
        small = logprobs_of(form, hidden_NH[:8], weight_VH[:8], target_N[:8] % 8, 8, 8)
        small.sum().backward()
    hidden_NH.grad = weight_VH.grad = None
    memory, began = Memory(args.device), time.monotonic()
    logp_BT = logprobs_of(form, hidden_NH, weight_VH, target_N, args.chunk, args.block)[None]
    old_BT = logp_BT.detach() + 0.05 * torch.sin(torch.arange(args.tokens, device=args.device))
    loss, _ = grpo_loss(
        logp_BT, old_BT, old_BT - 0.1, advantage_B, mask_BT, None, float(args.tokens), GRPOConfig(kl_coef=0.1)
    )
    loss.backward()
    peak, seconds = memory.peak(), time.monotonic() - began
    gradients = [hidden_NH.grad, weight_VH.grad]
    held = sum(g.numel() * g.element_size() for g in gradients)
    torch.save([g.cpu() for g in gradients], out / f"{form}.pt")
    return {"peak": peak, "beyond": peak - held, "seconds": seconds, "loss": float(loss.detach())}


def _one_rank(device: str, out: Path) -> None:
    """Set up Megatron's tensor-parallel group, which NeMo-Aligner's function needs, with this process alone."""
    import torch.distributed as dist
    from megatron.core import parallel_state

    backend = "nccl" if device == "cuda" else "gloo"
    dist.init_process_group(backend, init_method=f"file://{out}/meet", rank=0, world_size=1)
    parallel_state.initialize_model_parallel()


def differences(out: Path, form: str) -> float:
    """Return how far the gradients of `form` are from those of the naive form, as a relative distance in norm.

    There are two gradients, of the hidden states and of the weight; the larger of their distances is returned.
    """
    import torch

    wanted, found = (torch.load(out / f"{name}.pt", mmap=True) for name in ("naive", form))

    def norm(of: Any) -> float:
        return sum(float(part.double().norm()) ** 2 for part in of) ** 0.5

    def distance(a: Any, b: Any) -> float:
        pairs = zip(a.split(4096), b.split(4096), strict=True)
        return norm(x.double() - y.double() for x, y in pairs) / norm(b.split(4096))

    return max(distance(a, b) for a, b in zip(found, wanted, strict=True))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32")
    parser.add_argument("--tokens", type=int, default=3072)
    parser.add_argument("--hidden", type=int, default=1536)
    parser.add_argument("--words", type=int, default=151_936)
    parser.add_argument("--chunk", type=int, default=4096, help="tokens per chunk; default: 4096")
    parser.add_argument("--block", type=int, default=8192, help="words per block; default: 8192")
    parser.add_argument("--threads", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--forms", nargs="+", choices=FORMS, default=list(FORMS))
    parser.add_argument("--one", nargs=2, help=argparse.SUPPRESS)  # FORM FOLDER: measures in this process
    args = parser.parse_args()
    if args.one:
        found = measure(args.one[0], args, Path(args.one[1]))
        sys.stdout.write("\nRESULT " + json.dumps(found) + "\n")
        sys.stdout.flush()
        os._exit(0)
    matrix = args.tokens * args.words * 4
    sys.stdout.write(
        f"{describe()}\n\n{args.words:,} words, hidden {args.hidden:,}, {args.tokens:,} tokens, {args.dtype} on"
        f" {args.device}; float32 logits of all: {matrix / 1e9:.2f} GB; ours: {args.chunk} x {args.block} at a time\n"
        f"{'':22s} {'peak beyond inputs':>19s} {'of the naive':>13s} {'and gradients':>14s} {'of the naive':>13s}"
        f" {'seconds':>8s} {'gradients differ by':>20s}\n"
    )
    rows: dict[str, dict[str, float]] = {}
    with tempfile.TemporaryDirectory() as folder:
        for form in args.forms:
            command = [sys.executable, __file__, *sys.argv[1:], "--one", form, folder]
            output = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout
            rows[form] = row = json.loads(output.rsplit("RESULT ", 1)[1])
            compared = "naive" in rows and form != "naive"
            shares = {key: f"1/{rows['naive'][key] / row[key]:.1f}" if compared else "" for key in ("peak", "beyond")}
            differ = f"{differences(Path(folder), form):.1e}" if compared else ""
            sys.stdout.write(
                f"{FORMS[form]:22s} {row['peak'] / 1e9:16.2f} GB {shares['peak']:>13s} {row['beyond'] / 1e9:11.2f} GB"
                f" {shares['beyond']:>13s}"
                f" {row['seconds']:8.1f} {differ:>20s}\n"
            )
            sys.stdout.flush()


if __name__ == "__main__":
    main()
