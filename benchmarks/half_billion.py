"""Trains and converts a random model of Qwen2.5-0.5B's shape on a CPU: seconds, and memory compared with the plan.

    .venv/train/bin/python benchmarks/half_billion.py                    494M parameters, 151,936 words: 24 GB, 2 cores
    .venv/train/bin/python benchmarks/half_billion.py --layers 2         166M parameters, for trying it out

Four `prorl` commands run one after the other: import-hf; train with one step (rollout, rewards, log-probabilities,
update, publication) and its checkpoint; train with one step more, which resumes; export-hf.

Memory is sampled every 0.2 s: the proportional set sizes (Pss) of all processes of a command without shared memory,
and the weights in /dev/shm.  The page cache of files on disk does not count.
"""

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from machine import describe

from nemo_prorl.files import read_objects

WORDS = 151_936
GB = 1e9


def config_of(layers: int) -> dict[str, Any]:
    """Return config.json of Qwen2.5-0.5B with `layers` layers; the original has 24."""
    return {
        "architectures": ["Qwen2ForCausalLM"],
        "model_type": "qwen2",
        "vocab_size": WORDS,
        "hidden_size": 896,
        "intermediate_size": 4864,
        "num_hidden_layers": layers,
        "num_attention_heads": 14,
        "num_key_value_heads": 2,
        "rms_norm_eps": 1e-6,
        "rope_theta": 1_000_000.0,
        "hidden_act": "silu",
        "max_position_embeddings": 32768,
        "tie_word_embeddings": True,
        "torch_dtype": "bfloat16",
        "bos_token_id": 1,
        "eos_token_id": 2,
        "pad_token_id": 0,
    }


def write_model(folder: Path, config: dict[str, Any]) -> None:
    """Write a Hugging Face folder in bf16.  As in Qwen's models, the embedding has more rows than there are words."""
    import torch
    from safetensors.torch import save_file

    from nemo_prorl.data.laptop.model import _shapes, build_tokenizer

    folder.mkdir(parents=True)
    build_tokenizer(["one two three"]).save_pretrained(folder)
    (folder / "config.json").write_text(json.dumps(config))
    draw = torch.Generator().manual_seed(0)
    weights = {}
    for name, shape in sorted(_shapes(config).items()):
        ones = name.endswith("norm.weight")
        value = torch.ones(shape) if ones else torch.empty(shape).normal_(0.0, 0.02, generator=draw)
        weights[name] = value.bfloat16()
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})


def overrides_of(folder: Path, run: Path, steps: int, args: argparse.Namespace) -> list[str]:
    keys = {
        "run_dir": str(run),
        "pretrained_checkpoint.restore_from_path": str(folder),
        "trainer.grpo.max_steps": str(steps),
        "trainer.grpo.prompts_per_step": "2",
        "trainer.grpo.samples_per_prompt": "4",
        "trainer.grpo.updates_per_step": "1",
        "trainer.grpo.context_tokens": str(args.context),
        "trainer.grpo.max_response_tokens": "24",
        "trainer.grpo.dynamic_sampling.enabled": "false",  # random weights are never right: no group would be kept
        "trainer.grpo.checkpoint_every": "1",
        "trainer.grpo.keep_checkpoints": "1",
        "trainer.grpo.keep_best": "0",
        "trainer.grpo.async_checkpoints": "false",
        "trainer.warmup.steps": "0",
        "trainer.deadlines.startup_s": "1200",
        "trainer.deadlines.rollout_s": "1200",
        "trainer.deadlines.publish_s": "600",
        "trainer.deadlines.collective_s": "1200",
        "model.micro_batch_tokens": str(2 * args.context),
        "data.validation": "[]",
        "rollout.kv_cache_mb": "64",
        "rollout.max_num_seqs": "8",
        "rollout.max_batched_tokens": str(max(512, args.context)),
    }
    return [f"{key}={value}" for key, value in keys.items()]


class Sampler:
    """Samples the bytes of a process and its descendants every 0.2 s.

    `peak` is the largest total.  At that moment `shared` bytes were weights in /dev/shm; `parts` has the bytes of each
    process.
    """

    def __init__(self, pid: int) -> None:
        self._pid, self._end = pid, threading.Event()
        self.peak, self.shared, self.parts = 0, 0, dict[str, int]()
        self._thread = threading.Thread(target=self._watch, daemon=True)
        self._thread.start()

    def _watch(self) -> None:
        while not self._end.wait(0.2):
            parts = dict(_memory_below(self._pid))
            shared = sum(f.stat().st_blocks * 512 for f in Path("/dev/shm").glob(f"prorl-{os.getuid()}-*/weights-*"))
            if sum(parts.values()) + shared > self.peak:
                self.peak, self.shared, self.parts = sum(parts.values()) + shared, shared, parts

    def stop(self) -> None:
        self._end.set()
        self._thread.join()


def _memory_below(pid: int) -> Iterator[tuple[str, int]]:
    import psutil

    try:
        processes = [psutil.Process(pid), *psutil.Process(pid).children(recursive=True)]
    except psutil.Error:
        return
    for process in processes:
        try:
            text = Path(f"/proc/{process.pid}/smaps_rollup").read_text()
            command = " ".join(process.cmdline())
        except (OSError, psutil.Error):
            continue
        values = {key: int(value) * 1024 for key, value in re.findall(r"^(Pss\w*): +(\d+) kB", text, re.MULTILINE)}
        kinds = {"rollout": "engine", "EngineCore": "engine", "nemo_prorl.rank": "trainer", "rewards": "rewards"}
        kind = next((label for word, label in kinds.items() if word in command), "other")
        yield f"{kind} {process.pid}", values.get("Pss", 0) - values.get("Pss_Shmem", 0)


def timed(words: list[str], seconds: float) -> tuple[float, Sampler]:
    """Run `prorl` with the arguments `words`, at most `seconds` long; return its seconds and memory samples.

    Raises RuntimeError, with the command's output, if the command fails.
    """
    prorl = [sys.executable, "-m", "nemo_prorl.cli", *words]
    with tempfile.TemporaryFile("w+") as output:
        began = time.monotonic()
        process = subprocess.Popen(prorl, stdout=output, stderr=subprocess.STDOUT)
        sampler = Sampler(process.pid)
        try:
            code = process.wait(seconds)
        finally:
            sampler.stop()
            if process.poll() is None:
                process.terminate()
                process.wait(120)
        if code:
            output.seek(0)
            raise RuntimeError(f"prorl {words[0]} ended with {code}:\n{output.read()[-4000:]}")
    return time.monotonic() - began, sampler


def planned(overrides: list[str]) -> dict[str, int]:
    """Return the bytes of host memory that `prorl plan` expects during training, by part."""
    plan = subprocess.run(
        [sys.executable, "-m", "nemo_prorl.cli", "plan", "--json", *overrides], check=True, stdout=subprocess.PIPE
    ).stdout
    memory = json.loads(plan)["memory"]
    return {
        "trainer": memory["trainer_peak"] + memory["reference_host"],
        "engine": memory["needed"] - memory["trainer_peak"] - memory["reserve"],
        "processes": memory["reserve"],
        "published": memory["published"],
        "snapshot": memory["snapshot_host"],
    }


def run(args: argparse.Namespace) -> Iterator[str]:
    with tempfile.TemporaryDirectory(dir=args.dir) as name:
        folder, config = Path(name), config_of(args.layers)
        write_model(folder / "hf", config)
        first, second = (overrides_of(folder / "hf", folder / "run", n, args) for n in (1, 2))
        plan = planned(first)
        whole = sum(plan.values())
        yield "the plan: " + ", ".join(f"{key} {value / GB:.2f} GB" for key, value in plan.items())
        yield f"{'':34s} {'seconds':>8s} {'peak memory':>12s}   of which"
        jobs = {
            "import-hf": ["import-hf", str(folder / "hf"), str(folder / "imported")],
            "train, one step": ["train", *first],
            "train, resumed, one step more": ["train", *second],
            "export-hf": ["export-hf", str(folder / "run"), str(folder / "exported")],
        }
        most = 0
        for label, words in jobs.items():
            seconds, sampler = timed(words, args.wait_s)
            parts = {key.split()[0]: 0 for key in sampler.parts}
            for key, value in sampler.parts.items():
                parts[key.split()[0]] += value
            of = ", ".join(f"{k} {v / GB:.2f}" for k, v in sorted(parts.items(), key=lambda kv: -kv[1]) if v > 1e7)
            yield f"{label:34s} {seconds:8.1f} {sampler.peak / GB:9.2f} GB   {of}, /dev/shm {sampler.shared / GB:.2f}"
            most = max(most, sampler.peak if words[0] == "train" else 0)
        steps = read_objects(folder / "run" / "metrics.jsonl")
        for metrics in steps:
            phases = {
                k.removeprefix("time/"): v for k, v in metrics.items() if k.startswith("time/") and k.count("/") == 1
            }
            yield f"step {metrics['step']}: " + ", ".join(f"{k} {v:.1f} s" for k, v in phases.items())
        gap = steps[-1]["engine_gap/mean_abs"]
        yield f"engine and trainer differ by {gap:.1e} a token; KL after the update {steps[-1]['kl']:.1e}"
        yield f"peak of training {most / GB:.2f} GB, the plan says {whole / GB:.2f} GB ({most / whole:.2f} of it)"
        exported = (folder / "exported" / "model.safetensors").stat().st_size
        imported = (folder / "hf" / "model.safetensors").stat().st_size
        if abs(exported - imported) > 1e6 or len(steps) != 2:
            raise RuntimeError(f"expected {imported} exported bytes and 2 steps; got {exported} and {len(steps)}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=24)
    parser.add_argument("--context", type=int, default=256)
    parser.add_argument("--dir", type=Path, help="folder for the model and the run (15 GB); default: TMPDIR")
    parser.add_argument("--wait-s", type=float, default=3600.0, help="limit of each command, in seconds")
    args = parser.parse_args()
    sys.stdout.write(describe() + "\n\n")
    for line in run(args):
        sys.stdout.write(line + "\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main()
