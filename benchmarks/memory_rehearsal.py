"""Compares the plan's bytes of a trainer's GPU with those of the real actor at its real size, on the meta device.

    .venv/train/bin/python benchmarks/memory_rehearsal.py [--cases 1.5B-8k,7B-tp2]

tests/planning/rehearse_memory.py says what is real and what is a stand-in.  No GPU is needed, and little memory.
"""

import argparse
import sys
import tempfile
from pathlib import Path

from machine import describe

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

NOTE = """10^9 bytes on the GPU of the first of 32 ranks, the most at a time in each phase.
Not real: the other ranks; what Transformer Engine's kernels take beside the tensors that they keep; the content of
checkpoints; compiled code."""


def main() -> None:
    from tests.planning.memory_cases import CASES, planned, rehearse

    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--cases", default=",".join(CASES), help="comma-separated; default: %(default)s")
    names = parser.parse_args().cases.split(",")
    print(describe())  # noqa: T201
    print(NOTE)  # noqa: T201
    with tempfile.TemporaryDirectory() as out:
        found = rehearse(names, Path(out))
        for name in names:
            print(f"\n{name}: {' '.join(CASES[name].words)}")  # noqa: T201
            print(f"  {'phase':20} {'rehearsed':>9} {'planned':>9}")  # noqa: T201
            plan = planned(name, Path(out))
            for phase, size in found[name]["peaks"].items():
                off = plan[phase] / size - 1
                print(f"  {phase:20} {size / 1e9:9.3f} {plan[phase] / 1e9:9.3f} {off:+7.1%}")  # noqa: T201


if __name__ == "__main__":
    main()
