"""A vLLM engine beside a resident trainer, in the memory that the plan gives the engine.

Measures whether the engine starts, sleeps, wakes, loads new weights and starts again, how long each takes, and how many
bytes are free.  Uses `rollout/engine/server.py` over HTTP, as a run does.  The model is random; greedy answers
before and after each sleep or load are compared.  A plain tensor of the planned size stands in for the trainer.
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
from safetensors.torch import load_file

from gpu import Skipped, real
from gpu.common import Emit, Settings
from nemo_prorl.rollout.weights import WeightStore

ROOT = Path(__file__).resolve().parents[2]
TOKEN = "a-token-of-this-measurement"
START_S, CALL_S = 130.0, 60.0
PROMPT = [3 + 7 * i % 500 for i in range(64)]
SMALL_KV_MB = 64


@contextmanager
def server(python: str, folder: Path, settings: Settings, *options: str) -> Iterator[str]:
    """Run an engine for FOLDER/model that loads weights from FOLDER/weights; yield its address."""
    token, endpoint = folder / "token", folder / "engine-0.json"
    token.touch(mode=0o600)
    token.write_text(TOKEN)
    endpoint.unlink(missing_ok=True)
    command = [python, str(ROOT / "nemo_prorl" / "rollout" / "engine" / "server.py"), "--sleep", "--eager"]
    command += [
        f"--model={folder / 'model'}",
        f"--token-file={token}",
        f"--weights-dir={folder / 'weights'}",
        f"--endpoint-file={endpoint}",
        f"--parent-pid={os.getpid()}",
        "--dtype=bfloat16",
        f"--max-model-len={512 if settings.small else 8192}",
        *options,
    ]
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
    """Send `body` as JSON; return the decoded JSON lines of the reply, and the seconds of the call."""
    request = urllib.request.Request(
        url + path, json.dumps(body).encode(), {"Authorization": f"Bearer {TOKEN}", "Content-Type": "application/json"}
    )
    began = time.perf_counter()
    with urllib.request.urlopen(request, timeout=CALL_S) as reply:
        lines = [json.loads(line) for line in reply.read().splitlines() if line.strip()]
    return lines, time.perf_counter() - began


def answers(url: str) -> list[int]:
    body = {"prompt": PROMPT, "seeds": [0], "temperature": 0.0, "max_tokens": 32, "stop_token_ids": []}
    return list(call(url, "/generate", body)[0][0]["token_ids"])


def require_vllm(python: str) -> None:
    """Raise Skipped if the Python at `python` cannot import vLLM."""
    probe = subprocess.run([python, "-c", "import vllm"], capture_output=True, text=True, check=False)
    if probe.returncode:
        last = (probe.stderr.strip().splitlines() or ["no message"])[-1]
        raise Skipped(f"{python} cannot import vllm ({last})")


def plan(settings: Settings, folder: Path) -> tuple[int, list[str]]:
    """Plan a run on 32 GPUs with the model in `folder`; return how trainer and engine share a GPU's memory.

    Returns:
        (bytes that the trainer keeps on a GPU while the engines run, options of the engine's command)
    """
    if not settings.cuda:
        return 0, [f"--kv-mb={SMALL_KV_MB}"]
    from nemo_prorl.sizing.memory import memory_of

    cfg = real.config(settings, folder, "trainer.num_nodes=4", "trainer.devices=8", "rollout.engines=32")
    size = torch.cuda.mem_get_info()[1]
    memory = memory_of(cfg)
    room = memory.kv_room(size)
    return memory.trainer_resident, [f"--kv-mb={(room or 0) >> 20}"]


def run(emit: Emit, settings: Settings) -> None:
    python = settings.engine_python or sys.executable
    require_vllm(python)
    base = "/dev/shm" if Path("/dev/shm").is_dir() else None
    with tempfile.TemporaryDirectory(dir=base, prefix="gpu-evidence-") as name:
        folder = Path(name)
        real.write_model(folder / "model", settings)
        tensors = load_file(folder / "model" / "model.safetensors")
        weights = WeightStore(folder / "weights").write(tensors.items(), 1)
        resident, options = plan(settings, folder)
        trainer = torch.zeros(resident, dtype=torch.uint8, device=settings.device)
        emit("resident trainer", size_bytes=trainer.numel(), note="plain tensors of the plan's size")
        emit("engine's options", note=" ".join(options))
        for start in ("first", "second"):  # like a start after a crash, next to the resident trainer
            free(emit, f"before the {start} start", settings)
            began = time.perf_counter()
            with server(python, folder, settings, "--float32-head", *options) as url:
                emit(f"{start} start to ready", seconds=time.perf_counter() - began)
                free(emit, f"engine awake, {start} start", settings)
                if start == "second":
                    work(emit, url, weights, settings)


def free(emit: Emit, when: str, settings: Settings) -> None:
    if settings.cuda:
        left, whole = torch.cuda.mem_get_info()
        emit(when, free_bytes=left, used_bytes=whole - left)


def work(emit: Emit, url: str, weights: Path, settings: Settings) -> None:
    before = answers(url)
    version = 1
    for level in (1, 2, 2):
        version = naps(emit, url, level, version, weights, before, settings)
    for _ in range(2):
        version += 1
        _, seconds = call(url, "/weights", {"path": str(weights), "version": version, "wait_s": 10})
        emit("weights loaded, awake", seconds=seconds, same_answers=answers(url) == before)


def naps(emit: Emit, url: str, level: int, version: int, weights: Path, before: list[int], settings: Settings) -> int:
    """Measure one sleep and wake of the engine; return the version of its weights afterwards.

    Args:
        level: vLLM's sleep level; 2 discards the weights, so that `weights` are loaded again.
        version: version of the engine's weights before the sleep.
        weights: file of the weights.
        before: token ids of a greedy answer before any sleep; the answer after the wake is compared with it.
    """
    (reply,), seconds = call(url, "/sleep", {"level": level, "wait_s": 10})
    if not reply["frees_memory"]:
        emit(f"sleep, level {level}", note="a CPU's engine keeps its memory; times are those of the protocol alone")
    emit(f"sleep, level {level}", seconds=seconds, freed_bytes=reply["freed_bytes"])
    free(emit, f"asleep, level {level}", settings)
    if settings.cuda:  # allocate the freed memory
        taken = torch.empty(int(0.9 * reply["freed_bytes"]), dtype=torch.uint8, device="cuda").fill_(1)
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
