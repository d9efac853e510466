"""Tests of a submission that cannot notice each other: read from the source; same verdicts, fewer children."""

import json
from collections.abc import Iterator
from typing import Any

import pytest
from prorl_sandbox import Program, ProgramRun
from prorl_sandbox.client import Sandbox, _ProgramRun
from prorl_sandbox.independent import independent

pytestmark = pytest.mark.starts

ALONE = [
    "print(int(input()) + 1)",
    "import sys\nfrom collections import Counter\nsys.setrecursionlimit(10**6)\nprint(Counter(sys.stdin.read()))",
    "import sys\ninput = sys.stdin.readline\nsys.stdout.write(input())\nsys.exit(1)",
    "import sys\nsys.stdin = sys.stdin.buffer\nprint(sys.stdin.read())",
    "class A:\n    n = 0\n    def __init__(self):\n        self.x = 1\n        A.n += 1\n    def __lt__(self, o):\n"
    "        return self.x < o.x\nprint(A().__init__())",
    "from functools import lru_cache\n@lru_cache(None)\ndef f(n):\n    return n\nprint(f(1), [1][0], {}.get(2))",
    "from typing import *\nimport heapq as h, math, re\nprint(h.heappop([1]), math.pi, re.sub('a', 'b', 'a'))",
]
TOGETHER = [
    "import os\nprint(os.getcwd())",
    "import random\nprint(random.random())",
    "import threading, time",
    "import decimal\ndecimal.getcontext().prec = 50",
    "from . import x",
    "open('file', 'w')",
    "exec('x = 1')",
    "__import__('os')",
    "import builtins",
    "print(__builtins__)",
    "import sys\nsys.modules['x'] = 1",
    "import sys as s\ns.settrace(None)",
    "from sys import modules",
    "import math\nmath.x = 1",
    "from collections import Counter\nCounter.seen = []",
    "import collections\ncollections.Counter.seen = 1",
    "import collections\ndel collections.Counter",
    "print((1).__class__.__base__.__subclasses__())",
    "print(id(1))",
    "setattr(print, 'x', 1)",
    "import collections.abc, os.path",
    "from functools import lru_cache\nlru_cache.calls = 1",
    "import sys\nsys.ps1 = 1",
]


@pytest.mark.parametrize("source", ALONE)
def test_programs_that_keep_to_themselves(source: str) -> None:
    assert independent(source)


@pytest.mark.parametrize("source", TOGETHER)
def test_programs_that_may_leave_something(source: str) -> None:
    assert not independent(source)


@pytest.fixture(scope="module")
def box() -> Iterator[Sandbox]:
    sandbox = Sandbox("full")
    sandbox.start()
    yield sandbox
    sandbox.close()


def both(
    box: Sandbox, monkeypatch: pytest.MonkeyPatch, program: Program, expected: list[str]
) -> tuple[ProgramRun, int, int]:
    """The run, equal with and without the reading of the source, and the children that each way took."""
    real, children = Sandbox.run_child, [0]

    def counted(self: Sandbox, *arguments: Any, **more: Any) -> Any:
        children[0] += 1
        return real(self, *arguments, **more)

    def passes(index: int, output: bytes) -> bool:
        return output.decode().split() == expected[index].split()

    def verdicts(run: ProgramRun) -> list[bool]:
        return [output is not None and passes(at, output) for at, output in enumerate(run.outputs)]

    with monkeypatch.context() as patch:
        patch.setattr(Sandbox, "run_child", counted)
        with_it = box.run(program, passes)
        taken = children[0]
        patch.setattr(_ProgramRun, "_ask_independent", lambda self, job, code: None)
        without = box.run(program, passes)
    assert verdicts(with_it) == verdicts(without)
    assert with_it.details == without.details
    return with_it, taken, children[0] - taken


INPUTS = tuple(str(n) for n in range(8))


@pytest.mark.parametrize(
    ("source", "most"),
    [
        ("print(int(input()) + 1)", 2),
        ("n = int(input())\nprint(n if n % 2 else n + 1)", 2),
        ("n = int(input())\nprint([0, 1, 2][n])", 3),
        ("raise ValueError(input())", 3),
        ("n = int(input())\nif n == 3:\n    raise SystemExit(2)\nprint(n + (n > 5))", 3),
    ],
    ids=["wrong", "half wrong", "raises late", "raises", "exits"],
)
def test_failing_tests_cost_little_and_count_the_same(
    box: Sandbox, monkeypatch: pytest.MonkeyPatch, source: str, most: int
) -> None:
    _, taken, without = both(box, monkeypatch, Program(source, "stdin", INPUTS), list(INPUTS))
    assert taken <= most < without


def test_a_recursion_error_is_tried_alone(box: Sandbox, monkeypatch: pytest.MonkeyPatch) -> None:
    """How deep a stack may be can depend on what ran before."""
    source = "def f(n):\n    return f(n + 1)\nn = int(input())\nprint(n if n < 3 else f(0))"
    run, taken, _ = both(box, monkeypatch, Program(source, "stdin", INPUTS), list(INPUTS))
    assert taken >= 5
    assert "RecursionError" in run.details[7]


def test_functions_that_remember_are_judged_as_if_alone(box: Sandbox, monkeypatch: pytest.MonkeyPatch) -> None:
    source = "seen = []\ndef f(n):\n    seen.append(n)\n    if n == 6:\n        raise KeyError(n)\n"
    source += "    return len(seen) + (n == 5)"
    program = Program(source, "call", tuple(f"[{n}]" for n in INPUTS), function="f")
    run, taken, without = both(box, monkeypatch, program, ["1"] * 8)
    assert [json.loads(o) if o else None for o in run.outputs] == [1, 1, 1, 1, 1, 2, None, 1]
    assert taken < without


def test_state_of_a_module_is_never_taken_for_the_programs_own(box: Sandbox, monkeypatch: pytest.MonkeyPatch) -> None:
    source = (
        "import random\nrandom.seen = getattr(random, 'seen', 0) + 1\nprint(input() if random.seen == 1 else 'late')"
    )
    run, taken, without = both(box, monkeypatch, Program(source, "stdin", INPUTS), list(INPUTS))
    assert [output.split() for output in run.outputs if output] == [[n.encode()] for n in INPUTS]
    assert taken == without + 1  # the reading, in vain
