"""Conversion of programming problems: tests by standard input, by calls of a function, and by asserts."""

import json
import re
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from nemo_prorl.data.prepare.answers import row_id
from nemo_prorl.data.prepare.drafts import Draft, Drop
from nemo_prorl.data.prepare.rows import Row

PROGRAM = (
    "Write a Python program that reads standard input and writes standard output. "
    "Put the final program between triple backticks, after ```python."
)
FUNCTION = "Write it in Python, and put the final code between triple backticks, after ```python."

HUMANEVAL_TIME_S = 60.0  # for all tests of a function together: EvalPlus and the paper's authors limit each test

# The answer instructions at the end of Eurus-2-RL's prompts.
_EURUS_END = re.compile(r"\s*Write Python code to solve the problem\. Present the code in\s*```python.*?```.*\Z", re.S)


def fenced(code: str) -> str:
    return f"```python\n{code}\n```"


def _named(name: str) -> str:
    return f"The code must define `{name}`. {FUNCTION}"


def _tests(row: Row, field: str, value: Any) -> dict[str, Any] | Drop:
    """Convert tests in APPS' form (`inputs`, `outputs`, `fn_name`) to a truth or a Drop."""
    if isinstance(value, str):
        try:
            value = json.loads(value)
        except ValueError:
            raise row.wrong(field, value, 'JSON: {"inputs": [...], "outputs": [...]}') from None
    if not isinstance(value, dict) or not all(isinstance(value.get(key), list) for key in ("inputs", "outputs")):
        raise row.wrong(field, value, '{"inputs": [...], "outputs": [...]}')
    inputs, outputs, name = value["inputs"], value["outputs"], value.get("fn_name")
    if len(inputs) != len(outputs):
        return Drop("broken tests", f"{len(inputs)} inputs and {len(outputs)} outputs")
    if not inputs:
        return Drop("no tests", "the source gives none")
    return stream_truth(inputs, outputs) if name is None else call_truth(name, inputs, outputs, boxed=True)


def stream_truth(inputs: Sequence[Any], outputs: Sequence[Any]) -> dict[str, Any] | Drop:
    """Return the truth of a program that reads standard input, or a Drop if the tests cannot be run."""
    if not all(_plain(text) for text in (*inputs, *outputs)):
        return Drop("broken tests", "an input or output is not a text")
    if not any("".join(output).strip() for output in outputs):
        return Drop("broken tests", "every expected output is empty, so a program without output would pass")
    return {"tests": [{"input": stdin, "output": stdout} for stdin, stdout in zip(inputs, outputs, strict=True)]}


def call_truth(name: Any, inputs: Sequence[Any], outputs: Sequence[Any], boxed: bool) -> dict[str, Any] | Drop:
    """Return the truth of a function, or a Drop if the tests cannot be run.

    Args:
        inputs: for each call the list of its arguments, or a text with one argument in JSON per line.
        outputs: the results.  The result of a call with a text is a text, too, with the result in JSON.
        boxed: the source may put each result into a list of its own, as APPS does.  Lists are removed only if all
            results have one: otherwise a list is the result.
    """
    if not isinstance(name, str) or not name.isidentifier():
        return Drop("broken tests", f"fn_name is {name!r}")
    try:
        tests = [_call(arguments, result) for arguments, result in zip(inputs, outputs, strict=True)]
    except (ValueError, RecursionError) as error:
        return Drop("broken tests", f"a call has arguments or a result that are not JSON: {error}")
    if not all(isinstance(args, list) for args, _ in tests):
        return Drop("broken tests", "the arguments of a call are not a list")
    if boxed and all(isinstance(result, list) and len(result) == 1 for _, result in tests):
        tests = [(args, result[0]) for args, result in tests]
    return {"fn_name": name, "tests": [{"args": args, "expected": result} for args, result in tests]}


def _call(arguments: Any, result: Any) -> tuple[Any, Any]:
    """Return arguments and result of a call as JSON values.  Raises ValueError for a text that is not JSON."""
    if not isinstance(arguments, str):
        return arguments, result
    args = [_strict(line) for line in arguments.split("\n") if line.strip()]
    return args, _strict(result) if isinstance(result, str) else result


def _strict(text: str) -> Any:
    def refuse(constant: str) -> Any:
        raise ValueError(f"{constant} is not JSON")

    return json.loads(text, parse_constant=refuse)


def _plain(value: Any) -> bool:
    return isinstance(value, str) or (isinstance(value, list) and all(isinstance(line, str) for line in value))


def drafted_program(row: Row, question: str, truth: dict[str, Any] | Drop, gold: str | None = None) -> Draft | Drop:
    """Return a draft that asks for a program or function as the truth needs it; a Drop if there is no problem."""
    if isinstance(truth, Drop):
        return truth
    if not question.strip():
        return Drop("no problem", "the text is empty")
    form = _named(truth["fn_name"]) if "fn_name" in truth else PROGRAM if "tests" in truth else FUNCTION
    return Draft(
        "code",
        question.strip(),
        truth=truth,
        form=form,
        gold=None if gold is None else fenced(gold),
        row_id=row_id(row),
    )


def eurus(row: Row) -> Draft | Drop:
    """Convert a row of Eurus-2-RL: messages in `prompt`, tests in `reward_model.ground_truth`; drop mathematics.

    The system message and the last lines of the user message are removed: they describe another answer format.
    """
    if (ability := row.text("ability")) != "code":
        return Drop("no code", f"ability is {ability!r}")
    prompt, reward = row.needed("prompt"), row.needed("reward_model")
    if not isinstance(prompt, list) or not all(isinstance(message, dict) for message in prompt):
        raise row.wrong("prompt", prompt, "a list of messages")
    contents = [message.get("content") for message in prompt if message.get("role") == "user"]
    if not contents or not isinstance(contents[-1], str):
        raise row.wrong("prompt", prompt, "a list of messages, of which the last is the user's")
    if not isinstance(reward, dict) or "ground_truth" not in reward:
        raise row.wrong("reward_model", reward, 'an object with "ground_truth"')
    truth = _tests(row, "reward_model.ground_truth", reward["ground_truth"])
    drafted = drafted_program(row, _EURUS_END.sub("", contents[-1]), truth)
    if isinstance(drafted, Draft) and isinstance(origin := row.first("data_source"), str):
        drafted.meta["origin"] = origin
    return drafted


CODEFORCES_COLUMNS = (
    *("contestId", "index", "programmingLanguage", "verdict", "code", "test_cases", "problem-description"),
    *("input-specification", "output-specification", "demo-input", "demo-output", "note"),
)


def first_accepted() -> Callable[[Row], bool]:
    """Return a selection of rows of Codeforces' submissions: the first accepted Python 3 program of each problem."""
    seen: set[tuple[Any, Any]] = set()

    def wanted(row: Row) -> bool:
        problem = row.needed("contestId"), row.needed("index")
        language = row.text("programmingLanguage")
        if problem in seen or row.text("verdict") != "OK" or not language.startswith(("Python 3", "PyPy 3")):
            return False
        seen.add(problem)
        return True

    return wanted


def codeforces(row: Row) -> Draft | Drop:
    """Convert a row of Codeforces-Python-Submissions: a problem with its tests, and an accepted program.

    Codeforces shortens long tests with dots: these are left out.
    """
    tests = row.needed("test_cases") or []
    if not isinstance(tests, list) or not all(isinstance(test, dict) for test in tests):
        raise row.wrong("test_cases", tests, 'a list of {"input", "output"}')
    whole = [test for test in tests if not any(str(test.get(key)).rstrip().endswith("...") for key in test)]
    if not whole:
        return Drop("no tests", "the source gives none" if not tests else "all are shortened")
    truth = stream_truth([test.get("input") for test in whole], [test.get("output") for test in whole])
    parts = [row.text("problem-description").strip()]
    for title, field in (("Input", "input-specification"), ("Output", "output-specification"), ("Note", "note")):
        parts += [f"{title}\n{text}"] if (text := row.text(field).strip()) else []
    for title, field in (("Example input", "demo-input"), ("Example output", "demo-output")):
        shown = row.needed(field) or []
        parts += [f"{title}\n{text.strip()}" for text in ([shown] if isinstance(shown, str) else shown)]
    if not parts[0]:
        return Drop("no problem", "the text is empty")
    drafted = drafted_program(row, "\n\n".join(parts), truth, row.text("code"))
    if isinstance(drafted, Draft):
        drafted.meta["row"] = f"{row.needed('contestId')}{row.needed('index')}"
    return drafted


def tested(row: Row) -> Draft | Drop:
    """Convert a row of `problem` and `tests`, or of APPS with `input_output` and, optionally, `human_solutions`.

    `tests`: a list as in prompt records: each test has `input` and `output`, or `args` and `expected` if the row has
    `fn_name`.
    """
    row.require(("problem", "question"), ("tests", "input_output"))
    question = row.text("problem", "question")
    if "tests" in row.values:
        tests = row.needed("tests")
        if not isinstance(tests, list):
            raise row.wrong("tests", tests, 'a list of {"input", "output"}')
        if not tests:
            return Drop("no tests", "the source gives none")
        name = row.first("fn_name")
        return drafted_program(row, question, {"tests": tests} if name is None else {"fn_name": name, "tests": tests})
    solutions = row.first("human_solutions") or []
    truth = _tests(row, "input_output", row.needed("input_output"))
    return drafted_program(row, question, truth, solutions[0] if solutions else None)


# EvalPlus' published check of HumanEval/32 unpacks the result, a number: it fails for each program.
_ROOT_CHECK, _ROOT_MENDED = "_poly(*candidate(*inp), inp)", "abs(_poly(*inp, candidate(*inp)))"


def humaneval(row: Row) -> Draft | Drop:
    """Convert a row of HumanEval or HumanEval+: a function to complete.

    The tests of HumanEval, and of HumanEval+ on the hub, are a function `check` with asserts.  EvalPlus' own files have
    arguments but no expected results, which are computed later by running the solution in the row.
    """
    prompt, name = row.text("prompt"), row.text("entry_point")
    row.needed("test", "plus_input")  # HumanEval or HumanEval+
    oracle, solution = "", prompt + row.text("canonical_solution")
    if "test" in row.values:
        check = row.text("test").replace(_ROOT_CHECK, _ROOT_MENDED)
        truth: dict[str, Any] = {"asserts": [f"{check}\ncheck({name})"], "time_limit_s": HUMANEVAL_TIME_S}
    else:
        calls = [args for field in ("base_input", "plus_input") for args in _calls(row, field)]
        if not calls:
            return Drop("no tests", "the source gives none")
        if name == "find_zero":  # HumanEval/32 has many right results: assert that the polynomial is zero there
            truth = {"asserts": [_assert_root(name, args[0], row.first("atol") or 1e-4) for args in calls]}
        elif tolerance := row.first("atol"):
            truth = {"asserts": [_assert_close(name, args, solution, tolerance) for args in calls]}
        else:
            truth = {"fn_name": name, "tests": [{"args": args} for args in calls]}
            oracle = solution
        truth["time_limit_s"] = HUMANEVAL_TIME_S
    question = f"Complete this Python function:\n\n{fenced(prompt.rstrip())}"
    drafted = drafted_program(row, question, truth, solution)
    return replace(drafted, oracle=oracle) if isinstance(drafted, Draft) else drafted


def _assert_close(name: str, args: list[Any], solution: str, tolerance: float) -> str:
    """Return an assert that compares a call with the source's solution, with EvalPlus' tolerances."""
    return (
        "import numpy as np\n"
        f"known = {{}}\nexec({solution!r}, known)\n"
        f"assert np.allclose({name}(*{args!r}), known[{name!r}](*{args!r}), rtol=1e-07, atol={tolerance!r})"
    )


def _calls(row: Row, field: str) -> list[list[Any]]:
    """Return the calls in column `field`, each a list of arguments.  Raises DataError."""
    calls = row.needed(field)
    if not isinstance(calls, list) or not all(isinstance(args, list) for args in calls):
        raise row.wrong(field, calls, "a list with a list of arguments for each call")
    return calls


def _assert_root(name: str, coefficients: list[float], tolerance: float) -> str:
    value = f"sum(c * x**i for i, c in enumerate({coefficients!r}))"
    return f"x = {name}({coefficients!r})\nassert abs({value}) <= {tolerance!r}"


def mbpp(row: Row) -> Draft | Drop:
    """Convert a row of MBPP: a sentence, and asserts; the prompt shows the first assert as an example."""
    asserts = row.needed("test_list")
    if not isinstance(asserts, list) or not all(isinstance(text, str) for text in asserts):
        raise row.wrong("test_list", asserts, "a list of assert statements")
    if not asserts:
        return Drop("no tests", "the source gives none")
    setup = row.text("test_setup_code") if "test_setup_code" in row.values else ""
    truth: dict[str, Any] = {"asserts": asserts} | ({"setup": setup} if setup else {})
    question = f"{row.text('text', 'prompt').strip()}\nIt must pass, for example:\n\n{fenced(asserts[0])}"
    return drafted_program(row, question, truth, row.text("code"))


# The answer instructions at the start of the data set's prompts.
_LEETCODE_START = re.compile(r"\APlease solve the programming task below using [^\n]*\n+")


def leetcode(row: Row) -> Draft | Drop:
    """Convert a row of rLLM's LeetCode problems: a class to complete, and a function `check` with asserts."""
    question = _LEETCODE_START.sub("", row.text("problem"))
    return drafted_program(row, question, {"asserts": [row.text("test")]}, row.first("solution"))
