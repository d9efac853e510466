"""Run a stage as a Slurm job: start the supervisors of all nodes, and decide what follows each end of the run.

`slurm/stage.sbatch` runs this on the first node of the job.

    slurm.py STAGE [--container-image IMG] [--container-mounts A:B] [--dry-run] [OVERRIDE ...]

The cluster is h100_4x8 unless cluster=... says otherwise.

0, 2, 3, 4            the job ends with this code; after 3 it is requeued without the unfit node, if others are there
a crash               starts again in this allocation, at most `launch.attempts` times in a row without a new checkpoint
USR1, preemption      the run is asked to stop; the job is requeued when the run has ended, or when time runs out
a lost node           Slurm requeues the job; a node that fails twice in a row, or starts nothing, is left out
`prorl control stop`  the job ends with 75
scancel               nothing is requeued: after a SIGTERM this process starts nothing and asks Slurm for nothing
requeued by Slurm     this start of the job is a ghost, and ends

RUN/launches.jsonl records the beginning and the end of each attempt.  Standard library only, Python 3.9 at least: this
runs outside the container that the run may be in.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any, NoReturn

ROOT = Path(__file__).absolute().parent.parent.parent  # of the link nemo_prorl/launcher
if not __package__:  # started by path: this folder's module names must not shadow anybody's
    sys.path[0] = str(ROOT)

from nemo_prorl.errors import ProrlError  # noqa: E402
from nemo_prorl.launcher.launches import PREEMPTED, Launches  # noqa: E402
from nemo_prorl.launcher.slurm_job import Job, output, say  # noqa: E402
from nemo_prorl.launcher.step import Step  # noqa: E402

OWN_PYTHON = str(ROOT / ".venv" / "train" / "bin" / "python")
IN_CONTAINER = "/opt/nemo_prorl"  # where the Dockerfile puts the project
CLUSTER = "h100_4x8"  # what sbatch's lines ask for, where no cluster=... is given
STOPPED = 75
# Overrides that are paths.  Relative paths are made absolute here, because a container begins in another folder.
_PATHS = re.compile(
    r"pretrained_checkpoint\.restore_from_path|data\.folder|data\.(train|validation)\.\d+\.path|rollout\.python"
    r"|chain\.start_from"
)
_DATA = "prepared"  # data.folder, where no override names it
_ALL_ATTEMPTS = 10  # times launch.attempts: attempts in a row without a new checkpoint, whatever ended them
_SHOWN = ("NCCL_", "TORCH_NCCL_", "GLOO_", "UCX_", "FI_", "CUDA_", "NVTE_", "OMP_", "PRORL_", "SLURM_TOPOLOGY")
_SRUN_ENDS_S = 90.0  # after node 0 said how the run ended
_LAST_WORDS_S = 10.0  # for the last lines to arrive after srun has ended
_LOCK_WAIT_S = 300.0  # for processes of an earlier attempt to leave the run directory
_REACH_S, _REACH_IMAGE_S = 300.0, 1800.0  # for all supervisors to begin; where an image is fetched first
_LOOK_S = 60.0  # between two checks that Slurm has not started the job elsewhere
_PATIENCE = 0.8  # share of the time between the signal and the job's end that the run has to stop
_REQUEUE_EVERY_S, _REQUEUED_S = 10.0, 300.0  # between two requests to requeue; for Slurm to end this process
_PLAN_TRIES, _PLAN_PAUSE_S = 3, 30.0  # attempts to start the project's Python


class Unfit(ProrlError):
    """The allocation differs from what the configuration needs."""

    exit_code = 3


def arguments(argv: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="stage.sbatch", description="A stage of the run as a Slurm job.")
    parser.add_argument("stage", metavar="STAGE", help="run1 ... run8, or none")
    parser.add_argument("overrides", metavar="OVERRIDE", nargs="*", help="KEY=VALUE, as for prorl train")
    parser.add_argument("--container-image", default=os.environ.get("PRORL_CONTAINER_IMAGE"), help="for pyxis")
    parser.add_argument("--container-mounts", default=os.environ.get("PRORL_CONTAINER_MOUNTS"), metavar="A:B,...")
    given = os.environ.get("PRORL_PYTHON")
    parser.add_argument("--python", default=given, help="with our packages; default: .venv/train's, or the image's")
    parser.add_argument("--dry-run", action="store_true", help="say what would be started, and start nothing")
    args, rest = parser.parse_known_args(argv)
    if wrong := [word for word in rest if word.startswith("-")]:
        parser.error(f"unrecognized arguments: {' '.join(wrong)}; sbatch's own flags stand before the script's name")
    args.overrides += rest
    if "=" in args.stage:
        parser.error(f"{args.stage}: the stage comes first, such as run1; none for a run that is no stage")
    return args


class Driver:
    """One job from its start to its end or requeue."""

    def __init__(self, args: argparse.Namespace) -> None:
        self.args, self.job = args, Job()
        folder = f"runs/prorl/{args.stage}" if args.stage != "none" else "runs/laptop"
        given = dict(text.partition("=")[::2] for text in args.overrides)
        self.run_dir = Path(given.get("run_dir", folder)).absolute()
        rest = [text for text in args.overrides if not text.startswith("run_dir=")]
        rest = [absolute(text) for text in (rest if "cluster" in given else [f"cluster={CLUSTER}", *rest])]
        if args.container_image and "data.folder" not in given:
            rest.append(absolute(f"data.folder={_DATA}"))
        self.overrides = [f"stage={args.stage}", f"run_dir={self.run_dir}", *rest]
        self.asked: str | None = None  # why the run is to stop
        self.ended = False  # Slurm ends the job: a SIGTERM came
        self.removed = False  # the container
        self.step: Step | None = None
        self.plan: dict[str, Any] = {}
        self.launches = Launches(self.run_dir, self.job)

    # --- commands --------------------------------------------------------------------------------------------------

    def python(self) -> list[str]:
        if self.args.python:
            return [str(self.args.python)]
        return ["python3"] if self.args.container_image else [OWN_PYTHON]

    def srun(self, nodes: int) -> list[str]:
        """Return an srun command of one task per node with all processors, in the container if there is one."""
        command = ["srun", f"--nodes={nodes}", f"--ntasks={nodes}", "--ntasks-per-node=1", "--cpu-bind=none"]
        if cpus := self.job.cpus():
            command.append(f"--cpus-per-task={cpus}")
        command += ["--mpi=none", "--export=ALL"]
        if image := self.args.container_image:
            command += [f"--container-image={image}", f"--container-workdir={IN_CONTAINER}"]
            command += ["--no-container-mount-home"]
            if self.job.id:  # made once per node and job; no_exec: each start gets mounts and namespaces of its own
                command.append(f"--container-name={self.job.container}:no_exec")
            if self.args.container_mounts:
                command.append(f"--container-mounts={self.args.container_mounts}")
            if ours := [name for name in os.environ if _is_shown(name)]:  # otherwise the image's values win
                command.append(f"--container-env={','.join(sorted(ours))}")
        return command

    def node_command(self, attempt: int) -> list[str]:
        """Return the command that starts the supervisors of all nodes."""
        wait = _LOCK_WAIT_S if self.job.restart or self.launches.begun_here > 1 else 0.0  # this attempt has begun
        command = [*self.srun(self.plan["num_nodes"]), "--kill-on-bad-exit=1", *self.python()]
        command += ["-m", "nemo_prorl.launcher.node", f"--nodes={self.plan['num_nodes']}", f"--run-dir={self.run_dir}"]
        command += [f"--attempt={self.job.id or '-'}.{self.job.restart}.{attempt}", f"--lock-wait-s={wait:g}"]
        if self.launches.file.is_file():  # the nodes must see it; otherwise another folder has this name in there
            command.append(f"--expect={self.launches.file}")
        return [*command, *self.overrides]

    def load_plan(self) -> None:
        """Read what the configuration needs of the job.  End this process if the configuration is wrong."""
        ask = ["-m", "nemo_prorl.launcher.allocation", *self.overrides]
        if self.args.container_image and not self.args.dry_run:
            command, env = [*self.srun(1), *self.python(), *ask], self.environment()
        else:
            python = self.args.python or OWN_PYTHON
            if not shutil.which(python):
                raise Unfit(f"{python} is not there: make setup makes it; or --container-image=IMAGE after the stage")
            command, env = [python, *ask], with_path()
        for more in reversed(range(_PLAN_TRIES)):
            done = subprocess.run(command, check=False, stdout=subprocess.PIPE, env=env, text=True)
            if done.returncode in (0, 2, 3, 4) or self.ended or not more:
                break
            say(f"{shlex.join(command)} ended with {done.returncode}; again in {_PLAN_PAUSE_S:g} s")
            self.wait(_PLAN_PAUSE_S)
        if done.returncode:
            self.warn_of_paths()
            raise SystemExit(done.returncode if done.returncode in (2, 3, 4) else 1)
        self.plan.update(json.loads(done.stdout.splitlines()[-1]))

    def warn_of_paths(self) -> None:
        """Name the paths that lie under no mount of the container: only the image or the site can provide them."""
        mounts = [word.split(":") for word in (self.args.container_mounts or "").split(",") if word]
        inside = [Path(mount[1] if len(mount) > 1 else mount[0]) for mount in mounts] + [Path(IN_CONTAINER)]
        for key, _, value in (text.partition("=") for text in self.overrides if self.args.container_image):
            path = Path(value)
            is_path = key == "run_dir" or (_PATHS.fullmatch(key) and value not in ("", "null"))
            if not is_path or any(mount in (path, *path.parents) for mount in inside):
                continue
            place = path if key in ("run_dir", "data.folder") else path.parent
            say(
                f"{key}={value}: expected a path under a mount of the container; the mounts are"
                f" {self.args.container_mounts or 'none'}. Fix: --container-mounts={place}:{place}, or the path by"
                " which the container sees it."
            )

    # --- checks ----------------------------------------------------------------------------------------------------

    def check_allocation(self) -> None:
        """Raise Unfit unless the job has the nodes and GPUs that the configuration needs."""
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
                f"the job has {gpus} GPUs a node, {self.plan['devices_words']}: sbatch --gpus-per-node={devices} ...,"
                f" or the override trainer.devices={gpus or 'N'}"
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
            if _is_shown(name) and name not in plan["env"]:
                say(f"environment {name}={value}, from the job's own")
        if plan["accelerator"] == "gpu" and (text := output(["nvidia-smi", "topo", "-m"])):
            say(f"topology of {job.host}:\n{text.rstrip()}")

    # --- the job ---------------------------------------------------------------------------------------------------

    def run(self) -> int:
        if not self.args.dry_run:
            signal.signal(signal.SIGUSR1, self.on_usr1)
            signal.signal(signal.SIGTERM, self.on_term)
        try:
            return self._run()
        finally:
            self.remove_container()

    def _run(self) -> int:
        self.load_plan()
        self.show()
        if self.args.dry_run:
            self.warn_of_paths()
            sys.stdout.write(shlex.join(self.node_command(1)) + "\n")
            return 0
        self.check_allocation()
        while True:
            if self.ended or not self.is_ours():
                return STOPPED
            if self.asked is not None:
                return self.requeue(STOPPED)
            own, every = self.launches.fruitless()
            if own >= self.plan["attempts"] or every >= _ALL_ATTEMPTS * self.plan["attempts"]:
                return self.give_up(every)
            attempt = self.launches.begin()
            outcome = self.attempt(attempt)
            following, code = self.decide(outcome)
            fields = {key: outcome.get(key) or None for key in ("host", "process", "status")}
            next_ = "requeue" if following == "leave_out" else following
            self.launches.end(attempt, code=outcome["code"], what=outcome["what"], next=next_, **fields)
            say(f"attempt {attempt} ended with {outcome['code']} {outcome['what']}: {next_}")
            if following in ("requeue", "leave_out"):
                return self.requeue(code, outcome["host"] if following == "leave_out" else "")
            if following != "again":
                return code
            self.wait(min(60.0, 5.0 * 2.0 ** self.launches.fruitless()[0]))

    def on_usr1(self, *_: Any) -> None:
        self.asked = self.asked or "SIGUSR1: the time limit is near"
        self.tell_stop(self.asked)

    def on_term(self, *_: Any) -> None:
        self.ended = True
        self.tell_stop("SIGTERM: Slurm ends the job")

    def remove_container(self) -> None:
        """Remove the container of this start from its nodes, once: by pyxis's default it would stay for ever."""
        made = self.args.container_image and self.job.id and not self.args.dry_run
        if made and not self.ended and not self.removed:
            self.removed = True
            if not self.job.remove_container():
                say(f"the container pyxis_{self.job.container} may be left on a node: enroot remove removes it there")

    def tell_stop(self, reason: str) -> None:
        """Ask the run to stop."""
        say(f"{reason}; the run is asked to stop")
        if self.step is not None:
            self.step.stop()

    def attempt(self, number: int) -> dict[str, Any]:
        """Start the nodes once, wait for their end, and return it."""
        log = self.run_dir / "logs" / "all.log"
        self.step = step = Step(self.node_command(number), self.environment(), self.plan["num_nodes"], log)
        if self.asked is not None or self.ended:  # meanwhile
            step.stop()
        ended = self._watch(step)
        self.step = None
        return {"code": 1, "what": ended} if ended else step.result(_LAST_WORDS_S)

    def _watch(self, step: Step) -> str:
        """Wait until srun has ended.  Return why it was killed before the run had ended, or an empty string."""
        began = looked = time.monotonic()
        reach_s = _REACH_IMAGE_S if self.args.container_image else _REACH_S
        over: float | None = None  # when srun is killed
        stop_by: float | None = None
        why = ""
        while step.process.poll() is None:
            time.sleep(0.2)
            now = time.monotonic()
            step.forward_stop()
            if self.asked is not None and stop_by is None:
                stop_by = now + _PATIENCE * max(0.0, (self.job.end() or time.time() + 600.0) - time.time())
            if step.outcome is not None:
                over = over or now + _SRUN_ENDS_S
            elif step.missing and now - began > reach_s:
                why, over = (
                    f"{step.missing} of {self.plan['num_nodes']} supervisors have not begun for {reach_s:g} s",
                    now,
                )
            elif stop_by is not None and now > stop_by:
                why, over = "the run did not stop in time", now
            elif now - looked > _LOOK_S:
                looked = now
                if not self.is_ours():
                    why, over = "Slurm has given the job to other nodes", now
            if over is not None and now >= over:
                step.kill()
                break
        return why

    def environment(self) -> dict[str, str]:
        env = with_path()
        if self.args.container_image:  # packages of this machine are none of the image's
            env.pop("PYTHONPATH")
        return env

    # --- what follows ----------------------------------------------------------------------------------------------

    def decide(self, outcome: dict[str, Any]) -> tuple[str, int]:
        """Return (done | again | requeue | leave_out | give_up, exit code of the job); may name the host to blame."""
        code = outcome["code"]
        if code == 0:
            return "done", 0
        following = self._following(outcome)
        if self.ended:  # a SIGTERM came meanwhile: Slurm ends the job
            return "give_up", STOPPED if code == STOPPED else 1
        return following

    def _following(self, outcome: dict[str, Any]) -> tuple[str, int]:
        code, state = outcome["code"], self.job.state()
        if self.ended or (state is not None and not (state.ours and state.running)):
            return "give_up", STOPPED if code == STOPPED else 1
        if self.asked is not None:
            return "requeue", STOPPED
        if state is not None and state.preempted:
            outcome["what"] = f"{PREEMPTED} {outcome['what']}".strip()
            return "requeue", STOPPED
        if code == STOPPED:
            return ("requeue", STOPPED) if self.out_of_time() else ("give_up", STOPPED)
        if code in (2, 4):
            return "give_up", code
        host = outcome["host"] = outcome.get("host") or (self.silent_node() if code == 1 else "")
        if host and (code == 3 or self.blamed(host)) and self.job.spare(host):
            return "leave_out", code
        return ("give_up", 3) if code == 3 else ("again", 1)

    def is_ours(self) -> bool:
        """Return whether this is the current start of the job; also True if Slurm does not answer."""
        state = self.job.state()
        return state is None or state.ours

    def out_of_time(self) -> bool:
        """Return whether the run stopped because of trainer.deadlines.job_s, not because a user asked."""
        try:
            last = json.loads((self.run_dir / "journal.jsonl").read_text().splitlines()[-1])
            return last["event"] == "stop" and "trainer.deadlines.job_s" in last["reason"]
        except (OSError, ValueError, KeyError, IndexError):
            return False

    def silent_node(self) -> str:
        """Return the first node of the job that starts no program, or an empty string."""
        return next((host for host in self.job.nodes if not self.ended and not self.job.starts(host)), "")

    def blamed(self, host: str) -> bool:
        """Return whether this node ended the previous attempt, too, or cannot start a program now."""
        last = self.launches.last_end()
        before = last is not None and last["restart"] == self.job.restart and last["host"] == host
        return before or not self.job.starts(host)

    def wait(self, seconds: float) -> None:
        """Wait, at most until the job is to stop."""
        end = time.monotonic() + seconds
        while time.monotonic() < end and not self.ended and self.asked is None:
            time.sleep(0.2)

    def give_up(self, attempts: int) -> int:
        last = self.launches.last_end()
        how = f"; the last one ended so: {last['what']}" if last else ""
        say(
            f"{attempts} attempts in a row made no new checkpoint after step {self.launches.step()} (launch.attempts):"
            f" the job ends{how}. Its logs are in {self.run_dir / 'logs'}"
        )
        return 1

    def requeue(self, code: int, without: str = "") -> int:
        """Give the job back to Slurm, which ends this process.  `without`: a node to leave out from now on."""
        self.remove_container()
        end = self.job.end() or time.time() + _REQUEUED_S
        while not self.ended and self.is_ours():
            if self.job.requeue(without):
                say(f"requeued{f' without {without}' if without else ''}")
                gone = time.monotonic() + _REQUEUED_S
                while time.monotonic() < gone and not self.ended:
                    time.sleep(0.2)
                break
            if time.time() + _REQUEUE_EVERY_S > end:
                say("the job could not be requeued; the same sbatch command goes on from here")
                break
            time.sleep(_REQUEUE_EVERY_S)
        return code


def absolute(override: str) -> str:
    """Return an override, with its path made absolute if its value is a path."""
    key, equals, value = override.partition("=")
    if not _PATHS.fullmatch(key) or value in ("", "null") or value[0] in "/$\"'":
        return override
    return f"{key}{equals}{os.path.abspath(value)}"


def _is_shown(name: str) -> bool:
    return name.startswith(_SHOWN)


def with_path() -> dict[str, str]:
    """Return the environment of a Python that imports the project from here."""
    return {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))}


def _gpus_on_node() -> int:
    """Return the number of GPUs that Slurm has given to this node."""
    if (count := os.environ.get("SLURM_GPUS_ON_NODE", "")).isdigit():
        return int(count)
    return len([d for d in os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",") if d])


def main() -> NoReturn:
    try:
        code = Driver(arguments(sys.argv[1:])).run()
    except ProrlError as error:
        say(f"stage.sbatch: {error}")
        code = error.exit_code
    sys.exit(code)


if __name__ == "__main__":
    main()
