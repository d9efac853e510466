"""`prorl audit`: the table and the sides that it calls off; tests/test_main_job.py audits a real run."""

from pathlib import Path

import pytest
import torch

from nemo_prorl import cli
from nemo_prorl.report.audit import Tokens, differences
from nemo_prorl.report.tokens import ShownResponse, write_page


def test_a_side_is_off_beyond_what_its_precision_explains(capsys: pytest.CaptureFixture[str]) -> None:
    exact = torch.tensor([-1.0, -2.0], dtype=torch.float64)
    found = [
        Tokens(0, "response 0 of draw 7", exact, exact, exact),
        Tokens(1, "response 1 of draw 7", exact, exact, exact),
    ]
    assert differences(found, {"engine": "float32", "trainer": "bfloat16"}) == []
    found[1] = Tokens(1, "response 1 of draw 7", exact, exact + torch.tensor([0.0, 0.04]), exact)
    assert differences(found, {"engine": "float32", "trainer": "bfloat16"}) == []
    told = "trainer: 0.01 nats per token from float64, expected at most 0.001 in float32"
    assert differences(found, {"engine": "float32", "trainer": "float32"}) == [told]
    assert capsys.readouterr().out.splitlines()[-1].split() == (
        ["trainer", "float32", "0.01", "0.04", "response", "1", "of", "draw", "7,", "token", "1"]
    )
    broken = Tokens(2, "response 2 of draw 7", exact * torch.nan, exact, exact)
    [told] = differences([broken], {"engine": "bfloat16"})
    assert told.startswith("engine: nan nats")


def test_the_page_shows_tokens_with_both_probabilities(tmp_path: Path) -> None:
    tokens = ["a <b>", "\n"]
    shown = ShownResponse(
        "response 0", "1 < 2?", "right", tokens, engine=[-0.5, 0.0], trainer=[-9.0, 0.0], exact=[-1, 0]
    )
    write_page(tmp_path / "page.html", "run & step", [shown])
    page = (tmp_path / "page.html").read_text()
    assert "<h1>run &amp; step</h1>" in page
    assert "<pre>1 &lt; 2?</pre>" in page
    assert 'title="engine -0.5000, trainer -9.0000, float64 -1.0000"' in page
    assert "linear-gradient(rgba(255,140,0,0.10) 50%,rgba(255,140,0,1.00) 50%)" in page
    assert ">a &lt;b&gt;</span>" in page


@pytest.mark.parametrize(
    ("words", "told"),
    [(["gone", "--step", "3"], "gone is not a run directory"), (["a", "--step", "0"], "--step=0 --responses=16")],
)
def test_wrong_use_is_refused(words: list[str], told: str, caplog: pytest.LogCaptureFixture) -> None:
    assert cli.main(["audit", *words]) == 2
    assert told in caplog.text
