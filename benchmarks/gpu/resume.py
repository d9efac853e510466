"""Whether a training that goes on from a checkpoint equals an undisturbed one to the bit.

The real actor makes two updates, is saved, and makes two more.  Another process loads the checkpoint and makes the last
two.  Both compute as in a run with `deterministic=true`.
"""

import tempfile
from pathlib import Path
from typing import Any

from gpu import real
from gpu.common import Emit, Settings, require

RESPONSES, UPDATES = 4, 2


def run(emit: Emit, settings: Settings) -> None:
    require("megatron.core", "nemo", "nemo_aligner")
    emit("layers", note=real.layers())
    with tempfile.TemporaryDirectory(prefix="gpu-evidence-") as name:
        folder, saved = real.write_model(Path(name) / "model", settings), Path(name) / "step-000001"
        for what, work in {"undisturbed": undisturbed, "resumed in a new process": resumed}.items():
            emit(what, **real.in_a_process(work, settings, folder, saved))


def undisturbed(settings: Settings, folder: Path, saved: Path) -> dict[str, Any]:
    """Make the updates before and after the checkpoint `saved`; return what the later ones led to."""
    from nemo_prorl.policy.checkpoint_files import CheckpointFiles

    actor, cfg = real.build(settings, folder, "deterministic=true")
    updates(settings, actor, cfg)
    CheckpointFiles(actor).save(saved, {"step": 1})
    return updates(settings, actor, cfg)


def resumed(settings: Settings, folder: Path, saved: Path) -> dict[str, Any]:
    """Make the updates after the checkpoint `saved`; return what they led to."""
    from nemo_prorl.policy.checkpoint_files import CheckpointFiles

    actor, cfg = real.build(settings, folder, "deterministic=true")
    CheckpointFiles(actor).load(saved)
    return updates(settings, actor, cfg)


def updates(settings: Settings, actor: Any, cfg: Any) -> dict[str, Any]:
    """Make a step's updates; return the norm of the last gradient, and the sha256 of the weights."""
    batch, update = real.batch(settings, RESPONSES), real.updater(actor, cfg)
    batch = real.with_logprobs(batch, actor.logprobs(batch)[0], actor.reference_logprobs(batch))
    norms = [update(batch)["grad_norm"] for _ in range(UPDATES)]
    return {"gradient_norm": norms[-1], "weights_sha256": actor.weights_sha256()}
