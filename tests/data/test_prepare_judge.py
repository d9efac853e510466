"""SCP-116K's agreement filter, against a real HTTP server that speaks the protocol of chat completions."""

import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from nemo_prorl.data.prepare.judge import Judgement, judgement_in
from tests.data.preparing import Rows, dropped, made_anew, manifest, prepare, records, refused
from tests.data.published_stem import scp_116k
from tests.lines import write_lines
from tests.test_formats import against

pytestmark = pytest.mark.starts

MODEL = "judge-1"


def pairs(count: int) -> Rows:
    """Every third of R1's answers is another than the source's."""
    return [
        {
            "problem": f"What is the mass of {n} bricks of 2 kg?",
            "solution": f"One has 2 kg.\nTogether they have {2 * n} kg.",
            "r1_response": f"<think>{n}</think>It is {_written(n)}.",
            "domain": "physics",
        }
        for n in range(1, count + 1)
    ]


def _written(n: int) -> str:
    """R1's answer: wrong for every third, and without a box for every fourth."""
    mass = 2 * n + (n % 3 == 0)
    return f"{mass} kg" if n % 4 == 0 else f"\\boxed{{{mass}\\,\\text{{kg}}}}"


class Judge(ThreadingHTTPServer):
    """Reads and compares the two masses of what it is asked; `faults` come first, `slow_s` before each answer."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.asked: Counter[str] = Counter()
        self.bodies: list[dict[str, Any]] = []
        self.keys: list[str | None] = []
        self.faults: list[int] = []
        self.slow_s = 0.0
        self.counts_tokens = True
        self.busy = self.busiest = 0
        self.lock = threading.Lock()

    @staticmethod
    def judge(asked: str) -> str | None:
        found = re.search(r"Together they have (\d+) kg.*It is (?:\\boxed\{)?(\d+)", asked, re.DOTALL)
        assert found
        first, second = found.groups()
        if first == "10":
            return "Who knows."
        if first == "20":
            return None  # as a refusal
        verdict = "AGREE" if first == second else "DISAGREE"
        thought = "<think>VERDICT: DISAGREE? no</think>Both say so."
        return f"{thought}\n**FIRST:** ${first}\\,\\text{{kg}}$\nSECOND: {second} kg\nVERDICT: {verdict}"

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}/v1"


class _Handler(BaseHTTPRequestHandler):
    server: Judge

    def do_POST(self) -> None:
        server = self.server
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        with server.lock:
            server.busy += 1
            server.busiest = max(server.busiest, server.busy)
            fault = server.faults.pop(0) if server.faults else 0
        time.sleep(server.slow_s)
        try:
            if self.path != "/v1/chat/completions" or body["model"] != MODEL:
                fault = 404
            if fault:
                self._answer(fault, b"nonsense" if fault == 200 else b'{"error": "no"}')
                return
            asked = body["messages"][0]["content"]
            with server.lock:
                server.asked[asked] += 1
                server.bodies.append(body)
                server.keys.append(self.headers["Authorization"])
            reply: dict[str, Any] = {"choices": [{"message": {"content": server.judge(asked)}}]}
            if server.counts_tokens:
                reply["usage"] = {"prompt_tokens": 100, "completion_tokens": 20, "total_tokens": 120}
            self._answer(200, json.dumps(reply).encode())
        finally:
            with server.lock:
                server.busy -= 1

    def _answer(self, status: int, body: bytes) -> None:
        try:
            self.send_response(status)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)
        except OSError:
            pass  # who asked was killed

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def judge() -> Iterator[Judge]:
    server = Judge()
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    yield server
    server.shutdown()
    server.server_close()


def words(folder: Path, judge: Judge, count: int) -> list[str]:
    file = write_lines(folder / "scp.jsonl", pairs(count))
    given = ["scp-116k", "--from", str(file), "--out", str(folder / "out"), "--check", "0"]
    return [*given, "--judge-url", judge.url, "--judge-model", MODEL, "--judge-workers", "4"]


def test_what_agrees_is_kept_and_the_judge_is_asked_once(
    tmp_path: Path, judge: Judge, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PRORL_JUDGE_KEY", "secret")
    given = words(tmp_path, judge, 12)
    assert prepare(*given) == 0
    told = manifest(tmp_path / "out")
    assert against("data-manifest", told) == []
    assert told["checks"]["agreement"] == {
        **{"by": "judge", "model": MODEL},
        "counts": {"agree": 6, "disagree": 4, "unclear": 2},
        **{"requests": 12, "prompt_tokens": 1200, "completion_tokens": 240},
    }
    assert dropped(tmp_path / "out") == dict.fromkeys((3, 6, 9, 12), "the solutions disagree") | {
        5: "no verdict of the judge",
        10: "no verdict of the judge",
    }
    kept = {record["prompt"][0]["content"].split()[5]: record for record in records(tmp_path / "out")}
    assert kept["1"]["truth"] == {"answer": "2\\,\\text{kg}"}
    assert kept["4"]["truth"] == {"answer": ["8\\,\\text{kg}", "8 kg"]}  # no box, so as the judge read them
    assert kept["1"]["meta"] == {"domain": "physics"}
    assert set(judge.keys) == {"Bearer secret"}
    assert {body["temperature"] for body in judge.bodies} == {0.0}
    assert 1 < judge.busiest <= 4 or len(judge.bodies) == 12
    assert "secret" not in (tmp_path / "out" / "manifest.json").read_text()
    first = (tmp_path / "out" / "train.jsonl").read_bytes()
    assert prepare(*given) == 0  # from the cache
    assert len(judge.bodies) == 12
    assert (tmp_path / "out" / "train.jsonl").read_bytes() == first
    assert prepare(*words(tmp_path, judge, 14)) == 0  # two more rows
    assert len(judge.bodies) == 14


def test_killed_and_started_again_it_asks_only_for_what_is_missing(tmp_path: Path, judge: Judge) -> None:
    given, count = words(tmp_path, judge, 60), 60
    cache = tmp_path / "out" / "judge-cache.jsonl"
    judge.slow_s = 0.1
    command = [sys.executable, "-m", "nemo_prorl.cli", "data", "prepare", *given]
    process = subprocess.Popen(command, env={**os.environ, "PYTHONPATH": os.getcwd()}, stderr=subprocess.DEVNULL)
    until = time.monotonic() + 60
    while not (cache.exists() and cache.read_bytes().count(b"\n") >= 10):
        assert process.poll() is None
        assert time.monotonic() < until
        time.sleep(0.01)
    process.send_signal(signal.SIGKILL)
    process.wait()
    assert not (tmp_path / "out" / "manifest.json").exists()
    assert not (tmp_path / "out" / "train.jsonl").exists()
    known = cache.read_bytes().count(b"\n")
    assert known < count
    with cache.open("ab") as file:
        file.write(b'{"key": "cut o')  # as a kill in the middle of a write leaves it
    judge.slow_s = 0.0
    time.sleep(0.5)  # a request that was on its way at the kill has come
    while judge.busy:
        time.sleep(0.01)
    judge.asked.clear()
    assert prepare(*given) == 0
    assert sum(judge.asked.values()) == len(judge.asked) == count - known
    assert manifest(tmp_path / "out")["checks"]["agreement"]["counts"] == {"agree": 38, "disagree": 20, "unclear": 2}
    assert cache.read_bytes().count(b"\n") == count


def test_a_busy_judge_is_asked_again(tmp_path: Path, judge: Judge) -> None:
    judge.faults = [429, 503, 500, 200]
    assert prepare(*words(tmp_path, judge, 4)) == 0
    assert manifest(tmp_path / "out")["checks"]["agreement"]["counts"] == {"agree": 3, "disagree": 1}


def test_a_judge_that_refuses_or_is_gone_ends_it_with_what_is_known_kept(
    tmp_path: Path, judge: Judge, capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    given = words(tmp_path, judge, 4)
    judge.faults = [0, 401, 401, 401, 401]
    told = refused(capsys, caplog, 2, *given, "--judge-workers", 1)
    assert "the server refused --judge-model 'judge-1': " in told
    assert 'HTTP 401: {"error": "no"}' in told
    assert "Fix: check --judge-url and --judge-model" in told
    assert "PRORL_JUDGE_KEY" in told
    judge.faults = []
    assert prepare(*given) == 0
    assert len(judge.bodies) == 4  # the one before the refusal counts
    given[given.index(judge.url)] = "http://127.0.0.1:9/v1"
    (made_anew(tmp_path / "out") / "judge-cache.jsonl").unlink()
    told = refused(capsys, caplog, 1, *given, "--judge-deadline-s", 0.3)
    assert f"waited 0.3 s for a verdict of the judge at {given[given.index('--judge-url') + 1]}" in told
    assert "run the same command again" in told


def test_another_model_is_asked_anew_and_a_broken_cache_is_named(
    tmp_path: Path, judge: Judge, capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    given = words(tmp_path, judge, 3)
    assert prepare(*given) == 0
    other = [*given, "--judge-model", "judge-2"]
    made_anew(tmp_path / "out")
    assert "HTTP 404" in refused(capsys, caplog, 2, *other)
    cache = made_anew(tmp_path / "out") / "judge-cache.jsonl"
    cache.write_text(cache.read_text() + '{"key": "a", "verdict": "maybe"}\n')
    assert f"{cache}:4: field 'verdict' is 'maybe'; expected agree" in refused(capsys, caplog, 4, *given)


def kept_problems(out: Path) -> list[str]:
    return [record["prompt"][0]["content"] for record in records(out)]


def test_size_ends_it_early_with_the_same_records_whatever_the_workers_and_kills(tmp_path: Path, judge: Judge) -> None:
    given = words(tmp_path, judge, 400)
    assert prepare(*given, "--size", 30) == 0
    first = (tmp_path / "out" / "train.jsonl").read_bytes()
    assert len(records(tmp_path / "out")) == 30
    counts = manifest(tmp_path / "out")["counts"]["dropped"]
    assert counts["not judged"] == 400 - len(judge.bodies) == 400 - 64
    assert counts["beyond --size"] > 0
    told = manifest(tmp_path / "out")["checks"]["agreement"]
    assert told["requests"] == 64
    assert told["prompt_tokens"] == 6400
    (made_anew(tmp_path / "out") / "judge-cache.jsonl").unlink()
    judge.slow_s = 0.002
    assert prepare(*given, "--size", 30, "--judge-workers", 1) == 0
    assert (tmp_path / "out" / "train.jsonl").read_bytes() == first
    cache = made_anew(tmp_path / "out") / "judge-cache.jsonl"
    cache.write_bytes(b"".join(cache.read_bytes().splitlines(keepends=True)[:20]))  # as after a kill
    judge.asked.clear()
    assert prepare(*given, "--size", 30) == 0
    assert sum(judge.asked.values()) == 64 - 20
    assert (tmp_path / "out" / "train.jsonl").read_bytes() == first
    assert manifest(tmp_path / "out")["checks"]["agreement"] == told
    smaller = {*kept_problems(made_anew(tmp_path / "out"))}
    assert prepare(*given, "--size", 90) == 0  # more of the same order
    assert smaller < {*kept_problems(made_anew(tmp_path / "out"))}
    assert prepare(*given, "--size", 30, "--seed", 1) == 0
    assert smaller != {*kept_problems(tmp_path / "out")}


def test_an_estimate_comes_before_the_first_request(
    tmp_path: Path, judge: Judge, capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    given = words(tmp_path, judge, 20)
    caplog.set_level("INFO")
    assert prepare(*given, "--size", 8, "--estimate") == 0
    said = capsys.readouterr().out
    assert "20 pairs of solutions, 0 of them judged before: at most 20 requests and at least 8" in said
    tokens = int(said.split("About ")[1].split(" ")[0])
    assert not judge.bodies
    assert not (tmp_path / "out").exists()
    assert prepare(*given, "--limit", 5) == 0
    assert "5 pairs of solutions, 0 of them judged before: at most 5 requests." in caplog.text
    assert len(judge.bodies) == 5
    longest = max(len(body["messages"][0]["content"]) for body in judge.bodies)
    assert tokens == pytest.approx(longest / 4, rel=0.05)
    assert prepare(*given, "--estimate") == 0
    assert "20 pairs of solutions, 5 of them judged before: at most 15 requests." in capsys.readouterr().out
    assert "--estimate: is for" in refused(capsys, caplog, 2, *given, "--agreement", "none", "--estimate")


def test_a_server_that_counts_no_tokens_is_no_fault_and_long_texts_are_cut(tmp_path: Path, judge: Judge) -> None:
    judge.counts_tokens = False
    rows = pairs(2)
    rows[1]["solution"] = "Long. " * 5_000 + rows[1]["solution"]
    file = write_lines(tmp_path / "scp.jsonl", rows)
    given = ["--from", file, "--out", tmp_path / "out", "--judge-url", judge.url, "--judge-model", MODEL]
    assert prepare("scp-116k", *given) == 0
    told = manifest(tmp_path / "out")["checks"]["agreement"]
    assert (told["requests"], told["prompt_tokens"], told["completion_tokens"]) == (2, 0, 0)
    assert max(len(body["messages"][0]["content"]) for body in judge.bodies) < 12_000


def test_the_grader_and_none_need_a_box(tmp_path: Path) -> None:
    folder = scp_116k(tmp_path)
    given = ("scp-116k", "--from", folder, "--check", "all")
    assert prepare(*given, "--out", tmp_path / "graded", "--agreement", "grader") == 0
    fates = {2: "the solutions disagree", 3: "no answer", 4: "no solution", 5: "no solution", 6: "nothing to compare"}
    fates |= {7: "no answer", 8: "duplicate", 9: "no problem", 10: "no answer"}
    assert dropped(tmp_path / "graded") == fates
    assert prepare(*given, "--out", tmp_path / "all", "--agreement", "none") == 0
    kept_too = {2, 6}
    assert set(dropped(tmp_path / "all")) == set(fates) - kept_too


def test_the_grader_compares_boxed_answers_without_a_judge(tmp_path: Path) -> None:
    rows = pairs(4)
    rows[0]["solution"] += "\nSo \\boxed{2\\,\\text{kg}}."
    rows[2]["solution"] += "\nSo \\boxed{6\\,\\text{kg}}."
    file = write_lines(tmp_path / "scp.jsonl", rows)
    given = ("--agreement", "grader", "--check", 0)
    assert prepare("scp-116k", "--from", file, "--out", tmp_path / "out", *given) == 0
    assert dropped(tmp_path / "out") == {2: "nothing to compare", 3: "the solutions disagree", 4: "no answer"}
    counts = manifest(tmp_path / "out")["checks"]["agreement"]["counts"]
    assert counts == {"agree": 1, "disagree": 1, "unclear": 1}
    assert prepare("scp-116k", "--from", file, "--out", tmp_path / "all", "--agreement", "none", "--check", 0) == 0
    assert manifest(tmp_path / "all")["counts"]["kept"] == 3


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("FIRST: 1\nSECOND: 2\nVERDICT: AGREE", Judgement("agree", "1", "2")),
        ("FIRST: 3\nI first thought so.\nFIRST: 1\nSECOND: 2\nVERDICT: DISAGREE", Judgement("disagree", "1", "2")),
        ("<think>VERDICT: AGREE</think>FIRST: 1\nSECOND: 2\nVERDICT: DISAGREE", Judgement("disagree", "1", "2")),
        ("<think>FIRST: 1\nSECOND: 1\nVERDICT: AGREE</think>", Judgement("unclear")),
        (
            "**FIRST:** $\\frac{1}{2}$\n**SECOND:** \\boxed{0.5}\n**VERDICT: AGREE**",
            Judgement("agree", "\\frac{1}{2}", "0.5"),
        ),
        ("FIRST: \\(x\\)\nSECOND: $x$.\nVERDICT: AGREE", Judgement("agree", "x", "x")),
        ("FIRST: $a$ and $b$\nSECOND: b\nVERDICT: AGREE", Judgement("agree", "$a$ and $b$", "b")),
        ("FIRST: NONE\nSECOND: 2\nVERDICT: DISAGREE", Judgement("no answer", "NONE", "2")),
        ("FIRST: 1\nSECOND:\nVERDICT: AGREE", Judgement("unclear", "1", "")),
        ("FIRST: 1\nSECOND: 2\nVERDICT: AGREEMENT", Judgement("unclear", "1", "2")),
        ("They agree.", Judgement("unclear")),
        ('{"verdict": "AGREE", "first": ', Judgement("unclear")),
        ("", Judgement("unclear")),
    ],
)
def test_the_last_lines_count(text: str, expected: Judgement) -> None:
    assert judgement_in(text) == expected
