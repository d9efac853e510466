"""All nodes of a run compared: clocks, the shared run directory, versions, GPUs, /dev/shm.

`node_probe.py` runs once a node through srun and prints what it finds; meanwhile this process tells the time and writes
files when asked, on a port of this machine's address.  `judged` needs the nodes' facts alone.
"""

import fcntl
import json
import os
import re
import secrets
import shlex
import shutil
import socketserver
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, fields
from pathlib import Path

from omegaconf import DictConfig

from nemo_prorl.launcher.doctor import node_probe
from nemo_prorl.launcher.doctor.check import Check, gb
from nemo_prorl.launcher.doctor.network import own_address
from nemo_prorl.launcher.doctor.storage import MTIME_SKEW_S, nearest
from nemo_prorl.launcher.processes import free_port
from nemo_prorl.planning.memory import memory_of

SKEW_WARN_S, SKEW_FAIL_S = 1.0, 60.0  # between any two nodes; deadlines of the job are by the clock
STALE_WARN_S = 1.0
DEADLINE_S = 150.0  # for srun to start the probes and for them to end


@dataclass(frozen=True)
class NodeFacts:
    """What one node said; None where it could not be found out."""

    node: str
    versions: dict[str, str]
    gpus: list[str]
    shm_free: int
    ahead_s: float | None = None  # doctor's clock minus the node's
    ahead_error_s: float = 0.0
    reach_fault: str = ""  # why the node could not connect to this machine
    folder_fault: str = ""
    mtime_skew_s: float | None = None
    lock_holds: bool | None = None
    stale_s: float | None = None


def of_run(cfg: DictConfig, srun: str) -> Iterator[Check]:
    """Runs the probes in the run directory, or where it is to be made, and judges."""
    count = cfg.trainer.num_nodes
    try:
        shared = nearest(Path(cfg.run_dir).absolute())
        with _trial_folder(shared) as (folder, token), _told_time(folder, token) as (host, port):
            probe = [sys.executable, "-P", node_probe.__file__, host, str(port), token, str(folder)]
            output, errors = run_probes([*shlex.split(srun), *task_options(count), *probe])
            found = parse(output)
            hidden = [n.node for n in found if not n.folder_fault and not (folder / f"node-{n.node}").exists()]
    except OSError as error:
        yield Check("nodes", "fail", f"the nodes cannot be asked: {error}", "run it in the job, where srun is")
        return
    yield from judged(found, count, errors, memory_of(cfg).published, hidden)


def task_options(count: int) -> list[str]:
    """One task a node, beside whatever the job already runs."""
    return [f"--nodes={count}", f"--ntasks={count}", "--ntasks-per-node=1", "--overlap"]


def run_probes(command: Sequence[str], seconds: float = DEADLINE_S) -> tuple[str, str]:
    """(output, last line of the errors); srun is asked to end when the time is up, which ends its tasks."""
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
    """What the probes printed, by node; lines of others, broken lines and unknown keys are passed over."""
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
    yield from _reach(nodes)
    yield from _clocks(nodes)
    yield from _folder(nodes, hidden)
    yield from _alike(nodes)
    if small := [f"{n.node} {gb(n.shm_free)}" for n in nodes if n.shm_free < published]:
        text = f"/dev/shm has less than the {gb(published)} of two versions of the weights: {', '.join(small)}"
        yield Check("nodes: shm", "fail", text, "free it there, or give the containers more (--shm-size)")


def _reach(nodes: Sequence[NodeFacts]) -> Iterator[Check]:
    for facts in nodes:
        if facts.reach_fault:
            text = f"{facts.node} cannot connect to {facts.reach_fault}"
            cure = (
                "let this machine's name resolve to an address that nodes reach, and open their firewalls to each other"
            )
            yield Check("nodes: net", "fail", text, cure)


def _clocks(nodes: Sequence[NodeFacts]) -> Iterator[Check]:
    """Each node's clock was compared with this process's: the difference of two is that of their nodes."""
    asked = sorted((-facts.ahead_s, facts.ahead_error_s, facts.node) for facts in nodes if facts.ahead_s is not None)
    if len(asked) < 2:
        return
    (low, low_error, first), (high, high_error, last) = asked[0], asked[-1]
    sure = high - low - low_error - high_error  # what the time of the answers cannot explain
    text = f"{last} is {high - low:.3f} s ahead of {first} (to {low_error + high_error:.3f} s)"
    cure = "start chrony or NTP on both: deadlines of a job and times in the journal are by these clocks"
    state = "fail" if sure > SKEW_FAIL_S else "warn" if sure > SKEW_WARN_S else "pass"
    yield Check("nodes: clock", state, text, "" if state == "pass" else cure)


def _folder(nodes: Sequence[NodeFacts], hidden: Sequence[str]) -> Iterator[Check]:
    """The run directory from every node."""
    bad = False
    for facts in nodes:
        fault = facts.folder_fault or ("its files are not seen here" if facts.node in hidden else "")
        if fault:
            bad = True
            cure = "put run_dir on a filesystem that all nodes mount at the same path, writable"
            yield Check("nodes: dir", "fail", f"{facts.node}: {fault}", cure)
            continue
        if facts.lock_holds is False:
            bad = True
            text = f"{facts.node}: a lock held elsewhere does not count, so two jobs could work on one run"
            yield Check(
                "nodes: dir", "warn", text, "mount it with locks between nodes (Lustre: -o flock; NFS: local_lock=none)"
            )
        if facts.mtime_skew_s is not None and abs(facts.mtime_skew_s) > MTIME_SKEW_S:
            bad = True
            text = f"{facts.node}: files' times are {facts.mtime_skew_s:+.1f} s from its clock"
            yield Check("nodes: dir", "warn", text, "let NTP or chrony set the clocks of file server and node")
        if facts.reach_fault:
            continue  # then nobody replaced a file for it
        if facts.stale_s is None:
            bad = True
            text = f"{facts.node}: a file replaced elsewhere read as before for {node_probe.STALE_S:g} s"
            yield Check(
                "nodes: dir", "fail", text, "lower the mount's attribute caching (NFS: actimeo=1), or use another"
            )
        elif facts.stale_s > STALE_WARN_S:
            bad = True
            text = f"{facts.node}: a file replaced elsewhere read as before for {facts.stale_s:.1f} s"
            yield Check("nodes: dir", "warn", text, "services are found so much later: NFS: actimeo=1")
    if not bad:
        yield Check("nodes: dir", "pass", "shared, replaced files are seen, locks hold")


def _alike(nodes: Sequence[NodeFacts]) -> Iterator[Check]:
    """Versions must be equal, GPUs should."""
    first = nodes[0]
    bad = False
    for facts in nodes[1:]:
        keys = sorted(first.versions.keys() | facts.versions.keys())
        unlike = [k for k in keys if first.versions.get(k) != facts.versions.get(k)]
        if unlike:
            bad = True
            said = ", ".join(f"{k} {facts.versions.get(k)}, not {first.versions.get(k)}" for k in unlike)
            text = f"{facts.node} has {said} as {first.node}"
            yield Check("nodes: same", "fail", text, "start all nodes from one image or one shared environment")
        if facts.gpus != first.gpus:
            bad = True
            text = f"GPUs of {facts.node}: {_counted(facts.gpus)}; of {first.node}: {_counted(first.gpus)}"
            yield Check("nodes: same", "warn", text, "ask for nodes of one kind (--constraint), with one driver")
    if not bad:
        yield Check("nodes: same", "pass", f"versions and GPUs ({_counted(first.gpus)})")


def _counted(gpus: Sequence[str]) -> str:
    return ", ".join(f"{gpus.count(name)} x {name}" for name in dict.fromkeys(gpus)) or "none"


@contextmanager
def _trial_folder(run_dir: Path) -> Iterator[tuple[Path, str]]:
    """A folder in the run directory with a token, and a lock that is held; removed at the end."""
    folder, token = Path(tempfile.mkdtemp(prefix=".prorl-doctor-", dir=run_dir)), secrets.token_hex(16)
    try:
        (folder / "token").write_text(token)
        with (folder / "lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            handle = os.open(folder, os.O_RDONLY)
            os.fsync(handle)
            os.close(handle)
            yield folder, token
    finally:
        shutil.rmtree(folder, ignore_errors=True)


@contextmanager
def _told_time(folder: Path, token: str) -> Iterator[tuple[str, int]]:
    """Answers the probes while it lasts: the time, or a file of theirs in the folder written anew."""

    class Answers(socketserver.StreamRequestHandler):
        timeout = 60.0
        disable_nagle_algorithm = True

        def handle(self) -> None:
            for line in iter(lambda: self.rfile.readline(4096), b""):
                if (answer := _answer(line, folder, token)) is None:
                    return
                self.wfile.write(json.dumps(answer).encode() + b"\n")

    class Listener(socketserver.ThreadingTCPServer):
        daemon_threads = True

        def handle_error(self, request: object, client_address: object) -> None:
            """A node that breaks off is judged by what it printed."""

    host = own_address()
    with Listener((host, free_port(host)), Answers) as server:
        thread = threading.Thread(target=server.serve_forever, daemon=True, name="doctor")
        thread.start()
        try:
            yield host, server.server_address[1]
        finally:
            server.shutdown()
            thread.join()


def _answer(line: bytes, folder: Path, token: str) -> dict[str, float] | None:
    """The answer to one request; None for one that is not of our probes."""
    try:
        asked = json.loads(line)
        if not secrets.compare_digest(str(asked["token"]), token):
            return None
        if asked["what"] == "time":
            return {"time": time.time()}
        if asked["what"] != "write" or not re.fullmatch(r"seen-[\w.-]+", asked["name"]):
            return None
    except (ValueError, KeyError, TypeError):
        return None
    temporary = folder / f"{asked['name']}.tmp"
    temporary.write_text(str(asked["text"]))
    os.replace(temporary, folder / asked["name"])
    return {"time": time.time()}
