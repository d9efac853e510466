"""The result of converting a row: a draft of a prompt record, or the reason to drop the row."""

from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class Draft:
    """A prompt record without its id.

    `question`: the problem alone; `form`: the instruction after it on how to give the answer; `preface`: the
    instruction before it.
    `gold`: a response that must score 1; None if the source has no answer.  `row_id`: the row's id in the source.
    `reference` and `candidate`: two solutions, whose agreement a judge decides.
    `oracle`: a program whose results become the field `expected` of the truth's tests.
    """

    task: str
    question: str
    truth: dict[str, Any]
    form: str = ""
    gold: str | None = None
    row_id: str = ""
    meta: dict[str, Any] = field(default_factory=dict)
    reference: str = ""
    candidate: str = ""
    oracle: str = ""
    preface: str = ""

    @property
    def prompt_text(self) -> str:
        return "\n\n".join(filter(None, (self.preface, self.question, self.form)))


@dataclass(frozen=True)
class Drop:
    """A dropped row: `reason`, by which drops are counted, and the detail of this row."""

    reason: str
    detail: str = ""
