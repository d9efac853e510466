"""Checks of a node's GPUs: number, memory, compute capability, driver, torch of both environments.

None of these checks applies to a CPU configuration.  `check_node_gpus` takes about a second and imports no torch:
`prorl doctor` prints its checks, and `launcher.prepare.check_node` refuses to start a run if one of them fails.
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
from nemo_prorl.launcher.environment import engine_libraries
from nemo_prorl.sizing.devices import devices_words, node_devices
from nemo_prorl.sizing.memory import device_bytes

FP8 = (8, 9)  # Ada; Hopper is 9.0
FP8_LAYERS = (2, 2, 0)  # first version of Transformer Engine whose FP8 works here, with tensorwise and delayed scales
DRIVERS = {11: "450", 12: "525", 13: "580"}  # oldest driver branch that runs each CUDA major version
BF16 = (8, 0)
ROLLOUT = "the rollout environment"
_CLOSED = ("Exclusive", "Prohibited")  # compute modes; nvidia-smi prints [N/A] for a device without modes
IDLE_BYTES = 1 << 30  # a GPU with more memory in use than this is used by another program
_SMI = [
    "nvidia-smi",
    "--query-gpu=name,memory.total,memory.used,compute_cap,driver_version,compute_mode,pci.bus_id,uuid",
    "--format=csv,noheader,nounits",
]
_DRIVER = """
import ctypes
version, status = ctypes.c_int(0), 0
try:
    cuda = ctypes.CDLL("libcuda.so.1")
    cuda.cuDriverGetVersion(ctypes.byref(version))
    status = cuda.cuInit(0)
except OSError:
    pass
answer([version.value, status])
"""
_UNFIT = {  # what cuInit returns, and the fix
    802: ("the GPUs' switches are not ready", "start nvidia-fabricmanager on the node"),
    803: (
        "the driver does not take the forward-compatibility libraries",
        "install driver 580 or later, or the newest of branch 535, 550 or 570: only these take the libraries",
    ),
    804: (
        "this GPU does not take forward-compatibility libraries",
        "install driver 580 or later, and unset PRORL_CUDA_COMPAT: only data-centre GPUs take such libraries",
    ),
}
_IMAGE = (
    "run in the image built from NVIDIA's NeMo container: sbatch slurm/stage.sbatch STAGE --container-image=IMAGE"
    " (docs/howto/container.md)"
)
_TORCH = """
import torch
answer({"torch": torch.__version__, "cuda": torch.version.cuda,
        "gpus": torch.cuda.device_count() if torch.cuda.is_available() else 0})
"""


@dataclass(frozen=True)
class Gpu:
    """A GPU as nvidia-smi reports it."""

    name: str
    memory: int  # bytes
    used: int  # bytes
    capability: tuple[int, int]  # CUDA compute capability: (major, minor)
    driver: str
    mode: str = "Default"  # compute mode: how many processes may use the GPU
    bus: str = ""  # PCI address
    uuid: str = ""


@dataclass(frozen=True)
class Libcuda:
    """The part of the driver that a process of one environment loads."""

    runs: int  # newest CUDA version, as 1000 * major + 10 * minor; 0: libcuda cannot be loaded
    status: int = 0  # what cuInit returns; 0: CUDA starts
    folder: Path | None = None  # folder of the forward-compatibility libraries, if the process uses them


@dataclass(frozen=True)
class TorchFacts:
    """The version of torch in one environment, and the number of GPUs that it sees."""

    torch: str
    cuda: str | None  # CUDA version that torch was built for; None: a CPU build
    gpus: int


def check_gpus(cfg: DictConfig, rollout_python: Path) -> Iterator[Check]:
    """Check GPUs, driver and torch of both environments; yield nothing for a CPU configuration."""
    if cfg.trainer.accelerator != "gpu":
        return
    yield from check_node_gpus(cfg, os.environ, rollout_python)
    wanted, words = node_devices(cfg), devices_words(cfg)
    if OmegaConf.select(cfg, "model.transformer_engine"):
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):  # the check `container` reports it
            version = importlib.metadata.version("transformer-engine")
            yield assess_layers(version, OmegaConf.select(cfg, "model.fp8") is not None)
    try:
        variables = engine_libraries(cfg, os.environ, query()[0].driver)[1]
    except (NoAnswer, ValueError, IndexError):  # the check `gpus` reports it
        variables = {}
    for name, python, more in (("torch", sys.executable, {}), ("engine", str(rollout_python), variables)):
        try:
            facts = TorchFacts(**ask(python, _TORCH, variables=more))
        except NoAnswer as error:
            yield Check(name, "fail", f"torch could not be queried: {error}", "repair the environment: `make setup`")
            continue
        yield assess_torch(name, facts, wanted, words)


def check_node_gpus(
    cfg: DictConfig, environment: Mapping[str, str], rollout_python: Path, trains: bool = True
) -> Iterator[Check]:
    """Check what a node needs before any engine or rank starts; yield nothing for a CPU configuration.

    Args:
        trains: False if only engines run on the node, as in an evaluation.
    """
    if cfg.trainer.accelerator != "gpu":
        return
    if trains:
        lacking = [name for name in _libraries(cfg) if importlib.util.find_spec(name) is None]
        yield assess_container(lacking, environment.get("NVIDIA_PYTORCH_VERSION"))
    try:
        gpus = visible(query(), environment)
    except (NoAnswer, ValueError) as error:
        fix = (
            "install NVIDIA's driver, or start the container with GPUs (--gpus all) and"
            " NVIDIA_DRIVER_CAPABILITIES=compute,utility; to run on a CPU: cluster=laptop"
        )
        yield Check("gpus", "fail", f"trainer.accelerator=gpu: {error}", fix)
        return
    wanted, words = node_devices(cfg), devices_words(cfg)
    if not trains:
        wanted = cfg.rollout.engines * cfg.rollout.tensor_parallel_size
        words = f"rollout.engines={cfg.rollout.engines} x rollout.tensor_parallel_size"
    yield from assess_gpus(gpus, wanted, device_bytes(cfg), words)
    yield assess_modes(gpus)
    bf16 = cfg.rollout.dtype == "bfloat16" or (trains and str(cfg.trainer.precision).startswith("bf16"))
    yield assess_capability(gpus, OmegaConf.select(cfg, "model.fp8") if trains else None, bf16)
    if gpus:
        yield _check_driver(cfg, environment, rollout_python, gpus[0], trains)


def _check_driver(
    cfg: DictConfig, environment: Mapping[str, str], rollout_python: Path, gpu: Gpu, trains: bool
) -> Check:
    """Check that the driver runs the CUDA versions of the rollout environment and, if a trainer runs here, its own."""
    folder, variables = engine_libraries(cfg, environment, gpu.driver)
    spec = importlib.util.find_spec("torch") if trains else None
    try:
        runs, status = ask(sys.executable, _DRIVER, seconds=60, variables=variables)
        libcuda = Libcuda(runs, status, folder)
        cuda = {ROLLOUT: (cuda_of_torch(_packages(rollout_python)), libcuda)}
        if spec is not None and spec.origin is not None:
            libcuda = Libcuda(*ask(sys.executable, _DRIVER, seconds=60)) if variables else libcuda
            cuda["the training environment"] = (cuda_of_torch([Path(spec.origin).parent.parent]), libcuda)
    except NoAnswer as error:
        text = f"the driver's CUDA version could not be queried: {error}"
        return Check("driver", "fail", text, "see what nvidia-smi prints")
    return assess_driver(cuda, gpu.driver)


def query() -> list[Gpu]:
    """Return all GPUs that nvidia-smi reports.  Raises NoAnswer or ValueError."""
    return parse_smi(output_of(_SMI, 30))


def visible(gpus: Sequence[Gpu], environment: Mapping[str, str]) -> list[Gpu]:
    """Return the GPUs that CUDA_VISIBLE_DEVICES names, in its order; all GPUs if the variable is not set."""
    devices = environment.get("CUDA_VISIBLE_DEVICES")
    if devices is None:
        return list(gpus)
    chosen: list[Gpu] = []
    for word in (part.strip() for part in devices.split(",")):
        if word.isdigit():
            matches = list(gpus[int(word) : int(word) + 1])
        else:
            matches = [gpu for gpu in gpus if word and gpu.uuid.startswith(word)]
        if len(matches) != 1 or matches[0] in chosen:  # CUDA ignores all devices after an unknown one
            break
        chosen += matches
    return chosen


def _libraries(cfg: DictConfig) -> list[str]:
    """Return the modules of NVIDIA's container that the trainer needs for this configuration."""
    wanted = ["apex"]  # NeMo's strategy does not start without apex
    if OmegaConf.select(cfg, "model.transformer_engine"):
        wanted.append("transformer_engine")
    if OmegaConf.select(cfg, "model.gradient_accumulation_fusion"):
        wanted.append("fused_weight_gradient_mlp_cuda")  # a part of apex
    return wanted


def _packages(python: Path) -> list[Path]:
    """Return the package folders of the virtual environment that has `python` as its Python command."""
    return sorted(python.absolute().parent.parent.glob("lib/python3*/site-packages"))


def cuda_of_torch(folders: Sequence[Path]) -> str | None:
    """Return the CUDA version that torch was built for, without importing torch; None for a CPU build or no torch.

    Args:
        folders: package folders to search for torch.
    """
    for folder in folders:
        file = folder / "torch" / "version.py"
        if file.is_file() and (match := re.search(r"^cuda\b[^=\n]*=\s*['\"]([\d.]+)", file.read_text(), re.M)):
            return match[1]
    return None


def assess_container(lacking: Sequence[str], release: str | None) -> Check:
    """Assess whether the trainer's environment has the libraries of NVIDIA's container.

    Args:
        lacking: modules that the configuration needs and the environment does not have.
        release: NVIDIA_PYTORCH_VERSION, which NeMo reads; None: not set.
    """
    wrong = [f"no module {name}" for name in lacking]
    if release is None:
        wrong.append("NVIDIA_PYTORCH_VERSION is not set")
    if not wrong:
        return Check("container", "pass", f"NVIDIA's PyTorch {release}")
    fix = _IMAGE
    if list(lacking) == ["fused_weight_gradient_mlp_cuda"]:
        fix = "build apex with --cuda_ext, or set model.gradient_accumulation_fusion=false"
    text = f"trainer.accelerator=gpu needs NVIDIA's container; in {sys.executable}: {', '.join(wrong)}"
    return Check("container", "fail", text, fix)


def assess_modes(gpus: Sequence[Gpu]) -> Check:
    """Assess the compute modes: a trainer rank and an engine's processes must be able to share each GPU."""
    closed = [f"{index}: {gpu.mode}" for index, gpu in enumerate(gpus) if gpu.mode.startswith(_CLOSED)]
    if closed:
        text = f"expected compute mode Default; got {', '.join(closed)}: at most one process may use each of these GPUs"
        fix = "ask the administrator to run `nvidia-smi --compute-mode=0`, or to set the mode in Slurm's prolog"
        return Check("compute mode", "fail", text, fix)
    return Check("compute mode", "pass", "Default")


def assess_driver(cuda: Mapping[str, tuple[str | None, Libcuda]], driver: str) -> Check:
    """Assess whether the driver runs the CUDA versions that torch was built for.

    Args:
        cuda: for each environment the CUDA version of its torch (None: a CPU build) and the libcuda that it loads.
        driver: version of the driver.
    """
    said = [driver]
    for name, (version, libcuda) in cuda.items():
        if not libcuda.runs:
            fix = "start the container with NVIDIA_DRIVER_CAPABILITIES=compute,utility, or install the driver"
            return Check("driver", "fail", "libcuda.so.1 cannot be loaded", fix)
        newest = f"{libcuda.runs // 1000}.{libcuda.runs % 1000 // 10}"
        through = f" with the libraries in {libcuda.folder}" if libcuda.folder else ""
        if libcuda.status:
            meaning, fix = _UNFIT.get(libcuda.status, ("an error of the driver", "see the log of the node's kernel"))
            text = f"{driver}: CUDA does not start in {name}{through}: error {libcuda.status}, {meaning}"
            return Check("driver", "fail", text, fix)
        if version is not None and (major := int(version.split(".")[0])) > libcuda.runs // 1000:
            text = f"torch of {name} is built for CUDA {version}; driver {driver} runs at most CUDA {newest}{through}"
            fix = f"install driver {DRIVERS.get(major, 'of a newer branch')} or later"
            if name == ROLLOUT:
                package = f"cuda-compat-{version.replace('.', '-')}"
                fix += (
                    f", or set PRORL_CUDA_COMPAT to the folder of NVIDIA's package {package}, which the image has"
                    " (data-centre GPUs with driver 535, 550 or 570; docs/howto/container.md)"
                )
            return Check("driver", "fail", text, fix)
        said.append(f"CUDA {newest} in {name}{through}")
    return Check("driver", "pass", ", ".join(said))


def parse_smi(text: str) -> list[Gpu]:
    """Return the GPUs that `nvidia-smi --query-gpu` printed.  Raises ValueError with the line that cannot be read."""
    gpus = []
    for line in text.strip().splitlines():
        try:
            name, total, used, capability, *rest = (word.strip() for word in line.rsplit(",", 7))
            driver, mode, bus, uuid = rest
            major, minor = capability.split(".")
            at = (int(major), int(minor))
            gpus.append(
                Gpu(
                    name,
                    int(total) << 20,
                    used=int(used) << 20,
                    capability=at,
                    driver=driver,
                    mode=mode,
                    bus=bus,
                    uuid=uuid,
                )
            )
        except ValueError as error:
            raise ValueError(
                f"nvidia-smi printed {line!r}: expected a GPU with its memory and compute capability"
            ) from error
    return gpus


def assess_gpus(gpus: Sequence[Gpu], wanted: int, needed_bytes: float | None, words: str) -> Iterator[Check]:
    """Assess the number, kind and memory of the GPUs.

    Args:
        wanted: number of GPUs that the configuration needs.
        needed_bytes: rollout.device_memory_gb in bytes; None: not set.
        words: the keys and values that determine `wanted`.
    """
    names = ", ".join(f"{sum(g.name == n for g in gpus)} x {n}" for n in dict.fromkeys(g.name for g in gpus)) or "none"
    if len(gpus) < wanted:
        fix = f"request {wanted} per node (--gpus-per-node), or set trainer.devices={len(gpus) or 1} and its layout"
        yield Check("gpus", "fail", f"found {names}; the run needs {words}", fix)
        if not gpus:
            return
    else:
        yield Check("gpus", "pass", f"{names}, driver {gpus[0].driver}, {gb(min(g.memory for g in gpus))} each")
    if len({gpu.name for gpu in gpus}) > 1:
        text = f"{names}: the GPUs are not all of one kind"
        yield Check("gpus", "warn", text, "use GPUs of one kind: the slowest limits the speed, the smallest the memory")
    least = min(gpu.memory for gpu in gpus)
    if needed_bytes is not None and least < needed_bytes:
        text = f"a GPU has {least / 1e9:.1f} GB of memory; rollout.device_memory_gb={needed_bytes / 1e9:g}"
        fix = f"set rollout.device_memory_gb={_usable(least)}; doctor then names what does not fit and how to change it"
        yield Check("gpus", "fail", text, fix)
    elif needed_bytes is not None and least > 1.1 * needed_bytes:
        text = (
            f"each GPU has {least / 1e9:.1f} GB of memory; the plan uses only"
            f" rollout.device_memory_gb={needed_bytes / 1e9:g}"
        )
        yield Check("gpus", "warn", text, f"set rollout.device_memory_gb={_usable(least)} for a larger KV cache")
    if busy := [f"{index}: {gb(gpu.used)}" for index, gpu in enumerate(gpus) if gpu.used > IDLE_BYTES]:
        fix = "end the processes that nvidia-smi lists, or exclude these GPUs with CUDA_VISIBLE_DEVICES"
        yield Check("gpus", "warn", f"other programs use memory of GPUs ({', '.join(busy)})", fix)


def _usable(size: int) -> int:
    """Return the GB that CUDA gives of a GPU with `size` bytes by nvidia-smi, which counts 0.6 GB of the driver."""
    return int((size - 6e8) / 1e9)


def assess_capability(gpus: Sequence[Gpu], fp8: str | None, bf16: bool) -> Check:
    least = min((gpu.capability for gpu in gpus), default=(0, 0))
    text = f"compute capability {least[0]}.{least[1]}: FP8 {'works' if least >= FP8 else 'does not work'}"
    if fp8 and least < FP8:
        fix = "set model.fp8=null; FP8 needs 8.9 (Ada) or 9.0 (Hopper)"
        return Check("precision", "fail", f"{text}; model.fp8={fp8}", fix)
    if bf16 and least < BF16:
        fix = "set trainer.precision=32, model.megatron_amp_O2=false and rollout.dtype=float32; bf16 needs 8.0 (Ampere)"
        return Check("precision", "fail", f"{text}, and bf16 does not work", fix)
    return Check("precision", "pass", text)


def assess_layers(version: str, fp8: bool) -> Check:
    """Assess whether the installed version of Transformer Engine supports the configuration."""
    name = "transformer engine"
    numbers, early = re.match(r"[\d.]+", version), re.search(r"\.?(dev|a|b|rc)\d*", version.split("+")[0])
    release = tuple(int(number) for number in (numbers[0] if numbers else "0").strip(".").split("."))
    if fp8 and release < FP8_LAYERS:
        return Check(name, "fail", f"version {version}; FP8 needs 2.2.0", "update it, or set model.fp8=null")
    if fp8 and release[:3] == FP8_LAYERS and early:
        text = (
            f"version {version} is older than the final 2.2.0: FP8 weights that it caches in a pass without gradients"
            " cannot be used in an update"
        )
        fix = "update it, or set model.fp8=null; the actor drops these weights, but this has not been tested on a GPU"
        return Check(name, "warn", text, fix)
    return Check(name, "pass", f"version {version}")


def assess_torch(name: str, facts: TorchFacts, wanted: int, words: str) -> Check:
    """Assess whether torch of an environment sees the GPUs.  `words`: the keys and values that determine `wanted`."""
    text = f"torch {facts.torch}, CUDA {facts.cuda}, sees {facts.gpus} GPUs"
    if facts.cuda is None:
        fix = "install torch for CUDA into that environment: leave TORCH_INDEX empty, or set it to PyTorch's CUDA index"
        return Check(name, "fail", f"torch {facts.torch} is a CPU build", fix)
    if facts.gpus < wanted:
        fix = "compare CUDA_VISIBLE_DEVICES, the container's devices and `nvidia-smi` with trainer.devices"
        return Check(name, "fail", f"{text}; the run needs {words}", fix)
    return Check(name, "pass", text)
