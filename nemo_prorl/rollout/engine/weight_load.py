"""Weights of a running engine: the check of a file before the model is changed, and the load in vLLM's worker.

Runs in the rollout environment.  Importing this module imports neither torch nor vLLM.
"""

import os
import stat
from pathlib import Path
from typing import TYPE_CHECKING, Any

from safetensors import SafetensorError, safe_open

from nemo_prorl.data.hf_config import read_config, takes_part

if TYPE_CHECKING:
    from nemo_prorl.rollout.checksums import Held

Shapes = dict[str, tuple[int, ...]]


class UnfitWeights(ValueError):
    """A weights file was refused; the model is unchanged.  The text names the file or tensor and the fault."""


def read_header(path: str) -> Shapes:
    """Return {tensor name: shape} of a safetensors file.  Only its header and its size are read.

    Raises UnfitWeights if the file cannot be read, is not safetensors, or has the wrong length.
    """
    try:
        with safe_open(path, framework="np") as file:
            return {name: tuple(file.get_slice(name).get_shape()) for name in file.keys()}  # noqa: SIM118
    except (OSError, SafetensorError) as error:
        raise UnfitWeights(f"{path}: expected a complete safetensors file: {type(error).__name__}: {error}") from error


def shapes_of_model(folder: str) -> Shapes:
    """Return {tensor name: shape} of what the model computes with, from a Hugging Face model folder.

    Raises UnfitWeights for a folder without weights.
    """
    shapes: Shapes = {}
    for name in sorted(os.listdir(folder)):
        if name.endswith(".safetensors"):
            shapes.update(read_header(os.path.join(folder, name)))
    if not shapes:
        raise UnfitWeights(f"{folder}: contains no *.safetensors file.  Fix: export the model to this folder")
    hf = read_config(Path(folder))
    return {name: shape for name, shape in shapes.items() if takes_part(name, hf)}


def check_fits(path: str, folder: str, shapes: Shapes) -> None:
    """Raise UnfitWeights unless `path` is a complete weights file of this model directly in `folder`.

    Symbolic links are refused, so that nothing outside the run's folder can be loaded.
    """
    inside = os.path.join(os.path.realpath(folder), os.path.basename(path))
    if os.path.islink(path) or os.path.realpath(path) != inside:
        raise UnfitWeights(f"{path}: expected a file directly in this run's weights folder {folder}; links are refused")
    if not os.path.exists(inside) or not stat.S_ISREG(os.lstat(inside).st_mode):
        raise UnfitWeights(f"{path}: no such file")
    header = read_header(inside)
    wrong = sorted(name for name in shapes.keys() | header.keys() if shapes.get(name) != header.get(name))
    if wrong:
        first = wrong[0]
        raise UnfitWeights(
            f"{path}: {len(wrong)} tensors differ from the model; {first}: expected shape {shapes.get(first)}, "
            f"got {header.get(first)} (None: no such tensor)"
        )


def check_held(path: str, ranks: "list[list[Held]]") -> list[str]:
    """Check that an engine holds the weights of a file from which it has just loaded.

    Args:
        ranks: result of `prorl_load_weights` on each tensor-parallel rank.

    Returns:
        the names of the tensors of the file that could not be compared.

    Raises:
        RuntimeError: A tensor differs; the text names it.
    """
    from nemo_prorl.rollout.checksums import compare, from_metadata

    with safe_open(path, framework="np") as file:
        _, expected = from_metadata(file.metadata())
    wrong, unread = compare(expected, ranks)
    if wrong:
        raise RuntimeError(
            f"the engine holds other values than the published file in {len(wrong)} tensors: {', '.join(wrong[:3])}"
        )
    return unread


class WeightLoader:
    """Methods that vLLM adds to its worker (option `worker_extension_cls`); they run in the process of the model."""

    model_config: Any
    model_runner: Any
    reload_weights: Any  # method of the worker; it also sets vLLM's current configuration, which a quantised load reads

    def prorl_free_bytes(self) -> int:
        """Return the free bytes of this worker's GPU."""
        import torch

        return int(torch.cuda.mem_get_info()[0])

    def prorl_load_weights(self, path: str) -> "list[Held]":
        """Load a checked file into the running model; return the checksums of what the model then holds.

        A file without checksums, which is not published by a trainer, is not compared: the result is empty.

        After an error the model may contain old and new weights.

        Each tensor is first rounded to the engine's dtype, as when an engine starts.  vLLM's CPU build stores biases in
        float32, so without this cast a loaded bias would have more digits than the same bias after a restart.
        """
        from vllm.distributed import get_tensor_model_parallel_rank

        from nemo_prorl.rollout.checksums import from_metadata, held

        dtype = self.model_config.dtype
        with safe_open(path, framework="pt") as file:
            tensors = ((name, file.get_tensor(name).to(dtype)) for name in file.keys())  # noqa: SIM118
            self.reload_weights(weights_iterator=tensors)
            version, checksums = from_metadata(file.metadata())
        model = self.model_runner.get_model()
        _repack_tied_head(model)
        if not checksums:
            return []
        return list(held(model, read_header(path), version, dtype, get_tensor_model_parallel_rank()))


def _repack_tied_head(model: Any) -> None:
    """Pack a tied `lm_head` for CPU kernels after a load.

    vLLM 0.32 packs the head when the engine starts, but not in `reload_weights`.
    """
    from vllm.platforms import current_platform

    head = getattr(model, "lm_head", None)
    embedding = getattr(getattr(model, "model", None), "embed_tokens", None)
    if not current_platform.is_cpu() or head is None or embedding is None or head.weight is not embedding.weight:
        return
    from vllm.model_executor.layers.utils import dispatch_cpu_unquantized_gemm

    dispatch_cpu_unquantized_gemm(head, remove_weight=False)
