"""The start of a run on one node: lock the run directory, check configuration and data, start the supervisor.

Node 0 of a run on several nodes uses the same parts (`node`, started by `slurm_driver`).  Every fault of the
configuration or the data is reported before any engine or rank starts.
"""

import errno
import fcntl
import logging
import os
import re
import secrets
import shlex
import socket
import sys
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

from omegaconf import DictConfig

from nemo_prorl.errors import ConfigError, ProrlError, UnfitMachine
from nemo_prorl.launcher import run_results
from nemo_prorl.launcher.doctor.storage import checkpoint_room
from nemo_prorl.launcher.events import Events
from nemo_prorl.launcher.peers import NodeAddress, Peers
from nemo_prorl.launcher.prepare import prepare
from nemo_prorl.launcher.processes import MergedLog, free_port
from nemo_prorl.launcher.supervisor import NodeSupervisor
from nemo_prorl.sizing.memory import GB, memory_of

_log = logging.getLogger(__name__)


class StillInUse(ProrlError, RuntimeError):
    """Processes of an earlier start of the job still use the run directory; a later try may succeed."""


def run(cfg: DictConfig, config_text: str) -> int:
    """Start or continue the run in `cfg.run_dir` until its end; return the exit code of the `prorl` command."""
    run_dir = one_node(cfg)
    room = checkpoint_room(memory_of(cfg), cfg.trainer.grpo.checkpoint_budget_gb) / GB
    text = "checking data and machine for %s; its checkpoints take up to %.1f GB"
    _log.info(text, cfg.run_dir, room)  # before the check, which takes seconds to minutes
    with locked(run_dir):
        if is_finished(run_dir, cfg.trainer.grpo.max_steps):
            return 0
        with Events(cfg.on_event, run_dir) as events:
            code = _supervise(cfg, run_dir, config_text, events)
    if code == 0:
        run_results.print_results(run_dir)
    return code


def warmup(cfg: DictConfig, config_text: str) -> int:
    """Run only the supervised steps; return the exit code of the `prorl` command.

    The steps make RUN/base, the Hugging Face folder with which `prorl train` begins.
    """
    run_dir = one_node(cfg)
    with locked(run_dir):
        if (run_dir / "base").exists():
            _log.info("%s exists already; nothing to do", run_dir / "base")
            return 0
        with Events(cfg.on_event, run_dir) as events:
            code = _supervise(cfg, run_dir, config_text, events, only="warmup")
    if code == 0:
        sys.stdout.write(f"{run_dir / 'base'}\n")
    return code


def preflight(cfg: DictConfig, config_text: str, events: Events) -> int:
    """Run one step at full context with random tokens (`nemo_prorl.preflight`); return the trainer's exit code."""
    run_dir = one_node(cfg)
    with locked(run_dir):
        return _supervise(cfg, run_dir, config_text, events, only="preflight")


def replay(cfg: DictConfig, folder: Path) -> int:
    """Train stored steps again in a folder that `launcher.replayed` made; return the trainer's exit code."""
    one_node(cfg)
    with locked(folder), Events(None, folder) as events:
        clear_endpoints(folder)
        peers = Peers(folder / "endpoints", NodeAddress(port=free_port("127.0.0.1")))
        log = MergedLog(folder / "logs" / "all.log")
        return NodeSupervisor(cfg, folder, [], log, events, peers=peers).run("replay").code


def _supervise(cfg: DictConfig, run_dir: Path, config_text: str, events: Events, only: str | None = None) -> int:
    tasks = prepare(cfg, run_dir, config_text)
    clear_endpoints(run_dir)
    peers = Peers(run_dir / "endpoints", NodeAddress(port=free_port("127.0.0.1")))
    return (
        NodeSupervisor(cfg, run_dir, tasks, MergedLog(run_dir / "logs" / "all.log"), events, peers=peers).run(only).code
    )


def one_node(cfg: DictConfig) -> Path:
    """Return the run directory.  Raises ConfigError for a run on several nodes."""
    if cfg.trainer.num_nodes != 1:
        raise ConfigError(
            f"trainer.num_nodes={cfg.trainer.num_nodes}: expected 1, because this command runs one node. Fix:"
            f" trainer.num_nodes=1 rollout.engines={cfg.rollout.engines // cfg.trainer.num_nodes}, or start all nodes"
            " with Slurm: sbatch slurm/stage.sbatch STAGE"
        )
    return Path(cfg.run_dir).absolute()


@contextmanager
def locked(run_dir: Path, wait_s: float = 0.0) -> Iterator[None]:
    """Hold the lock of a run directory.  RUN/.lock contains the process id and the host of the holder.

    Args:
        wait_s: seconds to wait for another holder that is about to end.

    Raises:
        ConfigError: another process holds the lock, and `wait_s` is 0.
        StillInUse: another process holds the lock after `wait_s` seconds.
        UnfitMachine: the file system does not support locks.
    """
    make_folder(run_dir)
    end = time.monotonic() + wait_s
    with (run_dir / ".lock").open("a+") as file:
        while True:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except OSError as error:
                if error.errno not in (errno.EAGAIN, errno.EACCES):
                    raise UnfitMachine(
                        f"run_dir={run_dir}: expected a file system with locks; got {error.strerror}. Without locks two"
                        " jobs could write the same run. Fix: mount it with locks (Lustre: -o flock), or set run_dir to"
                        " another file system"
                    ) from error
                if time.monotonic() >= end:
                    file.seek(0)
                    holder = file.read().strip()
                    text = f"run_dir={run_dir} is in use by another process{f': {holder}' if holder else ''}"
                    fix = f". Fix: wait for its end{_stopping(holder, run_dir)}, or set run_dir to another folder"
                    waited = f", still after {wait_s:g} s" if wait_s else ""
                    raise (StillInUse if wait_s else ConfigError)(f"{text}{waited}{fix}") from error
                time.sleep(0.5)
        file.truncate(0)
        job = os.environ.get("SLURM_JOB_ID")
        file.write(f"process {os.getpid()} on {socket.gethostname()}{f', Slurm job {job}' if job else ''}\n")
        file.flush()
        yield


def _stopping(holder: str, run_dir: Path) -> str:
    """Return the command that stops the holder of a lock after its step; empty if the lock does not name it."""
    match = re.fullmatch(r"process (\d+) on (\S+?)(?:, Slurm job (\S+))?", holder)
    if match is None:
        return ""
    command = f"prorl control {shlex.quote(str(run_dir))} stop" if match[3] else f"kill {match[1]} on {match[2]}"
    return f", stop it ({command}; it saves its step)"


def make_folder(folder: Path) -> None:
    """Make a folder with its parents; raises ConfigError if it cannot be made or written."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        if not os.access(folder, os.W_OK | os.X_OK):
            raise PermissionError(errno.EACCES, "no permission to write")
    except OSError as error:
        raise ConfigError(
            f"{folder}: expected a folder that exists or can be made; got: {error.strerror}. Fix: another"
            " folder (run_dir=FOLDER)"
        ) from error


def is_finished(run_dir: Path, max_steps: int) -> bool:
    """Return whether the run has reached `max_steps`; if so, print its results."""
    if (step := run_results.finished_step(run_dir, max_steps)) is None:
        return False
    text = "%s is finished after step %d. For more steps set trainer.grpo.max_steps=N; for another run run_dir=FOLDER"
    _log.info(text, run_dir, step)
    run_results.print_results(run_dir)
    return True


def clear_endpoints(run_dir: Path, keep: Iterable[Path] = ()) -> None:
    """Remove the files in RUN/endpoints of earlier processes, and write a new token for the services.

    Args:
        keep: files of this start of the run, which other nodes may already have written.
    """
    kept = {file.name for file in keep}
    endpoints = run_dir / "endpoints"
    for old in endpoints.iterdir():
        if old.with_suffix(".json").name not in kept:
            old.unlink(missing_ok=True)
    token = endpoints / "token"
    with open(os.open(token, os.O_WRONLY | os.O_CREAT, 0o600), "w") as file:
        file.write(secrets.token_urlsafe(32))
