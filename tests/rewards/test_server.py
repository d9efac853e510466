"""The real server process: token, forms of a request, back-pressure, and its end in every way."""

import argparse
import asyncio
import contextlib
import json
import os
import resource
import select
import signal
import socket
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import Iterator
from http.client import HTTPConnection
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from sandbox_helpers import is_alive
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.testclient import TestClient

from nemo_prorl.deadlines import Deadline
from nemo_prorl.errors import ConfigError
from nemo_prorl.rewards import server
from nemo_prorl.rewards.connections import MAX_BODY, allow_connections
from nemo_prorl.rewards.discovery import discover
from nemo_prorl.rewards.judging import RewardService
from nemo_prorl.rewards.options import add_server_arguments
from nemo_prorl.rewards.server import DEADLINE_HEADER, RewardApp
from nemo_prorl.service import listening_socket, read_token
from tests.rewards.conftest import ROOT, RunningServer, StartServer, request_of, wait_gone

Capture = pytest.CaptureFixture[str]

pytestmark = pytest.mark.starts


def http(server: RunningServer, path: str, body: Any = None, token: str | None = "secret") -> tuple[int, Any]:
    """Status and body (parsed where it is JSON) of one call."""
    data = None if body is None else (body if isinstance(body, bytes) else json.dumps(body).encode())
    call = urllib.request.Request(server.url + path, data)
    if token is not None:
        call.add_header("Authorization", f"Bearer {token}")
    try:
        with urllib.request.urlopen(call, timeout=60) as response:
            status, text = response.status, response.read().decode()
    except urllib.error.HTTPError as error:
        status, text = error.code, error.read().decode()
    try:
        return status, json.loads(text)
    except ValueError:
        return status, text


def test_the_server_end_to_end(plugins: Path, start_server: StartServer) -> None:
    server = start_server("echo,odd", "--max-queue", "50", "--worker-memory-mb", "1024", "--unsafe-no-sandbox")
    assert server.url.startswith("http://127.0.0.1:")
    for pid in server.workers:
        assert Path(f"/proc/{pid}/cmdline").read_text().split("\0")[5:7] == ["1024", "1"]

    # The token is asked for; health is open and says nothing else.
    for token in (None, "", "wrong", "secre"):
        assert http(server, "/v1/score", [request_of("echo", "1")], token)[0] == 401
        assert http(server, "/metrics", token=token)[0] == 401
    assert http(server, "/v1/health", token=None) == (200, {"status": "ready"})

    # One request, or a list in its order; an unknown task does not spoil the rest.
    status, verdict = http(server, "/v1/score", request_of("echo", "0.5"))
    assert (status, verdict["score"], verdict["id"]) == (200, 0.5, "r")
    bodies = [request_of("echo", "0.25", "a"), request_of("none", "1", "b"), request_of("odd", "invalid", "c")]
    status, verdicts = http(server, "/v1/score", bodies)
    assert (status, [v["id"] for v in verdicts], [v["score"] for v in verdicts]) == (
        200,
        ["a", "b", "c"],
        [0.25, None, 0],
    )
    assert verdicts[1]["detail"] == "no reward plugin in use judges task 'none'; in use: echo, odd"
    assert http(server, "/v1/score", []) == (200, [])
    assert http(server, "/v1/score", request_of("echo", "1", "\ud800"))[1]["id"] == "\ud800"

    # A bad request is refused, naming the request and the field.
    broken = {key: value for key, value in request_of("echo", "1").items() if key != "truth"}
    status, error = http(server, "/v1/score", [request_of("echo", "1"), broken])
    assert (status, error["error"]) == (400, "request 1: field 'truth' is missing; it must be an object")
    assert http(server, "/v1/score", b"{")[0] == 400

    # A full queue pushes back, and judges what comes later.
    assert http(server, "/v1/score", [request_of("echo", "1")] * 51)[0] == 429
    assert http(server, "/v1/score", [request_of("echo", "1")] * 50)[0] == 200

    # What the workers do is recorded between two requests, and only then.
    assert http(server, "/v1/trace", {"record": True}, token=None)[0] == 401
    assert http(server, "/v1/trace", {"record": "yes"})[0] == 400
    assert http(server, "/v1/trace", {"record": True})[0] == 200
    assert http(server, "/v1/score", [request_of("echo", "1", f"t{k}") for k in range(9)])[0] == 200
    status, part = http(server, "/v1/trace", {"record": False})
    assert (status, sorted(s["args"]["id"] for s in part["spans"])) == (200, [f"t{k}" for k in range(9)])
    assert {(s["name"], s["cat"], s["process"]) for s in part["spans"]} == {
        ("echo", "judgements", "reward worker echo")
    }
    assert all(s["begin"] <= s["end"] <= part["clock"] for s in part["spans"])
    assert {name for _, name in part["others"]} == {"reward worker echo", "reward worker odd"}
    assert http(server, "/v1/trace", {"record": False})[1]["spans"] == []

    status, text = http(server, "/metrics")
    assert 'prorl_reward_verdicts_total{outcome="invalid",plugin="odd"} 1.0' in text
    assert 'prorl_reward_verdicts_total{outcome="judged",plugin="echo"} 62.0' in text
    assert 'prorl_reward_seconds_count{plugin="echo"} 62.0' in text
    assert 'prorl_reward_workers{plugin="echo"} 1.0' in text


def test_a_body_that_cannot_be_taken_is_refused(plugins: Path, start_server: StartServer, capfd: Capture) -> None:
    server = start_server("echo")
    for path in ("/v1/score", "/v1/trace"):
        status, error = http(server, path, b"[" * 100_000 + b"]" * 100_000)
        assert (status, error) == (400, {"error": "the body's JSON is nested too deeply"})
    text = json.dumps(request_of("echo", "1", meta={"deep": 0}))
    for depth in range(1000, 0, -1):  # what can be read can be handed on, and judged
        status, answer = http(server, "/v1/score", text.replace(": 0}", f": {'[' * depth}{']' * depth}}}").encode())
        if status == 200:
            break
        assert (status, answer) == (400, {"error": "the body's JSON is nested too deeply"})
    assert answer["score"] == 1.0
    assert depth > 500
    assert http(server, "/v1/score", [{**request_of("echo", "1"), "key": []}])[0] == 400

    # Too long a body: as declared, before it is sent; and in chunks, of which none says how many there will be.
    host = server.url.removeprefix("http://")
    connection = HTTPConnection(host, timeout=60)
    connection.putrequest("POST", "/v1/score")
    connection.putheader("Authorization", "Bearer secret")
    connection.putheader("Content-Length", str(MAX_BODY + 1))
    connection.endheaders()
    response = connection.getresponse()
    assert (response.status, json.load(response)) == (413, {"error": f"the body is larger than {MAX_BODY} bytes"})
    connection.close()
    connection = HTTPConnection(host, timeout=60)
    sent: list[int] = []

    def endless() -> Iterator[bytes]:  # until an answer comes, but for a server that gives none
        while sum(sent) < 2 * MAX_BODY and not select.select([connection.sock], [], [], 0)[0]:
            sent.append(2**20)
            yield bytes(2**20)

    with contextlib.suppress(BrokenPipeError, ConnectionResetError):  # it answers before it has read the last
        connection.request("POST", "/v1/score", endless(), {"Authorization": "Bearer secret"}, encode_chunked=True)
    assert connection.getresponse().status == 413
    assert sum(sent) < 2 * MAX_BODY
    connection.close()
    assert http(server, "/v1/score", request_of("echo", "1"))[0] == 200
    assert "Traceback" not in capfd.readouterr().err


def test_a_fault_of_the_server_is_not_the_senders(monkeypatch: pytest.MonkeyPatch) -> None:
    """A client takes 400 for final, and tries 500 again."""
    service = RewardService([], discover())
    client = TestClient(RewardApp(service, "secret").asgi, raise_server_exceptions=False)
    headers = {"Authorization": "Bearer secret"}

    def status(**more: str) -> int:
        return int(client.post("/v1/score", json=[request_of("echo", "1")], headers={**headers, **more}).status_code)

    assert status() == 200
    assert status(**{DEADLINE_HEADER: "soon"}) == 400

    def broken(_: Any) -> bool:
        raise ValueError("a fault of our own")

    monkeypatch.setattr(service, "room_for", broken)
    assert status() == 500


def test_a_body_up_to_the_limit_is_read_and_a_server_that_stops_takes_none(monkeypatch: pytest.MonkeyPatch) -> None:
    app = RewardApp(RewardService([], discover()), "secret")
    client = TestClient(app.asgi, headers={"Authorization": "Bearer secret"})
    body = json.dumps(request_of("echo", "1")).encode()
    for declared in (True, False):
        for most, status in ((len(body), 200), (len(body) - 1, 413)):
            monkeypatch.setattr("nemo_prorl.rewards.server.MAX_BODY", most)
            content: Any = body if declared else iter([body[:9], body[9:]])
            assert client.post("/v1/score", content=content).status_code == status
    monkeypatch.setattr("nemo_prorl.rewards.server.MAX_BODY", MAX_BODY)
    monkeypatch.setattr("nemo_prorl.rewards.server.MAX_REQUESTS", 2)
    for count, status in ((2, 200), (3, 400)):
        assert client.post("/v1/score", json=[request_of("echo", "1")] * count).status_code == status
    for key, status in ((7, 200), ("7", 200), ([], 400), (1.5, 400)):
        assert client.post("/v1/score", json=[{**request_of("echo", "1"), "key": key}]).status_code == status
    assert client.get("/v1/health").status_code == 200
    app.draining = True
    health, refused = client.get("/v1/health"), client.post("/v1/score", json=[])
    assert (health.status_code, health.json()) == (503, {"status": "draining"})
    assert (refused.status_code, refused.json()) == (503, {"error": "the reward server is stopping"})


def test_a_body_is_read_part_by_part_and_not_beyond_the_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    async def parts_left(limit: int) -> tuple[Any, int]:
        parts = [{"type": "http.request", "body": part, "more_body": True} for part in (b"[1,", b" 2", b"]", b" ")]
        parts[-1]["more_body"] = False

        async def receive() -> dict[str, Any]:
            return parts.pop(0)

        monkeypatch.setattr("nemo_prorl.rewards.server.MAX_BODY", limit)
        try:
            return await server._body(Request({"type": "http", "headers": []}, receive)), len(parts)
        except HTTPException as error:
            return error.status_code, len(parts)

    for limit, expected in ((7, ([1, 2], 0)), (6, (413, 0)), (4, (413, 2))):
        assert asyncio.run(parts_left(limit)) == expected


def test_the_options_of_a_server_have_these_defaults() -> None:
    parser = argparse.ArgumentParser()
    add_server_arguments(parser)
    limits = {"workers": 1, "max_queue": 8192, "worker_memory_mb": 4096, "drain_s": 20}
    address = {"host": "127.0.0.1", "public_host": None, "port": 0, "parent_pid": None, "endpoint_file": None}
    files = {"token_file": Path("file"), "tasks": "", "settings": {}, "unsafe_no_sandbox": False}
    assert vars(parser.parse_args(["--token-file", "file"])) == {**limits, **address, **files}
    with pytest.raises(SystemExit):
        parser.parse_args([])


def test_a_reply_has_the_form_that_is_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    client = TestClient(RewardApp(RewardService([], discover()), "secret", "mine").asgi)
    assert {client.post(path, json=[]).status_code for path in ("/v1/score", "/v1/trace")} == {401}
    assert client.get("/metrics").status_code == 401
    client.headers["Authorization"] = "Bearer secret"
    one, two = request_of("echo", "1", "a"), {**request_of("echo", "1", "b"), "key": 7}
    verdict = client.post("/v1/score", json=one).json()
    assert (verdict["id"], verdict["failure"]) == ("a", "infrastructure")
    assert client.post("/v1/score", json=[one, two]).json() == [verdict, {**verdict, "id": "b"}]
    streamed = client.post("/v1/score", json=[one, two], headers={"Accept": "application/x-ndjson"})
    assert streamed.headers["Content-Type"].startswith("application/x-ndjson")
    lines = sorted(map(json.loads, streamed.text.splitlines()), key=lambda line: str(line["id"]))
    assert lines == [{**verdict, "key": None}, {**verdict, "id": "b", "key": 7}]
    names = [line.split()[2] for line in client.get("/metrics").text.splitlines() if line.startswith("# TYPE")]
    kinds = {"seconds", "verdicts_total", "workers_lost_total", "queued", "workers"}
    assert set(names) >= {f"prorl_reward_{kind}" for kind in kinds}
    assert client.post("/v1/trace", json={"record": True}).json()["others"] == []
    assert client.post("/v1/trace", json={"record": False}).json()["spans"] == []
    monkeypatch.setattr(RewardService, "room_for", lambda *_: False)
    full = client.post("/v1/score", json=one)
    assert (full.status_code, full.json(), full.headers["Retry-After"]) == (429, {"error": "the queue is full"}, "1")


def test_a_token_file_is_read_and_one_that_others_can_read_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "token"
    with pytest.raises(ConfigError, match="No such file"):
        read_token(file)
    file.write_text(" \n")
    with pytest.raises(ConfigError, match="is empty"):
        read_token(file)
    file.write_text("secret\n")
    file.chmod(0o700)
    assert read_token(file) == "secret"
    for mode in (0o640, 0o604):
        file.chmod(mode)
        with pytest.raises(ConfigError, match=f"other users can read it.  Fix: chmod 600 {file}"):
            read_token(file)


NONE = resource.RLIM_INFINITY


@pytest.mark.parametrize(
    ("soft", "hard", "set_to"),
    [(1024, 4096, 4096), (1024, NONE, 65536), (4096, 4096, None), (70_000, NONE, None), (NONE, NONE, None)],
)
def test_a_process_may_open_as_many_connections_as_its_user(
    soft: int, hard: int, set_to: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    found: list[tuple[int, tuple[int, int]]] = []
    monkeypatch.setattr(resource, "getrlimit", lambda _: (soft, hard))
    monkeypatch.setattr(resource, "setrlimit", lambda kind, limits: found.append((kind, limits)))
    allow_connections()
    assert found == ([] if set_to is None else [(resource.RLIMIT_NOFILE, (set_to, hard))])


def test_verdicts_stream_as_they_are_known(plugins: Path, start_server: StartServer) -> None:
    server = start_server("echo", "--workers", "2")

    async def main() -> list[dict[str, Any]]:
        body = [{**request_of("echo", "1", "slow", meta={"sleep_s": 1.0}), "key": 7}]
        body += [{**request_of("echo", "0.5", f"fast{key}"), "key": key} for key in (8, 9)]
        headers = {"Authorization": "Bearer secret", "Accept": "application/x-ndjson"}
        async with (
            aiohttp.ClientSession() as session,
            session.post(f"{server.url}/v1/score", json=body, headers=headers) as response,
        ):
            return [json.loads(line) async for line in response.content]

    lines = asyncio.run(main())
    assert {line["key"]: line["id"] for line in lines} == {7: "slow", 8: "fast8", 9: "fast9"}
    assert lines[-1]["key"] == 7  # the fast ones did not wait for it


def test_sigterm_finishes_what_was_begun(plugins: Path, start_server: StartServer) -> None:
    server = start_server("echo")
    workers = server.workers

    async def main() -> dict[str, Any]:
        async with aiohttp.ClientSession(headers={"Authorization": "Bearer secret"}) as session:
            body = request_of("echo", "1", meta={"sleep_s": 3})
            call = asyncio.ensure_future(session.post(f"{server.url}/v1/score", json=body))
            await asyncio.sleep(1.5)  # it is being judged by now
            server.process.send_signal(signal.SIGTERM)
            async with await call as response:
                verdict: dict[str, Any] = await response.json()
                return verdict

    assert asyncio.run(main())["score"] == 1.0
    assert server.process.wait(20) == 0
    wait_gone(workers, "the workers")
    assert json.loads(server.endpoint_file.read_text())["state"] == "stopped"


def test_no_process_is_left_when_the_server_is_killed(plugins: Path, start_server: StartServer) -> None:
    server = start_server("echo,odd", "--workers", "4")
    workers = server.workers
    assert len(workers) == 4
    assert all(map(is_alive, workers))
    call = urllib.request.Request(
        f"{server.url}/v1/score",
        json.dumps([request_of("echo", "1", meta={"sleep_s": 60})]).encode(),
        {"Authorization": "Bearer secret", "Accept": "application/x-ndjson"},
    )
    with urllib.request.urlopen(call, timeout=60):  # one of them is in the middle of a request
        server.kill()
    wait_gone(workers, "the workers of a killed server")


def test_a_small_reply_does_not_wait_for_an_acknowledgement() -> None:
    with listening_socket("127.0.0.1", 0, 1) as listener, socket.create_connection(listener.getsockname()):
        connection, _ = listener.accept()
        with connection:
            assert connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY) != 0


def test_the_server_ends_with_its_parent(plugins: Path, start_server: StartServer) -> None:
    parent = subprocess.Popen(["sleep", "60"])
    server = start_server("echo", "--parent-pid", str(parent.pid))
    workers = server.workers
    newer = json.loads(server.endpoint_file.read_text()) | {"pid": os.getpid(), "url": "http://newer"}
    server.endpoint_file.write_text(json.dumps(newer))
    parent.kill()
    parent.wait()
    assert server.process.wait(20) == 0
    assert json.loads(server.endpoint_file.read_text()) == newer  # the file of its successor stays
    wait_gone(workers, "the workers")


def test_a_server_that_is_stopped_while_its_workers_start_ends_at_once(tmp_path: Path) -> None:
    wait = "import sys, time\nif 'worker' in sys.argv[0]:\n    time.sleep(60)\n"
    (tmp_path / "slow.py").write_text(wait + "def score(prompt, response, truth):\n    return 1.0\n")
    (tmp_path / "token").write_text("secret")
    (tmp_path / "token").chmod(0o600)
    command = [sys.executable, "-m", "nemo_prorl.rewards.server", "--tasks", f"slow={tmp_path / 'slow.py'}:score"]
    server = RunningServer(
        subprocess.Popen([*command, "--token-file", str(tmp_path / "token")], cwd=ROOT), tmp_path / "endpoint"
    )
    try:
        Deadline(60, "its worker").wait_until(lambda: bool(server.workers))
        workers = server.workers
        server.process.send_signal(signal.SIGTERM)
        assert server.process.wait(20) == 0
        wait_gone(workers, "the workers")
    finally:
        server.kill()


def test_wrong_use_is_said_before_anything_starts(plugins: Path, tmp_path: Path) -> None:
    def run(*arguments: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-m", "nemo_prorl.rewards.server", *arguments]
        return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60, check=False)

    token = tmp_path / "token"
    missing = run("--tasks", "echo", "--token-file", str(token))
    assert missing.returncode == 2
    assert str(token) in missing.stderr
    token.write_text("secret")
    os.chmod(token, 0o600)
    unknown = run("--tasks", "ecco", "--token-file", str(token))
    assert unknown.returncode == 2
    assert "no reward plugin judges task 'ecco'; known: code, echo" in unknown.stderr
    setting = run("--tasks", "echo", "--token-file", str(token), "--settings", '{"echo": {"speed": 1}}')
    assert setting.returncode == 2
    assert "rewards.plugins.echo.speed=1: unknown setting" in setting.stderr
