"""`prorl report RUN --step K`: the groups of a stored step; tests/report/test_browser.py opens the page."""

import re
from pathlib import Path

import pytest

from nemo_prorl import cli
from tests.report.made import STEP_TEXTS, make_step


def page_of(folder: Path, *words: str) -> str:
    """Write the page and return its text."""
    assert cli.main(["report", str(folder), *words]) == 0
    return (folder / "step-3.html").read_text()


def draws_on(page: str) -> list[int]:
    return [int(draw) for draw in re.findall('<h2 id="draw-([0-9]+)"', page)]


def test_a_stored_step_is_shown_with_tokens_of_both_sides_verdicts_and_advantages(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    groups = make_step(tmp_path / "run")
    page = page_of(tmp_path / "run", "--step", "3")
    assert capsys.readouterr().out == f"{tmp_path / 'run' / 'step-3.html'}\n"
    assert draws_on(page) == [10, 11, 12]
    assert page.count("<h3>response ") == 6
    tokens = sum(len(response.token_ids) for group in groups for response in group.responses)
    assert len(re.findall('<span class="e[0-9]+ t[0-9]+" title="engine -?[0-9.]+, trainer -[0-9.]+">', page)) == tokens
    # Scores 1 and 0: half a point from their mean, over the sample's standard deviation.
    assert [float(found) for found in re.findall("advantage (-?[0-9.]+)", page)[:2]] == [0.7071, -0.7071]
    assert page.count("engine and trainer differ by 0.5 nats per token") == 6
    assert page.count("accepted: 4") == 3
    assert page.count(", cut off</h3>") == 3
    shown = re.sub("<[^>]*>", "", page)
    assert STEP_TEXTS[0] in shown
    assert "&lt;b&gt; 5" in shown
    assert "<script" not in page  # the verdicts have one


def test_only_some_groups_are_on_the_page_and_the_table_has_all(tmp_path: Path) -> None:
    make_step(tmp_path / "run")
    for words, draws in ((["--samples", "4"], [10, 11]), (["--draw", "12"], [12]), (["--samples", "0"], [])):
        page = page_of(tmp_path / "run", "--step", "3", *words)
        assert draws_on(page) == draws
        assert [int(draw) for draw in re.findall("<tr><td>(?:<a href=.#draw-[0-9]+.>)?([0-9]+)", page)] == [10, 11, 12]
        assert [int(draw) for draw in re.findall('href="#draw-([0-9]+)"', page)] == draws


def test_what_the_trainer_did_not_measure_is_unknown(tmp_path: Path) -> None:
    make_step(tmp_path / "run", 3, 1, False)
    page = page_of(tmp_path / "run", "--step", "3")
    assert "trainer " not in re.sub("<p>The upper half.*?</p>", "", page)
    assert re.search('<span class="e[0-9]+" title="engine', page)


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["--step", "4"], "step 4 has no stored batch (stored: 3). Fix: "),
        (["--step", "3", "--draw", "9"], "--draw 9: expected draws of step 3: 10, 11, 12"),
        (["--step", "3", "--serve"], "--step 3: expected one run directory, without --evaluation and --serve"),
        (["--draw", "9"], "--draw 9: expected together with --step K"),
    ],
)
def test_wrong_use_is_refused(words: list[str], told: str, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    make_step(tmp_path / "run")
    assert cli.main(["report", str(tmp_path / "run"), *words]) in (2, 4)
    assert told in caplog.text
    assert cli.main(["report", str(tmp_path / "gone"), "--step", "3"]) == 2
    assert "gone is not a run directory" in caplog.text
