"""The page as one HTML text: template, style, script and data, and nothing that is loaded from elsewhere.

What a run wrote is data to it.  It stands in the file as JSON in which no character can end a script or mean anything
to HTML, and the script puts it into the page as text.  The page's policy lets only this one script run.
"""

import base64
import hashlib
import html
import json
import re
from importlib.resources import files
from typing import Any

_SCRIPTS = ("uplot.min.js", "base.js", "chart.js", "panels.js", "samples.js", "evaluation.js", "main.js")
_TELLING = ("reward/all", "validation/all", "kl", "entropy", "rollout/response_tokens", "keep_rate/all", "time/step")


def page(data: dict[str, Any]) -> str:
    """The whole file; with `live` in the data, an address on the same server, it asks there for newer data."""
    licence = "/*\nuPlot\n" + _asset("uplot.LICENSE.txt") + "\n*/\n"  # its terms: the notice stands in every copy
    script = licence + '(() => {\n"use strict";\n' + "\n".join(_asset(name) for name in _SCRIPTS) + "})();\n"
    parts = {
        "policy": _policy(script, bool(data.get("live"))),
        "title": html.escape(_title(data)),
        "style": _asset("uplot.min.css") + _asset("page.css"),
        "summary": _summary(data),
        "data": embedded(data),
        "script": script,
    }
    return re.sub(r"\{\{(\w+)\}\}", lambda match: parts[match[1]], _asset("page.html"))  # once: parts are not searched


def _title(data: dict[str, Any]) -> str:
    """Return the page's title: the names of what it shows."""
    names = [curve["name"] for curve in data["curves"]]
    shown = ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")
    return f"ProRL report: {shown}"


def embedded(data: Any) -> str:
    """JSON that may stand in a script element: ASCII, and without <, > and &."""
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
    """The last numbers as plain HTML, for a reader without scripts."""
    rows = []
    for curve in data["curves"]:
        known = {key: curve["metrics"][key]["stats"].get("last") for key in _TELLING if key in curve["metrics"]}
        cells = [curve["name"], str(curve["steps"]), *(_text(known.get(key)) for key in _TELLING)]
        rows.append("<tr>" + "".join(f"<td>{html.escape(cell)}</td>" for cell in cells) + "</tr>")
    head = "".join(f"<th>{name}</th>" for name in ("run", "steps", *_TELLING))
    return f"<table><thead><tr>{head}</tr></thead><tbody>{''.join(rows)}</tbody></table>"


def _text(value: float | None) -> str:
    return "-" if value is None else f"{value:.4g}"
