"""The diary of a chain: for each stage what changed, how it began and ended, and what its signals said.

`prorl report CHAIN` prints it and shows it on the page, so that a text like section 4.2 of the paper can be written
from it.  It has the paper's signals: KL, entropy, response length, missing eos, and validation.
"""

from typing import Any

from nemo_prorl.lifecycle.journal_events import effects_text
from nemo_prorl.lifecycle.stages import begun_from, end_text
from nemo_prorl.report.read import Curve, RunRecord, number, part_of
from nemo_prorl.report.tables import changes_between, trial_outcome

_ENDS = 10  # steps at the begin and at the end of a stage, of which the diary has the mean
_ALARMS = 12  # alarms of a stage, one by one
_TEXT = 300  # characters of an alarm or a reason
_SIGNALS = (
    ("kl", "KL, nats per token", ".3g"),
    ("entropy", "entropy, nats per token", ".3g"),
    ("rollout/response_tokens", "response length, tokens", ".0f"),
    ("rollout/truncated", "responses without eos", ".1%"),
    ("reward/all", "reward in training", ".3f"),
)


def diary(curve: Curve) -> list[dict[str, Any]]:
    """Return `stage` and `rows` (pairs of a title and a text) of each stage of a chain; [] for a single run."""
    if not curve.is_chain:
        return []
    runs = curve.runs
    before = [None, *runs[:-1]]
    return [{"stage": run.name, "rows": _rows(run, earlier, runs)} for run, earlier in zip(runs, before, strict=True)]


def diary_text(curve: Curve) -> str:
    """Return the diary as lines of text; "" for a single run."""
    lines = []
    for stage in diary(curve):
        width = max(len(title) for title, _ in stage["rows"])
        lines += [stage["stage"], *(f"  {title:{width}s}  {text}" for title, text in stage["rows"]), ""]
    return "\n".join("".join(c if c.isprintable() else "?" for c in line) for line in lines)


def _rows(run: RunRecord, before: RunRecord | None, runs: tuple[RunRecord, ...]) -> list[list[str]]:
    rows = [["began", _began(run)]]
    changed = {} if before is None else changes_between(before, run)
    rows += [["changed", f"{key}: {text}"] for key, text in changed.items()]
    if before is not None and not changed:
        rows.append(["changed", "nothing"])
    rows.append(["ended", _ended(run)])
    if judged := _validation(run):
        rows.append(["validation", judged])
    rows += [[title, text] for key, title, form in _SIGNALS if (text := _signal(run, key, form))]
    resets = run.counted("reset_commit")
    rows += [
        ["hard reset", f"after step {reset['step']}: {_short(reset.get('reason'))}{effects_text(reset)}"]
        for reset in resets
    ]
    rows += [["trial", _short(trial_outcome(end))] for end in run.counted("trial_end")]
    alarms = run.counted("alarm")
    rows += [["alarm", f"step {alarm['step']}: {_short(alarm.get('what'))}"] for alarm in alarms[:_ALARMS]]
    if len(alarms) > _ALARMS:
        rows.append(["alarm", f"{len(alarms) - _ALARMS} more, in journal.jsonl"])
    if not alarms:
        rows.append(["alarm", "none" if run.setting("trainer.resets.mode") != "manual" else "none; rules: manual"])
    for later in runs:
        if later is not run and (begun_from(later.events) or "").startswith(f"{run.folder.name}, step "):
            rows.append(["picked", f"{later.name} began from {begun_from(later.events)}"])
    return rows


def _began(run: RunRecord) -> str:
    starts = sum(event["event"] in ("start", "resume") for event in run.events)
    where = begun_from(run.events)
    often = f"; {starts} starts in all" if starts > 1 else ""
    return ("from the model" if where is None else f"from {where}") + often


def _ended(run: RunRecord) -> str:
    """Return how the stage ended, as `prorl status` says it, after which step, and why."""
    ended, end = end_text(run.events), run.ending or {}
    reason = f": {_short(end.get('reason'))}" if ended in ("stopped", "failed") else ""
    return f"{ended}, after step {run.last_step} of {run.setting('trainer.grpo.max_steps')}{reason}"


def _validation(run: RunRecord) -> str:
    """Return the first, the last and the best mean held-out reward; "" without a validation."""
    means = [(int(e["step"]), m) for e in run.counted("validation") if (m := number(part_of(e, "all").get("mean")))]
    if not means:
        return ""
    best = max(means, key=lambda point: point[1])
    if len(means) == 1:
        return f"{best[1]:.3f} at step {best[0]}"
    first, last = means[0], means[-1]
    return (
        f"{first[1]:.3f} at step {first[0]}, {last[1]:.3f} at step {last[0]}; best {best[1]:.3f} at step {best[0]} of"
        f" {len(means)} validations"
    )


def _signal(run: RunRecord, key: str, form: str) -> str:
    """Return the mean of the first and of the last steps, and the range; "" if no step has the metric."""
    values = [(line["step"], value) for line in run.metrics if (value := number(line.get(key))) is not None]
    if not values:
        return ""
    size = min(_ENDS, -(-len(values) // 2))
    first, last = (sum(value for _, value in part) / size for part in (values[:size], values[-size:]))
    low, high = (pick(values, key=lambda point: point[1]) for pick in (min, max))
    of = "1 step" if size == 1 else f"{size} steps"
    return (
        f"{first:{form}} -> {last:{form}} (means of {of}); lowest {low[1]:{form}} at step {low[0]}, highest"
        f" {high[1]:{form}} at step {high[0]}"
    )


def _short(text: Any) -> str:
    return str("no reason" if text is None else text)[:_TEXT]
