"""Types of the lines of journal.jsonl, shared with state.json and summary.json."""

from typing import Literal, NotRequired, TypedDict

from nemo_prorl.schema import Amount, Count, Number, Sha256, Share, Time


class HeldOutScore(TypedDict):
    """The mean reward over held-out prompts, and the standard error of that mean."""

    mean: Share
    se: Amount
    prompts: Number


class HeldOutScores(TypedDict):
    """A validation: scores over all held-out prompts, and by the name of their source."""

    all: HeldOutScore
    tasks: dict[str, HeldOutScore]


class _Line(TypedDict):
    step: Count
    time: Time


class Start(_Line):
    """A run begins, or continues from the checkpoint of `step`."""

    stage: str
    """name of the stage (configuration key `stage`)"""
    version: str
    """version of nemo_prorl"""
    start_from: NotRequired[str]
    """checkpoint of the previous stage"""
    weights_sha256: NotRequired[Sha256]
    """hash of that checkpoint's weights"""
    event: Literal["start", "resume"]


class Validated(_Line, HeldOutScores):
    """A validation on the held-out prompts."""

    event: Literal["validation"]


class Reasoned(_Line):
    """An event with a reason: a hard reset begins after `step`, or the run stops cleanly or fails after it."""

    reason: str
    event: Literal["reset_intent", "stop", "failure"]


class _ResetFields(TypedDict):
    reason: str
    reference_sha256: Sha256
    """hash of the weights of the reference policy after the reset"""
    rolled_back_to: NotRequired[Count]
    """the step whose weights were taken, with trainer.resets.roll_back"""


class Reset(_ResetFields):
    """A completed hard reset."""

    step: Count
    """0: at the start of a stage"""


class ResetCommit(_Line, _ResetFields):
    """The checkpoint that contains a hard reset is complete."""

    event: Literal["reset_commit"]


class Alarm(_Line):
    """A condition that needs a person's attention."""

    what: str
    event: Literal["alarm"]


class Change(_Line):
    """The run is continued from the checkpoint of `step` with other values of keys that may change."""

    what: str
    """keys with their new and old values"""
    event: Literal["change"]


RequestKind = Literal["reset", "validate", "checkpoint", "keep-batches", "stop"]
AnswerStatus = Literal["done", "refused", "dropped"]


class Answer(_Line):
    """The answer to a request of `prorl control`."""

    request: str
    """id of the request"""
    what: RequestKind
    status: AnswerStatus
    detail: str
    """result of the request, or the cause of the refusal, as text"""
    user: str
    """user who sent the request"""
    host: str
    """machine from which the request was sent"""
    event: Literal["control"]


class Finish(_Line):
    """The last step is done."""

    event: Literal["finish"]


JournalEvent = Start | Validated | Reasoned | ResetCommit | Alarm | Change | Answer | Finish
