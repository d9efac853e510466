"""Second verdicts for the page: how often a second verifier disagrees, and the stored responses on which it does."""

from typing import Any

from nemo_prorl.report.read import Curve, objects_of, part_of
from nemo_prorl.report.samples import cut, described, result_of
from nemo_prorl.report.tables import rates

_SHOWN = 50  # newest disagreements on the page
_TEXT = 3000  # characters of a prompt or response; the middle of a longer one is left out


def second(curve: Curve) -> dict[str, list[dict[str, Any]]]:
    """Return the rates of disagreement (`rows`), and the newest disagreements, newest first (`items`)."""
    return {"rows": rates(curve, "second", {"judged": "disagreed"}), "items": _items(curve)}


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
    return {
        **described(line, _TEXT),
        "second_task": cut(str(line.get("second_task", "?")), 100),
        "response": cut(str(line.get("response", "")), _TEXT),
        "first": result_of(part_of(line, "verdict")),
        "second": result_of(part_of(line, "second_verdict")),
    }
