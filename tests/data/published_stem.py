"""Stand-in rows of SCP-116K in the form that is published, with odd ones.

Columns: `domain`, `problem`, `extract_solution` (the source's), `r1_response` (R1's answer without its thought) and
`r1_reasoning_content`.  They are known from a data set derived from the newest version; an earlier version, without
R1, has `matched_solution` instead of `extract_solution`.
"""

import json
from pathlib import Path
from typing import Any


def scp_116k(folder: Path) -> Path:
    """Write FOLDER/scp-116k with 14 rows and return it; for `--agreement grader`, 6 of them agree."""
    rows = [_row(number) for number in range(14)]
    rows[1]["extract_solution"] = "They are \\boxed{99} trees."  # disagrees
    rows[2]["r1_response"] = "So there are **51** trees in all."  # no box: only a judge can read it
    rows[3]["extract_solution"] = ""  # no ground truth
    rows[4]["extract_solution"] = None
    rows[5]["extract_solution"] = "Counting rows and columns, one finds 60 trees."  # prose, no box
    rows[6]["r1_response"] = ""
    rows[7] = rows[0] | {"problem": f" {rows[0]['problem']}\n"}  # a duplicate
    rows[8]["problem"] = ""
    rows[9]["r1_response"] = "The proof is complete."  # no short answer
    path = folder / "scp-116k" / "SCP_116K_in_open_source_format.jsonl"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows), encoding="utf-8")
    return folder / "scp-116k"


def _row(number: int) -> dict[str, Any]:
    rows, columns = number + 3, number + 7
    return {
        "domain": ("Botany", "Physics", "Chemistry")[number % 3],
        "problem": f"An orchard in the valley of the river Ilm has {rows} rows of {columns} trees, and {number} of"
        f" the trees in its row number {number + 1} were felled in a storm. How many trees did the orchard have before"
        " the storm?",
        "r1_response": f"Multiply: ${rows} \\cdot {columns}$.\n\n$$\\boxed{{{rows * columns}}}$$",
        "r1_reasoning_content": "Okay, so I need to count the trees. Hmm.",
        "extract_solution": f"Each row has the same number.\nThere are \\boxed{{{rows * columns}}} trees.",
    }
