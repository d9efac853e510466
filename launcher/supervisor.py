"""The supervisor of one node: starts its reward server, engines and trainer ranks, restarts services, stops them all.

The same code supervises a laptop and each node of a cluster, where `peers` gives access to the other supervisors.
"""

import json
import logging
import os
import signal
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from omegaconf import DictConfig

import nemo_prorl
from nemo_prorl import stacks
from nemo_prorl.config import Config
from nemo_prorl.launcher.doctor.check import NoAnswer
from nemo_prorl.launcher.environment import engine_libraries, engine_variables, for_engine, rank_variables, with_caches
from nemo_prorl.launcher.events import Events, on_screen
from nemo_prorl.launcher.health import Health
from nemo_prorl.launcher.peers import CLEAN, NodeAddress, Peers, StepOutcome
from nemo_prorl.launcher.processes import Child, MergedLog, NeverServed, ProcessFailed, stop_all
from nemo_prorl.launcher.progress import Progress
from nemo_prorl.launcher.run_data import plain
from nemo_prorl.launcher.stack_writer import StackWriter
from nemo_prorl.launcher.usage_sampler import UsageSampler
from nemo_prorl.lifecycle.retention import complete
from nemo_prorl.lifecycle.stopping import FORWARDED_AS, JOB_START
from nemo_prorl.rewards.functions import name_of, settings_of
from nemo_prorl.sizing.cores import Cores, engine_threads
from nemo_prorl.sizing.devices import node_devices
from nemo_prorl.usage import RESTART_SUFFIX

if TYPE_CHECKING:
    from nemo_prorl.launcher.doctor.devices import Gpu

_log = logging.getLogger(__name__)

PACKAGE = Path(nemo_prorl.__file__).parent
_HOLD_S = 6 * 3600.0  # seconds an engine waits until the others wake; longer than any phase of the trainer
# On a CPU, glibc returns the memory of a freed tensor to the kernel, which then maps the next tensor page by page.
# With these limits in bytes a process keeps the memory; only larger tensors are mapped again.
HEAP = {"MALLOC_MMAP_THRESHOLD_": str(64 << 20), "MALLOC_TRIM_THRESHOLD_": str(1 << 30)}
_STARTING = "stopped while the trainer started"
_KILLED = (-signal.SIGKILL, 128 + signal.SIGKILL)  # statuses of a process, or of its shell
_LAST_LINES, _LINE_CHARS = 15, 2000  # lines of a process's log in the report of its failure; characters per line
# Variables that mark a Slurm task.  Our processes are not Slurm tasks, but libraries would take them for tasks.
_TASK_VARIABLES = tuple(
    f"SLURM_{name}" for name in ("PROCID", "LOCALID", "NODEID", "NTASKS", "NPROCS", "STEP", "TASK", "GTIDS")
) + ("PMI", "OMPI_")


class _Killed(BaseException):
    """A signal came for the second time, and all processes were killed."""


class NodeSupervisor:
    """The supervisor of this node's processes.

    Args:
        tasks: tasks that the reward server judges.
        merged: destination for the lines of all processes.
        events: caller of the `on_event` command; None on nodes other than node 0.
        peers: the other nodes, and the place of this one; None: the run has one node.
    """

    def __init__(
        self,
        cfg: DictConfig,
        run_dir: Path,
        tasks: Sequence[str],
        merged: MergedLog,
        events: Events | None = None,
        peers: Peers | None = None,
    ) -> None:
        self.cfg, self.dir, self.tasks, self.events = cfg, run_dir, tasks, events
        self.endpoints, self.logs = run_dir / "endpoints", run_dir / "logs"
        self.merged, self.peers = merged, peers or Peers(self.endpoints, NodeAddress())
        self.place = self.peers.place
        several = self.place.nodes > 1
        self._here = self.place.host if several else ""  # for messages
        # Address at which services listen, and at which the ranks reach the services of this node.  On one node both
        # are the loopback address, because a Slurm job's node has another address under its own name.
        self._bind, self._public = ("0.0.0.0", self.place.host) if several else ("127.0.0.1", "127.0.0.1")
        self.progress: Progress | None = None  # on node 0 of a run that trains
        self._signals: list[int] = []
        self._closing = False  # whether `run` has begun to stop its processes
        self._stacks_file = self.logs / f"stacks-{self.place.node}.txt"
        self._stacks = StackWriter([], self._stacks_file)
        self._look_at = 0.0  # monotonic time of the next look for requested restarts

    def run(self, only: str | None = None) -> StepOutcome:
        """Start all processes, wait for the end of the trainer, stop all processes; return how the run ended.

        Args:
            only: "warmup": only the supervised steps of the trainer, without engines and reward server;
                "preflight": only one step at full context (`nemo_prorl.preflight`); "replay": stored steps without
                engines (`nemo_prorl.replay_training`); None: the whole run.
        """
        from nemo_prorl.rollout.weight_store import WeightStore, weights_folder

        with_services = only not in ("warmup", "replay")
        self.progress = Progress(self.cfg, self.dir, with_services) if self.place.node == 0 else None
        store = WeightStore(weights_folder(self.dir, self.place.node if self.place.nodes > 1 else None))
        if stale := store.remove_stale():
            _log.info("removed %d stale weight files of an earlier process from %s", len(stale), store.folder)
        services = self.services(store.folder) if with_services else []
        ranks = self._ranks(only)
        health = Health(services, self.endpoints / "token", self.cfg.trainer.deadlines)
        usage = UsageSampler([*services, *ranks], self.dir, self.place)
        self._stacks = StackWriter([*services, *ranks], self._stacks_file)
        with self._forwarding_signals(services, ranks):
            try:
                for child in [*services, *ranks]:
                    child.start()
                return self._watch(services, ranks, health)
            except _Killed:
                return self._stopped("all processes were killed")
            finally:
                self._closing = True
                health.close()
                usage.close()
                stop_all(ranks, self.cfg.trainer.deadlines.stop_s)
                stop_all(services, 2.0, quiet=True)  # services have no state to save
                if self.progress is not None:
                    self.progress.close()
                store.remove()

    def services(self, weights: Path, engines: int | None = None, alone: bool = False) -> list[Child]:
        """Return the node's reward server and engines, not yet started.

        Args:
            weights: folder that engines may load weights from.
            engines: number of engines; None: the node's share of rollout.engines.
            alone: whether the engines have the devices for themselves, without a trainer.
        """
        each = self.cfg.rollout.engines // self.place.nodes if engines is None else engines
        return [self._rewards(), *(self._engine(k, weights, alone) for k in range(each))]

    def _watch(self, services: Sequence[Child], ranks: Sequence[Child], health: Health) -> StepOutcome:
        while True:
            end = self.peers.look()
            if end is not None or any(rank.status is not None for rank in ranks):
                return self._ended(ranks, end)
            try:
                self._restart_requested(services)
                for child in services:
                    child.keep_up()
            except ProcessFailed as failure:
                if isinstance(failure, NeverServed):  # no step of this start is complete, so the ranks need not save it
                    for rank in ranks:
                        rank.kill_group()
                if self.place.nodes == 1:
                    raise
                return self._over(StepOutcome(1, str(failure), self.place.host, child.name, child.status))
            health.update()
            self._stacks.update()
            if self.progress is not None:
                self.progress.update()
            if self.events is not None:
                self.events.update()
            time.sleep(0.1)

    def _restart_requested(self, services: Sequence[Child]) -> None:
        """Restart the services for which a file asks (`usage.request_restart`); this counts as no failure."""
        if time.monotonic() < self._look_at:
            return
        self._look_at = time.monotonic() + 1.0  # the folder may be on a slow shared disk
        for child in services:
            with suppress(OSError):  # there is no request, or a shared disk is unavailable for a moment
                (self.endpoints / f"{child.name}{RESTART_SUFFIX}").unlink()
                _log.info("%s is restarted on request", child.name)
                child.restart()

    def _ended(self, ranks: Sequence[Child], peer_end: StepOutcome | None) -> StepOutcome:
        """Return how the run ended, after a rank has ended here or on another node.

        The other ranks get some seconds to end without a signal.

        Args:
            peer_end: end of another node; None: a rank of this node ended first.
        """
        at = time.time()
        clean = peer_end is not None and peer_end.clean
        end = time.monotonic() + (self.cfg.trainer.deadlines.stop_s if clean else 10.0)
        while time.monotonic() < end and any(rank.status is None for rank in ranks):
            time.sleep(0.1)
        ended = [(rank, code) for rank in ranks if (code := rank.status) is not None]
        end = time.monotonic() + 1.0
        for rank, _ in ended:
            rank.read_out(max(0.0, end - time.monotonic()))
        if self.progress is not None:
            self.progress.update()
        if not ended:  # no rank of this node
            return self._over(None)
        failed = [(rank, code) for rank, code in ended if code not in CLEAN]
        if not failed:
            return self._over(StepOutcome(max(code for _, code in ended)) if clean or peer_end is None else None)
        rank, code = min(failed, key=lambda item: item[1] >= 0)  # killed ones first
        sent = {FORWARDED_AS[signal.Signals(number)] for number in self._signals}  # they end a rank that is starting
        if peer_end is None and -code in sent:
            return self._stopped(_STARTING)
        cause = f"{rank.name} ended with status {code}; its log is {rank.log_file}"
        if code in _KILLED:
            cause += "; it was killed by SIGKILL, often because memory was exhausted (dmesg, or the memory limit of the"
            cause += f" job); the same command {self._onward()}"
        log = [line[:_LINE_CHARS] for line in list(rank.tail)[-_LAST_LINES:]]
        return self._over(
            StepOutcome(code if code in (2, 3, 4) else 1, cause, self._here, rank.name, status=code, log=log, at=at)
        )

    def _stopped(self, how: str) -> StepOutcome:
        """Return how a run ended that a signal stopped immediately, with what the same command will do."""
        kept = complete(self.dir / "checkpoints")
        return self._over(StepOutcome(75 if kept else 1, f"{how}; the same command {self._onward()}", self._here))

    def _onward(self) -> str:
        kept = complete(self.dir / "checkpoints")
        return f"continues after {kept[-1].name}" if kept else "begins again, because no checkpoint was complete"

    def _over(self, own: StepOutcome | None) -> StepOutcome:
        """Return how the run ended, agreed with the other nodes; node 0 records a failure, or a stop of a start.

        Args:
            own: end of this node's processes; None: a process of another node ended first.
        """
        end = self.peers.agree(own, stop_requested=bool(self._signals))
        if self.place.node > 0:
            return end
        if end.what.startswith(_STARTING) and self.events is not None:
            self.events.stopped(end.what)
        if end.clean or end.what.startswith(_STARTING):
            if end.what:
                _log.warning(end.what)
            return end
        where = f"{end.host}: " if end.host else ""
        if self.events is not None:
            self.events.failure(f"{where}{end.what}", process=end.process, status=end.status, log=end.log)
        shown = self.progress is not None and end.process == "trainer-0"  # `Progress.line` shows what it logs
        for line in on_screen(end.what if end.host == self._here else f"{where}{end.what}", end.log, shown):
            _log.error("%s", line)
        return end

    @contextmanager
    def _forwarding_signals(self, services: Sequence[Child], ranks: Sequence[Child]) -> Iterator[None]:
        """Let SIGTERM, SIGINT and SIGUSR1 stop the trainer after its step; a repeated signal kills all processes.

        A trainer that starts handles no signals, so the first one ends it (`rank.train`).
        """

        def forward(number: int, _: Any) -> None:
            if number in self._signals:
                for child in [*services, *ranks]:
                    child.kill_group()
                if self._closing:
                    return
                raise _Killed
            self._signals.append(number)
            name = signal.Signals(number).name
            by_slurm = " from srun or Slurm" if name == "SIGTERM" and self.place.nodes > 1 else ""
            text = "received %s%s; the run stops after this step, or now if it is starting; a second signal kills it"
            _log.warning(text, name, by_slurm)
            for rank in ranks:
                rank.signal(FORWARDED_AS[signal.Signals(number)])

        before = {number: signal.signal(number, forward) for number in FORWARDED_AS}
        before[stacks.SIGNAL] = signal.signal(stacks.SIGNAL, self._stacks.ask)
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    def _child(
        self, name: str, command: list[str], env: dict[str, str], restarts: int, endpoint: bool, engine: bool = False
    ) -> Child:
        inherited = {key: value for key, value in os.environ.items() if not key.startswith(_TASK_VARIABLES)}
        inherited = for_engine(inherited) if engine else inherited
        heap = HEAP if self.cfg.trainer.accelerator == "cpu" else {}
        env = {**env, stacks.VARIABLE: str(self._stacks_file)}
        return Child(
            name,
            command,
            with_caches({"PYTHONUNBUFFERED": "1", **heap, **dict(self.cfg.launch.env), **inherited, **env}),
            self.logs / f"{name}.log",
            self.merged,
            restarts=restarts,
            endpoint=self.endpoints / f"{name}.json" if endpoint else None,
        )

    def _rewards(self) -> Child:
        cfg, name = self.cfg, f"rewards-{self.place.node}"
        command = [sys.executable, "-m", "nemo_prorl.rewards.server", "--workers", str(cfg.rewards.workers)]
        functions = cfg.rewards.functions
        tasks = [name_of(task, functions[task]) if task in functions else task for task in self.tasks]
        command += ["--tasks", ",".join(tasks), "--token-file", str(self.endpoints / "token")]
        command += ["--endpoint-file", str(self.endpoints / f"{name}.json"), "--parent-pid", str(os.getpid())]
        used = {task: place for task, place in functions.items() if task in self.tasks}  # it knows no others
        command += ["--settings", json.dumps(settings_of({**plain(cfg.rewards), "functions": used}))]
        command += ["--host", self._bind, "--public-host", self._public]
        command += ["--unsafe-no-sandbox"] if cfg.rewards.unsafe_no_sandbox else []
        return self._child(name, command, {"OMP_NUM_THREADS": "1"}, cfg.rollout.max_restarts, True)

    def _engine(self, local: int, weights: Path, alone: bool) -> Child:
        """Return an engine of this node, not yet started.

        Args:
            local: number of the engine on this node, from 0.  The engine's name counts the engines of all nodes.
        """
        from nemo_prorl.lifecycle.base_model import initial_model
        from nemo_prorl.rollout.engine.sleep import HOLD_FILE

        cfg, rollout = self.cfg, self.cfg.rollout
        index = self.place.node * (rollout.engines // self.place.nodes) + local
        options = {
            "model": initial_model(cast(Config, cfg), self.dir),
            "token-file": self.endpoints / "token",
            "weights-dir": weights,
            "endpoint-file": self.endpoints / f"engine-{index}.json",
            "index": index,
            "parent-pid": os.getpid(),
            "host": self._bind,
            "public-host": self._public,
            "dtype": rollout.dtype,
            "tp": rollout.tensor_parallel_size,
            "threads": engine_threads(cfg, len(os.sched_getaffinity(0))),
            "max-model-len": cfg.trainer.grpo.context_tokens,
            "max-num-seqs": rollout.max_num_seqs,
            "max-batched-tokens": rollout.max_batched_tokens,
            "kv-mb": rollout.kv_cache_mb or (None if alone else self._kv_mb()),
        }
        if rollout.sleep is not None and not alone:
            options |= {"hold-file": self.endpoints / HOLD_FILE, "hold-s": _HOLD_S}
        command = [str(Path(rollout.python).absolute()), str(PACKAGE / "rollout" / "engine" / "server.py")]
        command += [word for key, value in options.items() if value is not None for word in (f"--{key}", str(value))]
        command += ["--float32-head"] if cfg.trainer.grpo.float32_head else []
        command += ["--eager"] if rollout.eager else []
        command += ["--sleep"] if rollout.sleep is not None and not alone else []
        env = {**self._gpus(local, alone), **engine_variables(cfg), **self._libraries}
        engine = self._child(f"engine-{index}", command, env, rollout.max_restarts, endpoint=True, engine=True)
        engine.has_served = self._has_engine_served
        if not alone and self._cores is not None:
            engine.cores = self._cores.engines[local] or None
        return engine

    def _has_engine_served(self) -> bool:
        """Return whether any engine has generated a response since the start of the run."""
        from nemo_prorl.rollout.engine import SERVED_SUFFIX

        return any(self.endpoints.glob(f"engine-*{SERVED_SUFFIX}"))

    def _gpus(self, local: int, alone: bool) -> dict[str, str]:
        """Return CUDA_VISIBLE_DEVICES for an engine, one GPU per tensor parallel rank; empty without GPUs.

        The engine shares GPUs with trainer ranks.  With rollout.own_devices it uses the GPUs that follow the trainer's.
        """
        if self.cfg.trainer.accelerator != "gpu":
            return {}
        devices = os.environ.get("CUDA_VISIBLE_DEVICES")
        ours = devices.split(",") if devices else [str(k) for k in range(node_devices(self.cfg))]
        tp = self.cfg.rollout.tensor_parallel_size
        first = local * tp + (self.cfg.trainer.devices if self.cfg.rollout.own_devices and not alone else 0)
        return {"CUDA_VISIBLE_DEVICES": ",".join(ours[first : first + tp])}

    @cached_property
    def _cores(self) -> Cores | None:
        available = os.sched_getaffinity(0)
        if self.cfg.trainer.accelerator != "gpu":
            return Cores.of(self.cfg, available)
        return Cores.near_gpus(self.cfg, available, [gpu.bus for gpu in self._devices]) if self._devices else None

    @cached_property
    def _devices(self) -> "list[Gpu]":
        """Return the node's visible GPUs; none for a CPU configuration, or if nvidia-smi does not answer."""
        from nemo_prorl.launcher.doctor.devices import query, visible

        if self.cfg.trainer.accelerator != "gpu":
            return []
        try:
            return visible(query(), os.environ)
        except (NoAnswer, ValueError):
            return []

    @cached_property
    def _libraries(self) -> dict[str, str]:
        """Return the variable with which engines use CUDA on an older driver, if they need one."""
        return engine_libraries(self.cfg, os.environ, self._devices[0].driver if self._devices else None)[1]

    def _kv_mb(self) -> int | None:
        """Return the GPU memory that the trainer leaves for the engine's KV cache, in MiB; None on a CPU."""
        from nemo_prorl.sizing.memory import device_bytes, memory_of

        room = memory_of(self.cfg).kv_room(device_bytes(self.cfg))
        return None if room is None else room >> 20

    def _ranks(self, only: str | None) -> list[Child]:
        devices, place = self.cfg.trainer.devices, self.place
        apart = self._cores if self.cfg.trainer.accelerator == "cpu" else None
        cores_per_rank = len(os.sched_getaffinity(0)) // devices if apart is None else len(apart.ranks[0])
        threads = os.environ.get("OMP_NUM_THREADS") or str(max(1, cores_per_rank))
        env = {
            "WORLD_SIZE": str(devices * place.nodes),
            "LOCAL_WORLD_SIZE": str(devices),
            "GROUP_RANK": str(place.node),
            "GROUP_WORLD_SIZE": str(place.nodes),
            "MASTER_ADDR": place.master,
            "MASTER_PORT": str(place.port),
            "TORCHELASTIC_RUN_ID": "prorl",
            stacks.SUPERVISOR: str(os.getpid()),
            JOB_START: _job_start(),
            "OMP_NUM_THREADS": threads,
            "TOKENIZERS_PARALLELISM": "false",
            "HF_HUB_OFFLINE": "1",
            "TORCHINDUCTOR_COMPILE_THREADS": "1",  # a rank compiles four small functions; a process pool costs more
            **rank_variables(self.cfg),
        }
        module = {"preflight": "nemo_prorl.preflight", "replay": "nemo_prorl.replay_training"}.get(
            only or "", "nemo_prorl.rank"
        )
        command = [sys.executable, "-m", module, str(self.dir), *(["warmup"] if only == "warmup" else [])]
        ranks = []
        for k in range(devices):
            rank = place.node * devices + k
            own = {**env, "RANK": str(rank), "LOCAL_RANK": str(k)}
            ranks.append(self._child(f"trainer-{rank}", command, own, 0, False))
            if self._cores is not None:
                ranks[k].cores = self._cores.ranks[k] or None
        if self.progress is not None:
            ranks[0].on_line = self.progress.line
        return ranks


_STARTED = time.time()


def _job_start() -> str:
    """Return when the Slurm job began, or outside Slurm when this command began, in seconds since 1970."""
    return os.environ.get(JOB_START) or os.environ.get("SLURM_JOB_START_TIME") or str(_STARTED)
