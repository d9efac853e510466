"""The mutants of `make mutate`: what is changed, and that a run of tests tells a killed mutant from a survivor."""

import json
import os
import random
import subprocess
import sys
from pathlib import Path

import pytest

from tests import mutate

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
'''


def test_each_kind_of_change_is_made_once_and_gives_a_program(tmp_path: Path) -> None:
    (tmp_path / "sign.py").write_text(SOURCE)
    found = mutate.mutants_of(tmp_path, "sign.py")
    changes = {mutant.key.removeprefix("sign.py: ") for mutant in found}
    assert changes == {
        "3 -> 4",
        "False -> True",
        "not loud and x > 0 -> (not loud or x > 0)",
        "not loud and x > 0 -> not (not loud and x > 0)",
        "not loud -> bool(loud)",
        "x > 0 -> x >= 0",
        "0 -> 1",
        "1 -> 2",
        "return 1 -> return None",
        "return 0 -> return None",
        'box["x"] = 1 + len(box) -> pass',
        'box["x"] = 1 + len(box) -> return',
        "1 + len(box) -> (1 - len(box))",
        "box.clear() -> pass",
    }
    assert len(found) == len(changes) + 2  # 0 and 1 stand twice
    for mutant in found:
        changed = mutant.applied(SOURCE.encode())
        assert changed != SOURCE.encode()
        compile(changed, "sign.py", "exec")


def test_every_folder_has_files_and_tests(root: Path) -> None:
    for folder, (files, tests) in mutate.FOLDERS.items():
        found = sorted(str(path.relative_to(root)) for path in root.glob(files))
        assert found, folder
        assert all((root / test).exists() for test in tests), folder
        first = mutate.tests_of(root, folder, found[0])
        assert first
        assert set(first) == set(mutate.tests_of(root, folder, found[-1]))


def test_a_sample_is_spread_over_the_folders_and_repeatable(root: Path) -> None:
    one, two = (mutate.sample(root, ["trainer", "scaling"], 20, random.Random(4)) for _ in range(2))
    assert one == two
    assert [folder for folder, _ in one] == ["trainer", "scaling"] * 10


@pytest.mark.starts
def test_a_killed_mutant_is_told_from_a_survivor(tmp_path: Path) -> None:
    """In a process of its own, because the tool forks."""
    (tmp_path / "reward_plugins").mkdir()
    code = f"import sys; sys.path.insert(0, {str(Path(mutate.__file__).parent)!r}); import mutate, json, pathlib\n"
    code += "root = pathlib.Path.cwd()\nfound = []\n"
    for name, body in (("good", "assert True"), ("bad", "assert False"), ("slow", "while True: pass")):
        (tmp_path / f"test_{name}.py").write_text(f"def test_it():\n    {body}\n")
        code += f"found.append(mutate.run_tests(root, ['test_{name}.py'], '', {5.0 if name == 'slow' else 60.0})[0])\n"
    code += "print(json.dumps(found))"
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd=tmp_path,
        env=environment,
        capture_output=True,
        text=True,
        timeout=180,
        check=False,
    )
    assert json.loads(done.stdout.splitlines()[-1]) == ["survived", "killed", "timeout"], done.stderr


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
