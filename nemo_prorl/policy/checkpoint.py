"""Exact checkpoints in Megatron's distributed format, which loads at another parallel layout too.

checkpoints/step-000040/        complete only when it has this name; written as step-000040.tmp
    *.distcp .metadata common.pt metadata.json     weights, optimizer, reference policy
    rng-RANK.pt                                    random states of each rank
    state.json                                     what the run knows beside tensors, and the reference's sha256
"""

import json
import logging
import os
import random
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from megatron.core import dist_checkpointing
from megatron.core.dist_checkpointing.dict_utils import dict_list_map_inplace
from megatron.core.dist_checkpointing.mapping import ShardedBase, ShardedObject, ShardedTensor, ShardedTensorFactory
from megatron.core.dist_checkpointing.strategies.base import SaveShardedStrategy
from megatron.core.dist_checkpointing.strategies.torch import (
    MCoreSavePlanner,
    _replace_state_dict_keys_with_sharded_keys,
    mcore_to_pyt_state_dict,
)
from megatron.core.dist_checkpointing.utils import add_prefix_for_sharding
from torch.distributed.checkpoint import FileSystemWriter
from torch.distributed.checkpoint import save as torch_distributed_save

from nemo_prorl.errors import CheckpointError
from nemo_prorl.policy.actor import Actor

_log = logging.getLogger(__name__)

FORMAT = 1  # of state.json and of what lies beside it
REFERENCE = "reference."


class _WriteInThisProcess(SaveShardedStrategy):
    """Megatron's `torch_dist` format by torch's own writer.

    Megatron's writer forks and spawns processes, which a process with threads (rollout client, loggers) must not.
    """

    def __init__(self) -> None:
        super().__init__("torch_dist", 1)

    def can_handle_sharded_objects(self) -> bool:
        return True

    def save(self, sharded_state_dict: dict, checkpoint_dir: Path) -> None:
        state, _, _ = _replace_state_dict_keys_with_sharded_keys(sharded_state_dict, True)
        torch_distributed_save(
            mcore_to_pyt_state_dict(state, False),
            storage_writer=FileSystemWriter(checkpoint_dir, single_file_per_rank=True, sync_files=True),
            planner=MCoreSavePlanner(dedup_replicated_tensors=False, flatten_state_dict=False),
        )


def _detached(value: Any) -> Any:
    if isinstance(value, ShardedTensor | ShardedTensorFactory) and isinstance(value.data, torch.Tensor):
        value.data = value.data.detach().clone()
    return value


def _sharded_state(actor: Actor, is_loading: bool, with_optimizer: bool) -> dict[str, Any]:
    """The rank's tensors with their place in the whole: model, reference policy and optimizer."""
    with actor.reference_weights():  # built from the model, so that its sharding is the model's
        reference = actor.model.sharded_state_dict()
        dict_list_map_inplace(_detached, reference)
    add_prefix_for_sharding(reference, REFERENCE)
    model = actor.model.sharded_state_dict()
    state = {"model": model, "reference": reference}
    if with_optimizer:  # finds its place by the very parameters in `model`
        state["optimizer"] = actor.optimizer.sharded_state_dict(
            model, is_loading=is_loading, dist_ckpt_parallel_save=True
        )
    if is_loading:  # else the reference, which passes through the parameters, would overwrite what was read
        dict_list_map_inplace(_detached, model)
    return state


def save(actor: Actor, folder: Path, state: dict[str, Any]) -> None:
    """Writes a checkpoint; `state` (JSON) must be the same on all ranks.  A collective.

    Whatever kills it, `folder` is absent or whole.
    """
    rank, temporary = dist.get_rank(), folder.with_name(folder.name + ".tmp")
    if rank == 0:
        shutil.rmtree(temporary, ignore_errors=True)
        temporary.mkdir(parents=True)
    dist.barrier()
    dist_checkpointing.save(_sharded_state(actor, False, True), str(temporary), _WriteInThisProcess())
    torch.save(rng_state(), temporary / f"rng-{rank}.pt")
    hashes = {"weights_sha256": actor.weights_sha256(), "reference_sha256": actor.reference_sha256()}
    dist.barrier()
    if rank == 0:
        _write_json(temporary / "state.json", {"format": FORMAT, **hashes, **state})
        if folder.exists():  # the same step again, after a run lost its later metrics
            shutil.rmtree(folder)
        os.replace(temporary, folder)
        _sync_folder(folder.parent)
    dist.barrier()


def read_state(folder: Path) -> dict[str, Any]:
    """state.json of a checkpoint; raises CheckpointError where this code cannot continue it."""
    try:
        state = json.loads((folder / "state.json").read_text())
    except (OSError, ValueError) as e:
        raise CheckpointError(f"{folder} is no checkpoint: {e}") from e
    if state.get("format") != FORMAT:
        raise CheckpointError(f"{folder}: format {state.get('format')!r}, this version continues format {FORMAT} only")
    return state


def load(actor: Actor, folder: Path, with_optimizer: bool = True) -> dict[str, Any]:
    """Loads a checkpoint into the actor, at this run's layout, and returns its state.  A collective.

    Raises CheckpointError if the reference policy is not the one that was saved.
    """
    state = read_state(folder)
    loaded = dist_checkpointing.load(_sharded_state(actor, True, with_optimizer), str(folder))
    _load_module(actor, loaded["reference"])
    actor.set_reference()
    _load_module(actor, loaded["model"])
    if with_optimizer:
        actor.optimizer.load_state_dict(loaded["optimizer"])
        file = folder / f"rng-{dist.get_rank()}.pt"
        if file.is_file():  # a run continued on more ranks has none for the new ones
            set_rng_state(torch.load(file, weights_only=False))
    else:
        actor.mcore_optimizer.reload_model_params()
    for name, found in (("weights", actor.weights_sha256()), ("reference", actor.reference_sha256())):
        if found != state[f"{name}_sha256"]:
            raise CheckpointError(
                f"{folder}: the {name} policy has sha256 {found}, saved was {state[f'{name}_sha256']}"
            )
    return state


def _load_module(actor: Actor, state: dict[str, Any]) -> None:
    prefix = "model."
    plain = {k.removeprefix(prefix): v for k, v in state.items() if not isinstance(v, ShardedBase | ShardedObject)}
    parameters = dict(actor.module.named_parameters())
    missing = sorted(parameters.keys() - plain.keys())
    if missing:
        raise CheckpointError(f"the checkpoint has no {missing[0]}")
    for name, p in parameters.items():
        p.data.copy_(plain[name])


def rng_state() -> dict[str, Any]:
    """All random states of this process that could reach the maths."""
    from megatron.core.tensor_parallel import get_cuda_rng_tracker

    return {
        "python": random.getstate(),
        "numpy": np.random.get_state(),
        "torch": torch.get_rng_state(),
        "cuda": torch.cuda.get_rng_state_all() if torch.cuda.is_available() else [],
        "megatron": get_cuda_rng_tracker().get_states(),
    }


def set_rng_state(state: dict[str, Any]) -> None:
    from megatron.core.tensor_parallel import get_cuda_rng_tracker

    random.setstate(state["python"])
    np.random.set_state(state["numpy"])
    torch.set_rng_state(state["torch"])
    if state["cuda"]:
        torch.cuda.set_rng_state_all(state["cuda"])
    get_cuda_rng_tracker().set_states(state["megatron"])


def _write_json(path: Path, value: Any) -> None:
    with path.open("w") as f:
        json.dump(value, f)
        f.flush()
        os.fsync(f.fileno())


def _sync_folder(folder: Path) -> None:
    fd = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def step_folder(checkpoints: Path, step: int) -> Path:
    return checkpoints / f"step-{step:06d}"


def complete(checkpoints: Path) -> list[Path]:
    """The complete checkpoints of a run, oldest first."""
    return sorted(p for p in checkpoints.glob("step-*") if p.suffix != ".tmp" and (p / "state.json").is_file())


def prune(checkpoints: Path, keep: int) -> None:
    """Removes all but the newest `keep` checkpoints, and unfinished ones.  Rank 0 only."""
    for old in [*complete(checkpoints)[: -keep or None], *checkpoints.glob("step-*.tmp")]:
        if keep > 0 or old.suffix == ".tmp":
            shutil.rmtree(old, ignore_errors=True)
