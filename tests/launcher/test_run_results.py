"""What a run says at its end, and how a wrong number is answered."""

from typing import Any

import pytest

from nemo_prorl import settings
from nemo_prorl.errors import ConfigError
from nemo_prorl.launcher.run_results import outcome
from nemo_prorl.report.status import _event

HELDOUT = {"before": 0.0, "after": 0.0, "before_se": 0.0, "after_se": 0.0, "prompts": 8}
SUMMARY: dict[str, Any] = {
    "step": 2,
    "stage": "none",
    "seed": 1,
    "heldout": {**HELDOUT, "tasks": {"sums": {"before": 0.0, "after": 0.0}}},
}


def test_a_run_without_an_update_says_so() -> None:
    idle = [{"step": step, "reward/all": 0.0} for step in (1, 2)]
    assert outcome(SUMMARY, idle)[-1].startswith("no update was made: the responses of every group had equal rewards")
    unjudged = [{"step": 1, "reward/all": None}]
    assert outcome(SUMMARY, unjudged)[-1].startswith("no update was made: no response has a verdict. Fix: correct the ")
    trained = [*idle, {"step": 3, "reward/all": 0.5, "policy/grad_norm": 1.0}]
    assert outcome(SUMMARY, trained)[-1].endswith("no significant change")


def test_an_event_as_text() -> None:
    event = {"event": "reset_commit", "step": 6, "time": 0.0, "reason": "at_steps", "tasks": {"a": 1}}
    assert _event(event) == "reset_commit, step 6, 1970-01-01 00:00 UTC, reason at_steps"


def test_validations_are_switched_off_by_their_data() -> None:
    with pytest.raises(ConfigError, match=r"validate_every=0: expected a number at least 1. Fix: data.validation=\[\]"):
        settings.load(["trainer.grpo.validate_every=0"])
