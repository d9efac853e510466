"""Gain and cost of training one step off, in which the engine generates the next batch while the trainer works.

    .venv/train/bin/python benchmarks/one_step_off.py          2 rounds of 12 steps each way (about 10 min on 2 cores)
    ... --rounds 1 --steps 4                                   less
    ... KEY=VALUE                                              overrides for all runs

Two sides run the laptop job.  "shared": engine and trainer take turns on the same cores.  "one step off": the engine
has cores of its own, and generates the next batch while the trainer works on the current batch.

All runs begin with the same warmed-up policy and use the same cores.  Whole runs alternate; each round has another
seed, and every second round has the opposite order.  The seconds of a step are the sum of its phases without
validation; the first `--skip` steps warm caches and do not count.  Held-out rewards are means over all rounds: before
training, after all steps, and after equal training time.  The equal time of a round is the time until the last
validation of its fastest run; each side counts with its last validation within this time.
"""

import argparse
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from machine import describe

from nemo_prorl.files import read_objects

SIDES = {
    "shared": ["cluster=laptop"],
    "one step off": ["cluster=laptop_split"],
}
WORK = [
    "trainer.grpo.context_tokens=128",
    "trainer.grpo.max_response_tokens=64",
    "trainer.grpo.dynamic_sampling.max_staleness=2",
    "trainer.grpo.checkpoint_every=1000",
]
SECONDS = {
    "a step": "time/step",
    "  publish": "time/publish",
    "  rollout": "time/rollout",
    "  log-probabilities": "time/logprobs",
    "  updates": "time/updates",
    "  wait for the batch": "time/ahead",
    "engines waited": "time/ahead/engines_wait_s",
}
NUMBERS = {
    "groups trained on": "rollout/groups",
    "tokens a response": "rollout/response_tokens",
    "age of the weights": "rollout/staleness",
    "stale_gap/share": "stale_gap/share",
    "stale_gap/mean_abs": "stale_gap/mean_abs",
    "engine_gap/mean_abs": "engine_gap/mean_abs",
    "correction/mean_k3": "correction/mean_k3",
    "correction/fraction_capped": "correction/fraction_capped",
    "policy/weight": "policy/weight",
    "policy/clipped_high": "policy/clipped_high",
    "policy/clipped_low": "policy/clipped_low",
    "policy/approx_kl": "policy/approx_kl",
    "policy/grad_norm": "policy/grad_norm",
    "kl": "kl",
}


@dataclass
class Course:
    """A run: the lines of metrics.jsonl, and (training seconds, step, held-out reward) of each validation."""

    metrics: list[dict[str, Any]]
    heldout: list[tuple[float, int, float]]

    @classmethod
    def of(cls, run: Path) -> "Course":
        metrics = read_objects(run / "metrics.jsonl")
        journal = read_objects(run / "journal.jsonl")
        scores = {event["step"]: event["all"]["mean"] for event in journal if event["event"] == "validation"}
        seconds, heldout = 0.0, [(0.0, 0, scores[0])]
        for m in metrics:
            seconds += seconds_of(m)
            if m["step"] in scores:
                heldout.append((seconds, m["step"], scores[m["step"]]))
        return cls(metrics, heldout)

    def within(self, seconds: float) -> float:
        """Return the held-out reward at the last validation within `seconds` of training."""
        return next(score for at, _, score in reversed(self.heldout) if at <= seconds)


def seconds_of(metrics: dict[str, Any]) -> float:
    return float(metrics["time/step"] - (metrics.get("time/validate") or 0.0))


def prorl(command: str, *words: str) -> None:
    subprocess.run(
        [str(Path(sys.executable).with_name("prorl")), command, *WORK, *words], check=True, stdout=sys.stderr
    )


def rounds(folder: Path, args: argparse.Namespace) -> dict[str, list[Course]]:
    """Run all SIDES in turn from the same warmed-up policy; return the runs of each side."""
    prorl("warmup", "cluster=laptop", f"run_dir={folder / 'first'}", *args.overrides)
    base = [f"pretrained_checkpoint.restore_from_path={folder / 'first' / 'base'}", "trainer.warmup.steps=0"]
    courses: dict[str, list[Course]] = {side: [] for side in SIDES}
    for number in range(args.rounds):
        for side in list(SIDES)[:: -1 if number % 2 else 1]:
            run = folder / f"{side.replace(' ', '-')}-{number}"
            words = [*SIDES[side], f"run_dir={run}", f"seed={number + 1}"]
            words += [f"trainer.grpo.max_steps={args.steps}", f"trainer.grpo.validate_every={args.validate_every}"]
            prorl("train", *words, *args.overrides, *base)
            courses[side].append(Course.of(run))
    return courses


def report(courses: dict[str, list[Course]], skip: int) -> list[str]:
    counted = {
        side: [m for course in runs for m in course.metrics[skip:-1]]  # one step off, the last step has no next batch
        for side, runs in courses.items()
    }
    head = f"{'':28s}" + "".join(f"{side:>14s}" for side in SIDES)
    lines = [f"{len(counted['shared'])} steps each way", "", head]

    def row(name: str, values: Sequence[float | None], form: str) -> None:
        lines.append(f"{name:28s}" + "".join(f"{'-' if v is None else format(v, form):>14s}" for v in values))

    def mean(side: str, key: str) -> float | None:
        found = [m[key] for m in counted[side] if m.get(key) is not None]
        return statistics.mean(found) if found else None

    for name, key in SECONDS.items():
        if key == "time/step":
            row(f"{name}, seconds", [statistics.mean(map(seconds_of, counted[side])) for side in SIDES], ".3f")
        else:
            row(name, [mean(side, key) for side in SIDES], ".3f")
    steps = [statistics.mean(map(seconds_of, counted[side])) for side in SIDES]
    row("times as fast as shared", [steps[0] / step for step in steps], ".2f")
    lines.append("")
    for name, key in NUMBERS.items():
        row(name, [mean(side, key) for side in SIDES], ".4g")
    lines += ["", "held-out reward, mean of the rounds"]
    together = list(zip(*courses.values(), strict=True))
    least = [min(course.heldout[-1][0] for course in of_round) for of_round in together]
    last = courses["shared"][0].heldout[-1][1]
    row("before", [statistics.mean(c.heldout[0][2] for c in courses[side]) for side in SIDES], ".3f")
    row(f"after {last} steps", [statistics.mean(c.heldout[-1][2] for c in courses[side]) for side in SIDES], ".3f")
    within = [statistics.mean(c.within(s) for c, s in zip(courses[side], least, strict=True)) for side in SIDES]
    row(f"after {statistics.mean(least):.0f} s of training", within, ".3f")
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument(
        "--skip", type=int, default=2, help="number of first steps of each run to leave out; default: 2"
    )
    parser.add_argument("--validate-every", type=int, default=2)
    parser.add_argument("overrides", nargs="*")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        courses = rounds(Path(folder), args)
    sys.stdout.write("\n".join([describe(), *report(courses, args.skip)]) + "\n")


if __name__ == "__main__":
    main()
