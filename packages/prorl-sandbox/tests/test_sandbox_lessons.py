"""What hostile programs, and honest ones that look odd, have taught about the sandbox, one by one."""

import errno
import json
import os
from typing import Any

import pytest
from prorl_sandbox import Program, kernel, levels
from prorl_sandbox.client import Sandbox

pytestmark = pytest.mark.starts


def test_a_process_of_the_host_cannot_be_found_by_its_number(box: Sandbox) -> None:
    ways = ("os.getpgid(pid)", "os.getsid(pid)", "os.getpriority(0, pid)", "time.clock_gettime((~pid << 3) | 2)")
    source = (
        "import os, time\nway, pid = input().split(';')\npid = int(pid)\n"
        "try:\n    eval(way)\n    print('found')\nexcept OSError as error:\n    print(error.errno)\n"
    )
    run = box.run(Program(source, "stdin", tuple(f"{way};{os.getpid()}" for way in ways)), lambda *_: True)
    refused = {str(number).encode() for number in (errno.EPERM, errno.ESRCH, errno.EINVAL)}
    assert {output and output.strip() for output in run.outputs} <= refused


def test_own_clocks_and_groups_can_be_asked_for(box: Sandbox) -> None:
    source = "import os, time\nos.getsid(0), os.getpgid(os.getpid()), os.getpriority(0, 0)\n" + (
        "for clock in (0, 1, 2, 3, 4, 7):\n    time.clock_gettime(clock)\nprint('fine')\n"
    )
    assert box.run(Program(source, "stdin", ("",)), lambda *_: True).outputs == (b"fine\n",)


def test_repeats_take_what_time_the_tests_left(box: Sandbox) -> None:
    """Six tests of 0.5 s, of which five are right only alone: 2.5 s more, within the limit and a half."""
    source = "import heapq, time\ntime.sleep(0.5)\nprint(getattr(heapq, 'again', 0))\nheapq.again = 1\n"
    program = Program(source, "stdin", ("",) * 6, time_limit_s=5.0)
    run = box.run(program, lambda _, output: output == b"0\n")
    assert run.outputs == (b"0\n",) * 6


def test_large_outputs_that_are_wrong_are_not_kept(box: Sandbox) -> None:
    program = Program("print('x' * (3 << 20))", "stdin", ("1", "2"), output_mb=16)
    assert box.run(program, lambda *_: False).outputs == (None, None)
    assert [len(output or b"") for output in box.run(program, lambda *_: True).outputs] == [(3 << 20) + 1] * 2


RECURSION = "import functools, sys\nsys.setrecursionlimit(10**6)\n@functools.lru_cache(None)\ndef f(n):\n" + (
    "    return n and 1 + f(n - 1)\nprint(f(50000))"  # some 500 bytes of the stack for each call
)
THREADS = "import threading as t\nend = t.Event()\nall = [t.Thread(target=end.wait) for _ in range(16)]\n" + (
    "for one in all:\n    one.start()\nend.set()\nprint('started')"  # of 8 MiB each
)
PLACES = (
    "import os, tempfile as t\nprint({os.getcwd(), t.gettempdir(), *map(os.environ.get, ('HOME', 'PWD', 'TMPDIR'))} == "
)
CYCLE = "class A:\n    def __del__(self):\n        print('gone')\na = A()\na.me = a\n"
FILE = "import inspect\ndef f(): pass\nprint(inspect.getsource(f) == 'def f(): pass\\n', len(open(__file__).read()))"


@pytest.mark.parametrize(
    ("source", "output"),
    [
        ("print(1)\nexit()", "1\n"),
        ("import sys\nprint(1)\nsys.exit(0)", "1\n"),
        ("\ufeffprint(1)", "1\n"),
        (FILE, f"True {len(FILE)}\n"),
        ("import multiprocessing as m\nwith m.RLock():\n    print(m.Value('i', 5).value)", "5\n"),
        ("import multiprocessing as m\nprint(len(m.Array('i', 3)))", "3\n"),
        (
            "import threading as t\nend = t.Event()\nt.Thread(target=lambda: (end.wait(0.05), print('late'))).start()",
            "late\n",
        ),
        ("from concurrent.futures import ThreadPoolExecutor as T\nT(1).submit(print, 'done')", "done\n"),
        ("import atexit\natexit.register(print, 'end')\nprint('begin')", "begin\nend\n"),
        (CYCLE, "gone\n"),
        (RECURSION, "50000\n"),
        (THREADS, "started\n"),
        (PLACES + "{os.getcwd()})", "True\n"),
        ("print(open('/dev/stdin').read(), open('/dev/fd/0').read())", "in \n"),
        ("import shutil\nopen('a', 'w').close()\nshutil.copy('a', 'b')\nprint('copied')", "copied\n"),
        ("print({callable(name) for name in (help, quit, exit, copyright, credits, license)})", "{True}\n"),
        ("import gc\nprint(gc.isenabled())", "True\n"),
        (
            "import sys\nprint(sys.argv, __name__, sys.stdin.name, sys.stdout.mode, sys.getrecursionlimit())",
            "['main.py'] __main__ <stdin> w 1000\n",
        ),
    ],
)
def test_an_honest_program_runs_as_it_would_alone(box: Sandbox, source: str, output: str) -> None:
    run = box.run(Program(source, "stdin", ("in", "in")), lambda *_: True)
    assert run.outputs == (output.encode(),) * 2, run.details


def test_the_result_of_a_function_is_json_of_its_value(box: Sandbox) -> None:
    def deep(levels: int) -> Any:
        return [deep(levels - 1)] if levels else 0

    source = (
        "import collections, enum\nclass E(enum.IntEnum):\n    A = 1\n"
        "class S(str):\n    def __str__(self): return 'no'\n"
        "P = collections.namedtuple('P', 'x y')\ndef deep(n):\n    return [deep(n - 1)] if n else 0\n"
        "def f(text):\n    return eval(text)"
    )
    values = {
        "[E.A, S('yes'), True, None, 1.5]": [1, "yes", True, None, 1.5],
        "P(1, [2, (3,)])": [1, [2, [3]]],
        "collections.OrderedDict({None: 1, True: 2, 1.5: 3, S('k'): {}})": {"null": 1, "true": 2, "1.5": 3, "k": {}},
        "deep(201)": deep(201),
        "deep(202)": "ValueError: the result is nested more than 200 deep",
        "{1}": "TypeError: the result holds a set, which JSON cannot represent",
        "{E.A: 1}": "TypeError: the result has a key of type E, which JSON cannot represent",
        "float('nan')": "ValueError: Out of range float values are not JSON compliant",
        "g()": "NameError: name 'g' is not defined",
    }
    program = Program(source, "call", tuple(json.dumps([text]) for text in values), "f")
    run = box.run(program, lambda *_: True)
    found = [json.loads(output) if output else detail for output, detail in zip(run.outputs, run.details, strict=True)]
    assert found == list(values.values())
    missing = box.run(Program("x = 1", "call", ("[]",), "f"), lambda *_: True)
    assert missing.details == ("NameError: the program has no function 'f'",)


def test_a_setup_runs_once_and_after_the_program_if_it_needs_its_names(box: Sandbox) -> None:
    for setup, output in (("print('set')", b"set\nran\n"), ("print(f())", b"ran\n5\n")):
        program = Program("def f():\n    return 5\nprint('ran')", "stdin", ("",), setup=setup)
        assert box.run(program, lambda *_: True).outputs == (output,)


def test_a_program_has_limits_that_it_cannot_raise(box: Sandbox) -> None:
    names = ["AS", "CORE", "CPU", "FSIZE", "MEMLOCK", "MSGQUEUE", "NOFILE", "NPROC", "RTPRIO"]
    source = (
        "import resource as r\nfor name in input().split():\n"
        "    soft, hard = r.getrlimit(getattr(r, 'RLIMIT_' + name))\n    print(soft if soft == hard else (soft, hard))"
    )
    program = Program(source, "stdin", (" ".join(names),), time_limit_s=7.5, memory_mb=512, output_mb=4)
    (output,) = box.run(program, lambda *_: True).outputs
    found = dict(zip(names, (output or b"").decode().splitlines(), strict=True))
    wanted = {"AS": 512 << 20, "CORE": 0, "CPU": 9, "FSIZE": 4 << 20, "MEMLOCK": 0, "MSGQUEUE": 0, "RTPRIO": 0}
    wanted |= {"NOFILE": box._descriptor_limit(5, 4), "NPROC": box._thread_limit()}
    assert found == {name: str(number) for name, number in wanted.items()}


def test_a_new_sandbox_bears_no_mark_and_counts_threads_where_the_kernel_does_not_limit_them() -> None:
    sandbox = Sandbox("none")
    try:
        look = "import os\nprint(os.stat('.').st_mtime, os.listdir('.'))"
        assert sandbox.run(Program(look, "stdin", ("",)), lambda *_: True).outputs == (b"0.0 []\n",)
        run = sandbox.run(Program(levels._THREADS, "stdin", ("",), time_limit_s=20.0), lambda *_: True)
    finally:
        sandbox.close()
    assert (run.outputs, run.details) == ((None,), ("over the limit of threads",))


def test_the_layers_are_those_of_the_level_and_this_user(box: Sandbox) -> None:
    full = box.level == "full"
    assert box.layers == {
        "namespaces": full,
        "identity": os.geteuid() == 0,
        "landlock": kernel.landlock_abi(),
        "seccomp": True,
    }
    source = "import ctypes, os\nprint(os.getuid(), os.getppid(), ctypes.CDLL(None).prctl(3))"  # PR_GET_DUMPABLE
    uid, parent, dumpable = map(
        int, (box.run(Program(source, "stdin", ("",)), lambda *_: True).outputs[0] or b"").split()
    )
    assert not dumpable  # so that no process of the same user can trace it
    assert (uid != os.geteuid()) == (os.geteuid() == 0)
    assert (parent == 1) == full  # the first process of its namespace
