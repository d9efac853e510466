"""Conversion of programming problems: tests by standard input, by calls of a function, and by asserts."""

import json
import re
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

# The answer instructions at the end of Eurus-2-RL's prompts.
_EURUS_END = re.compile(r"\s*Write Python code to solve the problem\. Present the code in\s*```python.*?```.*\Z", re.S)


def _fenced(code: str) -> str:
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
    if name is None:
        tests = [{"input": one, "output": other} for one, other in zip(inputs, outputs, strict=True)]
        if not all(_plain(test[key]) for test in tests for key in test):
            return Drop("broken tests", "an input or output is not a text")
        return {"tests": tests}
    if not isinstance(name, str) or not name.isidentifier():
        return Drop("broken tests", f"fn_name is {name!r}")
    if not all(isinstance(args, list) for args in inputs):
        return Drop("broken tests", "the arguments of a call are not a list")
    results = [out[0] if isinstance(out, list) and len(out) == 1 else out for out in outputs]
    return {
        "fn_name": name,
        "tests": [{"args": args, "expected": out} for args, out in zip(inputs, results, strict=True)],
    }


def _plain(value: Any) -> bool:
    return isinstance(value, str) or (isinstance(value, list) and all(isinstance(line, str) for line in value))


def _draft(row: Row, question: str, truth: dict[str, Any] | Drop, gold: str | None = None) -> Draft | Drop:
    if isinstance(truth, Drop):
        return truth
    if not question.strip():
        return Drop("no problem", "the text is empty")
    form = _named(truth["fn_name"]) if "fn_name" in truth else PROGRAM if "tests" in truth else FUNCTION
    return Draft("code", question.strip(), truth, form, None if gold is None else _fenced(gold), row_id(row))


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
    drafted = _draft(row, _EURUS_END.sub("", contents[-1]), truth)
    if isinstance(drafted, Draft) and isinstance(origin := row.first("data_source"), str):
        drafted.meta["origin"] = origin
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
        return _draft(row, question, {"tests": tests} if name is None else {"fn_name": name, "tests": tests})
    solutions = row.first("human_solutions") or []
    truth = _tests(row, "input_output", row.needed("input_output"))
    return _draft(row, question, truth, solutions[0] if solutions else None)


def humaneval(row: Row) -> Draft | Drop:
    """Convert a row of HumanEval or HumanEval+: a function to complete.

    The tests of HumanEval are a function `check` with asserts.  The tests of HumanEval+ have arguments but no expected
    results, which are computed later by running the solution in the row.
    """
    prompt, name = row.text("prompt"), row.text("entry_point")
    row.needed("test", "plus_input")  # HumanEval or HumanEval+
    oracle = ""
    if "test" in row.values:
        truth: dict[str, Any] = {"asserts": [f"{row.text('test')}\ncheck({name})"]}
    else:
        calls = [args for field in ("base_input", "plus_input") for args in _calls(row, field)]
        if not calls:
            return Drop("no tests", "the source gives none")
        if name == "find_zero":  # HumanEval/32 has many right results: assert that the polynomial is zero there
            truth = {"asserts": [_assert_root(name, args[0], row.first("atol") or 1e-4) for args in calls]}
        else:
            truth = {"fn_name": name, "tests": [{"args": args} for args in calls]}
            oracle = prompt + row.text("canonical_solution")
    question = f"Complete this Python function:\n\n{_fenced(prompt.rstrip())}"
    drafted = _draft(row, question, truth, prompt + row.text("canonical_solution"))
    return replace(drafted, oracle=oracle) if isinstance(drafted, Draft) else drafted


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
    question = f"{row.text('text', 'prompt').strip()}\nIt must pass, for example:\n\n{_fenced(asserts[0])}"
    return _draft(row, question, truth, row.text("code"))


# The answer instructions at the start of the data set's prompts.
_LEETCODE_START = re.compile(r"\APlease solve the programming task below using [^\n]*\n+")


def leetcode(row: Row) -> Draft | Drop:
    """Convert a row of rLLM's LeetCode problems: a class to complete, and a function `check` with asserts."""
    question = _LEETCODE_START.sub("", row.text("problem"))
    return _draft(row, question, {"asserts": [row.text("test")]}, row.first("solution"))
