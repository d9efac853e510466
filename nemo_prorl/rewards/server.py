"""The reward server, which judges requests over HTTP.

    python -m nemo_prorl.rewards.server --workers 2 --tasks math,puzzles --token-file F --endpoint-file G

* `POST /v1/score`: the body is one request or a list; the reply is the verdict or the list of verdicts.  With
  `Accept: application/x-ndjson` the reply is a stream: each verdict is sent once it is known, in any order, with the
  `key` of its request.
* `GET /v1/health`, `GET /metrics` (Prometheus), and `POST /v1/trace`, which starts or stops a record of the workers'
  activity.

The server listens on the loopback address by default.  It stops when its parent ends (`--parent-pid`) or on SIGTERM,
after it has finished the open requests.  Its workers end with it, even if it is killed.
"""

import argparse
import asyncio
import contextlib
import json
import logging
import os
import signal
import socket
import sys
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import Any, Literal

import uvicorn
from prometheus_client import CollectorRegistry, Histogram, Metric, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

from nemo_prorl import stacks, tracing
from nemo_prorl.errors import ConfigError, ProrlError
from nemo_prorl.rewards.connections import MAX_BODY, allow_connections
from nemo_prorl.rewards.discovery import discover
from nemo_prorl.rewards.interface import RewardRequest, Verdict
from nemo_prorl.rewards.judging import RewardService, pool_specs
from nemo_prorl.rewards.options import add_server_arguments
from nemo_prorl.rewards.pool import PluginPool
from nemo_prorl.service import is_authorized, is_own, listening_socket, read_token, write_endpoint

_log = logging.getLogger(__name__)

NDJSON = "application/x-ndjson"
DEADLINE_HEADER = "prorl-deadline-s"  # seconds after which an unjudged request is an infrastructure failure
MAX_REQUESTS = 4096  # per POST
_BUCKETS = (0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0, 30.0)


class _PoolMetrics:
    """The counts of the pools in the format of Prometheus, collected at each scrape."""

    def __init__(self, pools: dict[str, PluginPool], registry: CollectorRegistry) -> None:
        self._pools = pools
        registry.register(self)
        text = "Wall time of a judgement in its worker, in seconds"
        seconds = Histogram("prorl_reward_seconds", text, ["plugin"], buckets=_BUCKETS, registry=registry)
        for name, pool in pools.items():
            pool.stats.on_seconds = seconds.labels(name).observe

    def collect(self) -> Iterator[Metric]:
        verdicts = CounterMetricFamily("prorl_reward_verdicts", "Verdicts by outcome", labels=["plugin", "outcome"])
        lost = CounterMetricFamily("prorl_reward_workers_lost", "Workers that died or were killed", labels=["plugin"])
        queued = GaugeMetricFamily("prorl_reward_queued", "Requests waiting for a worker", labels=["plugin"])
        workers = GaugeMetricFamily("prorl_reward_workers", "Workers alive", labels=["plugin"])
        for name, pool in self._pools.items():
            for outcome, count in sorted(pool.stats.outcomes.items()):
                verdicts.add_metric([name, outcome], count)
            lost.add_metric([name], pool.stats.workers_lost)
            queued.add_metric([name], pool.queued)
            workers.add_metric([name], len(pool.workers))
        yield from (verdicts, lost, queued, workers)


async def _body(http: Request) -> Any:
    """Return the parsed JSON body.

    Raises:
        HTTPException: The body is too long (413) or not JSON (400).
        RecursionError: The JSON is nested too deeply.
    """
    declared, size, parts = int(http.headers.get("content-length", "0")), 0, []
    if declared <= MAX_BODY:
        async for part in http.stream():  # a chunked body declares no length
            parts.append(part)
            size += len(part)
            if size > MAX_BODY:
                break
    if max(declared, size) > MAX_BODY:
        raise HTTPException(413, f"the body is larger than {MAX_BODY} bytes")
    try:
        return json.loads(b"".join(parts))
    except ValueError as error:
        raise HTTPException(400, f"the body is not JSON: {error}") from error


def _requests_of(items: list[Any]) -> list[RewardRequest]:
    """Return the requests of a POST.  Raises ValueError that names the request's index and the field."""
    if len(items) > MAX_REQUESTS:
        raise ValueError(f"{len(items)} requests in one POST; at most {MAX_REQUESTS} are allowed")
    requests = []
    for index, item in enumerate(items):
        try:
            requests.append(RewardRequest.from_json(item))
        except ValueError as error:
            raise ValueError(f"request {index}: {error}") from error
        if not isinstance(item.get("key", 0), int | str):
            raise ValueError(f"request {index}: field 'key' is {item['key']!r:.50}; it must be a number or a string")
    return requests


@contextlib.contextmanager
def _reading() -> Iterator[None]:
    """Turn a ValueError of parsing a request into status 400, which clients do not retry, instead of 500."""
    try:
        yield
    except ValueError as error:
        raise HTTPException(400, str(error)) from error


async def _refused(http: Request, error: Exception) -> Response:
    """Return the reply to an HTTP request that the server rejects."""
    if isinstance(error, HTTPException):
        return JSONResponse({"error": error.detail}, error.status_code, error.headers)
    return JSONResponse({"error": "the body's JSON is nested too deeply"}, 400)


class RewardApp:
    """The HTTP application of a service whose pools are started."""

    def __init__(self, service: RewardService, token: str, name: str = "rewards") -> None:
        self.service, self.name, self._token = service, name, token
        self._metrics = CollectorRegistry()
        _PoolMetrics(service.pools, self._metrics)
        self.draining = False
        routes = [
            Route("/v1/score", self.score, methods=["POST"]),
            Route("/v1/trace", self.trace, methods=["POST"]),
            Route("/v1/health", self.health),
            Route("/metrics", self.metrics),
        ]
        handlers: Any = dict.fromkeys((HTTPException, RecursionError), _refused)
        self.asgi = Starlette(routes=routes, exception_handlers=handlers)

    def _check_token(self, http: Request) -> None:
        if not is_authorized(http.headers.get("authorization"), self._token):
            raise HTTPException(401, "Authorization: Bearer TOKEN is missing or wrong")

    async def health(self, http: Request) -> Response:
        """Reply "ready" (200) or "draining" (503).  Needs no token."""
        return JSONResponse({"status": "draining" if self.draining else "ready"}, 503 if self.draining else 200)

    async def metrics(self, http: Request) -> Response:
        self._check_token(http)
        return Response(generate_latest(self._metrics), media_type="text/plain; version=0.0.4")

    async def trace(self, http: Request) -> Response:
        """Start recording on {"record": true}; on {"record": false}, stop and reply with the recorded spans.

        Each reply also lists the process ids and names of the workers.
        """
        self._check_token(http)
        with _reading():
            part = tracing.answer(await _body(http), self.name)
        workers = [(w.process.pid, f"reward worker {n}") for n, p in self.service.pools.items() for w in p.workers]
        return JSONResponse({**part, "others": workers})

    async def score(self, http: Request) -> Response:
        self._check_token(http)
        if self.draining:
            raise HTTPException(503, "the reward server is stopping")
        with _reading():
            deadline = http.headers.get(DEADLINE_HEADER)
            timeout_s = None if deadline is None else max(0.0, float(deadline))
            body = await _body(http)
            items = body if isinstance(body, list) else [body]
            requests = _requests_of(items)
        if not self.service.room_for(requests):
            raise HTTPException(429, "the queue is full", {"Retry-After": "1"})
        futures = [self.service.submit(request, timeout_s) for request in requests]
        if NDJSON in http.headers.get("accept", ""):
            return StreamingResponse(_as_known(futures, [item.get("key") for item in items]), media_type=NDJSON)
        verdicts = await asyncio.gather(*futures)
        answer = json.dumps(verdicts if body is items else verdicts[0])  # ASCII: an id may hold a lone surrogate
        return Response(answer, media_type="application/json")


async def _as_known(futures: list["asyncio.Future[Verdict]"], keys: list[Any]) -> AsyncIterator[bytes]:
    """Yield each verdict with its key as a JSON line once it is known; several known verdicts are sent together."""
    key_of = dict(zip(futures, keys, strict=True))
    known: asyncio.Queue[asyncio.Future[Verdict]] = asyncio.Queue()
    for future in futures:
        future.add_done_callback(known.put_nowait)
    left = len(futures)
    while left:
        done = [await known.get()]
        while not known.empty():
            done.append(known.get_nowait())
        left -= len(done)
        lines = [json.dumps({**future.result(), "key": key_of[future]}) + "\n" for future in done]
        yield "".join(lines).encode()


class _UvicornServer(uvicorn.Server):  # type: ignore[misc,unused-ignore]
    """A uvicorn server that calls `on_ready` once it listens, and leaves signals alone.

    Uvicorn's own signal handling would re-raise SIGTERM at the end of the process.
    """

    def __init__(self, config: uvicorn.Config, on_ready: Callable[[], None]) -> None:
        super().__init__(config)
        self._on_ready = on_ready

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        self._on_ready()

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


def announce(file: Path | None, url: str, state: Literal["ready", "stopped"]) -> None:
    """Write the endpoint file of this server; without a file, do nothing."""
    if file is not None:
        write_endpoint(file, {"kind": "rewards", "url": url, "pid": os.getpid(), "state": state})


def _pidfd(pid: int | None) -> int | None:
    try:
        return None if pid is None else os.pidfd_open(pid)
    except OSError as error:
        raise ConfigError(f"--parent-pid {pid}: {error.strerror}") from error


async def serve(args: argparse.Namespace) -> int:
    """Run the server until SIGTERM, SIGINT or the parent's end; then finish open requests for up to `--drain-s`."""
    allow_connections()
    token = read_token(args.token_file)
    wanted = [task.partition("=")[::2] for task in args.tasks.split(",") if task]
    registry, tasks = discover(functions={task: place for task, place in wanted if place}), [task for task, _ in wanted]
    limits = (args.max_queue, args.worker_memory_mb, args.unsafe_no_sandbox)
    specs = pool_specs(registry, tasks, args.workers, args.settings, *limits)
    service = RewardService(specs, registry)
    app = RewardApp(service, token, args.endpoint_file.stem if args.endpoint_file else "rewards")
    config = uvicorn.Config(
        app.asgi,
        lifespan="off",
        log_config=None,
        access_log=False,
        timeout_graceful_shutdown=args.drain_s,
        ws="none",
        timeout_keep_alive=75,  # seconds; longer than a client keeps an idle connection, so that the client closes it
    )
    listener = listening_socket(args.host, args.port, backlog=1024)
    url = f"http://{args.public_host or args.host}:{listener.getsockname()[1]}"
    server = _UvicornServer(config, lambda: announce(args.endpoint_file, url, "ready"))
    loop, parent_fd = asyncio.get_running_loop(), _pidfd(args.parent_pid)
    starting = asyncio.ensure_future(service.start())

    def stop() -> None:
        server.should_exit = app.draining = True
        starting.cancel()
        if parent_fd is not None:
            loop.remove_reader(parent_fd)

    if parent_fd is not None:
        loop.add_reader(parent_fd, stop)
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop)
    try:
        await starting
        workers = ", ".join(f"{spec.plugin} x{spec.workers}" for spec in specs)
        _log.info("reward server listens at %s; workers: %s", url, workers)
        await server.serve(sockets=[listener])
        if args.endpoint_file and is_own(args.endpoint_file):
            announce(args.endpoint_file, url, "stopped")
    except asyncio.CancelledError:
        if not app.draining:
            raise
    finally:
        await service.close()
        listener.close()
    return 0


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="nemo_prorl.rewards.server", description="The reward server of a node.")
    add_server_arguments(parser)
    args = parser.parse_args(argv)
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s", stream=sys.stderr)
    stacks.register()
    try:
        return asyncio.run(serve(args))
    except ProrlError as error:
        _log.error("%s", error)
        return error.exit_code


if __name__ == "__main__":
    sys.exit(main())
