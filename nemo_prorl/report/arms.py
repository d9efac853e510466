"""The arms of a fork for the page: the table of `prorl fork`, and the difference from the first arm by validation."""

from pathlib import Path
from typing import Any

from nemo_prorl.errors import ConfigError
from nemo_prorl.launcher import fork
from nemo_prorl.report.read import Curve, is_run, number
from nemo_prorl.report.series import rounded


def arms(folders: list[Path], curves: list[Curve]) -> dict[str, Any] | None:
    """Return the first fork among `folders`, None without one: its table and `series`, the lines of its chart."""
    forks = {folder: forked for folder in folders if not is_run(folder) and (forked := fork.read_fork(folder))}
    if not forks:
        return None
    folder, record = next(iter(forks.items()))
    runs = {curve.folder: curve.runs[0] for curve in curves}
    rows, series = [], []
    for arm in record["arms"]:
        name, run, hours, state = arm["folder"], runs.get(folder / arm["folder"]), "", "not begun"
        try:
            row = fork.cells({folder: record}, arm)
        except ConfigError:
            row = (arm["text"], "no validation", "", "", fork.cost([folder / name]))
        if run is not None:
            state = f"step {run.last_step} of {record['steps']}"
            state += ", decided" if fork.early_difference(folder, record, name) else ""
            hours = f"{sum(number(line.get('time/step')) or 0.0 for line in run.metrics) / 3600:.3g}"
            shown = fork.differences(folder, record, name)
            band = {key: rounded(ends[k] for ends in shown.values()) for k, key in enumerate(("lo", "m", "hi"))}
            series.append({"name": arm["text"], "x": list(shown), **band})
        rows.append([*row, hours, state])
    heads = [*fork.HEADS, "hours", "state"]
    return {"heads": heads, "rows": rows, "note": fork.footnote(record["steps"]), "series": series}
