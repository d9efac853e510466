"""JSON Lines files that tests write and read."""

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from nemo_prorl.files import json_lines


def write_lines(path: Path, values: Iterable[Any]) -> Path:
    """Write the file, in a folder that is made where it is missing."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json_lines(values))
    return path


def read_lines(path: Path) -> list[dict[str, Any]]:
    """Raises an error where the file is missing or a line is not whole; `files.read_objects` leaves such lines out."""
    return [json.loads(line) for line in path.read_bytes().splitlines()]
