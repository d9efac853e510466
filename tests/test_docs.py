"""README and docs against the code: links, files, commands, configuration keys, functions, examples."""

import argparse
import ast
import functools
import json
import re
import runpy
import shlex
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import fields
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from omegaconf import DictConfig

from nemo_prorl import cli, settings
from nemo_prorl.config import ADVISING_RULES, RESET_RULES, Config
from nemo_prorl.launcher.run_results import outcome
from nemo_prorl.rewards.discovery import discover
from nemo_prorl.rewards.interface import RewardRequest, Verdict, judge
from nemo_prorl.rewards.sandbox import open_sandbox
from tests import paper_model

ROOT = Path(__file__).resolve().parent.parent
FILES = sorted(path for folder in ("nemo_prorl", "launcher") for path in (ROOT / folder).rglob("*.py"))
DOCS = ROOT / "docs"
PAGES = [ROOT / "README.md", *sorted(DOCS.rglob("*.md"))]


def test_the_readme_s_outcome_is_that_of_the_report_in_the_tour() -> None:
    """Both are the laptop's first run; docs/tour/report.html was made by it."""
    report = (DOCS / "tour" / "report.html").read_text()
    found = re.search(r'<script type="application/json" id="data">(.*?)</script>', report, re.S)
    assert found is not None
    [curve] = json.loads(found[1])["curves"]
    whole, *tasks = curve["outcome"]["scores"]
    columns = {name: curve["metrics"][name]["m"] for name in ("reward/all", "entropy", "kl")}
    lines = [dict(zip(columns, row, strict=True)) for row in zip(*columns.values(), strict=True)]
    heldout = whole | {"prompts": int(whole["prompts"]), "tasks": {task["name"]: task for task in tasks}}
    lines[0]["policy/grad_norm"] = 1.0
    shown = outcome({"step": curve["steps"], "stage": "none", "seed": 1, "heldout": heldout}, lines)
    page = (ROOT / "README.md").read_text()
    told = re.search(r"<!-- outcome -->\n```text\n(.*?)\n```\n<!-- /outcome -->", page, re.S)
    assert told is not None
    assert told[1].split("\n") == shown
    assert "`deterministic=true`" in page[: told.start()]  # why one's own digits differ


def pages(*names: str) -> Any:
    chosen = [page for page in PAGES if not names or page.name in names]
    return pytest.mark.parametrize("page", chosen, ids=[page.name for page in chosen])


def blocks(page: Path, language: str) -> list[str]:
    """The fenced blocks of one language."""
    return re.findall(rf"^```{language}\n(.*?)^```", page.read_text(), re.M | re.S)


def prose(page: Path) -> str:
    """A page without its fenced blocks."""
    return re.sub(r"^```.*?^```", "", page.read_text(), flags=re.M | re.S)


def inline_code(page: Path) -> list[str]:
    return re.findall(r"`([^`\n]+)`", prose(page))


# --- links and files -------------------------------------------------------------------------------------------------


def anchors(page: Path) -> set[str]:
    """GitHub's anchors of a page's headings."""
    headings = re.findall(r"^#+ (.+)$", prose(page), re.M)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pages()
def test_every_relative_link_leads_somewhere(page: Path) -> None:
    links = re.findall(r"\]\(([^)\s]+)\)", page.read_text())
    for link in links:
        if link.startswith("http"):
            continue
        path, _, anchor = link.partition("#")
        target = (page.parent / path).resolve() if path else page
        assert target.exists(), f"{page.name} links to {link}"
        if anchor:
            assert anchor in anchors(target), f"{page.name} links to {link}; headings: {sorted(anchors(target))}"


def test_every_file_named_exists() -> None:
    """Paths of the repository in inline code.  What a run writes is not there; keys of metrics look like paths."""
    written = ("runs/", "checkpoints/", "rollouts/", "endpoints/", "logs/", ".venv/", "RUN/")
    folders = {path.name for path in ROOT.iterdir() if path.is_dir()}
    named = [code for page in PAGES for code in inline_code(page) if re.fullmatch(r"[\w.\-]+/[\w./\-]*", code)]
    for code in named:
        ours = code.split("/")[0] in folders or re.search(r"\.(py|md|yaml|toml|lock|sbatch|sh)$", code)
        if ours and not code.startswith(written):
            assert (ROOT / code).exists(), code


def test_the_start_page_leads_to_pages_in_an_order() -> None:
    """Each of the eight steps of docs/index.md names a page, and the page before it ends with a link to it."""
    order = (DOCS / "index.md").read_text().split("## Read in this order")[1].split("\n## ")[0]
    steps = [DOCS / link for link in re.findall(r"^\d\. \[[^]]+\]\(([\w/]+\.md)\)", order, re.M)]
    assert len(steps) == 8
    for page, following in pairwise(steps):
        link = re.search(r"\]\(([^)]+)\)\.$", page.read_text().splitlines()[-1])
        assert link, page
        assert (page.parent / link[1]).resolve() == following


def test_every_benchmark_has_its_question() -> None:
    """docs/reference/benchmarks.md lists each script that is run by itself; helpers and other sides are left out."""
    rows = re.findall(r"^\| \[(\w+\.py)\]\(.*\?", (DOCS / "reference" / "benchmarks.md").read_text(), re.M)
    helpers = {
        "machine.py",
        "engine.py",
        "instruction_prompts.py",
        "reward_load.py",
        "evaluate_offline.py",
        "versus_trl_trainer.py",
    }
    assert sorted(rows) == sorted({path.name for path in (ROOT / "benchmarks").glob("*.py")} - helpers)


def test_the_tests_of_differences_are_those_of_the_results() -> None:
    script = [sys.executable, str(ROOT / "benchmarks" / "significance.py")]
    made = subprocess.run(script, capture_output=True, text=True, check=True, timeout=120).stdout
    assert made == (ROOT / "benchmarks" / "results" / "significance.txt").read_text()


LIMIT = 1500  # words of a page, as `wc -w` counts them, without a generated table
GENERATED = {"configuration.md", "commands.md", "schemas.md"}


def test_pages_are_short() -> None:
    table = re.compile(
        r"<!-- sources.*?<!-- end of sources|<!-- table -->.*?<!-- /table -->|<!-- numbers: .*?-->", re.DOTALL
    )
    words = {page.name: len(table.sub("", page.read_text()).split()) for page in DOCS.rglob("*.md")}
    assert {name: count for name, count in words.items() if count >= LIMIT and name not in GENERATED} == {}


def test_every_page_is_in_the_navigation() -> None:
    listed = set(re.findall(r"([\w/]+\.md)$", (ROOT / "mkdocs.yml").read_text(), re.M))
    assert listed == {str(page.relative_to(DOCS)) for page in PAGES[1:]}


@pytest.mark.parametrize("script", ["configuration", "commands", "schema_list", "data_sources"])
def test_generated_pages_are_up_to_date(script: str) -> None:
    made = runpy.run_path(str(DOCS / f"{script}.py"))
    assert made["PAGE"].read_text() == made["page"](), f"python docs/{script}.py writes it again"


@pytest.mark.parametrize("name", ["processes", "step"])
def test_drawings_are_those_of_the_script(name: str) -> None:
    drawings = runpy.run_path(str(DOCS / "diagrams.py"))["drawings"]()
    assert (DOCS / "images" / f"{name}.svg").read_text() == drawings[f"{name}.svg"]


def test_the_tree_of_the_design_is_the_tree() -> None:
    [tree] = [block for block in blocks(DOCS / "explanation" / "design.md", "text") if "nemo_prorl/\n" in block]
    for line in tree.splitlines():
        folder = ROOT / "nemo_prorl" if line.startswith("  ") else ROOT
        for name in re.split(r"\s{2,}", line.strip())[0].split():
            if re.fullmatch(r"[\w/]+(\.py)?", name):
                assert (folder / name).exists(), name


def functions_of(module: str) -> set[str]:
    """Names that a module of `algorithms` defines, without importing it."""
    tree = ast.parse((ROOT / "nemo_prorl" / "algorithms" / f"{module}.py").read_text())
    return {node.name for node in tree.body if isinstance(node, ast.FunctionDef | ast.ClassDef)}


def test_every_function_named_beside_a_formula_exists() -> None:
    modules = {path.stem for path in (ROOT / "nemo_prorl" / "algorithms").glob("*.py")}
    named = [code.split(".") for code in inline_code(DOCS / "explanation" / "algorithm.md") if "." in code]
    found = [parts for parts in named if parts[0] in modules]
    assert len(found) >= 10
    assert [".".join(parts) for parts in found if parts[1] not in functions_of(parts[0])] == []


def test_beside_every_formula_stands_its_function() -> None:
    """The text after a block of mathematics begins with `module.name` of `algorithms`."""
    pages = [(DOCS / "explanation" / f"{name}.md").read_text() for name in ("algorithm", "resets")]
    parts = [part for page in pages for part in page.split("```math\n")[1:]]
    assert len(parts) >= 14
    for part in parts:
        formula, _, after = part.partition("\n```\n\n")
        name = re.match(r"`(\w+)\.(\w+)`", after)
        assert name, formula
        assert name[2] in functions_of(name[1]), formula


def alarm_texts() -> dict[str, str]:
    """Where the package raises an alarm, and the longest piece of its text that is always the same."""
    found = {}
    for path in FILES:
        for node in ast.walk(ast.parse(path.read_text())):
            if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Attribute) or len(node.args) < 2:
                continue
            if node.func.attr.removeprefix("_") == "alarm":
                pieces = [one.value for one in ast.walk(node.args[1]) if isinstance(one, ast.Constant)]
                texts = [piece for piece in pieces if isinstance(piece, str)]
                found[f"{path.name}:{node.lineno}"] = max(texts, key=len, default="").strip()
    return found


def test_every_alarm_has_a_cause_and_a_fix() -> None:
    texts, told = alarm_texts(), (DOCS / "howto" / "alarms.md").read_text()
    assert sum(bool(text) for text in texts.values()) >= 7
    assert {where: text for where, text in texts.items() if text not in told} == {}
    assert [where for where, text in texts.items() if not text] == [f"resets.py:{line_of_the_rules()}"]
    for rule in (*RESET_RULES, *ADVISING_RULES):
        assert f"`{rule}: ...`" in told


def line_of_the_rules() -> int:
    """The one alarm whose text is a rule's finding."""
    lines = (ROOT / "nemo_prorl" / "lifecycle" / "resets.py").read_text().splitlines()
    return next(number for number, line in enumerate(lines, 1) if ".alarm(metrics.step, str(finding))" in line)


def test_every_error_of_the_package_has_a_cause_and_a_fix() -> None:
    bases: dict[str, set[str]] = {}
    for path in FILES:
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ClassDef):
                bases[node.name] = {base.id for base in node.bases if isinstance(base, ast.Name)}
    errors = {"ProrlError"}
    while more := {name for name, of in bases.items() if of & errors} - errors:
        errors |= more
    assert len(errors) > 15
    rows = re.findall(r"^\| `(\w+)` \| \d+ \|", (DOCS / "howto" / "errors.md").read_text(), re.M)
    assert sorted(errors - set(rows) - {"ProrlError"}) == []


def names_of_tests() -> set[str]:
    files = [*(ROOT / "tests").rglob("test_*.py"), *(ROOT / "packages").rglob("test_*.py")]
    return {name for file in files for name in re.findall(r"^(?:async )?def (test_\w+)\(", file.read_text(), re.M)}


@pages("comparison.md", "defects.md")
def test_every_test_that_a_page_names_exists(page: Path) -> None:
    """They are the evidence for what the page claims."""
    named = {code for code in inline_code(page) if re.fullmatch(r"test_\w+", code)}
    assert len(named) >= 5
    assert sorted(named - names_of_tests()) == []


def test_every_defect_has_a_thread_and_a_test() -> None:
    """Each row of docs/explanation/defects.md links to one or more threads and names one or more tests."""
    lines = (DOCS / "explanation" / "defects.md").read_text().splitlines()
    rows = [line for line in lines if line.startswith("| ") and not line.startswith(("| defect", "| ---"))]
    assert len(rows) >= 12
    for row in rows:
        assert re.search(r"\]\(https://github\.com/[\w.-]+/[\w.-]+/(issues|pull)/\d+\)", row), row
        assert re.search(r"`test_\w+`", row), row


# --- commands (tests/test_docs_commands.py runs them) ----------------------------------------------------------------


def commands() -> Iterator[tuple[str, list[str]]]:
    """(page, words) of each command in a shell block."""
    for page in PAGES:
        for block in blocks(page, "(?:sh|bash)"):
            for line in block.replace("\\\n", " ").splitlines():
                if words := shlex.split(line, comments=True):
                    yield page.name, words


COMMANDS = list(commands())


def model_folder(folder: Path) -> Path:
    """What configuration checks look at of the paper's base model."""
    return paper_model.write(folder)


def test_there_are_commands_to_check() -> None:
    programs = {words[0] for _, words in COMMANDS}
    assert {"make", "prorl"} <= programs
    assert programs <= {
        "make",
        "prorl",
        ".venv/train/bin/prorl",
        "cp",
        "hf",
        "rm",
        "df",
        "pip",
        ".venv/train/bin/pip",
        ".venv/train/bin/python",
        "pytest",
        "sbatch",
        "bash",
    }


def stage_words(words: list[str]) -> list[str]:
    """What stage.sbatch is given by a command of the docs, without sbatch's own flags."""
    at = words.index("slurm/stage.sbatch")
    flags = [word for word in words[1:at] if not word.startswith("--")]
    assert flags == []
    return words[at + 1 :]


@pytest.mark.parametrize("words", [w for _, w in COMMANDS if Path(w[0]).name == "python"], ids=" ".join)
def test_scripts_have_the_options_that_are_named(words: list[str]) -> None:
    told = subprocess.run(
        [sys.executable, *words[1:2], "--help"], cwd=ROOT, capture_output=True, text=True, timeout=60, check=False
    )
    assert told.returncode == 0, told.stderr
    for option in words[2:]:
        assert not option.startswith("--") or option in told.stdout


@pytest.mark.parametrize("words", [w for _, w in COMMANDS if w[0] == "make"], ids=" ".join)
def test_make_commands_are_ones(words: list[str]) -> None:
    told = subprocess.run([*words, "-n"], cwd=ROOT, capture_output=True, text=True, timeout=60, check=False)
    assert told.returncode == 0, told.stderr
    for word in words[1:]:
        if word.startswith("ARGS=") and words[1] == "train":
            settings.load(shlex.split(word.removeprefix("ARGS=")))


def prorl_commands() -> set[str]:
    [choices] = [one.choices for one in cli._parser()._actions if isinstance(one, argparse._SubParsersAction)]
    return set(choices)


def test_the_overview_has_every_command_and_target() -> None:
    """First cells of the tables of docs/reference/overview.md; beside them every target has its meaning."""
    cells = re.findall(r"^\| (`.*?`) \|", prose(DOCS / "reference" / "overview.md"), re.M)
    told = [code.split()[:2] for cell in cells for code in re.findall(r"`([^`]+)`", cell)]
    assert sorted(prorl_commands() - {words[1] for words in told if words[0] == "prorl"}) == []
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.M))
    assert sorted(targets ^ {words[1] for words in told if words[0] == "make"}) == []


def test_inline_commands_exist() -> None:
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.M))
    found = [code for page in PAGES for code in inline_code(page) if code.startswith(("make ", "prorl "))]
    assert len(found) > 20
    for code in found:
        second = next((w for w in code.split()[1:] if "=" not in w), None)
        if second is not None:
            assert second in (targets if code.startswith("make ") else prorl_commands()), code


def test_make_variables_in_the_table_are_the_makefiles() -> None:
    known = set(re.findall(r"^([A-Z_]+) \?=", (ROOT / "Makefile").read_text(), re.M))
    assert known == {"PYTHON", "RUN", "ARGS", "TRAIN_LOCK", "ROLLOUT_LOCK", "TORCH_INDEX"} | {
        "EVIDENCE_PYTHON",
        "GPU_PYTHON",
        "GPU_WHEELS",
    }
    rows = re.findall(r"^\| (`[A-Z].*?`) \|", (DOCS / "howto" / "setup.md").read_text(), re.M)
    assert {name for row in rows for name in re.findall(r"`([A-Z_]+)`", row)} == known


# --- configuration ---------------------------------------------------------------------------------------------------

SECTIONS = {field.name for field in fields(Config)}


@functools.cache
def whole_configuration() -> DictConfig:
    return settings.load(["cluster=laptop"])


def is_key(key: str) -> bool:
    """Whether a key, without a value, is one of the composed configuration."""
    if key.startswith("rewards.plugins."):
        _, _, plugin, setting = key.split(".")
        return setting in {field.name for field in fields(discover().plugins[plugin].Config)}
    node: Any = whole_configuration()
    for part in key.split("."):
        if isinstance(node, DictConfig) and part in node:
            node = node._get_node(part)
        else:
            return False
    return True


def mentioned_keys() -> list[tuple[str, str]]:
    found = []
    for page in PAGES:
        for code in inline_code(page):
            for word in code.split():
                key, equals, _ = word.partition("=")
                dotted = re.fullmatch(r"[a-z_]+(\.[a-z0-9_]+)+", key)
                if re.search(r"\.(py|md|json|jsonl|yaml)$", key):
                    continue
                if key.split(".")[0] in SECTIONS and (dotted or (equals and re.fullmatch(r"[a-z_]+", key))):
                    found.append((page.name, key))
    return found


def test_every_configuration_key_exists() -> None:
    groups = set(settings.group_options())
    keys = [(page, key) for page, key in mentioned_keys() if key not in groups]
    assert len(keys) > 40
    assert [(page, key) for page, key in keys if not is_key(key)] == []


def test_every_choice_names_a_key_or_that_there_is_none() -> None:
    """The last column of the tables of docs/explanation/choices.md; the table of precisions has none."""
    rows = re.findall(r"^\|(?! *-)(.+)\|$", (DOCS / "explanation" / "choices.md").read_text(), re.M)
    keys = [
        row.split("|")[-1].strip()
        for row in rows
        if not row.startswith((" precision ", " float32 ", " 16 bits ", " FP8 "))
    ]
    keys = [key for key in keys if key != "key"]
    assert len(keys) > 25
    assert [key for key in keys if key != "none" and not all(map(is_key, re.findall(r"`([^`]+)`", key) or [key]))] == []


@pytest.mark.starts
def test_overrides_in_the_tables_are_accepted() -> None:
    """Every `key=value` of two pages, each by itself, as a user would try it."""
    tried = 0
    for page in (DOCS / "howto" / "overrides.md", DOCS / "tutorial" / "laptop.md"):
        for line in prose(page).splitlines():
            for code in re.findall(r"`([^`]+)`", line) if line.startswith("| `") else []:
                words = code.split()
                if all(re.fullmatch(r"[a-z_.0-9]+=[^|]+", word) for word in words):
                    settings.load([w for w in words if not w.startswith("run_dir=")])
                    tried += 1
    assert tried >= 20


def test_groups_in_the_list_are_the_shipped_ones() -> None:
    """docs/howto/overrides.md names every file of every group, and no other."""
    text = (DOCS / "howto" / "overrides.md").read_text().split("\n## Groups\n")[1]
    for group, options in settings.group_options().items():
        named = [name for choices in re.findall(rf"`{group}=([\w|]+)`", text) for name in choices.split("|")]
        assert sorted(named) == options, group


# --- examples in Python ----------------------------------------------------------------------------------------------


def test_the_readmes_plugin_judges() -> None:
    code = next(block for block in blocks(ROOT / "README.md", "python") if "RewardPlugin" in block)
    names: dict[str, Any] = {}
    exec(compile(code, "README.md", "exec"), names)
    plugin = names["Palindromes"]()

    def verdict(response: str) -> Verdict:
        return judge(plugin, RewardRequest("a", "palindromes", "?", {"length": 4}, response))

    assert verdict("abba")["score"] == 1.0
    assert verdict("<think>hm</think>abca")["score"] == 0.5
    assert verdict("abc")["failure"] == "invalid"
    assert verdict("<think>abba")["detail"].startswith("<think> was opened")


def test_the_sandboxs_plugin_judges() -> None:
    [code] = blocks(DOCS / "explanation" / "sandbox.md", "python")
    names: dict[str, Any] = {}
    exec(compile(code, "sandbox.md", "exec"), names)
    plugin = names["PrintsTheAnswer"]()
    plugin.sandbox = open_sandbox()
    try:
        verdicts = [judge(plugin, RewardRequest("a", "prints", "?", {"output": "7"}, f"print({n})")) for n in (7, 8)]
    finally:
        plugin.sandbox.close()
    assert [verdict["score"] for verdict in verdicts] == [1.0, 0.0]


def test_the_loss_of_the_python_page_has_a_gradient() -> None:
    [code] = blocks(DOCS / "reference" / "api_algorithms.md", "python")
    names: dict[str, Any] = {}
    exec(compile(code, "api_algorithms.md", "exec"), names)
    gradient = names["logp_BT"].grad
    expected = -names["advantage_B"][:, None].expand(4, 8) / 32
    torch.testing.assert_close(gradient, expected)
