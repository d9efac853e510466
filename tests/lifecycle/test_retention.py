"""Which checkpoints stay, and that a kill at any moment leaves no half one under a complete one's name."""

import itertools
import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from nemo_prorl import __version__
from nemo_prorl.errors import CheckpointError
from nemo_prorl.lifecycle import retention
from nemo_prorl.lifecycle.retention import Saved, clean, complete, put_in_place, retain, step_folder, step_of, to_remove


def kept(saved: list[Saved], **rules: Any) -> list[int]:
    given: dict[str, Any] = {"newest": 1, "best": 0, "budget": None, **rules}
    gone = to_remove(saved, **given)
    assert gone == sorted(gone)
    return [s.step for s in saved if s.step not in gone]


SAVED = [Saved(10, 4, 0.5), Saved(20, 4, 0.9), Saved(30, 4), Saved(40, 4, 0.7), Saved(50, 4, 0.1)]


@pytest.mark.parametrize(
    ("rules", "wanted"),
    [
        ({}, [50]),
        ({"newest": 2}, [40, 50]),
        ({"newest": 9}, [10, 20, 30, 40, 50]),
        ({"best": 1}, [20, 50]),
        ({"best": 2}, [20, 40, 50]),
        ({"best": 9}, [10, 20, 40, 50]),  # one without a score is not among the best
        ({"newest": 2, "best": 2}, [20, 40, 50]),  # one of the newest may be one of the best
        ({"needed": [30]}, [30, 50]),
        ({"needed": [7, 50]}, [50]),  # 7 is not there
        ({"newest": 9, "budget": 0}, [50]),  # the newest whatever its size
        ({"newest": 9, "budget": 8}, [40, 50]),
        ({"newest": 9, "best": 1, "budget": 8}, [20, 50]),
        ({"newest": 9, "best": 1, "budget": 11}, [20, 50]),
        ({"newest": 9, "best": 1, "budget": 12}, [20, 40, 50]),
        ({"newest": 9, "best": 2, "budget": 8, "needed": [10]}, [10, 50]),
    ],
)
def test_what_is_kept(rules: dict[str, Any], wanted: list[int]) -> None:
    assert kept(SAVED, **rules) == wanted
    assert kept(SAVED[::-1], **rules) == wanted[::-1]


def test_of_equal_scores_the_later_is_the_best() -> None:
    assert kept([Saved(1, 1, 0.5), Saved(2, 1, 0.5), Saved(3, 1)], best=1) == [2, 3]


def test_the_needed_one_does_not_go_before_others_however_large() -> None:
    """Where it does not fit, smaller and less important ones do not take its place."""
    saved = [Saved(1, 90, 0.9), Saved(2, 1), Saved(3, 1)]
    assert kept(saved, newest=3, best=1, budget=50, needed=[1]) == [3]


def test_no_checkpoints_at_all(tmp_path: Path) -> None:
    assert to_remove([], 1, 1, 0, [3]) == []
    assert retain(tmp_path / "none", {}, 1, 1, None) == []


def test_in_all_small_cases_the_newest_stays_and_the_rest_fits_the_budget() -> None:
    for sizes in itertools.product((1, 2, 5), repeat=3):
        for budget, newest, best in itertools.product((0, 3, 6, None), (1, 3), (0, 2)):
            saved = [
                Saved(step, size, score) for step, size, score in zip((1, 2, 3), sizes, (0.3, None, 0.1), strict=True)
            ]
            gone = to_remove(saved, newest, best, budget, [1])
            assert 3 not in gone
            assert budget is None or gone == [1, 2] or sum(s.bytes for s in saved if s.step not in gone) <= budget


def write(folder: Path, size: int = 4, text: str = "{}") -> Path:
    """A checkpoint of `size` bytes beside its state."""
    folder.mkdir(parents=True)
    (folder / "deep").mkdir()
    (folder / "deep" / "tensors").write_bytes(b"x" * (size - len(text)))
    (folder / "state.json").write_text(text)
    return folder


def names(folder: Path) -> list[str]:
    return sorted(p.name for p in folder.iterdir())


def test_retain_applies_the_rules_to_the_folders_and_removes_leftovers(tmp_path: Path) -> None:
    for step in (10, 20, 30, 40):
        write(step_folder(tmp_path, step), 100)
    for name in ("step-000050.tmp", "step-000005.trash", "step-000040.old"):
        write(tmp_path / name)
    write(tmp_path / "notes")  # not ours
    assert [step_of(p) for p in complete(tmp_path)] == [10, 20, 30, 40]
    assert retain(tmp_path, {10: 0.8, 20: 0.9, 30: 0.1}, newest=2, best=1, budget=None) == [10]
    assert names(tmp_path) == ["notes", "step-000020", "step-000030", "step-000040"]
    assert retain(tmp_path, {}, newest=9, best=0, budget=200) == [20]
    assert retain(tmp_path, {}, newest=9, best=0, budget=199) == [30]
    assert retain(tmp_path, {}, newest=9, best=0, budget=0) == []
    assert names(tmp_path) == ["notes", "step-000040"]


def test_a_checkpoint_that_a_fork_continues_stays(tmp_path: Path) -> None:
    checkpoints = tmp_path / "checkpoints"
    for step in (10, 20, 30):
        write(step_folder(checkpoints, step), 100)
    (tmp_path / "forks" / "10").mkdir(parents=True)
    assert retain(checkpoints, {}, newest=1, best=0, budget=None) == [20]
    assert [step_of(folder) for folder in complete(checkpoints)] == [10, 30]


class Killed(BaseException):
    """Stands for SIGKILL between two calls to the file system."""


def dies_at_every_call(work: Callable[[], Any], prepare: Callable[[], None], check: Callable[[], None]) -> int:
    """Runs `work` and dies before its first, second, ... change on disk, until it lives; how often it died."""
    for deaths in itertools.count():
        prepare()
        left = itertools.count(deaths, -1)

        def counted(real: Callable[..., Any], *arguments: Any, left: Any = left, **keywords: Any) -> Any:
            if next(left) == 0:
                raise Killed
            return real(*arguments, **keywords)

        with pytest.MonkeyPatch.context() as patch:
            for name in ("replace", "unlink", "rmdir"):
                real = getattr(os, name)
                patch.setattr(os, name, lambda *a, real=real, **k: counted(real, *a, **k))
            try:
                work()
                died = False
            except Killed:
                died = True
        check()
        if not died:
            return deaths
    raise AssertionError


def test_a_kill_while_one_is_removed_leaves_no_half_one(tmp_path: Path) -> None:
    def prepare() -> None:
        shutil.rmtree(tmp_path)
        for step in (10, 20, 30):
            write(step_folder(tmp_path, step), 100)

    def check() -> None:
        for folder in complete(tmp_path):
            assert retention.size_of(folder) == 100
        assert step_folder(tmp_path, 30) in complete(tmp_path)
        retain(tmp_path, {}, newest=1, best=0, budget=None)
        assert names(tmp_path) == ["step-000030"]

    assert dies_at_every_call(lambda: retain(tmp_path, {}, 1, 0, None), prepare, check) > 6


def test_a_kill_while_one_takes_the_place_of_another_leaves_one_of_them(tmp_path: Path) -> None:
    folder = step_folder(tmp_path, 10)
    temporary = folder.with_name(folder.name + ".tmp")
    seen = set()

    def prepare() -> None:
        shutil.rmtree(tmp_path)
        write(folder, 100, '{"which": "one before"}')
        write(temporary, 100, '{"which": "new"}')

    def check() -> None:
        clean(tmp_path)
        assert names(tmp_path) == ["step-000010"]
        assert retention.size_of(folder) == 100
        seen.add((folder / "state.json").read_text())

    assert dies_at_every_call(lambda: put_in_place(temporary, folder), prepare, check) > 3
    assert len(seen) == 2


def test_a_checkpoint_of_other_code_is_refused_before_anything_starts(tmp_path: Path) -> None:
    state = tmp_path / "state.json"
    with pytest.raises(CheckpointError, match="is not a complete checkpoint"):
        retention.check_continuable(tmp_path)
    state.write_text(json.dumps({"format": 1, "version": __version__}))
    with pytest.raises(CheckpointError, match="format=1: expected 5"):
        retention.check_continuable(tmp_path)
    state.write_text(json.dumps({"format": retention.FORMAT, "version": "0.0.9"}))
    with pytest.raises(CheckpointError, match=r"written by version 0.0.9, format 5; this is"):
        retention.check_continuable(tmp_path)
    state.write_text(json.dumps({"format": 4, "version": __version__}))  # its groups are in state.json
    assert retention.read_state(tmp_path)["format"] == 4
    with pytest.raises(CheckpointError, match=rf"written by version {__version__}, format 4; this is .* format 5. Fix"):
        retention.check_continuable(tmp_path)
    state.write_text(json.dumps({"format": retention.FORMAT, "version": __version__}))
    retention.check_continuable(tmp_path)
