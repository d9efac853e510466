"""`prorl forecast RUN...`: where a run will end, from its validations, and what to do next.

A hard reset and a new stage begin a segment of their own, because they change what the policy is held to.
"""

import argparse
import json
import math
import sys
from bisect import bisect_right
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from shlex import quote
from typing import TYPE_CHECKING, Any

from nemo_prorl.planning.columns import columns
from nemo_prorl.report.read import Curve, RunRecord, number, part_of, read_curves

if TYPE_CHECKING:
    from nemo_prorl.report.scaling import Curves

LEAST_POINTS = 8  # validations that a fit needs: twice its parameters
AHEAD_HOURS = 100.0  # GPU hours
_LITTLE_SIGNAL = 0.2  # share of groups with a signal below which more of the same data teaches little
_BACKTESTS = (0.4, 0.6, 0.8)
_GATE = 0.6  # share of the segment whose back-test must not miss
_LAST = 3  # validations at the end of a segment, whose mean a back-test must hit


@dataclass(frozen=True)
class Segment:
    """The validations from the start of a stage, or from a hard reset, up to the next of either.

    Attributes:
        begin: first step, counted over all stages.
        steps: steps of the validations, counted over all stages.
        hours: hours of all devices of the trainer and the engines, from the beginning of the segment.
        scores: mean score over all prompts.
        errors: standard errors of the scores.
        keep_rate: share of the groups with a signal, mean over the last ten steps; None: not recorded.
    """

    begin: int
    steps: tuple[int, ...]
    hours: tuple[float, ...]
    scores: tuple[float, ...]
    errors: tuple[float, ...]
    keep_rate: float | None

    def curves(self, count: int | None = None) -> "Curves | None":
        """Return the curves fitted to the first `count` validations (None: to all); None if these are too few."""
        import numpy as np

        from nemo_prorl.report.scaling import fit

        part = slice(count)
        hours = self.hours[part]
        if len(hours) < LEAST_POINTS or hours[-1] <= 0.0 or any(b < a for a, b in pairwise((0.0, *hours))):
            return None
        return fit(np.array(self.hours[part]), np.array(self.scores[part]), np.array(self.errors[part]))


def segments(curve: Curve) -> list[Segment]:
    """Return the segments of a run or a chain, in order, also those with few validations or none."""
    parts = []
    for run, offset in zip(curve.runs, curve.offsets, strict=True):
        resets = [int(event["step"]) for event in run.counted("reset_commit")]
        bounds = sorted({0, *resets, run.last_step})
        validations = {int(event["step"]): part_of(event, "all") for event in run.counted("validation")}
        spent = _spent_hours(run)
        for begin, end in pairwise(bounds):
            points = []
            for step, scores in sorted(validations.items()):
                mean, error = number(scores.get("mean")), number(scores.get("se"))
                if begin <= step <= end and _is_share(mean) and _is_share(error):
                    points.append((offset + step, spent(step) - spent(begin), mean, error))
            steps, hours, means, errors = zip(*points, strict=True) if points else ((), (), (), ())
            lines = [line for line in run.metrics if end - 10 < line["step"] <= end]
            rates = [rate for line in lines if (rate := number(line.get("keep_rate/all"))) is not None]
            parts.append(
                Segment(
                    begin=offset + begin,
                    steps=steps,
                    hours=hours,
                    scores=means,
                    errors=errors,
                    keep_rate=sum(rates) / len(rates) if rates else None,
                )
            )
    return parts


def _is_share(value: float | None) -> bool:
    return value is not None and 0.0 <= value <= 1.0


def _spent_hours(run: RunRecord) -> Callable[[int], float]:
    """Return a function of a step: the hours of all devices up to this step, validations not included.

    A step without a readable line in metrics.jsonl has the hours of the last step before it that has one.
    """
    total, steps, spent = 0.0, [0], [0.0]
    each = devices(run) / 3600.0
    for line in run.metrics:
        total += ((number(line.get("time/step")) or 0.0) - (number(line.get("time/validate")) or 0.0)) * each
        steps.append(line["step"])
        spent.append(total)
    return lambda step: spent[bisect_right(steps, step) - 1]


def devices(run: RunRecord) -> int:
    """Return the devices of a run: those of the trainer, and those of engines that have their own."""

    def count(*keys: str) -> int:
        return math.prod(max(1, int(number(run.setting(key)) or 1)) for key in keys)

    engines = count("rollout.engines", "rollout.tensor_parallel_size") if run.setting("rollout.own_devices") else 0
    return count("trainer.num_nodes", "trainer.devices") + engines


def forecast(curve: Curve) -> dict[str, Any]:
    """Return the forecast of a curve from its last segment.

    Returns:
        Always: `name`; `refused`, why no asymptote is given, or null; `segments`, a list of {begin, asymptote} of all
        segments with an asymptote.  With enough validations: `unit`, "GPU hours" or "hours"; `begin`, first step of the
        segment; `spent`, its hours; `now`, [value, low, high] of the 90 % interval; `ahead`, the hours of `gain`,
        [median, low, high]; `backtests`.  If nothing is refused: `asymptote`, as `now`; `midpoint`, hours to half of
        the gain; `exponent`; `advice`, what to do, as text.
    """
    parts = segments(curve)
    facts: dict[str, Any] = {"name": curve.name, "refused": None, "segments": []}
    if sum(len(part.steps) for part in parts) < 2:
        few = "fewer than two validations since the start"
        return facts | {"refused": few + _fix(curve.runs[-1], len(parts[-1].steps) if parts else 0)}
    fitted = [judged(part) for part in parts]
    for part, (curves, _, refusal) in zip(parts, fitted, strict=True):
        if curves is not None and refusal is None:
            facts["segments"].append({"begin": part.begin, "asymptote": _rounded(curves.asymptote)})
    last, (curves, tests, refusal) = parts[-1], fitted[-1]
    if curves is None:
        return facts | {"refused": f"{refusal}{_fix(curve.runs[-1], len(last.steps))}"}
    on_gpus = curve.runs[-1].setting("trainer.accelerator") == "gpu"
    ahead = AHEAD_HOURS if on_gpus else curves.end
    gain = curves.gain(ahead)
    facts |= {
        "refused": refusal,
        "unit": "GPU hours" if on_gpus else "hours",
        "begin": last.begin,
        "spent": round(curves.end, 4),
        "now": _rounded(curves.score_at(curves.end)),
        "ahead": float(f"{ahead:.4g}"),
        "gain": _rounded(gain),
        "backtests": tests,
    }
    if refusal is not None:
        return facts
    earlier = fitted[-2] if len(fitted) > 1 else None
    before = earlier[0].asymptote[0] if earlier and earlier[0] and earlier[2] is None else None
    return facts | {
        "asymptote": _rounded(curves.asymptote),
        "midpoint": float(f"{curves.best[1]:.4g}"),
        "exponent": float(f"{curves.best[2]:.3g}"),
        "advice": advice(
            gain,
            noise=curves.noise,
            low=curves.asymptote[1],
            before=before,
            keep_rate=last.keep_rate,
            resets=len(parts) - 1,
        ),
    }


def judged(segment: Segment) -> tuple["Curves | None", list[dict[str, Any]], str | None]:
    """Return the curves of a segment, its back-tests, and why no asymptote is given; None if it is given."""
    curves = segment.curves()
    if curves is None:
        validations = "1 validation" if len(segment.steps) == 1 else f"{len(segment.steps)} validations"
        return None, [], f"{validations} since step {segment.begin}; {LEAST_POINTS} are needed"
    tests = backtests(segment)
    refusal = curves.refusal
    missed = next((test for test in tests if test["share"] == _GATE and test["hit"] is False), None)
    if refusal is None and missed is not None:
        low, high = missed["interval"]
        refusal = (
            f"the forecast from the first {_GATE:.0%} missed: {low:.3f} to {high:.3f}, and it became"
            f" {missed['end']:.3f}"
        )
    return curves, tests, refusal


def _fix(run: RunRecord, count: int) -> str:
    """Return when a run whose last segment has `count` validations has enough, and the command if it ends before.

    Empty if config.yaml does not say when the run validates.
    """
    every, end = (number(run.setting(f"trainer.grpo.{key}")) for key in ("validate_every", "max_steps"))
    if run.setting("data.validation") == []:
        return ". Fix: another run with prompts to validate on (this one has data.validation=[])"
    if every is None or end is None or every < 1 or count >= LEAST_POINTS:
        return ""
    enough = int((run.last_step // every + LEAST_POINTS - count) * every)
    if enough <= end:
        return f". Fix: wait for step {enough}"
    key = f"trainer.grpo.max_steps={enough}"
    on_gpus = run.setting("trainer.accelerator") == "gpu"  # started by Slurm, with keys of its own
    return ". Fix: " + (f"continue with {key}" if on_gpus else f"prorl train run_dir={quote(str(run.folder))} {key}")


def _rounded(values: Sequence[float]) -> list[float]:
    return [round(float(value), 4) for value in values]


def _gain(facts: dict[str, Any]) -> str:
    gain, low, high = facts["gain"]
    return f"the next {facts['ahead']:.3g} {facts['unit']} bring {gain:+.3f} ({low:+.3f} to {high:+.3f})"


def advice(
    gain: tuple[float, float, float],
    noise: float,
    low: float,
    before: float | None,
    keep_rate: float | None,
    resets: int,
) -> str:
    """Return what to do: continue, reset, broaden the group, or stop.

    Args:
        gain: expected gain with the next hours: median, low, high.
        noise: standard error of one validation, below which a gain cannot be seen.
        low: lower end of the asymptote's interval.
        before: asymptote of the segment before; None if it has none.
        keep_rate: share of the groups with a signal.
        resets: number of hard resets, also those next to a segment without a forecast.
    """
    if gain[0] > noise:
        return "continue: the gain is larger than the noise of a validation"
    if not resets:
        return "reset: this segment is near its asymptote, and no hard reset has been tried (prorl control RUN reset)"
    if before is None:
        return "reset: this segment is near its asymptote; the gain from the last hard reset is not known"
    if low > before:
        return "reset: this segment is near its asymptote, and the last hard reset raised it"
    if keep_rate is not None and keep_rate < _LITTLE_SIGNAL:
        return f"stop, or take harder data: {keep_rate:.0%} of groups carry a signal, and the last reset gained nothing"
    return (
        "broaden the group: the last hard reset gained nothing; BroRL (arXiv 2510.01180) then raises"
        " trainer.grpo.samples_per_prompt"
    )


def backtests(segment: Segment) -> list[dict[str, Any]]:
    """Forecast the end of a segment, the mean of its last three scores, from its first 40, 60 and 80 %.

    Returns:
        for each: `share`; `end`, the mean of the last three scores; `interval` of the forecast of this mean, or null
        if the share has too few scores; `hit`, whether the end lies in the interval, null without one.  The last
        three scores are in no share.
    """
    tests: list[dict[str, Any]] = []
    end = sum(segment.scores[-_LAST:]) / _LAST
    for share in _BACKTESTS:
        count = min(round(share * len(segment.scores)), len(segment.scores) - _LAST)
        curves = segment.curves(max(0, count))
        entry: dict[str, Any] = {"share": share, "end": round(end, 4), "interval": None, "hit": None}
        if curves is not None:
            low, high = curves.measured(segment.hours[-_LAST:])
            entry |= {"interval": _rounded((low, high)), "hit": bool(low <= end <= high)}
        tests.append(entry)
    return tests


# --- the command -----------------------------------------------------------------------------------------------------


def add_parser(commands: Any) -> None:
    """Add `forecast` to the main command line."""
    text = "extrapolate the validations of runs: the score that each approaches, and what to do next"
    parser = commands.add_parser("forecast", help=text, description=text)
    parser.add_argument("runs", metavar="RUN", nargs="+", type=Path, help="run directory, or folder of a chain")
    parser.add_argument("--json", action="store_true", help="print one JSON object per run instead of text")
    parser.set_defaults(run_command=run)


def run(args: argparse.Namespace) -> int:
    """Print the forecasts; return 0, also without an asymptote.  Raises ConfigError for a folder that is no run."""
    results = [forecast(curve) for curve in read_curves(args.runs)]
    if args.json:
        sys.stdout.write("".join(json.dumps(facts) + "\n" for facts in results))
    else:
        sys.stdout.write("\n".join("\n".join(text_of(facts)) for facts in results) + "\n")
        if sum(facts["refused"] is None for facts in results) > 1:
            sys.stdout.write("\n" + comparison(results))
    return 0


def text_of(facts: dict[str, Any]) -> list[str]:
    """Return a forecast as lines of text, for the terminal and the page."""
    if "now" not in facts:
        return [f"{facts['name']}: no forecast: {facts['refused']}"]
    place = f"{facts['name']}, from step {facts['begin']}: {facts['now'][0]:.3f} now, after {facts['spent']:.3g}"
    if facts["refused"] is None:
        end, low, high = facts["asymptote"]
        lines = [
            f"{place} {facts['unit']}; it approaches {end:.3f} ({low:.3f} to {high:.3f})",
            f"  half of the gain came after {facts['midpoint']:.3g} {facts['unit']}; exponent {facts['exponent']:.2g}",
            f"  {_gain(facts)}",
            f"  {facts['advice']}",
        ]
    else:
        lines = [f"{place} {facts['unit']}; no asymptote: {facts['refused']}", f"  {_gain(facts)}"]
    for test in facts["backtests"]:
        share = f"  from the first {test['share']:.0%}: "
        if test["hit"] is None:
            lines.append(share + "no forecast was possible")
        else:
            low, high = test["interval"]
            lines.append(
                f"{share}{low:.3f} to {high:.3f}, it became {test['end']:.3f}: {'hit' if test['hit'] else 'missed'}"
            )
    return lines


def comparison(results: Sequence[dict[str, Any]]) -> str:
    """Return a table of the runs with an asymptote, the highest first: how far a recipe gets, apart from how fast."""
    whole = sorted((facts for facts in results if facts["refused"] is None), key=lambda facts: -facts["asymptote"][0])
    rows = [
        {
            "run": facts["name"],
            "asymptote": f"{facts['asymptote'][0]:.3f}",
            "90 %": f"{facts['asymptote'][1]:.3f} to {facts['asymptote'][2]:.3f}",
            "half after": f"{facts['midpoint']:.3g} {facts['unit']}",
            "exponent": f"{facts['exponent']:.2g}",
            "now": f"{facts['now'][0]:.3f}",
        }
        for facts in whole
    ]
    return columns([list(rows[0]), *(list(row.values()) for row in rows)])
