"""Writes docs/reference/schemas.md from the files in docs/schemas, by `python docs/schema_list.py`."""

import json
from pathlib import Path

DOCS = Path(__file__).resolve().parent
PAGE = DOCS / "reference" / "schemas.md"
HEAD = """# JSON schemas

Each file and message that other programs read has a JSON schema (draft 2020-12). The last column links to the page
that explains the fields.

`python setup/schemas.py` generates the schemas from the types of the code that writes and reads each file. A test fails
if a schema and its type differ. `python docs/schema_list.py` writes this page.

| Format | Content | Schema | Fields |
|---|---|---|---|
"""


def page() -> str:
    """Return the page as Markdown."""
    rows = []
    for path in sorted((DOCS / "schemas").glob("*.schema.json")):
        schema = json.loads(path.read_text())
        content = " ".join(schema.get("description", "").split()).rstrip(".")
        link = f"[{path.name}](../schemas/{path.name})"
        rows.append(f"| {schema['title']} | {content} | {link} | {_explained(path.name)} |\n")
    return HEAD + "".join(rows)


def _explained(schema: str) -> str:
    """Return links to the pages that refer to a schema."""
    pages = [path for path in sorted(PAGE.parent.glob("*.md")) if path != PAGE and schema in path.read_text()]
    return ", ".join(f"[{path.name}]({path.name})" for path in pages)


if __name__ == "__main__":
    PAGE.write_text(page())
