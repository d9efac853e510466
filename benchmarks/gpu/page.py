"""The Markdown page that `gpu_evidence.py` makes from its JSON.  Standard library only."""

from typing import Any

_UNITS = (("GB", 1e9), ("MB", 1e6), ("kB", 1e3), ("bytes", 1.0))
# Heading of a column by its key; `_value` derives the unit from the end of the key.
_NAMES = {
    "peak_bytes": "peak memory",
    "forward_peak_bytes": "peak memory, forward only",
    "forward_s": "forward",
    "seconds": "seconds",
    "logp_gap": "largest gap of a log-probability",
    "grad_hidden_gap": "gradient to hidden states, relative gap",
    "grad_weight_gap": "gradient to the weight, relative gap",
}


def page(result: dict[str, Any]) -> str:
    """Return the page: the machine, which sections ran or did not, the gates, then the rows of each section."""
    machine = result["machine"]
    gpu = machine["gpu"]
    device = f"{gpu['name']}, {gpu['memory_bytes'] / 1e9:.1f} GB, CUDA {gpu['cuda']}" if gpu else "no GPU: the CPU"
    found = ", ".join(f"{name} {version}" for name, version in machine["packages"].items() if version)
    lacks = ", ".join(name for name, version in machine["packages"].items() if not version)
    lines = [f"# Evidence on {gpu['name'] if gpu else 'a CPU'}, {result['date']}", "", f"- device: {device}"]
    lines += [f"- host: {machine['host']}", f"- packages: {found}", f"- not installed: {lacks or 'nothing'}"]
    if result.get("commit"):
        lines.append(f"- commit: {result['commit']}")
    if result["wheels"]:
        lines.append(f"- wheels brought along: {result['wheels']}")
    if result["small"]:
        lines += ["", "**Tiny sizes: this shows that the sections work, and no speed of anything.**"]
    lines += ["", "| section | state | seconds | |", "|---|---|---|---|"]
    for section in result["sections"].values():
        why = section.get("reason") or (f"status {section['status']}" if section.get("status") else "")
        lines.append(f"| {section['title']} | {section['state']} | {section['seconds']} | {_cell(why)} |")
    lines += ["", "## Gates", "", "Bounds for one H200 and the 1.5B model.", ""]
    lines += ["| gate | value | bound | verdict |", "|---|---|---|---|"]
    for row in result["gates"]:
        lines.append("| " + " | ".join(_cell(row[key]) for key in ("gate", "text", "bound", "verdict")) + " |")
    for section in result["sections"].values():
        lines += ["", f"## {section['title']}", "", *_section(section)]
    return "\n".join(lines) + "\n"


def _section(section: dict[str, Any]) -> list[str]:
    """Return the lines of a section: one table for all rows with the same keys, and notes below it."""
    lines: list[str] = []
    if section["state"] == "skipped":
        lines += [f"Left out: {section['reason']}.", ""]
    elif section["state"] != "done":
        lines += [f"{section['state'].capitalize()} after {section['seconds']} s (limit {section['limit_s']} s).", ""]
    tables: dict[tuple[str, ...], list[dict[str, Any]]] = {}
    for row in section["rows"]:
        tables.setdefault(tuple(key for key in row if key not in ("what", "note")), []).append(row)
    for keys, rows in tables.items():
        if keys:
            lines += ["| | " + " | ".join(_NAMES.get(key, key.replace("_", " ")) for key in keys) + " |"]
            lines += ["|---|" + "---|" * len(keys)]
            lines += [f"| {row['what']} | " + " | ".join(_value(key, row[key]) for key in keys) + " |" for row in rows]
            lines.append("")
        lines += [f"- {row['what']}: {row['note']}" for row in rows if "note" in row]
        lines += [""] if any("note" in row for row in rows) else []
    if last := section.get("last_lines"):
        lines += ["```", *last, "```"]
    return lines


def _value(key: str, value: Any) -> str:
    if value is None or isinstance(value, str | bool):
        return _cell(str(value)) if value is not None else "-"
    if key.endswith("bytes"):
        unit, size = next(((u, s) for u, s in _UNITS if abs(value) >= s), _UNITS[-1])
        return f"{value / size:,.2f} {unit}"
    if key.endswith(("share", "of_the_naive_form")):
        return f"{100 * value:.1f} %"
    if key.endswith("gap"):
        return f"{value:.1e}"
    if (key.endswith("_s") and not key.endswith("per_s")) or key.startswith("seconds"):
        return f"{1e3 * value:,.2f} ms" if abs(value) < 1 else f"{value:,.2f} s"
    return f"{value:,}" if isinstance(value, int) else f"{value:,.4g}"


def _cell(text: str) -> str:
    return text.replace("|", "\\|").replace("\n", " ")
