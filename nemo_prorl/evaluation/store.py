"""What an evaluation keeps in its folder: prompts, responses, verdicts; one JSON object a line, appended as they come.

A process killed at any moment leaves whole lines and at most one torn one at the end, which is cut off.
"""

import json
import logging
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO

from nemo_prorl.errors import ConfigError, DataError
from nemo_prorl.rewards.interface import Verdict

if TYPE_CHECKING:  # the command line reads files without the catalogue's libraries
    from nemo_prorl.evaluation.formats import EvaluationSample

_log = logging.getLogger(__name__)

Key = tuple[str, int]  # (prompt id, sample)


class StoredVerdict(Verdict):
    """The verdict on one response."""

    sample: int


def read_json(path: Path) -> Any:
    """Read a JSON object of an evaluation.  Raises ConfigError if there is none, DataError if it is broken."""
    try:
        value = json.loads(path.read_text())
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read: {error.strerror}; name what prorl evaluate --out wrote") from error
    except ValueError as error:
        raise DataError(f"{path}: not JSON: {error}") from error
    if not isinstance(value, dict) or value.get("format") != 1:
        raise DataError(f"{path}: field 'format' must be 1, as prorl evaluate writes it")
    return value


class Store:
    """One benchmark's lines in an evaluation's folder."""

    def __init__(self, folder: Path, benchmark: str, writable: bool = True) -> None:
        self._prompts = folder / "prompts" / f"{benchmark}.jsonl"
        self._samples = folder / "samples" / f"{benchmark}.jsonl"
        self._verdicts = folder / "verdicts" / f"{benchmark}.jsonl"
        self._files: dict[Path, TextIO] = {}
        self.writable = writable
        self.lines: dict[Key, EvaluationSample] = {_key(line): line for line in self._read(self._samples)}
        self.verdicts: dict[Key, StoredVerdict] = {_key(line): line for line in self._read(self._verdicts)}

    def records(self) -> list[dict[str, Any]]:
        """The prompt records that the samples answer."""
        from nemo_prorl.data.records import read_records

        return read_records(self._prompts)

    def write_records(self, records: Sequence[dict[str, Any]]) -> None:
        """As a whole, under its name only when complete."""
        self._prompts.parent.mkdir(parents=True, exist_ok=True)
        temporary = self._prompts.with_suffix(".tmp")
        temporary.write_text("".join(json.dumps(record) + "\n" for record in records))
        os.replace(temporary, self._prompts)

    def add(self, line: "EvaluationSample") -> None:
        """Store a response."""
        self._append(self._samples, line)
        self.lines[_key(line)] = line

    def judge(self, sample: int, verdict: Verdict) -> None:
        """Store the verdict on a response; a later one takes the place of an earlier."""
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
        file.flush()  # a killed process loses nothing that it wrote; only a machine that fails could

    def _read(self, path: Path) -> list[Any]:
        if not path.exists():
            return []
        data = path.read_bytes()
        whole = data[: data.rfind(b"\n") + 1]
        if len(whole) < len(data) and self.writable:
            _log.info("%s: cut off a line that a killed process left unfinished", path)
            os.truncate(path, len(whole))
        lines = []
        for number, text in enumerate(whole.split(b"\n")[:-1], 1):
            try:
                line = json.loads(text)
                _key(line)
            except (ValueError, KeyError, TypeError) as error:
                raise DataError(
                    f"{path}:{number}: no line of an evaluation ({error}); remove it to make it anew"
                ) from None
            lines.append(line)
        return lines


def _key(line: "EvaluationSample | StoredVerdict") -> Key:
    return str(line["id"]), int(line["sample"])
