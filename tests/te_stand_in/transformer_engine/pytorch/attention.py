"""Attention by torch, with Transformer Engine's layouts and checks."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from transformer_engine.pytorch.dot_product_attention.rope import apply_rotary_pos_emb as apply_rotary_pos_emb
from transformer_engine.pytorch.module.base import TransformerEngineBaseModule

_MASKS = "no_mask", "padding", "causal", "padding_causal", "arbitrary"


class _SplitAlongDim(torch.autograd.Function):
    """torch.split, whose gradient is one tensor."""

    @staticmethod
    def forward(
        ctx: Any, mixed_x_layer: Tensor, split_dim: int, split_size_or_sections: Any, squeeze: bool = False
    ) -> Any:
        ctx.dim, ctx.squeeze = split_dim, squeeze
        parts = torch.split(mixed_x_layer, split_size_or_sections, dim=split_dim)
        return tuple(part.squeeze(split_dim) for part in parts) if squeeze else parts

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None, None]:
        parts = [grad.unsqueeze(ctx.dim) for grad in grads] if ctx.squeeze else list(grads)
        return torch.cat(parts, dim=ctx.dim), None, None, None


class DotProductAttention(TransformerEngineBaseModule):
    """softmax(q k^T) v, with grouped queries; in FP8 recipes it computes in the dtype of its input."""

    def __init__(
        self,
        num_attention_heads: int,
        kv_channels: int | tuple[int, int],
        num_gqa_groups: int | None = None,
        attention_dropout: float = 0.0,
        qkv_format: str = "sbhd",
        attn_mask_type: str = "causal",
        window_size: tuple[int, int] | None = None,
        sequence_parallel: bool = False,
        tp_size: int = 1,
        get_rng_state_tracker: Callable[[], Any] | None = None,
        tp_group: Any = None,
        layer_number: int | None = None,
        attention_type: str = "self",
        cp_group: Any = None,
        cp_global_ranks: list[int] | None = None,
        cp_stream: Any = None,
        cp_comm_type: str = "p2p",
        softmax_scale: float | None = None,
    ) -> None:
        super().__init__()
        if attention_dropout or window_size or cp_group is not None or attention_type != "self":
            raise NotImplementedError("the stand-in for Transformer Engine has plain self-attention alone")
        self._take_group(tp_group, tp_size)
        self.qkv_format, self.attn_mask_type, self.softmax_scale = qkv_format, attn_mask_type, softmax_scale
        self.num_attention_heads, self.num_gqa_groups = num_attention_heads, num_gqa_groups or num_attention_heads
        assert num_attention_heads % self.num_gqa_groups == 0
        self.groups_here = self.num_gqa_groups // self.tp_size
        self.head_sizes = (kv_channels, kv_channels) if isinstance(kv_channels, int) else tuple(kv_channels)
        self.layer_number = layer_number or 1

    def set_context_parallel_group(
        self, cp_group: Any, cp_global_ranks: list[int], cp_stream: Any, cp_comm_type: str = "p2p"
    ) -> None:
        if cp_group is not None and torch.distributed.get_world_size(cp_group) > 1:
            raise NotImplementedError("the stand-in for Transformer Engine has no context parallelism")

    def forward(
        self,
        query_layer: Tensor,
        key_layer: Tensor,
        value_layer: Tensor,
        attention_mask: Any = None,
        qkv_format: str | None = None,
        cu_seqlens_q: Tensor | None = None,
        cu_seqlens_kv: Tensor | None = None,
        cu_seqlens_q_padded: Tensor | None = None,
        cu_seqlens_kv_padded: Tensor | None = None,
        max_seqlen_q: int | None = None,
        max_seqlen_kv: int | None = None,
        attn_mask_type: str | None = None,
        window_size: tuple[int, int] | None = None,
        checkpoint_core_attention: bool = False,
        core_attention_bias_type: str = "no_bias",
        core_attention_bias: Tensor | None = None,
        alibi_slopes: Tensor | None = None,
        fast_zero_fill: bool = True,
        inference_params: Any = None,
        pad_between_seqs: bool | None = None,
    ) -> Tensor:
        unused = (core_attention_bias, alibi_slopes, inference_params, cu_seqlens_q_padded, cu_seqlens_kv_padded)
        if any(x is not None for x in unused) or window_size is not None:
            raise NotImplementedError("the stand-in for Transformer Engine has plain self-attention alone")
        mask, layout = attn_mask_type or self.attn_mask_type, qkv_format or self.qkv_format
        assert mask in _MASKS, f"Attention mask type {mask} is not supported!"
        with self.prepare_forward(query_layer, num_gemms=3):
            heads = query_layer, key_layer, value_layer
            self._check(heads, layout)
            if layout == "thd":
                return self._packed(heads, mask, cu_seqlens_q, cu_seqlens_kv, max_seqlen_q)
            if mask not in ("causal", "no_mask"):
                raise NotImplementedError(f"the stand-in for Transformer Engine has no {mask} mask for {layout}")
            if layout == "sbhd":
                return self._attend(tuple(x.transpose(0, 1) for x in heads), mask == "causal").transpose(0, 1)
            return self._attend(heads, mask == "causal")

    def _check(self, heads: tuple[Tensor, ...], layout: str) -> None:
        query, key, value = heads
        assert query.dtype == key.dtype == value.dtype, "Queries, keys and values must have the same data type!"
        assert key.shape[:-1] == value.shape[:-1]
        assert (query.shape[-1], value.shape[-1]) == self.head_sizes, "head sizes are not those of the layer"
        assert key.shape[-2] == self.groups_here, f"expected {self.groups_here} key-value heads, got {key.shape[-2]}"
        assert all(x.dim() == (3 if layout == "thd" else 4) for x in heads)

    def _packed(
        self,
        heads: tuple[Tensor, ...],
        mask: str,
        cu_seqlens_q: Tensor | None,
        cu_seqlens_kv: Tensor | None,
        max_seqlen_q: int | None,
    ) -> Tensor:
        assert "padding" in mask, "Attention mask type must be padding or padding_causal for qkv_format=thd!"
        assert cu_seqlens_q is not None
        assert cu_seqlens_kv is not None
        assert cu_seqlens_q.dtype == cu_seqlens_kv.dtype == torch.int32
        assert cu_seqlens_q.shape == cu_seqlens_kv.shape
        lengths = cu_seqlens_q.diff().tolist()
        assert max_seqlen_q is None or max(lengths) <= max_seqlen_q, "max_seqlen_q is below the longest sequence"
        assert sum(lengths) == heads[0].shape[0]  # a kernel would leave what lies behind them undefined
        sequences = zip(*(x.split(lengths) for x in heads), strict=True)
        outputs = [self._attend(tuple(x[None] for x in one), mask == "padding_causal")[0] for one in sequences]
        return torch.cat(outputs)

    def _attend(self, heads: tuple[Tensor, ...], causal: bool) -> Tensor:
        """[b, s, h, d] -> [b, s, h * d]."""
        query, key, value = (x.transpose(1, 2) for x in heads)
        out = scaled_dot_product_attention(
            query, key, value, is_causal=causal, scale=self.softmax_scale, enable_gqa=query.shape[1] != key.shape[1]
        )
        return out.transpose(1, 2).flatten(2)
