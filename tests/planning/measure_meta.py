"""Count what Megatron's own GPTModel holds on the meta device, for three shapes; run by test_memory_meta.py.

measure_meta.py OUT      writes one JSON object: shape -> overrides, numbers

No kernel runs: on the meta device tensors have a size and no content.  Transformer Engine's RMSNorm and fused attention
cannot run here.  Stand-ins keep for the backward pass what those keep: input and 1 / rms; queries, keys, values, output
and log-sum-exp.  All other tensors that a layer keeps are Megatron's.
"""

import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.tensor_parallel import ColumnParallelLinear, RowParallelLinear
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor

from nemo_prorl import settings
from nemo_prorl.sizing.memory import ModelShape

TOKENS = 8192
H100 = ["cluster=h100_4x8", "pretrained_checkpoint.restore_from_path=null", "rollout.device_memory_gb=null"]
SHAPES: dict[str, tuple[int, list[str]]] = {  # rows of the embedding, overrides
    "1.5B": (151_936, []),
    "7B": (152_064, ["model.num_layers=28", "model.hidden_size=3584", "model.ffn_hidden_size=18944",
                     "model.num_attention_heads=28", "model.num_query_groups=4"]),
    "8B": (128_256, ["model.num_layers=32", "model.hidden_size=4096", "model.ffn_hidden_size=14336",
                     "model.num_attention_heads=32", "model.num_query_groups=8", "model.qkv_bias=false",
                     "model.bias_activation_fusion=true"]),
}  # fmt: skip


class _Norm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight, torch.empty(x.shape[:-1], dtype=torch.float32, device=x.device))
        return torch.empty_like(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
        _, weight, _ = ctx.saved_tensors
        return grad, weight


class Norm(torch.nn.Module):
    """Keeps what Transformer Engine's RMSNorm keeps."""

    def __init__(self, config: TransformerConfig, hidden_size: int, eps: float = 1e-5) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(hidden_size, dtype=config.params_dtype))

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = _Norm.apply(x, self.weight)
        return out


class _Attention(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q_SBHD: Tensor, k_SBGD: Tensor, v_SBGD: Tensor) -> Tensor:
        out = torch.empty_like(q_SBHD).flatten(2)
        lse = torch.empty(q_SBHD.shape[:-1], dtype=torch.float32, device=out.device)
        ctx.save_for_backward(q_SBHD, k_SBGD, v_SBGD, out, lse)
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        q, k, v, _, _ = ctx.saved_tensors
        return torch.empty_like(q), torch.empty_like(k), torch.empty_like(v)


class Attention(torch.nn.Module):
    """Keeps what a flash attention keeps."""

    def __init__(self, *_: Any, **__: Any) -> None:
        super().__init__()

    def forward(self, query: Tensor, key: Tensor, value: Tensor, *_: Any, **__: Any) -> Tensor:
        out: Tensor = _Attention.apply(query, key, value)
        return out


def model_of(shape: ModelShape, fused: bool) -> GPTModel:
    config = TransformerConfig(
        num_layers=shape.layers, hidden_size=shape.hidden, ffn_hidden_size=shape.ffn,
        num_attention_heads=shape.heads, num_query_groups=shape.groups, add_bias_linear=False,
        add_qkv_bias=shape.qkv_bias, gated_linear_unit=True, activation_func=torch.nn.functional.silu,
        bias_activation_fusion=fused, normalization="RMSNorm", hidden_dropout=0.0, attention_dropout=0.0,
        params_dtype=torch.bfloat16, bf16=True, use_cpu_initialization=True, perform_initialization=False,
    )  # fmt: skip
    spec: ModuleSpec = get_gpt_layer_local_spec(normalization="RMSNorm")
    spec.submodules.input_layernorm = spec.submodules.pre_mlp_layernorm = Norm
    spec.submodules.self_attention.submodules.core_attention = Attention
    return GPTModel(
        config, TransformerBlockSubmodules(layer_specs=[spec] * shape.layers, layer_norm=Norm), shape.padded_vocab,
        131_072, share_embeddings_and_output_weights=shape.tied, position_embedding_type="rope",
    )  # fmt: skip


def kept_bytes(model: torch.nn.Module, work: Callable[[], Any]) -> int:
    """Bytes that autograd keeps of `work` for its backward pass, without the weights."""
    weights = {p.untyped_storage()._cdata for p in model.parameters()}
    kept: dict[int, tuple[int, Tensor]] = {}  # by storage; the tensor keeps it alive, so that its number stays its own

    def keep(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage._cdata not in weights:
            kept.setdefault(storage._cdata, (storage.nbytes(), tensor))
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        work()
    return sum(size for size, _ in kept.values())


def optimizer_bytes(model: torch.nn.Module) -> int:
    """Bytes of float32 master weights and Adam's moments, undivided."""
    masters = [torch.nn.Parameter(torch.empty_like(p, dtype=torch.float32)) for p in model.parameters()]
    adam = torch.optim.AdamW(masters, foreach=False)
    for master in masters:
        master.grad = torch.empty_like(master)
    adam.step()
    states = [value for state in adam.state.values() for name, value in state.items() if name != "step"]
    return sum(tensor.numel() * tensor.element_size() for tensor in [*masters, *states])


def measure(vocab: int, overrides: list[str]) -> dict[str, int]:
    cfg = settings.load([*H100, *overrides])
    shape = ModelShape.of(cfg.model, vocab)
    with torch.device("meta"):
        model = model_of(shape, cfg.model.bias_activation_fusion)
        layers = model.decoder
        hidden = torch.empty(TOKENS, 1, shape.hidden, dtype=torch.bfloat16, requires_grad=True)
        angles = torch.empty(TOKENS, 1, 1, shape.head_size, dtype=torch.float32)
        kept = kept_bytes(model, lambda: layers(hidden, None, rotary_pos_emb=angles))
        in_layers = [m for m in layers.modules() if isinstance(m, ColumnParallelLinear | RowParallelLinear)]
        return {
            "vocab": vocab,
            "tokens": TOKENS,
            "parameters": sum(p.numel() for p in model.parameters()),
            "gradients": sum(torch.empty_like(p, dtype=torch.float32).nbytes for p in model.parameters()),
            "optimizer": optimizer_bytes(model),
            "linear": sum(m.weight.numel() for m in in_layers),
            "activations": kept,
        }


if __name__ == "__main__":
    dist.init_process_group("gloo", init_method=f"file://{sys.argv[1]}/rendezvous", rank=0, world_size=1)
    parallel_state.initialize_model_parallel()
    found = {name: (overrides, measure(vocab, overrides)) for name, (vocab, overrides) in SHAPES.items()}
    (Path(sys.argv[1]) / "measured.json").write_text(json.dumps(found))
    os._exit(0)
