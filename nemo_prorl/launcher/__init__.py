"""Starting a run on this machine: the node supervisor, its progress display, and what it says at the end."""

from typing import Any

from nemo_prorl.launcher.job import run, warmup

__all__: list[Any] = ["run", "warmup"]
