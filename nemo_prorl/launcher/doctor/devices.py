"""GPUs against a configuration: number, memory, compute capability, driver, torch of both environments, NCCL.

A CPU configuration is asked nothing of this.
"""

import importlib.metadata
import re
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from omegaconf import DictConfig, OmegaConf

from nemo_prorl.launcher.doctor.check import Check, NoAnswer, ask, gb, output_of
from nemo_prorl.recipe.devices import devices_words, node_devices
from nemo_prorl.recipe.memory import device_bytes

FP8 = (8, 9)  # Ada; Hopper is 9.0
TENSORWISE = (2, 2)  # Transformer Engine's first version with scales of the tensors at hand
BF16 = (8, 0)
IDLE_BYTES = 1 << 30  # a GPU that holds more than this is somebody's
_SMI = [
    "nvidia-smi",
    "--query-gpu=name,memory.total,memory.used,compute_cap,driver_version",
    "--format=csv,noheader,nounits",
]
_TORCH = """
import ctypes, torch
driver = ctypes.c_int(0)
try:
    ctypes.CDLL("libcuda.so.1").cuDriverGetVersion(ctypes.byref(driver))
except OSError:
    pass
there = torch.cuda.is_available()
try:
    nccl = ".".join(map(str, torch.cuda.nccl.version())) if torch.version.cuda else None
except Exception:
    nccl = None
answer({"torch": torch.__version__, "cuda": torch.version.cuda, "driver_cuda": driver.value, "nccl": nccl,
        "gpus": torch.cuda.device_count() if there else 0})
"""


@dataclass(frozen=True)
class Gpu:
    """One line of nvidia-smi."""

    name: str
    memory: int
    used: int
    capability: tuple[int, int]
    driver: str


@dataclass(frozen=True)
class TorchFacts:
    """What torch of one environment says."""

    torch: str
    cuda: str | None  # that it was built for; None: a CPU build
    driver_cuda: int  # the newest that the driver runs, as 1000 major + 10 minor; 0: no driver
    nccl: str | None
    gpus: int


def of_run(cfg: DictConfig, rollout_python: Path) -> Iterator[Check]:
    """Nothing for a CPU configuration."""
    if cfg.trainer.accelerator != "gpu":
        return
    try:
        gpus = parse_smi(output_of(_SMI, 30))
    except (NoAnswer, ValueError) as error:
        cure = "install NVIDIA's driver, or start the container with its GPUs (--gpus all); on a CPU: cluster=laptop"
        yield Check("gpus", "fail", f"trainer.accelerator=gpu: {error}", cure)
        return
    wanted, words = node_devices(cfg), devices_words(cfg)
    yield from gpus_judged(gpus, wanted, device_bytes(cfg), words)
    yield capability_judged(gpus, OmegaConf.select(cfg, "model.fp8"), _wants_bf16(cfg))
    if OmegaConf.select(cfg, "model.transformer_engine"):
        scales = OmegaConf.select(cfg, "model.fp8_recipe") if OmegaConf.select(cfg, "model.fp8") else None
        yield layers_judged(_version("transformer-engine"), scales)
    for name, python in (("torch", sys.executable), ("engine", str(rollout_python))):
        try:
            facts = TorchFacts(**ask(python, _TORCH))
        except NoAnswer as error:
            yield Check(name, "fail", f"torch cannot be asked: {error}", "mend the environment: `make setup`")
            continue
        yield torch_judged(name, facts, wanted, words)
        if name == "torch":
            yield nccl_judged(facts)


def _version(distribution: str) -> str | None:
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return None


def _wants_bf16(cfg: DictConfig) -> bool:
    return str(cfg.trainer.precision).startswith("bf16") or cfg.rollout.dtype == "bfloat16"


def parse_smi(text: str) -> list[Gpu]:
    """The lines of `nvidia-smi --query-gpu`.  Raises ValueError for another form, naming the line."""
    gpus = []
    for line in text.strip().splitlines():
        try:
            name, total, used, capability, driver = (word.strip() for word in line.rsplit(",", 4))
            major, minor = capability.split(".")
            gpus.append(Gpu(name, int(total) << 20, int(used) << 20, (int(major), int(minor)), driver))
        except ValueError as error:
            raise ValueError(f"nvidia-smi says {line!r}, which is no GPU with memory and capability") from error
    return gpus


def gpus_judged(gpus: Sequence[Gpu], wanted: int, needed_bytes: float | None, words: str) -> Iterator[Check]:
    """Number, kind and memory.  `words`: the keys that want so many; `needed_bytes`: rollout.device_memory_gb."""
    names = ", ".join(f"{sum(g.name == n for g in gpus)} x {n}" for n in dict.fromkeys(g.name for g in gpus)) or "none"
    if len(gpus) < wanted:
        cure = (
            f"set trainer.devices={len(gpus) or 1} and the layout to it, or ask for {wanted} a node (--gpus-per-node)"
        )
        yield Check("gpus", "fail", f"{names}; {words}", cure)
        if not gpus:
            return
    else:
        yield Check("gpus", "pass", f"{names}, driver {gpus[0].driver}, {gb(min(g.memory for g in gpus))} each")
    if len({gpu.name for gpu in gpus}) > 1:
        yield Check("gpus", "warn", f"{names}: not all alike", "the slowest sets the pace, the smallest the memory")
    least = min(gpu.memory for gpu in gpus)
    if needed_bytes is not None and least < needed_bytes:
        text = f"{least / 1e9:.1f} GB of memory; rollout.device_memory_gb={needed_bytes / 1e9:g}"
        cure = f"set rollout.device_memory_gb={int(least / 1e9)}: what does not fit then is said, with what would"
        yield Check("gpus", "fail", text, cure)
    elif needed_bytes is not None and least > 1.1 * needed_bytes:
        text = (
            f"{least / 1e9:.1f} GB of memory, of which rollout.device_memory_gb={needed_bytes / 1e9:g} is planned with"
        )
        yield Check("gpus", "warn", text, f"set rollout.device_memory_gb={int(least / 1e9)} for a larger KV cache")
    if busy := [f"{index}: {gb(gpu.used)}" for index, gpu in enumerate(gpus) if gpu.used > IDLE_BYTES]:
        cure = "end the processes that nvidia-smi shows, or leave those GPUs out by CUDA_VISIBLE_DEVICES"
        yield Check("gpus", "warn", f"memory of GPUs is in use ({', '.join(busy)})", cure)


def capability_judged(gpus: Sequence[Gpu], fp8: str | None, bf16: bool) -> Check:
    least = min((gpu.capability for gpu in gpus), default=(0, 0))
    text = f"compute capability {least[0]}.{least[1]}: FP8 {'works' if least >= FP8 else 'does not work'} here"
    if fp8 and least < FP8:
        cure = "set model.fp8=null; FP8 needs 8.9 (Ada) or 9.0 (Hopper)"
        return Check("precision", "fail", f"{text}; model.fp8={fp8}", cure)
    if bf16 and least < BF16:
        cure = (
            "set trainer.precision=32, model.megatron_amp_O2=false and rollout.dtype=float32; bf16 needs 8.0 (Ampere)"
        )
        return Check("precision", "fail", f"{text}, nor does bf16", cure)
    return Check("precision", "pass", text)


def layers_judged(version: str | None, scales: str | None) -> Check:
    """Transformer Engine by its version (None: not there); `scales`: model.fp8_recipe, where FP8 is wanted."""
    name = "transformer engine"
    if version is None:
        cure = "train in a container that has it, or set model.transformer_engine=false and model.fp8=null"
        return Check(name, "fail", "model.transformer_engine=true, and it is not installed here", cure)
    found = tuple(int(number) for number in re.findall(r"\d+", version)[:2])
    if scales == "tensorwise" and found < TENSORWISE:
        cure = "update it, or set model.fp8_recipe=delayed (see its comment) or model.fp8=null"
        return Check(name, "fail", f"version {version}; model.fp8_recipe=tensorwise needs 2.2", cure)
    return Check(name, "pass", f"version {version}")


def torch_judged(name: str, facts: TorchFacts, wanted: int, words: str) -> Check:
    """Whether torch of an environment sees the GPUs, and why not.  `words`: the keys that want so many."""
    text = f"torch {facts.torch}, CUDA {facts.cuda}, sees {facts.gpus} GPUs"
    if facts.cuda is None:
        cure = "install torch for CUDA into that environment: leave TORCH_INDEX empty, or name PyTorch's CUDA index"
        return Check(name, "fail", f"torch {facts.torch} is a build for CPUs", cure)
    major, driver_major = int(facts.cuda.split(".")[0]), facts.driver_cuda // 1000
    if facts.driver_cuda and driver_major < major:
        cure = f"update the driver, or install torch for CUDA {driver_major}"
        return Check(name, "fail", f"{text}; the driver runs CUDA {driver_major} at most", cure)
    if facts.gpus < wanted:
        cure = "look at CUDA_VISIBLE_DEVICES, the container's devices and `nvidia-smi`; trainer.devices must be there"
        return Check(name, "fail", f"{text} of {words}", cure)
    return Check(name, "pass", text)


def nccl_judged(facts: TorchFacts) -> Check:
    if facts.nccl is None:
        cure = "install a torch for CUDA on Linux that has NCCL; ranks on GPUs cannot talk without"
        return Check("nccl", "fail", f"torch {facts.torch} has no NCCL", cure)
    return Check("nccl", "pass", f"NCCL {facts.nccl}")
