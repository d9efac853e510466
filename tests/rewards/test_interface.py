"""The typed request and result, and how what a plugin does becomes a verdict."""

import dataclasses
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from nemo_prorl.rewards import interface
from nemo_prorl.rewards.interface import (
    InvalidAnswer,
    RewardPlugin,
    RewardRequest,
    RewardResult,
    Verdict,
    answer_text,
    judge,
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


def test_a_request_survives_json() -> None:
    request = RewardRequest.from_json({**REQUEST, "source": "s", "meta": {"k": 1}, "extra": "ignored"})
    assert RewardRequest.from_json(request.to_json()) == request
    assert (request.finished, request.source, request.meta) == (False, "s", {"k": 1})


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
    verdict = _verdict(InvalidAnswer("no digits"))
    assert (verdict["score"], verdict["correct"], verdict["failure"]) == (0.0, False, "invalid")
    assert verdict["detail"] == "no digits"


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


def test_settings_replace_the_time_budget() -> None:
    @dataclasses.dataclass(frozen=True)
    class Config:
        time_budget_s: float = 3.0

    class Quick(_Says):
        """Quick."""

    Quick.Config = Config  # type: ignore[misc,assignment]
    assert Quick(None).time_budget_s == 3.0
    assert _Says(None).time_budget_s == RewardPlugin.time_budget_s


def test_the_interface_imports_the_standard_library_only() -> None:
    code = (
        "import sys; import nemo_prorl.rewards.interface; "
        "print({m.partition('.')[0] for m in sys.modules} - set(sys.stdlib_module_names))"
    )
    found = subprocess.run([sys.executable, "-S", "-c", code], capture_output=True, text=True, check=True)
    assert set(eval(found.stdout)) <= {"nemo_prorl", "__main__"}
