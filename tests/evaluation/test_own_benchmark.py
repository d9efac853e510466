"""The commands of docs/howto/own_benchmark.md in their order, with the real reward server; a server answers."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from nemo_prorl.cli import main
from tests.conftest import ROOT
from tests.evaluation.test_evaluate import Address
from tests.test_docs import COMMANDS, blocks

pytestmark = [pytest.mark.starts, pytest.mark.timeout(600)]

PAGE = ROOT / "docs" / "howto" / "own_benchmark.md"
MENDED = "def score(prompt, response, truth):\n    return float(truth['source'] == 'book')\n"


@pytest.fixture
def url() -> Iterator[str]:
    server = Address(0.0)
    yield server.url
    server.process.kill()
    server.process.communicate()


def results(folder: str) -> dict[str, Any]:
    value: dict[str, Any] = json.loads(Path("runs", "measured", folder, "results.json").read_text())
    return value["benchmarks"]["measure"]


def test_the_page_is_walked(
    url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The function is corrected right before the first --judge-again."""
    monkeypatch.chdir(tmp_path)
    for language, name in (("text", "questions.csv"), ("python", "measure.py"), ("yaml", "measure.yaml")):
        [text] = blocks(PAGE, language)
        Path(name).write_text(text)
    printed: list[str] = []
    for words in [words for page, words in COMMANDS if page == PAGE.name]:
        if "--judge-again" in words and not printed[-1].startswith("task"):
            Path("measure.py").write_text(MENDED)
        given = [
            word for one in words[1:] for word in ([url, "--model", "tiny"] if one in ("BASE", "TRAINED") else [one])
        ]
        assert main(given) == 0, words
        printed.append(capsys.readouterr().out)
    assert len(printed) == 8
    assert "2 read, 2 kept" in printed[0]
    before, after = Path("runs/measured/base/verdicts/measure.jsonl").read_text(), results("base")
    assert {json.loads(line)["score"] for line in before.splitlines()} == {0.0}
    assert (after["reward"]["mean"] > 0, after["prompts"], after["samples"]) == (True, 2, 8)
    assert after["scorer"] == results("trained")["scorer"]
    assert f"measure: judged by {after['scorer']} at " in printed[4]
    assert printed[-1].endswith("equal to runs/measured/base/results.json\n")


def test_a_run_s_function_of_another_task_and_fewer_samples(
    url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The reward server is not asked for the function of a task that no benchmark has."""
    monkeypatch.chdir(tmp_path)
    Path("measure.py").write_text(MENDED)
    record = {"id": "m", "task": "measure", "prompt": "1?", "truth": {"answer": "1", "source": "book"}}
    Path("measure.jsonl").write_text(json.dumps(record) + "\n")
    words = ["evaluate", url, "--model", "tiny", "--benchmarks", "./measure.jsonl", "--out", "runs/measured/base"]
    words += ["rewards.functions.measure=measure.py:score", "rewards.functions.other=measure.py:score", "--samples"]
    assert main([*words, "4"]) == 0
    assert results("base")["reward"]["mean"] == 1.0
    caplog.set_level("INFO")
    assert main([*words, "3"]) == 0
    assert "4 responses are stored (1 of them do not count: --samples is smaller now); 0 to sample" in caplog.text
