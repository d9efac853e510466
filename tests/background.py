"""Long runs that several tests look at begin when the session does, beside the tests that need one core only."""

import os
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import psutil

Work = Callable[[], Path]
_MARK = "PRORL_TEST_SESSION"  # in the environment of every process of these runs


class Background:
    """One run at a time, in the order in which they are started; what fails, fails where its result is asked for."""

    def __init__(self) -> None:
        self._pool = ThreadPoolExecutor(1)
        self._runs: dict[str, Future[Path]] = {}
        os.environ[_MARK] = str(os.getpid())

    def start(self, name: str, work: Work) -> None:
        if name not in self._runs:
            self._runs[name] = self._pool.submit(work)

    def result(self, name: str) -> Path:
        """The folder of a run that was started; raises what it raised."""
        return self._runs[name].result()

    def close(self) -> None:
        """Nothing goes on after the session, however it ended."""
        for run in self._runs.values():
            run.cancel()
        for process in psutil.Process().children(recursive=True):
            try:
                if process.environ().get(_MARK) == str(os.getpid()):
                    process.kill()
            except psutil.Error:
                continue
        self._pool.shutdown(wait=True, cancel_futures=True)
