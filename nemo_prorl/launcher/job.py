"""A run on one node: checks, first model, reward server, engines, trainer ranks; ends all when a rank ends.

Everything that can be wrong with the configuration or the data is said before any engine or rank starts.
"""

import fcntl
import json
import logging
import os
import secrets
import signal
import socket
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from omegaconf import DictConfig

import nemo_prorl
from nemo_prorl.config import Config
from nemo_prorl.errors import ConfigError, DataError, UnfitMachine
from nemo_prorl.events import Events
from nemo_prorl.launcher.processes import Child, MergedLog, stop_all
from nemo_prorl.launcher.progress import Progress
from nemo_prorl.run_stopping import JOB_START

if TYPE_CHECKING:
    from nemo_prorl.config import DataSource
    from nemo_prorl.rewards.interface import RewardPlugin

_log = logging.getLogger(__name__)

PACKAGE = Path(nemo_prorl.__file__).parent


def run(cfg: DictConfig, config_text: str) -> int:
    """Runs or continues the run of `cfg.run_dir` to its end; returns the exit code of the `prorl` command."""
    from nemo_prorl.launcher.outcome import tell

    run_dir = Path(cfg.run_dir).absolute()
    with _locked(run_dir):
        if _finished(run_dir, cfg.trainer.grpo.max_steps):
            _log.info("%s is finished; more steps: trainer.grpo.max_steps=N, another run: run_dir=...", run_dir)
            tell(run_dir)
            return 0
        with Events(cfg.on_event, run_dir) as events:
            code = _node(cfg, run_dir, config_text, events).run()
    if code == 0:
        tell(run_dir)
    return code


def warmup(cfg: DictConfig, config_text: str) -> int:
    """Only the run's supervised steps: makes RUN/base, a Hugging Face folder, from which `prorl train` goes on."""
    run_dir = Path(cfg.run_dir).absolute()
    with _locked(run_dir):
        if (run_dir / "base").exists():
            _log.info("%s is there already", run_dir / "base")
            return 0
        with Events(cfg.on_event, run_dir) as events:
            code = _node(cfg, run_dir, config_text, events).run(only="warmup")
    if code == 0:
        sys.stdout.write(f"{run_dir / 'base'}\n")
    return code


def _node(cfg: DictConfig, run_dir: Path, config_text: str, events: Events) -> "Node":
    return Node(cfg, run_dir, prepare(cfg, run_dir, config_text), events)


@contextmanager
def _locked(run_dir: Path) -> Iterator[None]:
    """One process at a time works on a run directory; the lock ends with the process."""
    run_dir.mkdir(parents=True, exist_ok=True)
    with (run_dir / ".lock").open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            raise ConfigError(f"run_dir={run_dir} is in use by another process") from error
        yield


def _finished(run_dir: Path, max_steps: int) -> bool:
    try:
        summary = json.loads((run_dir / "summary.json").read_text())
    except (OSError, ValueError):
        return False
    return bool(summary["finished"]) and summary["step"] >= max_steps


def prepare(cfg: DictConfig, run_dir: Path, config_text: str) -> list[str]:
    """Checks data, rewards and the rollout environment, makes the run directory and the first model.

    Returns the tasks of the data.  Raises ConfigError, UnfitMachine or DataError.
    """
    from nemo_prorl.data.blend import load_sources
    from nemo_prorl.data.render import PromptRenderer
    from nemo_prorl.recipe.base_model import make_initial_model
    from nemo_prorl.recipe.retention import check_continuable, clean, complete
    from nemo_prorl.recipe.stages import origin
    from nemo_prorl.rewards.discovery import discover, make_plugin
    from nemo_prorl.rewards.service import check_sandbox
    from nemo_prorl.settings_checks import check_shape

    if cfg.trainer.num_nodes != 1:
        raise ConfigError(
            f"trainer.num_nodes={cfg.trainer.num_nodes}: this command runs one node; here set trainer.num_nodes=1,"
            " rollout.engines and trainer.devices to what the machine has"
        )
    python = Path(cfg.rollout.python)
    if not os.access(python, os.X_OK):
        raise UnfitMachine(f"rollout.python={python} is no Python that runs here; `make setup` makes .venv/rollout")
    sources = [pair for part in load_sources(cfg.data) for pair in part]
    tasks = sorted({record["task"] for _, records in sources for record in records})
    known = discover()
    plugins = {task: known.plugin_of_task(task) for task in tasks}
    settings = _plain(cfg.rewards.plugins)
    _check_truths(sources, {task: make_plugin(plugin, settings.get(plugin.name)) for task, plugin in plugins.items()})
    if any(plugin.needs_sandbox for plugin in plugins.values()):
        check_sandbox(cfg.rewards.unsafe_no_sandbox)
    clean(run_dir / "checkpoints")
    if own := complete(run_dir / "checkpoints"):
        check_continuable(own[-1])
    start = None if own else origin(cast(Config, cfg), run_dir)
    folder = make_initial_model(cfg, run_dir, start)
    check_shape(cfg.model, json.loads((folder / "config.json").read_text()), str(folder))
    renderer = PromptRenderer(folder, cfg.trainer.grpo.context_tokens, cfg.trainer.grpo.max_response_tokens)
    for _, records in sources:
        for record in records:
            renderer.prompt_ids(record)
    for name in ("logs", "endpoints", "checkpoints"):
        (run_dir / name).mkdir(exist_ok=True)
    (run_dir / "endpoints").chmod(0o700)
    (run_dir / "config.yaml").write_text(config_text)
    return tasks


def _check_truths(
    sources: "Sequence[tuple[DataSource, list[dict[str, Any]]]]", plugins: "dict[str, RewardPlugin]"
) -> None:
    """Asks each record's plugin whether it can judge by its truth.  Raises DataError: source, record, what is wrong."""
    for source, records in sources:
        for record in records:
            try:
                plugins[record["task"]].validate_truth(record["truth"])
            except ValueError as error:
                raise DataError(f"source {source.name!r}, record {record['id']!r}: {error}") from error


class Node:
    """The supervisor of this node's processes."""

    def __init__(self, cfg: DictConfig, run_dir: Path, tasks: Sequence[str], events: Events) -> None:
        self.cfg, self.dir, self.tasks, self.events = cfg, run_dir, tasks, events
        self.endpoints, self.logs = run_dir / "endpoints", run_dir / "logs"
        self.merged = MergedLog(self.logs / "all.log")
        self.progress = Progress(cfg, run_dir)
        self._signals: list[int] = []

    def run(self, only: str | None = None) -> int:
        """Starts everything, waits for the trainer's end, stops everything; the exit code is the trainer's.

        `only="warmup"`: the trainer's supervised steps, which need no engine and no reward server.
        """
        from nemo_prorl.rollout.publication import WeightStore, weights_folder

        store = WeightStore(weights_folder(self.dir))
        if stale := store.remove_stale():
            _log.info("removed %d stale weight files of an earlier process from %s", len(stale), store.folder)
        for old in self.endpoints.iterdir():
            old.unlink()
        token = self.endpoints / "token"
        with open(os.open(token, os.O_WRONLY | os.O_CREAT, 0o600), "w") as file:
            file.write(secrets.token_urlsafe(32))
        services = [self._rewards(), *(self._engine(i, store.folder) for i in range(self.cfg.rollout.engines))]
        services = [] if only else services
        ranks = self._ranks([only] if only else [])
        with self._forwarding_signals(ranks):
            try:
                for child in [*services, *ranks]:
                    child.start()
                return self._watch(services, ranks)
            finally:
                stop_all(ranks, self.cfg.trainer.deadlines.stop_s)
                stop_all(services, 2.0, quiet=True)  # they hold nothing worth a wait
                self.progress.close()
                store.remove()

    def _watch(self, services: Sequence[Child], ranks: Sequence[Child]) -> int:
        while True:
            codes = [rank.process.poll() for rank in ranks if rank.process is not None]
            if any(code is not None for code in codes):
                return self._ended(ranks)
            for child in services:
                child.keep_up()
            self.progress.update()
            self.events.update()
            time.sleep(0.1)

    def _ended(self, ranks: Sequence[Child]) -> int:
        """A rank ended: so does the run.  Gives the others a moment to end by themselves."""
        end = time.monotonic() + 10.0
        while time.monotonic() < end and any(r.process is not None and r.process.poll() is None for r in ranks):
            time.sleep(0.1)
        time.sleep(0.2)  # the last lines of its log
        self.progress.update()
        codes = [r.process.poll() for r in ranks if r.process is not None]
        bad = next(((r, c) for r, c in zip(ranks, codes, strict=True) if c not in (0, 75, None)), None)
        if bad is None:
            return max((c for c in codes if c is not None), default=1)
        rank, code = bad
        what = f"{rank.name} ended with status {code}; its log is {rank.log_file}"
        self.events.failure(what, process=rank.name, status=code, log=list(rank.tail)[-15:])
        _log.error("%s, and ends:", what)
        for line in list(rank.tail)[-15:]:
            _log.error("  %s", line)
        return code if code in (2, 3, 4) else 1

    @contextmanager
    def _forwarding_signals(self, ranks: Sequence[Child]) -> Iterator[None]:
        """SIGTERM, SIGINT and SIGUSR1 ask the trainer to stop after its step; the second one ends the run at once."""

        def forward(number: int, _: Any) -> None:
            if number in self._signals:
                raise KeyboardInterrupt
            self._signals.append(number)
            _log.warning("%s: the run stops after this step", signal.Signals(number).name)
            for rank in ranks:
                rank.signal(signal.SIGTERM)

        wanted = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)
        before = {number: signal.signal(number, forward) for number in wanted}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    def _child(self, name: str, command: list[str], env: dict[str, str], restarts: int, endpoint: bool) -> Child:
        return Child(
            name,
            command,
            {**os.environ, "PYTHONUNBUFFERED": "1", **env},
            self.logs / f"{name}.log",
            self.merged,
            restarts=restarts,
            endpoint=self.endpoints / f"{name}.json" if endpoint else None,
        )

    def _rewards(self) -> Child:
        cfg = self.cfg
        command = [sys.executable, "-m", "nemo_prorl.rewards.server", "--workers", str(cfg.rewards.workers)]
        command += ["--tasks", ",".join(self.tasks), "--token-file", str(self.endpoints / "token")]
        command += ["--endpoint-file", str(self.endpoints / "rewards-0.json"), "--parent-pid", str(os.getpid())]
        command += ["--settings", json.dumps(_plain(cfg.rewards.plugins))]
        command += ["--unsafe-no-sandbox"] if cfg.rewards.unsafe_no_sandbox else []
        return self._child("rewards-0", command, {"OMP_NUM_THREADS": "1"}, cfg.rollout.max_restarts, True)

    def _engine(self, index: int, weights: Path) -> Child:
        from nemo_prorl.recipe.base_model import initial_model

        cfg, rollout = self.cfg, self.cfg.rollout
        options = {
            "model": initial_model(cast(Config, cfg), self.dir),
            "token-file": self.endpoints / "token",
            "weights-dir": weights,
            "endpoint-file": self.endpoints / f"engine-{index}.json",
            "index": index,
            "parent-pid": os.getpid(),
            "dtype": rollout.dtype,
            "tp": rollout.tensor_parallel_size,
            "threads": rollout.threads,
            "max-model-len": cfg.trainer.grpo.context_tokens,
            "max-num-seqs": rollout.max_num_seqs,
            "max-batched-tokens": rollout.max_batched_tokens,
            "kv-mb": rollout.kv_cache_mb or self._kv_mb(),
        }
        command = [str(Path(rollout.python).absolute()), str(PACKAGE / "rollout" / "server.py")]
        command += [word for key, value in options.items() if value is not None for word in (f"--{key}", str(value))]
        command += ["--eager"] if rollout.eager else []
        return self._child(f"engine-{index}", command, {}, rollout.max_restarts, True)

    def _kv_mb(self) -> int | None:
        """What a trainer rank on the same GPU leaves for the engine's cache; None on a CPU: vLLM's own share."""
        from nemo_prorl.recipe.memory import device_bytes, memory_of

        room = memory_of(self.cfg).kv_room(device_bytes(self.cfg))
        return None if room is None else room >> 20

    def _ranks(self, arguments: list[str]) -> list[Child]:
        devices = self.cfg.trainer.devices
        threads = os.environ.get("OMP_NUM_THREADS") or str(max(1, (os.cpu_count() or 1) // devices))
        env = {
            "WORLD_SIZE": str(devices),
            "LOCAL_WORLD_SIZE": str(devices),
            "GROUP_RANK": "0",
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(_free_port()),
            "TORCHELASTIC_RUN_ID": "prorl",
            "PRORL_SUPERVISOR_PID": str(os.getpid()),
            JOB_START: _job_start(),
            "OMP_NUM_THREADS": threads,
            "TOKENIZERS_PARALLELISM": "false",
            "HF_HUB_OFFLINE": "1",
        }
        command = [sys.executable, "-m", "nemo_prorl.run", str(self.dir), *arguments]
        ranks = [
            self._child(f"trainer-{k}", command, {**env, "RANK": str(k), "LOCAL_RANK": str(k)}, 0, False)
            for k in range(devices)
        ]
        ranks[0].on_line = self.progress.line
        return ranks


def _plain(value: Any) -> Any:
    from omegaconf import OmegaConf

    return OmegaConf.to_container(value, resolve=True) if OmegaConf.is_config(value) else value


_STARTED = time.time()


def _job_start() -> str:
    """When the job began that is paid for: Slurm's, or this command (which may run several stages)."""
    return os.environ.get(JOB_START) or os.environ.get("SLURM_JOB_START_TIME") or str(_STARTED)


def _free_port() -> int:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        port: int = s.getsockname()[1]
        return port


__all__ = ["Node", "prepare", "run", "warmup"]
