"""Runs a step of the real actor in the Python that starts this script.  See rehearse.py.

python -m tests.container.actor_step float32|bf16_o2
"""

from __future__ import annotations

import sys
import tempfile
from functools import partial
from pathlib import Path

KINDS = {"float32": [], "bf16_o2": ["trainer.precision=bf16", "model.megatron_amp_O2=true"]}


def step(out: Path, overrides: list[str]) -> None:
    """Build the actor; compute log-probabilities; update; save a checkpoint and load it."""
    import torch

    from nemo_prorl.algorithms.losses import denominator_terms
    from nemo_prorl.config import GRPOConfig
    from nemo_prorl.policy import build, checkpoint_files
    from nemo_prorl.policy.weights import HFFolder
    from nemo_prorl.trainer import policy_loss
    from tests.policy import models, ranks

    models.write_model(out / "qwen2", models.QWEN2)
    folder = HFFolder(out / "qwen2")
    actor = build.build_actor(ranks.config_of(ranks.Layout(), folder.path, *overrides), folder.path).actor
    batch = ranks.fixed_batch()
    logp_BT = actor.logprobs(batch)[0]
    share = float(denominator_terms(batch.mask_BT, "token"))
    stats = actor.update(batch, partial(policy_loss, config=GRPOConfig(kl_coef=0.1)), share)
    checkpoint_files.CheckpointFiles(actor).save(out / "step-000001", {"step": 1})
    checkpoint_files.CheckpointFiles(actor).load(out / "step-000001")
    dtype = next(actor.module.parameters()).dtype
    say = f"weights {dtype}, mean logp {float(logp_BT[batch.mask_BT].mean()):.4f}, grad norm {stats['grad_norm']:.4f}"
    print(f"actor: torch {torch.__version__}, {say}, checkpoint saved and loaded")  # noqa: T201


def main() -> None:
    import torch

    from nemo_prorl.policy.cpu import shims as cpu

    torch.set_num_threads(1)
    cpu.enable()
    import nemo_prorl.policy.build
    import nemo_prorl.policy.checkpoint_files  # noqa: F401
    from tests.policy.ranks import fork_ranks

    with tempfile.TemporaryDirectory() as folder:
        fork_ranks(1, partial(step, Path(folder), KINDS[sys.argv[1]]), Path(folder, "rank"), 240)
        print(Path(folder, "rank.0.log").read_text())  # noqa: T201


if __name__ == "__main__":
    main()
