"""Gain in pass@k against the base's pass@k over tasks, as in the paper: weak starts should gain most (ProRL sec. 4)."""

from collections.abc import Mapping

import numpy as np

from nemo_prorl.evaluation.formats import ComparedBenchmark, ComparedPart, Correlation, GainByStart, TaskGain

K = 128  # of the paper's figure
LEAST_TASKS = 8  # with fewer, a bootstrap over tasks says nothing
_SHOWN = 3


def gains_by_start(
    entries: Mapping[str, ComparedBenchmark], others: list[str], base: str, resamples: int, level: float
) -> list[GainByStart]:
    """Return the gains of each model over tasks: the data sets of puzzles, and each other benchmark as a whole.

    k is the largest that all tasks have, up to `K`.  Models with a single sample for some prompt are left out.
    """
    tasks: dict[str, ComparedPart] = {}
    for name, entry in entries.items():
        parts = entry["parts"] if entry["domain"] == "puzzles" else {}
        tasks |= {f"{name}/{part}": its for part, its in parts.items()} or {name: entry}
    gains: list[GainByStart] = []
    for model in others:
        pairs = [
            (task, its["models"][base]["pass@k"], difference["pass@k"])
            for task, its in tasks.items()
            for difference in its["differences"]
            if difference["model"] == model
        ]
        shared = set.intersection(*(start.keys() & gain.keys() for _, start, gain in pairs)) if pairs else set[str]()
        k = max((int(k) for k in shared if int(k) <= K), default=1)
        if k > 1:
            rows: list[TaskGain] = [
                {"task": task, "base": start[str(k)]["mean"], "gain": gain[str(k)]["difference"]}
                for task, start, gain in pairs
            ]
            rows.sort(key=lambda row: (row["base"], row["task"]))
            gains.append({"model": model, "k": k, "tasks": rows, "correlation": correlation(rows, resamples, level)})
    return gains


def correlation(rows: list[TaskGain], resamples: int, level: float) -> Correlation | None:
    """Return Pearson's r between start and gain, with a percentile bootstrap over tasks.

    None: there are fewer than `LEAST_TASKS` tasks, or all starts or all gains are equal.
    """
    pair_T2 = np.asarray([(row["base"], row["gain"]) for row in rows])
    if len(rows) < LEAST_TASKS or np.ptp(pair_T2, axis=0).min() == 0.0:
        return None
    at_RT = np.random.default_rng(0).integers(0, len(rows), size=(resamples, len(rows)))
    drawn_RT2 = pair_T2[at_RT] - pair_T2[at_RT].mean(axis=1, keepdims=True)
    scale_R = np.sqrt(np.prod(np.square(drawn_RT2).sum(axis=1), axis=1))
    r_R = np.prod(drawn_RT2, axis=2).sum(axis=1)[scale_R > 0.0] / scale_R[scale_R > 0.0]
    tail = 50.0 * (1.0 - level)
    low, high = np.percentile(np.clip(r_R, -1.0, 1.0), [tail, 100.0 - tail]).tolist()
    return {"r": float(np.corrcoef(pair_T2.T)[0, 1]), "low": low, "high": high}


def gain_text(gain: GainByStart, base: str) -> str:
    """Return the lines that `--compare` prints."""
    k, rows = gain["k"], gain["tasks"]
    line = f"{gain['model']} - {base} in pass@{k}, against {base}'s pass@{k}, over {len(rows)} tasks: "
    if (pearson := gain["correlation"]) is None:
        return f"{line}no correlation, which needs {LEAST_TASKS} tasks that differ.\n"
    line += f"correlation {pearson['r']:+.2f} [{pearson['low']:+.2f}, {pearson['high']:+.2f}].\n"
    order = sorted(rows, key=lambda row: row["gain"])
    for label, some in (("most", order[: -_SHOWN - 1 : -1]), ("least", order[:_SHOWN])):
        tasks = ", ".join(f"{row['task']} {100 * row['gain']:+.1f} (from {100 * row['base']:.1f})" for row in some)
        line += f"  {label}: {tasks}\n"
    return line if k == K else f"{line}  The paper's figure has pass@{K}: --samples {K}.\n"
