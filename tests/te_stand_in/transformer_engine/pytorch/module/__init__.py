"""Layers."""

from transformer_engine.pytorch.module.grouped_linear import GroupedLinear as GroupedLinear
from transformer_engine.pytorch.module.layernorm import LayerNorm as LayerNorm
from transformer_engine.pytorch.module.layernorm_linear import LayerNormLinear as LayerNormLinear
from transformer_engine.pytorch.module.linear import Linear as Linear
from transformer_engine.pytorch.module.rmsnorm import RMSNorm as RMSNorm
