"""What a job does after each way in which a run can end.  Stand-ins for Slurm's commands; tests/cluster has it.

The stand-in `srun` writes what node 0 would, with the outcome that the test wrote, and `scontrol` answers from a file.
"""

import ast
import json
import os
import shlex
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from nemo_prorl import settings
from nemo_prorl.deadlines import Deadline
from nemo_prorl.files import write_json
from nemo_prorl.launcher import submission
from nemo_prorl.launcher.peers import node_file
from nemo_prorl.launcher.slurm_queries import Job
from nemo_prorl.launcher.srun_step import Step
from tests.data.preparing import touch_prepared
from tests.lines import write_lines

pytestmark = pytest.mark.starts

ROOT = Path(__file__).resolve().parents[2]

SRUN = """
import json, os, signal, sys, time
from dataclasses import fields
sys.path.insert(0, "ROOT")
from pathlib import Path
from nemo_prorl.files import write_json
from nemo_prorl.launcher.peers import StepOutcome, node_file
if "true" in sys.argv:
    dead = next((word[11:] for word in sys.argv if word.startswith("--nodelist=")), "")
    sys.exit(os.path.exists(f"dead-{dead}"))
with open("srun.txt", "a") as file:
    file.write(" ".join(sys.argv[1:]) + "\\n")
if "enroot" in sys.argv:
    sys.exit(1)
if "nemo_prorl.launcher.allocation" in sys.argv:  # in a container, which begins in a folder of its own
    os.chdir("/")
    first = next(k for k, word in enumerate(sys.argv) if k and word[:2] != "--")
    words = sys.argv[first:]
    os.execve(words[0], words, {**os.environ, "PYTHONPATH": "ROOT"})
outcomes = json.load(open("outcomes.json"))
told = outcomes.pop(0) if len(outcomes) > 1 else outcomes[0]
json.dump(outcomes, open("outcomes.json", "w"))
if told.get("deaf"):
    if told["deaf"] == "b": print("node-0: the supervisor has begun on a", flush=True)
    time.sleep(60)
stops = []
signal.signal(signal.SIGUSR1, lambda *_: stops.append(1))
print("node-0: the supervisor has begun on a", flush=True)
print("node-1: the supervisor has begun on b", flush=True)
if "checkpoint" in told:
    os.makedirs(f"run/checkpoints/step-{told['checkpoint']:06d}")
    open(f"run/checkpoints/step-{told['checkpoint']:06d}/state.json", "w").close()
if told.get("hangs"):
    open("waiting", "w").close()
    end = time.monotonic() + 60
    while time.monotonic() < end: time.sleep(1)
if "srun" in told:
    print("srun: error: " + told["srun"], file=sys.stderr, flush=True)
    time.sleep(0.5)
    if told["code"] is None: sys.exit(137)
if told.get("waits"):
    open("waiting", "w").close()
    while not stops: time.sleep(0.05)
outcome = {"what": "", "host": "", "process": "", "status": None, "log": [], **told}
for key in set(outcome) - {field.name for field in fields(StepOutcome)}: outcome.pop(key)
if not told.get("full disk"):
    attempt = next(word for word in sys.argv if word.startswith("--attempt=")).partition("=")[2]
    os.makedirs("run/endpoints", exist_ok=True)
    write_json(node_file(Path("run/endpoints"), 0, attempt), {"host": "a", "end": outcome})
sys.exit(0 if outcome["code"] == 75 else outcome["code"])
"""

SCONTROL = """
import json, sys
with open("slurm.txt", "a") as file:
    file.write(" ".join(sys.argv[1:]) + "\\n")
if sys.argv[1:3] == ["show", "hostnames"]:
    print("\\n".join(sys.argv[3].split(",")))
elif "show" in sys.argv:
    print(open("job.txt").read())
"""

SINFO = """
print(open("nodes.txt").read())
"""

BARE = f"#!{sys.executable} -S"  # without site-packages it starts in a third of the time
JOB = "JobId=17 JobState=RUNNING Restarts=0 BatchHost=localhost PreemptTime=None ExcNodeList=(null) ReqNodeList=(null)"
# Lines of the program that starts the driver; `put` fails for a name that the driver does not have.
QUICK = """
import nemo_prorl.launcher.slurm_driver as s
def put(name, value, owner=s):
    getattr(owner, name)
    setattr(owner, name, value)
put("wait", lambda self, seconds: None, s.Driver)
for name, seconds in {"_REQUEUED_S": 0.5, "_REQUEUE_EVERY_S": 0.2, "_NEEDS_PAUSE_S": 0.1, "_LOOK_S": 1.0}.items():
    put(name, seconds)
"""
PLAN = {
    "num_nodes": 2,
    "devices": 1,
    "engines": 4,
    "accelerator": "cpu",
    "attempts": 3,
    "env": {},
    "on_event": None,
    "reads_data_folder": True,
}


def known(needs: dict[str, Any]) -> str:
    """Lines for a driver that knows what the run needs; otherwise it takes 1.5 s to read it."""
    return QUICK + f'put("load_needs", lambda self: self.needs.update({needs}), s.Driver)\n'


def changed(field: str) -> str:
    """The job as scontrol shows it, with `old>new` in one field."""
    old, _, new = field.partition(">")
    return JOB.replace(old, new) if field else JOB


def nodes_of(*states: str) -> str:
    """sinfo's lines, of nodes with GPUs."""
    return "".join(f"{state.replace(' ', '|')}|gpu:h100:8(S:0-1)|ib\n" for state in states)


class Cluster:
    """A job of two nodes in a folder of its own."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.folder = folder
        (folder / "bin").mkdir()
        for name, code in (("srun", SRUN), ("scontrol", SCONTROL), ("sinfo", SINFO)):
            (folder / "bin" / name).write_text(f"{BARE}\n{code.replace('ROOT', str(ROOT))}")
            (folder / "bin" / name).chmod(0o755)
        (folder / "job.txt").write_text(JOB)
        (folder / "nodes.txt").write_text(nodes_of("a idle", "b allocated"))
        for name in [key for key in os.environ if key.startswith("SLURM")]:
            monkeypatch.delenv(name)
        monkeypatch.setenv("PATH", f"{folder / 'bin'}:{os.environ['PATH']}")
        monkeypatch.setenv("PYTHONPATH", str(ROOT))
        job = {"JOB_ID": "17", "JOB_NODELIST": "a,b", "JOB_PARTITION": "gpu", "GPUS_ON_NODE": "8"}
        job["JOB_CPUS_PER_NODE"] = "8(x2)"
        for name, value in job.items():
            monkeypatch.setenv(f"SLURM_{name}", value)
        monkeypatch.setenv("SLURMD_NODENAME", "localhost")
        self.code = known(PLAN)
        self.words = ["none", f"--python={sys.executable}", "run_dir=run"]
        self.words += ["cluster=slurm_dev", "trainer.num_nodes=2", "rollout.engines=2"]

    def start(self, outcomes: list[dict[str, Any]], *words: str) -> "subprocess.Popen[str]":
        (self.folder / "outcomes.json").write_text(json.dumps(outcomes))
        return subprocess.Popen(
            [sys.executable, "-S", "-c", self.code + "s.main()", *self.words, *words],
            cwd=self.folder,
            stderr=subprocess.PIPE,
            text=True,
        )

    def run(self, outcomes: list[dict[str, Any]], *words: str) -> tuple[int, str]:
        process = self.start(outcomes, *words)
        _, said = process.communicate(timeout=60)
        return process.returncode, said

    def ends(self) -> list[dict[str, Any]]:
        lines = [json.loads(line) for line in (self.folder / "run" / "launches.jsonl").read_text().splitlines()]
        return [line for line in lines if line["event"] == "end"]

    def launches(self) -> list[tuple[Any, ...]]:
        return [(line["attempt"], line["code"], line["next"]) for line in self.ends()]

    def asked(self) -> list[str]:
        """What Slurm was asked to do."""
        file = self.folder / "slurm.txt"
        lines = file.read_text().splitlines() if file.is_file() else []
        return [line for line in lines if line.startswith(("requeue", "update"))]

    def sruns(self) -> list[str]:
        return (self.folder / "srun.txt").read_text().splitlines()


@pytest.fixture
def cluster(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Cluster:
    return Cluster(tmp_path, monkeypatch)


CRASH = {"code": 1, "what": "trainer-1 ended with status -9", "host": "b"}


def test_a_finished_run_ends_the_job(cluster: Cluster) -> None:
    assert cluster.run([{"code": 0}])[0] == 0
    assert cluster.launches() == [(1, 0, "done")]
    assert cluster.asked() == []
    (line,) = cluster.sruns()
    for word in ("--nodes=2", "--ntasks=2", "--ntasks-per-node=1", "--cpus-per-task=8", "--kill-on-bad-exit=1"):
        assert word in line
    assert "--wait=0" in line  # otherwise srun ends node 0 a while after another node has ended cleanly
    assert "--lock-wait-s=0 " in line  # a second job on the same run directory is refused at once
    assert f"run_dir={cluster.folder / 'run'}" in line


def test_a_crash_starts_the_run_again_in_the_same_allocation(cluster: Cluster) -> None:
    assert cluster.run([CRASH, {"code": 0}])[0] == 0
    assert cluster.launches() == [(1, 1, "again"), (2, 0, "done")]
    assert cluster.asked() == []
    assert "--lock-wait-s=300 " in cluster.sruns()[1]


def test_no_progress_ends_the_job_and_says_why(cluster: Cluster) -> None:
    code, said = cluster.run([{**CRASH, "host": ""}])
    assert code == 1
    assert cluster.launches() == [(1, 1, "again"), (2, 1, "again"), (3, 1, "again")]
    assert "3 attempts in a row made no new checkpoint" in said
    assert "trainer-1 ended with status -9" in said.splitlines()[-1]


def test_a_new_checkpoint_is_progress(cluster: Cluster) -> None:
    crashes = [{**CRASH, "host": "", "checkpoint": step} for step in (1, 2, 3, 4)]
    assert cluster.run([*crashes, {"code": 0}])[0] == 0
    assert len(cluster.launches()) == 5


@pytest.mark.parametrize(
    ("says", "decision", "host", "what"),
    [
        ("b: task 1: Killed", None, "b", "the supervisor of b: Killed"),
        ("b: task 1: Killed", {"code": 1, "what": "trainer-0 ended with status 1", "host": "a"}, "b", "Killed"),
        ("b: task 1: Killed", {"code": 75}, "b", "Killed"),  # then srun asks node 0 to stop
        ("Node failure on b", None, "b", "srun reported a failure of node b"),
        ("node[1-3]: tasks 1-3: Terminated", None, "", "node[1-3]: Terminated"),
    ],
)
def test_what_srun_says_of_a_node_names_the_cause(
    cluster: Cluster, says: str, decision: dict[str, Any] | None, host: str, what: str
) -> None:
    cluster.run([{"code": None, "srun": says, **(decision or {})}, {"code": 0}])
    end = cluster.ends()[0]
    assert (end["code"], end["host"] or "", end["next"]) == (1, host, "again")
    assert what in end["what"]


def test_a_failure_that_only_srun_sees_is_told_to_the_hook(cluster: Cluster) -> None:
    """The ranks of node 0 may hang until Slurm kills node 0's supervisor, which then reports nothing."""
    hook = cluster.folder / "hook"
    hook.write_text('#!/bin/sh\necho "$PRORL_EVENT $PRORL_WHAT" >> told\n')
    hook.chmod(0o755)
    cluster.code = known({**PLAN, "on_event": str(hook)})
    assert cluster.run([{"code": None, "srun": "b: task 1: Killed"}, {**CRASH, "host": ""}, {"code": 0}])[0] == 0
    assert (cluster.folder / "told").read_text() == "failure the supervisor of b: Killed\n"


@pytest.mark.parametrize(("code", "expected"), [(3, 3), (1, 1)])
def test_an_exit_code_counts_where_node_0_says_nothing(cluster: Cluster, code: int, expected: int) -> None:
    """A node that does not see the run directory can say so to srun alone."""
    fault = {"code": None, "srun": f"b: task 1: Exited with exit code {code}"}
    assert cluster.run([fault])[0] == expected


def test_a_clean_end_counts_whatever_srun_says_of_another_node(cluster: Cluster) -> None:
    assert cluster.run([{"code": 0, "srun": "b: task 1: Killed"}])[0] == 0


@pytest.mark.parametrize(("code", "action"), [(75, "give_up"), (4, "give_up"), (1, "again")])
def test_on_a_full_disk_the_exit_status_is_the_outcome(cluster: Cluster, code: int, action: str) -> None:
    cluster.run([{"code": code, "full disk": True}, {"code": 75}])
    assert cluster.launches()[0] == (1, code, action)


@pytest.mark.parametrize("decides", [True, False])
def test_node_0_is_not_to_blame_for_its_exit_after_its_decision(tmp_path: Path, decides: bool) -> None:
    """The batch script may see its file late, and a disk that is full takes no file."""
    leader = node_file(tmp_path, 0, "1")
    says = "srun: error: a: task 0: Exited with exit code 1"
    code = f"""import sys, time
print({says!r}, file=sys.stderr, flush=True)
time.sleep(0.5)
"""
    step = Step([sys.executable, "-c", code], os.environ, 2, tmp_path / "all.log", leader)
    step.process.wait(30)
    if decides:
        write_json(leader, {"host": "a", "end": {"code": 1, "what": "trainer-2 ended with status -9", "host": "b"}})
    assert step.result().host == ("b" if decides else "")


def test_the_exit_of_another_node_after_node_0_s_decision_is_no_cause(tmp_path: Path) -> None:
    """All nodes end then as node 0 has decided."""
    leader = node_file(tmp_path, 0, "1")
    write_json(leader, {"host": "a", "end": {"code": 1, "what": "trainer-0 ended with status -9", "host": "a"}})
    code = "import sys; print('srun: error: b: task 1: Exited with exit code 1', file=sys.stderr)"
    step = Step([sys.executable, "-c", code], os.environ, 2, tmp_path / "all.log", leader)
    step.process.wait(30)
    assert step.result().host == "a"


def test_srun_s_output_is_not_labelled_whatever_the_site_s_habit(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    labels = 'if os.environ.get("SLURM_LABELIO"): sys.exit(9)\n'
    (cluster.folder / "bin" / "srun").write_text(
        (cluster.folder / "bin" / "srun").read_text().replace("outcomes = json", f"{labels}outcomes = json")
    )
    monkeypatch.setenv("SLURM_LABELIO", "1")
    assert cluster.run([{"code": 0}])[0] == 0


def test_the_lines_of_all_nodes_are_in_one_log(cluster: Cluster) -> None:
    (cluster.folder / "run" / "logs").mkdir(parents=True)
    cluster.run([{"code": 0}])
    assert (cluster.folder / "run" / "logs" / "all.log").read_text().startswith("node-0: the supervisor has begun")


def test_a_node_to_blame_twice_is_left_out_where_another_works(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    (cluster.folder / "nodes.txt").write_text(nodes_of("a allocated", "b allocated", "c idle", "d down*"))
    assert cluster.run([CRASH])[0] == 1
    assert cluster.launches() == [(1, 1, "again"), (2, 1, "requeue")]
    assert cluster.asked() == ["requeue 17", "update JobId=17 ExcNodeList=b"]
    monkeypatch.setenv("SLURM_RESTART_COUNT", "1")  # a node's failures count in one start of the job only
    (cluster.folder / "job.txt").write_text(JOB.replace("Restarts=0", "Restarts=1"))
    cluster.run([CRASH])
    assert cluster.launches()[2] == (3, 1, "again")


@pytest.mark.parametrize("named", ["a", "b", ""])
def test_a_node_that_starts_nothing_is_left_out_at_once_and_others_stay_left_out(cluster: Cluster, named: str) -> None:
    """A lost node leaves errors on the others, and the end of the run may name one of them, or none."""
    (cluster.folder / "nodes.txt").write_text(nodes_of("a allocated", "b down", "c mixed", "z idle"))
    (cluster.folder / "job.txt").write_text(JOB.replace("ExcNodeList=(null)", "ExcNodeList=z"))
    (cluster.folder / "dead-b").touch()
    assert cluster.run([{"code": 1, "what": "trainer-0 ended with status 1", "host": named}])[0] == 1
    assert cluster.asked() == ["requeue 17", "update JobId=17 ExcNodeList=z,b"]
    (end,) = [line for line in cluster.ends() if line["code"] == 1]
    assert (end["host"], end["next"]) == ("b", "requeue")


@pytest.mark.parametrize(
    ("third", "field", "asked"),
    [
        ("", "", False),
        ("c|idle|gpu:h100:8(S:0)|ib\n", "", True),
        ("c|idle*|gpu:h100:8(S:0)|ib\n", "", False),
        ("c|idle|(null)|ib\n", "", False),  # without GPUs
        ("c|idle|gpu:h100:8(S:0)|ib\n", "ExcNodeList=(null)>ExcNodeList=c", False),
        ("c|idle|gpu:h100:8(S:0)|ib\n", "ReqNodeList=(null)>ReqNodeList=a,b", False),  # sbatch --nodelist
    ],
)
def test_a_node_that_is_not_fit_is_left_out_where_another_is(
    cluster: Cluster, third: str, field: str, asked: bool
) -> None:
    (cluster.folder / "nodes.txt").write_text(nodes_of("a idle", "b idle") + third)
    (cluster.folder / "job.txt").write_text(changed(field))
    assert cluster.run([{"code": 3, "what": "b: rollout.python=x is no Python", "host": "b"}])[0] == 3
    assert cluster.asked() == (["requeue 17", "update JobId=17 ExcNodeList=b"] if asked else [])


@pytest.mark.parametrize("code", [2, 3, 4, 75])
def test_what_would_not_be_better_the_next_time_ends_the_job_with_its_code(cluster: Cluster, code: int) -> None:
    """75: somebody asked by `prorl control`."""
    assert cluster.run([{"code": code, "what": "the configuration is wrong"}])[0] == code
    assert cluster.launches() == [(1, code, "give_up")]
    assert cluster.asked() == []


def test_near_the_time_limit_the_run_stops_and_the_job_is_requeued(cluster: Cluster) -> None:
    process = cluster.start([{"code": 75, "waits": True}])
    Deadline(30, "the run to be under way").wait_until((cluster.folder / "waiting").exists)
    process.send_signal(signal.SIGUSR1)
    process.communicate(timeout=30)
    assert process.returncode == 75
    assert cluster.launches() == [(1, 75, "requeue")]
    assert cluster.asked() == ["requeue 17"]


def test_a_preempted_run_is_requeued(cluster: Cluster) -> None:
    """The node supervisors alone get Slurm's SIGTERM; this process sees that the run stopped, and scontrol says why."""
    (cluster.folder / "job.txt").write_text(JOB.replace("PreemptTime=None", "PreemptTime=2026-11-21T20:00:00"))
    lines = []
    for attempt in range(1, 6):  # such ends are not the run's fault
        begin = {"event": "begin", "job": "17", "restart": 0, "attempt": attempt, "step": -1}
        lines += [begin, {**begin, "event": "end", "code": 75, "what": "preempted", "host": None, "next": "requeue"}]
    (cluster.folder / "run").mkdir()
    (cluster.folder / "run" / "launches.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert cluster.run([{"code": 75}])[0] == 75
    assert cluster.asked() == ["requeue 17"]


def test_an_earlier_preemption_does_not_bring_a_stopped_run_back(cluster: Cluster) -> None:
    told = "PreemptTime=2026-11-21T20:00:00 StartTime=2026-11-21T20:05:00"
    (cluster.folder / "job.txt").write_text(JOB.replace("PreemptTime=None", told))
    assert cluster.run([{"code": 75}])[0] == 75
    assert cluster.launches() == [(1, 75, "give_up")]
    assert cluster.asked() == []


@pytest.mark.parametrize("outcome", [{"code": 75, "waits": True}, {"code": 1, "waits": True}], ids=["clean", "killed"])
def test_scancel_never_requeues(cluster: Cluster, outcome: dict[str, Any]) -> None:
    """Slurm sends SIGTERM to all; a requeue would bring the cancelled job back."""
    process = cluster.start([outcome], *IMAGE)
    Deadline(30, "the run to be under way").wait_until((cluster.folder / "waiting").exists)
    process.send_signal(signal.SIGTERM)
    process.communicate(timeout=30)
    assert cluster.launches() == [(1, outcome["code"], "give_up")]
    assert cluster.asked() == []
    assert len(cluster.sruns()) == 1


def test_attempts_are_counted_over_requeues_and_not_over_jobs(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert cluster.run([{**CRASH, "host": ""}])[0] == 1
    monkeypatch.setenv("SLURM_RESTART_COUNT", "1")
    (cluster.folder / "job.txt").write_text(JOB.replace("Restarts=0", "Restarts=1"))
    assert cluster.run([{"code": 0}])[0] == 1
    assert len(cluster.sruns()) == 3
    monkeypatch.setenv("SLURM_JOB_ID", "18")
    assert cluster.run([{"code": 0}])[0] == 0


@pytest.mark.parametrize(
    ("variable", "value", "override", "told"),
    [
        (
            "SLURM_JOB_NODELIST",
            "a,b,c",
            "seed=1",
            "expected a job of 2 nodes (trainer.num_nodes=2); got 3. Fix: sbatch --nodes=2 ..., or trainer.num_nodes=3"
            " rollout.engines=6",
        ),
        ("SLURM_JOB_ID", "", "seed=1", "not part of a Slurm job"),
    ],
)
def test_another_allocation_than_the_configuration_s_is_refused(
    cluster: Cluster, variable: str, value: str, override: str, told: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(variable, value)
    code, said = cluster.run([{"code": 0}], override)
    assert (code, told in said) == (3, True)
    assert not (cluster.folder / "srun.txt").exists()


def test_a_wrong_key_is_said_before_anything_starts(cluster: Cluster) -> None:
    cluster.code = QUICK
    code, said = cluster.run([{"code": 0}], "trainer.grpo.max_stps=3")
    assert (code, "trainer.grpo.max_steps" in said) == (2, True)
    assert not (cluster.folder / "srun.txt").exists()


def test_the_environment_is_shown_and_its_own_values_win(cluster: Cluster, monkeypatch: pytest.MonkeyPatch) -> None:
    cluster.code = QUICK
    monkeypatch.setenv("NCCL_DEBUG", "INFO")
    monkeypatch.setenv("NCCL_IB_HCA", "mlx5")
    _, said = cluster.run([{"code": 0}], "+launch.env.NCCL_DEBUG=WARN", "+launch.env.UCX_TLS=rc")
    assert "NCCL_DEBUG=INFO, which wins over launch.env.NCCL_DEBUG=WARN" in said
    assert "NCCL_IB_HCA=mlx5" in said
    assert "UCX_TLS=rc" in said


IMAGE = ["--container-image=/images/prorl.sqsh", "--container-mounts=/lustre:/lustre,/data"]


def test_a_container_is_made_once_a_job_and_removed_at_its_end(cluster: Cluster) -> None:
    assert cluster.run([CRASH, {"code": 0}], *IMAGE)[0] == 0
    *starts, removal = cluster.sruns()
    assert len(starts) == 2
    assert all("--container-name=prorl_17_0:no_exec" in line for line in starts)
    assert removal.endswith(
        "--nodes=2 --ntasks=2 --ntasks-per-node=1 --overlap --mpi=none enroot remove --force pyxis_prorl_17_0"
    )


def test_a_container_is_removed_before_slurm_ends_the_start_that_made_it(cluster: Cluster) -> None:
    ends = 'if sys.argv[1] == "requeue":\n    import os, signal\n    os.kill(os.getppid(), signal.SIGTERM)\n'
    (cluster.folder / "bin" / "scontrol").write_text(f"{BARE}\n{SCONTROL}{ends}")
    cluster.code += """
import os, signal
class Step(s.Step):
    def __init__(self, *words):
        super().__init__(*words)
        os.kill(os.getpid(), signal.SIGUSR1)
put("Step", Step)
"""
    assert cluster.run([{"code": 75, "waits": True}], *IMAGE)[0] == 75
    assert cluster.asked() == ["requeue 17"]
    _, removal = cluster.sruns()
    assert removal.endswith("enroot remove --force pyxis_prorl_17_0")


def test_a_job_that_is_cancelled_between_two_attempts_starts_no_other(cluster: Cluster) -> None:
    cluster.code += "import os, signal\n"
    cluster.code += "put('wait', lambda self, seconds: os.kill(os.getpid(), signal.SIGTERM), s.Driver)\n"
    assert cluster.run([{**CRASH, "host": ""}, {"code": 0}])[0] == 75
    assert cluster.launches() == [(1, 1, "again")]
    assert len(cluster.sruns()) == 1


def test_relative_paths_count_from_where_sbatch_was_called(cluster: Cluster) -> None:
    """A container begins in /opt/nemo_prorl; there a relative path would be another."""
    cluster.code = QUICK
    for name in ("deepscaler", "eurus2-rl", "scp-116k", "reasoning-gym", "instructions"):
        (cluster.folder / "records" / name).mkdir(parents=True)
        (cluster.folder / "records" / name / "train.jsonl").write_text('{"task": "math"}\n')
    for name in ("aime24", "codeforces", "gpqa", "ifeval", "graph_color"):
        (cluster.folder / "records" / name).mkdir(parents=True)
        (cluster.folder / "records" / name / "validation.jsonl").write_text('{"task": "math"}\n')
    words = ["data=prorl", "data.max_prompt_tokens=null", "data.folder=records", "rollout.python=bin/python"]
    (cluster.folder / "mine" / "data").mkdir(parents=True)
    (cluster.folder / "mine" / "data" / "own.yaml").write_text("# @package data\n")
    words.append("config_dir=mine")
    code, said = cluster.run([{"code": 0}], *IMAGE, *words)
    assert code == 0, said
    line = cluster.sruns()[1]
    for key, path in (("data.folder", "records"), ("rollout.python", "bin/python"), ("config_dir", "mine")):
        assert f" {key}={cluster.folder / path}" in line


@pytest.mark.parametrize(
    ("override", "mount"),
    [
        ("pretrained_checkpoint.restore_from_path=models/r1", "models"),
        ("pretrained_checkpoint.restore_from_path=/scratch/r1", "/scratch"),
        ("data=prorl", "prepared"),
        ("trainer.grpo.loss=/home/me/mine.py:f", "/home/me"),
        ("config_dir=/home/me/conf", "/home/me/conf"),
        ("data.train=[{name: a, path: /data/a.jsonl}, {name: b, path: /home/me/b.jsonl}]", "/home/me"),
        ("trainer.resets.rules.asks=[kl_spike,/home/me/mine.py:short]", "/home/me"),
    ],
)
def test_a_path_under_no_mount_is_named_with_the_mounts(cluster: Cluster, override: str, mount: str) -> None:
    cluster.code = QUICK
    (cluster.folder / "models").mkdir()  # so it is no name on the hub
    code, said = cluster.run([{"code": 0}], *IMAGE, override)
    assert code == 2
    place = cluster.folder / mount
    assert "expected a path under a mount of the container; the mounts are /lustre:/lustre,/data. Fix:" in said
    assert f"--container-mounts={place}:{place}" in said
    assert len([line for line in cluster.sruns() if "nemo_prorl.launcher.node" in line]) == 0


def test_paths_under_a_mount_or_in_the_image_are_no_matter(cluster: Cluster) -> None:
    words = ["data.folder=/data/prepared", "rollout.python=/opt/nemo_prorl/.venv/rollout/bin/python"]
    words += ["pretrained_checkpoint.restore_from_path=null", "run_dir=/lustre/run", "--dry-run"]
    words += ["trainer.grpo.loss=gspo"]
    cluster.words = [word for word in cluster.words if not word.startswith("run_dir=")]
    code, said = cluster.run([{"code": 0}], *IMAGE, *words)
    assert (code, "expected a path" in said) == (0, False)


def dry_run(*words: str) -> list[str]:
    script = str(ROOT / "slurm" / "stage.sbatch")
    done = subprocess.run(["bash", script, *words, "--dry-run"], capture_output=True, text=True, check=True)
    return shlex.split(done.stdout)


def test_the_dry_run_of_the_script_needs_no_slurm_and_shows_the_container() -> None:
    words = dry_run("run1", "cluster=slurm_dev", "--container-image=/images/prorl.sqsh", "--container-mounts=/lustre")
    for word in ("--container-image=/images/prorl.sqsh", "--container-mounts=/lustre", "--no-container-mount-home"):
        assert word in words
    assert "--container-workdir=/opt/nemo_prorl" in words
    assert words[words.index("-m") - 1] == "python3"
    assert {"stage=run1", f"run_dir={ROOT / 'runs/prorl/run1'}"} <= set(words)


@pytest.mark.parametrize(("data", "warned"), [("domains", False), ("prorl", True)])
def test_the_dry_run_names_the_data_folder_only_if_the_run_reads_it(data: str, warned: bool, tmp_path: Path) -> None:
    touch_prepared(tmp_path / "prepared")
    words = ["run1", "cluster=slurm_dev", f"data={data}", f"data.folder={tmp_path / 'prepared'}"]
    words += ["data.max_prompt_tokens=null"]
    words += ["--container-image=/images/prorl.sqsh", f"--container-mounts={ROOT}", "--dry-run"]
    command = ["bash", str(ROOT / "slurm" / "stage.sbatch"), *words]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert ("expected a path under a mount" in done.stdout + done.stderr) is warned, done.stdout + done.stderr
    assert "nemo_prorl.launcher.node" in done.stdout, done.stderr  # the needs were read


@pytest.mark.parametrize("cluster", ["h100_1x8", pytest.param("gpu_1", marks=pytest.mark.slow)])
def test_a_stage_on_one_node_starts_one_supervisor(cluster: str, tmp_path: Path) -> None:
    run = f"run_dir={tmp_path}"  # not the default, which has the laptop's run after `make train`
    words = dry_run("none", run, f"cluster={cluster}", "data=laptop", "pretrained_checkpoint.restore_from_path=null")
    assert {"--nodes=1", "--ntasks=1", f"cluster={cluster}"} <= set(words)
    assert words[words.index("nemo_prorl.launcher.node") + 1] == "--nodes=1"


def test_a_saved_run_has_the_configuration_of_its_folder(tmp_path: Path) -> None:
    """`saved` in place of a stage, as `prorl fork --sbatch` submits its arms."""
    assert sorted(submission.GROUPS) == sorted(path.name for path in (ROOT / "conf").iterdir() if path.is_dir())
    run = f"run_dir={tmp_path}"
    saved = settings.load([run, "cluster=slurm_dev", "data=laptop", "trainer.num_nodes=3", "rollout.engines=3"])
    (tmp_path / "config.yaml").write_text(settings.resolved_yaml(saved))
    words = dry_run("saved", run)
    assert "--nodes=3" in words
    assert words[-1] == run
    for wrong, told in (
        ([], "saved: expected run_dir=FOLDER"),
        ([f"run_dir={tmp_path / 'other'}"], "other/config.yaml, the configuration of a run; there is no such file"),
        ([run, "cluster=laptop"], "saved: cluster=laptop would choose another configuration. Fix: leave it out"),
    ):
        script = ["bash", str(ROOT / "slurm" / "stage.sbatch"), "saved", *wrong, "--dry-run"]
        done = subprocess.run(script, capture_output=True, text=True, check=False)
        assert (done.returncode, told in done.stderr) == (2, True), done.stderr


def test_the_script_s_python_may_be_an_old_one() -> None:
    """Outside a container it is the node's own: 3.9's grammar, annotations unevaluated, the standard library alone."""
    files = [ROOT / "nemo_prorl" / name for name in ("__init__.py", "errors.py", "launcher/__init__.py")]
    own = ("slurm_driver.py", "submission.py", "slurm_queries.py", "launches.py", "srun_step.py", "peers.py")
    files += [ROOT / "nemo_prorl" / "launcher" / name for name in own]
    files += [ROOT / "nemo_prorl" / name for name in ("schema.py", "launcher/formats.py", "deadlines.py", "files.py")]
    for file in files:
        tree = ast.parse(file.read_text(), feature_version=(3, 9))
        for node in [node for node in ast.walk(tree) if isinstance(node, ast.If)]:
            if ast.unparse(node.test) == "TYPE_CHECKING":
                node.body = []
        imports = [node for node in ast.walk(tree) if isinstance(node, ast.Import | ast.ImportFrom)]
        names = {alias.name for node in imports if isinstance(node, ast.Import) for alias in node.names}
        names |= {str(node.module) for node in imports if isinstance(node, ast.ImportFrom)}
        assert {name for name in names if name.split(".")[0] not in sys.stdlib_module_names} <= {
            "nemo_prorl.errors",
            "nemo_prorl.schema",
            "nemo_prorl.launcher.formats",
            "nemo_prorl.deadlines",
            "nemo_prorl.files",
            "nemo_prorl.launcher.launches",
            "nemo_prorl.launcher.peers",
            "nemo_prorl.launcher.srun_step",
            "nemo_prorl.launcher.submission",
            "nemo_prorl.launcher.slurm_queries",
        }
        assert not imports or "__future__" in names, file


def test_a_sigterm_after_the_first_query_is_obeyed(cluster: Cluster) -> None:
    """It comes while the driver reads why the run stopped, when the state of the job is already known."""
    cluster.code += "import os, signal\n"
    cluster.code += "put('out_of_time', lambda self: (os.kill(os.getpid(), signal.SIGTERM), True)[1], s.Driver)\n"
    code, log = cluster.run([{"code": 75}])
    assert code == 75
    assert "attempt 1 ended with exit code 75; Slurm ends this start of the job, and may requeue it" in log
    assert cluster.launches() == [(1, 75, "give_up")]
    assert cluster.asked() == []


def test_a_sigterm_while_it_decides_is_obeyed(cluster: Cluster) -> None:
    """It comes while Slurm is asked how things stand, and Slurm still says RUNNING."""
    cluster.code += """
import os, signal
before = s.Job.state
def state(self):
    found = before(self)
    if os.path.exists("over"): os.kill(os.getpid(), signal.SIGTERM)
    return found
put("state", state, s.Job)
"""
    process = cluster.start([{"code": 75, "waits": True}])
    Deadline(30, "the run to be under way").wait_until((cluster.folder / "waiting").exists)
    (cluster.folder / "over").touch()
    process.send_signal(signal.SIGUSR1)
    process.communicate(timeout=30)
    assert cluster.launches() == [(1, 75, "give_up")]
    assert cluster.asked() == []


@pytest.mark.parametrize("field", ["Restarts=0>Restarts=1", "BatchHost=localhost>BatchHost=elsewhere"])
def test_a_start_that_slurm_has_given_up_ends_what_it_runs_and_touches_nothing(cluster: Cluster, field: str) -> None:
    """slurmd of this node is gone, Slurm has started the job elsewhere, and this start of it still lives."""
    process = cluster.start([{"code": 0, "waits": True}])
    Deadline(30, "the run to be under way").wait_until((cluster.folder / "waiting").exists)
    (cluster.folder / "job.txt").write_text(changed(field))
    process.communicate(timeout=30)
    assert cluster.launches() == [(1, 1, "give_up")]
    assert cluster.asked() == []
    assert len(cluster.sruns()) == 1


def test_a_run_that_does_not_stop_in_time_is_ended_and_requeued(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SLURM_JOB_END_TIME", str(int(time.time()) + 6))
    process = cluster.start([{"code": 75, "hangs": True}])
    Deadline(30, "the run to be under way").wait_until((cluster.folder / "waiting").exists)
    process.send_signal(signal.SIGUSR1)
    process.communicate(timeout=30)
    assert cluster.launches() == [(1, 1, "requeue")]
    assert cluster.asked() == ["requeue 17"]


def test_supervisors_that_never_begin_are_a_failed_attempt(cluster: Cluster) -> None:
    cluster.code += "put('_REACH_S', 1.0)\n"
    code, said = cluster.run([{"code": 0, "deaf": True}])
    assert code == 1
    assert cluster.launches() == [(1, 1, "again"), (2, 1, "again"), (3, 1, "again")]
    assert "the supervisors of 2 of 2 nodes (a, b) have not begun within 1 s" in said


def test_the_only_supervisor_that_does_not_begin_names_the_node_to_blame(cluster: Cluster) -> None:
    cluster.code += "put('_REACH_S', 3.0)\n"
    cluster.run([{"code": 0, "deaf": "b"}, {"code": 0}])
    lines = [json.loads(line) for line in (cluster.folder / "run" / "launches.jsonl").read_text().splitlines()]
    assert (lines[1]["host"], lines[1]["next"]) == ("b", "again")
    assert "the supervisors of 1 of 2 nodes (b)" in lines[1]["what"]


def test_attempts_that_cannot_be_written_down_are_counted_too(cluster: Cluster) -> None:
    (cluster.folder / "run" / "launches.jsonl").mkdir(parents=True)
    assert cluster.run([{**CRASH, "host": ""}])[0] == 1
    attempts = [word for line in cluster.sruns() for word in line.split() if word.startswith("--attempt=")]
    assert attempts == [f"--attempt=17.0.{k}" for k in (1, 2, 3)]  # otherwise a node takes old files for new ones


def test_a_requeue_that_slurm_does_not_take_is_tried_again(cluster: Cluster, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SLURM_JOB_END_TIME", str(int(time.time()) + 300))
    refusing = (
        SCONTROL + 'if sys.argv[1] == "requeue" and len(open("slurm.txt").read().split("requeue")) < 4: sys.exit(1)\n'
    )
    (cluster.folder / "bin" / "scontrol").write_text(f"{BARE}\n{refusing}")
    process = cluster.start([{"code": 75, "waits": True}])
    Deadline(30, "the run to be under way").wait_until((cluster.folder / "waiting").exists)
    process.send_signal(signal.SIGUSR1)
    process.communicate(timeout=30)
    assert cluster.asked() == ["requeue 17"] * 3


def test_a_run_that_stops_for_its_own_time_limit_is_requeued(cluster: Cluster) -> None:
    (cluster.folder / "run").mkdir()
    reason = "60 s are left of the job (trainer.deadlines.job_s=3600): the rollout was abandoned"
    dropped = {"event": "control", "status": "dropped"}  # a request that the run did not serve
    write_lines(cluster.folder / "run" / "journal.jsonl", [{"event": "stop", "reason": reason}, dropped])
    assert cluster.run([{"code": 75}])[0] == 75
    assert cluster.asked() == ["requeue 17"]


@pytest.mark.parametrize(
    ("told", "least"), [("64(x4)", 64), ("64(x3),32", 32), ("8", 8), ("", None), ("16,128(x2)", 16)]
)
def test_every_node_has_so_many_processors(told: str, least: int | None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SLURM_JOB_CPUS_PER_NODE", told)
    assert Job().cpus() == least


def test_a_name_on_the_hub_is_no_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from nemo_prorl.launcher.submission import with_absolute_path

    monkeypatch.chdir(tmp_path)
    key = "pretrained_checkpoint.restore_from_path"
    assert with_absolute_path(f"{key}=Qwen/Qwen2.5-0.5B@main") == f"{key}=Qwen/Qwen2.5-0.5B@main"
    (tmp_path / "Qwen").mkdir()
    assert with_absolute_path(f"{key}=Qwen/Qwen2.5-0.5B") == f"{key}={tmp_path}/Qwen/Qwen2.5-0.5B"
    assert with_absolute_path("config_dir=~/conf") == f"config_dir={Path.home()}/conf"


@pytest.mark.parametrize("key", ["trainer.grpo.loss", "rewards.functions.units", "trainer.resets.rules.asks"])
@pytest.mark.parametrize(
    ("value", "absolute"),
    [
        ("mine.py:f", "HERE/mine.py:f"),
        ("a b/mine.py:f", "HERE/a b/mine.py:f"),
        ("/c++/mine.py:f", "/c++/mine.py:f"),
        ("${oc.env:USER}/mine.py:f", "${oc.env:USER}/mine.py:f"),
        ("gspo", "gspo"),
        ("package.module:f", "package.module:f"),
        ("a.py:f*0.9 + ../b.py:g*0.1", "HERE/a.py:f*0.9 + PARENT/b.py:g*0.1"),
        ("/x/a.py:f + b.py:g", "/x/a.py:f + HERE/b.py:g"),
        ("'a.py:f + b.py:g'", "'HERE/a.py:f + HERE/b.py:g'"),
        ("[kl_spike,mine.py:short, 'd/e.py:f']", "[kl_spike,HERE/mine.py:short, 'HERE/d/e.py:f']"),
        ("[mine.py:short]", "[HERE/mine.py:short]"),
        ("~/a.py:f*0.9 + ~/b.py:g", "HOME/a.py:f*0.9 + HOME/b.py:g"),
    ],
)
def test_files_of_own_functions_count_from_where_sbatch_was_called(
    key: str, value: str, absolute: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from nemo_prorl.launcher.submission import with_absolute_path

    monkeypatch.chdir(tmp_path)
    absolute = absolute.replace("HERE", str(tmp_path)).replace("PARENT", str(tmp_path.parent))
    assert with_absolute_path(f"{key}={value}") == f"{key}={absolute.replace('HOME', str(Path.home()))}"


@pytest.mark.parametrize("key", ["data.train", "data.validation"])
def test_files_of_records_count_from_where_sbatch_was_called(
    key: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from nemo_prorl.launcher.submission import with_absolute_path

    monkeypatch.chdir(tmp_path)
    value = f"{key}=[{{name: a, path: x/a.jsonl, size: 3}}, {{path: 'b.jsonl'}},{{path: null}}, {{path: /x/c.jsonl}}]"
    expected = value.replace("x/a", f"{tmp_path}/x/a").replace("b.jsonl", f"{tmp_path}/b.jsonl")
    assert with_absolute_path(value) == expected
    assert with_absolute_path(f"{key}=[]") == f"{key}=[]"


def test_a_run_directory_that_an_override_cannot_name_is_refused(cluster: Cluster) -> None:
    code, said = cluster.run([{"code": 0}], "run_dir=runs/a,b")
    assert (code, "runs/a,b: ',' has another meaning in an override. Fix: choose another folder" in said) == (2, True)


def test_an_own_file_may_set_the_data_folder_of_a_container(cluster: Cluster) -> None:
    """Otherwise the script names the default folder, whose path inside the image is another."""
    for words, named in (([], True), (["config_dir=/lustre/conf"], False)):
        code, _ = cluster.run([{"code": 0}], *IMAGE, *words)
        started = [line for line in cluster.sruns() if "nemo_prorl.launcher.node" in line][-1]
        assert (code, f"data.folder={cluster.folder}/prepared" in started) == (0, named)
