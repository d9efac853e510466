"""Parts of the sandbox, each alone in this process: what the caller reads, the clock of a program, folders."""

import contextlib
import json
import os
import resource
import select
import signal
import socket
import subprocess
import tempfile
import threading
import time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from prorl_sandbox import Program, Sandbox, SandboxFailure, client, folders, kernel, processes, zygote
from prorl_sandbox.runner import ProgramLimits

pytestmark = pytest.mark.starts

# --- the caller's side -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("killed", "status", "how"),
    [
        ("time", 9, "over the time limit"),
        ("idle", 9, "over the time limit"),
        ("disk", 9, "over the limit of disk"),
        ("threads", 9, "over the limit of threads"),
        (None, signal.SIGSEGV, "ended by SIGSEGV"),
        (None, 3 << 8, "ended with status 3"),
    ],
)
def test_the_end_of_a_child_is_told(killed: str | None, status: int, how: str) -> None:
    assert client._how_it_ended(client._Child(status, killed, 0.0, 0.0)) == how


def test_of_a_report_only_the_possible_lines_count() -> None:
    lines: list[Any] = [
        {"end": 2, "ok": True},  # before its start
        {"compiled": 1},
        {"compiled": True},
        {"compiled": False, "detail": "late"},
        {"start": 2},
        {"end": 2, "ok": True, "result": "\ud800"},
        {"end": 2, "ok": False},  # again
        {"start": True},
        {"start": 5},  # of another child
        {"end": 3, "ok": True},
        [],
        {"independent": True},
    ]
    text = b"".join(json.dumps(line).encode() + b"\n" for line in lines)
    child = client._Child(0, None, 0.0, 0.0)
    client._read_report(child, b"no JSON\n" + text, 2, 3)
    assert (child.compiled, child.started, child.independent) == (True, 2, False)
    assert child.ends == {2: lines[5]}
    assert child.outputs == {2: b"\xed\xa0\x80"}
    asked = client._Child(0, None, 0.0, 0.0)
    client._read_report(asked, text, 0, 0)
    assert (asked.independent, asked.ends) == (True, {})


def test_a_report_of_many_lines_is_read_at_once() -> None:
    child = client._Child(0, None, 0.0, 0.0)
    began = time.process_time()
    client._read_report(child, b"\n" * (8 << 20), 0, 10)
    assert time.process_time() - began < 5.0  # line by line it takes 15 s


def test_threads_of_this_user_are_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    own, child = os.getuid(), subprocess.Popen(["sleep", "60"])
    assert processes._uid_and_threads(child.pid) == (own, 1)
    ended = threading.Event()
    threads = [threading.Thread(target=ended.wait) for _ in range(2)]
    before = processes._uid_and_threads(os.getpid())[1]
    for thread in threads:
        thread.start()
    assert processes._uid_and_threads(os.getpid()) == (own, before + 2)
    ended.set()
    counts = {"1": (own, 3), "2": (-1, 0), "30": (own + 1, 5), "4": (own, 4)}
    with monkeypatch.context() as patched:
        patched.setattr("os.listdir", lambda _: [*counts, "self", "sys"])
        patched.setattr(processes, "_uid_and_threads", lambda pid: counts[str(pid)])
        processes._tasks.cache_clear()
        assert processes.tasks_of_user() == 7
    processes._tasks.cache_clear()
    pidfd = os.pidfd_open(child.pid)
    assert (processes.pid_behind(pidfd), processes.threads_behind(pidfd)) == (child.pid, 1)
    child.kill()
    child.wait()
    assert processes.threads_behind(pidfd) == 0
    os.close(pidfd)


def test_threads_are_limited_by_the_kernel_where_the_user_is_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(processes, "tasks_of_user", lambda: 100)
    sandbox = Sandbox("reduced")
    sandbox.layers = {"identity": True}
    assert (sandbox._watches, sandbox._thread_limit()) == (False, client.THREADS)
    sandbox.layers = {"identity": False}
    assert (sandbox._watches, sandbox._thread_limit()) == (True, 8 * client.THREADS + 100)


@pytest.mark.parametrize(
    ("status", "killed", "trusted", "sound", "broken"),
    [
        (signal.SIGKILL, None, False, False, True),
        (signal.SIGKILL, None, False, True, False),
        (signal.SIGKILL, None, True, False, False),
        (signal.SIGKILL, "time", False, False, False),
        (signal.SIGSEGV, None, False, False, False),
        (1 << 8, None, False, False, False),
    ],
)
def test_a_kill_by_others_is_the_program_s_fault_where_a_known_program_runs(
    status: int, killed: str | None, trusted: bool, sound: bool, broken: bool
) -> None:
    box: Any = SimpleNamespace(is_sound=lambda: sound)
    run = client._ProgramRun(
        box, Program("", "stdin", ("",)), lambda *_: True, **({"trusted": True} if trusted else {})
    )
    with pytest.raises(client._Broken) if broken else contextlib.nullcontext():
        run._raise_if_broken(client._Child(status, killed, 0.0, 0.0))


def test_deleted_files_are_limited_by_the_descriptors_where_the_kernel_does_not_limit_the_disk() -> None:
    assert Sandbox("full")._descriptor_limit(13, 1) == 512
    limited = Sandbox("reduced")._descriptor_limit
    assert [limited(13, 1), limited(13, 4), limited(13, 16), limited(500, 1)] == [272, 80, 48, 512]


def test_a_sandbox_process_that_does_not_answer_is_broken() -> None:
    sandbox = Sandbox("none")
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    sandbox._socket = ours
    with ours:
        with theirs:
            for wait in (sandbox._receive, sandbox._await_child):
                with pytest.raises(client._Broken, match=r"no answer within 0\.05 s"):
                    wait(0.05)
        for wait in (sandbox._receive, sandbox._await_child):
            with pytest.raises(client._Broken, match="its process ended"):
                wait(0.05)


def test_a_program_that_breaks_the_sandbox_twice_has_failed(monkeypatch: pytest.MonkeyPatch) -> None:
    broken: list[int] = []

    def breaks(run: client._ProgramRun) -> None:
        broken.append(1)
        raise client._Broken("it ended")

    sandbox = Sandbox("none")
    monkeypatch.setattr(client._ProgramRun, "result", breaks)
    monkeypatch.setattr(Sandbox, "start", lambda _: None)
    with pytest.raises(SandboxFailure, match="fails to run a trivial test program"):
        sandbox.run(Program("", "stdin", ("", "")), lambda *_: True)
    assert len(broken) == 3  # twice, and the known program
    monkeypatch.setattr(Sandbox, "is_sound", lambda _: True)
    run = sandbox.run(Program("", "stdin", ("", "")), lambda *_: True)
    assert run.outputs == (None, None)
    assert run.details == ("the sandbox's process ended twice on this program",) * 2
    broken.clear()

    def busy(run: client._ProgramRun) -> None:
        broken.append(1)
        raise SandboxFailure("the machine is too busy")

    monkeypatch.setattr(client._ProgramRun, "result", busy)
    with pytest.raises(SandboxFailure, match="too busy"):
        sandbox.run(Program("", "stdin", ("", "")), lambda *_: True)
    assert len(broken) == 1


def test_the_caller_keeps_its_stack_and_no_folder() -> None:
    """Programs have a large stack, for deep recursion."""
    soft, hard = resource.getrlimit(resource.RLIMIT_STACK)
    source = "import resource\nprint(resource.getrlimit(resource.RLIMIT_STACK)[0])"
    sandbox, small = Sandbox("none"), 4 << 20
    try:
        resource.setrlimit(resource.RLIMIT_STACK, (small, hard))
        run = sandbox.run(Program(source, "stdin", ("",)), lambda *_: True)
        assert resource.getrlimit(resource.RLIMIT_STACK) == (small, hard)
    finally:
        resource.setrlimit(resource.RLIMIT_STACK, (soft, hard))
    room = 512 << 20 if hard == resource.RLIM_INFINITY else min(512 << 20, hard)
    assert run.outputs == (b"%d\n" % room,)
    folder, process = Path(sandbox.folder), sandbox._process
    assert folder.is_dir()
    assert process is not None
    os.kill(process.pid, signal.SIGSTOP)  # it does not end by itself
    sandbox.close()
    assert process.returncode == -signal.SIGKILL
    assert not folder.exists()
    sandbox.close()


@pytest.mark.parametrize("level", ["none", "full"])
def test_a_sandbox_process_that_cannot_begin_says_why(
    level: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(folders, "make", lambda: str(tmp_path / "absent"))
    sandbox = Sandbox(level, tmp_mb=-1)  # which no file system takes
    with pytest.raises(client._Broken, match="absent" if level == "none" else "mount"):
        sandbox._start()
    assert sandbox._process is not None
    assert sandbox._process.wait(20) == 1
    sandbox.close()


@pytest.mark.parametrize("threads", [256, 257])
def test_a_child_with_too_many_threads_is_killed_and_its_waiting_is_told(
    threads: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    program = subprocess.Popen(["sleep", "60"])
    pidfd, looked = os.pidfd_open(program.pid), threading.Event()

    def threads_behind(fd: int) -> int:
        looked.set()
        return threads if processes.pid_behind(fd) == program.pid else 0

    monkeypatch.setattr(processes, "threads_behind", threads_behind)
    monkeypatch.setattr(processes, "queued_s", lambda pid: 0.5 if pid == program.pid else 0.0)
    replies: list[Any] = []

    def keep() -> None:
        for name in ("watch", "queued"):
            socket.send_fds(theirs, [json.dumps({name: True}).encode()], [pidfd])
        replies.append(json.loads(theirs.recv(4096)))
        looked.wait(9)
        if threads == 256:
            program.kill()
        program.wait(9)
        theirs.send(json.dumps({"status": 9, "killed": None, "used_s": 1.5, "queued_s": 0.25}).encode())

    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    sandbox, keeper, files = Sandbox("none"), threading.Thread(target=keep), os.listdir("/proc/self/fd")
    sandbox._socket = ours
    with ours, theirs:
        keeper.start()
        child = sandbox._await_child(20.0)
        keeper.join()
        assert os.listdir("/proc/self/fd") == files
    os.close(pidfd)
    assert child == client._Child(9, "threads" if threads == 257 else None, 1.5, 0.25)
    assert replies == [{"queued_s": 0.5}]


def test_memory_files_are_read_from_their_begin_and_cannot_be_changed() -> None:
    fd = client._memory_file("text", "ü\ud800")
    assert (os.get_inheritable(fd), os.read(fd, 9)) == (False, b"\xc3\xbc\xed\xa0\x80")
    for change in (lambda: os.pwrite(fd, b"x", 0), lambda: os.ftruncate(fd, 9), lambda: os.ftruncate(fd, 0)):
        with pytest.raises(PermissionError):
            change()
    assert client._contents(fd, 1) == client._contents(fd, 1) == b"\xc3\xbc\xed\xa0\x80"
    os.close(fd)
    fd = os.memfd_create("large")
    os.ftruncate(fd, (1 << 20) + 1)
    assert [len(client._contents(fd, mb)) for mb in (1, 2)] == [1 << 20, (1 << 20) + 1]
    os.close(fd)
    assert client._printable("a\nb\x1b" + "x" * 400) == "a b " + "x" * 296


def test_folders_of_ended_processes_are_removed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    before = time.clock_gettime(time.CLOCK_BOOTTIME)
    gone = subprocess.Popen(["sleep", "60"])
    after = time.clock_gettime(time.CLOCK_BOOTTIME)
    assert before - 0.02 < int(processes.started(gone.pid)) / os.sysconf("SC_CLK_TCK") <= after
    gone.kill()
    gone.wait()
    own, since = folders.make(), processes.started(os.getpid())
    assert processes.started(gone.pid) == ""
    assert Path(own).name.startswith(f"prorl-box-{os.getpid()}-{since}-")
    left = [f"{gone.pid}-{since}-x", f"{os.getpid()}-1-x", f"x{os.getpid()}-{since}-x", ""]
    for name in ("other", f"{os.getpid()}-1-x", *(f"prorl-box-{name}" for name in left)):
        (tmp_path / name / "inner").mkdir(parents=True)
    folders.sweep()
    assert set(os.listdir(tmp_path)) == {Path(own).name, "other", f"{os.getpid()}-1-x"}
    for _ in range(2):
        folders.remove(own)
        assert not Path(own).exists()


# --- the process that keeps the programs -----------------------------------------------------------------------------

LIMITS = ProgramLimits(seconds=2.0, queued_s=5.0, memory_mb=1, output_mb=1, threads=1, descriptors=64)


@pytest.mark.parametrize(
    ("passed_s", "cpu_s", "queued_s", "left_s", "why"),
    [
        (1.0, 1.0, None, 1.0, None),
        (1.0, 0.0, None, 1.0, None),  # it sleeps, and has time for that
        (2.0, 2.0, None, 0.0, "time"),
        (2.05, 2.0, None, -0.05, "time"),  # too short an idle time to ask
        (2.5, 1.0, 0.0, -0.5, "idle"),
        (2.5, 1.0, 0.4, -0.1, "idle"),
        (2.5, 1.0, 0.46, -0.04, "idle"),
        (2.5, 2.25, 0.2, -0.3, "time"),  # mostly computing
        (2.5, 1.0, 1.2, 0.7, None),
        (2.5, 1.0, 9.0, 1.0, None),  # no more than it was idle
        (7.5, 0.5, 7.0, -0.5, "starved"),
    ],
)
def test_waiting_for_a_cpu_does_not_count_as_time_of_a_program(
    passed_s: float,
    cpu_s: float,
    queued_s: float | None,
    left_s: float,
    why: str | None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with ours, theirs, open(os.devnull) as null:
        clock = zygote._Clock(theirs, os.getpid(), null.fileno(), 100.0, LIMITS)
        assert time.clock_gettime(clock._cpu) == pytest.approx(time.process_time(), abs=1.0)
        monkeypatch.setattr(time, "monotonic", lambda: 100.0 + passed_s)
        monkeypatch.setattr(time, "clock_gettime", lambda _: cpu_s)
        for _ in range(3 * (queued_s is not None)):
            ours.send(json.dumps({"queued_s": queued_s}).encode())
        assert clock.left_s() == pytest.approx(left_s)
        assert bool(select.select([ours], [], [], 0)[0]) == (queued_s is not None)  # it asked
        if why is not None:
            assert clock.why_over() == why
        if queued_s is not None:
            assert clock.queued_s == min(queued_s, passed_s - cpu_s)
            assert clock.used_s() == pytest.approx(passed_s - clock.queued_s)


@pytest.mark.parametrize("why", [None, "caller", "time", "disk"])
def test_a_child_is_waited_for_until_it_ends_or_reaches_a_limit(
    why: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(zygote, "InterpreterState", SimpleNamespace(now=lambda: None))  # it changes this process
    child = subprocess.Popen(["sleep", "0" if why is None else "60"])
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    pidfd = os.pidfd_open(child.pid)
    plan = zygote.SandboxPlan("reduced", str(tmp_path), 1, 0, ())
    limits = replace(LIMITS, seconds=0.1 if why == "time" else 60.0)
    if why == "disk":
        (tmp_path / "large").write_bytes(b"x" * (2 << 20))
    if why == "caller":
        ours.close()
    clock = zygote._Clock(theirs, child.pid, pidfd, time.monotonic(), limits)
    clock._update_queued = lambda: None  # type: ignore[method-assign]  # nobody answers
    found = zygote._ChildServer(theirs, plan, str(tmp_path), None)._wait(pidfd, clock)
    assert found in (("time", "idle") if why == "time" else (why,))
    assert child.wait(20) == (0 if why is None else -signal.SIGKILL)
    os.close(pidfd)
    theirs.close()
    ours.close()


def test_files_are_counted_and_measured(tmp_path: Path) -> None:
    inner = tmp_path / "inner"
    inner.mkdir()
    (inner / "file").write_bytes(b"x" * 8192)
    (tmp_path / "link").symlink_to("/usr")  # not followed
    used = sum(path.lstat().st_blocks * 512 for path in (inner, inner / "file", tmp_path / "link"))
    assert not zygote._exceeds_disk(str(tmp_path), used)
    assert zygote._exceeds_disk(str(tmp_path), used - 1)
    for number in range(4096 - 3):
        os.mkfifo(tmp_path / str(number))
    assert not zygote._exceeds_disk(str(tmp_path), 1 << 30)
    os.mkfifo(tmp_path / "one more")
    assert zygote._exceeds_disk(str(tmp_path), 1 << 30)


def test_what_hides_from_being_counted_counts_as_too_much(tmp_path: Path) -> None:
    assert not zygote._exceeds_disk(str(tmp_path), 1 << 20)
    descend = os.getcwd()
    os.chdir(tmp_path)
    try:
        for _ in range(25):
            os.mkdir("d" * 200)
            os.chdir("d" * 200)
    finally:
        os.chdir(descend)
    assert zygote._exceeds_disk(str(tmp_path), 1 << 20)
    zygote.empty_folder(str(tmp_path))
    assert not list(tmp_path.iterdir())


def test_a_locked_folder_is_emptied_without_the_rights_of_root(tmp_path: Path) -> None:
    inner = tmp_path / "locked" / "inner"
    inner.mkdir(parents=True)
    (inner / "file").touch()
    for folder in (inner, inner.parent, tmp_path):
        folder.chmod(0)

    def empty() -> None:
        kernel.drop_capabilities()  # of this thread
        zygote.empty_folder(str(tmp_path))

    thread = threading.Thread(target=empty)
    thread.start()
    thread.join()
    assert not list(tmp_path.iterdir())


def test_an_emptied_folder_bears_no_mark(tmp_path: Path) -> None:
    for number in range(4):
        (tmp_path / f".moved-{number}" / "x" / "y").mkdir(parents=True)
    os.utime(tmp_path, (123, 456))
    tmp_path.chmod(0o711)
    zygote.empty_folder(str(tmp_path))
    status = tmp_path.stat()
    assert (status.st_mode & 0o7777, status.st_mtime, status.st_atime) == (0o700, 0, 0)
    assert not list(tmp_path.iterdir())
