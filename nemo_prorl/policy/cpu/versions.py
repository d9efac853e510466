"""Check that torch and Megatron-Core have the versions for which kernels.py's linear layers and SwiGLU were made.

Both replace functions inside Megatron-Core, and the linear layers call a private operator of torch.  With other
versions Megatron-Core keeps its own functions, which are slower on a CPU.
"""

import functools
import importlib.metadata
import logging

_log = logging.getLogger(__name__)

MADE_FOR = {"torch": "2.13.0", "megatron-core": "0.12.3"}


@functools.cache
def fits_installed_versions() -> bool:
    """Return whether torch and Megatron-Core have the versions in `MADE_FOR`; log one warning otherwise."""
    installed = {name: importlib.metadata.version(name).split("+")[0] for name in MADE_FOR}
    if installed != MADE_FOR:
        _log.warning(
            "%s are installed; the faster linear layers and SwiGLU were made for %s and are off: training on a CPU is"
            " slower",
            _as_text(installed),
            _as_text(MADE_FOR),
        )
    return installed == MADE_FOR


def _as_text(versions: dict[str, str]) -> str:
    return " and ".join(f"{name} {version}" for name, version in versions.items())
