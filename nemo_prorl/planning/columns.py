"""Rows of text as a table for a terminal."""

from collections.abc import Container, Iterable, Sequence


def columns(rows: Iterable[Sequence[str]], right: Container[int] = ()) -> str:
    """Return lines whose cells stand below each other; the columns in `right` end below each other."""
    lines = list(rows)
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    text = ""
    for row in lines:
        cells = (c.rjust(w) if k in right else c.ljust(w) for k, (c, w) in enumerate(zip(row, widths, strict=True)))
        text += "  ".join(cells).rstrip() + "\n"
    return text
