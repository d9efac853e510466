"""What several commands around rewards share: options, JSON Lines, output.  Light, so that `--help` starts quickly."""

import argparse
import contextlib
import json
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, TextIO, TypeVar

from nemo_prorl.errors import DataError

T = TypeVar("T")


def parse_settings(text: str) -> dict[str, dict[str, Any]]:
    """Return settings by plugin name from an option's JSON."""
    try:
        settings = json.loads(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"not JSON: {error}") from error
    if not isinstance(settings, dict) or not all(isinstance(value, dict) for value in settings.values()):
        raise argparse.ArgumentTypeError('must be an object by plugin name, such as {"math": {"time_budget_s": 3}}')
    return settings


def add_settings(parser: argparse.ArgumentParser, default: Any = {}) -> None:  # noqa: B006 - never changed
    """Add the option for settings of plugins."""
    text = "JSON object: plugin name -> its settings"
    parser.add_argument("--settings", type=parse_settings, default=default, help=text)


def add_unsafe(parser: argparse.ArgumentParser) -> None:
    """Add the option that lets code of the model run without a sandbox."""
    text = "where no sandbox holds, run code of the model with all rights of this user"
    parser.add_argument("--unsafe-no-sandbox", action="store_true", help=text)


def add_server_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the server's options, for `prorl rewards serve` and `python -m nemo_prorl.rewards.server`."""
    parser.add_argument("--workers", type=int, default=1, help="worker processes, shared out; one a plugin at least")
    parser.add_argument("--tasks", default="", help="comma-separated tasks to judge; default: all that are known")
    add_settings(parser)
    parser.add_argument("--token-file", type=Path, required=True, help="file that holds the run's token")
    parser.add_argument("--endpoint-file", type=Path, help="written when ready: address, process and state")
    parser.add_argument("--host", default="127.0.0.1", help="the address to listen at")
    parser.add_argument("--public-host", help="the name that the endpoint file gives; default: --host")
    parser.add_argument("--port", type=int, default=0, help="0: any free one")
    parser.add_argument("--parent-pid", type=int, help="end when this process ends")
    parser.add_argument("--max-queue", type=int, default=8192, help="waiting requests a plugin; more get 429")
    parser.add_argument("--worker-memory-mb", type=int, default=4096, help="private memory of a worker")
    add_unsafe(parser)
    parser.add_argument("--drain-s", type=int, default=20, help="seconds to finish what was begun when stopped")


def read_line(line: str, where: str, read: Callable[[Any], T]) -> T:
    """Return what `read` makes of one line of JSON.  Raises DataError that names `where` and what `read` objects to."""
    try:
        return read(json.loads(line))
    except (json.JSONDecodeError, RecursionError) as error:
        raise DataError(f"{where}: not JSON: {error}; each line must be one JSON object") from error
    except ValueError as error:
        raise DataError(f"{where}: {error}") from error


def read_lines(path: Path, read: Callable[[Any], T]) -> Iterator[tuple[int, T]]:
    """Yield (line number, what `read` makes of it) for the lines of a file that are not empty.  Raises DataError."""
    try:
        with path.open(encoding="utf-8", newline="\n") as file:
            for number, line in enumerate(file, 1):
                if line.strip():
                    yield number, read_line(line, f"{path}:{number}", read)
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(f"{path}: cannot be read: {error}") from error


@contextlib.contextmanager
def opened(out: str) -> Iterator[TextIO]:
    """The file to write results to; `-` is standard output.  Raises DataError where it cannot be written."""
    if out == "-":
        yield sys.stdout
        return
    try:
        with open(out, "w", encoding="utf-8") as file:
            yield file
    except OSError as error:
        raise DataError(f"{out}: cannot be written: {error.strerror}") from error


def printable(text: str) -> str:
    """`text` for a terminal: what is not printable, such as a lone surrogate or an escape, as its code."""
    return "".join(c if c.isprintable() or c == "\n" else c.encode("unicode_escape").decode() for c in text)
