"""Tests of the differences between arms with three seeds: ablations.jsonl and resets.jsonl, recomputed.

    .venv/train/bin/python benchmarks/significance.py > benchmarks/results/significance.txt

Arms are compared seed by seed.  With three seeds a t value has 2 degrees of freedom: 95 % intervals are 4.30 standard
errors wide to each side, not 2.  "Holm" is the p value after Holm's correction for all comparisons of the table.  The
output has no date: it depends on the two result files only, and a test compares it.
"""

import argparse
import math
import statistics
import sys
from collections.abc import Iterator, Sequence

import ablations
import resets

T95 = resets.T95[3]
LAST = range(resets.STEPS - 3 * resets.EVERY, resets.STEPS + 1, resets.EVERY)


def p_value(t: float) -> float:
    """Return the two-sided p value of a t value with 2 degrees of freedom."""
    return 1 - abs(t) / math.sqrt(t * t + 2)


def holm(p_values: Sequence[float]) -> list[float]:
    """Return the p values after Holm's correction, in the order of the arguments."""
    adjusted, largest = [0.0] * len(p_values), 0.0
    for rank, index in enumerate(sorted(range(len(p_values)), key=p_values.__getitem__)):
        largest = max(largest, min(1.0, p_values[index] * (len(p_values) - rank)))
        adjusted[index] = largest
    return adjusted


def comparisons(pairs: dict[str, list[float]]) -> Iterator[str]:
    """Yield a line for each comparison: the mean difference of three seeds, its error, t, p, and the interval."""
    same = [name for name, values in pairs.items() if not any(values)]
    pairs = {name: values for name, values in pairs.items() if any(values)}
    means = {name: statistics.mean(values) for name, values in pairs.items()}
    errors = {name: statistics.stdev(values) / math.sqrt(len(values)) for name, values in pairs.items()}
    p_values = [p_value(means[name] / errors[name]) for name in pairs]
    yield f"{'':42}{'difference':>12}{'error':>9}{'t':>7}{'p':>8}{'Holm':>8}   95 % interval"
    for (name, values), p, corrected in zip(pairs.items(), p_values, holm(p_values), strict=True):
        mean, error = means[name], errors[name]
        interval = f"{mean - T95 * error:+.3f} to {mean + T95 * error:+.3f}"
        assert len(values) == 3  # T95 and p_value are those of three seeds
        yield f"{name:42}{mean:+12.4f}{error:9.4f}{mean / error:7.1f}{p:8.3f}{corrected:8.2f}   {interval}"
    yield from (f"{name:42}equal in each seed" for name in same)


def of_ablations() -> dict[str, list[float]]:
    """Return the differences of the gain of each arm from the first of its group, seed by seed."""
    gains = {(result["arm"], result["seed"]): ablations.gain(result) for result in ablations.results()}
    return {
        f"{arm} against {first}": [gains[arm, seed] - gains[first, seed] for seed in ablations.SEEDS]
        for first, *others in ablations.GROUPS.values()
        for arm in others
        if all((arm, seed) in gains and (first, seed) in gains for seed in ablations.SEEDS)
    }


def of_entropy() -> Iterator[str]:
    """Yield a line for each arm of the ablations: entropy over the first and last ten steps, and seconds."""
    yield f"{'means over seeds':42}{'entropy, first 10':>17}{'last 10':>9}{'ratio':>7}{'seconds of seed 1':>19}"
    for arm in ablations.ARMS:
        if mine := [result for result in ablations.results() if result["arm"] == arm]:
            first = statistics.mean(ablations.tail_mean(result["entropy"][:10]) for result in mine)
            last = statistics.mean(ablations.tail_mean(result["entropy"]) for result in mine)
            seconds = next(result["seconds"][-1] for result in mine if result["seed"] == 1)
            yield f"{arm:42}{first:17.3f}{last:9.3f}{last / first:7.2f}{seconds:19.0f}"


def of_resets() -> dict[str, list[float]]:
    """Return the differences of the score at the end of each arm from "no reset" (and others), seed by seed."""
    runs = [result for result in resets.results() if not result["arm"].startswith("pilot")]
    ends = {(result["arm"], result["seed"]): resets.score(result, LAST) for result in runs}
    pairs = [(arm, "no reset") for arm in resets.ARMS if arm != "no reset"] + [("reset every 500", "no reference")]
    return {
        f"{arm} against {other}": [ends[arm, seed] - ends[other, seed] for seed in resets.SEEDS]
        for arm, other in pairs
        if all((one, seed) in ends for one in (arm, other) for seed in resets.SEEDS)
    }


def slope(steps: Sequence[int], scores: Sequence[float]) -> tuple[float, float]:
    """Return the slope of a straight line through scores, and its standard error."""
    middle, mean = statistics.mean(steps), statistics.mean(scores)
    square = sum((step - middle) ** 2 for step in steps)
    gain = sum((step - middle) * (score - mean) for step, score in zip(steps, scores, strict=True)) / square
    rest = sum((score - mean - gain * (step - middle)) ** 2 for step, score in zip(steps, scores, strict=True))
    return gain, math.sqrt(rest / (len(steps) - 2) / square)


def of_curves() -> Iterator[str]:
    """Yield lines about single runs: gains late in a run, what each reset brought, and what each run ended with."""
    runs = [result for result in resets.results() if not result["arm"].startswith("pilot")]
    yield "gain in 300 steps from step 1,000 to 3,000, and its standard error (a straight line)"
    for run in runs:
        steps = [step for step in sorted(map(int, run["validation"])) if step >= 1000]
        gain, error = slope(steps, [run["validation"][str(step)] for step in steps])
        yield f"{run['arm'] + ', seed ' + str(run['seed']):42}{300 * gain:12.4f}{300 * error:9.4f}"
    yield ""
    yield "gain after each reset, less that of the twin without resets over the same steps"
    for arm in resets.ARMS:
        if gains := resets.after_resets(runs, arm):
            error = statistics.stdev(gains) / math.sqrt(len(gains))
            above = sum(gain > 0 for gain in gains)
            yield f"{arm:42}{statistics.mean(gains):+12.4f}{error:9.4f}   above 0: {above} of {len(gains)}"
    yield ""
    yield f"{'at the end':42}{'score':>12}{'entropy':>9}{'KL':>7}{'groups with a signal':>22}{'tokens':>12}"
    for run in runs:
        means = {name: statistics.mean(run["means"][name][-3:]) for name in ("entropy", "kl", "keep_rate/all")}
        yield (
            f"{run['arm'] + ', seed ' + str(run['seed']):42}{resets.score(run, LAST):12.3f}{means['entropy']:9.2f}"
            f"{means['kl']:7.2f}{means['keep_rate/all']:22.2f}{run['tokens']:12,}"
        )


def of_pilots() -> Iterator[str]:
    """Yield a line for each pilot: its score beside that of coefficient 0, by four validations and by the last one."""
    pilots = [result for result in resets.results() if result["arm"].startswith("pilot")]
    ends = range(resets.PILOT_STEPS - 3 * resets.EVERY, resets.PILOT_STEPS + 1, resets.EVERY)
    last = str(resets.PILOT_STEPS)
    yield f"{'':42}{'four validations':>18}{'below 0':>9}{'the last one':>14}{'below 0':>9}{'its error':>11}"
    for pilot in pilots:
        four, one = resets.score(pilot, ends), pilot["validation"][last]
        below = resets.score(pilots[0], ends) - four, pilots[0]["validation"][last] - one
        error = pilot["validation_se"][last]
        yield f"{pilot['arm']:42}{four:18.3f}{below[0]:9.3f}{one:14.3f}{below[1]:9.3f}{error:11.3f}"


def main() -> int:
    argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter).parse_args()
    lines = [
        "ablations: gain against the first of the group, three seeds",
        *comparisons(of_ablations()),
        "",
        *of_entropy(),
        "",
    ]
    lines += ["resets: score at the end, three seeds", *comparisons(of_resets()), "", *of_curves(), ""]
    lines += ["choice of the KL coefficient: scores after 1,000 steps, seed 1", *of_pilots()]
    sys.stdout.write("\n".join(lines) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
