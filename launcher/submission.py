"""What the batch script was asked for, and the commands that carry it out.

Standard library only, Python 3.9 at least (see `slurm_driver.py`).
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

from nemo_prorl.errors import ProrlError
from nemo_prorl.launcher.slurm_queries import Job, output, say

ROOT = Path(__file__).absolute().parent.parent.parent  # of the link nemo_prorl/launcher
OWN_PYTHON = str(ROOT / ".venv" / "train" / "bin" / "python")
IN_CONTAINER = "/opt/nemo_prorl"  # where the Dockerfile puts the project
CLUSTER = "h100_4x8"  # what sbatch's lines ask for, where no cluster=... is given
# Overrides that are paths.  Relative paths are made absolute here, because a container begins in another folder.
_PATHS = re.compile(
    r"pretrained_checkpoint\.restore_from_path|data\.folder|data\.(train|validation)\.\d+\.path|rollout\.python"
    r"|chain\.start_from"
)
_OUTPUT = ("SLURM_LABELIO", "SLURM_UNBUFFEREDIO", "SLURM_STDOUTMODE")  # change what srun prints, which is read here
_TELL_S = 120.0  # for the command in on_event; in a container, srun starts it
_DATA = "prepared"  # data.folder, where no override names it
_SHOWN = ("NCCL_", "TORCH_NCCL_", "GLOO_", "UCX_", "FI_", "CUDA_", "NVTE_", "OMP_", "PRORL_", "SLURM_TOPOLOGY")


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


class Submission:
    """A stage with its overrides, as a user gave them to sbatch.

    `plan`: what the configuration needs of the job, once it is known.
    """

    def __init__(self, args: argparse.Namespace, job: Job) -> None:
        self.args, self.job = args, job
        folder = f"runs/prorl/{args.stage}" if args.stage != "none" else "runs/laptop"
        given = dict(text.partition("=")[::2] for text in args.overrides)
        self.run_dir = Path(given.get("run_dir", folder)).absolute()
        rest = [text for text in args.overrides if not text.startswith("run_dir=")]
        rest = [absolute(text) for text in (rest if "cluster" in given else [f"cluster={CLUSTER}", *rest])]
        if args.container_image and "data.folder" not in given:
            rest.append(absolute(f"data.folder={_DATA}"))
        self.overrides = [f"stage={args.stage}", f"run_dir={self.run_dir}", *rest]
        self.plan: dict[str, Any] = {}

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

    def node_command(self, attempt: int, wait: float, launches: Path) -> list[str]:
        """Return the command that starts the supervisors of all nodes.

        `wait`: seconds, for an earlier attempt to leave the run directory.  `launches`: RUN/launches.jsonl.
        """
        command = [*self.srun(self.plan["num_nodes"]), "--kill-on-bad-exit=1", "--wait=0", *self.python()]
        command += ["-m", "nemo_prorl.launcher.node", f"--nodes={self.plan['num_nodes']}", f"--run-dir={self.run_dir}"]
        command += [f"--attempt={self.attempt_id(attempt)}", f"--lock-wait-s={wait:g}"]
        if launches.is_file():  # the nodes must see it; otherwise another folder has this name in there
            command.append(f"--expect={launches}")
        return [*command, *self.overrides]

    def attempt_id(self, attempt: int) -> str:
        """Return what names the files of an attempt in RUN/endpoints."""
        return f"{self.job.id or '-'}.{self.job.restart}.{attempt}"

    def ask_plan(self) -> subprocess.CompletedProcess[str]:
        """Have the configuration composed and checked; its standard output ends with the plan, as JSON."""
        command, env = self._ours("nemo_prorl.launcher.allocation", *self.overrides)
        return subprocess.run(command, check=False, stdout=subprocess.PIPE, env=env, text=True)

    def tell_failure(self, what: str) -> None:
        """Call the command in `on_event` for a failure that no supervisor could report."""
        if not self.plan["on_event"]:
            return
        command, env = self._ours("nemo_prorl.launcher.events", self.plan["on_event"], str(self.run_dir), what)
        try:
            subprocess.run(command, check=False, stdin=subprocess.DEVNULL, env=env, timeout=_TELL_S)
        except (OSError, subprocess.TimeoutExpired) as error:
            say(f"on_event={self.plan['on_event']}: {error}")

    def _ours(self, *words: str) -> tuple[list[str], dict[str, str]]:
        """Return the command that runs a module of ours with its arguments, and the command's environment."""
        if self.args.container_image and not self.args.dry_run:
            return [*self.srun(1), *self.python(), "-m", *words], self.environment()
        python = self.args.python or OWN_PYTHON
        if not shutil.which(python):
            raise Unfit(f"{python} is not there: make setup makes it; or --container-image=IMAGE after the stage")
        return [python, "-m", *words], with_path()

    def environment(self) -> dict[str, str]:
        env = {name: value for name, value in with_path().items() if name not in _OUTPUT}
        if self.args.container_image:  # packages of this machine are none of the image's
            env.pop("PYTHONPATH")
        return env

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
