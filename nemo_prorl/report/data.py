"""The data of the report page as one JSON value, which contains every number that the page shows."""

import time
from pathlib import Path
from typing import Any

from nemo_prorl.report import evaluation, samples, series, tables
from nemo_prorl.report.arms import arms
from nemo_prorl.report.diary import diary
from nemo_prorl.report.forecast import forecast, text_of
from nemo_prorl.report.outcome import outcome
from nemo_prorl.report.probe import probe
from nemo_prorl.report.read import Curve, read_curves
from nemo_prorl.report.second import second
from nemo_prorl.rewards.canaries import SIDES

POINTS = 256  # points of a curve; fewer with many runs, so that the file stays small
_ALL_POINTS = 1024


def page_data(folders: list[Path], evaluations: list[Path], limit: int) -> dict[str, Any]:
    """Return the data of the page as a JSON value, read from run directories and evaluations.

    Args:
        limit: responses in the sample browser, shared by the runs; -1 means all that fit into a page.

    Raises:
        ConfigError: a folder is not a run or an evaluation.
    """
    curves = read_curves(folders)
    tables_of_evaluation = [evaluation.read(folder) for folder in evaluations]
    points = max(80, min(POINTS, _ALL_POINTS // len(curves)))
    share = limit if limit <= 0 else max(1, limit // len(curves))
    return {
        "format": 1,
        "made": time.time(),
        "curves": [_curve(curve, points, share) for curve in curves],
        "differences": tables.differences(curves) if len(curves) > 1 else [],
        "evaluations": tables_of_evaluation,
        "fork": arms(folders, curves),
    }


def _curve(curve: Curve, points: int, limit: int) -> dict[str, Any]:
    grid = series.grid_of(curve, points)
    metrics = {key: series.metric(curve, key, grid) for key in series.keys_of(curve)}
    shown, again = samples.samples(curve, limit), second(curve)  # before the tables, which list their problems
    return {
        "name": curve.name,
        "steps": sum(run.last_step for run in curve.runs),
        "outcome": outcome(curve),
        "forecast": text_of(expected) if "now" in (expected := forecast(curve)) else [],
        "bucket": grid.size,
        **grid.steps(curve),
        "metrics": {key: value for key, value in metrics.items() if value is not None},
        "validations": series.validations(curve, points),
        "benchmarks": series.benchmarks(curve, points),
        "marks": series.marks(curve),
        "stages": tables.stage_rows(curve),
        "diary": diary(curve),
        "configuration": tables.configuration(curve.runs[0]),
        "phases": tables.phases(curve),
        "events": tables.events(curve),
        "canaries": tables.rates(curve, "canaries", SIDES),
        "second": again,
        "samples": shown,
        "probe": probe(curve),
    }
