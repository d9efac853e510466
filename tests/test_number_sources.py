"""Each number of README.md and docs/ has a source, and measured ones are those of the result files."""

import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "benchmarks" / "results"
GAIN = "benchmarks/results/gain-2026-11-25.txt"


def check(root: Path) -> subprocess.CompletedProcess[str]:
    script = [sys.executable, str(root / "docs" / "number_sources.py")]
    return subprocess.run(script, capture_output=True, text=True, check=False, timeout=120)


@pytest.fixture
def copy(tmp_path: Path) -> Path:
    """A copy of the pages and results; everything else is linked."""
    for path in ROOT.iterdir():
        if path.name not in ("docs", "benchmarks", "README.md", ".git"):
            (tmp_path / path.name).symlink_to(path)
    shutil.copy(ROOT / "README.md", tmp_path)
    shutil.copytree(ROOT / "docs", tmp_path / "docs", ignore=shutil.ignore_patterns("images"))
    shutil.copytree(ROOT / "benchmarks", tmp_path / "benchmarks")
    return tmp_path


def change(path: Path, old: str, new: str) -> None:
    text = path.read_text()
    assert text.count(old) == 1
    path.write_text(text.replace(old, new))


def test_every_number_has_its_source() -> None:
    done = check(ROOT)
    assert done.returncode == 0, done.stderr
    listed = [line.split("\t") for line in done.stdout.splitlines()]
    gained = [line for line in listed if line[0].startswith("README.md") and line[1] == "15.9"]
    assert [line[2:4] for line in gained] == [[GAIN, "2026-11-25, commit 1a620e3"]]


@pytest.mark.parametrize(
    ("page", "old", "new"),
    [
        ("docs/explanation/real_model.md", "| prompt level, strict | 18.3", "| prompt level, strict | 18.4"),
        ("docs/explanation/comparison.md", "| 66.04 |", "| 64.66 |"),  # another number of the same result
        ("docs/howto/chain.md", "| 2,200 | 7,200 |", "| 2,200 | 7,300 |"),  # calculated from results
    ],
)
def test_another_number_on_a_page_is_found(copy: Path, page: str, old: str, new: str) -> None:
    change(copy / page, old, new)
    done = check(copy)
    assert done.returncode == 1
    assert re.search(r"has no source|not up to date|not on the page", done.stderr)


@pytest.mark.parametrize(
    ("file", "old", "new"),
    [
        (
            "benchmarks/results/publication-2026-11-25.txt",
            "export and write        0.82 s",
            "export and write        0.92 s",
        ),
        ("benchmarks/results/significance.txt", "+0.0821   0.0086", "+0.0721   0.0086"),
    ],
)
def test_another_number_in_a_result_is_found(copy: Path, file: str, old: str, new: str) -> None:
    change(copy / file, old, new)
    assert check(copy).returncode == 1


def test_a_measured_number_without_a_source_is_found(copy: Path) -> None:
    sentences = [
        "It takes 41.7 s.",
        "That is 3.3 times as fast.",
        "The gain is 0.417 ± 0.03.",
        "It is 37 % less.",
        "9,117 won.",
    ]
    with (copy / "docs" / "howto" / "setup.md").open("a") as page:
        page.write("\n## Speed\n\n" + "\n\n".join(sentences) + "\n")
    done = check(copy)
    assert done.returncode == 1
    assert re.findall(r"setup.md:\d+: (\S+) has no source", done.stderr) == [
        "41.7",
        "3.3",
        "0.417",
        "0.03",
        "37",
        "9,117",
    ]


def test_the_list_has_no_words_that_are_not_on_their_page(copy: Path) -> None:
    with (copy / "docs" / "number_sources.txt").open("a") as file:
        file.write("docs/index.md: 99 bottles -> requirement\n")
    assert "docs/index.md: 99 bottles: these words are not on the page" in check(copy).stderr


def test_the_table_of_the_ablations_is_that_of_the_results() -> None:
    code = "import sys; sys.path.insert(0, 'benchmarks'); import ablations as a; sys.stdout.write(a.table(a.results()))"
    made = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=ROOT)
    page = (ROOT / "docs" / "explanation" / "ablations.md").read_text()
    table = re.search(r"<!-- table -->\n(.*?)<!-- /table -->", page, re.S)
    assert table
    assert table[1] == made.stdout


def git(*words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(["git", *words], cwd=ROOT, capture_output=True, text=True, check=False)


@pytest.mark.skipif(
    not shutil.which("git") or git("rev-parse", "--is-shallow-repository").stdout.strip() != "false",
    reason="needs the history",
)
@pytest.mark.parametrize("path", sorted(RESULTS.glob("*.txt")), ids=lambda path: path.name)
def test_a_result_says_if_its_commit_is_not_in_the_history(path: Path) -> None:
    text = path.read_text()
    explained = text.partition("in the history")[0].rpartition("\n\n")[2] if "in the history" in text else ""
    for commit in set(re.findall(r"\bcommit ([0-9a-f]{7})\b", text)):
        if git("merge-base", "--is-ancestor", commit, "HEAD").returncode:
            assert commit in explained, f"{path.name}: commit {commit} is not in the history, and no line says so"
