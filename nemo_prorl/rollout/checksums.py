"""Checksums of weights: what an engine holds after a load, compared with what the trainer published.

An engine that keeps one tensor of the step before samples from another policy, and no average over tokens shows it.
A checksum of a tensor has two parts, with other random numbers for each version:

- exact: the bits of all values of a bias or norm, and of 4 columns of a matrix, other ones for each version.  The bits
  are multiplied by random odd integers of row and column, so that permuted rows change the sum.
- projection: the matrix times a random vector, with the rows weighted and summed in 32 sums.  This reads every value,
  so that changes in other columns are found if they exceed the rounding of the product.

Both parts are sums over values.  So the checksum of a merged matrix (vLLM's qkv_proj and gate_up_proj) is the sum of
those of its parts, and the checksum of a matrix that engine ranks share is the sum over these ranks.
"""

import functools
import hashlib
import json
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

_KEY = "checksums"  # in the metadata of a published file
_COLUMNS = 4  # more cost CPU engines 9 % of a load, most of it for the head
_SUMS = 32  # of a projection; a damage that one of them misses by chance is in the others
_MODULO = 1 << 64
_INTEGERS = {8: torch.int64, 4: torch.int32, 2: torch.int16}  # keys: bytes of a value
_FLOAT32 = 2.0**-24  # largest relative error of a rounded value
_CERTAINTY = 4.0  # times the largest rounding of a value; sums have 0.4 times as a standard deviation

# Number of the values whose bits are read, sum of these bits modulo 2**64, and the sums of the projection.
Checksum = tuple[int, int, list[float]]
# Names of the published tensors that are merged into one, its checksum, and the squared rounding error of each sum.
Held = tuple[list[str], Checksum, list[float]]


@dataclass(frozen=True)
class _Reading:
    """What is read of a matrix (R rows): some columns and the product with the random vector.

    `column_C`: numbers of the columns in the published matrix.  `rounding`: largest relative error of `product_R`.
    """

    value_RC: Tensor
    column_C: Tensor
    product_R: Tensor
    width: int
    rounding: float = 0.0
    smallest: float = 0.0


def columns_of(width: int, version: int) -> Tensor:
    """Return the indices (at most 4,) of the columns that a checksum reads; consecutive versions read others."""
    count = min(_COLUMNS, width)
    return (version * count + torch.arange(count)) % width  # side by side, so that few cache lines are read


def published(name: str, tensor: Tensor, version: int, dtype: torch.dtype) -> Checksum:
    """Return the checksum of a published tensor, rounded to the engines' dtype."""
    matrix = tensor if tensor.ndim == 2 else tensor.reshape(-1, 1)
    checksum, _ = _checksum(_read(matrix, 0, matrix.shape[1], version, dtype), [(name, len(matrix), 0, 0)], version)
    return checksum


def held(
    model: Any, shapes: Mapping[str, Sequence[int]], version: int, dtype: torch.dtype, rank: int
) -> Iterator[Held]:
    """Yield the checksum of each tensor that vLLM's model holds on one of its tensor-parallel ranks.

    vLLM's CPU build keeps most matrices only in the form that its kernels read.  Such a matrix is read by applying the
    layer: its columns are the products with unit vectors, which are exact.

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
            for reading in _readings(module, kind, shape=shapes[names[0]], version=version, dtype=dtype, rank=rank):
                sizes = {part: shapes[part][0] for part in names}
                parts = _parts(module, sizes, len(reading.product_R), rank, version)
                yield names, *_checksum(reading, parts, version)


def _readings(
    module: Any, kind: str, shape: Sequence[int], version: int, dtype: torch.dtype, rank: int
) -> Iterator[_Reading]:
    """Read a layer's weight or bias; several readings if the layer has several copies of it."""
    tensor = getattr(module, kind).data
    if len(shape) == 1:
        yield _read(tensor[:, None], 0, 1, version, dtype)
        return
    width = tensor.shape[1] if tensor.numel() else module.input_size_per_partition
    first = rank * width if width < shape[1] else 0
    if tensor.numel():
        yield _read(tensor, first, shape[1], version, dtype)
    if hasattr(module, "cpu_linear"):
        column_C = _columns_between(first, first + width, shape[1], version)
        inputs = torch.zeros(len(column_C) + 1, width, dtype=tensor.dtype)
        inputs[torch.arange(len(column_C)), column_C - first] = 1.0
        inputs[-1] = _vector(version, shape[1])[first : first + width]
        outputs = module.cpu_linear(inputs, module.weight, None)
        limits = torch.finfo(tensor.dtype)
        product_R, value_RC = outputs[-1].double(), outputs[:-1].T.to(dtype)
        yield _Reading(
            value_RC, column_C, product_R=product_R, width=shape[1], rounding=limits.eps / 2, smallest=limits.tiny
        )


def _read(matrix: Tensor, first: int, width: int, version: int, dtype: torch.dtype) -> _Reading:
    """Read columns `first` and following of a published matrix with `width` columns, in one pass over its values."""
    column_C = _columns_between(first, first + matrix.shape[1], width, version)
    value_RC = matrix[:, (column_C - first).to(matrix.device)].to(dtype)
    vector_C = _vector(version, width)[first : first + matrix.shape[1]].to(matrix.device)
    at_once = (1 << (19 if matrix.is_cpu else 24)) // max(1, matrix.shape[1])  # rows; on CPUs they stay in the cache
    # One buffer for all parts: fresh memory for each costs CPUs several times as much as the work.
    buffer_RC = torch.empty(min(max(1, at_once), len(matrix)), matrix.shape[1], device=matrix.device)
    products = []
    for rows in torch.split(matrix, max(1, len(buffer_RC))):
        part_RC = buffer_RC[: len(rows)].copy_(rows.to(dtype))
        # On GPUs a matrix-vector product may be rounded to TF32.
        products.append(torch.mv(part_RC, vector_C) if part_RC.is_cpu else part_RC.mul_(vector_C).sum(1))
    return _Reading(value_RC, column_C, torch.cat(products).double(), width)


def _columns_between(first: int, end: int, width: int, version: int) -> Tensor:
    columns = columns_of(width, version)
    return columns[(columns >= first) & (columns < end)]


def _parts(
    module: Any, sizes: Mapping[str, int], rows: int, rank: int, version: int
) -> list[tuple[str, int, int, int]]:
    """Return which rows of which published tensors a rank's layer holds, in the layer's order.

    If several ranks have the same key-value head, one of them counts it, so that sums over ranks have it once; in the
    next version the next of them.  Rows beyond the last part are padding.

    Args:
        sizes: number of rows of each merged tensor.
        rows: number of rows of the layer on this rank.

    Returns:
        (name of the published tensor, number of rows that count, first of them in the published tensor and in the
        layer) of each part.
    """
    total = sum(sizes.values())
    if rows >= total:
        counts, firsts = dict(sizes), dict.fromkeys(sizes, 0)
    elif (replicas := getattr(module, "num_kv_head_replicas", 1)) > 1:
        query = module.num_heads * module.head_size
        counts = {name: query if at == 0 else (rows - query) // 2 for at, name in enumerate(sizes)}
        firsts = {name: (rank if at == 0 else rank // replicas) * counts[name] for at, name in enumerate(sizes)}
        if rank % replicas != version % replicas:
            counts = {name: count if at == 0 else 0 for at, (name, count) in enumerate(counts.items())}
    else:  # a vocabulary may end within the last rank's rows
        share = {name: rows if len(sizes) == 1 else size * rows // total for name, size in sizes.items()}
        firsts = {name: rank * share[name] for name in sizes}
        counts = {name: min(share[name], max(0, size - firsts[name])) for name, size in sizes.items()}
    starts = dict(zip(counts, np.cumsum([0, *counts.values()]).tolist(), strict=False))
    return [(name, counts[name], firsts[name], starts[name]) for name in sizes]


def _checksum(
    reading: _Reading, parts: Sequence[tuple[str, int, int, int]], version: int
) -> tuple[Checksum, list[float]]:
    """Return the checksum of what is read, and the squared rounding error of each sum of its projection."""
    value_RC, product_R, device = reading.value_RC, reading.product_R, reading.product_R.device
    factor_C = (_random(version, "columns", reading.width) | 1)[reading.column_C].to(device)
    count, bits = 0, 0
    sums = torch.zeros(2, _SUMS, dtype=torch.float64, device=device)  # of the products and of their squared errors
    for name, rows, first, start in parts:
        number_R = _random(version, name, first + rows)[first:].to(device)
        part_RC = value_RC[start : start + rows] + 0.0  # -0.0 becomes 0.0
        bits_R = (part_RC.contiguous().view(_INTEGERS[part_RC.element_size()]).long() * factor_C).sum(1)
        count, bits = count + part_RC.numel(), bits + int((bits_R * (number_R | 1)).sum())
        unit_R = number_R.double() * 2.0**-63
        # 0.5 to 1.5, so that exchanged rows change a sum; of both signs, so that equal rows do not add up rounding.
        weight_R = unit_R + 0.5 * unit_R.sign()
        product = weight_R * product_R[start : start + rows]
        size = weight_R.square() * reading.width * part_RC.double().square().sum(1) / max(1, part_RC.shape[1])
        error = (product.abs() + reading.smallest).square() * reading.rounding**2
        place_R = torch.arange(first, first + rows, device=device) % _SUMS
        sums.index_add_(1, place_R, torch.stack([product, error]))
        # Kernels and we add up in float32.  The terms' sizes are guessed from product and columns: either may be small.
        sums[1] += reading.width * _FLOAT32**2 * torch.maximum(product.square(), size).sum()
    return (count, bits % _MODULO, sums[0].tolist()), sums[1].tolist()


@functools.lru_cache(maxsize=4)
def _vector(version: int, width: int) -> Tensor:
    """Return float32 (width,), the vector of a projection: +-1 to +-1.94 in 16 steps, exact in every dtype."""
    number_C = _random(version, "columns", width)
    size_C = 1.0 + (number_C >> 8 & 15).float() / 16.0
    return torch.where(number_C < 0, -size_C, size_C)


def _random(version: int, name: str, count: int) -> Tensor:
    """Return int64 (count,) of random numbers, the same on every machine: numpy guarantees this for raw numbers."""
    seed = int.from_bytes(hashlib.blake2b(f"{version} {name}".encode(), digest_size=8).digest(), "little")
    return torch.from_numpy(np.random.PCG64(seed).random_raw(count).view(np.int64))


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
        wanted = _sum(expected[name] for name in names)
        measured = [(checksum, errors) for _, checksum, errors in copies]
        if any(count != wanted[0] for (count, *_), _ in measured):  # the ranks have parts
            total = [sum(column) for column in zip(*(errors for _, errors in measured), strict=True)]
            measured = [(_sum(checksum for checksum, _ in measured), total)]
        if not all(_equal(wanted, checksum, errors) for checksum, errors in measured):
            wrong["+".join(names)] = None
    return list(wrong), list(unread)


def _equal(wanted: Checksum, measured: Checksum, errors: Sequence[float]) -> bool:
    """Return whether the exact parts are equal, and the projections up to rounding."""
    if tuple(measured[:2]) != tuple(wanted[:2]):
        return False
    return all(
        not math.isfinite(a) or abs(a - b) <= _CERTAINTY * math.sqrt(error)  # weights that are not finite have no sum
        for a, b, error in zip(wanted[2], measured[2], errors, strict=True)
    )


def _sum(parts: Iterable[Checksum]) -> Checksum:
    counts, bits, sums = zip(*parts, strict=True)
    return sum(counts), sum(bits) % _MODULO, [sum(column) for column in zip(*sums, strict=True)]


def to_metadata(version: int, checksums: Mapping[str, Checksum]) -> dict[str, str]:
    """Return the metadata of a safetensors file with these checksums; `version` tells which random numbers they use."""
    tensors = {name: (n, bits, [float(f"{x:.10g}") for x in sums]) for name, (n, bits, sums) in checksums.items()}
    return {_KEY: json.dumps({"version": version, "tensors": tensors}, separators=(",", ":"))}


def from_metadata(metadata: Mapping[str, str] | None) -> tuple[int, dict[str, Checksum]]:
    """Return version and checksums from the metadata of a safetensors file; a file of another program has none."""
    if metadata is None or _KEY not in metadata:
        return 0, {}
    content = json.loads(metadata[_KEY])
    return content["version"], {name: (n, bits, sums) for name, (n, bits, sums) in content["tensors"].items()}
