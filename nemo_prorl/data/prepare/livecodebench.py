"""Conversion of LiveCodeBench: tests packed into each row, by standard input or by calls of a function."""

import base64
import json
import pickletools
import zlib
from typing import Any

from nemo_prorl.data.prepare.drafts import Draft, Drop
from nemo_prorl.data.prepare.programs import call_truth, drafted_program, fenced, stream_truth
from nemo_prorl.data.prepare.rows import Row
from nemo_prorl.rewards.interface import one_line

# A release contains the files of all earlier releases.
RELEASES = {
    f"release_v{last}": tuple(f"test{number if number > 1 else ''}.jsonl" for number in range(1, last + 1))
    for last in range(1, 7)
}
COLUMNS = (
    *("question_title", "question_content", "platform", "question_id", "contest_id", "contest_date"),
    *("starter_code", "difficulty", "public_test_cases", "private_test_cases", "metadata"),
)
# The paper names neither release nor period.  Its authors evaluated with DeepCoder's file of LiveCodeBench: release_v5
# from August 2024 to January 2025, 279 problems.  Release_v6 has more of the period: of its 175 new problems, other
# reports count 131 from February 2025 on.
SINCE, UNTIL = "2024-08-01", "2025-01-31"

MAX_TESTS_BYTES = 2**30  # of a row's private tests, unpacked
_TEST_TIME_S, _MOST_TIME_S = 6.0, 60.0  # the benchmark's own limit for each test; the longest limit of a truth
# What a pickle of one text consists of.  No other opcode is read: most of them make objects or call functions.
_TEXTS = {"SHORT_BINUNICODE", "BINUNICODE", "BINUNICODE8"}
_HARMLESS = {"PROTO", "FRAME", "MEMOIZE", "PUT", "BINPUT", "LONG_BINPUT", "STOP"}


def livecodebench(row: Row) -> Draft | Drop:
    """Convert a row of LiveCodeBench's code generation (lite), with the public and the private tests."""
    question, starter = row.text("question_content"), row.text("starter_code")
    date = row.text("contest_date")
    tests = [*_listed(row, "public_test_cases", row.text("public_test_cases")), *_private(row)]
    if not tests:
        return Drop("no tests", "the source gives none")
    kinds = {test.get("testtype") for test in tests}
    inputs, outputs = [test.get("input") for test in tests], [test.get("output") for test in tests]
    if not all(isinstance(text, str) for text in (*inputs, *outputs)):
        return Drop("broken tests", "an input or output is not a text")
    if kinds == {"functional"}:
        truth = call_truth(_function(row), inputs, outputs, boxed=False)
    elif kinds == {"stdin"}:
        truth = stream_truth(inputs, outputs)
    else:
        return Drop("broken tests", f"testtype is {' and '.join(sorted(map(repr, kinds)))}")
    if isinstance(truth, Drop):
        return truth
    truth["time_limit_s"] = min(_MOST_TIME_S, _TEST_TIME_S * len(tests))
    if starter.strip():
        question = f"{question.rstrip()}\n\nComplete this code:\n\n{fenced(starter.rstrip())}"
    drafted = drafted_program(row, question, truth)
    if isinstance(drafted, Draft):
        drafted.meta.update({"row": row.text("question_id"), "contest_date": date[:10]})
        drafted.meta.update({name: row.text(name) for name in ("platform", "difficulty")})
    return drafted


def _function(row: Row) -> Any:
    """Return the name of the function to call; None if the row does not name it."""
    metadata = row.needed("metadata")
    try:
        known = json.loads(metadata) if isinstance(metadata, str) else metadata
    except ValueError:
        raise row.wrong("metadata", metadata, 'JSON: {"func_name": "..."}') from None
    return known.get("func_name") if isinstance(known, dict) else None


def _private(row: Row) -> list[dict[str, Any]]:
    text = row.text("private_test_cases")
    return _listed(row, "private_test_cases", text if text.lstrip()[:1] in ("", "[") else _unpacked(row, text))


def _listed(row: Row, field: str, text: str) -> list[dict[str, Any]]:
    try:
        tests = json.loads(text) if text.strip() else []
    except (ValueError, RecursionError):
        tests = None
    if not isinstance(tests, list) or not all(isinstance(test, dict) for test in tests):
        raise row.wrong(field, text[:80], 'a JSON list of {"input", "output", "testtype"}')
    return tests


def _unpacked(row: Row, packed: str) -> str:
    """Return the text in a base64 text of zlib data of a pickle, which is not executed.  Raises DataError."""
    try:
        unzip = zlib.decompressobj()
        pickled = unzip.decompress(base64.b64decode(packed, validate=True), MAX_TESTS_BYTES)
        if not unzip.eof:
            raise ValueError(f"incomplete, or more than {MAX_TESTS_BYTES} bytes")
        return pickled_text(pickled)
    except (ValueError, zlib.error) as error:
        right = "a JSON list, or base64 of zlib data of a pickle of one text"
        raise row.wrong("private_test_cases", f"{packed[:20]}... ({one_line(str(error), 120)})", right) from None


def pickled_text(pickled: bytes) -> str:
    """Return the text of a pickle that contains one text and nothing else.

    The opcodes are read, not executed.  Raises ValueError for any other opcode, such as those that name a class.
    """
    texts: list[str] = []
    for opcode, argument, _ in pickletools.genops(pickled):
        if opcode.name in _TEXTS:
            texts.append(str(argument))
        elif opcode.name not in _HARMLESS:
            raise ValueError(f"the pickle contains {opcode.name}")
    if len(texts) != 1:
        raise ValueError(f"the pickle contains {len(texts)} texts")
    return texts[0]
