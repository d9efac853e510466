"""`prorl report --serve`: the page on this machine's loopback address, with newer data while a run goes on.

It answers two addresses, `/` and `/data.json`, to GET only, and only to requests whose Host is this machine: a page
from elsewhere cannot read it by giving its own name this address.  No path of a request ever reaches the file system.
"""

import hashlib
import json
import logging
import os
import signal
import sys
import threading
import time
from collections.abc import Iterator
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

from nemo_prorl.errors import ConfigError, ProrlError
from nemo_prorl.report.data import page_data
from nemo_prorl.report.page import page
from nemo_prorl.report.read import run_folders

_log = logging.getLogger(__name__)

_DATA = "/data.json"
_LEAST_S = 1.0  # between two readings of the run directories,
_PAUSE = 4  # and so many times as long as the last one took: it must not take a core from the run
_CLIENT_S = 20.0  # a request that takes longer to come or to be sent is dropped
_HEADERS = {
    "X-Content-Type-Options": "nosniff",
    "Cross-Origin-Resource-Policy": "same-origin",
    "X-Frame-Options": "DENY",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-store",
}


class PageSource:
    """The data of the page, read again when a file of a run changed; several threads may ask."""

    def __init__(self, runs: list[Path], evaluations: list[Path], samples: int) -> None:
        self._runs, self._evaluations, self._samples = runs, evaluations, samples
        self._lock = threading.Lock()
        self._state: object = None
        self._next_at = -float("inf")
        self._data: dict[str, Any] = {}
        self._body, self._tag = b"", ""

    def data(self) -> tuple[dict[str, Any], bytes, str]:
        """The value, as JSON, and its ETag; raises ProrlError where a run or an evaluation went away."""
        with self._lock:
            if time.monotonic() >= self._next_at and (state := tuple(self._files())) != self._state:
                begun = time.monotonic()
                data = page_data(self._runs, self._evaluations, self._samples) | {"live": _DATA}
                self._data, self._body = data, json.dumps(data, separators=(",", ":"), allow_nan=False).encode()
                self._tag = f'"{hashlib.sha256(self._body).hexdigest()[:32]}"'
                now = time.monotonic()
                self._state, self._next_at = state, now + _LEAST_S + _PAUSE * (now - begun)
            return self._data, self._body, self._tag

    def _files(self) -> Iterator[tuple[str, int, int]]:
        """What tells that something changed: times and sizes of the files that are read."""
        folders = [folder for argument in self._runs for folder in run_folders(argument)[0]]
        names = ("config.yaml", "metrics.jsonl", "journal.jsonl", "launches.jsonl", "summary.json", "rollouts")
        paths = [folder / name for folder in folders for name in names]
        paths += [folder / name for folder in self._evaluations for name in ("results.json", "comparison.json")]
        for path in paths:
            try:
                told = path.stat()
            except OSError:
                continue
            yield str(path), told.st_mtime_ns, told.st_size


class _Handler(BaseHTTPRequestHandler):
    server: "ReportServer"
    server_version = "prorl"
    sys_version = ""
    protocol_version = "HTTP/1.1"
    timeout = _CLIENT_S

    def do_GET(self) -> None:
        if not self._is_for_us():
            self._answer(HTTPStatus.MISDIRECTED_REQUEST, b"this server answers to 127.0.0.1 and localhost only\n")
        elif self.path not in ("/", _DATA):
            self._answer(HTTPStatus.NOT_FOUND, b"there is / and /data.json\n")
        else:
            self._send_report()

    def _refuse(self) -> None:
        self._answer(HTTPStatus.METHOD_NOT_ALLOWED, b"GET only\n", {"Allow": "GET"})

    do_HEAD = do_POST = do_PUT = do_PATCH = do_DELETE = do_OPTIONS = do_TRACE = do_CONNECT = _refuse

    def _is_for_us(self) -> bool:
        hosts = self.headers.get_all("Host") or []
        return len(hosts) == 1 and hosts[0].strip().lower() in self.server.hosts

    def _send_report(self) -> None:
        try:
            data, body, tag = self.server.source.data()
        except ProrlError as error:
            self._answer(HTTPStatus.SERVICE_UNAVAILABLE, f"{error}\n".encode())
            return
        if self.path == "/":
            self._answer(HTTPStatus.OK, page(data).encode(), {"Content-Type": "text/html; charset=utf-8"})
        elif self.headers.get("If-None-Match") == tag:
            self._answer(HTTPStatus.NOT_MODIFIED, b"", {"ETag": tag})
        else:
            self._answer(HTTPStatus.OK, body, {"Content-Type": "application/json", "ETag": tag})

    def _answer(self, status: HTTPStatus, body: bytes, headers: dict[str, str] | None = None) -> None:
        self.close_connection = True  # no thread waits for a reader, no body that nobody reads follows
        self.send_response(status)
        self.send_header("Connection", "close")
        for name, value in ({"Content-Type": "text/plain; charset=utf-8"} | _HEADERS | (headers or {})).items():
            self.send_header(name, value)
        if status != HTTPStatus.NOT_MODIFIED:
            self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def log_message(self, format: str, *args: Any) -> None:
        _log.debug(format, *args)


class ReportServer(ThreadingHTTPServer):
    """Listens on 127.0.0.1 only."""

    daemon_threads = True

    def __init__(self, source: PageSource, port: int) -> None:
        super().__init__(("127.0.0.1", port), _Handler)
        self.source = source
        names = ("127.0.0.1", "localhost")
        self.hosts = {f"{name}:{self.server_port}" for name in names} | (
            set(names) if self.server_port == 80 else set()
        )

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}/"

    def handle_error(self, request: Any, client_address: Any) -> None:
        error = sys.exc_info()[1]
        if isinstance(error, OSError):
            return  # the reader went away
        _log.error("report: a request failed", exc_info=error)


def serve(runs: list[Path], evaluations: list[Path], samples: int, port: int) -> int:
    """Prints the address and answers until it is interrupted.  Raises ConfigError before that, if anything is wrong."""
    if not 0 <= port <= 65535:
        raise ConfigError(f"--port {port}: must be 1 to 65535, or 0 for any that is free")
    source = PageSource(runs, evaluations, samples)
    source.data()  # what is wrong with the arguments is said now
    try:
        server = ReportServer(source, port)
    except OSError as error:
        raise ConfigError(
            f"--port {port}: {os.strerror(error.errno or 0)}; give another, or 0 for any free one"
        ) from error
    with server:
        before = signal.getsignal(signal.SIGTERM)
        try:
            signal.signal(signal.SIGTERM, _interrupt)  # before anybody knows the address
            sys.stdout.write(f"{server.url}\n")
            sys.stdout.flush()
            _log.info("Ctrl-C ends it")
            server.serve_forever(poll_interval=0.2)
        except KeyboardInterrupt:
            pass  # the ordinary end
        finally:
            signal.signal(signal.SIGTERM, before)
    return 0


def _interrupt(_number: int, _frame: Any) -> None:
    raise KeyboardInterrupt
