"""Hostile programs, and honest ones that look odd: the 126 of tests/attacks/given and our own of tests/attacks."""

import json
import sys
from pathlib import Path

import pytest

from tests.lines import read_lines
from tests.rewards.attack_runs import GIVEN, OWN, attack, judge, run_attacks

pytestmark = pytest.mark.starts


def cases_of(folder: Path) -> list[dict[str, object]]:
    return read_lines(folder / "manifest.jsonl")


@pytest.fixture(scope="session")
def attacked(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What the given programs did to the sandbox."""
    return run_attacks(tmp_path_factory.mktemp("attacked"))


@pytest.mark.parametrize("condition", ["root", "user"])
def test_no_given_case_is_judged_wrong(attacked: Path, condition: str) -> None:
    """As a user: of those, what depends on rights."""
    code, out, errors = json.loads((attacked / f"{condition}.json").read_text())
    assert code == 0, out + errors
    if condition == "root":
        assert f"{len(cases_of(GIVEN))} cases, 0 wrong" in out


@pytest.mark.slow
def test_no_case_of_ours_is_judged_wrong() -> None:
    done = attack(OWN, judge("root"))
    assert done.returncode == 0, done.stdout + done.stderr
    assert f"{len(cases_of(OWN))} cases, 0 wrong" in done.stdout


@pytest.mark.slow
@pytest.mark.parametrize("condition", ["user", "closed"])
@pytest.mark.parametrize("cases", [GIVEN, OWN], ids=["given", "own"])
def test_no_case_is_judged_wrong_without_rights(cases: Path, condition: str) -> None:
    done = attack(cases, judge(condition))
    assert done.returncode == 0, done.stdout + done.stderr


def test_a_judge_that_believes_everything_is_told_so(tmp_path: Path) -> None:
    """The runner can fail: here hostile programs are judged right, and honest ones too."""
    script = tmp_path / "gullible.py"
    script.write_text(
        "import json, sys\nfor line in sys.stdin:\n"
        "    print(json.dumps({'id': json.loads(line)['id'], 'score': 1, 'failure': None}), flush=True)\n"
    )
    only = ("h-exit-builtin", "zz-marks-folder", "zz-nul-source")
    done = attack(OWN, [sys.executable, str(script)], "--only", *only)
    assert done.returncode == 1
    assert "3 cases, 2 wrong" in done.stdout


def test_every_case_says_why() -> None:
    for case in cases_of(OWN):
        assert case["why"], case["id"]
        assert (OWN / str(case["file"])).is_file()
    assert {path.name for path in (OWN / "programs").iterdir()} == {Path(str(c["file"])).name for c in cases_of(OWN)}
