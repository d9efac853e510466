"""Rows of a data set's own files, whatever form they have, each with the place that an error names."""

import csv
import gzip
import hashlib
import io
import json
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from nemo_prorl.data import parquet as tables
from nemo_prorl.errors import ConfigError, DataError

SUFFIXES = (".jsonl", ".json", ".parquet", ".csv", ".jsonl.gz")
_SHOWN = 12  # columns that an error lists


@dataclass(frozen=True)
class Row:
    """One row with its place: `line` counts lines of JSON Lines, rows of the other forms, from 1."""

    file: str
    line: int
    values: Mapping[str, Any]

    @property
    def where(self) -> str:
        return f"{self.file}:{self.line}"

    def first(self, *names: str) -> Any:
        """The value of the first of these columns that the row has; None where it has none of them."""
        return next((self.values[name] for name in names if self.values.get(name) is not None), None)

    def needed(self, *names: str) -> Any:
        """As `first`, but a column must be there (null is there too).  Raises DataError naming place and columns."""
        for name in names:
            if name in self.values:
                return self.values[name]
        shown = ", ".join(list(self.values)[:_SHOWN])
        others = f" (or {', '.join(names[1:])})" if names[1:] else ""
        raise DataError(
            f"{self.where}: field {names[0]!r}{others} is missing; the row has: {shown}. "
            f"Where it has another name here, say --field {names[0]}=COLUMN"
        )

    def text(self, *names: str) -> str:
        """As `needed`, a string; null is an empty one."""
        value = self.needed(*names)
        if value is None:
            return ""
        if not isinstance(value, str):
            raise self.wrong(names[0], value, "a string")
        return value

    def wrong(self, field: str, value: Any, right: str) -> DataError:
        """The error that a column's value deserves."""
        shown = json.dumps(value, default=repr)
        shown = shown if len(shown) <= 80 else shown[:77] + "..."
        return DataError(f"{self.where}: field {field!r} is {shown}; it must be {right}")


def data_files(path: Path, patterns: Sequence[str] = (), option: str = "--from") -> list[Path]:
    """The data files that `path` names: itself, or those in a folder, in order of their names.

    `patterns`: of a folder only the files that one of these matches.  Raises ConfigError where there is none.
    """
    known = ", ".join(SUFFIXES)
    if path.is_file():
        if not path.name.endswith(SUFFIXES):
            raise ConfigError(f"{option} {path}: no data file that can be read; known are {known}")
        return [path]
    if not path.is_dir():
        raise ConfigError(f"{option} {path}: no such file or folder; give one that holds {known}")
    wanted = patterns or ("*",)
    found = {file for pattern in wanted for file in path.rglob(pattern) if file.name.endswith(SUFFIXES)}
    if not found:
        which = f"{' or '.join(patterns)}, being " if patterns else ""
        raise ConfigError(f"{option} {path}: the folder holds no {which}{known} file")
    return sorted(found)


def read_rows(file: Path, columns: Mapping[str, str]) -> Iterator[Row]:
    """All rows of a file.  `columns`: own name -> the file's column of another name.

    Raises DataError that names file and line: no such form, no objects, a column that is not there.
    """
    for line, values in _values(file):
        if not isinstance(values, dict):
            raise DataError(f"{file}:{line}: a row must be an object, not {type(values).__name__}")
        row = Row(str(file), line, values)
        if columns:
            row = Row(str(file), line, {**values, **{own: row.needed(theirs) for own, theirs in columns.items()}})
        yield row


def _values(file: Path) -> Iterator[tuple[int, Any]]:
    try:
        if file.suffix == ".parquet":
            yield from tables.read_rows(file)
        elif file.name.endswith(".gz"):
            with gzip.open(file, "rb") as packed:
                yield from _lines(file, packed)
        elif file.suffix == ".csv":
            csv.field_size_limit(sys.maxsize)
            with file.open(encoding="utf-8", newline="") as text:
                yield from enumerate(csv.DictReader(text), 1)
        elif file.suffix == ".json":
            yield from _whole(file)
        else:
            with file.open("rb") as raw:
                yield from _lines(file, raw)
    except (OSError, EOFError, UnicodeDecodeError, csv.Error) as error:
        raise DataError(f"{file}: cannot be read: {error}") from error


def _whole(file: Path) -> Iterator[tuple[int, Any]]:
    """A JSON file: a list of objects; or objects one a line, as some data sets name it."""
    raw = file.read_bytes()
    if raw.lstrip()[:1] != b"[":
        yield from _lines(file, io.BytesIO(raw))
        return
    try:
        yield from enumerate(json.loads(raw), 1)
    except ValueError as error:
        raise DataError(f"{file}: not JSON: {error}") from None


def _lines(file: Path, raw: Iterable[bytes]) -> Iterator[tuple[int, Any]]:
    for number, line in enumerate(raw, 1):
        if not line.strip():
            continue
        try:
            yield number, json.loads(line)
        except (ValueError, RecursionError) as error:
            raise DataError(f"{file}:{number}: not JSON: {error}; each line must be one JSON object") from None


def sha256_of(file: Path) -> str:
    with file.open("rb") as raw:
        return hashlib.file_digest(raw, "sha256").hexdigest()
