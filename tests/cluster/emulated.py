"""A Slurm cluster on this machine (slurm/dev-cluster.sh), for tests and benchmarks."""

import fcntl
import os
import random
import re
import shutil
import signal
import socket
import subprocess
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import psutil

ROOT = Path(__file__).resolve().parent.parent.parent
SCRIPT = ROOT / "slurm" / "dev-cluster.sh"
PROGRAMS = ("munged", "slurmctld", "slurmd", "sbatch", "scontrol")
FINAL = ("COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL", "OUT_OF_MEMORY", "BOOT_FAIL", "DEADLINE")


class NoSlurm(RuntimeError):
    """No Slurm cluster can be had on this machine; says why and what would help."""


@dataclass(frozen=True)
class Ended:
    """How a job ended: Slurm's state, exit code of the batch script, how often it was started again."""

    state: str
    code: int
    restarts: int


def provide() -> None:
    """Installs Slurm's daemons where they are missing and can be had; raises NoSlurm where not."""
    with (Path(tempfile.gettempdir()) / f"prorl-slurm-{os.getuid()}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # a run in the background may want them, too
        _provide()


def _provide() -> None:
    path = f"{os.environ.get('PATH', '')}:/usr/sbin:/sbin"
    missing = [program for program in PROGRAMS if shutil.which(program, path=path) is None]
    if os.geteuid() != 0:
        raise NoSlurm("the emulated Slurm cluster writes names to /etc/hosts: run the tests as root")
    if not missing:
        return
    if shutil.which("apt-get") is None:
        raise NoSlurm(f"{', '.join(missing)} not found: install slurmctld, slurmd, Slurm's commands and munge")
    told = subprocess.run([SCRIPT, "install"], capture_output=True, text=True, timeout=240, check=False)
    if told.returncode != 0:
        raise NoSlurm(f"'slurm/dev-cluster.sh install' ended with {told.returncode}: {told.stderr.strip()[-300:]}")


class Slurm:
    """A cluster that is up; nodes are node0, node1, ...  Made by `cluster`."""

    def __init__(self, folder: Path, environment: Mapping[str, str]) -> None:
        self.folder = folder
        self.conf = folder / "etc" / "slurm.conf"
        self.nodes = [f"node{k}" for k in range(int(environment["SLURM_DEV_NODES"]))]
        self.environment = {**environment, "SLURM_CONF": str(self.conf)}

    def run(self, *command: str, env: Mapping[str, str] | None = None) -> str:
        """Standard output of a command with the cluster's environment; raises RuntimeError with what it said."""
        environment = {**self.environment, **(env or {})}
        told = subprocess.run(
            command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=120, check=False
        )
        if told.returncode != 0:
            raise RuntimeError(f"{' '.join(command)} ended with {told.returncode}: {told.stderr.strip()}")
        return told.stdout

    def sbatch(self, *args: str, env: Mapping[str, str] | None = None) -> int:
        """Submits, from the project's folder; the job's number."""
        return int(self.run("sbatch", "--parsable", *args, env=env).split(";")[0])

    def scancel(self, job: int, *args: str) -> None:
        self.run("scancel", *args, str(job))

    def job(self, job: int) -> dict[str, str]:
        """What `scontrol show job` says, by key; {} when Slurm does not know the job."""
        try:
            told = self.run("scontrol", "-o", "show", "job", str(job))
        except RuntimeError as error:
            if "Invalid job id" in str(error):
                return {}
            raise
        found: dict[str, str] = {}
        for key, value in re.findall(r"(?:^|\s)([A-Z][\w/:]*)=(\S*)", told):
            found.setdefault(key, value)
        return found

    def state(self, job: int) -> str:
        return self.job(job).get("JobState", "UNKNOWN")

    def restarts(self, job: int) -> int:
        return int(self.job(job)["Restarts"])

    def output(self, job: int) -> str:
        """What the job printed so far."""
        path = Path(self.job(job)["StdOut"])
        return path.read_text(errors="replace") if path.is_file() else ""

    def wait_for(self, job: int, *states: str, seconds: float) -> dict[str, str]:
        """Waits until the job is in one of these states; raises TimeoutError with what it printed."""
        end = time.monotonic() + seconds
        while (found := self.job(job)).get("JobState") not in states:
            if time.monotonic() > end:
                what = f"job {job} is not {' or '.join(states)} after {seconds:g} s but {found.get('JobState')}"
                raise TimeoutError(f"{what} ({found.get('Reason')}); it printed:\n{self.output(job)[-3000:]}")
            time.sleep(0.5)
        return found

    def wait(self, job: int, seconds: float) -> Ended:
        """Waits for the job's end (a requeued job has not ended); raises TimeoutError with what it printed."""
        found = self.wait_for(job, *FINAL, seconds=seconds)
        return Ended(found["JobState"], int(found["ExitCode"].split(":")[0]), int(found["Restarts"]))

    def node_crash(self, node: str, now: bool = False) -> None:
        """Power loss: peers hear nothing.  Slurm notices after about 25 s, or `now`."""
        self._dev("node-crash", node, *["now"] * now)

    def node_kill(self, node: str, now: bool = False) -> None:
        """All of the node's processes die; peers see closed connections."""
        self._dev("node-kill", node, *["now"] * now)

    def slurmd_kill(self, node: str) -> None:
        """The node is lost to Slurm after about 25 s, but its jobs run on."""
        self._dev("slurmd-kill", node)

    def node_start(self, node: str) -> None:
        """Brings a node back; what still ran there is killed."""
        self._dev("node-start", node)

    def processes(self) -> list[psutil.Process]:
        """Processes of jobs on this cluster and their descendants that are alive, whoever is their parent now.

        A process that neither has the job's environment nor is a descendant of one that has is not found.
        """
        found: dict[int, psutil.Process] = {}
        for process in psutil.process_iter():
            try:
                environment = process.environ()
                if environment.get("SLURM_CONF") != str(self.conf) or "SLURM_JOB_ID" not in environment:
                    continue
                found |= {p.pid: p for p in (process, *process.children(recursive=True))}
            except psutil.Error:  # gone meanwhile, or another user's
                continue
        return [p for p in found.values() if _is_alive(p)]

    def no_orphans(self, seconds: float = 15.0) -> None:
        """Waits until no process of a job is left; raises AssertionError that names those that are."""
        end = time.monotonic() + seconds
        while alive := self.processes():
            if time.monotonic() > end:
                raise AssertionError(f"{seconds:g} s later still there: {[_named(p) for p in alive]}")
            time.sleep(0.2)

    def clean_up(self) -> None:
        """Ends all jobs and their processes and brings all nodes back, for the next test."""
        for state in ("PENDING", "RUNNING", "SUSPENDED"):
            self.run("scancel", f"--state={state}")
        for node in self.nodes:
            self.node_start(node)
        end = time.monotonic() + 30
        while self.run("squeue", "-h").strip() and time.monotonic() < end:
            time.sleep(0.2)
        for process in self.processes():
            try:
                process.send_signal(signal.SIGKILL)
            except psutil.NoSuchProcess:
                pass

    def _dev(self, *args: str) -> None:
        self.run(str(SCRIPT), *args)


def _is_alive(process: psutil.Process) -> bool:
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE and process.name() != "slurmstepd"
    except psutil.Error:
        return False


def _named(process: psutil.Process) -> str:
    try:
        return f"{process.pid} {' '.join(process.cmdline())[:150]}"
    except psutil.Error:
        return str(process.pid)


def free_ports(number: int) -> int:
    """The first of so many ports that are free in a row, below the range that connections take theirs from."""
    for _ in range(100):
        first = random.SystemRandom().randrange(20000, 32000 - number)
        held: list[socket.socket] = []
        try:
            for port in range(first, first + number):
                held.append(socket.socket())
                held[-1].setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                held[-1].bind(("", port))
            return first
        except OSError:
            continue
        finally:
            for one in held:
                one.close()
    raise NoSlurm(f"no {number} free ports in a row between 20000 and 32000")


@contextmanager
def cluster(nodes: int = 5, extra: str = "") -> Iterator[Slurm]:
    """A cluster of its own; `extra` is appended to slurm.conf.  Raises NoSlurm where none can be had.

    It is taken down at the end, also when this process is killed: a guard waits for the end of a pipe that it holds.
    """
    provide()
    folder = Path(tempfile.mkdtemp(prefix="prorl-slurm-"))
    folder.chmod(0o755)
    (folder / "extra.conf").write_text(extra)
    environment = {
        **{k: v for k, v in os.environ.items() if not k.startswith(("SLURM_", "SBATCH_", "SRUN_"))},
        "SLURM_DEV_DIR": str(folder),
        "SLURM_DEV_PORT": str(free_ports(nodes + 1)),
        "SLURM_DEV_NODES": str(nodes),
        "SLURM_DEV_GPUS": "1",
        "SLURM_DEV_EXTRA": str(folder / "extra.conf"),
    }
    code = 'read -r _ || true; "$0" down; rm -rf "$SLURM_DEV_DIR"'
    guard = subprocess.Popen(
        ["bash", "-c", code, str(SCRIPT)], env=environment, stdin=subprocess.PIPE, start_new_session=True
    )
    try:
        told = subprocess.run([SCRIPT, "up"], env=environment, capture_output=True, text=True, timeout=150, check=False)
        if told.returncode != 0:
            raise NoSlurm(f"'slurm/dev-cluster.sh up' ended with {told.returncode}: {told.stderr.strip()[-2000:]}")
        yield Slurm(folder, environment)
    finally:
        assert guard.stdin is not None
        guard.stdin.close()
        guard.wait(120)
