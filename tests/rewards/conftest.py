"""Installed-looking plugins that misbehave in known ways, and helpers to start a real reward server."""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from prorl_reward_math.plugin import MathReward
from sandbox_helpers import children_of, is_alive

from nemo_prorl.deadlines import Deadline

ROOT = Path(__file__).resolve().parents[2]

PLUGINS = '''
import os, select, signal, subprocess, sys, time
from nemo_prorl.rewards.interface import InvalidAnswer, RewardPlugin, RewardResult

class Echo(RewardPlugin):
    """Scores the number that the response is."""
    name, tasks = "echo", ("echo",)
    def prepare(self):
        print("warming up")
    def score(self, request):
        print("a plugin that prints")
        time.sleep(request.meta.get("sleep_s", 0))
        return RewardResult(score=float(request.response), detail="pid %d" % os.getpid())

class Odd(RewardPlugin):
    """Does what the response says."""
    name, tasks, time_budget_s = "odd", ("odd",), 0.4
    def score(self, request):
        word = request.response
        if word == "raise":
            raise RuntimeError("out of order")
        if word == "invalid":
            raise InvalidAnswer("not a number")
        if word == "sleep":
            time.sleep(60)
        if word == "select":
            select.select([], [], [], 60)
        if word == "spin":
            while True:
                pass
        if word == "child spins":
            subprocess.run([sys.executable, "-S", "-c", "while True: pass"])
        if word == "0.25 s":
            end = time.process_time() + 0.25
            while time.process_time() < end:
                pass
        if word == "die":
            os.kill(os.getpid(), signal.SIGKILL)
        if word == "line":  # past the worker, on its socket
            os.write(int(sys.argv[1]), request.meta["line"].encode() + b"\\n")
            time.sleep(60)
        if word == "memory":
            held = [bytearray(2**26) for _ in range(10**6)]
        odd = {"two": 2.0, "nan": float("nan"), "text": "1", "true": True}
        if word == "none":
            return None
        if word in ("die_once", "hang_once"):
            try:
                os.close(os.open(request.meta["flag"], os.O_CREAT | os.O_EXCL))
            except FileExistsError:
                return RewardResult(score=1.0)
            if word == "hang_once":
                time.sleep(60)
            os.kill(os.getpid(), signal.SIGKILL)
        return RewardResult(score=odd.get(word, 1.0))
'''
ENTRY_POINTS = """[nemo_prorl.rewards]
echo = misbehaving_plugins:Echo
odd = misbehaving_plugins:Odd
"""
BROKEN = """broken = misbehaving_missing_module:Nothing
not_a_plugin = json:loads
"""


def install(folder: Path, entry_points: str) -> None:
    """Makes `folder` look like site-packages with one installed distribution."""
    info = folder / "misbehaving_plugins-1.0.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: misbehaving-plugins\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(entry_points)
    (folder / "misbehaving_plugins.py").write_text(PLUGINS)


@pytest.fixture
def plugins(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """`echo` and `odd` are installed, here and in every process started from here."""
    folder = tmp_path / "site"
    install(folder, ENTRY_POINTS)
    return _use(folder, monkeypatch)


@pytest.fixture
def broken_plugins(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """As `plugins`, and two that cannot be used."""
    folder = tmp_path / "site"
    install(folder, ENTRY_POINTS + BROKEN)
    return _use(folder, monkeypatch)


def _use(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.syspath_prepend(str(folder))
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(folder), str(ROOT)]))
    return folder


@pytest.fixture(scope="module")
def math() -> MathReward:
    """The plugin of `math`, ready to judge in this process."""
    plugin = MathReward()
    plugin.prepare()
    return plugin


def request_of(task: str, response: str, name: str = "r", **more: Any) -> dict[str, Any]:
    base = {"id": name, "task": task, "prompt": "?", "truth": {}, "response": response, "finished": True}
    return {**base, "source": "test", "meta": {}, **more}


def wait_gone(pids: set[int], what: str) -> None:
    Deadline(20, f"the end of {what}").wait_until(lambda: not any(map(is_alive, pids)))


@dataclass
class RunningServer:
    """A real server process."""

    process: "subprocess.Popen[bytes]"
    endpoint_file: Path
    token: str = "secret"
    url: str = field(init=False, default="")

    def wait_ready(self) -> "RunningServer":
        def ready() -> bool:
            assert self.process.poll() is None, f"the server ended with {self.process.returncode}"
            if not self.endpoint_file.exists():
                return False
            announced = json.loads(self.endpoint_file.read_text())
            self.url = announced["url"]
            return bool(announced["state"] == "ready" and announced["pid"] == self.process.pid)

        Deadline(60, "the reward server").wait_until(ready)
        return self

    @property
    def workers(self) -> set[int]:
        return children_of(self.process.pid)

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()


StartServer = Callable[..., RunningServer]


@pytest.fixture
def start_server(tmp_path: Path) -> Iterator[StartServer]:
    with servers(tmp_path) as start:
        yield start


@contextmanager
def servers(folder: Path) -> Iterator[StartServer]:
    """Starts servers for a comma-separated list of tasks; all are ended afterwards, and must leave nothing."""
    started: list[RunningServer] = []
    token_file = folder / "token"
    token_file.write_text("secret\n")
    token_file.chmod(0o600)

    def start(tasks: str = "echo,odd", *more: str, name: str = "rewards") -> RunningServer:
        endpoint = folder / "endpoints" / f"{name}.json"
        command = [sys.executable, "-m", "nemo_prorl.rewards.server", "--tasks", tasks, "--token-file", str(token_file)]
        command += ["--endpoint-file", str(endpoint), *more]
        server = RunningServer(subprocess.Popen(command, cwd=ROOT), endpoint)
        started.append(server)
        return server.wait_ready()

    yield start
    for server in started:
        if server.process.poll() is None:
            workers = server.workers
            server.process.send_signal(signal.SIGTERM)
            try:
                server.process.wait(30)
            finally:
                server.kill()
            wait_gone(workers, "workers of an ended server")
