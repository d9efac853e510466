"""A run on one node, and what node 0 does of a run on several: lock the run directory, check, start the supervisor.

Every fault of the configuration or the data is reported before any engine or rank starts.
"""

import errno
import fcntl
import json
import logging
import os
import secrets
import socket
import sys
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

from omegaconf import DictConfig

from nemo_prorl.errors import ConfigError, ProrlError, UnfitMachine
from nemo_prorl.launcher.events import Events
from nemo_prorl.launcher.peers import Place
from nemo_prorl.launcher.prepare import prepare
from nemo_prorl.launcher.processes import MergedLog, free_port
from nemo_prorl.launcher.supervisor import Node

_log = logging.getLogger(__name__)


class StillInUse(ProrlError, RuntimeError):
    """Processes of an earlier start of a job still work on the run directory; they may end yet."""


def run(cfg: DictConfig, config_text: str) -> int:
    """Run or continue the run of `cfg.run_dir` to its end; return the exit code of the `prorl` command."""
    run_dir = one_node(cfg)
    with locked(run_dir):
        if is_finished(run_dir, cfg.trainer.grpo.max_steps):
            return 0
        with Events(cfg.on_event, run_dir) as events:
            code = _node(cfg, run_dir, prepare(cfg, run_dir, config_text), events).run().code
    if code == 0:
        print_results(run_dir)
    return code


def warmup(cfg: DictConfig, config_text: str) -> int:
    """Take only the supervised steps of a run: make RUN/base, a Hugging Face folder that `prorl train` begins with."""
    run_dir = one_node(cfg)
    with locked(run_dir):
        if (run_dir / "base").exists():
            _log.info("%s is there already", run_dir / "base")
            return 0
        with Events(cfg.on_event, run_dir) as events:
            code = _node(cfg, run_dir, prepare(cfg, run_dir, config_text), events).run(only="warmup").code
    if code == 0:
        sys.stdout.write(f"{run_dir / 'base'}\n")
    return code


def preflight(cfg: DictConfig, config_text: str, events: Events) -> int:
    """Take one step at full context with random tokens (`nemo_prorl.preflight`); return the trainer's exit code."""
    run_dir = one_node(cfg)
    with locked(run_dir):
        return _node(cfg, run_dir, prepare(cfg, run_dir, config_text), events).run(only="preflight").code


def _node(cfg: DictConfig, run_dir: Path, tasks: list[str], events: Events) -> Node:
    clear_endpoints(run_dir)
    return Node(
        cfg, run_dir, tasks, MergedLog(run_dir / "logs" / "all.log"), events, Place(port=free_port("127.0.0.1"))
    )


def one_node(cfg: DictConfig) -> Path:
    """Return the run directory.  Raises ConfigError for a run on several nodes."""
    if cfg.trainer.num_nodes != 1:
        raise ConfigError(
            f"trainer.num_nodes={cfg.trainer.num_nodes}: this command runs one node; here set trainer.num_nodes=1,"
            " rollout.engines and trainer.devices to what the machine has, or let Slurm start all nodes:"
            " sbatch slurm/stage.sbatch STAGE"
        )
    return Path(cfg.run_dir).absolute()


@contextmanager
def locked(run_dir: Path, wait_s: float = 0.0) -> Iterator[None]:
    """Hold the lock of a run directory, which ends with the process and names its holder.

    Args:
        wait_s: how long to wait for a holder that is about to end.

    Raises:
        ConfigError: another process holds the lock (StillInUse after a wait).
        UnfitMachine: the file system keeps no locks.
    """
    run_dir.mkdir(parents=True, exist_ok=True)
    end = time.monotonic() + wait_s
    with (run_dir / ".lock").open("a+") as file:
        while True:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except OSError as error:
                if error.errno not in (errno.EAGAIN, errno.EACCES):
                    raise UnfitMachine(
                        f"run_dir={run_dir}: its file system keeps no locks ({error.strerror}); without them two jobs"
                        " can write one run: mount it with them (Lustre: -o flock), or take another"
                    ) from error
                if time.monotonic() >= end:
                    file.seek(0)
                    holder = file.read().strip()
                    text = f"run_dir={run_dir} is in use by another process{f': {holder}' if holder else ''}"
                    raise (StillInUse(f"{text}, still after {wait_s:g} s") if wait_s else ConfigError(text)) from error
                time.sleep(0.5)
        file.truncate(0)
        job = os.environ.get("SLURM_JOB_ID")
        file.write(f"process {os.getpid()} on {socket.gethostname()}{f', Slurm job {job}' if job else ''}\n")
        file.flush()
        yield


def is_finished(run_dir: Path, max_steps: int) -> bool:
    """Return whether nothing is left to do; if so, print the outcome."""
    try:
        summary = json.loads((run_dir / "summary.json").read_text())
    except (OSError, ValueError):
        return False
    if not summary["finished"] or summary["step"] < max_steps:
        return False
    _log.info("%s is finished; more steps: trainer.grpo.max_steps=N, another run: run_dir=...", run_dir)
    print_results(run_dir)
    return True


def print_results(run_dir: Path) -> None:
    from nemo_prorl.launcher import run_results

    run_results.print_results(run_dir)


def clear_endpoints(run_dir: Path, keep: Iterable[Path] = ()) -> None:
    """Remove the addresses of an earlier process's services, and write a new token for those of this one.

    Args:
        keep: files of this start of the run, which other nodes may have written already.
    """
    kept = {file.name for file in keep}
    endpoints = run_dir / "endpoints"
    for old in endpoints.iterdir():
        if old.with_suffix(".json").name not in kept:
            old.unlink(missing_ok=True)
    token = endpoints / "token"
    with open(os.open(token, os.O_WRONLY | os.O_CREAT, 0o600), "w") as file:
        file.write(secrets.token_urlsafe(32))


__all__ = [
    "clear_endpoints",
    "is_finished",
    "locked",
    "one_node",
    "preflight",
    "prepare",
    "print_results",
    "run",
    "warmup",
]
