"""GPUs against a configuration: number, memory, compute capability, driver, torch of both environments.

A CPU configuration is asked nothing of this.  `of_node` needs about a second and no torch: `prorl doctor` prints its
checks, and `launcher.prepare.check_node` refuses a run on a node where one of them fails.
"""

import contextlib
import importlib.metadata
import importlib.util
import os
import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from omegaconf import DictConfig, OmegaConf

from nemo_prorl.launcher.doctor.check import Check, NoAnswer, ask, gb, output_of
from nemo_prorl.sizing.devices import devices_words, node_devices
from nemo_prorl.sizing.memory import device_bytes

FP8 = (8, 9)  # Ada; Hopper is 9.0
FP8_LAYERS = (2, 2, 0)  # Transformer Engine's first version whose FP8 is used here, with either kind of scales
DRIVERS = {11: "450", 12: "525", 13: "580"}  # CUDA: the oldest driver that runs it
BF16 = (8, 0)
_CLOSED = ("Exclusive", "Prohibited")  # compute modes; a device without modes says [N/A]
IDLE_BYTES = 1 << 30  # a GPU that holds more than this is somebody's
_SMI = [
    "nvidia-smi",
    "--query-gpu=name,memory.total,memory.used,compute_cap,driver_version,compute_mode,pci.bus_id,uuid",
    "--format=csv,noheader,nounits",
]
_DRIVER = """
import ctypes
version = ctypes.c_int(0)
try:
    ctypes.CDLL("libcuda.so.1").cuDriverGetVersion(ctypes.byref(version))
except OSError:
    pass
answer(version.value)
"""
_IMAGE = (
    "run it in the image made from NVIDIA's NeMo container: sbatch slurm/stage.sbatch STAGE --container-image=IMAGE"
    " (docs/container.md)"
)
_TORCH = """
import torch
answer({"torch": torch.__version__, "cuda": torch.version.cuda,
        "gpus": torch.cuda.device_count() if torch.cuda.is_available() else 0})
"""


@dataclass(frozen=True)
class Gpu:
    """A GPU as a line of nvidia-smi shows it."""

    name: str
    memory: int
    used: int
    capability: tuple[int, int]
    driver: str
    mode: str = "Default"  # compute mode: how many processes may use it
    bus: str = ""  # PCI address
    uuid: str = ""


@dataclass(frozen=True)
class TorchFacts:
    """The versions of torch in one environment, and the GPUs that it sees."""

    torch: str
    cuda: str | None  # that it was built for; None: a CPU build
    gpus: int


def check_gpus(cfg: DictConfig, rollout_python: Path) -> Iterator[Check]:
    """Check GPUs, driver and torch of both environments; yields nothing for a CPU configuration."""
    if cfg.trainer.accelerator != "gpu":
        return
    yield from of_node(cfg, os.environ, rollout_python)
    wanted, words = node_devices(cfg), devices_words(cfg)
    if OmegaConf.select(cfg, "model.transformer_engine"):
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):  # `container` says that it is not there
            version = importlib.metadata.version("transformer-engine")
            yield layers_judged(version, OmegaConf.select(cfg, "model.fp8") is not None)
    for name, python in (("torch", sys.executable), ("engine", str(rollout_python))):
        try:
            facts = TorchFacts(**ask(python, _TORCH))
        except NoAnswer as error:
            yield Check(name, "fail", f"torch cannot be asked: {error}", "mend the environment: `make setup`")
            continue
        yield torch_judged(name, facts, wanted, words)


def of_node(
    cfg: DictConfig, environment: Mapping[str, str], rollout_python: Path, trains: bool = True
) -> Iterator[Check]:
    """Yield what a node needs before any engine or rank starts; nothing for a CPU configuration.

    Args:
        trains: False where only engines run, as in an evaluation.
    """
    if cfg.trainer.accelerator != "gpu":
        return
    if trains:
        lacking = [name for name in _libraries(cfg) if importlib.util.find_spec(name) is None]
        yield container_judged(lacking, environment.get("NVIDIA_PYTORCH_VERSION"))
    try:
        gpus = visible(query(), environment)
    except (NoAnswer, ValueError) as error:
        cure = (
            "install NVIDIA's driver, or start the container with its GPUs (--gpus all) and with"
            " NVIDIA_DRIVER_CAPABILITIES=compute,utility; on a CPU: cluster=laptop"
        )
        yield Check("gpus", "fail", f"trainer.accelerator=gpu: {error}", cure)
        return
    wanted, words = node_devices(cfg), devices_words(cfg)
    if not trains:
        wanted = cfg.rollout.engines * cfg.rollout.tensor_parallel_size
        words = f"rollout.engines={cfg.rollout.engines} x rollout.tensor_parallel_size"
    yield from gpus_judged(gpus, wanted, device_bytes(cfg), words)
    yield modes_judged(gpus)
    bf16 = cfg.rollout.dtype == "bfloat16" or (trains and str(cfg.trainer.precision).startswith("bf16"))
    yield capability_judged(gpus, OmegaConf.select(cfg, "model.fp8") if trains else None, bf16)
    cuda = {"the rollout environment": cuda_of_torch(_packages(rollout_python))}
    spec = importlib.util.find_spec("torch") if trains else None
    if spec is not None and spec.origin is not None:
        cuda["the training environment"] = cuda_of_torch([Path(spec.origin).parent.parent])
    try:
        yield driver_judged(cuda, ask(sys.executable, _DRIVER, seconds=30), gpus[0].driver if gpus else "none")
    except NoAnswer as error:
        yield Check("driver", "fail", f"the driver's CUDA version cannot be asked: {error}", "look at nvidia-smi")


def query() -> list[Gpu]:
    """Return all GPUs that nvidia-smi shows.  Raises NoAnswer or ValueError."""
    return parse_smi(output_of(_SMI, 30))


def visible(gpus: Sequence[Gpu], environment: Mapping[str, str]) -> list[Gpu]:
    """Return the GPUs that CUDA_VISIBLE_DEVICES leaves, in its order; all where the variable is not set."""
    given = environment.get("CUDA_VISIBLE_DEVICES")
    if given is None:
        return list(gpus)
    chosen: list[Gpu] = []
    for word in (part.strip() for part in given.split(",")):
        if word.isdigit():
            found = [gpus[int(word)]] if int(word) < len(gpus) else []
        else:
            found = [gpu for gpu in gpus if word and gpu.uuid.startswith(word)]
        if len(found) != 1 or found[0] in chosen:  # CUDA ignores what follows an unknown device
            break
        chosen += found
    return chosen


def _libraries(cfg: DictConfig) -> list[str]:
    """Return the modules of NVIDIA's container that this configuration needs in the trainer."""
    wanted = ["apex"]  # NeMo's strategy refuses to start without
    if OmegaConf.select(cfg, "model.transformer_engine"):
        wanted.append("transformer_engine")
    if OmegaConf.select(cfg, "model.gradient_accumulation_fusion"):
        wanted.append("fused_weight_gradient_mlp_cuda")  # of apex
    return wanted


def _packages(python: Path) -> list[Path]:
    """Return the package folders of a virtual environment, by the path of its Python."""
    return sorted(python.absolute().parent.parent.glob("lib/python3*/site-packages"))


def cuda_of_torch(folders: Sequence[Path]) -> str | None:
    """Return the CUDA version that a torch was built for, without importing it; None for a CPU build or no torch."""
    for folder in folders:
        file = folder / "torch" / "version.py"
        if file.is_file() and (found := re.search(r"^cuda\b[^=\n]*=\s*['\"]([\d.]+)", file.read_text(), re.M)):
            return found[1]
    return None


def container_judged(lacking: Sequence[str], release: str | None) -> Check:
    """`lacking`: modules that the configuration needs; `release`: NVIDIA_PYTORCH_VERSION, which NeMo reads."""
    wrong = [f"no module {name}" for name in lacking]
    if release is None:
        wrong.append("NVIDIA_PYTORCH_VERSION is not set")
    if not wrong:
        return Check("container", "pass", f"NVIDIA's PyTorch {release}")
    cure = _IMAGE
    if list(lacking) == ["fused_weight_gradient_mlp_cuda"]:
        cure = "build apex with --cuda_ext, or set model.gradient_accumulation_fusion=false"
    return Check("container", "fail", f"trainer.accelerator=gpu, and in {sys.executable}: {', '.join(wrong)}", cure)


def modes_judged(gpus: Sequence[Gpu]) -> Check:
    """Several processes use each GPU: a trainer rank, an engine and its parts."""
    closed = [f"{index}: {gpu.mode}" for index, gpu in enumerate(gpus) if gpu.mode.startswith(_CLOSED)]
    if closed:
        text = f"compute mode of GPUs is not Default ({', '.join(closed)}): only one process may use each"
        return Check(
            "compute mode", "fail", text, "ask the administrator for `nvidia-smi --compute-mode=0`, or its prolog"
        )
    return Check("compute mode", "pass", "Default")


def driver_judged(cuda: Mapping[str, str | None], runs: int, driver: str) -> Check:
    """`cuda`: the CUDA of each environment's torch; `runs`: the newest that libcuda runs, 1000 major + 10 minor."""
    if not runs:
        cure = "start the container with NVIDIA_DRIVER_CAPABILITIES=compute,utility, or install the driver"
        return Check("driver", "fail", "libcuda.so.1 cannot be loaded", cure)
    newest = f"{runs // 1000}.{runs % 1000 // 10}"
    for name, version in cuda.items():
        if version is not None and (major := int(version.split(".")[0])) > runs // 1000:
            text = f"torch of {name} is built for CUDA {version}; driver {driver} runs CUDA {newest} at most"
            package = f"cuda-compat-{version.replace('.', '-')}"
            cure = (
                f"a driver of {DRIVERS.get(major, 'a newer branch')} or newer, the package {package} in the image"
                f" (data-centre GPUs), or torch for CUDA {major - 1} in that environment (docs/container.md)"
            )
            return Check("driver", "fail", text, cure)
    return Check("driver", "pass", f"{driver}, CUDA {newest}")


def parse_smi(text: str) -> list[Gpu]:
    """Return the GPUs that `nvidia-smi --query-gpu` printed.  Raises ValueError for another form, naming the line."""
    gpus = []
    for line in text.strip().splitlines():
        try:
            name, total, used, capability, *rest = (word.strip() for word in line.rsplit(",", 7))
            driver, mode, bus, uuid = rest
            major, minor = capability.split(".")
            at = (int(major), int(minor))
            gpus.append(Gpu(name, int(total) << 20, int(used) << 20, at, driver, mode, bus, uuid))
        except ValueError as error:
            raise ValueError(f"nvidia-smi says {line!r}, which is no GPU with memory and capability") from error
    return gpus


def gpus_judged(gpus: Sequence[Gpu], wanted: int, needed_bytes: float | None, words: str) -> Iterator[Check]:
    """Judge number, kind and memory.  `words`: the keys that want so many; `needed_bytes`: rollout.device_memory_gb."""
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


def layers_judged(version: str, fp8: bool) -> Check:
    """Judge whether a version of Transformer Engine can do what is wanted of it."""
    name = "transformer engine"
    numbers, early = re.match(r"[\d.]+", version), re.search(r"\.?(dev|a|b|rc)\d*", version.split("+")[0])
    found = tuple(int(number) for number in (numbers[0] if numbers else "0").strip(".").split("."))
    if fp8 and found < FP8_LAYERS:
        return Check(name, "fail", f"version {version}; FP8 needs 2.2.0", "update it, or set model.fp8=null")
    if fp8 and found[:3] == FP8_LAYERS and early:
        text = (
            f"version {version} is from before 2.2.0 final, whose FP8 weights of a pass without gradients fit no update"
        )
        cure = "the actor drops those weights, which no GPU has tried: update it if you can, or set model.fp8=null"
        return Check(name, "warn", text, cure)
    return Check(name, "pass", f"version {version}")


def torch_judged(name: str, facts: TorchFacts, wanted: int, words: str) -> Check:
    """Judge whether torch of an environment sees the GPUs.  `words`: the keys that want so many."""
    text = f"torch {facts.torch}, CUDA {facts.cuda}, sees {facts.gpus} GPUs"
    if facts.cuda is None:
        cure = "install torch for CUDA into that environment: leave TORCH_INDEX empty, or name PyTorch's CUDA index"
        return Check(name, "fail", f"torch {facts.torch} is a build for CPUs", cure)
    if facts.gpus < wanted:
        cure = "look at CUDA_VISIBLE_DEVICES, the container's devices and `nvidia-smi`; trainer.devices must be there"
        return Check(name, "fail", f"{text} of {words}", cure)
    return Check(name, "pass", text)
