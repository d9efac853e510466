"""Checksums of weights: what an engine holds after a load, compared with what the trainer published.

An engine that keeps one tensor of the step before samples from another policy, and no average over tokens shows it.
Of each matrix 4 columns are read, other ones for each version; biases and norms are read whole.  A checksum does not
depend on the order of rows, so the checksum of a merged matrix (vLLM's qkv_proj and gate_up_proj) is the sum of those
of its parts, and the checksum of a matrix that engine ranks share is the sum over these ranks.
"""

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

_KEY = "checksums"  # in the metadata of a published file
_COLUMNS = 4  # more cost CPU engines 9 % of a load, most of it for the head
_MODULO = 1 << 64
_INTEGERS = {8: torch.int64, 4: torch.int32, 2: torch.int16}  # keys: bytes of a value

# Number of the values; sum and sum of squares of their bits as integers, modulo 2**64.
Checksum = tuple[int, int, int]
Held = tuple[list[str], Checksum]  # names of the published tensors that are merged into one, and its checksum


def columns_of(width: int, version: int) -> Tensor:
    """Return the indices (at most 4,) of the columns that a checksum reads; consecutive versions read others."""
    count = min(_COLUMNS, width)
    return (version * count + torch.arange(count)) % width  # side by side, so that few cache lines are read


def checksum(values: Tensor) -> Checksum:
    """Return the checksum of values of any shape and float dtype; it depends on neither order nor shape."""
    flat = (values + 0.0).contiguous().view(_INTEGERS[values.element_size()]).flatten().long()  # -0.0 becomes 0.0
    total, squares = torch.stack([flat.sum(), (flat * flat).sum()]).tolist()
    return len(flat), total % _MODULO, squares % _MODULO


def published(tensor: Tensor, version: int, dtype: torch.dtype) -> Checksum:
    """Return the checksum of a published tensor, rounded to the engines' dtype."""
    read = tensor[:, columns_of(tensor.shape[1], version).to(tensor.device)] if tensor.ndim == 2 else tensor
    return checksum(read.to(dtype))


def held(
    model: Any, shapes: Mapping[str, Sequence[int]], version: int, dtype: torch.dtype, rank: int
) -> Iterator[Held]:
    """Yield the checksum of each tensor that vLLM's model holds on one of its tensor-parallel ranks.

    vLLM's CPU build keeps most matrices only in the form that its kernels read.  The columns of such a matrix are the
    products of the layer with unit vectors, which are exact.  If several ranks have the same key-value head, only the
    first of them reads it, so that sums over ranks count it once.

    Args:
        shapes: shapes of the published tensors by Hugging Face name.
    """
    merged = getattr(model, "packed_modules_mapping", {})
    for name, module in model.named_modules():
        above, _, leaf = name.rpartition(".")
        for kind in ("weight", "bias"):
            names = [f"{above}.{part}.{kind}".lstrip(".") for part in merged.get(leaf, [leaf])]
            if name == "lm_head" and names[0] not in shapes:
                names = [f"model.embed_tokens.{kind}"]  # a tied head
            if not all(part in shapes for part in names):
                continue
            for values in _values(module, kind, shapes[names[0]], version, rank):
                if rank % getattr(module, "num_kv_head_replicas", 1):
                    values = values[..., : module.num_heads * module.head_size]
                yield names, checksum(values.to(dtype))


def _values(module: Any, kind: str, shape: Sequence[int], version: int, rank: int) -> Iterator[Tensor]:
    """Yield the values that a layer holds: (n,), or columns as (columns, rows); several if it has several copies."""
    tensor = getattr(module, kind).data
    if len(shape) == 1:
        yield tensor
        return
    width = tensor.shape[1] if tensor.numel() else module.input_size_per_partition
    columns = columns_of(shape[1], version)
    if width < shape[1]:
        columns = columns[columns // width == rank] - rank * width
    if tensor.numel():
        yield tensor[:, columns.to(tensor.device)].T
    if hasattr(module, "cpu_linear") and len(columns):
        unit = torch.zeros(len(columns), width, dtype=tensor.dtype)
        unit[torch.arange(len(columns)), columns] = 1.0
        yield module.cpu_linear(unit, module.weight, None)


def compare(expected: Mapping[str, Checksum], ranks: Iterable[Iterable[Held]]) -> tuple[list[str], list[str]]:
    """Return the names of the published tensors whose checksums differ, and of those that `held` did not find.

    Args:
        expected: checksums of the published tensors by name.
        ranks: results of `held` on each tensor-parallel rank.
    """
    wrong: dict[str, None] = {}  # a tensor may be there more than once, such as a tied head
    unread = dict.fromkeys(expected)
    for copies in zip(*ranks, strict=True):  # the same tensor on each rank
        names = copies[0][0]
        if not all(name in expected for name in names):
            continue
        for name in names:
            unread.pop(name, None)
        count, *wanted = _sum(expected[name] for name in names)
        found = [checksum for _, checksum in copies]
        if any(values < count for values, *_ in found):  # the ranks have parts; padding may add zeros
            found = [_sum(found)]
        if any(sums != wanted for _, *sums in found):
            wrong["+".join(names)] = None
    return list(wrong), list(unread)


def _sum(parts: Iterable[Checksum]) -> Checksum:
    counts, totals, squares = zip(*parts, strict=True)
    return sum(counts), sum(totals) % _MODULO, sum(squares) % _MODULO


def to_metadata(version: int, checksums: Mapping[str, Checksum]) -> dict[str, str]:
    """Return the metadata of a safetensors file with these checksums; `version` tells which columns they read."""
    return {_KEY: json.dumps({"version": version, "tensors": checksums}, separators=(",", ":"))}


def from_metadata(metadata: Mapping[str, str] | None) -> tuple[int, dict[str, Checksum]]:
    """Return version and checksums from the metadata of a safetensors file; a file of another program has none."""
    if metadata is None or _KEY not in metadata:
        return 0, {}
    found = json.loads(metadata[_KEY])
    return found["version"], {name: (n, total, squares) for name, (n, total, squares) in found["tensors"].items()}
