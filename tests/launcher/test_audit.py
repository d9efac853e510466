"""`prorl audit`: the table and the sides that it calls off; tests/test_main_job.py audits a real run."""

import pytest
import torch

from nemo_prorl import cli
from nemo_prorl.launcher.audit import Tokens, differences


def test_a_side_is_off_beyond_what_its_precision_explains(capsys: pytest.CaptureFixture[str]) -> None:
    exact = torch.tensor([-1.0, -2.0], dtype=torch.float64)
    found = [Tokens("response 0 of draw 7", exact, exact, exact), Tokens("response 1 of draw 7", exact, exact, exact)]
    assert differences(found, {"engine": "float32", "trainer": "bfloat16"}) == []
    found[1] = Tokens("response 1 of draw 7", exact, exact + torch.tensor([0.0, 0.04]), exact)
    assert differences(found, {"engine": "float32", "trainer": "bfloat16"}) == []
    told = "trainer: 0.01 nats per token from float64, expected at most 0.001 in float32"
    assert differences(found, {"engine": "float32", "trainer": "float32"}) == [told]
    assert capsys.readouterr().out.splitlines()[-1].split() == (
        ["trainer", "float32", "0.01", "0.04", "response", "1", "of", "draw", "7,", "token", "1"]
    )
    broken = Tokens("response 2 of draw 7", exact * torch.nan, exact, exact)
    [told] = differences([broken], {"engine": "bfloat16"})
    assert told.startswith("engine: nan nats")


@pytest.mark.parametrize(
    ("words", "told"),
    [(["gone", "--step", "3"], "gone is not a run directory"), (["a", "--step", "0"], "--step=0 --responses=16")],
)
def test_wrong_use_is_refused(words: list[str], told: str, caplog: pytest.LogCaptureFixture) -> None:
    assert cli.main(["audit", *words]) == 2
    assert told in caplog.text
