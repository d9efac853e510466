"""Sampling kernels of vLLM's GPU path (Model Runner V2), run on a CPU by Triton's interpreter.

    python3.11 setup/environments.py --only triton                makes .venv/triton (0.7 GB, under a minute); first
    .venv/train/bin/python benchmarks/sampler_v2.py               all checks (minutes); exits 1 if one of them fails

GPU engines sample with Triton kernels, whose random numbers depend on seed, position and token.  Engines on a CPU use
another sampler, so no test of an engine runs these kernels.  Here vLLM's own `Sampler` is built and called, from the
sources in the wheel for CPUs, with the parameters that this project uses: a seed for each response, temperature 1.2,
`logprobs=0` and processed log-probabilities.  Expected values are computed from the logits in float64.

What this does not show: the compiled kernels, and the model runner around the sampler.
"""

import argparse
import math
import os
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from machine import describe

ROOT = Path(__file__).resolve().parent.parent
ROLLOUT = ROOT / ".venv" / "rollout" / "bin" / "python"
TRITON = ROOT / ".venv" / "triton" / "lib" / "python3.11" / "site-packages"
VOCABULARY = 32  # tokens of the distributions whose frequencies are counted
TEMPERATURE, TOP_P = 1.2, 0.9
CLOSE = 1e-5  # largest difference of a log-probability
SM = 132  # multiprocessors of an H100
EDGE = 1e-4  # largest error of a sum of probabilities in float32
RARE = 0.001  # a check fails if its chi-square is less probable than this


class Index(int):
    """An index of a loop in a kernel.  A kernel may cast it; Triton's interpreter gives it a plain int."""

    def to(self, _: Any) -> "Index":
        return self


def kernels() -> Any:
    """Return torch, after vLLM's modules have got the real Triton, and buffers that are not pinned.

    vLLM replaces Triton by an empty module if it finds no GPU, and takes a CPU for a device with pinned memory.
    """
    import torch
    import triton
    import triton.language
    import vllm.triton_utils as utils
    from triton.runtime import interpreter

    interpreter.range = lambda *limits: map(Index, range(*limits))
    utils.triton, utils.tl, utils.HAS_TRITON = triton, triton.language, True
    from vllm.v1.worker.gpu import buffer_utils

    buffer_utils.is_uva_available = lambda: False
    return torch


class Draws:
    """vLLM's sampler with one request slot for each row.

    Args:
        seeds: seed of each request slot.
    """

    def __init__(self, seeds: Sequence[int], vocabulary: int, temperature: float, top_p: float = 1.0) -> None:
        self.torch = torch = kernels()
        from vllm import SamplingParams
        from vllm.v1.worker.gpu.sample.sampler import Sampler
        from vllm.v1.worker.gpu.states import RequestState

        count, device = len(seeds), torch.device("cpu")
        states = RequestState(count, 8, 8, 0, vocabulary, device, use_dense_all_token_ids=True)
        config: Any = SimpleNamespace(reasoning_config=None)  # all that the constructor reads of the configuration
        self.sampler = Sampler(config, count, vocabulary, device, states, logprobs_mode="processed_logprobs")
        for slot, seed in enumerate(seeds):
            params = SamplingParams(temperature=temperature, top_p=top_p, seed=seed, logprobs=0)
            self.sampler.add_request(slot, params)
        self.sampler.apply_staged_writes()

    def at(self, logit_RV: Any, positions: Sequence[int], slots: Sequence[int] | None = None) -> tuple[Any, Any]:
        """Sample a token for each row; return tokens and log-probabilities, both (R,).

        Args:
            logit_RV: logits, which stay unchanged.
            positions: position of each row's token in its response.
            slots: request slot of each row; None: row 0 is slot 0, and so on.
        """
        torch, rows = self.torch, len(positions)
        slot_R = torch.arange(rows) if slots is None else torch.tensor(slots)
        ones_R = torch.ones(rows, dtype=torch.int32)
        batch: Any = SimpleNamespace(
            num_reqs=rows,
            expanded_idx_mapping=slot_R.int(),
            idx_mapping=slot_R.int(),
            idx_mapping_np=slot_R.numpy(),
            cu_num_logits=torch.arange(rows + 1, dtype=torch.int32),
            cu_num_logits_np=torch.arange(rows + 1).numpy(),
            expanded_local_pos=torch.zeros(rows, dtype=torch.int32),
            positions=torch.tensor(positions),
            logits_indices=torch.arange(rows),
            input_ids=torch.zeros(rows, dtype=torch.int32),
            seq_lens=ones_R,
            seq_lens_cpu_upper_bound=ones_R,
        )
        out = self.sampler(logit_RV.clone(), batch)
        assert out.logprobs_tensors.logprobs.shape == (rows, 1)
        token_R = out.sampled_token_ids[:, 0]
        assert torch.equal(out.logprobs_tensors.logprob_token_ids[:, 0], token_R)
        return token_R, out.logprobs_tensors.logprobs[:, 0]


def expected(logit_V: Any, temperature: float, top_p: float = 1.0) -> Any:
    """Return the probabilities (V,) in float64: softmax(logits / temperature) over the tokens that top_p keeps.

    top_p keeps the most probable tokens up to and including the one with which their sum reaches top_p.
    """
    prob_V = (logit_V.double() / temperature).softmax(0)
    sorted_V, token_V = prob_V.sort(descending=True)
    before_V = sorted_V.cumsum(0) - sorted_V
    kept_V = (before_V < top_p).double()[token_V.argsort()]
    return prob_V * kept_V / (prob_V * kept_V).sum()


def chi_square(tokens: Any, prob_V: Any) -> tuple[float, int, float]:
    """Return chi-square of drawn tokens, its degrees of freedom, and how probable a larger one is.

    Tokens that are expected less than five times are counted together.
    """
    count_V = tokens.bincount(minlength=len(prob_V)).double()
    expected_V = prob_V * len(tokens)
    often = expected_V >= 5
    seen = [*count_V[often].tolist(), float(count_V[~often].sum())]
    wanted = [*expected_V[often].tolist(), float(expected_V[~often].sum())]
    pairs = [(s, w) for s, w in zip(seen, wanted, strict=True) if w > 0]
    value, degrees = sum((s - w) ** 2 / w for s, w in pairs), len(pairs) - 1
    # Wilson and Hilferty: the cube root of chi-square per degree is nearly normal
    spread = 2 / (9 * degrees)
    z = ((value / degrees) ** (1 / 3) - (1 - spread)) / math.sqrt(spread)
    return value, degrees, 0.5 * math.erfc(z / math.sqrt(2))


class Report:
    """The lines of the output, and whether all checks have passed."""

    def __init__(self) -> None:
        self.passed, self._began = True, time.monotonic()

    def line(self, name: str, text: str, passed: bool) -> None:
        self.passed &= passed
        seconds = time.monotonic() - self._began
        self._began = time.monotonic()
        sys.stdout.write(f"{'pass' if passed else 'FAIL'}  {name:<24} {text} ({seconds:.0f} s)\n")
        sys.stdout.flush()

    def frequencies(self, name: str, token_R: Any, logprob_R: Any, prob_V: Any) -> None:
        """Compare tokens with their probabilities, and log-probabilities with the logarithms of these."""
        value, degrees, chance = chi_square(token_R, prob_V)
        outside = int((prob_V[token_R] == 0).sum())
        error = float((logprob_R.double() - prob_V.log()[token_R]).abs().max())
        text = f"{len(token_R)} draws: chi-square {value:.1f} of {degrees} degrees, {chance:.3f} are larger;"
        text += f" {outside} tokens outside; log-probabilities within {error:.1e}"
        self.line(name, text, chance > RARE and outside == 0 and error < CLOSE)


def kept_of(report: Report, name: str, mask: Callable[..., Any], logit_RV: Any) -> None:
    """Compare the tokens that a mask of vLLM keeps with those that top_p should keep.

    The kernels sum in float32, so a token may count as kept or not if the sum before it equals top_p but for rounding.
    """
    torch, wrong, distance = kernels(), 0, 0.0
    kept_RV = mask(logit_RV.clone(), None, logit_RV.new_full((len(logit_RV),), TOP_P)) > -math.inf
    for kept_V, logit_V in zip(kept_RV, logit_RV, strict=True):
        prob_V = logit_V.double().softmax(0)
        before_V = (prob_V[None] * (logit_V[None] > logit_V[:, None])).sum(1)
        other_V = kept_V != (before_V < TOP_P)
        wrong += int(other_V.sum())
        distance = max(distance, float(torch.where(other_V, (before_V - TOP_P).abs(), 0.0).max()))
    text = f"{int(kept_RV.sum())} tokens of {kept_RV.numel()} kept; {wrong} others than in float64, at most"
    report.line(name, f"{text} {distance:.1e} of probability from {TOP_P}", distance < EDGE)


def check(rows: int) -> bool:
    """Run all checks with so many draws each; return whether all passed."""
    torch = kernels()
    from vllm.v1.sample.ops.topk_topp_sampler import apply_top_k_top_p
    from vllm.v1.sample.ops.topk_topp_triton import _apply_topp_split

    from nemo_prorl.rollout.endpoints import response_seed

    def split(logit_RV: Any, _: None, top_p_R: Any) -> Any:
        """Mask logits as for at most 64 rows on a GPU; a CPU does not choose this way itself."""
        _apply_topp_split(logit_RV, None, top_p_R, float("-inf"), SM)
        return logit_RV

    report = Report()
    generator = torch.Generator().manual_seed(1)
    logit_V = 1.5 * torch.randn(VOCABULARY, generator=generator)
    logit_RV, prob_V = logit_V.repeat(rows, 1), expected(logit_V, TEMPERATURE)
    seeds = [response_seed(1, "prompt", 0, sample) for sample in range(rows)]

    draws = Draws(seeds, VOCABULARY, TEMPERATURE)
    token_R, logprob_R = draws.at(logit_RV, [7] * rows)
    report.frequencies("seeds of the project", token_R, logprob_R, prob_V)

    few = list(range(rows - 1, -1, -max(1, rows // 25)))
    again_R, same_R = draws.at(logit_RV[: len(few)], [7] * len(few), few)
    equal = bool(torch.equal(again_R, token_R[few]) and torch.equal(same_R, logprob_R[few]))
    report.line("another batch", f"{len(few)} requests in other rows draw the same tokens: {equal}", equal)

    one = Draws([seeds[0]] * rows, VOCABULARY, TEMPERATURE)
    token_R, logprob_R = one.at(logit_RV, range(rows))
    report.frequencies("positions of one seed", token_R, logprob_R, prob_V)
    repeated, chance = float((token_R[1:] == token_R[:-1]).double().mean()), float((prob_V**2).sum())
    spread = math.sqrt(chance * (1 - chance) / (rows - 1))
    text = f"successive draws equal in {repeated:.3f}; independent ones in {chance:.3f} +- {spread:.3f}"
    report.line("independence", text, abs(repeated - chance) < 4 * spread)

    token_R, logprob_R = Draws(range(rows), VOCABULARY, TEMPERATURE).at(logit_RV, [0] * rows)
    report.frequencies("seeds 0, 1, 2, ...", token_R, logprob_R, prob_V)

    token_R, logprob_R = Draws(seeds, VOCABULARY, TEMPERATURE, TOP_P).at(logit_RV, [7] * rows)
    report.frequencies(f"top_p {TOP_P}", token_R, logprob_R, expected(logit_V, TEMPERATURE, TOP_P))

    for name, mask in (("top_p, large batches", apply_top_k_top_p), ("top_p, small batches", split)):
        kept_of(report, name, mask, 1.5 * torch.randn(2, 3000, generator=generator))

    large_RV = 2 * torch.randn(2, 151_936, generator=generator)
    token_R, logprob_R = Draws(seeds[:2], 151_936, TEMPERATURE).at(large_RV, [7, 8])
    wanted_R = (large_RV.double() / TEMPERATURE).log_softmax(1).gather(1, token_R[:, None])[:, 0]
    error = float((logprob_R.double() - wanted_R).abs().max())
    report.line("151,936 tokens", f"log-probabilities within {error:.1e}", error < CLOSE)
    return report.passed


def main() -> int:
    parser = argparse.ArgumentParser(description="Check the sampling kernels of vLLM's GPU path on a CPU.")
    parser.add_argument("--rows", type=int, default=400, help="draws of each check, at least 25; default: 400")
    parser.add_argument("--inside", action="store_true", help=argparse.SUPPRESS)  # in the rollout environment
    args = parser.parse_args()
    if args.inside:
        return 0 if check(args.rows) else 1
    for path, fix in ((ROLLOUT, "make setup"), (TRITON, "python3.11 setup/environments.py --only triton")):
        if not path.exists():
            raise SystemExit(f"{path} does not exist. Fix: {fix}")
    variables = {"PYTHONPATH": f"{ROOT}{os.pathsep}{TRITON}", "TRITON_INTERPRET": "1", "VLLM_LOGGING_LEVEL": "ERROR"}
    sys.stdout.write(f"{describe()}\n")
    sys.stdout.flush()
    command = [str(ROLLOUT), __file__, "--inside", "--rows", str(args.rows)]
    return subprocess.run(command, env={**os.environ, **variables, "VLLM_NO_USAGE_STATS": "1"}, check=False).returncode


if __name__ == "__main__":
    sys.exit(main())
