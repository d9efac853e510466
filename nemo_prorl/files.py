"""Files that other processes may read at any time: written in one step, and read although a kill cut them short.

A file gets its name only when it is complete.  JSON Lines files are appended to, so a kill can leave an incomplete last
line.  The run's own files are read tolerantly (`objects_in`, `last_objects`, `Tail`, `read_object`); users' files
strictly (`parsed`), with an error that names the line.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from nemo_prorl.errors import DataError, json_fault

TEMPORARY = ".tmp"  # suffix of a folder, or last suffix of a file, that is not complete


@contextlib.contextmanager
def new_file(path: Path, sync: bool = False) -> Iterator[Path]:
    """Yield the path of a temporary file to write; then give it the name `path`, in place of an older file.

    If the block raises, the temporary file is removed.  `sync`: the content is on the disk before it gets its name.
    """
    temporary = path.with_name(f"{path.name}.{os.getpid()}{TEMPORARY}")
    try:
        yield temporary
        if sync:
            flush_to_disk(temporary)
        os.replace(temporary, path)
    finally:
        with contextlib.suppress(OSError):
            temporary.unlink()


def flush_to_disk(path: Path) -> None:
    """Flush a file's content, or a folder's names, to the disk."""
    fd = os.open(path, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


@contextlib.contextmanager
def new_folder(folder: Path) -> Iterator[Path]:
    """Yield a new empty folder to fill; then give it the name `folder`, which must not exist.

    What a killed process left of an earlier attempt is removed first.
    """
    temporary = folder.with_name(folder.name + TEMPORARY)
    shutil.rmtree(temporary, ignore_errors=True)
    temporary.mkdir(parents=True)
    yield temporary
    os.replace(temporary, folder)


def write_text(path: Path, text: str, sync: bool = False) -> None:
    """Replace a text file in one step."""
    with new_file(path, sync) as temporary:
        temporary.write_text(text, encoding="utf-8")


def write_json(path: Path, value: Any, indent: int | None = 1, sync: bool = False) -> None:
    """Replace a JSON file in one step."""
    write_text(path, json.dumps(value, indent=indent) + "\n", sync)


def json_lines(values: Iterable[Any]) -> str:
    """Return the text of a JSON Lines file."""
    return "".join(json.dumps(value) + "\n" for value in values)


def read_object(path: Path) -> dict[str, Any] | None:
    """Return the object in a JSON file; None if the file is missing, unreadable, or contains anything else."""
    try:
        value = json.loads(path.read_bytes())
    except (OSError, ValueError, RecursionError):
        return None
    return value if isinstance(value, dict) else None


def objects_in(lines: bytes) -> list[dict[str, Any]]:
    """Return the JSON objects of the lines; skip other lines, such as one cut short by a kill."""
    values = []
    for line in lines.splitlines():
        with contextlib.suppress(ValueError, RecursionError):
            values.append(json.loads(line))
    return [value for value in values if isinstance(value, dict)]


def read_objects(path: Path) -> list[dict[str, Any]]:
    """Return the objects of a JSON Lines file; an empty list if the file is missing or cannot be read."""
    try:
        return objects_in(path.read_bytes())
    except OSError:
        return []


def step_of_file(path: Path) -> int | None:
    """Return N of a file step-N.jsonl; None for another name."""
    match = re.fullmatch(r"step-(\d{1,15})\.jsonl", path.name)
    return int(match[1]) if match else None


def step_files(folder: Path) -> dict[int, Path]:
    """Return the files step-N.jsonl of a folder by N, in the order of N."""
    steps = ((step_of_file(path), path) for path in folder.glob("*.jsonl"))
    return dict(sorted((step, path) for step, path in steps if step is not None))


def last_objects(path: Path, num_bytes: int = 1 << 16) -> list[dict[str, Any]]:
    """Return the complete JSON objects in a file's last bytes; an empty list if the file cannot be read."""
    try:
        with path.open("rb") as file:
            file.seek(max(0, file.seek(0, os.SEEK_END) - num_bytes))
            return objects_in(file.read())
    except OSError:
        return []


def append_line(path: Path, value: Any, sync: bool = False) -> None:
    """Append a JSON line to a file.  A line that a kill or a full disk cut short stays a line of its own."""
    with path.open("ab+") as file:
        size = file.seek(0, os.SEEK_END)
        file.seek(max(0, size - 1))
        torn = file.read(1) not in (b"", b"\n")
        file.write(f"{chr(10) if torn else ''}{json.dumps(value)}\n".encode())
        if sync:
            file.flush()
            os.fsync(file.fileno())


class Tail:
    """A reader of the JSON objects appended to a JSON Lines file after the reader was created."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._position = path.stat().st_size if path.is_file() else 0

    def read(self) -> list[dict[str, Any]]:
        """Return the objects appended since the last call.

        An incomplete last line is left to a later call.  Lines that are not JSON are skipped.
        """
        try:
            with self._path.open("rb") as file:
                self._position = min(self._position, file.seek(0, os.SEEK_END))
                file.seek(self._position)
                data = file.read()
        except OSError:  # missing so far, or a shared disk that is briefly unavailable
            return []
        whole = data[: data.rfind(b"\n") + 1]
        self._position += len(whole)
        return objects_in(whole)


def parsed(line: bytes | str, where: str) -> Any:
    """Return the value of one line of JSON.

    Args:
        where: file and line, for the error.

    Raises:
        DataError: the line is not UTF-8, or not JSON (NaN and Infinity are not), or an object has a key twice.
    """
    try:
        text = line.decode() if isinstance(line, bytes) else line
        return json.loads(text, parse_constant=_refuse, object_pairs_hook=unique_keys)
    except UnicodeDecodeError as error:
        raise DataError(f"{where}: not UTF-8: {error}; the file must be JSON Lines in UTF-8") from None
    except (ValueError, RecursionError) as error:
        raise DataError(f"{where}: not JSON: {json_fault(error)}; each line must be one JSON object") from None


def unique_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Return the object of these pairs.  Raises ValueError if a key is there twice: JSON would keep the last value."""
    result = dict(pairs)
    if len(result) < len(pairs):
        names = [name for name, _ in pairs]
        twice = next(name for name in names if names.count(name) > 1)
        raise ValueError(f"the key {twice!r} is there {names.count(twice)} times")
    return result


def _refuse(name: str) -> Any:
    raise ValueError(f"{name} is not JSON")


def modified(file: Path, missing: float = 0.0) -> float:
    """Return the modification time of a file, by the file system's clock; `missing` if there is no such file."""
    try:
        return file.stat().st_mtime
    except OSError:
        return missing


def first_line(error: BaseException) -> str:
    """Return the first line of an error's message, or its class if it has none."""
    return (str(error).strip() or type(error).__name__).splitlines()[0]


def listed(names: Sequence[object], most: int) -> str:
    """Return the first `most` names, and how many more there are."""
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return ", ".join(map(str, names[:most])) + more


def shortened(text: str, limit: int = 80) -> str:
    """Return `text`, cut to `limit` characters; a text that is cut ends in `...`."""
    return text if len(text) <= limit else text[: limit - 3] + "..."
