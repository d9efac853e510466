"""One node of a run on several: `srun` starts it once a node.

    python -m nemo_prorl.launcher.node --nodes 4 --leader node0:41234 OVERRIDE ...

Node 0 leads: it alone reads the configuration, locks and prepares the run directory, and decides how the run ended.
The others connect to it (`link`), are asked whether they are fit, told to go, and told to stop.  The token of the
line stands in the environment, PRORL_LINK_TOKEN.
"""

import argparse
import logging
import os
import signal
import socket
import sys
import time
import traceback
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from nemo_prorl.deadlines import Deadline
from nemo_prorl.errors import ConfigError, DeadlineExceeded, ProrlError, UnfitMachine
from nemo_prorl.launcher.link import LeadingNode, Line, NodeLost, free_port, join
from nemo_prorl.launcher.supervisor import End, Node, Place

_log = logging.getLogger(__name__)

TOKEN = "PRORL_LINK_TOKEN"
_PREPARE_S = 3600.0  # for the leader to check data and rewards
_FIT_S = 120.0  # for a node to say whether it is fit
_KILLED = tuple(-number for number in (signal.SIGKILL, signal.SIGSEGV, signal.SIGBUS, signal.SIGILL))
_SEEN_S = 60.0  # for a file to show on a shared file system
_ENDS_S = 15.0  # for the nodes to say how they ended


class NodeUnfit(UnfitMachine):
    """A node of the run cannot take part in it."""

    def __init__(self, host: str, fault: str) -> None:
        super().__init__(f"{host}: {fault}")
        self.host = host


class Leading:
    """The other nodes, as the leader sees them."""

    def __init__(self, leader: LeadingNode, host: str = "", seconds: float = _ENDS_S) -> None:
        self.leader, self.host, self.seconds = leader, host, seconds
        self.decided: End | None = None
        self._ends: dict[int, End] = {}

    def look(self, signal_ranks: Callable[[int], None]) -> End | None:
        if self.leader.starter is not None:
            for message in self.leader.starter.messages():
                if message["kind"] == "stop":
                    _log.warning("%s: the run stops after this step", message["reason"])
                    signal_ranks(signal.SIGTERM)
        for node, line in list(self.leader.lines.items()):
            for message in line.messages():
                if message["kind"] == "end":
                    self._ends[node] = End(**message["end"])
            if line.lost is not None and node not in self._ends:
                self._ends[node] = End(1, f"node {node} was lost: {line.lost}", line.host)
        return blame(list(self._ends.values()))

    def agree(self, end: End | None) -> End:
        """Rank 0 is here: where it ended cleanly all did.  Else whoever was the first cause, so far as it shows."""
        deadline = time.monotonic() + self.seconds
        while len(self._ends) < self.leader.nodes - 1 and time.monotonic() < deadline:
            self.look(lambda number: None)
            time.sleep(0.05)
        known = [*self._ends.values(), *([end] if end else [])]
        if end is None and all(one.clean for one in known):
            known = [End(1, "the leading node's ranks did not end with the others", self.host)]
        self.decided = end if end is not None and end.clean else blame(known) or End(1)
        self.leader.tell("stop", code=self.decided.code)
        return self.decided


def blame(ends: list[End]) -> End | None:
    """Of several ends the one that explains the others: a process that was killed, a lost node, else the first error.

    Not every signal counts: a rank whose peer is gone may end itself by SIGABRT.
    """

    def weight(end: End) -> tuple[int, float]:
        if end.clean:
            return 2, end.at
        killed = end.status in _KILLED or (end.status is None and not end.process)
        return 0 if killed else 1, end.at

    return min(ends, key=weight, default=None)


class Following:
    """The leader, as another node sees it."""

    def __init__(self, line: Line) -> None:
        self.line = line
        self._told: End | None = None

    def look(self, signal_ranks: Callable[[int], None]) -> End | None:
        for message in self.line.messages():
            if message["kind"] == "stop":
                self._told = End(message["code"])
        if self._told is None and self.line.lost is not None:
            self._told = End(1, f"the leader was lost: {self.line.lost}", self.line.host)
        return self._told

    def agree(self, end: End | None) -> End:
        self.line.send("end", end=(end or End(0)).to_json())
        limit = time.monotonic() + 4 * _ENDS_S
        while self._told is None and time.monotonic() < limit:
            self.look(lambda number: None)
            time.sleep(0.05)
        return self._told or End(1, "the leader did not say how the run ended")


class Sent:
    """The lines of this node's processes go to the leader, who keeps the one log of all."""

    def __init__(self, line: Line) -> None:
        self._line = line

    def write(self, name: str, line: str) -> None:
        self._line.log(name, line)


def lead(args: argparse.Namespace, leader: LeadingNode, place: Place) -> End:
    """Node 0, from the configuration to the end of the run."""
    from nemo_prorl import settings
    from nemo_prorl.launcher import job
    from nemo_prorl.launcher.events import Events
    from nemo_prorl.launcher.prepare import prepare
    from nemo_prorl.launcher.processes import MergedLog

    cfg = settings.load_run(args.overrides)
    if cfg.trainer.num_nodes != place.nodes:
        raise ConfigError(f"trainer.num_nodes={cfg.trainer.num_nodes}: {place.nodes} nodes were started")
    run_dir = Path(cfg.run_dir).absolute()
    if args.expect is not None:
        _seen(args.expect)
    with job.locked(run_dir, args.lock_wait_s):
        if job.is_finished(run_dir, cfg.trainer.grpo.max_steps):
            return End(0)
        with Events(cfg.on_event, run_dir) as events:
            tasks = prepare(cfg, run_dir, settings.resolved_yaml(cfg))
            leader.wait_for_all(Deadline(cfg.trainer.deadlines.startup_s, "the nodes (trainer.deadlines.startup_s)"))
            _require_reachable(cfg, [line.host for line in leader.lines.values()])
            _require_fit(leader, run_dir)
            job.clear_endpoints(run_dir)
            merged = MergedLog(run_dir / "logs" / "all.log")
            leader.on_log = merged.write
            place = replace(place, port=free_port())  # now: preparing took minutes, in which another may take it
            leader.tell("go", tasks=tasks, master=place.master, port=place.port)
            peers = Leading(leader, place.host)
            code = Node(cfg, run_dir, tasks, merged, events, place, peers).run()
        if code == 0:
            job.tell(run_dir)
        return peers.decided or End(code)


def _require_fit(leader: LeadingNode, run_dir: Path) -> None:
    """Raises NodeUnfit, or NodeLost, naming the node."""
    leader.tell("fit", run_dir=str(run_dir))
    for node, line in sorted(leader.lines.items()):
        deadline = Deadline(_FIT_S, f"node {node} ({line.host}) to say whether it is fit")
        try:
            answer = line.wait_for(("fitness",), deadline)
        except DeadlineExceeded as error:
            raise NodeLost(str(error), line.host) from None
        if answer["fault"]:
            raise NodeUnfit(line.host, answer["fault"])


def _require_reachable(cfg: Any, peers: list[str]) -> None:
    """Raise UnfitMachine if this machine's name resolves to an address that the other nodes cannot reach."""
    from nemo_prorl.launcher.doctor.network import loopback_fault

    if fault := loopback_fault(peers, {**dict(cfg.launch.env), **os.environ}):
        raise UnfitMachine(fault)


def _seen(file: Path) -> Path:
    """The file, once it shows here; raises UnfitMachine."""
    try:
        Deadline(_SEEN_S, f"{file}").wait_until(file.is_file, every=0.5)
    except DeadlineExceeded:
        raise UnfitMachine(
            f"{file} is not to be seen here: the run directory must lie on a file system that all nodes share, and in"
            " a container be mounted"
        ) from None
    return file


def follow(line: Line, place: Place) -> int:
    """Another node; 0 when it was told how the run ended, whatever that was."""
    from nemo_prorl.launcher.prepare import check_node
    from nemo_prorl.settings import read_config

    asked = line.wait_for(("fit", "stop"), Deadline(_PREPARE_S, "the leader to prepare the run"))
    if asked["kind"] == "stop":
        return 0
    run_dir = Path(asked["run_dir"])
    try:
        cfg: Any = read_config(_seen(run_dir / "config.yaml"))
        check_node(cfg)
        _require_reachable(cfg, [line.host])
    except ProrlError as error:
        line.send("fitness", fault=str(error))
    else:
        line.send("fitness", fault="")
    go = line.wait_for(("go", "stop"), Deadline(2 * _FIT_S, "the leader to say go"))
    if go["kind"] == "stop":
        return 0
    place = Place(place.node, place.nodes, place.host, go["master"], go["port"])
    peers = Following(line)
    Node(cfg, run_dir, go["tasks"], Sent(line), None, place, peers).run()
    return 0 if line.lost is None else 1


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="nemo_prorl.launcher.node", description="One node of a run on several.")
    parser.add_argument("--nodes", type=int, required=True)
    parser.add_argument("--node", type=int, default=int(os.environ.get("SLURM_NODEID", 0)), help="0 leads")
    parser.add_argument("--leader", required=True, metavar="HOST:PORT", help="where node 0 listens")
    parser.add_argument("--host", default=os.environ.get("SLURMD_NODENAME") or socket.gethostname())
    parser.add_argument("--silence-s", type=float, default=60.0, help="a node that says nothing for so long is lost")
    parser.add_argument("--join-s", type=float, default=300.0, help="for the leader to listen")
    parser.add_argument("--lock-wait-s", type=float, default=0.0, help="for an earlier job to leave the run directory")
    parser.add_argument("--expect", type=Path, metavar="FILE", help="what who started the nodes put there")
    parser.add_argument("--starter", action="store_true", help="who started the nodes will connect and ask for the end")
    parser.add_argument("overrides", nargs="*", metavar="OVERRIDE")
    args = parser.parse_args(argv)
    logging.basicConfig(level=logging.INFO, format=f"{args.host}: %(message)s", stream=sys.stderr)
    token = os.environ.pop(TOKEN)  # not for the children
    host, _, port = args.leader.rpartition(":")
    if args.node > 0:
        return _follow(args, host, int(port), token)
    return _lead(args, host, int(port), token)


def _follow(args: argparse.Namespace, host: str, port: int, token: str) -> int:
    try:
        deadline = Deadline(args.join_s, "the leader to listen")
        line = join(host, port, token, args.node, args.host, args.silence_s, deadline)
        return follow(line, Place(args.node, args.nodes, args.host))
    except (NodeLost, DeadlineExceeded) as error:
        _log.error("%s", error)
        return 1


def _lead(args: argparse.Namespace, host: str, port: int, token: str) -> int:
    try:
        leader = LeadingNode(args.nodes, token, args.silence_s, port)
    except OSError as error:
        _log.error("port %d cannot be listened at: %s", port, error)
        return 1
    place = Place(0, args.nodes, args.host, host)
    end = End(1, "the node supervisor was interrupted", args.host)
    try:
        end = lead(args, leader, place)
    except ProrlError as error:
        _log.error("%s", error)
        unfit = args.host if error.exit_code == UnfitMachine.exit_code else ""
        end = End(error.exit_code, str(error), getattr(error, "host", unfit))
    except Exception as error:
        _log.error("%s", traceback.format_exc())
        end = End(1, f"{type(error).__name__}: {error}", args.host)
    finally:
        leader.part(end.to_json())
        leader.close(seconds=20.0, starter=args.starter)
    return end.code


if __name__ == "__main__":
    sys.exit(main())
