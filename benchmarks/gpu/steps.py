"""Eight whole steps of the real training loop: `prorl train` with an engine on the same device.

The model is random and ends its responses (`real.MEAN_TOKENS`): their lengths are geometric, cut off at the context,
with the mean of the log-normal ones in benchmarks/padding.py and nearly their spread (standard deviation by mean: 1 and
1.1).  Prompts are random words, and a reward is 0 or 1 by the checksum of the response.
"""

import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from gpu import real
from gpu.common import Emit, Settings, require
from gpu.engine import ROOT, SMALL_KV_MB, require_vllm

STEPS = 8
CONTEXT = {False: 4096, True: 64}  # by Settings.small
PROMPTS, SAMPLES = {False: 16, True: 4}, {False: 16, True: 8}  # of a step; of a prompt
RECORDS = 512
REWARD = """
import zlib


def score(prompt, response, truth):
    return float(zlib.crc32(response.encode()) % 2)
"""
# Columns of a step's two rows, and their keys in metrics.jsonl.
TIMES = {
    "publish_s": "time/publish",
    "rollout_s": "time/rollout",
    "logprobs_s": "time/logprobs",
    "updates_s": "time/updates",
    "step_s": "time/step",
    "tokens": "rollout/generated_tokens",
    "decoded_per_s": "time/rollout/tokens_per_s",
}
NUMBERS = {
    "response_tokens": "rollout/response_tokens",
    "cut_off_share": "rollout/truncated",
    "mean_ratio": "engine_gap/mean_ratio",
    "generation_kl": "engine_gap/mean_k3",
    "kv_cache_peak_share": "system/engine_kv_cache_peak",
    "preemptions": "time/rollout/preemptions",
    "shapes": "system/max_shapes",
}


def run(emit: Emit, settings: Settings) -> None:
    def step(metrics: dict[str, Any]) -> None:
        what = f"step {metrics['step']}"
        emit(what, **{column: metrics.get(key, 0.0) for column, key in TIMES.items()})  # 0: nothing to train on
        emit(what, **{column: metrics.get(key) for column, key in NUMBERS.items()})

    with prepared(emit, settings) as folder:
        began = time.monotonic()
        train(folder, settings, step, f"trainer.grpo.max_steps={STEPS}")
        emit("whole command, with start and checkpoint", seconds=time.monotonic() - began)


@contextmanager
def prepared(emit: Emit, settings: Settings) -> Iterator[Path]:
    """Yield a folder with a model, prompts and a reward function.  Raises Skipped if a run cannot start here."""
    require("megatron.core", "nemo", "nemo_aligner")
    if settings.cuda:
        require("apex", "transformer_engine")  # `prorl train` refuses to start without them
    require_vllm(settings.engine_python or sys.executable)
    emit("layers", note=real.layers())
    with tempfile.TemporaryDirectory(prefix="gpu-evidence-") as name:
        folder = Path(name)
        real.write_model(folder / "model", settings, ends=True)
        (folder / "reward.py").write_text(REWARD)
        words = real.hf_config(settings)["vocab_size"] - 3
        with (folder / "prompts.jsonl").open("w") as file:
            for number in range(RECORDS):
                prompt = " ".join(f"t{3 + (number * 31 + k * k) % words}" for k in range(real.PROMPT))
                file.write(json.dumps({"id": str(number), "task": "made", "prompt": prompt, "truth": {}}) + "\n")
        yield folder


def train(folder: Path, settings: Settings, step: Callable[[dict[str, Any]], None], *overrides: str) -> str:
    """Run `prorl train` in FOLDER/run, and remove that folder; return the sha256 of the weights after the last step.

    Args:
        step: called with the metrics of each step, as soon as it ends.
    """
    run_dir = folder / "run"
    words = [f"run_dir={run_dir}", *real.overrides(settings, folder / "model"), *job(folder, settings), *overrides]
    env = {"NVIDIA_PYTORCH_VERSION": "25.01", **os.environ}  # NeMo reads it; only NVIDIA's image sets it
    command = [sys.executable, "-m", "nemo_prorl.cli", "train", *words]
    process, seen = subprocess.Popen(command, cwd=ROOT, env=env, stdout=sys.stderr), 0
    while True:
        ended = process.poll() is not None  # before the file is read, so that the last step is not missed
        metrics = run_dir / "metrics.jsonl"
        lines = metrics.read_text().rpartition("\n")[0].splitlines() if metrics.is_file() else []
        for line in lines[seen:]:
            step(json.loads(line))
        seen = len(lines)
        if ended:
            break
        time.sleep(0.5)
    if process.returncode:
        raise RuntimeError(f"prorl train ended with status {process.returncode}")
    summary = json.loads((run_dir / "summary.json").read_text())
    shutil.rmtree(run_dir)  # with a checkpoint of 28 GB
    return str(summary["weights_sha256"])


def job(folder: Path, settings: Settings) -> list[str]:
    """Return the overrides of the run, besides those of `real.overrides`."""
    small = settings.small
    words = [
        "data=laptop",  # its training data and tasks are replaced
        f"data.train=[{{name: made, path: {folder / 'prompts.jsonl'}}}]",
        "data.validation=[]",
        "data.tasks=null",
        f"rewards.functions.made={folder / 'reward.py'}:score",
        "rewards.workers=2",
        f"trainer.grpo.context_tokens={CONTEXT[small]}",
        f"trainer.grpo.prompts_per_step={PROMPTS[small]}",
        f"trainer.grpo.samples_per_prompt={SAMPLES[small]}",
        "trainer.grpo.checkpoint_every=1000",
        "trainer.grpo.save_rollout_groups=0",
        "rollout.device_memory_gb=null",
        f"rollout.python={settings.engine_python or sys.executable}",
    ]
    if not settings.cuda:
        words += [f"rollout.kv_cache_mb={SMALL_KV_MB}", "rollout.eager=true", "rollout.threads=1"]
    return words
