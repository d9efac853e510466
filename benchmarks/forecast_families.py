"""What `prorl forecast` says of curves of many families: refused, or an interval that holds the true asymptote.

    .venv/train/bin/python benchmarks/forecast_families.py [--runs 400] [--seed 1]
    .venv/train/bin/python benchmarks/forecast_families.py --real    the validations of benchmarks/results/resets.jsonl
    .venv/train/bin/python benchmarks/forecast_families.py --page    writes the table of the page from RECORD

A simulated run starts at 2 to 50 % of its asymptote (0.3 to 0.9) and is cut at a random multiple of its midpoint, the
compute at which half of the gain is reached.  Its recorded errors are those of 512 prompts.

independent   scores scatter as widely as their recorded errors say: new prompts for each validation.
paired        scores scatter half as widely: the same prompts for each validation, as in every run of this project.
wandering     also, the policy wanders about its curve: a first-order process, correlation 0.8 from one validation to
              the next, standard deviation 0.025 (or 0.01).

"Held" is the share of the runs not refused whose 90 % interval holds the true asymptote; the logarithm has none, so no
interval can hold it.  --real fits the beginnings of recorded runs, and the segments between their hard resets.  Nobody
knows their asymptotes.  An asymptote is refuted if the run later ended above its interval.
"""

import argparse
import math
import re
import sys
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from machine import describe

from nemo_prorl.files import read_objects
from nemo_prorl.report.forecast import forecast
from nemo_prorl.report.read import Curve, RunRecord

Floats = npt.NDArray[np.float64]
Values = Floats | Sequence[float]
Share = Callable[[Floats], Floats]
ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "benchmarks" / "results" / "resets.jsonl"
RECORD = ROOT / "benchmarks" / "results" / "forecast_families-2026-11-26.txt"  # outputs of two ways to forecast
PAGE = ROOT / "docs" / "howto" / "forecast.md"
PROMPTS = 512
MANY, FEW = (25, 80), (10, 16)  # validations
SHARES = tuple(k / 10 for k in range(2, 11))  # beginnings of a real run


# --- families: the share of the gain after a compute, in midpoints ---------------------------------------------------


def scalerl(random: np.random.Generator, exponents: tuple[float, float] = (1.0, 3.0)) -> Share:
    exponent = random.uniform(*exponents)
    return lambda c: c**exponent / (1.0 + c**exponent)


def shallow(random: np.random.Generator) -> Share:
    return scalerl(random, (0.5, 0.8))


def exponential(random: np.random.Generator) -> Share:
    return lambda c: 1.0 - 0.5**c


def logistic(random: np.random.Generator) -> Share:
    steepness = random.uniform(2.0, 6.0)
    zero = 1.0 / (1.0 + math.exp(steepness))
    return lambda c: (1.0 / (1.0 + np.exp(steepness * (1.0 - c))) - zero) / (1.0 - zero)


def power_law(random: np.random.Generator) -> Share:
    power = random.uniform(0.4, 1.5)
    return lambda c: 1.0 - (1.0 + c * (2.0 ** (1.0 / power) - 1.0)) ** -power


def logarithm(random: np.random.Generator) -> Share:
    speed = random.uniform(1.0, 10.0)
    return lambda c: np.log1p(speed * c) / math.log1p(speed * 6.0)


@dataclass(frozen=True)
class Case:
    """A kind of simulated run."""

    family: Callable[[np.random.Generator], Share]
    cut: tuple[float, float] = (2.0, 6.0)  # end of the segment, in midpoints
    paired: bool = True
    validations: tuple[int, int] = MANY
    wander: float = 0.0  # standard deviation

    @property
    def name(self) -> str:
        noise = "paired" if self.paired else "independent"
        wander = f", wandering {self.wander:g}" if self.wander else ""
        counts = "{} to {} validations".format(*self.validations)
        return f"{self.family.__name__}, to {self.cut[0]:g}..{self.cut[1]:g} midpoints, {counts}, {noise}{wander}"


FAMILIES = (scalerl, shallow, exponential, logistic, power_law, logarithm)
CASES = (
    *(Case(family, paired=paired) for family in FAMILIES for paired in (False, True)),
    *(Case(family, validations=FEW) for family in FAMILIES),
    *(Case(family, (1.0, 2.0)) for family in FAMILIES),
    *(Case(scalerl, (0.5, 1.0), paired) for paired in (False, True)),
    *(Case(scalerl, paired=paired, wander=0.025) for paired in (False, True)),
    Case(scalerl, wander=0.025, validations=FEW),
    Case(scalerl, wander=0.01),
)


def simulated(random: np.random.Generator, case: Case) -> tuple[float, tuple[Floats, Floats, Floats]]:
    """Return the asymptote of a run (nan: it has none) and compute, scores and errors of its validations."""
    asymptote, share = random.uniform(0.3, 0.9), case.family(random)
    start, count = random.uniform(0.02, 0.5) * asymptote, int(random.integers(*case.validations))
    compute = np.linspace(0.0, random.uniform(*case.cut), count)
    true, state = start + (asymptote - start) * share(compute), random.normal(0.0, case.wander)
    for k in range(count):
        true[k] += state
        state = 0.8 * state + 0.6 * random.normal(0.0, case.wander)
    true = np.clip(true, 0.0, 1.0)
    scores = random.binomial(PROMPTS, true) / PROMPTS
    if case.paired:
        scores = true + 0.5 * (scores - true)
    errors = np.sqrt(np.maximum(scores * (1.0 - scores), 1.0 / PROMPTS) / PROMPTS)
    return math.nan if case.family is logarithm else asymptote, (compute * 10 ** random.uniform(-1, 1), scores, errors)


def curve_of(compute: Values, scores: Values, errors: Values) -> Curve:
    """Return a run with one step before each validation but the first."""
    run = RunRecord(Path("simulated"), "simulated")
    run.metrics = [{"step": k, "time/step": 3600.0 * (compute[k] - compute[k - 1])} for k in range(1, len(compute))]
    run.events = [
        {"event": "validation", "step": k, "all": {"mean": float(score), "se": float(error)}}
        for k, (score, error) in enumerate(zip(scores, errors, strict=True))
    ]
    return Curve("simulated", run.folder, (run,), is_chain=False)


def reason_of(refusal: str) -> str:
    """Return a refusal without its numbers, by which refusals are counted."""
    return " ".join(word for word in refusal.split() if not any(letter.isdigit() for letter in word))[:60]


def simulate(cases: Sequence[Case], runs: int, seed: int) -> None:
    sys.stdout.write(f"{runs} runs each, seed {seed}\n{'refused':>8} {'held':>6} {'width':>6}\n")
    for case in cases:
        random, refused, held, widths = np.random.default_rng(seed), 0, 0, []
        reasons: Counter[str] = Counter()
        for _ in range(runs):
            asymptote, measured = simulated(random, case)
            found = forecast(curve_of(*measured))
            if found["refused"] is not None:
                refused += 1
                reasons[reason_of(found["refused"])] += 1
                continue
            _, low, high = found["asymptote"]
            held += low <= asymptote <= high
            widths.append(high - low)
        share = f"{held / len(widths):6.0%} {np.median(widths):6.3f}" if widths else f"{'-':>6} {'-':>6}"
        sys.stdout.write(f"{refused / runs:8.0%} {share}  {case.name}\n")
        for reason, count in reasons.most_common(4):
            sys.stdout.write(f"{'':24}  {count / runs:.0%} {reason}\n")
        sys.stdout.flush()


# --- recorded runs ---------------------------------------------------------------------------------------------------


def real_segments() -> list[tuple[str, list[int], list[float], list[float]]]:
    """Return name, steps, scores and errors of each recorded segment; runs with equal validations once."""
    found: list[tuple[str, list[int], list[float], list[float]]] = []
    seen: list[dict[str, float]] = []
    results = read_objects(RESULTS)
    for result in sorted(results, key=lambda result: -result["steps"]):  # a pilot may be the beginning of a run
        validations: dict[str, float] = result["validation"]
        if any(validations.items() <= other.items() for other in seen):
            continue
        seen.append(validations)
        bounds = [0, *result["resets"]]
        for begin, end in zip(bounds, [*bounds[1:], 10**9], strict=True):
            steps = [step for step in sorted(map(int, validations)) if begin <= step <= end]
            if len(steps) >= 8:
                scores, errors = ([result[key][str(s)] for s in steps] for key in ("validation", "validation_se"))
                name = f"{result['arm']}, seed {result['seed']}" + (f", from step {begin}" if begin else "")
                found.append((name, [step - begin for step in steps], scores, errors))
    return found


def real() -> None:
    """Print what the forecast says of the beginnings of recorded runs, and of the segments between their resets."""
    fits = given = refuted = 0
    tests: Counter[tuple[float, Any]] = Counter()
    for name, steps, scores, errors in real_segments():
        became = sum(scores[-3:]) / 3.0
        for share in SHARES:
            count = sum(step <= share * steps[-1] + 0.5 for step in steps)
            if count < 8 or (len(steps) < 20 and share < 1.0):
                continue
            found = forecast(curve_of(steps[:count], scores[:count], errors[:count]))
            fits += 1
            if share == 1.0:
                tests.update((test["share"], test["hit"]) for test in found["backtests"])
            if found["refused"] is not None:
                continue
            value, low, high = found["asymptote"]
            wrong = became > high
            given, refuted = given + 1, refuted + wrong
            sys.stdout.write(
                f"{name}, first {share:.0%}: approaches {value:.3f} ({low:.3f} to {high:.3f}); it became {became:.3f}"
                f"{': refuted' if wrong else ''}\n"
            )
    sys.stdout.write(f"{fits} fits: {fits - given} refused, {given} asymptotes, {refuted} of them refuted\n")
    for share in sorted({share for share, _ in tests}):
        hit, missed, none = (tests[share, value] for value in (True, False, None))
        sys.stdout.write(f"the end, forecast from {share:.0%}: {hit} hit, {missed} missed, {none} not possible\n")


# --- the page --------------------------------------------------------------------------------------------------------


def rows_of(text: str) -> dict[str, tuple[str, str]]:
    """Return {case: (refused, held)} of the output of a simulation."""
    found = re.findall(r"^ *(\d+%) +(\d+%|-) +[\d.-]+ +(.+)$", text, re.M)
    return {name: (refused, held) for refused, held, name in found}


def table() -> str:
    """Return a Markdown table of the cases with the same prompts, from RECORD."""
    alone, now = (rows_of(part) for part in re.split(r"^## ", RECORD.read_text(), flags=re.M)[1:3])
    lines = ["| truth | ScaleRL's family alone: refused, held | `prorl forecast`: refused, held |", "|---|---|---|"]
    for case in (case for case in CASES if case.paired):
        name = case.name
        for usual in (", paired", ", to 2..6 midpoints", ", {} to {} validations".format(*MANY)):
            name = name.replace(usual, "")
        name = name.replace(", to ", ", cut at ").replace("..", " to ")
        cells = [", ".join(rows[case.name]) for rows in (alone, now)]
        lines.append(f"| {name} | {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def page() -> str:
    """Return the page with the table of RECORD."""
    return re.sub(
        r"(<!-- families: [^>]*-->\n).*?(<!-- end of families -->)",
        lambda found: f"{found[1]}{table()}{found[2]}",
        PAGE.read_text(),
        flags=re.S,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=400)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--real", action="store_true", help="recorded runs in the place of simulated ones")
    parser.add_argument("--page", action="store_true", help="run nothing; write the table of the page")
    args = parser.parse_args()
    if args.page:
        PAGE.write_text(page())
        return
    sys.stdout.write(f"{describe()}\n")
    if args.real:
        real()
    else:
        simulate(CASES, args.runs, args.seed)


if __name__ == "__main__":
    main()
