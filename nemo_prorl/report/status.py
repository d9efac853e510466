"""`prorl status`: where a run or a chain of stages is, from the files of its folder and, for a chain, from Slurm."""

import json
import logging
import shutil
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Any

from nemo_prorl.errors import ConfigError, UnfitMachine
from nemo_prorl.launcher.chain_slurm import JobState, job_states, read_record
from nemo_prorl.launcher.formats import ChainRecord
from nemo_prorl.lifecycle.bottleneck import bottleneck
from nemo_prorl.lifecycle.retention import complete
from nemo_prorl.settings import read_config

_log = logging.getLogger(__name__)

_UNKNOWN = JobState("-", "")  # without Slurm, or never submitted
_RECENT = 10  # steps that the bottleneck is told of
_ALARM_LENGTH = 60  # of its text in the table


def status(folder: Path, as_json: bool = False) -> str:
    """A chain's table where `folder` has a chain.json, else a run's; raises ConfigError where it holds neither."""
    if (record := read_record(folder)) is not None:
        chain = chain_state(folder, record)
        return json.dumps(chain, indent=1) + "\n" if as_json else _chain_table(chain)
    run = run_state(folder)
    return json.dumps(run, indent=1) + "\n" if as_json else _run_table(run)


# --- a run -----------------------------------------------------------------------------------------------------------


def run_state(run_dir: Path) -> dict[str, Any]:
    """Where a run is; raises ConfigError where the folder holds none."""
    if not (run_dir / "config.yaml").is_file():
        raise ConfigError(f"{run_dir} holds no run: it has no config.yaml; nor a chain: it has no chain.json")
    cfg = read_config(run_dir / "config.yaml")
    checkpoints = [p.name for p in complete(run_dir / "checkpoints")]
    metrics, journal = next(_backwards(run_dir / "metrics.jsonl"), {}), run_dir / "journal.jsonl"
    summary = _summary(run_dir)
    return {
        "run_dir": str(run_dir),
        "stage": cfg.stage,
        "step": metrics.get("step", 0),
        "max_steps": cfg.trainer.grpo.max_steps,
        "finished": summary.get("finished", False),
        "checkpoint": checkpoints[-1] if checkpoints else None,
        "heldout": {key: summary["heldout"][key] for key in ("before", "after")} if summary.get("heldout") else None,
        "metrics": metrics,
        "bottleneck": bottleneck(list(islice(_backwards(run_dir / "metrics.jsonl"), _RECENT))),
        "journal": next(_backwards(journal), None),
        "alarm": next((event for event in _backwards(journal) if event["event"] == "alarm"), None),
        **_launches(run_dir),
    }


def _launches(run_dir: Path) -> dict[str, Any]:
    """From launches.jsonl: how often Slurm's jobs started the run, the last start, and the last end.

    Without those of a job that was refused because another works on the run directory.
    """
    lines = list(_backwards(run_dir / "launches.jsonl"))
    ended = [line for line in lines if line["event"] == "end" and line["code"] == 2]
    refused = {(line["job"], line["attempt"]) for line in ended if "is in use by another process" in line["what"]}
    lines = [line for line in lines if (line["job"], line["attempt"]) not in refused]
    begins, ends = ([line for line in lines if line["event"] == event] for event in ("begin", "end"))
    return {"attempts": len(begins), "launch": begins[0] if begins else None, "end": ends[0] if ends else None}


def _run_table(run: dict[str, Any]) -> str:
    rows: dict[str, Any] = {
        "run directory": run["run_dir"],
        "stage": run["stage"],
        "step": f"{run['step']} of {run['max_steps']}{', finished' if run['finished'] else ''}",
        "last checkpoint": run["checkpoint"] or "none",
    }
    if launch := run["launch"]:
        requeued = f", requeued {_times(launch['restart'])}" if launch["restart"] else ""
        rows["job"] = f"{launch['job']}{requeued}"
        rows["attempt"] = f"{launch['attempt']} of this job, {run['attempts']} in all"
        rows["nodes"] = ", ".join(launch["nodes"])
    if end := run["end"]:
        where = f", on {end['host']}" if end["host"] else ""
        rows["last end"] = f"{end['what']}{where}; code {end['code']}, next: {end['next']}"
    for key, value in run["metrics"].items():
        if key in ("kl", "entropy") or key.startswith(("reward/", "keep_rate/", "validation/")):
            rows[key] = f"{value:.6g}" if isinstance(value, float) else value
    if alarm := run["alarm"]:
        rows["last alarm"] = f"step {alarm['step']}: {alarm['what']}"
    if run["bottleneck"]:
        rows["bottleneck"] = run["bottleneck"]
    if run["journal"]:
        rows["journal"] = json.dumps(run["journal"])
    width = max(map(len, rows))
    return "".join(f"{name:<{width}}  {value}\n" for name, value in rows.items())


def _times(number: int) -> str:
    return "once" if number == 1 else f"{number} times"


# --- a chain ---------------------------------------------------------------------------------------------------------


def chain_state(folder: Path, record: ChainRecord) -> dict[str, Any]:
    """Each stage of chain.json: its job, Slurm's word for it, and where its run is."""
    jobs = [entry["job"] for entry in record["stages"] if entry["job"] is not None]
    states: dict[str, JobState] = {}
    if jobs and shutil.which("squeue"):
        try:
            states = job_states(jobs)
        except UnfitMachine as error:
            _log.warning("Slurm's states are missing: %s", error)
    stages = []
    for entry in record["stages"]:
        state = states.get(entry["job"] or "", _UNKNOWN)
        row = {"stage": entry["stage"], "job": entry["job"], "state": state.state, "reason": state.reason}
        run_dir = folder / entry["stage"]
        run = run_state(run_dir) if (run_dir / "config.yaml").is_file() else None
        unstarted = {"step": 0, "max_steps": entry["max_steps"], "finished": False, "heldout": None, "alarm": None}
        unstarted |= _launches(run_dir)
        stages.append(row | {key: (run or unstarted)[key] for key in unstarted})
    return {"folder": str(folder), "stages": stages}


def _chain_table(chain: dict[str, Any]) -> str:
    head = ("stage", "job", "state", "reason", "step", "attempts", "last end", "held-out", "last alarm")
    rows: list[tuple[str, ...]] = [head]
    for stage in chain["stages"]:
        heldout, alarm, end = stage["heldout"], stage["alarm"], stage["end"]
        rows.append(
            (
                stage["stage"],
                stage["job"] or "-",
                stage["state"],
                stage["reason"] or "-",
                f"{stage['step']} of {stage['max_steps']}{', finished' if stage['finished'] else ''}",
                str(stage["attempts"]),
                end["what"] if end else "-",
                f"{heldout['before']:.3f} -> {heldout['after']:.3f}" if heldout else "-",
                _cut(f"step {alarm['step']}: {alarm['what']}") if alarm else "-",
            )
        )
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = ["  ".join(c.ljust(w) for c, w in zip(row, widths, strict=True)).rstrip() for row in rows]
    return "\n".join(lines) + "\n"


def _cut(text: str) -> str:
    return text if len(text) <= _ALARM_LENGTH else text[: _ALARM_LENGTH - 3] + "..."


# --- files -----------------------------------------------------------------------------------------------------------


def _backwards(path: Path) -> Iterator[dict[str, Any]]:
    """The JSON lines of a file, the last first; one that is being written, or was cut by a kill, is passed over."""
    for line in reversed(path.read_text().splitlines() if path.is_file() else []):
        try:
            yield json.loads(line)
        except ValueError:
            continue


def _summary(run_dir: Path) -> dict[str, Any]:
    path = run_dir / "summary.json"
    read: dict[str, Any] = json.loads(path.read_text()) if path.is_file() else {}
    return read
