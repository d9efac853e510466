"""Types of the lines of journal.jsonl, shared with state.json and summary.json."""

from collections.abc import Iterable, Mapping
from typing import Any, Literal, NotRequired, TypedDict

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
    lr_factor: NotRequired[Amount]
    """factor of the learning rate after the reset (trainer.resets.lr_factor), if it is not 1"""
    lr_until: NotRequired[Count]
    """last step with this factor, with trainer.resets.lr_factor_steps"""


class Reset(_ResetFields):
    """A completed hard reset."""

    step: Count
    """0: at the start of a stage"""


class ResetCommit(_Line, _ResetFields):
    """The checkpoint that contains a hard reset is complete."""

    event: Literal["reset_commit"]


def rate_text(reset: Mapping[str, Any]) -> str:
    """Return what a hard reset does to the learning rate, such as `x 0.5 until step 90`; "" if nothing."""
    factor, until = reset.get("lr_factor"), reset.get("lr_until")
    if not isinstance(factor, int | float):  # a person may have edited the journal
        return ""
    return f"x {factor:g}" + ("" if until is None else f" until step {until}")


def effects_text(reset: Mapping[str, Any]) -> str:
    """Return what a hard reset did to the weights and does to the learning rate, each after a comma."""
    text = f", back to the weights of step {reset['rolled_back_to']}" if "rolled_back_to" in reset else ""
    return f"{text}, learning rate {rate}" if (rate := rate_text(reset)) else text


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


class TrialArm(_Line):
    """A trial of a hard reset (trainer.resets.mode=trial) goes on with an arm, from the checkpoint of `step`."""

    arm: Literal["none", "reset"]
    """without the reset, which comes first, or with it"""
    reason: str
    """why a reset was asked for"""
    event: Literal["trial"]


class TrialResult(TypedDict):
    """How a trial of a hard reset ended."""

    winner: Literal["none", "reset"]
    difference: float
    """held-out score with the reset minus that without it, in the later half of the validations"""
    se: Amount
    """standard error of the difference"""
    looks: NotRequired[Number]
    """comparisons that could decide; the interval of the difference is that of so many looks"""
    because: str
    """what decided, as text"""


class TrialEnd(_Line, TrialResult):
    """A trial is decided: the run continues from the end of the winner.  `step` is that end."""

    trial: Count
    """step after which the trial began"""
    tokens: Count
    """tokens that the losing arm generated"""
    event: Literal["trial_end"]


class Finish(_Line):
    """The last step is done."""

    event: Literal["finish"]


JournalEvent = Start | Validated | Reasoned | ResetCommit | Alarm | Change | Answer | TrialArm | TrialEnd | Finish


def standing(events: Iterable[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """Return the events that stand, in order: a resume discards those of later steps, a trial those of its losing arm.

    Args:
        events: lines of journal.jsonl; those without a step that is a number are left out.
    """
    kept: list[Mapping[str, Any]] = []
    without: list[Mapping[str, Any]] | None = None  # what stood at the end of a trial's arm without reset
    for event in events:
        step, kind = event.get("step"), event.get("event")
        if not isinstance(step, int) or isinstance(step, bool):
            continue
        if kind == "trial" and event.get("arm") == "reset" and without is None:
            without = kept
        elif kind == "trial" and event.get("arm") == "none":
            without = None
        elif kind == "trial_end":
            kept = without if event.get("winner") == "none" and without is not None else kept
            without = None
        if kind in ("resume", "trial"):
            kept = [earlier for earlier in kept if earlier["step"] <= step]
        kept.append(event)
    return kept
