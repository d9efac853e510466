"""Series of metrics for the page: a limited number of points per curve, and the range of each point.

A long run has more steps than a screen has pixels.  So one point shows a bucket, a group of successive steps of one
stage.  A point has the mean, minimum and maximum of its bucket, so that no spike is lost.  The page says how many steps
a bucket has.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from math import isfinite
from typing import Any

from nemo_prorl.evaluation.watch import results as watched
from nemo_prorl.report.read import Curve, number, part_of


@dataclass(frozen=True)
class Grid:
    """Buckets of successive steps, the same for all metrics of a curve.

    A bucket is (number of the stage from 0, its first row in the metrics of the stage, the row after its last).
    """

    buckets: tuple[tuple[int, int, int], ...]
    size: int  # steps in a bucket, at most

    def steps(self, curve: Curve) -> dict[str, list[float]]:
        """Return three lists with a number for each bucket: `x`, its middle; `x0` and `x1`, its first and last step.

        Steps are counted over all stages.  With one step per bucket there is only `x`.
        """
        first, last = [], []
        for stage, begin, end in self.buckets:
            rows, offset = curve.runs[stage].metrics, curve.offsets[stage]
            first.append(offset + rows[begin]["step"])
            last.append(offset + rows[end - 1]["step"])
        if self.size == 1:
            return {"x": first}
        return {"x": [(a + b) / 2 for a, b in zip(first, last, strict=True)], "x0": first, "x1": last}


def grid_of(curve: Curve, points: int) -> Grid:
    """Return about `points` buckets, each within one stage."""
    total = sum(len(run.metrics) for run in curve.runs)
    size = max(1, -(-total // points))
    buckets = [
        (stage, begin, min(begin + size, len(run.metrics)))
        for stage, run in enumerate(curve.runs)
        for begin in range(0, len(run.metrics), size)
    ]
    return Grid(tuple(buckets), size)


def keys_of(curve: Curve) -> list[str]:
    """Return all metrics that occur in any step."""
    keys: set[str] = set()
    for run in curve.runs:
        for line in run.metrics:
            keys |= line.keys()
    return sorted(keys - {"step", "stage"})


def metric(curve: Curve, key: str, grid: Grid) -> dict[str, Any] | None:
    """Return the points of a metric, and its exact statistics over all steps; None if no step has the metric.

    `m` is the mean of each bucket, None for a bucket without a number.  `lo` and `hi` are the smallest and the largest
    number of each bucket, if buckets have several steps.  A metric that few steps have, such as a validation, has one
    point per step instead, with the steps in `x`.
    """
    values = [_column(run.metrics, key) for run in curve.runs]
    points = [
        (offset + line["step"], value)
        for run, offset, column in zip(curve.runs, curve.offsets, values, strict=True)
        for line, value in zip(run.metrics, column, strict=True)
        if value is not None
    ]
    lost = sum(key in line for run in curve.runs for line in run.metrics) - len(points)
    if not points:
        return {"m": [], "x": [], "stats": {"count": 0, "lost": lost}} if lost else None
    stats = _stats(points) | {"lost": lost}
    if len(points) <= len(grid.buckets) // 2 or (grid.size > 1 and len(points) <= len(grid.buckets)):
        return {"x": [x for x, _ in points], "m": rounded(y for _, y in points), "stats": stats}
    cells = [[v for v in values[stage][begin:end] if v is not None] for stage, begin, end in grid.buckets]
    series: dict[str, Any] = {"m": rounded(sum(c) / len(c) if c else None for c in cells), "stats": stats}
    if grid.size > 1:
        series["lo"] = rounded(min(c, default=None) for c in cells)
        series["hi"] = rounded(max(c, default=None) for c in cells)
    return series


def _column(lines: list[dict[str, Any]], key: str) -> list[float | None]:
    """Return a metric's value in each line, None unless it is a finite number."""
    values = []
    for line in lines:
        value = line.get(key)
        # A float takes the short way, because a long run has 500,000 lines.
        values.append(value if value.__class__ is float and isfinite(value) else number(value))
    return values


def _stats(points: list[tuple[int, float]]) -> dict[str, Any]:
    """Return first, last, smallest, largest (with its step) and mean value of (step, value) points, and their count."""
    numbers = [value for _, value in points]
    named = {"first": numbers[0], "last": numbers[-1], "min": min(numbers), "max": max(numbers)}
    named["mean"] = sum(numbers) / len(numbers)
    exact = {"max_step": points[numbers.index(named["max"])][0], "count": len(points)}
    return dict(zip(named, rounded(named.values()), strict=True)) | exact


def rounded(values: Iterable[float | None]) -> list[float | None]:
    """Round to five digits, more than a screen shows; an overflow becomes None."""
    return [None if value is None else number(float(f"{value:.5g}")) for value in values]


def validations(curve: Curve, points: int) -> dict[str, dict[str, Any]]:
    """Return the held-out scores of each source, and of "all" sources together, from journal.jsonl.

    `x`: steps of the validations; `m`: mean scores; `lo`, `hi`: mean minus and plus one standard error.  If there are
    more validations than `points`, only every k-th is kept, and `left_out` is the number of the other validations.
    """
    scores: list[tuple[str, int, Any]] = []
    for run, offset in zip(curve.runs, curve.offsets, strict=True):
        for event in run.counted("validation"):
            scores += [(name, offset + event["step"], score) for name, score in part_of(event, "tasks").items()]
            scores.append(("all", offset + event["step"], event.get("all")))
    return _by_name(scores, points)


def benchmarks(curve: Curve, points: int) -> dict[str, dict[str, Any]]:
    """Return pass@1 and pass@k, for the largest k, of the benchmarks that `prorl watch` evaluated.

    The series are those of `validations`.  Their names are those of the benchmarks, for pass@k with `pass@k` added.
    """
    scores: list[tuple[str, int, Any]] = []
    for run, offset in zip(curve.runs, curve.offsets, strict=True):
        for step, evaluation in watched(run.folder):
            for name in part_of(evaluation, "benchmarks"):
                passes = part_of(part_of(evaluation["benchmarks"], name), "pass@k")
                ks = [int(k) for k in passes if k.isdecimal() and len(k) < 10]
                scores.append((name, offset + step, passes.get("1")))
                if (largest := max(ks, default=1)) > 1:
                    scores.append((f"{name} pass@{largest}", offset + step, passes.get(str(largest))))
    return _by_name(scores, points)


def _by_name(scores: Iterable[tuple[str, int, Any]], points: int) -> dict[str, dict[str, Any]]:
    """Return the series of (name, step, score) by name; a score is an object with `mean` and `se`."""
    by_name: dict[str, dict[int, tuple[float, float | None]]] = {}
    for name, step, score in scores:
        if isinstance(score, dict) and (mean := number(score.get("mean"))) is not None:
            by_name.setdefault(name, {})[step] = (mean, number(score.get("se")))
    return {name: _validation(sorted(by_step.items()), points) for name, by_step in sorted(by_name.items())}


def _validation(judged: list[tuple[int, tuple[float, float | None]]], points: int) -> dict[str, Any]:
    every = max(1, -(-len(judged) // points))
    kept = [point for index, point in enumerate(reversed(judged)) if index % every == 0][::-1]  # keeps the last one
    series: dict[str, Any] = {"x": [x for x, _ in kept], "m": rounded(m for _, (m, _) in kept)}
    if any(error is not None for _, (_, error) in kept):
        series["lo"] = rounded(m - e if e is not None else None for _, (m, e) in kept)
        series["hi"] = rounded(m + e if e is not None else None for _, (m, e) in kept)
    if every > 1:
        series["left_out"] = len(judged) - len(kept)
    return series


def marks(curve: Curve) -> list[dict[str, Any]]:
    """Return the vertical marks of a curve's charts: starts of stages and committed hard resets.

    A mark has `kind`, `text` and `x`, its position: 100.5 is between the steps 100 and 101, counted over all stages.
    """
    lines = []
    for run, offset in zip(curve.runs, curve.offsets, strict=True):
        if curve.is_chain:
            lines.append({"x": offset + 0.5, "kind": "stage", "text": run.name})
        resets = {event["step"]: str(event.get("reason", ""))[:200] for event in run.counted("reset_commit")}
        lines += [{"x": offset + at + 0.5, "kind": "reset", "text": reason} for at, reason in sorted(resets.items())]
    return lines
