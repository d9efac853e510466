"""Environment variables of `deterministic=true` on GPUs.

Libraries read them when they are imported or open a device, so that a process must be started with them.
"""

import os

from omegaconf import DictConfig

_RANKS = {
    "NVTE_ALLOW_NONDETERMINISTIC_ALGO": "0",  # Transformer Engine: no attention backward that adds up atomically
    "CUBLAS_WORKSPACE_CONFIG": ":4096:8",  # cuBLAS: one order of additions, whatever streams do
    "NCCL_ALGO": "^NVLS",  # no reduction inside of the switch, as Megatron's deterministic mode wants it
}
_ENGINES = {"VLLM_BATCH_INVARIANT": "1"}  # a response does not depend on what else is in the batch
_YIELDS = ("NCCL_ALGO",)  # a site may know a better one


def variables_of_ranks(cfg: DictConfig) -> dict[str, str]:
    """Return what the trainer ranks of a run are started with; nothing unless it is deterministic and on GPUs."""
    return _chosen(cfg, _RANKS)


def variables_of_engines(cfg: DictConfig) -> dict[str, str]:
    """Return what the rollout engines of a run are started with; nothing unless it is deterministic and on GPUs."""
    return _chosen(cfg, _ENGINES)


def _chosen(cfg: DictConfig, values: dict[str, str]) -> dict[str, str]:
    if not cfg.deterministic or cfg.trainer.accelerator != "gpu":
        return {}
    theirs = {**dict(cfg.launch.env), **os.environ}
    return {name: value for name, value in values.items() if name not in _YIELDS or name not in theirs}
