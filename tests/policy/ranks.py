"""Runs the real actor at several parallel layouts and writes down what each computes.

    python tests/policy/ranks.py OUT [slow]        slow: also the layouts that only slow tests look at

NeMo takes 15 s to import: one process does it and forks the ranks of each layout in turn.
"""

import errno
import gc
import os
import shutil
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch

from nemo_prorl import device
from nemo_prorl.algorithms.losses import denominator_terms
from nemo_prorl.batch import Batch
from nemo_prorl.config import GRPOConfig
from nemo_prorl.errors import ProrlError, disk_full
from nemo_prorl.launcher.processes import free_port
from nemo_prorl.policy.weights import HFFolder, write_hf_folder
from nemo_prorl.settings import load
from nemo_prorl.trainer import policy_loss
from tests.ending import end_with_session
from tests.policy.gradients import whole_gradients
from tests.policy.measure_wiring import wired
from tests.policy.models import LLAMA_TIED, QWEN2, QWEN3, write_model

STEPS = 3
# Two layers, of which a pipeline stage has one.  In 16 bits each of two stages has two.
MODELS = {"qwen2": QWEN2 | {"num_hidden_layers": 2}, "qwen3": QWEN3, "llama_tied": LLAMA_TIED}
HALF_MODELS = {"qwen2": QWEN2, "llama_tied": LLAMA_TIED | {"num_hidden_layers": 4}}


@dataclass(frozen=True)
class Layout:
    """One way to run one model."""

    model: str = "qwen2"
    tp: int = 1
    pp: int = 1
    dp: int = 1
    sp: bool = False
    micro_batch: int = 4
    tokens: int | None = None  # model.micro_batch_tokens
    packed: bool = False  # model.packed_sequences

    @property
    def name(self) -> str:
        name = f"{self.model}-tp{self.tp}-pp{self.pp}-dp{self.dp}-sp{int(self.sp)}-mb{self.micro_batch}"
        return name + (f"-t{self.tokens}" if self.tokens else "") + ("-packed" if self.packed else "")

    @property
    def world(self) -> int:
        return self.tp * self.pp * self.dp


DATA_PARALLEL = Layout(dp=2, micro_batch=18, tokens=64)
OTHER_MICRO_BATCHES = Layout(micro_batch=3, packed=True)
MOST_CUT = Layout("llama_tied", tp=2, pp=2, sp=True, micro_batch=18, tokens=64, packed=True)
SLOW = [Layout(pp=2, packed=True), Layout(tp=2, pp=2)]  # MOST_CUT has all of it at once
LAYOUTS = [
    Layout(),
    *SLOW,
    DATA_PARALLEL,
    OTHER_MICRO_BATCHES,
    Layout("qwen3"),
    Layout("qwen3", tp=2, sp=True, micro_batch=18, tokens=64),
    MOST_CUT,
    Layout("llama_tied"),
]


# The other layouts of a model load the checkpoint of its first one: of one rank, or of as many as MOST_CUT has.
FIRST = {model: next(x for x in LAYOUTS if x.model == model) for model in MODELS}
# Where a roll-back, both ways to write and the wiring are looked at, to save time; on one rank for slow tests alone.
CLOSER = [DATA_PARALLEL, MOST_CUT, Layout()]
RECORDED_UPDATES = 2


def fixed_batch() -> Batch:
    """18 responses of many lengths, one of them empty, with targets that exercise every term of the loss."""
    generator = torch.Generator().manual_seed(3)

    def tokens(count: int) -> list[int]:
        return torch.randint(3, 99, (count,), generator=generator).tolist()

    shared = [tokens(3 + k) for k in range(5)]
    prompts = [shared[i % 5] for i in range(18)]
    responses = [tokens((7 * i) % 12) for i in range(18)]
    logps = [(-4.0 - torch.rand(len(r), generator=generator)).tolist() for r in responses]
    batch = Batch.from_sequences(prompts, responses, logps)
    noise_BT = 0.3 * torch.randn(batch.mask_BT.shape, generator=generator)
    return batch.with_targets(
        advantage_B=torch.randn(18, generator=generator),
        old_logp_BT=torch.where(batch.mask_BT, batch.engine_logp_BT + noise_BT, 0.0),
        ref_logp_BT=torch.where(batch.mask_BT, batch.engine_logp_BT - noise_BT, 0.0),
        weight_BT=torch.where(batch.mask_BT, 1.0 + 0.5 * noise_BT.abs(), 0.0),
    )


def config_of(layout: Layout, folder: Path, *overrides: str) -> Any:
    """The shipped laptop configuration with the layout and the folder's model."""
    return load(
        [
            f"trainer.devices={layout.world}",
            f"model.tensor_model_parallel_size={layout.tp}",
            f"model.pipeline_model_parallel_size={layout.pp}",
            f"model.sequence_parallel={str(layout.sp).lower()}",
            f"model.micro_batch_size={layout.micro_batch}",
            f"model.micro_batch_tokens={layout.tokens or 'null'}",
            f"model.packed_sequences={str(layout.packed).lower()}",
            "model.make_vocab_size_divisible_by=8",
            "model.optim.lr=1e-3",
            "trainer.grpo.logprob_chunk_tokens=16",
            "trainer.grpo.logprob_chunk_words=24",
            f"pretrained_checkpoint.restore_from_path={folder}",
            *overrides,
        ]
    )


def rows_of_rank(rows: int, actor: Any) -> torch.Tensor:
    """Very unequal shares: one row for the first of two data ranks, which then has fewer rows than micro-batches."""
    return (
        torch.arange(rows)
        if actor.data_ranks.size == 1
        else torch.arange(rows).tensor_split([1])[actor.data_ranks.rank]
    )


def measure(layout: Layout, out: Path, slow: bool) -> None:
    """What one rank does; rank 0 writes OUT/NAME.pt.  `slow`: also what only slow tests look at."""
    from nemo_prorl.policy.build import build_actor
    from nemo_prorl.policy.checkpoint_files import CheckpointFiles

    torch.set_num_threads(1)
    folder = HFFolder(out / layout.model)
    actor = build_actor(config_of(layout, folder.path), folder.path).actor
    closer = layout in CLOSER and (slow or layout.world > 1)
    everything = fixed_batch()
    mine = everything.rows(rows_of_rank(len(everything), actor))
    share = denominator_terms(mine.mask_BT, "token")
    denominator = actor.data_ranks.sum(float(share))
    config = GRPOConfig(kl_coef=0.1, entropy_coef=0.01)

    def loss(logp_BT: Any, entropy_BT: Any, micro: Batch, denominator: float) -> Any:
        return policy_loss(logp_BT, entropy_BT, micro, denominator, config)

    found: dict[str, Any] = {"exported": {k: v.clone() for k, v in actor.export_weights()}}
    found["rows"], found["micro_batches"] = len(mine), [len(rows) for rows, _ in actor._parts(mine)]
    found["logp"], found["entropy"] = actor.logprobs(everything)
    found["reference_logp"] = actor.reference_logprobs(everything)
    found["sums"] = actor.gradients(mine, loss, denominator, 1.2, with_entropy=True)
    found["gradients"] = whole_gradients(actor)
    found["updates"] = [actor.update(mine, loss, denominator, with_entropy=True) for _ in range(STEPS)]
    found["weights"] = {k: v.clone() for k, v in actor.export_weights()}
    found["reference_after"] = actor.reference_sha256()

    # A checkpoint goes on to the bit, though it is written while updates go on; so does one of a hard reset.
    saved, step = out / "checkpoints" / layout.name, {"step": STEPS}
    writer = CheckpointFiles(actor, background=True, seconds=60)
    sha = actor.weights_sha256()
    with held_back():
        with copied_bytes() as copied:
            writer.save(saved, step)
        onward = [actor.update(mine, loss, denominator, with_entropy=True), actor.weights_sha256()]
        place = places(actor)
        actor.set_reference()
        found["meanwhile"] = (writer.busy, saved.exists(), places(actor) == place)
    writer.wait()
    place = places(actor)
    actor.set_reference()
    found["again in place"] = places(actor) == place
    state = CheckpointFiles(actor).load(saved)
    again = [actor.update(mine, loss, denominator, with_entropy=True), actor.weights_sha256()]
    found["resumed"] = (state["step"], state["weights_sha256"] == sha, onward, again)
    found["copied"] = [torch.empty(1, dtype=torch.int64) for _ in range(layout.world)]
    torch.distributed.all_gather(found["copied"], torch.tensor(copied))
    if closer:
        found["rolled_back"] = rolled_back(
            actor, saved, lambda: actor.update(mine, loss, denominator, with_entropy=True)
        )
    actor.set_reference()
    actor.reset_optimizer()
    CheckpointFiles(actor).save(saved.with_name(layout.name + "-reset"), step)
    if closer:
        writer.save(saved.with_name(layout.name + "-reset-background"), step)
    onward = [actor.update(mine, loss, denominator, with_entropy=True), actor.weights_sha256()]
    CheckpointFiles(actor).load(saved.with_name(layout.name + "-reset"))
    again = [actor.update(mine, loss, denominator, with_entropy=True), actor.weights_sha256()]
    found["reset"] = (onward, again, actor.reference_sha256())

    poison = mine.with_targets(old_logp_BT=torch.where(mine.mask_BT, float("nan"), 0.0))
    before = actor.weights_sha256()
    try:
        actor.update(poison, loss, denominator, with_entropy=True)
        found["poison"] = "was made"
    except ArithmeticError as error:
        found["poison"] = f"{type(error).__name__}; weights kept: {actor.weights_sha256() == before}"

    first = out / "checkpoints" / FIRST[layout.model].name
    CheckpointFiles(actor).load(first)  # another layout's checkpoint: the same policy, from other files
    if layout.world == 1:
        write_hf_folder(out / f"{layout.name}-hf", actor.export_weights(), folder.path, None)
    found["resharded"] = {k: v.clone() for k, v in actor.export_weights()}
    found["resharded_update"] = actor.update(mine, loss, denominator, with_entropy=True)

    # A hard reset of the one policy, and updates on recorded rollouts.
    CheckpointFiles(actor).load(first)
    actor.set_reference()
    actor.reset_optimizer()
    ref_logp_BT = actor.reference_logprobs(everything)
    recorded = everything.with_targets(ref_logp_BT=torch.where(everything.mask_BT, ref_logp_BT, 0.0))
    recorded = recorded.rows(rows_of_rank(len(recorded), actor))
    for _ in range(RECORDED_UPDATES):
        actor.update(recorded, loss, denominator, with_entropy=True)
    found["recorded"] = (actor.reference_sha256(), {k: v.clone() for k, v in actor.export_weights()})

    if closer:
        CheckpointFiles(actor).load(first)
        checkpoints = out / "wired" / layout.name if slow or layout == DATA_PARALLEL else None
        found["wired"] = wired(actor, mine, loss, denominator, checkpoints)
    if layout == Layout():
        found["killed"] = killed_writes(actor, out / "killed")
    if layout == DATA_PARALLEL:
        found["failing"] = failing_writes(actor, out / "failing")
    if int(os.environ["RANK"]) == 0:
        torch.save(found, out / f"{layout.name}.pt")


def places(actor: Any) -> list[int]:
    return [tensor.data_ptr() for tensor in actor.stored_reference.tensors.values()]


@contextmanager
def patched_write(name: str, instead: Callable[..., None]) -> Iterator[None]:
    """Inside, a checkpoint's write runs `instead`, which gets what it replaces as its first argument."""
    from nemo_prorl.policy import checkpoint_files

    real = getattr(checkpoint_files._Snapshot, name)
    setattr(checkpoint_files._Snapshot, name, lambda *arguments: instead(real, *arguments))
    try:
        yield
    finally:
        setattr(checkpoint_files._Snapshot, name, real)


@contextmanager
def copied_bytes() -> Iterator[list[int]]:
    """One number: bytes that a snapshot inside copies on this rank."""
    real, count = device.to_host, [0]

    def counted(tensor: torch.Tensor, into: torch.Tensor | None = None) -> torch.Tensor:
        count[0] += tensor.nbytes
        return real(tensor, into)

    device.to_host = counted
    try:
        yield count
    finally:
        device.to_host = real


@contextmanager
def held_back() -> Iterator[None]:
    """Inside, no tensor of a checkpoint is written: what it holds must have been copied before."""
    go = threading.Event()

    def wait_first(real: Callable[..., None], *arguments: Any) -> None:
        go.wait(60)
        real(*arguments)

    with patched_write("write_tensors", wait_first):
        try:
            yield
        finally:
            go.set()


def rolled_back(actor: Any, folder: Path, update: Callable[[], Any]) -> dict[str, Any]:
    """What `load_policy` leaves as it was, and how it goes on with an optimizer reset."""
    from nemo_prorl.policy.checkpoint_files import CheckpointFiles

    CheckpointFiles(actor).load(folder)
    actor.reset_optimizer()
    wanted = [update(), actor.weights_sha256()]
    actor.set_reference()
    torch.rand(3)
    reference, random = actor.reference_sha256(), torch.get_rng_state()
    update()
    state = CheckpointFiles(actor).load_policy(folder)
    found = {
        "weights": (actor.weights_sha256(), state["weights_sha256"]),
        "random": torch.equal(random, torch.get_rng_state()),
        "reference": actor.reference_sha256() == reference,
    }
    actor.reset_optimizer()
    return {**found, "update": ([update(), actor.weights_sha256()], wanted)}


class Killed(BaseException):
    """Stands for SIGKILL."""


def killed_writes(actor: Any, out: Path) -> dict[str, list[Any]]:
    """For each point in a write: (folder, state, whether its files are whole) of the checkpoints after dying at it.

    A second one is written: of step 2, and of step 1 again where only that comes past the point.
    """
    from nemo_prorl.lifecycle import killpoints, retention
    from nemo_prorl.policy import checkpoint_files
    from nemo_prorl.policy.checkpoint_files import CheckpointFiles

    def content(folder: Path) -> dict[str, bytes]:
        """The same of each write; torch notes a random identity in .metadata."""
        return {p.name: p.read_bytes() for p in folder.iterdir() if p.name not in ("state.json", ".metadata")}

    found: dict[str, list[Any]] = {}
    CheckpointFiles(actor).save(whole := retention.step_folder(out / "before", 1), {"write": 1})
    for point in (p for p in killpoints.POINTS if p.startswith("checkpoint:")):

        def die(name: str, point: str = point) -> None:
            if name == point:
                raise Killed

        folder, step = out / point.split(":")[1], 1 if point == "checkpoint:exchange" else 2
        shutil.copytree(whole, retention.step_folder(folder, 1))
        for module in (checkpoint_files, retention):
            setattr(module, "killpoint", die)  # noqa: B010
        try:
            writer = CheckpointFiles(actor, background=False, seconds=60)
            writer.save(retention.step_folder(folder, step), {"write": 2}, on_complete=lambda: None)
            found[point] = ["was not passed"]
        except Killed:
            retention.clean(folder)
            found[point] = [
                (
                    p.name,
                    retention.read_state(p)["write"],
                    (p / ".metadata").is_file() and content(p) == content(whole),
                )
                for p in retention.complete(folder)
            ]
        finally:
            for module in (checkpoint_files, retention):
                setattr(module, "killpoint", killpoints.killpoint)  # noqa: B010
    return found


def failing_writes(actor: Any, out: Path) -> dict[str, list[Any]]:
    """What each of two ranks is told when rank 1 cannot write, and when it never does."""
    import torch.distributed as dist

    from nemo_prorl.policy.checkpoint_files import CheckpointFiles

    def full_disk(real: Callable[..., None], *arguments: Any) -> None:
        if dist.get_rank() == 1:
            raise OSError(errno.ENOSPC, "No space left on device")
        real(*arguments)

    def silent(real: Callable[..., None], *arguments: Any) -> None:
        if dist.get_rank() == 1:
            time.sleep(30)
        real(*arguments)

    def told(work: Callable[[], None]) -> list[Any]:
        began = time.monotonic()
        try:
            work()
            mine: Any = None
        except ProrlError as error:
            mine = (type(error).__name__, str(error), disk_full(error), time.monotonic() - began)
        every: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(every, mine)
        return every

    def save_and_wait(writer: Any, folder: Path) -> None:
        writer.save(folder, {})
        writer.wait()

    found = {}
    for way, background in (("background", True), ("foreground", False)):
        writer, folder = CheckpointFiles(actor, background, 60), out / way
        with patched_write("write_rest", full_disk):
            found[way] = told(partial(save_and_wait, writer, folder))
        there = folder.exists()
        found[f"{way}, again"] = told(partial(save_and_wait, writer, folder))
        found[f"{way}, there"] = [there, folder.exists()]
    writer = CheckpointFiles(actor, background=True, seconds=60)
    with patched_write("write_rest", full_disk):
        writer.save(out / "first", {})
        while writer.busy:
            time.sleep(0.01)
    found["next save"] = told(lambda: writer.save(out / "second", {}))
    with patched_write("write_tensors", silent):
        writer = CheckpointFiles(actor, background=True, seconds=1)
        writer.save(out / "silent", {})
        found["silent"] = told(writer.wait)
    return found


def fork_ranks(world: int, work: Callable[[], None], log: Path, seconds: float) -> None:
    """Runs `work` in `world` forked ranks; raises with their output if one fails or the time is over."""
    port = free_port("127.0.0.1")
    children = []
    for rank in range(world):
        pid = os.fork()
        if pid == 0:
            end_with_session()
            with log.with_suffix(f".{rank}.log").open("w") as f:
                os.dup2(f.fileno(), 1)
                os.dup2(f.fileno(), 2)
            os.environ |= {
                "RANK": str(rank),
                "LOCAL_RANK": str(rank),
                "WORLD_SIZE": str(world),
                "LOCAL_WORLD_SIZE": str(world),
                "GROUP_RANK": "0",
                "MASTER_ADDR": "127.0.0.1",
                "MASTER_PORT": str(port),
                "TORCHELASTIC_RUN_ID": "test",
            }
            code = 1
            try:
                work()
                code = 0
            except BaseException:  # a forked child must never return into the parent's code
                traceback.print_exc()
            finally:
                sys.stdout.flush()
                os._exit(code)
        children.append(pid)
    wait_for(children, log, seconds)


def wait_for(children: list[int], log: Path, seconds: float) -> None:
    """Waits for all children; kills the rest once one failed or the time is over."""
    end, waiting, failed = time.monotonic() + seconds, list(children), False
    while waiting and not failed and time.monotonic() < end:
        for pid in list(waiting):
            done, status = os.waitpid(pid, os.WNOHANG)
            if done:
                waiting.remove(pid)
                failed |= status != 0
        time.sleep(0.02)
    for pid in waiting:
        os.kill(pid, 9)
        os.waitpid(pid, 0)
    if failed or waiting:
        told = "\n".join(p.read_text()[-3000:] for p in sorted(log.parent.glob(log.stem + ".*.log")))
        raise RuntimeError(f"{log.stem}: {'failed' if failed else 'out of time'}\n{told}")


def main() -> None:
    out, slow = Path(sys.argv[1]), sys.argv[2:] == ["slow"]
    for name, config in MODELS.items():
        write_model(out / name, config)
    from nemo_prorl.policy.cpu import shims as cpu
    from tests.policy import measure_checkpoints as of  # sees Megatron as it is
    from tests.policy import measure_half as half

    cpu.enable()
    import nemo_prorl.policy.actor
    import nemo_prorl.policy.checkpoint_files  # noqa: F401  (imported before the forks)

    config_of(Layout(), out / "qwen2")  # Hydra composes once, before the forks
    gc.freeze()  # a collection of garbage in a rank would touch, and so copy, all that was imported

    for layout in (x for x in LAYOUTS if slow or x not in SLOW):
        fork_ranks(layout.world, partial(measure, layout, out, slow), out / layout.name, 240)

    for work in (of.of_one_adam, of.across):
        for lazy in (False, True):
            fork_ranks(2, partial(of.write, work, lazy, out), out / f"adam-{work.__name__}-{lazy}", 120)
    fork_ranks(2, partial(of.write, of.of_extra_state, False, out), out / "extra-state", 120)

    for name, config in HALF_MODELS.items():
        write_model(out / f"half-{name}", config, torch.bfloat16)
    for layout in (x for x in half.LAYOUTS if slow or x not in half.SLOW):
        fork_ranks(layout.world, partial(half.measure, layout, out), out / f"half-{layout.name}", 120)


if __name__ == "__main__":
    main()
