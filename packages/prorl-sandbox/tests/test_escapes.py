"""The escapes that the sandbox tries on itself: each works where nothing confines it, and its effects are seen."""

import ast
import contextlib
import json
import os
import re
import resource
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from prorl_sandbox import Program, Sandbox, SandboxFailure, levels
from prorl_sandbox.levels import _Bait, _baits
from test_syscalls import HEADER, numbers

pytestmark = pytest.mark.starts

# Attempts that every user can make, and what `_Bait.touched` then finds.
ANYBODY = {
    "read a file of the host": (),
    "write a file of the host": ("change files of the host",),
    "remove a file of the host": ("change files of the host",),
    "change the mode of a file of the host": ("change the mode of a file of the host",),
    "truncate a file of the host": ("change files of the host",),
    "link to a file of the host": (),
    "read through a link": (),
    "see other processes": (),
    "signal the parent": (),
    "signal the caller": (),
    "signal the process group": (),
    "signal by descriptor": (),
    "send signals by a file's owner": (),
    "fork": (),
    "execute a program": (),
    "replace itself by a program": (),
    "reach a tcp port of the host": ("reach a socket of the host",),
    "reach a udp port of the host": ("reach a socket of the host",),
    "reach an abstract unix socket": ("reach a socket of the host",),
    "send to a unix socket from one of a pair": ("reach a socket of the host",),
    "see the host's ports": (),
    "change the caller's limits": (),
    "make shared memory": (),
    "make a message queue": (),
    "make an executable in memory": (),
    "take 3 GiB of memory": (),
    "open 2,000 files": (),
    "write a file of 80 MB": (),
    "find the host's variables": (),
    "read what is behind the descriptors it was left": (),
    "ask for the size of a file of the host": (),
}
# Attempts for which the kernel or a container may ask for rights: elsewhere refused with one of three errors.
WITH_RIGHTS = {
    "read the caller's memory",
    "copy another process's memory",
    "trace another process",
    "be traced",
    "open a raw socket",
    "raise its own limits",
    "enter new namespaces",
    "mount",
    "change the root",
    "load a kernel program",
    "use io_uring",
    "set the clock",
    "use kernel keys",
    "watch page faults",
    "count events",
    "become another user",
}
HARD = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
REFUSALS = {"refused (EPERM)", "refused (EACCES)", "refused (ENOSYS)"}


def outcomes(bait: _Bait, folder: Path, only: list[str] | None = None) -> dict[str, str]:
    """Return the outcomes of attempts that nothing confines, by a process with a descriptor of the secret."""
    words = bait.words if only is None else {**bait.words, "only": only}
    with bait.secret.open() as secret:
        done = subprocess.run(
            [sys.executable, "-I", str(levels._ESCAPES)],
            input=json.dumps(words),
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
            cwd=folder,
            pass_fds=[secret.fileno()],
            start_new_session=True,  # for the signal to its process group
            preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_NOFILE, (256, HARD)),  # as a login has it
        )
    assert done.returncode == 0, done.stderr
    return dict(json.loads(done.stdout))


def test_the_attempts_are_those_that_are_shown_to_work() -> None:
    source = levels._ESCAPES.read_text()
    (table,) = (
        node.value
        for node in ast.parse(source).body
        if isinstance(node, ast.AnnAssign) and ast.unparse(node.target) == "ATTEMPTS"
    )
    assert isinstance(table, ast.Dict)
    assert {ast.literal_eval(key) for key in table.keys if key is not None} == set(ANYBODY) | WITH_RIGHTS


# System calls that the attempts make by number, in their order.
BY_NUMBER = ["process_vm_readv", "execve", "ptrace", "ptrace", "unshare", "mount", "chroot", "bpf", "io_uring_setup"]
BY_NUMBER += ["clock_settime", "keyctl", "shmget", "shmctl", "msgget", "msgctl", "userfaultfd", "perf_event_open"]
BY_NUMBER += ["memfd_create", "setuid"]


@pytest.mark.skipif(not HEADER.is_file(), reason="needs the kernel's headers")
def test_the_calls_by_number_are_those_that_they_are_meant_to_be() -> None:
    """With these arguments another call could be refused, or fail in a way that counts as possible."""
    source = levels._ESCAPES.read_text()
    made = re.findall(r"call\((\d+)|make_and_remove\((\d+), \(.*?\), (\d+)\)", source)
    assert [int(number) for found in made for number in found if number] == [numbers()[name] for name in BY_NUMBER]


@pytest.mark.parametrize(
    ("source", "why"),
    [
        ("raise RuntimeError('broken')", "did not end: RuntimeError: broken"),
        ("x = =", "did not end: SyntaxError"),
        ("print('fine')", "printed no JSON"),
    ],
)
def test_a_program_of_attempts_that_breaks_proves_nothing(
    source: str, why: str, unconfined: Sandbox, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = proof_of(unconfined, monkeypatch, source=source)
    assert not found.holds
    assert f"the program that attempts the escapes {why}" in found.failure


@pytest.mark.parametrize("name", ANYBODY)
def test_an_attempt_is_possible_where_nothing_confines_it_and_its_effect_is_seen(name: str, tmp_path: Path) -> None:
    with _baits() as bait:
        assert bait.touched() == []
        assert outcomes(bait, tmp_path, [name]) == {name: "POSSIBLE"}
        assert tuple(bait.touched()) == ANYBODY[name]


@pytest.mark.parametrize("name", sorted(WITH_RIGHTS))
def test_an_attempt_that_needs_rights_is_possible_or_refused_for_the_lack_of_them(name: str, tmp_path: Path) -> None:
    with _baits() as bait:
        (found,) = outcomes(bait, tmp_path, [name]).values()
        assert found == "POSSIBLE" or found in REFUSALS
        assert bait.touched() == []


def test_root_of_this_machine_can_make_most_of_them(tmp_path: Path) -> None:
    """A kernel that refuses all of these to everybody would hide an attempt that is broken."""
    if os.geteuid() != 0:
        pytest.skip("needs root")
    possible = set()
    for name in WITH_RIGHTS:
        with _baits() as bait:
            possible |= {name for found in outcomes(bait, tmp_path, [name]).values() if found == "POSSIBLE"}
    assert possible >= {"read the caller's memory", "copy another process's memory", "be traced", "become another user"}


# --- what the proof makes of them ------------------------------------------------------------------------------------


@pytest.fixture
def unconfined(monkeypatch: pytest.MonkeyPatch) -> Iterator[Sandbox]:
    """A plain child process, which only its limits confine."""
    monkeypatch.setitem(levels._LACKS, "none", {})
    sandbox = Sandbox("none")
    sandbox.start()
    yield sandbox
    sandbox.close()


def proof_of(sandbox: Sandbox, monkeypatch: pytest.MonkeyPatch, *only: str, source: str | None = None) -> Any:
    """Return the proof of a sandbox with these attempts only."""

    @contextlib.contextmanager
    def baits() -> Iterator[_Bait]:
        with _baits() as bait:
            bait.words["only"] = list(only)
            yield bait

    monkeypatch.setattr(levels, "_baits", baits)
    if source is not None:
        monkeypatch.setattr(levels, "_ESCAPES", Source(source))
    return levels.prove(sandbox)


class Source:
    """A file with this text."""

    def __init__(self, text: str) -> None:
        self._text = text

    def read_text(self) -> str:
        return self._text


@pytest.mark.parametrize("name", [name for name, effects in ANYBODY.items() if effects])
def test_an_effect_outside_breaks_the_proof_whatever_the_attempt_says(
    name: str, unconfined: Sandbox, monkeypatch: pytest.MonkeyPatch
) -> None:
    liar = levels._ESCAPES.read_text().replace('else "POSSIBLE"', 'else "refused (EPERM)"')
    found = proof_of(unconfined, monkeypatch, name, source=liar)
    assert not found.holds
    assert set(found.open) - {"start 300 threads", "fill the disk"} == set(ANYBODY[name])


def test_a_possible_attempt_breaks_the_proof(unconfined: Sandbox, monkeypatch: pytest.MonkeyPatch) -> None:
    found = proof_of(unconfined, monkeypatch, "read a file of the host")
    assert not found.holds
    assert "read a file of the host" in found.open


@pytest.mark.parametrize("error", ["AttributeError", "ValueError", "NameError", "ctypes.ArgumentError"])
def test_an_attempt_that_does_not_work_is_not_a_refusal(
    error: str, unconfined: Sandbox, monkeypatch: pytest.MonkeyPatch
) -> None:
    reads = '"read a file of the host": lambda: open(secret).read(),'
    source = levels._ESCAPES.read_text()
    assert reads in source
    raises = f'"read a file of the host": lambda: (_ for _ in ()).throw({error}("broken")),'
    found = proof_of(unconfined, monkeypatch, "read a file of the host", source=source.replace(reads, raises))
    assert not found.holds
    assert f"read a file of the host: failed ({error.rpartition('.')[2]}: broken)" in found.failure


@pytest.mark.parametrize("level", levels.LEVELS)
def test_in_a_level_every_attempt_is_refused_by_the_system(level: str) -> None:
    """Also those that `test_sandbox` counts: here with the reason of each refusal."""
    with contextlib.closing(Sandbox(level)) as sandbox:
        try:
            sandbox.start()
        except SandboxFailure as error:
            pytest.skip(f"this machine has no such level: {error}")
        with _baits() as bait:
            program = Program(levels._ESCAPES.read_text(), "stdin", (json.dumps(bait.words),), time_limit_s=20.0)
            run = sandbox.run(program, lambda *_: True)
            assert run.outputs[0] is not None, run.details
            found = json.loads(run.outputs[0])
            assert bait.touched() == []
    assert set(found) == set(ANYBODY) | WITH_RIGHTS
    lacking = {levels._STAT} if level == "reduced" else set()
    assert {name for name, outcome in found.items() if not outcome.startswith("refused (")} == lacking
    by_search = {"find the host's variables", "read what is behind the descriptors it was left"}
    limits = {"take 3 GiB of memory": "ENOMEM", "open 2,000 files": "EMFILE", "write a file of 80 MB": "EFBIG"}
    assert {name: found[name] for name in limits} == {name: f"refused ({error})" for name, error in limits.items()}
    nothing = {name for name, outcome in found.items() if outcome == "refused (nothing was found)"}
    assert nothing <= by_search | {"see other processes"}
