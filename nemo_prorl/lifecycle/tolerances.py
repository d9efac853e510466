"""Tolerances for rounding differences of log-probabilities, by the precision of a run.

A configured value has priority; null, the default, takes the value in the tables of this module.
"""

from omegaconf import DictConfig

FLOAT32, HALF, FP8 = "float32", "16 bits", "FP8"

# Mean absolute difference per token between policy and reference with equal weights.
REFERENCE = {
    FLOAT32: 1e-5,
    # The same kernels on copies of the same numbers give the same bits, unless cuBLAS chooses another algorithm for
    # another address; then single bfloat16 roundings differ.
    HALF: 1e-4,
    FP8: 1e-3,  # the scale of a tensor depends on all rows of its micro-batch
}
# Mean absolute difference per token between engine and trainer with equal weights.
ENGINE = {
    FLOAT32: 1e-3,  # a laptop run shows 1e-6 to 1e-5; one update too many or too few shows more than 1e-3
    # cluster=laptop_bf16 shows 0.003; deep models on GPUs show more.
    HALF: 0.05,  # a mean factor of exp(0.05) = 1.05, which NeMo-RL's issue #1801 calls too large
    FP8: 0.1,  # FP8 in training with 16-bit engines: twice the value of HALF, an assumption
}

# The mean of exp(|difference|) between engine and trainer may exceed 1 by this factor times the larger of the mean
# that is allowed and the mean that is found.
# With equal differences in all tokens both limits are alike; with large ones in few tokens this one is reached first.
# In 16 bits it is 1.1; NeMo-RL stops at 1.05 (token_mult_prob_error), and bfloat16 on a CPU comes close to that.
RATIO_PER_GAP = 2.0

# The engine's temperature may differ by this share.  In 16 bits, rounding looks like less than a tenth of it.
TEMPERATURE = 0.02


def kl_after_reset(cfg: DictConfig) -> float:
    """Return the allowed mean absolute difference per token between policy and reference.

    It applies to the first step of a run and to the step after a reset.  If
    trainer.resets.kl_after_reset is set, its value is returned.
    """
    configured = cfg.trainer.resets.kl_after_reset
    return REFERENCE[_trainers(cfg)] if configured is None else float(configured)


def engine_gap_alarm(cfg: DictConfig) -> float:
    """Return the allowed mean absolute difference per token between engine and trainer.

    A step with a larger difference causes an alarm.  If trainer.grpo.correction.alarm is set, its
    value is returned.
    """
    configured, trainers = cfg.trainer.grpo.correction.alarm, _trainers(cfg)
    coarsest = HALF if trainers == FLOAT32 and cfg.rollout.dtype != "float32" else trainers
    return ENGINE[coarsest] if configured is None else float(configured)


def _trainers(cfg: DictConfig) -> str:
    if cfg.model.get("fp8"):
        return FP8
    return HALF if str(cfg.trainer.precision).split("-")[0] in ("bf16", "16") else FLOAT32
