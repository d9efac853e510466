"""What the real CPU actor keeps for a backward pass and writes as a checkpoint; run by test_memory.py.

measure_actor.py OUT CONTEXT MICRO_BATCH      prints one JSON object
"""

import json
import os
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

CHUNK = 64


def main(out: Path, context: int, rows: int) -> None:
    torch.set_num_threads(1)
    overrides = [f"trainer.grpo.context_tokens={context}", f"model.micro_batch_size={rows}"]
    from nemo_prorl.data.laptop.model import build_base_model
    from nemo_prorl.settings import load

    cfg = load([*overrides, f"trainer.grpo.logprob_chunk_tokens={CHUNK}"])
    build_base_model(out / "model", cfg.model, 1, ["one two three", "three and four"])
    from nemo_prorl.policy.cpu import shims as cpu

    cpu.enable()
    from megatron.core.dist_checkpointing.mapping import ShardedTensor

    from nemo_prorl.batch import Batch
    from nemo_prorl.policy import checkpoint_files
    from nemo_prorl.policy.build import build_actor

    actor = build_actor(cfg, out / "model").actor
    batch = Batch.from_sequences([[5] * 8] * rows, [[7] * (context - 8)] * rows, [[-1.0] * (context - 8)] * rows)
    weights = {p.untyped_storage().data_ptr() for p in actor.module.parameters()}
    kept: dict[int, tuple[int, Tensor]] = {}  # by storage, so that two views count once; the tensor keeps it alive

    def keep(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in weights:
            kept.setdefault(storage.data_ptr(), (storage.nbytes(), tensor))
        return tensor

    def loss(logp_BT: Tensor, _: Any, micro: Batch, denominator: float) -> tuple[Tensor, dict[str, Tensor]]:
        return (logp_BT * micro.mask_BT).sum() / denominator, {}

    sizes = []
    for packed in (False, True):
        actor.limits = replace(actor.limits, packed=packed)
        kept.clear()
        with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
            actor.gradients(batch, loss, 1.0, 1.2)
        sizes.append(sum(size for size, _ in kept.values()))
    checkpoint_files.CheckpointFiles(actor).save(out / "step-000001", {"step": 1})
    place = ShardedTensor.from_rank_offsets("weight", torch.empty(2, 3, dtype=torch.bfloat16, device="meta"))
    read = checkpoint_files._to_be_read(place).data
    told = {
        "read_into": [read.device.type, str(read.dtype), *read.shape],
        "activations": sizes[0],
        "packed_activations": sizes[1],
        "megatron_parameters": sum(p.numel() for p in actor.module.parameters()),
        "checkpoint": sum(file.stat().st_size for file in (out / "step-000001").iterdir()),
    }
    (out / "measured.json").write_text(json.dumps(told))


if __name__ == "__main__":
    os.environ.update(RANK="0", LOCAL_RANK="0", WORLD_SIZE="1", LOCAL_WORLD_SIZE="1", GROUP_RANK="0")
    os.environ.setdefault("TORCHELASTIC_RUN_ID", "measure")
    main(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]))
