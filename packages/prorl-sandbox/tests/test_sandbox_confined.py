"""What confines the process that keeps the programs: its user, its view of files, and the calls for them."""

import errno
import json
import os
import sys
import sysconfig
from contextlib import closing
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from prorl_sandbox import Program, Sandbox, SandboxFailure, confine, kernel
from sandbox_helpers import in_child

pytestmark = pytest.mark.starts


EXECUTE, WRITE, READ, LIST = (1 << bit for bit in range(4))  # of linux/landlock.h
REMOVE_DIR, REMOVE, CHAR, MAKE_DIR, REGULAR, SOCK, FIFO, BLOCK, SYM, REFER, TRUNCATE, IOCTL = (
    1 << bit for bit in range(4, 16)
)


@pytest.mark.parametrize("abi", range(8))
def test_landlock_gives_the_rights_that_a_program_needs(
    abi: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "lib" / "test").mkdir(parents=True)
    (tmp_path / "lib" / "json.py").touch()
    (tmp_path / "dynamic").mkdir()
    (tmp_path / "cache").touch()
    rules: dict[str, int] = {}
    made: list[tuple[int, ...]] = []
    restricted: list[int] = []

    def ruleset(*arguments: int) -> int:
        made.append(arguments)
        return os.open(os.devnull, os.O_RDONLY)

    def allow(_: int, path: str, access: int) -> None:
        rules[path] = rules.get(path, 0) | access

    monkeypatch.setattr(kernel, "landlock_abi", lambda: abi)
    monkeypatch.setattr(kernel, "landlock_ruleset", ruleset)
    monkeypatch.setattr(kernel, "landlock_allow", allow)
    monkeypatch.setattr(kernel, "landlock_restrict", restricted.append)
    library = str(tmp_path / "lib")
    files = (str(tmp_path / "cache"), "/dev/null", str(tmp_path / "absent"))
    view = confine.View((library, str(tmp_path / "dynamic")), files, (f"{library}/test",))
    assert confine.restrict_files(view, str(tmp_path)) == abi
    if abi == 0:
        assert not made + restricted
        return
    refer, truncate = REFER * (abi >= 2), TRUNCATE * (abi >= 3)
    all_rights = (1 << 13) - 1 | refer | truncate | IOCTL * (abi >= 5)
    assert made == [(all_rights, 3 * (abi >= 4), 3 * (abi >= 6), abi)]
    assert len(restricted) == 1
    own = READ | LIST | WRITE | REMOVE_DIR | REMOVE | MAKE_DIR | REGULAR | FIFO | SYM | truncate | refer
    devices = dict.fromkeys(confine._DEVICES, READ | WRITE | truncate)
    assert rules == {
        str(tmp_path): own,
        f"{library}/json.py": READ,
        library: LIST,
        str(tmp_path / "dynamic"): READ | LIST,
        str(tmp_path / "cache"): READ,
        **devices,
    }


def test_a_folder_is_open_if_all_above_it_are(tmp_path: Path) -> None:
    (tmp_path / "closed" / "inner").mkdir(parents=True)
    (tmp_path / "closed").chmod(0o700)
    assert confine._open_to_all("/")
    assert confine._open_to_all("/usr/lib")
    assert not confine._open_to_all(str(tmp_path / "closed"))
    assert not confine._open_to_all(str(tmp_path / "closed" / "inner"))


def test_calls_of_the_kernel_have_the_arguments_that_it_knows(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[tuple[Any, ...]] = []

    def record(*arguments: Any) -> int:
        calls.append(arguments)
        return 7

    monkeypatch.setattr(kernel, "_syscall", record)
    for abi in range(1, 7):
        assert kernel.landlock_ruleset(1, 2, 3, abi) == 7
    words = (n.to_bytes(8, "little") for n in (1, 2, 3))
    packed = b"".join(words)
    sizes = [8, 8, 8, 16, 16, 24]
    assert calls == [("landlock_create_ruleset", 444, packed[:size], size, 0) for size in sizes]
    calls.clear()
    kernel.landlock_restrict(5)
    kernel.close_all_but({0, 1, 2, 5, 9})
    assert calls == [
        ("landlock_restrict_self", 446, 5, 0),
        ("close_range", 436, 3, 4, 0),
        ("close_range", 436, 6, 8, 0),
        ("close_range", 436, 10, (1 << 31) - 1, 0),
    ]

    calls.clear()
    assert kernel.landlock_abi() == 7
    assert calls == [("landlock", 444, None, 0, 1)]  # asks for the version

    def refuse(*_: Any) -> int:
        raise OSError(errno.ENOSYS, "no Landlock")

    monkeypatch.setattr(kernel, "_syscall", refuse)
    assert kernel.landlock_abi() == 0


def test_a_process_dies_with_its_parent_and_at_once_without_it(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[int, int]] = []
    ended: list[int] = []
    monkeypatch.setattr(kernel, "prctl", lambda *arguments: asked.append(arguments))
    monkeypatch.setattr(os, "_exit", ended.append)
    kernel.die_with_parent(os.getppid())
    assert (asked, ended) == ([(1, 9)], [])  # PR_SET_PDEATHSIG, SIGKILL
    kernel.die_with_parent(os.getppid() + 1)
    assert (asked, ended) == ([(1, 9)] * 2, [1])


# --- user and files --------------------------------------------------------------------------------------------------


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root")
@pytest.mark.parametrize("reachable", [True, False])
def test_root_becomes_a_user_that_owns_its_folder_if_that_user_can_read_python(reachable: bool, tmp_path: Path) -> None:
    uid, own, closed = 1_000_000_007, tmp_path / "own", tmp_path / "closed"
    own.mkdir()
    closed.mkdir(0o700)
    folders = ("/usr/lib", "/absent")
    assert (confine._open_to_all(folders[0]), confine._open_to_all(str(closed))) == (True, False)

    def identity(view: confine.View) -> Any:
        os.setgroups([5])
        changed = confine.drop_identity(view, str(own), uid)
        lines = (line.split() for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("Cap"))
        held = {name: int(bits, 16) for name, bits in lines}
        return changed, os.getresuid(), os.getresgid(), os.getgroups(), [held[f"Cap{kind}:"] for kind in ("Prm", "Eff")]

    group = os.getgid()
    closed_views = confine.View((*folders, str(closed)), (), ()), confine.View(folders, (), (), (str(closed),))
    for view in (confine.View(folders, (), ()),) if reachable else closed_views:
        user, groups = ([uid] * 3, [uid] * 3) if reachable else ([uid, 0, 0], [group] * 3)
        assert in_child(partial(identity, view)) == [True, user, groups, [], [0, 0]]
        assert (own.stat().st_uid, own.stat().st_gid) == ((uid, uid) if reachable else (0, group))


def test_a_private_root_has_the_files_of_the_view_and_none_can_be_changed() -> None:
    view, read_only, no_suid, no_device = confine.host_view(), 1, 2, 4
    places = [*view.folders, *view.files, *view.hidden, "/", "/tmp"]
    source = (
        "import json, os\nfound = {}\nfor place in json.loads(input()):\n    s = os.statvfs(place)\n"
        "    found[place] = s.f_flag & 7, s.f_blocks * s.f_frsize, s.f_files\nprint(json.dumps(found))"
    )
    with closing(Sandbox("full", tmp_mb=3)) as sandbox:
        try:
            sandbox.start()
        except SandboxFailure as error:
            pytest.skip(f"this machine has no such level: {error}")
        (output,) = sandbox.run(Program(source, "stdin", (json.dumps(places),)), lambda *_: True).outputs
    found = json.loads(output or b"")
    flags = {place: flag for place, (flag, _, _) in found.items()}
    devices = dict.fromkeys(confine._DEVICES, read_only | no_suid)
    own = {"/": read_only | no_suid, "/tmp": no_suid | no_device}
    assert flags == {**dict.fromkeys(places, read_only | no_suid | no_device), **devices, **own}
    assert [found[place][1:] for place in ("/", "/tmp")] == [[4 << 20, 4096], [3 << 20, 4096]]
    assert {tuple(found[place][1:]) for place in view.hidden} <= {(4096, 2)}


def test_the_view_has_the_library_without_what_was_installed_into_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    library = tmp_path / "lib" / "python"
    for name in ("site-packages", "test", "json", "lib-dynload"):
        (library / name).mkdir(parents=True)
    shared = [tmp_path / "lib" / name for name in ("libx.so", "libx.so.1")]
    for file in (*shared, tmp_path / "lib" / "x.so", tmp_path / "lib" / "libx.a"):
        file.touch()
    monkeypatch.setattr(sysconfig, "get_paths", lambda: {"stdlib": str(library)})
    monkeypatch.setattr(sysconfig, "get_config_var", lambda _: None)
    monkeypatch.setattr(sys, "base_prefix", str(tmp_path))
    view = confine.host_view(("/of/a/package",))
    assert view.folders[0] == str(library)
    assert set(view.folders[1:]) <= {"/lib/x86_64-linux-gnu", "/usr/lib/x86_64-linux-gnu", "/lib64", "/usr/lib64"} | {
        "/usr/share/zoneinfo",
        "/usr/lib/locale",
    }
    assert all(map(os.path.isdir, view.folders))
    assert view.hidden == (str(library / "site-packages"), str(library / "test"))
    assert view.packages == ("/of/a/package",)
    system = {"/etc/ld.so.cache", *confine._DEVICES}
    assert {*view.files} - system == {*map(str, shared)}
    assert {*view.files} & system == {*filter(os.path.exists, system)}
    for number in range(401):
        (tmp_path / "lib" / f"lib{number}.so").touch()
    assert len({*confine.host_view().files} - system) == 400
    monkeypatch.setattr(sys, "base_prefix", "/usr")
    assert {*confine.host_view().files} <= system
