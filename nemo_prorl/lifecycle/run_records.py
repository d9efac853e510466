"""Records of a run: metrics.jsonl, journal.jsonl, summary.json and rollouts/."""

import functools
import hashlib
import json
import logging
import os
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypedDict

import nemo_prorl
from nemo_prorl.config import Config
from nemo_prorl.files import append_line, json_lines, read_objects, write_json
from nemo_prorl.lifecycle.journal_events import HeldOutScores, Reset, standing
from nemo_prorl.lifecycle.summary import summary
from nemo_prorl.metrics import Metrics
from nemo_prorl.schema import Amount, Count
from nemo_prorl.usage import GrowthWatch, newest, totals

_log = logging.getLogger(__name__)


@functools.cache
def code_sha256() -> str:
    """Return the sha256 of this package's Python files, to detect checkpoints of other code.

    Without `launcher`, which computes nothing: it is a link in a checkout and a folder in a wheel.
    """
    package = Path(nemo_prorl.__file__).parent
    digest = hashlib.sha256()
    for file in sorted(set(package.rglob("*.py")) - set((package / "launcher").rglob("*.py"))):
        digest.update(str(file.relative_to(package)).encode() + file.read_bytes())
    return digest.hexdigest()


class RecordsState(TypedDict):
    """The state of a run's records that a checkpoint stores."""

    metrics_bytes: Count
    """length of metrics.jsonl in bytes; a resume cuts the file to it"""
    checkpoint_s: Amount
    """seconds that training waited for checkpoints"""


@dataclass(eq=False, repr=False)
class Records:
    """The metrics, journal and summary of a run.  Each rank has this object; only rank 0 writes.

    Each checkpoint stores the length of metrics.jsonl; a resume removes the lines of later steps from the file.
    """

    cfg: Config
    dir: Path  # the run directory
    writes: bool  # whether this rank writes the files; True on rank 0 only
    loggers: Sequence[Any] = ()  # Lightning's, which also get the metrics of each step
    devices: int = 1  # number of devices of the run, by which its speed is divided

    def __post_init__(self) -> None:
        self._journal = Journal(self.dir, self.writes)
        self._metrics = self.dir / "metrics.jsonl"
        if self.writes:
            self._metrics.touch()
        self.event = self._journal.append
        self.checkpoint_s = 0.0  # seconds that training waited for checkpoints
        self._growth = GrowthWatch(recycles=self.cfg.rollout.recycle_gb is not None)

    def events(self) -> list[dict[str, Any]]:
        """Return the journal's events so far; an empty list on ranks other than 0."""
        return self._journal.events() if self.writes else []

    def alarm(self, step: int, message: str) -> None:
        """Write a condition that needs a person's attention to the log and the journal."""
        if self.writes:
            _log.warning("step %d: %s", step, message)
            self.event("alarm", step, what=message)

    def log(self, metrics: Metrics) -> None:
        """Write the step's line of metrics.jsonl: `time/step`, the sum of its phases, its speed, and `system/*`."""
        seconds = sum(v for k, v in metrics.as_json().items() if k.startswith("time/") and k.count("/") == 1)
        metrics.put("time/step", seconds)
        if "time/updates/tokens" in metrics:
            rate = metrics["time/updates/tokens"] / max(seconds, 1e-9)
            metrics.put("time/step/tokens_per_s_per_device", rate / self.devices)
        if not self.writes:
            return
        nodes = newest(self.dir / "endpoints")
        metrics.add("system", totals(nodes))
        for finding in self._growth.observe(metrics.step, seconds, nodes, self.cfg.trainer.grpo.max_steps):
            self.alarm(metrics.step, f"memory will be full before the last step: {finding}")
        values = metrics.as_json()
        with self._metrics.open("a") as file:
            file.write(json.dumps(values) + "\n")
        numbers = {k: v for k, v in values.items() if isinstance(v, float)}
        for logger in self.loggers:
            logger.log_metrics(numbers, step=metrics.step)

    def lines(self) -> list[dict[str, Any]]:
        """Return the lines of metrics.jsonl; an empty list on ranks other than 0."""
        return [json.loads(line) for line in self._metrics.read_text().splitlines()] if self.writes else []

    def rollouts(
        self,
        step: int,
        groups: Sequence[Any],
        dropped: Sequence[Any],
        judged_text: Callable[[list[int], list[int]], str],
    ) -> None:
        """Write the step's first `trainer.grpo.save_rollout_groups` groups, with the texts that verifiers got.

        Args:
            groups: groups that the step trains on.
            dropped: groups of the step that are not trained on.  Groups drawn later than all written groups may be
                left out.
            judged_text: returns the text that verifiers get, from the token ids of a prompt and of a response.
        """
        most = self.cfg.trainer.grpo.save_rollout_groups
        if self.writes and most != 0:
            first = sorted([*groups, *dropped], key=lambda group: group.draw_index)[: None if most < 0 else most]
            write_rollouts(self.dir, step, first, {group.draw_index for group in groups}, judged_text)

    def stored_responses(self, step: int) -> list[dict[str, Any]]:
        """Return the lines of rollouts/step-N.jsonl; an empty list if the step has none, and on ranks other than 0."""
        file = self.dir / "rollouts" / f"step-{step}.jsonl"
        return read_objects(file) if self.writes else []

    def disagreements(self, step: int, responses: Sequence[dict[str, Any]]) -> None:
        """Write the responses of a step on which a second verifier disagrees; a repeated step replaces its file."""
        if not self.writes:
            return
        path = self.dir / "disagreements" / f"step-{step}.jsonl"
        if responses:
            path.parent.mkdir(exist_ok=True)
            path.write_text(json_lines(responses))
        else:
            path.unlink(missing_ok=True)

    def summary(
        self,
        step: int,
        scores: Mapping[int, HeldOutScores],
        resets: Sequence[Reset],
        hashes: Mapping[str, str] | None = None,
    ) -> None:
        """Write summary.json.

        Args:
            scores: validations by step.
            hashes: hashes of the weights, if the run is finished.
        """
        if self.writes:
            value = summary(
                step=step,
                stage=self.cfg.stage,
                seed=self.cfg.seed,
                scores=scores,
                resets=resets,
                lines=self.lines(),
                checkpoint_s=self.checkpoint_s,
                hashes=hashes,
            )
            write_json(self.dir / "summary.json", value)

    def begin(self) -> None:
        """Begin a new run; move the metrics of an earlier run to metrics.lost.jsonl."""
        self._cut(0)

    def state_dict(self) -> RecordsState:
        return {"metrics_bytes": self._length() if self.writes else 0, "checkpoint_s": self.checkpoint_s}

    def load_state_dict(self, state: RecordsState) -> None:
        self.checkpoint_s = float(state["checkpoint_s"])
        self._cut(state["metrics_bytes"])

    def _length(self) -> int:
        """Return the length of metrics.jsonl in bytes, after a sync to disk."""
        with self._metrics.open("rb") as file:
            os.fsync(file.fileno())
            return file.seek(0, os.SEEK_END)

    def _cut(self, length: int) -> None:
        """Move everything after `length` bytes of metrics.jsonl to metrics.lost.jsonl, on rank 0."""
        data = self._metrics.read_bytes() if self.writes else b""
        if len(data) > length:
            lost = self.dir / "metrics.lost.jsonl"
            with lost.open("ab") as file:
                file.write(data[length:])
            os.truncate(self._metrics, length)
            _log.info(
                "metrics.jsonl: moved %d bytes of the steps after the checkpoint to %s; these steps are repeated",
                len(data) - length,
                lost,
            )


class Journal:
    """The file journal.jsonl: stages, resets, stops, resumes and failures, with step and time.

    Each event is on disk when its method returns.
    """

    def __init__(self, run_dir: Path, writes: bool = True) -> None:
        self.path = run_dir / "journal.jsonl"
        self._writes = writes

    def append(self, event: str, step: int, **fields: Any) -> None:
        """Append an event with the fields of its class in `journal_events`."""
        if self._writes:
            append_line(self.path, {"event": event, "step": step, "time": time.time(), **fields}, sync=True)

    def events(self) -> list[dict[str, Any]]:
        """Return the events of all complete lines; leave out a last line that a kill cut short."""
        return read_objects(self.path)

    def resets(self) -> dict[int, Reset]:
        """Return the hard resets by step, except those that a resume or a lost trial discarded."""
        made = [event for event in standing(self.events()) if event["event"] == "reset_commit"]
        return {e["step"]: {key: e[key] for key in Reset.__annotations__ if key in e} for e in made}  # type: ignore[misc]


def write_rollouts(
    run_dir: Path,
    step: int,
    groups: Sequence[Any],
    trained: Collection[int],
    judged_text: Callable[[list[int], list[int]], str],
) -> None:
    """Write rollouts/step-N.jsonl: one line per response, with its prompt record and verdict.

    Args:
        trained: `draw_index` of the groups that the step trains on; the others were dropped.
        judged_text: returns the text that verifiers get, from the token ids of a prompt and of a response.
    """
    folder = run_dir / "rollouts"
    folder.mkdir(exist_ok=True)
    lines = [
        {
            **group.record,
            "response": judged_text(group.prompt_ids, response.token_ids),
            "finished": response.finished,
            "verdict": verdict,
            "trained": group.draw_index in trained,
            "version": response.weight_version,
        }
        for group in groups
        for response, verdict in zip(group.responses, group.verdicts, strict=True)
    ]
    (folder / f"step-{step}.jsonl").write_text(json_lines(lines))
