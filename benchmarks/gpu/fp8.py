"""FP8 by Transformer Engine in the real actor, compared with bf16: log-probabilities, updates and speed.

Each of WAYS runs in a separate process with its own actor.
"""

import tempfile
from pathlib import Path
from typing import Any

import torch

from gpu import real
from gpu.common import Emit, Settings, require, seconds_of

WAYS = {  # overrides of the configuration by name
    "bf16": [],
    "FP8 hybrid, tensorwise scales": ["model.fp8=hybrid", "model.fp8_recipe=tensorwise"],
    "FP8 hybrid, delayed scales": ["model.fp8=hybrid", "model.fp8_recipe=delayed"],
}
RESPONSES = 2


def run(emit: Emit, settings: Settings) -> None:
    require("megatron.core", "nemo", "nemo_aligner", "transformer_engine")
    emit("layers", note=real.layers())
    with tempfile.TemporaryDirectory(prefix="gpu-evidence-") as name:
        folder = real.write_model(Path(name) / "model", settings)
        base_N: torch.Tensor | None = None
        failed: list[str] = []
        for way, overrides in WAYS.items():
            found = measured(settings, folder, overrides)
            if "error" in found:
                emit(way, note=f"failed in {found['part']}: {found['error']}")
                failed.append(way)
                continue
            first_N, later_N = found.pop("first_N"), found.pop("later_N")
            base_N = first_N if base_N is None else base_N
            emit(
                way,
                mean_logp_gap=float((first_N - base_N).abs().mean()),
                largest_logp_gap=float((first_N - base_N).abs().max()),
                mean_logp_gap_after_updates=float((later_N - base_N).abs().mean()),
                **found,
            )
    if failed:
        raise RuntimeError(f"these ways of computing failed: {', '.join(failed)}")


def measured(settings: Settings, folder: Path, overrides: list[str]) -> dict[str, Any]:
    """Return the results of `measure`, or the error and the part in which it occurred."""
    try:
        return real.in_a_process(measure, settings, folder, overrides)
    except RuntimeError as error:
        return {"part": "its process", "error": str(error)}


def measure(settings: Settings, folder: Path, overrides: list[str]) -> dict[str, Any]:
    """Return log-probabilities before and after updates with advantages of 0, and seconds.

    The seconds are medians, of an update and of a pass without gradients.  If a part of the work fails, the name of the
    part and the error are returned instead.
    """
    part = "building the actor"
    try:
        actor, cfg = real.build(settings, folder, "model.optim.weight_decay=0.0", *overrides)
        batch = real.batch(settings, RESPONSES)
        batch = batch.with_targets(
            advantage_B=torch.zeros(RESPONSES)
        )  # weights do not change; the backward pass is complete
        update = real.updater(actor, cfg)
        part = "the pass without gradients"
        old_BT, _ = actor.logprobs(batch)
        batch = real.with_logprobs(batch, old_BT, old_BT)
        part = "the update after it"
        repeats = 1 if settings.small else 2
        update_s = seconds_of(lambda: update(batch), settings.device, repeats)[0]
        part = "the pass after updates"
        forward_s = seconds_of(lambda: actor.logprobs(batch), settings.device, repeats)[0]
        return {
            "first_N": old_BT[batch.mask_BT],
            "later_N": actor.logprobs(batch)[0][batch.mask_BT],
            "forward_s": forward_s,
            "update_s": update_s,
            "tokens_per_s": batch.tokens_BT.numel() / update_s,
        }
    except Exception as error:
        return {"part": part, "error": f"{type(error).__name__}: {(str(error).splitlines() or [''])[0][:300]}"}
