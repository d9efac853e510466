"""The typed request and result, and how what a plugin does becomes a verdict."""

import dataclasses
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from nemo_prorl.rewards import interface
from nemo_prorl.rewards.interface import (
    InvalidAnswer,
    Program,
    ProgramRun,
    RewardPlugin,
    RewardRequest,
    RewardResult,
    Verdict,
    answer_text,
    failed_verdict,
    judge,
    no_answer,
    one_line,
    opened_thought,
    read_verdict,
)

REQUEST = {"id": "a", "task": "t", "prompt": "?", "truth": {}, "response": "x", "finished": False}


@pytest.mark.parametrize(
    ("response", "answer"),
    [
        ("plain", "plain"),
        ("<think>a</think>b", "b"),
        ("thoughts whose tag stood in the prompt</think> b", " b"),
        ("<think>a</think>b<think>c</think>d", "d"),
        ("<think>never closed", None),
        ("<think>a</think>b<think>again", None),
        ("<think>a</think>", ""),
        ("", ""),
    ],
)
def test_the_text_after_the_last_think_is_judged(response: str, answer: str | None) -> None:
    assert answer_text(response) == answer
    assert RewardRequest.from_json({**REQUEST, "response": response}).answer_text == answer


@pytest.mark.parametrize(
    ("prompt", "thought"),
    [
        ("a<think>", "<think>"),
        ("<think> \n", "<think> \n"),
        ("<think>x", ""),
        ("<think>x<think>\n", "<think>\n"),
        (" ", ""),
    ],
)
def test_a_thought_that_the_prompt_opens_belongs_to_the_response(prompt: str, thought: str) -> None:
    assert opened_thought(prompt) == thought


def test_a_long_detail_is_cut_to_its_limit() -> None:
    assert one_line(" a\n\tb ") == "a b"
    assert one_line("x" * 500) == "x" * 500
    assert one_line("x" * 501) == "x" * 497 + "..."


def test_a_request_survives_json() -> None:
    request = RewardRequest.from_json({**REQUEST, "source": "s", "meta": {"k": 1}, "extra": "ignored"})
    assert RewardRequest.from_json(request.to_json()) == request
    assert (request.finished, request.source, request.meta) == (False, "s", {"k": 1})
    assert RewardRequest("a", "t", "?", {}, "x").finished
    assert RewardRequest.from_json({**REQUEST, "truth": {"answer": "7", "unit": None}}).truth == {"answer": "7"}


@pytest.mark.parametrize("key", sorted(REQUEST))
def test_a_missing_or_wrong_field_is_named(key: str) -> None:
    with pytest.raises(ValueError, match=f"field '{key}' is missing"):
        RewardRequest.from_json({k: v for k, v in REQUEST.items() if k != key})
    with pytest.raises(ValueError, match=f"field '{key}' is NoneType"):
        RewardRequest.from_json({**REQUEST, key: None})


class _Says(RewardPlugin):
    """Returns or raises what it is given."""

    name, tasks = "says", ("t",)

    def __init__(self, says: Any) -> None:
        super().__init__()
        self.says = says

    def score(self, request: RewardRequest) -> RewardResult:
        if isinstance(self.says, Exception):
            raise self.says
        result: RewardResult = self.says
        return result


def _verdict(says: Any) -> Verdict:
    return judge(_Says(says), RewardRequest.from_json(REQUEST))


def test_a_result_becomes_a_verdict() -> None:
    result = RewardResult(score=1, correct=True, parts={"tests": 1}, detail="two\nlines")
    assert _verdict(result) == {
        "id": "a",
        "score": 1.0,
        "correct": True,
        "parts": {"tests": 1.0},
        "detail": "two lines",
        "failure": None,
    }


def test_an_invalid_answer_scores_zero() -> None:
    nothing: dict[str, Any] = {"id": "a", "score": 0.0, "correct": False, "parts": {}}
    assert _verdict(InvalidAnswer("no digits")) == {**nothing, "detail": "no digits", "failure": "invalid"}
    assert _verdict(InvalidAnswer()) == {**nothing, "detail": "malformed answer", "failure": "invalid"}
    assert failed_verdict("a", "timeout", "too\nlate") == {**nothing, "detail": "too late", "failure": "timeout"}
    detail = "<think> was opened and never closed: no answer"
    assert _verdict(no_answer()) == {**nothing, "detail": detail, "failure": None}


@pytest.mark.parametrize(
    ("says", "detail"),
    [
        (None, "plugin 'says': it returned NoneType; it must return a RewardResult"),
        (RewardResult(score=1.5), "plugin 'says': score is 1.5; it must lie in [0, 1]"),
        (RewardResult(score=-0.1), "plugin 'says': score is -0.1; it must lie in [0, 1]"),
        (RewardResult(score=float("nan")), "plugin 'says': score is nan; it must be a finite number"),
        (RewardResult(score=True), "plugin 'says': score is True; it must be a finite number"),
        (RewardResult(score=0.0, parts={"p": float("inf")}), "plugin 'says': parts['p'] is inf"),
        (RewardResult(score=0.5, failure="timeout"), "plugin 'says': failure is 'timeout' but score is 0.5"),
        (RewardResult(score=0.0, failure="infrastructure"), "plugin 'says': failure is 'infrastructure'"),
        (RewardResult(score=0.0, correct=1), "plugin 'says': correct is 1"),  # type: ignore[arg-type]
        (RewardResult(score=0.0, detail=None), "plugin 'says': detail is NoneType"),  # type: ignore[arg-type]
    ],
)
def test_what_else_a_plugin_does_is_infrastructure_and_names_it(says: Any, detail: str) -> None:
    verdict = _verdict(says)
    assert (verdict["score"], verdict["correct"], verdict["failure"]) == (None, None, "infrastructure")
    assert verdict["detail"].startswith(detail)


def test_an_exception_has_its_file_and_line_and_is_in_the_log_once(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(interface, "_shown", set())  # another test may have raised it first
    first, second = (_verdict(KeyError("k")) for _ in range(2))
    assert first == second
    assert (first["score"], first["failure"]) == (None, "infrastructure")
    place = re.fullmatch(r"plugin 'says' raised KeyError \((.*):(\d+)\): 'k'", first["detail"])
    assert place is not None
    assert place[1] == __file__
    assert "raise" in Path(__file__).read_text().splitlines()[int(place[2]) - 1]
    [record] = caplog.records
    assert record.exc_info is not None


def test_what_is_left_out_of_results_and_programs_has_its_default() -> None:
    program = {"source": "x", "style": "stdin", "inputs": (), "function": "", "setup": ""}
    limits = {"time_limit_s": 5.0, "memory_mb": 2048, "output_mb": 1}
    assert dataclasses.asdict(Program("x", "stdin", ())) == {**program, **limits}
    assert ProgramRun((), ()) == ProgramRun((), (), over_time=False, refused="")
    left_out: dict[str, Any] = {"correct": None, "parts": {}, "detail": "", "failure": None}
    assert _verdict(RewardResult(0.5)) == {"id": "a", "score": 0.5, **left_out}


GIVEN = {"id": "a", "score": 0.5, "correct": None, "parts": {"p": 0.5}, "detail": "half", "failure": None}
MASKED = {"score": None, "failure": "infrastructure"}


@pytest.mark.parametrize(
    "change",
    [{}, {"score": 0}, {"score": 1, "correct": True}, {"score": 0.0, "correct": False, "failure": "invalid"}, MASKED],
)
def test_a_verdict_from_elsewhere_is_read_without_unknown_fields(change: dict[str, Any]) -> None:
    assert read_verdict({**GIVEN, **change, "extra": 1}, "a") == {**GIVEN, **change}


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"id": "b"}, "'verdict.id' is 'b'; the request's id is 'a'"),
        ({"score": 1.1}, "'verdict.score' is 1.1; it must be a number from 0 to 1, or null"),
        ({"score": -0.1}, "'verdict.score' is -0.1; it must be a number"),
        ({"score": True}, "'verdict.score' is True; it must be a number"),
        ({"score": "1"}, "'verdict.score' is '1'; it must be a number"),
        ({"correct": 1}, "'verdict.correct' is 1; it must be true, false or null"),
        ({"parts": []}, "'verdict.parts' is []; it must be an object"),
        ({"detail": None}, "'verdict.detail' is None; it must be a string"),
        (
            {"failure": "late"},
            "'verdict.failure' is 'late'; it must be null or one of timeout, invalid, infrastructure",
        ),
        ({"score": None}, "'verdict.score' is None with failure None; it must be null if"),
        ({"failure": "infrastructure"}, "'verdict.score' is 0.5 with failure 'infrastructure'; it must be null if"),
    ],
)
def test_a_wrong_field_of_a_verdict_is_named(change: dict[str, Any], says: str) -> None:
    with pytest.raises(ValueError, match=re.escape(says)):
        read_verdict({**GIVEN, **change}, "a")
    (key, *_) = change
    with pytest.raises(ValueError, match=f"'verdict.{key}' is missing"):
        read_verdict({name: value for name, value in GIVEN.items() if name != key}, "a")


def test_settings_replace_the_time_budget() -> None:
    @dataclasses.dataclass(frozen=True)
    class Config:
        time_budget_s: float = 3.0

    class Quick(_Says):
        """Quick."""

    Quick.Config = Config  # type: ignore[misc,assignment]
    assert Quick(None).time_budget_s == 3.0
    assert _Says(None).time_budget_s == RewardPlugin.time_budget_s


def test_the_interface_imports_the_standard_library_and_the_sandbox_only(root: Path) -> None:
    code = (
        "import sys; import nemo_prorl.rewards.interface; "
        "print({m.partition('.')[0] for m in sys.modules} - set(sys.stdlib_module_names))"
    )
    env = {**os.environ, "PYTHONPATH": os.pathsep.join([str(root), str(root / "packages" / "prorl-sandbox")])}
    found = subprocess.run([sys.executable, "-S", "-c", code], env=env, capture_output=True, text=True, check=True)
    assert set(eval(found.stdout)) <= {"nemo_prorl", "prorl_sandbox", "__main__"}
