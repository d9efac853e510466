"""Checks whether two runs of `prorl train` with the same seed and `deterministic=true` end with equal weights."""

import time

from gpu import steps
from gpu.common import Emit, Settings

OVERRIDES = ("deterministic=true", "trainer.grpo.max_steps=2", "trainer.grpo.prompts_per_step=4")


def run(emit: Emit, settings: Settings) -> None:
    with steps.prepared(emit, settings) as folder:
        for name in ("first run", "second run"):
            began = time.monotonic()
            sha256 = steps.train(folder, settings, lambda metrics: None, *OVERRIDES)
            emit(name, weights_sha256=sha256, seconds=time.monotonic() - began)
