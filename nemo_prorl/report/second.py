"""Second verdicts for the page: how often a second verifier disagrees, and the stored responses on which it does."""

import json
from typing import Any

from nemo_prorl.report.read import Curve, number, objects_of, part_of
from nemo_prorl.report.samples import cut, prompt_text
from nemo_prorl.rewards.canaries import interval

_SHOWN = 50  # newest disagreements on the page
_TEXT = 3000  # characters of a prompt or response; the middle of a longer one is left out
_KINDS = ("judged", "disagreed")


def second(curve: Curve) -> dict[str, list[dict[str, Any]]]:
    """Return the second verdicts of a curve.

    Returns:
        rows: numbers of second verdicts and disagreements of each task over all steps, with the exact 95 % interval of
            their rate.
        items: the newest disagreements, newest first.
    """
    counts: dict[str, dict[str, float]] = {}
    for line in (line for run in curve.runs for line in run.metrics):
        for key, value in line.items():
            name, _, rest = key.partition("/")
            kind, _, task = rest.partition("/")
            if name == "second" and kind in _KINDS:
                tally = counts.setdefault(task, dict.fromkeys(_KINDS, 0.0))
                tally[kind] += min(1e6, max(0.0, number(value) or 0.0))
    rows = []
    for task, tally in sorted(counts.items()):
        judged, disagreed = (int(tally[kind]) for kind in _KINDS)
        if disagreed <= judged and judged > 0:  # otherwise the file was changed
            low, high = interval(disagreed, judged)
            rows.append({"task": task, "judged": judged, "disagreed": disagreed, "low": low, "high": high})
    return {"rows": rows, "items": _items(curve)}


def _items(curve: Curve) -> list[dict[str, Any]]:
    items: list[dict[str, Any]] = []
    for run, offset in reversed(list(zip(curve.runs, curve.offsets, strict=True))):
        for step, path in reversed(run.disagreements.items()):
            if len(items) >= _SHOWN:
                return items
            if step <= run.last_step:  # a resumed run may not have come to this step again
                items += [{"step": offset + step, **_item(line)} for line in objects_of(path, run.problems)]
    return items[:_SHOWN]


def _item(line: dict[str, Any]) -> dict[str, Any]:
    truth = line.get("truth")
    return {
        "id": cut(str(line.get("id", "?")), 200),
        "task": cut(str(line.get("task", "?")), 100),
        "second_task": cut(str(line.get("second_task", "?")), 100),
        "prompt": cut(prompt_text(line.get("prompt")), _TEXT),
        "response": cut(str(line.get("response", "")), _TEXT),
        "truth": "" if truth is None else cut(json.dumps(truth, ensure_ascii=False), 1000),
        "first": _verdict(part_of(line, "verdict")),
        "second": _verdict(part_of(line, "second_verdict")),
    }


def _verdict(verdict: dict[str, Any]) -> dict[str, Any]:
    correct = verdict.get("correct")
    return {
        "score": number(verdict.get("score")),
        "correct": correct if isinstance(correct, bool) else None,
        "detail": str(verdict.get("detail") or "")[:500],
    }
