"""Writes the table of sources in docs/howto/prepare_data.md from the code, by `python docs/data_sources.py`."""

import re
from pathlib import Path

from nemo_prorl.data.prepare.sources import SOURCES, VERIFIED, Source
from nemo_prorl.data.prepared import PAPER

PAGE = Path(__file__).resolve().parent / "howto" / "prepare_data.md"
HEAD = """\
| `SOURCE` | folder | hub data set | commit | files | columns | rows | licence | remarks |
|---|---|---|---|---|---|---|---|---|
"""


def table() -> str:
    """Return the table as Markdown: the sources that are on the hub or generated."""
    made: dict[str, list[str]] = {}
    for folder, command in PAPER.items():
        made.setdefault(command.split()[0], []).append(f"`{folder}`")
    known = [source for source in SOURCES.values() if source.repo or source.size is not None]
    return HEAD + "".join(_row(source, made.get(source.name, [])) for source in known)


def _row(source: Source, folders: list[str]) -> str:
    size = f"{source.rows:,}" if source.rows is not None else ""
    remarks = [
        "gated: needs an account" if source.gated else "",
        f"{source.megabytes:,.10g} MB" if source.megabytes is not None else "",
        "" if source.known_from == VERIFIED else f"known from: {source.known_from}" if source.known_from else "",
    ]
    cells = [
        f"`{source.name}`",
        ", ".join(folders) or "your choice",
        source.repo or "generated",
        f"`{source.revision[:12]}`" if source.revision else "newest, recorded" if source.repo else "",
        ", ".join(f"`{pattern}`" for pattern in source.files),
        ", ".join(f"`{column}`" for column in source.columns),
        size,
        source.licence.partition("; problems belong")[0],
        "; ".join(filter(None, remarks)),
    ]
    return "|" + "|".join(f" {cell} " if cell else " " for cell in cells) + "|\n"


def page() -> str:
    """Return the page with the table of the code between its markers."""
    start, end = "<!-- sources: python docs/data_sources.py -->\n", "<!-- end of sources -->\n"
    pattern = re.compile(re.escape(start) + ".*?" + re.escape(end), re.DOTALL)
    return pattern.sub(lambda _: start + table() + end, PAGE.read_text(), count=1)


if __name__ == "__main__":
    PAGE.write_text(page())
