"""Time to publish a model's weights through /dev/shm, compared with a plain copy of as many bytes in the same run."""

import os
import shutil
import statistics
import tempfile
import time
from pathlib import Path

import torch

from gpu import Skipped
from gpu.common import Emit, Settings, synchronize
from nemo_prorl.rollout.weight_store import WeightStore

REPEATS = 5
ROOM = 3  # times the model's size: two versions and the copy


def shapes(small: bool) -> list[tuple[str, tuple[int, ...]]]:
    """Return names and shapes of the tensors of DeepSeek-R1-Distill-Qwen-1.5B (untied), or of a tiny Qwen2."""
    layers, hidden, ffn, kv, words = (2, 64, 128, 32, 512) if small else (28, 1536, 8960, 256, 151_936)
    found: list[tuple[str, tuple[int, ...]]] = [("model.embed_tokens.weight", (words, hidden))]
    for layer in range(layers):
        parts = {
            "self_attn.q_proj.weight": (hidden, hidden),
            "self_attn.q_proj.bias": (hidden,),
            "self_attn.k_proj.weight": (kv, hidden),
            "self_attn.k_proj.bias": (kv,),
            "self_attn.v_proj.weight": (kv, hidden),
            "self_attn.v_proj.bias": (kv,),
            "self_attn.o_proj.weight": (hidden, hidden),
            "mlp.gate_proj.weight": (ffn, hidden),
            "mlp.up_proj.weight": (ffn, hidden),
            "mlp.down_proj.weight": (hidden, ffn),
            "input_layernorm.weight": (hidden,),
            "post_attention_layernorm.weight": (hidden,),
        }
        found += [(f"model.layers.{layer}.{name}", shape) for name, shape in parts.items()]
    return [*found, ("model.norm.weight", (hidden,)), ("lm_head.weight", (words, hidden))]


def run(emit: Emit, settings: Settings) -> None:
    tensors = {
        name: torch.randn(shape, device=settings.device).to(settings.dtype) for name, shape in shapes(settings.small)
    }
    size = sum(t.numel() * t.element_size() for t in tensors.values())
    free = shutil.disk_usage("/dev/shm").free
    if free < ROOM * size:
        raise Skipped(f"/dev/shm has {free / 1e9:.1f} GB free; {ROOM * size / 1e9:.1f} GB are needed")
    emit("model", parameters=sum(t.numel() for t in tensors.values()), size_bytes=size)
    with tempfile.TemporaryDirectory(dir="/dev/shm", prefix="gpu-evidence-") as folder:
        store, plain = WeightStore(Path(folder) / "weights"), Path(folder) / "plain"
        host = torch.ones(size, dtype=torch.uint8)
        times: dict[str, list[float]] = {"publication": [], "plain copy": []}
        for version in range(REPEATS + 1):  # alternating; the first of each warms up
            synchronize(settings.device)
            began = time.perf_counter()
            store.write(tensors.items(), version)
            times["publication"].append(time.perf_counter() - began)
            began = time.perf_counter()
            with plain.open("wb") as file:
                file.write(host.numpy().data)
            times["plain copy"].append(time.perf_counter() - began)
            os.unlink(plain)
    medians = {way: statistics.median(seconds[1:]) for way, seconds in times.items()}
    for way, median in medians.items():
        emit(way, seconds=median, gb_per_s=size / median / 1e9, times_a_plain_copy=median / medians["plain copy"])
