"""The environment variables of a run's processes.

All processes get writable folders for caches.  Engines do not get the variables of the trainer's ranks.

In a container the home folder is often read-only, missing or `/`, and the user may have no name.
"""

import os
import pwd
from collections.abc import Mapping
from pathlib import Path

from omegaconf import DictConfig, OmegaConf

from nemo_prorl.caches import cache_folder

# Subfolder for the compiled code of each library.  Values that the user or launch.env sets take precedence.
_CACHES = {
    "XDG_CACHE_HOME": "",
    "XDG_CONFIG_HOME": "config",
    "CUDA_CACHE_PATH": "cuda",
    "FLASHINFER_WORKSPACE_BASE": "",
    "MPLCONFIGDIR": "matplotlib",
    "TORCHINDUCTOR_CACHE_DIR": "inductor",
    "TRITON_CACHE_DIR": "triton",
    "TVM_FFI_CACHE_DIR": "tvm-ffi",
    "VLLM_CACHE_ROOT": "vllm",
}
# Beginnings of warnings that libraries give about each other and that a user of this project cannot change.
_QUIET = (
    "The pynvml package is deprecated",  # torch, where NeMo's pynvml is installed
    "`torch.distributed.reduce_op` is deprecated",  # vLLM
)
# An engine is not a rank, and uses its own torch and NCCL.  NVIDIA's image and the hooks of enroot set these variables
# for the image's torch: MASTER_ADDR, RANK, NCCL_*, PYTHONPATH, TORCH_ALLOW_TF32_CUBLAS_OVERRIDE (float32 products in
# 19 bits).
_NOT_AN_ENGINES = (
    *("GROUP_", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_", "NCCL_", "PYTHONPATH", "PYTORCH_", "RANK"),
    *("ROLE_", "TORCHELASTIC_", "TORCH_", "WORLD_SIZE"),
    "CUDA_DEVICE_MAX_CONNECTIONS",  # 1 orders the trainer's kernels; an engine copies beside its kernels
    # compilers of the image's CUDA
    *("CUDA_HOME", "CUDA_PATH", "TRITON_CUDA", "TRITON_CUOBJDUMP", "TRITON_CUPTI", "TRITON_NVDISASM", "TRITON_PTXAS"),
)
# Libraries read these variables on import or when they open a device, so a process must be started with them.
_DETERMINISTIC_RANKS = {
    "NVTE_ALLOW_NONDETERMINISTIC_ALGO": "0",  # Transformer Engine: no attention backward with atomic additions
    "CUBLAS_WORKSPACE_CONFIG": ":4096:8",  # cuBLAS: the same order of additions with any streams
}
# No reduction in the NVLink switch, as Megatron's deterministic mode requires.  A value of the site takes precedence.
_NO_NVLS = "^NVLS"
_DETERMINISTIC_ENGINES = {"VLLM_BATCH_INVARIANT": "1"}  # a response does not depend on what else is in the batch

CUDA_COMPAT = "PRORL_CUDA_COMPAT"  # variable: folder with NVIDIA's forward-compatibility libraries; the image sets it


def with_caches(environ: Mapping[str, str]) -> dict[str, str]:
    """Return `environ` with the variables of all caches, and USER and HOME if the user has no passwd entry.

    The variables also silence the Python warnings in `_QUIET`.  Values in `environ` take precedence.
    """
    folder = cache_folder(environ)
    values = {name: str(folder / below) for name, below in _CACHES.items()}
    try:
        pwd.getpwuid(os.getuid())
    except KeyError:
        user = f"uid{os.getuid()}"
        values |= {"USER": user, "LOGNAME": user, "HOME": str(folder)}
        if environ.get("HOME") == "/":  # Docker's, for a user without an entry
            environ = {name: value for name, value in environ.items() if name != "HOME"}
    quiet = [*(f"ignore:{message}:FutureWarning" for message in _QUIET), environ.get("PYTHONWARNINGS")]
    return {**values, **environ, "PYTHONWARNINGS": ",".join(filter(None, quiet))}


def rank_variables(cfg: DictConfig) -> dict[str, str]:
    """Return the variables that trainer ranks on GPUs need for tensor parallelism and for `deterministic=true`.

    Megatron's tensor parallel layers rely on kernels and collectives that start in the order of their calls.
    """
    if cfg.trainer.accelerator != "gpu":
        return {}
    ordered = OmegaConf.select(cfg, "model.tensor_model_parallel_size", default=1) > 1
    site = {**dict(cfg.launch.env), **os.environ}
    return {
        **({"CUDA_DEVICE_MAX_CONNECTIONS": "1"} if ordered else {}),
        **(_DETERMINISTIC_RANKS if cfg.deterministic else {}),
        **({"NCCL_ALGO": site.get("NCCL_ALGO", _NO_NVLS)} if cfg.deterministic else {}),
    }


def engine_variables(cfg: DictConfig) -> dict[str, str]:
    """Return the variables that engines on GPUs need for `deterministic=true`."""
    return _DETERMINISTIC_ENGINES if cfg.deterministic and cfg.trainer.accelerator == "gpu" else {}


def for_engine(environ: Mapping[str, str]) -> dict[str, str]:
    """Return `environ` without the variables of trainer ranks, torch, NCCL and CUDA compilers, and PYTHONPATH.

    LD_LIBRARY_PATH loses its folders of Python packages: NVIDIA's image names the libraries of its own torch there.
    """
    kept = {name: value for name, value in environ.items() if not name.startswith(_NOT_AN_ENGINES)}
    if folders := kept.get("LD_LIBRARY_PATH"):
        ours = (folder for folder in folders.split(os.pathsep) if "-packages/" not in folder)
        kept["LD_LIBRARY_PATH"] = os.pathsep.join(ours)
    return kept


def engine_libraries(
    cfg: DictConfig, environ: Mapping[str, str], driver: str | None
) -> tuple[Path | None, dict[str, str]]:
    """Return the folder of NVIDIA's forward-compatibility libraries and the variable with which an engine uses it.

    The folder (PRORL_CUDA_COMPAT) has the part of a newer driver that a process loads: libcuda.so.1.  With a driver of
    the same or a newer branch CUDA refuses it (error 803).  vLLM's own variable for such a folder
    (VLLM_CUDA_COMPATIBILITY_PATH) does not suffice: vLLM changes LD_LIBRARY_PATH in a running process, where the
    dynamic linker has read it already.

    Args:
        environ: variables of the process that starts the engine.
        driver: version of the node's driver, such as 550.54.15; None: unknown.

    Returns:
        (None, {}) if there are no such libraries or the driver does not need them.
    """
    environ = {**dict(cfg.launch.env), **for_engine(environ)}
    folder = Path(environ.get(CUDA_COMPAT) or "/nowhere")
    try:
        library = (folder / "libcuda.so.1").resolve(strict=True).name  # such as libcuda.so.580.95.05
    except OSError:
        return None, {}
    if driver is None or not 0 < _branch(driver) < _branch(library.removeprefix("libcuda.so.")):
        return None, {}
    folders = filter(None, (str(folder), environ.get("LD_LIBRARY_PATH")))
    return folder, {"LD_LIBRARY_PATH": os.pathsep.join(folders)}


def _branch(version: str) -> int:
    """Return the branch of a driver's version, which is its first number; 0 if there is none."""
    first = version.split(".")[0]
    return int(first) if first.isdigit() else 0
