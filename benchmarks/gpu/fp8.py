"""The same weights in Transformer Engine's layers, in bf16 and in FP8: how far log-probabilities part, and how fast."""

from typing import Any

import torch

from gpu import model as m
from gpu.common import Emit, Settings, Skipped, require, seconds_of

RECIPE = "hybrid"  # e4m3 forward, e5m2 backward: conf/cluster/h100_4x8.yaml
WAYS = {  # name: model.fp8, model.fp8_recipe
    "bf16, Transformer Engine": (None, "tensorwise"),
    f"FP8 {RECIPE}, tensorwise scales": (RECIPE, "tensorwise"),
    f"FP8 {RECIPE}, delayed scales": (RECIPE, "delayed"),
}


def run(emit: Emit, settings: Settings) -> None:
    require("megatron.core", "transformer_engine")
    if not settings.cuda:
        raise Skipped("Transformer Engine needs a GPU")
    shape = m.Shape.of(settings)
    m.start(settings)
    tokens = torch.randint(shape.vocab, (1, shape.context), device=settings.device)
    local = m.build(shape, settings)
    base_BT = logp_of(local, tokens, shape)
    weights = local.state_dict()
    row(emit, "bf16, nemo_prorl's layers", local, tokens, shape, base_BT, settings)
    del local
    for name, (fp8, scales) in WAYS.items():
        net = m.build(shape, settings, transformer_engine=True, fp8=fp8, scales=scales)
        missing = load(net, weights)
        if missing:
            emit(name, note=f"not compared: {len(missing)} parameters have no counterpart, first {missing[0]}")
        try:
            row(emit, name, net, tokens, shape, base_BT, settings)
        except (ValueError, AssertionError) as error:  # an older Transformer Engine knows delayed scales only
            emit(name, note=f"not measured: {error}")
        del net


def load(net: torch.nn.Module, weights: dict[str, torch.Tensor]) -> list[str]:
    """Copies weights by name; Transformer Engine keeps a norm's weight in the linear layer after it."""
    moved = {
        "self_attention.linear_qkv.layer_norm_weight": "input_layernorm.weight",
        "mlp.linear_fc1.layer_norm_weight": "pre_mlp_layernorm.weight",
    }
    missing = []
    for name, parameter in net.named_parameters():
        theirs = name
        for ending, source in moved.items():
            theirs = theirs.removesuffix(ending) + source if theirs.endswith(ending) else theirs
        if theirs in weights:
            parameter.data.copy_(weights[theirs])
        else:
            missing.append(name)
    return missing


@torch.no_grad()
def logp_of(net: Any, tokens: torch.Tensor, shape: m.Shape) -> torch.Tensor:
    net.set_is_first_microbatch()
    return m.logprobs(net, tokens, shape, with_entropy=False)[0]


def row(
    emit: Emit, name: str, net: Any, tokens: torch.Tensor, shape: m.Shape, base_BT: torch.Tensor, settings: Settings
) -> None:
    def both() -> None:
        net.set_is_first_microbatch()  # as Megatron's schedule at each step: weights are cast anew, by new scales
        net.zero_grad(set_to_none=True)
        m.logprobs(net, tokens, shape, with_entropy=False)[0].mean().backward()

    first_BT = (logp_of(net, tokens, shape) - base_BT).abs()
    for _ in range(3):  # delayed scales are 1 before the first backward pass, and passes without one leave them alone
        both()
    gap_BT = (logp_of(net, tokens, shape) - base_BT).abs()
    forward_s = seconds_of(lambda: logp_of(net, tokens, shape), settings.device, 3)[0]
    both_s = seconds_of(both, settings.device, 3)[0]
    emit(
        name,
        mean_logp_gap=float(gap_BT.mean()),
        largest_logp_gap=float(gap_BT.max()),
        mean_logp_gap_before_an_update=float(first_BT.mean()),
        forward_s=forward_s,
        forward_and_backward_s=both_s,
        tokens_per_s=shape.context / both_s,
    )
