"""When a run stops before its end: signals, and the end of its job."""

import asyncio
import inspect
import logging
import signal
import threading
import time
from types import SimpleNamespace

import pytest

from nemo_prorl.config import DeadlinesConfig
from nemo_prorl.deadlines import Deadline
from nemo_prorl.errors import RolloutAbandoned, StoppedCleanly
from nemo_prorl.lifecycle.stopping import FORWARDED_AS, JOB_START, Stopping
from nemo_prorl.rollout.background import BackgroundLoop


def test_nobody_asked() -> None:
    stopping = Stopping(DeadlinesConfig())
    assert [stopping.reason() for _ in range(3)] == [None] * 3


def test_a_signal_stops_after_the_step_and_later_gives_up_the_rollout() -> None:
    stopping, given_up = Stopping(DeadlinesConfig(finish_step_s=0.2)), threading.Event()
    stopping.set_abandon(given_up.set)
    began = time.monotonic()
    stopping.on_signal(FORWARDED_AS[signal.SIGUSR1], None)
    assert stopping.reason() == "SIGUSR1"
    assert not given_up.is_set()
    assert given_up.wait(5)
    assert time.monotonic() - began >= 0.2
    stopping.on_signal(signal.SIGTERM, None)  # the first reason counts
    assert stopping.reason() == "SIGUSR1"


def test_ctrl_c_is_named() -> None:
    stopping = Stopping(DeadlinesConfig())
    stopping.on_signal(FORWARDED_AS[signal.SIGINT], None)
    assert stopping.reason() == "SIGINT (Ctrl-C)"


def test_a_signal_is_no_message_of_the_rank_s(caplog: pytest.LogCaptureFixture) -> None:
    """The supervisor has said it already, with the name of the signal that it got: SIGINT for Ctrl-C."""
    with caplog.at_level(logging.INFO):
        Stopping(DeadlinesConfig()).on_signal(signal.SIGTERM, None)
    assert caplog.records == []


def test_a_signal_while_engines_start_is_not_forgotten() -> None:
    stopping, given_up = Stopping(DeadlinesConfig(finish_step_s=0.05)), threading.Event()
    stopping.on_signal(signal.SIGTERM, None)
    time.sleep(0.3)
    assert stopping.reason() == "SIGTERM"
    stopping.set_abandon(given_up.set)
    assert given_up.is_set()


def test_a_job_near_its_end_stops_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(JOB_START, str(time.time() - 1000))
    assert Stopping(DeadlinesConfig(job_s=2000, finish_step_s=1)).reason() is None
    near = Stopping(DeadlinesConfig(job_s=1000.5, finish_step_s=0.001))
    assert near.reason() is None  # no step was measured yet, and the time is not over
    time.sleep(0.4)  # a step
    reason = near.reason()
    assert reason is not None
    assert "trainer.deadlines.job_s=1000.5" in reason
    assert "job_s=900" in (Stopping(DeadlinesConfig(job_s=900)).reason() or "")


def test_a_step_begins_while_one_and_a_half_of_the_longest_fit(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [0.0]
    clock = SimpleNamespace(time=lambda: now[0], monotonic=lambda: 7.0 + now[0])
    monkeypatch.setattr("nemo_prorl.lifecycle.stopping.time", clock)
    monkeypatch.setenv(JOB_START, "0.0")
    stopping = Stopping(DeadlinesConfig(job_s=10_000, finish_step_s=1))
    for now[0] in (0.0, 2000.0, 4000.0, 6000.0):
        assert stopping.reason() is None
    now[0] = 8000.0
    told = "2000 s are left of the job (trainer.deadlines.job_s=10000), and a step took up to 2000 s"
    assert stopping.reason() == told
    now[0] = 9000.0
    assert stopping.reason() == told


def test_a_step_that_outlasts_its_job_is_asked_to_stop(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(JOB_START, str(time.time()))
    stopping, given_up = Stopping(DeadlinesConfig(job_s=2.4, finish_step_s=1.0)), threading.Event()
    stopping.set_abandon(given_up.set)
    assert given_up.wait(2.3)  # asked 2 s before the end, given up 1 s later


class Busy:
    """Work that changes something at each turn of the loop, and once more when it is cancelled."""

    turns = 0

    async def work(self) -> None:
        try:
            while True:
                self.turns += 1
                await asyncio.sleep(0)
        finally:
            await asyncio.sleep(0.05)
            self.turns += 1


def test_work_that_is_given_up_before_it_begins_never_does() -> None:
    loop, busy, go_on = BackgroundLoop("test"), Busy(), threading.Event()
    loop._loop.call_soon_threadsafe(go_on.wait)
    work = busy.work()
    future = loop.start(work)
    loop.abandon()
    go_on.set()
    with pytest.raises(RolloutAbandoned):
        loop.result(future)
    assert (busy.turns, inspect.getcoroutinestate(work)) == (0, inspect.CORO_CLOSED)
    loop.close(asyncio.sleep(0))


def test_the_last_work_begins_when_what_is_cancelled_has_ended() -> None:
    loop, busy, seen = BackgroundLoop("test"), Busy(), list[int]()

    async def last() -> None:
        seen.append(busy.turns)

    loop.start(busy.work())
    Deadline(10, "the work").wait_until(lambda: busy.turns > 0)
    loop.close(last())
    assert seen == [busy.turns]


@pytest.mark.parametrize("seconds", [0.0, 0.01, 0.3, 0.99, 1.0, 1.01])
@pytest.mark.starts
def test_what_is_given_up_has_ended_when_its_caller_goes_on(seconds: float) -> None:
    """The caller puts its state back: nothing may change it behind its back.  It looks once a second."""
    loop, busy = BackgroundLoop("test"), Busy()
    threading.Timer(seconds, loop.abandon).start()
    with pytest.raises(RolloutAbandoned):
        loop.run(busy.work())
    turns = busy.turns
    time.sleep(0.1)
    assert busy.turns == turns
    with pytest.raises(RolloutAbandoned):  # for good: the run is about to end
        loop.run(asyncio.sleep(0))
    loop.close(asyncio.sleep(0))


def test_work_that_comes_after_the_end_is_closed(caplog: pytest.LogCaptureFixture) -> None:
    async def lasts_longer() -> None:
        asyncio.get_running_loop().call_soon(time.sleep, 0.3)

    loop = BackgroundLoop("test")
    loop.close(lasts_longer())
    assert not loop._thread.is_alive()
    loop.abandon()  # the timer of a stop ends after the run: there is nothing to cancel and nothing to say
    assert "abandoning" not in caplog.text
    work, last = Busy().work(), asyncio.sleep(0)
    with pytest.raises(StoppedCleanly, match="the rollouts are closed"):
        loop.start(work)
    loop.close(last)
    assert [inspect.getcoroutinestate(one) for one in (work, last)] == [inspect.CORO_CLOSED] * 2


def test_what_a_signal_interrupts_is_cancelled() -> None:
    class Interrupted(Exception):
        pass

    def interrupt(*_: object) -> None:
        raise Interrupted

    loop, busy = BackgroundLoop("test"), Busy()
    assert loop._thread.daemon  # a process that is left without `close` ends all the same
    before = signal.signal(signal.SIGUSR1, interrupt)
    try:
        threading.Timer(0.1, signal.pthread_kill, (threading.get_ident(), signal.SIGUSR1)).start()
        with pytest.raises(Interrupted):
            loop.run(busy.work())
    finally:
        signal.signal(signal.SIGUSR1, before)
    assert loop._task is not None
    Deadline(10, "the work's end").wait_until(loop._task.cancelled)
    loop.close(asyncio.sleep(0))


def test_the_first_of_several_errors_is_told() -> None:
    async def fails(error: Exception) -> None:
        raise error

    async def several() -> None:
        async with asyncio.TaskGroup() as outer, asyncio.TaskGroup() as inner:
            inner.create_task(fails(OSError("first")))
            inner.create_task(fails(ValueError("second")))
            outer.create_task(asyncio.sleep(0))

    loop = BackgroundLoop("test")
    with pytest.raises(OSError, match="first") as caught:
        loop.run(several())
    assert caught.value.__suppress_context__  # the group says nothing more
    loop.close(asyncio.sleep(0))
