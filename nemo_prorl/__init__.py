"""Prolonged reinforcement learning with verifiable rewards on NVIDIA's NeMo stack."""

from __future__ import annotations

import warnings
from typing import TYPE_CHECKING

warnings.filterwarnings("ignore", message="The pynvml package is deprecated")  # torch, where NeMo's pynvml is installed

__version__: str
"""The version that pyproject.toml names."""

if TYPE_CHECKING:
    from nemo_prorl.api import Run, evaluate, load_run, train

__all__ = ["Run", "__version__", "evaluate", "load_run", "train"]

if not TYPE_CHECKING:

    def __getattr__(name: str) -> object:
        """Find the API and `__version__` on first use: worker and sandbox processes start faster without them."""
        if name == "__version__":
            globals()[name] = _version()
        elif name in __all__:
            import importlib

            globals()[name] = getattr(importlib.import_module("nemo_prorl.api"), name)
        else:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        return globals()[name]

    def __dir__() -> list[str]:
        return sorted(__all__)


def _version() -> str:
    """Return the version in the checkout's pyproject.toml, or that of the installed distribution outside a checkout.

    A checkout comes first because it may run without being installed, or beside an older installed version.
    """
    import importlib.metadata
    import tomllib
    from pathlib import Path

    file = Path(__file__).resolve().parent.parent / "pyproject.toml"
    project = tomllib.loads(file.read_text()).get("project", {}) if file.is_file() else {}
    return str(project["version"]) if project.get("name") == "nemo-prorl" else importlib.metadata.version("nemo-prorl")
