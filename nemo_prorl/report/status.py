"""`prorl status`: state of a run or a chain of stages, from the files of its folder and, for a chain, from Slurm."""

import json
import logging
import shutil
import socket
import time
from pathlib import Path
from typing import Any

from nemo_prorl.algorithms.paired import look
from nemo_prorl.errors import ConfigError, UnfitMachine
from nemo_prorl.files import modified, shortened
from nemo_prorl.launcher.chain_slurm import JobState, job_states, read_record
from nemo_prorl.launcher.formats import ChainEntry, ChainRecord
from nemo_prorl.lifecycle.bottleneck import bottleneck
from nemo_prorl.lifecycle.control import is_locked, last_start
from nemo_prorl.lifecycle.journal_events import rate_text
from nemo_prorl.lifecycle.retention import complete, newest_state, step_folder
from nemo_prorl.lifecycle.stages import begun_from, end_text, stop_requested
from nemo_prorl.lifecycle.summary import validations_of
from nemo_prorl.planning.columns import columns
from nemo_prorl.report.read import RunRecord, is_run, number, part_of, read_run, runs_inside

_log = logging.getLogger(__name__)

_AT_WORK = ("RUNNING", "COMPLETING", "SUSPENDED")  # states of Slurm
_UNKNOWN = JobState("-", "")  # no Slurm, or never submitted
_RECENT = 10  # steps that the bottleneck is computed from
# Files that processes of a run write, also while a start is prepared; another user may not see those in endpoints/.
_LIFE_SIGNS = ("metrics.jsonl", "logs/all.log", ".lock")
_ALIVE_S = 300.0  # a run writes a sample of its memory more often than this
_ALARM_LENGTH = 60  # characters of an alarm in a chain's table


def status(folder: Path, as_json: bool = False) -> str:
    """Return the table of a chain if `folder` has a chain.json or stages, otherwise the table of a run.

    Raises ConfigError if it has neither.
    """
    if (record := read_record(folder) or _of_stages(folder)) is not None:
        chain = chain_state(folder, record)
        return json.dumps(chain, indent=1) + "\n" if as_json else _chain_table(chain)
    run = run_state(folder)
    return json.dumps(run, indent=1) + "\n" if as_json else _run_table(run)


def _of_stages(folder: Path) -> ChainRecord | None:
    """Return the record of runs without Slurm, stages or the arms of a fork; None if the folder has none, or is one."""
    stages = [] if is_run(folder) else [run for run in runs_inside(folder) if (run / "config.yaml").is_file()]
    if not stages:
        return None
    entries: list[ChainEntry] = [
        {"stage": stage.name, "job": None, "command": None, "time": None, "max_steps": 0} for stage in stages
    ]
    return {"command": [], "time": 0.0, "stages": entries}


# --- a run -----------------------------------------------------------------------------------------------------------


def run_state(run_dir: Path) -> dict[str, Any]:
    """Return the state of a run.  Raises ConfigError if the folder is not a run."""
    if not (run_dir / "config.yaml").is_file():
        raise ConfigError(
            f"{run_dir}: neither a run (it has no config.yaml) nor a chain of runs (it has no chain.json)"
        )
    locked = is_locked(run_dir)  # before the journal: a run writes its last event first and then frees the lock
    run = read_run(run_dir)
    checkpoints = complete(run_dir / "checkpoints")
    resumes = f"the same command {f'continues from {checkpoints[-1].name}' if checkpoints else 'begins again'}"
    state, detail = _state(run, locked, resumes)
    heldout = run.summary.get("heldout")
    return {
        "run_dir": str(run_dir),
        "stage": run.setting("stage"),
        "state": state,
        "state_detail": detail,
        "step": run.last_step,
        "max_steps": run.setting("trainer.grpo.max_steps"),
        "finished": run.summary.get("finished", False),
        "from": begun_from(run.events),
        "ended": "running" if state == "running" else _ended(run),
        "checkpoint": checkpoints[-1].name if checkpoints else None,
        "trial": _trial(run),
        "learning_rate": _lowered(run),
        "heldout": {key: heldout[key] for key in ("before", "after")} if heldout else None,
        "metrics": run.metrics[-1] if run.metrics else {},
        "bottleneck": bottleneck(run.metrics[-_RECENT:]),
        "journal": run.events[-1] if run.events else None,
        "alarm": next((event for event in reversed(run.events) if event["event"] == "alarm"), None),
        **_launches(run),
    }


def _trial(run: RunRecord) -> str | None:
    """Return as text the trial of a hard reset that a run is in; None if it is in none."""
    trial = part_of(part_of(newest_state(run.folder), "resets"), "trial")
    if trial.get("arm", "over") == "over":
        return None
    begun, last = trial["step"], trial["step"] + trial["steps"]
    text = f"of a hard reset after step {begun} ({trial['reason']}): arm {trial['arm']}, up to step {last}"
    if trial["arm"] == "none":
        return text
    without = validations_of(step_folder(run.folder / "trials", begun) / "none", begun, last)
    pair = look(without, validations_of(run.folder, begun, last), run.setting("trainer.resets.trial_noise"))
    return f"{text}; {f'with the reset at the last look {pair[0].text(len(without))}' if pair else 'no look so far'}"


def _lowered(run: RunRecord) -> str | None:
    """Return as text what hard resets do to the learning rate of the next step; None if nothing."""
    texts = [
        f"{rate} (hard reset after step {reset['step']})"
        for reset in run.counted("reset_commit")
        if (rate := rate_text(reset)) and ((end := number(reset.get("lr_until"))) is None or end > run.last_step)
    ]
    return "; ".join(texts) or None


def _ended(run: RunRecord) -> str:
    if run.summary.get("finished") is True:
        return "done"
    return "failed" if _launch_failure(run) else end_text(run.events)


def _state(run: RunRecord, locked: bool, resumes: str) -> tuple[str, str]:
    """Return the state of a run and a sentence about it.

    Args:
        locked: whether this machine sees a process that has locked the run directory.
        resumes: what the next start does, as text.

    Returns:
        `running`, `finished`, `stopped`, `failed` or `killed`, and the sentence.
    """
    if locked:
        return "running", "running"
    end, seen = _launch_failure(run) or run.ending, ""
    host, began = last_start(run.folder)
    if host not in ("", socket.gethostname()) and (end is None or (number(end.get("time")) or 0.0) < began):
        # Many file systems do not show locks of other machines.
        files = [*run.folder.glob("endpoints/usage-*.json"), *(run.folder / name for name in _LIFE_SIGNS)]
        seconds = max(0.0, time.time() - max(modified(file) for file in files))
        seen = f"last sign of life on {host} {seconds:.0f} s ago; "
        if seconds < _ALIVE_S:
            return "running", f"running; {seen}this machine does not see its lock"
    if end is None:
        return "killed", f"not running: it ended without saying why (killed?); {seen}{resumes}"
    after = f"after step {end.get('step', run.last_step)}"
    if end["event"] == "finish":
        return "finished", f"not running: finished {after}"
    if end["event"] == "stop":
        reason = str(end.get("reason", "no reason")).partition("; the same command")[0]
        if who := stop_requested(run.events):
            reason = f"by {who} with prorl control"
        return "stopped", f"not running: stopped {after} ({reason}); {resumes}"
    return "failed", f"not running: failed {after}: {end.get('reason', 'no reason')}"


def _launch_failure(run: RunRecord) -> dict[str, Any] | None:
    """Return, as an event, a failure that only the batch script has recorded; None if it recorded no failure."""
    last, began = (lines[-1] if lines else {} for lines in (run.launches, run.events))
    if last.get("event") != "end" or last.get("code") in (0, 75):
        return None
    if (number(last.get("time")) or 0.0) < (number(began.get("time")) or 0.0):
        return None  # the run was started again without Slurm
    begun = next((line for line in reversed(run.launches) if line.get("event") == "begin"), last)
    if run.ending and (number(run.ending.get("time")) or 0.0) >= (number(begun.get("time")) or 0.0):
        return None  # the journal has this end
    return {"event": "failure", "step": run.last_step, "time": last.get("time"), "reason": last.get("what")}


def _launches(run: RunRecord) -> dict[str, Any]:
    """Return how often Slurm jobs started the run (`attempts`), and two lines of its launches.jsonl.

    `launch` is the line of the last start, `end` the line of the last end; None if there is no such line.  An attempt
    that was refused because another process uses the run directory does not count.
    """
    ends = [line for line in run.launches if line["event"] == "end"]
    refused = [end for end in ends if end["code"] == 2 and "is in use by another process" in end["what"]]
    jobs = {(end["job"], end["attempt"]) for end in refused}
    lines = [line for line in run.launches if (line["job"], line["attempt"]) not in jobs]
    begins, ends = ([line for line in lines if line["event"] == event] for event in ("begin", "end"))
    return {"attempts": len(begins), "launch": begins[-1] if begins else None, "end": ends[-1] if ends else None}


def _run_table(run: dict[str, Any]) -> str:
    rows: dict[str, Any] = {
        "run directory": run["run_dir"],
        "stage": run["stage"],
        "state": run["state_detail"],
        "step": _step(run),
        "last checkpoint": run["checkpoint"] or "none",
    }
    rows |= {name: run[key] for name, key in (("trial", "trial"), ("learning rate", "learning_rate")) if run[key]}
    if launch := run["launch"]:
        times = "once" if launch["restart"] == 1 else f"{launch['restart']} times"
        rows["job"] = f"{launch['job']}{f', requeued {times}' if launch['restart'] else ''}"
        rows["attempt"] = f"{launch['attempt']} of this job, {run['attempts']} in all"
        rows["nodes"] = ", ".join(launch["nodes"])
    if end := run["end"]:
        where = f", on {end['host']}" if end["host"] else ""
        rows["last end"] = f"{end['what']}{where}; code {end['code']}, next: {end['next']}"
    for key, value in run["metrics"].items():
        if key in ("kl", "entropy") or key.startswith(("reward/", "keep_rate/", "validation/")):
            rows[key] = f"{value:.6g}" if isinstance(value, float) else value
    if speed := _speed(run["metrics"]):
        rows["speed"] = speed
    if alarm := run["alarm"]:
        rows["last alarm"] = f"step {alarm['step']}: {alarm['what']}"
    if run["bottleneck"]:
        rows["bottleneck"] = run["bottleneck"]
    if run["journal"]:
        rows["last event"] = _event(run["journal"])
    return columns((name, str(value)) for name, value in rows.items())


def _speed(line: dict[str, Any]) -> str:
    """Return the speed of a step as text, such as `7,120 tokens/s per device, updates 402 TFLOP/s (MFU 0.41)`."""
    rate, flops, mfu = (
        number(line.get(key))
        for key in ("time/step/tokens_per_s_per_device", "time/updates/tflops_per_device", "time/updates/mfu")
    )
    if rate is None or flops is None:
        return ""
    share = "" if mfu is None else f" (MFU {mfu:.2f})"
    return f"{rate:,.0f} tokens/s per device, updates {flops:.3g} TFLOP/s{share}"


def _event(event: dict[str, Any]) -> str:
    """Return an event of journal.jsonl as text, such as `finish, step 120, 2026-11-25 03:24 UTC`."""
    shown = {key: value for key, value in event.items() if isinstance(value, str | int | float)}
    known = ("event", "step", "time", "version", "stage")
    rest = [f"{key} {value}" for key, value in shown.items() if key not in known]
    when = time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime(event["time"])) if "time" in event else ""
    step = f"step {event['step']}" if "step" in event else ""
    return ", ".join(filter(None, (event["event"], step, when, *rest)))


def _step(run: dict[str, Any]) -> str:
    return f"{run['step']} of {run['max_steps']}{', finished' if run['finished'] else ''}"


# --- a chain ---------------------------------------------------------------------------------------------------------


def chain_state(folder: Path, record: ChainRecord) -> dict[str, Any]:
    """Return the state of each stage in chain.json: its job, the job's state in Slurm, and its run."""
    jobs = [entry["job"] for entry in record["stages"] if entry["job"] is not None]
    states: dict[str, JobState] = {}
    if jobs and shutil.which("squeue"):
        try:
            states = job_states(jobs)
        except UnfitMachine as error:
            _log.warning("the states of the Slurm jobs cannot be shown: %s", error)
    stages = []
    for entry in record["stages"]:
        state = states.get(entry["job"] or "", _UNKNOWN)
        run_dir = folder / entry["stage"]
        unstarted = {"step": 0, "max_steps": entry["max_steps"], "finished": False, "heldout": None, "alarm": None}
        unstarted |= {"from": None, "ended": None}
        started = (run_dir / "config.yaml").is_file()
        run = run_state(run_dir) if started else unstarted | _launches(read_run(run_dir))
        shown = {key: run[key] for key in (*unstarted, "attempts", "launch", "end")}
        if state.state in _AT_WORK:  # the journal may say how an earlier start ended
            shown["ended"] = "running"
        stages.append(
            {"stage": entry["stage"], "job": entry["job"], "state": state.state, "reason": state.reason} | shown
        )
    return {"folder": str(folder), "stages": stages}


def _chain_table(chain: dict[str, Any]) -> str:
    rows = []
    for stage in chain["stages"]:
        heldout, alarm, end = stage["heldout"], stage["alarm"], stage["end"]
        row = {
            "stage": stage["stage"],
            "job": stage["job"],
            "state": stage["state"],
            "reason": stage["reason"],
            "step": _step(stage),
            "from": stage["from"],
            "ended": stage["ended"],
            "attempts": str(stage["attempts"]),
            "last end": end and end["what"],
            "held-out": heldout and f"{heldout['before']:.3f} -> {heldout['after']:.3f}",
            "last alarm": alarm and shortened(f"step {alarm['step']}: {alarm['what']}", _ALARM_LENGTH),
        }
        rows.append({title: text or "-" for title, text in row.items()})
    return columns([list(rows[0]), *(list(row.values()) for row in rows)])
