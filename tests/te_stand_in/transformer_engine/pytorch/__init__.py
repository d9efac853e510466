"""What Megatron and NeMo import of `transformer_engine.pytorch`."""

from transformer_engine.pytorch import distributed as distributed
from transformer_engine.pytorch import optimizers as optimizers
from transformer_engine.pytorch.attention import DotProductAttention as DotProductAttention
from transformer_engine.pytorch.distributed import CudaRNGStatesTracker as CudaRNGStatesTracker
from transformer_engine.pytorch.distributed import checkpoint as checkpoint
from transformer_engine.pytorch.fp8 import fp8_autocast as fp8_autocast
from transformer_engine.pytorch.fp8 import fp8_model_init as fp8_model_init
from transformer_engine.pytorch.module import GroupedLinear as GroupedLinear
from transformer_engine.pytorch.module import LayerNorm as LayerNorm
from transformer_engine.pytorch.module import LayerNormLinear as LayerNormLinear
from transformer_engine.pytorch.module import Linear as Linear
from transformer_engine.pytorch.module import RMSNorm as RMSNorm
from transformer_engine.pytorch.transformer import TransformerLayer as TransformerLayer
