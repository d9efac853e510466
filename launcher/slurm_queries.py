"""Queries about the Slurm job of this process, and requests to Slurm such as requeue.

SIGTERM to the job reaches every process of the job.  Slurm commands that this module starts ignore SIGTERM, because
the output of a killed command would look valid.  Standard library only, Python 3.9 at least (see `slurm_driver.py`).
"""

from __future__ import annotations

import contextlib
import os
import re
import shlex
import signal
import socket
import subprocess
import sys
import time
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from nemo_prorl.errors import UnfitMachine

_QUERY_S = 60.0  # seconds for a Slurm command to answer, and for a node to start a program
_TRANSIENT = ("", "SIGNALING", "CONFIGURING", "RESIZING")  # no answer, or a state that changes soon: query again
_QUERIES = 10
_BROKEN = ("down", "drain", "fail", "maint", "unk", "power", "reboot", "inval")


def say(text: str) -> None:
    """Write a line with the time to the job's output.  Safe in a signal handler."""
    os.write(sys.stderr.fileno(), f"{time.strftime('%Y-%m-%d %H:%M:%S')} {text}\n".encode())


@dataclass(frozen=True)
class State:
    """The state of the job in Slurm.

    Attributes:
        ours: whether this process runs the job's newest start; False once Slurm has started the job again.
        running: whether Slurm says that the job runs.
        preempted: whether Slurm has preempted the newest start of the job.
    """

    ours: bool
    running: bool
    preempted: bool


class Job:
    """The Slurm job of this process; `id` is empty outside a job."""

    def __init__(self) -> None:
        env = os.environ
        self.id = env.get("SLURM_JOB_ID", "")
        self.restart = int(env.get("SLURM_RESTART_COUNT") or 0)
        self.host = env.get("SLURMD_NODENAME") or socket.gethostname()
        self.nodes = _hosts(env.get("SLURM_JOB_NODELIST", ""))
        self.partition = env.get("SLURM_JOB_PARTITION", "")
        self.container = f"prorl_{self.id}_{self.restart}"  # for pyxis on each node; unique for this start

    def fields(self) -> dict[str, str]:
        """Return the fields of `scontrol show job`; empty if Slurm does not answer."""
        text = output(["scontrol", "-o", "show", "job", self.id])
        words = [word.partition("=") for word in reversed(text.split())]  # of a repeated key the first value counts
        return {key: value for key, _, value in words}

    def state(self) -> State | None:
        """Return the state of the job; None if Slurm does not answer."""
        for query in range(_QUERIES):
            if query:
                time.sleep(0.5)
            fields = self.fields()
            if fields.get("JobState", "") in _TRANSIENT:
                continue
            ours = fields.get("Restarts", str(self.restart)) == str(self.restart)
            ours = ours and fields.get("BatchHost", self.host) in (self.host, "(null)")
            preempted, started = (fields.get(name, "") for name in ("PreemptTime", "StartTime"))
            # Dates or words such as None and Unknown, compared as text.  Preemption of an earlier start does not count.
            is_preempted = preempted[:1].isdigit() and (preempted >= started or not started[:1].isdigit())
            return State(ours, fields["JobState"] == "RUNNING", is_preempted)
        return None

    def ends_at(self) -> float | None:
        """Return the time when the job reaches its time limit, in seconds since 1970; None if it is not known."""
        if (end_time := os.environ.get("SLURM_JOB_END_TIME", "")).isdigit():
            return float(end_time)
        try:
            return time.mktime(time.strptime(self.fields().get("EndTime", ""), "%Y-%m-%dT%H:%M:%S"))
        except (ValueError, OverflowError):
            return None

    def cpus(self) -> int | None:
        """Return the number of processors on the job's node that has the fewest; None outside a job."""
        # Slurm writes 64(x3),32 for three nodes with 64 processors and one with 32.
        counts = re.findall(r"(\d+)(?:\(x\d+\))?(?:,|$)", os.environ.get("SLURM_JOB_CPUS_PER_NODE", ""))
        return min(map(int, counts), default=None)

    def spare(self, host: str) -> bool:
        """Return whether the partition has enough healthy nodes, idle or busy, without `host` and excluded nodes.

        Only nodes with the same GPUs and features as `host` count.  False if the job was submitted with --nodelist.
        """
        fields = self.fields()
        if fields.get("ReqNodeList", "(null)") != "(null)":
            return False
        excluded = {host, *_hosts(fields.get("ExcNodeList", "(null)"))}
        healthy, kinds = set(), {}
        for line in output(["sinfo", "-h", "-N", "-p", self.partition, "-o", "%N|%T|%G|%f"]).splitlines():
            name, state, gpus, features = (*line.strip().split("|"), "", "", "")[:4]
            kinds[name] = (gpus.split("(")[0], features)
            if name and not state.startswith(_BROKEN) and not state.endswith("*"):
                healthy.add(name)
        alike = {name for name in healthy - excluded if kinds[name] == kinds.get(host, kinds[name])}
        return len(alike) >= len(self.nodes)

    def requeue(self, without: str = "") -> bool:
        """Requeue the job; return whether Slurm accepted.

        Args:
            without: node to exclude; Slurm accepts an exclusion only after the requeue, while the job waits.
        """
        excluded_before = self.fields().get("ExcNodeList", "(null)") if without else ""
        if not _accepted(["scontrol", "requeue", self.id]):
            return False
        if without:
            excluded = without if excluded_before in ("", "(null)") else f"{excluded_before},{without}"
            _accepted(["scontrol", "update", f"JobId={self.id}", f"ExcNodeList={excluded}"])
        return True

    def remove_container(self) -> bool:
        """Remove this start's container from all nodes; return whether this succeeded on all nodes.

        pyxis itself removes the container only if it is configured with `container_scope=job`.
        """
        return _accepted(
            ["srun", *_one_each(len(self.nodes)), "enroot", "remove", "--force", f"pyxis_{self.container}"]
        )

    def starts(self, host: str) -> bool:
        """Return whether a node of the job can start a program."""
        with contextlib.suppress(UnfitMachine):
            call(["srun", *_one_each(1), f"--nodelist={host}", "true"])
            return True
        return False


def _hosts(nodelist: str) -> list[str]:
    return [] if nodelist in ("", "(null)") else output(["scontrol", "show", "hostnames", nodelist]).split()


def _one_each(nodes: int) -> list[str]:
    """Return srun's options for one task on each of so many nodes, in parallel to the job's other steps."""
    return [f"--nodes={nodes}", f"--ntasks={nodes}", "--ntasks-per-node=1", "--overlap", "--mpi=none"]


def output(command: list[str]) -> str:
    """Return the standard output of a command; empty if it fails."""
    with contextlib.suppress(UnfitMachine):
        return call(command)
    return ""


def _accepted(command: list[str]) -> bool:
    """Run a command and return whether it succeeded; write its message to the job's output if it failed."""
    try:
        call(command)
    except UnfitMachine as error:
        say(f"{shlex.join(command)} failed: {error}")
        return False
    return True


def call(command: list[str], seconds: float = _QUERY_S, folder: Path | None = None) -> str:
    """Return the standard output of a Slurm command.

    Args:
        folder: working directory of the command; None: that of this process.

    Raises:
        UnfitMachine: the program is missing, failed, or takes longer than `seconds`.
    """
    try:
        done = subprocess.run(
            command,
            cwd=folder,
            check=False,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=seconds,
            preexec_fn=partial(signal.signal, signal.SIGTERM, signal.SIG_IGN),
        )
    except FileNotFoundError as error:
        raise UnfitMachine(f"{command[0]} is not on the PATH. Fix: run this on a machine with Slurm") from error
    except OSError as error:
        raise UnfitMachine(f"{command[0]} cannot be run: {error}") from error
    except subprocess.TimeoutExpired as error:
        raise UnfitMachine(
            f"{command[0]} did not answer within {seconds:g} s. Its request may still take effect: check squeue --me"
        ) from error
    if done.returncode:
        message = " ".join((done.stderr.strip() or done.stdout.strip() or "no message").split())
        raise UnfitMachine(f"{command[0]} ended with exit code {done.returncode}: {message}")
    return done.stdout
