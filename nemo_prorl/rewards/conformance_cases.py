"""Requests and truths for the conformance kit, made from a plugin's examples.  Runs no plugin code."""

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from nemo_prorl.errors import DataError
from nemo_prorl.rewards.canaries import requests_of
from nemo_prorl.rewards.interface import Example, RewardPlugin, RewardRequest, answer_text
from nemo_prorl.rewards.options import read_lines

LONG = 100_000
HOSTILE_EXAMPLES = 2  # number of examples that get hostile texts in place of their answers

# Hostile texts, used alone and in place of an example's answer.
UNICODE = {
    "emoji": "\U0001f469\u200d\U0001f680 5\ufe0f\u20e3 \u00bd",
    "a lone surrogate": "a\ud800b\udfff",
    "right-to-left": "\u202e\u05e9\u05dc\u05d5\u05dd 12\u0661\u0662\u202c",
    "NUL and controls": "1\x00\x07\x1b[31m\x7f\u2028\u2029\ufeff",
    "stacked marks": "e" + "\u0301" * 300,
    "odd digits": "\uff14\uff12 \u00b2 \u2075 \u4e94 \u2167 \u2212\u0967",
}
EMPTY = {
    "nothing": "",
    "white space": " \n\t\r\n ",
    "no-break space": "\u00a0\u200b",
    "1,000 closing tags": "</think>" * 1_000,
    "tags inside tags": "<think><think></think>",
}
ADVERSARIAL = {
    "5,000 digits": "9" * 5_000,
    "a huge exponent": "1e999999999",
    "a tower of powers": "9^9^9^9^9",
    "Python's powers": "9**9**9**9",
    "not a number": "nan inf -inf -0 1/0 0/0",
    "open parentheses": "(" * 3_000,
    "deep nesting": "(" * 2_000 + "1" + ")" * 2_000,
    "deep JSON": "[" * 20_000 + "]" * 20_000,
    "deep braces": "\\frac{1}{" * 400 + "2" + "}" * 400,
    "format strings": "%s%n%d{0.__class__.__init__.__globals__}{}${HOME}{{7*7}}",
    "a shell": "$(id); `id` | cat /etc/passwd && exit 1 #",
    "Python": "__import__('os')._exit(3)",
    "quotes": '"\'\\"\'\'\'"""\\',
    "a regular expression's trap": "a" * 3_000 + "!" + "\\1(?P<x>(a+)+)$",
    "tags": "<answer></boxed><|im_end|></s>```\\boxed{<answer>",
    "1,000 opening tags": "<think>" * 1_000,
}
WRONG: tuple[Any, ...] = (None, True, -1.5, "", [], [[{}]], {"?": []})  # wrong values for each field of a truth
LONG_TEXTS = {
    "letters": "a" * LONG,
    "digits": "7" * LONG,
    "words": "word " * (LONG // 5),
    "lines": "a\n" * (LONG // 2),
    "open braces": "\\boxed{" * (LONG // 7),
    "open tags": "<answer>" * (LONG // 8),
    "fences": "```\n" * (LONG // 4),
}


@dataclass(frozen=True)
class Case:
    """A test request.

    `kind`: "good", "bad", "right canary", "wrong canary", or the name of the check for which the request was made.
    `label`: description for messages.
    `equals`: id of the case that must have the same score.  Only cases of kind "thinking" have `equals`; a "thinking"
    case in which `equals` is None must have score 0.
    """

    kind: str
    label: str
    request: RewardRequest
    equals: str | None = None

    @property
    def id(self) -> str:
        return self.request.id


def _parts(example: Example) -> tuple[str, str]:
    """Return the answer texts of the good and the bad response, without their thoughts."""
    return answer_text(example.good) or "", answer_text(example.bad) or ""


def shell(good: str, bad: str) -> tuple[str, str]:
    """Return the longest common prefix of two responses, and the longest common suffix of what follows the prefix."""
    before = _shared(good, bad)
    reversed_after = _shared(good[len(before) :][::-1], bad[len(before) :][::-1])
    return before, reversed_after[::-1]


def _shared(first: str, second: str) -> str:
    """Return the longest common prefix of two texts."""
    pairs = zip(first, second, strict=False)
    return first[: next((at for at, (a, b) in enumerate(pairs) if a != b), min(len(first), len(second)))]


def _thinking(example: Example, name: str) -> Iterator[tuple[str, str, str | None]]:
    """Yield (label, response, equals) for responses with thoughts, made from an example.

    `equals`: id of the case that must have the same score; None: the score must be 0.  `name`: name of the
    example, with which the ids of its cases begin.
    """
    good, bad = _parts(example)
    yield "a thought before the good answer", f"<think>hm, {bad}</think>{good}", f"{name}/good"
    yield "the good answer only in the thought", f"<think>{good}</think>{bad}", f"{name}/bad"
    yield "a thought whose opening tag is in the prompt", f"{bad}</think>{good}", f"{name}/good"
    yield "two thoughts", f"<think>{bad}</think>{bad}<think>{bad}</think>{good}", f"{name}/good"
    yield "a thought never closed", f"<think>{good}", None
    yield "a thought opened after the answer", f"<think>hm</think>{good}<think>", None


def _hostile(example: Example) -> Iterator[tuple[str, str, str]]:
    """Yield (kind, label, response): each hostile text as the whole response, and in place of the answer."""
    good, bad = _parts(example)
    before, after = shell(good, bad)
    for kind, texts in (("unicode", UNICODE), ("empty", EMPTY), ("adversarial", ADVERSARIAL), ("long", LONG_TEXTS)):
        for label, text in texts.items():
            yield kind, label, text
            yield kind, f"{label}, in place of the answer", before + text + after
    yield "empty", "nothing after a thought", "<think>hm</think>"
    yield "long", "a long thought", f"<think>{'hm, ' * (LONG // 4)}</think>{good}"
    yield "long", "the good answer, again and again", good * (LONG // max(1, len(good)))


def make_cases(examples: Sequence[Example], first_task: str) -> list[Case]:
    """Return the cases of all examples, with unique request ids; each example begins with its good and bad case.

    `first_task`: task of the examples that do not name a task.
    """
    cases: list[Case] = []
    for number, example in enumerate(examples):
        name = f"example-{number + 1}"

        def case(kind: str, label: str, response: str, key: str, equals: str | None = None) -> None:
            task = example.task or first_task  # noqa: B023 - called only in this iteration
            request = RewardRequest(f"{name}/{key}", task, "?", example.truth, response)  # noqa: B023
            cases.append(Case(kind, f"{name}, {label}", request, equals))  # noqa: B023

        case("good", "its good response", example.good, "good")
        case("bad", "its bad response", example.bad, "bad")
        for at, (label, response, equals) in enumerate(_thinking(example, name)):
            case("thinking", label, response, f"thinking-{at}", equals)
        if number < HOSTILE_EXAMPLES:
            for at, (kind, label, response) in enumerate(_hostile(example)):
                case(kind, label, response, f"{kind}-{at}")
    return cases


def canary_cases(plugin: type[RewardPlugin]) -> list[Case]:
    """Return a case for each canary of a plugin; none if the plugin's examples are its canaries."""
    if plugin.canaries.__func__ is RewardPlugin.canaries.__func__:  # type: ignore[attr-defined]
        return []
    sent = requests_of(plugin.tasks, plugin.canaries())
    kinds = {True: "right canary", False: "wrong canary"}
    return [Case(kinds[canary.right], canary.request["id"], RewardRequest.from_json(canary.request)) for canary in sent]


@dataclass(frozen=True)
class TruthTrial:
    """A truth to validate.

    `example`: name of the example that the truth comes from.  `key`: the field that was changed.  `validate_truth` must
    accept the truth or raise a ValueError that names `key`.  If `key` is empty, nothing was changed, and
    `validate_truth` must accept the truth.
    """

    example: str
    key: str
    wrong: str  # "as it is", "missing", or the JSON of the wrong value
    truth: dict[str, Any]


def truth_trials(examples: Sequence[Example]) -> list[TruthTrial]:
    """Return for each example its truth unchanged, and copies with one change each.

    For each field of the truth there is a copy without the field, and a copy for each wrong value of the field.
    """
    trials = []
    for number, example in enumerate(examples):
        name, truth = f"example-{number + 1}", example.truth
        trials.append(TruthTrial(name, "", "as it is", truth))
        for key in truth:
            trials.append(TruthTrial(name, key, "missing", {k: v for k, v in truth.items() if k != key}))
            for wrong in WRONG:
                trials.append(TruthTrial(name, key, json.dumps(wrong), {**truth, key: wrong}))
    return trials


def read_examples(path: Path, tasks: Sequence[str]) -> list[Example]:
    """Read examples from a JSON Lines file with the fields `truth`, `good`, `bad` and, if wanted, `task`.

    Raises:
        DataError: The file has no example, or a line is wrong; the message names file, line and field.
    """
    examples = [example for _, example in read_lines(path, lambda obj: _example(obj, tasks))]
    if not examples:
        example = '{"truth": {...}, "good": "...", "bad": "..."}'
        raise DataError(f"{path}: contains no example; each line must be {example}")
    return examples


def _example(obj: Any, tasks: Sequence[str]) -> Example:
    if not isinstance(obj, dict):
        raise ValueError(f"an example must be a JSON object, not {type(obj).__name__}")
    for key, kind, expected in (("truth", dict, "an object"), ("good", str, "a string"), ("bad", str, "a string")):
        if not isinstance(obj.get(key), kind):
            raise ValueError(f"field {key!r} is {obj.get(key)!r}; it must be {expected}")
    task = obj.get("task", tasks[0])
    if task not in tasks:
        raise ValueError(f"field 'task' is {task!r}; it must be one of {', '.join(tasks)}")
    return Example(obj["truth"], obj["good"], obj["bad"], task)
