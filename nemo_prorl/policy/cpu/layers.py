"""Transformer layers without Transformer Engine: Megatron's local layers with another attention and another norm.

Megatron's unfused attention keeps the full score matrix in memory, and its `WrappedTorchNorm` refuses sequence
parallelism; `CausalAttention` and `RMSNorm` replace them.
"""

import torch
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules, get_num_layers_to_build
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor
from torch.nn.functional import rms_norm, scaled_dot_product_attention

from nemo_prorl.policy.packing import SharedPrompts


class RMSNorm(torch.nn.Module):
    """Norm `weight * x / rms(x)`; under sequence parallelism the weight's gradient is reduced over tensor ranks."""

    def __init__(self, config: TransformerConfig, hidden_size: int, eps: float = 1e-5) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(hidden_size, dtype=config.params_dtype))
        self.weight.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        return rms_norm(x, (x.shape[-1],), self.weight, self.eps)


class CausalAttention(MegatronModule):
    """Causal attention by torch's fused kernel, with grouped queries.

    The attention mask is not used: sequences are padded on the right, so no real token attends to padding.  Packed
    sequences are unpacked for the attention only: sequences of similar length form a group, each group is padded to its
    longest sequence, and each response gets a copy of its prompt.
    """

    def __init__(
        self,
        config: TransformerConfig,
        layer_number: int,
        attn_mask_type: AttnMaskType,
        attention_type: str,
        attention_dropout: float | None = None,
        softmax_scale: float | None = None,
        cp_comm_type: str | None = None,
    ) -> None:
        super().__init__(config=config)
        if config.context_parallel_size != 1 or config.attention_dropout or attention_dropout:
            raise NotImplementedError(
                "CausalAttention: expected no context parallelism and no dropout; got model.context_parallel_size="
                f"{config.context_parallel_size}, attention_dropout={attention_dropout or config.attention_dropout}"
            )
        self.softmax_scale = softmax_scale

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        *_: object,
        packed_seq_params: SharedPrompts | None = None,
        **__: object,
    ) -> Tensor:
        """Return the attention's output [S, B, heads * D]; packed sequences have no dimension B.

        Args:
            query: [S, B, heads, D].
            key: [S, B, groups, D]; `value` has the same shape.
            packed_seq_params: the layout of packed sequences; None if sequences are padded.
        """
        if packed_seq_params is None:
            return self._causal(*(x.transpose(0, 1) for x in (query, key, value))).transpose(0, 1)
        heads = [x.index_select(0, packed_seq_params.spread_R) for x in (query, key, value)]
        outputs, start = [], 0
        for rows, width in packed_seq_params.groups:
            group = slice(start, start + rows * width)
            outputs.append(self._causal(*(x[group].unflatten(0, (rows, width)) for x in heads)).flatten(0, 1))
            start += rows * width
        return torch.cat(outputs).index_select(0, packed_seq_params.keep_N)

    def _causal(self, query_BSHD: Tensor, key_BSGD: Tensor, value_BSGD: Tensor) -> Tensor:
        """Return [B, S, heads * D]."""
        out_BHSD = scaled_dot_product_attention(
            query_BSHD.transpose(1, 2),
            key_BSGD.transpose(1, 2),
            value_BSGD.transpose(1, 2),
            is_causal=True,
            scale=self.softmax_scale,
            enable_gqa=query_BSHD.shape[2] != key_BSGD.shape[2],
        )
        return out_BHSD.transpose(1, 2).flatten(2)


def layer_spec(config: TransformerConfig) -> TransformerBlockSubmodules:
    """Return the layers of a Llama, Qwen2 or Qwen3 decoder without Transformer Engine."""
    spec = get_gpt_layer_local_spec(normalization=config.normalization)
    attention = spec.submodules.self_attention.submodules
    if config.qk_layernorm:
        attention.q_layernorm = attention.k_layernorm = RMSNorm
    spec.submodules.input_layernorm = RMSNorm
    spec.submodules.pre_mlp_layernorm = RMSNorm
    attention.core_attention = CausalAttention
    return TransformerBlockSubmodules(layer_specs=[spec] * get_num_layers_to_build(config), layer_norm=RMSNorm)
