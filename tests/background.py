"""Long runs that several tests look at begin when the session does, beside the tests that need one core only.

They are started by a process of their own, so that what a test does to its environment or folder is nothing to them.
"""

import ctypes
import os
import signal
from collections.abc import Callable
from concurrent.futures import Future, ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import psutil

_MARK = "PRORL_TEST_SESSION"  # in the environment of every process of these runs


class Background:
    """One run at a time, in the order in which they are started; what fails, fails where its result is asked for.

    Runs that mostly sleep have a lane of their own.
    """

    def __init__(self) -> None:
        os.environ[_MARK] = str(os.getpid())
        self._lanes = {name: _lane() for name in ("works", "sleeps")}
        self._runs: dict[str, Future[Path]] = {}

    def start(self, name: str, work: Callable[..., Path], *args: Any, lane: str = "works") -> None:
        """`work`: a function of a module, that gives the folder of what it ran."""
        self._runs[name] = self._lanes[lane].submit(work, *args)

    def result(self, name: str) -> Path:
        """The folder of a run that was started; raises what it raised."""
        return self._runs[name].result()

    def close(self) -> None:
        """Nothing goes on after the session, however it ended."""
        for lane in self._lanes.values():
            lane.shutdown(wait=False, cancel_futures=True)
        for process in psutil.Process().children(recursive=True):
            try:
                tracker = any("resource_tracker" in word for word in process.cmdline())  # Python's own, ends by itself
                if process.environ().get(_MARK) == str(os.getpid()) and not tracker:
                    process.kill()
            except psutil.Error:
                continue


def _lane() -> ProcessPoolExecutor:
    return ProcessPoolExecutor(1, mp_context=get_context("spawn"), initializer=_end_with_session)


def _end_with_session() -> None:
    """Else a session that is killed would leave the runs that still wait to begin."""
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG
