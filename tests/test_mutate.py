"""The mutants of `make mutate`: what is changed, and that a run of tests tells a killed mutant from a survivor."""

import json
import random
import subprocess
import sys
from pathlib import Path

import pytest

from tests import mutate
from tests.mutation import Reached, Tests

SOURCE = '''"""Text with 1 number."""
import logging

_log = logging.getLogger(__name__)


def sign(x: int = 3, *, loud: bool = False) -> int:
    """Return 1 or 0."""
    if not loud and x > 0:
        _log.info("%d", 5)
        return 1
    return 0


def raised(box: dict[str, int]) -> None:
    box["x"] = 1 + len(box)
    box.clear()


def near(x: float) -> bool:
    return x < 0.5


def promised() -> int: ...


def pairs(x: list[int]) -> object:
    return zip(x, x, strict=True)
'''


def test_each_kind_of_change_is_made_once_and_gives_a_program(tmp_path: Path) -> None:
    (tmp_path / "sign.py").write_text(SOURCE)
    found = mutate.mutants_of(tmp_path, "sign.py")
    changes = {mutant.key.removeprefix("sign.py: ") for mutant in found}
    assert changes == {
        "3 -> 4  in: def sign(x: int = 3, *, loud: bool = False) -> int:",
        "False -> True  in: def sign(x: int = 3, *, loud: bool = False) -> int:",
        "not loud and x > 0 -> (not loud or x > 0)",
        "not loud and x > 0 -> not (not loud and x > 0)",
        "not loud -> bool(loud)",
        "x > 0 -> x >= 0",
        "0 -> 1  in: if not loud and x > 0:",
        "0 -> 1  in: return 0",
        "1 -> 2  in: return 1",
        '1 -> 2  in: box["x"] = 1 + len(box)',
        "return 1 -> return None",
        "return 0 -> return None",
        'box["x"] = 1 + len(box) -> pass',
        'box["x"] = 1 + len(box) -> return',
        "1 + len(box) -> (1 - len(box))",
        "box.clear() -> pass",
        "x < 0.5 -> x > 0.5",  # not <=: floats are hardly ever equal
        "0.5 -> 1.5  in: return x < 0.5",
        "return x < 0.5 -> return None",
        "return zip(x, x, strict=True) -> return None",
    }
    assert len(found) == len(changes)
    for mutant in found:
        changed = mutant.applied(SOURCE.encode())
        assert changed != SOURCE.encode()
        compile(changed, "sign.py", "exec")


def test_every_folder_has_files_and_tests(root: Path) -> None:
    for folder, (files, tests) in mutate.FOLDERS.items():
        assert list(root.glob(files)), folder
        assert all((root / test.split("::")[0]).exists() for test in tests), folder


def test_every_reason_names_a_mutant(root: Path) -> None:
    keys = {mutant.key for _, mutant in mutate.sample(root, list(mutate.FOLDERS), None, random.Random(0))}
    assert set(mutate.reasons()) - keys == set()


def test_a_sample_is_spread_over_the_folders_and_repeatable(root: Path) -> None:
    one, two = (mutate.sample(root, ["trainer", "scaling"], 20, random.Random(4)) for _ in range(2))
    assert one == two
    assert [folder for folder, _ in one] == ["trainer", "scaling"] * 10


CODE = """LIMIT = 3


def clipped(x: int) -> int:
    if x > LIMIT:
        return LIMIT
    return x


def unused() -> int:
    return 5


def counted(n: int) -> int:
    total = 0
    while total < n:
        total += 1
    return total


def bounds(least: int = 1) -> int:
    return least
"""
TESTS = """import pytest

from code_under_test import bounds, clipped, counted


@pytest.fixture(scope="module")
def shared() -> int:
    return counted(3)


def test_clipped() -> None:
    assert clipped(9) == 3


def test_counted(shared: int) -> None:
    assert shared == 3


def test_bounds() -> None:
    assert bounds() == 1
"""
OUTCOMES = {
    "x > LIMIT -> not (x > LIMIT)": "killed",
    "x > LIMIT -> x >= LIMIT": "survived",
    "return LIMIT -> return None": "killed",
    "return x -> return None": "survived",  # no test runs this line; those that run its file do not notice
    "3 -> 4  in: LIMIT = 3": "killed",  # a constant of the module
    "return 5 -> return None": "survived",
    "5 -> 6  in: return 5": "survived",
    "0 -> 1  in: total = 0": "survived",
    "total < n -> total <= n": "killed",
    "total < n -> not (total < n)": "killed",
    "total += 1 -> pass": "timeout",  # no end
    "1 -> 2  in: total += 1": "killed",
    "1 -> 2  in: def bounds(least: int = 1) -> int:": "killed",
    "return total -> return None": "killed",
    "return least -> return None": "killed",
}


def tried(folder: Path, tests: str) -> subprocess.CompletedProcess[str]:
    """Try the mutants of CODE, in a process of its own, because the tool forks."""
    (folder / "reward_plugins").mkdir()
    (folder / "code_under_test.py").write_text(CODE)
    (folder / "test_it.py").write_text(tests)
    code = f"""import json, pathlib, sys
sys.path.insert(0, {str(Path(mutate.__file__).parent)!r})
import mutate, mutation
root, found = pathlib.Path.cwd(), open("found.jsonl", "a", buffering=1)
mutation.PATIENCE_S = 1.0
mutate.FOLDERS = {{"it": ("code_under_test.py", ["test_it.py"])}}
mutants = mutate.mutants_of(root, "code_under_test.py")
mutate.try_folder(root, "it", mutants, lambda m, outcome, _: found.write(json.dumps([m.key, outcome]) + "\\n"))"""
    command = [sys.executable, "-c", code]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=180, check=False)


@pytest.mark.slow
@pytest.mark.starts
def test_killed_mutants_are_told_from_survivors(tmp_path: Path) -> None:
    done = tried(tmp_path, TESTS)
    assert done.returncode == 0, done.stderr
    lines = (tmp_path / "found.jsonl").read_text().splitlines()
    found = {(key.partition(": ")[2], outcome) for key, outcome in map(json.loads, lines)}
    assert found == set(OUTCOMES.items())
    assert (tmp_path / "code_under_test.py").read_text() == CODE


def test_code_of_other_processes_is_tried_by_the_tests_that_start_them(tmp_path: Path) -> None:
    """`caller` starts `child`, which runs `inner` and `alone`; a test calls `alone`, and another one starts `other`."""
    sources = {
        "caller": "import subprocess, sys\ndef run():\n    subprocess.run([sys.executable, '-m', 'box.child'])\n",
        "child": "from box import alone, inner\ndef main():\n    inner.work()\n    return alone\n",
        "inner": "def work():\n    return 1\n",
        "alone": "def work():\n    return 1\n\n\ndef unused():\n    return 2\n",
        "other": "from box import child\n\n\ndef unused():\n    return 2\n",
    }
    (tmp_path / "box").mkdir()
    for name, source in sources.items():
        (tmp_path / "box" / f"{name}.py").write_text(source)
    (tmp_path / "test_it.py").write_text("")
    lines = {"starts": ("caller", 3), "within": ("child", 4), "alone": ("alone", 2), "other": ("other", 1)}
    (tmp_path / "test_more.py").write_text("START = '-m box.other'\n")
    reached = {"test_more.py::more": Reached(1.0, 1.0, frozenset())} | {
        f"test_it.py::{test}": Reached(1.0, 1.0, frozenset({(f"box/{file}.py", line)}))
        for test, (file, line) in lines.items()
    }

    def tests_of(name: str, line: int) -> set[str]:
        mutant = mutate.Mutant(f"box/{name}.py", (line, 4), (line, 5), "", "")
        return {node.partition("::")[2] for node in Tests(tmp_path, reached).of(mutant)}

    assert tests_of("inner", 2) == {"starts"}
    assert tests_of("child", 3) == {"starts", "within"}
    assert tests_of("child", 4) == {"within"}
    assert tests_of("alone", 6) == {"starts", "alone"}
    assert tests_of("caller", 3) == {"starts"}
    assert tests_of("other", 1) == {"other"}
    assert tests_of("other", 5) == {"other", "more"}
    within = Tests(tmp_path, reached, ["test_more.py"]).of(mutate.Mutant("box/child.py", (4, 4), (4, 5), "", ""))
    assert within == ["test_it.py::within", "test_more.py::more"]  # what fixtures start comes last


@pytest.mark.starts
def test_a_test_that_fails_without_a_mutation_ends_the_tool(tmp_path: Path) -> None:
    done = tried(tmp_path, TESTS.replace("assert shared == 3", "assert shared == 4"))
    assert done.returncode == 1
    assert "test_it.py::test_counted" in done.stderr
    assert "it: the session of the tests failed; without a mutation they must pass" in done.stderr


def test_the_table_counts_by_folder_and_gives_reasons(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mutate, "reasons", lambda: {"a.py: 1 -> 2": "a time"})
    rows = [
        {"folder": "trainer", "key": f"a.py: {k} -> {k + 1}", "line": 9, "outcome": outcome}
        for k, outcome in enumerate(("killed", "survived", "survived", "timeout"))
    ]
    text = mutate.table(rows)
    assert "| trainer | 4 | 2 (50%) | 1 |" in text
    assert "| `a.py: 1 -> 2` | 9 | a time |" in text
    assert "| `a.py: 2 -> 3` | 9 | survived |" in text
