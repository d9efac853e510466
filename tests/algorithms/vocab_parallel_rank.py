"""One rank of `test_logprobs.test_two_ranks_equal_one`: FOLDER RANK."""

import json
import sys
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

from nemo_prorl.algorithms.logprobs import chunked_logprobs


def main(folder: Path, rank: int) -> None:
    torch.set_num_threads(1)
    settings = json.loads((folder / "settings.json").read_text())
    world = settings["world"]
    dist.init_process_group(
        "gloo", init_method=f"file://{folder}/meet", rank=rank, world_size=world, timeout=timedelta(seconds=60)
    )
    results = []
    for vocab_size, (hidden, weight, target, slope_logp, slope_entropy) in zip(
        settings["vocab_sizes"], torch.load(folder / "cases.pt"), strict=True
    ):
        rows = weight.shape[0] // world
        shard = weight[rank * rows : (rank + 1) * rows].clone().requires_grad_()
        hidden.requires_grad_()
        logp, entropy = chunked_logprobs(
            hidden,
            shard,
            target,
            settings["temperature"],
            vocab_size=vocab_size,
            vocab_start=rank * rows,
            group=dist.group.WORLD,
            chunk=settings["chunk"],
            block=settings["block"],
            with_entropy=True,
        )
        assert entropy is not None
        (slope_logp @ logp + slope_entropy @ entropy).backward()
        results.append([logp.detach(), entropy.detach(), hidden.grad, shard.grad])
    torch.save(results, folder / f"rank{rank}.pt")
    dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]))
