"""Fifteen faults of a cluster, each injected into a run on an emulated Slurm cluster, compared with an undisturbed run.

    .venv/train/bin/python benchmarks/cluster_faults.py [--nodes 4] [--only NAME,NAME] [--base FOLDER] [--out DIR]

Needs root and Slurm's daemons (docs/tutorial/cluster.md).  One run is undisturbed; each other run has one fault at step
3 of 20.  Slurm and the job continue without help.  Where a fault ends the job for good (scancel, a full run
directory), the same command is submitted again.  Weights, metrics (all but time/), held-out scores and rollouts must be
equal to the bit: no prompt is lost or counted twice.  No process may be left on any node, and no wait may be longer
than --deadline.
"""

import argparse
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import psutil
from kill_resume import compare, last_step
from machine import describe

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))
from nemo_prorl.files import read_objects  # noqa: E402
from tests.cluster.emulated import Ended, Slurm, cluster  # noqa: E402

STEPS, BREAK_AT = 20, 3  # enough steps left that Slurm misses a lost node (25 s) before the last one
COMMON = [
    "cluster=slurm_dev",
    "data=laptop",
    "deterministic=true",
    f"trainer.grpo.max_steps={STEPS}",
    "trainer.grpo.prompts_per_step=8",
    "trainer.grpo.samples_per_prompt=8",
    "trainer.grpo.checkpoint_every=2",
    "trainer.grpo.validate_every=3",
    "rollout.max_num_seqs=64",
    "rollout.kv_cache_mb=128",
    *[f"data.{part}.{k}.size={size}" for part, size in (("train", 300), ("validation", 16)) for k in range(5)],
]
PARTITIONS = """PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
PartitionName=high Nodes=ALL Default=NO MaxTime=INFINITE State=UP PriorityTier=10 PreemptMode=OFF
PartitionName=low Nodes=ALL Default=NO MaxTime=INFINITE State=UP PriorityTier=1 GraceTime=120 PreemptMode=REQUEUE
"""
PROGRAMS = {
    "engine": "nemo_prorl/rollout/engine/server.py",
    "reward server": "nemo_prorl.rewards.server",
    "trainer": "nemo_prorl.rank",
    "supervisor": "nemo_prorl.launcher.node",
}


@dataclass
class Case:
    """A run with one injected fault, and what happened to the run."""

    name: str
    run: Path
    job: int = 0  # id of the run's newest Slurm job
    ends: list[Ended] = field(default_factory=list)  # how each Slurm job of the case ended
    broken: float = 0.0  # time of the fault, by time.monotonic()
    next_step_s: float = 0.0  # seconds from the fault to the next logged step
    equal: bool = False  # whether all results equal those of the undisturbed run
    left: str = "none"  # processes left on the nodes at the end, as text
    failed: str = ""  # error that ended the case, such as a timeout; empty: none

    def happened(self) -> str:
        """Return exit code and next action of each attempt (from launches.jsonl), and how the Slurm jobs ended."""
        ends = [m for m in read_objects(self.run / "launches.jsonl") if m["event"] == "end"]
        says = [f"{m['code']} {m['next']}" for m in ends]
        ended = ", ".join(
            f"{e.state} {e.code}{f' after {e.restarts} requeues' if e.restarts else ''}" for e in self.ends
        )
        return f"{' > '.join(says) or 'nothing'}; {ended}"


class Bench:
    """The cluster, the folders and the deadline that all faults share."""

    def __init__(self, slurm: Slurm, out: Path, base: Path, nodes: int, deadline: float) -> None:
        self.slurm, self.out, self.base, self.nodes, self.deadline = slurm, out, base, nodes, deadline
        self.drained = ""

    def submit(self, run: Path, *flags: str, nodes: int = 0) -> int:
        """Submit a Slurm job of the run and return the job's id.  `nodes`: number of nodes; 0: the value of --nodes."""
        nodes = nodes or self.nodes
        overrides = [
            f"run_dir={run}",
            f"trainer.num_nodes={nodes}",
            f"rollout.engines={nodes}",
            f"pretrained_checkpoint.restore_from_path={self.base}",
            "trainer.warmup.steps=0",
        ]
        words = [f"--nodes={nodes}", "--gpus-per-node=0", f"--output={self.out}/logs/{run.name}.log", *flags]
        return self.slurm.sbatch(*words, "slurm/stage.sbatch", "none", *COMMON, *overrides)

    def until(self, what: str, ready: Callable[[], bool]) -> None:
        end = time.monotonic() + self.deadline
        while not ready():
            if time.monotonic() > end:
                raise TimeoutError(f"{what} did not happen in {self.deadline:.0f} s")
            time.sleep(0.1)

    def nodes_of(self, job: int) -> list[str]:
        return self.slurm.run("scontrol", "show", "hostnames", self.slurm.job(job)["NodeList"]).split()

    def kill(self, case: Case, program: str, index: int) -> None:
        """Send SIGKILL to the processes of `program` (a key of PROGRAMS) on node number `index` of the job."""
        node = self.nodes_of(case.job)[index]
        victims = []
        for process in self.slurm.processes():
            try:
                if PROGRAMS[program] in process.cmdline() or any(
                    word.endswith(PROGRAMS[program]) for word in process.cmdline()
                ):
                    here = process.environ().get("SLURMD_NODENAME") == node and process.name() != "srun"
                    victims += [process] * here
            except psutil.Error:
                continue
        victims = [p for p in victims if p.parent() is None or p.parent() not in victims]
        if not victims:
            raise RuntimeError(f"node {node}: expected a running {program} process of job {case.job}; found none")
        for victim in victims:
            victim.kill()

    # --- faults: called when step BREAK_AT is logged ---------------------------------------------------------------

    def engine(self, case: Case) -> None:
        self.kill(case, "engine", -1)

    def reward_server(self, case: Case) -> None:
        self.kill(case, "reward server", -1)

    def trainer(self, case: Case) -> None:
        self.kill(case, "trainer", -1)

    def supervisor(self, case: Case) -> None:
        self.kill(case, "supervisor", -1)

    def leader(self, case: Case) -> None:
        self.kill(case, "supervisor", 0)

    def node_crash(self, case: Case) -> None:
        self.slurm.node_crash(self.nodes_of(case.job)[-1])

    def node_kill(self, case: Case) -> None:
        self.slurm.node_kill(self.nodes_of(case.job)[-1])

    def first_node_kill(self, case: Case) -> None:
        self.slurm.node_kill(self.nodes_of(case.job)[0])

    def node_drain_lost(self, case: Case) -> None:
        node = self.nodes_of(case.job)[-1]
        self.slurm.run("scontrol", "update", f"NodeName={node}", "State=DRAIN", "Reason=benchmark")
        self.slurm.slurmd_kill(node)
        self.drained = node

    def first_slurmd_kill(self, case: Case) -> None:
        self.slurm.slurmd_kill(self.nodes_of(case.job)[0])

    def time_limit(self, case: Case) -> None:
        """Send the signal that Slurm sends ten minutes before the time limit (--signal=B:USR1@600)."""
        self.slurm.scancel(case.job, "--batch", "--signal=USR1")
        self.until("a requeue", lambda: self.slurm.job(case.job)["Restarts"] == "1")

    def preemption(self, case: Case) -> None:
        words = ["--partition=high", f"--nodes={len(self.slurm.nodes)}", "--exclusive", "--output=/dev/null"]
        self.slurm.sbatch(*words, "--wrap", "sleep 5")

    def scancel(self, case: Case) -> None:
        self.slurm.scancel(case.job)
        case.ends.append(self.slurm.wait(case.job, self.deadline))
        self.slurm.no_orphans(30)
        case.job = self.submit(case.run)

    def full_directory(self, case: Case) -> None:
        filler = case.run / "filler"
        with filler.open("wb", buffering=0) as file:  # nothing is left that closing the file would write
            try:
                while file.write(b"\0" * (1 << 16)):
                    pass
            except OSError:
                pass
        case.ends.append(self.slurm.wait(case.job, self.deadline))
        self.slurm.no_orphans(30)
        filler.unlink()
        case.job = self.submit(case.run)

    def second_job(self, case: Case) -> None:
        """Submit a second job of the same run, on the node that the first job does not use."""
        second = self.submit(case.run, nodes=1)
        case.ends.append(self.slurm.wait(second, self.deadline))

    # ---------------------------------------------------------------------------------------------------------------

    def undisturbed(self) -> Case:
        case = Case("undisturbed", self.out / "undisturbed")
        case.job = self.submit(case.run)
        case.ends.append(self.slurm.wait(case.job, self.deadline))
        if case.ends[-1].state != "COMPLETED":
            raise RuntimeError(f"the undisturbed run failed; see {self.out / 'logs' / case.run.name}.log")
        return case

    def case(self, name: str, fault: Callable[[Case], None], undisturbed: Path) -> Case:
        case = Case(name, self.out / name.replace(" ", "_"))
        case.run.mkdir()
        small = fault == self.full_directory
        if small:
            subprocess.run(["mount", "-t", "tmpfs", "-o", "size=256m", "tmpfs", case.run], check=True)
        try:
            self._case(case, fault, undisturbed)
        except (TimeoutError, RuntimeError, AssertionError) as error:
            case.failed = f"{type(error).__name__}: {str(error).splitlines()[0]}"
            sys.stderr.write(f"{error}\n")
        finally:
            if self.drained:  # a drained node stays drained until scontrol resumes it
                self.slurm.run("scontrol", "update", f"NodeName={self.drained}", "State=RESUME")
                self.drained = ""
            self.slurm.clean_up()
            if small:
                saved = self.out / f"{case.run.name}.kept"
                subprocess.run(["cp", "-r", case.run, saved], check=False)
                subprocess.run(["umount", case.run], check=False)
                case.run = saved
        sys.stderr.write(f"{case}\n")
        return case

    def _case(self, case: Case, fault: Callable[[Case], None], undisturbed: Path) -> None:
        flags = ["--partition=low"] if fault == self.preemption else []
        case.job = self.submit(case.run, *flags)
        self.until(f"step {BREAK_AT}", lambda: last_step(case.run) >= BREAK_AT)
        case.broken, step = time.monotonic(), last_step(case.run)
        fault(case)
        self.until("the next step", lambda: last_step(case.run) > step)
        case.next_step_s = time.monotonic() - case.broken
        case.ends.append(self.slurm.wait(case.job, self.deadline))
        if fault in (self.node_crash, self.node_kill, self.first_node_kill):
            for node in self.slurm.nodes:
                self.slurm.node_start(node)  # processes of a machine that was off are not orphans
        try:
            self.slurm.no_orphans(30)
        except AssertionError as error:
            case.left = str(error)
        case.equal = all(same for _, same in compare(undisturbed, case.run))

    def cases(self) -> dict[str, Callable[[Case], None]]:
        return {
            "engine killed": self.engine,
            "reward server killed": self.reward_server,
            "trainer rank killed": self.trainer,
            "node supervisor killed": self.supervisor,
            "leading supervisor killed": self.leader,
            "node crashes": self.node_crash,
            "node dies": self.node_kill,
            "first node dies": self.first_node_kill,
            "node drained and lost": self.node_drain_lost,
            "first node lost to Slurm": self.first_slurmd_kill,
            "time limit": self.time_limit,
            "preemption": self.preemption,
            "scancel": self.scancel,
            "run directory full": self.full_directory,
            "second job": self.second_job,
        }


def say(*rows: str) -> None:
    for row in rows:
        sys.stdout.write(f"{row}\n")
    sys.stdout.flush()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--nodes", type=int, default=4, help="nodes of the run; the cluster has one more; default: 4")
    parser.add_argument("--only", help="comma-separated names of faults; default: all")
    parser.add_argument("--base", type=Path, help="folder of the first policy; default: made by prorl warmup")
    parser.add_argument("--deadline", type=float, default=900.0, help="maximum seconds of each wait; default: 900")
    parser.add_argument("--out", type=Path, default=Path("runs/cluster_faults"))
    args = parser.parse_args()
    if args.out.exists():
        parser.error(f"--out {args.out}: expected a folder that does not exist; it exists")
    out = args.out.absolute()
    (out / "logs").mkdir(parents=True)
    if args.base is None:
        prorl = str(Path(sys.executable).with_name("prorl"))
        short = ["trainer.warmup.steps=40", *COMMON[1:]]
        subprocess.run([prorl, "warmup", f"run_dir={out / 'base'}", *short], check=True, stdout=sys.stderr)
        args.base = out / "base" / "base"
    with cluster(nodes=args.nodes + 1, extra=PARTITIONS) as slurm:
        bench = Bench(slurm, out, args.base.absolute(), args.nodes, args.deadline)
        chosen = bench.cases()
        if args.only:
            names = args.only.split(",")
            if unknown := [name for name in names if name not in chosen]:
                parser.error(f"--only {unknown[0]}: expected names among {', '.join(chosen)}")
            chosen = {name: chosen[name] for name in names}
        began = time.monotonic()
        one = bench.undisturbed()
        say(describe(), f"{args.nodes} nodes of {args.nodes + 1}, {STEPS} steps, fault at step {BREAK_AT}")
        say(f"undisturbed: {time.monotonic() - began:.0f} s, {one.happened()}")
        say(f"{'fault':26s} {'next step':>9s} {'equal':>5s} {'left':>5s}  attempts: code and what followed; the job")
        cases = []
        for name, fault in chosen.items():
            cases.append(case := bench.case(name, fault, one.run))
            wait, left = f"{case.next_step_s:7.0f} s", "0" if case.left == "none" else "SOME"
            say(f"{case.name:26s} {wait:>9s} {'yes' if case.equal else 'NO':>5s} {left:>5s}  {case.happened()}")
            say(*(f"    {text}" for text in (case.failed, case.left) if text not in ("", "none")))
    good = [case for case in cases if case.equal and case.left == "none" and not case.failed]
    say(f"{len(good)} of {len(cases)} faults without a trace")
    return 0 if len(good) == len(cases) else 1


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    sys.exit(main())
