"""RUN/launches.jsonl: each start of a run by a Slurm job and how it ended, and so whether the job gets anywhere.

Standard library only, Python 3.9 at least (see `slurm.py`).
"""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

from nemo_prorl.launcher.slurm_job import Job, say

PREEMPTED = "preempted"  # how the end of what was preempted begins


class Launches:
    """The record of one job's attempts; it also counts those that a full disk keeps from being written."""

    def __init__(self, run_dir: Path, job: Job) -> None:
        self.file = run_dir / "launches.jsonl"
        self._run_dir, self._job = run_dir, job
        self._begins: list[int] = []  # steps at which this process began attempts

    @property
    def begun_here(self) -> int:
        """Attempts by this process."""
        return len(self._begins)

    def begin(self) -> int:
        """The number of an attempt that begins, from 1."""
        attempt = len(self._begun()) + 1
        self._begins.append(self.step())
        self._write("begin", attempt)
        return attempt

    def end(self, attempt: int, **fields: Any) -> None:
        self._write("end", attempt, **fields)

    def last_end(self) -> dict[str, Any] | None:
        return next((told for told in reversed(self._told()) if told["event"] == "end"), None)

    def step(self) -> int:
        """Of the newest complete checkpoint; -1 where there is none."""
        found = (self._run_dir / "checkpoints").glob("step-*")
        steps = [int(p.name[5:]) for p in found if p.name[5:].isdigit() and (p / "state.json").is_file()]
        return max(steps, default=-1)

    def fruitless(self) -> tuple[int, int]:
        """How many attempts in a row began where the run still stands: those that were its own fault, and all.

        Not its fault: what was preempted, or has no end because Slurm took the nodes away.
        """
        now, own, every = self.step(), 0, 0
        ends = {told["attempt"]: told for told in self._told() if told["event"] == "end"}
        for begun in reversed(self._begun()):
            if begun["step"] != now:
                break
            every += 1
            end = ends.get(begun["attempt"])
            own += end is not None and not end["what"].startswith(PREEMPTED)
        here = 0
        for step in reversed(self._begins):
            if step != now:
                break
            here += 1
        return max(own, here), max(every, here)

    def _write(self, event: str, attempt: int, **fields: Any) -> None:
        told = {"event": event, "job": self._job.id, "restart": self._job.restart, "attempt": attempt}
        told.update(nodes=self._job.nodes, step=self.step(), time=round(time.time(), 3), **fields)
        try:
            self._run_dir.mkdir(parents=True, exist_ok=True)
            with self.file.open("a") as file:
                file.write(json.dumps(told) + "\n")
        except OSError as error:  # a full disk must not end what still runs
            say(f"{self.file} cannot be written: {error}")

    def _begun(self) -> list[dict[str, Any]]:
        return [told for told in self._told() if told["event"] == "begin"]

    def _told(self) -> list[dict[str, Any]]:
        """The lines of this job."""
        found = []
        try:
            lines = self.file.read_text().splitlines()
        except OSError:
            return []
        for line in lines:
            try:
                told = json.loads(line)
            except ValueError:
                continue  # cut off by a full disk or a crash
            if told.get("job") == self._job.id:
                found.append(told)
        return found
