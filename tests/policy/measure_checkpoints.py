"""Measures checkpoints of the optimizer's state for `ranks.py`: before any step, after a reset, between two Adams."""

import os
import pickle
import shutil
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import torch

from nemo_prorl.config import GRPOConfig
from nemo_prorl.policy.weights import HFFolder
from nemo_prorl.trainer import policy_loss
from tests.policy.lazy_adam import use_lazy_adam
from tests.policy.ranks import Layout, config_of, fixed_batch, rows_of_rank

LAYOUT = Layout(dp=2)  # the moments are cut over its ranks


def built(out: Path, *overrides: str) -> tuple[Any, Callable[[], list[Any]]]:
    """An actor, and its next update: what that reports, and the weights' sha256."""
    from nemo_prorl.policy.build import build_actor

    torch.set_num_threads(1)
    folder = HFFolder(out / LAYOUT.model)
    actor = build_actor(config_of(LAYOUT, folder.path, *overrides), folder.path).actor
    batch = fixed_batch()
    mine = batch.rows(rows_of_rank(len(batch), actor))
    loss = partial(policy_loss, config=GRPOConfig(kl_coef=0.1))
    return actor, lambda: [actor.update(mine, loss, 200.0)["grad_norm"], actor.weights_sha256()]


def counts(actor: Any) -> set[Any]:
    """Step counts, wherever this Adam keeps them."""
    (leaf,) = actor._leaf_optimizers()
    of_parameters = {int(state["step"]) for state in leaf.optimizer.state.values() if "step" in state}
    return of_parameters or {group.get("step") for group in leaf.optimizer.param_groups}


def attempted(work: Callable[[], Any]) -> Any:
    """Return the result of `work`, or the text of the error that it raises."""
    try:
        return work()
    except BaseException as error:  # as torch raises those of a checkpoint
        return f"{type(error).__name__}: {error}"


def disk_operations(work: Callable[[], object]) -> list[tuple[str, str]]:
    """Return what `work` flushed to the disk and to what it gave a name, in order."""
    done: list[tuple[str, str]] = []
    fsync, replace = os.fsync, os.replace

    def flush(fd: int) -> None:
        done.append(("flushed", Path(os.readlink(f"/proc/self/fd/{fd}")).name))
        fsync(fd)

    def name(old: Path, new: Path) -> None:
        done.append(("named", Path(new).name))
        replace(old, new)

    with mock.patch.object(os, "fsync", flush), mock.patch.object(os, "replace", name):
        work()
    return done


def of_one_adam(lazy: bool, out: Path) -> dict[str, Any]:
    """Saves before any step, after steps and after a hard reset; loads each as a new process does, and goes on."""
    from nemo_prorl.policy.checkpoint_files import CheckpointFiles

    if lazy:
        use_lazy_adam()
    actor, update = built(out)
    folder = out / "adam" / ("lazy" if lazy else "torch")

    def saved_and_loaded(name: str) -> Any:
        """(how it goes on, how it goes on from its checkpoint in an optimizer that knows nothing)."""

        def run() -> list[Any]:
            CheckpointFiles(actor).save(folder / name, {"step": 0})
            onward = update()
            actor.reset_optimizer()  # as a new process finds it
            CheckpointFiles(actor).load(folder / name)
            return [onward, update()]

        return attempted(run)

    found = {"before any step": saved_and_loaded("step-000000")}
    update()
    found["after steps"] = saved_and_loaded("step-000002")
    actor.set_reference()
    actor.reset_optimizer()
    found["after a reset"] = saved_and_loaded("reset")
    found["counts"] = sorted(counts(actor))
    found["disk"] = disk_operations(lambda: CheckpointFiles(actor).save(folder / "flushed", {"step": 0}))
    return found


def across(lazy: bool, out: Path) -> dict[str, Any]:
    """Load what the other Adam saved, under other settings of the optimizer, and make one more update."""
    from nemo_prorl.policy.checkpoint_files import CheckpointFiles

    if lazy:
        use_lazy_adam()
    of_optimizer = ["model.optim.weight_decay=0.5", "model.optim.betas=[0.5,0.9]", "+model.optim.eps=1e-5"]
    found: dict[str, Any] = {}
    for settings in ([], of_optimizer):
        actor, update = built(out, *settings)

        def run(actor: Any = actor, update: Callable[[], Any] = update) -> list[Any]:
            CheckpointFiles(actor).load(out / "adam" / ("torch" if lazy else "lazy") / "step-000002")
            groups = [(g["weight_decay"], tuple(g["betas"]), g["eps"]) for g in actor.mcore_optimizer.param_groups]
            return [groups, sorted(counts(actor)), update()[0], sorted(counts(actor)), dict(actor.export_weights())]

        found["configured" if settings else "as it was"] = attempted(run)
    return found


def write(work: Callable[[bool, Path], dict[str, Any]], lazy: bool, out: Path) -> None:
    """Measure one rank; rank 0 writes OUT/adam-WORK-KIND.pt."""
    import torch.distributed as dist

    found = work(lazy, out)
    if dist.get_rank() == 0:
        torch.save(found, out / f"adam-{work.__name__}-{'lazy' if lazy else 'torch'}.pt")


def of_extra_state(lazy: bool, out: Path) -> dict[str, Any]:
    """Attention that keeps a state beside parameters, as FP8's with delayed scales does: here, passes with gradients.

    It also notes in which mode the model computes.
    """
    from nemo_prorl.policy.checkpoint_files import CheckpointFiles
    from nemo_prorl.policy.cpu import layers as cpu_layers

    modes: set[tuple[bool, bool]] = set()

    class Remembering(cpu_layers.CausalAttention):
        passes = 0

        def forward(self, *args: Any, **kwargs: Any) -> torch.Tensor:
            modes.add((torch.is_grad_enabled(), self.training))
            self.passes += torch.is_grad_enabled()
            return super().forward(*args, **kwargs)

        def get_extra_state(self) -> torch.Tensor:
            return torch.tensor(self.passes)

        def set_extra_state(self, state: torch.Tensor) -> None:
            self.passes = int(state)

    plain, cpu_layers.CausalAttention = cpu_layers.CausalAttention, Remembering  # type: ignore[misc]
    actor, update = built(out)
    actor.keeps_scales = True  # as with FP8's delayed scales
    attention = [m for m in actor.module.modules() if isinstance(m, Remembering)]
    actor.logprobs(fixed_batch())
    update()
    saved = [m.passes for m in attention]
    CheckpointFiles(actor).save(out / "extra", {"step": 1})
    onward = update()
    actor.logprobs(fixed_batch())
    found = {"modes": sorted(modes), "saved": saved, "later": [m.passes for m in attention]}
    found["loaded"] = attempted(lambda: CheckpointFiles(actor).load(out / "extra") and [m.passes for m in attention])
    found["goes on"] = (onward, update())
    without = out / "adam" / "torch" / "step-000002"
    found["without"] = attempted(lambda: CheckpointFiles(actor).load(without) and actor.weights_sha256())
    cpu_layers.CausalAttention = plain  # type: ignore[misc]
    actor, update = built(out)
    found["into one without"] = attempted(lambda: CheckpointFiles(actor).load(out / "extra") and update())
    for how in ("flipped", "cut"):
        folder = damaged(without, out / how, how)
        found[how] = attempted(lambda folder=folder: CheckpointFiles(actor).load(folder))  # type: ignore[misc]
    return found


def damaged(checkpoint: Path, copy: Path, how: str) -> Path:
    """Return a copy of a checkpoint with one bit of a weight changed, or with half of its tensors."""
    import torch.distributed as dist

    if dist.get_rank() == 0:
        shutil.copytree(checkpoint, copy)
        places = pickle.loads((copy / ".metadata").read_bytes()).storage_data
        weights = [place for index, place in places.items() if index.fqn.startswith("model.decoder")]
        largest = max(weights, key=lambda place: int(place.length))
        file = copy / largest.relative_path
        content = bytearray(file.read_bytes())
        content[largest.offset + largest.length // 2] ^= 64
        file.write_bytes(content if how == "flipped" else content[: largest.offset + largest.length // 2])
    dist.barrier()
    return copy
