"""The program of one trainer rank: builds all parts of a run, connects them, and runs the training.

The supervisor of a node starts this program once for each rank.  Only this file and
`replay_training` know all parts of a run.

    python -m nemo_prorl.rank RUN_DIR [warmup]
"""

import gc
import logging
import os
import signal
import sys
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from omegaconf import OmegaConf
from prorl_sandbox.kernel import die_with_parent

from nemo_prorl import __version__, device, stacks
from nemo_prorl.algorithms.entropy import AdaptiveEntropy
from nemo_prorl.config import Config, num_ranks, responses_per_step
from nemo_prorl.data.blend import Blend, LoadedData, load_sources, of_tasks
from nemo_prorl.data.laptop.generators import warmup_target
from nemo_prorl.data.lengths import PromptLengths, fit
from nemo_prorl.data.render import PromptRenderer
from nemo_prorl.errors import ProrlError, StoppedCleanly, disk_full
from nemo_prorl.leader import Leader
from nemo_prorl.lifecycle import retention, stages
from nemo_prorl.lifecycle.base_model import base_folder, initial_model, warmup_records
from nemo_prorl.lifecycle.batches import Batches
from nemo_prorl.lifecycle.checkpoints import Checkpoints, LeaderState, Stateful
from nemo_prorl.lifecycle.control import Control, Requests
from nemo_prorl.lifecycle.ledger import Ledger
from nemo_prorl.lifecycle.resets import Resets
from nemo_prorl.lifecycle.run_records import Journal, Records
from nemo_prorl.lifecycle.step_traces import StepTraces
from nemo_prorl.lifecycle.stopping import FORWARDED_AS, Stopping
from nemo_prorl.lifecycle.tolerances import kl_after_reset
from nemo_prorl.lifecycle.trials import Trials
from nemo_prorl.lifecycle.validation import HeldOut, Validation
from nemo_prorl.lifecycle.warmup import warm_up
from nemo_prorl.lifecycle.watchdog import Watchdog
from nemo_prorl.rewards.canaries import CanarySchedule
from nemo_prorl.rewards.client import RewardClient
from nemo_prorl.rewards.connections import allow_connections
from nemo_prorl.rewards.discovery import discover
from nemo_prorl.rewards.second import SecondVerifiers
from nemo_prorl.rollout.collector import Collector
from nemo_prorl.rollout.engines import EnginePool
from nemo_prorl.rollout.groups import PromptDraw
from nemo_prorl.rollout.overlap import OneStepOff
from nemo_prorl.rollout.rollouts import Rollouts
from nemo_prorl.service import awaited_services, read_token
from nemo_prorl.sizing.devices import node_devices
from nemo_prorl.sizing.flops import UpdateSpeed
from nemo_prorl.sizing.memory import ModelShape
from nemo_prorl.trainer import RunProgress, Trainer

if TYPE_CHECKING:
    from nemo_prorl.policy.checkpoint_files import CheckpointFiles

_log = logging.getLogger("nemo_prorl.rank")  # __name__ is __main__ when this file is the program


class Policy:
    """The policy of this rank, and the parts that do not need engines: tokenizer, data (rank 0), leader, loggers."""

    def __init__(self, cfg: Config, run_dir: Path) -> None:
        """Build the policy; a collective of all ranks.

        If the run begins with a warm-up and RUN/base is missing, also warm the policy up and write RUN/base.
        """
        from nemo_prorl.policy.build import build_actor

        base = base_folder(cfg, run_dir)
        self.folder = folder = base if base.exists() else initial_model(cfg, run_dir)  # with the tokenizer
        built = build_actor(OmegaConf.structured(cfg), folder, run_dir / "logs" / "nemo")
        self.actor = built.actor
        self.loggers = built.trainer.loggers
        self.leader = Leader(cfg.trainer.deadlines, self.actor.data_ranks.rank)
        self.data = self.leader.only(lambda: load_sources(cfg.data))
        self.renderer = PromptRenderer(folder, cfg.trainer.grpo.context_tokens, cfg.data)
        _log.info("the model is built")
        if not base.exists() and not retention.complete(run_dir / "checkpoints"):
            make_base(cfg, self, base)

    def checkpoint_files(self, cfg: Config) -> "CheckpointFiles":
        """Return the writer and loader of the policy's checkpoints.  A collective."""
        from nemo_prorl.policy.checkpoint_files import CheckpointFiles

        return CheckpointFiles(self.actor, cfg.trainer.grpo.async_checkpoints, cfg.trainer.deadlines.collective_s)


def make_base(cfg: Config, policy: Policy, base: Path) -> None:
    """Warm the policy up with supervised steps, and write it to `base` as a Hugging Face folder."""
    warmup, actor = cfg.trainer.warmup, policy.actor
    _log.info("warm-up: %d supervised steps with %d answers each", warmup.steps, warmup.batch_size)
    examples = policy.data.call(lambda data: warmup_examples(cfg, data, policy))
    warm_up(actor, examples, warmup, float(cfg.model["optim"]["lr"]))
    actor.set_reference()
    write_policy(policy, base)


def write_policy(policy: Policy, folder: Path) -> None:
    """Write the weights in use as a Hugging Face folder.  A collective."""
    from nemo_prorl.policy.weights import write_hf_folder

    tensors = [(name, t.cpu()) for name, t in policy.actor.export_weights()]
    if policy.leader.rank == 0:
        write_hf_folder(folder, iter(tensors), policy.folder, None)
    policy.leader.barrier()


def warmup_examples(cfg: Config, data: LoadedData, policy: Policy) -> list[tuple[list[int], list[int]]]:
    """Return the examples of the warm-up: the token ids of a prompt and of its correct response."""
    renderer, lengths = policy.renderer, PromptLengths(policy.folder, cfg.data)
    records = warmup_records(cfg, fit(cfg, LoadedData(data.train, []), lengths).train)
    prompts = [renderer.prompt_ids(record) for record in records]
    answers = [warmup_target(record) for record in records]
    return [(ids, renderer.target_ids(ids, text)) for ids, text in zip(prompts, answers, strict=True)]


def build(cfg: Config, run_dir: Path, policy: Policy, stopping: Stopping) -> Trainer:
    """Build and connect all parts of a run; a collective.  Waits until engines and reward servers are ready."""
    actor, leader = policy.actor, policy.leader
    ranks = num_ranks(cfg)
    devices = cfg.trainer.num_nodes * node_devices(cfg)  # type: ignore[arg-type]
    records = Records(cfg, run_dir, leader.rank == 0, policy.loggers, devices)
    source = policy.data.only(lambda data: rollout_source(cfg, run_dir, data, policy))
    blend, collector = source.only(lambda source: source.blend), source.only(lambda source: source.collector)
    collector.run_on_leader(lambda collector: stopping.set_abandon(collector.abandon))
    ledger = Ledger(run_dir, leader.rank == 0, actor, Batches(run_dir, cfg.trainer.grpo, records.alarm))
    shared: dict[str, Any] = {"records": records, "leader": leader, "ledger": ledger}
    rollouts = Rollouts(cfg, run_dir, actor, blend=blend, collector=collector, **shared)
    validation = Validation(cfg, source.only(lambda source: source.heldout), rollouts, records)
    used = step_parts(cfg, policy, RunProgress(), rollouts=rollouts, validation=validation, records=records)
    resets: Resets = used["resets"]
    parts: dict[str, Stateful] = {  # named as in state.json, and loaded in this order
        "trainer": used["progress"],
        "records": records,
        "validation": validation,
        "resets": resets,
        "prompts": LeaderState(blend),
        "rollouts": rollouts,
        "entropy": used["entropy"],
    }
    checkpoints = Checkpoints(
        cfg=cfg,
        folder=run_dir / "checkpoints",
        files=policy.checkpoint_files(cfg),
        parts=parts,
        validation=validation,
        resets=resets,
        records=records,
        leader=leader,
    )
    requests = leader.only(lambda: Requests(run_dir, Journal(run_dir), records.alarm))
    services = {"engine": cfg.rollout.engines, "rewards": cfg.trainer.num_nodes}
    watchdog = Watchdog(leader.rank, ranks, run_dir, records.alarm)
    collector.run_on_leader(lambda collector: watchdog.set_waiting(collector.waiting))
    return Trainer(
        **used,
        trials=Trials(cfg, run_dir, resets, checkpoints, **shared),
        checkpoints=checkpoints,
        control=Control(requests, validation, checkpoints, stopping, ledger),
        stopping=stopping,
        traces=StepTraces(run_dir, cfg.trainer.trace_steps, leader.rank, ranks, services),
        watchdog=watchdog,
        ledger=ledger,
    )


def step_parts(
    cfg: Config, policy: Any, progress: RunProgress, *, rollouts: Any, validation: Any, records: Records
) -> dict[str, Any]:
    """Return the parts that a trainer needs for `train_step`, by the names of its fields."""
    shared = {"rollouts": rollouts, "validation": validation, "records": records, "leader": policy.leader}
    allowed = kl_after_reset(cfg)  # type: ignore[arg-type]
    shape = ModelShape.of(OmegaConf.create(cfg.model), policy.actor.shape.vocab)
    return {
        "cfg": cfg,
        "policy": policy.actor,
        "progress": progress,
        **shared,
        "resets": Resets(cfg.trainer.resets, allowed, policy.actor, **shared),
        "entropy": AdaptiveEntropy(cfg.trainer.grpo.adaptive_entropy),
        "speed": UpdateSpeed(shape, num_ranks(cfg), device.card()),
    }


@dataclass(frozen=True)
class RolloutSource:
    """The training prompts (`blend`), the held-out prompts, and the collector of judged responses; on rank 0 only."""

    blend: Blend
    heldout: HeldOut
    collector: Collector


def rollout_source(cfg: Config, run_dir: Path, data: LoadedData, policy: Policy) -> RolloutSource:
    """Build the prompts and the collector on rank 0; wait until engines and reward servers are ready."""
    used = data._replace(train=of_tasks(data.train, cfg.data))
    renderer, train = policy.renderer, fit(cfg, used, PromptLengths(policy.folder, cfg.data)).train
    blend = Blend(train, cfg.seed, cfg.data.retire_after)
    heldout = [(source.name, record) for source, records in data.validation for record in records]
    draws = [PromptDraw(record, renderer.prompt_ids(record), 0) for _, record in heldout]
    tasks = {record["task"] for _, records in train for record in records} - cfg.rewards.functions.keys()
    registry = discover(functions=cfg.rewards.functions)
    # The user's functions have no canaries and no second verifier.
    canaries = CanarySchedule(registry, tasks, responses_per_step(cfg), cfg.seed)
    second = SecondVerifiers(registry, tasks, cfg.rewards.plugins, cfg.seed)
    collector = connect(cfg, run_dir, blend, renderer, canaries=canaries, second=second)
    return RolloutSource(
        blend, HeldOut([name for name, _ in heldout], draws, collector, run_dir / "validations"), collector
    )


def connect(
    cfg: Config,
    run_dir: Path,
    blend: Blend,
    renderer: PromptRenderer,
    canaries: CanarySchedule | None = None,
    second: SecondVerifiers | None = None,
) -> Collector:
    """Wait on rank 0 until every engine and reward server is ready, and return the collector.

    Raises DeadlineExceeded: not all are ready in time; the error says how many endpoint files were expected and where.
    """
    allow_connections()
    endpoints, token_file = run_dir / "endpoints", run_dir / "endpoints" / "token"
    seconds = cfg.trainer.deadlines.startup_s
    for kind, count in (("rewards", cfg.trainer.num_nodes), ("engine", cfg.rollout.engines)):
        deadline, are_ready = awaited_services(endpoints, kind, count, seconds)
        deadline.wait_until(are_ready)
    _log.info("ready: rollout engines: %d, reward servers: %d", cfg.rollout.engines, cfg.trainer.num_nodes)
    engines = EnginePool(endpoints, read_token(token_file), cfg.rollout.engines)
    collector = OneStepOff if cfg.rollout.own_devices else Collector
    rewards = RewardClient(endpoints, token_file)
    return collector(cfg, engines, rewards, blend, renderer, canaries=canaries, second=second)


def begin(trainer: Trainer, run_dir: Path) -> None:
    """Resume from the newest checkpoint; without a checkpoint, start the run, from the previous stage if any."""
    cfg, checkpoints, progress = trainer.cfg, trainer.checkpoints, trainer.progress
    newest = checkpoints.newest()
    made = 0 if newest is None else retention.step_of(newest)
    trainer.ledger.cut(made)
    if newest is not None:
        checkpoints.resume(newest)
        checkpoints.tell_damaged(progress.step)
        _log.info("continuing after step %d, from checkpoint %s", progress.step, newest)
        trainer.resets.settle(progress.step)
        if progress.step < cfg.trainer.grpo.max_steps or progress.unfinished is not None:
            trainer.write_summary()
    else:
        start = trainer.leader.call(lambda: stages.origin(cfg, run_dir))
        trainer.records.begin()
        if start is None:
            _log.info("the run starts with the weights of %s", base_folder(cfg, run_dir))
            trainer.records.event("start", 0, stage=cfg.stage, version=__version__)
        else:
            begin_stage(trainer, start)
    trainer.control.settle(progress.step, [reset["reason"] for reset in trainer.resets.done])


def begin_stage(trainer: Trainer, start: stages.Origin) -> None:
    """Load policy, optimizer, reference and the position in the data from the previous stage."""
    cfg, records = trainer.cfg, trainer.records
    sha256 = trainer.checkpoints.files.load(start.checkpoint)["weights_sha256"]
    source = {"start_from": str(start.checkpoint), "weights_sha256": sha256}
    records.event("start", 0, stage=cfg.stage, version=__version__, **source)
    state = retention.read_state(start.newest)  # prompts continue after the newest step even if the weights are older
    if "imported_from" not in state:
        trainer.checkpoints.begin_stage(state)
    if (version := state.get("version", __version__)) != __version__:
        records.alarm(0, f"{start.checkpoint} was written by version {version}; this is {__version__}")
    _log.info("stage %s starts from checkpoint %s", cfg.stage, start.checkpoint)
    if cfg.chain.hard_reset:
        trainer.resets.perform(0, f"stage {cfg.stage} begins", trainer.checkpoints)
    else:
        trainer.resets.continue_reference()
        trainer.checkpoints.save(0)


def setup_process(cfg: Config, rank: int) -> None:
    """Set up logging, stacks on request, threads and determinism of this rank."""
    logging.basicConfig(
        level=logging.INFO if rank == 0 else logging.WARNING,
        format="%(asctime)s %(levelname)s %(name)s: %(message)s",
        force=True,
    )
    stacks.register()
    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", os.cpu_count() or 1)))
    if cfg.deterministic:  # launcher.environment sets the environment variables
        # On GPUs some library operations have no deterministic algorithm: log a warning instead of ending the run.
        torch.use_deterministic_algorithms(True, warn_only=cfg.trainer.accelerator == "gpu")


def read(run_dir: Path) -> Config:
    """Set up this process as a rank of the run in `run_dir`, and return the run's configuration."""
    from nemo_prorl.settings import read_config

    die_with_parent(int(os.environ.get(stacks.SUPERVISOR, os.getppid())))  # the supervisor
    cfg: Any = OmegaConf.to_object(read_config(run_dir / "config.yaml"))
    setup_process(cfg, int(os.environ.get("RANK", 0)))
    return cfg


def train(cfg: Config, run_dir: Path, only_warmup: bool) -> None:
    """Run a rank from its start to its end.  Raises StoppedCleanly after a stop request."""
    stopping = Stopping(cfg.trainer.deadlines)
    policy = Policy(cfg, run_dir)
    if only_warmup:
        return
    trainer = build(cfg, run_dir, policy, stopping)
    # Until here a signal ends the process: nothing is lost, and a warm-up or a wait for engines may take long.
    for sig in FORWARDED_AS.values():
        signal.signal(sig, stopping.on_signal)
    try:
        begin(trainer, run_dir)
        gc.collect()
        gc.freeze()  # saves time: later collections skip the many permanent objects of NeMo and torch
        trainer.train()
        trainer.finish()
    except StoppedCleanly as stopped:
        trainer.records.event("stop", trainer.progress.step, reason=str(stopped))
        trainer.control.close(trainer.progress.step)
        raise
    except ProrlError:  # a checkpoint that is being written gets `stop_s` seconds to complete
        trainer.checkpoints.files.drain(cfg.trainer.deadlines.stop_s)
        raise
    finally:
        trainer.ledger.close()


def main(work: Callable[[], None]) -> int:
    """Run `work`, log its error if any, and return the exit code of the process."""
    try:
        work()
    except StoppedCleanly as stopped:
        _log.warning("%s", stopped)
        return stopped.exit_code
    except ProrlError as error:
        _log.error("%s: %s", type(error).__name__, error)
        return error.exit_code
    except Exception as error:
        if (text := disk_full(error)) is None:
            raise
        _log.error("%s", text)
        return 1
    return 0


def end(code: int) -> None:
    """Exit now, because threads of loggers and collectives could keep a finished rank alive."""
    logging.shutdown()
    os._exit(code)


if __name__ == "__main__":
    directory = Path(sys.argv[1])
    end(main(partial(train, read(directory), directory, only_warmup=sys.argv[2:] == ["warmup"])))
