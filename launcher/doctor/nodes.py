"""Comparison of the nodes of a run: clocks, the shared run directory, versions, GPUs, /dev/shm.

srun runs `node_probe.py` once per node.  Meanwhile this process serves its clock on a port of this machine, and
keeps replacing a file in the shared folder.  Each probe compares its clock, and checks that it sees the new files.
"""

import fcntl
import json
import shlex
import shutil
import socketserver
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, fields, replace
from pathlib import Path

from omegaconf import DictConfig

from nemo_prorl.files import write_text
from nemo_prorl.launcher.doctor import node_probe
from nemo_prorl.launcher.doctor.check import Check, gb
from nemo_prorl.launcher.doctor.network import own_address
from nemo_prorl.launcher.doctor.storage import nearest
from nemo_prorl.launcher.processes import free_port
from nemo_prorl.sizing.memory import memory_of

SKEW_WARN_S, SKEW_FAIL_S = 1.0, 60.0  # difference of two nodes' clocks; deadlines of the job depend on the clocks
STALE_WARN_S = 1.0
BEAT_S = 0.05  # pause between two replacements of the file that the nodes watch
DEADLINE_S = 150.0  # limit for srun to start the probes and for the probes to end


@dataclass(frozen=True)
class NodeFacts:
    """Measured facts about one node; None means that the fact could not be measured."""

    node: str
    versions: dict[str, str]  # version of each package, and of Python
    gpus: list[str]  # name and driver of each GPU
    shm_free: int  # bytes free in /dev/shm
    ahead_s: float | None = None  # doctor's clock minus the node's clock
    ahead_error_s: float = 0.0
    reach_fault: str = ""  # why the node could not connect to this machine
    folder_fault: str = ""  # why the node could not write to the run directory
    lock_holds: bool | None = None  # whether the node sees a lock of another machine
    stale_s: float | None = None  # seconds until the node saw that a file was replaced


def check_nodes(cfg: DictConfig, srun: str) -> Iterator[Check]:
    """Run the probes on all nodes, and assess the nodes.

    The probes use the run directory, or its nearest existing parent.
    """
    count = cfg.trainer.num_nodes
    try:
        if shutil.which(shlex.split(srun)[0]) is None:
            raise FileNotFoundError(f"{srun} is not on the PATH")
        shared = nearest(Path(cfg.run_dir).absolute())
        with _trial_folder(shared) as (folder, faults), _clock() as (host, port):
            probe = [sys.executable, "-P", node_probe.__file__, host, str(port), str(folder)]
            output, errors = run_probes(shlex.split(srun), count, probe)
            measured = parse(output)
            hidden = [n.node for n in measured if not n.folder_fault and not (folder / f"node-{n.node}").exists()]
    except OSError as error:
        fix = "run doctor inside the Slurm job, where srun is available"
        yield Check("nodes", "fail", f"the probes could not be started: {error}", fix)
        return
    if faults:  # a node that saw no new content then does not prove a fault of its mount
        fix = "free space or raise the quota there, or choose another run_dir"
        yield Check("nodes: dir", "fail", f"{shared}: this machine could not replace a file: {faults[0]}", fix)
        measured = [replace(facts, stale_s=0.0) for facts in measured]
    yield from assess(measured, count, errors, memory_of(cfg).published, hidden)


def run_probes(srun: Sequence[str], count: int, probe: Sequence[str], seconds: float = DEADLINE_S) -> tuple[str, str]:
    """Run a probe on each of `count` nodes, in parallel to the job's other steps.

    After `seconds`, srun gets a SIGTERM, with which it ends its tasks.

    Returns:
        (standard output, last line of standard error).
    """
    tasks = [f"--nodes={count}", f"--ntasks={count}", "--ntasks-per-node=1", "--overlap"]
    limit = ["timeout", "--foreground", "--kill-after=10", str(seconds)]
    done = subprocess.run(
        [*limit, *srun, *tasks, *probe], stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False
    )
    late = [f"srun did not end within {seconds:g} s"] if done.returncode in (124, 137) else []
    return done.stdout, "; ".join([*late, *done.stderr.strip().splitlines()[-1:]])


def parse(output: str) -> list[NodeFacts]:
    """Return the facts that the probes printed, sorted by node; skip other lines, broken lines and unknown keys."""
    known, by_node = {field.name for field in fields(NodeFacts)}, {}
    for line in output.splitlines():
        _, mark, text = line.partition(node_probe.MARK)  # srun --label prefixes each line with the task
        if not mark:
            continue
        try:
            facts = NodeFacts(**{key: value for key, value in json.loads(text).items() if key in known})
        except (ValueError, TypeError, AttributeError):
            continue
        by_node[facts.node] = facts
    return [by_node[name] for name in sorted(by_node)]


def assess(
    nodes: Sequence[NodeFacts], expected: int, errors: str, published: int, hidden: Sequence[str] = ()
) -> Iterator[Check]:
    """Assess the nodes by their facts.

    Args:
        nodes: facts of the nodes that answered.
        errors: last line of srun's standard error.
        published: bytes of two versions of the weights.
        hidden: nodes that wrote a file into the run directory which this machine does not see.
    """
    names = ", ".join(facts.node for facts in nodes) or "none"
    if len(nodes) < expected:
        text = f"{len(nodes)} of {expected} nodes answered ({names})" + (f": {errors}" if errors else "")
        fix = f"run doctor in a job of {expected} nodes with this project at one path on all; drain a node that hangs"
        yield Check("nodes", "fail", text, fix)
    else:
        yield Check("nodes", "pass", names)
    if not nodes:
        return
    for facts in nodes:
        if facts.reach_fault:
            fix = "make this machine's name resolve to an address that the nodes can reach, and open their firewalls"
            yield Check("nodes: net", "fail", f"{facts.node} cannot connect to {facts.reach_fault}", fix)
    yield from _assess_clocks(nodes)
    wrong = [check for facts in nodes for check in _assess_folder(facts, facts.node in hidden)]
    text = "all nodes see the run directory, replaced files and each other's locks"
    yield from wrong or [Check("nodes: dir", "pass", text)]
    wrong = [check for facts in nodes[1:] for check in _differences(facts, nodes[0])]
    text = f"all nodes have the same versions and GPUs ({_counted(nodes[0].gpus)})"
    yield from wrong or [Check("nodes: same", "pass", text)]
    if small := [f"{n.node} {gb(n.shm_free)}" for n in nodes if n.shm_free < published]:
        text = f"two versions of the weights take {gb(published)}; free in /dev/shm: {', '.join(small)}"
        yield Check("nodes: shm", "fail", text, "free space in it there, or enlarge it (containers: --shm-size)")


def _assess_clocks(nodes: Sequence[NodeFacts]) -> Iterator[Check]:
    """Assess the largest difference of two nodes' clocks; each clock was compared with this process's clock."""
    known = sorted((-facts.ahead_s, facts.ahead_error_s, facts.node) for facts in nodes if facts.ahead_s is not None)
    if len(known) < 2:
        return
    (low, low_error, first), (high, high_error, last) = known[0], known[-1]
    certain = high - low - low_error - high_error  # the part that measuring errors cannot explain
    text = f"the clock of {last} is {high - low:.3f} s ahead of that of {first} (+- {low_error + high_error:.3f} s)"
    fix = "start chrony or NTP on both: a job's deadlines and the times in the journal depend on these clocks"
    state = "fail" if certain > SKEW_FAIL_S else "warn" if certain > SKEW_WARN_S else "pass"
    yield Check("nodes: clock", state, text, "" if state == "pass" else fix)


def _assess_folder(facts: NodeFacts, hidden: bool) -> Iterator[Check]:
    """Yield the faults of the run directory on a node."""
    name, node = "nodes: dir", facts.node
    if fault := facts.folder_fault or ("this machine does not see the file that the node wrote" if hidden else ""):
        fix = "put run_dir on a filesystem that all nodes mount at the same path, writable"
        yield Check(name, "fail", f"{node}: {fault}", fix)
        return
    if facts.lock_holds is False:
        fix = "mount it with locks between nodes (Lustre: -o flock; NFS: local_lock=none)"
        text = f"{node}: a lock of another node has no effect here, so that two jobs could work on one run"
        yield Check(name, "warn", text, fix)
    late = f"{node}: a file that another node replaced showed its old content for"
    fix = "lower the mount's attribute caching (NFS: actimeo=1)"
    if facts.stale_s is None:
        yield Check(name, "fail", f"{late} {node_probe.STALE_S:g} s or longer", f"{fix}, or use another filesystem")
    elif facts.stale_s > STALE_WARN_S:
        yield Check(name, "warn", f"{late} {facts.stale_s:.1f} s", f"{fix}: services are found late by this time")


def _differences(facts: NodeFacts, first: NodeFacts) -> Iterator[Check]:
    """Yield the differences between a node and the first node: a failure for versions, a warning for GPUs."""
    keys = sorted(first.versions.keys() | facts.versions.keys())
    if unlike := [k for k in keys if first.versions.get(k) != facts.versions.get(k)]:
        versions = ", ".join(f"{k} {facts.versions.get(k)} (there {first.versions.get(k)})" for k in unlike)
        text = f"{facts.node} has other versions than {first.node}: {versions}"
        yield Check("nodes: same", "fail", text, "start all nodes from one image or one shared environment")
    if facts.gpus != first.gpus:
        text = f"GPUs of {facts.node}: {_counted(facts.gpus)}; of {first.node}: {_counted(first.gpus)}"
        yield Check("nodes: same", "warn", text, "request nodes of one kind (--constraint), with the same driver")


def _counted(gpus: Sequence[str]) -> str:
    return ", ".join(f"{gpus.count(name)} x {name}" for name in dict.fromkeys(gpus)) or "none"


@contextmanager
def _trial_folder(run_dir: Path) -> Iterator[tuple[Path, list[OSError]]]:
    """Make a folder with a locked file and with a file that a thread replaces continuously; remove it at the end.

    Yields:
        The folder, and a list to which errors of replacing the file are added.
    """
    faults: list[OSError] = []
    folder, end = Path(tempfile.mkdtemp(prefix=".prorl-doctor-", dir=run_dir)), threading.Event()

    def beat() -> None:
        write_text(folder / "beat", str(time.monotonic()))

    def beats() -> None:
        while not end.wait(BEAT_S):
            try:
                beat()
            except OSError as error:
                faults.append(error)

    thread = threading.Thread(target=beats, daemon=True, name="doctor's beat")
    try:
        with (folder / "lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            beat()
            thread.start()
            yield folder, faults
    finally:
        end.set()
        if thread.is_alive():
            thread.join()
        shutil.rmtree(folder, ignore_errors=True)


@contextmanager
def _clock() -> Iterator[tuple[str, int]]:
    """Serve this process's clock to the probes; yield the address (host, port)."""

    class Answer(socketserver.StreamRequestHandler):
        def handle(self) -> None:
            with suppress(OSError):  # the node that closed the connection reports the error itself
                self.wfile.write(f"{time.time()}\n".encode())

    host = own_address()
    with socketserver.ThreadingTCPServer((host, free_port(host)), Answer) as server:
        thread = threading.Thread(target=server.serve_forever, daemon=True, name="doctor's clock")
        thread.start()
        try:
            yield host, server.server_address[1]
        finally:
            server.shutdown()
            thread.join()
