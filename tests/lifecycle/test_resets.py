"""What the rules for hard resets do in each mode of a run."""

from pathlib import Path
from typing import Any

import pytest

from nemo_prorl.algorithms.reset_rules import Finding
from nemo_prorl.config import ResetsConfig
from nemo_prorl.lifecycle import resets
from nemo_prorl.metrics import Metrics
from tests.lifecycle.parts import Parts


@pytest.mark.parametrize(("mode", "alarms", "asks"), [("manual", 0, False), ("advise", 2, False), ("auto", 2, True)])
def test_only_auto_resets(mode: str, alarms: int, asks: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In every step each rule finds something; `advise` tells it and asks for nothing."""

    def all_rules(*_: Any) -> list[Finding]:
        return [Finding("kl_spike", 1, "kl", 9.0, 3.0, True, "KL"), Finding("length", 1, "l", 2.0, 1.5, False, "long")]

    monkeypatch.setattr(resets, "decide", all_rules)
    parts = Parts(tmp_path / "run", ResetsConfig(mode=mode))
    assert parts.resets.reason(Metrics(1, "none")) == ("kl_spike: KL" if asks else None)
    told = [event["what"] for event in parts.records.events() if event["event"] == "alarm"]
    assert told == ["kl_spike: KL", "length: long"][:alarms]
    assert parts.resets.state_dict()["done"] == []
