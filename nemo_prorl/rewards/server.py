"""The reward server: `POST /v1/score`, `GET /v1/health`, `GET /metrics`, on loopback unless told otherwise.

    python -m nemo_prorl.rewards.server --workers 2 --tasks math,puzzles --token-file F --endpoint-file G

It ends with its parent (`--parent-pid`), finishes what it has begun on SIGTERM, and its workers end with it however it
ends.  A POST holds one request or a list; with `Accept: application/x-ndjson` verdicts are sent as soon as each is
known, out of order, each with the `key` that its request carried.
"""

import argparse
import asyncio
import contextlib
import hmac
import json
import logging
import os
import signal
import socket
import stat
import sys
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Annotated, Any, Literal, TypedDict

import uvicorn
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

from nemo_prorl import tracing
from nemo_prorl.errors import ConfigError, ProrlError
from nemo_prorl.rewards.connections import allow_connections
from nemo_prorl.rewards.discovery import discover
from nemo_prorl.rewards.interface import RewardRequest
from nemo_prorl.rewards.options import add_server_arguments
from nemo_prorl.rewards.service import RewardService, plan_pools
from nemo_prorl.schema import Constraint, Number

_log = logging.getLogger(__name__)

NDJSON = "application/x-ndjson"
DEADLINE_HEADER = "prorl-deadline-s"  # seconds after which an unjudged request is an infrastructure failure
MAX_REQUESTS, MAX_BODY = 4096, 256 * 2**20
_BUCKETS = (0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0, 30.0)


class _Metrics:
    """The pools' counts in Prometheus' form, read at each scrape."""

    def __init__(self, service: RewardService) -> None:
        self._service = service
        self._buckets = {name: [0] * (len(_BUCKETS) + 1) for name in service.pools}
        self._sums = dict.fromkeys(service.pools, 0.0)
        for name, pool in service.pools.items():
            pool.stats.seconds = lambda seconds, name=name: self._observe(name, seconds)  # type: ignore[misc]

    def _observe(self, name: str, seconds: float) -> None:
        self._buckets[name][sum(seconds > bound for bound in _BUCKETS)] += 1
        self._sums[name] += seconds

    def collect(self) -> Iterator[Any]:
        verdicts = CounterMetricFamily("prorl_reward_verdicts", "Verdicts given", labels=["plugin", "outcome"])
        lost = CounterMetricFamily("prorl_reward_workers_lost", "Workers killed or dead", labels=["plugin"])
        queued = GaugeMetricFamily("prorl_reward_queued", "Requests that wait for a worker", labels=["plugin"])
        workers = GaugeMetricFamily("prorl_reward_workers", "Workers alive", labels=["plugin"])
        seconds = HistogramMetricFamily("prorl_reward_seconds", "Time in a worker, by the clock", labels=["plugin"])
        for name, pool in self._service.pools.items():
            for outcome, count in sorted(pool.stats.outcomes.items()):
                verdicts.add_metric([name, outcome], count)
            lost.add_metric([name], pool.stats.workers_lost)
            queued.add_metric([name], pool.queued)
            workers.add_metric([name], len(pool.workers))
            counts = self._buckets[name]
            bounds = [*map(str, _BUCKETS), "+Inf"]
            cumulative = [(bound, sum(counts[: index + 1])) for index, bound in enumerate(bounds)]
            seconds.add_metric([name], cumulative, self._sums[name])
        yield from (verdicts, lost, queued, workers, seconds)


def parse_requests(body: bytes) -> tuple[list[RewardRequest], list[Any], bool]:
    """Requests, their keys, and whether they came as a list.  Raises ValueError naming the request and the field."""
    try:
        obj = json.loads(body)
    except ValueError as error:
        raise ValueError(f"the body is not JSON: {error}") from error
    items = obj if isinstance(obj, list) else [obj]
    if len(items) > MAX_REQUESTS:
        raise ValueError(f"{len(items)} requests in one POST; at most {MAX_REQUESTS}")
    requests = []
    for index, item in enumerate(items):
        try:
            requests.append(RewardRequest.from_json(item))
        except ValueError as error:
            raise ValueError(f"request {index}: {error}") from error
    return requests, [item.get("key") for item in items], isinstance(obj, list)


class RewardApp:
    """The HTTP side of a service whose pools run."""

    def __init__(self, service: RewardService, token: str, name: str = "rewards") -> None:
        self.service, self.name = service, name
        self._token = token.encode()
        self._metrics = CollectorRegistry()
        self._metrics.register(_Metrics(service))
        self.draining = False
        routes = [
            Route("/v1/score", self.score, methods=["POST"]),
            Route("/v1/trace", self.trace, methods=["POST"]),
            Route("/v1/health", self.health),
            Route("/metrics", self.metrics),
        ]
        self.asgi = Starlette(routes=routes)

    def _refusal(self, http: Request) -> Response | None:
        given = http.headers.get("authorization", "").encode()
        if hmac.compare_digest(given, b"Bearer " + self._token):
            return None
        return JSONResponse({"error": "Authorization: Bearer TOKEN is missing or wrong"}, 401)

    async def health(self, http: Request) -> Response:
        """Open to all, and says nothing but whether requests are taken."""
        return JSONResponse({"status": "draining" if self.draining else "ready"}, 503 if self.draining else 200)

    async def metrics(self, http: Request) -> Response:
        return self._refusal(http) or Response(generate_latest(self._metrics), media_type="text/plain; version=0.0.4")

    async def trace(self, http: Request) -> Response:
        """{"record": true}, then {"record": false}: what the workers did in between."""
        if refusal := self._refusal(http):
            return refusal
        try:
            said = tracing.answer(json.loads(await http.body()), self.name)
        except ValueError as error:
            return JSONResponse({"error": str(error)}, 400)
        workers = [(w.process.pid, f"reward worker {n}") for n, p in self.service.pools.items() for w in p.workers]
        return JSONResponse({**said, "others": workers})

    async def score(self, http: Request) -> Response:
        if refusal := self._refusal(http):
            return refusal
        if self.draining:
            return JSONResponse({"error": "the reward server is stopping"}, 503)
        try:
            if int(http.headers.get("content-length", "0")) > MAX_BODY:
                return JSONResponse({"error": f"the body is over {MAX_BODY} bytes"}, 413)
            deadline = http.headers.get(DEADLINE_HEADER)
            timeout_s = None if deadline is None else max(0.0, float(deadline))
            requests, keys, many = parse_requests(await http.body())
        except ValueError as error:
            return JSONResponse({"error": str(error)}, 400)
        if not self.service.room_for(requests):
            return JSONResponse({"error": "the queue is full"}, 429, {"Retry-After": "1"})
        futures = [self.service.submit(request, timeout_s) for request in requests]
        if NDJSON in http.headers.get("accept", ""):
            return StreamingResponse(_as_known(futures, keys), media_type=NDJSON)
        verdicts = await asyncio.gather(*futures)
        body = json.dumps(verdicts if many else verdicts[0])  # ASCII: an id may hold a lone surrogate
        return Response(body, media_type="application/json")


async def _as_known(futures: list["asyncio.Future[dict[str, Any]]"], keys: list[Any]) -> AsyncIterator[bytes]:
    """Verdict lines in the order in which they become known; those known together leave together."""
    key_of = dict(zip(futures, keys, strict=True))
    known: asyncio.Queue[asyncio.Future[dict[str, Any]]] = asyncio.Queue()
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
    """Uvicorn whose signals are ours: it would end by re-raising SIGTERM instead of exiting with 0."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


class RewardEndpoint(TypedDict):
    """Where a reward server of a run listens."""

    kind: Literal["rewards"]
    url: Annotated[str, Constraint(pattern="^http://")]
    pid: Number
    state: Literal["ready", "stopped"]


def write_endpoint(path: Path, url: str, state: Literal["ready", "stopped"]) -> None:
    """Announces this server, atomically: a reader sees the old file or the new one."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    endpoint: RewardEndpoint = {"kind": "rewards", "url": url, "pid": os.getpid(), "state": state}
    temporary.write_text(json.dumps(endpoint) + "\n")
    temporary.replace(path)


def _is_ours(path: Path, url: str) -> bool:
    """Whether the endpoint file is still this server's, and not that of one started since."""
    try:
        return bool(json.loads(path.read_text())["url"] == url)
    except (OSError, ValueError, KeyError, TypeError):
        return False


def read_token(path: Path) -> str:
    """The run's token.  Raises ConfigError where the file is missing or empty."""
    try:
        token = path.read_text().strip()
    except OSError as error:
        raise ConfigError(f"token file {path}: {error.strerror}; the launcher writes one for each run") from error
    if not token:
        raise ConfigError(f"token file {path} is empty; it must hold the run's token")
    if stat.S_IMODE(path.stat().st_mode) & 0o077:
        _log.warning("token file %s can be read by others than its owner; chmod 600 it", path)
    return token


def _watch_parent(pid: int, stop: Any) -> int:
    """Calls `stop` when process `pid` ends; gives the pidfd, to be kept open."""
    try:
        fd = os.pidfd_open(pid)
    except OSError as error:
        raise ConfigError(f"--parent-pid {pid}: {error.strerror}") from error
    asyncio.get_running_loop().add_reader(fd, stop)
    return fd


async def serve(args: argparse.Namespace) -> int:
    """Runs until SIGTERM, SIGINT or the parent's end; then drains for `--drain-s` seconds.  0 when it ended cleanly."""
    allow_connections()
    token = read_token(args.token_file)
    registry = discover()
    tasks = [task for task in args.tasks.split(",") if task]
    specs = plan_pools(
        registry,
        tasks,
        args.workers,
        args.settings,
        args.max_queue,
        args.worker_memory_mb,
        args.unsafe_no_sandbox,
    )
    service = RewardService(specs, registry)
    app = RewardApp(service, token, args.endpoint_file.stem if args.endpoint_file else "rewards")
    config = uvicorn.Config(
        app.asgi,
        lifespan="off",
        log_config=None,
        access_log=False,
        timeout_graceful_shutdown=args.drain_s,
        ws="none",
        timeout_keep_alive=75,  # longer than a client keeps an idle connection, so that it never meets a closed one
    )
    server = _UvicornServer(config)
    listener = socket.create_server((args.host, args.port), backlog=1024)
    # asyncio sets it only where the socket says TCP itself; without it a small answer waits 40 ms for an ACK
    listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    url = f"http://{args.public_host or args.host}:{listener.getsockname()[1]}"
    stopping = asyncio.Event()

    def stop() -> None:
        server.should_exit = app.draining = True
        stopping.set()
        if parent_fd is not None:
            loop.remove_reader(parent_fd)

    loop = asyncio.get_running_loop()
    parent_fd = None if args.parent_pid is None else _watch_parent(args.parent_pid, stop)
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop)
    try:
        starting = asyncio.ensure_future(service.start())
        halted = asyncio.ensure_future(stopping.wait())
        await asyncio.wait({starting, halted}, return_when=asyncio.FIRST_COMPLETED)
        if not starting.done():
            starting.cancel()
            return 0
        starting.result()
        _log.info("reward server at %s: %s", url, ", ".join(f"{spec.plugin} x{spec.workers}" for spec in specs))
        announced = asyncio.ensure_future(_announce(server, args.endpoint_file, url))
        await server.serve(sockets=[listener])
        announced.cancel()
        if args.endpoint_file is not None and _is_ours(args.endpoint_file, url):
            write_endpoint(args.endpoint_file, url, "stopped")
        return 0
    finally:
        await service.close()
        listener.close()


async def _announce(server: uvicorn.Server, path: Path | None, url: str) -> None:
    while not server.started:
        await asyncio.sleep(0.01)
    if path is not None:
        write_endpoint(path, url, "ready")


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="nemo_prorl.rewards.server", description="The reward server of a node.")
    add_server_arguments(parser)
    args = parser.parse_args(argv)
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s", stream=sys.stderr)
    try:
        return asyncio.run(serve(args))
    except ProrlError as error:
        _log.error("%s", error)
        return error.exit_code


if __name__ == "__main__":
    sys.exit(main())
