"""Worker processes: timeouts, deaths, kills; every request gets exactly one verdict."""

import asyncio
import json
import os
import random
import re
import resource
import signal
import socket
import subprocess
import sys
from collections.abc import Awaitable, Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from sandbox_helpers import children_of, is_alive, sharing_one_cpu

from nemo_prorl import stacks
from nemo_prorl.data.prepare.gold import failures
from nemo_prorl.data.records import PromptRecord
from nemo_prorl.errors import RewardFailure
from nemo_prorl.rewards import process_times
from nemo_prorl.rewards.discovery import discover
from nemo_prorl.rewards.interface import RewardRequest, Verdict
from nemo_prorl.rewards.judging import RewardService, pool_specs
from nemo_prorl.rewards.pool import PluginPool, PoolSpec, WorkerGone, _Job, _Worker
from tests.rewards.conftest import request_of as json_of

pytestmark = pytest.mark.starts


def request_of(*arguments: Any, **more: Any) -> RewardRequest:
    return RewardRequest(**json_of(*arguments, **more))


Steps = Callable[[PluginPool], Awaitable[None]]


def with_pool(
    steps: Steps,
    plugin: str = "odd",
    workers: int = 1,
    budget_s: float = 0.4,
    settings: dict[str, Any] | None = None,
    **more: Any,
) -> None:
    """Runs `steps` with a started pool; no process may be left afterwards."""

    async def main() -> None:
        pool = PluginPool(PoolSpec(plugin, settings or {}, workers, budget_s, **more))
        await pool.start()
        pids = {worker.process.pid for worker in pool.workers}
        try:
            async with asyncio.timeout(100):
                await steps(pool)
        finally:
            pids |= {worker.process.pid for worker in pool.workers}
            await pool.close()
        assert not [pid for pid in pids if is_alive(pid)]

    asyncio.run(main())


async def judged(pool: PluginPool, response: str, **more: Any) -> Verdict:
    return await pool.submit(request_of(pool.spec.plugin, response, **more))


def test_a_plugin_that_raises_is_infrastructure_and_named(plugins: Path) -> None:
    async def steps(pool: PluginPool) -> None:
        verdict = await judged(pool, "raise")
        assert (verdict["score"], verdict["failure"]) == (None, "infrastructure")
        assert re.fullmatch(r"plugin 'odd' raised RuntimeError \(.*\.py:\d+\): out of order", verdict["detail"])
        for word in ("two", "nan", "text", "true", "none", "memory"):
            verdict = await judged(pool, word)
            assert (verdict["score"], verdict["failure"]) == (None, "infrastructure"), word
            assert "'odd'" in verdict["detail"]
        assert (await judged(pool, "invalid"))["failure"] == "invalid"
        assert pool.stats.workers_lost == 0
        assert pool.stats.outcomes == {"infrastructure": 7, "invalid": 1}
        (worker,) = pool.workers
        assert resource.prlimit(worker.process.pid, resource.RLIMIT_DATA)[0] == 512 << 20
        assert resource.prlimit(worker.process.pid, resource.RLIMIT_CORE) == (0, 0)

    with_pool(steps, budget_s=20, memory_mb=512)


def test_each_pool_has_the_settings_and_limits_of_its_server() -> None:
    given: dict[str, dict[str, Any]] = {"math": {"time_budget_s": 9.5}}
    specs = pool_specs(discover(), ["code", "math"], 2, given, 7, 512, unsafe_no_sandbox=True, on_demand=True)
    code, math = sorted(specs, key=lambda spec: spec.plugin)
    limits: dict[str, Any] = {"workers": 2, "max_queue": 7, "memory_mb": 512, "unsafe_no_sandbox": True}
    assert math == PoolSpec("math", given["math"], budget_s=9.5, **limits)
    assert code == PoolSpec("code", {}, budget_s=code.budget_s, sandboxed=True, **limits)


@pytest.mark.parametrize("unsafe", [False, True])
def test_a_worker_is_told_whether_it_may_do_without_a_sandbox(plugins: Path, unsafe: bool) -> None:
    async def steps(pool: PluginPool) -> None:
        (worker,) = pool.workers
        words = Path(f"/proc/{worker.process.pid}/cmdline").read_text().split("\0")
        told = words[words.index("nemo_prorl.rewards.worker") + 3 :]
        assert told == ["4096", str(int(unsafe)), "odd", "{}", ""]
        assert "PYTHONHASHSEED=7" in Path(f"/proc/{worker.process.pid}/environ").read_text().split("\0")

    with_pool(steps, unsafe_no_sandbox=unsafe, hash_seed=7)


def test_a_worker_writes_its_stacks_when_it_is_asked(
    plugins: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(stacks.VARIABLE, str(tmp_path / "stacks"))

    async def steps(pool: PluginPool) -> None:
        (worker,) = pool.workers
        os.kill(worker.process.pid, stacks.SIGNAL)
        async with asyncio.timeout(9):
            while "rewards/worker.py" not in (tmp_path / "stacks").read_text():
                await asyncio.sleep(0.02)
        assert (await judged(pool, "fine"))["score"] == 1.0
        assert pool.stats.workers_lost == 0

    with_pool(steps, budget_s=10)


def test_a_worker_has_the_settings_of_its_pool(plugins: Path) -> None:
    async def steps(pool: PluginPool) -> None:
        raise AssertionError("it started")

    with pytest.raises(RewardFailure, match=r"rewards\.plugins\.odd\.speed=1: unknown setting"):
        with_pool(steps, settings={"speed": 1})


@pytest.mark.parametrize("how", ["spin", "child spins"])
def test_a_plugin_that_uses_up_its_cpu_time_is_a_timeout_and_the_worker_is_replaced(
    plugins: Path, how: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("nemo_prorl.rewards.pool.WALL_FACTOR", 100.0)  # for busy machines

    async def steps(pool: PluginPool) -> None:
        (before,) = (worker.process.pid for worker in pool.workers)
        verdict = await judged(pool, how)
        assert (verdict["score"], verdict["correct"], verdict["failure"]) == (0.0, False, "timeout")
        fix = "Fix, if it needs more: rewards.plugins.odd.time_budget_s"
        assert verdict["detail"] == f"plugin 'odd': over the time budget of 0.4 s of CPU. {fix}"
        assert (await judged(pool, "fine"))["score"] == 1.0
        (after,) = (worker.process.pid for worker in pool.workers)
        assert after != before
        assert not is_alive(before)
        assert pool.stats.workers_lost == 1

    with_pool(steps)


def test_programs_in_the_sandbox_have_no_part_in_the_plugin_s_time(plugins: Path) -> None:
    """They have a limit of their own, which may be longer."""

    async def steps(pool: PluginPool) -> None:
        assert (await judged(pool, "child spins"))["failure"] == "infrastructure"
        assert (await judged(pool, "spin"))["failure"] == "timeout"

    with_pool(steps, sandboxed=True)
    specs = pool_specs(discover(), ["code", "math"], 2, on_demand=True)
    assert {spec.plugin: spec.sandboxed for spec in specs} == {"code": True, "math": False}


@pytest.mark.parametrize(
    ("used", "queued_s", "stopped", "failure", "says"),
    [
        (0.985, 0.0, False, "timeout", "over the time budget of 0.05 s of CPU. Fix"),
        (0.975, 0.0, False, "infrastructure", "for a busy CPU: the plugin waits for something else. Fix"),
        (0.0, 0.09, False, "infrastructure", "waited 0.1 s for a busy CPU: the plugin waits for something else. Fix"),
        (
            0.0,
            9.0,
            False,
            "infrastructure",
            "waited 9.0 s for a busy CPU: the machine is too busy. Fix: fewer rewards.workers",
        ),
        (0.0, 9.0, True, "infrastructure", ": its process is stopped. Fix"),
    ],
)
def test_a_late_worker_is_told_by_how_it_spent_its_time(
    used: float, queued_s: float, stopped: bool, failure: str, says: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A worker that never answers; what it used is counted from the begin of its request."""
    cpu, queued = iter([7.0]), iter([3.0])
    monkeypatch.setattr("nemo_prorl.rewards.pool.QUEUED_S", 0.1)
    monkeypatch.setattr(process_times, "cpu_s", lambda _: next(cpu, 7.0 + 0.05 * used))
    monkeypatch.setattr(process_times, "cpu_s_below", lambda _: 0.0)
    monkeypatch.setattr("nemo_prorl.rewards.pool.queued_s", lambda _: next(queued, 3.0 + queued_s))
    monkeypatch.setattr(process_times, "is_stopped", lambda _: stopped)

    async def main() -> WorkerGone:
        ours, theirs = socket.socketpair()
        process: Any = SimpleNamespace(pid=1, wait=asyncio.Event().wait)
        with theirs:
            worker = _Worker(process, *await asyncio.open_connection(sock=ours))
            job = _Job(request_of("odd", "fine"), b"one request\n", asyncio.get_running_loop().create_future())
            with pytest.raises(WorkerGone) as found:
                await asyncio.wait_for(worker.judge(job, PoolSpec("odd", {}, 1, 0.05)), 20)
            assert theirs.recv(100) == b"one request\n"
            worker.ended.cancel()
            worker._writer.close()
        return found.value

    gone = asyncio.run(main())
    assert gone.failure == failure
    assert says in str(gone)


TIMES = """
import os, subprocess, sys, time
from nemo_prorl.rewards import process_times

spin = [sys.executable, "-S", "-c", "import time\\nwhile time.process_time() < 0.5: pass\\ninput()"]
subprocess.run(spin, input=b"\\n", check=True)
own, ended, times = process_times.cpu_s(os.getpid()), process_times.cpu_s_below(os.getpid()), os.times()
assert abs(own - (times.user + times.system)) < 0.2
assert abs(ended - (times.children_user + times.children_system)) < 0.2
assert ended > 0.4
with subprocess.Popen(spin, stdin=subprocess.PIPE) as child:
    while process_times.cpu_s(child.pid) < 0.5:
        time.sleep(0.05)
    assert process_times.cpu_s_below(os.getpid()) > ended + 0.4
    child.kill()
try:
    process_times.cpu_s(child.pid)
except OSError:
    print("told apart")
"""


def test_the_time_of_a_process_is_what_it_computed_and_that_of_its_children_is_told_apart() -> None:
    """In a process of its own: this one may have children of other tests, whose times count, too."""
    done = subprocess.run([sys.executable, "-c", TIMES], capture_output=True, text=True, timeout=60, check=False)
    assert done.stdout == "told apart\n", done.stderr


@pytest.mark.parametrize("how", ["sleep", "select"])
def test_a_plugin_that_hangs_is_infrastructure_and_the_worker_is_replaced(
    plugins: Path, how: str, caplog: pytest.LogCaptureFixture
) -> None:
    async def steps(pool: PluginPool) -> None:
        (before,) = (worker.process.pid for worker in pool.workers)
        verdict = await judged(pool, how)
        assert (verdict["score"], verdict["correct"], verdict["failure"]) == (None, None, "infrastructure")
        assert verdict["detail"].startswith("plugin 'odd': no verdict after ")
        assert "for a busy CPU: the plugin waits for something else. Fix: give its requests a time" in verdict["detail"]
        assert verdict["detail"].endswith("raise rewards.plugins.odd.time_budget_s (docs/howto/reward_server.md)")
        assert verdict["detail"].removeprefix("plugin 'odd': ") in caplog.text
        assert (await judged(pool, "fine"))["score"] == 1.0
        assert not is_alive(before)
        assert (pool.stats.workers_lost, pool.stats.outcomes["infrastructure"]) == (1, 1)

    with_pool(steps)


def test_a_worker_that_is_stopped_gives_no_score(plugins: Path) -> None:
    async def steps(pool: PluginPool) -> None:
        (worker,) = pool.workers
        os.kill(worker.process.pid, signal.SIGSTOP)
        verdict = await judged(pool, "fine")
        assert (verdict["score"], verdict["failure"]) == (None, "infrastructure")
        assert ": its process is stopped. Fix" in verdict["detail"]
        assert (await judged(pool, "fine"))["score"] == 1.0

    with_pool(steps)


def test_a_worker_without_a_cpu_gives_no_score(plugins: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It gets a sixteenth of a CPU, so it cannot use up its second of CPU time in the 4.5 that it has."""
    monkeypatch.setattr("nemo_prorl.rewards.pool.QUEUED_S", 0.5)

    async def steps(pool: PluginPool) -> None:
        (worker,) = pool.workers
        with sharing_one_cpu([worker.process.pid], others=15):
            verdict = await judged(pool, "spin")
        assert (verdict["score"], verdict["failure"]) == (None, "infrastructure")
        assert ": the machine is too busy. Fix" in verdict["detail"]

    with_pool(steps, budget_s=1.0)


def test_waiting_for_a_busy_cpu_is_not_the_plugin_s_time(plugins: Path) -> None:
    """The verdict takes longer than four times its budget, and comes."""

    async def steps(pool: PluginPool) -> None:
        (worker,) = pool.workers
        with sharing_one_cpu([worker.process.pid]):
            verdict = await judged(pool, "0.25 s")
        assert verdict["score"] == 1.0
        assert pool.stats.workers_lost == 0

    with_pool(steps, budget_s=0.3)


def test_requests_sent_along_with_a_hanging_one_are_judged(plugins: Path) -> None:
    async def steps(pool: PluginPool) -> None:
        words = ["fine"] * 6 + ["spin"] + ["fine"] * 30
        verdicts = await asyncio.gather(*(judged(pool, word, name=str(at)) for at, word in enumerate(words)))
        assert [verdict["id"] for verdict in verdicts] == [str(at) for at in range(len(words))]
        assert [verdict["failure"] for verdict in verdicts] == [None] * 6 + ["timeout"] + [None] * 30

    with_pool(steps)


def test_a_request_whose_worker_dies_is_infrastructure(plugins: Path) -> None:
    async def steps(pool: PluginPool) -> None:
        verdict = await judged(pool, "die")
        assert (verdict["score"], verdict["failure"]) == (None, "infrastructure")
        assert verdict["detail"].startswith("plugin 'odd': worker died of signal 9 (out of memory")
        assert (await judged(pool, "fine"))["score"] == 1.0
        assert pool.stats.workers_lost == 1

    with_pool(steps)


_VERDICT = {"id": "another", "score": 1.0, "correct": None, "parts": {}, "detail": "", "failure": None}


@pytest.mark.parametrize(
    ("line", "says"),
    [
        ("not JSON", "which is not JSON"),
        ("7", "it must be an object"),
        ("{}", "field 'verdict.id' is missing"),
        (json.dumps(_VERDICT), "the request's id is 'r'"),
        (json.dumps({**_VERDICT, "id": "r", "score": "1"}), "field 'verdict.score' is '1'"),
    ],
)
def test_a_worker_that_answers_nonsense_is_replaced(plugins: Path, line: str, says: str) -> None:
    async def steps(pool: PluginPool) -> None:
        async with asyncio.timeout(20):
            verdict = await judged(pool, "line", meta={"line": line})
            assert (verdict["id"], verdict["score"], verdict["failure"]) == ("r", None, "infrastructure")
            assert says in verdict["detail"]
            assert (await judged(pool, "fine"))["score"] == 1.0
        assert pool.stats.workers_lost == 1

    with_pool(steps, budget_s=30)


@pytest.mark.parametrize("how", ["die_once", "hang_once"])
def test_who_has_workers_of_their_own_judges_again_when_one_fails(plugins: Path, tmp_path: Path, how: str) -> None:
    """`prorl data prepare` by `failures`; `prorl rewards score` and `prorl reverify` by `in_order`."""
    record: PromptRecord = {"id": "a", "task": "odd", "prompt": "?", "truth": {}, "meta": {"flag": str(tmp_path / "1")}}
    assert failures([record], [how], 1, True) == {}
    registry = discover()
    one = request_of("odd", how, meta={"flag": str(tmp_path / "2")})

    async def main() -> list[Verdict]:
        service = RewardService(pool_specs(registry, ["odd"], 1, on_demand=True), registry)  # started by its request
        try:
            return [verdict async for _, verdict in service.in_order(iter([one]), lambda request: request, 1)]
        finally:
            await service.close()

    assert [verdict["score"] for verdict in asyncio.run(main())] == [1.0]


def test_every_request_is_answered_once_while_workers_are_killed(plugins: Path) -> None:
    async def steps(pool: PluginPool) -> None:
        chance = random.Random(1)
        count, killed = 120, set()
        futures = [
            pool.submit(request_of("echo", str(at / count), name=str(at), meta={"sleep_s": 0.01}))
            for at in range(count)
        ]
        for done in (20, 50, 80):
            while sum(future.done() for future in futures) < done or len(pool.workers) < 2:
                await asyncio.sleep(0.005)
            worker = chance.choice(sorted(pool.workers, key=lambda worker: worker.process.pid))
            killed.add(worker.process.pid)
            os.kill(worker.process.pid, signal.SIGKILL)
            while worker in pool.workers:
                await asyncio.sleep(0.005)
        verdicts = await asyncio.gather(*futures)
        assert [verdict["id"] for verdict in verdicts] == [str(at) for at in range(count)]
        lost = [verdict for verdict in verdicts if verdict["failure"] == "infrastructure"]
        assert len(lost) <= len(killed) == 3  # what a killed worker held, if anything, and nothing else
        assert all(v["score"] == at / count for at, v in enumerate(verdicts) if v not in lost)
        assert sum(pool.stats.outcomes.values()) == count

    with_pool(steps, "echo", workers=2, budget_s=10)


@pytest.mark.parametrize("others", [False, True])
def test_a_worker_is_started_until_it_starts_and_after_three_failures_of_all_no_request_waits(
    others: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    pauses: list[tuple[float, bool]] = []

    async def main() -> Verdict | None:
        pool = PluginPool(PoolSpec("odd", {}, 2, 1.0))
        future, worker = pool.submit(request_of("odd", "fine")), object()

        async def spawn() -> object:
            if len(pauses) < 6:
                raise RewardFailure("out of order")
            return worker

        async def sleep(seconds: float) -> None:
            pauses.append((seconds, future.done()))

        monkeypatch.setattr(pool, "_spawn", spawn)
        monkeypatch.setattr(pool, "workers", {worker} if others else set())
        monkeypatch.setattr(asyncio, "sleep", sleep)
        assert await pool._respawn() is worker
        return future.result() if future.done() else None

    verdict = asyncio.run(main())
    assert [seconds for seconds, _ in pauses] == [1.0, 2.0, 4.0, 8.0, 10.0, 10.0]
    assert [answered for _, answered in pauses] == ([False] * 6 if others else [False] * 2 + [True] * 4)
    assert (verdict is None) == others
    assert verdict is None or (verdict["failure"], verdict["detail"]) == ("infrastructure", "out of order")


def test_an_idle_worker_that_is_killed_is_replaced(plugins: Path) -> None:
    async def steps(pool: PluginPool) -> None:
        for _ in range(2):
            (worker,) = pool.workers
            os.kill(worker.process.pid, signal.SIGKILL)
            while pool.workers == {worker} or not pool.workers:
                await asyncio.sleep(0.02)
        assert (await judged(pool, "0.25"))["score"] == 0.25

    with_pool(steps, "echo", budget_s=10)


def test_a_deadline_that_passes_is_infrastructure_not_zero(plugins: Path) -> None:
    async def steps(pool: PluginPool) -> None:
        slow = pool.submit(request_of("odd", "0.25 s"))
        late = await pool.submit(request_of("odd", "die", name="late"), timeout_s=0.1)
        assert (late["id"], late["score"], late["failure"]) == ("late", None, "infrastructure")
        assert "deadline of 0.1 s" in late["detail"]
        assert (await slow)["score"] == (await judged(pool, "fine"))["score"] == 1.0
        assert pool.stats.workers_lost == 0  # no worker judges it any more

    with_pool(steps, budget_s=10)


def test_a_deadline_counts_from_the_pool_s_last_verdict(plugins: Path) -> None:
    async def steps(pool: PluginPool) -> None:
        requests = [request_of("echo", "1", meta={"sleep_s": 0.5}) for _ in range(6)]
        verdicts = await asyncio.gather(*(pool.submit(request, timeout_s=2.0) for request in requests))
        assert [verdict["score"] for verdict in verdicts] == [1.0] * 6  # the last one after 3 s
        slow = pool.submit(request_of("echo", "1", meta={"sleep_s": 8}))
        late = await pool.submit(request_of("echo", "1"), timeout_s=1.0)
        assert re.search(
            r"\(rewards.workers: 1, 1 requests wait for them, 0\.\d+ s per verdict before\)\. Fix, .*reward_s",
            late["detail"],
        )
        slow.cancel()

    with_pool(steps, "echo", budget_s=10)


def test_a_missed_deadline_quotes_the_last_failure_of_a_worker(plugins: Path) -> None:
    async def steps(pool: PluginPool) -> None:
        hanging = [pool.submit(request_of("odd", "select")) for _ in range(2)]
        await hanging[0]
        late = await pool.submit(request_of("odd", "fine"), timeout_s=0.3)
        assert re.search(r"; last failure: plugin 'odd': no verdict after [\d.]+ s, of which", late["detail"])

    with_pool(steps)


def test_a_service_hands_the_deadline_on_to_its_pool() -> None:
    async def main() -> Verdict:
        registry = discover()
        service = RewardService(pool_specs(registry, ["math"], 1, on_demand=True), registry)  # which is not started
        return await asyncio.wait_for(service.submit(request_of("math", "1"), 0.01), 10)

    assert "deadline of 0.01 s" in asyncio.run(main())["detail"]


def test_the_queue_is_bounded(plugins: Path) -> None:
    async def steps(pool: PluginPool) -> None:
        futures = [pool.submit(request_of("echo", "1", meta={"sleep_s": 0.05})) for _ in range(3)]
        with pytest.raises(asyncio.QueueFull):
            pool.submit(request_of("echo", "1"))
        assert [verdict["score"] for verdict in await asyncio.gather(*futures)] == [1.0] * 3
        assert pool.room == 3

    with_pool(steps, "echo", budget_s=10, max_queue=3)


def test_what_waits_when_the_pool_closes_gets_a_verdict(plugins: Path) -> None:
    async def main() -> None:
        pool = PluginPool(PoolSpec("echo", {}, 1, 10.0))
        await pool.start()
        futures = [pool.submit(request_of("echo", "1", meta={"sleep_s": 30})) for _ in range(3)]
        await asyncio.sleep(0.1)
        await pool.close()
        for verdict in await asyncio.gather(*futures):
            assert (verdict["score"], verdict["failure"]) == (None, "infrastructure")

    asyncio.run(main())


def test_what_a_slot_has_just_taken_when_the_pool_closes_gets_a_verdict(plugins: Path) -> None:
    async def main(turns: int) -> Verdict:
        pool = PluginPool(PoolSpec("echo", {}, 1, 10.0))
        await pool.start()
        await asyncio.sleep(0.1)  # its slot waits for work
        future = pool.submit(request_of("echo", "1", meta={"sleep_s": 30}))
        for _ in range(turns):  # of the loop: the request leaves the queue before its slot goes on
            await asyncio.sleep(0)
        await pool.close()
        return await asyncio.wait_for(future, 5)

    for turns in range(4):
        verdict = asyncio.run(main(turns))
        assert (verdict["failure"], verdict["detail"]) == ("infrastructure", "the reward server stopped"), turns


def test_a_worker_that_takes_too_long_to_start_is_killed(plugins: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("nemo_prorl.rewards.pool.STARTUP_S", 0.01)
    before = children_of(os.getpid())

    async def main() -> None:
        with pytest.raises(RewardFailure, match=r"'odd' was not ready after 0\.01 s"):
            await PluginPool(PoolSpec("odd", {}, 1, 1.0)).start()
        async with asyncio.timeout(9):  # while the loop runs, which would end its processes itself
            while any(map(is_alive, children_of(os.getpid()) - before)):
                await asyncio.sleep(0.02)

    asyncio.run(main())


def test_a_plugin_that_cannot_start_is_an_error_that_names_it(
    broken_plugins: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    async def main() -> None:
        with pytest.raises(RewardFailure, match=r"'broken' cannot start: .*misbehaving_missing_module"):
            await PluginPool(PoolSpec("broken", {}, 1, 1.0)).start()

    asyncio.run(main())
    assert "Traceback (most recent call last)" in capfd.readouterr().err  # the whole cause is in the log
