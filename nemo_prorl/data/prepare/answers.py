"""Conversion of problems with a final answer: mathematics, science, multiple choice, and SCP-116K's solution pairs."""

import math
import random
import re
import string
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from nemo_prorl.data.prepare.drafts import Draft, Drop
from nemo_prorl.data.prepare.rows import Row

BOXED = "Let's think step by step and output the final answer within \\boxed{}."  # paper section 2.1
CHOICE = "Think step by step, and put the letter of the right option in \\boxed{}."

_PROBLEM = ("problem", "question", "prompt", "Question")
_ANSWER = ("answer", "expected_answer", "final_answer")
_ID = ("id", "task_id", "key", "uuid", "hash_id", "unique_id", "Record ID", "record_id")
_PLACEHOLDERS = {"n/a", "na", "nan", "null", "tbd", "todo", "?", "unknown", "no answer", "not available"}
_BETWEEN_WORDS = r"[\s,.;:!?'\"\u2018-\u201d\u2013\u2014-]"
_PROSE = re.compile(rf"[^\W\d_]+(?:{_BETWEEN_WORDS}+[^\W\d_]+)*{_BETWEEN_WORDS}*")  # no digit and no sign of a formula
_WORD = re.compile(r"[^\W\d_]{2,}")
# Products, points, units, Roman numerals and chemical formulas: xy, ABCD, km, αβ, iii, NaCl.
_SYMBOLS = re.compile(
    r"[A-Za-z]{2}|[A-Z]{3,4}|(?:(?![AEIOUYaeiouy])[A-Za-z])+|[\u0370-\u03ff]+|[ivxlc]+|[A-Z][a-z]+[A-Z][A-Za-z]*"
)
_NUMBER_AND_LETTER = re.compile(r"[+-]?[\d.,]*\d(?:\s|~|\\[,;: ])*[msghlLJNWVKCFA](?:[²³23]|\^\{?[23]\}?)?")
_BEFORE_LETTER = re.compile(r".*(?<![\w/^_}])\d+/\d+[A-Za-zπ(].*")
_COMMA = re.compile(
    r"[^\w.,;()\[\]\\]*\d+(?:\.\d{3})*,\d+[^\d,;()\[\]]*"
    r"|[\[(]?[^()\[\]]*(?:\d,\d[^()\[\]]*;|;[^()\[\]]*\d,\d)[^()\[\]]*[\])]?|\d{1,3}(?:\.\d{3}){2,}"
)
_THOUSANDS = re.compile(r"\D*[1-9]\d{0,2}(?:,\d{3})+(?:\.\d*)?\D*")
_MOST = 200  # characters of an answer that is looked at; the forms are short
_REMARK = re.compile(
    r"(?:ca\.?|circa|approx\.?|approximately|about|around|roughly|~|≈)\s*\$?\d.*|.*\d\s*\?"
    r"|.*\d\s+\((?:or\b.*|[a-z]{3}[a-z .]*)\)|(?:the )?ans(?:wer)?(?: is|\s*[:=]).*",
    re.IGNORECASE,
)
_KNOWN = (
    "yes no true false none neither both always never sometimes odd even prime composite positive negative"
    " and or undefined infinity infinite inf nan increasing decreasing convergent divergent converges diverges"
    " alpha beta gamma delta epsilon zeta eta theta iota kappa lambda omicron rho sigma tau upsilon omega"
    " sin cos tan cot sec csc sinh cosh tanh arcsin arccos arctan asin acos atan exp log max min sup mod det dim ker"
    " arg meter meters metre metres kilometer kilometers centimeter centimeters mile miles foot feet inch inches yard"
    " yards gram grams kilogram kilograms pound pounds ounce ounces ton tons liter liters litre litres second seconds"
    " minute minutes hour hours day days week weeks month months year years degree degrees radian radians percent"
    " dollar dollars cent cents euro euros newton newtons joule joules watt watts volt volts ampere amperes kelvin"
)
_KNOWN_WORDS = frozenset(_KNOWN.split())
_OPTIONS = string.ascii_uppercase


def row_id(row: Row) -> str:
    value = row.first(*_ID)
    return "" if value is None else str(value)


def _answer_text(row: Row, value: Any) -> str:
    """Return a number, truth value or string as people write it; `142.0` becomes 142."""
    if isinstance(value, bool):
        return str(value)
    if isinstance(value, float) and not math.isfinite(value):
        raise row.wrong("answer", value, "a finite number, or a string")
    if isinstance(value, (int, float)):
        return str(int(value)) if float(value).is_integer() and abs(value) < 1e15 else repr(value)
    if not isinstance(value, str):
        raise row.wrong("answer", value, "a string or a number")
    return value.strip()


def _braces_balance(text: str) -> bool:
    r"""Return whether the braces of `text` balance, as `\boxed{}` requires."""
    depth = 0
    for brace in re.findall(r"(?<!\\)[{}]", text):
        depth += 1 if brace == "{" else -1
        if depth < 0:
            return False
    return depth == 0


def is_worded(truth: dict[str, Any]) -> bool:
    """Return whether an answer consists of ordinary words, which a comparison of mathematical expressions cannot judge.

    An answer with a digit, a sign of a formula or a TeX command does not count, nor does one whose words are all known:
    units, functions, names of variables, and words with one usual spelling such as `yes` and `even`.  If several
    answers are accepted, all of them must consist of words.
    """
    answer = truth.get("answer")
    accepted = answer if isinstance(answer, list) else [answer]
    return all(isinstance(text, str) and _is_prose(text) for text in accepted)


def _is_prose(text: str) -> bool:
    if any(map(str.isnumeric, text)):  # `¾ cup`
        return False
    return _PROSE.fullmatch(text) is not None and any(map(_is_ordinary, _WORD.findall(text)))


def _is_ordinary(word: str) -> bool:
    """Return whether a word of letters is neither a symbol (`xy`, `ABCD`) nor a known word (`even`)."""
    if word.lower() in _KNOWN_WORDS or _SYMBOLS.fullmatch(word):
        return False
    return len(word) > 3 or list(word) != sorted(set(word))  # `abc` is a product: its letters follow the alphabet


def has_letter_for_unit(truth: dict[str, Any]) -> bool:
    """Return whether an answer without `unit` ends with a letter that may be one, as `3 m`: the plugin multiplies."""
    return "unit" not in truth and _has_form(truth, _NUMBER_AND_LETTER)


def has_decimal_comma(truth: dict[str, Any]) -> bool:
    """Return whether a comma may be a decimal point, as in `3,5 €`: the plugin reads a list.  `3,500` is a number."""
    return _has_form(truth, _COMMA) and not _has_form(truth, _THOUSANDS)


def has_remark(truth: dict[str, Any]) -> bool:
    """Return whether an answer is a number with a remark, as in `ca. 60` or `12 (rounded)`."""
    return _has_form(truth, _REMARK)


def has_fraction_before_letter(truth: dict[str, Any]) -> bool:
    """Return whether an answer has a fraction right before a letter, as `1/2x`: the plugin reads 1/(2x)."""
    return _has_form(truth, _BEFORE_LETTER)


# Answers that the plugin may read otherwise than they are meant, and what `prorl data prepare` says of them.
DOUBTS: dict[Callable[[dict[str, Any]], bool], str] = {
    is_worded: "are ordinary words, such as {}: a response must have the same words; a number is wrong.  Not counted:"
    " answers with a digit, a formula or \\text{{}}, and words such as yes or even.  Fix: correct them, or leave these"
    " problems out with --drop-worded",
    has_letter_for_unit: "are a number and a letter, such as {}.  The letter counts as a factor: a response without it"
    " is wrong.  Fix, if it is a unit: write a word (3 meters) or 3 \\text{{ m}}, or give units in a column"
    " of their own (--field unit=COLUMN)",
    has_decimal_comma: "may have a decimal comma or points between thousands, such as {}: a comma makes a list in any"
    " order, and a point is decimal.  Fix, if so: write 3.5 and 1234567",
    has_fraction_before_letter: "have a fraction right before a letter or bracket, such as {}: 1/2x counts as 1/(2x)."
    "  Fix, if it is not: write (1/2)x or \\frac{{1}}{{2}}x",
    has_remark: "carry a remark, such as {}: a response without it is wrong.  Fix: leave only the answer",
}


def _has_form(truth: dict[str, Any], form: re.Pattern[str]) -> bool:
    answer = truth.get("answer")
    accepted = answer if isinstance(answer, list) else [answer]
    texts = [text.strip(" $.") for text in accepted if isinstance(text, str)]
    return bool(texts) and all(len(text) <= _MOST and form.fullmatch(text) for text in texts)


def unusable(answer: str) -> Drop | None:
    """Return why no response can be compared with an answer; None for a usable answer."""
    if answer.lower() in _PLACEHOLDERS:
        return Drop("no answer", f"{answer!r} stands in its place")
    if not _braces_balance(answer):
        return Drop("broken answer", f"its braces do not balance: {answer[:80]}")
    return None


def _final(row: Row, task: str, truth: dict[str, Any], answer: str, question: str) -> Draft | Drop:
    if not question.strip():
        return Drop("no problem", "the text is empty")
    if not answer:
        return Drop("no answer", "the source gives none")
    if (fault := unusable(answer)) is not None:
        return fault
    return Draft(task, question.strip(), truth=truth, form=BOXED, gold=f"\\boxed{{{answer}}}", row_id=row_id(row))


def _tolerance(row: Row, answer: str) -> float | None:
    """Return OlympiadBench's `error` divided by the answer; None if either is not a number or the answer is 0."""
    try:
        error, value = float(row.first("error")), float(answer.strip("$ "))
    except (TypeError, ValueError):
        return None
    return abs(error / value) if value else None


def final_answer(task: str) -> Callable[[Row], Draft | Drop]:
    """Return the converter of rows with `problem` and `answer` (a text, a number or a list), `unit` and `error`.

    A list is a single answer (`[4, 2]`) if `answer_type` begins with "list"; otherwise any of its elements is accepted.
    """

    def convert(row: Row) -> Draft | Drop:
        row.require(_PROBLEM, _ANSWER)
        value = row.needed(*_ANSWER)
        if isinstance(value, list) and not str(row.first("answer_type") or "").startswith("list"):
            accepted = [text for item in value if (text := _answer_text(row, item))]
        elif isinstance(value, list):
            accepted = [f"[{', '.join(_answer_text(row, item) for item in value)}]"]
        else:
            accepted = [] if value is None else [_answer_text(row, value)]
        answer = accepted[0] if accepted else ""
        truth: dict[str, Any] = {"answer": accepted if len(accepted) > 1 else answer}
        if (tolerance := _tolerance(row, answer)) is not None:
            truth["tolerance"] = tolerance
        if isinstance(unit := row.first("unit"), str) and unit.strip():
            truth["unit"] = unit.strip()
        return _final(row, task, truth, answer, row.text(*_PROBLEM))

    return convert


def choice(row: Row) -> Draft | Drop:
    """Convert a row of `question`, `options` (texts, or objects letter -> text) and `answer` (a letter or an index)."""
    row.require(("question", "problem"), ("options", "choices"), ("answer", "expected_answer"))
    options, answer = _options(row), row.needed("answer", "expected_answer")
    if isinstance(answer, int) and not isinstance(answer, bool) and 0 <= answer < len(options):
        answer = _OPTIONS[answer]
    return _choice(row, row.text("question", "problem"), options, answer)


def _options(row: Row) -> list[str]:
    value: Any = row.needed("options", "choices")
    if isinstance(value, dict) and "".join(value) == _OPTIONS[: len(value)]:  # {"A": TEXT, ...}
        value = list(value.values())
    elif isinstance(value, dict) and value.keys() == {"label", "text"}:  # as in ARC
        value = value["text"]
    items = value if isinstance(value, list) else []
    texts = [text for item in items for text in (item.values() if isinstance(item, dict) else [item])]
    if not 2 <= len(texts) <= len(_OPTIONS) or not all(isinstance(text, str) for text in texts):
        raise row.wrong("options", value, f"a list of 2 to {len(_OPTIONS)} texts")
    return texts


def _choice(row: Row, question: str, options: Sequence[str], answer: Any) -> Draft | Drop:
    letters = _OPTIONS[: len(options)]
    if not isinstance(answer, str) or answer.strip() not in set(letters):
        raise row.wrong("answer", answer, f"one letter of {letters[0]} to {letters[-1]}, or its index")
    if not question.strip():
        return Drop("no problem", "the text is empty")
    listed = "\n".join(f"{letter}. {text}" for letter, text in zip(letters, options, strict=True))
    truth = {"answer": answer.strip(), "options": list(options)}
    return Draft(
        "stem",
        f"{question.strip()}\n\n{listed}",
        truth=truth,
        form=CHOICE,
        gold=f"\\boxed{{{answer.strip()}}}",
        row_id=row_id(row),
    )


def gpqa(row: Row) -> Draft | Drop:
    """Convert a row of GPQA.  The order of the options depends only on the question."""
    question = row.text("Question")
    names = ("Correct Answer", "Incorrect Answer 1", "Incorrect Answer 2", "Incorrect Answer 3")
    texts = [row.text(name).strip() for name in names]
    order = list(range(len(texts)))
    random.Random(question).shuffle(order)
    return _choice(row, question, [texts[at] for at in order], _OPTIONS[order.index(0)])


def gpqa_open(row: Row) -> Draft | Drop:
    """Convert a row of GPQA without its options: `question` and `correct_answer`, a text."""
    question, answer = row.text("question"), row.text("correct_answer").strip()
    return _final(row, "stem", {"answer": answer}, answer, question)


def last_box(text: str) -> str | None:
    r"""Return the content of the last complete `\boxed{...}`; None without one."""
    for start in reversed([match.end() for match in re.finditer(r"\\boxed\s*\{", text)]):
        depth = 1
        for match in re.finditer(r"\\.|[{}]", text[start:], re.DOTALL):
            depth += {"{": 1, "}": -1}.get(match[0], 0)
            if depth == 0:
                return text[start : start + match.start()].strip()
    return None


def scp(row: Row) -> Draft | Drop:
    """Convert a row of SCP-116K: `problem`, the source's solution and R1's response.

    A row without a boxed answer of R1 gets an empty truth, which only a judge can fill.  Otherwise the truth accepts
    R1's boxed answer, and the source's: boxed, or the whole solution if it is one short line.
    """
    question = row.text("problem", "question")
    solution = row.text("solution", "matched_solution", "extract_solution").strip()
    response = row.text("response", "r1_response", "r1_solution").rpartition("</think>")[2].strip()
    if not question.strip():
        return Drop("no problem", "the text is empty")
    if not solution:
        return Drop("no solution", "the source's solution was not found")
    if not response:
        return Drop("no answer", "R1's response is empty")
    domain = row.first("domain")
    meta = {"domain": domain} if isinstance(domain, str) else {}
    drafted = Draft(
        "stem",
        question.strip(),
        truth={},
        form=BOXED,
        gold=None,
        row_id=row_id(row),
        meta=meta,
        reference=solution,
        candidate=response,
    )
    answer = last_box(response)
    if not answer or unusable(answer):
        return drafted
    source_answer = last_box(solution) or (solution if "\n" not in solution and len(solution) <= 60 else None)
    accepted = list(dict.fromkeys([text for text in (source_answer, answer) if text]))
    truth = {"answer": accepted if len(accepted) > 1 else answer}
    return replace(drafted, truth=truth, gold=f"\\boxed{{{answer}}}")
