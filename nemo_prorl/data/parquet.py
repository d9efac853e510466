"""Reads and writes prompt records in Parquet files.

Columns: `id`, `task`, `source` (text), `prompt` (text, or a list of messages), `truth` and `meta` (JSON as text, since
their fields differ by task; structs are read too).
"""

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from nemo_prorl.errors import DataError
from nemo_prorl.files import first_line

if TYPE_CHECKING:
    from nemo_prorl.data.records import PromptRecord

_BATCH_ROWS = 1024


def is_parquet(path: str | Path) -> bool:
    return Path(path).suffix == ".parquet"


def read_rows(path: str | Path, with_null: bool = False) -> Iterator[tuple[int, dict[str, Any]]]:
    """Yield each row with its number, from 1.  Raises DataError for an unreadable file.

    `with_null`: keep the columns that are null in a row; otherwise they are left out.
    """
    import pyarrow
    import pyarrow.parquet

    number = 0
    try:
        with pyarrow.parquet.ParquetFile(path) as file:
            for batch in file.iter_batches(batch_size=_BATCH_ROWS):
                for row in batch.to_pylist():
                    number += 1
                    yield number, {key: value for key, value in row.items() if with_null or value is not None}
    except pyarrow.ArrowException as error:
        raise DataError(f"{path}: not a readable Parquet file: {first_line(error)}") from error


def has_messages(path: str | Path) -> bool:
    """Return whether the prompts of a file are message lists; False for an unreadable file."""
    import pyarrow
    import pyarrow.parquet

    try:
        schema = pyarrow.parquet.read_schema(path)
        return "prompt" in schema.names and bool(pyarrow.types.is_list(schema.field("prompt").type))
    except (pyarrow.ArrowException, OSError):
        return False


def record_of(row: dict[str, Any], where: str) -> dict[str, Any]:
    """Return a row as a prompt record, with `truth` and `meta` as objects.  Raises DataError for bad JSON."""
    record = dict(row)
    for column in ("truth", "meta"):
        value = row.get(column)
        if isinstance(value, str):
            try:
                record[column] = json.loads(value)
            except ValueError as error:
                raise DataError(f"{where}: field {column!r} is not JSON: {error}; it must be an object") from None
        elif isinstance(value, dict):  # a struct has the fields of all rows, null where this row lacks a field
            record[column] = {key: item for key, item in value.items() if item is not None}
            try:
                json.dumps(record[column], allow_nan=False)
            except (TypeError, ValueError) as error:
                raise DataError(f"{where}: field {column!r}: {error}; expected values that JSON has") from None
    return record


def write_records(path: Path, rows: "Sequence[PromptRecord]") -> None:
    """Write prompt records to a Parquet file.  Either all prompts are text, or all are message lists."""
    import pyarrow
    import pyarrow.parquet

    message = pyarrow.struct([("role", pyarrow.string()), ("content", pyarrow.string())])
    texts = all(isinstance(row["prompt"], str) for row in rows)
    kinds = {"prompt": pyarrow.string() if texts else pyarrow.list_(message)}
    columns = ("id", "task", "prompt", "truth", "source", "meta")
    schema = pyarrow.schema([(name, kinds.get(name, pyarrow.string())) for name in columns])
    plain = [{**row, "truth": json.dumps(row["truth"]), "meta": json.dumps(row.get("meta", {}))} for row in rows]
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(plain, schema=schema), path)
