"""Measures 16-bit ranks for `ranks.py`: weights in bf16; masters, moments and gradients in float32."""

from functools import partial
from pathlib import Path
from typing import Any

import torch

from nemo_prorl.config import GRPOConfig, WarmupConfig
from nemo_prorl.lifecycle.warmup import warm_up
from nemo_prorl.policy.weights import HFFolder
from nemo_prorl.trainer import policy_loss
from tests.policy.gradients import whole_gradients
from tests.policy.ranks import Layout, config_of, fixed_batch, rows_of_rank

LAYOUTS = [
    Layout(),
    Layout(tp=2),
    Layout(tp=2, sp=True),
    Layout("llama_tied", pp=2),
    Layout(dp=2, micro_batch=18, tokens=64, packed=True),
]
SLOW = [Layout(tp=2)]  # the next has its tensor ranks, too
LOSS = GRPOConfig(kl_coef=0.1, entropy_coef=0.01)
DENOMINATOR = 99.0


def measure(layout: Layout, out: Path) -> None:
    """Rank 0 writes OUT/half-NAME.pt: the gradient, and how a checkpoint and a hard reset go on."""
    import torch.distributed as dist

    from nemo_prorl.policy import checkpoint_files
    from nemo_prorl.policy.build import build_actor

    torch.set_num_threads(1)
    folder = HFFolder(out / f"half-{layout.model}")
    cfg = config_of(layout, folder.path, "trainer.precision=bf16", "model.megatron_amp_O2=true")
    actor = build_actor(cfg, folder.path).actor
    batch = fixed_batch()
    mine, loss = batch.rows(rows_of_rank(len(batch), actor)), partial(policy_loss, config=LOSS)

    def update() -> list[Any]:
        return [actor.update(mine, loss, DENOMINATOR, with_entropy=True), actor.weights_sha256()]

    found: dict[str, Any] = {"exported": {k: v.clone() for k, v in actor.export_weights()}}
    found["logp"], found["entropy"] = actor.logprobs(batch)
    found["sums"] = actor.gradients(mine, loss, DENOMINATOR, 1.2, with_entropy=True)
    found["gradients"] = whole_gradients(actor)
    (leaf,) = actor._leaf_optimizers()
    masters = [p for group in leaf.optimizer.param_groups for p in group["params"]]
    found["dtypes"] = {p.dtype for p in actor.module.parameters()}, {p.dtype for p in masters}

    update()
    saved = out / "checkpoints" / f"half-{layout.name}"
    for moment in ("resumed", "reset"):
        if moment == "reset":
            actor.set_reference()
            actor.reset_optimizer()
            found["kl"] = float((actor.reference_logprobs(batch) - actor.logprobs(batch)[0]).abs().max())
        checkpoint_files.CheckpointFiles(actor).save(written := saved.with_name(f"{saved.name}-{moment}"), {"step": 1})
        onward = update()
        checkpoint_files.CheckpointFiles(actor).load(written)
        found[moment] = (onward, update())
    beyond = [not torch.equal(p, p.bfloat16().float()) for p in masters]
    warm_up(actor, [([3, 4, 5], [6, 2])] * 4, WarmupConfig(steps=1, batch_size=4), 1e-3)
    found["masters"] = any(beyond), all(torch.equal(p, p.bfloat16().float()) for p in masters)
    if dist.get_rank() == 0:
        torch.save(found, out / f"half-{layout.name}.pt")
