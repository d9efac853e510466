"""What `slurm/stage.sbatch` runs on the job's first node: starts the node supervisors, and decides what follows an end.

    slurm.py STAGE [--container-image IMG] [--container-mounts A:B] [--dry-run] [OVERRIDE ...]

The cluster is h100_4x8 unless cluster=... says otherwise.

0, 2, 3, 4            the job ends so; of 3, a node that is not fit is left out and the job requeued, where others are
a crash               again in this allocation, at most `launch.attempts` times in a row without a new checkpoint
USR1, preemption      the run is asked to stop; the job is requeued when it has
a lost node           Slurm requeues the job itself; where it has not noticed, we do, without that node
`prorl control stop`  75
scancel               nothing is requeued: from a SIGTERM on, this process starts nothing and asks Slurm for nothing

RUN/launches.jsonl tells each attempt's beginning and end.  Standard library only, Python 3.9 at least: where the run is
in a container this is outside of it.
"""

from __future__ import annotations

import argparse
import json
import os
import secrets
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any, NoReturn

ROOT = Path(__file__).resolve().parent.parent.parent
if not __package__:  # started by path: this folder's module names must not shadow anybody's
    sys.path[0] = str(ROOT)

from nemo_prorl.deadlines import Deadline  # noqa: E402
from nemo_prorl.errors import DeadlineExceeded, ProrlError  # noqa: E402
from nemo_prorl.launcher.link import STARTER, Line, join  # noqa: E402

OWN_PYTHON = str(ROOT / ".venv" / "train" / "bin" / "python")
IN_CONTAINER = "/opt/nemo_prorl"  # where the Dockerfile puts the project
CLUSTER = "h100_4x8"  # what sbatch's lines ask for, where no cluster=... is given
STOPPED = 75
_SHOWN = ("NCCL_", "TORCH_NCCL_", "GLOO_", "UCX_", "FI_", "CUDA_", "NVTE_", "OMP_", "PRORL_", "SLURM_TOPOLOGY")
_NOT_SHOWN = ("PRORL_LINK_TOKEN",)
_SRUN_ENDS_S = 90.0  # after the leader told how the run ended
_LAST_WORDS_S = 10.0  # for what the leader said last to arrive
_LOCK_WAIT_S = 120.0  # for what is left of an earlier attempt to leave the run directory
_PROBE_S = 60.0  # for every node to start something
_REQUEUED_S = 300.0  # to be ended by Slurm after a requeue


class Unfit(ProrlError):
    """The allocation is not what the configuration asks for."""

    exit_code = 3


def say(text: str) -> None:
    sys.stderr.write(f"{time.strftime('%Y-%m-%d %H:%M:%S')} {text}\n")
    sys.stderr.flush()


def arguments(argv: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="stage.sbatch", description="A stage of the run as a Slurm job.")
    parser.add_argument("stage", metavar="STAGE", help="run1 ... run8, or none")
    parser.add_argument("overrides", metavar="OVERRIDE", nargs="*", help="KEY=VALUE, as for prorl train")
    parser.add_argument("--container-image", default=os.environ.get("PRORL_CONTAINER_IMAGE"), help="for pyxis")
    parser.add_argument("--container-mounts", default=os.environ.get("PRORL_CONTAINER_MOUNTS"), metavar="A:B,...")
    parser.add_argument("--python", help="with our packages; default: .venv/train's, in a container python3")
    parser.add_argument("--dry-run", action="store_true", help="say what would be started, and start nothing")
    args, rest = parser.parse_known_args(argv)
    if wrong := [word for word in rest if word.startswith("-")]:
        parser.error(f"unrecognized arguments: {' '.join(wrong)}; sbatch's own flags stand before the script's name")
    args.overrides += rest
    if "=" in args.stage:
        parser.error(f"{args.stage}: the stage comes first, such as run1; none for a run that is no stage")
    return args


class Job:
    """The Slurm job that this is, or would be."""

    def __init__(self) -> None:
        env = os.environ
        self.id = env.get("SLURM_JOB_ID", "")
        self.restart = int(env.get("SLURM_RESTART_COUNT") or 0)
        self.host = env.get("SLURMD_NODENAME") or socket.gethostname()
        self.nodes = _hosts(env.get("SLURM_JOB_NODELIST", ""))
        self.partition = env.get("SLURM_JOB_PARTITION", "")

    def field(self, name: str) -> str:
        """A field of `scontrol show job`; empty where it cannot be had."""
        return _field(_output(["scontrol", "-o", "show", "job", self.id]), name)

    def spare(self, without: list[str]) -> bool:
        """Whether the partition has enough nodes that work, busy or not, without these."""
        listed = _output(["sinfo", "-h", "-N", "-p", self.partition, "-o", "%N %T"]).split("\n")
        bad = ("down", "drain", "fail", "maint", "unk", "power")
        able = {line.split()[0] for line in listed if line.strip() and not line.split()[1].startswith(bad)}
        able = {host for host in able if host not in without}
        return len(able) >= len(self.nodes)

    def exclude(self, host: str) -> bool:
        """Whether the job will not get this node again."""
        before = [] if (now := self.field("ExcNodeList")) in ("", "(null)") else [now]
        return _call(["scontrol", "update", f"JobId={self.id}", f"ExcNodeList={','.join([*before, host])}"])

    def requeue(self) -> bool:
        return _call(["scontrol", "requeue", self.id])


def _field(text: str, name: str) -> str:
    for word in text.split():
        if word.startswith(name + "="):
            return word.split("=", 1)[1]
    return ""


def _hosts(nodelist: str) -> list[str]:
    return _output(["scontrol", "show", "hostnames", nodelist]).split() if nodelist else []


def _output(command: list[str]) -> str:
    try:
        done = subprocess.run(
            command, check=False, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, timeout=60, text=True
        )
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout if done.returncode == 0 else ""


def _call(command: list[str]) -> bool:
    try:
        done = subprocess.run(
            command, check=False, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, timeout=60, text=True
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        say(f"{shlex.join(command)}: {error}")
        return False
    if done.returncode:
        say(f"{shlex.join(command)}: {done.stdout.strip()}")
    return done.returncode == 0


class Driver:
    """One job from its start to its end or requeue."""

    def __init__(self, args: argparse.Namespace) -> None:
        self.args, self.job = args, Job()
        folder = f"runs/prorl/{args.stage}" if args.stage != "none" else "runs/laptop"
        given = dict(text.partition("=")[::2] for text in args.overrides)
        self.run_dir = Path(given.get("run_dir", folder)).absolute()
        rest = [text for text in args.overrides if not text.startswith("run_dir=")]
        rest = rest if "cluster" in given else [f"cluster={CLUSTER}", *rest]
        self.overrides = [f"stage={args.stage}", f"run_dir={self.run_dir}", *rest]
        self.asked: str | None = None  # to stop, and why
        self.ended = False  # by Slurm: a SIGTERM came
        self.line: Line | None = None
        self.plan: dict[str, Any] = {}

    # --- commands --------------------------------------------------------------------------------------------------

    def python(self) -> list[str]:
        if self.args.python:
            return [str(self.args.python)]
        return ["python3"] if self.args.container_image else [OWN_PYTHON]

    def srun(self, nodes: int) -> list[str]:
        """One task a node with all of the node's processors, in the container where there is one."""
        command = ["srun", f"--nodes={nodes}", f"--ntasks={nodes}", "--ntasks-per-node=1", "--cpu-bind=none"]
        if cpus := os.environ.get("SLURM_CPUS_ON_NODE"):
            command.append(f"--cpus-per-task={cpus}")
        command += ["--mpi=none", "--export=ALL"]
        if image := self.args.container_image:
            command += [f"--container-image={image}", f"--container-workdir={IN_CONTAINER}"]
            command += ["--no-container-mount-home"]
            if self.args.container_mounts:
                command.append(f"--container-mounts={self.args.container_mounts}")
        return command

    def node_command(self, port: int) -> list[str]:
        wait = _LOCK_WAIT_S if self.job.restart or len(self.begun()) > 1 else 0.0  # this one has begun already
        command = [*self.srun(self.plan["num_nodes"]), "--kill-on-bad-exit=1", "--unbuffered", *self.python()]
        command += ["-m", "nemo_prorl.launcher.node", "--starter", f"--nodes={self.plan['num_nodes']}"]
        command += [f"--leader={self.job.host}:{port}", f"--silence-s={self.plan['node_s']:g}"]
        return [*command, f"--join-s={self.plan['startup_s']:g}", f"--lock-wait-s={wait:g}", *self.overrides]

    def load_plan(self) -> None:
        """What the configuration says of the job.  Ends this process where it is wrong."""
        ask = ["-m", "nemo_prorl.launcher.allocation", *self.overrides]
        if self.args.container_image and not self.args.dry_run:
            command, env = [*self.srun(1), *self.python(), *ask], dict(os.environ)
        else:
            python = self.args.python or OWN_PYTHON
            if not shutil.which(python):
                raise Unfit(f"{python} is not there: make setup makes it; or --container-image=IMAGE after the stage")
            command, env = [python, *ask], with_path()
        done = subprocess.run(command, check=False, stdout=subprocess.PIPE, env=env, text=True)
        if done.returncode:
            raise SystemExit(done.returncode)
        self.plan = json.loads(done.stdout.splitlines()[-1])

    # --- checks ----------------------------------------------------------------------------------------------------

    def check_allocation(self) -> None:
        """Raises Unfit unless the job has what the configuration asks for."""
        wanted, devices, found = self.plan["num_nodes"], self.plan["devices"], len(self.job.nodes)
        if not self.job.id:
            raise Unfit("this is no Slurm job: start it with sbatch, or look at it with --dry-run")
        if not shutil.which("srun"):
            raise Unfit(
                "srun is not here: where this script runs in a container, give the image to the script, not to sbatch:"
                " sbatch slurm/stage.sbatch STAGE --container-image=IMAGE"
            )
        if found != wanted:
            raise Unfit(
                f"the job has {found} nodes, trainer.num_nodes={wanted}: sbatch --nodes={wanted} ..., or the override"
                f" trainer.num_nodes={found} with rollout.engines to fit"
            )
        gpus = _gpus_on_node()
        if self.plan["accelerator"] == "gpu" and gpus < devices:
            raise Unfit(
                f"the job has {gpus} GPUs a node, trainer.devices={devices}: sbatch --gpus-per-node={devices} ..., or"
                f" the override trainer.devices={gpus or 'N'}"
            )

    def show(self) -> None:
        job, plan = self.job, self.plan
        say(f"job {job.id or '-'}, start {job.restart + 1}, nodes {' '.join(job.nodes) or '-'}")
        say(f"run directory {self.run_dir}; {plan['num_nodes']} nodes x {plan['devices']} {plan['accelerator']}")
        image = self.args.container_image
        say(f"container {image}, mounts {self.args.container_mounts or 'none'}" if image else "no container")
        for name, value in plan["env"].items():
            mine = os.environ.get(name)
            say(f"environment {name}={value if mine is None else f'{mine}, which wins over launch.env.{name}={value}'}")
        for name, value in sorted(os.environ.items()):
            if name.startswith(_SHOWN) and name not in plan["env"] and name not in _NOT_SHOWN:
                say(f"environment {name}={value}, from the job's own")
        if plan["accelerator"] == "gpu" and (text := _output(["nvidia-smi", "topo", "-m"])):
            say(f"topology of {job.host}:\n{text.rstrip()}")

    # --- the record of attempts ------------------------------------------------------------------------------------

    @property
    def launches(self) -> Path:
        return self.run_dir / "launches.jsonl"

    def record(self, event: str, attempt: int, **fields: Any) -> None:
        self.run_dir.mkdir(parents=True, exist_ok=True)
        told = {"event": event, "job": self.job.id, "restart": self.job.restart, "attempt": attempt}
        told.update(nodes=self.job.nodes, step=self.step(), time=round(time.time(), 3), **fields)
        try:
            with self.launches.open("a") as file:
                file.write(json.dumps(told) + "\n")
        except OSError as error:  # a full disk must not end what still runs
            say(f"{self.launches} cannot be written: {error}")

    def begun(self) -> list[dict[str, Any]]:
        return [told for told in self.told() if told["event"] == "begin"]

    def told(self) -> list[dict[str, Any]]:
        """The lines of this job."""
        found = []
        try:
            lines = self.launches.read_text().splitlines()
        except OSError:
            return []
        for line in lines:
            try:
                told = json.loads(line)
            except ValueError:
                continue  # cut off by a full disk or a crash
            if told.get("job") == self.job.id:
                found.append(told)
        return found

    def step(self) -> int:
        """Of the newest complete checkpoint; -1 where there is none."""
        found = (self.run_dir / "checkpoints").glob("step-*")
        steps = [int(p.name[5:]) for p in found if p.name[5:].isdigit() and (p / "state.json").is_file()]
        return max(steps, default=-1)

    def fruitless(self) -> int:
        """How many attempts in a row, up to now, began where the run still stands."""
        count, now = 0, self.step()
        for begun in reversed(self.begun()):
            if begun["step"] != now:
                break
            count += 1
        return count

    # --- the job ---------------------------------------------------------------------------------------------------

    def run(self) -> int:
        self.load_plan()
        self.show()
        if self.args.dry_run:
            sys.stdout.write(shlex.join(self.node_command(port=0)) + "\n")
            return 0
        self.check_allocation()
        signal.signal(signal.SIGUSR1, self.on_usr1)
        signal.signal(signal.SIGTERM, self.on_term)
        while True:
            if self.fruitless() >= self.plan["attempts"]:
                return self.give_up()
            attempt = len(self.begun()) + 1
            self.record("begin", attempt)
            outcome = self.attempt()
            following, code = self.decide(outcome)
            fields = {key: outcome.get(key) or None for key in ("host", "process", "status")}
            self.record("end", attempt, code=outcome["code"], what=outcome["what"], next=following, **fields)
            say(f"attempt {attempt} ended with {outcome['code']} {outcome['what']}: {following}")
            if following == "requeue":
                self.requeue_and_wait()
            if following != "again":
                return code
            self.pause()

    def on_usr1(self, *_: Any) -> None:
        self.ask("SIGUSR1: the time limit is near")

    def on_term(self, *_: Any) -> None:
        self.ended = True
        self.ask("SIGTERM: Slurm ends the job")

    def ask(self, reason: str) -> None:
        """Asks the run to stop, now or as soon as it can be reached."""
        if self.asked is None:
            say(f"{reason}; the run is asked to stop")
            self.asked = reason
            if self.line is not None:  # in a thread: a signal handler must not wait for a lock that it may hold
                threading.Thread(target=self.line.send, args=("stop",), kwargs={"reason": reason}, daemon=True).start()

    def attempt(self) -> dict[str, Any]:
        """Starts the nodes once and waits for their end."""
        token, port = secrets.token_urlsafe(32), _free_port()
        self.line = None
        srun = subprocess.Popen(self.node_command(port), env=self.environment(token), stdin=subprocess.DEVNULL)
        joined = threading.Thread(target=self._join, args=(port, token, srun), daemon=True)
        joined.start()
        outcome: dict[str, Any] | None = None
        while srun.poll() is None:
            time.sleep(0.2)
            line = self.line
            if line is None or outcome is not None:
                continue
            outcome = self._outcome(line)
            if outcome is None and line.lost is not None:
                outcome = self._outcome(line) or {"code": 1, "what": f"the leader was lost: {line.lost}"}
                outcome.setdefault("host", self.job.host)
            if outcome is not None:
                end_by = threading.Timer(_SRUN_ENDS_S, _end, [srun])
                end_by.daemon = True
                end_by.start()
        end, line = time.monotonic() + _LAST_WORDS_S, self.line
        while outcome is None and line is not None and time.monotonic() < end:
            gone = line.lost is not None  # looked at first: what it said last is there then
            outcome = self._outcome(line)
            if gone:
                break
            time.sleep(0.05)
        if line is not None:
            line.close()
        self.line = None
        return outcome or {"code": 1, "what": f"srun ended with status {srun.returncode} before the nodes had met"}

    def environment(self, token: str) -> dict[str, str]:
        return {**(os.environ if self.args.container_image else with_path()), "PRORL_LINK_TOKEN": token}

    def _join(self, port: int, token: str, srun: subprocess.Popen[bytes]) -> None:
        while srun.poll() is None:
            try:
                deadline = Deadline(5.0, "the leader")
                line = join(self.job.host, port, token, STARTER, self.job.host, self.plan["node_s"], deadline)
            except DeadlineExceeded:
                continue
            self.line = line
            if self.asked is not None:
                line.send("stop", reason=self.asked)
            return

    @staticmethod
    def _outcome(line: Line) -> dict[str, Any] | None:
        return next((m for m in line.messages() if m["kind"] == "outcome"), None)

    # --- what follows ----------------------------------------------------------------------------------------------

    def decide(self, outcome: dict[str, Any]) -> tuple[str, int]:
        """(done | again | requeue | give_up, this job's exit code)."""
        code, host = outcome["code"], outcome.get("host") or ""
        if code == 0:
            return "done", 0
        if self.ended or self.job.field("JobState") not in ("RUNNING", ""):
            return "give_up", STOPPED if code == STOPPED else 1  # Slurm has decided already
        if self.asked is not None or self.preempted():
            return "requeue", STOPPED
        if code == STOPPED:
            return "give_up", STOPPED
        if code in (2, 4):
            return "give_up", code
        blamed = self.blamed(host)
        if code == 3 or blamed:
            if host and self.job.spare([host]) and self.job.exclude(host):
                say(f"{host} is left out from now on: {outcome['what']}")
                return "requeue", code
            return ("give_up", 3) if code == 3 else ("again", 1)
        return "again", 1

    def preempted(self) -> bool:
        return self.job.field("PreemptTime") not in ("", "None", "N/A")

    def blamed(self, host: str) -> bool:
        """Whether this node ended the attempt before, too, or cannot start anything now."""
        if not host:
            return False
        ends = [told for told in self.told() if told["event"] == "end" and told["restart"] == self.job.restart]
        return bool(ends and ends[-1]["host"] == host) or not self.starts(host)

    def starts(self, host: str) -> bool:
        """Whether a node starts a program."""
        probe = ["srun", "--nodes=1", "--ntasks=1", f"--nodelist={host}", "--overlap", "--mpi=none", "true"]
        try:
            return subprocess.run(probe, check=False, stdin=subprocess.DEVNULL, timeout=_PROBE_S).returncode == 0
        except subprocess.TimeoutExpired:
            return False

    def pause(self) -> None:
        """The longer the more often it failed where it stands; shorter where somebody asks to stop."""
        end = time.monotonic() + min(60.0, 5.0 * 2.0 ** self.fruitless())
        while time.monotonic() < end and not self.ended:
            time.sleep(0.2)

    def give_up(self) -> int:
        ends = [told for told in self.told() if told["event"] == "end"]
        last = f"; the last one ended so: {ends[-1]['what']}" if ends else ""
        say(
            f"{self.fruitless()} attempts in a row made no new checkpoint after step {self.step()} (launch.attempts):"
            f" the job ends{last}. Its logs are in {self.run_dir / 'logs'}"
        )
        return 1

    def requeue_and_wait(self) -> None:
        """Slurm ends this process when it requeues the job."""
        if self.job.requeue():
            end = time.monotonic() + _REQUEUED_S
            while time.monotonic() < end and not self.ended:
                time.sleep(0.2)
        else:
            say("the job could not be requeued; the same sbatch command goes on from here")


def with_path() -> dict[str, str]:
    """The environment of a Python that imports this very project."""
    return {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))}


def _end(process: subprocess.Popen[bytes]) -> None:
    """srun that outlives the run, as with a node that does not answer."""
    say("srun has not ended; it is ended")
    for number, seconds in ((signal.SIGTERM, 15.0), (signal.SIGKILL, 5.0)):
        process.send_signal(number)
        try:
            process.wait(seconds)
            return
        except subprocess.TimeoutExpired:
            continue


def _gpus_on_node() -> int:
    """As Slurm tells a batch script."""
    if (count := os.environ.get("SLURM_GPUS_ON_NODE", "")).isdigit():
        return int(count)
    return len([d for d in os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",") if d])


def _free_port() -> int:
    with socket.socket() as s:
        s.bind(("", 0))
        port: int = s.getsockname()[1]
        return port


def main() -> NoReturn:
    try:
        code = Driver(arguments(sys.argv[1:])).run()
    except ProrlError as error:
        say(f"stage.sbatch: {error}")
        code = error.exit_code
    sys.exit(code)


if __name__ == "__main__":
    main()
