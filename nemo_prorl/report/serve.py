"""`prorl report --serve`: the page on this machine's loopback address, with newer data while a run continues.

The server has two addresses, `/` and `/data.json`.  It answers only requests whose header Host is 127.0.0.1 or
localhost: otherwise a page of another site could read the report under a host name that it maps to 127.0.0.1 (DNS
rebinding).  The path of a request is never used as the path of a file.
"""

import hashlib
import json
import logging
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import uvicorn
from starlette.applications import Starlette
from starlette.middleware import Middleware
from starlette.middleware.trustedhost import TrustedHostMiddleware
from starlette.requests import Request
from starlette.responses import HTMLResponse, PlainTextResponse, Response
from starlette.routing import Route

from nemo_prorl.errors import ConfigError, ProrlError
from nemo_prorl.report.data import page_data
from nemo_prorl.report.page import page
from nemo_prorl.report.read import run_folders, with_arms

_log = logging.getLogger(__name__)

_DATA = "/data.json"
# Pause between two readings of the run directories: _LEAST_S seconds and _PAUSE times the duration of the last reading,
# so that the readings do not take a core from the run.
_LEAST_S = 1.0
_PAUSE = 4
_HEADERS = {
    "X-Content-Type-Options": "nosniff",
    "Cross-Origin-Resource-Policy": "same-origin",
    "X-Frame-Options": "DENY",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-store",
}


class PageSource:
    """The data of the page, read again when a file of a run changes.  Several threads may use it."""

    def __init__(self, runs: list[Path], evaluations: list[Path], samples: int) -> None:
        self._runs, self._evaluations, self._samples = runs, evaluations, samples
        self._lock = threading.Lock()
        self._state: object = None
        self._next_at = -float("inf")
        self._data: dict[str, Any] = {}
        self._body, self._tag = b"", ""

    def data(self) -> tuple[dict[str, Any], bytes, str]:
        """Return the data, the data as JSON, and its ETag.

        Raises ProrlError if a run or an evaluation has been removed.
        """
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
        """Yield (path, time of last change, size) of each file that the data comes from, to notice changed files."""
        folders = [folder for argument in with_arms(self._runs) for folder in run_folders(argument)[0]]
        names = ["config.yaml", "metrics.jsonl", "journal.jsonl", "launches.jsonl", "summary.json"]
        names += ["rollouts", "disagreements", "probe/probe.json", "validations"]
        paths = [folder / name for folder in folders for name in names] + [run / "fork.json" for run in self._runs]
        paths += [file for folder in folders for file in sorted(folder.glob("evaluations/*/results.json"))]
        paths += [folder / name for folder in self._evaluations for name in ("results.json", "comparison.json")]
        for path in paths:
            try:
                state = path.stat()
            except OSError:
                continue
            yield str(path), state.st_mtime_ns, state.st_size


def application(source: PageSource) -> Starlette:
    """Return the web application that serves the page at `/`, and the data of the page as JSON at `/data.json`."""

    def whole(_request: Request) -> Response:
        return HTMLResponse(page(source.data()[0]), headers=_HEADERS)

    def data(request: Request) -> Response:
        _, body, tag = source.data()
        headers = {**_HEADERS, "ETag": tag}
        if request.headers.get("if-none-match") == tag:
            return Response(status_code=304, headers=headers)
        return Response(body, media_type="application/json", headers=headers)

    def unreadable(_request: Request, error: Exception) -> Response:
        return PlainTextResponse(f"{error}\n", 503, _HEADERS)

    return Starlette(
        routes=[Route("/", whole), Route(_DATA, data)],
        middleware=[Middleware(TrustedHostMiddleware, allowed_hosts=["127.0.0.1", "localhost"], www_redirect=False)],
        exception_handlers={ProrlError: unreadable},
    )


def listen(port: int) -> socket.socket:
    """Return a socket on 127.0.0.1.  Raises ConfigError if the port is not available."""
    if not 0 <= port <= 65535:
        raise ConfigError(f"--port {port}: must be 1 to 65535, or 0 for any that is free")
    try:
        return socket.create_server(("127.0.0.1", port))
    except OSError as error:
        reason = os.strerror(error.errno or 0)
        raise ConfigError(f"--port {port}: {reason}; give another, or 0 for any free one") from error


def server(source: PageSource) -> uvicorn.Server:
    """Return the server; `run(sockets=[...])` serves until `should_exit`."""
    config = uvicorn.Config(application(source), lifespan="off", log_config=None, access_log=False, ws="none")
    return uvicorn.Server(config)


def serve(runs: list[Path], evaluations: list[Path], samples: int, port: int) -> int:
    """Print the address and serve until interrupted; return 0.  A wrong argument raises ConfigError before that."""
    source = PageSource(runs, evaluations, samples)
    with listen(port) as listener:
        source.data()  # raises before the start if arguments are wrong
        before = signal.signal(signal.SIGTERM, signal.default_int_handler)  # before the address is printed
        try:
            sys.stdout.write(f"http://127.0.0.1:{listener.getsockname()[1]}/\n")
            sys.stdout.flush()
            _log.info("Ctrl-C ends it")
            server(source).run(sockets=[listener])  # uvicorn raises its ending signal again
        except KeyboardInterrupt:
            pass  # the ordinary end
        finally:
            signal.signal(signal.SIGTERM, before)
    return 0
