"""Compares the nodes of a run: clocks, the shared run directory, versions, GPUs, /dev/shm.

`node_probe.py` runs once a node through srun and prints what it finds; meanwhile this process tells the time on a port
of this machine's address, and replaces a file in the shared folder.  `judged` needs the nodes' facts alone.
"""

import fcntl
import json
import os
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

from nemo_prorl.launcher.doctor import node_probe
from nemo_prorl.launcher.doctor.check import Check, gb
from nemo_prorl.launcher.doctor.network import own_address
from nemo_prorl.launcher.doctor.storage import nearest
from nemo_prorl.launcher.processes import free_port
from nemo_prorl.sizing.memory import memory_of

SKEW_WARN_S, SKEW_FAIL_S = 1.0, 60.0  # between any two nodes; deadlines of the job are by the clock
STALE_WARN_S = 1.0
BEAT_S = 0.05  # between two replacements of the file that nodes watch
DEADLINE_S = 150.0  # for srun to start the probes and for them to end


@dataclass(frozen=True)
class NodeFacts:
    """The facts about one node; None if they could not be found out."""

    node: str
    versions: dict[str, str]
    gpus: list[str]
    shm_free: int
    ahead_s: float | None = None  # doctor's clock minus the node's
    ahead_error_s: float = 0.0
    reach_fault: str = ""  # why the node could not connect to this machine
    folder_fault: str = ""
    lock_holds: bool | None = None
    stale_s: float | None = None


def check_nodes(cfg: DictConfig, srun: str) -> Iterator[Check]:
    """Run the probes in the run directory, or where it is to be made, and judge."""
    count = cfg.trainer.num_nodes
    try:
        shared = nearest(Path(cfg.run_dir).absolute())
        with _trial_folder(shared) as (folder, faults), _clock() as (host, port):
            probe = [sys.executable, "-P", node_probe.__file__, host, str(port), str(folder)]
            output, errors = run_probes([*shlex.split(srun), *task_options(count), *probe])
            found = parse(output)
            hidden = [n.node for n in found if not n.folder_fault and not (folder / f"node-{n.node}").exists()]
    except OSError as error:
        yield Check("nodes", "fail", f"the nodes cannot be asked: {error}", "run it in the job, where srun is")
        return
    if faults:  # what a node did not see then says nothing about its mount
        cure = "free space or raise the quota there, or take another run_dir"
        yield Check("nodes: dir", "fail", f"{shared}: a file could not be replaced: {faults[0]}", cure)
        found = [replace(facts, stale_s=0.0) for facts in found]
    yield from judged(found, count, errors, memory_of(cfg).published, hidden)


def task_options(count: int) -> list[str]:
    """Return srun's options for one task per node, beside what the job already runs."""
    return [f"--nodes={count}", f"--ntasks={count}", "--ntasks-per-node=1", "--overlap"]


def run_probes(command: Sequence[str], seconds: float = DEADLINE_S) -> tuple[str, str]:
    """Return (output, last line of the errors); srun is asked to end when the time is up, which ends its tasks."""
    process = subprocess.Popen(
        command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    late = ""
    try:
        output, errors = process.communicate(timeout=seconds)
    except subprocess.TimeoutExpired:
        late = f"no end within {seconds:g} s"
        process.terminate()
        try:
            output, errors = process.communicate(timeout=10)
        except subprocess.TimeoutExpired:
            process.kill()
            output, errors = process.communicate()
    said = errors.strip().splitlines()[-1:]
    return output, "; ".join(filter(None, [late, *said]))


def parse(output: str) -> list[NodeFacts]:
    """Read what the probes printed, by node; other lines, broken lines and unknown keys are skipped."""
    known, found = {field.name for field in fields(NodeFacts)}, {}
    for line in output.splitlines():
        _, mark, text = line.partition(node_probe.MARK)  # srun --label writes the task before it
        if not mark:
            continue
        try:
            facts = NodeFacts(**{key: value for key, value in json.loads(text).items() if key in known})
        except (ValueError, TypeError, AttributeError):
            continue
        found[facts.node] = facts
    return [found[name] for name in sorted(found)]


def judged(
    nodes: Sequence[NodeFacts], expected: int, errors: str, published: int, hidden: Sequence[str] = ()
) -> Iterator[Check]:
    """`errors`: srun's last words; `hidden`: nodes whose own file in the run directory is not seen here."""
    names = ", ".join(facts.node for facts in nodes) or "none"
    if len(nodes) < expected:
        text = f"{len(nodes)} of {expected} nodes answered ({names})" + (f": {errors}" if errors else "")
        cure = "run it in a job of so many nodes; each needs this project at the same path; drain a node that hangs"
        yield Check("nodes", "fail", text, cure)
    else:
        yield Check("nodes", "pass", names)
    if not nodes:
        return
    for facts in nodes:
        if facts.reach_fault:
            cure = "let this machine's name resolve to an address that nodes reach, and open their firewalls"
            yield Check("nodes: net", "fail", f"{facts.node} cannot connect to {facts.reach_fault}", cure)
    yield from _clocks(nodes)
    wrong = [check for facts in nodes for check in _folder(facts, facts.node in hidden)]
    yield from wrong or [Check("nodes: dir", "pass", "shared, replaced files are seen, locks hold")]
    wrong = [check for facts in nodes[1:] for check in _unlike(facts, nodes[0])]
    yield from wrong or [Check("nodes: same", "pass", f"versions and GPUs ({_counted(nodes[0].gpus)})")]
    if small := [f"{n.node} {gb(n.shm_free)}" for n in nodes if n.shm_free < published]:
        text = f"/dev/shm has less than the {gb(published)} of two versions of the weights: {', '.join(small)}"
        yield Check("nodes: shm", "fail", text, "free it there, or give the containers more (--shm-size)")


def _clocks(nodes: Sequence[NodeFacts]) -> Iterator[Check]:
    """Judge the largest difference of two clocks; each was compared with this process's."""
    asked = sorted((-facts.ahead_s, facts.ahead_error_s, facts.node) for facts in nodes if facts.ahead_s is not None)
    if len(asked) < 2:
        return
    (low, low_error, first), (high, high_error, last) = asked[0], asked[-1]
    sure = high - low - low_error - high_error  # what the time of the answers cannot explain
    text = f"{last} is {high - low:.3f} s ahead of {first} (to {low_error + high_error:.3f} s)"
    cure = "start chrony or NTP on both: deadlines of a job and times in the journal are by these clocks"
    state = "fail" if sure > SKEW_FAIL_S else "warn" if sure > SKEW_WARN_S else "pass"
    yield Check("nodes: clock", state, text, "" if state == "pass" else cure)


def _folder(facts: NodeFacts, hidden: bool) -> Iterator[Check]:
    """Yield what is wrong with the run directory as a node sees it."""
    name, node = "nodes: dir", facts.node
    if fault := facts.folder_fault or ("its files are not seen here" if hidden else ""):
        cure = "put run_dir on a filesystem that all nodes mount at the same path, writable"
        yield Check(name, "fail", f"{node}: {fault}", cure)
        return
    if facts.lock_holds is False:
        cure = "mount it with locks between nodes (Lustre: -o flock; NFS: local_lock=none)"
        yield Check(name, "warn", f"{node}: a lock held elsewhere does not count: two jobs could work on a run", cure)
    late = f"{node}: a file replaced elsewhere read as before for"
    if facts.stale_s is None:
        cure = "lower the mount's attribute caching (NFS: actimeo=1), or use another"
        yield Check(name, "fail", f"{late} {node_probe.STALE_S:g} s", cure)
    elif facts.stale_s > STALE_WARN_S:
        yield Check(name, "warn", f"{late} {facts.stale_s:.1f} s", "services are found so much later: NFS: actimeo=1")


def _unlike(facts: NodeFacts, first: NodeFacts) -> Iterator[Check]:
    """Yield how a node differs from the first: versions must be equal, GPUs should."""
    keys = sorted(first.versions.keys() | facts.versions.keys())
    if unlike := [k for k in keys if first.versions.get(k) != facts.versions.get(k)]:
        said = ", ".join(f"{k} {facts.versions.get(k)}, not {first.versions.get(k)}" for k in unlike)
        text = f"{facts.node} has {said} as {first.node}"
        yield Check("nodes: same", "fail", text, "start all nodes from one image or one shared environment")
    if facts.gpus != first.gpus:
        text = f"GPUs of {facts.node}: {_counted(facts.gpus)}; of {first.node}: {_counted(first.gpus)}"
        yield Check("nodes: same", "warn", text, "ask for nodes of one kind (--constraint), with one driver")


def _counted(gpus: Sequence[str]) -> str:
    return ", ".join(f"{gpus.count(name)} x {name}" for name in dict.fromkeys(gpus)) or "none"


@contextmanager
def _trial_folder(run_dir: Path) -> Iterator[tuple[Path, list[OSError]]]:
    """Make a folder in the run directory, with a lock that is held and a file that is replaced; remove it at the end.

    Yields the folder, and the errors of replacing the file.
    """
    faults: list[OSError] = []
    folder, end = Path(tempfile.mkdtemp(prefix=".prorl-doctor-", dir=run_dir)), threading.Event()

    def beat() -> None:
        (folder / "beat.tmp").write_text(str(time.monotonic()))
        os.replace(folder / "beat.tmp", folder / "beat")

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
    """Tell the time to the probes while it lasts; yields the address."""

    class Answer(socketserver.StreamRequestHandler):
        def handle(self) -> None:
            with suppress(OSError):  # a node that breaks off is judged by what it printed
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
