"""Error rates of the rules for automatic resets: true drops, plateaus and KL spikes against noise.

    .venv/train/bin/python benchmarks/triggers.py [--traces 100] [--seed 1] [--rule plateau_sigma=4.5]...

A trace is 2,000 lines like those of metrics.jsonl, with five validation scores every 10 steps.  Each score starts
between 0.2 and 0.4, rises by 0.1 to 0.4 as 1 - exp(-step / tau), tau between 200 and 1,500 steps, and wanders (a
stationary first-order process of sd 0.005, or 0.01 in the harder case, with 200 steps of memory); each measurement has
independent noise of sd 0.02.  KL grows from 0 as 0.02 (1 - exp(-step / 400)) and has log-normal noise of sd 0.15.

quiet      nothing else.  A false alarm is any drop or spike.  A reported plateau is false if the mean of the scores,
           without noise and wander, gained at least `plateau_gain` over the `plateau_steps` before.
drop       one score falls by 0.10 for good at a random evaluation from the 15th to the 195th.  Found: a drop of that
           score is reported by the third evaluation that shows it.
plateau    all scores stop rising at a random step from 300 to 1,000, after a rise of 0.00015 to 0.0003 per step.
           Found: a plateau is reported after it.  Delay in steps; the window of `plateau_steps` must first fill.
steady     3,000 steps in which the mean score gains 0, 0.01, 0.02 or 0.04 in each 300 steps, validated every 10, 25
           or 50 steps on the same prompts, so that its scatter of 0.009 is half of the recorded standard error of
           0.018, as in benchmarks/results/resets.jsonl (0.0075 to 0.0112 and 0.0154 to 0.0174); the policy itself
           wanders by 0, 0.005 or 0.01 (in resets.jsonl about 0.01).  A report is a false alarm where the gain is at
           least `plateau_gain`, 0.02; a gain of just 0.02 is the limit.
kl spike   KL is 5 times as high, beginning at a random step from 200 to 1,900.  Found: reported within 10 steps.

Multiple testing.  100 quiet traces contain 200 evaluations x 5 scores x 100 = 100,000 tests, each with two windows.  At
4.6 standard deviations (probability 2.1e-6; Student's distribution if the deviation is estimated) 0.2 to 0.4 false
alarms are expected in all.  `algorithms.reset_rules` lowers this number: its threshold is higher by b, because the best
of many means exceeds their average by chance; and each evaluation must show half of the fall.  A drop of 0.10, 5 sd of
one evaluation, is then visible in the mean of two or three: 5 / sqrt(1/3 + 1/10) = 7.6 standard deviations of the
difference to the mean of ten before.
"""

import argparse
import math
import random
import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from statistics import median
from typing import Any

from machine import describe

from nemo_prorl.algorithms.reset_rules import Finding, replay
from nemo_prorl.config import RESET_RULES, ResetRulesConfig

STEPS, EVERY, NOISE, DROP = 2000, 10, 0.02, 0.10
LONG, SCATTER = 3000, 0.009
NAMES = ("math", "code", "stem", "puzzles", "instructions")
Curve = Callable[[int], float]


@dataclass(frozen=True)
class Case:
    """The parameters in which traces differ."""

    error: float | None  # recorded standard error of a score; None: not recorded
    wander: float  # standard deviation of the wander of a score


def rising(rng: random.Random) -> Curve:
    """Return a score by step that rises and saturates, without noise."""
    start, gain, tau = rng.uniform(0.2, 0.4), rng.uniform(0.1, 0.4), rng.uniform(200, 1500)
    return lambda step: start + gain * (1.0 - math.exp(-step / tau))


def stopping(rng: random.Random, stop: int) -> Curve:
    start, slope = rng.uniform(0.2, 0.4), rng.uniform(1.5e-4, 3e-4)
    return lambda step: start + slope * min(step, stop)


def lines_of(
    rng: random.Random,
    curves: dict[str, Curve],
    case: Case,
    drop: tuple[str, int] = ("", 0),
    spike: int = STEPS + 1,
) -> list[dict[str, Any]]:
    """Return the lines of a trace.  `drop`: a score and the first step of its fall; `spike`: first step of high KL."""
    wander, memory = dict.fromkeys(curves, 0.0), math.exp(-EVERY / 200)
    lines: list[dict[str, Any]] = []
    for step in range(1, STEPS + 1):
        kl = 0.02 * (1.0 - math.exp(-(step - 1) / 400)) * math.exp(rng.gauss(0.0, 0.15))
        line: dict[str, Any] = {"step": step, "kl": kl * 5.0 if step >= spike else kl}
        if step % EVERY == 0:
            for name, curve in curves.items():
                wander[name] = memory * wander[name] + math.sqrt(1 - memory**2) * rng.gauss(0.0, case.wander)
                fallen = DROP if name == drop[0] and step >= drop[1] else 0.0
                line[f"validation/{name}"] = curve(step) + wander[name] - fallen + rng.gauss(0.0, NOISE)
        lines.append(line)
    return lines


def told_of(lines: list[dict[str, Any]], rules: ResetRulesConfig, case: Case) -> list[Finding]:
    errors = (
        None if case.error is None else {s: dict.fromkeys(NAMES, case.error) for s in range(EVERY, STEPS + 1, EVERY)}
    )
    return replay(lines, rules, errors)


def quiet(count: int, seed: int, rules: ResetRulesConfig, case: Case) -> str:
    false, traces, plateaus, wrong = dict.fromkeys(RESET_RULES, 0), 0, 0, 0
    for trace in range(count):
        rng = random.Random(f"quiet {seed} {trace}")
        curves = {name: rising(rng) for name in NAMES}
        found = told_of(lines_of(rng, curves, case), rules, case)
        for finding in found:
            false[finding.rule] += finding.rule != "plateau"
        traces += any(f.rule != "plateau" for f in found)
        for finding in (f for f in found if f.rule == "plateau"):
            at = finding.step
            gain = sum(c(at) - c(at - rules.plateau_steps) for c in curves.values()) / len(curves)
            plateaus, wrong = plateaus + 1, wrong + (gain >= rules.plateau_gain)
    return (
        f"quiet     {count} traces: {traces} with a false alarm ({false['validation_drop']} drops,"
        f" {false['kl_spike']} spikes); plateaus reported {plateaus}, false {wrong}"
    )


def drops(count: int, seed: int, rules: ResetRulesConfig, case: Case) -> str:
    delays, early = [], 0
    for trace in range(count):
        rng = random.Random(f"drop {seed} {trace}")
        name, at = rng.choice(NAMES), EVERY * rng.randint(15, 195)
        found = told_of(lines_of(rng, {n: rising(rng) for n in NAMES}, case, (name, at)), rules, case)
        alarms = [f for f in found if f.rule == "validation_drop"]
        early += any(f.step < at or f.subject != name for f in alarms)
        delays += [(f.step - at) // EVERY + 1 for f in alarms if f.step >= at and f.subject == name][:1]
    within = [sum(d <= n for d in delays) for n in (1, 2, 3, 4, 6)]
    return (
        f"drop      {count} traces: found by evaluation 1, 2, 3, 4, 6: {', '.join(map(str, within))};"
        f" ever {len(delays)}; false alarms {early}"
    )


def plateaus(count: int, seed: int, rules: ResetRulesConfig, case: Case) -> str:
    delays, early = [], 0
    for trace in range(count):
        rng = random.Random(f"plateau {seed} {trace}")
        stop = rng.randint(300, 1000)
        found = told_of(lines_of(rng, {n: stopping(rng, stop) for n in NAMES}, case), rules, case)
        steps = [f.step for f in found if f.rule == "plateau"]
        early += any(step < stop for step in steps)
        delays += [step - stop for step in steps if step >= stop][:1]
    ordered = sorted(delays)
    tail = f", 9 in 10 by {ordered[int(0.9 * (len(ordered) - 1))]}" if ordered else ""
    middle = f"median delay {median(ordered):.0f} steps{tail}" if ordered else "none"
    return f"plateau   {count} traces: found {len(delays)}, {middle}; reported before it {early}"


def steady(count: int, seed: int, rules: ResetRulesConfig, every: int, gain: float, wander: float) -> str:
    """Return in how many runs of constant gain a plateau is reported, and the median step of the first report."""
    first = []
    memory = math.exp(-every / 200)
    for trace in range(count):
        rng = random.Random(f"steady {seed} {trace}")
        lines, recorded, drift = list[dict[str, Any]](), {}, rng.gauss(0.0, wander)
        for step in range(every, LONG + 1, every):
            drift = memory * drift + math.sqrt(1 - memory**2) * rng.gauss(0.0, wander)
            value = 0.3 + gain * step / 300 + drift + rng.gauss(0.0, SCATTER)
            lines.append({"step": step, "validation/math": value})
            recorded[step] = {"math": 2 * SCATTER}
        first += [f.step for f in replay(lines, rules, recorded) if f.rule == "plateau"][:1]
    return f"{len(first)} at {median(first):.0f}" if first else "0"


def table(count: int, seed: int, rules: ResetRulesConfig) -> str:
    """Return the table of `steady`: a row for each interval of validations and wander, a column for each gain."""
    gains = (0.0, 0.01, 0.02, 0.04)
    head = "".join(f"{f'gain {gain:g}':>14}" for gain in gains)
    lines = [
        f"steady    of {count} runs of {LONG} steps, those with a plateau reported, at the median step",
        f"{head:>78}",
    ]
    for every in (10, 25, 50):
        for wander in (0.0, 0.005, 0.01):
            cells = "".join(f"{steady(count, seed, rules, every, gain, wander):>14}" for gain in gains)
            lines.append(f"  every {every}, wander {wander:g}".ljust(22) + cells)
    return "\n".join(lines)


def spikes(count: int, seed: int, rules: ResetRulesConfig, case: Case) -> str:
    delays, early = [], 0
    for trace in range(count):
        rng = random.Random(f"spike {seed} {trace}")
        at = rng.randint(200, 1900)
        found = told_of(lines_of(rng, {n: rising(rng) for n in NAMES}, case, spike=at), rules, case)
        steps = [f.step for f in found if f.rule == "kl_spike"]
        early += any(step < at for step in steps)
        delays += [step - at + 1 for step in steps if step >= at][:1]
    within = sum(d <= 10 for d in delays)
    middle = f", median at step {median(delays):.0f} of the spike" if delays else ""
    return f"kl spike  {count} traces: found within 10 steps {within}, ever {len(delays)}{middle}; false alarms {early}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--traces", type=int, default=100)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--rule", action="append", default=[], metavar="KEY=NUMBER", help="another value of a rule")
    args = parser.parse_args()
    changed = dict(word.split("=", 1) for word in args.rule)
    rules = replace(
        ResetRulesConfig(), **{key: type(getattr(ResetRulesConfig(), key))(v) for key, v in changed.items()}
    )
    sys.stdout.write(f"{describe()}\n{args.traces} traces each, seed {args.seed}; {STEPS} steps, {len(NAMES)} scores\n")
    everything, few = (quiet, drops, plateaus, spikes), (quiet, drops)
    sys.stdout.write(f"{' '.join(args.rule) or 'default rules'}\n\n{table(args.traces, args.seed, rules)}\n")
    cases = {
        "standard errors recorded (0.02), wander 0.005": (Case(NOISE, 0.005), everything),
        "standard errors recorded (0.02), wander 0.01": (Case(NOISE, 0.01), few),
        "standard errors recorded half too large (0.03), wander 0.005": (Case(1.5 * NOISE, 0.005), few),
        "no standard errors, noise from scatter only, wander 0.005": (Case(None, 0.005), few),
    }
    for name, (case, works) in cases.items():
        sys.stdout.write(f"\n{name}\n")
        for work in works:
            sys.stdout.write(work(args.traces, args.seed, rules, case) + "\n")
            sys.stdout.flush()


if __name__ == "__main__":
    main()
