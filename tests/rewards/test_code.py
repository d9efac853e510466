"""The code plugin: which block is the program, what is an equal output, and verdicts through the real sandbox."""

import json
import time
from collections.abc import Iterator
from typing import Any

import prorl_sandbox
import pytest
from prorl_reward_code.compare import equal, same_text, same_value
from prorl_reward_code.extract import program_of
from prorl_reward_code.plugin import MAX_SOURCE_CHARS, CodeReward
from prorl_reward_code.truth import MAX_TIME_LIMIT_S, check, names_called
from prorl_sandbox.client import ANSWER_S, EXTRA_TIME_S
from prorl_sandbox.processes import QUEUED_S

from nemo_prorl.errors import UnfitMachine
from nemo_prorl.rewards.interface import RewardRequest, RewardResult
from nemo_prorl.rewards.pool import WALL_FACTOR
from nemo_prorl.rewards.sandbox import open_sandbox

pytestmark = pytest.mark.starts

F = "```"
ONE, TWO = "print(1)\n", "print(2)\n"


@pytest.fixture(scope="module")
def code() -> Iterator[CodeReward]:
    plugin = CodeReward()
    sandbox = open_sandbox(packages=plugin.sandbox_packages)
    plugin.sandbox = sandbox
    plugin.prepare()
    yield plugin
    sandbox.close()


def judged(plugin: CodeReward, truth: dict[str, Any], response: str) -> RewardResult:
    return plugin.score(RewardRequest("x", "code", "?", truth, response))


def run(plugin: CodeReward, truth: dict[str, Any], program: str) -> RewardResult:
    return judged(plugin, truth, f"So:\n{F}python\n{program}\n{F}\n")


def stdin(*pairs: tuple[str, str], **more: Any) -> dict[str, Any]:
    return {"tests": [{"input": given, "output": wanted} for given, wanted in pairs], **more}


def call(name: str, *pairs: tuple[list[Any], Any], **more: Any) -> dict[str, Any]:
    return {"fn_name": name, "tests": [{"args": args, "expected": wanted} for args, wanted in pairs], **more}


# --- which block -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "program"),
    [
        (f"a\n{F}python\n{ONE}{F}\nb", ONE),
        (f"{F}python\n{ONE}{F}\n{F}python\n{TWO}{F}", TWO),
        (f"{F}\n{ONE}{F}", ONE),
        (f"{F}python\r\n{ONE}{F}\r\n", ONE),
        (f"~~~python\n{ONE}~~~", ONE),
        (f"{F}python\nprint('{F}')\n{F}", f"print('{F}')\n"),
        (f"{F}`python\ns = '''\n{F}\n'''\n{F}`", f"s = '''\n{F}\n'''\n"),
        (f"{F}python\nd = '''\n    {F}python\n    >>> 1\n    {F}\n'''\n{ONE}{F}", None),
        (f"1. so\n   {F}python\n   if 1:\n       print(1)\n   {F}", "if 1:\n    print(1)\n"),
        (f"- {F}python\n  {ONE}  {F}", ONE),
        (f"> {F}python\n> if 1:\n>     print(1)\n> {F}", "if 1:\n    print(1)\n"),
        (f"{F}python\n    a = 1\n    print(a)\n{F}", "a = 1\nprint(a)\n"),
        (f"{F}python\n{ONE}      {F}", ONE),
        (f"{F}python\n{ONE}{F}</answer>", ONE),
        (f"The code: {F}python\n{ONE}{F}\nIt prints: {F}\n3\n{F}", ONE),
        (f"{F}python\nprint(1){F}", ONE),
        (f"it is {F}print(1){F}", ONE),
        (f"{F}python\n{ONE}", None),
        (f"{F}python\n{ONE}{F}\n{F}python\n{TWO}", ONE),
        (f"{F}python\n{ONE}no, better:\n{F}python\n{TWO}{F}", TWO),
        (ONE, None),
        ("", None),
    ],
)
def test_the_last_closed_block_is_the_program(text: str, program: str | None) -> None:
    if program is None and ">>>" in text:  # fences in a docstring close nothing
        program = text.removeprefix(f"{F}python\n").removesuffix(F)
    assert program_of(text) == program


@pytest.mark.parametrize(
    "info",
    [
        "python",
        "Python",
        "py",
        "python3",
        "python3.11",
        "pypy3",
        "{.python .x}",
        "python:main.py",
        'python title="a b"',
    ],
)
def test_languages_that_are_python(info: str) -> None:
    assert program_of(f"{F}{info}\n{ONE}{F}\n{F}cpp\nint main(){{}}\n{F}") == ONE


@pytest.mark.parametrize(
    "after", ["\n3 5\nYes\n", "text\nprints 1\n", "bash\npython main.py\n", "python\n>>> print(1)\n1\n", "json\n{}\n"]
)
def test_a_sample_of_output_is_no_program(after: str) -> None:
    assert program_of(f"{F}python\n{ONE}{F}\nThis gives\n{F}{after}{F}") == ONE


def test_without_python_the_last_block_counts() -> None:
    assert program_of(f"{F}code\n{ONE}{F}\n{F}cpp\n{TWO}{F}") == TWO


def test_a_usage_example_is_not_the_answer_of_a_function() -> None:
    solution, usage = "def f(x):\n    return x\n", "print(f(1))\n"
    text = f"{F}python\n{solution}{F}\nUse it so:\n{F}python\n{usage}{F}"
    assert program_of(text, {"f"}) == solution
    assert program_of(text, {"g"}) == usage
    assert program_of(text) == usage
    other = f"{F}python\ndef f(x):\n    return 2\n{F}"
    assert program_of(f"{text}\n{other}", {"f"}) == "def f(x):\n    return 2\n"
    assigned = f"{F}\n{solution}{F}\n{F}\nroot = 1\nprint(f(root))\n{F}"
    assert program_of(assigned, {"f", "root"}) == solution
    assert program_of(f"{F}\nf = abs\n{F}\n{F}\n{usage}{F}", {"f"}) == "f = abs\n"
    leetcode = "class Solution:\n    def f(self, x):\n        return x\n"
    assert program_of(f"{F}\n{leetcode}{F}\n{F}\n{usage}{F}", {"f"}) == leetcode


@pytest.mark.parametrize(
    "text",
    [F * 40_000, f"{F}\n" * 40_000, f"{F}python\n" * 20_000, F + " " * 100_000 + "`", "> " * 60_000, "\n" * 100_000]
    + [f"{F}python\n{' ' * 100_000}", f"{F}python\n{'print ' * 20_000}\n{F}", f"{F}{' ' * 100_000}b " + "b " * 99],
    ids=range(9),
)
def test_long_responses_take_linear_time(text: str) -> None:
    began = time.process_time()
    program_of(text, {"f"})
    assert time.process_time() - began < 10.0  # about 0.5 s; as the square of the length: many minutes


# --- what is equal ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("expected", "output", "same"),
    [
        ("1 2\n3\n", b"1 2\n3", True),
        ("1 2\n\n3 \n", b"1\n2 3\r\n", True),
        ("", b" \n", True),
        ("1", b"", False),
        ("1 2", b"12", False),
        ("1 2", b"1 2 3", False),
        ("YES", b"Yes", False),
        ("1", b"1.0", False),
        ("7", b"07", False),
        ("x\u00a0y", b"x y", False),
        ("3.162277660", b"3.1622776601683795", True),
        ("1.68040", b"1.6804", True),
        ("0.333333", b"0.3333333333", True),
        ("1e-3", b"0.001", False),
        ("0.5", b"0.50001", False),
        ("1234567890.5", b"1234567891.0", False),
        ("12345678901234.5", b"12345678901235", False),
        ("0.0000001", b"0.0", False),
        ("1.5", b"nan", False),
        ("1.5", b"inf", False),
        ("1.5x", b"1.50x", False),
        ("1.2.3", b"1.2.30", False),
        ("\ud800", b"\xed\xa0\x80", True),
    ],
)
def test_outputs_are_compared_by_tokens(expected: str, output: bytes, same: bool) -> None:
    assert same_text(expected, output) is same


@pytest.mark.parametrize(
    ("expected", "value", "same"),
    [
        (1, 1.0, True),
        (1.0, 1, True),
        (True, 1, False),
        (1, True, False),
        (None, 0, False),
        (None, None, True),
        (0, None, False),
        ("1", 1, False),
        ([1, [2]], [1, [2]], True),
        ([1], [1, 1], False),
        ([1, 2], [2, 1], False),
        ([1], 1, False),
        ((1, 2), [1, 2], True),
        ({"a": 1}, {"a": 1, "b": 2}, False),
        ({"a": [True]}, {"a": [1]}, False),
        (0.3, 0.1 + 0.2, True),
        (0.3, 0.30001, False),
        (10**12, float(10**12 + 1), False),
        (2**53 + 1, float(2**53), False),
        (10**400, 1.5, False),
        (1.5, 10**400, False),
        (1234567890.5, 1234567891, False),
    ],
)
def test_results_are_compared_as_json(expected: Any, value: Any, same: bool) -> None:
    assert equal(expected, value) is same
    assert same_value(expected, json.dumps(value).encode()) is same


@pytest.mark.parametrize("output", [b"", b"NaN", b"1 1", b"{", b"[" * 100_000, b"\xff", b"9" * 5000])
def test_what_is_no_json_is_no_result(output: bytes) -> None:
    assert not same_value(1, output)


# --- truths ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("truth", "says"),
    [
        ({}, "either 'tests' or 'asserts'"),
        ({"tests": None}, "either 'tests' or 'asserts'"),
        ({"tests": [], "asserts": ["assert f()"]}, "either 'tests' or 'asserts'"),
        ({"tests": []}, r"truth\.tests is \[\]; it must be a list of at least one test"),
        ({"tests": "1"}, r"truth\.tests is '1'"),
        ({"tests": [1]}, r"truth\.tests\[0\] is 1; it must be an object"),
        (stdin(("", "1")) | {"tests": [{"input": ""}]}, r"truth\.tests\[0\]\.output is missing"),
        (
            {"tests": [{"input": "", "output": ""}, {"input": 1, "output": ""}]},
            r"tests\[1\]\.input is 1; it must be a str",
        ),
        ({"tests": [{"input": "", "output": [1]}]}, r"tests\[0\]\.output is \[1\]"),
        ({"tests": [{"args": [], "expected": 1}]}, r"truth\.fn_name is missing"),
        ({"fn_name": "f g", "tests": [{"args": [], "expected": 1}]}, r"truth\.fn_name is 'f g'"),
        ({"fn_name": "f", "tests": [{"args": 1, "expected": 1}]}, r"tests\[0\]\.args is 1; it must be a list"),
        ({"fn_name": "f", "tests": [{"args": []}]}, r"tests\[0\]\.expected is missing"),
        ({"asserts": []}, r"truth\.asserts is \[\]"),
        ({"asserts": [1]}, r"truth\.asserts is \[1\]"),
        ({"asserts": ["assert f("]}, r"truth\.asserts\[0\] is not valid Python: SyntaxError"),
        (stdin(("", ""), setup="import"), r"truth\.setup is not valid Python"),
        (stdin(("", ""), setup=1), r"truth\.setup is 1; it must be a string"),
        (stdin(("", ""), time_limit_s=0), r"truth\.time_limit_s is 0"),
        (stdin(("", ""), time_limit_s=True), r"truth\.time_limit_s is True"),
        (stdin(("", ""), time_limit_s=61), r"at most 60"),
    ],
)
def test_a_wrong_truth_is_refused_by_the_name_of_its_field(truth: dict[str, Any], says: str) -> None:
    with pytest.raises(ValueError, match=says):
        check(truth)


def test_fields_that_are_null_are_absent(code: CodeReward) -> None:
    truth = stdin(("2", "2"), fn_name=None, asserts=None, setup=None, time_limit_s=None)
    assert run(code, truth, "print(input())").score == 1.0


def test_names_that_tests_call() -> None:
    assert names_called({"asserts": ["import math\nassert math.isclose(f(x=[i for i in range(3)]), 2)"]}) == {"f"}
    assert names_called({"asserts": ["def check(g):\n    assert g(1)\ncheck(f)"]}) == {"f"}
    assert names_called(call("f", ([], 1))) == {"f"}
    assert names_called(stdin(("", ""))) == set()


# --- standard input --------------------------------------------------------------------------------------------------

ADD = stdin(("1 2\n", "3\n"), ("4 5", "9"), ("0 0\n", "0 \n"))


@pytest.mark.parametrize(
    "program",
    [
        "a, b = map(int, input().split())\nprint(a + b)",
        "import sys\nprint(sum(map(int, sys.stdin.read().split())), end='')",
        "def main():\n    print(sum(map(int, input().split())))\nif __name__ == '__main__':\n    main()",
        "import os\nprint(sum(map(int, os.read(0, 99).split())), flush=True)\nos._exit(0)",
        "from __future__ import annotations\ndef f(x: Odd):\n    return sum(map(int, x))\nprint(f(input().split()))",
        "import sys\nfor line in sys.stdin:\n    print(sum(map(int, line.split())))\nsys.exit()",
    ],
)
def test_programs_that_read_and_print(code: CodeReward, program: str) -> None:
    result = run(code, ADD, program)
    assert (result.score, result.correct, result.parts) == (1.0, True, {"passed": 3, "tests": 3}), result.detail


def test_partial_credit_names_the_first_test_that_fails(code: CodeReward) -> None:
    result = run(code, ADD, "a, b = map(int, input().split())\nassert a < 4, 'too big'\nprint(a + b)")
    assert result.score == pytest.approx(2 / 3)
    assert (result.correct, result.failure) == (False, None)
    assert result.detail == "2 of 3 tests passed; test 2: AssertionError: too big"


@pytest.mark.parametrize(
    ("program", "says"),
    [
        ("print(1", "SyntaxError"),
        ("def f():\nreturn 1", "IndentationError"),
        ("print(sum(map(int, input().split())) + 1)", "another answer"),
        ("def main():\n    print(sum(map(int, input().split())))", "another answer"),
        ("def f(x: List[int]):\n    pass", "NameError: name 'List' is not defined"),
        ("print(sum(map(int, input().split())))\nraise KeyError('k')", "KeyError: 'k'"),
        ("print(sum(map(int, input().split())))\nexit(1)", "SystemExit: 1"),
        ("import numpy_of_nobody", "ModuleNotFoundError"),
        ("\0", "null bytes"),
        ("\ud800", "surrogates"),
    ],
)
def test_programs_that_earn_nothing(code: CodeReward, program: str, says: str) -> None:
    result = run(code, ADD, program)
    assert (result.score, result.correct, result.failure) == (0.0, False, None)
    assert says in result.detail


@pytest.mark.parametrize(
    "program",
    [
        "import scipy.special\nprint(int(scipy.special.comb(a + b, 1, exact=True)))",
        "from scipy.optimize import linprog\nprint(round(linprog([1], A_eq=[[1]], b_eq=[a + b]).x[0]))",
        "import sympy\nprint(sympy.solve(sympy.Symbol('x') - a - b)[0])",
        "import networkx as nx\nG = nx.path_graph(a + b)\nprint(len(nx.shortest_path(G, 0, a + b - 1)))",
        "from sortedcontainers import SortedList\nprint(sum(SortedList([b, a])))",
        "import more_itertools\nprint(sum(more_itertools.flatten([[a], [b]])))",
    ],
)
def test_programs_use_the_packages_of_contest_judges(code: CodeReward, program: str) -> None:
    result = run(code, stdin(("1 2", "3"), ("4 5", "9")), "a, b = map(int, input().split())\n" + program)
    assert result.score == 1.0, result.detail


def test_a_program_that_needs_another_package_fails_with_its_name(code: CodeReward) -> None:
    for wanted in ("torch", "torch.nn"):
        result = run(code, ADD, f"import {wanted}\nprint(sum(map(int, input().split())))")
        assert (result.score, result.failure) == (0.0, None)
        assert "cannot import 'torch' here; setting packages allows the standard library, numpy, " in result.detail


def test_all_tests_together_have_one_time_limit(code: CodeReward) -> None:
    truth = stdin(*[(str(n), str(n)) for n in range(5)], time_limit_s=0.8)
    program = "import time\nn = input()\nwhile time.process_time() < {} * (int(n) + 1): pass\nprint(n)"
    assert run(code, truth, program.format(0.01)).score == 1.0
    began = time.monotonic()
    late = run(code, truth, program.format(0.3))
    assert (late.score, late.correct, late.failure) == (0.0, False, "timeout")
    assert late.detail == "over the time limit of 0.8 s"
    assert time.monotonic() - began < 10.0


def test_the_sandbox_decides_on_a_slow_program_before_the_worker_is_given_up() -> None:
    most = 2 * MAX_TIME_LIMIT_S + EXTRA_TIME_S + QUEUED_S + ANSWER_S + 1.0  # s
    assert WALL_FACTOR * CodeReward.Config().time_budget_s > most


def test_input_and_output_may_be_lists_of_lines(code: CodeReward) -> None:
    truth = {"tests": [{"input": ["2", "a b"], "output": ["b", "a"]}]}
    assert run(code, truth, "input()\nprint(*reversed(input().split()))").score == 1.0
    assert run(code, truth, "input()\nprint(input())").score == 0.0


def test_what_is_thought_is_not_judged(code: CodeReward) -> None:
    good = f"{F}python\nprint(sum(map(int, input().split())))\n{F}"
    assert judged(code, ADD, f"<think>{F}python\nprint(1)\n{F}</think>{good}").score == 1.0
    assert judged(code, ADD, f"<think>{good}</think>No.").score == 0.0
    assert judged(code, ADD, f"<think>{good}").detail == "<think> was opened and never closed: no answer"
    assert judged(code, ADD, "print(3)").detail == "no program between triple backticks"
    assert "longer than" in run(code, ADD, "#" * MAX_SOURCE_CHARS).detail


# --- functions -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "program",
    [
        "def pair(x):\n    return [x, x * 2]",
        "def pair(x):\n    print('[0, 0]')\n    return x, x * 2",
        "pair = lambda x: (x, x + x)",
        "class Solution:\n    def pair(self, x: int) -> List[int]:\n        return [x, x * 2]",
        "class Solution:\n    def __init__(self):\n        self.n = []\n    def pair(self, x):\n"
        "        self.n += [x, 2 * x]\n        return self.n",
        "class Solution:\n    @staticmethod\n    def pair(x):\n        return [x, x * 2]",
        "def pair(x: Optional[int]) -> 'List[int]':\n    return [*accumulate([x, x])]",
        "from __future__ import annotations\nfrom dataclasses import dataclass\n@dataclass\nclass P:\n    x: int\n"
        "def pair(x):\n    return [P(x).x, x * 2]",
        "def pair(x):\n    return [x, x * 2]\nif __name__ == '__main__':\n    print(pair(int(input())))",
        "def pair(x):\n    return [pow(x, 1, 10**9), float(2 * x)]",
    ],
)
def test_functions(code: CodeReward, program: str) -> None:
    result = run(code, call("pair", ([3], [3, 6]), ([0], [0, 0]), setup="import json"), program)
    assert (result.score, result.correct) == (1.0, True), result.detail


@pytest.mark.parametrize(
    ("name", "program", "says"),
    [
        ("f", "def g(x):\n    return x", "the program has no function 'f'"),
        ("gcd", "pass", "the program has no function 'gcd'"),
        ("sum", "pass", "the program has no function 'sum'"),
        ("f", "def f(x):\n    return {x}", "which JSON cannot represent"),
        ("f", "def f(x):\n    return float('nan')", "ValueError"),
        ("f", "def f(x):\n    print(x)", "another answer"),
        ("f", "def f():\n    return 4", "TypeError"),
        ("f", "x = int(input())\ndef f(x):\n    return x", "EOFError"),
        ("f", "def f(x):\n    return str(x)", "another answer"),
        (
            "f",
            "class Yes:\n    def __eq__(self, other):\n        return True\ndef f(x):\n    return Yes()",
            "JSON cannot",
        ),
    ],
)
def test_functions_that_earn_nothing(code: CodeReward, name: str, program: str, says: str) -> None:
    result = run(code, call(name, ([4], 4)), program)
    assert result.score == 0.0
    assert says in result.detail


def test_each_call_gets_arguments_of_its_own(code: CodeReward) -> None:
    truth = call("f", ([[1]], [1, 1]), ([[1]], [1, 1]), ([{"k": [2]}], {"k": [2], "1": None}))
    program = "def f(x):\n    if isinstance(x, dict):\n        x[1] = None\n    else:\n        x += x\n    return x"
    assert run(code, truth, program).score == 1.0


# --- asserts ---------------------------------------------------------------------------------------------------------


def test_asserts(code: CodeReward) -> None:
    truth = {"asserts": ["assert f(1) == 2", "assert f(2) == 4", "import math\nassert math.isclose(f(0.5), 1)"]}
    assert run(code, truth, "def f(x):\n    return x * 2").score == 1.0
    result = run(code, truth, "def f(x):\n    return x + 1")
    assert result.score == pytest.approx(1 / 3)
    assert "test 2: AssertionError" in result.detail
    usage = f"{F}python\ndef f(x):\n    return x * 2\n{F}\nso\n{F}python\nprint(f(2))  # 4\n{F}"
    assert judged(code, truth, usage).score == 1.0


@pytest.mark.parametrize("name", ["gcd", "comb", "Counter", "accumulate", "heappop", "deepcopy", "sqrt"])
def test_no_assert_is_answered_by_names_that_only_programs_get(code: CodeReward, name: str) -> None:
    result = run(code, {"asserts": [f"assert {name}"]}, "pass")
    assert result.score == 0.0
    assert "NameError" in result.detail


def test_trees_and_lists_of_leetcode(code: CodeReward) -> None:
    truth = {
        "asserts": [
            "def check(candidate):\n    assert is_same_tree(candidate(root=tree_node([1, 2, 3, None, 4])),"
            " tree_node([1, 3, 2, None, None, 4]))\ncheck(Solution().flip)",
            "assert Solution().flip(tree_node([])) is None",
            "assert is_same_list(list_node([1, 2]), ListNode(1, ListNode(2)))",
            "root = tree_node([1, 2, 3, 4, None, 5])\nassert (root.left.left.val, root.right.left.val) == (4, 5)",
            "assert not is_same_list(list_node([1, 2]), list_node([1]))",
            "assert not is_same_tree(tree_node([1, 2]), tree_node([1, None, 2]))",
        ]
    }
    program = (
        "class Solution:\n    def flip(self, root: Optional[TreeNode]) -> Optional[TreeNode]:\n        if root:\n"
        "            root.left, root.right = self.flip(root.right), self.flip(root.left)\n        return root"
    )
    assert run(code, truth, program).score == 1.0
    assert run(code, truth, program.replace("self.flip(root.right)", "self.flip(root.left)")).score == pytest.approx(
        5 / 6
    )


def test_a_setup_that_needs_the_program_runs_after_it(code: CodeReward) -> None:
    truth = {"asserts": ["assert depth(root) == 2"], "setup": "root = Node(1)\nroot.left = Node(2)"}
    program = (
        "class Node:\n    def __init__(self, x):\n        self.left = None\n"
        "def depth(n):\n    return 1 + depth(n.left) if n else {}"
    )
    assert run(code, truth, program.format(0)).score == 1.0
    assert run(code, truth, program.format(1)).score == 0.0
    assert run(code, truth, "def depth(n):\n    return 2").score == 0.0


def test_a_setup_stands_before_a_program_from_the_future(code: CodeReward) -> None:
    truth = stdin(("", "2"), setup="base = 1")
    result = run(code, truth, "from __future__ import annotations\nprint(base + 1)")
    assert result.score == 1.0, result.detail
    assert "main.py, line 1" in run(code, truth, "1 +").detail


def test_the_setting_setup_runs_before_programs_that_read_standard_input(code: CodeReward) -> None:
    """For example the imports that PRIME's checker puts before each program."""
    program = "print(Counter(input()).most_common(1)[0][0], sys.getrecursionlimit())"
    truth = stdin(("aab\n", "a 5000\n"), ("xyy\n", "y 5000\n"))
    assert run(code, truth, program).score == 0
    imports = "from collections import *\nimport sys\nsys.setrecursionlimit(5000)"
    other = CodeReward(CodeReward.Config(setup=imports))
    other.sandbox = code.sandbox
    assert run(other, truth, program).score == 1
    assert run(other, {**truth, "setup": "import sys"}, program).score == 0
    assert run(other, call("f", ([], 1000)), "def f():\n    import sys\n    return sys.getrecursionlimit()").score == 1
    with pytest.raises(ValueError, match="setup is not valid Python: SyntaxError"):
        CodeReward(CodeReward.Config(setup="from math import"))


def test_a_machine_without_a_sandbox_is_refused_with_both_fixes(monkeypatch: pytest.MonkeyPatch) -> None:
    def none_works(unsafe: bool, packages: tuple[str, ...]) -> None:
        raise prorl_sandbox.NoSandbox("no sandbox works on this machine (why).  Fix: another kernel")

    monkeypatch.setattr(prorl_sandbox, "open_sandbox", none_works, raising=False)
    with pytest.raises(UnfitMachine, match=r"another kernel; or rewards\.unsafe_no_sandbox=true: code of the model"):
        open_sandbox()
