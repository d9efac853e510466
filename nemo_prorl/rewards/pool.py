"""Worker processes of one plugin: pre-warmed, each with a socket of its own, so that a kill harms one request only.

Why not a ready-made process pool: pebble's workers share one channel and one lock, and the death of an idle worker, or
of one that holds the lock, breaks the whole pool.  Here the server always knows which request which worker holds.

* Over its time budget: the worker is killed, the submission is judged "timeout" (score 0).
* Worker dies otherwise, or answers nonsense: the verdict is "infrastructure" (score null).  The caller tries again.

A message on the socket is one line of JSON.  ASCII escapes keep lone surrogates, which UTF-8 does not have.
"""

import asyncio
import contextlib
import json
import logging
import os
import signal
import socket
import sys
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import psutil

from nemo_prorl.errors import RewardFailure
from nemo_prorl.rewards.interface import RewardRequest, Verdict, failed_verdict, read_verdict
from nemo_prorl.tracing import RECORDER

_log = logging.getLogger(__name__)

MAX_QUEUE = 8192  # requests that may wait for one plugin
STARTUP_S = 120.0
WALL_FACTOR = 4.0  # on a busy machine a worker may take this many times its CPU budget by the clock
KEPT_VARIABLES = ("PATH", "HOME", "LANG", "LC_ALL", "TMPDIR", "PYTHONPATH", "VIRTUAL_ENV", "LD_LIBRARY_PATH")
ONE_THREAD = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS", "NUMEXPR_NUM_THREADS")
_MAX_LINE = 2**30  # bytes of a worker's message; nothing is set aside for it


@dataclass(frozen=True)
class PoolSpec:
    """One plugin's workers: its settings, their number, CPU seconds an answer may take, bounds of queue and memory.

    `hash_seed` is their PYTHONHASHSEED: a verdict must not depend on it, which the conformance kit checks.
    `unsafe_no_sandbox`: a plugin that needs the sandbox runs without where none holds.
    """

    plugin: str
    settings: dict[str, Any]
    workers: int
    budget_s: float
    max_queue: int = MAX_QUEUE
    memory_mb: int = 4096
    hash_seed: int = 0
    unsafe_no_sandbox: bool = False


@dataclass
class PoolStats:
    """Counts since the start; `on_seconds` is called with the time that a judged request spent in its worker."""

    outcomes: Counter[str] = field(default_factory=Counter)
    workers_lost: int = 0
    on_seconds: Callable[[float], None] = lambda _: None


@dataclass(eq=False)
class _Job:
    request: RewardRequest
    line: bytes
    future: "asyncio.Future[Verdict]"


class WorkerGone(Exception):
    """The worker is dead, or is to be killed; `failure` is that of the verdict on its request."""

    def __init__(self, why: str, failure: str = "infrastructure") -> None:
        super().__init__(why)
        self.failure = failure


def worker_environment(hash_seed: int = 0) -> dict[str, str]:
    """The environment variables of a worker: few of ours, one thread, a fixed hash seed."""
    kept = {name: os.environ[name] for name in KEPT_VARIABLES if name in os.environ}
    return kept | dict.fromkeys(ONE_THREAD, "1") | {"PYTHONHASHSEED": str(hash_seed), "PYTHONUNBUFFERED": "1"}


class _Worker:
    """One worker process and the server's end of its socket."""

    def __init__(
        self, process: asyncio.subprocess.Process, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        self.process, self._reader, self._writer = process, reader, writer
        self.ended = asyncio.ensure_future(process.wait())
        self._seen: psutil.Process | None = None

    @classmethod
    async def start(cls, spec: PoolSpec) -> "_Worker":
        """Starts the process and waits until its plugin is ready.  Raises RewardFailure naming plugin and cause."""
        ours, theirs = socket.socketpair()
        numbers = [theirs.fileno(), os.getpid(), spec.memory_mb, int(spec.unsafe_no_sandbox)]
        arguments = [*map(str, numbers), spec.plugin, json.dumps(spec.settings)]
        with theirs:
            process = await asyncio.create_subprocess_exec(
                *(sys.executable, "-m", "nemo_prorl.rewards.worker", *arguments),
                stdin=asyncio.subprocess.DEVNULL,
                stdout=2,  # a plugin that prints must not reach our results
                pass_fds=(theirs.fileno(),),
                env=worker_environment(spec.hash_seed),
                start_new_session=True,
            )
        worker = cls(process, *await asyncio.open_connection(sock=ours, limit=_MAX_LINE))
        try:
            first = await asyncio.wait_for(worker.receive(), STARTUP_S)
            if not isinstance(first, dict) or "ready" not in first:
                why = first["failed"] if isinstance(first, dict) and "failed" in first else f"it sent {first!r:.80}"
                raise RewardFailure(f"reward plugin {spec.plugin!r} cannot start: {why}")
        except WorkerGone as error:
            worker.kill()
            raise RewardFailure(f"a worker of reward plugin {spec.plugin!r} died while it started") from error
        except TimeoutError as error:
            worker.kill()
            raise RewardFailure(f"waited {STARTUP_S:g} s for a worker of reward plugin {spec.plugin!r}") from error
        except BaseException:
            worker.kill()
            raise
        return worker

    @property
    def alive(self) -> bool:
        return not self.ended.done()

    def _cpu_seconds(self) -> float:
        self._seen = self._seen or psutil.Process(self.process.pid)
        times = self._seen.cpu_times()
        return float(times.user + times.system)

    async def receive(self) -> Any:
        """The next message.  Raises WorkerGone, also for a line that is not JSON."""
        try:
            line = await self._reader.readline()
        except OSError as error:
            raise WorkerGone("worker died") from error
        if not line.endswith(b"\n"):
            raise WorkerGone("worker died")
        try:
            return json.loads(line)
        except (ValueError, RecursionError) as error:
            raise WorkerGone(f"worker sent {line[:80]!r}, which is not JSON") from error

    async def judge(self, job: _Job, budget_s: float) -> Verdict:
        """The verdict on a request.  Raises WorkerGone if the worker dies or takes too long.

        Time counts as CPU time, so that a busy machine does not turn right answers into zeros; one that sleeps
        instead of computing runs into WALL_FACTOR times the budget.
        """
        self._writer.write(job.line)
        receiving = asyncio.ensure_future(self.receive())
        started, wait = asyncio.get_running_loop().time(), budget_s
        try:
            spent = self._cpu_seconds()
            while not (await asyncio.wait({receiving}, timeout=wait))[0]:
                elapsed = asyncio.get_running_loop().time() - started
                used = self._cpu_seconds() - spent
                if used >= 0.98 * budget_s or elapsed >= WALL_FACTOR * budget_s:
                    raise WorkerGone(f"over the time budget of {budget_s:g} s", "timeout")
                wait = max(0.02, min(budget_s - used, WALL_FACTOR * budget_s - elapsed))
            return read_verdict(receiving.result(), job.request.id)
        except ValueError as error:
            raise WorkerGone(f"worker sent a wrong verdict: {error}") from error
        except psutil.NoSuchProcess as error:
            raise WorkerGone("worker died") from error
        finally:
            receiving.cancel()

    def kill(self) -> None:
        """Kills the process and everything it started; closes our end."""
        if self.alive:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(self.process.pid, signal.SIGKILL)
        self._writer.close()


class PluginPool:
    """The queue and the workers of one plugin."""

    def __init__(self, spec: PoolSpec) -> None:
        self.spec = spec
        self.stats = PoolStats()
        self.workers: set[_Worker] = set()
        self._jobs: asyncio.Queue[_Job] = asyncio.Queue(spec.max_queue)
        self._slots: list[asyncio.Task[None]] = []

    async def start(self) -> None:
        """Starts and warms all workers.  Raises RewardFailure where one cannot start."""
        first = await asyncio.gather(*(self._spawn() for _ in range(self.spec.workers)), return_exceptions=True)
        if errors := [worker for worker in first if isinstance(worker, BaseException)]:
            await self.close()
            raise errors[0]
        self._slots = [asyncio.create_task(self._run_slot(worker)) for worker in tuple(self.workers)]

    async def close(self) -> None:
        """Kills the workers; what is still queued gets an infrastructure verdict."""
        for slot in self._slots:
            slot.cancel()
        await asyncio.gather(*self._slots, return_exceptions=True)
        for worker in tuple(self.workers):
            await self._drop(worker)
        self._fail_all("the reward server stopped")

    @property
    def queued(self) -> int:
        return self._jobs.qsize()

    @property
    def room(self) -> int:
        return self.spec.max_queue - self._jobs.qsize()

    def submit(self, request: RewardRequest, timeout_s: float | None = None) -> "asyncio.Future[Verdict]":
        """Queues one request; its future ends with exactly one verdict, never an error.

        After `timeout_s` seconds that is an infrastructure verdict.  Raises asyncio.QueueFull (ask for `room` first),
        and RecursionError for a request that is nested too deeply to be sent.
        """
        loop = asyncio.get_running_loop()
        job = _Job(request, json.dumps(request.to_json()).encode() + b"\n", loop.create_future())
        self._jobs.put_nowait(job)
        if timeout_s is not None:
            late = f"the request's deadline of {timeout_s:g} s passed before plugin {self.spec.plugin!r} had judged it"
            timer = loop.call_later(timeout_s, self._fail, job, late)
            job.future.add_done_callback(lambda _: timer.cancel())
        return job.future

    def _answer(self, job: _Job, verdict: Verdict) -> None:
        if not job.future.done():
            self.stats.outcomes[verdict["failure"] or "judged"] += 1
            job.future.set_result(verdict)

    def _fail(self, job: _Job, detail: str, failure: str = "infrastructure") -> None:
        self._answer(job, failed_verdict(job.request.id, failure, detail))

    def _fail_all(self, detail: str) -> None:
        while not self._jobs.empty():
            self._fail(self._jobs.get_nowait(), detail)

    async def _spawn(self) -> _Worker:
        worker = await _Worker.start(self.spec)
        self.workers.add(worker)
        return worker

    async def _respawn(self) -> _Worker:
        """A new worker, tried until it starts; after three failures what waits is not left waiting."""
        failures = 0
        while True:
            try:
                return await self._spawn()
            except (RewardFailure, OSError) as error:
                failures += 1
                _log.error("%s (attempt %d)", error, failures)
                if failures >= 3 and not self.workers:
                    self._fail_all(str(error))
                await asyncio.sleep(min(10.0, 0.5 * 2**failures))

    async def _drop(self, worker: _Worker) -> None:
        worker.kill()
        self.workers.discard(worker)
        await worker.ended

    async def _run_slot(self, worker: _Worker) -> None:
        while True:
            job = await self._next_job(worker)
            if job is not None and not job.future.done():  # its deadline may have passed in the queue
                await self._run_job(worker, job)
            if not worker.alive:
                self.stats.workers_lost += 1
                await self._drop(worker)
                worker = await self._respawn()

    async def _next_job(self, worker: _Worker) -> _Job | None:
        """Waits for work; None where the worker ends first."""
        if worker.alive and not self._jobs.empty():
            return self._jobs.get_nowait()
        getting = asyncio.ensure_future(self._jobs.get())
        try:
            await asyncio.wait({getting, worker.ended}, return_when=asyncio.FIRST_COMPLETED)
        except asyncio.CancelledError:
            if getting.done():
                self._fail(getting.result(), "the reward server stopped")
            raise
        finally:
            getting.cancel()
        return getting.result() if getting.done() else None

    async def _run_job(self, worker: _Worker, job: _Job) -> None:
        """Judges one request.  Whatever happens, it is answered."""
        loop = asyncio.get_running_loop()
        started, score = loop.time(), None
        try:
            verdict = await worker.judge(job, self.spec.budget_s)
            self.stats.on_seconds(loop.time() - started)
            score = verdict["score"]
            self._answer(job, verdict)
        except WorkerGone as error:
            _log.warning("plugin %r: %s on request %r", self.spec.plugin, error, job.request.id)
            self._fail(job, f"plugin {self.spec.plugin!r}: {error}", error.failure)
            await self._drop(worker)
        except asyncio.CancelledError:
            self._fail(job, "the reward server stopped")
            raise
        name, request = f"reward worker {self.spec.plugin}", job.request  # the loop's clock is the recorder's
        lane = (request.task, "judgements", started, loop.time(), worker.process.pid, name)
        RECORDER.add(*lane, id=request.id, score=score)
