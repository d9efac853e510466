"""Megatron-Core's GPTModel in Qwen2's shape with random weights, its distributed optimizer, and a step of training.

The section `mcore` measures this model; unlike the real actor, the model does not need NeMo.  Layers, last hidden
states and chunked log-probabilities are those of the actor (`nemo_prorl.policy`); the wrappers around them are
Megatron-Core's own.
"""

import os
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from gpu.common import Settings
from nemo_prorl.algorithms.logprobs import chunked_logprobs
from nemo_prorl.algorithms.losses import grpo_loss
from nemo_prorl.config import GRPOConfig
from nemo_prorl.launcher.processes import free_port
from nemo_prorl.policy.cpu import shims as cpu

TEMPERATURE, CHUNK = 1.2, 4096


@dataclass(frozen=True)
class Shape:
    """Sizes of the model, and of a micro-batch of one sequence."""

    layers: int = 28
    hidden: int = 1536
    ffn: int = 8960  # width of the feed-forward layers
    heads: int = 12
    groups: int = 2  # key-value heads
    vocab: int = 151_936
    context: int = 8192
    tied: bool = False  # whether embedding and output layer share a weight; not so in DeepSeek-R1-Distill-Qwen-1.5B

    @classmethod
    def of(cls, settings: Settings) -> "Shape":
        return cls(2, 64, 128, 4, 2, 512, 64) if settings.small else cls()

    def flops(self, tokens: int) -> tuple[float, float]:
        """Return the operations of a sequence: (forward, forward and backward).

        Each matrix product counts 2 per weight and token (the output layer counts, the embedding does not); causal
        attention counts its two products over half of all pairs.  The backward pass counts twice the forward pass;
        recomputation does not count.
        """
        head = self.hidden // self.heads
        wide = self.hidden + 2 * self.groups * head
        weights = self.layers * (self.hidden * (wide + self.hidden) + 3 * self.hidden * self.ffn)
        forward = 2.0 * tokens * (weights + self.hidden * self.vocab)
        forward += self.layers * 2.0 * tokens * tokens * self.hidden
        return forward, 3 * forward


def start(settings: Settings) -> None:
    """Set up the process groups of a single rank, and Megatron's random generators."""
    from megatron.core import parallel_state

    os.environ |= {
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(free_port("127.0.0.1")),
    }
    if not settings.cuda:
        cpu.enable_megatron()
    if not _installed("transformer_engine") and not _installed("apex"):
        cpu.distributed_optimizer_with_torch_adamw()
    dist.init_process_group("nccl" if settings.cuda else "gloo", rank=0, world_size=1)
    parallel_state.initialize_model_parallel()
    from megatron.core.tensor_parallel import model_parallel_cuda_manual_seed

    model_parallel_cuda_manual_seed(1)


def _installed(name: str) -> bool:
    import importlib.util

    return importlib.util.find_spec(name) is not None


def config_of(
    shape: Shape, settings: Settings, fp8: str | None = None, fused: bool = False, scales: str = "tensorwise"
) -> Any:
    from megatron.core.transformer.transformer_config import TransformerConfig

    torch.manual_seed(1)
    half = settings.dtype == torch.bfloat16
    return TransformerConfig(
        num_layers=shape.layers,
        hidden_size=shape.hidden,
        ffn_hidden_size=shape.ffn,
        num_attention_heads=shape.heads,
        num_query_groups=shape.groups,
        normalization="RMSNorm",
        layernorm_epsilon=1e-6,
        add_bias_linear=False,
        add_qkv_bias=True,
        gated_linear_unit=True,
        activation_func=torch.nn.functional.silu,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        bf16=half,
        params_dtype=settings.dtype,
        pipeline_dtype=settings.dtype,
        gradient_accumulation_fusion=False,
        bias_activation_fusion=fused,
        fp8=fp8,
        fp8_recipe=scales,
        use_cpu_initialization=not settings.cuda,
    )


def build(
    shape: Shape,
    settings: Settings,
    transformer_engine: bool = False,
    fp8: str | None = None,
    fused: bool = False,
    scales: str = "tensorwise",
) -> torch.nn.Module:
    """Return a GPTModel that returns its last hidden states [B, T, H], as the actor's model does.

    Args:
        transformer_engine: use Transformer Engine's layers; False: the project's own layers.
        fp8: FP8 format, such as "hybrid"; None: no FP8.
        fused: use Megatron's compiled SwiGLU.
        scales: recipe of the FP8 scales, "tensorwise" or "delayed".
    """
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_with_transformer_engine_spec
    from megatron.core.models.gpt.gpt_model import GPTModel

    from nemo_prorl.policy.cpu.layers import layer_spec

    config = config_of(shape, settings, fp8, fused, scales)
    model: Any = GPTModel(
        config=config,
        transformer_layer_spec=get_gpt_layer_with_transformer_engine_spec()
        if transformer_engine
        else layer_spec(config),
        vocab_size=shape.vocab,
        max_sequence_length=shape.context,
        parallel_output=True,
        share_embeddings_and_output_weights=shape.tied,
        position_embedding_type="rope",
        rotary_base=1_000_000 if not settings.small else 10_000,
    )
    model.output_layer.forward = lambda hidden, weight=None, **_: (hidden, None)
    model = model.to(settings.device)
    return model.bfloat16() if settings.dtype == torch.bfloat16 else model


def with_optimizer(model: torch.nn.Module) -> tuple[torch.nn.Module, Any]:
    """Return the model in Megatron's data-parallel wrapper, and its distributed optimizer; gradients are float32."""
    from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
    from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer

    half = next(model.parameters()).dtype == torch.bfloat16
    settings = DistributedDataParallelConfig(grad_reduce_in_fp32=True, use_distributed_optimizer=True)
    wrapped = DistributedDataParallel(model.config, settings, model)
    options = OptimizerConfig(
        optimizer="adam",
        lr=2e-6,
        weight_decay=0.01,
        bf16=half,
        params_dtype=next(model.parameters()).dtype,
        use_distributed_optimizer=True,
        clip_grad=1.0,
    )
    return wrapped, get_megatron_optimizer(options, [wrapped])


def logprobs(model: Any, tokens_BT: Tensor, shape: Shape, with_entropy: bool) -> tuple[Tensor, Tensor | None]:
    """Return log-probabilities and entropies (None if not wanted) of all tokens but each row's first, [B, T - 1]."""
    net = getattr(model, "module", model)
    position_BT = torch.arange(tokens_BT.shape[1], device=tokens_BT.device).expand_as(tokens_BT)
    hidden_BTH = model(tokens_BT, position_BT, None, labels=None)
    weight_VH = net.shared_embedding_or_output_weight() if shape.tied else net.output_layer.weight
    logp_N, entropy_N = chunked_logprobs(
        hidden_BTH[:, :-1].reshape(-1, shape.hidden),
        weight_VH,
        tokens_BT[:, 1:].reshape(-1),
        TEMPERATURE,
        vocab_size=shape.vocab,
        chunk=CHUNK,
        with_entropy=with_entropy,
    )
    place = partial(torch.reshape, shape=(tokens_BT.shape[0], -1))
    return place(logp_N), None if entropy_N is None else place(entropy_N)


def update(model: Any, optimizer: Any, micro_batches: list[Tensor], old: list[Tensor], shape: Shape) -> float:
    """Make one optimizer step over the micro-batches and return the norm of the gradient."""
    model.zero_grad_buffer()
    optimizer.zero_grad()
    count = sum(tokens_BT[:, 1:].numel() for tokens_BT in micro_batches)
    for tokens_BT, old_BT in zip(micro_batches, old, strict=True):
        logp_BT, _ = logprobs(model, tokens_BT, shape, with_entropy=False)
        mask_BT = torch.ones_like(logp_BT, dtype=torch.bool)
        advantage_B = torch.ones(len(tokens_BT), device=tokens_BT.device)
        loss, _ = grpo_loss(logp_BT, old_BT, old_BT, advantage_B, mask_BT, None, float(count), GRPOConfig())
        loss.backward()
    model.finish_grad_sync()
    done, norm, _ = optimizer.step()
    assert done
    return float(norm)
