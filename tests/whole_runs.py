"""Whole runs, small: NeMo-Aligner's model, vLLM, real verifiers.  Several tests look at each of them."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import psutil

from nemo_prorl.lifecycle import killpoints
from tests.ending import end_with_session

STEPS = 4
SMALL = [
    "deterministic=true",
    f"trainer.grpo.max_steps={STEPS}",
    "trainer.grpo.prompts_per_step=8",
    "trainer.grpo.samples_per_prompt=8",
    "trainer.grpo.checkpoint_every=2",
    "trainer.grpo.validate_every=2",
    "trainer.resets.at_steps=[2]",
    f"trainer.trace_steps=[{STEPS - 1},{STEPS}]",  # one right after the other
    "trainer.warmup.steps=40",
    "rollout.max_num_seqs=64",
    "rollout.kv_cache_mb=128",
    *[f"data.{part}.{k}.size={size}" for part, size in (("train", 300), ("validation", 16)) for k in range(5)],
]


class Job:
    """One `prorl train`, or another command, in a process of its own.

    `faults`: a folder with a sitecustomize.py, which Python runs at the start of each process and which may break it.
    """

    def __init__(
        self,
        root: Path,
        run_dir: Path,
        *overrides: str,
        command: str = "train",
        kill_at: str | None = None,
        faults: Path | None = None,
    ) -> None:
        self.root, self.run_dir = root, run_dir
        words = [sys.executable, "-m", "nemo_prorl.cli", command, f"run_dir={run_dir}", *SMALL, *overrides]
        self.log = run_dir.with_suffix(f".{time.monotonic_ns()}.log")
        env = {**os.environ, "PYTHONPATH": str(root), "OMP_NUM_THREADS": "1"}
        env |= {"PYTHONPATH": f"{faults}:{root}"} if faults else {}
        env |= {killpoints.VARIABLE: kill_at} if kill_at else {}
        with self.log.open("w") as f:
            self.process = subprocess.Popen(
                words,
                cwd=root,
                env=env,
                stdout=f,
                stderr=subprocess.STDOUT,
                preexec_fn=end_with_session,  # noqa: PLW1509  it calls nothing but prctl
            )

    def wait(self, seconds: float = 600.0) -> int:
        return self.process.wait(seconds)

    def until(self, ready: Callable[[], bool], seconds: float = 240.0) -> None:
        end = time.monotonic() + seconds
        while not ready():
            assert self.process.poll() is None, f"ended with {self.process.returncode}:\n{self.text()}"
            assert time.monotonic() < end, f"out of time:\n{self.text()}"
            time.sleep(0.05)

    def text(self) -> str:
        return self.log.read_text()[-5000:]

    def children(self) -> list[psutil.Process]:
        return psutil.Process(self.process.pid).children(recursive=True)

    def kill_supervisor(self) -> None:
        """SIGKILL; returns when all processes below it are gone, too."""
        processes = self.children()
        self.process.kill()
        self.process.wait()
        end = time.monotonic() + 20
        while not all(map(gone, processes)):
            assert time.monotonic() < end, [p for p in processes if not gone(p)]
            time.sleep(0.1)


def metrics_of(run_dir: Path) -> list[dict[str, Any]]:
    path = run_dir / "metrics.jsonl"
    return _lines(path) if path.is_file() else []


def events_of(run_dir: Path) -> list[dict[str, Any]]:
    return _lines(run_dir / "journal.jsonl")


def _lines(path: Path) -> list[dict[str, Any]]:
    """Without the end of what is being written."""
    return [json.loads(line) for line in path.read_text().rpartition("\n")[0].splitlines()]


def without_time(values: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in values.items() if not key.startswith(("time", "system"))}


def stopped_without_patience(root: Path, run: Path, waits_s: Sequence[float], *overrides: str) -> list[int]:
    """Exit codes of a run that gets SIGTERM so long after each of its starts, and is let run at last."""
    codes, journal = [], run / "journal.jsonl"
    for wait_s in (*waits_s, None):
        job = Job(root, run, *overrides, "trainer.deadlines.finish_step_s=0.01")
        events = len(events_of(run)) if journal.is_file() else 0
        job.until(lambda e=events: journal.is_file() and len(events_of(run)) > e)  # type: ignore[misc]
        if wait_s is not None:
            time.sleep(wait_s)
            job.process.send_signal(signal.SIGTERM)
        codes.append(job.wait(200))
        assert codes[-1] in (0, 75), job.text()
    return codes


def engine_process(job: Job) -> psutil.Process:
    return next(p for p in job.children() if "rollout/engine/server.py" in " ".join(p.cmdline()))


def gone(process: psutil.Process) -> bool:
    try:
        return not process.is_running() or process.status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:  # between the two
        return True


def run_undisturbed(root: Path, folder: Path, *overrides: str) -> Path:
    """A finished run."""
    job = Job(root, folder / "undisturbed", *overrides)
    assert job.wait() == 0, job.text()
    assert "held-out mean reward" in job.text()
    return job.run_dir


def run_disturbed(root: Path, undisturbed: Path, *overrides: str) -> Path:
    """The same run in parts, begun here or before: the supervisor killed after step 3, the engine at the next start."""
    job = Job(root, undisturbed.with_name("disturbed"), *overrides)
    job.until(lambda: len(metrics_of(job.run_dir)) >= STEPS - 1)
    job.kill_supervisor()
    known = len(events_of(job.run_dir))
    again = Job(root, job.run_dir, *overrides)
    again.until(lambda: "resume" in [e["event"] for e in events_of(job.run_dir)[known:]])
    engine_process(again).kill()
    assert again.wait() == 0, again.text()
    return job.run_dir
