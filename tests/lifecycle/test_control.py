"""`prorl control`: requests to a run that works, its answers, and that a kill neither loses nor repeats a reset."""

import fcntl
import json
import os
import shutil
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

from nemo_prorl import cli
from nemo_prorl.config import GRPOConfig
from nemo_prorl.deadlines import Deadline
from nemo_prorl.lifecycle import control
from nemo_prorl.lifecycle.batches import Batches, stored_batch
from nemo_prorl.lifecycle.control import Control, Request, Requests
from nemo_prorl.lifecycle.ledger import Ledger
from nemo_prorl.lifecycle.run_records import Journal
from nemo_prorl.metrics import Metrics
from tests.lifecycle.parts import leader
from tests.lines import write_lines

STEPS = 6


class Killed(BaseException):
    """A SIGKILL: nothing of ours catches it."""


class Run:
    """The part of a run that `prorl control` meets, with its transactions; checkpoints are one JSON file.

    `at` is called at each point where a kill would leave different files behind.
    """

    def __init__(self, folder: Path, at: Callable[[], None] = lambda: None, heldout: bool = True) -> None:
        self.dir, self.at, self.has_prompts, self.stop = folder, at, heldout, ""
        (folder / ".lock").touch()  # the supervisor's
        os.utime(folder / ".lock")
        self.journal = Journal(folder)
        append: Any = self.journal.append

        def journal_append(event: str, step: int, **fields: Any) -> None:
            self.at()
            append(event, step, **fields)
            self.at()

        self.journal.append = journal_append  # type: ignore[method-assign]
        self.requests = Requests(folder, self.journal, lambda step, what: self.journal.append("alarm", step, what=what))
        self.batches = Batches(folder, GRPOConfig(), lambda step, what: None)
        ledger = Ledger(folder, True, None, self.batches)
        itself: Any = self  # validation, checkpoints and stopping of the real one
        self.control = Control(leader().only(lambda: self.requests), itself, itself, itself, ledger)
        self.saved = folder / "checkpoint.json"
        self.state: dict[str, Any] = {"step": 0, "weights": "", "resets": []}
        if self.saved.exists():
            self.state = json.loads(self.saved.read_text())
            done = self.state["resets"]
            last = [e for e in self.journal.events() if e["event"].startswith("reset_")][-1:]
            self.journal.append("resume", self.state["step"])
            if last and last[0]["event"] == "reset_intent" and done and done[-1]["step"] == last[0]["step"]:
                self.journal.append("reset_commit", **done[-1])
        else:
            self.journal.append("start", 0)
        self.control.settle(self.state["step"], [reset["reason"] for reset in self.state["resets"]])

    def save(self, step: int, wait: bool = False) -> None:
        temporary = self.saved.with_suffix(".tmp")
        temporary.write_text(json.dumps(self.state))
        self.at()
        os.replace(temporary, self.saved)
        self.at()

    def judge(self, metrics: Metrics) -> dict[str, Any]:
        score = {"mean": len(self.state["weights"]) / 100, "se": 0.1, "prompts": 4}
        scores: Any = {"all": score, "tasks": {"sums": score}}
        self.journal.append("validation", metrics.step, **scores)
        return scores

    def request_stop(self, reason: str) -> None:
        self.stop = reason

    def train(self, before_the_look: Callable[[int], None] = lambda step: None, steps: int = STEPS) -> None:
        while self.state["step"] < steps and not self.stop:
            step = self.state["step"] + 1
            self.state |= {"step": step, "weights": self.state["weights"] + f"u{step}"}
            before_the_look(step)
            asked = self.control.pending(step)
            if reason := control.reset_reason(asked, None):
                self.journal.append("reset_intent", step, reason=reason)
                self.state["weights"] += "R"
                self.state["resets"].append({"step": step, "reason": reason})
                self.save(step)
                self.journal.append("reset_commit", step, reason=reason, reference_sha256="0" * 64)
            elif step % 4 == 0:
                self.save(step)
            self.control.serve(asked, step)
        if self.stop:
            self.journal.append("stop", self.state["step"], reason=self.stop)
        else:
            self.journal.append("finish", self.state["step"])
        self.control.close(self.state["step"])


def place(folder: Path, what: Any, name: str = "r-1", at: float = 1.0) -> Path:
    (folder / "control").mkdir(exist_ok=True)
    file = folder / "control" / f"{name}.json"
    file.write_text(json.dumps(asdict(Request(name, what, at, "ann", "login-1"))))
    return file


def age(*files: Path) -> None:
    """Makes files older than the start of any process to come."""
    for file in files:
        os.utime(file, (time.time() - 60, time.time() - 60))


def answers(folder: Path) -> list[dict[str, Any]]:
    return [event for event in Journal(folder).events() if event["event"] == "control"]


def statuses(folder: Path) -> list[tuple[str, str, int]]:
    return [(event["request"], event["status"], event["step"]) for event in answers(folder)]


def left(folder: Path) -> list[str]:
    return sorted(path.name for path in (folder / "control").iterdir())


# --- the run's side --------------------------------------------------------------------------------------------------


def test_all_requests_are_served_in_order_of_time(tmp_path: Path) -> None:
    def ask(step: int) -> None:
        if step == 3:
            place(tmp_path, "checkpoint", "b", 2.0)
            place(tmp_path, "validate", "c", 1.0)
            place(tmp_path, "reset", "a", 3.0)
            place(tmp_path, "reset", "d", 4.0)

    run = Run(tmp_path)
    run.train(ask)
    assert statuses(tmp_path) == [(name, "done", 3) for name in "cbad"]
    assert run.state["weights"] == "u1u2u3Ru4u5u6"  # one reset serves both
    assert run.state["resets"] == [{"step": 3, "reason": "control a; control d"}]
    [validation] = [event for event in run.journal.events() if event["event"] == "validation"]
    assert answers(tmp_path)[0]["detail"] == "held-out mean reward after step 3: 0.0700 (sums 0.0700)"
    assert validation["step"] == 3
    assert {(event["user"], event["host"]) for event in answers(tmp_path)} == {("ann", "login-1")}
    assert left(tmp_path) == []


def test_stored_batches_are_kept_on_request(tmp_path: Path) -> None:
    """`prorl control RUN keep-batches`."""

    def ask(step: int) -> None:
        if step == 3:
            run.batches.store(3, [])
            place(tmp_path, "keep-batches")

    run = Run(tmp_path)
    run.train(ask)
    assert statuses(tmp_path) == [("r-1", "done", 3)]
    assert answers(tmp_path)[0]["detail"] == "kept the batches of 1 steps: 3"
    assert stored_batch(tmp_path, 3) == tmp_path / "batches" / "kept" / "step-000003.safetensors"


def test_a_rules_reset_and_a_requested_one_are_one() -> None:
    asked = [Request("a", "reset", 1.0, "", ""), Request("b", "validate", 1.0, "", "")]
    assert control.reset_reason(asked, "at_steps") == "at_steps; control a"
    assert control.request_ids_in("at_steps; control a; control b-2") == ["a", "b-2"]
    assert control.reset_reason(asked[1:], "at_steps") == "at_steps"
    assert control.reset_reason(asked[1:], None) is None


def test_a_stop_comes_in_its_turn_and_drops_what_comes_later(tmp_path: Path) -> None:
    def ask(step: int) -> None:
        if step == 2:
            place(tmp_path, "validate", "a", 1.0)
            place(tmp_path, "stop", "b", 2.0)
            place(tmp_path, "reset", "c", 3.0)

    run = Run(tmp_path)
    run.train(ask)
    assert statuses(tmp_path) == [("a", "done", 2), ("b", "done", 2), ("c", "dropped", 2)]
    assert run.stop == "control b"
    assert run.state["resets"] == []
    again = Run(tmp_path)
    assert again.state["step"] == 2  # saved
    again.train()
    assert again.state["weights"] == "u1u2u3u4u5u6"
    assert len(statuses(tmp_path)) == 3


def test_no_heldout_prompts_refuse_a_validation(tmp_path: Path) -> None:
    run = Run(tmp_path, heldout=False)
    place(tmp_path, "validate")
    run.train(steps=1)
    assert statuses(tmp_path) == [("r-1", "refused", 1)]
    assert "data.validation" in answers(tmp_path)[0]["detail"]


@pytest.mark.parametrize("what", control.REQUESTS)
def test_a_kill_at_any_point_neither_loses_nor_repeats_a_request(tmp_path: Path, what: str) -> None:
    """The run is killed at its n-th point, for every n, and started again; the request comes before the look of step 3.

    A reset whose intent is in the journal comes after the same step as in the run that was not killed.
    """
    kills = 0
    for n in range(200):
        folder = tmp_path / str(n)
        folder.mkdir()
        points = iter(range(1000))
        placed: list[int] = []

        def at(points: Iterator[int] = points, n: int = n) -> None:
            if next(points) == n:
                raise Killed

        def ask(step: int, folder: Path = folder, placed: list[int] = placed) -> None:
            if step >= 3 and not placed:
                placed.append(step)
                age(place(folder, what))

        try:
            run = Run(folder, at)
            run.train(ask)
            killed = False
        except Killed:
            killed = True
            kills += 1
            intents = [e["step"] for e in Journal(folder).events() if e["event"] == "reset_intent"]
            run = Run(folder)
            run.train(ask)
            if intents:
                assert [reset["step"] for reset in run.state["resets"]] == intents
                assert run.state["weights"] == "u1u2u3Ru4u5u6"
        ended = [status for _, status, _ in statuses(folder)]
        restarted_stop = what == "stop" and killed and len(placed) == 1
        assert ended == ["done"] or (restarted_stop and ended == ["dropped"]), n
        assert run.state["weights"].count("R") == len(run.state["resets"]) == (what == "reset")
        assert left(folder) == []
        if not killed:
            break
    assert kills >= 8


def test_what_an_earlier_process_left(tmp_path: Path) -> None:
    """After a kill all but a stop is served; what was asked for during the start always is."""
    with pytest.raises(Killed):
        Run(tmp_path).train(lambda step: kill() if step == 2 else None)
    old = [place(tmp_path, what, f"old-{what}", at) for at, what in enumerate(("stop", "validate", "reset"))]
    age(*old)
    run = Run(tmp_path)
    assert statuses(tmp_path) == [("old-stop", "dropped", 0)]
    run.train(steps=1)
    assert statuses(tmp_path)[1:] == [("old-validate", "done", 1), ("old-reset", "done", 1)]

    age(place(tmp_path, "reset", "between"), tmp_path / ".lock")  # after a clean end
    new = place(tmp_path, "checkpoint", "new")
    os.utime(new, (time.time() + 5, time.time() + 5))
    Run(tmp_path).train(steps=2)
    assert statuses(tmp_path)[3:] == [("between", "dropped", 1), ("new", "done", 2)]


def test_a_run_that_never_began_has_not_ended_cleanly(tmp_path: Path) -> None:
    """It was killed before its first event: what was asked for then is served."""
    age(place(tmp_path, "validate", "early"))
    run = Run(tmp_path)
    run.train(steps=1)
    assert statuses(tmp_path) == [("early", "done", 1)]


def kill() -> None:
    raise Killed


def test_an_answered_request_is_only_removed(tmp_path: Path) -> None:
    run = Run(tmp_path)
    place(tmp_path, "reset")
    run.train(steps=1)
    place(tmp_path, "reset")  # the kill came between journal and removal
    again = Run(tmp_path)
    again.train()
    assert len(again.state["resets"]) == len(answers(tmp_path)) == 1
    assert left(tmp_path) == []


GOOD = asdict(Request("bad", "reset", 1.0, "ann", "login-1"))


@pytest.mark.parametrize(
    "content",
    [
        "{",
        "[]",
        "[" * 60_000,
        json.dumps({**GOOD, "id": "other"}),
        json.dumps({**GOOD, "what": "explode"}),
        json.dumps({**GOOD, "what": ["reset"]}),
        json.dumps({**GOOD, "time": float("nan")}),
        json.dumps({**GOOD, "time": True}),
        json.dumps({**GOOD, "user": None}),
        json.dumps({**GOOD, "more": 1}),
        json.dumps({"id": "bad"}),
        b"\xff\xfe",
        " " * 70_000,
        os.mkfifo,
        os.mkdir,
        lambda path: os.symlink(place(path.parent.parent / "..", "reset", "bad"), path),
    ],
    ids=[
        *(
            "cut",
            "list",
            "deep",
            "other id",
            "unknown what",
            "what is a list",
            "nan",
            "bool",
            "no user",
            "more",
            "less",
        ),
        *("not UTF-8", "long", "pipe", "folder", "link"),
    ],
)
def test_a_file_that_is_no_request_is_moved_aside(tmp_path: Path, content: Any) -> None:
    tmp_path = tmp_path / "run"
    tmp_path.mkdir()
    run = Run(tmp_path)
    bad = tmp_path / "control" / "bad.json"
    if callable(content):
        content(bad)
    else:
        bad.write_bytes(content.encode() if isinstance(content, str) else content)
    place(tmp_path, "checkpoint", "good")
    run.train()
    alarms = [event["what"] for event in run.journal.events() if event["event"] == "alarm"]
    assert len(alarms) == 1
    assert "control/bad.json is not a valid request" in alarms[0]
    large = isinstance(content, str) and len(content) == 70_000
    assert (content is os.mkfifo or large) == alarms[0].endswith("expected a regular file of at most 64 KiB")
    assert statuses(tmp_path) == [("good", "done", 1)]
    assert left(tmp_path) == ["bad"]
    [moved] = (tmp_path / "control" / "bad").iterdir()
    assert moved.name.endswith("-bad.json")


def test_what_cannot_be_moved_or_removed_is_told_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = Run(tmp_path)
    place(tmp_path, "reset")
    (tmp_path / "control" / "bad.json").write_text("{")

    def refuse(*_: Any, **__: Any) -> None:
        raise PermissionError("not yours")

    monkeypatch.setattr(os, "replace", lambda a, b: refuse() if "control" in str(a) else os.rename(a, b))
    monkeypatch.setattr(Path, "unlink", refuse)
    run.train()
    assert len(run.state["resets"]) == 1
    assert len([event for event in run.journal.events() if event["event"] == "alarm"]) == 1


def test_a_folder_that_is_away_for_a_moment_ends_nothing(tmp_path: Path) -> None:
    run = Run(tmp_path)
    (tmp_path / "control").rename(tmp_path / "away")
    run.train(steps=1)
    assert run.state["step"] == 1


# --- the command's side ----------------------------------------------------------------------------------------------


@contextmanager
def at_work(folder: Path, serve: bool = True) -> Iterator[Run]:
    """A run that holds its lock, and takes 20 ms a step in another thread."""
    with (folder / ".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        run, over = Run(folder), threading.Event()

        def steps() -> None:
            while not over.is_set() and not run.stop:
                time.sleep(0.02)
                serve_once(run)

        thread = threading.Thread(target=steps, daemon=True)
        if serve:
            thread.start()
        try:
            yield run
        finally:
            over.set()
            if serve:
                thread.join(10)


def serve_once(run: Run) -> None:
    run.control.serve(run.control.pending(7), 7)


def test_the_command_asks_waits_and_says_the_answer(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    with at_work(tmp_path):
        for what, text in (
            ("reset", "hard reset after step 7"),
            ("validate", "held-out mean reward after step 7: 0.0000 (sums 0.0000)"),
            ("checkpoint", "checkpoint of step 7"),
            ("stop", "stopped after step 7; the same command continues"),
        ):
            assert cli.main(["control", str(tmp_path), what]) == 0
            assert capsys.readouterr().out == text + "\n"
    assert (
        "waiting up to 900 s: the run reads requests at the end of each step, and has not finished a step yet"
        in caplog.text
    )
    assert [event["what"] for event in answers(tmp_path)] == ["reset", "validate", "checkpoint", "stop"]
    assert left(tmp_path) == ["host"]


def test_a_no_is_exit_code_1(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with at_work(tmp_path) as run:
        run.has_prompts = False
        assert cli.main(["control", str(tmp_path), "validate"]) == 1
    assert "validate was refused: the run has no held-out prompts" in caplog.text


def test_without_a_wait_it_returns_the_id(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with at_work(tmp_path, serve=False):
        shutil.rmtree(tmp_path / "control")  # not there while ranks start
        assert cli.main(["control", str(tmp_path), "reset", "--wait", "0"]) == 0
        name = capsys.readouterr().out.strip()
        request = Request.parse((tmp_path / "control" / f"{name}.json").read_bytes(), f"{name}.json")
    assert request.what == "reset"
    assert abs(request.time - time.time()) < 60
    assert left(tmp_path) == [f"{name}.json"]


def test_without_an_answer_the_request_stays(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with at_work(tmp_path, serve=False):
        assert cli.main(["control", str(tmp_path), "stop", "--wait", "0.3"]) == 1
    [name] = [name for name in left(tmp_path) if name != "host"]
    for text in ("waited 0.3 s", name, "stays in", "delete it", "prorl status", "all.log"):
        assert text in caplog.text


def test_a_run_that_ends_meanwhile_is_told(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    codes: list[int] = []
    with at_work(tmp_path, serve=False):
        command = threading.Thread(target=lambda: codes.append(cli.main(["control", str(tmp_path), "reset"])))
        command.start()
        Deadline(10, "the request").wait_until(lambda: len(left(tmp_path)) == 2)
    command.join(10)
    assert codes == [1]
    assert f"the run in {tmp_path} ended without an answer to reset" in caplog.text


def test_a_wait_below_0_is_refused(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    assert cli.main(["control", str(tmp_path), "stop", "--wait", "-1"]) == 2
    assert "--wait -1: expected a number of seconds, 0 or more" in caplog.text


def test_a_run_that_starts_on_another_machine_is_asked(tmp_path: Path) -> None:
    """Its trainer, which says where it is, does not work yet."""
    (tmp_path / "config.yaml").touch()
    (tmp_path / "control").mkdir()
    Journal(tmp_path).append("stop", 3, reason="SIGUSR1")
    lock = tmp_path / ".lock"
    lock.write_text("process 12 on elsewhere, Slurm job 7\n")
    os.utime(lock, (0, 0))
    assert cli.main(["control", str(tmp_path), "stop", "--wait", "0"]) == 2  # it has ended since
    os.utime(lock, (time.time() + 1, time.time() + 1))
    assert cli.main(["control", str(tmp_path), "stop", "--wait", "0"]) == 0
    assert len(left(tmp_path)) == 1


def test_no_live_run(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    assert control.is_locked(tmp_path / "nothing") is False
    assert cli.main(["control", str(tmp_path / "nothing"), "stop"]) == 2
    assert "is not a run directory" in caplog.text
    (tmp_path / "config.yaml").touch()
    assert cli.main(["control", str(tmp_path), "stop"]) == 2  # never started
    assert "no run is active in" in caplog.text
    assert "Fix: the command that started the run continues it" in caplog.text
    run = Run(tmp_path)
    assert cli.main(["control", str(tmp_path), "stop"]) == 2  # killed: it says this machine, whose lock is free
    run.train()
    assert cli.main(["control", str(tmp_path), "stop", "--wait", "0"]) == 2
    assert left(tmp_path) == []
    assert cli.main(["control", str(tmp_path), "stop", "--wait", "-1"]) == 2
    assert cli.main(["control", str(tmp_path), "stop", "--wait", "nan"]) == 2


def test_a_run_on_another_machine_is_waited_for(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Its lock may not be seen here: the command says so, and waits for what the shared directory tells."""
    caplog.set_level("INFO")
    with at_work(tmp_path):
        (tmp_path / "config.yaml").touch()
    (tmp_path / "control" / "host").write_text("node-17\n")
    assert cli.main(["control", str(tmp_path), "reset", "--wait", "0.3"]) == 1
    assert "last seen on node-17" in caplog.text
    assert "waited 0.3 s" in caplog.text


def test_the_wait_is_that_of_a_few_steps(tmp_path: Path) -> None:
    lines = [{"step": n, "time/step": 100.0 if n < 5 else n} for n in range(1, 21)]
    write_lines(tmp_path / "metrics.jsonl", lines)
    seconds, why = control._default_wait(tmp_path)
    assert seconds == 60 + 4 * 20
    assert "took up to 20 s" in why


def test_a_directory_of_somebody_else_is_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def refuse(*_: Any, **__: Any) -> None:
        raise PermissionError(13, "Permission denied")

    with at_work(tmp_path, serve=False):
        monkeypatch.setattr(Path, "write_text", refuse)
        assert cli.main(["control", str(tmp_path), "stop"]) == 2
    assert "control cannot be written" in caplog.text
