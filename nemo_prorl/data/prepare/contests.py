"""Conversion of benchmarks of mathematics whose columns need more than `problem` and `answer`: AIME, OlympiadBench."""

import re

from nemo_prorl.data.prepare.answers import final_answer, last_box
from nemo_prorl.data.prepare.drafts import Draft, Drop
from nemo_prorl.data.prepare.rows import Row

_convert = final_answer("math")
_LEADING_ZEROS = re.compile(r"0+(?=\d)")
_DOLLARS = re.compile(r"\$([^$]*)\$")


def aime(row: Row) -> Draft | Drop:
    r"""Convert a row of an AIME: `problem`, and `answer` or a `solution` that boxes the answer.

    A whole number loses its leading zeros: the exam's answer sheet has three digits, as in 073.
    """
    answer = row.first("answer")
    if answer is None and isinstance(solution := row.first("solution"), str):
        answer = last_box(solution)
    if isinstance(answer, str) and answer.strip().isdecimal():
        answer = _LEADING_ZEROS.sub("", answer.strip(), count=1)
    return _convert(Row(row.file, row.line, {**row.values, "answer": answer}))


def olympiad(row: Row) -> Draft | Drop:
    r"""Convert a row of OlympiadBench with a final answer.

    `final_answer` is a list, usually of one text in dollar signs.  With `is_multiple_answer`, this text lists all
    solutions, as in `$2, -1$`, and a response must have all of them, in any order.  Otherwise, any element of the list
    is accepted.  `context` precedes the question.  A problem that needs an image is dropped.
    """
    row.require(("question",), ("final_answer",))
    if any(value for name, value in row.values.items() if name.startswith("image_")):
        return Drop("needs an image", "the model reads text only")
    value = row.needed("final_answer")
    answers = [value] if isinstance(value, str) else value
    if answers is not None and not (isinstance(answers, list) and all(isinstance(text, str) for text in answers)):
        raise row.wrong("final_answer", value, "a list of texts")
    plain = [text.strip() for text in answers or [] if text.strip()]
    if row.first("is_multiple_answer") is True:
        plain = [", ".join(_DOLLARS.sub(r"\1", text).strip() for text in plain)] if plain else []
    context, question = row.first("context"), row.text("question")
    text = f"{context.strip()}\n\n{question.strip()}" if isinstance(context, str) and context.strip() else question
    return _convert(Row(row.file, row.line, {**row.values, "problem": text, "answer": plain, "answer_type": None}))
