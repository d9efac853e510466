"""The tables of all Markdown pages, as GitHub reads them: it drops cells beyond the header's, and unknown HTML tags."""

import subprocess
from pathlib import Path

import pytest
from markdown_it import MarkdownIt
from markdown_it.rules_block.table import escapedSplit

from nemo_prorl import settings
from nemo_prorl.config import all_keys
from tests import paper_model

ROOT = Path(__file__).resolve().parent.parent
OWN = ("docs", "examples", "packages", "reward_plugins", "benchmarks", ".github")
PAGES = [*ROOT.glob("*.md"), *(page for folder in OWN for page in (ROOT / folder).rglob("*.md"))]


def faults(text: str) -> list[str]:
    """Each line that looks like a row and is not one on GitHub, or that has not as many cells as its header."""
    lines, found = text.splitlines(), []
    inside: set[int] = set()
    for token in MarkdownIt("commonmark").enable("table").parse(text):
        found += [f"{one.content} is dropped" for one in token.children or [] if one.type == "html_inline"]
        if token.map is None or token.type not in ("table_open", "fence", "code_block", "html_block"):
            continue
        inside.update(range(*token.map))
        if token.type == "table_open":
            rows = [escapedSplit(line.strip().removeprefix("|").removesuffix("|")) for line in lines[slice(*token.map)]]
            found += [
                f"line {token.map[0] + at + 1}: {len(row)} cells below a header of {len(rows[0])}"
                for at, row in enumerate(rows)
                if len(row) != len(rows[0])
            ]
    rows_outside = [at for at, line in enumerate(lines) if line.lstrip().startswith("|") and at not in inside]
    return found + [f"line {at + 1}: a row outside of a table: {lines[at][:60]}" for at in rows_outside]


@pytest.mark.parametrize("page", PAGES, ids=[str(page.relative_to(ROOT)) for page in PAGES])
def test_github_shows_the_tables_whole(page: Path) -> None:
    assert faults(page.read_text()) == []


@pytest.mark.parametrize(
    ("table", "fault"),
    [
        ("| a | b |\n|---|---|\n| 1 | `x|y` |\n", "line 3: 3 cells below a header of 2"),
        ("| a | b |\n|---|---|\n| 1 |\n", "line 3: 1 cells below a header of 2"),
        ("| a | b |\n|---|---|\n| 1 | 2 |\n\n| 3 | 4 |\n", "line 5: a row outside of a table: | 3 | 4 |"),
        ("| a | b |\n|---|---|\n| 1 | `{x\n\n y}` |\n| 3 | 4 |\n", "line 6: a row outside of a table: | 3 | 4 |"),
        ("| a | b |\n|---|---|\n| `<b>` | ends in <think> |\n", "<think> is dropped"),
        ("| a | b |\n|---|---|\n| 1 | x\\|y |\n\n```\n| 3 |\n```\n", None),
    ],
)
def test_faults_are_found(table: str, fault: str | None) -> None:
    assert faults(table) == ([] if fault is None else [fault])


def test_every_page_of_the_repository_is_read() -> None:
    listed = subprocess.run(["git", "ls-files", "*.md"], cwd=ROOT, capture_output=True, text=True, check=False)
    if listed.returncode:
        pytest.skip("not a clone")
    own = {name for name in listed.stdout.split() if not name.startswith("tests/")}
    assert own <= {str(page.relative_to(ROOT)) for page in PAGES}


def test_the_row_of_run_dir_has_the_default_of_each_cluster_and_stage(tmp_path: Path) -> None:
    [key] = [key for key in all_keys() if key.name == "run_dir"]
    model = f"pretrained_checkpoint.restore_from_path={paper_model.write(tmp_path / 'model')}"
    for cluster in settings.group_options()["cluster"]:
        given = [f"cluster={cluster}", *([] if cluster == "laptop" else [model])]
        assert settings.load(given).run_dir == key.default
        assert settings.load([*given, "stage=run1"]).run_dir == "runs/prorl/run1"
    assert key.rule.meaning.endswith("; default of each cluster: runs/laptop, with a stage runs/prorl/STAGE")
