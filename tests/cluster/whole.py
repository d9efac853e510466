"""The small run of tests/whole_runs.py as a job on several nodes, and what its checkpoints hold."""

import json
import os
import warnings
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.checkpoint.state_dict_loader import load

from tests.cluster.emulated import Ended, cluster
from tests.whole_runs import SMALL

STEPS = 2


def run_on_nodes(undisturbed: Path, name: str, nodes: int, *overrides: str) -> Path:
    """Two steps from where the run on one node began, on so many nodes, through sbatch; the run directory."""
    run = undisturbed.with_name(name)
    words = [f"--nodes={nodes}", "--gpus-per-node=0", "--mem=0", f"--output={run}.log"]
    words += ["slurm/stage.sbatch", "none", "cluster=slurm_dev", "data=laptop", f"run_dir={run}", *SMALL]
    words += [f"trainer.num_nodes={nodes}", f"rollout.engines={nodes}", f"trainer.grpo.max_steps={STEPS}"]
    words += [f"trainer.trace_steps=[{STEPS}]"]
    words += [f"pretrained_checkpoint.restore_from_path={undisturbed / 'base'}", "trainer.warmup.steps=0"]
    with cluster(nodes=nodes) as slurm:
        job = slurm.sbatch(*words, *overrides, env={"OMP_NUM_THREADS": "1", "PATH": os.environ["PATH"]})
        ended = slurm.wait(job, 600)
        log = Path(f"{run}.log").read_text()
        assert ended == Ended("COMPLETED", 0, 0), log[-5000:]
        slurm.no_orphans()
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
    return [json.loads(line) for line in (run / "rollouts" / f"step-{step}.jsonl").read_text().splitlines()]
