"""Names, locks and files that a program finds as if it ran elsewhere, each alone in this process."""

import bisect
import builtins
import collections
import functools
import io
import itertools
import linecache
import math
import os
import threading
import time
import typing
from pathlib import Path
from typing import Any

import pytest
from prorl_sandbox import prelude, shims


def test_trees_and_lists_are_built_and_compared_by_shape_and_values() -> None:
    tree, same = prelude.tree_node, prelude.is_same_tree
    root = tree([1, 2, None, 3, 4, None, 5])
    assert root is not None
    assert (root.val, root.right, root.left.val, root.left.left.val, root.left.right.val) == (1, None, 2, 3, 4)
    assert (root.left.left.left, root.left.left.right.val) == (None, 5)
    assert tree([]) is tree([None]) is None
    assert [
        same(tree([1, 2]), tree(other)) for other in ([1, 2], [1, None, 2], [1, 3], [1], [1, 2, 3], [2, 2], [])
    ] == [True] + [False] * 6
    assert same(None, None)
    assert not same(None, root)
    assert not same(tree([1]), root)
    chain = prelude.list_node([1, 2, 3])
    assert chain is not None
    assert (chain.val, chain.next.val, chain.next.next.val, chain.next.next.next) == (1, 2, 3, None)
    assert prelude.list_node([]) is None
    same = prelude.is_same_list
    others: tuple[list[int], ...] = ([1, 2, 3], [1, 2], [1, 2, 4], [1, 2, 3, 4], [0, 2, 3], [])
    assert [same(chain, prelude.list_node(other)) for other in others] == [True, False, False, False, False, False]
    assert same(None, None)
    assert not same(None, chain)


def test_programs_have_the_names_that_the_sites_define_and_tests_only_what_builds_arguments() -> None:

    names = prelude.FOR_PROGRAMS
    assert names["Counter"] is collections.Counter
    assert (names["count"], names["cache"], names["List"]) == (itertools.count, functools.cache, typing.List)  # noqa: UP006
    assert (names["bisect"], names["gcd"], names["math"]) == (bisect.bisect, math.gcd, math)
    assert not {"pow", "sum", "__name__", "_heappop_max", "is_same_tree", "tree_node"} & names.keys()
    modules = "collections copy datetime functools heapq itertools json math operator random re string sys time typing"
    helpers = "TreeNode ListNode tree_node list_node is_same_tree is_same_list"
    assert prelude.FOR_TESTS.keys() == {*modules.split(), *helpers.split()}
    assert vars(names["ListNode"]()) == {"val": 0, "next": None}
    assert vars(names["TreeNode"]()) == {"val": 0, "left": None, "right": None}
    assert prelude.FOR_TESTS.keys() - set(helpers.split()[2:]) <= names.keys()


def test_a_lock_of_multiprocessing_works_between_threads() -> None:
    lock = shims.SemLock(1, 1, 1)  # a semaphore
    assert lock.acquire()
    began = time.monotonic()
    assert not lock.acquire(False)
    assert not lock.acquire(True, 0.01)
    assert time.monotonic() - began < 0.9
    assert shims.SemLock.SEM_VALUE_MAX == 2147483647  # of glibc
    got: list[bool] = []
    waiting = threading.Thread(target=lambda: got.append(lock.acquire()), daemon=True)
    waiting.start()
    waiting.join(0.05)
    assert (got, lock._get_value(), lock._is_zero()) == ([], 0, True)
    lock.release()
    waiting.join(9)
    assert got == [True]  # it was woken
    lock.release()
    assert (lock._get_value(), lock._is_zero()) == (1, False)
    with pytest.raises(ValueError, match="too many times"):
        lock.release()
    many = shims.SemLock(1, 2, 3)
    with many, many:
        assert not many.acquire(False)
    many.release()
    assert many._get_value() == 3


def test_a_recursive_lock_belongs_to_its_thread() -> None:
    lock = shims.SemLock(0, 1, 1)
    others: list[Any] = []

    def other(work: Any) -> Any:
        def run() -> None:
            try:
                others.append(work())
            except AssertionError as error:
                others.append(str(error))

        thread = threading.Thread(target=run)
        thread.start()
        thread.join()
        return others.pop()

    with lock:
        assert lock.acquire(False)
        assert (lock._count(), lock._is_mine(), lock._get_value()) == (2, True, 0)
        assert other(lock._is_mine) is False
        assert other(lambda: lock.acquire(False)) is False
        assert "not owned by thread" in other(lock.release)
        lock.release()
        assert lock._is_mine()
        assert other(lambda: lock.acquire(False)) is False
    assert (lock._is_mine(), lock._get_value()) == (False, 1)
    with lock:
        assert other(lambda: lock.acquire(False)) is False  # taken again, by the same thread
    assert other(lambda: lock.acquire(False)) is True
    with pytest.raises(AssertionError):
        lock.release()


def test_only_allowed_packages_are_found_and_only_as_a_whole(tmp_path: Path) -> None:
    for name in ("allowed", "other"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "__init__.py").touch()
    finder = shims.Packages((str(tmp_path / "allowed"),))
    found = finder.find_spec("allowed", None)
    assert found.origin == str(tmp_path / "allowed" / "__init__.py")
    assert list(found.submodule_search_locations) == [str(tmp_path / "allowed")]
    assert finder.find_spec("other", None) is None
    assert finder.find_spec("allowed", [str(tmp_path)]) is None


def test_a_refused_change_of_a_mode_is_ignored_in_the_program_s_folder_only(tmp_path: Path) -> None:
    calls = []

    def refuse(path: Any, *arguments: Any, **options: Any) -> None:
        calls.append((path, arguments, options))
        raise PermissionError

    change = shims._ignoring_refusal(refuse, str(tmp_path))
    for path in (str(tmp_path / "x"), os.fsencode(tmp_path / "x"), tmp_path / "x"):
        change(path, 0o644, follow_symlinks=True)
        assert calls.pop() == (path, (0o644,), {"follow_symlinks": True})
    (tmp_path / "out").symlink_to("/")
    for outside in (3, "/etc/passwd", str(tmp_path) + "x", str(tmp_path / "out" / "etc"), str(tmp_path)):
        with pytest.raises(PermissionError):
            change(outside, 0)


def test_standard_streams_open_by_their_paths(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("text")
    opened, lowest = shims._with_standard_files(open), shims._with_standard_files(shims._os_open)
    fd = os.open(tmp_path / "file", os.O_RDONLY)
    with opened(os.dup(fd)) as copied:
        assert copied.read() == "text"
    with opened(tmp_path / "file", encoding="utf-8") as file, opened(str(tmp_path / "file"), "rb") as raw:
        assert (file.read(), raw.read()) == ("text", b"text")
    for path in (f"/dev/fd/{fd}", f"/proc/self/fd/{fd}", Path(f"/dev/fd/{fd}")):
        os.lseek(fd, 2, os.SEEK_SET)  # the same open file, where it is
        with opened(path) as file:
            assert (file.read(), file.fileno() != fd) == ("xt", True)
        again = lowest(path, os.O_RDONLY)
        assert os.fstat(again).st_ino == os.fstat(fd).st_ino
        os.close(again)
    os.close(fd)
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        copy = lowest(f"/dev/{name}", os.O_RDONLY)
        assert os.path.sameopenfile(copy, number)
        os.close(copy)


def test_a_program_has_the_replacements_that_its_source_needs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:

    for owner, name in ((os, "chmod"), (os, "utime"), (os, "open"), (builtins, "open"), (io, "open")):
        monkeypatch.setattr(owner, name, getattr(owner, name))  # undone at the end
    path, before = str(tmp_path / "main.py"), (open, os.open)
    shims.add_for("print(1)\r\n", path)
    assert (open, os.open) == before
    assert not list(tmp_path.iterdir())
    assert linecache.getlines(path) == ["print(1)\n"]
    shims.add_for("__file__ = '\ud800'\r\n", path)
    assert Path(path).read_bytes() == b"__file__ = '\xed\xa0\x80'\r\n"
    shims.add_for("'/fd/'", path)
    assert builtins.open is io.open is not before[0]
    assert os.open is not before[1]
    linecache.cache.pop(path)
