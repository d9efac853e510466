"""Estimated seconds of a step on GPUs, from the peaks of an H100 SXM and stated assumptions.  Not measured.  No torch.

Decoding reads an engine's weights and the KV cache of all running sequences once for each token, at `BANDWIDTH_SHARE`
of the bandwidth, or computes at `FLOPS_SHARE` of the peak if that takes longer.  Each token also takes `TOKEN_S`, and
`SEQUENCE_S` for each running sequence.  All responses of an engine that fit start at once, and the others follow as
these end; then fewer and fewer run, until the longest response has ended.  Training takes two passes for
log-probabilities and an update, at `FLOPS_SHARE` of the peak.

The times per token and sequence, and the lengths, are those that benchmarks/simulate.py assumes for Qwen2 1.5B.
Validation, checkpoints, padding, prompts' prefill and restarts do not count.
"""

from dataclasses import dataclass

from omegaconf import DictConfig

from nemo_prorl.config import num_ranks, responses_per_step
from nemo_prorl.sizing.flops import PEAKS, update_flops
from nemo_prorl.sizing.memory import Memory, ModelShape, vocabulary

FLOPS = PEAKS["NVIDIA H100 80GB HBM3"]
BANDWIDTH = 3.35e12  # bytes per second, by NVIDIA's datasheet of the H100 SXM
BANDWIDTH_SHARE, FLOPS_SHARE = 0.8, 0.4
TOKEN_S, SEQUENCE_S = 3.1e-3, 1.2e-5
OTHER_S = 3.0  # publication of the weights, and the rest of a step
PROMPT_TOKENS = 300  # of an average prompt
# benchmarks/results/simulate-2026-11-23.txt, 8,192 tokens: 24.8 million tokens in 460 groups of 16, of which 256 are
# trained on.
MEAN_SHARE = 0.41  # mean response, of the longest that is possible
DRAWN = 1.8  # responses generated for each one trained on, with dynamic sampling
_PIECES = 200  # of the longest response, in the sum over the end of a rollout


@dataclass(frozen=True)
class StepTime:
    """The estimated seconds of a step.  With `apart`, engines with separate GPUs generate while the trainer works."""

    rollout_s: float
    training_s: float
    responses: float  # that one engine generates
    running: float  # of these, at the same time
    apart: bool

    @property
    def seconds(self) -> float:
        parts = (self.rollout_s, self.training_s)
        return OTHER_S + (max(parts) if self.apart else sum(parts))


def longest_response(cfg: DictConfig) -> int:
    """Return the tokens of the longest response that the configuration allows."""
    grpo = cfg.trainer.grpo
    return int(min(grpo.context_tokens - 1, grpo.max_response_tokens or grpo.context_tokens))


def step_time(
    cfg: DictConfig, memory: Memory, device_bytes: float | None, mean_tokens: float, per_trained: float
) -> StepTime:
    """Return the estimated time of a step.

    Of all responses, the share (1 - x / longest) ** power is longer than x tokens, with the power that gives the mean.

    Args:
        mean_tokens: mean length of a response.
        per_trained: responses generated for each one trained on.
    """
    grpo, rollout, longest = cfg.trainer.grpo, cfg.rollout, longest_response(cfg)
    shape = ModelShape.of(cfg.model, vocabulary(cfg)[0])
    mean = min(mean_tokens, longest)
    power = longest / mean - 1
    trained = responses_per_step(cfg)
    cached = memory.kv_sequence / grpo.context_tokens  # bytes of a token in the KV cache of one rank of an engine
    generated = trained * per_trained / rollout.engines
    room = memory.kv_room(device_bytes)
    fit = rollout.max_num_seqs if room is None else room / cached / (PROMPT_TOKENS + mean)
    running = min(generated, rollout.max_num_seqs, fit)

    def token_s(sequences: float, tokens: float) -> float:
        """Return the seconds in which `sequences` with `tokens` tokens each in the cache get one more token."""
        read = (memory.engine_weights + sequences * tokens * cached) / (BANDWIDTH * BANDWIDTH_SHARE)
        computed = sequences * update_flops(shape, 1, 0) / 3 / rollout.tensor_parallel_size / (FLOPS * FLOPS_SHARE)
        return max(read, computed) + TOKEN_S + SEQUENCE_S * sequences

    full = token_s(running, PROMPT_TOKENS + longest / (power + 2)) / running  # mean age of a sequence that still runs
    piece = longest / _PIECES
    ages = [(number + 0.5) * piece for number in range(_PIECES)]
    end = sum(piece * token_s(running * (1 - age / longest) ** power, PROMPT_TOKENS + age) for age in ages)
    squares = PROMPT_TOKENS**2 + 2 * PROMPT_TOKENS * mean + 2 * longest**2 / ((power + 1) * (power + 2))
    recomputes = cfg.model.get("activations_checkpoint_granularity") == "full"
    # An update counts three forward passes, and one more with recomputation; policy and reference have one each before.
    passes = 1 + (2 + recomputes) / 3
    operations = passes * update_flops(shape, trained * (PROMPT_TOKENS + mean), trained * squares)
    return StepTime(
        rollout_s=(generated - running) * mean * full + end,
        training_s=operations / (num_ranks(cfg) * FLOPS * FLOPS_SHARE),
        responses=generated,
        running=running,
        apart=bool(rollout.own_devices),
    )
