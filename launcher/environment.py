"""The environment variables of a run's processes.

All processes get writable folders for caches.  Engines do not get the variables of the trainer's ranks.

In a container the home folder is often read-only, missing or `/`, and the user may have no name.
"""

import os
import pwd
from collections.abc import Mapping

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
    # compilers of the image's CUDA
    *("CUDA_HOME", "CUDA_PATH", "TRITON_CUDA", "TRITON_CUOBJDUMP", "TRITON_CUPTI", "TRITON_NVDISASM", "TRITON_PTXAS"),
)


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


def for_engine(environ: Mapping[str, str]) -> dict[str, str]:
    """Return `environ` without the variables of trainer ranks, torch, NCCL and CUDA compilers, and PYTHONPATH."""
    return {name: value for name, value in environ.items() if not name.startswith(_NOT_AN_ENGINES)}
