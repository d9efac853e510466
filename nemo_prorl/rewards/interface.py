"""The interface of reward plugins: request, result and base class; for programs of the model also `prorl_sandbox`.

A plugin is a separate Python project with a subclass of `RewardPlugin`, registered under the entry point group
`nemo_prorl.rewards`.  A worker process calls the plugin on its main thread, one request at a time.

The `failure` of a verdict is one of:
    None: the response was judged.
    "timeout": the judgement used up its CPU time, or the program of the response its own time; score 0.
    "invalid": the response is malformed; score 0.
    "infrastructure": the plugin or the machine is at fault, also if no verdict came in time; score None.  The request
        is retried on another worker.  If the retries fail too, the response is masked out of training; it never counts
        as a reward of 0.
"""

import dataclasses
import logging
import math
import sys
import traceback
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any, ClassVar, TypedDict, cast

from prorl_sandbox import Program as Program
from prorl_sandbox import ProgramRun as ProgramRun
from prorl_sandbox import Sandbox as Sandbox

_log = logging.getLogger(__name__)

ENTRY_POINT_GROUP = "nemo_prorl.rewards"
FAILURES = ("timeout", "invalid", "infrastructure")
DETAIL_CHARS = 500
FULL_SCORE = 1.0 - 1e-9  # a verdict without `correct` is right from this score on


class WrongValue(ValueError):
    """A value that a reward function must not return.  `place`: FILE:LINE of the function."""

    def __init__(self, message: str, place: str) -> None:
        super().__init__(message)
        self.place = place


class InvalidAnswer(ValueError):
    """A malformed answer, which scores 0.  Any other exception that a plugin raises is an infrastructure failure."""


def answer_text(response: str) -> str | None:
    """Return the part of a response that is judged: the text after the last `</think>`.

    Returns:
        The whole response if it contains neither tag.  None if a `<think>` is never closed.
    """
    _, closing, answer = response.rpartition("</think>")
    if closing:
        return None if "<think>" in answer else answer
    return None if "<think>" in response else response


def opened_thought(prompt: str) -> str:
    """Return the `<think>` at the end of a rendered prompt, with the white space after it.

    Some chat templates, such as that of DeepSeek-R1-Distill, open the thought for the model.

    Returns:
        The empty string if the prompt does not end in `<think>`.
    """
    _, tag, blank = prompt.rpartition("<think>")
    return tag + blank if tag and not blank.strip() else ""


def is_right(verdict: Mapping[str, Any]) -> bool | None:
    """Return whether a verdict calls the response right; None if the infrastructure failed."""
    if verdict["score"] is None:
        return None
    return bool(verdict["score"] >= FULL_SCORE if verdict["correct"] is None else verdict["correct"])


def one_line(text: str, limit: int = DETAIL_CHARS) -> str:
    """Return `text` with each run of white space replaced by one blank, cut to at most `limit` characters."""
    line = " ".join(text.split())
    return line if len(line) <= limit else line[: limit - 3] + "..."


def _typed(obj: Mapping[str, Any], key: str, kind: type | tuple[type, ...], expected: str) -> Any:
    if key not in obj:
        raise ValueError(f"field {key!r} is missing; it must be {expected}")
    if not isinstance(obj[key], kind):
        raise ValueError(f"field {key!r} is {type(obj[key]).__name__}; it must be {expected}")
    return obj[key]


@dataclass(frozen=True)
class RewardRequest:
    """One response to judge, with the prompt record that it answers."""

    id: str
    task: str
    prompt: str | list[dict[str, Any]]  # text, or chat messages with the fields `role` and `content`
    truth: dict[str, Any]  # the data that the plugin judges by; not yet checked by `validate_truth`
    response: str  # full text of the model, with its thought
    finished: bool = True  # ended with eos; False: cut off at the length limit
    source: str = ""  # name of the dataset
    meta: dict[str, Any] = field(default_factory=dict)

    @property
    def answer_text(self) -> str | None:
        """The text after the last `</think>`; None if a `<think>` is never closed."""
        return answer_text(self.response)

    @classmethod
    def from_json(cls, obj: Any) -> "RewardRequest":
        """Return the request that a JSON object describes.

        Raises:
            ValueError: A field is missing or has a wrong type; the message names the field and the expected type.
        """
        if not isinstance(obj, dict):
            raise ValueError(f"a request must be a JSON object, not {type(obj).__name__}")
        return cls(
            id=_typed(obj, "id", str, "a string"),
            task=_typed(obj, "task", str, "a string, the name of a task"),
            prompt=_typed(obj, "prompt", (str, list), "a string or a list of messages"),
            truth={key: value for key, value in _typed(obj, "truth", dict, "an object").items() if value is not None},
            response=_typed(obj, "response", str, "a string, the full text of the response"),
            finished=_typed(obj, "finished", bool, "true (ended with eos) or false"),
            source=_typed(obj, "source", str, "a string") if "source" in obj else "",
            meta=_typed(obj, "meta", dict, "an object") if "meta" in obj else {},
        )

    def to_json(self) -> dict[str, Any]:
        """Return the fields of the request.  `prompt`, `truth` and `meta` are shared with the request, not copied."""
        return {item.name: getattr(self, item.name) for item in dataclasses.fields(self)}


@dataclass(frozen=True)
class RewardResult:
    """The judgement that a plugin returns for one response."""

    score: float  # in [0, 1]; 0 if there is a failure
    correct: bool | None = None  # None: the task does not distinguish right from wrong
    parts: dict[str, float] = field(default_factory=dict)  # sub-scores by name
    detail: str = ""  # the reason for the score, for people; cut to one line of DETAIL_CHARS characters
    failure: str | None = None  # None, "timeout" or "invalid"

    def fault(self) -> str | None:
        """Return a description of the first rule that this result violates; None if the result is well formed."""
        numbers = {"score": self.score, **{f"parts[{k!r}]": v for k, v in self.parts.items()}}
        for name, value in numbers.items():
            if isinstance(value, bool) or not isinstance(value, (int, float)) or not math.isfinite(value):
                return f"{name} is {value!r}; it must be a finite number"
        if not 0.0 <= self.score <= 1.0:
            return f"score is {self.score!r}; it must lie in [0, 1]"
        if self.correct is not None and not isinstance(self.correct, bool):
            return f"correct is {self.correct!r}; it must be true, false or None"
        if self.failure not in (None, "timeout", "invalid"):
            return f"failure is {self.failure!r}; it must be None, 'timeout' or 'invalid'"
        if self.failure is not None and self.score != 0:
            return f"failure is {self.failure!r} but score is {self.score!r}; it must be 0"
        if not isinstance(self.detail, str):
            return f"detail is {type(self.detail).__name__}; it must be a string"
        return None


@dataclass(frozen=True)
class Example:
    """A truth with two responses, from which `prorl rewards test` makes its requests."""

    truth: dict[str, Any]
    good: str  # response that must score 1
    bad: str  # response that must score less than 1
    task: str = ""  # empty: the first task of the plugin


@dataclass(frozen=True)
class Canary:
    """A response whose verdict is known.  A run sends canaries to its reward servers, and never trains on them.

    The verdict must be the same under all settings of the plugin.  The prompt of a canary is "?".
    """

    truth: dict[str, Any]
    response: str
    right: bool  # True: must score 1; False: must score less than 1
    task: str = ""  # empty: the first task of the plugin


class RewardPlugin(ABC):
    """The base class of all reward plugins.

    Importing the module of a plugin must be cheap and without side effects: import heavy packages in `prepare`.
    A subclass must define `name`, `tasks` and `score`.
    """

    name: ClassVar[str]  # equal to the name of the entry point
    tasks: ClassVar[tuple[str, ...]]  # values of `task` in prompt records that this plugin judges
    time_budget_s: float = 10.0  # CPU seconds for one response (score 0); 4 times as long in all (no score)
    second: ClassVar[str] = ""  # task of another plugin that judges a sample of the responses again; empty: none
    needs_sandbox: ClassVar[bool] = False
    sandbox_packages: tuple[str, ...] = ()  # installed packages that programs in the sandbox may import
    sandbox: Sandbox  # set before `prepare` if `needs_sandbox` is True; do not catch the SandboxFailure of its `run`
    _noun: ClassVar[str] = "plugin"  # error messages use this name

    @dataclass(frozen=True)
    class Config:
        """The settings of the plugin, given by `rewards.plugins.NAME` in the configuration.

        The base class has no settings.  A plugin with settings overrides this class with a frozen dataclass in which
        every field has a default.  A field `time_budget_s` replaces the plugin's attribute of the same name.
        """

    def __init__(self, config: Any = None) -> None:
        self.config = self.Config() if config is None else config
        self.time_budget_s = float(getattr(self.config, "time_budget_s", type(self).time_budget_s))

    def prepare(self) -> None:  # noqa: B027 - overriding is a choice
        """Import heavy packages, fill caches and warm up slow code.

        Called once in each worker, before the first request.  The worker cannot start if `prepare` raises an
        exception, or if start and `prepare` together take more than two minutes.
        """

    def validate_truth(self, truth: dict[str, Any]) -> None:  # noqa: B027
        """Check that this plugin can judge by `truth`.

        `prorl data prepare` and `prorl evaluate` call it for each record; `score` may call it for each request.

        Raises:
            ValueError: A field is missing or wrong; the message must name the field and the expected value.
        """

    @classmethod
    def examples(cls) -> tuple[Example, ...]:
        """Return two or three examples, with different forms of truth, for the conformance kit.

        Without examples, `prorl rewards test` skips most of its checks.
        """
        return ()

    @classmethod
    def canaries(cls) -> tuple[Canary, ...]:
        """Return responses with known verdicts, by which a run notices that this plugin begins to err.

        A handful is enough: right answers in unusual notation, answers that are nearly right, known tricks.  They must
        be quick to judge, because a run sends one for each 100 responses.  The default is made from `examples()`.
        """
        both = ((example, right) for example in cls.examples() for right in (True, False))
        return tuple(Canary(one.truth, one.good if right else one.bad, right, one.task) for one, right in both)

    @abstractmethod
    def score(self, request: RewardRequest) -> RewardResult:
        """Judge one response.

        The result may depend only on the request: not on time, random numbers, the network or earlier requests.

        Args:
            request: `request.answer_text` is the part to judge; return `no_answer()` if it is None.

        Raises:
            InvalidAnswer: The response is malformed; its score is 0.  Any other exception counts as an infrastructure
                failure, and a run stops after several of these in a row.
        """


def no_answer() -> RewardResult:
    """Return the result for a response whose `<think>` is never closed: score 0."""
    return RewardResult(score=0.0, correct=False, detail="<think> was opened and never closed: no answer")


class Verdict(TypedDict):
    """The judgement of one request as a JSON object.  `score` is None only if `failure` is "infrastructure"."""

    id: str
    score: float | None
    correct: bool | None
    parts: dict[str, float]
    detail: str
    failure: str | None


def verdict_of(request_id: str, result: RewardResult) -> Verdict:
    """Return the verdict with the content of a well-formed result; `detail` is cut to one line."""
    return {
        "id": request_id,
        "score": float(result.score),
        "correct": result.correct,
        "parts": {name: float(value) for name, value in result.parts.items()},
        "detail": one_line(result.detail),
        "failure": result.failure,
    }


def failed_verdict(request_id: str, failure: str, detail: str) -> Verdict:
    """Return the verdict of a request that failed: score 0 for "timeout" and "invalid", None for "infrastructure"."""
    verdict = verdict_of(request_id, RewardResult(0.0, correct=False, detail=detail, failure=failure))
    if failure == "infrastructure":
        verdict["score"] = verdict["correct"] = None
    return verdict


def read_verdict(obj: Any, request_id: str) -> Verdict:
    """Check a verdict that comes from another process or from a file, and return it without unknown fields.

    Raises:
        ValueError: The object is not a verdict on request `request_id`; the message names field, value and rule.
    """
    if not isinstance(obj, dict):
        raise ValueError(f"field 'verdict' is {obj!r}; it must be an object, as `prorl rewards score` writes it")
    fields = {key: obj.get(key) for key in Verdict.__annotations__}
    score, failure = fields["score"], fields["failure"]
    number = isinstance(score, (int, float)) and not isinstance(score, bool)
    rules = {
        "id": (fields["id"] == request_id, f"the request's id is {request_id!r}"),
        "score": (score is None or (number and 0 <= score <= 1), "it must be a number from 0 to 1, or null"),
        "correct": (fields["correct"] is None or isinstance(fields["correct"], bool), "it must be true, false or null"),
        "parts": (isinstance(fields["parts"], dict), "it must be an object"),
        "detail": (isinstance(fields["detail"], str), "it must be a string"),
        "failure": (failure in (None, *FAILURES), f"it must be null or one of {', '.join(FAILURES)}"),
    }
    for key, (is_valid, rule) in rules.items():
        if key not in obj or not is_valid:
            raise ValueError(f"field 'verdict.{key}' is {repr(obj[key]) if key in obj else 'missing'}; {rule}")
    if (score is None) != (failure == "infrastructure"):
        rule = "it must be null if failure is 'infrastructure', otherwise a number"
        raise ValueError(f"field 'verdict.score' is {score!r} with failure {failure!r}; {rule}")
    return cast(Verdict, fields)


_shown: set[str] = set()  # places whose traceback is in the log


def _place_of(error: BaseException, plugin: RewardPlugin) -> str:
    """Return FILE:LINE of the innermost frame of an exception that is in the plugin's own folder."""
    frames = traceback.extract_tb(error.__traceback__)
    own = Path(getattr(sys.modules[type(plugin).__module__], "__file__", None) or "").parent
    inner = [frame for frame in frames if Path(frame.filename).is_relative_to(own)] or frames[-1:]
    return f"{inner[-1].filename}:{inner[-1].lineno}"


def _without_callers(frames: TracebackType | None) -> TracebackType | None:
    """Return a traceback without this package's frames at its beginning, which only say how a plugin is called."""
    package = Path(__file__).parents[1]
    while frames is not None and Path(frames.tb_frame.f_code.co_filename).is_relative_to(package):
        frames = frames.tb_next
    return frames


def judge(plugin: RewardPlugin, request: RewardRequest) -> Verdict:
    """Return the plugin's verdict on a request.  Never raises.

    Any exception except InvalidAnswer, and any malformed result, becomes an "infrastructure" verdict that names the
    plugin.
    """
    try:
        result = plugin.score(request)
        fault = (
            result.fault()
            if isinstance(result, RewardResult)
            else f"it returned {type(result).__name__}; it must return a RewardResult"
        )
    except InvalidAnswer as error:
        return failed_verdict(request.id, "invalid", str(error) or "malformed answer")
    except WrongValue as error:
        fault = f"{error} ({error.place})"
        if error.place not in _shown:
            _shown.add(error.place)
            _log.error("%s %r: %s; shown only once for this place", plugin._noun, plugin.name, fault)
    except (Exception, SystemExit) as error:
        place = _place_of(error, plugin)
        if place not in _shown:
            _shown.add(place)
            _log.error(
                "%s %r raised an exception at %s; it is shown only once for this place",
                plugin._noun,
                plugin.name,
                place,
                exc_info=(type(error), error, _without_callers(error.__traceback__)),
            )
        detail = f"{plugin._noun} {plugin.name!r} raised {type(error).__name__} ({place}): {error}"
        return failed_verdict(request.id, "infrastructure", detail)
    if fault is not None:
        return failed_verdict(request.id, "infrastructure", f"{plugin._noun} {plugin.name!r}: {fault}")
    return verdict_of(request.id, result)
