"""The sandbox at both levels: what a program gets, what it cannot reach, and how its verdict comes about."""

import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from prorl_sandbox import NoSandbox, Program, ProgramRun, Sandbox, SandboxFailure, folders, levels
from prorl_sandbox.zygote import empty_folder
from sandbox_helpers import ENVIRONMENT, children_of, is_alive, sharing_one_cpu, wait_until

pytestmark = pytest.mark.starts

ADD = "a, b = map(int, input().split())\nprint(a + b)\n"


def run(box: Sandbox, source: str, *inputs: str, **more: Any) -> ProgramRun:
    return box.run(Program(source, "stdin", inputs or ("",), **more), lambda *_: True)


def right(expected: list[str]) -> Callable[[int, bytes], bool]:
    return lambda index, output: output.decode().split() == expected[index].split()


# --- what is confined ------------------------------------------------------------------------------------------------


def test_every_escape_is_attempted_and_refused(box: Sandbox) -> None:
    found = levels.prove(box)
    assert found.holds, found.line()
    assert bool(found.lacks) == (box.level == "reduced")


@pytest.mark.parametrize(
    ("options", "level"), [((), "full"), (("--no-user-namespaces",), "reduced")], ids=["user", "closed"]
)
def test_a_user_without_rights_has_a_level_that_holds(options: tuple[str, ...], level: str) -> None:
    code = "from prorl_sandbox import levels; b = levels.open_sandbox(); print(b.level); b.close()"
    command = [sys.executable, str(Path(__file__).with_name("as_user.py")), *options, sys.executable, "-c", code]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False, env=ENVIRONMENT)
    assert done.stdout.strip() == level, done.stderr


def test_no_level_means_no_sandbox(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(self: Sandbox) -> None:
        if self.level != "none":
            raise SandboxFailure(f"{self.level} is out of order")
        real(self)

    real = Sandbox.start
    monkeypatch.setattr(Sandbox, "start", refuse)
    with pytest.raises(NoSandbox, match=r"full is out of order.*reduced is out of order.*Fix: allow user namespaces"):
        levels.open_sandbox()
    sandbox = levels.open_sandbox(unsafe=True)
    try:
        assert sandbox.level == "none"
        assert run(sandbox, ADD, "1 2").outputs == (b"3\n",)
    finally:
        sandbox.close()


def test_a_level_with_an_open_escape_is_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(levels, "_THREADS", "print('POSSIBLE')")  # as where nothing bounds them
    with pytest.raises(NoSandbox, match="a program can start 300 threads"):
        levels.open_sandbox()


# --- what a program gets ---------------------------------------------------------------------------------------------


def test_tests_run_with_streams_of_their_own(box: Sandbox) -> None:
    inputs = tuple(f"{i} {i}\n" for i in range(250))  # more than one child takes
    answer = box.run(Program(ADD, "stdin", inputs), right([str(2 * i) for i in range(250)]))
    assert answer.outputs == tuple(b"%d\n" % (2 * i) for i in range(250))
    assert not answer.over_time


def test_functions_get_arguments_and_give_json(box: Sandbox) -> None:
    source = "class Solution:\n    def f(self, a: List[int], b=2):\n        return (a, {b: None}, 'ü', 1.5, True)\n"
    program = Program(source, "call", ("[[1]]", "[[], 3]"), function="f")
    answer = box.run(program, lambda *_: True)
    assert [json.loads(output or b"") for output in answer.outputs] == [
        [[1], {"2": None}, "ü", 1.5, True],
        [[], {"3": None}, "ü", 1.5, True],
    ]


def test_asserts_run_beside_the_program(box: Sandbox) -> None:
    program = Program("def f(x):\n    return x + 1\n", "assert", ("assert f(1) == 2", "assert f(1) == 3", "f()"))
    answer = box.run(program, lambda *_: True)
    assert [output is not None for output in answer.outputs] == [True, False, False]
    assert "AssertionError" in answer.details[1]
    assert "TypeError" in answer.details[2]


def test_setup_runs_before_the_program(box: Sandbox) -> None:
    assert run(box, "print(x)", setup="x = 5").outputs == (b"5\n",)


def test_memory_time_and_output_are_bounded(box: Sandbox) -> None:
    began = time.monotonic()
    assert "MemoryError" in run(box, "x = bytearray(3 << 30)").details[0]
    assert run(box, "while True: pass", time_limit_s=0.5).over_time
    assert run(box, "import time\ntime.sleep(9)", time_limit_s=0.5).over_time
    assert "OSError" in run(box, "print('x' * (2 << 20))").details[0]
    assert run(box, "print('x' * (2 << 20))", output_mb=16).outputs[0] == b"x" * (2 << 20) + b"\n"
    assert time.monotonic() - began < 20


def test_all_tests_share_the_time_limit(box: Sandbox) -> None:
    busy = "import time\nend = time.process_time() + float(input())\nwhile time.process_time() < end: pass\n"
    assert not run(box, busy, "0.1", "0.1", time_limit_s=0.8).over_time
    assert run(box, busy, *["0.1"] * 9, time_limit_s=0.8).over_time


def test_sleeping_counts_as_time(box: Sandbox) -> None:
    sleepy = "import time\ntime.sleep(float(input()))\n"
    assert not run(box, sleepy, "0.3", "0.3", time_limit_s=1.2).over_time
    assert run(box, sleepy, *["0.3"] * 6, time_limit_s=1.2).over_time


def test_a_busy_machine_is_not_the_program_s_fault(box: Sandbox) -> None:
    """A good program that gets a sixth of a CPU, and so takes longer than its time limit, is judged right."""
    assert run(box, ADD, "1 2").outputs == (b"3\n",)
    assert box._process is not None
    with sharing_one_cpu(below(box._process.pid)):
        began = time.monotonic()
        busy = "import time\nwhile time.process_time() < 0.3: pass\nprint(1)\n"
        assert run(box, busy, time_limit_s=0.8).outputs == (b"1\n",)
        assert time.monotonic() - began > 0.8
        assert run(box, "while True: pass", time_limit_s=0.2).over_time


def test_a_program_that_gets_no_cpu_for_long_is_not_judged(box: Sandbox, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("prorl_sandbox.client.QUEUED_S", 0.3)
    busy = "import time\nwhile time.process_time() < 1.5: pass\nprint(1)\n"
    assert run(box, ADD, "1 2").outputs == (b"3\n",)
    assert box._process is not None
    with sharing_one_cpu(below(box._process.pid)), pytest.raises(SandboxFailure, match="the machine is too busy"):
        run(box, busy, time_limit_s=2.0)
    assert run(box, ADD, "1 2").outputs == (b"3\n",)


BUSY = "import time\nwhile time.process_time() < 0.5: pass\nprint(1)\n"


@pytest.mark.parametrize("all_of_them", [False, True])
def test_a_program_that_is_stopped_from_outside_is_judged(box: Sandbox, all_of_them: bool) -> None:
    """It alone, until its time is over; or everything, as when a job is suspended, and all goes on later."""
    assert run(box, ADD, "1 2").outputs == (b"3\n",)
    assert box._process is not None
    keeper = box._process.pid
    idle = below(keeper)

    def stop() -> None:
        wait_until(lambda: below(keeper) > idle)
        stopped = below(keeper) if all_of_them else below(keeper) - idle
        for pid in sorted(stopped):
            os.kill(pid, signal.SIGSTOP)
        time.sleep(2.5 if all_of_them else 0.0)
        for pid in stopped if all_of_them else ():
            os.kill(pid, signal.SIGCONT)

    stopper = threading.Thread(target=stop)
    stopper.start()
    answer = run(box, BUSY, time_limit_s=1.0)
    stopper.join()
    assert answer.outputs == (b"1\n",), answer


def test_a_program_that_stops_itself_is_over_its_time(box: Sandbox) -> None:
    assert run(box, "import os, signal\nos.kill(os.getpid(), signal.SIGSTOP)\nprint(1)", time_limit_s=0.3).over_time


def below(pid: int) -> set[int]:
    """A process and all that descend from it."""
    return {pid}.union(*map(below, children_of(pid)))


def test_what_does_not_compile_is_refused(box: Sandbox) -> None:
    assert run(box, "x = = 1").refused.startswith("SyntaxError")
    assert run(box, "(" * 5000).refused
    assert run(box, "x = '\x00'").refused
    assert not run(box, ADD, "1 2").refused


# --- how a verdict comes about ---------------------------------------------------------------------------------------

SPOILS = """
import builtins, sys
n = int(input())
if getattr(builtins, "spoilt", False) or "spoilt" in sys.modules:
    n = -1
{}
print(n)
"""


@pytest.mark.parametrize(
    "spoil",
    [
        "builtins.spoilt = True",
        "sys.modules['spoilt'] = sys",
        "import math; math.floor, math.ceil = math.ceil, math.floor",
        "sys.setrecursionlimit(60)",
        "open('left', 'x').close()",
        "import threading; threading.Thread(target=__import__('time').sleep, args=(30,), daemon=True).start()",
        "import os; os.close(0)",
        "import os; os.chdir('/')",
        "sys.stdin = None",
        "import json; json.loads = None",
        "import signal; signal.setitimer(signal.ITIMER_REAL, 0.05)",
    ],
)
def test_no_test_spoils_another(box: Sandbox, spoil: str) -> None:
    inputs = tuple(str(i) for i in range(4))
    answer = box.run(Program(SPOILS.format(spoil), "stdin", inputs), right(list(inputs)))
    assert answer.outputs == tuple(b"%d\n" % i for i in range(4)), answer.details


def test_a_test_that_ends_the_process_loses_itself_only(box: Sandbox) -> None:
    source = "import os, sys\nn = int(input())\nif n == 1:\n    os._exit(0)\nif n == 2:\n    sys.exit(3)\nprint(n)"
    answer = box.run(Program(source, "stdin", ("0", "1", "2", "3")), right(["0", "1", "2", "3"]))
    assert answer.outputs == (b"0\n", b"", None, b"3\n")
    assert "SystemExit: 3" in answer.details[2]


def test_an_end_with_output_counts(box: Sandbox) -> None:
    source = "import os\nprint(input(), flush=True)\nos._exit(0)"
    assert run(box, source, "1", "2").outputs == (b"1\n", b"2\n")
    assert run(box, "import os\nprint(1, flush=True)\nos._exit(1)").outputs == (None,)


def test_a_crash_is_told_and_the_next_program_runs(box: Sandbox) -> None:
    crash = run(box, "import ctypes\nctypes.string_at(0)")
    assert crash.outputs == (None,)
    assert "SIGSEGV" in crash.details[0]
    assert run(box, ADD, "1 2").outputs == (b"3\n",)


def test_a_report_full_of_lies_gains_nothing(box: Sandbox) -> None:
    """A program can say that it ended well, which `os._exit(0)` does, too; the output is still what it wrote."""
    lies = [
        b'{"compiled": false}',
        b'{"end": 0, "ok": true, "more": true, "result": "1"}',
        b"[]",
        b'{"start": 7}',
        b"\xff",
    ]
    source = (
        "import os\nfor fd in range(3, 64):\n    try:\n        os.write(fd, {!r} * 50)\n"
        "    except OSError:\n        pass\n"
        "print('wrong')\nraise SystemExit(1)"
    ).format(b"\n" + b"\n".join(lies) + b"\n")
    answer = box.run(Program(source, "stdin", ("", "")), right(["1", "1"]))
    assert not answer.refused
    assert b"1" not in [(output or b"").strip() for output in answer.outputs]


# --- faults ----------------------------------------------------------------------------------------------------------


def test_a_killed_sandbox_starts_again_and_the_verdict_is_right(box: Sandbox) -> None:
    assert box._process is not None
    first = box._process.pid
    timer = threading.Timer(0.3, os.kill, (first, signal.SIGKILL))
    timer.start()
    answer = run(box, "import time\ntime.sleep(1)\nprint(5)")
    timer.join()
    assert answer.outputs == (b"5\n",)
    assert box._process.pid != first
    assert not is_alive(first)


def test_a_program_that_is_killed_from_outside_is_tried_again(box: Sandbox) -> None:
    """As when a machine runs out of memory; one that is killed each time has failed."""

    def alive_below(pid: int) -> list[int]:
        return [below for below in descendants(pid) if is_alive(below)]

    def kill_programs(times: int) -> None:
        assert box._process is not None
        for _ in range(times):
            keeper, idle = box._process.pid, int(box.level == "full")  # the first process of the namespace
            wait_until(lambda at=keeper, idle=idle: len(alive_below(at)) > idle)  # type: ignore[misc]
            time.sleep(0.1)
            with contextlib.suppress(ProcessLookupError):
                os.kill(max(alive_below(keeper)), signal.SIGKILL)
            time.sleep(0.1)

    slow = "import time\ntime.sleep(1.5)\nprint(input())"
    for times, expected in ((1, b"7\n"), (3, None)):
        killer = threading.Thread(target=kill_programs, args=(times,))
        killer.start()
        answer = run(box, slow, "7")
        killer.join()
        assert answer.outputs == (expected,), answer.details
    assert "SIGKILL" in answer.details[0]
    assert run(box, ADD, "1 2").outputs == (b"3\n",)


def test_a_sandbox_that_never_works_is_an_infrastructure_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    sandbox = Sandbox("full")
    monkeypatch.setattr(Sandbox, "_receive", lambda *_: {"failed": "the kernel says no"})
    with pytest.raises(SandboxFailure, match="the kernel says no"):
        sandbox.run(Program(ADD, "stdin", ("1 2",)), lambda *_: True)
    sandbox.close()


RUNS_FOR_EVER = """
import sys
from prorl_sandbox import Program
from prorl_sandbox.client import Sandbox
box = Sandbox(sys.argv[1])
box.start()
print(flush=True)
box.run(Program("while True: pass", "stdin", ("",), time_limit_s=60), lambda *_: True)
"""


def descendants(pid: int) -> set[int]:
    found = children_of(pid)
    return found | {below for child in found for below in descendants(child)}


@pytest.mark.parametrize("level", levels.LEVELS)
def test_nothing_outlives_its_caller(level: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    environment = {**ENVIRONMENT, "TMPDIR": str(tmp_path)}
    caller = subprocess.Popen([sys.executable, "-c", RUNS_FOR_EVER, level], stdout=subprocess.PIPE, env=environment)
    assert caller.stdout is not None
    assert caller.stdout.readline() == b"\n"
    expected = 3 if level == "full" else 2  # keeper, first process of the namespace, program
    wait_until(lambda: len(descendants(caller.pid)) >= expected)
    family = descendants(caller.pid)
    caller.kill()
    caller.wait()
    caller.stdout.close()
    wait_until(lambda: not any(map(is_alive, family)))
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    folders.sweep()
    assert not list(tmp_path.iterdir())


def test_many_programs_leave_nothing(box: Sandbox) -> None:
    assert box._process is not None
    keeper = box._process.pid

    def state() -> tuple[int, int]:
        return len(os.listdir("/proc/self/fd")), len(descendants(keeper))

    run(box, ADD, "1 2")
    before = state()
    for number in range(40):
        source = ADD if number % 2 else "open(str(id(0)), 'w').write('x')\nraise SystemExit(1)"
        run(box, source, "1 2", "3 4")
    assert state() == before
    assert run(box, "import os\nprint(os.listdir())").outputs == (b"[]\n",)


def test_a_folder_is_emptied_however_deep_and_locked(tmp_path: Path) -> None:
    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / "keep").write_text("kept")
    folder = tmp_path / "box"
    folder.mkdir()
    (folder / "link").symlink_to(outside)
    os.mkfifo(folder / "fifo")
    at = os.open(folder, os.O_RDONLY)
    for _ in range(1500):
        os.mkdir("d", dir_fd=at)
        below = os.open("d", os.O_RDONLY, dir_fd=at)
        os.close(os.open("f", os.O_CREAT | os.O_WRONLY, dir_fd=below))
        os.symlink(outside, "l", dir_fd=below)
        os.close(at)
        at = below
    os.fchmod(at, 0)
    os.close(at)
    empty_folder(str(folder))
    assert not list(folder.iterdir())
    assert (outside / "keep").read_text() == "kept"


@pytest.mark.parametrize("level", levels.LEVELS)
def test_packages_can_be_imported_and_nothing_beside_them(level: str) -> None:
    source = "import numpy, sys\nfrom numpy import linalg\nprint(int(linalg.det(numpy.eye(int(input())))))"
    with contextlib.closing(Sandbox(level, packages=("numpy", "no_such_package"))) as sandbox:
        sandbox.start()
        found = levels.prove(sandbox)
        assert found.holds, found.line()
        assert run(sandbox, source, "2", "3").outputs == (b"1\n", b"1\n")
        assert "ModuleNotFoundError" in run(sandbox, "import torch").details[0]
    with contextlib.closing(Sandbox(level)) as bare:
        bare.start()
        assert "ModuleNotFoundError" in run(bare, "import numpy").details[0]
