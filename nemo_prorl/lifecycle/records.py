"""What a run writes down: metrics.jsonl, journal.jsonl, summary.json and rollouts/.  Written by one rank only."""

import functools
import hashlib
import json
import logging
import os
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import nemo_prorl

_log = logging.getLogger(__name__)


@functools.cache
def code_sha256() -> str:
    """sha256 over the Python files of this package: another one may continue a checkpoint otherwise."""
    package = Path(nemo_prorl.__file__).parent
    digest = hashlib.sha256()
    for file in sorted(package.rglob("*.py")):
        digest.update(str(file.relative_to(package)).encode() + file.read_bytes())
    return digest.hexdigest()


class MetricsLog:
    """metrics.jsonl: one object a step.

    A checkpoint records the file's length; a resume cuts the file to it, so that each step stands once.
    """

    def __init__(self, run_dir: Path) -> None:
        self.path, self.lost = run_dir / "metrics.jsonl", run_dir / "metrics.lost.jsonl"
        self.path.touch()

    def append(self, value: dict[str, Any]) -> None:
        with self.path.open("a") as f:
            f.write(json.dumps(value) + "\n")

    def lines(self) -> list[dict[str, Any]]:
        return [json.loads(line) for line in self.path.read_text().splitlines()]

    def length(self) -> int:
        with self.path.open("rb") as f:
            os.fsync(f.fileno())
            return f.seek(0, os.SEEK_END)

    def cut(self, length: int) -> None:
        """Moves what stands behind `length` bytes to metrics.lost.jsonl."""
        data = self.path.read_bytes()
        if len(data) > length:
            with self.lost.open("ab") as f:
                f.write(data[length:])
            os.truncate(self.path, length)
            _log.info("%d bytes of metrics behind the checkpoint were moved to %s", len(data) - length, self.lost)


class Journal:
    """journal.jsonl: stages, resets, stops, resumes and failures, each with step and time; on disk when it returns."""

    def __init__(self, run_dir: Path) -> None:
        self.path = run_dir / "journal.jsonl"

    def append(self, event: str, step: int, **fields: Any) -> None:
        line = json.dumps({"event": event, "step": step, "time": time.time(), **fields})
        with self.path.open("a") as f:
            f.write(line + "\n")
            f.flush()
            os.fsync(f.fileno())

    def events(self) -> list[dict[str, Any]]:
        """All whole lines; a last line cut by a kill is left out."""
        if not self.path.is_file():
            return []
        found = []
        for line in self.path.read_text().splitlines():
            try:
                found.append(json.loads(line))
            except ValueError:
                continue
        return found


def interrupted_reset(events: Iterable[dict[str, Any]]) -> int | None:
    """The step of a hard reset that was begun and not committed, if the journal ends with one."""
    begun = None
    for event in events:
        if event["event"] in ("reset_intent", "reset_commit"):
            begun = event["step"] if event["event"] == "reset_intent" else None
    return begun


def write_json(path: Path, value: Any) -> None:
    """Replaces a JSON file as a whole."""
    temporary = path.with_name(path.name + ".tmp")
    temporary.write_text(json.dumps(value, indent=1) + "\n")
    os.replace(temporary, path)


def write_rollouts(run_dir: Path, step: int, groups: list[Any], texts: list[list[str]], how_many: int) -> None:
    """rollouts/step-N.jsonl: requests with their verdicts, of the first `how_many` groups (-1: of all)."""
    if how_many == 0:
        return
    folder = run_dir / "rollouts"
    folder.mkdir(exist_ok=True)
    lines = []
    for group, responses in list(zip(groups, texts, strict=True))[: how_many if how_many > 0 else None]:
        for text, response, verdict in zip(responses, group.responses, group.verdicts, strict=True):
            request = {**group.record, "response": text, "finished": response.finished}
            lines.append(json.dumps({**request, "verdict": verdict, "version": response.weight_version}))
    (folder / f"step-{step}.jsonl").write_text("".join(line + "\n" for line in lines))


class Tail:
    """The JSON objects that are appended to a file of lines from now on."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._position = path.stat().st_size if path.is_file() else 0

    def read(self) -> list[dict[str, Any]]:
        """Those since the last call.  A line that is still being written comes later; one that is broken never."""
        try:
            with self._path.open("rb") as file:
                self._position = min(self._position, file.seek(0, os.SEEK_END))
                file.seek(self._position)
                data = file.read()
        except OSError:  # not there yet, or a shared disk that is away for a moment
            return []
        whole = data[: data.rfind(b"\n") + 1]
        self._position += len(whole)
        return [value for value in map(_parsed, whole.splitlines()) if isinstance(value, dict)]


def _parsed(line: bytes) -> Any:
    try:
        return json.loads(line)
    except ValueError:
        return None


def last_lines(path: Path, num_bytes: int = 1 << 16) -> list[dict[str, Any]]:
    """The whole JSON objects among a file's last bytes; none where it cannot be read."""
    try:
        with path.open("rb") as file:
            file.seek(max(0, file.seek(0, os.SEEK_END) - num_bytes))
            lines = file.read().splitlines()
    except OSError:
        return []
    return [value for value in map(_parsed, lines) if isinstance(value, dict)]
