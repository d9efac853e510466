"""The program that `srun` starts on each node of a run on several nodes.

    python -m nemo_prorl.launcher.node --nodes 4 --run-dir RUN --attempt ID OVERRIDE ...

Only node 0 reads the overrides, locks and prepares the run directory, and decides how the run ended.  The other nodes
wait until node 0 has prepared the run, and report in one file per node whether they are fit (`peers`).  Standard output
goes through `srun` to the batch script: the lines of all processes.
"""

import argparse
import contextlib
import logging
import os
import signal
import socket
import sys
import time
import traceback
from dataclasses import replace
from pathlib import Path
from typing import Any

from nemo_prorl.deadlines import Deadline
from nemo_prorl.errors import ConfigError, DeadlineExceeded, ProrlError, UnfitMachine
from nemo_prorl.files import write_json
from nemo_prorl.launcher.peers import Launch, NodeAddress, Peers, StepOutcome, read
from nemo_prorl.launcher.processes import MergedLog, free_port
from nemo_prorl.launcher.srun_step import BEGUN
from nemo_prorl.launcher.supervisor import NodeSupervisor

_log = logging.getLogger(__name__)

_PREPARE_S = 3600.0  # seconds for node 0 to check data and rewards
_VISIBLE_S = 60.0  # seconds for a file to become visible on a shared file system


class _Stopped(BaseException):
    """SIGUSR1 arrived before the ranks were started, so there is nothing to save."""


def lead(args: argparse.Namespace, peers: Peers, output: MergedLog) -> StepOutcome:
    """Run node 0, from reading the configuration to the end of the run; return how the run ended."""
    from nemo_prorl import settings
    from nemo_prorl.launcher import one_node, run_results
    from nemo_prorl.launcher.events import Events, last_step
    from nemo_prorl.launcher.prepare import prepare

    cfg, place = settings.load_run(args.overrides), peers.place
    if cfg.trainer.num_nodes != place.nodes:
        raise ConfigError(
            f"trainer.num_nodes={cfg.trainer.num_nodes}: expected the number of supervisors that srun started; got"
            f" {place.nodes}. Fix: set trainer.num_nodes={place.nodes}, or start that many nodes"
        )
    run_dir = Path(cfg.run_dir).absolute()
    with contextlib.ExitStack() as held:
        try:
            held.enter_context(one_node.locked(run_dir, args.lock_wait_s))
        except ProrlError as error:
            with Events(cfg.on_event, run_dir) as events:  # without the journal, which belongs to the other process
                events.emit("failure", last_step(run_dir), str(error), kind=type(error).__name__)
            raise
        if one_node.is_finished(run_dir, cfg.trainer.grpo.max_steps):
            peers.launch.parent.mkdir(exist_ok=True)
            write_json(peers.launch, Launch(tasks=None, master=place.host, port=0))
            return StepOutcome(0)
        with Events(cfg.on_event, run_dir) as events:
            tasks = prepare(cfg, run_dir, settings.resolved_yaml(cfg))
            one_node.clear_endpoints(run_dir, keep=peers.files)
            peers.require_no_end()
            launch = Launch(tasks=tasks, master=place.host, port=free_port())  # after `prepare`, which takes minutes
            peers.place = replace(place, master=launch["master"], port=launch["port"])
            write_json(peers.launch, launch)
            startup = Deadline(cfg.trainer.deadlines.startup_s, "the nodes (trainer.deadlines.startup_s)")
            _require_reachable(cfg, peers.meet(startup))
            end = _run(NodeSupervisor(cfg, run_dir, tasks, output, events, peers=peers))
        if end.code == 0:
            run_results.print_results(run_dir)
        return end


def follow(args: argparse.Namespace, peers: Peers, output: MergedLog) -> StepOutcome:
    """Run a node other than node 0: wait until node 0 has prepared the run, then work; return how the run ended."""
    from nemo_prorl.launcher.prepare import check_node
    from nemo_prorl.settings import read_config

    prepared = Deadline(_PREPARE_S, f"node 0 to prepare the run and write {peers.launch}")
    while (launch := read(peers.launch)) is None:
        prepared.check()
        time.sleep(0.2)
    if launch["tasks"] is None:  # the run is already finished
        return StepOutcome(0)
    cfg: Any = read_config(_when_visible(args.run_dir / "config.yaml"))
    check_node(cfg)
    peers.place = replace(peers.place, master=launch["master"], port=launch["port"])
    _require_reachable(cfg, [launch["master"]])
    peers.meet(Deadline(cfg.trainer.deadlines.startup_s, "the nodes (trainer.deadlines.startup_s)"))
    return _run(NodeSupervisor(cfg, args.run_dir, launch["tasks"], output, peers=peers))


def _run(node: NodeSupervisor) -> StepOutcome:
    try:
        return node.run()
    finally:
        signal.signal(signal.SIGUSR1, signal.SIG_IGN)  # nothing is left to stop


def _require_reachable(cfg: Any, peers: list[str]) -> None:
    """Raise UnfitMachine if this machine's name resolves to an address that the other nodes cannot reach."""
    from nemo_prorl.launcher.doctor.network import loopback_fault

    if fault := loopback_fault(peers, {**dict(cfg.launch.env), **os.environ}):
        raise UnfitMachine(fault)


def _when_visible(file: Path) -> Path:
    """Return the file once it is visible on this node.  Raises UnfitMachine if it does not become visible."""
    try:
        Deadline(_VISIBLE_S, f"{file}").wait_until(file.is_file, every=0.5)
    except DeadlineExceeded:
        raise UnfitMachine(
            f"{file}: not visible on this node after {_VISIBLE_S:g} s. Fix: set run_dir to a file system that all nodes"
            " share; in a container, mount it (--container-mounts)"
        ) from None
    return file


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="nemo_prorl.launcher.node", description="Run one node of a run on several nodes."
    )
    parser.add_argument("--nodes", type=int, required=True, help="number of nodes of the run")
    parser.add_argument(
        "--node",
        type=int,
        default=int(os.environ.get("SLURM_NODEID", 0)),
        help="index of this node; node 0 leads the run; default: SLURM_NODEID, otherwise 0",
    )
    parser.add_argument(
        "--host",
        default=os.environ.get("SLURMD_NODENAME") or socket.gethostname(),
        help="name at which other nodes reach this node; default: SLURMD_NODENAME, otherwise the host name",
    )
    parser.add_argument("--run-dir", type=Path, required=True, help="run directory, on a file system of all nodes")
    parser.add_argument("--attempt", required=True, metavar="ID", help="unique identifier of this start of all nodes")
    parser.add_argument(
        "--lock-wait-s",
        type=float,
        default=0.0,
        help="seconds to wait until an earlier job releases the run directory; default 0",
    )
    parser.add_argument(
        "--expect",
        type=Path,
        metavar="FILE",
        help="file written by the batch script; proves that this node sees the shared run directory",
    )
    parser.add_argument("overrides", nargs="*", metavar="OVERRIDE", help="configuration overrides, KEY=VALUE")
    args = parser.parse_args(argv)
    form = f"%(asctime)s {args.host}: %(message)s"
    logging.basicConfig(level=logging.INFO, format=form, datefmt="%Y-%m-%d %H:%M:%S", stream=sys.stderr)
    output = MergedLog(None)
    signal.signal(signal.SIGUSR1, _stop)
    output.write(f"node-{args.node}", BEGUN + args.host)
    peers = Peers(args.run_dir / "endpoints", NodeAddress(args.node, args.nodes, args.host), args.attempt)
    with contextlib.redirect_stdout(sys.stderr):
        end = _end(args, peers, output)
    if args.node == 0:
        peers.write_end(end)
        return 0 if end.clean else end.code  # srun ends the other nodes if this code is not 0
    return 0 if end.clean or peers.decision is not None else end.code  # node 0 reports the end that it decided


def _stop(*_: Any) -> None:
    raise _Stopped


def _end(args: argparse.Namespace, peers: Peers, output: MergedLog) -> StepOutcome:
    try:
        try:
            if args.expect is not None:
                _when_visible(args.expect)
            return (lead if args.node == 0 else follow)(args, peers, output)
        finally:
            signal.signal(signal.SIGUSR1, signal.SIG_IGN)  # a late signal must not replace the outcome
    except _Stopped:
        end = StepOutcome(75, "stopped before the run began")
    except ProrlError as error:
        _log.error("%s", error)
        unfit = args.host if error.exit_code == UnfitMachine.exit_code else ""
        end = StepOutcome(error.exit_code, str(error), getattr(error, "host", unfit))
    except Exception as error:
        _log.error("%s", traceback.format_exc())
        end = StepOutcome(1, f"{type(error).__name__}: {error}", args.host)
    return end if args.node == 0 else peers.agree(end)


if __name__ == "__main__":
    sys.exit(main())
