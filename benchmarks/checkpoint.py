"""Time that training waits for a checkpoint that is written synchronously or in the background.

    .venv/train/bin/python benchmarks/checkpoint.py                     the laptop's model, and one of 100M parameters
    .venv/train/bin/python benchmarks/checkpoint.py --models laptop --rounds 9

Rounds of the same number of updates alternate: without a checkpoint, with a synchronous checkpoint, and with a
checkpoint in the background.  The cost of a checkpoint is the extra time of its round: the seconds in `save`, and the
time that the writing thread takes from the updates that run at the same time.
"""

import argparse
import json
import math
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from machine import describe, seconds

SHAPES: dict[str, dict[str, int]] = {
    "laptop": {},
    "100M": {
        "num_layers": 12,
        "hidden_size": 768,
        "ffn_hidden_size": 3072,
        "num_attention_heads": 12,
        "num_query_groups": 4,
    },
}


@dataclass
class Job:
    """An actor, with the batch and the loss of its updates."""

    actor: Any
    batch: Any
    loss: Callable[..., Any]

    def update(self) -> None:
        self.actor.update(self.batch, self.loss, float(self.batch.mask_BT.sum()))


def build(shape: dict[str, int], folder: Path) -> Job:
    import torch

    from nemo_prorl.batch import Batch
    from nemo_prorl.config import GRPOConfig
    from nemo_prorl.data.laptop.model import build_base_model
    from nemo_prorl.policy.build import build_actor
    from nemo_prorl.settings import load
    from nemo_prorl.trainer import policy_loss

    torch.set_num_threads(os.cpu_count() or 1)
    cfg = load([f"model.{key}={value}" for key, value in shape.items()])
    build_base_model(folder, cfg.model, 0, ["one two three"])
    cfg = load([f"pretrained_checkpoint.restore_from_path={folder}"])
    actor = build_actor(cfg, folder).actor
    batch = Batch.from_sequences([[3, 4, 5]] * 8, [[3, 4, 5, 6] * 4] * 8, [[-4.0] * 16] * 8)
    logp_BT = actor.logprobs(batch)[0]
    batch = batch.with_targets(
        old_logp_BT=logp_BT,
        ref_logp_BT=logp_BT,
        advantage_B=torch.linspace(-1, 1, 8),
        weight_BT=torch.ones_like(logp_BT),
    )
    job = Job(actor, batch, partial(policy_loss, config=GRPOConfig(kl_coef=0.1)))
    for _ in range(3):
        job.update()
    return job


def measure(shape: dict[str, int], rounds: int) -> dict[str, Any]:
    """Return medians over rounds in seconds for each kind of round, and the sizes of model and checkpoint."""
    from nemo_prorl.lifecycle.retention import size_of

    with tempfile.TemporaryDirectory() as name:  # under TMPDIR
        folder = Path(name)
        job = build(shape, folder / "hf")
        from nemo_prorl.policy.checkpoint_files import CheckpointFiles

        saved = folder / "checkpoints" / "step-000001"
        writers = {way: CheckpointFiles(job.actor, way == "background", 600) for way in ("foreground", "background")}
        for writer in writers.values():  # the first round warms caches
            writer.save(saved, {"step": 1})
            writer.wait()
        update = statistics.median(seconds(job.update) for _ in range(5))
        write = seconds(lambda: writers["foreground"].save(saved, {"step": 1}))
        updates = max(4, math.ceil(1.5 * write / update))

        def window(writer: Any) -> dict[str, float]:
            began = time.monotonic()
            save = seconds(lambda: writer.save(saved, {"step": 1})) if writer is not None else 0.0
            for _ in range(updates):
                job.update()
            trained = time.monotonic() - began
            if writer is not None:
                writer.wait()
            return {"save": save, "window": trained, "until complete": time.monotonic() - began}

        found: dict[str, list[dict[str, float]]] = {"none": [], "foreground": [], "background": []}
        for _ in range(rounds):
            for way, windows in found.items():
                windows.append(window(writers.get(way)))
        size = size_of(saved)
    result: dict[str, Any] = {
        way: {key: statistics.median(w[key] for w in windows) for key in windows[0]} for way, windows in found.items()
    }
    parameters = sum(p.numel() for p in job.actor.module.parameters())
    return {**result, "update": update, "updates": updates, "bytes": size, "parameters": parameters, "rounds": rounds}


def report(name: str, found: dict[str, Any]) -> list[str]:
    none = found["none"]["window"]
    lines = [
        f"{name}: {found['parameters'] / 1e6:.1f}M parameters in float32, checkpoint of {found['bytes'] / 1e6:.0f} MB;"
        f" {found['updates']} updates a round ({none:.2f} s without a checkpoint), medians of {found['rounds']} rounds",
        f"{'checkpoint':12s} {'save() returns after':>22s} {'the round takes longer by':>27s} {'complete after':>16s}",
    ]
    for way in ("foreground", "background"):
        row = found[way]
        complete = row["save"] if way == "foreground" else row["until complete"]
        lines.append(
            f"{way:12s} {row['save']:20.3f} s {row['window'] - none:25.3f} s"
            f" {'' if way == 'foreground' else '<='}{complete:{14 if way == 'foreground' else 12}.3f} s"
        )
    ratio = found["foreground"]["save"] / found["background"]["save"]
    return [*lines, f"training waits in save() {ratio:.1f} times shorter in the background", ""]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", choices=SHAPES, default=list(SHAPES))
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--one", choices=SHAPES, help=argparse.SUPPRESS)  # Megatron builds one model per process
    args = parser.parse_args()
    if args.one:
        sys.stdout.write("\nRESULT " + json.dumps(measure(SHAPES[args.one], args.rounds)) + "\n")
        sys.stdout.flush()
        os._exit(0)
    sys.stdout.write(describe() + "\n\n")
    for name in args.models:
        command = [sys.executable, __file__, "--one", name, "--rounds", str(args.rounds)]
        output = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout
        sys.stdout.write("\n".join(report(name, json.loads(output.rsplit("RESULT ", 1)[1]))) + "\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main()
