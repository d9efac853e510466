"""The file RUN/launches.jsonl: records of the beginning and the end of each attempt of a Slurm job.

`Launches` counts from these records how many attempts in a row made no new checkpoint.

Standard library only, Python 3.9 at least (see `slurm_driver.py`).
"""

from __future__ import annotations

import time
from itertools import takewhile
from pathlib import Path
from typing import TYPE_CHECKING, Any

from nemo_prorl.files import append_line, read_objects
from nemo_prorl.launcher.slurm_queries import Job, say

if TYPE_CHECKING:
    from typing import Unpack

    from nemo_prorl.launcher.formats import LaunchEndFields

PREEMPTED = "preempted"  # first word of `what` for an attempt that preemption ended


class Launches:
    """The attempts of one Slurm job, recorded in RUN/launches.jsonl.

    If the disk is full, an attempt of this process is counted even though it is missing in the file.
    """

    def __init__(self, run_dir: Path, job: Job) -> None:
        self.file = run_dir / "launches.jsonl"
        self._run_dir, self._job = run_dir, job
        self._begins: list[int] = []  # newest checkpoint's step at the beginning of each attempt of this process
        self._last = 0  # number of the newest attempt, which may be missing in the file

    @property
    def begun_here(self) -> int:
        """Return the number of attempts that this process began."""
        return len(self._begins)

    def begin(self) -> int:
        """Record that an attempt begins; return its number, from 1."""
        self._last = max(self._last, *(record["attempt"] for record in self._begun()), 0) + 1
        self._begins.append(self.step())
        self._write("begin", self._last)
        return self._last

    def end(self, attempt: int, **fields: Unpack[LaunchEndFields]) -> None:
        self._write("end", attempt, **fields)

    def last_end(self) -> dict[str, Any] | None:
        return next((record for record in reversed(self._records()) if record["event"] == "end"), None)

    def step(self) -> int:
        """Return the step of the newest complete checkpoint; -1 if there is none."""
        folders = (self._run_dir / "checkpoints").glob("step-*")
        steps = [int(p.name[5:]) for p in folders if p.name[5:].isdigit() and (p / "state.json").is_file()]
        return max(steps, default=-1)

    def fruitless(self) -> tuple[int, int]:
        """Count the attempts that began since the newest checkpoint: none of them has made a newer checkpoint.

        Returns:
            (failed attempts, all attempts).  A preempted attempt is not a failure, nor is an attempt without an end
            record, whose nodes Slurm took away.
        """
        now = self.step()
        records = self._records()
        failed = {r["attempt"] for r in records if r["event"] == "end" and not r["what"].startswith(PREEMPTED)}
        begun = list(takewhile(lambda r: r["step"] == now, reversed(self._begun())))
        here = sum(1 for _ in takewhile(lambda step: step == now, reversed(self._begins)))
        return max(sum(r["attempt"] in failed for r in begun), here), max(len(begun), here)

    def _write(self, event: str, attempt: int, **fields: Any) -> None:
        record = {"event": event, "job": self._job.id, "restart": self._job.restart, "attempt": attempt}
        record.update(nodes=self._job.nodes, step=self.step(), time=round(time.time(), 3), **fields)
        try:
            self._run_dir.mkdir(parents=True, exist_ok=True)
            append_line(self.file, record)
        except OSError as error:  # a full disk must not end a run that still works
            say(f"{self.file}: the {event} of attempt {attempt} could not be written: {error}; the job goes on")

    def _begun(self) -> list[dict[str, Any]]:
        return [record for record in self._records() if record["event"] == "begin"]

    def _records(self) -> list[dict[str, Any]]:
        """Return the records of this job."""
        return [record for record in read_objects(self.file) if record.get("job") == self._job.id]
