"""Run one section in this process: `python section.py NAME ROWS_FILE SETTINGS_JSON`.

Exit status 0: done; 10: skipped, with the reason in the last row, such as a package that is not installed.
"""

import importlib
import json
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # benchmarks/
sys.path.insert(1, str(Path(__file__).resolve().parents[2]))  # nemo_prorl

SKIPPED = 10
OURS = ("gpu", "machine", "nemo_prorl", "tests")


def main() -> int:
    from gpu import Skipped

    name, rows, text = sys.argv[1:4]
    try:
        run(name, Path(rows), json.loads(text))
    except ModuleNotFoundError as error:
        package = (error.name or "").split(".")[0]
        if package in OURS:
            raise
        reason = f"{package} is not installed here"
    except Skipped as error:
        reason = str(error)
    else:
        return 0
    with open(rows, "a") as out:
        out.write(json.dumps({"what": "skipped", "reason": reason}) + "\n")
    return SKIPPED


def run(name: str, rows: Path, settings: dict[str, Any]) -> None:
    """Run the section; its rows of results go to the file `rows`."""
    import torch

    from gpu.common import Settings, emitter

    if settings["small"]:
        torch.set_num_threads(1)  # threads would wait for each other: tensors are small and cores busy
    importlib.import_module(f"gpu.{name}").run(emitter(rows), Settings(**settings))


if __name__ == "__main__":
    sys.exit(main())
