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
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors.torch import load_file

from gpu import Skipped, real
from gpu.common import Emit, Settings
from nemo_prorl.rollout.weight_store import WeightStore
from nemo_prorl.sizing.phases import ASLEEP, AWAKE, LOADING, phase_bytes

if TYPE_CHECKING:
    from nemo_prorl.sizing.memory import Memory

ROOT = Path(__file__).resolve().parents[2]
TOKEN = "a-token-of-this-measurement"
START_S, CALL_S = 130.0, 60.0
PROMPT = [3 + 7 * i % 500 for i in range(64)]
SMALL_KV_MB = 64
PLANNED_GPU = 84 * 10**9  # bytes of an H100
ENDPOINT = "engine-0.json"


@contextmanager
def server(python: str, folder: Path, settings: Settings, *options: str) -> Iterator[str]:
    """Run an engine for FOLDER/model that loads weights from FOLDER/weights; yield its address."""
    token, endpoint = folder / "token", folder / ENDPOINT
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


@dataclass(frozen=True)
class Place:
    """A folder with a model and its published weights, and the plan of a GPU that a trainer and an engine share."""

    python: str  # with vLLM
    folder: Path  # contains model/ and weights/
    weights: Path  # the published file
    memory: "Memory"
    device_bytes: int  # of the GPU; on a CPU those of PLANNED_GPU
    device: str
    options: list[str]  # of the engine's command

    def free_bytes(self) -> int | None:
        """Return the free bytes of the GPU; None on a CPU."""
        return int(torch.cuda.mem_get_info()[0]) if self.device == "cuda" else None


@contextmanager
def beside_a_trainer(emit: Emit, settings: Settings) -> Iterator[Place]:
    """Prepare an engine of a run on 32 GPUs; a plain tensor takes the trainer's planned memory meanwhile.

    Raises Skipped if there is no vLLM.
    """
    python = settings.engine_python or sys.executable
    require_vllm(python)
    base = "/dev/shm" if Path("/dev/shm").is_dir() else None
    with tempfile.TemporaryDirectory(dir=base, prefix="gpu-evidence-") as name:
        folder = Path(name)
        real.write_model(folder / "model", settings)
        tensors = load_file(folder / "model" / "model.safetensors")
        weights = WeightStore(folder / "weights").write(tensors.items(), 1)
        size = torch.cuda.mem_get_info()[1] if settings.cuda else PLANNED_GPU
        memory, kv_mb = plan(folder / "model", size)
        trainer = torch.zeros(memory.trainer_resident, dtype=torch.uint8, device=settings.device)
        emit("resident trainer", size_bytes=trainer.numel(), note="plain tensors of the plan's size")
        options = [f"--kv-mb={kv_mb if settings.cuda else SMALL_KV_MB}", "--float32-head"]
        emit("engine's options", note=f"{' '.join(options)}; planned for {size / 1e9:.1f} GB: --kv-mb={kv_mb}")
        yield Place(python, folder, weights, memory, size, settings.device, options)


def plan(model: Path, device_bytes: int) -> "tuple[Memory, int]":
    """Plan `cluster=h100_4x8` with this model and GPU; return the memory of a GPU, and the MiB of its KV cache."""
    from nemo_prorl.settings import load
    from nemo_prorl.sizing.memory import memory_of

    cluster = ["cluster=h100_4x8", f"pretrained_checkpoint.restore_from_path={model}"]
    cluster += [f"rollout.device_memory_gb={device_bytes / 1e9}"]
    kv_mb = (memory_of(load(cluster)).kv_room(device_bytes) or 0) >> 20
    return memory_of(load([*cluster, f"rollout.kv_cache_mb={kv_mb}"])), kv_mb


def run(emit: Emit, settings: Settings) -> None:
    with beside_a_trainer(emit, settings) as place:
        for start in ("first", "second"):  # like a start after a crash, next to the resident trainer
            free(emit, place, f"before the {start} start")
            began = time.perf_counter()
            with server(place.python, place.folder, settings, *place.options) as url:
                emit(f"{start} start to ready", seconds=time.perf_counter() - began)
                free(emit, place, f"{start} start", AWAKE)
                if start == "second":
                    work(emit, url, place)


def free(emit: Emit, place: Place, when: str, phase: str | None = None) -> None:
    """Emit the free bytes of the GPU and, if `when` is in a phase of a step, those that the plan leaves."""
    found = {"free_bytes": place.free_bytes()}
    if phase is not None:
        found["planned_free_bytes"] = place.device_bytes - phase_bytes(place.memory)[phase]
    emit(when if phase is None else f"{when}: {phase}", **found)


def work(emit: Emit, url: str, place: Place) -> None:
    before, version = answers(url), 1
    for number, level in enumerate((1, 2, 2), start=1):
        name = f"sleep {number}, level {level}"
        version += 1
        found = nap(url, place, level, version, partial(free, emit, place, name))
        emit(name, **found, same_answers=answers(url) == before)
    for _ in range(2):
        version += 1
        seconds = load(url, place, version)
        emit("weights loaded, awake", seconds=seconds, same_answers=answers(url) == before)


def load(url: str, place: Place, version: int) -> float:
    """Load the weights as `version`; return the seconds."""
    return call(url, "/weights", {"path": str(place.weights), "version": version, "wait_s": 10})[1]


def nap(url: str, place: Place, level: int, version: int, look: Callable[[str], None]) -> dict[str, Any]:
    """Let the engine sleep while the trainer takes the memory of its work, and wake it.

    Args:
        level: vLLM's sleep level; 2 discards the weights, so that they are loaded again.
        version: version of the weights that are loaded.
        look: called with each phase of a step (nemo_prorl.sizing.phases) while the GPU is in it.

    Returns:
        Seconds of each call, and the bytes that the sleep freed: 0 on a CPU, whose engine keeps its memory.
    """
    (reply,), sleep_s = call(url, "/sleep", {"level": level, "wait_s": 10})
    taken = place.memory.trainer_peak - place.memory.trainer_resident
    trainer = torch.zeros(taken, dtype=torch.uint8, device=place.device)
    look(ASLEEP)
    del trainer
    torch.cuda.empty_cache()
    _, wake_s = call(url, "/wake", {"parts": ["weights"]})
    load_s = load(url, place, version) if level == 2 else None
    look(LOADING)
    _, cache_s = call(url, "/wake", {"parts": ["kv_cache"]})
    look(AWAKE)
    return {
        "sleep_s": sleep_s,
        "wake_s": wake_s,
        "load_s": load_s,
        "cache_s": cache_s,
        "freed_bytes": reply["freed_bytes"],
    }
