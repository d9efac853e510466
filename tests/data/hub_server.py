"""A small server that speaks as much of the Hugging Face hub's protocol as a download needs."""

import hashlib
import json
import os
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

from tests.conftest import ROOT

COMMIT = "0123456789abcdef0123456789abcdef01234567"


@contextmanager
def serving(repo: str, files: Mapping[str, bytes], asked: list[str] | None = None) -> Iterator[str]:  # noqa: C901
    """Serve one repository, as a data set and as a model, at one commit; yields the address.

    `asked`: gets the path of each request.
    """

    class Hub(BaseHTTPRequestHandler):
        def do_HEAD(self) -> None:
            self._serve(False)

        def do_GET(self) -> None:
            self._serve(True)

        def _serve(self, with_body: bool) -> None:
            if asked is not None:
                asked.append(self.path)
            path = self.path.split("?")[0].replace("/datasets/", "/").replace("/models/", "/")
            siblings = [{"rfilename": name} for name in files]
            info = {"id": repo, "sha": COMMIT, "private": False, "downloads": 0, "likes": 0, "tags": []}
            name = path.rpartition("/")[2]
            if path.startswith(f"/api/{repo}"):
                tree = [{"type": "file", "path": n, "size": len(d), "oid": "0"} for n, d in files.items()]
                body = json.dumps(tree if "/tree/" in path else {**info, "siblings": siblings})
                self._answer(200, body.encode(), with_body, {"Content-Type": "application/json"})
            elif path.startswith(f"/{repo}/resolve/{COMMIT}/") and name in files:
                etag = hashlib.sha1(files[name]).hexdigest()
                self._answer(200, files[name], with_body, {"ETag": f'"{etag}"', "X-Repo-Commit": COMMIT})
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

    server = ThreadingHTTPServer(("127.0.0.1", 0), Hub)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}"
    finally:
        server.shutdown()
        server.server_close()


def environment(cache: Path, endpoint: str) -> dict[str, str]:
    """Return the variables of a process whose hub is `endpoint`: its client reads them when it is imported."""
    others = {key: value for key, value in os.environ.items() if not key.startswith("HF_")}
    hub = {"HF_ENDPOINT": endpoint, "HF_HOME": str(cache), "HF_HUB_DISABLE_XET": "1", "HF_HUB_DISABLE_TELEMETRY": "1"}
    return {**others, **hub, "PYTHONPATH": str(ROOT)}
