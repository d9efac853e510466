"""`prorl report --serve`: who may ask, for what, and that the data is that of now."""

import http.client
import json
import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from nemo_prorl.errors import ConfigError
from nemo_prorl.report import serve
from nemo_prorl.report.serve import PageSource, ReportServer
from tests.report.made import make_run, metrics_line


@contextmanager
def served(folder: Path) -> Iterator[ReportServer]:
    with ReportServer(PageSource([folder], [], 10), 0) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
        thread.start()
        try:
            yield server
        finally:
            server.shutdown()
            thread.join(10)


@pytest.fixture
def server(tmp_path: Path) -> Iterator[ReportServer]:
    with served(make_run(tmp_path / "run", 3)) as one:
        yield one


def ask(
    server: ReportServer, path: str = "/", method: str = "GET", **headers: str
) -> tuple[int, bytes, dict[str, str]]:
    connection = http.client.HTTPConnection("127.0.0.1", server.server_port, timeout=10)
    try:
        connection.request(method, path, headers=headers)
        answer = connection.getresponse()
        return answer.status, answer.read(), {key.lower(): value for key, value in answer.getheaders()}
    finally:
        connection.close()


def test_it_listens_on_loopback_only(server: ReportServer) -> None:
    assert server.socket.getsockname()[0] == "127.0.0.1"


def test_the_page_and_its_data(server: ReportServer) -> None:
    status, body, headers = ask(server)
    assert status == 200
    assert b'"live":"/data.json"' in body
    assert headers["cross-origin-resource-policy"] == "same-origin"
    assert "access-control-allow-origin" not in headers
    status, body, _ = ask(server, "/data.json")
    assert status == 200
    assert json.loads(body)["curves"][0]["steps"] == 3


@pytest.mark.parametrize("host", ["evil.example", "127.0.0.1", "127.0.0.1.evil.example:PORT", "", "localhost:1"])
def test_other_hosts_are_refused(server: ReportServer, host: str) -> None:
    for path in ("/", "/data.json"):
        status, body, _ = ask(server, path, Host=host.replace("PORT", str(server.server_port)))
        assert status == 421
        assert b"curves" not in body


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost", "LOCALHOST"])
def test_this_machine_is_answered(server: ReportServer, host: str) -> None:
    assert ask(server, Host=f"{host}:{server.server_port}")[0] == 200


def test_a_request_with_two_hosts_or_none_is_refused(server: ReportServer) -> None:
    for hosts in ("", f"Host: localhost:{server.server_port}\r\nHost: evil.example\r\n"):
        with socket.create_connection(("127.0.0.1", server.server_port), 10) as connection:
            connection.sendall(f"GET / HTTP/1.1\r\n{hosts}Connection: close\r\n\r\n".encode())
            assert connection.makefile("rb").readline().split()[1] == b"421"


@pytest.mark.parametrize(
    "path",
    ["/../config.yaml", "/config.yaml", "//etc/passwd", "/%2e%2e/%2e%2e/etc/passwd", "/data.json/..", "/?a", "/x"],
)
def test_no_path_leads_to_a_file(server: ReportServer, path: str) -> None:
    status, body, _ = ask(server, path)
    assert status == 404
    assert body == b"there is / and /data.json\n"


@pytest.mark.parametrize("method", ["POST", "PUT", "DELETE", "PATCH", "OPTIONS", "HEAD", "TRACE"])
def test_only_get_is_answered(server: ReportServer, method: str) -> None:
    status, _, headers = ask(server, "/data.json", method)
    assert status == 405
    assert headers["allow"] == "GET"


def test_data_is_that_of_now_and_sent_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(serve, "_LEAST_S", 0.0)
    monkeypatch.setattr(serve, "_PAUSE", 0)
    folder = make_run(tmp_path / "run", 3)
    with served(folder) as server:
        _, _, headers = ask(server, "/data.json")
        tag = {"If-None-Match": headers["etag"]}
        assert ask(server, "/data.json", **tag)[:2] == (304, b"")
        with (folder / "metrics.jsonl").open("a") as file:
            file.write(json.dumps(metrics_line(4)) + "\n")
        status, body, _ = ask(server, "/data.json", **tag)
        assert status == 200
        assert json.loads(body)["curves"][0]["steps"] == 4
        (folder / "metrics.jsonl").unlink()
        assert json.loads(ask(server, "/data.json")[1])["curves"][0]["steps"] == 0
        for path in folder.iterdir():
            if path.is_file():
                path.unlink()
        assert ask(server, "/data.json")[0] == 503


def test_it_ends_with_an_interrupt_and_refuses_a_port_that_is_taken(tmp_path: Path, root: Path) -> None:
    folder = make_run(tmp_path / "run", 1)
    command = [sys.executable, "-m", "nemo_prorl.cli", "report", "--serve", "--port", "0", str(folder)]
    environment = {**os.environ, "PYTHONPATH": str(root)}
    with subprocess.Popen(command, cwd=tmp_path, env=environment, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        address = process.stdout.readline().strip()
        port = int(address.rstrip("/").rsplit(":", 1)[1])
        assert address == f"http://127.0.0.1:{port}/"
        with pytest.raises(ConfigError, match=f"--port {port}: "):
            serve.serve([folder], [], 0, port)
        process.send_signal(signal.SIGTERM)
        assert process.wait(20) == 0
