"""The stored prompts, responses and verdicts of an evaluation: one JSON object per line, appended as it arises.

A process killed at any moment leaves complete lines and at most one partial line at the end, which is removed.
"""

import json
import logging
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO

from nemo_prorl import files
from nemo_prorl.errors import ConfigError, DataError
from nemo_prorl.rewards.interface import Verdict

if TYPE_CHECKING:  # the command line reads JSON files without importing the catalogue's libraries
    from nemo_prorl.evaluation.formats import EvaluationSample

_log = logging.getLogger(__name__)

Key = tuple[str, int]  # (prompt id, sample)


class StoredVerdict(Verdict):
    """The verdict on one response.

    `sample` is the number of the response among the responses to its prompt, from 0.
    """

    sample: int


def read_json(path: Path) -> Any:
    """Read a JSON file of an evaluation.  Raises ConfigError if it cannot be read, DataError if it is broken."""
    try:
        value = json.loads(path.read_text())
    except OSError as error:
        raise ConfigError(
            f"{path}: cannot be read: {error.strerror}; give a folder that prorl evaluate --out wrote"
        ) from error
    except ValueError as error:
        raise DataError(f"{path}: not JSON: {error}") from error
    if not isinstance(value, dict) or value.get("format") != 1:
        raise DataError(
            f"{path}: field 'format': expected 1, which prorl evaluate writes; got another value or no such field"
        )
    return value


def verdicts_folder(manifest: Mapping[str, Any]) -> str:
    """Return the name of the folder of the verdicts that count; `manifest`: manifest.json or results.json."""
    return str(manifest.get("verdicts", "verdicts"))


class Store:
    """The stored prompts, responses and verdicts of one benchmark."""

    def __init__(self, folder: Path, benchmark: str, writable: bool = True, verdicts: str | None = None) -> None:
        """Read the files of a benchmark.

        Args:
            folder: Folder of the evaluation.
            benchmark: Name of the benchmark.
            writable: Whether an incomplete last line is removed, and responses and verdicts may be added.
            verdicts: Folder of the verdicts in `folder`; None: the one that manifest.json names.
        """
        verdicts = verdicts or verdicts_folder(files.read_object(folder / "manifest.json") or {})
        self._prompts = folder / "prompts" / f"{benchmark}.jsonl"
        self._samples = folder / "samples" / f"{benchmark}.jsonl"
        self._verdicts = folder / verdicts / f"{benchmark}.jsonl"
        self._files: dict[Path, TextIO] = {}
        self.writable = writable
        self.lines: dict[Key, EvaluationSample] = {_key(line): line for line in self._read(self._samples)}
        self.verdicts: dict[Key, StoredVerdict] = {_key(line): line for line in self._read(self._verdicts)}

    def records(self) -> list[dict[str, Any]]:
        """Return the prompt records of the stored responses."""
        from nemo_prorl.data.records import read_records

        return read_records(self._prompts)

    def write_records(self, records: Sequence[dict[str, Any]]) -> None:
        """Write the prompt records; the file gets its name only when it is complete."""
        self._prompts.parent.mkdir(parents=True, exist_ok=True)
        files.write_text(self._prompts, files.json_lines(records))

    def add(self, line: "EvaluationSample") -> None:
        """Store a response."""
        self._append(self._samples, line)
        self.lines[_key(line)] = line

    def judge(self, sample: int, verdict: Verdict) -> None:
        """Store the verdict on a response.  It replaces an earlier verdict."""
        line: StoredVerdict = {**verdict, "sample": sample}
        self._append(self._verdicts, line)
        self.verdicts[_key(line)] = line

    def close(self) -> None:
        for file in self._files.values():
            file.flush()
            os.fsync(file.fileno())
            file.close()
        self._files.clear()

    def _append(self, path: Path, line: Mapping[str, object]) -> None:
        assert self.writable
        if path not in self._files:
            path.parent.mkdir(parents=True, exist_ok=True)
            self._files[path] = path.open("a", encoding="utf-8")
        file = self._files[path]
        file.write(json.dumps(line) + "\n")
        file.flush()  # a killed process then loses no line; only a failing machine can

    def _read(self, path: Path) -> list[Any]:
        if not path.exists():
            return []
        data = path.read_bytes()
        whole = data[: data.rfind(b"\n") + 1]
        if len(whole) < len(data) and self.writable:
            _log.info("%s: removed the last line, which a killed process had not finished", path)
            os.truncate(path, len(whole))
        lines = []
        for number, text in enumerate(whole.split(b"\n")[:-1], 1):
            try:
                line = json.loads(text)
                _key(line)
            except (ValueError, KeyError, TypeError) as error:
                raise DataError(
                    f"{path}:{number}: expected a JSON object with id and sample; got a damaged line ({error})."
                    " Fix: remove this line and run the command again"
                ) from None
            lines.append(line)
        return lines


def _key(line: "EvaluationSample | StoredVerdict") -> Key:
    return str(line["id"]), int(line["sample"])
