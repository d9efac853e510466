"""The plugin class for `code`: runs a program on its tests and scores the share that pass (paper sec. 2)."""

import json
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from prorl_sandbox import Program

from nemo_prorl.rewards.interface import (
    Canary,
    Example,
    RewardPlugin,
    RewardRequest,
    RewardResult,
    no_answer,
)
from prorl_reward_code.compare import same_text, same_value
from prorl_reward_code.extract import program_of
from prorl_reward_code.truth import check, check_code, names_called, text_of, without_nulls

MAX_SOURCE_CHARS = 1_000_000
# Import names of the packages that contest judges commonly offer; sympy needs mpmath.
PACKAGES = ("numpy", "scipy", "sympy", "mpmath", "networkx", "sortedcontainers", "more_itertools")
_MISSING = re.compile(r"ModuleNotFoundError: No module named '([^'.]+)")
_OUTPUT_MB = (1, 16, 128)  # few steps, so that the limit reveals little about the expected output


class CodeReward(RewardPlugin):
    """Continuous reward: the share of its tests that a Python program passes; 0 if it exceeds the time limit."""

    name = "code"
    tasks = ("code",)
    needs_sandbox = True

    @dataclass(frozen=True)
    class Config:
        """Settings.

        `time_limit_s`: seconds for all tests of a program together, unless the truth has its own `time_limit_s`.
        `memory_mb`: memory limit of a program in MB.  `time_budget_s`: CPU seconds to judge an answer, without
            those of the program.
        `packages`: import names of third-party packages that programs may import if they are installed.
        `setup`: Python code that runs before each program that reads standard input, unless the truth has its own
            `setup`, for example imports that a program need not repeat.
        """

        time_limit_s: float = 5.0
        memory_mb: int = 2048
        packages: Sequence[str] = PACKAGES
        setup: str = ""
        time_budget_s: float = 40.0  # four times this is longer than all that a program may take

    config: Config

    def __init__(self, config: Any = None) -> None:
        super().__init__(config)
        self.sandbox_packages = tuple(self.config.packages)
        check_code(self.config.setup, "setup")

    def validate_truth(self, truth: dict[str, Any]) -> None:
        check(truth)

    @classmethod
    def examples(cls) -> tuple[Example, ...]:
        add = "```python\na, b = map(int, input().split())\nprint(a {} b)\n```"
        twice = "```python\ndef twice(x):\n    return [x{}, x]\n```"
        return (
            Example(
                {"tests": [{"input": "1 2\n", "output": "3\n"}, {"input": "4 5\n", "output": "9\n"}]},
                add.format("+"),
                add.format("*"),
            ),
            Example(
                {"fn_name": "twice", "tests": [{"args": [3], "expected": [3, 3]}]}, twice.format(""), twice.format("+1")
            ),
            Example({"asserts": ["assert twice(3) == [3, 3]"]}, twice.format(""), twice.format("+1")),
        )

    @classmethod
    def canaries(cls) -> tuple[Canary, ...]:
        def block(code: str) -> str:
            return f"```python\n{code}\n```"

        add: dict[str, Any] = {"tests": [{"input": "1 2\n", "output": "3\n"}, {"input": "4 5\n", "output": "9\n"}]}
        quick = {**add, "time_limit_s": 0.05}  # seconds; an endless loop must not cost more than other canaries
        twice: dict[str, Any] = {"fn_name": "twice", "tests": [{"args": [3], "expected": [3, 3]}]}
        asserts: dict[str, Any] = {"asserts": ["assert twice(3) == [3, 3]"]}
        reads_answer = (
            "import sys\nframe = sys._getframe()\nwhile frame.f_back:\n    frame = frame.f_back\n"
            "print(frame.f_locals.get('outputs') or frame.f_locals.get('tests'))"
        )
        return (
            Canary(add, block("import sys;print(sum(map(int,sys.stdin.read().split())),end='')"), True),
            Canary(add, block("a, b = map(int, input().split())\nprint(a | b)"), False),
            Canary(twice, "As a lambda:\n" + block("twice = lambda x: 2 * [x]"), True),
            Canary(twice, block("def twice(x):\n    return [x, x, x]"), False),
            Canary(asserts, block("class Pair(list):\n    pass\n\ndef twice(x):\n    return Pair([x] * 2)"), True),
            Canary(asserts, block("class Equal:\n    pass\n\ndef twice(x):\n    return Equal()"), False),
            Canary(quick, block("while True:\n    pass"), False),
            Canary(add, block(reads_answer), False),
            Canary(add, block("print(3)"), False),
            Canary(add, block("a, b = (int(n) for n in input().split())\nprint(f'{a + b} ')"), True),
        )

    def score(self, request: RewardRequest) -> RewardResult:
        self.validate_truth(request.truth)
        if request.answer_text is None:
            return no_answer()
        truth = without_nulls(request.truth)
        source = program_of(request.answer_text, names_called(truth))
        if source is None:
            return RewardResult(score=0.0, correct=False, detail="no program between triple backticks")
        if len(source) > MAX_SOURCE_CHARS:
            return RewardResult(
                score=0.0, correct=False, detail=f"the program is longer than {MAX_SOURCE_CHARS} characters"
            )
        program, passes = self._program(source, truth)
        run = self.sandbox.run(program, passes)
        if run.refused:
            return RewardResult(score=0.0, correct=False, detail=run.refused)
        if run.over_time:
            detail = f"over the time limit of {program.time_limit_s:g} s"
            return RewardResult(score=0.0, correct=False, detail=detail, failure="timeout")
        verdicts = [output is not None and passes(at, output) for at, output in enumerate(run.outputs)]
        passed = sum(verdicts)
        detail = f"{passed} of {len(verdicts)} tests passed"
        if passed < len(verdicts):
            first = verdicts.index(False)
            detail += f"; test {first + 1}: {run.details[first] or 'another answer'}"
            missing = _MISSING.match(run.details[first])
            if missing and missing[1] not in self.sandbox_packages:
                allowed = ", ".join(("the standard library", *self.sandbox_packages))
                detail += f": programs cannot import {missing[1]!r} here; setting packages allows {allowed}"
        return RewardResult(
            passed / len(verdicts), passed == len(verdicts), {"passed": passed, "tests": len(verdicts)}, detail
        )

    def _program(self, source: str, truth: dict[str, Any]) -> tuple[Program, Callable[[int, bytes], bool]]:
        """Return the program with its inputs, and a function (index, output) that checks the output of a test."""
        tests = truth.get("tests", ())
        if "asserts" in truth:
            style, inputs, expected = "assert", tuple(truth["asserts"]), 0

            def passes(index: int, output: bytes) -> bool:
                return True
        elif "fn_name" in truth:
            style, inputs = "call", tuple(json.dumps(test["args"]) for test in tests)
            expected = max(len(json.dumps(test["expected"])) for test in tests)

            def passes(index: int, output: bytes) -> bool:
                return same_value(tests[index]["expected"], output)
        else:
            style, inputs = "stdin", tuple(text_of(test["input"]) or "" for test in tests)
            outputs = [text_of(test["output"]) or "" for test in tests]
            expected = max(map(len, outputs))

            def passes(index: int, output: bytes) -> bool:
                return same_text(outputs[index], output)

        room = next((mb for mb in _OUTPUT_MB if 4 * expected <= mb << 20), _OUTPUT_MB[-1])
        limit = float(truth.get("time_limit_s") or self.config.time_limit_s)
        setup = truth.get("setup") or (self.config.setup if style == "stdin" else "")
        name = truth.get("fn_name", "")
        return Program(source, style, inputs, name, setup, limit, self.config.memory_mb, room), passes
