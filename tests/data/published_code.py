"""Makes stand-ins of the published code data sets: the files' own names and columns, with invented problems.

Each problem has a right and a wrong program, so that its tests can be judged.
"""

import base64
import json
import pickle
import zlib
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet

from tests.lines import write_lines

SYSTEM = "Work in named steps.\n\n[ASSESS]\n\n[ADVANCE]\n\n[OUTPUT]\n"  # in place of PRIME's
ASKED = "\n\nWrite Python code to solve the problem. Present the code in \n```python\nYour code\n```\nat the end."
SETS = ("apps", "codecontests", "codeforces", "taco")


@dataclass(frozen=True)
class Problem:
    """An invented problem with its tests in the published form, and programs that must score 1 and less than 1."""

    origin: str
    text: str
    tests: dict[str, Any]
    right: str
    wrong: str
    meta: dict[str, str] = field(default_factory=dict)


_SUM = "print(sum(map(int, open(0).read().split()){}))"
_LONG = [str(number % 997) for number in range(40_000)]

# The forms that tests have in PRIME's files: texts, lists of lines, calls with arguments in JSON, boxed results.
PROBLEMS = (
    Problem(
        "apps",
        "Read two integers and print their sum.",
        {"inputs": ["1 2\n", "4 5"], "outputs": ["3\n", "9"]},
        _SUM.format(""),
        "print(3)",
    ),
    Problem(
        "apps",
        "Write a function that doubles an integer; its tests have boxed results.",
        {"fn_name": "double", "inputs": [[1], [4]], "outputs": [[2], [8]]},
        "def double(n):\n    return 2 * n",
        "def double(n):\n    return n + 1",
    ),
    Problem(
        "apps",
        "Write a function that adds an integer to each entry of a list; its tests are texts.",
        {"fn_name": "shifted", "inputs": ["3\n[1, 2]", "-1\n[]"], "outputs": ["[4, 5]", "[]"]},
        "class Solution:\n    def shifted(self, n, values):\n        return [n + value for value in values]",
        "def shifted(n, values):\n    return [n - value for value in values]",
    ),
    Problem(
        "apps",
        "Write a function that returns the words of a text that have one letter; one test has one such word.",
        {"fn_name": "letters", "inputs": ['"a bc d"', '"x yz"'], "outputs": ['["a", "d"]', '["x"]']},
        "def letters(text):\n    return tuple(word for word in text.split() if len(word) == 1)",
        "def letters(text):\n    return text.split()",
    ),
    Problem(
        "taco",
        "Read a number of integers and then the integers, and print their sum; the tests are lists of lines.",
        {"inputs": [["2", "1 2"], ["1", "7"]], "outputs": [["3"], ["7"]]},
        "input()\nprint(sum(map(int, input().split())))",
        "print(input())",
    ),
    Problem(
        "taco",
        "Read a text and print it in capital letters; a test is given twice.",
        {"inputs": ["ab\n", "ab\n", "c"], "outputs": ["AB\n", "AB\n", "C"]},
        "print(input().upper())",
        "print(input().title())",
    ),
    Problem(
        "codecontests",
        "Read many integers and print their sum.",
        {"inputs": [" ".join(_LONG), "5"], "outputs": [str(sum(map(int, _LONG))), "5"]},
        _SUM.format(""),
        _SUM.format(", 1"),
    ),
    Problem(
        "codecontests",
        "Read an integer and print its square; there are many tests.",
        {"inputs": [f"{n}\n" for n in range(60)], "outputs": [f"{n * n}\n" for n in range(60)]},
        "print(int(input()) ** 2)",
        "print(int(input()) * 2)",
    ),
    Problem(
        "codecontests",
        "Read two integers and print the larger one.",
        {"inputs": ["1 2\n", "9 3\n"], "outputs": ["2\n", "9\n"]},
        "print(max(map(int, input().split())))",
        "print(input().split()[1])",
    ),
    Problem(
        "codeforces",
        "Read an integer and print half of it with a decimal point.",
        {"inputs": ["1\n", "3\n"], "outputs": ["0.500000000\n", "1.500000000\n"]},
        "print(int(input()) / 2)",
        "print(int(input()) // 2)",
    ),
    Problem(
        "codeforces",
        "Read a text and print its letters, each in a line of its own; the lines of the tests end as on Windows.",
        {"inputs": ["abc\r\n", "z\r\n"], "outputs": ["a\r\nb\r\nc\r\n", "z\r\n"]},
        "print(*input().strip(), sep='\\n')",
        "print(input())",
    ),
    Problem(
        "codeforces",
        "Print the integers from one to the one read; a test expects no output.",
        {"inputs": ["3\n", "0\n"], "outputs": ["1 2 3\n", ""]},
        "print(*range(1, int(input()) + 1))",
        "pass",
    ),
)

# Tests that nobody can pass or that each program passes, with the reason for which the row is dropped.
BROKEN: tuple[tuple[str, dict[str, Any]], ...] = (
    ("no tests", {"inputs": [], "outputs": []}),
    ("broken tests", {"inputs": ["1\n", "2\n"], "outputs": ["1\n"]}),
    ("broken tests", {"inputs": ["1\n"], "outputs": [1]}),
    ("broken tests", {"inputs": ["1\n", "2\n"], "outputs": ["", "\n"]}),
    ("broken tests", {"fn_name": "two words", "inputs": [[1]], "outputs": [[1]]}),
    ("broken tests", {"fn_name": "f", "inputs": ["1, 2"], "outputs": ["3"]}),
    ("broken tests", {"fn_name": "f", "inputs": ["1"], "outputs": ["NaN"]}),
    ("broken tests", {"fn_name": "f", "inputs": [{"n": 1}], "outputs": [1]}),
)


def parquet(path: Path, rows: Sequence[dict[str, Any]]) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(list(rows)), path)
    return path


# --- Eurus-2-RL ------------------------------------------------------------------------------------------------------


def _eurus(origin: str, ability: str, text: str, truth: str, split: str, index: int) -> dict[str, Any]:
    said = [{"content": SYSTEM, "role": "system"}, {"content": text, "role": "user"}]
    return {
        "data_source": origin,
        "prompt": said,
        "ability": ability,
        "reward_model": {"ground_truth": truth, "style": "rule"},
        "extra_info": {"index": index, "split": split},
    }


def _eurus_rows(split: str, problems: Sequence[Problem], preface: str) -> list[dict[str, Any]]:
    told = [(problem.origin, "code", preface + problem.text + ASKED, json.dumps(problem.tests)) for problem in problems]
    told += [
        (SETS[number % 4], "code", f"{preface}This is problem {number}.{ASKED}", json.dumps(tests))
        for number, (_, tests) in enumerate(BROKEN)
    ]
    told += [
        (
            "numina_olympiads",
            "math",
            f"What is {n} plus {n}?\n\nPresent the answer in LaTex format: \\boxed{{}}",
            str(n),
        )
        for n in range(4)
    ]
    return [_eurus(*row, split, index) for index, row in enumerate(told)]


def eurus_validation(folder: Path) -> Path:
    """Write eurus2-rl-validation/validation.parquet: 12 problems, 8 broken ones, and 4 of mathematics."""
    rows = _eurus_rows("dummy", PROBLEMS, "")
    return parquet(folder / "eurus2-rl-validation" / "validation.parquet", rows)


def eurus_train(folder: Path) -> Path:
    """Write eurus2-rl/train.parquet: other problems in the same forms."""
    rows = _eurus_rows("train", PROBLEMS, "On a Monday, do this. ")
    return parquet(folder / "eurus2-rl" / "train.parquet", rows)


# --- LiveCodeBench ---------------------------------------------------------------------------------------------------


def packed(tests: Any, protocol: int = 4) -> str:
    """Return private tests as LiveCodeBench publishes them: base64 of zlib data of a pickle of one text."""
    return base64.b64encode(zlib.compress(pickle.dumps(json.dumps(tests), protocol))).decode("ascii")


def contest_row(number: int, date: str, problem: Problem, kind: str, starter: str = "", **more: Any) -> dict[str, Any]:
    """Return a row of LiveCodeBench; the first test is public, and the others are private."""
    tests = [
        {"input": given, "output": wanted, "testtype": kind}
        for given, wanted in zip(problem.tests["inputs"], problem.tests["outputs"], strict=True)
    ]
    name = problem.tests.get("fn_name")
    return {
        "question_title": f"problem {number}",
        "question_content": f"{problem.text} (Contest {number}.)",
        "platform": "leetcode" if name else "atcoder",
        "question_id": str(3000 + number),
        "contest_id": f"contest-{number}",
        "contest_date": f"{date}T00:00:00",
        "starter_code": starter,
        "difficulty": "easy",
        "public_test_cases": json.dumps(tests[:1]),
        "private_test_cases": packed(tests[1:]),
        "metadata": json.dumps({"func_name": name} if name else {}),
        **more,
    }


_ADDED = "class Solution:\n    def shifted(self, n: int, values: List[int]) -> List[int]:\n        "
_WORDS = "class Solution:\n    def letters(self, text: str) -> List[str]:\n        "


def livecodebench(folder: Path) -> Path:
    """Write livecodebench/test.jsonl to test6.jsonl: 13 rows, 8 of the paper's period; 2 of these have no tests."""
    stream = [
        problem
        for problem in PROBLEMS
        if "fn_name" not in problem.tests and isinstance(problem.tests["inputs"][0], str)
    ]
    added = PROBLEMS[2]
    lists = {"inputs": ['"x yz"', '"ab c"'], "outputs": ['["x"]', '["c"]']}  # each result is a list with one entry
    words = replace(PROBLEMS[3], tests={**PROBLEMS[3].tests, **lists})
    plain = json.dumps([{"input": "8 8\n", "output": "16\n", "testtype": "stdin"}])
    empty: dict[str, Any] = {"public_test_cases": "[]", "private_test_cases": ""}
    files: dict[str, list[Any]] = {
        "test.jsonl": [("2023-05-07", stream[0], "stdin"), ("2023-08-13", added, "functional", _ADDED)],
        "test2.jsonl": [("2024-04-06", stream[1], "stdin")],
        "test3.jsonl": [("2024-07-31", stream[2], "stdin"), ("2024-08-01", stream[3], "stdin")],
        "test4.jsonl": [("2024-08-31", added, "functional", _ADDED), ("2024-09-14", stream[4], "stdin")],
        "test5.jsonl": [
            ("2024-12-07", words, "functional", _WORDS),
            ("2025-01-04", stream[0], "stdin", "", {"private_test_cases": plain}),
            ("2025-01-11", stream[1], "stdin", "", empty),
            ("2025-01-18", words, "functional", _WORDS, {"metadata": "{}"}),
            ("2025-01-31", stream[5], "stdin"),
        ],
        "test6.jsonl": [("2025-02-01", stream[6], "stdin")],
    }
    number = 0
    for name, given in files.items():
        rows = []
        for date, problem, kind, *rest in given:
            number += 1
            more = rest[1] if len(rest) > 1 else {}
            rows.append(contest_row(number, date, problem, kind, rest[0] if rest else "", **more))
        write_lines(folder / "livecodebench" / name, rows)
    return folder / "livecodebench"


# --- HumanEval+ ------------------------------------------------------------------------------------------------------

_COMPARE = """import numpy as np

def is_floats(x) -> bool:
    return isinstance(x, float) or (isinstance(x, (list, tuple)) and all(isinstance(i, float) for i in x))

def assertion(out, exp, atol):
    exact_match = out == exp
    if atol == 0 and is_floats(exp):
        atol = 1e-6
    if not exact_match and atol != 0:
        assert np.allclose(out, exp, rtol=1e-07, atol=atol)
    else:
        assert exact_match

"""
_CHECK = """def check(candidate):
    inputs = {inputs}
    results = {results}
    for i, (inp, exp) in enumerate(zip(inputs, results)):
        {assertion}
"""
_POLY = "def _poly(xs: list, x: float):\n    return sum(c * x**i for i, c in enumerate(xs))\n\n"
ZERO_CHECK = "assert _poly(*candidate(*inp), inp) <= 0.0001"  # as published: it fails for each program


@dataclass(frozen=True)
class Function:
    """An invented function of HumanEval+: right bodies, a wrong body, and its test in the published form."""

    name: str
    arguments: str
    task: str
    body: str
    also_right: str
    wrong: str
    test: str


def _checked(inputs: list[Any], results: list[Any], atol: float = 0) -> str:
    return _COMPARE + _CHECK.format(
        inputs=inputs, results=results, assertion=f"assertion(candidate(*inp), exp, {atol})"
    )


_REPEATED = "def ref_func(text: str, n: int) -> str:\n    return text * n\n\n"
_CROSS = """def check(candidate):
    inputs = {inputs}
    for i, inp in enumerate(inputs):
        assertion(candidate(*inp), ref_func(*inp), 0)
"""

FUNCTIONS = (
    Function(
        "last_digit",
        "n: int",
        "Return the last digit of n.",
        "return n % 10",
        "return int(str(n)[-1])",
        "return n % 9",
        _checked([[n] for n in range(0, 4000, 7)], [n % 10 for n in range(0, 4000, 7)]),
    ),
    Function(
        "rest",
        "x: float",
        "Return the part of x after the decimal point.",
        "return x % 1.0",
        "return round(x - int(x), 7)",
        "return x - round(x)",
        _checked([[3.5], [1.3333333333], [7.75]], [0.5, 1.3333333333 % 1.0, 0.75], 1e-6),
    ),
    Function(
        "repeated",
        "text: str, n: int",
        "Return the text n times.",
        "return text * n",
        "return ''.join(text for _ in range(n))",
        "return text + text",
        _COMPARE + _REPEATED + _CROSS.format(inputs=[["ab", 2], ["x", 20_000], ["", 3]]),
    ),
    Function(
        "find_zero",
        "xs: list",
        "Return a zero of the polynomial with the coefficients xs, the constant first.",
        "return -xs[0] / xs[1]",
        "return -xs[0] / xs[1] + 1e-7",
        "return xs[0]",
        "import math\n\n"
        + _POLY
        + "\n"
        + _CHECK.format(inputs=[[[1, 2]], [[-3, 4]]], results=[-0.5, 0.75], assertion=ZERO_CHECK),
    ),
)


def function_prompt(function: Function) -> str:
    return f'def {function.name}({function.arguments}):\n    """{function.task}"""\n'


def humanevalplus(folder: Path) -> Path:
    """Write humanevalplus/data/test-....parquet: 12 functions, three times the four forms that tests have."""
    rows = []
    for number in range(12):
        function, again = FUNCTIONS[number % 4], f" Variant {number // 4}."
        prompt = function_prompt(function).replace('"""\n', f'{again}"""\n')
        rows.append(
            {
                "task_id": f"HumanEval/{number}",
                "prompt": prompt,
                "canonical_solution": f"    {function.body}\n",
                "entry_point": function.name,
                "test": function.test,
            }
        )
    return parquet(folder / "humanevalplus" / "data" / "test-00000-of-00001-5973903632b82d40.parquet", rows)


# --- Codeforces-Python-Submissions -----------------------------------------------------------------------------------


def codeforces_submissions(folder: Path) -> Path:
    """Write codeforces-submissions/data/train-....parquet: 8 submissions of 3 problems, one of which nobody solved."""
    programs = {
        ("WRONG_ANSWER", "Python 3"): "print(3)",
        ("OK", "Python 2"): "print sum(map(int, raw_input().split()))",
        ("OK", "PyPy 3"): _SUM.format(""),
        ("OK", "Python 3"): "print(sum(int(n) for n in input().split()))",
    }
    given = (
        [(0, *key) for key in programs] + [(1, *key) for key in list(programs)[1:]] + [(2, "WRONG_ANSWER", "PyPy 3")]
    )
    tests = [{"input": "1 2\n", "output": "3\n"}, {"input": "5 6 7\r\n", "output": "18\r\n"}]
    cut = {"input": "1 2 3 4 5...", "output": "999..."}
    rows = [
        {
            "contestId": 4,
            "index": "ABC"[problem],
            "name": f"Sum {problem}",
            "rating": 800,
            "tags": ["math"],
            "problem-description": f"Add the integers, for the {problem + 1}. time.",
            "input-specification": "A line of integers.",
            "output-specification": "Their sum.",
            "demo-input": ["1 2"],
            "demo-output": ["3"],
            "note": "",
            "programmingLanguage": language,
            "verdict": verdict,
            "passedTestCount": 2,
            "code": programs[verdict, language] if problem < 2 else "print(0)",
            "test_cases": [*tests, cut] if problem == 0 else tests,
        }
        for problem, verdict, language in given
    ]
    return parquet(folder / "codeforces-submissions" / "data" / "train-00000-of-00009.parquet", rows)
