"""What a source makes of a row: a draft of a prompt record, or a reason to leave the row out."""

from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class Draft:
    """A record before it has its id.

    `question`: the problem alone; `form`: how to give the answer, put after it.  `gold`: a response that must score 1;
    None where the source has none.  `theirs`: the row's own id.  `reference` and `candidate`: two solutions of which a
    judge says whether they agree.  `oracle`: a program whose results are what the truth's tests lack (`expected`).
    """

    task: str
    question: str
    truth: dict[str, Any]
    form: str = ""
    gold: str | None = None
    theirs: str = ""
    meta: dict[str, Any] = field(default_factory=dict)
    reference: str = ""
    candidate: str = ""
    oracle: str = ""

    @property
    def prompt_text(self) -> str:
        return f"{self.question}\n\n{self.form}" if self.form else self.question


@dataclass(frozen=True)
class Drop:
    """Why a row makes no record: `reason`, by which drops are counted, and what it was here."""

    reason: str
    detail: str = ""
