"""The files for people who join: links, commands, forms and hooks of CONTRIBUTING and its neighbours."""

import ast
import re
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).resolve().parent.parent
PAGES = [ROOT / name for name in ("CONTRIBUTING.md", "CHANGELOG.md", "SECURITY.md")]
FORMS = sorted((ROOT / ".github" / "ISSUE_TEMPLATE").glob("*.yml"))
HOOKS = ROOT / ".pre-commit-config.yaml"


def inline_code(page: Path) -> list[str]:
    return re.findall(r"`([^`\n]+)`", re.sub(r"^ *```.*?^ *```", "", page.read_text(), flags=re.M | re.S))


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_to_files_and_headings(page: Path) -> None:
    links = [link for link in re.findall(r"\]\(([^)\s]+)\)", page.read_text()) if not link.startswith("http")]
    assert links
    for link in links:
        path, _, anchor = link.partition("#")
        target = page.parent / path if path else page
        assert target.exists(), link
        headings = re.findall(r"^#+ (.+)$", target.read_text(), re.M) if anchor else []
        anchors = [re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings]
        assert not anchor or anchor in anchors, link


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_make_targets_and_paths_exist(page: Path) -> None:
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.M))
    folders = {path.name for path in ROOT.iterdir() if path.is_dir()} - {"runs", ".venv"}
    for code in inline_code(page):
        if code.startswith("make "):
            assert code.split()[1] in targets, code
        first = code.split("/")[0]
        if first in folders and re.fullmatch(r"[\w./*-]+", code) and "NAME" not in code:
            assert list(ROOT.glob(code)), code


def test_names_in_the_guide_are_in_the_file_beside_them() -> None:
    """Each "`NAME` in [file](path)" of CONTRIBUTING, and one at least in each row of "Where things happen"."""
    page, named = (ROOT / "CONTRIBUTING.md").read_text(), re.compile(r"`([\w.]+)` in\s\[[^]]+\]\(([\w/]+\.py)\)")
    rows = page.split("## Where things happen")[1].split("|---|---|\n")[1].split("\n\n")[0].splitlines()
    assert [row for row in rows if not named.search(row) and "](#" not in row] == []
    wrong = [f"{file}: {name}" for name, file in named.findall(page) if not defines((ROOT / file).read_text(), name)]
    assert wrong == []


def defines(source: str, name: str) -> bool:
    """Whether a module defines or assigns a name; CLASS.METHOD is a method."""
    nodes = ast.parse(source).body
    for part in name.split("."):
        targets = [(getattr(one, "targets", None) or [getattr(one, "target", one)])[0] for one in nodes]
        names = [getattr(one, "name", None) or getattr(one, "id", None) for one in targets]
        if part not in names:
            return False
        nodes = getattr(nodes[names.index(part)], "body", [])
    return True


def test_scripts_of_the_guide_exist() -> None:
    """Python files and modules in the commands of CONTRIBUTING."""
    blocks = "\n".join(re.findall(r"```sh\n(.*?)```", (ROOT / "CONTRIBUTING.md").read_text(), re.S))
    files = re.findall(r"(?<![\w./])([a-z_]+/[\w/]+\.py)", blocks)
    modules = [name.replace(".", "/") + ".py" for name in re.findall(r"(?:-m|from) (tests\.\w+)", blocks)]
    assert len(files) >= 3
    assert len(modules) >= 2
    assert [name for name in files + modules if not (ROOT / name).is_file()] == []


def test_the_bug_form_asks_for_what_is_needed_to_help() -> None:
    form = yaml.safe_load((ROOT / ".github" / "ISSUE_TEMPLATE" / "bug.yml").read_text())
    labels = " ".join(field["attributes"].get("label", "") for field in form["body"])
    for wanted in ("prorl doctor", "summary.json", "config.yaml"):
        assert wanted in labels


@pytest.mark.parametrize("form", [form for form in FORMS if form.stem != "config"], ids=lambda form: form.stem)
def test_fields_of_a_form_have_a_name_and_a_kind(form: Path) -> None:
    content = yaml.safe_load(form.read_text())
    assert {"name", "description", "body"} <= set(content)
    fields = [field for field in content["body"] if field["type"] != "markdown"]
    assert {field["type"] for field in fields} <= {"textarea", "input", "dropdown"}
    names = [field["id"] for field in fields]
    assert len(names) == len(set(names))


def test_local_hooks_are_those_of_make_lint() -> None:
    """The same programs as in `make lint`; hooks that are fetched have a fixed version."""
    lint = (ROOT / "Makefile").read_text().split("\nlint:")[1].split("\n\n")[0]
    for repository in yaml.safe_load(HOOKS.read_text())["repos"]:
        if repository["repo"] != "local":
            assert re.fullmatch(r"v\d+\.\d+\.\d+", repository["rev"])
            continue
        for hook in repository["hooks"]:
            program, *words = hook["entry"].removeprefix(".venv/train/bin/").split()
            if program == "python":
                assert [word for word in words if word.endswith(".py") and not (ROOT / word).is_file()] == []
            else:
                verb = f" {words[0]}" if program == "ruff" else ""
                assert f"$(BIN)/{program}{verb}" in lint
