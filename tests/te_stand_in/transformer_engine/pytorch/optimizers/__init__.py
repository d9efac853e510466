"""Adam, and operations over lists of tensors."""

from transformer_engine.pytorch.optimizers.fused_adam import FusedAdam as FusedAdam
from transformer_engine.pytorch.optimizers.fused_sgd import FusedSGD as FusedSGD
from transformer_engine.pytorch.optimizers.multi_tensor_apply import MultiTensorApply as MultiTensorApply
from transformer_engine.pytorch.optimizers.multi_tensor_apply import multi_tensor_applier as multi_tensor_applier
from transformer_engine.pytorch.optimizers.multi_tensor_apply import multi_tensor_l2norm as multi_tensor_l2norm
from transformer_engine.pytorch.optimizers.multi_tensor_apply import multi_tensor_scale as multi_tensor_scale
