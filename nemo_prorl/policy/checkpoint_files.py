"""Exact checkpoints in Megatron's distributed format, which loads at another parallel layout too.

checkpoints/step-000040/        complete only when it has this name; written as step-000040.tmp (lifecycle/retention.py)
    *.distcp .metadata          all ranks: tensors of the policy, the optimizer and the reference policy
    common.pt metadata.json     rank 0: the optimizer's settings, and the format
    rng-RANK.pt                 each rank: its random states
    state.json                  rank 0: the state of each part of the run (`rank.build` names the parts), and the sha256
                                of weights and reference
"""

import copy
import json
import os
import shutil
import threading
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import dist_checkpointing
from megatron.core.dist_checkpointing.core import CheckpointingConfig, save_config
from megatron.core.dist_checkpointing.dict_utils import dict_list_map_inplace
from megatron.core.dist_checkpointing.mapping import ShardedBase, ShardedObject, ShardedTensor, ShardedTensorFactory
from megatron.core.dist_checkpointing.state_dict_utils import save_preprocess
from megatron.core.dist_checkpointing.strategies.common import TorchCommonSaveStrategy
from megatron.core.dist_checkpointing.strategies.torch import (
    MCoreSavePlanner,
    _replace_state_dict_keys_with_sharded_keys,
    mcore_to_pyt_state_dict,
)
from megatron.core.dist_checkpointing.utils import add_prefix_for_sharding
from megatron.core.dist_checkpointing.validation import StrictHandling
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.state_dict_saver import save as torch_distributed_save

from nemo_prorl.deadlines import Deadline
from nemo_prorl.errors import CheckpointError
from nemo_prorl.lifecycle.killpoints import killpoint
from nemo_prorl.lifecycle.retention import FORMAT, TEMPORARY, put_in_place, read_state
from nemo_prorl.policy.actor import Actor, to_host
from nemo_prorl.policy.plain_files import check_metadata, load_plain
from nemo_prorl.policy.random_state import RandomState, random_state, set_random_state
from nemo_prorl.policy.weights import sha256_of

REFERENCE = "reference."
_EXTRA = "_extra_state"  # of a module beside its parameters: FP8's scales and their history, where scales are delayed


def _to_be_read(value: Any) -> Any:
    """Put uninitialised CPU memory in the place of a parameter, to be filled from a checkpoint.

    Weights that are read would otherwise pass through the parameters, or need room on a GPU where engines are awake.
    """
    if isinstance(value, ShardedTensor | ShardedTensorFactory) and isinstance(value.data, torch.Tensor):
        value.data = torch.empty_like(value.data, device="cpu", requires_grad=False)
    return value


def _sharded_state(actor: Actor) -> dict[str, Any]:
    """The rank's tensors with their place in the whole: model, reference policy and optimizer."""
    reference = actor.model.sharded_state_dict()  # built from the model, so that its sharding is the model's
    reference = {key: value for key, value in reference.items() if not key.endswith(_EXTRA)}
    dict_list_map_inplace(_reference_of(actor), reference)
    add_prefix_for_sharding(reference, REFERENCE)
    model = actor.model.sharded_state_dict()
    return {"reference": reference, "model": model, "optimizer": _sharded_optimizer(actor, model, is_loading=False)}


def _sharded_optimizer(actor: Actor, model: dict[str, Any], is_loading: bool) -> dict[str, Any]:
    """Return the optimizer's tensors; Megatron finds their places by the parameters in `model`."""
    state: dict[str, Any] = actor.optimizer.sharded_state_dict(
        model, is_loading=is_loading, dist_ckpt_parallel_save=True
    )
    return state


def _load_weights(actor: Actor, folder: Path, prefix: str = "") -> None:
    """The model's parameters from a checkpoint's model, or with REFERENCE from its reference policy.

    A module's extra state is loaded where the checkpoint has one: that of a reference and of a CPU has none.
    """
    state = actor.model.sharded_state_dict()
    dict_list_map_inplace(_to_be_read, state)
    if prefix:
        add_prefix_for_sharding(state, prefix)
    found = dist_checkpointing.load({"weights": state}, str(folder), strict=StrictHandling.IGNORE_ALL)
    _load_module(actor, found["weights"])  # which misses any parameter
    actor.version += 1


def _load_optimizer(actor: Actor, folder: Path) -> None:
    """Moments, master weights and step count; the settings are this run's, not those that the checkpoint's run had."""
    state = _sharded_optimizer(actor, actor.model.sharded_state_dict(), is_loading=True)
    own = copy.deepcopy(state["optimizer"]["param_groups"])
    found = dist_checkpointing.load({"optimizer": state}, str(folder))["optimizer"]
    step = int(found["optimizer"]["param_groups"][0]["step"])  # torch's AdamW counts in floats, other Adams in ints
    found["optimizer"]["param_groups"] = [{**group, "step": step} for group in own]
    actor.optimizer.load_state_dict(found)


def _reference_of(actor: Actor) -> Callable[[Any], Any]:
    """Puts the reference policy's tensor in the place of each parameter."""
    names = {id(p): name for name, p in actor.module.named_parameters()}

    def put(value: Any) -> Any:
        if isinstance(value, ShardedTensor | ShardedTensorFactory):
            value.data = actor.reference[names[id(value.data)]]
        return value

    return put


@dataclass(frozen=True)
class _Snapshot:
    """What a checkpoint holds, as it was at one moment; where it was copied no later update reaches it."""

    tensors: dict[str, Any]  # in torch's distributed form, on the CPU
    common: dict[str, Any]  # what the optimizer keeps beside tensors
    rng: RandomState
    state: dict[str, Any]
    weights: list[tuple[str, torch.Tensor]]  # rank 0 only: whole, under their Hugging Face names, to be hashed
    reference_sha256: str

    @classmethod
    def take(cls, actor: Actor, state: dict[str, Any], copy_cpu: bool) -> "_Snapshot":
        """A collective, in the thread that trains.

        `copy_cpu` False: what lies in CPU memory is not copied, and must stay as it is until the checkpoint is written.
        """

        def kept(tensor: torch.Tensor) -> torch.Tensor:
            return to_host(tensor) if copy_cpu or tensor.is_cuda else tensor.detach()

        sharded, common = save_preprocess(_sharded_state(actor))
        flat, _, _ = _replace_state_dict_keys_with_sharded_keys(sharded, True)  # what this rank writes, no replicas
        for value in (value for values in flat.values() for value in values):
            if isinstance(value, ShardedTensor) and not value.key.startswith(REFERENCE):  # the reference never changes
                value.data = kept(value.data)
        weights = [(name, kept(t)) for name, t in actor.export_weights() if dist.get_rank() == 0]
        if torch.cuda.is_available():
            torch.cuda.current_stream().synchronize()
        return cls(
            tensors=mcore_to_pyt_state_dict(flat, False),
            common=copy.deepcopy(common),
            rng=random_state(),
            state=json.loads(json.dumps(state)),
            weights=weights,
            reference_sha256=actor.reference_sha256(),
        )

    def write_tensors(self, folder: Path, group: dist.ProcessGroup | None) -> None:
        """Write the tensors of all ranks; a collective of `group`.

        By torch's own writer: Megatron's forks and spawns processes, which a process with threads (rollout client,
        loggers) must not.

        Raises CheckpointError where `load` would refuse what was written: now, and not at a resume days later.
        """
        torch_distributed_save(
            self.tensors,
            storage_writer=FileSystemWriter(
                folder, single_file_per_rank=True, sync_files=True, per_thread_copy_ahead=0
            ),
            planner=MCoreSavePlanner(dedup_replicated_tensors=False, flatten_state_dict=False),
            process_group=group,
        )
        if dist.get_rank() == 0:
            check_metadata(folder)

    def write_rest(self, folder: Path) -> None:
        """Write what belongs to this rank alone, and on rank 0 what belongs to none.

        Raises CheckpointError where `load` would refuse it: now, and not at a resume days later.
        """
        rank = dist.get_rank()
        files = [folder / f"rng-{rank}.pt"]
        torch.save(self.rng, files[0])
        load_plain(files[0])
        if rank == 0:
            TorchCommonSaveStrategy("torch", 1).save_common(self.common, folder)
            load_plain(folder / "common.pt")
            save_config(CheckpointingConfig("torch_dist", 1), str(folder))
            hashes = {"weights_sha256": sha256_of(self.weights), "reference_sha256": self.reference_sha256}
            (folder / "state.json").write_text(json.dumps({"format": FORMAT, **hashes, **self.state}))
            files += [folder / "common.pt", folder / "metadata.json", folder / "state.json", folder]
        for file in files:
            _sync(file)


class PolicyStore:
    """Writes and loads an actor's checkpoints; writes one at a time, in the background or not.

    In the background `save` copies and returns; a thread writes.  Its collectives go over a process group of its own,
    so that they never mix with those of the training.  `seconds`: how long a rank waits for another, and the next
    `save` for the write before.  Whatever kills it, a folder is absent or whole.
    """

    def __init__(self, actor: Actor, background: bool = False, seconds: float = 0) -> None:
        self.actor, self.background, self.seconds = actor, background, seconds
        self._group = dist.new_group(backend="gloo", timeout=timedelta(seconds=seconds)) if background else None
        self._thread: threading.Thread | None = None
        self._folder = Path()
        self._failure: Exception | None = None

    @property
    def busy(self) -> bool:
        """Whether this rank still writes.  Ranks may differ: decide nothing by it that all must agree on."""
        return self._thread is not None and self._thread.is_alive()

    def save(self, folder: Path, state: dict[str, Any], on_complete: Callable[[], object] | None = None) -> None:
        """Saves the actor as it is now, with `state` (JSON) of rank 0 beside it.  A collective.

        First waits for the write before, and raises as `wait`.  `on_complete` is called on rank 0, in the thread that
        writes, once the folder has its name.
        """
        self.wait()
        snapshot = _Snapshot.take(self.actor, state, copy_cpu=self.background)
        if not self.background:
            self._write(snapshot, folder, on_complete)
            return
        self._folder = folder
        self._thread = threading.Thread(
            target=self._write_and_tell, args=(snapshot, folder, on_complete), name="checkpoint", daemon=True
        )
        self._thread.start()

    def wait(self) -> None:
        """Returns when the last checkpoint is complete, on every rank.  A collective.

        Raises CheckpointError on all ranks, with the ranks' own words, if it is not; DeadlineExceeded if it still is
        being written after `seconds`.
        """
        if self._thread is None:
            return
        self._thread.join(self.seconds)
        if self._thread.is_alive():
            raise Deadline(self.seconds, f"{self._folder} to be written (trainer.deadlines.collective_s)").error()
        self._thread, failure, self._failure = None, self._failure, None
        self._agree(self._folder, failure)

    def drain(self, seconds: float) -> None:
        """After a failure elsewhere: gives the write under way so long to end.  No collective, raises nothing."""
        if self._thread is not None:
            self._thread.join(seconds)

    def load(self, folder: Path) -> dict[str, Any]:
        """Loads a checkpoint into the actor, at this run's layout, and returns its state.  A collective.

        Of this run or, to start a stage, of another, at whatever layout it was written; or an imported one, which holds
        weights alone: they are the reference policy, too, and the optimizer begins.
        Raises CheckpointError if the policy or its reference is not the one that was saved.
        """
        state = _read_checked_state(folder)
        if "imported_from" in state:
            _load_weights(self.actor, folder)
            self.actor.set_reference()
            self.actor.reload_masters()
            self.actor.reset_optimizer()
        else:
            _load_weights(self.actor, folder, REFERENCE)  # one after another: what is read is in memory twice
            self.actor.set_reference()
            _load_weights(self.actor, folder)
            _load_optimizer(self.actor, folder)
            file = folder / f"rng-{dist.get_rank()}.pt"
            if file.is_file():  # a run continued on more ranks has none for the new ones
                set_random_state(load_plain(file))
        _check(folder, state, weights=self.actor.weights_sha256(), reference=self.actor.reference_sha256())
        return state

    def load_policy(self, folder: Path) -> dict[str, Any]:
        """Loads a checkpoint's weights with their float32 master weights, for a roll-back; returns its state.

        A collective.  The reference policy and the random states stay those of this process.  The optimizer's moments
        and step count become the checkpoint's: a roll-back goes on with `reset_optimizer`.
        Raises CheckpointError if the policy is not the one that was saved.
        """
        state = _read_checked_state(folder)
        _load_weights(self.actor, folder)
        _load_optimizer(self.actor, folder)
        _check(folder, state, weights=self.actor.weights_sha256())
        return state

    def _write_and_tell(self, *arguments: Any) -> None:
        try:
            self._write(*arguments)
        except Exception as error:
            self._failure = error

    def _write(self, snapshot: _Snapshot, folder: Path, on_complete: Callable[[], object] | None) -> None:
        temporary, first = folder.with_name(folder.name + TEMPORARY), dist.get_rank() == 0

        def complete() -> None:
            killpoint("checkpoint:rename")
            put_in_place(temporary, folder)
            _sync(folder.parent)
            killpoint("checkpoint:renamed")
            if on_complete is not None:
                killpoint("checkpoint:prune")
                on_complete()

        killpoint("checkpoint:begin")
        self._together(folder, partial(_make_empty, temporary) if first else None)
        self._together(folder, partial(snapshot.write_tensors, temporary, self._group))
        killpoint("checkpoint:tensors")
        self._together(folder, partial(snapshot.write_rest, temporary))
        killpoint("checkpoint:state")
        self._together(folder, complete if first else None)

    def _together(self, folder: Path, work: Callable[[], None] | None) -> None:
        """Does a part of the work, and goes on when all ranks have done theirs."""
        failure = None
        try:
            if work is not None:
                work()
        except Exception as error:
            failure = error
        self._agree(folder, failure)

    def _agree(self, folder: Path, failure: Exception | None) -> None:
        """Raises on every rank if one failed."""
        if isinstance(failure, CheckpointError):  # agreed on already
            text: str | None = str(failure)
        else:
            text = None if failure is None else f"{folder} was not saved: rank {dist.get_rank()}: {_said(failure)}"
        told: list[Any] = [None] * dist.get_world_size()
        try:
            dist.all_gather_object(told, text, group=self._group)
        except Exception as lost:  # a rank is gone, or said nothing in time
            raise CheckpointError(text or f"{folder} was not saved: another rank is silent: {_said(lost)}") from failure
        if any(told):
            raise CheckpointError(next(t for t in told if t)) from failure


def _read_checked_state(folder: Path) -> dict[str, Any]:
    """A checkpoint's state, once what torch and Megatron will unpickle beside it is known to run no code."""
    state = read_state(folder)
    check_metadata(folder)
    load_plain(folder / "common.pt")
    return state


def _check(folder: Path, state: dict[str, Any], **found: str) -> None:
    for name, sha256 in found.items():
        if sha256 != state[f"{name}_sha256"]:
            raise CheckpointError(
                f"{folder}: the {name} policy has sha256 {sha256}, saved was {state[f'{name}_sha256']}"
            )


def _load_module(actor: Actor, state: dict[str, Any]) -> None:
    prefix = "model."
    plain = {k.removeprefix(prefix): v for k, v in state.items() if not isinstance(v, ShardedBase | ShardedObject)}
    parameters = dict(actor.module.named_parameters())
    missing = sorted(parameters.keys() - plain.keys())
    if missing:
        raise CheckpointError(f"the checkpoint has no {missing[0]}")
    for name, p in parameters.items():
        p.data.copy_(plain[name])
    for name, module in actor.module.named_modules():
        if (key := f"{name}.{_EXTRA}") in plain:
            module.set_extra_state(plain[key])


def _make_empty(folder: Path) -> None:
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)


def _sync(path: Path) -> None:
    """On disk, whatever happens next: a file's content, or a folder's names."""
    fd = os.open(path, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def _said(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}"
