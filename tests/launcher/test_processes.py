"""One process under the supervisor: its output, its restarts, its end."""

import logging
import os
import re
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from sandbox_helpers import is_alive

from nemo_prorl.deadlines import Deadline
from nemo_prorl.launcher.processes import Child, MergedLog, ProcessFailed, free_port, stop_all

pytestmark = pytest.mark.starts

Start = Callable[..., Child]


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    """Starts a child that runs some Python; all are ended afterwards."""
    made: list[Child] = []
    merged = MergedLog(tmp_path / "all.log")

    def make(code: str, restarts: int = 0, cores: list[int] | None = None) -> Child:
        command = [sys.executable, "-u", "-c", code]
        name = f"child-{len(made)}"
        child = Child(name, command, dict(os.environ), tmp_path / f"{name}.log", merged, restarts=restarts)
        child.endpoint, child.cores = tmp_path / f"{name}.json", cores
        child.start()
        made.append(child)
        return child

    yield make
    stop_all(made, 0.0, quiet=True)


def pid_in(path: Path) -> int:
    Deadline(20, f"a number in {path}").wait_until(lambda: path.exists() and path.read_text().strip().isdigit())
    return int(path.read_text())


def ended(child: Child) -> None:
    assert child.process is not None
    child.process.wait(20)


def test_what_it_says_is_in_its_log_and_in_the_merged_one(start: Start, tmp_path: Path) -> None:
    child = start("import sys; print('one'); print('two', file=sys.stderr)")
    ended(child)
    Deadline(5, "both lines").wait_until(lambda: list(child.tail) == ["one", "two"])
    assert (tmp_path / "child-0.log").read_text() == "one\ntwo\n"
    assert "child-0: one\n" in (tmp_path / "all.log").read_text()


def test_a_full_disk_takes_the_log_and_not_the_process(start: Start, caplog: pytest.LogCaptureFixture) -> None:
    child = start("import time; time.sleep(1)\nfor n in range(20_000): print('line', n)")
    child.log_file = Path("/dev/full")
    ended(child)  # with nobody to read, the pipe would fill and it would wait for ever
    Deadline(10, "the last line").wait_until(lambda: list(child.tail)[-1:] == ["line 19999"])
    assert child.process is not None
    assert child.process.returncode == 0
    assert caplog.text.count("No space left on device") == 1


def test_one_that_ends_is_started_again_up_to_the_cap(start: Start, tmp_path: Path) -> None:
    child = start(f"import os; open({str(tmp_path / 'pids')!r}, 'a').write('x'); print('why'); os._exit(7)", restarts=2)
    assert child.endpoint is not None
    began = time.monotonic()
    with pytest.raises(ProcessFailed, match=r"child-0 ended with status 7, 3 times within an hour(.|\n)*why"):
        while time.monotonic() - began < 30:
            child.endpoint.touch()
            child.keep_up()
            time.sleep(0.02)
    assert (tmp_path / "pids").read_text() == "xxx"
    assert time.monotonic() - began >= 1.5  # 0.5 s, then 1 s


# What an engine of vLLM 0.32 prints when its core dies: the cause, and the exception of the process that lost its core.
DIES = """import os, sys
pid = os.getpid()
core, server = (f"({name} pid={pid}) ERROR 11-27 01:36:52 [core.py:1512] " for name in ("EngineCore", "MainProcess"))
print(f"{core}Traceback (most recent call last):\\n{core}  File 'x', line 1279, in __call__")
print(f"{core}RuntimeError: head_dim=16 isa=2")
print(f"{server}vllm.v1.engine.exceptions.EngineDeadError: Failed. See stack trace (above) for the root cause.")
print("2026-11-27 01:36:53,095 CRITICAL nemo_prorl.rollout.engine.server: the engine core died", flush=True)
"""
AGAIN = f"{DIES}sys.exit(70)"
PLAIN = "raise ValueError('no memory')"
OTHER = "import os; raise ValueError(f'no memory at {os.getpid()}')"
A_SET = "raise ValueError({'layers.2', 'layers.3', 'norm', 'embed_tokens'})"  # printed in another order each time
KILLED = f"{DIES}os.kill(os.getpid(), 9)"


@pytest.mark.parametrize(
    ("code", "served", "starts", "cause"),
    [
        (AGAIN, False, 2, "status 70 (RuntimeError: head_dim=16 isa=2)"),
        (PLAIN, False, 2, "status 1 (ValueError: no memory)"),
        (PLAIN, True, 3, "status 1 (ValueError: no memory)"),
        (PLAIN, None, 3, "status 1 (ValueError: no memory)"),
        (OTHER, False, 3, "status 1 (ValueError: no memory at "),
        (A_SET, False, 2, "status 1 (ValueError: {"),
        (KILLED, False, 3, "status -9; starting it again"),
        ("import sys; sys.exit('why')", False, 3, "status 1; starting it again"),
    ],
)
def test_the_cause_of_an_end_is_shown_and_is_not_tried_again_before_it_has_served(
    code: str, served: bool | None, starts: int, cause: str, start: Start, caplog: pytest.LogCaptureFixture
) -> None:
    child = start(code, restarts=2)
    child.has_served = None if served is None else lambda: served
    pids = set()
    with pytest.raises(ProcessFailed) as failed:
        while child.process is not None:
            pids.add(child.process.pid)
            child.keep_up()
            time.sleep(0.02)
    assert f"child-0 ended with {cause}" in caplog.messages[0]
    assert len(pids) == starts
    if starts == 2:
        raised = cause.split("(")[1].rstrip(")")
        told = f"child-0 ended twice with the same exception before any response was generated: {raised}"
        assert str(failed.value).startswith(told)
        assert str(failed.value).endswith(f"; its log is {child.log_file}")
    else:
        assert "3 times within an hour" in str(failed.value)


def test_one_that_runs_is_left_alone(start: Start) -> None:
    child = start("import time; time.sleep(60)")
    process = child.process
    for _ in range(3):
        child.keep_up()
    assert child.process is process


def test_a_restart_takes_away_what_the_dead_left_and_says_when_it_serves_again(
    start: Start, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Its endpoint, so that nobody asks it, and the processes that it started."""
    caplog.set_level(logging.INFO)
    code = (
        "import os, subprocess, sys, time\n"
        f"mark = {str(tmp_path / 'below')!r}\n"
        "if os.path.exists(mark): time.sleep(60)\n"
        "below = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(60)'], stdout=subprocess.DEVNULL)\n"
        "open(mark, 'w').write(str(below.pid)); os._exit(1)"
    )
    child = start(code, restarts=1)
    below = pid_in(tmp_path / "below")
    ended(child)
    assert child.endpoint is not None
    child.endpoint.write_text("{}")

    def runs_again() -> bool:
        child.keep_up()
        return child.process is not None and child.process.poll() is None

    Deadline(20, "the restart").wait_until(runs_again)
    Deadline(10, "the end of what it started").wait_until(lambda: not is_alive(below))
    assert not child.endpoint.exists()
    child.keep_up()
    assert "again after" not in caplog.text
    child.endpoint.write_text("{}")
    for _ in range(2):
        child.keep_up()
    assert len(re.findall(r"child-0 serves again after \d+ s", caplog.text)) == 1


def test_stopping_is_asked_for_and_then_enforced(start: Start, tmp_path: Path) -> None:
    polite = start("import signal, sys, time; signal.signal(15, lambda *_: sys.exit(75)); print('up'); time.sleep(60)")
    stubborn = start(
        "import os, signal, subprocess, sys, time\nsignal.signal(15, signal.SIG_IGN)\n"
        "below = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(60)'], stdout=subprocess.DEVNULL)\n"
        f"open({str(tmp_path / 'below')!r}, 'w').write(str(below.pid)); print('up'); time.sleep(60)"
    )
    below = pid_in(tmp_path / "below")
    Deadline(20, "both").wait_until(lambda: "up" in polite.tail and "up" in stubborn.tail)
    began = time.monotonic()
    stop_all([polite, stubborn], 3.0)
    assert time.monotonic() - began < 20
    assert polite.process is not None
    assert stubborn.process is not None
    assert (polite.process.returncode, stubborn.process.returncode) == (75, -9)
    Deadline(10, "the end of what it started").wait_until(lambda: not is_alive(below))


@pytest.mark.parametrize("sleep", [None, 2])
def test_an_engine_is_told_its_kv_cache_and_whether_it_sleeps(tmp_path: Path, sleep: int | None) -> None:
    from nemo_prorl import settings
    from nemo_prorl.launcher.supervisor import NodeSupervisor
    from nemo_prorl.rollout.engine.server import arguments
    from nemo_prorl.sizing.memory import device_bytes, memory_of

    chosen = ["cluster=h100_4x8", "pretrained_checkpoint.restore_from_path=null", "trainer.num_nodes=1"]
    words = "null" if sleep is None else str(sleep)
    cfg = settings.load([*chosen, "rollout.engines=8", f"rollout.sleep={words}", f"run_dir={tmp_path}"])
    merged = MergedLog(tmp_path / "all.log")
    [_, *engines] = NodeSupervisor(cfg, tmp_path, ["math"], merged).services(tmp_path / "weights")
    args = arguments(list(engines[3].command)[2:])
    memory, size = memory_of(cfg), device_bytes(cfg)
    assert size is not None
    assert args.sleep is (sleep is not None)
    assert args.hold_file == (None if sleep is None else str(tmp_path / "endpoints" / "engines-asleep"))
    assert args.kv_mb == (memory.kv_room(size) or 0) >> 20
    alone = arguments(
        list(NodeSupervisor(cfg, tmp_path, ["math"], merged).services(tmp_path, 1, alone=True)[1].command)[2:]
    )
    assert (alone.sleep, alone.hold_file, alone.kv_mb) == (False, None, None)
    assert args.float32_head
    assert alone.float32_head
    cfg.trainer.grpo.float32_head = False
    rounded = arguments(list(NodeSupervisor(cfg, tmp_path, ["math"], merged).services(tmp_path)[1].command)[2:])
    assert not rounded.float32_head


def test_engines_on_devices_of_their_own_come_after_the_trainers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from nemo_prorl import settings
    from nemo_prorl.launcher.supervisor import NodeSupervisor

    chosen = ["cluster=h100_4x8_split", "pretrained_checkpoint.restore_from_path=null", f"run_dir={tmp_path}"]
    cfg = settings.load([*chosen, "trainer.num_nodes=1", "rollout.engines=3", "rollout.tensor_parallel_size=2"])
    node = NodeSupervisor(cfg, tmp_path, ["math"], MergedLog(tmp_path / "all.log"))

    def gpus(alone: bool = False) -> list[str]:
        return [child.env["CUDA_VISIBLE_DEVICES"] for child in node.services(tmp_path, alone=alone)[1:]]

    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    assert gpus() == ["2,3", "4,5", "6,7"]
    assert gpus(alone=True) == ["0,1", "2,3", "4,5"]
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "7,6,5,4,3,2,1,0")
    assert gpus() == ["5,4", "3,2", "1,0"]


def test_a_process_and_its_children_stay_on_their_cores(start: Start) -> None:
    told, core = "import os, subprocess, sys; print(os.sched_getaffinity(0))", max(os.sched_getaffinity(0))
    child = start(f"{told}; subprocess.run([sys.executable, '-c', {told!r}], check=True)", cores=[core])
    ended(child)
    Deadline(5, "both lines").wait_until(lambda: list(child.tail) == [f"{{{core}}}"] * 2)


def test_what_is_said_of_a_failure_has_its_last_line_however_slowly_that_is_written(tmp_path: Path) -> None:
    class Slow(MergedLog):
        def write(self, name: str, line: str) -> None:
            time.sleep(0.3)

    command = [sys.executable, "-c", "print('why it ended')"]
    child = Child("child", command, dict(os.environ), tmp_path / "child.log", Slow(None))
    child.start()
    ended(child)
    with pytest.raises(ProcessFailed, match="why it ended"):
        child.keep_up()


def test_a_port_for_later_is_none_that_a_connection_may_take() -> None:
    lowest = int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
    found = {free_port("127.0.0.1") for _ in range(20)}
    assert max(found) < lowest
    assert len(found) > 10


def test_standard_output_that_is_not_utf_8_takes_every_line() -> None:
    """A thread that fails at a character would leave the process behind at a full pipe."""
    code = """from nemo_prorl.launcher.processes import MergedLog
MergedLog(None).write("trainer-1", "reward \\u2192 1")
"""
    env = {**os.environ, "PYTHONIOENCODING": "ascii", "PYTHONPATH": os.pathsep.join(sys.path)}
    said = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, check=True)
    assert said.stdout.decode() == "trainer-1: reward \u2192 1\n"


def is_another(child: Child, pid: int) -> bool:
    """Keep the child up; return whether it has another process.  ProcessFailed if the restart counts as a failure."""
    child.keep_up()
    return child.process is not None and child.process.pid != pid


def test_a_restart_on_request_is_no_failure(start: Start, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    child = start("import time; print('up'); time.sleep(60)", restarts=0)
    assert child.process is not None
    first = child.process.pid
    Deadline(20, "the first process").wait_until(lambda: "up" in child.tail)
    child.restart()
    Deadline(20, "the second process").wait_until(lambda: is_another(child, first))
    assert not is_alive(first)
    assert is_alive(child.process.pid)
    assert child.endpoint is not None
    child.endpoint.touch()
    child.keep_up()
    assert "child-0 serves again after" in caplog.text


def test_a_restart_kills_a_process_that_does_not_stop(start: Start) -> None:
    child = start("import signal, time; signal.signal(15, signal.SIG_IGN); print('up'); time.sleep(60)", restarts=0)
    assert child.process is not None
    first = child.process.pid
    Deadline(20, "the first process").wait_until(lambda: "up" in child.tail)
    child.restart()
    child.keep_up()
    assert is_alive(first)
    Deadline(20, "the second process").wait_until(lambda: is_another(child, first))
    assert not is_alive(first)
