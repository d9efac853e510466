"""The small run of tests/whole_runs.py as a job on several nodes, and what its checkpoints hold."""

import os
import signal
import sys
import warnings
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.checkpoint.state_dict_loader import load

from nemo_prorl.deadlines import Deadline
from tests.cluster.emulated import Ended, Slurm, cluster
from tests.lines import read_lines
from tests.whole_runs import SMALL, metrics_of

FIRST_STEPS = 2
ENVIRONMENT = {"OMP_NUM_THREADS": "1", "PATH": os.environ["PATH"]}


def submitted(slurm: Slurm, run: Path, nodes: int, stage: str, *overrides: str) -> int:
    """The number of a job in which each of so many nodes has a data-parallel rank, an engine and a reward server."""
    words = [f"--nodes={nodes}", "--gpus-per-node=0", "--mem=0", f"--output={run}.log"]
    words += ["slurm/stage.sbatch", stage, "cluster=slurm_dev", "data=laptop", f"run_dir={run}", *SMALL]
    words += [f"trainer.num_nodes={nodes}", f"rollout.engines={nodes}"]
    return slurm.sbatch(*words, *overrides, env=ENVIRONMENT)


def ended(slurm: Slurm, job: int, run: Path, code: int) -> None:
    """Waits for the job's end with this exit code; nothing of it is left."""
    wanted = Ended("FAILED" if code else "COMPLETED", code, 0)
    assert slurm.wait(job, 600) == wanted, Path(f"{run}.log").read_text()[-5000:]
    slurm.no_orphans()


def run_on_nodes(undisturbed: Path, name: str, nodes: int, *overrides: str) -> Path:
    """Two steps from where the run on one node began, on so many nodes, through sbatch; the run directory."""
    run = undisturbed.with_name(name)
    words = [f"trainer.grpo.max_steps={FIRST_STEPS}", f"trainer.trace_steps=[{FIRST_STEPS}]"]
    words += [f"pretrained_checkpoint.restore_from_path={undisturbed / 'base'}", "trainer.warmup.steps=0"]
    with cluster(nodes=nodes) as slurm:
        ended(slurm, submitted(slurm, run, nodes, "none", *words, *overrides), run, 0)
    return run


def run_stage(undisturbed: Path, nodes: int) -> Path:
    """A stage on several nodes that begins from the finished run; while it works it is asked for a checkpoint, then to
    stop, which every supervisor is told as Slurm does it."""
    run, log = undisturbed.with_name("stage"), undisturbed.with_name("told.jsonl")
    hook = f"""on_event='{sys.executable} -c "import sys; open(sys.argv[1], \\"a\\").write(sys.stdin.read())" {log}'"""
    words = ["data.tasks=null", f"chain.start_from={undisturbed}", "trainer.resets.at_steps=[]", hook]
    words += ["trainer.grpo.max_steps=40", "trainer.trace_steps=[1]"]
    with cluster(nodes=nodes) as slurm:
        job = submitted(slurm, run, nodes, "run2", *words)

        def begun() -> bool:
            assert slurm.state(job) in ("PENDING", "RUNNING"), Path(f"{run}.log").read_text()[-5000:]
            return bool(metrics_of(run))

        Deadline(400, "the first step").wait_until(begun, every=1.0)
        slurm.run(sys.executable, "-m", "nemo_prorl.cli", "control", str(run), "checkpoint", env=ENVIRONMENT)
        for process in slurm.processes():
            if any("nemo_prorl.launcher.node" in word for word in process.cmdline()) and "srun" not in process.name():
                process.send_signal(signal.SIGTERM)
        ended(slurm, job, run, 75)
    return run


def saved_tensors(checkpoint: Path) -> dict[str, torch.Tensor]:
    """What a checkpoint holds of model, reference and optimizer, whole, whatever ranks wrote it."""
    reader = FileSystemReader(checkpoint)
    found = reader.read_metadata().state_dict_metadata
    state = {
        name: torch.empty(entry.size, dtype=entry.properties.dtype)
        for name, entry in found.items()
        if isinstance(entry, TensorStorageMetadata)
    }
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # it says that no process group is there
        load(state, storage_reader=reader, no_dist=True)
    return state


def recorded(run: Path, step: int) -> list[Any]:
    """The rollouts that a run wrote down of a step."""
    return read_lines(run / "rollouts" / f"step-{step}.jsonl")
