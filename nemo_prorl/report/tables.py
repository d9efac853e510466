"""Tables of the report: settings and results of each run, events, time by phase, and differences between runs."""

import json
import shlex
from collections.abc import Mapping
from typing import Any

from nemo_prorl.algorithms.paired import PairedDifference
from nemo_prorl.config_changes import leaves
from nemo_prorl.files import shortened
from nemo_prorl.lifecycle.bottleneck import bottleneck
from nemo_prorl.lifecycle.stages import begun_from
from nemo_prorl.report.read import Curve, RunRecord, number, part_of, step_of
from nemo_prorl.report.samples import cut
from nemo_prorl.report.series import keys_of, rounded
from nemo_prorl.rewards.canaries import interval

_EVENTS = 1000  # events on the page: first the alarms and resets that fit, then the newest
_TEXT = 1000
_VALUE = 1000  # characters of a setting
_ALARMS = ("alarm", "failure")
_COMMON = ("event", "step", "time")  # common fields of events
# Keys of places, names and people instead of settings of the training; they are not compared.
_PLACES = (
    "run_dir",
    "stage",
    "on_event",
    "exp_manager",
    "chain",
    "pretrained_checkpoint",
    "rollout.python",
    "launch.env",
)


def stage_rows(curve: Curve) -> list[dict[str, Any]]:
    """Return a row with settings and results for each run directory of a curve."""
    return [_row(run, changes_between(curve.runs[k - 1], run) if k else {}) for k, run in enumerate(curve.runs)]


def _row(run: RunRecord, changes: dict[str, str]) -> dict[str, Any]:
    heldout = part_of(run.summary, "heldout")
    starts = [event for event in run.events if event["event"] in ("start", "resume")]
    ending = run.ending or {}
    is_failed = ending.get("event") == "failure"
    times = [t for event in run.events if (t := number(event.get("time"))) is not None]
    return {
        "name": run.name,
        "step": run.last_step,
        "max_steps": number(run.setting("trainer.grpo.max_steps")),
        "finished": run.summary.get("finished") is True,
        "stopped": ending.get("event") == "stop",
        "failed": f"after step {ending.get('step')}: {ending.get('reason')}"[:_TEXT] if is_failed else "",
        "starts": len(starts),
        "from": begun_from(run.events),
        "began": min(times, default=None),
        "seconds": _sum(run, "time/step"),
        "tokens": _sum(run, "rollout/generated_tokens"),
        "heldout": {key: number(heldout.get(key)) for key in ("before", "after", "before_se", "after_se", "prompts")},
        "changes": changes,
        "problems": run.problems,
    }


def _sum(run: RunRecord, key: str) -> float:
    """Return the sum of a metric over all steps; values that are not finite count as 0."""
    return number(sum(number(line.get(key)) or 0.0 for line in run.metrics)) or 0.0


def _flat(config: dict[str, Any], named: bool = True) -> dict[str, str]:
    """Return a configuration's dotted keys with values as text; keys in `_PLACES`, such as run_dir, are left out.

    Args:
        named: show a list of data sources by the names of the sources only.
    """
    texts: dict[str, str] = {}
    for key, value in leaves(config, into_lists=False):
        if any(f"{key}.".startswith(f"{place}.") for place in _PLACES):
            continue
        if named and key in ("data.train", "data.validation") and isinstance(value, list):
            value = ", ".join(str(source.get("name")) for source in value if isinstance(source, dict)) or "nothing"
        texts[key] = value if isinstance(value, str) else json.dumps(value, default=str)
    return texts


def changes_between(before: RunRecord, after: RunRecord) -> dict[str, str]:
    """Return {key: "old value → new value"} of at most 40 settings in which `after` differs from `before`."""
    if not before.config or not after.config:
        return {}
    old, new = _flat(before.config), _flat(after.config)
    keys = [key for key in new if old.get(key) != new[key]]
    return {key: f"{_short(old.get(key))} → {_short(new[key])}" for key in keys[:40]}


def _short(text: str | None) -> str:
    if text is None:
        return "absent"
    return shortened(text)


def differences(curves: list[Curve]) -> list[dict[str, Any]]:
    """Return the settings in which the curves' first runs differ: `key`, and `values` with one value per curve."""
    flat = [_flat(curve.runs[0].config) for curve in curves]
    keys = [key for key in sorted({key for run in flat for key in run}) if len({run.get(key) for run in flat}) > 1]
    keys.sort(key=lambda key: any(key not in run for run in flat))  # keys missing in an older version come last
    return [{"key": key, "values": [_short(run.get(key)) for run in flat]} for key in keys[:200]]


def configuration(run: RunRecord) -> dict[str, Any]:
    """Return the settings of a run as (key, value) pairs, and the command that repeats the run elsewhere."""
    words = ["prorl", "train", "--config", str(run.folder / "config.yaml"), "run_dir=NEW"]
    pairs = [[key, cut(value, _VALUE)] for key, value in _flat(run.config, named=False).items()]
    return {"command": shlex.join(words) if run.config else "", "settings": pairs[:1000]}


def phases(curve: Curve) -> dict[str, Any]:
    """Return the total seconds of each phase over all steps, and the bottleneck of the last 10 steps.

    Checkpoints are not part of a step: their seconds come from the summary.json of each run.
    """
    seconds: dict[str, float] = {}
    keys = [key for key in keys_of(curve) if key.startswith("time/") and key.count("/") == 1 and key != "time/step"]
    for run in curve.runs:
        for key in keys:
            seconds[key] = seconds.get(key, 0.0) + _sum(run, key)
        if checkpoint := number(part_of(part_of(run.summary, "time"), "phase_s").get("checkpoint")):
            seconds["checkpoint"] = seconds.get("checkpoint", 0.0) + checkpoint
    ordered = sorted(seconds.items(), key=lambda item: -item[1])
    finite = [(name.removeprefix("time/"), s) for name, s in ordered if number(s) is not None]
    recent = curve.runs[-1].metrics[-10:]
    return {
        "names": [name for name, _ in finite],
        "seconds": rounded(s for _, s in finite),
        "bottleneck": bottleneck(recent),
        "steps": len(recent),
    }


def rates(curve: Curve, group: str, errors_of: Mapping[str, str]) -> list[dict[str, Any]]:
    """Return the error rate of verdicts of each task over all steps, with its exact 95 % interval.

    Args:
        group: first part of the metrics: `canaries` or `second`.
        errors_of: second part of the metrics that count errors, by that of the metrics that count verdicts.
    """
    sums: dict[str, float] = {}
    for key, value in (item for run in curve.runs for line in run.metrics for item in line.items()):
        if key.startswith(f"{group}/"):
            name = key.removeprefix(f"{group}/")
            sums[name] = sums.get(name, 0.0) + min(1e6, max(0.0, number(value) or 0.0))
    rows = []
    for kind, its_errors in errors_of.items():
        for key in sums:
            task = key.removeprefix(f"{kind}/")
            judged, errors = int(sums[key]), int(sums.get(f"{its_errors}/{task}", 0.0))
            if task != key and errors <= judged and judged > 0:  # otherwise the file was changed
                low, high = interval(errors, judged)
                counts = {"judged": judged, "errors": errors, "low": low, "high": high}
                rows.append({"task": task, "kind": its_errors.replace("_", " "), **counts})
    return sorted(rows, key=lambda row: (row["task"], row["kind"]))


def events(curve: Curve) -> dict[str, Any]:
    """Return the events of journal.jsonl and launches.jsonl in order of time.

    Returns:
        `rows`: at most 1,000 events.  `left_out`: number of the other events.  `alarms`: number of all alarms and
        failures.
    """
    rows = []
    for run, offset in zip(curve.runs, curve.offsets, strict=True):
        rows += [_event(run, offset, event) for event in run.events]
        rows += _launches(run)
    rows.sort(key=lambda row: row["time"] or 0.0)  # stable: events without time come first
    telling = [row for row in rows if row["event"] in (*_ALARMS, "reset_commit")][-_EVENTS // 2 :]
    wanted = {id(row) for row in telling}
    others = [row for row in rows if id(row) not in wanted]
    wanted |= {id(row) for row in others[-(_EVENTS - len(telling)) :]}
    kept = [row for row in rows if id(row) in wanted]
    return {"rows": kept, "left_out": len(rows) - len(kept), "alarms": sum(r["event"] in _ALARMS for r in rows)}


def _event(run: RunRecord, offset: int, event: dict[str, Any]) -> dict[str, Any]:
    own = step_of(event)
    if event["event"] == "validation":
        mean, error = (number(part_of(event, "all").get(key)) for key in ("mean", "se"))
        text = f"held-out mean {mean:.4f}" if mean is not None else "no mean"
        text += f" ± {error:.4f}" if error is not None else ""
    elif event["event"] == "trial_end":
        text = trial_outcome(event)
    else:
        rest = {key: value for key, value in event.items() if key not in _COMMON and not key.endswith("sha256")}
        text = "; ".join(f"{key}: {v if isinstance(v, str) else json.dumps(v)}" for key, v in rest.items())
        if set(rest) <= {"what", "reason"}:
            text = "; ".join(map(str, rest.values()))
    return {
        "stage": run.name,
        "step": None if own is None else offset + own,
        "time": number(event.get("time")),
        "event": event["event"][:40],
        "what": text[:_TEXT],
    }


def trial_outcome(end: dict[str, Any]) -> str:
    """Return as text how a trial of a hard reset ended, from its line `trial_end`."""
    mean, se, looks = (number(end.get(key)) or 0.0 for key in ("difference", "se", "looks"))
    shown = (
        f"with the reset {PairedDifference(mean, se).text(min(max(1, int(looks)), 10**6))} held out; " if se > 0 else ""
    )
    return f"trial after step {end.get('trial')}: the arm {end.get('winner')} wins; {shown}{end.get('because')}"


def _launches(run: RunRecord) -> list[dict[str, Any]]:
    """Return the rows of the event table for launches.jsonl.  A failure that is in the journal too counts once."""
    failures = [number(event.get("time")) or 0.0 for event in run.events if event["event"] == "failure"]
    rows, began = [], 0.0
    for launch in run.launches:
        if launch.get("event") not in ("begin", "end"):
            continue
        row = _launch(run, launch)
        if row["event"] == "failure" and any(began <= at <= (row["time"] or 0.0) for at in failures):
            row["event"] = "launch end"
        began = row["time"] or 0.0
        rows.append(row)
    return rows


def _launch(run: RunRecord, launch: dict[str, Any]) -> dict[str, Any]:
    """Return the row of the event table for the start, or the end, of a run in a Slurm job."""
    kind = f"launch {launch['event']}"
    if launch["event"] == "begin":
        nodes = launch.get("nodes")
        text = f"job {launch.get('job')}, attempt {launch.get('attempt')}"
        text += f", on {', '.join(map(str, nodes))}" if isinstance(nodes, list) else ""
    else:
        text = f"{launch.get('what') or 'ended'}; code {launch.get('code')}, next: {launch.get('next')}"
        kind = kind if launch.get("code") in (0, 75) else "failure"
    return {"stage": run.name, "step": None, "time": number(launch.get("time")), "event": kind, "what": text[:_TEXT]}
