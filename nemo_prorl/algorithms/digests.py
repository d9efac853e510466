"""Digests of tensors: 64 bits that depend on each bit of each value and on its position.

A digest is a sum over the bits of all values, each multiplied by an odd number of its position, modulo 2**64.  It finds
accidental differences, such as a flipped bit or two values that changed places.  It does not stop an attacker.
"""

import functools
import hashlib

import torch
from torch import Tensor

_BLOCK = 1 << 20  # positions for which factors are kept
_MODULO = 1 << 64
_BITS = {8: torch.int64, 4: torch.int32, 2: torch.int16, 1: torch.int8}  # bytes of a value: the type of its bits


def digest(value: Tensor) -> int:
    """Return the digest of a tensor, in 0..2**64 - 1; its shape does not count."""
    words = _words(value)
    total = torch.zeros((), dtype=torch.int64, device=words.device)
    for block, part in enumerate(torch.split(words, _BLOCK)):
        factors = _factors(str(words.device))[: len(part)]
        of_block = torch.dot(part, factors) if part.is_cpu else (part * factors).sum()  # CUDA has no dot of integers
        total += of_block * (_mixed(block) | 1)
    return int(total) % _MODULO


def _words(value: Tensor) -> Tensor:
    """Return the bits of a tensor as int64, eight bytes each; zeros fill up the last."""
    flat = value.detach().contiguous().flatten().view(torch.uint8)
    if len(flat) % 8 or flat.storage_offset() % 8:  # a part of a larger tensor may begin anywhere
        flat = torch.cat([flat, flat.new_zeros(-len(flat) % 8)])
    return flat.view(torch.int64)


def row_digests(value_BT: Tensor) -> Tensor:
    """Return the digest of each row, modulo 2**32: int64 [B].  Zeros at the end of a row do not count."""
    width = value_BT.shape[1]
    parts = torch.split(_bits(value_BT), max(1, _BLOCK // max(1, width)))  # eight bytes for each value are much memory
    return torch.cat([_folded((part.long() * _positions(width, part.device)).sum(1)) for part in parts])


def ragged_digests(value_N: Tensor, length_B: Tensor) -> Tensor:
    """Return the digest of each row, as `row_digests`, of rows without padding that follow each other."""
    bits_N, total_B = _bits(value_N).long(), torch.zeros(len(length_B), dtype=torch.int64)
    first_B = length_B.cumsum(0) - length_B
    row_N = torch.repeat_interleave(torch.arange(len(length_B)), length_B)
    position_N = torch.arange(len(bits_N)) - first_B[row_N]
    factor_P = _positions(int(length_B.max()) if len(length_B) else 0, bits_N.device)
    return _folded(total_B.index_add_(0, row_N, bits_N * factor_P[position_N]))


def text_digest(text: str) -> int:
    """Return the digest of a text, in 0..2**32 - 1."""
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=4).digest(), "big")


def named(name: str, value: int) -> int:
    """Return a digest that also depends on a name, so that digests of several tensors can be summed."""
    factor = int.from_bytes(hashlib.blake2b(name.encode(), digest_size=8).digest(), "big") | 1
    return value * factor % _MODULO


def _folded(total_B: Tensor) -> Tensor:
    return (total_B ^ total_B >> 32) & 0xFFFFFFFF


def _positions(width: int, device: torch.device) -> Tensor:
    """Return a factor for each position of a row: int64 [width]."""
    first = _factors(str(device))
    if width <= _BLOCK:
        return first[:width]
    return torch.cat([first, *(first * (_mixed(block) | 1) for block in range(1, -(-width // _BLOCK)))])[:width]


def _bits(value: Tensor) -> Tensor:
    value = value.detach().contiguous()
    if value.dtype == torch.bool:
        return value.to(torch.int8)
    return value.view(_BITS[value.element_size()])


@functools.lru_cache(maxsize=2)
def _factors(device: str) -> Tensor:
    """Return an odd factor for each position of a block: int64 [2**20]."""
    position = torch.arange(1, _BLOCK + 1, device=device) * -7046029254386353131  # 2**64 / golden ratio
    position ^= position >> 29
    position *= -4658895280553007687
    return position ^ position >> 32 | 1


def _mixed(block: int) -> int:
    """Return a factor for a block, in the range of int64."""
    return int.from_bytes(hashlib.blake2b(str(block).encode(), digest_size=8).digest(), "big", signed=True)
