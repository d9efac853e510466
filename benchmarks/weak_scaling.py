"""Overhead of the framework in a training step on 1, 2 and 4 data-parallel CPU ranks with equal work for each rank.

    .venv/train/bin/python benchmarks/weak_scaling.py                 one thread and 192 responses per rank

Each rank runs the real `trainer.train_step` on the laptop's model with recorded lengths.  Rollouts and rewards are
generated beforehand, so that engines take no time.  Seconds of a step are split into:

    model        Megatron's schedule: forward and backward passes of log-probabilities, reference and updates
    collectives  calls of torch.distributed outside of the schedule, including the wait for slower ranks; also the rows
                 of a step that rank 0 sends to the other ranks (`DataRanks`)
    optimizer    Adam, norms and clipping
    framework    the rest: batches, micro-batches, advantages, diagnostics, the reference's swap, publication, ledger

CPU seconds are those of a rank's process.  With more ranks than cores the ranks take turns, so that wall time rises;
CPU time would stay equal if caches were not shared.
"""

import argparse
import importlib
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from machine import describe

LENGTHS = Path(__file__).parent / "results" / "lengths-laptop.json"
PARTS = ("model", "collectives", "optimizer", "framework")
GROUP = 16


class Clock:
    """Wall seconds by name of the functions given to `around` or `watch`.

    A call inside another timed call counts only as part of the outer call.
    """

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}
        self._inside = False

    def around(self, name: str, work: Callable[..., Any]) -> Callable[..., Any]:
        def timed(*args: Any, **kwargs: Any) -> Any:
            if self._inside:
                return work(*args, **kwargs)
            self._inside, began = True, time.monotonic()
            try:
                return work(*args, **kwargs)
            finally:
                self._inside = False
                self.seconds[name] = self.seconds.get(name, 0.0) + time.monotonic() - began

        return timed

    def watch(self, name: str, owner: Any, attribute: str) -> None:
        setattr(owner, attribute, self.around(name, getattr(owner, attribute)))


class MadeUpRollouts:
    """A stand-in for the trainer's rollouts, without an engine: publishes weights and distributes prepared groups."""

    def __init__(self, cfg: Any, policy: Any, store: Any, groups: Any) -> None:
        self._updates, self._policy, self._store, self._groups = (
            cfg.trainer.grpo.updates_per_step,
            policy,
            store,
            groups,
        )

    def publish(self, version: int) -> None:
        weights = self._policy.export_weights()
        if self._store is not None:
            self._store.write(weights, version)
        else:
            for _ in weights:
                pass

    def collect(self, metrics: Any) -> Any:
        """Return this rank's rows of the prepared groups."""
        return self._groups.share(self._deal)

    def _deal(self, groups: list[Any]) -> Any:

        from nemo_prorl.batch import JudgedGroups

        judged = JudgedGroups.of(groups)
        return judged.for_ranks(self._updates, self._policy.data_ranks.size)


def trainer_of(cfg: Any, policy: Any, store: Any, groups: list[Any], out: Path) -> Any:
    """Return a trainer with made-up rollouts and a real ledger, which saves, validates and resets nothing."""
    from nemo_prorl.leader import Leader
    from nemo_prorl.lifecycle.ledger import Ledger
    from nemo_prorl.trainer import RunProgress, Trainer

    leader = Leader(cfg.trainer.deadlines, policy.data_ranks.rank)
    rollouts: Any = MadeUpRollouts(cfg, policy, store, leader.only(lambda: groups))
    resets: Any = SimpleNamespace(check_reference=lambda step, gap: None, steps=[], of_optimizer=[])
    records: Any = SimpleNamespace(alarm=lambda step, what: None)
    speed: Any = SimpleNamespace(metrics=lambda tokens, squares, seconds: {})
    none: Any = None
    ledger = Ledger(out, leader.rank == 0, policy)
    parts = (rollouts, none, resets, none, none, none, records, none, none, speed, none, none, leader, ledger)
    return Trainer(cfg, policy, RunProgress(), *parts)


def groups_of(ranks: int, rows: int, vocab: int) -> list[Any]:
    """Return groups of 16 responses, `rows` responses per rank: recorded lengths, random tokens and rewards."""
    import torch

    recorded = json.loads(LENGTHS.read_text())
    generator = torch.Generator().manual_seed(0)

    def group(index: int) -> Any:
        lengths = [recorded[(index * GROUP + k) % len(recorded)] for k in range(GROUP)]
        tokens = [torch.randint(vocab, (max(1, n - 8),), generator=generator).tolist() for n in lengths]
        responses = [
            SimpleNamespace(token_ids=t, logprobs=torch.randn(len(t), generator=generator).tolist()) for t in tokens
        ]
        scores = torch.randint(2, (GROUP,), generator=generator).tolist()
        return SimpleNamespace(
            task="made", prompt_ids=[3] * 8, responses=responses, scores=scores, valid=[True] * GROUP,
            finished=[True] * GROUP, version=0, draw_index=index,
        )  # fmt: skip

    return [group(index) for index in range(ranks * rows // GROUP)]


def one_rank(folder: Path, rows: int, steps: int, out: Path) -> None:
    """Measure one rank, in its own process; torchrun's variables name the rank."""
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    from nemo_prorl.policy.build import build_actor
    from nemo_prorl.rollout.weight_store import WeightStore
    from nemo_prorl.settings import load

    cfg = load([f"trainer.devices={world}", f"trainer.grpo.prompts_per_step={world * rows // GROUP}"])
    policy = build_actor(cfg, folder).actor
    store = WeightStore(out / "store") if rank == 0 else None
    trainer = trainer_of(cfg, policy, store, groups_of(world, rows, policy.shape.vocab) if rank == 0 else [], out)
    actor: Any = importlib.import_module("nemo_prorl.policy.actor")

    clock = Clock()
    schedule = actor.get_forward_backward_func
    actor.get_forward_backward_func = lambda: clock.around("model", schedule())
    for call in (
        "all_reduce",
        "all_gather",
        "all_gather_object",
        "broadcast",
        "broadcast_object_list",
        "scatter_object_list",
        "barrier",
    ):
        clock.watch("collectives", dist, call)
    clock.watch("collectives", actor, "grad_reductions")
    for method in ("prepare_grads", "get_grad_norm", "step_with_ready_grads", "zero_grad"):
        clock.watch("optimizer", policy.mcore_optimizer, method)
    train = trainer.train_step
    train(1)  # the first step warms caches
    found = []
    for step in range(2, steps + 2):
        dist.barrier()
        clock.seconds.clear()
        wall, cpu = time.monotonic(), time.process_time()
        train(step)
        whole = time.monotonic() - wall
        parts = dict(clock.seconds)
        parts["framework"] = whole - sum(parts.values())
        found.append(
            {**{name: parts.get(name, 0.0) for name in PARTS}, "step": whole, "cpu": time.process_time() - cpu}
        )
    (out / f"rank-{rank}.json").write_text(json.dumps(found))


def start(world: int, folder: Path, args: argparse.Namespace, out: Path) -> dict[str, float]:
    """Run `world` ranks; return the seconds of a step by part: medians over steps of means over ranks."""
    from nemo_prorl.launcher.processes import free_port

    port = free_port("127.0.0.1")
    shared: dict[str, Any] = {"WORLD_SIZE": world, "LOCAL_WORLD_SIZE": world, "GROUP_RANK": 0, "MASTER_PORT": port}
    shared |= {"OMP_NUM_THREADS": 1, "MASTER_ADDR": "127.0.0.1", "TORCHELASTIC_RUN_ID": "weak-scaling"}
    command = [
        sys.executable,
        __file__,
        "--rows",
        str(args.rows),
        "--steps",
        str(args.steps),
        "--one",
        str(folder),
        str(out),
    ]
    ranks = []
    for rank in range(world):
        env = {**os.environ, **{k: str(v) for k, v in (shared | {"RANK": rank, "LOCAL_RANK": rank}).items()}}
        ranks.append(subprocess.Popen(command, env=env, stdout=subprocess.DEVNULL))
    try:
        if any(process.wait(args.wait_s) for process in ranks):
            raise RuntimeError(f"one of {world} ranks failed; its error is printed above")
    finally:
        for process in ranks:
            process.kill()
    by_rank = [json.loads((out / f"rank-{rank}.json").read_text()) for rank in range(world)]
    steps = [
        {key: statistics.mean(rank[k][key] for rank in by_rank) for key in by_rank[0][k]} for k in range(args.steps)
    ]
    return {key: statistics.median(step[key] for step in steps) for key in steps[0]}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 2, 4])
    parser.add_argument(
        "--rows", type=int, default=192, help="responses per rank and step, a multiple of 64; default: 192"
    )
    parser.add_argument("--steps", type=int, default=7)
    parser.add_argument("--wait-s", type=float, default=1200.0, help="maximum seconds per layout; default: 1200")
    parser.add_argument("--one", nargs=2, help=argparse.SUPPRESS)  # MODEL OUT: run one rank in this process
    args = parser.parse_args()
    if args.one:
        one_rank(Path(args.one[0]), args.rows, args.steps, Path(args.one[1]))
        os._exit(0)
    from nemo_prorl.data.laptop.model import build_base_model
    from nemo_prorl.settings import load

    cores = len(os.sched_getaffinity(0))
    sys.stdout.write(
        f"{describe()}\n\n{args.rows} responses a rank, 4 updates a step, one thread a rank, {cores} cores; medians of"
        f" {args.steps} steps, means over ranks, seconds\n"
        f"{'ranks':>5s} {'step':>8s} {'cpu':>8s} {'model':>8s} {'collectives':>12s} {'optimizer':>10s}"
        f" {'framework':>10s}"
        f" {'added beside the model':>23s}\n"
    )
    with tempfile.TemporaryDirectory() as name:
        model = Path(name) / "model"
        build_base_model(model, load([]).model, 0, ["one two three"])
        for world in args.ranks:
            out = Path(name) / str(world)
            out.mkdir()
            row = start(world, model, args, out)
            added = row["collectives"] + row["framework"]
            sys.stdout.write(
                f"{world:5d} {row['step']:8.3f} {row['cpu']:8.3f} {row['model']:8.3f} {row['collectives']:12.3f}"
                f" {row['optimizer']:10.3f} {row['framework']:10.3f}"
                f" {added:12.3f} s, {100 * added / row['step']:4.1f} %"
                f"{'  (more ranks than cores)' if world > cores else ''}\n"
            )
            sys.stdout.flush()


if __name__ == "__main__":
    main()
