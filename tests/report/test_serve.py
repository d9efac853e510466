"""`prorl report --serve`: who may ask, for what, and that the data is that of now."""

import http.client
import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from starlette.testclient import TestClient

from nemo_prorl.errors import ConfigError
from nemo_prorl.report import serve
from tests.report.made import make_run, metrics_line


def client_of(folder: Path) -> TestClient:
    app = serve.application(serve.PageSource([folder], [], 10))
    return TestClient(app, "http://127.0.0.1:8642", follow_redirects=False)


@pytest.fixture
def client(tmp_path: Path) -> TestClient:
    return client_of(make_run(tmp_path / "run", 3))


def test_it_listens_on_loopback_only() -> None:
    with serve.listen(0) as listener:
        assert listener.getsockname()[0] == "127.0.0.1"


def test_the_page_and_its_data(client: TestClient) -> None:
    answer = client.get("/")
    assert answer.status_code == 200
    assert '"live":"/data.json"' in answer.text
    assert answer.headers["cross-origin-resource-policy"] == "same-origin"
    assert "access-control-allow-origin" not in answer.headers
    answer = client.get("/data.json")
    assert answer.status_code == 200
    assert answer.json()["curves"][0]["steps"] == 3


@pytest.mark.parametrize("host", ["evil.example", "127.0.0.1.evil.example:8642", "", "evil.example:8642", "localhost."])
def test_other_hosts_are_refused(client: TestClient, host: str) -> None:
    for path in ("/", "/data.json"):
        answer = client.get(path, headers={"Host": host})
        assert answer.status_code == 400
        assert "curves" not in answer.text


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost", "localhost:9000"])
def test_this_machine_is_answered(client: TestClient, host: str) -> None:
    assert client.get("/", headers={"Host": host}).status_code == 200


@pytest.mark.parametrize("path", ["/../config.yaml", "/config.yaml", "/%2e%2e/%2e%2e/etc/passwd", "/x"])
def test_no_path_leads_to_a_file(client: TestClient, path: str) -> None:
    answer = client.get(path)
    assert (answer.status_code, answer.text) == (404, "Not Found")


@pytest.mark.parametrize("method", ["POST", "PUT", "DELETE", "PATCH", "OPTIONS", "TRACE"])
def test_nothing_can_be_written(client: TestClient, method: str) -> None:
    answer = client.request(method, "/data.json")
    assert answer.status_code == 405
    assert set(answer.headers["allow"].split(", ")) == {"GET", "HEAD"}


def test_data_is_that_of_now_and_sent_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(serve, "_LEAST_S", 0.0)
    monkeypatch.setattr(serve, "_PAUSE", 0)
    folder = make_run(tmp_path / "run", 3)
    client = client_of(folder)
    tag = {"If-None-Match": client.get("/data.json").headers["etag"]}
    answer = client.get("/data.json", headers=tag)
    assert (answer.status_code, answer.content) == (304, b"")
    with (folder / "metrics.jsonl").open("a") as file:
        file.write(json.dumps(metrics_line(4)) + "\n")
    answer = client.get("/data.json", headers=tag)
    assert answer.status_code == 200
    assert answer.json()["curves"][0]["steps"] == 4
    (folder / "metrics.jsonl").unlink()
    assert client.get("/data.json").json()["curves"][0]["steps"] == 0
    for path in folder.iterdir():
        if path.is_file():
            path.unlink()
    assert client.get("/data.json").status_code == 503


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
@pytest.mark.starts
def test_it_answers_until_a_signal_and_refuses_a_port_that_is_taken(
    tmp_path: Path, root: Path, number: signal.Signals
) -> None:
    folder = make_run(tmp_path / "run", 1)
    command = [sys.executable, "-m", "nemo_prorl.cli", "report", "--serve", "--port", "0", str(folder)]
    environment = {**os.environ, "PYTHONPATH": str(root)}
    with subprocess.Popen(command, cwd=tmp_path, env=environment, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        address = process.stdout.readline().strip()
        port = int(address.rstrip("/").rsplit(":", 1)[1])
        assert address == f"http://127.0.0.1:{port}/"
        for hosts, status in ((["127.0.0.1"], 200), ([], 400), (["localhost", "evil.example"], 400)):
            connection = http.client.HTTPConnection("127.0.0.1", port, timeout=20)
            connection.putrequest("GET", "/", skip_host=True)
            for host in hosts:
                connection.putheader("Host", host)
            connection.endheaders()
            assert connection.getresponse().status == status
            connection.close()
        with pytest.raises(ConfigError, match=f"--port {port}: "):
            serve.serve([folder], [], 0, port)
        process.send_signal(number)
        assert process.wait(20) == 0
