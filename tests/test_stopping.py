"""When a run stops before its end: signals, and the end of its job."""

import signal
import threading
import time

import pytest

from nemo_prorl.config import DeadlinesConfig
from nemo_prorl.errors import RolloutAbandoned
from nemo_prorl.rollout.background import BackgroundLoop
from nemo_prorl.run_stopping import Stopping


def test_nobody_asked() -> None:
    stopping = Stopping(DeadlinesConfig())
    assert [stopping.reason() for _ in range(3)] == [None] * 3


def test_a_signal_stops_after_the_step_and_later_gives_up_the_rollout() -> None:
    stopping, given_up = Stopping(DeadlinesConfig(finish_step_s=0.2)), threading.Event()
    stopping.abandon = given_up.set
    began = time.monotonic()
    stopping.on_signal(signal.SIGUSR1, None)
    assert stopping.reason() == "SIGUSR1"
    assert not given_up.is_set()
    assert given_up.wait(5)
    assert time.monotonic() - began >= 0.2
    stopping.on_signal(signal.SIGTERM, None)  # the first reason counts
    assert stopping.reason() == "SIGUSR1"


def test_a_job_near_its_end_stops_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PRORL_JOB_START", str(time.time() - 1000))
    assert Stopping(DeadlinesConfig(job_s=2000)).reason() is None
    near = Stopping(DeadlinesConfig(job_s=1000.5))
    assert near.reason() is None  # no step was measured yet, and the time is not over
    time.sleep(0.4)  # a step
    reason = near.reason()
    assert reason is not None
    assert "trainer.deadlines.job_s=1000.5" in reason
    assert "job_s=900" in (Stopping(DeadlinesConfig(job_s=900)).reason() or "")


def test_what_waits_for_a_rollout_is_told_that_it_was_given_up() -> None:
    import asyncio

    loop = BackgroundLoop("test")
    threading.Timer(0.2, loop.abandon).start()
    with pytest.raises(RolloutAbandoned):
        loop.run(asyncio.sleep(30))
    assert loop.run(asyncio.sleep(0, "still works")) == "still works"
    loop.abandon()  # nothing is waited for: nothing happens
    assert loop.run(asyncio.sleep(0, "and again")) == "and again"
    loop.close(asyncio.sleep(0))
