"""Queries about the Slurm job of this process, and requests to Slurm such as requeue.

SIGTERM to the job reaches every process of the job.  Slurm commands that this module starts ignore SIGTERM, because
the output of a killed command would look valid.  Standard library only, Python 3.9 at least (see `slurm_driver.py`).
"""

from __future__ import annotations

import os
import re
import shlex
import signal
import socket
import subprocess
import sys
import time
from dataclasses import dataclass

_QUERY_S = 60.0  # seconds for a Slurm command to answer
_PROBE_S = 60.0  # seconds for a node to start a program
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
        nodelist = env.get("SLURM_JOB_NODELIST", "")
        self.nodes = output(["scontrol", "show", "hostnames", nodelist]).split() if nodelist else []
        self.partition = env.get("SLURM_JOB_PARTITION", "")
        self.container = f"prorl_{self.id}_{self.restart}"  # for pyxis on each node; unique for this start

    def fields(self) -> dict[str, str]:
        """Return the fields of `scontrol show job`; empty if Slurm does not answer."""
        text = output(["scontrol", "-o", "show", "job", self.id])
        found: dict[str, str] = {}
        for word in text.split():
            key, equals, value = word.partition("=")
            if equals:
                found.setdefault(key, value)
        return found

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

    def end(self) -> float | None:
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
        excluded = {host, *self._hosts(fields.get("ExcNodeList", "(null)"))}
        healthy, kinds = set(), {}
        for line in output(["sinfo", "-h", "-N", "-p", self.partition, "-o", "%N|%T|%G|%f"]).splitlines():
            name, state, gpus, features = (*line.strip().split("|"), "", "", "")[:4]
            kinds[name] = (gpus.split("(")[0], features)
            if name and not state.startswith(_BROKEN) and not state.endswith("*"):
                healthy.add(name)
        alike = {name for name in healthy - excluded if kinds[name] == kinds.get(host, kinds[name])}
        return len(alike) >= len(self.nodes)

    @staticmethod
    def _hosts(nodelist: str) -> list[str]:
        return [] if nodelist in ("", "(null)") else output(["scontrol", "show", "hostnames", nodelist]).split()

    def requeue(self, without: str = "") -> bool:
        """Requeue the job; return whether Slurm accepted.

        Args:
            without: node to exclude; Slurm accepts an exclusion only after the requeue, while the job waits.
        """
        excluded_before = self.fields().get("ExcNodeList", "(null)") if without else ""
        if not _call(["scontrol", "requeue", self.id]):
            return False
        if without:
            excluded = without if excluded_before in ("", "(null)") else f"{excluded_before},{without}"
            _call(["scontrol", "update", f"JobId={self.id}", f"ExcNodeList={excluded}"])
        return True

    def remove_container(self) -> bool:
        """Remove this start's container from all nodes; return whether this succeeded on all nodes.

        pyxis itself removes the container only if it is configured with `container_scope=job`.
        """
        nodes = str(len(self.nodes))
        srun = ["srun", f"--nodes={nodes}", f"--ntasks={nodes}", "--ntasks-per-node=1", "--overlap", "--mpi=none"]
        return _call([*srun, "enroot", "remove", "--force", f"pyxis_{self.container}"])

    def starts(self, host: str) -> bool:
        """Return whether a node of the job can start a program."""
        probe = ["srun", "--nodes=1", "--ntasks=1", f"--nodelist={host}", "--overlap", "--mpi=none", "true"]
        try:
            done = subprocess.run(probe, check=False, stdin=subprocess.DEVNULL, timeout=_PROBE_S)
        except (OSError, subprocess.TimeoutExpired):
            return False
        return done.returncode == 0


def _ignore_sigterm() -> None:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)


def output(command: list[str]) -> str:
    """Return the standard output of a command; empty if it fails."""
    done = _run(command, subprocess.DEVNULL)
    return done.stdout if isinstance(done, subprocess.CompletedProcess) and done.returncode == 0 else ""


def _call(command: list[str]) -> bool:
    """Run a command and return whether it succeeded; write its message to the job's output if it failed."""
    done = _run(command, subprocess.STDOUT)
    if isinstance(done, Exception) or done.returncode:
        cause = done if isinstance(done, Exception) else f"exit code {done.returncode}: {done.stdout.strip()}"
        say(f"{shlex.join(command)} failed: {cause}")
        return False
    return True


def _run(command: list[str], errors: int) -> subprocess.CompletedProcess[str] | Exception:
    try:
        return subprocess.run(
            command,
            check=False,
            stdout=subprocess.PIPE,
            stderr=errors,
            timeout=_QUERY_S,
            text=True,
            preexec_fn=_ignore_sigterm,
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        return error
