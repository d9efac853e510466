"""Environment variables for `deterministic=true` on GPUs.

Libraries read these variables on import or when they open a device, so a process must be started with them.
"""

import os

from omegaconf import DictConfig

_RANKS = {
    "NVTE_ALLOW_NONDETERMINISTIC_ALGO": "0",  # Transformer Engine: no attention backward with atomic additions
    "CUBLAS_WORKSPACE_CONFIG": ":4096:8",  # cuBLAS: the same order of additions with any streams
    "NCCL_ALGO": "^NVLS",  # no reduction in the NVLink switch; Megatron's deterministic mode requires this
}
_ENGINES = {"VLLM_BATCH_INVARIANT": "1"}  # a response does not depend on what else is in the batch
_YIELDS = ("NCCL_ALGO",)  # a value that the site has set takes precedence


def variables_of_ranks(cfg: DictConfig) -> dict[str, str]:
    """Return the environment variables that make trainer ranks deterministic.

    Empty unless the run is deterministic and on GPUs.
    """
    return _chosen(cfg, _RANKS)


def variables_of_engines(cfg: DictConfig) -> dict[str, str]:
    """Return the environment variables that make rollout engines deterministic.

    Empty unless the run is deterministic and on GPUs.
    """
    return _chosen(cfg, _ENGINES)


def _chosen(cfg: DictConfig, values: dict[str, str]) -> dict[str, str]:
    if not cfg.deterministic or cfg.trainer.accelerator != "gpu":
        return {}
    site = {**dict(cfg.launch.env), **os.environ}
    return {name: value for name, value in values.items() if name not in _YIELDS or name not in site}
