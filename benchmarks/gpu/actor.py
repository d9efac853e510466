"""A test of the real actor in bf16: log-probabilities, updates, and a hard reset that is saved and loaded.

The actor is built as in a run, with megatron_amp_O2.  Each row is written once its part has succeeded.  If rows
are missing at the end, the part after the last row has failed.
"""

import tempfile
from pathlib import Path
from typing import Any

import torch
from omegaconf import OmegaConf

from gpu import model as m
from gpu import real
from gpu.common import Emit, Settings, peak_bytes, peak_flops, require, seconds_of

RESPONSES = {False: 4, True: 4}  # responses that fill the context, by Settings.small


def run(emit: Emit, settings: Settings) -> None:
    require("megatron.core", "nemo", "nemo_aligner")
    with tempfile.TemporaryDirectory(prefix="gpu-evidence-") as name:
        folder = real.write_model(Path(name) / "model", settings)
        actor, cfg = real.build(settings, folder)
        emit("layers", note=real.layers())
        built(emit, actor)
        resident = torch.cuda.memory_allocated() if settings.cuda else None
        batch = logprobs_and_updates(emit, actor, cfg, settings)
        memory(emit, actor, cfg, settings, resident)
        reset_save_load(emit, actor, cfg, settings, batch, Path(name))


def built(emit: Emit, actor: Any) -> None:
    weights = list(actor.module.parameters())
    masters = {p.dtype for group in actor.mcore_optimizer.param_groups for p in group["params"]}
    emit(
        "built",
        parameters=sum(p.numel() for p in weights),
        weights=", ".join(sorted({str(p.dtype) for p in weights})),
        masters=", ".join(sorted(map(str, masters))),
        wrapper=type(actor.model.model[0].module).__name__,
    )


def logprobs_and_updates(emit: Emit, actor: Any, cfg: Any, settings: Settings) -> Any:
    """Emit rows with speeds; return the batch with its old and reference log-probabilities."""
    batch = real.batch(settings, RESPONSES[settings.small])
    tokens, known = batch.tokens_BT.numel(), peak_flops()
    shape = m.Shape.of(settings)
    forward_flops, update_flops = (len(batch) * one for one in shape.flops(batch.tokens_BT.shape[1]))
    update = real.updater(actor, cfg)
    old_BT, entropy_BT = actor.logprobs(batch)
    assert torch.isfinite(old_BT).all(), "log-probabilities are not finite"
    assert torch.isfinite(entropy_BT).all(), "entropies are not finite"
    ref_BT = actor.reference_logprobs(batch)
    emit("reference, before any update", mean_logp_gap=float((old_BT - ref_BT)[batch.mask_BT].abs().mean()))
    batch = real.with_logprobs(batch, old_BT, ref_BT)
    norms: list[float] = []
    repeats = 1 if settings.small else 3
    for what, call, flops in (
        ("log-probabilities and entropies", lambda: actor.logprobs(batch), forward_flops),
        ("update: forward, backward, optimizer", lambda: norms.append(update(batch)["grad_norm"]), update_flops),
    ):
        median, least, most = seconds_of(call, settings.device, repeats)
        row = {"tokens_per_s": tokens / median, "peak_share": flops / median / known[0] if known else None}
        emit(what, **row, seconds=median, seconds_least=least, seconds_most=most)
    emit("gradient norms of the updates", note=", ".join(f"{norm:.4g}" for norm in norms))
    return batch


def memory(emit: Emit, actor: Any, cfg: Any, settings: Settings, resident: int | None) -> None:
    """Emit the measured memory beside the memory that `prorl plan` predicts for one GPU with this model.

    Args:
        resident: bytes allocated on the GPU before the first update; None on a CPU.
    """
    from nemo_prorl.sizing.memory import memory_of

    fused: Any = OmegaConf.merge(cfg, {"model": {"transformer_engine": True}})  # no layer here keeps attention scores
    numbers = memory_of(fused, actor.shape.vocab).numbers()
    plan = {name: int(value or 0) for name, value in numbers.items()}
    peak = torch.cuda.max_memory_allocated() if settings.cuda else None
    emit("before the first update", measured_bytes=resident, planned_bytes=plan["trainer_resident"])
    emit("at most", measured_bytes=peak, planned_bytes=plan["trainer_peak"])
    for name in ("weights", "gradients", "optimizer", "activations", "logits_backward", "trainer_peak"):
        emit(f"plan: {name}", planned_bytes=plan[name])


def reset_save_load(emit: Emit, actor: Any, cfg: Any, settings: Settings, batch: Any, folder: Path) -> None:
    """Make a hard reset, save the actor, update, load the actor, update again; emit whether both updates are equal.

    Also emits the memory that reset and save take beside the plan's: in a run, engines may be awake at this time.

    Raises RuntimeError if the gradient norms differ by more than 0.1 %.
    """
    from nemo_prorl.policy import checkpoint_files
    from nemo_prorl.sizing.phases import MOST_BESIDE_ENGINES, RESETTING, SAVING

    update = real.updater(actor, cfg)
    with peak_bytes(settings.device) as taken:
        actor.set_reference()
        actor.reset_optimizer()
    emit(f"taken while {RESETTING}", measured_bytes=taken[0], planned_bytes=MOST_BESIDE_ENGINES)
    old_BT, _ = actor.logprobs(batch)
    ref_BT = actor.reference_logprobs(batch)
    gap = float((old_BT - ref_BT)[batch.mask_BT].abs().mean())
    emit("reference, right after a hard reset", mean_logp_gap=gap)
    batch = real.with_logprobs(batch, old_BT, ref_BT)
    saved = folder / "step-000001"
    with peak_bytes(settings.device) as taken:
        checkpoint_files.CheckpointFiles(actor).save(saved, {"step": 1})
    emit(f"taken while {SAVING}", measured_bytes=taken[0], planned_bytes=MOST_BESIDE_ENGINES)
    size = sum(file.stat().st_size for file in saved.iterdir())
    emit("saved after the reset", size_bytes=size)
    onward = update(batch)["grad_norm"], actor.weights_sha256()
    checkpoint_files.CheckpointFiles(actor).load(saved)
    again = update(batch)["grad_norm"], actor.weights_sha256()
    emit(
        "loaded, and the same update again",
        same_bits=onward == again,
        gradient_norm=onward[0],
        gradient_norm_again=again[0],
    )
    if abs(onward[0] - again[0]) > 1e-3 * abs(onward[0]):
        raise RuntimeError(f"gradient norm of the update after loading: expected {onward[0]:g}; got {again[0]:g}")
