"""`prorl rewards`: results on standard output, bad lines named, verdicts in order and streamed."""

import argparse
import io
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from nemo_prorl.errors import ConfigError, DataError, RewardFailure
from nemo_prorl.files import json_lines
from nemo_prorl.rewards import cli
from tests.lines import write_lines
from tests.rewards.conftest import ROOT, request_of

pytestmark = pytest.mark.starts

MAIN = """
import argparse, sys
from nemo_prorl.errors import ProrlError
from nemo_prorl.rewards import cli
parser = argparse.ArgumentParser()
cli.add_parser(parser.add_subparsers())
args = parser.parse_args()
try:
    sys.exit(cli.run(args))
except ProrlError as error:
    print(error, file=sys.stderr)
    sys.exit(error.exit_code)
"""


def run(*arguments: str) -> int:
    parser = argparse.ArgumentParser()
    cli.add_parser(parser.add_subparsers())
    return cli.run(parser.parse_args(["rewards", *arguments]))


def lines_of(text: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in text.splitlines()]


def test_list_and_describe(broken_plugins: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run("list", "--json") == 0
    rows = {row["name"]: row for row in lines_of(capsys.readouterr().out)}
    assert rows["echo"]["tasks"] == ["echo"]
    assert rows["broken"]["state"] == "broken"
    assert "misbehaving_missing_module" in rows["broken"]["why"]
    assert run("describe", "code") == 0
    assert "packages  judged programs may import numpy, scipy, sympy, mpmath, networkx," in capsys.readouterr().out
    assert run("describe", "math") == 0
    out = capsys.readouterr().out
    assert "rewards.plugins.math.time_budget_s: float" in out
    with pytest.raises(ConfigError, match="unknown reward plugin 'maths'; known: code, echo"):
        run("describe", "maths")


def test_score_a_file_in_order(plugins: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO")
    count = 40
    requests = [request_of("echo", str(at / count), f"r{at}", meta={"sleep_s": 0.02 * (at % 3)}) for at in range(count)]
    source, out = write_lines(tmp_path / "in.jsonl", requests), tmp_path / "out.jsonl"
    assert run("score", "--in", str(source), "--out", str(out), "--workers", "3") == 0
    verdicts = lines_of(out.read_text())
    assert [(v["id"], v["score"]) for v in verdicts] == [(f"r{at}", at / count) for at in range(count)]
    assert caplog.messages[-1] == "40 responses: 0 score 1, 1 score 0, 39 between"


def test_each_line_leaves_at_once(tmp_path: Path) -> None:
    with (tmp_path / "out").open("w") as out:
        cli._write(out, "a line")
        assert (tmp_path / "out").read_text() == "a line\n"


def test_score_says_how_many_responses_have_no_score(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO")
    (tmp_path / "mine.py").write_text("def score(prompt, response, truth):\n    return 1 / (response != 'zero')\n")
    source = write_lines(tmp_path / "in.jsonl", [request_of("mine", "one"), request_of("mine", "zero", "r2")])
    function = f"rewards.functions.mine={tmp_path / 'mine.py'}:score"
    assert run("score", function, "--in", str(source), "--out", str(tmp_path / "out.jsonl")) == 0
    assert caplog.messages[-2] == "1 responses: 1 score 1, 0 score 0, 0 between"
    assert caplog.messages[-1].startswith("1 responses have no score")


@pytest.mark.parametrize("text", ["0.2", "soon"])
def test_score_takes_the_time_of_a_function(text: str, tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text("def score(prompt, response, truth):\n    while True: pass\n")
    source, out = write_lines(tmp_path / "in.jsonl", [request_of("mine", "one")]), tmp_path / "out.jsonl"
    words = [f"rewards.functions.mine={tmp_path / 'mine.py'}:score", f"rewards.functions_time_s={text}"]
    if text == "soon":
        with pytest.raises(ConfigError, match="functions_time_s=soon: expected a number of seconds above 0"):
            run("score", *words, "--in", str(source), "--out", str(out))
        return
    assert run("score", *words, "--in", str(source), "--out", str(out)) == 0
    [verdict] = lines_of(out.read_text())
    assert (verdict["failure"], "over the time budget of 0.2 s" in verdict["detail"]) == ("timeout", True)


@pytest.mark.parametrize("streamed", [False, True])
def test_score_fails_if_no_response_has_a_score(
    streamed: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "mine.py").write_text("def score(prompt, response, truth):\n    return float(response) or None\n")
    source = write_lines(tmp_path / "in.jsonl", [request_of("mine", "0", f"r{n}") for n in range(2)])
    out, function = tmp_path / "out.jsonl", f"rewards.functions.mine={tmp_path / 'mine.py'}:score"
    monkeypatch.setattr("sys.stdin", source.open())
    with pytest.raises(RewardFailure, match="none of 2 responses could be judged; the first: .* score returned None"):
        run("score", function, "--in", "-" if streamed else str(source), "--out", str(out))
    assert [verdict["score"] for verdict in lines_of(out.read_text())] == [None, None]


def test_a_bad_line_is_named_before_anything_is_judged(plugins: Path, tmp_path: Path) -> None:
    good = request_of("echo", "1")
    for bad, says in (
        ({**good, "finished": "yes"}, r"in\.jsonl:2: field 'finished' is str"),
        ([], r"in\.jsonl:2: a request must be a JSON object"),
    ):
        source = write_lines(tmp_path / "in.jsonl", [good, bad])
        with pytest.raises(DataError, match=says):
            run("score", "--in", str(source))
    (tmp_path / "in.jsonl").write_text('{"id": ')
    with pytest.raises(DataError, match=r"in\.jsonl:1: not JSON"):
        run("score", "--in", str(tmp_path / "in.jsonl"))
    (tmp_path / "in.jsonl").write_text("\n")
    with pytest.raises(DataError, match="contains no request"):
        run("score", "--in", str(tmp_path / "in.jsonl"))
    with pytest.raises(DataError, match="cannot be read"):
        run("score", "--in", str(tmp_path / "absent.jsonl"))
    source = write_lines(tmp_path / "in.jsonl", [good])
    with pytest.raises(DataError, match="out.jsonl: cannot be written: No such file"):
        run("score", "--in", str(source), "--out", str(tmp_path / "none" / "out.jsonl"))
    source = write_lines(tmp_path / "in.jsonl", [request_of("ecco", "1")])
    with pytest.raises(ConfigError, match="no reward plugin judges task 'ecco'; known: code, echo"):
        run("score", "--in", str(source))


def test_a_stream_is_read_to_its_end_without_its_empty_lines(monkeypatch: pytest.MonkeyPatch) -> None:
    one, two = (json.dumps(request_of("echo", "1", name)) for name in "ab")
    monkeypatch.setattr(sys, "stdin", io.StringIO(f"{one}\n \n\n{two}"))
    assert [request.id for request in cli._from_stdin()] == ["a", "b"]
    monkeypatch.setattr(sys, "stdin", io.StringIO(f"{one}\n\n{{}}"))
    with pytest.raises(DataError, match="standard input:3: field"):
        list(cli._from_stdin())


def test_a_project_is_written_where_it_is_wanted_and_the_next_steps_are_shown(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    for options, folder, sandboxed in ((["--sandbox"], "word_count", True), (["--dir", "other"], "other", False)):
        assert run("new", "word_count", *options) == 0
        assert f"--no-build-isolation -e {folder}\n" in capsys.readouterr().out
        (code,) = (tmp_path / folder).rglob("plugin.py")
        assert ("needs_sandbox = True" in code.read_text()) == sandboxed


def test_a_stream_answers_each_line_before_the_next_is_written(plugins: Path) -> None:
    command = [sys.executable, "-c", MAIN, "rewards", "score", "--in", "-"]
    process = subprocess.Popen(command, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert process.stdin is not None
    assert process.stdout is not None
    for at in range(3):
        process.stdin.write(json.dumps(request_of("echo", f"0.{at}", f"r{at}")) + "\n")
        process.stdin.flush()
        verdict = json.loads(process.stdout.readline())  # the stream is still open
        assert (verdict["id"], verdict["score"]) == (f"r{at}", at / 10)
    process.stdin.write("{}\n")
    process.stdin.close()
    assert process.stdout.read() == ""
    assert process.wait(30) == 4


def test_a_stream_starts_what_it_needs_with_all_the_workers(plugins: Path) -> None:
    requests = [request_of("echo", "1", f"r{at}", meta={"sleep_s": 0.2}) for at in range(6)]
    command = [sys.executable, "-c", MAIN, "rewards", "score", "--workers", "2"]
    text = json_lines(requests)
    done = subprocess.run(command, cwd=ROOT, input=text, capture_output=True, text=True, check=True, timeout=60)
    verdicts = lines_of(done.stdout)
    assert [v["id"] for v in verdicts] == [f"r{at}" for at in range(6)]
    assert len({v["detail"] for v in verdicts}) == 2  # its workers' numbers
    assert "warming up" in done.stderr
    assert done.stderr.count("warming up") == 2  # of echo alone


def test_bad_settings_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        run("score", "--settings", "[1]")
    assert "must map plugin names to settings" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        run()
    assert "required: COMMAND" in capsys.readouterr().err
