"""Reader of a data set's files in all supported formats; each row has its file and line, for error messages."""

import csv
import gzip
import hashlib
import io
import json
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TextIO

from nemo_prorl.data import parquet as tables
from nemo_prorl.errors import ConfigError, DataError
from nemo_prorl.files import parsed, shortened, unique_keys

SUFFIXES = (".jsonl", ".json", ".parquet", ".csv", ".jsonl.gz")
_SHOWN = 12  # most columns that an error message lists


@dataclass(frozen=True)
class Row:
    """A row with its file and line.

    `line` counts from 1: in JSON Lines and CSV, the line in which the row begins; in other formats, the row's number.
    """

    file: str
    line: int
    values: Mapping[str, Any]

    @property
    def where(self) -> str:
        return f"{self.file}:{self.line}"

    def first(self, *names: str) -> Any:
        """Return the first value of these columns that is not null; None if all are null or missing."""
        return next((self.values[name] for name in names if self.values.get(name) is not None), None)

    def needed(self, *names: str) -> Any:
        """Return the value of the first of these columns that exists; the value may be None.

        Raises DataError if the row has none of the columns.
        """
        for name in names:
            if name in self.values:
                return self.values[name]
        raise self._missing([names])

    def require(self, *fields: Sequence[str]) -> None:
        """Raise DataError that names all missing fields; `fields`: for each field, the names that it may have."""
        if missing := [names for names in fields if not any(name in self.values for name in names)]:
            raise self._missing(missing)

    def _missing(self, fields: Sequence[Sequence[str]]) -> DataError:
        named = [f"{names[0]!r}" + (f" (or {', '.join(names[1:])})" if names[1:] else "") for names in fields]
        options = " ".join(f"--field {names[0]}=COLUMN" for names in fields)
        subject, cause = ("field {} is", "the column has another name")
        if len(fields) > 1:
            subject, cause = ("fields {} are", "the columns have other names")
        return DataError(
            f"{self.where}: {subject.format(' and '.join(named))} missing; the row has: "
            f"{', '.join(list(self.values)[:_SHOWN])}.  Fix: {options} if {cause}"
        )

    def column(self, option: str, name: str) -> Any:
        """Return the value of a column that an option names; raises DataError if the row does not have it."""
        if name not in self.values:
            shown = ", ".join(list(self.values)[:_SHOWN])
            raise DataError(f"{self.where}: {option}: there is no column {name!r}; the row has: {shown}")
        return self.values[name]

    def text(self, *names: str) -> str:
        """Return the string in the first of these columns that exists; "" for null.

        Raises DataError if the row has none of the columns, or if the value is not a string.
        """
        value = self.needed(*names)
        if value is None:
            return ""
        if not isinstance(value, str):
            raise self.wrong(names[0], value, "a string")
        return value

    def wrong(self, field: str, value: Any, right: str) -> DataError:
        """Return the error for a wrong value of a field; `right` describes the right value."""
        shown = shortened(json.dumps(value, default=repr))
        return DataError(f"{self.where}: field {field!r} is {shown}; it must be {right}")


def data_files(path: Path, patterns: Sequence[str] = (), option: str = "--from") -> list[Path]:
    """Return `path` itself, or the data files in the folder `path`, sorted by name.

    `patterns`: return only files of the folder that match one of them.  Raises ConfigError if no file is found.
    """
    known = ", ".join(SUFFIXES)
    if path.is_file():
        if not path.name.endswith(SUFFIXES):
            raise ConfigError(f"{option} {path}: not a supported data file; expected one of {known}")
        return [path]
    if not path.is_dir():
        raise ConfigError(f"{option} {path}: no such file or folder; expected one with data in {known}")
    wanted = patterns or ("*",)
    absent = [name for name in patterns if "*" not in name and not any(path.rglob(name))]
    if absent and len(absent) < len(patterns):
        raise ConfigError(f"{option} {path}: the folder lacks {', '.join(absent)}; expected {', '.join(patterns)}")
    files = {file for pattern in wanted for file in path.rglob(pattern) if file.name.endswith(SUFFIXES)}
    if not files:
        which = f" that matches {' or '.join(patterns)}" if patterns else ""
        raise ConfigError(f"{option} {path}: the folder contains no {known} file{which}")
    return sorted(files)


def used_patterns(path: Path, patterns: Sequence[str]) -> Sequence[str]:
    """Return the patterns that a file of the folder matches; without any, the files have other names: all are read."""
    return [name for name in patterns if path.is_dir() and any(path.rglob(name))]


def read_rows(file: Path, columns: Mapping[str, str]) -> Iterator[Row]:
    """Yield the rows of a file.  `columns`: field -> name of its column in the file.

    Raises DataError that names file and line of invalid data, a row that is not an object, or a missing column.
    """
    for line, values in _values(file):
        if not isinstance(values, dict):
            raise DataError(f"{file}:{line}: a row must be an object, not {type(values).__name__}")
        row = Row(str(file), line, values)
        if columns:
            fields = {name: row.column(f"--field {name}={column}", column) for name, column in columns.items()}
            row = Row(str(file), line, {**values, **fields})
        yield row


def _values(file: Path) -> Iterator[tuple[int, Any]]:
    try:
        if file.suffix == ".parquet":
            yield from tables.read_rows(file, with_null=True)
        elif file.name.endswith(".gz"):
            with gzip.open(file, "rb") as packed:
                yield from _lines(file, packed)
        elif file.suffix == ".csv":
            with file.open(encoding="utf-8-sig", newline="") as text:
                yield from _table(file, text)
        elif file.suffix == ".json":
            yield from _whole(file)
        else:
            with file.open("rb") as raw:
                yield from _lines(file, raw)
    except UnicodeDecodeError as error:
        raise DataError(f"{file}: not UTF-8 ({error}).  Fix: save or convert the file as UTF-8") from error
    except (OSError, EOFError, csv.Error) as error:
        raise DataError(f"{file}: cannot be read: {error}") from error


def _table(file: Path, text: TextIO) -> Iterator[tuple[int, Any]]:
    """Yield the rows of a CSV file, whose columns are separated by commas, semicolons or tabs as in its first line."""
    csv.field_size_limit(sys.maxsize)
    head = text.readline()
    text.seek(0)
    separator = max(",;\t", key=head.count)
    rows = csv.DictReader(text, delimiter=separator)
    names = rows.fieldnames or []
    if twice := [name for name in names if name and names.count(name) > 1]:
        raise DataError(
            f"{file}:1: {names.count(twice[0])} columns have the name {twice[0]!r}.  Fix: give each column its own name"
        )
    line = rows.line_num + 1
    for values in rows:
        surplus, absent = values.get(None, ()), sum(value is None for value in values.values())
        if surplus or absent:
            raise DataError(
                f"{file}:{line}: the row has {len(names) + len(surplus) - absent} values for {len(names)} columns."
                f"  Fix: put a value that contains {separator!r} or a line break in quotation marks; write"
                f" {separator!r} between the values of all columns, also the empty ones"
            )
        yield line, values
        line = rows.line_num + 1


def _whole(file: Path) -> Iterator[tuple[int, Any]]:
    """Yield the rows of a .json file: a JSON list of objects, or one JSON object per line."""
    raw = file.read_bytes()
    if raw.lstrip()[:1] != b"[":
        yield from _lines(file, io.BytesIO(raw))
        return
    try:
        yield from enumerate(json.loads(raw, object_pairs_hook=unique_keys), 1)
    except ValueError as error:
        raise DataError(f"{file}: not JSON: {error}") from None


def _lines(file: Path, raw: Iterable[bytes]) -> Iterator[tuple[int, Any]]:
    for number, line in enumerate(raw, 1):
        if line.strip():
            yield number, parsed(line, f"{file}:{number}")


def sha256_of(file: Path) -> str:
    with file.open("rb") as raw:
        return hashlib.file_digest(raw, "sha256").hexdigest()
