"""Worker processes of one plugin: pre-warmed, each with a socket of its own, so that a kill harms one request only.

Why not a ready-made process pool: pebble's workers share one channel and one lock, and the death of an idle worker, or
of one that holds the lock, breaks the whole pool.  Here the server always knows which request which worker holds.

* Over its time budget: the worker is killed, the submission is judged "timeout" (score 0).
* Worker dies otherwise: the request is tried once more on another worker, then "infrastructure" (score null).
* Requests sent along behind such a one go back to the head of the queue; that is no attempt of theirs.
"""

import asyncio
import contextlib
import json
import logging
import os
import signal
import socket
import sys
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from nemo_prorl.errors import RewardFailure
from nemo_prorl.rewards import frames
from nemo_prorl.rewards.interface import failed_verdict
from nemo_prorl.tracing import RECORDER

_log = logging.getLogger(__name__)

CHUNK = 8  # requests sent to a worker at once while the queue is long: hides the round trip
STARTUP_S = 120.0
WALL_FACTOR = 4.0  # on a busy machine a worker may take this many times its CPU budget by the clock
KEPT_VARIABLES = ("PATH", "HOME", "LANG", "LC_ALL", "TMPDIR", "PYTHONPATH", "VIRTUAL_ENV", "LD_LIBRARY_PATH")
ONE_THREAD = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS", "NUMEXPR_NUM_THREADS")


class QueueFull(Exception):
    """The bounded queue of a plugin has no room: try again later."""


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
    max_queue: int = 8192
    memory_mb: int = 4096
    hash_seed: int = 0
    unsafe_no_sandbox: bool = False


@dataclass
class PoolStats:
    """Counts since the start; `seconds` is called with the time a judged request spent in its worker."""

    outcomes: dict[str, int] = field(default_factory=dict)
    workers_lost: int = 0
    seconds: Callable[[float], None] = lambda _: None

    def count(self, verdict: dict[str, Any]) -> None:
        outcome = verdict["failure"] or "judged"
        self.outcomes[outcome] = self.outcomes.get(outcome, 0) + 1


@dataclass(eq=False)
class _Job:
    request: dict[str, Any]
    future: "asyncio.Future[dict[str, Any]]"
    crashes: int = 0


class WorkerGone(Exception):
    """The worker is dead; `timeout` where it was over its budget and is to be killed."""

    def __init__(self, why: str, timeout: bool = False) -> None:
        super().__init__(why)
        self.timeout = timeout


def _cpu_seconds(pid: int) -> float:
    """CPU time of a process, from fields 14 and 15 of /proc/PID/stat; 0 where it is gone."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            fields = file.read().rpartition(b")")[2].split()
    except OSError:
        return 0.0
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


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
        self._exit = asyncio.ensure_future(process.wait())
        self.on_exit: Callable[[], None] = lambda: None
        self._exit.add_done_callback(lambda _: self.on_exit())

    @classmethod
    async def start(cls, spec: PoolSpec) -> "_Worker":
        """Starts the process and waits until its plugin is ready.  Raises RewardFailure naming plugin and cause."""
        ours, theirs = socket.socketpair()
        numbers = [theirs.fileno(), os.getpid(), spec.memory_mb, int(spec.unsafe_no_sandbox)]
        arguments = [*map(str, numbers), spec.plugin, json.dumps(spec.settings)]
        try:
            process = await asyncio.create_subprocess_exec(
                *(sys.executable, "-m", "nemo_prorl.rewards.worker", *arguments),
                stdin=asyncio.subprocess.DEVNULL,
                stdout=2,  # a plugin that prints must not reach our results
                pass_fds=(theirs.fileno(),),
                env=worker_environment(spec.hash_seed),
                start_new_session=True,
            )
        finally:
            theirs.close()
        reader, writer = await asyncio.open_connection(sock=ours)
        worker = cls(process, reader, writer)
        try:
            first = await asyncio.wait_for(frames.read(reader), STARTUP_S)
        except (EOFError, OSError) as error:
            worker.kill()
            raise RewardFailure(f"a worker of reward plugin {spec.plugin!r} died while it started") from error
        except TimeoutError as error:
            worker.kill()
            raise RewardFailure(f"waited {STARTUP_S:g} s for a worker of reward plugin {spec.plugin!r}") from error
        except BaseException:
            worker.kill()
            raise
        if "failed" in first:
            worker.kill()
            raise RewardFailure(f"reward plugin {spec.plugin!r} cannot start: {first['failed']}")
        return worker

    @property
    def alive(self) -> bool:
        return not self._exit.done()

    def send(self, numbered: list[tuple[int, dict[str, Any]]]) -> None:
        for number, request in numbered:
            self._writer.write(frames.pack({"number": number, "request": request}))

    async def verdict(self, number: int, budget_s: float) -> dict[str, Any]:
        """The verdict on the request it works on now.  Raises WorkerGone if it dies or takes too long.

        Time counts as CPU time, so that a busy machine does not turn right answers into zeros; one that sleeps
        instead of computing runs into WALL_FACTOR times the budget.
        """
        reading = asyncio.ensure_future(frames.read(self._reader))
        try:
            started, spent = asyncio.get_running_loop().time(), _cpu_seconds(self.process.pid)
            wait = budget_s
            while not (await asyncio.wait({reading}, timeout=wait))[0]:
                elapsed = asyncio.get_running_loop().time() - started
                used = _cpu_seconds(self.process.pid) - spent
                if used >= 0.98 * budget_s or elapsed >= WALL_FACTOR * budget_s:
                    raise WorkerGone(f"over the time budget of {budget_s:g} s", timeout=True)
                wait = max(0.02, min(budget_s - used, WALL_FACTOR * budget_s - elapsed))
            message = reading.result()
        except (EOFError, OSError) as error:
            raise WorkerGone("worker died") from error
        finally:
            reading.cancel()
        if message.get("number") != number:
            raise WorkerGone(f"worker answered request {message.get('number')} where {number} was due")
        verdict: dict[str, Any] = message["verdict"]
        return verdict

    def kill(self) -> None:
        """Kills the process and everything it started; closes our end."""
        if self.alive:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(self.process.pid, signal.SIGKILL)
        self._writer.close()

    async def reaped(self) -> None:
        await self._exit


class PluginPool:
    """The queue and the workers of one plugin."""

    def __init__(self, spec: PoolSpec) -> None:
        self.spec = spec
        self.stats = PoolStats()
        self.workers: set[_Worker] = set()
        self._jobs: deque[_Job] = deque()
        self._idle: deque[asyncio.Future[None]] = deque()
        self._slots: list[asyncio.Task[None]] = []
        self._number = 0

    async def start(self) -> None:
        """Starts and warms all workers.  Raises RewardFailure where one cannot start."""
        first = await asyncio.gather(*(self._spawn() for _ in range(self.spec.workers)), return_exceptions=True)
        if errors := [worker for worker in first if isinstance(worker, BaseException)]:
            await self.close()
            raise errors[0]
        workers = [worker for worker in first if isinstance(worker, _Worker)]
        self._slots = [asyncio.create_task(self._run_slot(worker)) for worker in workers]

    async def close(self) -> None:
        """Kills the workers; what is still queued gets an infrastructure verdict."""
        for slot in self._slots:
            slot.cancel()
        await asyncio.gather(*self._slots, return_exceptions=True)
        for worker in tuple(self.workers):
            await self._drop(worker)
        while self._jobs:
            self._fail(self._jobs.popleft(), "the reward server stopped")

    @property
    def queued(self) -> int:
        return len(self._jobs)

    @property
    def room(self) -> int:
        return self.spec.max_queue - len(self._jobs)

    def submit(self, request: dict[str, Any], timeout_s: float | None = None) -> "asyncio.Future[dict[str, Any]]":
        """Queues one request (checked by the caller); its future ends with exactly one verdict, never an error.

        After `timeout_s` seconds that is an infrastructure verdict.  Raises QueueFull.
        """
        if self.room <= 0:
            raise QueueFull(f"{len(self._jobs)} requests wait for plugin {self.spec.plugin!r}")
        loop = asyncio.get_running_loop()
        job = _Job(request, loop.create_future())
        if timeout_s is not None:
            late = f"the request's deadline of {timeout_s:g} s passed before plugin {self.spec.plugin!r} had judged it"
            timer = loop.call_later(timeout_s, self._fail, job, late)
            job.future.add_done_callback(lambda _: timer.cancel())
        self._jobs.append(job)
        self._wake()
        return job.future

    def _wake(self) -> None:
        while self._idle:
            waiting = self._idle.popleft()
            if not waiting.done():
                waiting.set_result(None)
                return

    def _answer(self, job: _Job, verdict: dict[str, Any]) -> None:
        if not job.future.done():
            self.stats.count(verdict)
            job.future.set_result(verdict)

    def _fail(self, job: _Job, detail: str) -> None:
        self._answer(job, failed_verdict(job.request["id"], "infrastructure", detail))

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
                    while self._jobs:
                        self._fail(self._jobs.popleft(), str(error))
                await asyncio.sleep(min(10.0, 0.5 * 2**failures))

    async def _drop(self, worker: _Worker) -> None:
        worker.kill()
        self.workers.discard(worker)
        await worker.reaped()

    async def _run_slot(self, worker: _Worker) -> None:
        while True:
            jobs = await self._next_jobs(worker)
            if jobs:
                await self._run_jobs(worker, jobs)
            if not worker.alive:
                self.stats.workers_lost += 1
                self._wake()  # another idle worker may take what is queued meanwhile
                await self._drop(worker)
                worker = await self._respawn()

    async def _next_jobs(self, worker: _Worker) -> list[_Job]:
        """Waits for work; returns nothing when the worker has died meanwhile."""
        while worker.alive:
            jobs: list[_Job] = []
            size = max(1, min(CHUNK, len(self._jobs) // (2 * self.spec.workers)))
            while self._jobs and len(jobs) < size:
                job = self._jobs.popleft()
                if not job.future.done():  # its deadline passed in the queue
                    jobs.append(job)
            if jobs:
                return jobs
            waiting = asyncio.get_running_loop().create_future()
            self._idle.append(waiting)
            worker.on_exit = lambda waiting=waiting: None if waiting.done() else waiting.set_result(None)  # type: ignore[misc]
            if worker.alive:
                await waiting
        return []

    async def _run_jobs(self, worker: _Worker, jobs: list[_Job]) -> None:
        """Judges `jobs` in order.  Whatever happens, each is answered or back in the queue."""
        numbered = [(self._number + index, job) for index, job in enumerate(jobs)]
        self._number += len(jobs)
        worker.send([(number, job.request) for number, job in numbered])
        loop = asyncio.get_running_loop()
        for index, (number, job) in enumerate(numbered):
            started = loop.time()
            try:
                verdict = await worker.verdict(number, self.spec.budget_s)
            except WorkerGone as error:
                self._jobs.extendleft(reversed(jobs[index + 1 :]))
                self._trace(worker, job, started, None)
                self._lost(job, error)
                await self._drop(worker)
                return
            except asyncio.CancelledError:
                for unjudged in jobs[index:]:
                    self._fail(unjudged, "the reward server stopped")
                raise
            self.stats.seconds(loop.time() - started)
            if RECORDER.on:
                self._trace(worker, job, started, verdict["score"])
            self._answer(job, verdict)

    def _trace(self, worker: _Worker, job: _Job, started: float, score: float | None) -> None:
        """A judgement as its worker's work; the loop's clock is the recorder's."""
        request, now = job.request, asyncio.get_running_loop().time()
        pid, name = worker.process.pid, f"reward worker {self.spec.plugin}"
        RECORDER.add(request["task"], "judgements", started, now, pid, name, id=request["id"], score=score)

    def _lost(self, job: _Job, error: WorkerGone) -> None:
        """The request on which its worker was lost: judged, tried once more, or given up."""
        name = self.spec.plugin
        if error.timeout:
            detail = f"plugin {name!r}: {error}"
            self._answer(job, failed_verdict(job.request["id"], "timeout", detail))
            return
        job.crashes += 1
        _log.warning("plugin %r: %s on request %r (%d)", name, error, job.request["id"], job.crashes)
        if job.crashes > 1:
            self._fail(job, f"plugin {name!r}: {error}, twice, on this request")
        else:
            self._jobs.appendleft(job)
            self._wake()
