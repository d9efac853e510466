"""A service that lives and does not answer is killed, so that its supervisor starts it again."""

import json
import socket
import sys
import threading
import time
from pathlib import Path

import pytest

from nemo_prorl.config import DeadlinesConfig
from nemo_prorl.launcher.health import Health
from nemo_prorl.launcher.processes import Child, MergedLog, stop_all
from nemo_prorl.service import ask

pytestmark = pytest.mark.starts

SERVER = """
import http.server, json, os, sys, time

class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        told = self.headers["Authorization"] == "Bearer secret" and self.path == "/v1/health"
        while os.path.exists(sys.argv[2]): time.sleep(0.1)
        self.send_response(200 if told else 401)
        self.end_headers()
    def log_message(self, *words): pass

server = http.server.HTTPServer(("127.0.0.1", 0), Handler)
url = f"http://127.0.0.1:{server.server_port}"
with open(sys.argv[1] + ".tmp", "w") as file:
    json.dump({"kind": "rewards", "url": url, "pid": os.getpid(), "state": "ready"}, file)
os.replace(sys.argv[1] + ".tmp", sys.argv[1])
server.serve_forever()
"""


@pytest.mark.parametrize(
    "ready", [pytest.param(True, marks=pytest.mark.slow), False], ids=["hangs later", "never gets ready"]
)
def test_a_silent_service_is_started_again(tmp_path: Path, ready: bool) -> None:
    (tmp_path / "token").write_text("secret\n")
    endpoint, hang = tmp_path / "rewards-0.json", tmp_path / "hang"
    command = [sys.executable, "-c", SERVER if ready else "import time; time.sleep(100)", str(endpoint), str(hang)]
    merged = MergedLog(tmp_path / "all.log")
    child = Child("rewards-0", command, {}, tmp_path / "log", merged, restarts=1, endpoint=endpoint)
    deadlines = DeadlinesConfig(health_s=2.0, startup_s=60.0 if ready else 2.0)
    health = Health([child], tmp_path / "token", deadlines)
    child.start()
    assert child.process is not None
    first = child.process.pid

    def run_for(seconds: float, until_restart: bool) -> None:
        end = time.monotonic() + seconds
        while time.monotonic() < end and not (
            until_restart and child.process is not None and child.process.pid != first
        ):
            child.keep_up()
            health.update()
            time.sleep(0.05)

    try:
        if ready:
            run_for(4.0, until_restart=False)
            assert child.process.pid == first
            assert json.loads(endpoint.read_text())["pid"] == first
            hang.touch()
        run_for(20.0, until_restart=True)
        assert child.process.pid != first
    finally:
        health.close()
        stop_all([child], 0.0, quiet=True)


def test_an_engine_that_waits_for_the_others_to_wake_is_not_late(tmp_path: Path) -> None:
    (tmp_path / "token").write_text("secret\n")
    held = tmp_path / "engine-0.held"
    command = [sys.executable, "-c", "import time; time.sleep(100)"]
    merged, endpoint = MergedLog(tmp_path / "all.log"), tmp_path / "engine-0.json"
    child = Child("engine-0", command, {}, tmp_path / "log", merged, restarts=1, endpoint=endpoint)
    held.touch()
    child.start()
    health = Health([child], tmp_path / "token", DeadlinesConfig(health_s=0.4, startup_s=0.5))
    assert child.process is not None
    try:
        end = time.monotonic() + 1.5
        while time.monotonic() < end:
            health.update()
            time.sleep(0.05)
        assert child.process.poll() is None
        held.unlink()
        end = time.monotonic() + 20.0
        while child.process.poll() is None and time.monotonic() < end:
            health.update()
            time.sleep(0.05)
        assert child.process.poll() is not None
    finally:
        health.close()
        stop_all([child], 0.0, quiet=True)


@pytest.mark.parametrize("reply", [b"no HTTP at all\r\n", b"HTTP/1.0 401 no\r\n\r\nwrong token", b""])
def test_what_is_no_answer_is_an_error_of_the_connection(reply: bytes, tmp_path: Path) -> None:
    """Another program may have the port of a dead service; health checks must go on then, and notice it."""
    (tmp_path / "token").write_text("secret\n")
    with socket.create_server(("127.0.0.1", 0)) as server:

        def answer() -> None:
            for _ in range(2):
                connection, _address = server.accept()
                with connection:
                    connection.recv(1 << 16)
                    connection.sendall(reply)

        threading.Thread(target=answer, daemon=True).start()
        url = f"http://127.0.0.1:{server.getsockname()[1]}/v1/health"
        with pytest.raises(OSError, match="wrong token" if b"401" in reply else None):
            ask(url, "secret", 5.0)
        assert not Health([], tmp_path / "token", DeadlinesConfig())._answers(url)
