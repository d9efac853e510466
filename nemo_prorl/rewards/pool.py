"""A pool of worker processes for one plugin.

Each worker has a separate socket, so the death of a worker affects only the request that it is judging.  pebble's pool
is not used because its workers share one channel and one lock: the death of an idle worker, or of the worker that owns
the lock, breaks the whole pool.

* A worker that used up its budget of CPU time is killed; the verdict is "timeout" (score 0).
* A worker without a verdict after WALL_FACTOR times the budget of wall time, which did not use up its CPU time, is
  killed, too: the plugin hangs, or the machine is too busy.  The verdict is "infrastructure" (score null).  Up to
  QUEUED_S of waiting for a busy CPU come on top.
* If a worker dies or sends a malformed verdict, the verdict is "infrastructure", too.  The caller retries the request.

Each message on a socket is one line of JSON in ASCII, because UTF-8 cannot encode lone surrogates.
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

from prorl_sandbox.processes import QUEUED_S, queued_s

from nemo_prorl import stacks
from nemo_prorl.errors import RewardFailure
from nemo_prorl.rewards import process_times
from nemo_prorl.rewards.functions import is_function
from nemo_prorl.rewards.interface import RewardRequest, Verdict, failed_verdict, read_verdict
from nemo_prorl.tracing import RECORDER

_log = logging.getLogger(__name__)

MAX_QUEUE = 8192  # maximum waiting requests per plugin
STARTUP_S = 120.0  # seconds for a worker to start and run `prepare`
_FIRST_LOOK_S = 0.1  # seconds to the first look at a worker's processes; most verdicts come sooner and need none
END_S = 10.0  # seconds for killed workers to end
WALL_FACTOR = 4.0  # limit of wall time per request, as a multiple of the CPU budget, without waiting for a busy CPU
KEPT_VARIABLES = (
    *("PATH", "HOME", "LANG", "LC_ALL", "TMPDIR", "PYTHONPATH", "VIRTUAL_ENV", "LD_LIBRARY_PATH"),
    stacks.VARIABLE,
)
ONE_THREAD = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS", "NUMEXPR_NUM_THREADS")
_DIED = "worker died{} (out of memory, or a crash in the plugin). Fix: the reward server's log has its last output"
_MAX_LINE = 2**30  # maximum bytes of a worker's message; the memory is not reserved in advance


@dataclass(frozen=True)
class PoolSpec:
    """The configuration of one plugin's pool."""

    plugin: str
    settings: dict[str, Any]
    workers: int
    budget_s: float  # CPU seconds per request, of the worker and of the processes that it starts
    max_queue: int = MAX_QUEUE
    memory_mb: int = 4096  # MiB of private memory per worker
    hash_seed: int = 0  # PYTHONHASHSEED of the workers; the conformance kit checks that verdicts do not depend on it
    sandboxed: bool = False  # its processes are the sandbox, which limits its programs: they have no part in the budget
    unsafe_no_sandbox: bool = False  # if no sandbox works on this machine, run model-written code without one

    @property
    def time_key(self) -> str:
        """The configuration key of `budget_s`."""
        own = is_function(self.plugin)
        return "rewards.functions_time_s" if own else f"rewards.plugins.{self.plugin}.time_budget_s"


@dataclass
class PoolStats:
    """Counts since the start of a pool."""

    outcomes: Counter[str] = field(default_factory=Counter)  # verdicts: "judged" or the kind of failure
    workers_lost: int = 0
    seconds: float = 0.0  # wall time of all judgements, failed ones left out
    last_failure: str = ""  # detail of the last "infrastructure" verdict of a worker
    on_seconds: Callable[[float], None] = lambda _: None  # called with the wall seconds that a judgement took


@dataclass(eq=False)
class _Job:
    request: RewardRequest
    line: bytes
    future: "asyncio.Future[Verdict]"
    timer: asyncio.TimerHandle | None = None  # of its deadline

    def end_timer(self, _: object) -> None:
        if self.timer is not None:
            self.timer.cancel()


class WorkerGone(Exception):
    """The worker is dead or must be killed; `failure` is the failure kind of the verdict on its current request."""

    def __init__(self, reason: str, failure: str = "infrastructure") -> None:
        super().__init__(reason)
        self.failure = failure


def worker_environment(hash_seed: int = 0) -> dict[str, str]:
    """Return a worker's environment: this process's KEPT_VARIABLES, one thread per library, and the hash seed."""
    kept = {name: os.environ[name] for name in KEPT_VARIABLES if name in os.environ}
    return kept | dict.fromkeys(ONE_THREAD, "1") | {"PYTHONHASHSEED": str(hash_seed), "PYTHONUNBUFFERED": "1"}


class _Worker:
    """One worker process and the server's end of its socket."""

    def __init__(
        self, process: asyncio.subprocess.Process, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        self.process, self._reader, self._writer = process, reader, writer
        self.ended = asyncio.ensure_future(process.wait())
        self._killed = False

    @classmethod
    async def start(cls, spec: PoolSpec) -> "_Worker":
        """Start the process and wait until its plugin is ready.

        Raises:
            RewardFailure: The worker reported an error, died, or was not ready within STARTUP_S.
        """
        own_end, worker_end = socket.socketpair()
        numbers = [worker_end.fileno(), os.getpid(), spec.memory_mb, int(spec.unsafe_no_sandbox)]
        arguments = [*map(str, numbers), spec.plugin, json.dumps(spec.settings)]
        with worker_end:
            reader, writer = await asyncio.open_connection(sock=own_end, limit=_MAX_LINE)
            try:
                process = await asyncio.create_subprocess_exec(
                    *(sys.executable, "-m", "nemo_prorl.rewards.worker", *arguments),
                    stdin=asyncio.subprocess.DEVNULL,
                    stdout=2,  # keep what plugins print out of this process's standard output, which has the results
                    pass_fds=(worker_end.fileno(),),
                    env=worker_environment(spec.hash_seed),
                    start_new_session=True,
                )
            except BaseException:
                writer.close()
                raise
        worker = cls(process, reader, writer)  # no await since the start of the process: a cancellation would leave it
        try:
            async with asyncio.timeout(STARTUP_S):  # asyncio.wait_for of Python 3.11 may lose a cancellation
                first = await worker.receive()
            if not isinstance(first, dict) or "ready" not in first:
                reason = first["failed"] if isinstance(first, dict) and "failed" in first else f"it sent {first!r:.80}"
                raise RewardFailure(f"reward plugin {spec.plugin!r} cannot start: {reason}")
        except BaseException as error:
            worker.kill()
            if isinstance(error, WorkerGone):
                reason = "died during its start. Fix: the lines above, or the reward server's log, have its last output"
                raise RewardFailure(f"a worker of reward plugin {spec.plugin!r} {reason}") from error
            if isinstance(error, TimeoutError):
                late = (
                    f"a worker of reward plugin {spec.plugin!r} was not ready after {STARTUP_S:g} s. Fix: import less"
                )
                raise RewardFailure(late) from error
            raise
        return worker

    @property
    def alive(self) -> bool:
        """Return whether the process runs and was not killed."""
        return not (self._killed or self.ended.done())

    async def receive(self) -> Any:
        """Return the next message.  Raises WorkerGone if the worker is dead or sent a line that is not JSON."""
        try:
            line = await self._reader.readline()
        except OSError as error:
            raise WorkerGone(await self._death()) from error
        if not line.endswith(b"\n"):
            raise WorkerGone(await self._death())
        try:
            return json.loads(line)
        except (ValueError, RecursionError) as error:
            raise WorkerGone(f"worker sent {line[:80]!r}, which is not JSON") from error

    async def _death(self) -> str:
        """Return how the process ended, with its exit code or signal if it ends within a second."""
        await asyncio.wait({self.ended}, timeout=1.0)
        code = self.process.returncode
        how = "" if code is None else f" of signal {-code}" if code < 0 else f" with exit code {code}"
        return _DIED.format(how)

    async def judge(self, job: _Job, spec: PoolSpec) -> Verdict:
        """Send one request to the worker and return its verdict.

        The budget counts CPU time, so that a busy machine does not turn right answers into timeouts.

        Raises:
            WorkerGone: The worker died, used up its CPU time ("timeout"), gave no verdict for WALL_FACTOR times the
                budget, or sent a malformed verdict.  The caller must kill it.
        """
        self._writer.write(job.line)
        receiving = asyncio.ensure_future(self.receive())
        pid, families, budget_s = self.process.pid, not spec.sandboxed, spec.budget_s
        started, wait, wall_s = asyncio.get_running_loop().time(), min(budget_s, _FIRST_LOOK_S), WALL_FACTOR * budget_s
        before: tuple[float, float] | None = None  # CPU seconds of the worker's processes, waiting for a busy CPU
        try:
            own_before = process_times.cpu_s(pid)
            while not (await asyncio.wait({receiving}, timeout=wait))[0]:
                elapsed = asyncio.get_running_loop().time() - started
                below, queued = process_times.cpu_s_below(pid) if families else 0.0, queued_s(pid)
                before = before or (below, queued)
                used, queued = process_times.cpu_s(pid) - own_before + below - before[0], queued - before[1]
                if used >= 0.98 * budget_s:
                    fix = f"Fix, if it needs more: {spec.time_key}"
                    raise WorkerGone(f"over the time budget of {budget_s:g} s of CPU. {fix}", "timeout")
                left = wall_s + min(QUEUED_S, queued) - elapsed
                if left <= 0:
                    raise WorkerGone(_why_late(pid, elapsed, used, spec, queued))
                wait = max(0.02, min(budget_s - used, left))
            return read_verdict(receiving.result(), job.request.id)
        except ValueError as error:
            raise WorkerGone(f"the plugin returned a verdict of a wrong form: {error}") from error
        except OSError as error:
            raise WorkerGone(await self._death()) from error
        finally:
            receiving.cancel()

    def kill(self) -> None:
        """Kill the process and its process group, and close the socket."""
        if self.alive:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(self.process.pid, signal.SIGKILL)
        self._killed = True
        self._writer.close()


def _why_late(pid: int, elapsed: float, used: float, spec: PoolSpec, queued: float) -> str:
    """Return why a worker that is still within its CPU time gave no verdict: the likely cause, and what to do."""
    if process_times.is_stopped(pid):
        cause = "its process is stopped. Fix: find out what sent SIGSTOP"
    elif queued >= (elapsed - used) / 2:
        cause = "the machine is too busy. Fix: fewer rewards.workers, or fewer other processes"
    else:
        cause = (
            f"the plugin waits for something else. Fix: give its requests a time limit below {WALL_FACTOR:g} times the"
            f" budget, or raise {spec.time_key} (docs/howto/reward_server.md)"
        )
    return (
        f"no verdict after {elapsed:.1f} s, of which its worker computed for {used:.1f} s (budget: {spec.budget_s:g} s)"
        f" and waited {queued:.1f} s for a busy CPU: {cause}"
    )


class PluginPool:
    """The request queue and the workers of one plugin.  A dead worker is replaced by a new one."""

    def __init__(self, spec: PoolSpec) -> None:
        self.spec = spec
        self.stats = PoolStats()
        self.workers: set[_Worker] = set()
        self._jobs: asyncio.Queue[_Job] = asyncio.Queue(spec.max_queue)
        self._slots: list[asyncio.Task[None]] = []
        self._judged_at = 0.0  # time of the last verdict, failures of infrastructure left out, on the loop's clock

    async def start(self) -> None:
        """Start all workers and wait until they are ready.  Raises RewardFailure if a worker cannot start."""
        first = await asyncio.gather(*(self._spawn() for _ in range(self.spec.workers)), return_exceptions=True)
        if errors := [worker for worker in first if isinstance(worker, BaseException)]:
            await self.close()
            raise errors[0]
        self._slots = [asyncio.create_task(self._run_slot(worker)) for worker in tuple(self.workers)]

    async def close(self) -> None:
        """Kill the workers, and answer all open requests with "infrastructure" verdicts."""
        for slot in self._slots:
            slot.cancel()
        if self._slots:
            await asyncio.wait(self._slots, timeout=END_S)
        await self._drop(*self.workers)
        self._fail_all("the reward server stopped")

    @property
    def queued(self) -> int:
        return self._jobs.qsize()

    @property
    def room(self) -> int:
        return self.spec.max_queue - self._jobs.qsize()

    def submit(self, request: RewardRequest, timeout_s: float | None = None) -> "asyncio.Future[Verdict]":
        """Queue one request.

        Args:
            timeout_s: Seconds until an unjudged request gets an "infrastructure" verdict, counted from the pool's last
                verdict, because the request may wait in the queue; None: no limit.

        Returns:
            A future of the verdict, which never ends with an exception.

        Raises:
            asyncio.QueueFull: The queue is full; check `room` first.
            RecursionError: The request is nested too deeply for JSON.
        """
        loop = asyncio.get_running_loop()
        job = _Job(request, json.dumps(request.to_json()).encode() + b"\n", loop.create_future())
        self._jobs.put_nowait(job)
        if timeout_s is not None:
            self._end_late(job, loop.time(), timeout_s)
            job.future.add_done_callback(job.end_timer)
        return job.future

    def _end_late(self, job: _Job, began: float, timeout_s: float) -> None:
        """Give a request an "infrastructure" verdict if its deadline has passed; otherwise look again at the deadline.

        Args:
            began: Time at which the request came, on the loop's clock.
        """
        loop = asyncio.get_running_loop()
        left = max(began, self._judged_at) + timeout_s - loop.time()
        if left > 0:
            job.timer = loop.call_later(left, self._end_late, job, began, timeout_s)
            return
        stats = self.stats
        count = stats.outcomes.total() - stats.outcomes["infrastructure"]
        pace = f", {stats.seconds / count:.2g} s per verdict before" if count else ""
        failure = f"; last failure: {stats.last_failure}" if stats.last_failure else ""
        self._fail(
            job,
            f"the request's deadline of {timeout_s:g} s passed before plugin {self.spec.plugin!r} had judged it: no"
            f" verdict meanwhile (rewards.workers: {len(self.workers)}, {self.queued} requests wait for them{pace})"
            f"{failure}. Fix, if one verdict takes that long: trainer.deadlines.reward_s",
        )

    def _answer(self, job: _Job, verdict: Verdict) -> None:
        if not job.future.done():
            self.stats.outcomes[verdict["failure"] or "judged"] += 1
            if verdict["failure"] != "infrastructure":
                self._judged_at = asyncio.get_running_loop().time()
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
        """Start a new worker, and retry until it starts.

        After three failures, if the pool has no worker left, the queued requests get "infrastructure" verdicts.
        """
        failures = 0
        while True:
            try:
                return await self._spawn()
            except (RewardFailure, OSError, RuntimeError) as error:  # RuntimeError: asyncio got no thread for the child
                failures += 1
                _log.error("%s (failure %d in a row; the start will be retried)", error, failures)
                if failures >= 3 and not self.workers:
                    self._fail_all(str(error))
                await asyncio.sleep(min(10.0, 0.5 * 2**failures))

    async def _drop(self, *workers: _Worker) -> None:
        """Kill workers and wait END_S at most for their end: a process that waits for a device may outlive SIGKILL."""
        for worker in workers:
            worker.kill()
        self.workers.difference_update(workers)
        if workers:
            await asyncio.wait({worker.ended for worker in workers}, timeout=END_S)
        if left := [worker.process.pid for worker in workers if not worker.ended.done()]:
            fault = f"had not ended {END_S:g} s after SIGKILL. Fix: look for a file system or a device that hangs"
            _log.error("workers of plugin %r (processes %s) %s", self.spec.plugin, left, fault)

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
        """Return the next request for a worker; None if the worker ends first."""
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
        """Let a worker judge one request.  The request always gets a verdict, even if this task is cancelled."""
        loop = asyncio.get_running_loop()
        started, score = loop.time(), None
        try:
            verdict = await worker.judge(job, self.spec)
            self.stats.on_seconds(loop.time() - started)
            self.stats.seconds += loop.time() - started
            score = verdict["score"]
            if verdict["failure"] == "infrastructure":
                self.stats.last_failure = verdict["detail"]
            self._answer(job, verdict)
        except WorkerGone as error:
            _log.warning("plugin %r, request %r: %s; its worker is replaced", self.spec.plugin, job.request.id, error)
            detail = f"plugin {self.spec.plugin!r}: {error}"
            if error.failure == "infrastructure":
                self.stats.last_failure = detail
            self._fail(job, detail, error.failure)
            worker.kill()
        except asyncio.CancelledError:
            self._fail(job, "the reward server stopped")
            raise
        name, request = f"reward worker {self.spec.plugin}", job.request  # the loop's clock is the recorder's
        lane = (request.task, "judgements", started, loop.time(), worker.process.pid, name)
        RECORDER.add(*lane, id=request.id, score=score)
