"""The lines of journal.jsonl, and what they share with state.json and summary.json.

`...Fields` is what the writer of an event gives; `Journal` adds event, step and time.
"""

from typing import Literal, NotRequired, TypedDict

from nemo_prorl.schema import Amount, Count, Number, Sha256, Share, Time


class HeldOutScore(TypedDict):
    """The mean reward over held-out prompts, and the standard error of that mean."""

    mean: Share
    se: Amount
    prompts: Number


class HeldOutScores(TypedDict):
    """A validation: over all held-out prompts, and by the name of their source."""

    all: HeldOutScore
    tasks: dict[str, HeldOutScore]


class _Line(TypedDict):
    step: Count
    time: Time


class StartFields(TypedDict):
    """What a run says of itself when it begins or continues."""

    stage: str
    version: str
    start_from: NotRequired[str]
    """the checkpoint of the stage before"""
    weights_sha256: NotRequired[Sha256]
    """of that checkpoint"""


class Start(_Line, StartFields):
    """A run begins, or continues from the checkpoint of `step`."""

    event: Literal["start", "resume"]


class Validated(_Line, HeldOutScores):
    """Held-out prompts were judged."""

    event: Literal["validation"]


class ReasonFields(TypedDict):
    """Why something happens."""

    reason: str


class Reasoned(_Line, ReasonFields):
    """A hard reset begins, or the run stops cleanly after `step`."""

    event: Literal["reset_intent", "stop"]


class ResetFields(TypedDict):
    """A hard reset without its step."""

    reason: str
    reference_sha256: Sha256
    rolled_back_to: NotRequired[Count]
    """the step whose weights were taken, with trainer.resets.roll_back"""


class Reset(ResetFields):
    """A hard reset that was made."""

    step: Count
    """0: at the start of a stage"""


class ResetCommit(_Line, ResetFields):
    """The checkpoint that contains a hard reset is complete."""

    event: Literal["reset_commit"]


class AlarmFields(TypedDict):
    """What a person should look at."""

    what: str


class Alarm(_Line, AlarmFields):
    """Something that a person should look at."""

    event: Literal["alarm"]


RequestKind = Literal["reset", "validate", "checkpoint", "stop"]
AnswerStatus = Literal["done", "refused", "dropped"]


class AnswerFields(TypedDict):
    """A request of `prorl control`, and what became of it."""

    request: str
    """its id"""
    what: RequestKind
    status: AnswerStatus
    detail: str
    user: str
    host: str


class Answer(_Line, AnswerFields):
    """The answer to a request of `prorl control`."""

    event: Literal["control"]


class Finish(_Line):
    """The last step is done."""

    event: Literal["finish"]


JournalEvent = Start | Validated | Reasoned | ResetCommit | Alarm | Answer | Finish
