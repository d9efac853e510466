"""Prompt records: one JSON object a line (or a row of a Parquet file), checked when read.  Standard library only.

`{"id", "task", "prompt", "truth", "source", "meta"}`; `source` and `meta` may be absent.  The shape of `truth` is
the task's (see `TRUTH_CHECKS`); for tasks of other plugins it must be an object, and their plugin checks the rest.
"""

import json
from collections.abc import Callable, Collection, Iterator
from pathlib import Path
from typing import Any

from nemo_prorl.errors import DataError

_ROLES = ("system", "user", "assistant")


class _FieldFault(Exception):
    """What is wrong with which field."""


def _need(holds: bool, field: str, value: Any, right: str) -> None:
    if not holds:
        shown = json.dumps(value, default=repr)
        shown = shown if len(shown) <= 80 else shown[:77] + "..."
        raise _FieldFault(f"field {field!r} is {shown}; it must be {right}")


def _has(obj: dict[str, Any], key: str, field: str, right: str) -> Any:
    if key not in obj:
        raise _FieldFault(f"field {field!r} is missing; it must be {right}")
    return obj[key]


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def _text(value: Any) -> bool:
    return isinstance(value, str) and bool(value.strip())


def _texts(value: Any) -> bool:
    return isinstance(value, list) and bool(value) and all(map(_text, value))


def _check_answer(truth: dict[str, Any]) -> None:
    """math and stem: `answer` (text or list) or `all_of`, with `tolerance`, `unit`, `options` where given."""
    if "answer" in truth and "all_of" in truth:
        raise _FieldFault("field 'truth' has both 'answer' and 'all_of'; it must have one of them")
    if "all_of" in truth:
        _need(_texts(truth["all_of"]), "truth.all_of", truth["all_of"], "a list of answers, each a string")
    else:
        answer = _has(truth, "answer", "truth.answer", "the right answer as a string, or a list of accepted ones")
        _need(_text(answer) or _texts(answer), "truth.answer", answer, "a string, or a list of strings, not empty")
    if "tolerance" in truth:
        tolerance = truth["tolerance"]
        _need(_is_number(tolerance) and tolerance >= 0, "truth.tolerance", tolerance, "a relative error of at least 0")
    if "unit" in truth:
        _need(isinstance(truth["unit"], str), "truth.unit", truth["unit"], "a string")
    if "options" in truth:
        options = truth["options"]
        _need(isinstance(options, list) and len(options) > 1, "truth.options", options, "a list of at least 2 options")
        _need(all(isinstance(option, str) for option in options), "truth.options", options, "a list of strings")


def _check_code(truth: dict[str, Any]) -> None:
    """code: stdin tests, function tests (`fn_name`), or `asserts`; null fields, as of tables, are absent."""
    truth = {name: value for name, value in truth.items() if value is not None}
    if "tests" in truth and "asserts" in truth:
        raise _FieldFault("field 'truth' has both 'tests' and 'asserts'; it must have one of them")
    if "asserts" in truth:
        _need(_texts(truth["asserts"]), "truth.asserts", truth["asserts"], "a list of assert statements")
    else:
        tests = _has(truth, "tests", "truth.tests", "a list of tests (or give 'asserts')")
        _need(isinstance(tests, list) and bool(tests), "truth.tests", tests, "a list of at least one test")
        called = "fn_name" in truth
        if called:
            _need(_text(truth["fn_name"]), "truth.fn_name", truth["fn_name"], "the name of a function")
        for index, test in enumerate(tests):
            _check_test(test, f"truth.tests[{index}]", called)
    if "time_limit_s" in truth:
        limit = truth["time_limit_s"]
        _need(_is_number(limit) and 0 < limit <= 60, "truth.time_limit_s", limit, "seconds, above 0, at most 60")
    if "setup" in truth:
        _need(isinstance(truth["setup"], str), "truth.setup", truth["setup"], "a string of Python code")


def _check_test(test: Any, field: str, called: bool) -> None:
    right = '{"args": [...], "expected": ...}' if called else '{"input": "...", "output": "..."}'
    _need(isinstance(test, dict), field, test, right)
    if called:
        args = _has(test, "args", f"{field}.args", "the list of arguments")
        _need(isinstance(args, list), f"{field}.args", args, "the list of arguments")
        _has(test, "expected", f"{field}.expected", "the value that the function must return")
        return
    for key in ("input", "output"):
        value = _has(test, key, f"{field}.{key}", "a string")
        lines = isinstance(value, list) and all(isinstance(line, str) for line in value)
        _need(isinstance(value, str) or lines, f"{field}.{key}", value, "a string, or a list of lines")


def _check_puzzle(truth: dict[str, Any]) -> None:
    """puzzles: the name of a reasoning-gym data set and its own entry."""
    dataset = _has(truth, "dataset", "truth.dataset", "the name of a reasoning-gym data set")
    _need(_text(dataset), "truth.dataset", dataset, "the name of a reasoning-gym data set")
    entry = _has(truth, "entry", "truth.entry", "reasoning-gym's entry")
    _need(isinstance(entry, dict), "truth.entry", entry, "reasoning-gym's entry, an object")
    for key in ("question", "answer", "metadata"):
        _has(entry, key, f"truth.entry.{key}", "as reasoning-gym made it")
    _need(isinstance(entry["metadata"], dict), "truth.entry.metadata", entry["metadata"], "an object")


def _check_instructions(truth: dict[str, Any]) -> None:
    """instructions: IFEval's own two fields, of equal length."""
    ids = _has(truth, "instruction_id_list", "truth.instruction_id_list", "a list of instruction names")
    _need(_texts(ids), "truth.instruction_id_list", ids, "a list of instruction names")
    kwargs = _has(truth, "kwargs", "truth.kwargs", "a list of objects, one an instruction")
    right = f"a list of {len(ids)} objects, one an instruction"
    fits = isinstance(kwargs, list) and len(kwargs) == len(ids) and all(isinstance(one, dict) for one in kwargs)
    _need(fits, "truth.kwargs", kwargs, right)


TRUTH_CHECKS: dict[str, Callable[[dict[str, Any]], None]] = {
    "math": _check_answer,
    "stem": _check_answer,
    "code": _check_code,
    "puzzles": _check_puzzle,
    "instructions": _check_instructions,
}


def _check_prompt(prompt: Any) -> None:
    right = 'text, or a list of messages {"role": "user", "content": "..."}'
    _need(_text(prompt) or (isinstance(prompt, list) and bool(prompt)), "prompt", prompt, right)
    if isinstance(prompt, str):
        return
    for index, message in enumerate(prompt):
        field = f"prompt[{index}]"
        _need(isinstance(message, dict), field, message, 'a message {"role": "user", "content": "..."}')
        role = _has(message, "role", f"{field}.role", f"one of {', '.join(_ROLES)}")
        _need(role in _ROLES, f"{field}.role", role, f"one of {', '.join(_ROLES)}")
        content = _has(message, "content", f"{field}.content", "a string")
        _need(isinstance(content, str), f"{field}.content", content, "a string")


def validate_record(obj: Any, where: str, tasks: Collection[str] | None = None) -> dict[str, Any]:
    """The record, with `source` and `meta` filled in.  Raises DataError: `where`, the field, and what is right.

    `tasks`: those that can be judged; None accepts any.
    """
    try:
        if not isinstance(obj, dict):
            raise _FieldFault(f"a record must be a JSON object, not {type(obj).__name__}")
        record = {"source": "", "meta": {}, **obj}
        identity = _has(record, "id", "id", "a string, its own in the file")
        _need(_text(identity), "id", identity, "a string, not empty")
        task = _has(record, "task", "task", "the name of a task")
        known = ", ".join(sorted(tasks)) if tasks is not None else "the name of a task"
        _need(_text(task) and (tasks is None or task in tasks), "task", task, f"one of: {known}" if tasks else known)
        _has(record, "prompt", "prompt", "text or a list of messages")
        _check_prompt(record["prompt"])
        truth = _has(record, "truth", "truth", "an object, what the task is judged by")
        _need(isinstance(truth, dict), "truth", truth, "an object, what the task is judged by")
        _need(isinstance(record["source"], str), "source", record["source"], "a string")
        _need(isinstance(record["meta"], dict), "meta", record["meta"], "an object")
        if task in TRUTH_CHECKS:
            TRUTH_CHECKS[task](truth)
    except _FieldFault as fault:
        raise DataError(f"{where}: {fault}") from None
    return record


def _refuse_constant(name: str) -> Any:
    raise ValueError(f"{name} is not JSON")


def _parse(raw: bytes, where: str) -> Any:
    try:
        return json.loads(raw.decode("utf-8"), parse_constant=_refuse_constant)
    except UnicodeDecodeError as error:
        raise DataError(f"{where}: not UTF-8: {error}; the file must be JSON Lines in UTF-8") from None
    except (ValueError, RecursionError) as error:
        raise DataError(f"{where}: not JSON: {error}; each line must be one JSON object") from None


def _objects(path: str | Path) -> Iterator[tuple[str, int, Any]]:
    """(where, line or row, object) of each record in a file, which nobody has checked yet."""
    if Path(path).suffix == ".parquet":
        from nemo_prorl.data import parquet  # pyarrow is not for everybody who reads records

        for number, row in parquet.read_rows(path):
            yield f"{path}:{number}", number, parquet.record_of(row, f"{path}:{number}")
        return
    with open(path, "rb") as file:
        for number, raw in enumerate(file, 1):
            if raw.strip():
                yield f"{path}:{number}", number, _parse(raw, f"{path}:{number}")


def read_records(path: str | Path, tasks: Collection[str] | None = None) -> list[dict[str, Any]]:
    """All records of a JSON Lines file, in order; lines of white space are skipped.  `.parquet`: of its rows.

    Raises DataError that names file, line (or row) and field: unreadable or empty file, bad JSON, a bad field, an id
    used twice.
    """
    records: list[dict[str, Any]] = []
    line_of: dict[str, int] = {}
    try:
        for where, number, found in _objects(path):
            record = validate_record(found, where, tasks)
            first = line_of.setdefault(record["id"], number)
            if first != number:
                raise DataError(f"{where}: field 'id' is {record['id']!r}, as in line {first}; ids must differ")
            records.append(record)
    except OSError as error:
        raise DataError(f"{path}: cannot be read: {error.strerror or error}") from error
    if not records:
        raise DataError(f"{path}: holds no record; each line must be a prompt record, one JSON object")
    return records
