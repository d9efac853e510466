"""Speed and memory of Megatron-Core's GPTModel alone: log-probabilities and updates of full-context sequences."""

import gc
from typing import Any

import torch

from gpu import model as m
from gpu.common import Emit, Settings, peak_flops, require, seconds_of

PLANNED = ("weights", "gradients", "optimizer", "activations", "logits_backward", "trainer_peak")


def run(emit: Emit, settings: Settings) -> None:
    require("megatron.core")
    shape = m.Shape.of(settings)
    m.start(settings)
    policy = "Megatron-Core's GPTModel with nemo_prorl's layer spec, not NeMo-Aligner's model: see gpu/model.py"
    emit("policy", note=policy)
    net = built(shape, settings, emit)
    parameters = sum(p.numel() for p in net.parameters())
    emit(
        "shape",
        parameters=parameters,
        layers=shape.layers,
        hidden=shape.hidden,
        words=shape.vocab,
        context=shape.context,
    )
    net, optimizer = m.with_optimizer(net)
    plan = planned(shape, settings, emit)
    resident = _allocated(settings)
    work(emit, net, optimizer, shape, settings)
    if settings.cuda:
        memory = {"measured_bytes": torch.cuda.max_memory_allocated(), "planned_bytes": plan.get("trainer_peak")}
        emit("memory at most", **memory)
        masters = plan.get("optimizer", 0) // 3  # Adam's two moments come with the first update
        planned_bytes = plan.get("weights", 0) + plan.get("gradients", 0) + masters
        emit("before the first update", measured_bytes=resident, planned_bytes=planned_bytes)
    for name, value in plan.items():
        emit(f"plan: {name}", planned_bytes=value)


def built(shape: m.Shape, settings: Settings, emit: Emit) -> torch.nn.Module:
    """Build the model with Megatron's compiled SwiGLU, or without it if the compiler does not work here."""
    if settings.cuda:
        net = m.build(shape, settings, fused=True)
        try:
            tokens = torch.zeros(1, 64, dtype=torch.int64, device=settings.device)
            m.logprobs(net, tokens, shape, with_entropy=False)[0].sum().backward()
            net.zero_grad(set_to_none=True)
            return net
        except Exception as error:
            emit("compiled SwiGLU", note=f"left out: {type(error).__name__}: {str(error).splitlines()[0][:200]}")
            del net
    return m.build(shape, settings)


def work(emit: Emit, net: Any, optimizer: Any, shape: m.Shape, settings: Settings) -> None:
    """Emit rows with tokens per second and the share of the device's peak arithmetic."""
    count, repeats = (2, 2) if settings.small else (8, 3)
    generator = torch.Generator(settings.device).manual_seed(1)
    batches = [
        torch.randint(shape.vocab, (1, shape.context), generator=generator, device=settings.device)
        for _ in range(count)
    ]
    tokens, known = count * shape.context, peak_flops()

    def forward() -> list[torch.Tensor]:
        with torch.no_grad():
            return [m.logprobs(net, batch, shape, with_entropy=True)[0] for batch in batches]

    old = forward()
    norms: list[float] = []
    flops = [count * one for one in shape.flops(shape.context)]
    for what, call, arithmetic in (
        ("log-probabilities and entropies", forward, flops[0]),
        (
            "update: forward, backward, optimizer",
            lambda: norms.append(m.update(net, optimizer, batches, old, shape)),
            flops[1],
        ),
    ):
        median, least, most = seconds_of(call, settings.device, repeats)
        share = arithmetic / median / known[0] if known else None
        row = {"tokens_per_s": tokens / median, "tflops": arithmetic / median / 1e12, "peak_share": share}
        emit(what, **row, seconds=median, seconds_least=least, seconds_most=most)
    emit("gradient norms of the updates", note=", ".join(f"{norm:.4g}" for norm in norms))
    gap = float((torch.cat(forward()) - torch.cat(old)).abs().mean())
    emit("log-probabilities after the updates", note=f"moved by {gap:.2e} on average")
    gc.collect()


def planned(shape: m.Shape, settings: Settings, emit: Emit) -> dict[str, int]:
    """Return the sizes that `prorl plan` gives for one GPU; empty, with a note, if OmegaConf is not installed."""
    try:
        from pathlib import Path

        from omegaconf import OmegaConf

        import nemo_prorl
        from nemo_prorl.config import Config
        from nemo_prorl.sizing.memory import memory_of
    except ImportError as error:
        emit("the plan", note=f"not computed: {error}")
        return {}
    cfg: Any = OmegaConf.structured(Config)
    OmegaConf.set_struct(cfg, False)
    conf = Path(nemo_prorl.__file__).parent / "conf"
    for file in ("model/qwen2_1p5b.yaml", "cluster/h100_4x8.yaml"):
        read: Any = OmegaConf.load(conf / file)
        read.pop("defaults", None)
        cfg = OmegaConf.merge(cfg, read)
    sizes = {
        "num_layers": shape.layers,
        "hidden_size": shape.hidden,
        "ffn_hidden_size": shape.ffn,
        "num_attention_heads": shape.heads,
        "num_query_groups": shape.groups,
        "share_embeddings_and_output_weights": shape.tied,
        "micro_batch_size": 1,
    }
    cfg = OmegaConf.merge(cfg, {"model": sizes, "trainer": {"num_nodes": 1, "devices": 1}})
    cfg.trainer.grpo.context_tokens, cfg.trainer.precision = shape.context, "bf16" if settings.cuda else 32
    cfg.pretrained_checkpoint.restore_from_path = None
    numbers = memory_of(cfg, shape.vocab).numbers()
    return {name: int(numbers[name] or 0) for name in PLANNED}


def _allocated(settings: Settings) -> int:
    return torch.cuda.memory_allocated() if settings.cuda else 0
