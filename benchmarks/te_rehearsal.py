"""Rehearses the GPU cluster's configurations, made small, on two CPU ranks; Transformer Engine and apex are stand-ins.

    .venv/train/bin/python benchmarks/te_rehearsal.py [--out runs/te_rehearsal] [--clusters h100_4x8,h100_4x8_fp8]

tests/te_stand_in computes what Transformer Engine and apex would.  For each cluster file: a model is imported; run1
begins from it, with a vLLM engine, and is killed within its hard reset; the same command continues run1; run2 begins
from run1 with a hard reset; the policy of run2 is exported and hashed.  This tests how the parts fit together, not
their speed.
"""

import argparse
import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from machine import describe

from nemo_prorl.files import read_objects
from nemo_prorl.lifecycle.killpoints import VARIABLE

ROOT = Path(__file__).resolve().parent.parent
MODEL = [
    *("model.num_layers=2", "model.hidden_size=128", "model.ffn_hidden_size=384", "model.num_attention_heads=4"),
    *("model.num_query_groups=2", "model.make_vocab_size_divisible_by=128", "model.max_position_embeddings=2048"),
]
SMALL = [
    "data=laptop",
    "data.tasks=null",  # the laptop's data lacks tasks that stages name
    *[f"data.{part}.{k}.size={size}" for part, size in (("train", 300), ("validation", 16)) for k in range(5)],
    "trainer.grpo.prompts_per_step=8",
    "trainer.grpo.context_tokens=64",
    "trainer.grpo.max_response_tokens=16",
    "rollout.max_num_seqs=64",
    "rollout.max_batched_tokens=4096",
    "rollout.kv_cache_mb=128",
]
SHRUNK = [
    "trainer.accelerator=cpu",
    "trainer.num_nodes=1",
    "trainer.devices=2",
    "rollout.engines=1",
    "rollout.threads=1",
    "rollout.eager=true",
    "rewards.workers=1",
    "trainer.grpo.checkpoint_every=2",
    "trainer.grpo.validate_every=2",
    "trainer.grpo.validation_samples=1",
    "trainer.resets.at_steps=[2]",
    "trainer.deadlines.startup_s=900",
]


def prorl(log: Path, *words: object, kill_at: str | None = None, expect: int = 0) -> float:
    """Run `prorl` with its output in `log`; return its seconds.  Raises SystemExit if its status is not `expect`."""
    env = {**os.environ, "PYTHONPATH": f"{ROOT}:{ROOT / 'tests' / 'te_stand_in'}", "OMP_NUM_THREADS": "1"}
    env |= {VARIABLE: kill_at} if kill_at else {}
    command, began = [sys.executable, "-m", "nemo_prorl.cli", *map(str, words)], time.monotonic()
    with log.open("a") as f:
        code = subprocess.run(command, cwd=ROOT, env=env, stdout=f, stderr=subprocess.STDOUT, check=False).returncode
    if code != expect:
        raise SystemExit(f"{' '.join(map(str, words[:3]))}: expected exit status {expect}, got {code}; see {log}")
    return time.monotonic() - began


def make_model(out: Path) -> Path:
    """Make a small model in bf16 that has learnt a little, so that rewards differ; return its folder."""
    import torch

    from nemo_prorl.policy.weights import HFFolder, write_hf_folder

    warm = [*MODEL, *SMALL, "trainer.warmup.steps=60"]
    prorl(out / "warmup.log", "warmup", "cluster=laptop", f"run_dir={out / 'warm'}", *warm)
    folder = HFFolder(out / "warm" / "base")
    write_hf_folder(out / "model", folder.tensors(), folder.path, torch.bfloat16)
    config = json.loads((out / "model" / "config.json").read_text())
    config.pop("dtype", None)
    (out / "model" / "config.json").write_text(json.dumps(config | {"torch_dtype": "bfloat16"}))
    return out / "model"


def rehearse(cluster: str, model: Path, out: Path) -> Iterator[str]:
    from nemo_prorl.policy.weights import HFFolder, sha256_of

    out.mkdir(parents=True)
    imported, exported, runs = out / "imported", out / "exported", {n: out / n for n in ("run1", "run2")}
    path = f"pretrained_checkpoint.restore_from_path={model}"

    def train(stage: str, start: Path, *overrides: str, **options: Any) -> float:
        words = [f"cluster={cluster}", f"stage={stage}", f"run_dir={runs[stage]}", f"chain.start_from={start}", path]
        return prorl(out / f"{stage}.log", "train", *words, *MODEL, *SMALL, *SHRUNK, *overrides, **options)

    yield f"import-hf: {prorl(out / 'import.log', 'import-hf', model, imported):.0f} s"
    first = "trainer.grpo.max_steps=3"
    seconds = train("run1", imported, first, kill_at="reset:checkpointed", expect=1)
    yield f"run1, killed within its hard reset after step 2: {seconds:.0f} s"
    yield f"run1, the same command again: {train('run1', imported, first):.0f} s"
    yield f"run2, from run1 with a hard reset: {train('run2', runs['run1'], 'trainer.grpo.max_steps=2'):.0f} s"
    yield f"export-hf: {prorl(out / 'export.log', 'export-hf', runs['run2'], exported):.0f} s"
    for name, run in runs.items():
        events = [event["event"] for event in read_objects(run / "journal.jsonl")]
        yield f"{name}'s journal: {' '.join(events)}"
        for metrics in read_objects(run / "metrics.jsonl"):
            keys = ("reward/all", "kl", "policy/loss", "policy/grad_norm", "engine_gap/mean_abs")
            yield f"  step {metrics['step']}: " + ", ".join(f"{key} {metrics[key]:.3g}" for key in keys)
    wanted = json.loads((runs["run2"] / "summary.json").read_text())["weights_sha256"]
    same = sha256_of(HFFolder(exported).tensors()) == wanted
    yield f"the exported weights are run2's last, by sha256: {same}"
    changed = sha256_of(HFFolder(exported).tensors()) != sha256_of(HFFolder(model).tensors())
    yield f"and not those that were imported: {changed}"
    if not (same and changed):
        raise SystemExit("not what was expected")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--out", type=Path, default=ROOT / "runs" / "te_rehearsal", help="output folder; deleted first")
    text = "names of files in conf/cluster, comma-separated; default: %(default)s"
    parser.add_argument("--clusters", default="h100_4x8,h100_4x8_fp8", help=text)
    args = parser.parse_args()
    out = args.out.resolve()
    shutil.rmtree(out, ignore_errors=True)
    out.mkdir(parents=True)
    print(describe())  # noqa: T201
    model = make_model(out)
    for cluster in args.clusters.split(","):
        print(f"cluster={cluster}, {' '.join(SHRUNK)}", flush=True)  # noqa: T201
        for line in rehearse(cluster, model, out / cluster):
            print("  " + line, flush=True)  # noqa: T201


if __name__ == "__main__":
    main()
