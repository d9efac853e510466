"""The conformance kit: installed plugins pass; a plugin that is bad in one way fails that check and no other."""

import dataclasses
import json
import os
import re
import subprocess
from collections.abc import Callable
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any

import psutil
import pytest

from nemo_prorl import cli
from nemo_prorl.errors import ConfigError, DataError, UnfitMachine
from nemo_prorl.rewards import conformance, import_probe
from nemo_prorl.rewards.conformance import CHECKS, CheckOutcome, Report, check_plugin
from nemo_prorl.rewards.conformance_cases import WRONG, make_cases, read_examples, shell, truth_trials
from nemo_prorl.rewards.discovery import discover
from nemo_prorl.rewards.interface import ENTRY_POINT_GROUP, Example
from tests.rewards.conftest import ROOT

pytestmark = pytest.mark.starts

Prorl = Callable[..., subprocess.CompletedProcess[str]]
INSTALLED = sorted({point.name for point in entry_points(group=ENTRY_POINT_GROUP)})

# A plugin that passes, with places where the bad ones differ.
GOOD = '''
import os
from nemo_prorl.rewards.interface import Example, InvalidAnswer, RewardPlugin, RewardResult, no_answer
{top}
class Tested(RewardPlugin):
    """One word must be given."""
    name, tasks, time_budget_s = "tested", ("tested",), 1.0
{more}
    def prepare(self):
        {prepare}
    @classmethod
    def examples(cls):
        return {examples}
    def validate_truth(self, truth):
        {validate}
    def score(self, request):
        text = {text}
        if text is None:
            return no_answer()
        right = text.split()[-1:] == [request.truth["word"]]
        score, detail = float(right), "right" if right else "wrong"
        {score}
        return RewardResult(score=score, correct=score == 1, detail=detail)
'''
PLACES = {
    "top": "",
    "more": "",
    "prepare": "pass",
    "examples": 'Example({"word": "yes"}, "I say yes", "I say no"),',
    "validate": """if not isinstance(truth.get("word"), str):
            raise ValueError("truth.word must be a string")""",
    "text": "request.answer_text",
    "score": "",
}

# What a bad plugin has instead, and the check that must find it.
BAD: dict[str, tuple[str, dict[str, str]]] = {
    "prints when imported": ("import", {"top": "print('hello')"}),
    "writes a file when imported": ("import", {"top": "open(os.environ['HOME'] + '/w', 'w').close()"}),
    "opens a socket when imported": ("import", {"top": "import socket; S = socket.socket()"}),
    "starts a thread when imported": (
        "import",
        {"top": "import threading, time; threading.Thread(target=time.sleep, args=(1,), daemon=True).start()"},
    ),
    "starts a process when imported": ("import", {"top": "import subprocess; subprocess.run(['true'])"}),
    "changes its folder when imported": ("import", {"top": "os.chdir('..')"}),
    "changes the environment when imported": ("import", {"top": "os.environ['TZ'] = 'UTC'"}),
    "loads a heavy package when imported": ("import", {"top": "import sympy"}),
    "computes when imported": (
        "import",
        {"top": "import time\nend = min(time.process_time(), 0.7) + 1.1\nwhile time.process_time() < end: pass"},
    ),
    "cannot be prepared": ("start", {"prepare": "raise RuntimeError('no word list')"}),
    "a good answer scores less": ("examples", {"score": "score *= 0.5"}),
    "a bad answer scores 1": ("examples", {"score": "score = 1.0 if right or 'no' in text else 0.0"}),
    "it errs on a canary": (
        "canaries",
        {
            "more": """    @classmethod
    def canaries(cls):
        from nemo_prorl.rewards.interface import Canary
        return Canary({"word": "yes"}, "no yes", True), Canary({"word": "yes"}, "yes", False)"""
        },
    ),
    "an example breaks it": ("examples", {"score": "assert request.response != 'I say no'"}),
    "a score above 1": ("form", {"score": "score = 2.0 if len(text) > 9000 else score"}),
    "a score that is no number": ("form", {"score": "score = float('nan') if len(text) > 9000 else score"}),
    "a truth's missing field is a KeyError": ("truth", {"validate": "truth['word']"}),
    "a wrong truth is refused without its field": (
        "truth",
        {"validate": "if not isinstance(truth.get('word'), str): raise ValueError('bad truth')"},
    ),
    "any truth is accepted": ("truth", {"validate": "pass"}),
    "refuses its own example": ("truth", {"validate": "raise ValueError('truth.word')"}),
    "the thoughts are judged": ("thinking", {"text": "request.response.replace('<think>', '')"}),
    "an open thought is an answer": (
        "thinking",
        {"text": "request.answer_text if request.answer_text is not None else request.response"},
    ),
    "breaks on a lone surrogate": ("unicode", {"score": "text.encode()"}),
    "breaks on nothing": ("empty", {"score": "text.strip()[0] if len(text) < 9 else 0"}),
    "breaks on a long answer": ("long", {"score": "assert len(text) < 90000"}),
    "breaks on 5,000 digits": ("adversarial", {"score": "int(text) if text.isdecimal() and len(text) < 9000 else 0"}),
    "evaluates an answer": ("adversarial", {"score": "eval(text) if text.startswith('__') else 0"}),
    "slow on a long answer": (
        "time",
        {
            "more": "    time_budget_s = 0.4",
            "score": "import time\n        while len(text) > 90000 and time.process_time() < 1e9: pass",
        },
    ),
    "waits on a long answer": (
        "time",
        {"more": "    time_budget_s = 0.4", "score": "import time; time.sleep(99 * (len(text) > 90000))"},
    ),
    "rolls dice": ("determinism", {"score": "import random; detail = str(random.random())"}),
    "depends on the order of a set": ("determinism", {"score": "detail = str({'a', 'b', 'c', 'd', 'e'})"}),
    "remembers earlier answers": (
        "determinism",
        {"more": "    seen = []", "score": "self.seen.append(text); detail = str(len(self.seen))"},
    ),
    "shares a file with others": (
        "concurrency",
        {
            "score": """import time
        with open(os.environ["HOME"] + "/answer", "w", errors="replace") as file: file.write(text[:99])
        time.sleep(0.001)
        with open(os.environ["HOME"] + "/answer") as file: detail = file.read()"""
        },
    ),
    "asks a server": (
        "network",
        {"score": "import socket; socket.socket(socket.AF_INET, socket.SOCK_DGRAM).connect(('127.0.0.1', 9))"},
    ),
    "looks up a name": (
        "network",
        {"prepare": "import socket; socket.getaddrinfo('localhost', 80)"},
    ),
}


@pytest.fixture
def tested(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., str]:
    """Installs the plugin `tested`, with other code in some of its places; gives its name."""
    folder = tmp_path / "site"
    info = folder / "tested_plugin-1.0.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: tested-plugin\nVersion: 1.0\n")
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("TZ", os.environ.get("TZ", ""))  # one of them sets it
    monkeypatch.chdir(tmp_path)  # and one leaves it

    def install(**places: str) -> str:
        module = f"tested_plugin_{tmp_path.name.replace('-', '_')}"  # its own in this process, which imports it too
        (info / "entry_points.txt").write_text(f"[{ENTRY_POINT_GROUP}]\ntested = {module}:Tested\n")
        (folder / f"{module}.py").write_text(GOOD.format(**{**PLACES, **places}))
        monkeypatch.syspath_prepend(str(folder))
        monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(folder), str(ROOT)]))
        return "tested"

    return install


@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=() if name in ("code", "instructions") else pytest.mark.slow) for name in INSTALLED],
)
def test_every_installed_plugin_passes(name: str) -> None:
    plugin = discover().plugin(name)
    assert plugin.examples(), "a plugin of this project gives examples"
    report = check_plugin(name)
    assert report.failed == [], "\n".join(report.lines())
    skipped = [outcome.check for outcome in report.outcomes if outcome.state == "skipped"]
    assert not skipped or plugin.needs_sandbox, "\n".join(report.lines())


PASSED = """import: writes nothing, prints nothing, starts nothing, loads nothing heavy
start: a worker starts and prepares the plugin
examples: 1 good responses score 1, and 1 bad ones less
canaries: the examples are the canaries
form: 79 results are well formed
truth: 1 fields, each named where it is wrong
thinking: what follows the last </think> is judged; an open <think> is no answer
unicode: 12 responses: all have a verdict, 0 of them invalid
empty: 11 responses: all have a verdict, 0 of them invalid
long: 16 responses: all have a verdict, 0 of them invalid
adversarial: 32 responses: all have a verdict, 0 of them invalid
time: slowest; allowed: 1 s of CPU, 4 s in all
determinism: 79 requests have equal verdicts in another worker, order and hash seed
concurrency: 80 requests to two workers at once: no verdict changed
network: no address looked up, no connection made"""


def test_a_good_plugin_passes_every_check(tested: Callable[..., str]) -> None:
    report = check_plugin(tested())
    assert [(outcome.check, outcome.state) for outcome in report.outcomes] == [(c, "passed") for c in CHECKS]
    said = "\n".join(f"{outcome.check}: {outcome.text}" for outcome in report.outcomes)
    assert re.sub(r"slowest: .*;", "slowest;", said) == PASSED


WAIT = ("slow on a long answer", "waits on a long answer", "computes when imported")  # seconds until they are found


@pytest.mark.parametrize("way", [pytest.param(way, marks=pytest.mark.slow if way in WAIT else ()) for way in BAD])
def test_a_bad_plugin_fails_that_check_and_no_other(way: str, tested: Callable[..., str]) -> None:
    check, places = BAD[way]
    report = check_plugin(tested(**places))
    assert report.failed == [check], "\n".join(report.lines())
    assert report[check].fix == CHECKS[check]


@pytest.mark.parametrize(
    ("event", "args", "effect"),
    [
        ("open", ("a", "w", os.O_WRONLY), "opens 'a' for writing"),
        ("open", ("a", None, os.O_RDWR | os.O_CLOEXEC), "opens 'a' for writing"),
        ("open", ("a", None, os.O_RDONLY | os.O_CREAT), "opens 'a' for writing"),
        ("open", ("a", "r", os.O_RDONLY | os.O_CLOEXEC), None),
        ("open", (os.devnull, "w", os.O_WRONLY), None),
        ("open", ("a", "r", None), None),
        ("os.mkdir", ("a", 511, -1), "changes files: os.mkdir('a')"),
        ("tempfile.mkstemp", ("a",), "changes files: tempfile.mkstemp('a')"),
        ("socket.__new__", (None, 2, 1, 0), "opens a socket"),
        ("os.fork", (), "starts a process: os.fork()"),
        ("subprocess.Popen", ("true", ["true"], None, None), "starts a process: subprocess.Popen('true')"),
        ("_thread.start_new_thread", (), "starts a thread"),
        ("os.putenv", (b"a", b"b"), "changes the environment variables"),
        ("os.unsetenv", (b"a",), "changes the environment variables"),
        ("os.listdir", (".",), None),
        ("socket.connect", (None, ("127.0.0.1", 9)), None),
    ],
)
def test_effects_of_an_import_are_told_from_what_it_may_do(
    event: str, args: tuple[Any, ...], effect: str | None
) -> None:
    assert import_probe._import_effect(event, args) == effect


@pytest.mark.parametrize(
    ("event", "args", "use"),
    [
        ("socket.connect", (None, ("127.0.0.1", 9)), "socket.connect(('127.0.0.1', 9))"),
        ("socket.connect", (None, "/run/local"), None),
        ("socket.bind", (None, b"\0local"), None),
        ("socket.getaddrinfo", ("host", 80, 0, 0, 0), "socket.getaddrinfo('host')"),
        ("socket.gethostbyname", ("host",), "socket.gethostbyname('host')"),
        ("socket.__new__", (None, 2, 1, 0), None),
    ],
)
def test_use_of_the_network_is_told_from_local_sockets(event: str, args: tuple[Any, ...], use: str | None) -> None:
    assert import_probe._network_use(event, args) == use


def test_every_check_has_a_bad_plugin() -> None:
    assert {check for check, _ in BAD.values()} == set(CHECKS)


def test_without_examples_it_says_what_could_not_be_checked(tested: Callable[..., str]) -> None:
    report = check_plugin(tested(examples="()"))
    assert report.failed == []
    states = {outcome.check: outcome.state for outcome in report.outcomes}
    assert states["import"] == states["start"] == "passed"
    assert {state for check, state in states.items() if check not in ("import", "start")} == {"skipped"}
    assert "define examples()" in report["unicode"].text


NO_WORKERS: dict[str, Any] = {"import": [], "network": [], "truths": [], "failed": None}


@pytest.mark.parametrize(
    ("check", "more", "state", "text"),
    [
        (
            "import",
            {"probe": {**NO_WORKERS, "import": None, "failed": "it died"}},
            "skipped",
            "could not be tried: it died",
        ),
        ("start", {"failed": "no word list"}, "failed", "no word list"),
        ("start", {"unfit": "no sandbox"}, "skipped", "no sandbox"),
        ("form", {"failed": "no word list"}, "skipped", "no worker starts"),
        ("truth", {}, "skipped", "the examples' truths have no fields"),
        ("truth", {"probe": {**NO_WORKERS, "failed": "it died"}}, "skipped", "could not be tried: it died"),
        ("determinism", {}, "skipped", "gave no verdict to compare"),
        ("concurrency", {}, "skipped", "judged one at a time get different verdicts"),
        ("network", {"probe": {**NO_WORKERS, "network": ["x", "y"]}}, "failed", "uses the network: x; y"),
        ("network", {"probe": {**NO_WORKERS, "failed": "it died"}}, "skipped", "could not be tried: it died"),
        ("network", {}, "passed", "no address looked up"),
        ("unicode", {"examples": []}, "skipped", "the plugin has no examples"),
        ("canaries", {"examples": []}, "passed", "the examples are the canaries"),
    ],
)
def test_what_could_not_be_seen_is_not_passed(check: str, more: dict[str, Any], state: str, text: str) -> None:
    plugin = discover().plugin("puzzles")
    trial = conformance._Trial(plugin, list(plugin.examples()), [], [], NO_WORKERS)
    outcome = conformance._outcome(dataclasses.replace(trial, **more), check)
    assert (outcome.state, text in outcome.text, outcome.fix) == (
        state,
        True,
        CHECKS[check] if state == "failed" else "",
    )


def test_a_plugin_that_ends_its_process_is_reported_and_not_believed(tested: Callable[..., str]) -> None:
    """It dies wherever it is prepared: in the worker and in the process that watches it."""
    report = check_plugin(tested(prepare="os._exit(3)"))
    assert report.failed == ["start"], "\n".join(report.lines())
    assert "died during its start" in report["start"].text
    assert report["import"].state == "skipped"
    assert "ended with status 3" in report["truth"].text


@pytest.mark.slow
def test_a_plugin_that_hangs_where_it_is_watched_is_killed_with_what_it_started(
    tested: Callable[..., str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(conformance, "PROBE_S", 6.0)
    hang = "import os, sys, time; watched = 'nemo_prorl.rewards.import_probe' in sys.orig_argv;"
    report = check_plugin(tested(prepare=f"{hang} watched and (os.system('sleep 941.5 &'), time.sleep(60))"))
    assert "took over 6 s" in report["truth"].text
    assert not [p for p in psutil.process_iter(["cmdline"]) if p.info["cmdline"] == ["sleep", "941.5"]]


def test_a_sandboxed_plugin_is_checked_as_far_as_this_machine_can(
    tested: Callable[..., str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def unfit(*_: object) -> None:
        raise UnfitMachine("no sandbox here")

    monkeypatch.setattr(conformance, "pool_specs", unfit)
    report = check_plugin(tested(more="    needs_sandbox = True"))
    assert report.failed == []
    assert [outcome.check for outcome in report.outcomes if outcome.state == "passed"] == ["import", "truth"]
    assert report["start"].text == report["time"].text == "no sandbox here"


def test_the_command_line(prorl: Prorl, tested: Callable[..., str], tmp_path: Path) -> None:
    told = prorl("rewards", "test", "maths")
    assert (told.returncode, told.stdout) == (2, "")
    assert "unknown reward plugin 'maths'; known: " in told.stderr
    told = prorl("rewards", "test", "puzzles", "--settings", '{"math": {}}')
    assert told.returncode == 2
    assert "--settings: plugin 'math' is not tested here; expected only 'puzzles'" in told.stderr


def test_results_leave_as_lines_or_as_json(tested: Callable[..., str], capsys: pytest.CaptureFixture[str]) -> None:
    name = tested(score="text.encode()")
    assert cli.main(["rewards", "test", name]) == 1
    *lines, counts = capsys.readouterr().out.splitlines()
    assert "1 failed" in counts
    [at] = [at for at, line in enumerate(lines) if line.startswith("failed")]
    assert "a lone surrogate" in lines[at]
    assert "UnicodeEncodeError" in lines[at]
    assert lines[at + 1].split() == ["fix:", *CHECKS["unicode"].split()]
    assert [line.split()[1] for line in lines[:at] + lines[at + 2 :]] == [c for c in CHECKS if c != "unicode"]
    assert cli.main(["rewards", "test", name, "--json"]) == 1
    report = json.loads(capsys.readouterr().out)
    assert (report["plugin"], report["passed"]) == (name, False)
    assert {one["check"]: one["state"] for one in report["checks"]}["unicode"] == "failed"


def test_examples_and_settings_are_given(
    tested: Callable[..., str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Other examples than the plugin's own, and a budget that its import of nothing holds."""
    config = """    from dataclasses import dataclass
    @dataclass(frozen=True)
    class Config:
        time_budget_s: float = 9.0"""
    name, path = tested(more=config, examples="()"), tmp_path / "examples.jsonl"
    path.write_text('\n{"truth": {"word": "A"}, "good": "it is A", "bad": "it is B"}\n')
    words = ["rewards", "test", name, "--examples", str(path), "--settings", '{"tested": {"time_budget_s": 3}}']
    assert cli.main(words) == 0
    out = capsys.readouterr().out
    assert "1 good responses score 1" in out
    assert "allowed: 3 s of CPU" in out
    path.write_text('{"truth": {"word": "A"}, "good": "it is B", "bad": "it is A"}')
    assert cli.main(words) == 1
    assert "failed   examples" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("line", "says"),
    [
        ("[]", "must be a JSON object"),
        ('{"truth": 1, "good": "a", "bad": "b"}', "field 'truth' is 1; it must be an object"),
        ('{"truth": {}, "good": "a"}', "field 'bad' is None; it must be a string"),
        ('{"truth": {}, "good": "a", "bad": "b", "task": "x"}', "field 'task' is 'x'; it must be one of t"),
        ("{", "Expecting"),
    ],
)
def test_a_bad_line_of_examples_is_named(line: str, says: str, tmp_path: Path) -> None:
    path = tmp_path / "examples.jsonl"
    path.write_text('{"truth": {}, "good": "a", "bad": "b"}\n' + line)
    with pytest.raises(DataError, match=rf"examples\.jsonl:2: .*{says}"):
        read_examples(path, ["t"])
    path.write_text(" ")
    with pytest.raises(DataError, match="contains no example"):
        read_examples(path, ["t"])
    with pytest.raises(DataError, match="cannot be read"):
        read_examples(tmp_path / "absent", ["t"])


def test_an_unknown_plugin_lists_the_known() -> None:
    with pytest.raises(ConfigError, match="unknown reward plugin 'nothing'; known: .*math"):
        check_plugin("nothing")


def test_hostile_texts_stand_where_the_answers_differ() -> None:
    assert shell("so \\boxed{12}.", "so \\boxed{13}.") == ("so \\boxed{1", "}.")
    assert shell("yes", "yes and no") == ("yes", "")
    assert shell("", "a") == ("", "")
    cases = make_cases([Example({}, "<think>hm</think>(yes)", "(no)")], "t")
    assert len({case.id for case in cases}) == len(cases)
    responses = {case.request.response for case in cases}
    assert {"<think>hm</think>(yes)", "<think>(yes)</think>(no)", "()", "(1e999999999)"} <= responses


def test_each_field_of_each_truth_is_left_out_once_and_given_each_wrong_value() -> None:
    trials = truth_trials([Example({"word": "yes", "n": 1}, "", ""), Example({}, "", "")])
    assert [(one.key, one.truth) for one in trials if one.wrong == "missing"] == [
        ("word", {"n": 1}),
        ("n", {"word": "yes"}),
    ]
    assert [(one.example, one.key, one.truth) for one in trials if one.wrong == "as it is"] == [
        *(("example-1", "", {"word": "yes", "n": 1}), ("example-2", "", {}))
    ]
    wrong = [one for one in trials if one.wrong not in ("missing", "as it is")]
    assert [one.truth for one in wrong if one.key == "word"] == [{"word": value, "n": 1} for value in WRONG]
    assert [one.truth for one in wrong if one.key == "n"] == [{"word": "yes", "n": value} for value in WRONG]
    assert all(json.loads(one.wrong) == one.truth[one.key] for one in wrong)


def test_pytest_is_told_what_failed() -> None:
    CheckOutcome("form", "passed", "fine").require()
    with pytest.raises(AssertionError, match="form: score is 2; do this"):
        CheckOutcome("form", "failed", "score is 2", "do this").require()
    with pytest.raises(pytest.skip.Exception, match="no example"):
        CheckOutcome("form", "skipped", "no example").require()


def test_a_report_counts_what_was_not_checked() -> None:
    outcomes = [CheckOutcome("start", "passed", ""), CheckOutcome("good", "skipped", "no examples")]
    last = Report("own", outcomes).lines()[-1]
    assert last.startswith("1 passed, 0 failed, 1 skipped: a skipped check proves nothing")
    assert Report("own", outcomes[:1]).lines()[-1] == "1 passed, 0 failed, 0 skipped"
