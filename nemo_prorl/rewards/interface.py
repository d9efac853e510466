"""What a reward plugin sees: a typed request, a typed result, and the base class.  Standard library only.

A plugin lives in a project of its own, subclasses `RewardPlugin`, and is found by its entry point in the group
`nemo_prorl.rewards`.  It is called in a worker process, on the main thread, one request at a time.

Failure kinds of a verdict: None (judged), "timeout" and "invalid" (score 0: the answer's fault), "infrastructure"
(score None: ours; retried elsewhere, then masked, never a reward of 0).
"""

import dataclasses
import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar, Protocol, TypedDict, cast

ENTRY_POINT_GROUP = "nemo_prorl.rewards"
FAILURES = ("timeout", "invalid", "infrastructure")
DETAIL_CHARS = 500


class InvalidAnswer(ValueError):
    """The answer is malformed: its score is 0.  All else that leaves a plugin is an infrastructure failure."""


def answer_text(response: str) -> str | None:
    """The part of a response that is judged: what follows the last `</think>`.

    Without any tag this is the whole text; a `<think>` that is never closed has no answer (None).
    """
    _, closing, answer = response.rpartition("</think>")
    if closing:
        return None if "<think>" in answer else answer
    return None if "<think>" in response else response


def opened_thought(prompt: str) -> str:
    """Return the `<think>` that a rendered prompt ends in, with the white space behind it; empty without one.

    Some chat templates open the thought for the model, that of DeepSeek-R1-Distill among them.
    """
    _, tag, blank = prompt.rpartition("<think>")
    return tag + blank if tag and not blank.strip() else ""


def one_line(text: str, limit: int = DETAIL_CHARS) -> str:
    """`text` without line breaks, at most `limit` characters."""
    line = " ".join(text.split())
    return line if len(line) <= limit else line[: limit - 3] + "..."


def _typed(obj: Mapping[str, Any], key: str, kind: type | tuple[type, ...], says: str) -> Any:
    if key not in obj:
        raise ValueError(f"field {key!r} is missing; it must be {says}")
    if not isinstance(obj[key], kind):
        raise ValueError(f"field {key!r} is {type(obj[key]).__name__}; it must be {says}")
    return obj[key]


@dataclass(frozen=True)
class RewardRequest:
    """One response to judge: a prompt record, the full response text, and whether it ended with eos."""

    id: str
    task: str
    prompt: str | list[dict[str, Any]]
    truth: dict[str, Any]
    response: str
    finished: bool = True
    source: str = ""
    meta: dict[str, Any] = field(default_factory=dict)

    @property
    def answer_text(self) -> str | None:
        """What follows the last `</think>`; None where a `<think>` was never closed."""
        return answer_text(self.response)

    @classmethod
    def from_json(cls, obj: Any) -> "RewardRequest":
        """Checks the fields of the documented request.  Raises ValueError that names the field and what is right."""
        if not isinstance(obj, dict):
            raise ValueError(f"a request must be a JSON object, not {type(obj).__name__}")
        return cls(
            id=_typed(obj, "id", str, "a string"),
            task=_typed(obj, "task", str, "a string, the name of a task"),
            prompt=_typed(obj, "prompt", (str, list), "a string or a list of messages"),
            truth=_typed(obj, "truth", dict, "an object"),
            response=_typed(obj, "response", str, "a string, the full text of the response"),
            finished=_typed(obj, "finished", bool, "true (ended with eos) or false"),
            source=_typed(obj, "source", str, "a string") if "source" in obj else "",
            meta=_typed(obj, "meta", dict, "an object") if "meta" in obj else {},
        )

    def to_json(self) -> dict[str, Any]:
        """The request's fields; prompt, truth and meta are not copied."""
        return {one.name: getattr(self, one.name) for one in dataclasses.fields(self)}


@dataclass(frozen=True)
class RewardResult:
    """What a plugin answers: `score` in [0, 1], `correct` where binary correctness exists, named sub-scores.

    `failure` is None, "timeout" or "invalid"; with a failure the score must be 0.
    """

    score: float
    correct: bool | None = None
    parts: dict[str, float] = field(default_factory=dict)
    detail: str = ""
    failure: str | None = None

    def fault(self) -> str | None:
        """What is wrong with this result, in words; None if it is well formed."""
        numbers = {"score": self.score, **{f"parts[{k!r}]": v for k, v in self.parts.items()}}
        for name, value in numbers.items():
            if isinstance(value, bool) or not isinstance(value, (int, float)) or not math.isfinite(value):
                return f"{name} is {value!r}; it must be a finite number"
        if not 0.0 <= self.score <= 1.0:
            return f"score is {self.score!r}; it must lie in [0, 1]"
        if self.correct is not None and not isinstance(self.correct, bool):
            return f"correct is {self.correct!r}; it must be true, false or None"
        if self.failure not in (None, "timeout", "invalid"):
            return f"failure is {self.failure!r}; a plugin may say None, 'timeout' or 'invalid'"
        if self.failure is not None and self.score != 0:
            return f"failure is {self.failure!r} but score is {self.score!r}; it must be 0"
        if not isinstance(self.detail, str):
            return f"detail is {type(self.detail).__name__}; it must be a string"
        return None


@dataclass(frozen=True)
class Example:
    """What `prorl rewards test` tries a plugin with: a truth, a response that scores 1, and one that scores less.

    `task` is the plugin's first where empty.
    """

    truth: dict[str, Any]
    good: str
    bad: str
    task: str = ""


@dataclass(frozen=True)
class Program:
    """Code written by the model, and what it is run on.  No answer that it could be compared with belongs in here.

    `style` says what an input is, and what comes of it:
    "stdin": a text for standard input; the bytes that the program printed.
    "call": a JSON array of arguments for `function` (of `Solution()` where there is such a class); the result as JSON.
    "assert": a statement that runs beside the program; nothing.
    `time_limit_s`: on all inputs, computing or asleep; waiting for the CPU of a busy machine does not count.
    """

    source: str
    style: str
    inputs: tuple[str, ...]
    function: str = ""
    setup: str = ""
    time_limit_s: float = 5.0
    memory_mb: int = 2048
    output_mb: int = 1


@dataclass(frozen=True)
class ProgramRun:
    """What came of each input: the output, or None where the program did not end well on it, and then why.

    `over_time`: all inputs together took longer than the limit.  `refused`: why it did not compile, if it did not.
    """

    outputs: tuple[bytes | None, ...]
    details: tuple[str, ...]
    over_time: bool = False
    refused: str = ""


class Sandbox(Protocol):
    """Runs code that nobody has read; handed to the plugins that need it (`needs_sandbox`) as `self.sandbox`."""

    def run(self, program: Program, passes: Callable[[int, bytes], bool]) -> ProgramRun:
        """Runs the program on each of its inputs.

        `passes` says whether the output on an input is right: one that is not, and shared its process with another
        input, is tried once more in a process of its own.  What is raised is an infrastructure failure.
        """


class RewardPlugin(ABC):
    """Base of all plugins.  Importing the module of a plugin must be cheap: import heavy packages in `prepare`.

    `Config` is the schema of the plugin's settings, a dataclass whose every field has a default; where it has a field
    `time_budget_s`, that replaces the class attribute.  The budget is CPU seconds of one answer (wall time: 4 times).
    """

    name: ClassVar[str]
    tasks: ClassVar[tuple[str, ...]]
    time_budget_s: float = 10.0
    needs_sandbox: ClassVar[bool] = False
    sandbox_packages: tuple[str, ...] = ()  # installed packages that programs in the sandbox may import
    sandbox: Sandbox  # set before `prepare` where the class says that it needs one

    @dataclass(frozen=True)
    class Config:
        """No settings."""

    def __init__(self, config: Any = None) -> None:
        self.config = self.Config() if config is None else config
        self.time_budget_s = float(getattr(self.config, "time_budget_s", type(self).time_budget_s))

    def prepare(self) -> None:  # noqa: B027 - overriding is a choice
        """Called once in each worker before its first request: imports, caches, a first call of what is slow."""

    def validate_truth(self, truth: dict[str, Any]) -> None:  # noqa: B027
        """Raises ValueError that names the field where `truth` is not what this plugin judges by."""

    @classmethod
    def examples(cls) -> tuple[Example, ...]:
        """For the conformance kit; two or three, of different forms of truth.  Without any it can check little."""
        return ()

    @abstractmethod
    def score(self, request: RewardRequest) -> RewardResult:
        """Judges one response.  Raises InvalidAnswer for a malformed one; all else raised is infrastructure."""


def no_answer() -> RewardResult:
    """The result for a response whose `<think>` was never closed."""
    return RewardResult(score=0.0, correct=False, detail="<think> was opened and never closed: no answer")


class Verdict(TypedDict):
    """The documented verdict on one request, a JSON object; `score` is None for failure "infrastructure" only."""

    id: str
    score: float | None
    correct: bool | None
    parts: dict[str, float]
    detail: str
    failure: str | None


def verdict_of(request_id: str, result: RewardResult) -> Verdict:
    """Return the verdict that a plugin's result stands for."""
    return {
        "id": request_id,
        "score": float(result.score),
        "correct": result.correct,
        "parts": {name: float(value) for name, value in result.parts.items()},
        "detail": one_line(result.detail),
        "failure": result.failure,
    }


def failed_verdict(request_id: str, failure: str, detail: str) -> Verdict:
    """Return a verdict without a judgement: score 0 for "timeout" and "invalid", None for "infrastructure"."""
    if failure != "infrastructure":
        return verdict_of(request_id, RewardResult(0.0, False, {}, detail, failure))
    return {
        "id": request_id,
        "score": None,
        "correct": None,
        "parts": {},
        "detail": one_line(detail),
        "failure": failure,
    }


def read_verdict(obj: Any, request_id: str) -> Verdict:
    """Check a verdict that comes from outside this process.  Raises ValueError that names field, value and rule."""
    if not isinstance(obj, dict):
        raise ValueError(f"field 'verdict' is {obj!r}; it must be an object, as `prorl rewards score` writes it")
    found = {key: obj.get(key) for key in Verdict.__annotations__}
    score, failure = found["score"], found["failure"]
    number = isinstance(score, (int, float)) and not isinstance(score, bool)
    rules = {
        "id": (found["id"] == request_id, f"the request's id is {request_id!r}"),
        "score": (score is None or (number and 0 <= score <= 1), "it must be a number from 0 to 1, or null"),
        "correct": (found["correct"] in (None, True, False), "it must be true, false or null"),
        "parts": (isinstance(found["parts"], dict), "it must be an object"),
        "detail": (isinstance(found["detail"], str), "it must be a string"),
        "failure": (failure in (None, *FAILURES), f"it must be null or one of {', '.join(FAILURES)}"),
    }
    for key, (holds, rule) in rules.items():
        if key not in obj or not holds:
            raise ValueError(f"field 'verdict.{key}' is {repr(obj[key]) if key in obj else 'missing'}; {rule}")
    if (score is None) != (failure == "infrastructure"):
        raise ValueError(f"field 'verdict.score' is {score!r} with failure {failure!r}; only infrastructure has null")
    return cast(Verdict, found)


def judge(plugin: RewardPlugin, request: RewardRequest) -> Verdict:
    """Calls the plugin and turns whatever comes of it into one verdict that names the plugin where it failed."""
    try:
        result = plugin.score(request)
        fault = (
            result.fault()
            if isinstance(result, RewardResult)
            else f"it returned {type(result).__name__}; it must return a RewardResult"
        )
    except InvalidAnswer as error:
        return failed_verdict(request.id, "invalid", str(error) or "malformed answer")
    except Exception as error:
        detail = f"plugin {plugin.name!r} raised {type(error).__name__}: {error}"
        return failed_verdict(request.id, "infrastructure", detail)
    if fault is not None:
        return failed_verdict(request.id, "infrastructure", f"plugin {plugin.name!r}: {fault}")
    return verdict_of(request.id, result)
