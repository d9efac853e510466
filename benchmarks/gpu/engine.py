"""A vLLM engine that shares the device: how long it takes to sleep, to wake and to take new weights, and what it frees.

Talks to `nemo_prorl.rollout.server` over HTTP, as a run does.  The model is random; greedy answers before and after
must be the same.
"""

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from gpu.common import Emit, Settings, Skipped
from gpu.publication import shapes
from nemo_prorl.rollout.publication import WeightStore

ROOT = Path(__file__).resolve().parents[2]
TOKEN = "a-token-of-this-measurement"
START_S, CALL_S = 130.0, 60.0
PROMPT = [3 + 7 * i % 500 for i in range(64)]


def write_model(folder: Path, settings: Settings) -> Path:
    """A Hugging Face folder of a random Qwen2, written by the trainer's own writer of safetensors; its weights file."""
    sizes = dict(shapes(settings.small))
    words, hidden = sizes["model.embed_tokens.weight"]
    config = {
        "architectures": ["Qwen2ForCausalLM"],
        "model_type": "qwen2",
        "vocab_size": words,
        "hidden_size": hidden,
        "intermediate_size": sizes["model.layers.0.mlp.gate_proj.weight"][0],
        "num_hidden_layers": sum(name.endswith("mlp.gate_proj.weight") for name in sizes),
        "num_attention_heads": 2 if settings.small else 12,
        "num_key_value_heads": 1 if settings.small else 2,
        "max_position_embeddings": 32768,
        "rms_norm_eps": 1e-6,
        "rope_theta": 1e6,
        "hidden_act": "silu",
        "tie_word_embeddings": True,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "torch_dtype": str(settings.dtype).removeprefix("torch."),
    }
    generator = torch.Generator().manual_seed(1)

    def value(name: str, shape: tuple[int, ...]) -> torch.Tensor:
        return torch.ones(shape) if "norm" in name else 0.02 * torch.randn(shape, generator=generator)

    store = WeightStore(folder / "weights")
    path = store.write(((name, value(name, shape).to(settings.dtype)) for name, shape in sizes.items()), 1)
    (folder / "model").mkdir()
    (folder / "model" / "config.json").write_text(json.dumps(config))
    os.link(path, folder / "model" / "model.safetensors")
    return path


@contextmanager
def server(python: str, folder: Path, settings: Settings) -> Iterator[str]:
    """The address of a running engine."""
    token, endpoint = folder / "token", folder / "engine-0.json"
    token.touch(mode=0o600)
    token.write_text(TOKEN)
    options = {
        "model": folder / "model",
        "token-file": token,
        "weights-dir": folder / "weights",
        "endpoint-file": endpoint,
        "parent-pid": os.getpid(),
        "dtype": str(settings.dtype).removeprefix("torch."),
        "max-model-len": 512 if settings.small else 8192,
        "kv-mb": 64 if settings.small else 20_000,
        "memory-share": 0.5,
    }
    command = [python, str(ROOT / "nemo_prorl" / "rollout" / "server.py"), "--sleep", "--eager"]
    command += [f"--{name}={value}" for name, value in options.items()]
    process = subprocess.Popen(command, start_new_session=True, stdout=sys.stderr)
    try:
        end = time.monotonic() + START_S
        while not endpoint.exists():
            if process.poll() is not None or time.monotonic() > end:
                raise RuntimeError(f"the engine is not ready after {START_S:g} s; status {process.poll()}")
            time.sleep(0.1)
        yield json.loads(endpoint.read_text())["url"]
    finally:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def call(url: str, path: str, body: Any) -> tuple[Any, float]:
    """The answer's lines as JSON, and seconds."""
    request = urllib.request.Request(
        url + path, json.dumps(body).encode(), {"Authorization": f"Bearer {TOKEN}", "Content-Type": "application/json"}
    )
    began = time.perf_counter()
    with urllib.request.urlopen(request, timeout=CALL_S) as reply:
        lines = [json.loads(line) for line in reply.read().splitlines() if line.strip()]
    return lines, time.perf_counter() - began


def answers(url: str) -> list[int]:
    body = {"prompt": PROMPT, "temperature": 0.0, "max_tokens": 32, "stop_token_ids": []}
    return list(call(url, "/generate", body)[0][0]["token_ids"])


def require_vllm(python: str) -> None:
    """Raises Skipped where that Python has no vLLM."""
    probe = subprocess.run([python, "-c", "import vllm"], capture_output=True, text=True, check=False)
    if probe.returncode:
        last = (probe.stderr.strip().splitlines() or ["no message"])[-1]
        raise Skipped(f"{python} cannot import vllm ({last})")


def run(emit: Emit, settings: Settings) -> None:
    python = settings.engine_python or sys.executable
    require_vllm(python)
    base = "/dev/shm" if Path("/dev/shm").is_dir() else None
    with tempfile.TemporaryDirectory(dir=base, prefix="gpu-evidence-") as name:
        folder = Path(name)
        weights = write_model(folder, settings)
        began = time.perf_counter()
        with server(python, folder, settings) as url:
            emit("start to ready", seconds=time.perf_counter() - began)
            before = answers(url)
            version = 1
            for level in (1, 2, 2):
                version = naps(emit, url, level, version, weights, before, settings)
            for _ in range(2):
                version += 1
                _, seconds = call(url, "/weights", {"path": str(weights), "version": version, "wait_s": 10})
                emit("weights loaded, awake", seconds=seconds, same_answers=answers(url) == before)


def naps(emit: Emit, url: str, level: int, version: int, weights: Path, before: list[int], settings: Settings) -> int:
    """One sleep and wake; the version of the weights after it."""
    (said,), seconds = call(url, "/sleep", {"level": level, "wait_s": 10})
    if not said["frees_memory"]:
        emit(f"sleep, level {level}", note="a CPU's engine keeps its memory; times are those of the protocol alone")
    emit(f"sleep, level {level}", seconds=seconds, freed_bytes=said["freed_bytes"])
    if settings.cuda:  # what was freed can be had
        taken = torch.empty(int(0.9 * said["freed_bytes"]), dtype=torch.uint8, device="cuda").fill_(1)
        emit(f"taken by the trainer in its sleep, level {level}", taken_bytes=taken.numel())
        del taken
        torch.cuda.empty_cache()
    _, seconds = call(url, "/wake", {"parts": ["weights"]})
    emit(f"wake of the weights, level {level}", seconds=seconds)
    if level == 2:
        version += 1
        _, seconds = call(url, "/weights", {"path": str(weights), "version": version, "wait_s": 10})
        emit("weights loaded, KV cache asleep", seconds=seconds)
    _, seconds = call(url, "/wake", {"parts": ["kv_cache"]})
    emit(f"wake of the KV cache, level {level}", seconds=seconds, same_answers=answers(url) == before)
    return version
