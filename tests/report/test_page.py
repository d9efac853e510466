"""The file that `prorl report` writes: self-contained, safe whatever a run wrote, legible; and its exit codes.

What it does in a browser is in test_browser.py.
"""

import base64
import hashlib
import json
import re
import subprocess
from collections.abc import Callable
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

from nemo_prorl import cli
from nemo_prorl.report.data import page_data
from nemo_prorl.report.page import page
from tests.lines import write_lines
from tests.report.made import HOSTILE, make_hostile, make_run

PAGE = Path(page.__code__.co_filename).parent / "page"
SCRIPTS = sorted(PAGE.glob("*.js"))  # uPlot's, too


class Elements(HTMLParser):
    """The elements of a page with their attributes and text, as a browser's parser divides it."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.found: list[tuple[str, dict[str, str | None], list[str]]] = []
        self._open = False
        self.feed(text)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.found.append((tag, dict(attrs), []))
        self._open = True

    def handle_endtag(self, tag: str) -> None:
        self._open = False

    def handle_data(self, data: str) -> None:
        if self._open:
            self.found[-1][2].append(data)

    def all(self, tag: str) -> list[tuple[dict[str, str | None], str]]:
        return [(attributes, "".join(text)) for name, attributes, text in self.found if name == tag]


def written(folder: Path, **options: Any) -> tuple[str, Elements]:
    data = page_data([folder], [], 100) | options
    text = page(data)
    return text, Elements(text)


def test_the_file_asks_for_nothing(tmp_path: Path) -> None:
    text, elements = written(make_run(tmp_path / "run"))
    addresses = [
        v for _, a, _ in elements.found for k, v in a.items() if k in ("src", "href", "action", "data", "poster")
    ]
    assert addresses
    assert all(address == "data:," or (address or "").startswith("#") for address in addresses)
    uplot = "https://github.com/leeoniya/uPlot"  # in its own notice
    assert set(re.findall(r"https?://[^\s\"']+", text)) == {"http://www.w3.org/2000/svg", uplot}
    assert "The above copyright notice and this permission notice shall be included" in text
    assert "url(" not in text
    assert "@import" not in text
    assert not {"img", "iframe", "object", "embed", "base", "audio", "video"} & {tag for tag, _, _ in elements.found}


def test_without_scripts_the_page_says_the_outcome(tmp_path: Path) -> None:
    folder = make_run(tmp_path / "run")
    mean = {"mean": 0.5, "se": 0.02, "prompts": 64}
    with (folder / "journal.jsonl").open("a") as file:
        file.write(json.dumps({"event": "validation", "step": 12, "time": 1.8e9, "all": mean, "tasks": {"sums": mean}}))
        file.write("\n")
    text, _ = written(folder)
    [shown] = re.findall(r"<noscript>(.*)</noscript>", text, re.DOTALL)
    assert "validations have other sources" not in shown
    assert "mean reward on held-out prompts" not in shown  # the validations have different sources
    lines = (folder / "journal.jsonl").read_text().splitlines()
    last = json.loads(lines[-1]) | {"tasks": {"sums": mean, "words": mean}}
    write_lines(folder / "journal.jsonl", [*map(json.loads, lines[:-1]), last])
    [shown] = re.findall(r"<noscript>(.*)</noscript>", written(folder)[0], re.DOTALL)
    assert "run: mean reward on held-out prompts 0.250 at step 0, 0.500 at step 12. 8.8 standard errors: " in shown


@pytest.mark.parametrize("live", [False, True])
def test_the_policy_lets_this_script_run_and_no_other(tmp_path: Path, live: bool) -> None:
    _, elements = written(make_run(tmp_path / "run"), **({"live": "/data.json"} if live else {}))
    [policy] = [a["content"] for a, _ in elements.all("meta") if a.get("http-equiv") == "Content-Security-Policy"]
    [(kind, data), (_, script)] = elements.all("script")
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    rules = dict(rule.split(" ", 1) for rule in str(policy).split("; "))
    assert rules["default-src"] == "'none'"
    assert rules["script-src"] == f"'sha256-{digest}'"
    assert rules["connect-src"] == ("'self'" if live else "'none'")
    assert kind["type"] == "application/json"
    assert json.loads(data)["curves"][0]["steps"] == 12


def test_what_a_run_wrote_stays_data(tmp_path: Path) -> None:
    plain, hostile = (written(f(tmp_path / name)) for name, f in (("plain", make_run), ("hostile", make_hostile)))
    assert [tag for tag, _, _ in hostile[1].found] == [tag for tag, _, _ in plain[1].found]
    [(_, data), _] = hostile[1].all("script")
    assert not set(data) & set("<>&\u2028\u2029")
    assert data.isascii()
    [curve] = json.loads(data)["curves"]
    assert curve["samples"]["groups"][0]["prompt"] == "".join(HOSTILE)
    assert f"reward/{HOSTILE[0]}" in curve["metrics"]


def test_a_name_stays_text(tmp_path: Path) -> None:
    folder = make_run(tmp_path / "<img src=x>{{data}}")
    _, elements = written(folder)
    assert not elements.all("img")
    assert len(elements.all("script")) == 2


def test_the_script_never_parses_text_as_html() -> None:
    assert SCRIPTS
    for path in SCRIPTS:
        text = path.read_text()
        assert not re.search(r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|\beval\(|new Function", text), (
            path
        )
        assert "</script" not in text
        assert "<!--" not in text


# --- colours ---------------------------------------------------------------------------------------------------------


def luminance(colour: str) -> float:
    """Relative luminance of #rrggbb, as WCAG defines it."""
    parts = [int(colour[at : at + 2], 16) / 255 for at in (1, 3, 5)]
    linear = [part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


def contrast(one: str, other: str) -> float:
    high, low = sorted((luminance(one), luminance(other)), reverse=True)
    return (high + 0.05) / (low + 0.05)


def test_contrast_is_known_for_black_on_white() -> None:
    assert contrast("#000000", "#ffffff") == pytest.approx(21)


@pytest.mark.parametrize("theme", [0, 1], ids=["light", "dark"])
def test_colours_can_be_seen(theme: int) -> None:
    """4.5 to 1 for text, 3 to 1 for lines, on the page and on a card (WCAG AA)."""
    blocks = re.findall(r":root \{(.*?)\}", (PAGE / "page.css").read_text(), re.S)
    colours = dict(re.findall(r"--(\w+): (#[0-9a-f]{6})", blocks[theme]))
    assert len(colours) == 17
    for back in (colours["back"], colours["card"]):
        for name in ("text", "dim", "link", "alarm"):
            assert contrast(colours[name], back) >= 4.5, name
        for number in range(8):
            assert contrast(colours[f"c{number}"], back) >= 3, number


# --- the command -----------------------------------------------------------------------------------------------------


def test_the_report_is_written_into_the_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = make_run(tmp_path / "run")
    assert cli.main(["report", str(folder)]) == 0
    assert capsys.readouterr().out == f"{folder / 'report.html'}\n"
    first = (folder / "report.html").read_text()
    assert first.startswith("<!DOCTYPE html>")
    assert cli.main(["report", str(folder), "--samples", "0"]) == 0
    assert len((folder / "report.html").read_text()) < len(first)
    assert sorted(path.name for path in folder.glob("*.html*")) == ["report.html"]


def test_several_runs_are_compared_in_one_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    folders = [make_run(tmp_path / name, steps) for name, steps in (("a", 3), ("b", 5))]
    assert cli.main(["report", *map(str, folders)]) == 0
    elements = Elements((tmp_path / "report.html").read_text())
    data = json.loads(elements.all("script")[0][1])
    assert [curve["steps"] for curve in data["curves"]] == [3, 5]
    assert data["differences"] == [{"key": "trainer.grpo.max_steps", "values": ["3", "5"]}]


def test_wrong_use_is_said_before_anything_is_written(
    tmp_path: Path, prorl: Callable[..., subprocess.CompletedProcess[str]]
) -> None:
    told = prorl("report", str(tmp_path / "nothing"))
    assert told.returncode == 2
    assert "no such folder" in told.stderr
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("options", "told"),
    [
        (["--out", "OUT"], "is a folder"),
        (["--out", "OUT/none/x.html"], "cannot be written"),
        (["--samples", "-2"], "expected -1"),
        (["--port", "80"], "expected together with --serve"),
        (["--serve", "--out", "x"], "expected one of them"),
        (["--serve", "--port", "70000"], "must be 1 to 65535"),
        (["--evaluation", "OUT"], "expected results.json or comparison.json"),
    ],
)
def test_wrong_options_exit_with_2(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, options: list[str], told: str
) -> None:
    folder = make_run(tmp_path / "run", 1)
    assert cli.main(["report", str(folder), *(option.replace("OUT", str(tmp_path)) for option in options)]) == 2
    assert told in caplog.text


@pytest.mark.parametrize("broken", ["{", "[]", '{"format": 1, "benchmarks": []}'])
def test_a_broken_evaluation_exits_with_4(tmp_path: Path, caplog: pytest.LogCaptureFixture, broken: str) -> None:
    folder = make_run(tmp_path / "run", 1)
    (tmp_path / "results.json").write_text(broken)
    assert cli.main(["report", str(folder), "--evaluation", str(tmp_path)]) == 4
    assert "results.json" in caplog.text


def test_a_long_run_stays_a_small_file(tmp_path: Path) -> None:
    folder = make_run(tmp_path / "run", 1)
    names = [f"policy/number_{k}" for k in range(60)]
    lines = [{"step": k, **dict.fromkeys(names, k * 7919 % 1000 / 997)} for k in range(1, 1501)]
    write_lines(folder / "metrics.jsonl", lines)
    text, _ = written(folder)
    assert len(text) < 60 * 320 * 4 * 12  # metrics, points, numbers a point, characters
    assert len(json.loads(Elements(text).all("script")[0][1])["curves"][0]["metrics"]) == 60


def test_nan_in_an_evaluation_is_an_error_that_names_the_file(tmp_path: Path) -> None:
    from nemo_prorl.errors import DataError
    from nemo_prorl.report import evaluation

    row = {"pass@k": {"1": float("nan")}}
    results = {"format": 1, "model": {"name": "m"}, "complete": True, "benchmarks": {"b": row}, "domains": {}}
    (tmp_path / "results.json").write_text(json.dumps({**results, "out_of_distribution": None}))
    with pytest.raises(DataError, match=r"results\.json: expected a file that prorl evaluate wrote"):
        evaluation.read(tmp_path)
