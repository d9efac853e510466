"""Run one section in this process: `python section.py NAME ROWS_FILE SETTINGS_JSON`.

Exit status 0: done; 10: skipped, with the reason in the last row.
"""

import importlib
import json
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # benchmarks/
sys.path.insert(1, str(Path(__file__).resolve().parents[2]))  # nemo_prorl

SKIPPED = 10


def main() -> int:
    import torch

    from gpu.common import Settings, Skipped, emitter

    name, rows, text = sys.argv[1:4]
    settings = Settings(**json.loads(text))
    if settings.small:
        torch.set_num_threads(1)  # threads would wait for each other: tensors are small and cores busy
    emit = emitter(Path(rows))
    try:
        importlib.import_module(f"gpu.{name}").run(emit, settings)
    except Skipped as reason:
        emit("skipped", reason=str(reason))
        return SKIPPED
    return 0


if __name__ == "__main__":
    sys.exit(main())
