"""Measures for `ranks.py` how the parts of an actor are wired: an update's steps, and a checkpoint's save and load."""

import json
import math
import pickle
import random
import shutil
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from nemo_prorl import device
from nemo_prorl.batch import Batch
from nemo_prorl.errors import CheckpointError, NonFiniteUpdate
from nemo_prorl.policy.plain_files import check_metadata

Update = Callable[..., dict[str, float]]
LR, OTHER_LR = 1e-3, 3e-4  # of the layouts' configuration, and another
FAULTS = ("gradient", "loss", "log-probability")
LOST = "model.decoder.layers.self_attention.linear_qkv.layer_norm_weight"  # one for all layers, so every stage lacks it


def of_all_ranks(value: Any) -> list[Any]:
    every: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(every, value)
    return every


def wired(actor: Any, batch: Batch, loss: Any, denominator: float, out: Path | None) -> dict[str, Any]:
    """What an update does, and a checkpoint in `out`.  The optimizer is reset; `batch`: this data rank's rows."""
    from nemo_prorl.policy import checkpoint_files

    update = partial(actor.update, batch, loss, denominator, with_entropy=True)
    found: dict[str, Any] = {
        "sums": sums_of_ranks(actor),
        "updates": updates(actor, update),
        "refused": refused(actor, batch, loss),
    }
    at = actor.temperature
    found["temperatures"] = [
        (given, actor.gradients(batch, loss, denominator, used, with_entropy=True)["loss"], update(given)["loss"])
        for given, used in ((None, at), (0.7, 0.7), (at, at))
    ]
    found["digests"] = flipped(actor, update)
    if out is None:
        return found
    store = checkpoint_files.CheckpointFiles(actor)
    found |= saved_and_loaded(actor, store, update, out / "saved")
    found["after refused"] = after_refused(actor, store, update, batch, loss, saved=out / "saved")
    found["failed"] = failed(store, out / "saved", out)
    found["held"] = held(actor, out)
    found["in turn"] = in_turn(actor, out)
    return found


# --- updates ---------------------------------------------------------------------------------------------------------


def sums_of_ranks(actor: Any) -> dict[str, Any]:
    """Numbers of the data ranks; what is too small for float32 beside 1 stays."""
    ranks, rank = actor.data_ranks, actor.data_ranks.rank
    values = {"a": 1.0 + rank, "max_b": 2.0 - rank, "min_c": 1.0 + rank}
    given = {key: torch.tensor(value) for key, value in {**values, "tokens": 3.0}.items()}
    found = {"reduce_sums": ranks.reduce_sums(values), "reduce": ranks.reduce(given), "gather": ranks.gather(rank)}
    return {**found, "sum": ranks.sum(1 + 2**-40), "most": ranks.most(rank)}


def moments(actor: Any) -> list[tuple[Tensor, Tensor, float]]:
    """(first moment, second moment, steps) of each parameter's part on this rank."""
    (leaf,) = actor._leaf_optimizers()
    states = leaf.optimizer.state.values()
    return [(s["exp_avg"].clone(), s["exp_avg_sq"].clone(), float(s["step"])) for s in states]


def norm_over_ranks(tensors: list[Tensor]) -> float:
    squares = sum((t.double() ** 2).sum() for t in tensors)
    return math.sqrt(sum(float(part) for part in of_all_ranks(squares)))


def updates(actor: Any, update: Update) -> list[dict[str, Any]]:
    """One update after a reset of the optimizer for each limit of the gradient's norm, at another learning rate."""
    (leaf,) = actor._leaf_optimizers()
    limit, found = leaf.config.clip_grad, []
    for clip in (limit, 0.25, 1e6, 0.0):
        update()
        actor.reset_optimizer()
        empty = not any(one.any() or two.any() or steps for one, two, steps in moments(actor))
        leaf.config.clip_grad, version = clip, actor.version
        before = {name: value.clone() for name, value in actor.export_weights()}
        actor.set_learning_rate(OTHER_LR)
        norm = update()["grad_norm"]
        actor.set_learning_rate(LR)
        moved = {name: float((value - before[name]).abs().max()) for name, value in actor.export_weights()}
        first = norm_over_ranks([one for one, _, _ in moments(actor)])  # 0.1 times the gradient; here of dp ranks alone
        found.append({"clip": clip, "norm": norm, "first moment": first, "moved": moved, "empty": empty})
        found[-1]["versions"] = actor.version - version
    leaf.config.clip_grad = limit
    return found


def flipped(actor: Any, update: Update) -> dict[str, Any]:
    """Objects and number of layers whose digests change if the last rank flips a bit of one of them."""
    update()
    objects = "weights", "gradient", "moments", "masters"
    before, last = actor.digests(*objects), dist.get_rank() == dist.get_world_size() - 1
    (leaf,) = actor._leaf_optimizers()
    master = next(p for p in leaf.optimizer.param_groups[0]["params"] if p.numel())
    tensors = {"gradient": master.grad, "moments": leaf.optimizer.state[master]["exp_avg_sq"], "masters": master}
    found: dict[str, Any] = {"again": actor.digests(*objects) == before}
    for name, tensor in tensors.items():
        bits = tensor.data.view({4: torch.int32, 2: torch.int16}[tensor.element_size()]).view(-1)[-1:]
        bits ^= int(last)
        after = actor.digests(*objects)
        bits ^= int(last)
        changed = [
            (what, layer) for what in objects for layer in before[what] if before[what][layer] != after[what][layer]
        ]
        found[name] = sorted({what for what, _ in changed}), len({layer for _, layer in changed})
    return found | {"as before": actor.digests(*objects) == before, "layers": [len(before[what]) for what in objects]}


def kept(actor: Any) -> Any:
    """What an update changes of a policy on this rank, moments and steps of Adam among it."""
    state = [tensor.tolist() for one, two, _ in moments(actor) for tensor in (one, two)]
    return state, [steps for *_, steps in moments(actor)], actor.weights_sha256()


def try_with(fault: str, actor: Any, batch: Batch, loss: Any) -> str | None:
    """Try an update of which one thing is not finite on the last data rank; return what this rank is told."""
    last = actor.data_ranks.rank == actor.data_ranks.size - 1

    def bad(logp_BT: Tensor, entropy_BT: Any, micro: Batch, denominator: float) -> Any:
        value, sums = loss(logp_BT, entropy_BT, micro, denominator)
        if last and fault == "gradient":
            value = value + (logp_BT - logp_BT.detach()).abs().sqrt().sum()  # 0, of which the slope is infinite
        if last and fault == "loss":
            value = value + math.inf
            sums = {**sums, "loss": value.detach()}
        return value, {**sums, "nonfinite": torch.tensor(float(last and fault == "log-probability"))}

    try:
        actor.update(batch, bad, 99.0, with_entropy=True)
    except NonFiniteUpdate as error:
        return type(error).__name__
    return None


def refused(actor: Any, batch: Batch, loss: Any) -> dict[str, Any]:
    """Updates of which one thing is not finite: what all ranks are told, and whether they keep what they had."""
    found = {}
    for fault in ("nothing", *FAULTS):
        before, version = kept(actor), actor.version
        told = try_with(fault, actor, batch, loss)
        found[fault] = of_all_ranks((told, (kept(actor), actor.version) == (before, version)))
    return found


def after_refused(actor: Any, store: Any, update: Update, batch: Batch, loss: Any, *, saved: Path) -> list[Any]:
    """Whether an update has the effect on each rank, after refused ones, that it has without them."""
    effects: list[Any] = []
    for faults in ((), FAULTS):
        store.load(saved)
        before = kept(actor)
        told = [try_with(fault, actor, batch, loss) for fault in faults]
        effects.append((update(), kept(actor)))
        moved = [one != other for one, other in zip(before, kept(actor), strict=True)]
    return of_all_ranks((told, moved, effects[0] == effects[1]))


# --- checkpoints -----------------------------------------------------------------------------------------------------


def drawn() -> list[Any]:
    return [random.random(), np.random.rand(), torch.rand(2).tolist()]


def saved_and_loaded(actor: Any, store: Any, update: Update, folder: Path) -> dict[str, Any]:
    """What is drawn after a save and after its load, on each rank; what is written of a state that changes later."""
    from nemo_prorl.policy import checkpoint_files
    from tests.policy.ranks import copied_bytes, held_back

    rank, state = dist.get_rank(), {"step": 5, "of parts": {"a": 1}}
    random.seed(rank)
    np.random.seed(rank)
    torch.manual_seed(rank)
    called: list[Any] = []

    def complete() -> None:
        called.append((folder.exists(), folder.with_name("saved.tmp").exists(), threading.current_thread().name))

    writer = checkpoint_files.CheckpointFiles(actor, background=True, seconds=60)
    with held_back():
        writer.save(folder, state, on_complete=complete)
        wanted = drawn()
        state["step"], state["of parts"]["a"] = 6, 2  # type: ignore[index]
        began = time.monotonic()
        writer.drain(0.1)
        drained = [writer.busy, time.monotonic() - began < 30]
    writer.drain(60)
    drained.append(writer.busy)
    writer.wait()
    version = actor.version
    update()
    loaded = store.load(folder)
    again, versions = drawn(), [actor.version - version]
    store.load_policy(folder)
    versions.append(actor.version - version)
    with copied_bytes() as copied:
        store.save(folder.with_name("foreground"), state)
    return {
        "drawn": of_all_ranks((wanted, again)),
        "state": (loaded["step"], loaded["of parts"]),
        "called": of_all_ranks(called),
        "drained": drained,
        "versions": versions,
        "copied in the foreground": of_all_ranks(copied),
    }


def failed(store: Any, good: Path, out: Path) -> dict[str, Any]:
    """What `load` and `load_policy` say of a checkpoint that was changed in one place."""

    def hashes(folder: Path, **change: str) -> None:
        state = json.loads((folder / "state.json").read_text())
        (folder / "state.json").write_text(json.dumps(state | change))

    def lose(folder: Path) -> None:
        metadata = check_metadata(folder)
        del metadata.state_dict_metadata[LOST]
        (folder / ".metadata").write_bytes(pickle.dumps(metadata))

    def other_states(folder: Path) -> None:
        for file in folder.glob("rng-*.pt"):
            torch.save(random.Random(1), file)

    changes: dict[str, Callable[[Path], object]] = {
        "weights": partial(hashes, weights_sha256="0" * 64),
        "reference": partial(hashes, reference_sha256="0" * 64),
        "random states": other_states,
        "a parameter": lose,
    }
    found: dict[str, Any] = {}
    for name, change in changes.items():
        folder = out / f"changed-{name}"
        if dist.get_rank() == 0:
            change(Path(shutil.copytree(good, folder)))
        dist.barrier()
        for work in (store.load, store.load_policy):
            try:
                work(folder)
                told = ""
            except CheckpointError as error:
                told = str(error)
            found[f"{name}: {work.__name__}"] = of_all_ranks(told)
    return found


def held(actor: Any, out: Path) -> dict[str, bool]:
    """Whether a new reference takes the memory of the last one, after a write that failed and beside two readers."""
    from nemo_prorl.policy import checkpoint_files
    from tests.policy.ranks import patched_write, places

    def reused() -> bool:
        before = places(actor)
        actor.set_reference()
        return places(actor) == before

    def fail(*_: Any) -> None:
        raise OSError

    writer = checkpoint_files.CheckpointFiles(actor, background=True, seconds=60)
    with patched_write("write_tensors", fail):
        writer.save(out / "not-written", {})
        try:
            writer.wait()
        except CheckpointError:
            found = {"after a failure": reused()}
    one, other = actor.stored_reference.hold(), actor.stored_reference.hold()
    other()
    found["beside a reader"] = reused()
    one()
    found["after all readers"] = reused()
    return found


def in_turn(actor: Any, out: Path) -> list[bool]:
    """Whether the first write still goes on when each of two saves takes its snapshot."""
    from nemo_prorl.policy import checkpoint_files
    from tests.policy.ranks import patched_write

    writer, busy = checkpoint_files.CheckpointFiles(actor, background=True, seconds=60), []

    def slow(real: Callable[..., None], *arguments: Any) -> None:
        time.sleep(0.2)
        real(*arguments)

    with patched_write("write_tensors", slow), called_first(device, "synchronize", lambda: busy.append(writer.busy)):
        writer.save(out / "first", {})
        writer.save(out / "second", {})
        writer.wait()
    return busy


@contextmanager
def called_first(module: Any, name: str, first: Callable[[], object]) -> Iterator[None]:
    """Inside, a function of a module calls `first`, and then does what it does."""
    real = getattr(module, name)
    setattr(module, name, lambda *arguments: (first(), real(*arguments))[1])
    try:
        yield
    finally:
        setattr(module, name, real)
