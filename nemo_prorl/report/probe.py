"""The table and samples of `prorl probe` for the report."""

from collections.abc import Iterator
from typing import Any

from nemo_prorl.report.read import Curve, number, part_of

_NUMBERS = ("prompts", "responses", "reward", "keep_rate", "solved", "pass_at_n", "without_form", "cut_off", "tokens")
_ESTIMATE = ("tokens_per_step", "generation_s_per_step", "tokens_per_s")
_SOURCES = 200
_TEXT = 2000  # characters of a response


def probe(curve: Curve) -> dict[str, Any] | None:
    """Return the results of `prorl probe` from probe.json of the curve's first run; None without results.

    Returns:
        `rows`: for each source, the measured numbers and the advice.  `estimate`: tokens and generation time per step.
        `examples`: the best, the worst and the longest response of each source.  `samples`: responses per prompt.
    """
    data = curve.runs[0].probe
    rows = [_row(source) for source in _objects(data.get("sources"))]
    if not rows:
        return None
    estimate = part_of(data, "estimate")
    return {
        "samples": number(data.get("samples")),
        "rows": rows[:_SOURCES],
        "estimate": {key: number(estimate.get(key)) for key in _ESTIMATE},
        "examples": [example for one in _objects(data.get("responses")) for example in _examples(one)][: 3 * _SOURCES],
    }


def _row(source: dict[str, Any]) -> dict[str, Any]:
    numbers = {key: number(source.get(key)) for key in _NUMBERS}
    return {"source": str(source.get("source")), "advice": str(source.get("advice")), **numbers}


def _examples(source: dict[str, Any]) -> Iterator[dict[str, Any]]:
    for kind, response in zip(("best", "worst", "longest"), _objects(source.get("examples")), strict=False):
        yield {
            "source": str(source.get("source")),
            "kind": kind,
            "score": number(response.get("score")),
            "tokens": number(response.get("tokens")),
            "finished": response.get("finished") is True,
            "text": str(response.get("text"))[:_TEXT],
        }


def _objects(value: Any) -> list[dict[str, Any]]:
    return [item for item in value if isinstance(item, dict)] if isinstance(value, list) else []
