"""Source distribution and wheel: complete, and usable in another folder with the declared dependencies only."""

import importlib.metadata
import os
import re
import shutil
import subprocess
import sys
import tarfile
import tomllib
import zipfile
from collections.abc import Callable
from pathlib import Path

import pytest
import yaml
from packaging.requirements import Requirement

from nemo_prorl.data.laptop.model import build_tokenizer
from nemo_prorl.lifecycle.run_records import code_sha256
from tests import paper_model

ROOT = Path(__file__).resolve().parent.parent
SANDBOX = ROOT / "packages" / "prorl-sandbox"
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
VERSION = PROJECT["version"]

Command = Callable[..., subprocess.CompletedProcess[str]]
starts = pytest.mark.starts


# --- one version -----------------------------------------------------------------------------------------------------


def test_the_version_of_a_checkout_is_the_one_of_pyproject() -> None:
    """Without site-packages: a Python into which nothing of this project is installed."""
    code = "import sys; sys.path.insert(0, sys.argv[1]); from nemo_prorl import __version__; print(__version__)"
    command = [sys.executable, "-I", "-S", "-c", code, str(ROOT)]
    assert subprocess.run(command, capture_output=True, text=True, check=True).stdout == f"{VERSION}\n"


def test_the_version_is_written_in_one_module_only() -> None:
    written = [path for path in ROOT.glob("nemo_prorl/**/*.py") if f'"{VERSION}"' in path.read_text()]
    assert written == []


def test_the_citation_names_this_version() -> None:
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    assert citation["version"] == VERSION
    assert citation["license"] == PROJECT["license"]
    released = re.search(rf"^## \[{re.escape(VERSION)}\] - (\S+)$", (ROOT / "CHANGELOG.md").read_text(), re.M)
    assert released is not None
    assert str(citation["date-released"]) == released[1]


def test_the_changelog_has_this_version_below_what_is_unreleased() -> None:
    headings = re.findall(r"^## \[([^]]+)\]", (ROOT / "CHANGELOG.md").read_text(), re.M)
    assert headings[:2] == ["Unreleased", VERSION]
    known = {"Added", "Changed", "Deprecated", "Removed", "Fixed", "Security"}
    assert set(re.findall(r"^### (.*)$", (ROOT / "CHANGELOG.md").read_text(), re.M)) <= known


# --- source distribution and wheel -----------------------------------------------------------------------------------


def run(*command: str | Path, cwd: Path, timeout: float = 240) -> subprocess.CompletedProcess[str]:
    """Run a command outside the repository, without the variables that would show it this checkout."""
    env = {name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "VIRTUAL_ENV"))}
    words = [str(word) for word in command]
    return subprocess.run(words, cwd=cwd, env=env, capture_output=True, text=True, timeout=timeout, check=False)


def successful(*command: str | Path, cwd: Path) -> str:
    result = run(*command, cwd=cwd)
    assert result.returncode == 0, result.stdout + result.stderr
    return result.stdout


def pip(*arguments: str | Path, cwd: Path) -> None:
    successful(sys.executable, "-m", "pip", "--disable-pip-version-check", *arguments, cwd=cwd)


def shipped() -> set[str]:
    """Return every file below nemo_prorl/, conf/ and launcher/, as the path that it has in the package."""
    listing = ["git", "ls-files", "--cached", "--others", "--exclude-standard", "-z"]
    listed = subprocess.run([*listing, "nemo_prorl", "conf", "launcher"], cwd=ROOT, capture_output=True, check=False)
    if listed.returncode:
        pytest.skip("not a git checkout")
    names = {name for name in listed.stdout.decode().split("\0") if name and (ROOT / name).is_file()}
    return {name if name.startswith("nemo_prorl/") else f"nemo_prorl/{name}" for name in names}


@pytest.fixture(scope="module")
def sdist(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The source distribution of this checkout, built from a copy: a build writes into its folder."""
    copy, out = tmp_path_factory.mktemp("checkout"), tmp_path_factory.mktemp("sdist")
    for name in ("conf", "launcher", "nemo_prorl"):
        ignored = shutil.ignore_patterns("__pycache__", "*.egg-info")
        shutil.copytree(ROOT / name, copy / name, symlinks=True, ignore=ignored)
    for path in ROOT.iterdir():
        if path.is_file() and not path.is_symlink():
            shutil.copy(path, copy)
    code = "import sys; from setuptools import build_meta; build_meta.build_sdist(sys.argv[1])"
    successful(sys.executable, "-c", code, out, cwd=copy)
    [archive] = out.iterdir()
    return archive


@pytest.fixture(scope="module")
def wheel(sdist: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel that is built from the source distribution; no package index is needed."""
    out = tmp_path_factory.mktemp("wheel")
    pip("wheel", "--no-deps", "--no-build-isolation", "--no-index", "--wheel-dir", out, sdist, cwd=out)
    [archive] = out.iterdir()
    return archive


@pytest.fixture(scope="module")
def sandbox_wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel of packages/prorl-sandbox, built from a copy."""
    copy, out = tmp_path_factory.mktemp("sandbox") / "prorl-sandbox", tmp_path_factory.mktemp("sandbox_wheel")
    shutil.copytree(SANDBOX, copy, ignore=shutil.ignore_patterns("__pycache__", "*.egg-info", "build"))
    pip("wheel", "--no-deps", "--no-build-isolation", "--no-index", "--wheel-dir", out, copy, cwd=out)
    [archive] = out.iterdir()
    return archive


def required(names: list[str]) -> set[str]:
    """Return the distributions that requirements name, with those that these require."""
    found: set[str] = set()
    wanted = [Requirement(name) for name in names]
    while wanted:
        need = wanted.pop()
        if need.name not in found and (need.marker is None or need.marker.evaluate({"extra": ""})):
            found.add(need.name)
            wanted += [Requirement(text) for text in importlib.metadata.requires(need.name) or []]
    return found


@pytest.fixture(scope="module")
def environment(wheel: Path, sandbox_wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An environment with the wheel and links to its declared dependencies; neither NeMo nor this checkout."""
    folder = tmp_path_factory.mktemp("environment")
    successful(sys.executable, "-m", "venv", "--without-pip", folder, cwd=folder)
    [packages] = folder.glob("lib/python*/site-packages")
    for name in required([name for name in PROJECT["dependencies"] if name != "prorl-sandbox"]):
        distribution = importlib.metadata.distribution(name)
        tops = {file.parts[0] for file in distribution.files or () if file.parts[0] not in ("..", "__pycache__")}
        assert tops, name
        for top in tops:
            (packages / top).symlink_to(Path(str(distribution.locate_file(top))).resolve())
    install(folder, wheel, sandbox_wheel)
    return folder


def install(environment: Path, *what: str | Path) -> None:
    python = environment / "bin" / "python"
    pip("--python", python, "install", "--no-deps", "--no-index", *what, cwd=environment)


@pytest.fixture
def prorl(environment: Path, tmp_path: Path) -> Command:
    """Run the installed `prorl` in an empty folder."""

    def command(*arguments: str) -> subprocess.CompletedProcess[str]:
        return run(environment / "bin" / "prorl", *arguments, cwd=tmp_path)

    return command


@starts
def test_the_source_distribution_holds_every_file_and_no_link(sdist: Path) -> None:
    with tarfile.open(sdist) as archive:
        members = {member.name.partition("/")[2]: member for member in archive.getmembers()}
    assert sorted(shipped() - set(members)) == []
    assert [name for name, member in members.items() if member.issym() or member.islnk()] == []
    assert {"LICENSE", "README.md", "CHANGELOG.md", "CITATION.cff", "SECURITY.md"} <= set(members)
    assert [name for name in members if name.startswith("tests")] == []


@starts
def test_the_wheel_holds_every_file_and_nothing_else(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        names = {name for name in archive.namelist() if ".dist-info/" not in name}
        metadata = archive.read(f"nemo_prorl-{VERSION}.dist-info/METADATA").decode()
    assert sorted(names ^ shipped()) == []
    assert f"\nVersion: {VERSION}\n" in metadata


@pytest.mark.slow
@starts
def test_the_installed_package_is_the_one_of_the_wheel(environment: Path, tmp_path: Path) -> None:
    code = "import nemo_prorl; print(nemo_prorl.__file__, nemo_prorl.__version__)"
    file, version = successful(environment / "bin" / "python", "-c", code, cwd=tmp_path).split()
    assert Path(file).is_relative_to(environment)
    assert version == VERSION
    code = "from nemo_prorl.lifecycle.run_records import code_sha256; print(code_sha256())"
    assert successful(environment / "bin" / "python", "-c", code, cwd=tmp_path).strip() == code_sha256()


@starts
@pytest.mark.parametrize(
    ("words", "printed"),
    [
        ("--version", f"prorl {VERSION}"),
        ("--help", "rewards"),
        ("plan", "memory of a rank"),
        ("plan cluster=h100_4x8 stage=run1 pretrained_checkpoint.restore_from_path=model", "GPU hours"),
        ("train --dry-run", "samples_per_prompt"),
        ("data sources", "leetcode"),
    ],
)
def test_commands_work_in_another_folder(prorl: Command, tmp_path: Path, words: str, printed: str) -> None:
    paper_model.write(tmp_path / "model")
    build_tokenizer(["What?"]).save_pretrained(tmp_path / "model")
    result = prorl(*words.split())
    assert result.returncode == 0, result.stderr
    assert printed in result.stdout


@starts
def test_a_command_that_needs_more_packages_names_the_first(prorl: Command) -> None:
    result = prorl("evaluate", "--list")
    assert result.returncode == 3
    assert "needs the Python package pydantic" in result.stderr
    assert "Traceback" not in result.stderr


@starts
def test_an_environment_from_before_the_sandbox_was_a_package_names_the_fix() -> None:
    code = "import sys; sys.modules['prorl_sandbox'] = None; from nemo_prorl import cli; sys.exit(cli.main(['plan']))"
    result = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False)
    assert result.returncode == 3
    assert "needs the Python package prorl_sandbox" in result.stderr
    assert "Fix: run `make setup`" in result.stderr
    assert "Traceback" not in result.stderr


@starts
def test_the_report_page_is_made_from_the_wheel(environment: Path, tmp_path: Path) -> None:
    """Template, style, scripts and uPlot are in the wheel."""
    code = "from nemo_prorl.report.page import page; print(page({'curves': [], 'runs': [], 'evaluations': []}))"
    made = successful(environment / "bin" / "python", "-c", code, cwd=tmp_path)
    assert made.startswith("<!doctype html>") or made.startswith("<!DOCTYPE html>")
    assert "uPlot" in made


@pytest.mark.slow
@starts
def test_a_new_plugin_is_listed_once_it_is_installed(prorl: Command, environment: Path, tmp_path: Path) -> None:
    before = prorl("rewards", "list")
    assert before.returncode == 0, before.stderr
    assert "no reward plugin is installed" in before.stderr
    made = prorl("rewards", "new", "wordlength")
    assert made.returncode == 0, made.stderr
    pip(
        "wheel", "--no-deps", "--no-build-isolation", "--no-index", "--wheel-dir", "built", "./wordlength", cwd=tmp_path
    )
    install(environment, *(tmp_path / "built").iterdir())
    after = prorl("rewards", "list")
    assert after.returncode == 0, after.stderr
    assert re.match(r"wordlength +ok +tasks wordlength", after.stdout), after.stdout


# --- the sandbox alone -----------------------------------------------------------------------------------------------


@starts
def test_the_sandbox_alone_judges_a_program_by_the_lines_of_its_page(sandbox_wheel: Path, tmp_path: Path) -> None:
    """In an environment with nothing else; the zygote finds its package there, too."""
    with zipfile.ZipFile(sandbox_wheel) as archive:
        names = {name for name in archive.namelist() if ".dist-info/" not in name}
    here = {f"prorl_sandbox/{path.name}" for path in (SANDBOX / "prorl_sandbox").iterdir() if path.is_file()}
    assert names == here
    successful(sys.executable, "-m", "venv", "--without-pip", tmp_path / "empty", cwd=tmp_path)
    install(tmp_path / "empty", sandbox_wheel)
    page = (SANDBOX / "README.md").read_text()
    [code] = re.findall(r"^```python\n(.*?)^```", page, re.M | re.S)
    printed = successful(tmp_path / "empty" / "bin" / "python", "-I", "-c", code, cwd=tmp_path)
    assert f"This prints `{printed.strip()}`." in page
