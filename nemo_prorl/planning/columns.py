"""A function that aligns rows of text as a table for a terminal."""

from collections.abc import Container, Iterable, Sequence


def columns(rows: Iterable[Sequence[str]], right: Container[int] = ()) -> str:
    """Return one line of text per row, with aligned columns.

    Args:
        rows: Cells of each line. A row with a single cell is a heading and does not widen the first column.
        right: Numbers of the columns that are aligned to the right, from 0.
    """
    lines = list(rows)
    widths = [max(map(len, column)) for column in zip(*(row for row in lines if len(row) > 1), strict=True)]
    text = ""
    for row in lines:
        cells = (c.rjust(w) if k in right else c.ljust(w) for k, (c, w) in enumerate(zip(row, widths, strict=False)))
        text += "  ".join(cells).rstrip() + "\n"
    return text
