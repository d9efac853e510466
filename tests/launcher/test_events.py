"""`on_event`: what the hook is told, and that nothing it does touches the run."""

import json
import logging
import os
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from sandbox_helpers import is_alive

from nemo_prorl.checks import check_command
from nemo_prorl.deadlines import Deadline
from nemo_prorl.errors import DataError
from nemo_prorl.files import Tail
from nemo_prorl.launcher import events as events_module
from nemo_prorl.launcher import one_node, supervisor
from nemo_prorl.launcher.events import Events, on_screen
from nemo_prorl.launcher.processes import Child, ProcessFailed
from nemo_prorl.lifecycle.run_records import Journal
from nemo_prorl.settings import load

pytestmark = pytest.mark.starts

Script = Callable[[str], str]

# Writes what it is given into a file of its own, in the order of starts.
TELL = (
    'mkdir -p told; f=told/$(date +%s%N)-$$; { cat; echo "$PRORL_EVENT|$PRORL_STEP|$PRORL_WHAT|$PRORL_RUN_DIR"; } > $f'
)


@pytest.fixture
def script(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Script:
    """Makes an executable file; the test's folder is the present one."""
    monkeypatch.chdir(tmp_path)

    def make(text: str) -> str:
        file = tmp_path / "hook"
        file.write_text(f"#!/bin/sh\n{text}\n")
        file.chmod(0o755)
        return str(file)

    return make


def told(folder: Path) -> list[tuple[dict[str, Any], list[str]]]:
    """(standard input, the four variables) of each call."""
    found = []
    for file in sorted((folder / "told").glob("*")):
        about, variables = file.read_text().splitlines()
        found.append((json.loads(about), variables.split("|")))
    return found


def settled(events: Events) -> None:
    def ready() -> bool:
        events.update()
        return not events._running and not events._waiting

    Deadline(20, "the hook").wait_until(ready, 0.01)


def test_it_hears_what_the_journal_tells(script: Script, tmp_path: Path) -> None:
    journal = Journal(tmp_path)
    journal.append("alarm", 1, what="of an earlier process")
    with Events(script(TELL), tmp_path) as events:
        journal.append("resume", 2, stage="none", version="0")
        for event, fields in (
            ("alarm", {"what": 'a "quoted" $what'}),
            ("reset_intent", {"reason": "at_steps"}),
            ("reset_commit", {"reason": "at_steps", "reference_sha256": "ab"}),
            ("validation", {}),
            ("stop", {"reason": "SIGTERM"}),
            ("finish", {}),
        ):
            journal.append(event, 3, **fields)
            events.update()
            settled(events)
    expected = [
        ("alarm", 'a "quoted" $what'),
        ("reset", "at_steps"),
        ("stop", "SIGTERM"),
        ("finish", "finished after step 3"),
    ]
    calls = told(tmp_path)
    assert [(about["event"], about["what"]) for about, _ in calls] == expected
    assert [variables for _, variables in calls] == [[e, "3", w, str(tmp_path)] for e, w in expected]
    assert calls[1][0]["journal"]["reference_sha256"] == "ab"
    assert {about["run_dir"] for about, _ in calls} == {str(tmp_path)}
    log = (tmp_path / "logs" / "on_event.log").read_text()
    assert [line.split(" ", 3)[3] for line in log.splitlines()] == [f"{e} of step 3: {w}" for e, w in expected]


def test_an_error_that_leaves_the_run_is_a_failure(script: Script, tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").write_text('{"step": 6}\n{"step": 7}\n{"st')
    with pytest.raises(DataError), Events(script(TELL), tmp_path):
        raise DataError("file, line")
    with pytest.raises(KeyboardInterrupt), Events(script(TELL), tmp_path):
        raise KeyboardInterrupt  # whoever ended it knows
    [(about, variables)] = told(tmp_path)
    assert variables[:3] == ["failure", "7", "file, line"]
    assert about["kind"] == "DataError"


def test_a_slow_hook_delays_nothing_and_is_killed(
    script: Script, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    events = Events(script("sleep 60 & echo $! $$ >> pids; wait"), tmp_path, kill_after_s=2.0)
    began = time.monotonic()
    for step in range(5):
        events.emit("alarm", step, "slow")
    assert time.monotonic() - began < 2.0
    assert len(events._running) == 3  # at a time
    settled(events)
    pids = [int(word) for word in (tmp_path / "pids").read_text().split()]
    assert len(pids) == 10
    Deadline(5, "the end of all").wait_until(lambda: not any(is_alive(pid) for pid in pids))
    assert caplog.text.count("was killed after 2 s") == 1  # told once; the rest is in its own log
    assert (tmp_path / "logs" / "on_event.log").read_text().count("was killed after 2 s") == 5


def test_too_many_events_drop_the_oldest_that_wait(script: Script, tmp_path: Path) -> None:
    events = Events(script(f"{TELL}; while [ ! -f go ]; do sleep 0.02; done"), tmp_path)
    for step in range(30):
        events.emit("alarm", step, "again")
    (tmp_path / "go").touch()
    settled(events)
    steps = sorted(about["step"] for about, _ in told(tmp_path))
    assert steps == [0, 1, 2, *range(14, 30)]
    assert [about["dropped"] for about, _ in told(tmp_path) if "dropped" in about] == [11]
    assert "11 events were dropped" in (tmp_path / "logs" / "on_event.log").read_text()


def test_at_the_end_it_gets_a_moment_and_no_more(script: Script, tmp_path: Path) -> None:
    with Events(script(f"sleep 0.3; {TELL}"), tmp_path) as events:
        for step in range(5):
            events.emit("alarm", step, "late")
    assert len(told(tmp_path)) == 5
    began = time.monotonic()
    with Events(script("echo $$ > pid; sleep 60"), tmp_path, grace_s=2.0) as events:
        events.emit("alarm", 1, "stuck")
    assert time.monotonic() - began < 30
    assert not is_alive(int((tmp_path / "pid").read_text()))


def test_a_hook_that_fails_is_told_once(script: Script, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with Events(script("echo out of order; exit 3"), tmp_path) as events:
        for step in range(3):
            events.emit("alarm", step, "x")
    assert caplog.text.count("ended with status 3") == 1
    assert (tmp_path / "logs" / "on_event.log").read_text().count("out of order") == 3
    (tmp_path / "hook").unlink()  # since it was checked
    with Events(str(tmp_path / "hook"), tmp_path) as events:
        events.emit("alarm", 1, "a zero byte \0 and more")
    assert caplog.text.count("could not be started") == 1


def test_a_log_that_cannot_be_written_takes_nothing_else(script: Script, tmp_path: Path) -> None:
    (tmp_path / "logs").mkdir()
    (tmp_path / "logs" / "on_event.log").symlink_to("/dev/full")
    with Events(script(TELL), tmp_path) as events:
        events.emit("alarm", 1, "x")
    assert len(told(tmp_path)) == 1


def test_without_a_command_nothing_happens(tmp_path: Path) -> None:
    with Events(None, tmp_path) as events:
        events.emit("alarm", 1, "x")
    assert not list(tmp_path.iterdir())


def test_the_command_is_checked(script: Script, tmp_path: Path) -> None:
    hook = script(TELL)
    assert check_command(f"{hook} 'two words' $HOME") is None
    assert check_command("sh -c 'exit 0'") is None
    (tmp_path / "plain").touch()
    for text, why in (
        ("no-such-program --now", "got no-such-program, which is not on PATH"),
        ("./plain", "got ./plain, which is not an executable file"),
        (str(tmp_path), "which is not an executable file"),
        ("sh 'open", "No closing quotation"),
        ("  ", "an empty value"),
    ):
        fault = check_command(text)
        assert fault is not None
        assert fault.startswith(f"on_event={text.strip()}")
        assert why in fault


def test_a_tail_reads_whole_lines_that_came_since(tmp_path: Path) -> None:
    file = tmp_path / "lines"
    tail = Tail(file)
    assert tail.read() == []
    file.write_text('{"n": 1}\n{"n": ')
    assert tail.read() == [{"n": 1}]
    with file.open("a") as f:
        f.write('2}\nbroken\n[3]\n{"n": 4}\n')
    assert tail.read() == [{"n": 2}, {"n": 4}]
    assert tail.read() == []
    file.write_text("")  # somebody made it again
    tail.read()
    file.write_text('{"n": 5}\n')
    assert tail.read() == [{"n": 5}]


# --- with the supervisor ---------------------------------------------------------------------------------------------


def supervised(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, hook: str | None, trainer: str, service: str) -> int:
    """Runs a node whose one rank and one service are programs in Python."""
    cfg = load([f"run_dir={tmp_path}"])
    cfg.on_event = hook
    for name in ("logs", "endpoints"):
        (tmp_path / name).mkdir()

    def child(node: supervisor.NodeSupervisor, name: str, code: str) -> Child:
        return node._child(name, [sys.executable, "-c", code], {}, 0, False)

    real = supervisor.NodeSupervisor._ranks

    def ranks(node: supervisor.NodeSupervisor, only: str | None) -> list[Child]:
        [rank] = real(node, only)
        rank.command = [sys.executable, "-c", trainer]
        return [rank]

    monkeypatch.setattr(one_node, "prepare", lambda *_: ["math"])
    monkeypatch.setattr(supervisor.NodeSupervisor, "_ranks", ranks)
    monkeypatch.setattr(supervisor.NodeSupervisor, "_rewards", lambda node: child(node, "rewards-0", service))
    monkeypatch.setattr(
        supervisor.NodeSupervisor,
        "_engine",
        lambda node, i, *_: child(node, f"engine-{i}", "import time; time.sleep(60)"),
    )
    return one_node.run(cfg, "")


SLEEP = "import time; time.sleep(60)"


def test_a_trainer_that_is_killed_is_told(script: Script, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    line = json.dumps({"event": "alarm", "step": 4, "time": 0.0, "what": "before"})
    (tmp_path / "config.yaml").touch()
    code = (
        f"import os; open('journal.jsonl', 'a').write({line!r} + '\\n'); open('metrics.jsonl', 'w')\n"
        "print('its last words', flush=True); os.kill(os.getpid(), 9)"
    )
    assert supervised(tmp_path, monkeypatch, script(TELL), code, SLEEP) == 1
    calls = told(tmp_path)
    assert sorted(v[0] for _, v in calls) == ["alarm", "failure"]
    [failure] = [about for about, v in calls if v[0] == "failure"]
    assert failure["status"] == -9
    assert failure["process"] == "trainer-0"
    assert failure["log"] == ["its last words"]
    log = (tmp_path / "logs" / "on_event.log").read_text()
    assert log.index("alarm of step 4: before") < log.index("failure of step 0: trainer-0 ended")
    last = Journal(tmp_path).events()[-1]
    assert last["event"] == "failure"
    assert last["reason"] == failure["what"]


def test_a_failure_is_in_the_journal_with_its_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a hook, too; a folder in which no run has begun gets no journal."""
    with pytest.raises(DataError), Events(None, tmp_path):
        raise DataError("file, line")
    assert not (tmp_path / "journal.jsonl").exists()
    (tmp_path / "config.yaml").touch()
    (tmp_path / "metrics.jsonl").write_text('{"step": 7}\n')
    what = "trainer-0 ended with status 1"
    logged = "2026-11-25 14:00:00,000 ERROR nemo_prorl.rank: RewardFailure: sums raised ValueError"
    with Events(None, tmp_path) as events:
        events.failure(what, log=["INFO before", logged, "of another thread"])
        events.failure(what, log=["Traceback (most recent call last):", '  File "x"', "torch.OutOfMemoryError: 3 GB"])
        events.failure(what)
    found = Journal(tmp_path).events()
    assert {(event["event"], event["step"]) for event in found} == {("failure", 7)}
    assert [event["reason"] for event in found] == [
        f"RewardFailure: sums raised ValueError ({what})",
        f"torch.OutOfMemoryError: 3 GB ({what})",
        what,
    ]


OF_NEMO = [
    "[NeMo I 2026-11-27 01:48:30 utils:553] Number of buckets for gradient all-reduce / reduce-scatter: 1",
    "    Params for bucket 1 (886912 elements, 886912 padded size):",
    "    \tdecoder.layers.3.self_attention.linear_qkv.bias",
    "[NeMo I 2026-11-27 01:48:30 utils:532] Setting up optimizer with config OptimizerConfig(optimizer='adam')",
]
OURS = "2026-11-25 14:00:00,000 ERROR nemo_prorl.rank: RewardFailure: sums raised ValueError"
WHAT = "trainer-0 ended with status 1; its log is LOG"


@pytest.mark.parametrize(
    ("log", "shown", "lines"),
    [
        ([*OF_NEMO, OURS], True, [WHAT]),
        ([OURS, *OF_NEMO], True, [WHAT]),
        (
            [*OF_NEMO, OURS, "    in sums.py:3", "2026-11-25 14:00:00,000 INFO httpx: ok"],
            True,
            ["    in sums.py:3", WHAT],
        ),
        ([*OF_NEMO, OURS], False, [f"RewardFailure: sums raised ValueError ({WHAT})"]),
        ([*OF_NEMO, OURS.replace("nemo_prorl", "nemo")], True, [f"RewardFailure: sums raised ValueError ({WHAT})"]),
        (
            [*OF_NEMO, "Traceback (most recent call last):", '  File "x"', "KeyError: 3"],
            True,
            [f"KeyError: 3 ({WHAT})"],
        ),
        (
            [*OF_NEMO, "terminate called", "  what(): CUDA error"],
            True,
            ["terminate called", "  what(): CUDA error", WHAT],
        ),
        (OF_NEMO[:3], True, [WHAT]),
        ([], True, [WHAT]),
    ],
)
def test_the_screen_has_the_error_once_and_no_lines_of_libraries(log: list[str], shown: bool, lines: list[str]) -> None:
    assert on_screen(WHAT, log, shown) == lines


def test_a_failed_run_ends_with_its_error_and_nothing_of_nemo(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    capsys: pytest.CaptureFixture[str],
) -> None:
    (tmp_path / "config.yaml").touch()
    code = "print(" + repr("\n".join([*OF_NEMO, OURS])) + "); raise SystemExit(1)"
    assert supervised(tmp_path, monkeypatch, None, code, SLEEP) == 1
    screen = capsys.readouterr().err + caplog.text
    assert screen.count("RewardFailure: sums raised ValueError") == 1
    assert "OptimizerConfig" not in screen
    assert "linear_qkv" not in screen
    log = tmp_path / "logs" / "trainer-0.log"
    assert f"trainer-0 ended with status 1; its log is {log}" in screen
    assert "OptimizerConfig" in log.read_text()


def test_a_service_that_dies_for_good_is_told(script: Script, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ProcessFailed):
        supervised(tmp_path, monkeypatch, script(TELL), SLEEP, "raise SystemExit('why it ended')")
    [(about, variables)] = told(tmp_path)
    assert variables[0] == "failure"
    assert "rewards-0 ended with status 1" in about["what"]
    assert about["log"] == ["why it ended"]


def test_a_stop_while_the_trainer_starts_is_a_stop_in_the_journal_and_for_the_hook(
    script: Script, tmp_path: Path
) -> None:
    (tmp_path / "config.yaml").touch()
    with Events(script(TELL), tmp_path) as events:
        events.stopped("stopped while the trainer started")
    [line] = Journal(tmp_path).events()
    [(about, _)] = told(tmp_path)
    assert (line["event"], line["step"], line["reason"]) == ("stop", 0, "stopped while the trainer started")
    assert (about["event"], about["what"]) == ("stop", "stopped while the trainer started")


def test_a_clean_stop_is_no_failure(script: Script, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    line = json.dumps({"event": "stop", "step": 4, "time": 0.0, "reason": "SIGTERM: stopped after step 4"})
    code = f"open('journal.jsonl', 'a').write({line!r} + '\\n'); raise SystemExit(75)"
    assert supervised(tmp_path, monkeypatch, script(TELL), code, SLEEP) == 75
    assert [variables[:3] for _, variables in told(tmp_path)] == [["stop", "4", "SIGTERM: stopped after step 4"]]


def test_the_hook_is_known_by_its_own_name(caplog: pytest.LogCaptureFixture, tmp_path: Path) -> None:
    """The process's environment goes to the hook, and PRORL_ variables of a run around it do not hide its own."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PRORL_STEP", "99")
        patch.chdir(tmp_path)
        with caplog.at_level(logging.WARNING), Events("sh -c 'echo $PRORL_STEP > step'", tmp_path) as events:
            events.emit("alarm", 5, "x")
    assert (tmp_path / "step").read_text() == "5\n"
    assert os.environ.get("PRORL_STEP") != "5"
    assert events_module.last_step(tmp_path) == 0


def test_slurm_s_signal_to_all_processes_of_a_task_does_not_end_it(script: Script, tmp_path: Path) -> None:
    with Events(script("echo $$ > pid; sleep 1; touch done"), tmp_path) as events:
        events.emit("alarm", 1, "a")
        pid = tmp_path / "pid"
        Deadline(20, "the hook").wait_until(lambda: pid.exists() and pid.read_text().strip().isdigit())
        os.kill(int(pid.read_text()), signal.SIGUSR1)
        settled(events)
    assert (tmp_path / "done").exists()
