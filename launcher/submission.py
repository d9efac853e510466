"""The arguments of the batch script, and the commands that start a stage from them.

Standard library only, Python 3.9 or later (see `slurm_driver.py`).
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from nemo_prorl.errors import ConfigError, UnfitMachine
from nemo_prorl.launcher.slurm_queries import Job, output, say

ROOT = Path(__file__).absolute().parent.parent.parent  # the repository: this file's path is ROOT/nemo_prorl/launcher/
OWN_PYTHON = str(ROOT / ".venv" / "train" / "bin" / "python")
IN_CONTAINER = "/opt/nemo_prorl"  # the project's folder in the image, as in the Dockerfile
SAVED = "saved"  # in place of a stage: the configuration that the run directory has
CLUSTER = "h100_4x8"  # default of cluster=...; matches the #SBATCH lines of slurm/stage.sbatch
GROUPS = ("algorithm", "cluster", "data", "model", "stage")  # the folders of conf/
# Overrides that are paths.  Relative paths are made absolute, because a container starts in another folder.
_PATHS = re.compile(
    r"pretrained_checkpoint\.restore_from_path|data\.folder|data\.(train|validation)\.\d+\.path|rollout\.python"
    r"|chain\.start_from|config_dir"
)
# Overrides whose value contains paths: functions as FILE.py:FUNCTION, joined by " + " or in a list; a list of sources.
_INNER = {
    r"rewards\.functions\.[\w-]+|trainer\.grpo\.(loss|advantage)|trainer\.resets\.rules\.asks": re.compile(
        r"""(?P<before>^[\["']*|,\s*["']?| \+ )(?P<path>[^$"'\[,][^"'\[,]*?\.py)(?=:\w)"""
    ),
    r"data\.(train|validation)": re.compile(
        r"""(?P<before>[{,]\s*path:\s*["']?)(?!null\b)(?P<path>[^$"'{},\s][^"'{},]*)"""
    ),
}
_OUTPUT = ("SLURM_LABELIO", "SLURM_UNBUFFEREDIO", "SLURM_STDOUTMODE")  # would change the output that `srun_step` parses
_ON_EVENT_S = 120.0  # limit for the command in on_event, including srun's start of a container
_DATA = "prepared"  # default of data.folder
_SHOWN = ("NCCL_", "TORCH_NCCL_", "GLOO_", "UCX_", "FI_", "CUDA_", "NVTE_", "OMP_", "PRORL_", "SLURM_TOPOLOGY")


def arguments(argv: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="stage.sbatch", description="Run a stage as a Slurm job.")
    text = "stage to run: run1 to run8; none: a run outside the stages; saved: the run of RUN_DIR/config.yaml"
    parser.add_argument("stage", metavar="STAGE", help=text)
    parser.add_argument("overrides", metavar="OVERRIDE", nargs="*", help="KEY=VALUE, as for prorl train")
    image, mounts = os.environ.get("PRORL_CONTAINER_IMAGE"), os.environ.get("PRORL_CONTAINER_MOUNTS")
    text = "image of the container for pyxis; default: $PRORL_CONTAINER_IMAGE, or no container"
    parser.add_argument("--container-image", default=image, metavar="IMAGE", help=text)
    text = "mounts of the container, comma-separated; default: $PRORL_CONTAINER_MOUNTS"
    parser.add_argument("--container-mounts", default=mounts, metavar="A:B,...", help=text)
    text = "Python with the project's packages; default: $PRORL_PYTHON, .venv/train/bin/python or the image's python3"
    parser.add_argument("--python", default=os.environ.get("PRORL_PYTHON"), help=text)
    parser.add_argument("--dry-run", action="store_true", help="print the srun command and start nothing")
    args, rest = parser.parse_known_args(argv)
    if wrong := [word for word in rest if word.startswith("-")]:
        parser.error(f"unrecognized arguments: {' '.join(wrong)}; put flags of sbatch before the script's name")
    args.overrides += rest
    if "=" in args.stage:
        parser.error(
            f"{args.stage}: expected the stage as the first argument, such as run1; 'none' for a run outside the stages"
        )
    if args.stage == SAVED and (fault := _not_saved(args.overrides)):
        parser.error(f"{SAVED}: {fault}")
    return args


def _not_saved(overrides: list[str]) -> str | None:
    """Return why no saved configuration can be run; None if the overrides name one."""
    values = dict(text.partition("=")[::2] for text in overrides)
    if "run_dir" not in values:
        return "expected run_dir=FOLDER after it, the folder of a run"
    if not (saved := Path(values["run_dir"]).absolute() / "config.yaml").is_file():
        return f"expected {saved}, the configuration of a run; there is no such file"
    group = next((key for key in values if key in GROUPS), None)
    return None if group is None else f"{group}={values[group]} would choose another configuration. Fix: leave it out"


class Submission:
    """A stage and its overrides, as the user submitted them with sbatch.

    `needs`: what the configuration needs (`allocation.allocation`); empty until `load_needs` of the driver fills it.
    """

    def __init__(self, args: argparse.Namespace, job: Job) -> None:
        self.args, self.job = args, job
        folder = f"runs/prorl/{args.stage}" if args.stage != "none" else "runs/laptop"
        values = dict(text.partition("=")[::2] for text in args.overrides)
        self.run_dir = Path(values.get("run_dir", folder)).expanduser().absolute()
        if wrong := re.search(r"[^\w./@+%: -]", str(self.run_dir), re.ASCII):
            raise ConfigError(
                f"run_dir={self.run_dir}: {wrong[0]!r} has another meaning in an override. Fix: choose another folder"
            )
        rest = [with_absolute_path(text) for text in args.overrides if not text.startswith("run_dir=")]
        if args.stage == SAVED:  # an override of a group would make `settings.load_run` leave it out
            self.overrides = [f"run_dir={self.run_dir}", *rest]
        else:
            rest = rest if "cluster" in values else [f"cluster={CLUSTER}", *rest]
            if args.container_image and not {"data.folder", "config_dir"} & values.keys():  # an own file may set it
                rest.append(with_absolute_path(f"data.folder={_DATA}"))
            self.overrides = [f"stage={args.stage}", f"run_dir={self.run_dir}", *rest]
        self.needs: dict[str, Any] = {}

    def python(self) -> list[str]:
        if self.args.python:
            return [str(self.args.python)]
        return ["python3"] if self.args.container_image else [OWN_PYTHON]

    def srun(self, nodes: int) -> list[str]:
        """Return an srun command of one task per node with all processors, in the container if one is used."""
        command = ["srun", f"--nodes={nodes}", f"--ntasks={nodes}", "--ntasks-per-node=1", "--cpu-bind=none"]
        if cpus := self.job.cpus():
            command.append(f"--cpus-per-task={cpus}")
        command += ["--mpi=none", "--export=ALL"]
        if image := self.args.container_image:
            command += [f"--container-image={image}", f"--container-workdir={IN_CONTAINER}"]
            command += ["--no-container-mount-home"]
            if self.job.id:  # unpacked once per node and job; no_exec: each start gets new mounts and namespaces
                command.append(f"--container-name={self.job.container}:no_exec")
            if self.args.container_mounts:
                command.append(f"--container-mounts={self.args.container_mounts}")
            if names := [name for name in os.environ if _is_shown(name)]:  # otherwise the image's values would win
                command.append(f"--container-env={','.join(sorted(names))}")
        return command

    def node_command(self, attempt: int, wait: float, launches: Path) -> list[str]:
        """Return the command that starts the supervisors of all nodes.

        Args:
            wait: seconds to wait until the processes of an earlier attempt release the run directory.
            launches: RUN/launches.jsonl.
        """
        command = [*self.srun(self.needs["num_nodes"]), "--kill-on-bad-exit=1", "--wait=0", *self.python()]
        command += ["-m", "nemo_prorl.launcher.node", f"--nodes={self.needs['num_nodes']}", f"--run-dir={self.run_dir}"]
        command += [f"--attempt={self.attempt_id(attempt)}", f"--lock-wait-s={wait:g}"]
        if launches.is_file():  # a node that does not see the file has another folder under the name of the run
            command.append(f"--expect={launches}")
        return [*command, *self.overrides]

    def attempt_id(self, attempt: int) -> str:
        """Return the id that is part of the names of an attempt's files in RUN/endpoints."""
        return f"{self.job.id or '-'}.{self.job.restart}.{attempt}"

    def run_allocation(self) -> subprocess.CompletedProcess[str]:
        """Run the program `allocation`; the last line of standard output in its result has the needs, as JSON."""
        command, env = self._module_command("nemo_prorl.launcher.allocation", *self.overrides)
        return subprocess.run(command, check=False, stdout=subprocess.PIPE, env=env, text=True)

    def check_records(self) -> int:
        """Check the records as `prorl train --dry-run` does; return its exit code.  A job does this when it starts."""
        command, env = self._module_command("nemo_prorl.cli", "train", "--dry-run", *self.overrides)
        return subprocess.run(command, check=False, stdout=subprocess.DEVNULL, env=env).returncode

    def report_failure(self, message: str) -> None:
        """Call the command in `on_event` for a failure that no supervisor could report."""
        if not self.needs["on_event"]:
            return
        command, env = self._module_command(
            "nemo_prorl.launcher.events", self.needs["on_event"], str(self.run_dir), message
        )
        try:
            subprocess.run(command, check=False, stdin=subprocess.DEVNULL, env=env, timeout=_ON_EVENT_S)
        except (OSError, subprocess.TimeoutExpired) as error:
            say(f"on_event={self.needs['on_event']}: the call for this failure failed: {error}")

    def _module_command(self, *words: str) -> tuple[list[str], dict[str, str]]:
        """Return the command that runs a module of this project with its arguments, and the command's environment."""
        if self.args.container_image and not self.args.dry_run:
            return [*self.srun(1), *self.python(), "-m", *words], self.environment()
        python = self.args.python or OWN_PYTHON
        if not shutil.which(python):
            raise UnfitMachine(
                f"{python}: no such Python. Fix: run make setup, or give the image after the stage:"
                " --container-image=IMAGE"
            )
        return [python, "-m", *words], with_path()

    def environment(self) -> dict[str, str]:
        env = {name: value for name, value in with_path().items() if name not in _OUTPUT}
        if self.args.container_image:  # the image must not import packages of this machine
            env.pop("PYTHONPATH")
        return env

    def warn_of_paths(self) -> None:
        """Write `path_faults` to the job's output."""
        for fault in self.path_faults():
            say(fault)

    def path_faults(self) -> Iterator[str]:
        """Yield a warning for each path in overrides that is outside the --container-mounts.

        In the container such a path exists only if the image contains it or the cluster's configuration mounts it.
        """
        mounts = [word.split(":") for word in (self.args.container_mounts or "").split(",") if word]
        inside = [Path(mount[1] if len(mount) > 1 else mount[0]) for mount in mounts] + [Path(IN_CONTAINER)]
        for key, _, value in (text.partition("=") for text in self.overrides if self.args.container_image):
            if key == "data.folder" and not self.needs.get("reads_data_folder", True):
                continue
            for path in _paths(key, value):
                if any(mount in (path, *path.parents) for mount in inside):
                    continue
                place = path if key in ("run_dir", "data.folder", "config_dir") else path.parent
                yield (
                    f"{key}={value}: expected a path under a mount of the container; the mounts are"
                    f" {self.args.container_mounts or 'none'}. Fix: --container-mounts={place}:{place}, or give the"
                    " path inside the container."
                )

    def check_allocation(self) -> None:
        """Raise UnfitMachine unless the job has the nodes and GPUs that the configuration needs."""
        if not self.job.id:
            raise UnfitMachine(
                "SLURM_JOB_ID is not set: this process is not part of a Slurm job. Fix: start it with sbatch, or add"
                " --dry-run to print the command"
            )
        if not shutil.which("srun"):
            raise UnfitMachine(
                "srun is not on the PATH. Fix: if this script runs in a container, give the image to the script, not to"
                " sbatch: sbatch slurm/stage.sbatch STAGE --container-image=IMAGE"
            )
        for fault, fix in allocation_faults(self.needs, len(self.job.nodes), gpus_on_node(os.environ)):
            raise UnfitMachine(f"{fault}. Fix: {fix}")

    def show(self) -> None:
        """Write the job, the run directory and the relevant environment variables to the job's output."""
        job, needs = self.job, self.needs
        say(f"job {job.id or '-'}, start {job.restart + 1}, nodes {' '.join(job.nodes) or '-'}")
        say(f"run directory {self.run_dir}; {needs['num_nodes']} nodes x {needs['devices']} {needs['accelerator']}")
        image = self.args.container_image
        say(f"container {image}, mounts {self.args.container_mounts or 'none'}" if image else "no container")
        for name, value in needs["env"].items():
            inherited = os.environ.get(name)
            if inherited is None:
                say(f"environment {name}={value}, from launch.env.{name}")
            else:
                say(f"environment {name}={inherited}, which wins over launch.env.{name}={value}")
        for name, value in sorted(os.environ.items()):
            if _is_shown(name) and name not in needs["env"]:
                say(f"environment {name}={value}, from the job's environment")
        if needs["accelerator"] == "gpu" and (text := output(["nvidia-smi", "topo", "-m"])):
            say(f"topology of {job.host}:\n{text.rstrip()}")


def with_absolute_path(override: str) -> str:
    """Return an override; relative paths in its value are made absolute."""
    key, equals, value = override.partition("=")
    if pattern := _inner(key):
        return key + equals + pattern.sub(lambda match: match["before"] + _absolute(match["path"]), value)
    if not _PATHS.fullmatch(key) or value in ("", "null") or value[0] in "/$\"'":
        return override
    if key.endswith("restore_from_path") and value.count("/") == 1 and not os.path.exists(os.path.dirname(value)):
        return override  # a name on the Hugging Face hub, as `data.hub.model_folder` decides it
    return f"{key}{equals}{_absolute(value)}"


def _paths(key: str, value: str) -> list[Path]:
    """Return the absolute paths in an override that `with_absolute_path` returned."""
    if pattern := _inner(key):
        return [Path(match["path"]) for match in pattern.finditer(value)]
    return [Path(value)] if key == "run_dir" or (_PATHS.fullmatch(key) and value.startswith("/")) else []


def _inner(key: str) -> re.Pattern[str] | None:
    """Return the pattern of the paths inside the value of an override; None: the whole value is a path, or no path."""
    return next((pattern for keys, pattern in _INNER.items() if re.fullmatch(keys, key)), None)


def _absolute(path: str) -> str:
    return os.path.abspath(os.path.expanduser(path))


def _is_shown(name: str) -> bool:
    return name.startswith(_SHOWN)


def with_path() -> dict[str, str]:
    """Return the environment of a Python that imports the project from this repository."""
    return {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))}


def gpus_on_node(environment: Mapping[str, str]) -> int:
    """Return the number of GPUs that the job has on this node."""
    if (count := environment.get("SLURM_GPUS_ON_NODE", "")).isdigit():
        return int(count)
    return len([d for d in environment.get("CUDA_VISIBLE_DEVICES", "").split(",") if d])


def allocation_faults(needs: Mapping[str, Any], nodes: int, gpus: int) -> Iterator[tuple[str, str]]:
    """Yield (fault, fix) for each difference between a job's allocation and the needs (`allocation.allocation`).

    Args:
        nodes: number of the job's nodes.
        gpus: number of the job's GPUs on this node.
    """
    wanted, devices = needs["num_nodes"], needs["devices"]
    if nodes != wanted:
        engines = needs["engines"] // wanted * nodes
        yield (
            f"expected a job of {wanted} nodes (trainer.num_nodes={wanted}); got {nodes}",
            f"sbatch --nodes={wanted} ..., or trainer.num_nodes={nodes} rollout.engines={engines}",
        )
    if needs["accelerator"] == "gpu" and gpus < devices:
        yield (
            f"expected {devices} GPUs per node ({needs['devices_words']}); got {gpus}",
            f"sbatch --gpus-per-node={devices} ..., or trainer.devices={gpus or 'N'} and a layout to match",
        )
