"""Writes docs/reference/schemas.md from the files in docs/schemas, by `python docs/schema_list.py`."""

import json
from pathlib import Path

DOCS = Path(__file__).resolve().parent
PAGE = DOCS / "reference" / "schemas.md"
HEAD = """# JSON schemas

Each file and message that other programs read has a JSON schema (draft 2020-12).
`python setup/schemas.py` makes it from the types that write and read the file,
and `make check` fails if a schema and its type differ.
`python docs/schema_list.py` writes this page.

| Format | Content | Schema |
|---|---|---|
"""


def page() -> str:
    """Return the page as Markdown."""
    rows = []
    for path in sorted((DOCS / "schemas").glob("*.schema.json")):
        schema = json.loads(path.read_text())
        content = " ".join(schema.get("description", "").split()).rstrip(".")
        rows.append(f"| {schema['title']} | {content} | [{path.name}](../schemas/{path.name}) |\n")
    return HEAD + "".join(rows)


if __name__ == "__main__":
    PAGE.write_text(page())
