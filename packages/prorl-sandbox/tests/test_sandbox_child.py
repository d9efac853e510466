"""What a program finds in its process, what is undone between its tests, and what its process reports of each."""

import fcntl
import json
import os
from collections.abc import Iterator
from typing import Any

import pytest
from prorl_sandbox import Program, client, runner
from prorl_sandbox.client import Sandbox

pytestmark = pytest.mark.starts


@pytest.fixture(scope="module")
def plain() -> Iterator[Sandbox]:
    """A sandbox that confines nothing, so that only the child's own doings count."""
    sandbox, before = Sandbox("none"), os.umask(0o077)
    sandbox.start()
    os.umask(before)
    yield sandbox
    sandbox.close()


class Job:
    """The memory files of a program."""

    def __init__(self, source: str, *inputs: str, style: str = "stdin", function: str = "f", setup: str = "") -> None:
        self.program = Program(source, style, inputs or ("",), function, setup)
        fields = {"source": source, "style": style, "function": function, "setup": setup, "inputs": inputs}
        self.job, self.code = (
            client._memory_file("job", json.dumps(fields)),
            os.memfd_create("code", os.MFD_ALLOW_SEALING),
        )

    def run(self, box: Sandbox, first: int = 0, count: int = 1, go_on: bool = False) -> client._Child:
        return box.run_child(self.program, first, count, self.job, self.code, 5.0, 5.0, go_on)

    def __enter__(self) -> "Job":
        return self

    def __exit__(self, *_: object) -> None:
        os.close(self.job)
        os.close(self.code)


def ran(box: Sandbox, source: str, *inputs: str, go_on: bool = False, **more: Any) -> client._Child:
    """Run all tests of a program in one child."""
    with Job(source, *inputs, **more) as job:
        return job.run(box, 0, max(1, len(inputs)), go_on)


# --- what a child reports --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("does", "ok", "more", "detail"),
    [
        ("pass", True, True, ""),
        ("raise SystemExit", True, True, ""),
        ("raise SystemExit(0)", True, True, ""),
        ("raise SystemExit(2)", False, False, "SystemExit: 2"),
        ("raise SystemExit('x' * 400)", False, False, f"SystemExit: '{'x' * 287}"),
        ("raise ValueError('x')", False, False, "ValueError: x"),
        ("raise ValueError('x' * 400)", False, False, f"ValueError: {'x' * 288}"),
        ("raise type('E', (Exception,), {'__str__': None})", False, False, "an error that cannot be shown"),
        (
            "import threading; threading._register_atexit(lambda: 1 / 0)",
            False,
            False,
            "ZeroDivisionError: division by zero",
        ),
        ("open('left', 'w').close()", True, False, ""),
        ("os.chdir('/')", True, False, ""),
        (r"exec('try:\n while True: os.dup(1)\nexcept OSError: pass')", True, False, ""),
        (
            "import threading, time; threading.Thread(target=time.sleep, args=(9,), daemon=True).start()",
            True,
            False,
            "",
        ),
        ("import _thread, time; _thread.start_new_thread(time.sleep, (9,)); time.sleep(0.1)", True, False, ""),
        ("import concurrent.futures.thread", True, False, ""),
        ("import builtins; builtins.x = 1", True, False, ""),
        ("sys.modules['json'] = sys", True, False, ""),
        ("del sys.modules['json']", True, False, ""),
        ("sys.modules['new'] = sys", True, True, ""),
        ("raise SystemExit(False)", True, True, ""),
        ("open('/dev/stdin').close()", True, True, ""),
        ("sys.stdout.close()", True, True, ""),
        ("sys.stdout = None", True, True, ""),
    ],
)
def test_a_child_reports_how_each_test_ended_and_whether_the_next_may_follow(
    does: str, ok: bool, more: bool, detail: str, plain: Sandbox
) -> None:
    source = f"import os, sys\nn = input()\nprint(n, flush=True)\nif n == '1':\n    {does}"
    found = ran(plain, source, "0", "1", "2")
    assert (found.compiled, found.status, found.killed) == (True, 0, None)
    end = {"ok": True, "more": True, "detail": "", "result": ""}
    expected = {0: {"end": 0, **end}, 1: {"end": 1, **end, "ok": ok, "more": more, "detail": detail}}
    expected |= {2: {"end": 2, **end}} if more else {}
    assert found.ends == expected
    assert found.outputs == {index: b"%d\n" % index for index in expected}
    if ok:  # after the last test nothing can be spoilt
        assert ran(plain, source, "0", "1").ends[1]["more"] is True


@pytest.mark.parametrize(
    ("error", "more"),
    [("ValueError", True), ("SystemExit(2)", True)]
    + [(name, False) for name in ("RecursionError", "MemoryError", "KeyboardInterrupt")],
)
@pytest.mark.parametrize("style", ["stdin", "call", "assert"])
def test_where_tests_go_on_after_an_error_it_is_an_ordinary_one(
    style: str, error: str, more: bool, plain: Sandbox
) -> None:
    inputs = {"stdin": ("", ""), "call": ("[]", "[]"), "assert": ("f()", "f()")}[style]
    source = f"def f():\n    raise {error}\n" + ("f()" if style == "stdin" else "")
    for go_on in (False, True):
        ends = ran(plain, source, *inputs, style=style, go_on=go_on).ends
        assert [(end["ok"], end["more"]) for end in ends.values()] == [(False, more and go_on)] * (1 + (more and go_on))


def test_an_end_is_an_error_where_functions_or_asserts_run(plain: Sandbox) -> None:
    for style, text in (("call", "[]"), ("assert", "f()")):
        end = ran(plain, "def f():\n    raise SystemExit(0)", text, style=style).ends[0]
        assert (end["ok"], end["detail"]) == (False, "SystemExit: 0")


def test_where_tests_go_on_each_has_new_names(plain: Sandbox) -> None:
    source = "seen = []\ndef f():\n    seen.append(1)\n    return len(seen)"
    for go_on, second in ((False, "2"), (True, "1")):
        called = ran(plain, source, "[]", "[]", style="call", go_on=go_on).ends
        assert [end["result"] for end in called.values()] == ["1", second]
        asserted = ran(plain, source, "assert f() == 1", f"assert f() == {second}", style="assert", go_on=go_on).ends
        assert [end["ok"] for end in asserted.values()] == [True, True]


def test_a_process_whose_report_is_closed_tells_by_its_status(plain: Sandbox) -> None:
    for end, status in (("", 0), ("raise ValueError", 1 << 8)):
        found = ran(plain, f"import os\nos.closerange(3, 64)\nprint(5, flush=True)\n{end}", "", "")
        assert (found.status, found.ends, found.started, found.outputs) == (status, {}, 0, {0: b"5\n"})


def test_a_child_without_tests_says_whether_tests_can_influence_each_other(plain: Sandbox) -> None:
    for source, setup, independent in (
        ("print(input())", "", True),
        ("\ufeffprint(input())", "", True),
        ("print(input())", "x = 1", False),
        ("open('x')", "", False),
    ):
        with Job(source, setup=setup) as job:
            found = job.run(plain, count=0)
        assert (found.compiled, found.independent, found.ends, found.status) == (True, independent, {}, 0)
    for count in (0, 1):
        with Job("x = = 1") as job:
            found = job.run(plain, count=count)
        assert (found.compiled, found.independent, found.started, found.status) == (False, False, -1, 0)
        assert found.detail.startswith("SyntaxError: invalid syntax")
    for source in ("x = = 1", "(" * 5000):  # as where only the reading of the source has too little room
        assert runner._is_independent({"source": source, "setup": ""}) is False


def test_the_first_child_compiles_for_all(plain: Sandbox) -> None:
    """What it writes, no program can change.  A code that is too large for a file each child compiles again."""
    with Job("print(1)", "", "") as job:
        assert job.run(plain).outputs == {0: b"1\n"}
        size, seals = os.fstat(job.code).st_size, fcntl.F_SEAL_WRITE | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SHRINK
        assert size > 0
        assert fcntl.fcntl(job.code, fcntl.F_GET_SEALS) == seals
        other = client._memory_file("job", json.dumps({"source": "x = = 1", "style": "stdin", "inputs": []}))
        os.dup2(other, job.job)
        os.close(other)
        found = job.run(plain, first=1)
        assert (found.compiled, found.outputs) == (True, {1: b"1\n"})
    with Job(f"x = {'x' * (2 << 20)!r}\nprint(len(x))", "", "") as job:
        for first in (0, 1):
            assert job.run(plain, first).outputs == {first: b"%d\n" % (2 << 20)}
            assert (os.fstat(job.code).st_size, os.lseek(job.code, 0, os.SEEK_CUR)) == (0, 0)


# --- what is undone between two tests --------------------------------------------------------------------------------

STATE = """
import os, signal, sys
def umask():
    now = os.umask(0)
    os.umask(now)
    return now
streams = [(s.name, s.mode, s.encoding, s.errors, s.closed, s.fileno()) for s in (sys.stdin, sys.stdout, sys.stderr)]
print(os.getpid(), input(), streams, sys.stdin is sys.__stdin__, sys.stdout is sys.__stdout__, umask())
print(sys.getrecursionlimit(), sys.gettrace(), sys.getprofile(), sys.path, sys.argv, sorted(os.environ.items()))
print(signal.getitimer(signal.ITIMER_REAL), signal.getsignal(signal.SIGALRM), sorted(globals()))
print(sys.modules['__main__'].__dict__ is globals(), __builtins__ is sys.modules['builtins'])
print(__file__ == os.getcwd() + '/main.py', flush=True)
sys.setrecursionlimit(5000)
sys.settrace(lambda *_: None)
sys.setprofile(lambda *_: None)
os.umask(0o077)
sys.path.append('x')
sys.argv.append('x')
os.environ['X'] = 'x'
signal.signal(signal.SIGALRM, signal.SIG_IGN)
signal.alarm(50)
sys.stderr.close()
sys.stdin = sys.stdout = sys.__stdin__ = None
"""


def test_each_test_finds_the_process_as_the_first_did(plain: Sandbox) -> None:
    found = ran(plain, STATE, "same", "same", "same")
    assert [end["more"] for end in found.ends.values()] == [True] * 3
    first, second, third = (found.outputs[index].decode() for index in range(3))
    assert first == second == third
    streams = [("<stdin>", "r", "utf-8", "strict", False, 0), ("<stdout>", "w", "utf-8", "strict", False, 1)]
    streams += [("<stderr>", "w", "utf-8", "backslashreplace", False, 2)]
    assert f"same {streams} True True {0o022}\n1000 None None" in first
    assert "['main.py']" in first
    assert "\n(0.0, 0.0) 0 [" in first
    assert first.endswith("\nTrue True\nTrue\n")
    gone = ran(plain, "import sys\nprint(sys.stderr.closed, flush=True)\nsys.stderr = None", "", "")
    assert list(gone.outputs.values()) == [b"False\n"] * 2


def test_what_a_test_could_not_print_before_its_end_is_still_its_own(plain: Sandbox) -> None:
    source = "import threading\nprint(input())\nthreading._register_atexit(lambda: 1 / 0)"
    assert ran(plain, source, "a", "b", "c", go_on=True).outputs == {0: b"a\n", 1: b"b\n", 2: b""}


def test_functions_and_asserts_have_empty_streams_and_the_program_s_module(plain: Sandbox) -> None:
    source = (
        "import ctypes, os, sys, __main__\ndef f():\n    import __main__ as again\n    signal = ctypes.c_int()\n"
        "    ctypes.CDLL(None).prctl(2, ctypes.byref(signal))\n    null, found = os.stat('/dev/null').st_rdev, []\n"
        "    for fd in range(256):\n        try:\n            found.append(os.fstat(fd).st_rdev == null)\n"
        "        except OSError:\n            pass\n"
        "    return found, signal.value, __name__, again.f is f, __main__ is again"
    )
    ends = ran(plain, source, "[]", "[]", style="call").ends
    files = [True] * 3 + [False] * 3  # job, report and code; no socket of the process that keeps the programs
    assert [json.loads(end["result"]) for end in ends.values()] == [[files, 9, "solution", True, True]] * 2


OWN_STREAM = """
import sys
def shown(text):
    sys.__stdout__.write(text.upper())
class Stream:
    held = ''
    def write(self, text):
        self.held += text
    def flush(self):
        shown(self.held)
        self.held = ''
sys.stdout = Stream()
print('text')
"""
JOINED = """
import threading, time
def late():
    time.sleep(0.3)
    print('waited', 'asleep' if time.process_time() - began < 0.15 else 'awake')
began = time.process_time()
threading.Thread(target=late).start()
"""


@pytest.mark.parametrize(
    ("source", "output"),
    [
        ("def late():\n    return 'gone'\nclass A:\n    def __del__(self):\n        print(late())\na = A()", "gone"),
        ("import io, sys\nsys.stdout = io.TextIOWrapper(io.FileIO(1, 'w', closefd=False))\nprint('own')", "own"),
        ("import sys\nsys.__stdout__.write('real')\nsys.stdout = None", "real"),
        (OWN_STREAM, "TEXT"),
        ("def g():\n    try:\n        yield\n    finally:\n        print('closed')\nx = g()\nnext(x)", "closed"),
        (JOINED, "waited asleep"),
        ("import atexit\natexit.register(print, 'end')", "end"),
    ],
)
def test_what_a_program_does_at_its_end_counts(source: str, output: str, plain: Sandbox) -> None:
    found = ran(plain, source, "", "")
    assert [text.decode().strip() for text in found.outputs.values()] == [output] * 2
    assert [end["ok"] for end in found.ends.values()] == [True, True]


def test_asserts_do_not_see_the_names_of_programs(plain: Sandbox) -> None:
    ends = ran(plain, "x = gcd(4, 6)", "assert x == 2", "gcd(1, 1)", "is_same_list(None, None)", style="assert").ends
    assert [end["detail"] for end in ends.values()] == ["", "NameError: name 'gcd' is not defined"]


def test_results_are_plain_json_without_methods_of_the_program() -> None:
    class Text(str):
        def __str__(self) -> str:
            return "no"

    class Number(int):
        def __int__(self) -> int:
            return 7

    class Rows(list[Any]):
        def __iter__(self) -> Iterator[Any]:
            return iter(())

    class Table(dict[Any, Any]):
        def items(self) -> Any:
            return ()

    value = [Text("yes"), Number(3), Rows([1, [2]]), Table({Text("k"): True, None: 1, 2: 1.5}), (None, False)]
    assert runner._as_json(value) == '["yes", 3, [1, [2]], {"k": true, "null": 1, "2": 1.5}, [null, false]]'
    assert runner._as_json(Rows([1, "2"])) == '[1, "2"]'
