"""Cost of the ledger and of stored batches: share of a step and bytes, on the laptop and at the paper's size.

    .venv/train/bin/python benchmarks/ledger.py                          trains 30 steps of the laptop's job first
    .venv/train/bin/python benchmarks/ledger.py --run runs/laptop        takes a run that is there

The paper's size is a rehearsal on this machine's CPU.  Rank 0 makes the digests of 256 x 16 responses of 2,560 tokens;
one of 32 ranks makes those of its responses and of its part of a 1.5B model's gradient, moments and weights.  Ranks on
GPUs make the latter in the GPU's memory, which was not measured.
"""

import argparse
import subprocess
import sys
import tempfile
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from checkpoint_groups import group_of, seconds
from machine import describe

from nemo_prorl.algorithms.digests import digest
from nemo_prorl.batch import JudgedGroups
from nemo_prorl.files import read_objects
from nemo_prorl.lifecycle.ledger import Ledger
from nemo_prorl.metrics import Metrics
from nemo_prorl.rollout.group_arrays import encode

ROOT = Path(__file__).resolve().parent.parent
GROUPS, SAMPLES, TOKENS, RANKS, UPDATES = 256, 16, 2560, 32, 4
WEIGHTS, LAYERS = 1_780_000_000, 28  # Qwen2 1.5B
SHIFT = 3  # first steps, which compile, are left out


def of_run(run: Path) -> list[str]:
    """Return what the ledger of a run cost."""
    lines = [
        line for line in read_objects(run / "metrics.jsonl") if line["step"] > SHIFT and "time/ledger/seconds" in line
    ]
    took, steps = sum(line["time/ledger/seconds"] for line in lines), sum(line["time/step"] for line in lines)
    written = (run / "ledger.jsonl").stat().st_size / max(1, len((run / "ledger.jsonl").read_bytes().splitlines()))
    batches = [file.stat().st_size for file in (run / "batches").glob("step-*.safetensors")]
    share, each = 100 * took / steps, sum(batches) / len(batches)
    return [
        f"laptop, {len(lines)} steps of {steps / len(lines):.2f} s:",
        f"  ledger         {1e3 * took / len(lines):6.1f} ms per step, {share:.2f} % of a step",
        f"  line           {written / 1e3:6.1f} kB per step",
        f"  stored batch   {each / 1e3:6.1f} kB",
    ]


def rehearsal(folder: Path) -> list[str]:
    """Return what the ledger and a batch cost at the paper's size, on this machine's CPU."""
    own: Any = SimpleNamespace(data_ranks=SimpleNamespace(gather=lambda value: [value]))
    layers = {f"layer {k}": k * 0x1234567 for k in range(LAYERS + 2)}
    own.digests, own.reference_sha256 = (lambda *objects: dict.fromkeys(objects, layers)), (lambda: "0" * 64)
    ledger = Ledger(folder, True, own)
    groups = [group_of(draw, SAMPLES, TOKENS) for draw in range(GROUPS)]
    judged = JudgedGroups.of(groups)
    outcomes = [(group.prompt_id, "mixed") for group in groups] * 2
    ledger.begin()
    rank0_s, _ = seconds(lambda: ledger.groups(1, groups, judged, outcomes))
    width = TOKENS + 128
    values_BT = torch.randn(GROUPS * SAMPLES // RANKS, width)
    numbers_B = torch.arange(len(values_BT))
    names = dict.fromkeys(("old_logp", "ref_logp", "weight"), values_BT)
    rows_s, _ = seconds(lambda: ledger.responses(numbers_B, **names, advantage=values_BT[:, 0]))
    every_BT = torch.zeros(GROUPS * SAMPLES, 1)
    ledger.responses(
        torch.arange(GROUPS * SAMPLES), **dict.fromkeys(("old_logp", "ref_logp", "weight", "advantage"), every_BT)
    )
    for _ in range(UPDATES):
        ledger.update(lr=2e-6, entropy_coef=0.0)
    ledger.end(Metrics(1, "none"))
    part = torch.randn(WEIGHTS // RANKS)
    part_s, _ = seconds(lambda: digest(part))
    store_s, data = seconds(lambda: encode(groups))
    tokens = GROUPS * SAMPLES * TOKENS
    line = (folder / "ledger.jsonl").stat().st_size
    updates_s = 4 * UPDATES * part_s
    together_s = rank0_s + rows_s + part_s + updates_s
    return [
        f"paper's size, {GROUPS} x {SAMPLES} responses of {TOKENS} tokens, {UPDATES} updates, {RANKS} ranks:",
        f"  rank 0, digests of the rollout           {rank0_s:6.2f} s",
        f"  a rank, digests of its {len(values_BT)} responses      {rows_s:6.2f} s",
        f"  a rank, its part of the weights          {part_s:6.2f} s",
        f"  a rank, four tensors in each update      {updates_s:6.2f} s",
        f"  together                                 {together_s:6.2f} s: 1 % of a step of {100 * together_s:.0f} s",
        f"  line of the ledger                       {line / 1e6:6.2f} MB per step",
        f"  stored batch                             {len(data) / 1e6:6.2f} MB, {len(data) / tokens:.2f} bytes a token",
        f"  in the background                        {store_s:6.2f} s per step",
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--run", type=Path, help="run directory of a laptop's run; default: train one of 30 steps")
    run = parser.parse_args().run
    sys.stdout.write(f"{describe()}\n")
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        if run is None:
            run = folder / "run"
            words = [sys.executable, "-m", "nemo_prorl.cli", "train", f"run_dir={run}", "trainer.grpo.max_steps=30"]
            with (folder / "train.log").open("w") as log:
                subprocess.run(words, cwd=ROOT, stdout=log, stderr=log, check=True)
        sys.stdout.write("\n".join([*of_run(run), *rehearsal(folder)]) + "\n")


if __name__ == "__main__":
    main()
