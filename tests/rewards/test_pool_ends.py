"""A pool and its workers end in a bounded time, whatever happens at that moment."""

import asyncio
import os
import signal
from pathlib import Path

import pytest
from sandbox_helpers import children_of

from nemo_prorl.rewards.pool import PluginPool, PoolSpec
from tests.rewards.conftest import wait_gone

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
