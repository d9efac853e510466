"""Rotary positions, of heads whose whole length is rotated in two halves."""

import torch
from torch import Tensor


def apply_rotary_pos_emb(
    t: Tensor,
    freqs: Tensor,
    tensor_format: str = "sbhd",
    fused: bool = False,
    cu_seqlens: Tensor | None = None,
    cp_size: int = 1,
    cp_rank: int = 0,
) -> Tensor:
    """t [s, b, h, d], [b, s, h, d] or [t, h, d], angles [s, 1, 1, d]; "thd" needs `fused` and `cu_seqlens`."""
    assert tensor_format in (("sbhd", "bshd", "thd") if fused else ("sbhd", "bshd"))
    if cp_size != 1:
        raise NotImplementedError("the stand-in for Transformer Engine has no context parallelism")
    angles = freqs.float()
    if tensor_format == "thd":
        assert cu_seqlens is not None
        assert cu_seqlens.dtype == torch.int32
        lengths = cu_seqlens.diff().tolist()
        assert sum(lengths) == t.shape[0]
        angles = torch.cat([angles[:length, 0] for length in lengths])
    elif tensor_format == "bshd":
        angles = angles[: t.shape[1]].transpose(0, 1)
    else:
        angles = angles[: t.shape[0]]
    first, second = t.float().chunk(2, -1)
    turned = torch.cat((-second, first), -1)
    return (t.float() * angles.cos() + turned * angles.sin()).to(t.dtype)
