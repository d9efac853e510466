"""Prompt records: one JSON object a line (or a row of a Parquet file), checked when read.

`{"id", "task", "prompt", "truth", "source", "meta"}`; `source` and `meta` may be absent.  The form of `truth` is the
task's (see `TRUTHS`).  For the tasks of other plugins it must be an object, and their plugin checks the rest.
"""

import functools
import json
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import Annotated, Any, Literal, NotRequired, get_type_hints

from pydantic import ConfigDict, Discriminator, Field, Tag, TypeAdapter, ValidationError
from pydantic_core import core_schema
from typing_extensions import TypedDict  # pydantic cannot read Python 3.11's own

from nemo_prorl.errors import DataError


class Expected:
    """What a value must be, in the words of an error."""

    def __init__(self, text: str) -> None:
        self.text = text

    def __get_pydantic_core_schema__(self, source: Any, handler: Any) -> core_schema.CoreSchema:
        return core_schema.custom_error_schema(handler(source), "unexpected", custom_error_message=self.text)


Text = Annotated[str, Field(pattern=r"\S"), Expected("a string, not empty")]
Texts = Annotated[list[Annotated[str, Field(pattern=r"\S")]], Field(min_length=1)]
Lines = Annotated[str | list[str], Expected("a string, or a list of lines")]
Object = Annotated[dict[str, Any], Expected("an object")]
Role = Literal["system", "user", "assistant"]


class Message(TypedDict):
    """A message of a prompt."""

    role: Annotated[Role, Expected("one of system, user, assistant")]
    content: Annotated[str, Expected("a string")]


Messages = Annotated[list[Message], Field(min_length=1)]


_PROMPT = 'text, or a list of messages {"role": "user", "content": "..."}'


class PromptRecord(TypedDict):
    """One line of a data file: a prompt, its task, and what a response is judged by."""

    id: Text
    task: Text
    prompt: Annotated[
        Annotated[str, Field(pattern=r"\S"), Expected(_PROMPT), Tag("text")] | Annotated[Messages, Tag("messages")],
        Discriminator(lambda prompt: "messages" if isinstance(prompt, list) else "text"),
        Field(description=_PROMPT),
    ]
    truth: Annotated[dict[str, Any], Expected("an object, what the task is judged by")]
    source: NotRequired[Annotated[str, Expected("a string")]]
    meta: NotRequired[Object]


class _AnswerLimits(TypedDict, total=False):
    tolerance: Annotated[float, Field(ge=0), Expected("a relative error of at least 0")] | None
    """relative"""
    unit: Annotated[str, Expected("a string")] | None
    options: Annotated[list[str], Field(min_length=2), Expected("a list of at least 2 options, each a string")] | None


class AnswerTruth(_AnswerLimits):
    """The right answer, or a list of which any is accepted."""

    answer: Annotated[Text | Texts, Expected("a string, or a list of strings, not empty")]
    all_of: NotRequired[None]


class AllOfTruth(_AnswerLimits):
    """Answers that a response must all give."""

    all_of: Annotated[Texts, Expected("a list of answers, each a string")]
    answer: NotRequired[None]


class _CodeLimits(TypedDict, total=False):
    time_limit_s: Annotated[float, Field(gt=0, le=60), Expected("seconds, above 0, at most 60")] | None
    """wall time of all tests together; 5 if absent"""
    setup: Annotated[str, Expected("a string of Python code")] | None


class StreamTest(TypedDict):
    """Text or lines on standard input, and the output that is right."""

    input: Lines
    output: Lines


class CallTest(TypedDict):
    """The arguments of a call, and the value that it must return."""

    args: Annotated[list[Any], Expected("the list of arguments")]
    expected: Annotated[Any, Field(description="the value that the function must return")]


class StreamTruth(_CodeLimits):
    """The program reads standard input."""

    tests: Annotated[list[StreamTest], Field(min_length=1, description="a list of tests (or give 'asserts')")]
    fn_name: NotRequired[None]
    asserts: NotRequired[None]


class CallTruth(_CodeLimits):
    """A function is called."""

    tests: Annotated[list[CallTest], Field(min_length=1, description="a list of tests (or give 'asserts')")]
    fn_name: Annotated[Text, Expected("the name of a function")]
    asserts: NotRequired[None]


class AssertTruth(_CodeLimits):
    """Statements run beside the answer: weaker than tests."""

    asserts: Annotated[Texts, Expected("a list of assert statements")]
    tests: NotRequired[None]
    fn_name: NotRequired[str | None]


_AsMade = Annotated[Any, Field(description="as reasoning-gym made it")]


class PuzzleEntry(TypedDict):
    """reasoning-gym's own entry."""

    question: _AsMade
    answer: _AsMade
    metadata: Annotated[dict[str, Any], Expected("an object, as reasoning-gym made it")]


class PuzzleTruth(TypedDict):
    """An entry of a reasoning-gym data set."""

    dataset: Annotated[Text, Expected("the name of a reasoning-gym data set")]
    entry: Annotated[PuzzleEntry, Field(description="reasoning-gym's entry, an object")]


class InstructionTruth(TypedDict):
    """IFEval's own fields, of equal length."""

    instruction_id_list: Annotated[Texts, Expected("a list of instruction names")]
    kwargs: Annotated[list[Object | None], Field(description="a list of objects or null, one per instruction")]


# The forms of a task's truth, by the field that only this form has; "" where none of these fields is there.
_ANSWERS = {"all_of": AllOfTruth, "": AnswerTruth}
TRUTHS: dict[str, dict[str, Any]] = {
    "math": _ANSWERS,
    "stem": _ANSWERS,
    "code": {"asserts": AssertTruth, "fn_name": CallTruth, "": StreamTruth},
    "puzzles": {"": PuzzleTruth},
    "instructions": {"": InstructionTruth},
}
_EITHER = (("answer", "all_of"), ("tests", "asserts"))
_STRICT = ConfigDict(strict=True)  # no text is taken for a number


@functools.cache
def _adapter(kind: Any) -> TypeAdapter[Any]:
    return TypeAdapter(list[kind], config=_STRICT)  # of a list: a class itself takes no configuration


def _expected(kind: Any, field: int | str) -> str:
    """Return what a field of this kind, or of a kind within it, must be."""
    for inner in (kind, Message, StreamTest if kind is StreamTruth else CallTest, PuzzleEntry):
        for mark in getattr(get_type_hints(inner, include_extras=True).get(str(field)), "__metadata__", ()):
            if text := mark.text if isinstance(mark, Expected) else getattr(mark, "description", None):
                return str(text)
    return "given"


def _check(value: Any, kind: Any, where: str, field: str) -> None:
    """Raise DataError for the first field of `value` that is not of the kind; `field` begins its name."""
    try:
        _adapter(kind).validate_python([value])
    except ValidationError as error:
        fault = error.errors(include_url=False)[0]
    else:
        return
    name, found = field, value
    for part in fault["loc"][1:]:
        if isinstance(found, list) and isinstance(part, int):
            name, found = f"{name}[{part}]", found[part]
        elif isinstance(found, dict) and (part in found or fault["type"] == "missing"):
            name, found = f"{name}.{part}".lstrip("."), found.get(part)
    if fault["type"] == "missing":
        raise DataError(f"{where}: field {name!r} is missing; it must be {_expected(kind, fault['loc'][-1])}")
    shown = json.dumps(found, default=repr)
    shown = shown if len(shown) <= 80 else shown[:77] + "..."
    message = fault["msg"]  # pydantic's own where the type has no `Expected`
    right = message.replace("Input should be", "it must be") if " should " in message else f"it must be {message}"
    raise DataError(f"{where}: field {name!r} is {shown}; {right}")


def _check_truth(task: str, truth: dict[str, Any], where: str) -> None:
    for one, other in _EITHER:
        if one in truth and other in truth:
            raise DataError(f"{where}: field 'truth' has both {one!r} and {other!r}; it must have one of them")
    forms = TRUTHS[task]
    _check(truth, next(kind for field, kind in forms.items() if field in truth or not field), where, "truth")
    if task == "instructions" and len(truth["kwargs"]) != len(truth["instruction_id_list"]):
        number, shown = len(truth["instruction_id_list"]), json.dumps(truth["kwargs"])[:80]
        raise DataError(f"{where}: field 'truth.kwargs' is {shown}; it must be a list of {number}: one per instruction")


def validate_record(obj: Any, where: str, tasks: Collection[str] | None = None) -> dict[str, Any]:
    """Return the record, with `source` and `meta` filled in and without the fields of its truth that are null.

    Raise DataError: `where`, the field, and what is right.

    Args:
        tasks: those that can be judged; None accepts any.
    """
    if not isinstance(obj, dict):
        raise DataError(f"{where}: a record must be a JSON object, not {type(obj).__name__}")
    record = {"source": "", "meta": {}, **obj}
    _check(record, PromptRecord, where, "")
    task = record["task"]
    if tasks is not None and task not in tasks:
        raise DataError(f"{where}: field 'task' is {json.dumps(task)}; it must be one of: {', '.join(sorted(tasks))}")
    # Tables have null where a field is absent; plugins see no such field.
    record["truth"] = {name: value for name, value in record["truth"].items() if value is not None}
    if task in TRUTHS:
        _check_truth(task, record["truth"], where)
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
