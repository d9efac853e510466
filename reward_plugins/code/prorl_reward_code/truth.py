"""Validation of the truth of the `code` plugin, with errors that name the field."""

import ast
import builtins
from functools import lru_cache
from typing import Any

from nemo_prorl.rewards.interface import one_line

MAX_TIME_LIMIT_S = 60.0


def without_nulls(truth: dict[str, Any]) -> dict[str, Any]:
    """Return the fields that are not null.  Column formats such as Parquet fill absent fields with null."""
    return {name: value for name, value in truth.items() if value is not None}


def text_of(value: Any) -> str | None:
    """Return a test's input or output, a string or a list of lines, as a string; None for anything else."""
    if isinstance(value, list) and all(isinstance(line, str) for line in value):
        return "\n".join(value)
    return value if isinstance(value, str) else None


def names_called(truth: dict[str, Any]) -> set[str]:
    """Return the names that the tests call.  Code that defines one of them is the program, not a usage example."""
    if "fn_name" in truth:
        return {truth["fn_name"]}
    names: set[str] = set()
    return names.union(*map(_called, truth.get("asserts", ())))


def check(truth: dict[str, Any]) -> None:
    """Raise ValueError that names the first invalid field of a truth."""
    truth = without_nulls(truth)
    if ("tests" in truth) == ("asserts" in truth):
        raise ValueError("truth must have either 'tests' or 'asserts'")
    if "asserts" in truth:
        _check_asserts(truth["asserts"])
    elif "fn_name" in truth:
        name = truth["fn_name"]
        if not isinstance(name, str) or not name.isidentifier():
            raise ValueError(f"truth.fn_name is {_shown(name)}; it must be the name of a function")
        _check_tests(truth["tests"], ("args", "expected"), "a test of a function")
    else:
        _check_tests(truth["tests"], ("input", "output"), "a test by standard input")
    limit, setup = truth.get("time_limit_s", 1), truth.get("setup", "")
    if isinstance(limit, bool) or not isinstance(limit, (int, float)) or not 0 < limit <= MAX_TIME_LIMIT_S:
        allowed = f"a number above 0, at most {MAX_TIME_LIMIT_S:g}"
        raise ValueError(f"truth.time_limit_s is {_shown(limit)}; it must be {allowed}")
    if not isinstance(setup, str):
        raise ValueError(f"truth.setup is {_shown(setup)}; it must be a string, code that runs before the program")
    check_code(setup, "truth.setup")


def _shown(value: Any) -> str:
    return one_line(repr(value), 80)


def _check_asserts(asserts: Any) -> None:
    if not isinstance(asserts, list) or not asserts or not all(isinstance(item, str) for item in asserts):
        raise ValueError(f"truth.asserts is {_shown(asserts)}; it must be a list of statements, at least one")
    for index, statement in enumerate(asserts):
        check_code(statement, f"truth.asserts[{index}]")


def _check_tests(tests: Any, fields: tuple[str, str], style: str) -> None:
    if not isinstance(tests, list) or not tests:
        raise ValueError(f"truth.tests is {_shown(tests)}; it must be a list of at least one test")
    for index, test in enumerate(tests):
        _check_test(test, f"truth.tests[{index}]", fields, style)


def _check_test(test: Any, where: str, fields: tuple[str, str], style: str) -> None:
    if not isinstance(test, dict):
        raise ValueError(f"{where} is {_shown(test)}; it must be an object")
    if "args" in test and fields[0] != "args":
        raise ValueError(f"truth.fn_name is missing; {where} has 'args', so it must be the name of a function")
    for name in fields:
        if name not in test:
            raise ValueError(f"{where}.{name} is missing; {style} must have {fields[0]!r} and {fields[1]!r}")
    if fields[0] == "args":
        if not isinstance(test["args"], list):
            raise ValueError(f"{where}.args is {_shown(test['args'])}; it must be a list")
        return
    for name in fields:
        if text_of(test[name]) is None:
            raise ValueError(f"{where}.{name} is {_shown(test[name])}; it must be a string, or a list of lines")


def check_code(code: str, field: str) -> None:
    """Raise ValueError that names the field if its code is not valid Python."""
    try:
        _called(code)
    except ValueError as error:
        raise ValueError(f"{field} is not valid Python: {error}") from None


@lru_cache(maxsize=4096)
def _called(code: str) -> frozenset[str]:
    """Return the names that a piece of code uses but does not define.  Raises ValueError if it is not valid Python."""
    try:
        tree = ast.parse(code)
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        raise ValueError(f"{type(error).__name__}: {error}") from None
    used: set[str] = set()
    made = set(dir(builtins))
    for node in ast.walk(tree):
        if isinstance(node, ast.Name):
            (used if isinstance(node.ctx, ast.Load) else made).add(node.id)
        elif isinstance(node, ast.arg):
            made.add(node.arg)
        elif isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            made.add(node.name)
        elif isinstance(node, ast.alias):
            made.add((node.asname or node.name).partition(".")[0])
    return frozenset(used - made)
