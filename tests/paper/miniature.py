"""The paper's training in small, from nothing to its table: the steps of docs/howto/paper.md, on one machine.

    .venv/train/bin/python -m tests.paper.miniature FOLDER

The data are stand-ins of a dozen rows for each set, in the form in which it is published.  The model is that of
`base_model`, the cluster an emulated Slurm of four nodes, the judge a small HTTP server.  Everything else is what a
user of the page runs: the same commands, with smaller numbers.  It shows that no step is missing, and nothing about
scores.
"""

import json
import logging
import os
import shlex
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from tests.cluster.emulated import ROOT, Slurm, cluster
from tests.data import published
from tests.paper import base_model
from tests.paper.judge import judge

_log = logging.getLogger(__name__)

STAGES = [f"run{k}" for k in range(1, 9)]
STEPS = 3
STEPS_BEFORE = 12  # of runs 1 to 3, so that run 3 can be stopped early
SMALL = [
    "trainer.warmup.steps=0",
    f"trainer.grpo.max_steps={STEPS}",
    "trainer.grpo.prompts_per_step=4",
    "trainer.grpo.context_tokens=1152",
    "chain.long_context_tokens=1216",
    "trainer.grpo.max_response_tokens=48",
    "trainer.grpo.checkpoint_every=1",
    f"trainer.grpo.validate_every={STEPS}",
    "trainer.grpo.dynamic_sampling.max_draw_factor=8",
    "rollout.max_num_seqs=32",
    "rollout.kv_cache_mb=128",
]
EVALUATION = ["--samples", "2", "--context", "8192", "--max-response", "48"]
_PATIENCE_S = 900  # seconds for one stage on a busy machine with two cores


class Walk:
    """The folder of a walk, and the commands run in it.  Each command is written to FOLDER/commands.txt."""

    def __init__(self, folder: Path, environment: Mapping[str, str] | None = None) -> None:
        self.folder = folder
        path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
        self.environment = {**os.environ, "PATH": path, **(environment or {})}
        folder.mkdir(parents=True, exist_ok=True)

    def note(self, *words: object) -> None:
        """Write a command to FOLDER/commands.txt."""
        with (self.folder / "commands.txt").open("a") as file:
            file.write(shlex.join(map(str, words)) + "\n")

    def call(self, *words: object, code: int = 0) -> str:
        """Run a command in the folder; return its output.  Raises AssertionError for another exit code than `code`."""
        text = [str(word) for word in words]
        _log.info("%s", shlex.join(text)[:200])
        self.note(*text)
        done = subprocess.run(
            text,
            cwd=self.folder,
            env=self.environment,
            capture_output=True,
            text=True,
            timeout=2 * _PATIENCE_S,
            check=False,
        )
        assert done.returncode == code, f"{shlex.join(text)}: {done.returncode}\n{done.stdout}\n{done.stderr}"
        return done.stdout + done.stderr

    def prorl(self, *words: object) -> str:
        return self.call("prorl", *words)


def prepare(walk: Walk) -> str:
    """Write the published files and prepare all data; return the table that the command prints."""
    published.make_all(walk.folder / "published")
    with judge() as address:
        words = ["data", "prepare", "paper", "--from", "published", "--out", "prepared", "--scale", "0.004"]
        words += ["--judge-url", address, "--judge-model", "stand-in", "--workers", "2"]
        return walk.prorl(*words)


def make_model(walk: Walk) -> None:
    """Write the stand-in of the base model, whose tokenizer knows the words of the prepared prompts."""
    records: list[dict[str, Any]] = []
    for file in sorted((walk.folder / "prepared").glob("*/*.jsonl")):
        if file.stem in ("train", "validation"):
            records += [json.loads(line) for line in file.read_text().splitlines()[:200]]
    base_model.write(walk.folder / "MODEL", records)


def of_chain(walk: Walk, *more: str) -> list[str]:
    """Return the overrides of the chain on the emulated cluster."""
    here = walk.folder
    words = ["cluster=slurm_dev", "data=prorl", f"data.folder={here / 'prepared'}", *SMALL, *more]
    return [*words, f"pretrained_checkpoint.restore_from_path={here / 'MODEL'}"]


def rehearse(walk: Walk) -> None:
    """Check everything that can be checked before a job."""
    run1 = [*of_chain(walk), "stage=run1"]
    walk.prorl("plan", *run1)
    walk.prorl("train", "--dry-run", *run1)
    walk.prorl("doctor", *run1)
    walk.call("bash", ROOT / "slurm/stage.sbatch", "run1", *of_chain(walk), "--dry-run")


def steps_of(run: Path) -> int:
    """Return the number of training steps that a run has recorded."""
    file = run / "metrics.jsonl"
    return file.read_text().count("\n") if file.is_file() else 0


def wait(what: str, is_so: Callable[[], bool], seconds: float) -> None:
    end = time.monotonic() + seconds
    while not is_so():
        assert time.monotonic() < end, f"{what}: not within {seconds:g} s"
        time.sleep(0.5)


def jobs_of(chain: Path) -> dict[str, int]:
    entries = json.loads((chain / "chain.json").read_text())["stages"]
    return {entry["stage"]: int(entry["job"]) for entry in entries if entry["job"] is not None}


def completed(slurm: Slurm, job: int, what: str) -> None:
    """Wait for a job's end.  Raises AssertionError with what it printed unless it succeeded."""
    ended = slurm.wait(job, _PATIENCE_S)
    assert (ended.state, ended.code) == ("COMPLETED", 0), f"{what}: {ended}\n{slurm.output(job)[-5000:]}"


def train(walk: Walk, slurm: Slurm) -> None:
    """Run the eight stages; stop run 3 early by hand, and go on with run 4 from a checkpoint of it."""
    chain = walk.folder / "runs" / "paper"
    flags = ["--gpus-per-node=0", "--mem=0", f"--output={walk.folder / '%x-%j.out'}"]
    longer = [*of_chain(walk), f"trainer.grpo.max_steps={STEPS_BEFORE}"]
    alone = ["slurm/stage.sbatch", "run1", f"run_dir={chain / 'run1'}", *longer]
    walk.note("sbatch", *alone)
    completed(slurm, slurm.sbatch(*flags, *alone), "run1")

    launch = ["launch", "--stages", "run1..run8", "--sbatch", " ".join(flags), f"run_dir={chain}", *longer]
    walk.prorl(*launch, "--dry-run")
    walk.prorl(*launch)
    jobs = jobs_of(chain)
    completed(slurm, jobs["run2"], "run2")
    wait("step 2 of run 3", lambda: steps_of(chain / "run3") >= 2, _PATIENCE_S)
    walk.prorl("control", chain / "run3", "stop")
    walk.prorl("status", chain)
    slurm.wait(jobs["run3"], _PATIENCE_S)
    picked = sorted((chain / "run3" / "checkpoints").glob("step-*"))[0]
    walk.prorl("status", chain / "run3")

    walk.prorl("launch", "--from", picked, "--sbatch", " ".join(flags), *of_chain(walk))
    for stage, job in jobs_of(chain).items():
        if stage in STAGES[3:]:
            completed(slurm, job, stage)
    walk.prorl("status", chain)
    walk.prorl("report", chain)


def evaluate(walk: Walk) -> str:
    """Evaluate the base model and the end on all benchmarks; return the comparison with the paper."""
    words = ["--benchmarks", "paper", "--data", "prepared", *EVALUATION]
    overrides = ["cluster=laptop", "rollout.kv_cache_mb=256"]
    walk.prorl("evaluate", "MODEL", *words, "--out", "evaluation/base", *overrides)
    walk.prorl("evaluate", "--compare", "paper", "evaluation/base", "--as", "base")
    walk.prorl("evaluate", "runs/paper/run8", *words, "--out", "evaluation/end", *overrides)
    folders = ["evaluation/base", "evaluation/end"]
    walk.prorl("evaluate", "--compare", *folders, "--out", "evaluation/comparison")
    return walk.prorl("evaluate", "--compare", "paper", *folders, "--as", "base,end", "--out", "evaluation/paper")


def run(folder: Path) -> Walk:
    """Walk the whole page; return what was walked."""
    walk = Walk(folder, {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)})
    sys.stdout.write(prepare(walk))
    make_model(walk)
    rehearse(walk)
    with cluster(nodes=4) as slurm:
        walk.environment |= {name: value for name, value in slurm.environment.items() if name.startswith("SLURM")}
        train(walk, slurm)
    sys.stdout.write(evaluate(walk))
    return walk


if __name__ == "__main__":
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(message)s")
    run(Path(sys.argv[1]).absolute())
