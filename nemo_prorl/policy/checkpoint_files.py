"""Exact checkpoints of an actor in Megatron's distributed format, which can be loaded at any parallel layout.

checkpoints/step-000040/        complete once it has this name; written as step-000040.tmp (lifecycle/retention.py)
    *.distcp .metadata          all ranks: tensors of the policy, the optimizer and the reference policy
    common.pt metadata.json     rank 0: the optimizer's settings, and the format
    rng-RANK.pt                 each rank: its random states
    groups.safetensors          rank 0: the groups that wait for a later step (rollout/group_arrays.py)
    state.json                  rank 0: format; sha256 of weights, reference and (`files`) groups; step, stage, version
                                of this package, hashes of its code and the user's functions (lifecycle/checkpoints.py);
                                the run's parts (`build` in rank.py): trainer (step), records (length of metrics.jsonl),
                                validation (held-out scores), resets (made, found, on trial), prompts (position in the
                                data), rollouts (keep rates, groups that wait), entropy (coefficient of its bonus)

A checkpoint made by `prorl import-hf` has weights only: its state.json has no parts, but `imported_from`, and the
folder hf/ has the model's config.json and tokenizer.
"""

import copy
import hashlib
import json
import shutil
import threading
from collections.abc import Callable, Mapping
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
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.state_dict_saver import save as torch_distributed_save

from nemo_prorl import device
from nemo_prorl.deadlines import Deadline
from nemo_prorl.errors import CheckpointError, DamagedCheckpoint
from nemo_prorl.files import TEMPORARY, flush_to_disk
from nemo_prorl.lifecycle.killpoints import killpoint
from nemo_prorl.lifecycle.retention import FORMAT, put_in_place, read_state
from nemo_prorl.policy.actor import Actor, load_optimizer
from nemo_prorl.policy.plain_files import check_objects, load_plain
from nemo_prorl.policy.random_state import RandomState, random_state, set_random_state
from nemo_prorl.policy.weights import sha256_of

REFERENCE = "reference."
_EXTRA = "_extra_state"  # key suffix of a module's state beside parameters: an object, of which files have a pickle


def _to_be_read(value: Any) -> Any:
    """Make a sharded tensor refer to new CPU memory, which a load fills, instead of the model's parameter.

    Loading then neither overwrites the model's parameters nor takes GPU memory, which awake engines may occupy.
    Returns `value`; a value of another kind is not changed.
    """
    if isinstance(value, ShardedTensor | ShardedTensorFactory) and isinstance(value.data, torch.Tensor):
        value.data = torch.empty_like(value.data, device="cpu", requires_grad=False)
    return value


def _sharded_state(actor: Actor) -> dict[str, Any]:
    """Return this rank's tensors of model, reference policy and optimizer, each with its place in the whole tensor."""
    reference = _sharded_model(actor, scales=False)  # built from the model, so that the reference is sharded alike
    dict_list_map_inplace(_reference_of(actor), reference)
    add_prefix_for_sharding(reference, REFERENCE)
    model = _sharded_model(actor, actor.keeps_scales)
    return {"reference": reference, "model": model, "optimizer": _sharded_optimizer(actor, model)}


def _sharded_model(actor: Actor, scales: bool) -> dict[str, Any]:
    """Return the model's parameters and, with `scales`, the extra state of its modules (`Actor.keeps_scales`)."""
    state: dict[str, Any] = actor.model.sharded_state_dict()
    return {key: value for key, value in state.items() if scales or not key.endswith(_EXTRA)}


def _sharded_optimizer(actor: Actor, model: dict[str, Any]) -> dict[str, Any]:
    """Return the optimizer's tensors, sharded like the parameters in `model`."""
    state: dict[str, Any] = actor.optimizer.sharded_state_dict(model, dist_ckpt_parallel_save=True)
    return state


def _load_weights(actor: Actor, folder: Path, prefix: str = "") -> None:
    """Load the weights of a checkpoint's policy into the model, and FP8's delayed scales where the model keeps them.

    Reference policies, and checkpoints of runs without such scales, have none.

    Args:
        prefix: REFERENCE loads the weights of the checkpoint's reference policy instead.
    """
    state = _sharded_model(actor, actor.keeps_scales and not prefix)
    dict_list_map_inplace(_to_be_read, state)
    if prefix:
        add_prefix_for_sharding(state, prefix)
    tensors = _read_tensors({"weights": state}, folder, strict=StrictHandling.IGNORE_ALL)
    _load_module(actor, tensors["weights"])  # raises CheckpointError for a missing parameter, which `load` ignored
    actor.version += 1


def _read_tensors(state: dict[str, Any], folder: Path, **options: Any) -> dict[str, Any]:
    """Return the content of a checkpoint for a sharded state.  Raises DamagedCheckpoint if a file cannot be read."""
    try:
        tensors: dict[str, Any] = dist_checkpointing.load(state, str(folder), **options)
    except (CheckpointException, OSError) as error:  # torch raises the first on all ranks
        cause = next(iter(error.failures.values()))[0] if isinstance(error, CheckpointException) else error
        raise DamagedCheckpoint(folder, f"{folder}: its tensors cannot be read: {_with_type(cause)}") from error
    return tensors


def _load_optimizer(actor: Actor, folder: Path) -> None:
    """Load Adam's moments, master weights and step count; keep this run's settings, such as the learning rate."""
    state = _sharded_optimizer(actor, _sharded_model(actor, scales=False))
    dict_list_map_inplace(_to_be_read, state)
    saved = _read_tensors({"optimizer": state}, folder)["optimizer"]
    step = int(saved["optimizer"]["param_groups"][0]["step"])  # a float from torch's AdamW, an int from other Adams
    load_optimizer(actor, saved["param_state"], step)


def _reference_of(actor: Actor) -> Callable[[Any], Any]:
    """Return a function that replaces a parameter by the reference policy's tensor of the same name."""
    names = {id(p): name for name, p in actor.module.named_parameters()}

    def put(value: Any) -> Any:
        if isinstance(value, ShardedTensor | ShardedTensorFactory):
            value.data = actor.stored_reference.tensors[names[id(value.data)]]
        return value

    return put


@dataclass(frozen=True)
class _Snapshot:
    """This rank's part of a checkpoint at one moment; later updates do not change the tensors that were copied."""

    tensors: dict[str, Any]  # in torch's distributed form, on the CPU
    common: dict[str, Any]  # the optimizer's settings and counters beside its tensors
    rng: RandomState
    state: dict[str, Any]  # state of the parts of the run; rank 0 writes it to state.json
    files: Mapping[str, Callable[[], bytes]]  # further files of rank 0: a function that returns the content, by name
    weights: list[tuple[str, torch.Tensor]]  # rank 0 only: (Hugging Face name, whole tensor), for the sha256
    reference_sha256: str

    @classmethod
    def take(
        cls, actor: Actor, state: dict[str, Any], files: Mapping[str, Callable[[], bytes]], copy_cpu: bool
    ) -> "_Snapshot":
        """Take a snapshot of the actor, in the training thread.  A collective.

        Args:
            copy_cpu: False: tensors in CPU memory are not copied, and must not change until the checkpoint is written.
                The reference policy is never copied.
        """

        def to_cpu(tensor: torch.Tensor) -> torch.Tensor:
            return device.to_host(tensor) if copy_cpu or device.on_gpu(tensor) else tensor.detach()

        sharded, common = save_preprocess(_sharded_state(actor))
        flat, _, _ = _replace_state_dict_keys_with_sharded_keys(sharded, True)  # drops replicas of other ranks' tensors
        for value in (value for values in flat.values() for value in values):
            # The reference policy is in host memory, and `Reference.hold` keeps it unchanged: it needs no copy.
            if isinstance(value, ShardedTensor) and not value.key.startswith(REFERENCE):
                value.data = to_cpu(value.data)
        weights = [(name, to_cpu(t)) for name, t in actor.export_weights() if dist.get_rank() == 0]
        device.synchronize()
        return cls(
            tensors=mcore_to_pyt_state_dict(flat, False),
            common=copy.deepcopy(common),
            rng=random_state(),
            state=json.loads(json.dumps(state)),
            files=files,
            weights=weights,
            reference_sha256=actor.reference_sha256(),
        )

    def write_tensors(self, folder: Path, group: dist.ProcessGroup | None) -> None:
        """Write the tensors of all ranks.  A collective of `group`.

        torch's writer is used, because Megatron's writer forks processes, which is unsafe in a process with threads
        (rollout client, loggers).
        Raises CheckpointError: `load` would refuse what was written.  The error comes now, not days later.
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
            check_objects(folder)

    def write_rest(self, folder: Path) -> None:
        """Write this rank's random states and, on rank 0, the files shared by all ranks.

        Raises CheckpointError: `load` would refuse a written file.  The error comes now, not days later at a resume.
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
            written = {name: _write_file(folder / name, content()) for name, content in self.files.items()}
            state = {"format": FORMAT, **hashes, "files": written, **self.state}
            (folder / "state.json").write_text(json.dumps(state))
            files += [folder / name for name in ("common.pt", "metadata.json", *written, "state.json")]
            files.append(folder)
        for file in files:
            flush_to_disk(file)


class CheckpointFiles:
    """A writer and loader of an actor's checkpoints; it writes one checkpoint at a time.

    With `background`, `save` returns after copying the tensors, and a thread writes them.  The thread's collectives
    use a separate process group, so that they never mix with the collectives of training.  A checkpoint folder is
    either absent or complete, even if the process is killed during a write.
    """

    def __init__(self, actor: Actor, background: bool = False, seconds: float = 0) -> None:
        """Make the process group of the background thread, if there is one.  A collective.

        Args:
            seconds: used with `background` only: how long the thread waits for other ranks at most, and how long
                `wait` or the next `save` waits for an unfinished write at most.
        """
        self.actor, self.background, self.seconds = actor, background, seconds
        self._group = dist.new_group(backend="gloo", timeout=timedelta(seconds=seconds)) if background else None
        self._thread: threading.Thread | None = None
        self._folder = Path()
        self._failure: Exception | None = None

    @property
    def busy(self) -> bool:
        """True while this rank writes.  Ranks may have different values, so no common decision may depend on it."""
        return self._thread is not None and self._thread.is_alive()

    def save(
        self,
        folder: Path,
        state: dict[str, Any],
        on_complete: Callable[[], object] | None = None,
        files: Mapping[str, Callable[[], bytes]] | None = None,
    ) -> None:
        """Save the actor and rank 0's `state` as they are now, after the previous write is complete.  A collective.

        Args:
            state: goes into state.json; must be JSON.
            on_complete: called on rank 0, in the writing thread, once the folder has its final name.
            files: functions that return the content of further files, by name; called on rank 0, in the writing
                thread.  state.json gets the files' sha256.

        Raises:
            CheckpointError, DeadlineExceeded: the previous write failed or is not complete, as in `wait`; without
                `background` also if this write failed.
        """
        self.wait()
        snapshot = _Snapshot.take(self.actor, state, files or {}, copy_cpu=self.background)
        if not self.background:
            self._write(snapshot, folder, on_complete)
            return
        self._folder = folder
        arguments = self.actor.stored_reference.hold(), snapshot, folder, on_complete
        self._thread = threading.Thread(target=self._write_in_thread, args=arguments, name="checkpoint", daemon=True)
        self._thread.start()

    def wait(self) -> None:
        """Wait until the last checkpoint is complete on every rank.  A collective.

        Raises:
            CheckpointError: the write failed; raised on all ranks, with the error of the rank that failed.
            DeadlineExceeded: the write is not complete after `seconds`.
        """
        if self._thread is None:
            return
        self._thread.join(self.seconds)
        if self._thread.is_alive():
            raise Deadline(self.seconds, f"{self._folder} to be written (trainer.deadlines.collective_s)").error()
        self._thread, failure, self._failure = None, self._failure, None
        self._agree(self._folder, failure)

    def drain(self, seconds: float) -> None:
        """Wait at most `seconds` for an unfinished write, after a failure elsewhere in the run.

        In this time the write may still complete the checkpoint.  Not a collective; never raises.
        """
        if self._thread is not None:
            self._thread.join(seconds)

    def load(self, folder: Path) -> dict[str, Any]:
        """Load a checkpoint into the actor, at this run's layout, and return its state.  A collective.

        The checkpoint may be this run's or another run's, written at any layout, or an imported one.  An imported
        checkpoint has weights only: they become the reference policy too, and the optimizer is reset.

        Raises:
            CheckpointError: the sha256 of policy or reference differs from state.json, or a file is missing, damaged or
                refused.
        """
        state = _read_checked_state(folder)
        if "imported_from" in state:
            _load_weights(self.actor, folder)
            self.actor.set_reference()
            self.actor.reload_masters()
            self.actor.reset_optimizer()
        else:
            _load_weights(
                self.actor, folder, REFERENCE
            )  # before the policy, not with it: reading needs twice the memory
            self.actor.set_reference()
            _load_weights(self.actor, folder)
            _load_optimizer(self.actor, folder)
            file = folder / f"rng-{dist.get_rank()}.pt"
            if file.is_file():  # absent for the additional ranks when a run continues on more ranks
                set_random_state(load_plain(file), dist.get_rank())
        _check(folder, state, weights=self.actor.weights_sha256(), reference=self.actor.reference_sha256())
        return state

    def load_policy(self, folder: Path) -> dict[str, Any]:
        """Load a checkpoint's weights and float32 master weights for a roll-back; return its state.  A collective.

        Reference policy and random states of this process stay unchanged.  The optimizer's moments and step count
        become the checkpoint's; call `reset_optimizer` next.
        Raises CheckpointError: the policy's sha256 differs from state.json, or a file is missing, damaged or refused.
        """
        state = _read_checked_state(folder)
        _load_weights(self.actor, folder)
        _load_optimizer(self.actor, folder)
        _check(folder, state, weights=self.actor.weights_sha256())
        return state

    def _write_in_thread(self, release: Callable[[], None], *arguments: Any) -> None:
        """Call `_write` with `arguments`; keep an error for `wait`, which raises it in the training thread.

        Args:
            release: called at the end; from then on the tensors of the reference policy may change.
        """
        try:
            self._write(*arguments)
        except Exception as error:
            self._failure = error
        finally:
            release()

    def _write(self, snapshot: _Snapshot, folder: Path, on_complete: Callable[[], object] | None) -> None:
        temporary, first = folder.with_name(folder.name + TEMPORARY), dist.get_rank() == 0

        def complete() -> None:
            killpoint("checkpoint:rename")
            put_in_place(temporary, folder)
            flush_to_disk(folder.parent)
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
        """Run this rank's `work`, then wait for all ranks; raise CheckpointError on every rank if one failed."""
        failure = None
        try:
            if work is not None:
                work()
        except Exception as error:
            failure = error
        self._agree(folder, failure)

    def _agree(self, folder: Path, failure: Exception | None) -> None:
        """Tell all ranks this rank's failure (None: no failure); raise CheckpointError on every rank if one failed."""
        if isinstance(failure, CheckpointError):  # names folder and rank already
            text: str | None = str(failure)
        else:
            text = None if failure is None else f"{folder} was not saved: rank {dist.get_rank()}: {_with_type(failure)}"
        texts: list[Any] = [None] * dist.get_world_size()
        try:
            dist.all_gather_object(texts, text, group=self._group)
        except Exception as lost:  # a rank has ended, or did not answer in time
            no_answer = f"{folder} was not saved: another rank did not answer: {_with_type(lost)}"
            raise CheckpointError(text or no_answer) from failure
        if any(texts):
            raise CheckpointError(next(t for t in texts if t)) from failure


def _read_checked_state(folder: Path) -> dict[str, Any]:
    """Return the content of state.json, after a check that torch and Megatron run no code when they load the rest.

    FP8's delayed scales are the exception: Transformer Engine unpickles the bytes of the tensors that hold them.
    Raises CheckpointError: this version cannot continue the checkpoint, or a pickle is damaged or refused.
    """
    state = read_state(folder)
    check_objects(folder)
    load_plain(folder / "common.pt")
    return state


def _check(folder: Path, state: dict[str, Any], **hashes: str) -> None:
    for name, sha256 in hashes.items():
        if sha256 != state[f"{name}_sha256"]:
            raise DamagedCheckpoint(
                folder,
                f"{folder}: the {name} policy was changed after the save: expected sha256 {state[f'{name}_sha256']};"
                f" got {sha256}",
            )


def _load_module(actor: Actor, state: dict[str, Any]) -> None:
    prefix = "model."
    plain = {k.removeprefix(prefix): v for k, v in state.items() if not isinstance(v, ShardedBase | ShardedObject)}
    parameters = dict(actor.module.named_parameters())
    missing = sorted(parameters.keys() - plain.keys())
    if missing:
        raise CheckpointError(f"the checkpoint has no parameter {missing[0]}")
    for name, p in parameters.items():
        p.data.copy_(plain[name])
    for name, module in actor.module.named_modules():
        if (key := f"{name}.{_EXTRA}") in plain:
            module.set_extra_state(plain[key])


def _make_empty(folder: Path) -> None:
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)


def _write_file(path: Path, content: bytes) -> str:
    """Write a file and return its sha256."""
    path.write_bytes(content)
    return hashlib.sha256(content).hexdigest()


def _with_type(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}"
