"""`--from hub`, against a small server that speaks as much of the hub's protocol as a download needs."""

import hashlib
import json
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from tests.conftest import ROOT
from tests.data.preparing import SUMS, manifest, records

pytestmark = pytest.mark.starts

REPO, COMMIT = "agentica-org/DeepScaleR-Preview-Dataset", "0123456789abcdef0123456789abcdef01234567"
FILES = {"deepscaler.json": json.dumps(SUMS).encode(), "README.md": b"# not data\n"}


class _Hub(BaseHTTPRequestHandler):
    def do_HEAD(self) -> None:
        self._serve(False)

    def do_GET(self) -> None:
        self._serve(True)

    def _serve(self, with_body: bool) -> None:
        path = self.path.split("?")[0]
        info = {
            "id": REPO,
            "sha": COMMIT,
            "private": False,
            "downloads": 0,
            "likes": 0,
            "tags": [],
            "siblings": [{"rfilename": name} for name in FILES],
        }
        name = path.rpartition("/")[2]
        if path.startswith(f"/api/datasets/{REPO}"):
            if "/tree/" in path:
                body = json.dumps([{"type": "file", "path": n, "size": len(d), "oid": "0"} for n, d in FILES.items()])
            else:
                body = json.dumps(info)
            self._answer(200, body.encode(), with_body, {"Content-Type": "application/json"})
        elif path.startswith(f"/datasets/{REPO}/resolve/{COMMIT}/") and name in FILES:
            etag = hashlib.sha1(FILES[name]).hexdigest()
            self._answer(200, FILES[name], with_body, {"ETag": f'"{etag}"', "X-Repo-Commit": COMMIT})
        else:
            self._answer(404, b"{}", with_body, {"X-Error-Code": "RepoNotFound"})

    def _answer(self, status: int, body: bytes, with_body: bool, headers: dict[str, str]) -> None:
        self.send_response(status)
        for name, value in {**headers, "Content-Length": str(len(body))}.items():
            self.send_header(name, value)
        self.end_headers()
        if with_body:
            self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def hub() -> Iterator[str]:
    server = ThreadingHTTPServer(("127.0.0.1", 0), _Hub)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_address[1]}"
    server.shutdown()
    server.server_close()


def prepare(folder: Path, endpoint: str, *words: str) -> subprocess.CompletedProcess[str]:
    """In a process of its own: the hub's client reads its environment when it is imported."""
    environment = {key: value for key, value in os.environ.items() if not key.startswith("HF_")}
    environment |= {"HF_ENDPOINT": endpoint, "HF_HOME": str(folder / "cache"), "PYTHONPATH": str(ROOT)}
    environment |= {"HF_HUB_DISABLE_XET": "1", "HF_HUB_DISABLE_TELEMETRY": "1"}
    command = [sys.executable, "-m", "nemo_prorl.cli", "data", "prepare", *words, "--from", "hub", "--check", "0"]
    command += ["--out", str(folder / "out")]
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120, check=False)


def test_a_data_set_of_the_hub(tmp_path: Path, hub: str) -> None:
    told = prepare(tmp_path, hub, "deepscaler")
    assert told.returncode == 0, told.stderr
    assert len(records(tmp_path / "out")) == len(SUMS)
    made = manifest(tmp_path / "out")
    assert (made["from"], made["repo"], made["commit"]) == ("hub", REPO, COMMIT)
    assert made["inputs"] == [
        {"file": "deepscaler.json", "sha256": hashlib.sha256(FILES["deepscaler.json"]).hexdigest(), "rows": 8}
    ]


def test_one_that_is_not_there_and_a_hub_that_is_not_there(tmp_path: Path, hub: str) -> None:
    told = prepare(tmp_path, hub, "eurus2-rl")
    assert told.returncode == 2
    assert "the hub has no data set PRIME-RL/Eurus-2-RL-Data" in told.stderr
    told = prepare(tmp_path, "http://127.0.0.1:9", "scp-116k", "--agreement", "none")
    assert told.returncode == 3
    assert "EricLu/SCP-116K cannot be fetched" in told.stderr
    assert "download *.jsonl and *.parquet of https://huggingface.co/datasets/EricLu/SCP-116K" in told.stderr
    assert "Traceback" not in told.stderr
    assert not (tmp_path / "out").exists()
