"""The page as one HTML text: template, style, script and data, without any file loaded from elsewhere.

Text from a run is data: it is embedded as JSON in which no character can end a script or has a meaning in HTML, and the
script inserts it as text.  The page's content security policy allows this one script only.
"""

import base64
import hashlib
import html
import json
import re
from importlib.resources import files
from typing import Any

from nemo_prorl.files import listed

_SCRIPTS = (
    "uplot.min.js",
    "base.js",
    "chart.js",
    "panels.js",
    "samples.js",
    "evaluation.js",
    "probe.js",
    "second.js",
    "outcome.js",
    "fork.js",
    "main.js",
)
_TELLING = ("reward/all", "validation/all", "kl", "entropy", "rollout/response_tokens", "keep_rate/all", "time/step")


def page(data: dict[str, Any]) -> str:
    """Return the report as the text of one HTML file.

    If `data` has the key `live` (as with `prorl report --serve`), the page fetches newer data from this URL path.
    """
    licence = "/*\nuPlot\n" + _asset("uplot.LICENSE.txt") + "\n*/\n"  # its licence requires the notice in every copy
    script = licence + '(() => {\n"use strict";\n' + "\n".join(_asset(name) for name in _SCRIPTS) + "})();\n"
    parts = {
        "policy": _policy(script, bool(data.get("live"))),
        "title": html.escape(_title(data)),
        "style": _asset("uplot.min.css") + _asset("page.css"),
        "summary": _summary(data),
        "data": embedded(data),
        "script": script,
    }
    # A single pass, which does not search the inserted parts.
    return re.sub(r"\{\{(\w+)\}\}", lambda match: parts[match[1]], _asset("page.html"))


def _title(data: dict[str, Any]) -> str:
    """Return the title of the page: the names of its curves."""
    names = [curve["name"] for curve in data["curves"]]
    shown = listed(names, 3)
    return f"ProRL report: {shown}"


def embedded(data: Any) -> str:
    """Return JSON for a script element: ASCII without <, > and &."""
    text = json.dumps(data, ensure_ascii=True, allow_nan=False, separators=(",", ":"))
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")


def _asset(name: str) -> str:
    return (files(__package__) / "page" / name).read_text(encoding="utf-8")


def _policy(script: str, live: bool) -> str:
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    rules = ["default-src 'none'", f"script-src 'sha256-{digest}'", "style-src 'unsafe-inline'", "img-src data:"]
    rules += [f"connect-src {chr(39) + 'self' + chr(39) if live else chr(39) + 'none' + chr(39)}"]
    return "; ".join([*rules, "base-uri 'none'", "form-action 'none'"])


def _summary(data: dict[str, Any]) -> str:
    """Return outcome and last value of each main metric of each curve as HTML, for a browser without scripts."""
    failures = [f"{s['name']} failed {s['failed']}" for c in data["curves"] for s in c["stages"] if s["failed"]]
    texts = [*failures, *map(_outcome, data["curves"])]
    rows, outcomes = [], [f"<p>{html.escape(text)}</p>" for text in texts if text]
    for curve in data["curves"]:
        known = {key: curve["metrics"][key]["stats"].get("last") for key in _TELLING if key in curve["metrics"]}
        cells = [curve["name"], str(curve["steps"]), *(_text(known.get(key)) for key in _TELLING)]
        rows.append("<tr>" + "".join(f"<td>{html.escape(cell)}</td>" for cell in cells) + "</tr>")
    head = "".join(f"<th>{name}</th>" for name in ("run", "steps", *_TELLING))
    return f"{''.join(outcomes)}<table><thead><tr>{head}</tr></thead><tbody>{''.join(rows)}</tbody></table>"


def _outcome(curve: dict[str, Any]) -> str:
    """Return in a sentence the held-out reward before and after; "" before the second validation."""
    outcome = curve["outcome"]
    whole = next((row for row in outcome["scores"] if row["name"] == "all"), None)
    if whole is None or whole["before"] is None or whole["after"] is None:
        return ""
    first, last = outcome["steps"]
    return (
        f"{curve['name']}: mean reward on held-out prompts {whole['before']:.3f} at step {first}, {whole['after']:.3f}"
        f" at step {last}. {outcome['words']}"
    )


def _text(value: float | None) -> str:
    return "-" if value is None else f"{value:.4g}"
