"""Reads and checks prompt records: one JSON object per line, or one row of a Parquet file.

A record is `{"id", "task", "prompt", "truth", "source", "meta"}`; `source` and `meta` may be absent.  The form of
`truth` depends on the task (see `TRUTHS`).  For the tasks of other plugins it must be an object; the plugin checks it.
"""

import functools
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any, Literal, NotRequired, get_type_hints

from pydantic import ConfigDict, Discriminator, Field, Tag, TypeAdapter, ValidationError
from pydantic_core import core_schema
from typing_extensions import TypedDict  # pydantic does not support Python 3.11's typing.TypedDict

from nemo_prorl.data import parquet
from nemo_prorl.errors import DataError
from nemo_prorl.files import parsed, shortened


class Expected:
    """An annotation that names the expected value in error messages."""

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


def as_messages(text: str) -> list[Message]:
    """Return a prompt as the message list that the chat template renders."""
    return [{"role": "user", "content": text}]


_PROMPT = 'text, or a list of messages {"role": "user", "content": "..."}'


class PromptRecord(TypedDict):
    """A prompt with its task and the truth that responses are judged by: one line of a data file."""

    id: Text
    task: Text
    prompt: Annotated[
        Annotated[str, Field(pattern=r"\S"), Expected(_PROMPT), Tag("text")] | Annotated[Messages, Tag("messages")],
        Discriminator(lambda prompt: "messages" if isinstance(prompt, list) else "text"),
        Field(description=_PROMPT),
    ]
    truth: Annotated[dict[str, Any], Expected("an object: the truth that responses are judged by")]
    source: NotRequired[Annotated[str, Expected("a string")]]
    meta: NotRequired[Object]


class _AnswerLimits(TypedDict, total=False):
    tolerance: Annotated[float, Field(ge=0), Expected("a relative error of at least 0")] | None
    """relative error that is accepted"""
    unit: Annotated[str, Expected("a string")] | None
    options: Annotated[list[str], Field(min_length=2), Expected("a list of at least 2 options, each a string")] | None


class AnswerTruth(_AnswerLimits):
    """The correct answer, or a list of answers of which any one is accepted."""

    answer: Annotated[Text | Texts, Expected("a string, or a list of strings, not empty")]
    all_of: NotRequired[None]


class AllOfTruth(_AnswerLimits):
    """A list of answers; a response must give all of them."""

    all_of: Annotated[Texts, Expected("a list of answers, each a string")]
    answer: NotRequired[None]


class _CodeLimits(TypedDict, total=False):
    time_limit_s: Annotated[float, Field(gt=0, le=60), Expected("seconds, above 0, at most 60")] | None
    """wall time of all tests together; 5 if absent"""
    setup: Annotated[str, Expected("a string of Python code")] | None


class StreamTest(TypedDict):
    """The text or lines on standard input, and the correct output."""

    input: Lines
    output: Lines


class CallTest(TypedDict):
    """The arguments of a call, and the value that it must return."""

    args: Annotated[list[Any], Expected("the list of arguments")]
    expected: Annotated[Any, Field(description="the value that the function must return")]


class StreamTruth(_CodeLimits):
    """Tests of a program that reads standard input."""

    tests: Annotated[list[StreamTest], Field(min_length=1, description="a list of tests (or give 'asserts')")]
    fn_name: NotRequired[None]
    asserts: NotRequired[None]


class CallTruth(_CodeLimits):
    """Tests that call a function."""

    tests: Annotated[list[CallTest], Field(min_length=1, description="a list of tests (or give 'asserts')")]
    fn_name: Annotated[Text, Expected("the name of a function")]
    asserts: NotRequired[None]


class AssertTruth(_CodeLimits):
    """Assert statements.  Weaker than tests: they run in the process of the answer, which can tamper with them."""

    asserts: Annotated[Texts, Expected("a list of assert statements")]
    tests: NotRequired[None]
    fn_name: NotRequired[str | None]


_AsMade = Annotated[Any, Field(description="as generated by reasoning-gym")]


class PuzzleEntry(TypedDict):
    """An entry as reasoning-gym generates it."""

    question: _AsMade
    answer: _AsMade
    metadata: Annotated[dict[str, Any], Expected("an object, as generated by reasoning-gym")]


class PuzzleTruth(TypedDict):
    """An entry of a reasoning-gym data set."""

    dataset: Annotated[Text, Expected("the name of a reasoning-gym data set")]
    entry: Annotated[PuzzleEntry, Field(description="reasoning-gym's entry, an object")]


class InstructionTruth(TypedDict):
    """The fields of IFEval: two lists of equal length."""

    instruction_id_list: Annotated[Texts, Expected("a list of instruction names")]
    kwargs: Annotated[list[Object | None], Field(description="a list of objects or null, one per instruction")]


# The forms of each task's truth, by the field that only this form has; "" if the truth has none of these fields.
_ANSWERS = {"all_of": AllOfTruth, "": AnswerTruth}
TRUTHS: dict[str, dict[str, Any]] = {
    "math": _ANSWERS,
    "stem": _ANSWERS,
    "code": {"asserts": AssertTruth, "fn_name": CallTruth, "": StreamTruth},
    "puzzles": {"": PuzzleTruth},
    "instructions": {"": InstructionTruth},
}
_EITHER = (("answer", "all_of"), ("tests", "asserts"))
_STRICT = ConfigDict(strict=True)  # text is not converted to a number


@functools.cache
def _adapter(kind: Any) -> TypeAdapter[Any]:
    return TypeAdapter(list[kind], config=_STRICT)  # a list, because pydantic refuses `config` for a TypedDict


def _expected(kind: Any, field: int | str) -> str:
    """Return as text the expected value of a field; the field belongs to `kind` or to a type nested in `kind`."""
    for inner in (kind, Message, StreamTest if kind is StreamTruth else CallTest, PuzzleEntry):
        for mark in getattr(get_type_hints(inner, include_extras=True).get(str(field)), "__metadata__", ()):
            if text := mark.text if isinstance(mark, Expected) else getattr(mark, "description", None):
                return str(text)
    return "given"


def _check(value: Any, kind: Any, where: str, field: str) -> None:
    """Raise DataError for the first part of `value` that does not fit the type `kind`.

    Args:
        where: file and line of the record, for the error.
        field: path of `value` in the record, such as `truth`; empty for the whole record.  The error names the wrong
            part by its path in the record, such as `truth.tests[0].input`.
    """
    try:
        _adapter(kind).validate_python([value])
    except ValidationError as error:
        fault, *others = error.errors()
    else:
        return
    name, wrong = field, value
    for part in fault["loc"][1:]:
        if isinstance(wrong, list) and isinstance(part, int):
            name, wrong = f"{name}[{part}]", wrong[part]
        elif isinstance(wrong, dict) and (part in wrong or fault["type"] == "missing"):
            name, wrong = f"{name}.{part}".lstrip("."), wrong.get(part)
    if fault["type"] == "missing":
        same = [other for other in others if (other["type"], other["loc"][:-1]) == ("missing", fault["loc"][:-1])]
        also = f"; also missing: {', '.join(repr(other['loc'][-1]) for other in same)}" if same else ""
        raise DataError(f"{where}: field {name!r} is missing; it must be {_expected(kind, fault['loc'][-1])}{also}")
    shown = shortened(json.dumps(wrong, default=repr))
    message = fault["msg"]  # pydantic's message if the type does not have an `Expected`
    right = message.replace("Input should be", "it must be") if " should " in message else f"it must be {message}"
    if name == "truth" and isinstance(wrong, str | int | float):
        right += f". For an answer write {json.dumps({'answer': str(wrong)[:80]})}"
    raise DataError(f"{where}: field {name!r} is {shown}; {right}")


def _check_truth(task: str, truth: dict[str, Any], where: str) -> None:
    for first, second in _EITHER:
        if first in truth and second in truth:
            raise DataError(f"{where}: field 'truth' has both {first!r} and {second!r}; it must have only one of them")
    forms = TRUTHS[task]
    _check(truth, next(kind for field, kind in forms.items() if field in truth or not field), where, "truth")
    if task == "instructions" and len(truth["kwargs"]) != len(truth["instruction_id_list"]):
        number, shown = len(truth["instruction_id_list"]), json.dumps(truth["kwargs"])[:80]
        raise DataError(
            f"{where}: field 'truth.kwargs' is {shown}; it must be a list of {number} objects or nulls: one per"
            " instruction in truth.instruction_id_list"
        )


def validate_record(obj: Any, where: str) -> dict[str, Any]:
    """Return the record with defaults for `source` and `meta`, and without the null fields of its truth.

    Raises DataError naming `where`, the field and the expected value.
    """
    if not isinstance(obj, dict):
        raise DataError(f"{where}: a record must be a JSON object, not {type(obj).__name__}")
    record = {"source": "", "meta": {}, **obj}
    _check(record, PromptRecord, where, "")
    # A Parquet table stores null for an absent field; plugins expect the field to be absent.
    record["truth"] = {name: value for name, value in record["truth"].items() if value is not None}
    if (task := record["task"]) in TRUTHS:
        _check_truth(task, record["truth"], where)
    return record


def of_table(path: str | Path, options: str = "", made: str = "train.jsonl") -> str:
    """Return how to make prompt records of a CSV file; `made`: the file that `prorl data prepare` writes."""
    return (
        "prompt records are .jsonl or .parquet files. Fix: make them with prorl data prepare math --from"
        f" {path}{options} --out DIR (with --task NAME if your function judges them), and take DIR/{made}"
    )


def _objects(path: str | Path) -> Iterator[tuple[str, int, Any]]:
    """Yield (where, line or row, object) of each record in a file, unchecked."""
    if parquet.is_parquet(path):
        for number, row in parquet.read_rows(path):
            yield f"{path}:{number}", number, parquet.record_of(row, f"{path}:{number}")
        return
    if Path(path).suffix in (".csv", ".tsv"):
        raise DataError(f"{path}: {of_table(path)}")
    with open(path, "rb") as file:
        for number, raw in enumerate(file, 1):
            if raw.strip():
                yield f"{path}:{number}", number, parsed(raw, f"{path}:{number}")


def line_of(path: str | Path, identity: str) -> int:
    """Return the line or row of the record with an id in a file that `read_records` accepts."""
    return next(number for _, number, record in _objects(path) if record["id"] == identity)


def read_records(path: str | Path) -> list[dict[str, Any]]:
    """Return the records of a JSON Lines or Parquet (`.parquet`) file, in order; blank lines are skipped.

    Raises DataError, naming file, line or row, and field, for an unreadable or empty file, bad JSON, a bad field or a
    repeated id.
    """
    records: list[dict[str, Any]] = []
    lines: dict[str, int] = {}
    try:
        for where, number, obj in _objects(path):
            record = validate_record(obj, where)
            first = lines.setdefault(record["id"], number)
            if first != number:
                raise DataError(f"{where}: field 'id' is {record['id']!r}, as in line {first}; ids must differ")
            records.append(record)
    except OSError as error:
        raise DataError(f"{path}: cannot be read: {error.strerror or error}") from error
    if not records:
        raise DataError(f"{path}: the file has no records; each line must be a prompt record, one JSON object")
    return records
