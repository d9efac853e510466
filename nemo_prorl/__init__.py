"""Prolonged reinforcement learning with verifiable rewards on NVIDIA's NeMo stack."""

from __future__ import annotations

from typing import TYPE_CHECKING

__version__: str
"""The version that pyproject.toml names."""

if not TYPE_CHECKING:

    def __getattr__(name: str) -> str:
        """Find `__version__` on first use: worker and sandbox processes start faster without it."""
        if name != "__version__":
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        globals()[name] = _version()
        return globals()[name]


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
