"""A pool and its workers end in a bounded time, whatever happens at that moment."""

import asyncio
import contextlib
import logging
import os
import signal
import sys
from pathlib import Path
from typing import Any

import pytest
from sandbox_helpers import children_of

from nemo_prorl.rewards.pool import PluginPool, PoolSpec, _Worker
from tests.rewards.conftest import wait_gone
from tests.rewards.test_pool import judged

pytestmark = pytest.mark.starts


@pytest.mark.parametrize("word", [b'"ready"', b'"failed"'])
@pytest.mark.parametrize("turns", range(4))
def test_a_pool_ends_that_is_closed_just_when_a_new_worker_reports(
    plugins: Path, monkeypatch: pytest.MonkeyPatch, turns: int, word: bytes
) -> None:
    """A turn of the event loop passes between each two of: its line comes, the line is read, the slot goes on."""
    feed = asyncio.StreamReader.feed_data

    async def main() -> None:
        pool, reported = PluginPool(PoolSpec("echo", {}, 1, 10.0)), asyncio.Event()
        await pool.start()

        def report(reader: asyncio.StreamReader, data: bytes) -> None:
            feed(reader, data.replace(b'"ready"', word))
            reported.set()

        monkeypatch.setattr(asyncio.StreamReader, "feed_data", report)
        (worker,) = pool.workers
        os.kill(worker.process.pid, signal.SIGKILL)
        async with asyncio.timeout(20):
            await reported.wait()
        for _ in range(turns):
            await asyncio.sleep(0)
        closing = asyncio.create_task(pool.close())
        assert (await asyncio.wait({closing}, timeout=5))[0], "close() waits for a slot that lost its cancellation"
        assert not pool.workers

    before = children_of(os.getpid())
    asyncio.run(main())
    wait_gone(children_of(os.getpid()) - before, "the workers")


def test_a_start_that_is_cancelled_in_any_turn_of_the_loop_leaves_no_process(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    slow = tmp_path / "python"
    slow.write_text("#!/bin/sh\nexec sleep 60\n")
    slow.chmod(0o700)
    monkeypatch.setattr(sys, "executable", str(slow))
    before = children_of(os.getpid())

    async def main(turns: int) -> None:
        starting = asyncio.create_task(_Worker.start(PoolSpec("echo", {}, 1, 10.0)))
        for _ in range(turns):
            await asyncio.sleep(0)
        starting.cancel()
        await asyncio.wait({starting}, timeout=5)
        assert starting.cancelled(), turns

    for turns in range(10):
        asyncio.run(main(turns))
        wait_gone(children_of(os.getpid()) - before, f"a worker, cancelled in turn {turns}")


def test_a_worker_that_survives_sigkill_is_replaced_and_named(
    plugins: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """As a process does that waits for a file system that hangs."""
    monkeypatch.setattr("nemo_prorl.rewards.pool.END_S", 0.2)

    async def main() -> tuple[Any, Any, int]:
        pool = PluginPool(PoolSpec("odd", {}, 1, 0.4))
        await pool.start()
        (worker,) = pool.workers
        ended, worker.ended = worker.ended, asyncio.get_running_loop().create_future()  # type: ignore[assignment]
        async with asyncio.timeout(60):
            verdicts = await judged(pool, "select"), await judged(pool, "fine")
            await ended
            await pool.close()
        return *verdicts, worker.process.pid

    with caplog.at_level(logging.ERROR):
        late, fine, pid = asyncio.run(main())
    assert (late["failure"], fine["score"]) == ("infrastructure", 1.0)
    assert f"workers of plugin 'odd' (processes [{pid}]) had not ended 0.2 s after SIGKILL. Fix: " in caplog.text


def test_a_slot_that_does_not_end_does_not_keep_a_pool_open(plugins: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("nemo_prorl.rewards.pool.END_S", 0.2)

    async def main() -> None:
        pool = PluginPool(PoolSpec("echo", {}, 1, 10.0))
        await pool.start()
        freed = asyncio.Event()

        async def deaf() -> None:
            while not freed.is_set():
                with contextlib.suppress(asyncio.CancelledError):
                    await freed.wait()

        pool._slots.append(asyncio.create_task(deaf()))
        await asyncio.sleep(0)
        try:
            async with asyncio.timeout(5):
                await pool.close()
        finally:
            freed.set()

    asyncio.run(main())


def test_a_machine_without_free_threads_costs_no_slot(plugins: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def main() -> None:
        pool = PluginPool(PoolSpec("odd", {}, 1, 10.0))
        await pool.start()
        start, calls = asyncio.create_subprocess_exec, iter([1])

        async def exhausted(*given: Any, **more: Any) -> Any:
            if next(calls, 0):
                raise RuntimeError("can't start new thread")
            return await start(*given, **more)

        monkeypatch.setattr(asyncio, "create_subprocess_exec", exhausted)
        (worker,) = pool.workers
        os.kill(worker.process.pid, signal.SIGKILL)
        async with asyncio.timeout(20):
            while pool.workers:
                await asyncio.sleep(0.01)
            assert (await judged(pool, "fine"))["score"] == 1.0
            await pool.close()

    asyncio.run(main())
