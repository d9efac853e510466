"""Options, JSON Lines input and output shared by the reward commands.  Imports little, so that `--help` is fast."""

import argparse
import contextlib
import json
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, TextIO, TypeVar

from nemo_prorl.errors import DataError
from nemo_prorl.files import parsed

T = TypeVar("T")


def parse_settings(text: str) -> dict[str, dict[str, Any]]:
    """Return the settings by plugin name from the JSON text of `--settings`."""
    try:
        settings = json.loads(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"not JSON: {error}") from error
    if not isinstance(settings, dict) or not all(isinstance(value, dict) for value in settings.values()):
        raise argparse.ArgumentTypeError('must map plugin names to settings, such as {"math": {"time_budget_s": 3}}')
    return settings


def add_settings(parser: argparse.ArgumentParser, default: Any = {}) -> None:  # noqa: B006 - never changed
    """Add the option `--settings`."""
    text = 'plugin settings as JSON, such as {"math": {"time_budget_s": 3}}; default: those of the plugins'
    parser.add_argument("--settings", type=parse_settings, default=default, help=text)


def add_unsafe(parser: argparse.ArgumentParser) -> None:
    """Add the option `--unsafe-no-sandbox`."""
    text = "if no sandbox works on this machine, run model-written code with all rights of this user"
    parser.add_argument("--unsafe-no-sandbox", action="store_true", help=text)


def add_server_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of the server, for `prorl rewards serve` and `python -m nemo_prorl.rewards.server`."""
    workers = "total worker processes, divided among the plugins, at least one per plugin; default: 1"
    add = parser.add_argument
    add("--workers", type=int, default=1, help=workers)
    add("--tasks", default="", help="comma-separated tasks to judge; default: all known tasks")
    add_settings(parser)
    add("--token-file", type=Path, required=True, help="file with the token that clients must send")
    add("--endpoint-file", type=Path, help="file to write with URL, process id and state of the server")
    add("--host", default="127.0.0.1", help="address to listen on; default: 127.0.0.1")
    add("--public-host", help="host name written to the endpoint file; default: --host")
    add("--port", type=int, default=0, help="TCP port; default: 0, any free port")
    add("--parent-pid", type=int, help="process id; the server stops when this process ends; default: none")
    queue = "maximum waiting requests per plugin; more get HTTP 429; default: 8192"
    add("--max-queue", type=int, default=8192, help=queue)
    add("--worker-memory-mb", type=int, default=4096, help="MiB of private memory per worker; default: 4096")
    add_unsafe(parser)
    add("--drain-s", type=int, default=20, help="seconds to finish open requests after a stop signal; default: 20")


def read_line(line: bytes | str, where: str, read: Callable[[Any], T]) -> T:
    """Parse one line of JSON and return the result of `read` on it.

    Args:
        where: File and line, for error messages.
        read: Converts the parsed object; raises ValueError if the object is wrong.

    Raises:
        DataError: The line is not JSON, or `read` raised ValueError.
    """
    value = parsed(line, where)
    try:
        return read(value)
    except ValueError as error:
        raise DataError(f"{where}: {error}") from error


def read_lines(path: Path, read: Callable[[Any], T]) -> Iterator[tuple[int, T]]:
    """Yield (line number, result of `read`) for each non-empty line of a JSON Lines file.

    Raises:
        DataError: The file cannot be read, a line is not JSON, or `read` raised ValueError.
    """
    try:
        with path.open("rb") as file:
            for number, line in enumerate(file, 1):
                if line.strip():
                    yield number, read_line(line, f"{path}:{number}", read)
    except OSError as error:
        raise DataError(f"{path}: cannot be read: {error}") from error


@contextlib.contextmanager
def opened(out: str) -> Iterator[TextIO]:
    """Open the file for results; `-` is standard output.  Raises DataError if it cannot be written."""
    if out == "-":
        yield sys.stdout
        return
    try:
        with open(out, "w", encoding="utf-8") as file:
            yield file
    except OSError as error:
        raise DataError(f"{out}: cannot be written: {error.strerror}") from error


def printable(text: str) -> str:
    """Return `text` with each unprintable character except line feed as an escape sequence, safe for a terminal."""
    return "".join(c if c.isprintable() or c == "\n" else c.encode("unicode_escape").decode() for c in text)
