"""The Slurm job that this process belongs to: what Slurm knows of it, and requests to Slurm.

A SIGTERM to the job reaches every process of it.  Commands that ask Slurm ignore it, so that a missing answer is not
taken for an answer.  Standard library only, Python 3.9 at least (see `slurm_driver.py`).
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

_ASK_S = 60.0
_PROBE_S = 60.0  # for a node to start a program
_PASSING = ("", "SIGNALING", "CONFIGURING", "RESIZING")  # ask again: no answer, or a state on the way to another
_LOOKS = 10
_BROKEN = ("down", "drain", "fail", "maint", "unk", "power", "reboot", "inval")


def say(text: str) -> None:
    """Write a line to the job's output; also from a signal handler."""
    os.write(sys.stderr.fileno(), f"{time.strftime('%Y-%m-%d %H:%M:%S')} {text}\n".encode())


@dataclass(frozen=True)
class State:
    """The job as Slurm sees it now.  `ours`: this start of it is the current one, not a start on other nodes."""

    ours: bool
    running: bool
    preempted: bool


class Job:
    """The Slurm job of this process; without an id outside of a job."""

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
        for look in range(_LOOKS):
            if look:
                time.sleep(0.5)
            fields = self.fields()
            if fields.get("JobState", "") in _PASSING:
                continue
            ours = fields.get("Restarts", str(self.restart)) == str(self.restart)
            ours = ours and fields.get("BatchHost", self.host) in (self.host, "(null)")
            preempted, started = (fields.get(name, "") for name in ("PreemptTime", "StartTime"))
            # Compared as text: dates, or words such as None and Unknown.  An earlier start's preemption does not count.
            now = preempted[:1].isdigit() and (preempted >= started or not started[:1].isdigit())
            return State(ours, fields["JobState"] == "RUNNING", now)
        return None

    def end(self) -> float | None:
        """Return when the job's time is over, in seconds since 1970; None if that is not known."""
        if (told := os.environ.get("SLURM_JOB_END_TIME", "")).isdigit():
            return float(told)
        try:
            return time.mktime(time.strptime(self.fields().get("EndTime", ""), "%Y-%m-%dT%H:%M:%S"))
        except (ValueError, OverflowError):
            return None

    def cpus(self) -> int | None:
        """Return the number of processors that every node of the job has; Slurm writes 64(x3),32."""
        told = re.findall(r"(\d+)(?:\(x\d+\))?(?:,|$)", os.environ.get("SLURM_JOB_CPUS_PER_NODE", ""))
        return min(map(int, told), default=None)

    def spare(self, host: str) -> bool:
        """Return whether the partition has enough healthy nodes, idle or busy, without `host` and those left out.

        Only nodes with the same GPUs and features as `host` count.  False if the job was submitted with --nodelist.
        """
        fields = self.fields()
        if fields.get("ReqNodeList", "(null)") != "(null)":
            return False
        out = {host, *self._hosts(fields.get("ExcNodeList", "(null)"))}
        able, kinds = set(), {}
        for line in output(["sinfo", "-h", "-N", "-p", self.partition, "-o", "%N|%T|%G|%f"]).splitlines():
            name, state, gpus, features = (*line.strip().split("|"), "", "", "")[:4]
            kinds[name] = (gpus.split("(")[0], features)
            if name and not state.startswith(_BROKEN) and not state.endswith("*"):
                able.add(name)
        alike = {name for name in able - out if kinds[name] == kinds.get(host, kinds[name])}
        return len(alike) >= len(self.nodes)

    @staticmethod
    def _hosts(nodelist: str) -> list[str]:
        return [] if nodelist in ("", "(null)") else output(["scontrol", "show", "hostnames", nodelist]).split()

    def requeue(self, without: str = "") -> bool:
        """Requeue the job; return whether Slurm did.  `without`: a node to exclude, which only a waiting job can."""
        before = self.fields().get("ExcNodeList", "(null)") if without else ""
        if not _call(["scontrol", "requeue", self.id]):
            return False
        if without:
            out = without if before in ("", "(null)") else f"{before},{without}"
            _call(["scontrol", "update", f"JobId={self.id}", f"ExcNodeList={out}"])
        return True

    def remove_container(self) -> bool:
        """Remove this start's container, where pyxis's `container_scope=job` does not; return whether all nodes did."""
        nodes = str(len(self.nodes))
        srun = ["srun", f"--nodes={nodes}", f"--ntasks={nodes}", "--ntasks-per-node=1", "--overlap", "--mpi=none"]
        return _call([*srun, "enroot", "remove", "--force", f"pyxis_{self.container}"])

    def starts(self, host: str) -> bool:
        """Return whether a node of the job starts a program."""
        probe = ["srun", "--nodes=1", "--ntasks=1", f"--nodelist={host}", "--overlap", "--mpi=none", "true"]
        try:
            done = subprocess.run(probe, check=False, stdin=subprocess.DEVNULL, timeout=_PROBE_S)
        except (OSError, subprocess.TimeoutExpired):
            return False
        return done.returncode == 0


def _undisturbed() -> None:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)


def output(command: list[str]) -> str:
    """Return the standard output of a command; empty if it fails."""
    done = _run(command, subprocess.DEVNULL)
    return done.stdout if isinstance(done, subprocess.CompletedProcess) and done.returncode == 0 else ""


def _call(command: list[str]) -> bool:
    """Return whether a command succeeded; otherwise write its message to the job's output."""
    done = _run(command, subprocess.STDOUT)
    if isinstance(done, Exception) or done.returncode:
        say(f"{shlex.join(command)}: {done if isinstance(done, Exception) else done.stdout.strip()}")
        return False
    return True


def _run(command: list[str], errors: int) -> subprocess.CompletedProcess[str] | Exception:
    try:
        return subprocess.run(
            command,
            check=False,
            stdout=subprocess.PIPE,
            stderr=errors,
            timeout=_ASK_S,
            text=True,
            preexec_fn=_undisturbed,
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        return error
