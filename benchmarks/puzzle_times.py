"""Print how long it takes to verify puzzles: right and wrong answers of each task, in milliseconds of CPU time.

The tasks are the 96 of the paper's authors and the six that `--from ours` has instead.  The plugin `puzzles` judges in
this process; CPU time is what its time budget counts.  `first` is the first answer of a task after a start, when the
scorer may load word lists or tables.  Wrong answers: `words` cannot be read, `long` is 30,000 characters (a sum, then
prose), and `other` is the right answer of another problem of the task.
"""

import argparse
import json
import statistics
import sys
import time
from pathlib import Path
from typing import Any

from machine import describe, libraries_on_stderr
from prorl_reward_puzzles.plugin import PuzzlesReward

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from nemo_prorl.data.prepare import puzzles  # noqa: E402
from nemo_prorl.rewards.interface import RewardRequest, judge  # noqa: E402
from tests.rewards.puzzle_answers import right_answer  # noqa: E402

LONG = ("1 + 2*x - 3 + " * 1100 + "Wait, let me think about this again. " * 400)[:30_000]
KINDS = ("right", "words", "long", "other")


def entries_of(name: str, options: dict[str, Any], count: int, seed: int) -> list[dict[str, Any]]:
    records, _ = puzzles._of_task(name, options, count, 0, seed)
    return [json.loads(json.dumps(record["truth"]["entry"])) for record in records]


def milliseconds(plugin: PuzzlesReward, name: str, entry: dict[str, Any], answer: str) -> tuple[float, float]:
    """Return the CPU time of one verdict and its score."""
    truth = {"dataset": name, "entry": entry}
    request = RewardRequest("x", "puzzles", "<answer></answer>", truth, f"<think>hm</think><answer>{answer}</answer>")
    began = time.process_time()
    verdict = judge(plugin, request)
    spent = time.process_time() - began
    assert verdict["score"] is not None, (name, verdict)
    return 1000 * spent, verdict["score"]


def measure(name: str, options: dict[str, Any], count: int, seed: int) -> tuple[float, dict[str, list[float]], int]:
    """Return the time of the first verdict, those of each kind of answer, and how many right answers score 1."""
    plugin, entries = PuzzlesReward(), entries_of(name, options, count, seed)
    golds = [right_answer(name, entry) for entry in entries]
    first, _ = milliseconds(plugin, name, entries[0], golds[0])
    times: dict[str, list[float]] = {kind: [] for kind in KINDS}
    accepted = 0
    for at, entry in enumerate(entries):
        given = dict(zip(KINDS, (golds[at], "I do not know.", LONG, golds[at - 1]), strict=True))
        for kind, answer in given.items():
            spent, score = milliseconds(plugin, name, entry, answer)
            times[kind].append(spent)
            accepted += kind == "right" and score >= 1.0
    return first, times, accepted


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--entries", type=int, default=40, help="problems of each task; default: 40")
    parser.add_argument("--seed", type=int, default=41, help="seed of the problems; default: 41")
    parser.add_argument("tasks", nargs="*", help="tasks to measure; default: all")
    given = parser.parse_args()
    lists = [puzzles.read_tasks(path) for path in (puzzles.tasks_file(None), puzzles.tasks_file(puzzles.OURS)) if path]
    tasks = lists[1] | lists[0]
    sys.stdout.write(f"{describe()}\n{given.entries} problems of each task; CPU milliseconds, median and slowest\n")
    sys.stdout.write(f"{'task':<26}{'first':>8}" + "".join(f"{kind:>18}" for kind in KINDS) + "   accepted\n")
    slowest: dict[str, tuple[float, str]] = dict.fromkeys(("first", *KINDS), (0.0, ""))
    for name in sorted(given.tasks or tasks):
        with libraries_on_stderr():
            first, times, accepted = measure(name, tasks[name], given.entries, given.seed)
        cells = "".join(f"{statistics.median(times[kind]):>9.2f}{max(times[kind]):>9.2f}" for kind in KINDS)
        ours = "" if name in lists[0] else "  (only in ours)"
        sys.stdout.write(f"{name:<26}{first:>8.1f}{cells}{accepted:>8}/{given.entries}{ours}\n")
        sys.stdout.flush()
        for kind, value in {"first": first, **{kind: max(times[kind]) for kind in KINDS}}.items():
            slowest[kind] = max(slowest[kind], (value, name))
    for kind, (value, name) in slowest.items():
        sys.stdout.write(f"slowest {kind}: {value:.1f} ms ({name})\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
